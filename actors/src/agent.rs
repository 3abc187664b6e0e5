//! One actor per agent with something to do, where the agent's home shard is led.
//!
//! It compares what the directory says with what its instances do and takes the steps that
//! [`domain::agent::plan`] names. It keeps no state that matters: after a crash the next look finds
//! the same work. Its counters of crashes begin anew then, which only delays a verdict.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use domain::{
    AgentId, DeploymentId, InstanceId, Timestamp,
    agent::{
        Agent, Desired, Source, Status, Variable,
        plan::{self, Crashes, Plan, Seen, Step, View},
    },
    cloud::Provider,
    deployment::{Deployment, Failure, Image},
    directory::Command,
    instance::{Instance, InstanceStatus},
    machine::Claim,
};
use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef};
use tokio::task::AbortHandle;
use tracing::{info, warn};

use crate::{
    instance::{self, InstanceMessage},
    log_line,
    ports::{BuildRequest, Channel, Opened, StartRequest},
    root::{Told, detach},
    world::World,
};

/// Between looks for room for one more instance of an agent that serves.
const ROOM_LOOKED_FOR_EVERY: Duration = Duration::from_secs(5);

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
    /// Whoever supervises its instances.
    pub root: ActorCell,
}

/// What it remembers between looks.
pub struct Owner {
    world: Arc<World>,
    id: AgentId,
    claim: Claim,
    root: ActorCell,
    crashes: Crashes,
    lost_since: Option<Timestamp>,
    build: Option<(DeploymentId, AbortHandle)>,
    alarm: Option<AbortHandle>,
    has_adopted: bool,
    no_room_at: Option<Timestamp>,
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
        AgentArguments { world, id, claim, root }: AgentArguments,
    ) -> Result<Owner, ActorProcessingErr> {
        myself.cast(AgentMessage::Look)?;
        Ok(Owner {
            world,
            id,
            claim,
            root,
            crashes: Crashes::default(),
            lost_since: None,
            build: None,
            alarm: None,
            has_adopted: false,
            no_room_at: None,
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
                self.gone().await;
                myself.stop(None);
                return Ok(());
            };
            self.stop_stale_build(&sight);
            self.adopt(&sight).await?;
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

    /// Takes up, at the first look, the instances that an earlier life of this node had started and
    /// whose runtime kept them.
    async fn adopt(&mut self, sight: &Sight) -> Result<(), ActorProcessingErr> {
        let provider = self.provider(&sight.agent);
        let adopts = provider.is_some_and(|provider| self.world.ports.runtime.adopts(provider));
        if std::mem::replace(&mut self.has_adopted, true) || !adopts {
            return Ok(());
        }
        for row in sight.rows.iter().filter(|row| self.seen(row.id).is_none()) {
            let request = self.start_request(row.id, row.version, row.deployment_id, &sight.agent);
            let Ok(request) = request else { continue };
            let request = StartRequest { adopt: true, ..request };
            instance::start(&self.world, request, self.root.clone()).await?;
            if let Some(handle) = self.world.watch.instances.get(row.id)
                && row.status == InstanceStatus::Draining
            {
                // Its calls ended with that life.
                let _ = handle.actor.cast(InstanceMessage::Drain(Duration::ZERO));
            }
        }
        Ok(())
    }

    fn sight(&self) -> Option<Sight> {
        let directory = self.world.directory().read();
        let agent = directory.agents.get(&self.id)?;
        let deployment = directory.deployment(self.id, agent.deployment);
        let rows = directory.instances_of(self.id).map(|row| Instance::clone(row)).collect();
        Some(Sight { agent, deployment, rows })
    }

    fn seen(&self, id: InstanceId) -> Option<Seen> {
        let handle = self.world.watch.instances.get(id)?;
        let alive = matches!(
            handle.actor.get_status(),
            ractor::ActorStatus::Unstarted
                | ractor::ActorStatus::Starting
                | ractor::ActorStatus::Running
                | ractor::ActorStatus::Upgrading
        );
        Some(if alive { handle.seen() } else { Seen::Exited })
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
            crashes: &self.crashes,
            lost_since: self.lost_since,
            timing: &self.world.settings.timing,
            now,
        })
    }

    /// Builds and drains are begun once and take their time.
    fn is_under_way(&self, step: &Step) -> bool {
        match step {
            Step::Build(id) => self.build.as_ref().is_some_and(|(building, _)| building == id),
            Step::Drain(id, _) => self.seen(*id) == Some(Seen::Draining),
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
            Step::Promote(id) => {
                self.report(Command::Promote { agent, id }).await?;
                self.prune_images();
                Ok(())
            }
            Step::FailDeployment(id, failure) => {
                self.crashes = Crashes::default();
                self.report(Command::FailDeployment { agent, id, failure }).await
            }
            Step::FailAgent(failure) => {
                self.crashes = Crashes::default();
                self.report(Command::FailAgent { agent, failure }).await
            }
            Step::Place { version, deployment } => self.place(version, deployment, sight).await,
            Step::Drain(id, timeout) => self.drain(id, timeout).await,
            Step::Remove(id) => self.remove(id, sight).await,
            Step::ReportRunning(id) => {
                let isolation = self.world.watch.instances.get(id).map(|one| one.isolation());
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
        let ended = Told::when_dropped(myself.clone(), || AgentMessage::Built(id, None));
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
        version: u64,
        deployment_id: DeploymentId,
        sight: &Sight,
    ) -> Result<(), ActorProcessingErr> {
        if let Some(failure) = self.lacks_room(&sight.agent) {
            let now = self.world.now();
            if sight.agent.is_serving() && sight.agent.version == Some(version) {
                // What runs goes on; one more is tried again later.
                self.no_room_at = Some(now);
            } else {
                self.crashes.exited(version, false, now, failure);
            }
            return Ok(());
        }
        let id = self.world.mint(InstanceId::new);
        let row = Instance {
            id,
            agent_id: self.id,
            version,
            deployment_id,
            node_id: self.world.node_id,
            status: InstanceStatus::Starting,
            started_at: self.world.now(),
            ready_at: None,
            isolation: vec![],
        };
        self.report(Command::PlaceInstance(Box::new(row))).await?;
        let placed = self.world.directory().read().instance(self.id, id).is_some();
        if !placed {
            return Ok(());
        }
        match self.start_request(id, version, deployment_id, &sight.agent) {
            Ok(request) => instance::start(&self.world, request, self.root.clone()).await,
            Err(failure) => {
                self.crashes.exited(version, false, self.world.now(), failure);
                Ok(())
            }
        }
    }

    /// Whether one more instance would be more than this node may promise.
    fn lacks_room(&self, agent: &Agent) -> Option<Failure> {
        let capacity = self.world.settings.capacity;
        let directory = self.world.directory().read();
        let here = directory.instances.rows().filter(|(_, row)| row.node_id == self.world.node_id);
        let promised = here.filter_map(|(_, row)| directory.agents.get(&row.agent_id));
        let all = promised.map(|other| other.spec.resources.clone());
        let (cores, memory_mb) =
            all.chain([agent.spec.resources.clone()]).fold((0, 0), |sum, one| {
                (sum.0 + u64::from(one.cpu), sum.1 + u64::from(one.memory_mb))
            });
        let what = match () {
            () if memory_mb > capacity.memory_mb => "memory",
            () if cores > capacity.cores => "processors",
            () => return None,
        };
        let message = format!(
            "no node of this cloud has {what} left for one more instance; lower resources, or stop other agents"
        );
        Some(Failure::new("NO_CAPACITY", message))
    }

    fn start_request(
        &self,
        instance_id: InstanceId,
        version: u64,
        deployment_id: DeploymentId,
        agent: &Agent,
    ) -> Result<StartRequest, Failure> {
        let lost = |what: &str| Failure::new("INTERNAL_ERROR", format!("{what} is gone"));
        let provider = self.provider(agent).ok_or_else(|| lost("the agent's cloud"))?;
        let (spec, image) = {
            let directory = self.world.directory().read();
            let deployment = directory.deployment(self.id, deployment_id);
            let version = directory.version(self.id, version);
            let from_deployment = deployment.map(|d| (d.spec.clone(), d.image.clone()));
            let from_version = version.map(|v| (v.spec.clone(), Some(v.image.clone())));
            from_deployment.or(from_version).ok_or_else(|| lost("the deployment"))?
        };
        let image = image.ok_or_else(|| lost("the image"))?;
        let mut environment = self.opened(&spec.environment)?;
        environment.insert("ROOST_AGENT_ID".to_owned(), self.id.to_string());
        environment.insert("ROOST_INSTANCE_ID".to_owned(), instance_id.to_string());
        environment.insert("ROOST_VERSION".to_owned(), version.to_string());
        Ok(StartRequest {
            agent_id: self.id,
            instance_id,
            version,
            provider,
            image,
            resources: spec.resources,
            environment,
            adopt: false,
        })
    }

    fn registry_password(&self, source: &Source) -> Option<Opened> {
        let Source::Docker { credentials: Some(credentials), .. } = source else { return None };
        let place = sealed_place(self.id, "source.credentials.password");
        match self.world.sealer.open(&credentials.password, &place) {
            Ok(plain) => Some(Opened(plain)),
            Err(error) => {
                warn!(agent_id = %self.id, %error, "the registry's password can't be opened");
                None
            }
        }
    }

    fn opened(
        &self,
        variables: &BTreeMap<String, Variable>,
    ) -> Result<BTreeMap<String, String>, Failure> {
        let open = |name: &str, value: &Variable| match value {
            Variable::Plain(text) => Ok(text.clone()),
            Variable::Unchanged => Ok(String::new()),
            Variable::Sealed(sealed) => {
                let plain = self.world.sealer.open(sealed, &sealed_place(self.id, name));
                plain.map(|plain| plain.to_string()).map_err(|error| {
                    Failure::new("INTERNAL_ERROR", format!("{error}; set {name} again"))
                })
            }
        };
        variables.iter().map(|(name, value)| Ok((name.clone(), open(name, value)?))).collect()
    }

    async fn drain(&self, id: InstanceId, timeout: Duration) -> Result<(), ActorProcessingErr> {
        if let Some(handle) = self.world.watch.instances.get(id) {
            // The plan repeats itself until the instance says that it drains.
            let _ = handle.actor.cast(InstanceMessage::Drain(timeout));
            handle.mark_draining();
        }
        let (agent, status) = (self.id, InstanceStatus::Draining);
        self.report(Command::ReportInstance { agent, id, status, isolation: None }).await
    }

    async fn remove(&mut self, id: InstanceId, sight: &Sight) -> Result<(), ActorProcessingErr> {
        let row = sight.rows.iter().find(|row| row.id == id);
        if let (Some(handle), Some(row)) = (self.world.watch.instances.remove(id), row) {
            let ended = handle.ended();
            if !ended.asked {
                let now = self.world.now();
                self.crashes.exited(row.version, ended.stayed_up, now, ended.cause);
            }
        }
        self.report(Command::RemoveInstance { agent: self.id, id }).await
    }

    /// Images that no kept version, no deployment on its way and no instance needs any more go.
    fn prune_images(&self) {
        let kept: Vec<String> = {
            let directory = self.world.directory().read();
            let versions = directory.versions_of(self.id).map(|row| row.image.reference.clone());
            let running: Vec<_> =
                directory.instances_of(self.id).map(|row| row.deployment_id).collect();
            let needed = directory
                .deployments_of(self.id)
                .filter(|row| row.status.is_active() || running.contains(&row.id));
            let needed = needed.flat_map(|row| {
                let built = row.image.as_ref().map(|image| image.reference.clone());
                [built, Some(format!("{}/{}", row.agent_id, row.id))]
            });
            versions.chain(needed.flatten()).collect()
        };
        let (world, id) = (Arc::clone(&self.world), self.id);
        // The old instances are not to wait for it.
        detach(async move { world.ports.runtime.forget_images(id, kept).await });
    }

    /// The row is gone: so goes what belonged to it.
    async fn gone(&self) {
        self.world.routes.forget(self.id);
        self.world.meter.forget(self.id);
        self.world.ports.logs.forget(self.id);
        self.world.ports.series.forget(self.id);
        self.world.ports.runtime.forget_images(self.id, vec![]).await;
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
    let _builder = world.watch.builders.acquire().await.ok()?;
    if let Err(error) = world.report(claim, Command::BeginBuild { agent, id }).await {
        warn!(agent_id = %agent, %error, "a build could not begin");
        return None;
    }
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
