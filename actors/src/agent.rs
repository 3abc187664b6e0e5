//! One actor per agent with something to do, where the agent's home shard is led.
//!
//! It compares what the directory says with what its instances do and takes the steps that
//! [`domain::agent::plan`] names. It keeps no state that matters: after a crash the next look finds
//! the same work. Its counters of crashes begin anew then, which only delays a verdict.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use domain::{
    AgentId, DeploymentId, InstanceId, NodeId, Rejection, Timestamp,
    agent::{
        Agent, Desired, Source, Status,
        plan::{self, Crashes, DRAINED_AGAIN_AFTER, IMAGE_PULL_FAILED, Plan, Seen, Step, View},
    },
    cloud::Provider,
    deployment::{Deployment, Failure, Image},
    directory::Command,
    instance::{Instance, InstanceStatus},
    machine::Claim,
    node::NodeStatus,
    schedule::{self, Offer},
};
use futures::StreamExt as _;
use ractor::{Actor, ActorProcessingErr, ActorRef};
use tokio::task::AbortHandle;
use tracing::{info, warn};

use crate::{
    ask::{self, Ask, Observed, Told},
    instance::Ended,
    log_line,
    ports::{BuildRequest, Channel, Opened, ProposeError},
    root::{Told as Telling, detach},
    world::World,
};

/// Between looks for room for one more instance of an agent that serves.
const ROOM_LOOKED_FOR_EVERY: Duration = Duration::from_secs(5);
/// How long nodes may take to say what they see of instances.
const OBSERVED_WITHIN: Duration = Duration::from_secs(1);
/// Instances of one agent that nodes are asked to start at once.
const STARTED_AT_ONCE: usize = 16;
/// How long a node that did not take an instance is not asked again.
const AVOIDED_FOR: Duration = Duration::from_secs(5);

/// Between looks whether an organization has few enough builds under way for one more.
const BUILD_AGAIN: Duration = Duration::from_millis(500);

/// What wakes an agent.
pub enum AgentMessage {
    /// Something may have changed; find out what. Carries no hint on purpose.
    Look,
    /// A build ended; without a result if it could not even begin.
    Built(DeploymentId, Option<Box<Result<Image, Failure>>>),
}

/// The actor of one agent.
pub struct AgentActor;

/// Who it is for.
pub struct AgentArguments {
    /// Everything there is.
    pub world: Arc<World>,
    /// Which agent.
    pub id: AgentId,
    /// In whose name it acts.
    pub claim: Claim,
}

/// What it remembers between looks.
pub struct Owner {
    world: Arc<World>,
    id: AgentId,
    claim: Claim,
    /// What nodes said of its instances last.
    seen: BTreeMap<InstanceId, Observed>,
    /// Since when nodes with instances of it do not answer.
    silent: BTreeMap<NodeId, Timestamp>,
    /// Nodes that could not take an instance lately.
    avoided: BTreeMap<NodeId, Timestamp>,
    /// Instances that were looked for after their node had started again.
    adopted: BTreeSet<InstanceId>,
    crashes: Crashes,
    lost_since: Option<Timestamp>,
    build: Option<(DeploymentId, AbortHandle)>,
    alarm: Option<AbortHandle>,
    no_room_at: Option<Timestamp>,
    /// When instances were told to drain last.
    drained_at: BTreeMap<InstanceId, Timestamp>,
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.stop_build();
        if let Some(alarm) = self.alarm.take() {
            alarm.abort();
        }
    }
}

impl Actor for AgentActor {
    type Msg = AgentMessage;
    type State = Owner;
    type Arguments = AgentArguments;

    async fn pre_start(
        &self,
        myself: ActorRef<AgentMessage>,
        AgentArguments { world, id, claim }: AgentArguments,
    ) -> Result<Owner, ActorProcessingErr> {
        myself.cast(AgentMessage::Look)?;
        Ok(Owner {
            world,
            id,
            claim,
            seen: BTreeMap::new(),
            silent: BTreeMap::new(),
            avoided: BTreeMap::new(),
            adopted: BTreeSet::new(),
            crashes: Crashes::default(),
            lost_since: None,
            build: None,
            alarm: None,
            no_room_at: None,
            drained_at: BTreeMap::new(),
        })
    }

    async fn handle(
        &self,
        myself: ActorRef<AgentMessage>,
        message: AgentMessage,
        owner: &mut Owner,
    ) -> Result<(), ActorProcessingErr> {
        if let AgentMessage::Built(id, result) = message {
            owner.built(id, result.map(|result| *result)).await?;
        }
        owner.look(&myself).await
    }
}

/// An agent as one look finds it.
struct Sight {
    agent: Arc<Agent>,
    deployment: Option<Arc<Deployment>>,
    rows: Vec<Instance>,
}

/// Whether there is anything to do for an agent beside answering questions.
pub fn has_work(agent: &Agent, has_instances: bool, deploying: bool) -> bool {
    let wants_instances = agent.desired == Desired::Run && agent.status != Status::Failed;
    let is_ending = agent.desired == Desired::Delete
        || agent.desired == Desired::Stop && agent.status == Status::Running;
    has_instances || deploying || is_ending || wants_instances && agent.version.is_some()
}

impl Owner {
    /// One step at a time, until there is none.
    async fn look(&mut self, myself: &ActorRef<AgentMessage>) -> Result<(), ActorProcessingErr> {
        loop {
            let Some(sight) = self.sight() else {
                myself.stop(None);
                return Ok(());
            };
            self.stop_stale_build(&sight);
            self.observe(&sight).await;
            self.report_health(&sight).await?;
            self.adopt(&sight).await;
            let Plan { steps, look_again } = self.plan(&sight);
            let waits = steps.iter().all(|step| self.is_under_way(step));
            if waits {
                return self.rest(myself, &sight, look_again);
            }
            for step in
                steps.into_iter().filter(|step| !self.is_under_way(step)).collect::<Vec<_>>()
            {
                info!(agent_id = %self.id, ?step, "agent is not yet as it should be");
                self.take(step, &sight, myself).await?;
            }
        }
    }

    /// Asks every node that has instances of the agent what it sees. One that does not answer is
    /// believed to go on as it was, until it has been silent for too long.
    async fn observe(&mut self, sight: &Sight) {
        let nodes: BTreeSet<NodeId> = sight.rows.iter().map(|row| row.node_id).collect();
        let ask = Ask::Observe { agent: self.id };
        let told = self.world.ask_all(nodes.iter().copied(), &ask, OBSERVED_WITHIN).await;
        let mut told: BTreeMap<NodeId, Vec<Observed>> = told
            .into_iter()
            .filter_map(|(node, told)| {
                let Told::Observed(seen) = told else { return None };
                Some((node, seen))
            })
            .collect();
        let now = self.world.now();
        let mut seen = BTreeMap::new();
        for node in nodes {
            if let Some(observed) = told.remove(&node) {
                self.silent.remove(&node);
                seen.extend(observed.into_iter().map(|one| (one.id, one)));
            } else if !self.is_given_up(node, now) {
                let rows = sight.rows.iter().filter(|row| row.node_id == node);
                seen.extend(rows.map(|row| (row.id, self.believed(row))));
            }
        }
        self.seen = seen;
    }

    /// Tells when the agent's health has changed.
    async fn report_health(&self, sight: &Sight) -> Result<(), ActorProcessingErr> {
        if !sight.agent.is_serving() {
            return Ok(());
        }
        let first = |wanted: fn(&Seen) -> bool| {
            self.seen.values().find(|one| wanted(&one.seen)).map(|one| one.id)
        };
        let ready = first(|seen| matches!(seen, Seen::Ready(_)));
        let sick = first(|seen| matches!(seen, Seen::Sick));
        let now = match (ready, sick) {
            (Some(_), None) => "healthy",
            (Some(_), Some(_)) => "degraded",
            (None, Some(_)) => "unhealthy",
            (None, None) => return Ok(()),
        };
        let known = self.world.directory().read().health.get(&self.id);
        if known.as_ref().map_or("healthy", |known| known.as_str()) == now {
            return Ok(());
        }
        let reason = match sick {
            Some(_) => "an instance does not pass its health check",
            None => "every instance passes its health check",
        };
        let (now, reason) = (now.to_owned(), reason.to_owned());
        let command = Command::ReportHealth { agent: self.id, now, reason, instance: sick };
        self.world.report(self.claim, command).await?;
        Ok(())
    }

    /// Whether a node that does not answer is given up: its instances are replaced.
    fn is_given_up(&mut self, node: NodeId, now: Timestamp) -> bool {
        if self.world.has_left(node) {
            return true;
        }
        if self.world.ports.peers.is_alive(node) {
            // It is slow, or on its way back.
            self.silent.remove(&node);
            return false;
        }
        let since = *self.silent.entry(node).or_insert(now);
        now.since(since) >= self.world.settings.replacement_grace
    }

    /// What an instance of a silent node is taken for.
    fn believed(&self, row: &Instance) -> Observed {
        if let Some(known) = self.seen.get(&row.id) {
            return known.clone();
        }
        let seen = match row.status {
            InstanceStatus::Starting => Seen::Starting(row.started_at),
            InstanceStatus::Running => Seen::Ready(row.ready_at.unwrap_or(row.started_at)),
            InstanceStatus::Draining => Seen::Draining,
            InstanceStatus::Stopped | InstanceStatus::Failed => Seen::Exited,
        };
        Observed { id: row.id, seen, isolation: row.isolation.clone(), ended: Ended::default() }
    }

    /// Takes up the instances that an earlier life of their node had started and whose runtime kept
    /// them.
    async fn adopt(&mut self, sight: &Sight) {
        let provider = self.provider(&sight.agent);
        let adopts = provider.is_some_and(|provider| self.world.ports.runtime.adopts(provider));
        if !adopts {
            return;
        }
        let lost = |row: &&Instance| {
            !self.seen.contains_key(&row.id)
                && !self.adopted.contains(&row.id)
                && !self.world.has_left(row.node_id)
        };
        let lost: Vec<Instance> = sight.rows.iter().filter(lost).cloned().collect();
        for row in lost {
            self.adopted.insert(row.id);
            let ask =
                Ask::Start { claim: self.claim, agent: self.id, instance: row.id, adopt: true };
            let told = self.world.ask_node(row.node_id, ask, ask::ANSWER_WITHIN).await;
            if !matches!(told, Ok(Told::Done)) {
                continue;
            }
            let starting =
                Observed { seen: Seen::Starting(self.world.now()), ..self.believed(&row) };
            self.seen.insert(row.id, starting);
            if row.status == InstanceStatus::Draining {
                // Its calls ended with that life.
                self.tell_drain(row.node_id, row.id, Duration::ZERO).await;
            }
        }
    }

    fn sight(&self) -> Option<Sight> {
        let directory = self.world.directory().read();
        let agent = directory.agents.get(&self.id)?;
        let deployment = directory.deployment(self.id, agent.deployment);
        let rows = directory.instances_of(self.id).map(|row| Instance::clone(row)).collect();
        Some(Sight { agent, deployment, rows })
    }

    fn seen(&self, id: InstanceId) -> Option<Seen> {
        self.seen.get(&id).map(|one| one.seen.clone())
    }

    fn plan(&mut self, sight: &Sight) -> Plan {
        let seen: BTreeMap<InstanceId, Seen> =
            sight.rows.iter().filter_map(|row| Some((row.id, self.seen(row.id)?))).collect();
        let now = self.world.now();
        let ready = seen.values().any(|seen| matches!(seen, Seen::Ready(_)));
        self.lost_since = match sight.agent.is_serving() && !ready {
            true => self.lost_since.or(Some(now)),
            false => None,
        };
        plan::plan(&View {
            agent: &sight.agent,
            deployment: sight.deployment.as_deref(),
            rows: &sight.rows,
            seen: &seen,
            leaving: &self.leaving(sight),
            crashes: &self.crashes,
            lost_since: self.lost_since,
            timing: &self.world.settings.timing,
            now,
        })
    }

    /// Instances of nodes that drain, with the time by which they do.
    fn leaving(&self, sight: &Sight) -> BTreeMap<InstanceId, Timestamp> {
        let directory = self.world.directory().read();
        let drains_by = |row: &Instance| {
            let node = directory.nodes.get(&row.node_id)?;
            (node.status == NodeStatus::Draining).then(|| node.drains_by.unwrap_or(Timestamp::MAX))
        };
        sight.rows.iter().filter_map(|row| Some((row.id, drains_by(row)?))).collect()
    }

    /// Builds and drains are begun once and take their time.
    fn is_under_way(&self, step: &Step) -> bool {
        match step {
            Step::Build(id) => self.build.as_ref().is_some_and(|(building, _)| building == id),
            Step::Drain(id, _) => {
                let told = self.drained_at.get(id);
                let now = self.world.now();
                self.seen(*id) == Some(Seen::Draining)
                    || told.is_some_and(|at| now.since(*at) < DRAINED_AGAIN_AFTER)
            }
            Step::Place { .. } => {
                let now = self.world.now();
                self.no_room_at.is_some_and(|at| now.since(at) < ROOM_LOOKED_FOR_EVERY)
            }
            Step::BeginRollout(_)
            | Step::Verify(_)
            | Step::Promote(_)
            | Step::FailDeployment(..)
            | Step::FailAgent(_)
            | Step::Remove(_)
            | Step::ReportRunning(_)
            | Step::ReportStopped
            | Step::Forget => false,
        }
    }

    /// Nothing to do now: sleep until a deadline, or end if there is nothing to wait for.
    fn rest(
        &mut self,
        myself: &ActorRef<AgentMessage>,
        sight: &Sight,
        look_again: Option<Timestamp>,
    ) -> Result<(), ActorProcessingErr> {
        if let Some(alarm) = self.alarm.take() {
            alarm.abort();
        }
        let deploying = sight.deployment.as_ref().is_some_and(|d| d.status.is_active());
        if let Some(at) = look_again {
            let (me, pause) = (myself.clone(), at.since(self.world.now()));
            self.alarm = Some(detach(async move {
                tokio::time::sleep(pause + Duration::from_millis(1)).await;
                let _ = me.cast(AgentMessage::Look);
            }));
        } else if !has_work(&sight.agent, !sight.rows.is_empty(), deploying) {
            myself.stop(None);
        }
        Ok(())
    }

    async fn take(
        &mut self,
        step: Step,
        sight: &Sight,
        myself: &ActorRef<AgentMessage>,
    ) -> Result<(), ActorProcessingErr> {
        let agent = self.id;
        match step {
            Step::Build(id) | Step::BeginRollout(id) if let Some(failure) = self.lack(sight) => {
                self.report(Command::FailDeployment { agent, id, failure }).await
            }
            Step::Build(id) => self.build(id, sight, myself),
            Step::BeginRollout(id) => {
                self.report(Command::BeginRollout { agent, id, image: None }).await
            }
            Step::Verify(id) => self.report(Command::Verify { agent, id }).await,
            Step::Promote(id) => self.report(Command::Promote { agent, id }).await,
            Step::FailDeployment(id, failure) => {
                self.crashes = Crashes::default();
                self.report(Command::FailDeployment { agent, id, failure }).await
            }
            Step::FailAgent(failure) => {
                self.crashes = Crashes::default();
                self.report(Command::FailAgent { agent, failure }).await
            }
            Step::Place { instances, version, deployment } => {
                self.place(instances, version, deployment, sight).await
            }
            Step::Drain(id, timeout) => self.drain(id, timeout, sight).await,
            Step::Remove(id) => self.remove(id, sight).await,
            Step::ReportRunning(id) => {
                let isolation = self.seen.get(&id).map(|one| one.isolation.clone());
                let status = InstanceStatus::Running;
                self.report(Command::ReportInstance { agent, id, status, isolation }).await
            }
            Step::ReportStopped => self.report(Command::ReportStopped { agent }).await,
            Step::Forget => self.report(Command::ForgetAgent { agent }).await,
        }
    }

    /// Why nothing here could run the newest deployment.
    fn lack(&self, sight: &Sight) -> Option<Failure> {
        let gpu = sight.deployment.as_ref().is_some_and(|d| d.spec.resources.gpu.is_some());
        let provider = self.provider(&sight.agent)?;
        self.world.ports.runtime.lack(provider, gpu)
    }

    async fn report(&self, command: Command) -> Result<(), ActorProcessingErr> {
        self.world.report(self.claim, command).await?;
        Ok(())
    }

    fn build(
        &mut self,
        id: DeploymentId,
        sight: &Sight,
        myself: &ActorRef<AgentMessage>,
    ) -> Result<(), ActorProcessingErr> {
        self.stop_build();
        let Some(deployment) = sight.deployment.as_ref().filter(|d| d.id == id) else {
            return Ok(());
        };
        let provider = self.provider(&sight.agent).ok_or("the agent's cloud is gone")?;
        let request = BuildRequest {
            agent_id: self.id,
            deployment_id: id,
            provider,
            spec: deployment.spec.clone(),
            registry_password: self.registry_password(&deployment.spec.source),
            no_cache: deployment.no_cache,
        };
        let (world, claim) = (Arc::clone(&self.world), self.claim);
        let ended = Telling::when_dropped(myself.clone(), || AgentMessage::Built(id, None));
        let task = detach(async move {
            match build(&world, claim, request).await {
                Some(result) => ended.instead(AgentMessage::Built(id, Some(Box::new(result)))),
                // A pause, so that a log that does not answer is not asked without end.
                None => tokio::time::sleep(Duration::from_secs(1)).await,
            }
        });
        self.build = Some((id, task));
        Ok(())
    }

    async fn built(
        &mut self,
        id: DeploymentId,
        result: Option<Result<Image, Failure>>,
    ) -> Result<(), ActorProcessingErr> {
        // An answer of a build that was called off says nothing about the one that runs.
        if self.build.as_ref().is_some_and(|(building, _)| *building == id) {
            self.build = None;
        }
        let Some(result) = result else { return Ok(()) };
        let agent = self.id;
        let command = match result {
            Ok(image) => Command::BeginRollout { agent, id, image: Some(Box::new(image)) },
            Err(failure) => Command::FailDeployment { agent, id, failure },
        };
        self.report(command).await
    }

    /// A build whose deployment was called off must not go on.
    fn stop_stale_build(&mut self, sight: &Sight) {
        let wanted = sight.deployment.as_ref().filter(|d| d.status.is_active()).map(|d| d.id);
        if self.build.as_ref().is_some_and(|(id, _)| Some(*id) != wanted) {
            self.stop_build();
        }
    }

    fn stop_build(&mut self) {
        if let Some((_, task)) = self.build.take() {
            task.abort();
        }
    }

    fn provider(&self, agent: &Agent) -> Option<Provider> {
        self.world.directory().read().clouds.get(&agent.cloud_id).map(|cloud| cloud.provider)
    }

    async fn place(
        &mut self,
        instances: usize,
        version: u64,
        deployment_id: DeploymentId,
        sight: &Sight,
    ) -> Result<(), ActorProcessingErr> {
        let now = self.world.now();
        let nodes = match self.choose_nodes(&sight.agent, instances, now) {
            Ok(nodes) => nodes,
            // What runs goes on; one more is tried again later.
            Err(_) if sight.agent.is_serving() && sight.agent.version == Some(version) => {
                self.no_room_at = Some(now);
                return Ok(());
            }
            Err(failure) => {
                self.crashes.exited(version, false, now, now, failure);
                return Ok(());
            }
        };
        let row = |node_id| Instance {
            id: self.world.mint(InstanceId::new),
            agent_id: self.id,
            version,
            deployment_id,
            node_id,
            status: InstanceStatus::Starting,
            started_at: now,
            ready_at: None,
            isolation: vec![],
        };
        let mut rows: Vec<Instance> = nodes.into_iter().map(row).collect();
        self.report(Command::PlaceInstances(rows.clone())).await?;
        {
            let directory = self.world.directory().read();
            rows.retain(|row| directory.instance(self.id, row.id).is_some());
        }
        let here = rows.iter().find(|row| row.node_id == self.world.node_id);
        if let Some(Err(failure)) = here.map(|row| self.world.start_request(row)) {
            self.crashes.exited(version, false, now, now, failure);
        }
        self.start(&rows, now).await;
        Ok(())
    }

    /// Has instances started where they have their places.
    async fn start(&mut self, rows: &[Instance], now: Timestamp) {
        let (world, claim, agent) = (Arc::clone(&self.world), self.claim, self.id);
        let start = async |row: &Instance| {
            let ask = Ask::Start { claim, agent, instance: row.id, adopt: false };
            let told = world.ask_node(row.node_id, ask, ask::ANSWER_WITHIN).await;
            (row.node_id, matches!(told, Ok(Told::Done)))
        };
        let mut told = futures::stream::iter(rows.iter().map(start)).buffered(STARTED_AT_ONCE);
        while let Some((node, is_taken)) = told.next().await {
            if is_taken {
                self.avoided.remove(&node);
            } else {
                // The next look finds a row with nothing behind it, and another node for it.
                info!(agent_id = %self.id, %node, "a node did not take an instance");
                self.avoided.insert(node, now);
            }
        }
    }

    /// The nodes for more instances: the pure scheduler's choice among those that answer.
    fn choose_nodes(
        &mut self,
        agent: &Agent,
        instances: usize,
        now: Timestamp,
    ) -> Result<Vec<NodeId>, Failure> {
        self.avoided.retain(|_, at| now.since(*at) < AVOIDED_FOR);
        let world = &self.world;
        let directory = world.directory().read();
        let answers = |id: NodeId| id == world.node_id || world.ports.peers.is_alive(id);
        let usable = |id: NodeId| answers(id) && !self.avoided.contains_key(&id);
        let alone = || {
            let capacity = world.settings.capacity;
            Offer::alone(world.node_id, capacity.cores, capacity.memory_mb)
        };
        let offers = schedule::offers(&directory, usable, alone);
        schedule::choose_all(&offers, schedule::Need::of(&directory, agent), instances)
    }

    fn registry_password(&self, source: &Source) -> Option<Opened> {
        let Source::Docker { credentials: Some(credentials), .. } = source else { return None };
        let place = sealed_place(self.id, "source.credentials.password");
        let agent = self.world.directory().read().agents.get(&self.id)?;
        let sealer = self.world.opener(agent.tenant.org);
        let plain = match sealer.and_then(|sealer| sealer.open(&credentials.password, &place)) {
            Ok(plain) => plain,
            Err(error) => {
                warn!(agent_id = %self.id, %error, "the registry's password can't be opened");
                return None;
            }
        };
        if !credentials.is_template {
            return Some(Opened(plain));
        }
        match self.world.resolved((agent.tenant, agent.cloud_id), &plain) {
            Ok(resolved) => Some(Opened(resolved.into())),
            Err(failure) => {
                warn!(agent_id = %self.id, message = failure.message, "no password for the registry");
                None
            }
        }
    }

    async fn drain(
        &mut self,
        id: InstanceId,
        timeout: Duration,
        sight: &Sight,
    ) -> Result<(), ActorProcessingErr> {
        if let Some(row) = sight.rows.iter().find(|row| row.id == id) {
            self.tell_drain(row.node_id, id, timeout).await;
        }
        let (agent, status) = (self.id, InstanceStatus::Draining);
        self.report(Command::ReportInstance { agent, id, status, isolation: None }).await
    }

    /// The plan repeats itself until the instance says that it drains.
    async fn tell_drain(&mut self, node: NodeId, id: InstanceId, timeout: Duration) {
        let ask = Ask::Drain { claim: self.claim, instance: id, timeout };
        let told = self.world.ask_node(node, ask, ask::ANSWER_WITHIN).await;
        if let (Ok(Told::Done), Some(seen)) = (told, self.seen.get_mut(&id))
            && seen.seen != Seen::Exited
        {
            seen.seen = Seen::Draining;
        }
        self.drained_at.insert(id, self.world.now());
    }

    async fn remove(&mut self, id: InstanceId, sight: &Sight) -> Result<(), ActorProcessingErr> {
        self.drained_at.remove(&id);
        let row = sight.rows.iter().find(|row| row.id == id);
        if let (Some(Observed { ended, .. }), Some(row)) = (self.seen.remove(&id), row) {
            let now = self.world.now();
            let serves = sight.agent.is_serving() && sight.agent.version == Some(row.version);
            if serves && ended.cause.code == IMAGE_PULL_FAILED {
                // Who holds the image does not answer now. It served, so that is no verdict on the agent.
                self.avoided.insert(row.node_id, now);
            } else if !ended.asked {
                let Ended { stayed_up, cause, .. } = ended;
                self.crashes.exited(row.version, stayed_up, row.started_at, now, cause);
            }
            let ask = Ask::Dismiss { claim: self.claim, instances: vec![id] };
            let _ = self.world.ask_node(row.node_id, ask, ask::ANSWER_WITHIN).await;
        }
        self.report(Command::RemoveInstance { agent: self.id, id }).await
    }
}

/// Where a variable's sealed value belongs.
pub fn sealed_place(agent: AgentId, variable: &str) -> String {
    format!("{agent}/{variable}")
}

/// Waits for a builder, builds, and says what came of it; `None` if the leadership was lost.
async fn build(
    world: &Arc<World>,
    claim: Claim,
    request: BuildRequest,
) -> Option<Result<Image, Failure>> {
    let (agent, id) = (request.agent_id, request.deployment_id);
    let _builder = loop {
        if !world.directory().read().has_room_to_build(agent) {
            tokio::time::sleep(BUILD_AGAIN).await;
            continue;
        }
        let builder = world.watch.builders.acquire().await.ok()?;
        match world.report(claim, Command::BeginBuild { agent, id }).await {
            Ok(_) => break builder,
            // The organization has others under way: this node's builder is free for somebody else.
            Err(ProposeError::Rejected(Rejection::QuotaExceeded { .. })) => {
                drop(builder);
                tokio::time::sleep(BUILD_AGAIN).await;
            }
            Err(error) => {
                warn!(agent_id = %agent, %error, "a build could not begin");
                return None;
            }
        }
    };
    let logs = Arc::clone(world);
    let sink = Arc::new(move |channel: Channel, text: String| {
        for part in log_line::split(&text) {
            let level = if channel == Channel::Stderr { "error" } else { "info" };
            let mut line = log_line::plain(logs.now(), Channel::Build, level, part.to_owned());
            line.deployment_id = Some(id);
            logs.ports.logs.append(agent, line);
        }
    });
    let timeout = world.settings.build_timeout;
    let result =
        match tokio::time::timeout(timeout, world.ports.runtime.build(request, sink.clone())).await
        {
            Ok(result) => result,
            Err(_) => Err(Failure::new(
                "BUILD_TIMEOUT",
                format!("the build took longer than {} s; make it smaller", timeout.as_secs()),
            )),
        };
    if let Err(failure) = &result {
        sink(Channel::Stderr, format!("{}: {}", failure.code, failure.message));
    }
    Some(result)
}
