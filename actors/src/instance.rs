//! One actor per running copy of an agent, on the node that runs it, whoever leads the agent's shard.
//!
//! It starts the process, probes it, opens the way to it, drains it and ends it. What it knows
//! stands in its [`Handle`], which the agent's actor reads; a wake-up carries no news.

use std::{
    collections::{HashMap, VecDeque},
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::Bytes;
use domain::{
    AgentId, InstanceId, Timestamp,
    agent::plan::{CRASH_LOOP, OUT_OF_MEMORY, Seen},
    deployment::Failure,
};
use http::{Method, Request};
use http_body_util::Full;
use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef, SupervisionEvent};
use tokio::{
    net::TcpStream,
    sync::{OwnedSemaphorePermit, mpsc},
    task::AbortHandle,
    time::Instant,
};

use crate::{
    ask::Observed,
    log_line::{self, Writer},
    ports::{Channel, Exit, Process, StartRequest, Started},
    root::detach,
    route::{Endpoint, NewEndpoint, Place},
    world::World,
};

/// Lines kept for the words of a crash.
const LAST_LINES: usize = 10;
/// Between looks at an instance whose unwanted calls are all that is left.
const LET_GO_LOOK: Duration = Duration::from_millis(50);
/// Between connection attempts after the first second of a start.
const PROBE_SLOW: Duration = Duration::from_millis(250);
/// How long one that does not come up keeps others waiting for their turn.
const TURN_LASTS: Duration = Duration::from_secs(3);
/// How long after a broken connection an instance is looked at.
const ENDS_OR_GOES_ON: Duration = Duration::from_millis(20);
/// How long it may take to accept a connection then.
const LISTENS_WITHIN: Duration = Duration::from_secs(1);

/// What wakes an instance.
pub enum InstanceMessage {
    /// Its turn to be started has come. What is only found again needs none.
    Turn(Option<OwnedSemaphorePermit>),
    /// The runtime has started it, or not.
    Started(Result<Started, Failure>),
    /// It answered for the first time.
    Ready,
    /// A health check of the ready instance ended.
    Checked(bool),
    /// The process has ended.
    Exited(Exit),
    /// Nobody listens where it was.
    Unreachable,
    /// A connection to it broke.
    Doubted,
    /// No new calls; end it when its calls are over, or after this time.
    Drain(Duration),
    /// A canceled call is not let go of: end it once only such calls are left in it.
    LetGo,
    /// End it at once.
    Kill,
}

/// How an instance ended.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub struct Ended {
    /// Whether it had been ready long enough not to count as a crash.
    pub stayed_up: bool,
    /// Whether somebody asked for it.
    pub asked: bool,
    /// Why: how it exited and the last lines it wrote, or why it did not start.
    pub cause: Failure,
}

impl Default for Ended {
    fn default() -> Self {
        Self { stayed_up: false, asked: false, cause: Failure::new(CRASH_LOOP, "") }
    }
}

/// What the rest of the node knows of an instance.
pub struct Handle {
    /// The agent.
    pub agent_id: AgentId,
    /// Its actor.
    pub actor: ActorRef<InstanceMessage>,
    state: Mutex<Known>,
}

struct Known {
    seen: Seen,
    isolation: Vec<String>,
    ended: Ended,
    process: Option<Arc<dyn Process>>,
    cpu_ms: u64,
}

impl Handle {
    fn known(&self) -> MutexGuard<'_, Known> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes of memory now, and milliseconds of processor time since the last time somebody asked.
    pub fn usage(&self) -> (u64, u64) {
        let process = self.known().process.clone();
        let Some((memory, cpu_ms)) = process.and_then(|process| process.usage()) else {
            return (0, 0);
        };
        let before = std::mem::replace(&mut self.known().cpu_ms, cpu_ms);
        (memory, cpu_ms.saturating_sub(before))
    }

    /// What the owner of its agent wants to know. An actor that fell has ended its instance.
    pub fn observed(&self, id: InstanceId) -> Observed {
        let alive = matches!(
            self.actor.get_status(),
            ractor::ActorStatus::Unstarted
                | ractor::ActorStatus::Starting
                | ractor::ActorStatus::Running
                | ractor::ActorStatus::Upgrading
        );
        let known = self.known();
        Observed {
            id,
            seen: if alive { known.seen.clone() } else { Seen::Exited },
            isolation: known.isolation.clone(),
            ended: known.ended.clone(),
        }
    }
}

/// All instances of this node.
#[derive(Default)]
pub struct Instances {
    all: Mutex<HashMap<InstanceId, Arc<Handle>>>,
    end: AtomicBool,
}

impl Instances {
    fn all(&self) -> MutexGuard<'_, HashMap<InstanceId, Arc<Handle>>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The node stops. Instances that end from now on end with it, which is no agent's crash.
    pub fn end_with_the_node(&self) {
        self.end.store(true, Relaxed);
    }

    /// One of them.
    pub fn get(&self, id: InstanceId) -> Option<Arc<Handle>> {
        self.all().get(&id).cloned()
    }

    /// Forgets one that has ended.
    pub fn remove(&self, id: InstanceId) -> Option<Arc<Handle>> {
        self.all().remove(&id)
    }

    /// What is seen of an agent's.
    pub fn observed(&self, agent: AgentId) -> Vec<Observed> {
        let all = self.all();
        let of_agent = all.iter().filter(|(_, handle)| handle.agent_id == agent);
        let mut observed: Vec<_> = of_agent.map(|(id, handle)| handle.observed(*id)).collect();
        let with_the_node = self.end.load(Relaxed);
        observed.iter_mut().for_each(|one| one.ended.asked |= with_the_node);
        observed
    }

    /// Every one of them.
    pub fn handles(&self) -> Vec<Arc<Handle>> {
        self.all().values().cloned().collect()
    }
}

/// Starts an instance under `supervisor`.
pub async fn start(
    world: &Arc<World>,
    request: StartRequest,
    supervisor: ActorCell,
) -> Result<(), ActorProcessingErr> {
    let (agent_id, id, adopt) = (request.agent_id, request.instance_id, request.adopt);
    let arguments = (Arc::clone(world), request);
    let (actor, _) = Actor::spawn_linked(None, InstanceActor, arguments, supervisor).await?;
    let state = Known {
        seen: Seen::Waiting,
        isolation: vec![],
        ended: Ended::default(),
        process: None,
        cpu_ms: 0,
    };
    let handle = Arc::new(Handle { agent_id, actor: actor.clone(), state: Mutex::new(state) });
    world.watch.instances.all().insert(id, handle);
    // Only now, as it tells its handle what becomes of it.
    if adopt {
        actor.cast(InstanceMessage::Turn(None))?;
        return Ok(());
    }
    let starts = Arc::clone(&world.starts);
    detach(async move {
        let Ok(turn) = starts.acquire_owned().await else { return };
        let _ = actor.cast(InstanceMessage::Turn(Some(turn)));
    });
    Ok(())
}

/// The actor of one instance.
pub struct InstanceActor;

/// What it holds while it lives.
pub struct Running {
    world: Arc<World>,
    request: StartRequest,
    address: Option<SocketAddr>,
    process: Option<Arc<dyn Process>>,
    endpoint: Option<Arc<Endpoint>>,
    ready_at: Option<Timestamp>,
    failures: u32,
    asked: bool,
    words: Arc<Mutex<VecDeque<String>>>,
    /// Holds its turn to come up, for a while.
    turn: Option<AbortHandle>,
    tasks: Vec<AbortHandle>,
}

impl Drop for Running {
    /// However the actor ends, nothing of its process stays.
    fn drop(&mut self) {
        self.tasks.iter().for_each(AbortHandle::abort);
        self.world.routes.remove(self.request.agent_id, self.request.instance_id);
        if let Some(process) = &self.process {
            process.kill();
        }
    }
}

impl Actor for InstanceActor {
    type Msg = InstanceMessage;
    type State = Running;
    type Arguments = (Arc<World>, StartRequest);

    async fn pre_start(
        &self,
        _: ActorRef<InstanceMessage>,
        (world, request): Self::Arguments,
    ) -> Result<Running, ActorProcessingErr> {
        Ok(Running {
            world,
            request,
            address: None,
            process: None,
            endpoint: None,
            ready_at: None,
            failures: 0,
            asked: false,
            words: Arc::default(),
            turn: None,
            tasks: vec![],
        })
    }

    async fn handle(
        &self,
        myself: ActorRef<InstanceMessage>,
        message: InstanceMessage,
        running: &mut Running,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            InstanceMessage::Turn(turn) => running.start(&myself, turn),
            // Nothing of it is there.
            InstanceMessage::Drain(_) | InstanceMessage::LetGo | InstanceMessage::Kill
                if running.turn.is_none() && !running.request.adopt =>
            {
                running.asked = true;
                running.ended(Failure::new(CRASH_LOOP, "it was not started"));
                myself.stop(None);
            }
            InstanceMessage::Started(Ok(started)) => running.started(&myself, started),
            InstanceMessage::Started(Err(failure)) => {
                // One that is no longer there to be found again is nobody's crash.
                running.asked |= running.request.adopt;
                let level = if running.asked { "info" } else { "error" };
                running.log(level, format!("{}: {}", failure.code, failure.message));
                running.ended(failure);
                myself.stop(None);
            }
            InstanceMessage::Ready => running.ready(&myself),
            InstanceMessage::Checked(well) => running.checked(well),
            InstanceMessage::Unreachable => running.unreachable(),
            InstanceMessage::Doubted => running.doubted(&myself),
            InstanceMessage::Drain(timeout) => running.drain(timeout),
            InstanceMessage::LetGo => running.let_go(),
            InstanceMessage::Kill => running.kill(),
            InstanceMessage::Exited(exit) => {
                running.exited(exit);
                myself.stop(None);
            }
        }
        Ok(())
    }

    async fn handle_supervisor_evt(
        &self,
        _: ActorRef<InstanceMessage>,
        _: SupervisionEvent,
        _: &mut Running,
    ) -> Result<(), ActorProcessingErr> {
        Ok(())
    }
}

impl Running {
    fn tell(&self, change: impl FnOnce(&mut Known)) {
        if let Some(handle) = self.world.watch.instances.get(self.request.instance_id) {
            change(&mut handle.known());
        }
        self.world.watch.report(self.request.agent_id);
    }

    fn log(&self, level: &str, message: String) {
        let mut line = log_line::plain(self.world.now(), Channel::System, level, message);
        line.instance_id = Some(self.request.instance_id);
        line.version = Some(self.request.version);
        self.world.ports.logs.append(self.request.agent_id, line);
    }

    fn start(&mut self, myself: &ActorRef<InstanceMessage>, turn: Option<OwnedSemaphorePermit>) {
        let turn = detach(async move {
            tokio::time::sleep(TURN_LASTS).await;
            drop(turn);
        });
        self.tasks.push(turn.clone());
        self.turn = Some(turn);
        let (world, request, me) = (Arc::clone(&self.world), self.request.clone(), myself.clone());
        self.tasks.push(detach(async move {
            let started = world.ports.runtime.start(request).await;
            let _ = me.cast(InstanceMessage::Started(started));
        }));
        let now = self.world.now();
        self.tell(|known| known.seen = Seen::Starting(now));
    }

    fn started(&mut self, myself: &ActorRef<InstanceMessage>, started: Started) {
        let Started { address, isolation, output, exit, process } = started;
        let shown = Arc::clone(&process);
        self.tell(|known| {
            known.isolation = isolation;
            known.process = Some(shown);
        });
        self.address = Some(address);
        self.process = Some(process);
        let reader = self.read_output(output);
        self.tasks.push(reader);
        let me = myself.clone();
        // Not among the tasks that end with the actor: the exit is what ends it.
        detach(async move {
            let exit = exit.await;
            let _ = me.cast(InstanceMessage::Exited(exit));
        });
        if self.asked {
            self.end();
            return;
        }
        let probe = Probe {
            world: Arc::clone(&self.world),
            actor: myself.clone(),
            process: self.process.clone(),
            address,
            path: self.request.image.health_path.clone(),
        };
        self.tasks.push(detach(probe.run()));
    }

    fn read_output(&self, mut output: mpsc::Receiver<(Channel, String)>) -> AbortHandle {
        let world = Arc::clone(&self.world);
        let words = Arc::clone(&self.words);
        let agent_id = self.request.agent_id;
        let writer =
            Writer { instance_id: self.request.instance_id, version: self.request.version };
        detach(async move {
            while let Some((channel, text)) = output.recv().await {
                for part in log_line::split(&text) {
                    let line = log_line::read(part, channel, writer, world.now());
                    world.ports.logs.append(agent_id, line);
                }
                let mut words = words.lock().unwrap_or_else(PoisonError::into_inner);
                words.push_back(text);
                if words.len() > LAST_LINES {
                    words.pop_front();
                }
            }
        })
    }

    fn ready(&mut self, myself: &ActorRef<InstanceMessage>) {
        let (Some(address), None, false) = (self.address, &self.endpoint, self.asked) else {
            return;
        };
        self.turn.iter().for_each(AbortHandle::abort);
        let now = self.world.now();
        let image = &self.request.image;
        let new = NewEndpoint {
            agent_id: self.request.agent_id,
            id: self.request.instance_id,
            version: self.request.version,
            place: Place::Here { address, actor: myself.clone() },
            invoke_path: image.invoke_path.clone(),
            concurrency: image.concurrency,
        };
        let endpoint = Endpoint::new(new, now);
        self.world.routes.add(Arc::clone(&endpoint));
        self.endpoint = Some(endpoint);
        self.ready_at = Some(now);
        self.tell(|known| known.seen = Seen::Ready(now));
    }

    /// A busy instance may be slow to answer; only an idle one that fails is sick.
    fn checked(&mut self, well: bool) {
        let Some(endpoint) = &self.endpoint else { return };
        endpoint.last_check.store(self.world.now().millis(), Relaxed);
        self.failures = if well { 0 } else { self.failures + 1 };
        let failing = self.failures >= self.world.settings.health_failures;
        endpoint.healthy.store(!failing, Relaxed);
        if failing && endpoint.in_flight() == 0 && !self.asked {
            self.log("error", "health checks fail; the instance is replaced".to_owned());
            self.tell(|known| known.seen = Seen::Sick);
        }
    }

    /// Whatever is left of it ends; it counts as an exit of its own.
    fn unreachable(&mut self) {
        if let Some(process) = &self.process {
            process.kill();
        }
    }

    /// A process that ends closes its connections one after the other. A moment later it listens no more, or it
    /// goes on.
    fn doubted(&mut self, myself: &ActorRef<InstanceMessage>) {
        let (Some(endpoint), Some(address)) = (&self.endpoint, self.address) else { return };
        let (world, endpoint, me) = (Arc::clone(&self.world), Arc::clone(endpoint), myself.clone());
        detach(async move {
            tokio::time::sleep(ENDS_OR_GOES_ON).await;
            let connected = TcpStream::connect(address);
            match tokio::time::timeout(LISTENS_WITHIN, connected).await {
                Ok(Ok(_)) => world.routes.trust(&endpoint),
                Ok(Err(_)) | Err(_) => drop(me.cast(InstanceMessage::Unreachable)),
            }
        });
    }

    fn drain(&mut self, timeout: Duration) {
        if self.asked {
            return;
        }
        self.asked = true;
        self.world.routes.remove(self.request.agent_id, self.request.instance_id);
        self.tell(|known| known.seen = Seen::Draining);
        match (&self.endpoint, &self.process) {
            (Some(endpoint), Some(process)) => {
                let (endpoint, process) = (Arc::clone(endpoint), Arc::clone(process));
                let kill_after = self.world.settings.kill_after;
                self.tasks.push(detach(async move {
                    let _ = tokio::time::timeout(timeout, endpoint.drained()).await;
                    terminate(process, kill_after).await;
                }));
            }
            _ => self.end(),
        }
    }

    /// No new calls; when all that is left in it are calls that nobody wants, it is ended.
    fn let_go(&mut self) {
        let (Some(endpoint), Some(process)) = (&self.endpoint, &self.process) else { return };
        let (endpoint, process) = (Arc::clone(endpoint), Arc::clone(process));
        self.asked = true;
        self.world.routes.remove(self.request.agent_id, self.request.instance_id);
        self.tell(|known| known.seen = Seen::Draining);
        self.tasks.push(detach(async move {
            while endpoint.in_flight() > endpoint.unwanted() {
                tokio::time::sleep(LET_GO_LOOK).await;
            }
            process.kill();
        }));
    }

    /// Ends a process that takes no calls; one that is still being started ends when it is known.
    fn end(&mut self) {
        if let Some(process) = &self.process {
            let (process, kill_after) = (Arc::clone(process), self.world.settings.kill_after);
            self.tasks.push(detach(terminate(process, kill_after)));
        }
    }

    fn kill(&mut self) {
        self.asked = true;
        self.world.routes.remove(self.request.agent_id, self.request.instance_id);
        if let Some(process) = &self.process {
            process.kill();
        }
    }

    fn exited(&mut self, exit: Exit) {
        let words = {
            let words = self.words.lock().unwrap_or_else(PoisonError::into_inner);
            words.iter().cloned().collect::<Vec<_>>().join("\n")
        };
        let how = match exit {
            Exit { out_of_memory: true, .. } => "out of memory".to_owned(),
            Exit { code: Some(code), .. } => format!("exit code {code}"),
            Exit { signal: Some(signal), .. } => format!("signal {signal}"),
            Exit { .. } => "unknown".to_owned(),
        };
        let level = if self.asked { "info" } else { "error" };
        self.log(level, format!("the instance ended: {how}"));
        self.process = None;
        let code = if exit.out_of_memory { OUT_OF_MEMORY } else { CRASH_LOOP };
        let details = if words.is_empty() { how.clone() } else { format!("{how}\n{words}") };
        self.ended(Failure { details, ..Failure::new(code, how) });
    }

    fn ended(&mut self, cause: Failure) {
        self.world.routes.remove(self.request.agent_id, self.request.instance_id);
        let enough = self.world.settings.timing.min_healthy;
        let now = self.world.now();
        let stayed_up = self.ready_at.is_some_and(|ready| now.since(ready) >= enough);
        let asked = self.asked;
        self.tell(|known| {
            known.seen = Seen::Exited;
            known.process = None;
            known.ended = Ended { stayed_up, asked, cause };
        });
    }
}

async fn terminate(process: Arc<dyn Process>, kill_after: Duration) {
    process.terminate();
    tokio::time::sleep(kill_after).await;
    process.kill();
}

/// Asks an instance whether it is well, for as long as its actor lives.
struct Probe {
    world: Arc<World>,
    actor: ActorRef<InstanceMessage>,
    process: Option<Arc<dyn Process>>,
    address: SocketAddr,
    path: String,
}

impl Probe {
    async fn run(self) {
        self.until_ready().await;
        if self.actor.cast(InstanceMessage::Ready).is_err() {
            return;
        }
        loop {
            tokio::time::sleep(self.world.settings.health_interval).await;
            let well = self.check().await;
            if self.actor.cast(InstanceMessage::Checked(well)).is_err() {
                return;
            }
        }
    }

    async fn until_ready(&self) {
        let began = Instant::now();
        loop {
            let answers = TcpStream::connect(self.address).await.is_ok() && self.check().await;
            if answers && self.is_ours().await {
                return;
            }
            tokio::time::sleep(probe_again(began.elapsed())).await;
        }
    }

    /// Another program may have taken the port first; its answers are not the agent's.
    async fn is_ours(&self) -> bool {
        let Some(process) = self.process.clone() else { return true };
        tokio::task::spawn_blocking(move || process.listens()).await.unwrap_or_default()
    }

    /// A path that does not exist is no sickness: the open port counts then.
    async fn check(&self) -> bool {
        let request = Request::builder()
            .method(Method::GET)
            .uri(&self.path)
            .body(Full::new(Bytes::new()))
            .expect("the path was checked when the image was built");
        let answer = self.world.client.send(self.address, true, request);
        match tokio::time::timeout(self.world.settings.health_timeout, answer).await {
            Ok(Ok(response)) => response.status().is_success() || response.status() == 404,
            Ok(Err(_)) | Err(_) => false,
        }
    }
}

/// How long to wait for the next look at an instance that began so long ago: a compiled program is there after some
/// milliseconds, an interpreter after a hundred.
fn probe_again(age: Duration) -> Duration {
    const PAUSES: [(Duration, Duration); 2] = [
        (Duration::from_millis(50), Duration::from_millis(1)),
        (Duration::from_secs(1), Duration::from_millis(5)),
    ];
    PAUSES.iter().find(|(until, _)| age < *until).map_or(PROBE_SLOW, |(_, pause)| *pause)
}

impl Handle {
    /// Said by whoever asked for the drain, so that nobody asks twice.
    pub(crate) fn mark_draining(&self) {
        let mut known = self.known();
        if known.seen != Seen::Exited {
            known.seen = Seen::Draining;
        }
    }
}
