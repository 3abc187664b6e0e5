//! `POST /v1/agents/{id}/invoke`: synchronous, asynchronous, or as a stream.

use std::{collections::BTreeMap, time::Duration};

use actors::{
    call::{Invoked, NewJob},
    invocation::{CallError, Invocation, OUTPUT_BYTES_MAX},
    settings::Settings,
    wire::StreamEvent,
};
use domain::{
    AgentId,
    account::Tenant,
    idempotency::Keyed,
    job::{Payload, Retry},
};
use futures::{Stream, StreamExt as _};
use http::{HeaderName, HeaderValue, header};
use poem::{Request, web::sse::Event};
use poem_openapi::{
    ApiResponse, OpenApi, ResponseContent,
    param::Path,
    payload::Json,
    types::{Any, ToJSON as _},
};
use serde_json::{Value, value::RawValue};

use crate::{
    Handle,
    agents::agent_id,
    body::{
        agent::{Wrong, check_metadata},
        invocation::{InvokeBody, InvokeOptions, InvokeRequest, StreamEventBody, StreamUsage},
        job::poll_url,
    },
    caller::Caller,
    check::Checked,
    envelope::{Current, Meta, Success},
    error::{ApiError, Problem},
    repeat::{keyed, replayed},
    sse::Sse,
};

pub(crate) struct InvokeApi(pub(crate) Handle);

/// An answer, whole or in pieces.
#[derive(ResponseContent)]
#[expect(clippy::large_enum_variant, reason = "made once for each call and handed on at once")]
pub(crate) enum InvokeContent {
    /// The whole answer, or with `async` the job.
    Json(Json<Success<InvokeBody>>),
    /// With `Accept: text/event-stream`: one event per piece.
    Sse(Sse<StreamEventBody>),
}

/// The answer to an invocation.
#[derive(ApiResponse)]
pub(crate) enum InvokeAnswer {
    /// The agent's answer.
    #[oai(status = 200)]
    Ok(
        InvokeContent,
        #[oai(header = "Location")] Option<String>,
        #[oai(header = "Idempotency-Replayed")] Option<String>,
    ),
}

#[OpenApi(prefix_path = "/v1", tag = "crate::document::Tag::Invocations")]
impl InvokeApi {
    /// Invoke an agent
    ///
    /// Waits for the answer; with `"async": true` answers at once with a job;
    /// with `Accept: text/event-stream` answers with events as the agent makes them.
    #[oai(path = "/agents/:id/invoke", method = "post", operation_id = "invokeAgent")]
    async fn invoke(
        &self,
        caller: Caller,
        request: &Request,
        /// The agent.
        id: Path<String>,
        body: Checked<InvokeRequest>,
    ) -> Result<InvokeAnswer, ApiError> {
        let (tenant, id) = (caller.tenant(), agent_id(&id)?);
        let key = keyed(request, tenant, Some(&body.json))?;
        let (is_async, is_stream) = (body.body.is_async == Some(true), wants_stream(request));
        let call = Call { tenant, id, key };
        let input = body.body.input.map_or(Value::Null, |Any(input)| input);
        let options = body.body.options.unwrap_or_default();
        // In boxes: every layer above carries what is not in one.
        match (is_async, is_stream) {
            (true, true) => Err(Problem::field(
                "async",
                "can't be true with Accept: text/event-stream; leave one of them",
            )
            .into()),
            (true, false) => Box::pin(self.accept(call, &input, options)).await,
            (false, true) => Box::pin(self.stream(call, &input, options)).await,
            (false, false) => Box::pin(self.wait(call, &input, options)).await,
        }
    }
}

struct Call {
    tenant: Tenant,
    id: AgentId,
    key: Option<Keyed>,
}

fn wants_stream(request: &Request) -> bool {
    let accept = request.headers().get(header::ACCEPT).and_then(|value| value.to_str().ok());
    accept.is_some_and(|accept| accept.contains("text/event-stream"))
}

impl InvokeApi {
    fn settings(&self) -> &Settings {
        &self.0.service.world.settings
    }

    async fn wait(
        &self,
        call: Call,
        input: &Value,
        options: InvokeOptions,
    ) -> Result<InvokeAnswer, ApiError> {
        let options = Options::of(options, self.settings().sync_timeout, false)?;
        let (tenant, key) = (call.tenant, call.key.clone());
        let answer = self.0.service.invoke(tenant, invocation(&call, input, options), key).await?;
        let finished = answer.value;
        let body = InvokeBody {
            output: Some(Any(finished.output)),
            usage: Some(finished.usage.into()),
            job_id: None,
            status: None,
            poll_url: None,
        };
        let latency = Current::get().began.elapsed().as_millis();
        let meta = Meta {
            latency_ms: Some(u64::try_from(latency).unwrap_or(u64::MAX)),
            instance_id: finished.instance_id.map(|id| id.to_string()),
            ..Meta::now()
        };
        let content = InvokeContent::Json(Json(Success { success: true, data: body, meta }));
        Ok(InvokeAnswer::Ok(content, None, replayed(answer.replayed)))
    }

    async fn accept(
        &self,
        call: Call,
        input: &Value,
        options: InvokeOptions,
    ) -> Result<InvokeAnswer, ApiError> {
        let options = Options::of(options, self.settings().job_timeout, true)?;
        let new = NewJob {
            agent_id: call.id,
            input: Payload::Here(input.to_string()),
            headers: options.headers,
            metadata: options.metadata,
            timeout: options.timeout,
            retry: options.retry,
            request_id: Current::get().request_id,
            retried_from: None,
        };
        let answer = self.0.service.accept_job(call.tenant, new, call.key).await?;
        let job = answer.value;
        let body = InvokeBody {
            output: None,
            usage: None,
            job_id: Some(job.id.to_string()),
            status: Some("pending".to_owned()),
            poll_url: Some(poll_url(&job)),
        };
        let location = Some(poll_url(&job));
        let content = InvokeContent::Json(Json(Success::of(body)));
        Ok(InvokeAnswer::Ok(content, location, replayed(answer.replayed)))
    }

    async fn stream(
        &self,
        call: Call,
        input: &Value,
        options: InvokeOptions,
    ) -> Result<InvokeAnswer, ApiError> {
        if call.key.is_some() {
            let why =
                "is not taken for streams; leave it out, or call without Accept: text/event-stream";
            return Err(Problem::field("Idempotency-Key", why).into());
        }
        let options = Options::of(options, self.settings().stream_timeout, false)?;
        let tenant = call.tenant;
        let events = self.0.service.stream(tenant, invocation(&call, input, options)).await?;
        let mut sequence = 0;
        let events = spoken(events).map(move |event| {
            sequence += 1;
            Event::message(event.to_json_string()).id(sequence.to_string())
        });
        Ok(InvokeAnswer::Ok(InvokeContent::Sse(Sse::new(events)), None, None))
    }
}

fn invocation(call: &Call, input: &Value, options: Options) -> Invocation {
    let input = RawValue::from_string(input.to_string()).expect("a JSON value writes JSON");
    Invocation {
        agent_id: call.id,
        livemode: call.tenant.mode.is_live(),
        input,
        headers: options.headers,
        metadata: options.metadata,
        timeout: options.timeout,
        request_id: Current::get().request_id,
        job_id: None,
        attempt: 1,
        epoch: 1,
        output_max: OUTPUT_BYTES_MAX,
    }
}

/// The agent's events in the specification's words, with our own first one.
fn spoken(events: Invoked) -> impl Stream<Item = StreamEventBody> + Send {
    let kind = |kind: &str| StreamEventBody { kind: kind.to_owned(), ..Default::default() };
    let start = StreamEventBody {
        request_id: Some(Current::get().request_id.to_string()),
        ..kind("start")
    };
    let rest = futures::stream::unfold(events, |mut events| async move {
        let event = events.recv().await?;
        Some((event, events))
    });
    let rest = rest.map(move |event| match event {
        Ok(StreamEvent::Chunk(text)) => StreamEventBody { content: Some(text), ..kind("chunk") },
        Ok(StreamEvent::Custom { name, data }) => {
            StreamEventBody { name: Some(name), data: Some(Any(data)), ..kind("custom") }
        }
        Ok(StreamEvent::Done(tokens)) => {
            StreamEventBody { usage: Some(StreamUsage { tokens }), ..kind("done") }
        }
        Ok(StreamEvent::Failed { code, message }) => failed(&kind("error"), code, message),
        Err(CallError::Reported { code, message }) => failed(&kind("error"), code, message),
        Err(error) => {
            let problem = Problem::from(error.clone());
            failed(&kind("error"), problem.code().to_owned(), error.to_string())
        }
    });
    futures::stream::once(async { start }).chain(rest)
}

fn failed(event: &StreamEventBody, code: String, message: String) -> StreamEventBody {
    StreamEventBody { code: Some(code), message: Some(message), ..event.clone() }
}

/// Options, checked.
struct Options {
    timeout: Duration,
    headers: BTreeMap<String, String>,
    metadata: BTreeMap<String, String>,
    retry: Retry,
}

impl Options {
    fn of(
        body: InvokeOptions,
        (default, most): (Duration, Duration),
        is_async: bool,
    ) -> Result<Self, Problem> {
        let mut wrong: Wrong = vec![];
        let InvokeOptions { timeout, timeout_ms, headers, metadata, retry } = body;
        if timeout.is_some() && timeout_ms.is_some() {
            wrong.push((
                "options.timeout_ms".to_owned(),
                "can't be given beside timeout".to_owned(),
            ));
        }
        if retry.is_some() && !is_async {
            wrong.push(("options.retry".to_owned(), "needs \"async\": true".to_owned()));
        }
        let seconds = timeout.map(|seconds| Duration::try_from_secs_f64(seconds).unwrap_or(most));
        let timeout =
            seconds.or(timeout_ms.map(Duration::from_millis)).unwrap_or(default).min(most);
        let headers = headers.unwrap_or_default();
        check_headers(&headers, &mut wrong);
        let metadata = metadata.unwrap_or_default();
        check_metadata(metadata.iter().map(|(k, v)| (k, v.as_str())), &mut wrong);
        if wrong.is_empty() {
            Ok(Self {
                timeout,
                headers,
                metadata,
                retry: retry.map(Retry::from).unwrap_or_default(),
            })
        } else {
            let fields = wrong.into_iter().map(|(field, why)| {
                (
                    if field.starts_with("metadata") { format!("options.{field}") } else { field },
                    why,
                )
            });
            Err(Problem::invalid(fields.collect()))
        }
    }
}

/// Most headers for the agent.
const HEADERS_MAX: usize = 50;
/// Headers that belong to the connection or to us.
const OWN_HEADERS: [&str; 15] = [
    "accept",
    "authorization",
    "connection",
    "content-length",
    "content-type",
    "expect",
    "host",
    "keep-alive",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "x-api-key",
];

fn check_headers(headers: &BTreeMap<String, String>, wrong: &mut Wrong) {
    if headers.len() > HEADERS_MAX {
        wrong.push((
            "options.headers".to_owned(),
            format!("must have at most {HEADERS_MAX} headers"),
        ));
    }
    for (name, value) in headers {
        let field = || format!("options.headers.{}", name.chars().take(64).collect::<String>());
        let lower = name.to_ascii_lowercase();
        if HeaderName::try_from(name).is_err() {
            wrong.push((field(), "is not a header's name".to_owned()));
        } else if OWN_HEADERS.contains(&lower.as_str())
            || lower.starts_with("x-service-")
            || lower == "x-request-id"
        {
            wrong.push((field(), "is set by the platform; choose another name".to_owned()));
        } else if HeaderValue::from_str(value).is_err() || value.len() > 4096 {
            wrong.push((field(), "must be at most 4096 visible characters".to_owned()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeout_above_the_most_is_taken_as_that() {
        let limits = (Duration::from_secs(300), Duration::from_secs(900));
        let options = |timeout| InvokeOptions { timeout, ..InvokeOptions::default() };
        let timeout =
            |given| Options::of(options(given), limits, false).map(|options| options.timeout);
        assert_eq!(timeout(None).ok(), Some(limits.0));
        assert_eq!(timeout(Some(30_000.0)).ok(), Some(limits.1));
        assert_eq!(timeout(Some(f64::MAX)).ok(), Some(limits.1));
        assert_eq!(timeout(Some(0.5)).ok(), Some(Duration::from_millis(500)));
    }

    #[test]
    fn headers_of_ours_are_refused() {
        for name in ["Authorization", "x-api-key", "Host", "X-Service-Signature", "a b", ""] {
            let headers = BTreeMap::from([(name.to_owned(), "v".to_owned())]);
            let options = InvokeOptions { headers: Some(headers), ..InvokeOptions::default() };
            let limits = (Duration::from_secs(1), Duration::from_secs(1));
            let problem = Options::of(options, limits, false).err().expect(name);
            assert_eq!(
                (problem.status(), problem.code()),
                (http::StatusCode::BAD_REQUEST, "VALIDATION_ERROR")
            );
        }
    }
}
