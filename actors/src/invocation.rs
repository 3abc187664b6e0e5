//! One call of an agent: from a slot to an answer or a stream.
//!
//! Dropping the future or the stream closes the connection to the agent, which is how a client that
//! went away cancels its call.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use bytes::Bytes;
use domain::{AgentId, InstanceId, JobId, RequestId, agent::Agent, job::Usage};
use futures::StreamExt as _;
use http::{Method, Request, Response, header};
use http_body_util::{BodyExt as _, BodyStream, Full, LengthLimitError, Limited};
use hyper::body::Incoming;
use serde_json::{Value, value::RawValue};
use tokio::{sync::mpsc, time::Instant};

use crate::{
    flight::Flight,
    instance::InstanceMessage,
    meter::Sample,
    ports::{PeerError, PeerResponse},
    route::{Endpoint, NoSlot, Patience, Place, Slot},
    settings::Settings,
    wire::{self, Answer, Context, EventReader, StreamEvent},
    world::World,
};

/// Largest output of a synchronous call (`decisions` §6).
pub const OUTPUT_BYTES_MAX: usize = 6 * 1024 * 1024;
/// Largest output of a job.
pub const JOB_OUTPUT_BYTES_MAX: usize = 64 * 1024 * 1024;
/// How much of an agent's error body is shown.
pub const ERROR_BODY_BYTES_MAX: usize = 4 * 1024;
/// Events that wait for a slow reader before the agent is held back.
const STREAM_EVENTS_WAITING: usize = 64;

/// What is to be called.
#[derive(Clone, Debug)]
pub struct Invocation {
    /// The agent.
    pub agent_id: AgentId,
    /// Live or test.
    pub livemode: bool,
    /// JSON.
    pub input: Box<RawValue>,
    /// Headers for the agent.
    pub headers: BTreeMap<String, String>,
    /// The client's own notes.
    pub metadata: BTreeMap<String, String>,
    /// How long it may take.
    pub timeout: Duration,
    /// The request it is part of.
    pub request_id: RequestId,
    /// The job it is an attempt of.
    pub job_id: Option<JobId>,
    /// 1, 2, …
    pub attempt: u32,
    /// Fences late results.
    pub epoch: u64,
    /// Most bytes of output.
    pub output_max: usize,
}

/// Why a call has no output.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CallError {
    /// There was no instance for it.
    #[error(transparent)]
    NoSlot(#[from] NoSlot),
    /// It took too long.
    #[error("the agent did not answer within {} s; raise options.timeout or make the call async", .0.as_secs_f64())]
    Timeout(Duration),
    /// The agent answered with an error status.
    #[error("the agent answered with status {status}")]
    Agent {
        /// Its status.
        status: u16,
        /// The beginning of its body.
        body: String,
    },
    /// The agent's own stream reported an error.
    #[error("{message}")]
    Reported {
        /// Its code.
        code: String,
        /// Its words.
        message: String,
    },
    /// Nobody listens where the instance was; the agent saw nothing of the call.
    #[error("the instance is gone; retry in a moment")]
    Unreached,
    /// The instance is on another node and has no free slot; the agent saw nothing of the call.
    #[error("the instance has no free slot; retry in a moment")]
    Busy,
    /// The connection ended before the answer did.
    #[error("the connection to the agent ended before its answer was complete")]
    Broken(String),
    /// The answer can't be read.
    #[error("the agent's answer is neither JSON nor an event stream")]
    BadResponse(String),
    /// The answer is too long.
    #[error("the agent's answer is longer than {0} bytes; return a reference instead")]
    TooLarge(usize),
}

/// The end of a call.
#[derive(Clone, Debug, PartialEq)]
pub struct Output {
    /// The result.
    pub output: Value,
    /// What it used.
    pub usage: Usage,
    /// The instance that answered.
    pub instance_id: InstanceId,
    /// Its version.
    pub version: u64,
}

/// Where a node's instances are on its peer port: agent, instance and the agent's own path follow.
pub const INSTANCES_PATH: &str = "/instances/";
/// Says why a node did not pass a call on: `busy`, `gone` or `broken`.
pub const REFUSED_HEADER: &str = "x-roost-refused";

pub(crate) fn uri(text: String) -> http::Uri {
    text.parse().expect("paths were checked when they came in")
}

fn refused(response: PeerResponse) -> Result<PeerResponse, CallError> {
    match response.headers().get(REFUSED_HEADER).map(|why| why.as_bytes()) {
        None => Ok(response),
        Some(b"busy") => Err(CallError::Busy),
        Some(b"broken") => Err(CallError::Broken("the instance let go of the call".to_owned())),
        Some(_) => Err(CallError::Unreached),
    }
}

impl From<PeerError> for CallError {
    fn from(error: PeerError) -> Self {
        match error {
            PeerError::Unreached(_) | PeerError::Refused(_) => Self::Unreached,
            PeerError::Broken(cause) => Self::Broken(cause),
        }
    }
}

impl World {
    /// A slot for a call that may last until `deadline`.
    pub async fn slot(&self, agent: AgentId, deadline: Instant) -> Result<Slot, NoSlot> {
        let serves = self.serves(agent);
        let at_once = self.routes.take_at_once(agent, serves, self.settings.in_flight);
        if let Ok(Some(slot)) = at_once {
            return Ok(slot);
        }
        if self.routes.is_cold(agent) {
            self.meter.cold_start(agent, self.now());
        }
        at_once?;
        let Settings { ready_wait, queue, .. } = self.settings;
        let patience = Patience { serves, deadline, ready_wait, queue };
        self.routes.wait_for(agent, patience).await
    }

    /// Calls the agent and waits for its whole answer.
    pub async fn invoke(&self, call: &Invocation) -> Result<Output, CallError> {
        let deadline = Instant::now() + call.timeout;
        let began = Instant::now();
        loop {
            let slot = match self.slot(call.agent_id, deadline).await {
                Ok(slot) => slot,
                Err(reason) => {
                    self.meter.record(call.agent_id, Sample::refused(began.elapsed()), self.now());
                    return Err(reason.into());
                }
            };
            match self.invoke_in(&slot, call, deadline).await {
                Err(CallError::Unreached) => self.give_up(&slot),
                Err(CallError::Busy) => slot.endpoint.mark_busy(),
                ended => return ended,
            }
        }
    }

    /// Nobody listens where this instance was: it takes no more calls and is replaced.
    pub fn give_up(&self, slot: &Slot) {
        self.routes.remove(slot.endpoint.agent_id, slot.endpoint.id);
        slot.endpoint.tell(InstanceMessage::Unreachable);
    }

    /// Sends a request to an instance, wherever it is; the address is a path.
    pub async fn send_to(
        &self,
        endpoint: &Endpoint,
        request: Request<Bytes>,
    ) -> Result<Response<Incoming>, CallError> {
        match &endpoint.place {
            Place::Here { address, .. } => {
                let is_alone = endpoint.concurrency == 1;
                let sent = self.client.send(*address, is_alone, request.map(Full::new)).await;
                if let Err(CallError::Broken(_)) = sent {
                    endpoint.doubt();
                }
                sent
            }
            Place::There(node) => {
                let Endpoint { agent_id, id, .. } = endpoint;
                let (mut parts, body) = request.into_parts();
                let path = parts.uri.path_and_query().map_or("/", |path| path.as_str());
                parts.uri = uri(format!("https://peer{INSTANCES_PATH}{agent_id}/{id}{path}"));
                let body = Full::new(body).map_err(|never| match never {}).boxed();
                let request = Request::from_parts(parts, body);
                refused(self.ports.peers.pass(*node, request).await?)
            }
        }
    }

    /// Calls one instance and waits for its whole answer.
    pub async fn invoke_in(
        &self,
        slot: &Slot,
        call: &Invocation,
        deadline: Instant,
    ) -> Result<Output, CallError> {
        let began = Instant::now();
        let answer = tokio::time::timeout_at(deadline, self.exchange(slot, call)).await;
        let answer = answer.unwrap_or(Err(CallError::Timeout(call.timeout)));
        if let Err(unseen @ (CallError::Unreached | CallError::Busy)) = answer {
            return Err(unseen);
        }
        if let Err(CallError::Broken(_)) = answer {
            slot.endpoint.doubt();
        }
        let elapsed = began.elapsed();
        let tokens = answer.as_ref().map_or(0, |answer| answer.tokens);
        let sample = Sample::ended(elapsed, answer.is_ok(), tokens);
        self.meter.record(call.agent_id, sample, self.now());
        Ok(Output {
            output: answer?.output,
            usage: wire::usage(tokens, elapsed),
            instance_id: slot.endpoint.id,
            version: slot.endpoint.version,
        })
    }

    async fn exchange(&self, slot: &Slot, call: &Invocation) -> Result<Answer, CallError> {
        let request = self.request(slot, call, "application/json");
        let response = self.send_to(&slot.endpoint, request).await?;
        let response = checked(response).await?;
        if is_event_stream(&response) {
            return join(response.into_body(), call.output_max).await;
        }
        let is_text = content_type(&response).starts_with("text/plain");
        let bytes = collect(response.into_body(), call.output_max).await?;
        match wire::read_json(&bytes) {
            Ok(answer) => Ok(answer),
            Err(_) if is_text => Ok(Answer {
                output: Value::String(String::from_utf8_lossy(&bytes).into_owned()),
                tokens: 0,
            }),
            Err(error) => Err(CallError::BadResponse(error.to_string())),
        }
    }

    fn request(&self, slot: &Slot, call: &Invocation, accept: &str) -> Request<Bytes> {
        let context = Context {
            request_id: call.request_id,
            job_id: call.job_id,
            attempt: call.attempt,
            epoch: call.epoch,
            deadline: wire::deadline(self.now(), call.timeout),
            agent_id: call.agent_id,
            version: slot.endpoint.version,
            livemode: call.livemode,
            metadata: call.metadata.clone(),
        };
        let body = Bytes::from(wire::request_body(&call.input, &context));
        let mut request = Request::builder()
            .method(Method::POST)
            .uri(slot.endpoint.invoke_path.as_str())
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::ACCEPT, accept)
            .header("x-request-id", call.request_id.to_string());
        for (name, value) in &call.headers {
            request = request.header(name, value);
        }
        request.body(body).expect("paths and headers were checked when they came in")
    }

    /// Calls the agent and hands its events on as they come; the call is in flight until the last.
    pub async fn stream(
        self: &Arc<Self>,
        call: Invocation,
        flight: Flight,
    ) -> Result<mpsc::Receiver<Result<StreamEvent, CallError>>, CallError> {
        let deadline = Instant::now() + call.timeout;
        let mut slot = self.slot(call.agent_id, deadline).await?;
        let (sender, receiver) = mpsc::channel(STREAM_EVENTS_WAITING);
        let world = Arc::clone(self);
        crate::root::detach(async move {
            let _flight = flight;
            let began = Instant::now();
            let pump = tokio::time::timeout_at(deadline, async {
                loop {
                    match world.pump(&slot, &call, &sender).await {
                        Err(CallError::Unreached) => world.give_up(&slot),
                        Err(CallError::Busy) => slot.endpoint.mark_busy(),
                        ended => return ended,
                    }
                    slot = world.slot(call.agent_id, deadline).await?;
                }
            });
            // A reader that went away ends the call: the agent's connection closes with this task.
            let ended = tokio::select! {
                ended = pump => ended.unwrap_or(Err(CallError::Timeout(call.timeout))),
                () = sender.closed() => Ok(0),
            };
            let tokens = *ended.as_ref().unwrap_or(&0);
            let sample = Sample::ended(began.elapsed(), ended.is_ok(), tokens);
            world.meter.record(call.agent_id, sample, world.now());
            if let Err(error) = ended {
                let _ = sender.send(Err(error)).await;
            }
        });
        Ok(receiver)
    }

    async fn pump(
        &self,
        slot: &Slot,
        call: &Invocation,
        out: &mpsc::Sender<Result<StreamEvent, CallError>>,
    ) -> Result<u64, CallError> {
        let request = self.request(slot, call, "text/event-stream");
        let response = self.send_to(&slot.endpoint, request).await?;
        let response = checked(response).await?;
        let send = async |event| {
            // A reader that went away is noticed by `closed`.
            let _ = out.send(Ok(event)).await;
        };
        let mut tokens = 0;
        if is_event_stream(&response) {
            let mut events = Events::of(response.into_body());
            while let Some(event) = events.next().await? {
                match event {
                    StreamEvent::Done(used) => {
                        tokens = used;
                        break;
                    }
                    StreamEvent::Failed { code, message } => {
                        return Err(CallError::Reported { code, message });
                    }
                    StreamEvent::Chunk(text) if text.is_empty() => {}
                    event @ (StreamEvent::Chunk(_) | StreamEvent::Custom { .. }) => {
                        send(event).await;
                    }
                }
            }
        } else if content_type(&response).starts_with("text/") {
            let mut body = BodyStream::new(response.into_body());
            while let Some(frame) = body.next().await {
                let frame = frame.map_err(|error| CallError::Broken(error.to_string()))?;
                if let Ok(bytes) = frame.into_data() {
                    send(StreamEvent::Chunk(String::from_utf8_lossy(&bytes).into_owned())).await;
                }
            }
        } else {
            let bytes = collect(response.into_body(), OUTPUT_BYTES_MAX).await?;
            let answer = wire::read_json(&bytes)
                .map_err(|error| CallError::BadResponse(error.to_string()))?;
            tokens = answer.tokens;
            send(StreamEvent::Chunk(wire::as_text(&answer.output))).await;
        }
        send(StreamEvent::Done(tokens)).await;
        Ok(tokens)
    }
}

fn content_type<B>(response: &Response<B>) -> &str {
    let value = response.headers().get(header::CONTENT_TYPE);
    value.and_then(|value| value.to_str().ok()).unwrap_or_default()
}

fn is_event_stream<B>(response: &Response<B>) -> bool {
    content_type(response).starts_with("text/event-stream")
}

async fn checked(response: Response<Incoming>) -> Result<Response<Incoming>, CallError> {
    if response.status().is_success() {
        return Ok(response);
    }
    let status = response.status().as_u16();
    let bytes = collect(response.into_body(), OUTPUT_BYTES_MAX).await.unwrap_or_default();
    let shown = &bytes[..bytes.len().min(ERROR_BODY_BYTES_MAX)];
    Err(CallError::Agent { status, body: String::from_utf8_lossy(shown).into_owned() })
}

async fn collect(body: Incoming, most: usize) -> Result<Bytes, CallError> {
    match Limited::new(body, most).collect().await {
        Ok(whole) => Ok(whole.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(CallError::TooLarge(most)),
        Err(error) => Err(CallError::Broken(error.to_string())),
    }
}

/// A streaming agent's answer to a synchronous call: its chunks, joined.
async fn join(body: Incoming, most: usize) -> Result<Answer, CallError> {
    let mut events = Events::of(body);
    let (mut text, mut tokens) = (String::new(), 0);
    while let Some(event) = events.next().await? {
        match event {
            StreamEvent::Chunk(more) => text.push_str(&more),
            StreamEvent::Custom { .. } => {}
            StreamEvent::Done(used) => {
                tokens = used;
                break;
            }
            StreamEvent::Failed { code, message } => {
                return Err(CallError::Reported { code, message });
            }
        }
        if text.len() > most {
            return Err(CallError::TooLarge(most));
        }
    }
    Ok(Answer { output: Value::String(text), tokens })
}

/// The events of an agent's stream.
struct Events {
    body: BodyStream<Incoming>,
    reader: EventReader,
    ready: std::collections::VecDeque<String>,
}

impl Events {
    fn of(body: Incoming) -> Self {
        Self {
            body: BodyStream::new(body),
            reader: EventReader::default(),
            ready: std::collections::VecDeque::new(),
        }
    }

    async fn next(&mut self) -> Result<Option<StreamEvent>, CallError> {
        loop {
            if let Some(data) = self.ready.pop_front() {
                return Ok(Some(wire::read_event(&data)));
            }
            match self.body.next().await {
                None => return Ok(None),
                Some(Err(error)) => return Err(CallError::Broken(error.to_string())),
                Some(Ok(frame)) => {
                    let Ok(bytes) = frame.into_data() else { continue };
                    let events = self.reader.push(&bytes);
                    let events =
                        events.map_err(|error| CallError::BadResponse(error.to_string()))?;
                    self.ready.extend(events);
                }
            }
        }
    }
}

/// Why an agent takes no calls now.
pub fn refusal(agent: &Agent) -> domain::Rejection {
    use domain::agent::Status;
    match agent.status {
        Status::Created | Status::Building | Status::Deploying => domain::Rejection::AgentNotReady,
        Status::Running | Status::Stopped | Status::Failed => domain::Rejection::AgentNotRunning,
    }
}

impl CallError {
    /// A code and details for whoever called.
    pub fn explained(&self) -> (&'static str, Value) {
        use serde_json::json;
        match self {
            Self::NoSlot(NoSlot::Overloaded) => ("AGENT_OVERLOADED", json!({})),
            Self::NoSlot(NoSlot::Unavailable) => ("AGENT_UNAVAILABLE", json!({})),
            Self::NoSlot(NoSlot::Timeout) => ("INVOCATION_TIMEOUT", json!({ "reason": "queue" })),
            Self::Timeout(after) => {
                ("INVOCATION_TIMEOUT", json!({ "timeout_seconds": after.as_secs_f64() }))
            }
            Self::Agent { status, body } => {
                ("AGENT_ERROR", json!({ "status": status, "body": body, "attempts": 1 }))
            }
            Self::Reported { code, .. } => ("AGENT_ERROR", json!({ "agent_code": code })),
            Self::Unreached | Self::Busy => ("AGENT_UNAVAILABLE", json!({})),
            Self::Broken(_) => ("AGENT_ERROR", json!({ "reason": "connection_lost" })),
            Self::BadResponse(cause) => ("AGENT_BAD_RESPONSE", json!({ "cause": cause })),
            Self::TooLarge(most) => ("AGENT_BAD_RESPONSE", json!({ "max_bytes": most })),
        }
    }
}
