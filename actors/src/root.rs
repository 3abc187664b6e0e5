//! The root of the supervision tree: starts actors where there is work and this node leads, wakes
//! them when something changed, and starts them again with a growing pause when they fall.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use domain::{
    AgentId, DeliveryId, JobId, WebhookId,
    event::{DirectoryEvent, ShardEvent},
    idempotency::Keyed,
    machine::Claim,
    shard::Command,
};
use ractor::{Actor, ActorCell, ActorId, ActorProcessingErr, ActorRef, SupervisionEvent};
use tokio::{
    sync::{Notify, Semaphore},
    task::AbortHandle,
};
use tracing::{error, warn};

use crate::{
    agent::{self, AgentActor, AgentArguments, AgentMessage},
    ask::{self, Ask, Told as Answer},
    call::invoke,
    instance::Instances,
    job::{JobActor, JobArguments, JobMessage},
    meter::Gauges,
    ports::Observer,
    relay::Bells,
    route::Slot,
    webhook::{WebhookActor, WebhookArguments, WebhookMessage},
    world::World,
};

/// Pauses before a fallen actor is started again.
const RESTART_PAUSES: [Duration; 6] = [
    Duration::from_millis(100),
    Duration::from_secs(1),
    Duration::from_secs(2),
    Duration::from_secs(5),
    Duration::from_secs(10),
    Duration::from_secs(30),
];
/// Job actors at once; further jobs wait in the log.
const JOB_ACTORS_MAX: usize = 2000;
/// Job actors at once for one agent, so that one that is not coming up starves no other.
const JOB_ACTORS_PER_AGENT: usize = 200;

/// Sweeps of a shard in a row, each of which forgets some hundreds of rows.
const SWEEPS_AT_ONCE: usize = 20;

/// Things waited for above which those that nobody waits for any more are forgotten.
const WAITERS_PRUNED_ABOVE: usize = 10_000;

/// Runs a task outside of any mailbox. The only place that spawns; whoever holds the handle may end
/// the task, and a node that stops ends all of them.
pub fn detach(task: impl Future<Output = ()> + Send + 'static) -> AbortHandle {
    tokio::spawn(task).abort_handle()
}

/// Tells an actor something when a task ends, however it ends: a task that panicked or was aborted
/// must not leave its actor waiting.
pub(crate) struct Told<M: ractor::Message> {
    actor: ActorRef<M>,
    message: Option<M>,
}

impl<M: ractor::Message> Told<M> {
    pub(crate) fn when_dropped(actor: ActorRef<M>, message: impl FnOnce() -> M) -> Self {
        Self { actor, message: Some(message()) }
    }

    /// Something better is told instead.
    pub(crate) fn instead(mut self, message: M) {
        self.message = Some(message);
    }
}

impl<M: ractor::Message> Drop for Told<M> {
    fn drop(&mut self) {
        if let Some(message) = self.message.take() {
            // The actor may have ended first.
            let _ = self.actor.cast(message);
        }
    }
}

/// A thing that somebody may wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Thing {
    /// An agent's record.
    Agent(AgentId),
    /// A job.
    Job(JobId),
}

#[derive(Default)]
struct Touched {
    agents: BTreeSet<AgentId>,
    /// Agents whose instances moved here: their owner wants to know.
    reports: BTreeSet<AgentId>,
    gone: BTreeSet<AgentId>,
    /// Agents with another live version than before.
    live: BTreeSet<AgentId>,
    /// Something is wanted of a node that was not before.
    nodes: bool,
    jobs: BTreeSet<(u16, JobId)>,
    /// Webhooks, with the deliveries that moved.
    hooks: BTreeMap<WebhookId, Vec<DeliveryId>>,
}

/// What changed and who waits for it: between the log and the actors.
pub struct Watch {
    touched: Mutex<Touched>,
    something: Notify,
    waiters: Mutex<HashMap<Thing, Weak<Notify>>>,
    /// Instances of this node.
    pub instances: Instances,
    /// Builders of this node.
    pub builders: Semaphore,
    /// Slots taken for jobs whose first attempt was committed with them.
    pub handover: Mutex<HashMap<JobId, Slot>>,
    root: Mutex<Option<ActorCell>>,
    /// Rings when there is something to tell.
    pub bells: Bells,
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Watch {
    /// With so many builders.
    pub fn new(builders: usize) -> Arc<Self> {
        Arc::new(Self {
            touched: Mutex::default(),
            something: Notify::new(),
            waiters: Mutex::default(),
            instances: Instances::default(),
            builders: Semaphore::new(builders),
            handover: Mutex::default(),
            root: Mutex::default(),
            bells: Bells::default(),
        })
    }

    /// Whoever supervises instances, once it is there.
    pub fn root(&self) -> Option<ActorCell> {
        lock(&self.root).clone()
    }

    /// An instance of this node has moved: its agent's owner wants to know, wherever that is.
    pub fn report(&self, id: AgentId) {
        lock(&self.touched).reports.insert(id);
        self.touch_agent(id);
    }

    /// Nothing is left of an agent but what this node keeps of it.
    fn lose_agent(&self, id: AgentId) {
        lock(&self.touched).gone.insert(id);
        self.something.notify_one();
    }

    /// An agent may have something to do.
    pub fn touch_agent(&self, id: AgentId) {
        lock(&self.touched).agents.insert(id);
        self.something.notify_one();
        self.wake(Thing::Agent(id));
    }

    fn touch_hook(&self, id: WebhookId, delivery: Option<DeliveryId>) {
        lock(&self.touched).hooks.entry(id).or_default().extend(delivery);
        self.something.notify_one();
    }

    fn touch_job(&self, shard: u16, id: JobId) {
        lock(&self.touched).jobs.insert((shard, id));
        self.something.notify_one();
    }

    /// Wakes when the thing changes. Ask before looking, so that no change is missed.
    pub fn subscribe(&self, thing: Thing) -> Arc<Notify> {
        let mut waiters = lock(&self.waiters);
        if waiters.len() > WAITERS_PRUNED_ABOVE {
            waiters.retain(|_, waiter| waiter.strong_count() > 0);
        }
        if let Some(notify) = waiters.get(&thing).and_then(Weak::upgrade) {
            return notify;
        }
        let notify = Arc::new(Notify::new());
        waiters.insert(thing, Arc::downgrade(&notify));
        notify
    }

    fn wake(&self, thing: Thing) {
        let mut waiters = lock(&self.waiters);
        match waiters.get(&thing).map(Weak::upgrade) {
            Some(Some(notify)) => notify.notify_waiters(),
            Some(None) => {
                waiters.remove(&thing);
            }
            None => {}
        }
    }

    fn take(&self) -> Touched {
        std::mem::take(&mut *lock(&self.touched))
    }
}

fn agent_of(event: &DirectoryEvent) -> Option<AgentId> {
    use DirectoryEvent as E;
    match event {
        E::AgentCreated(row) | E::AgentUpdated(row) => Some(row.id),
        E::AgentDesired { id, .. } | E::AgentMoved { id, .. } | E::AgentDeleted { id, .. } => {
            Some(*id)
        }
        E::AgentGone(id) => Some(*id),
        E::DeploymentQueued(row) | E::DeploymentWaits(row) => Some(row.agent_id),
        E::DeploymentMoved { agent_id, .. }
        | E::DeploymentUnblocked { agent_id }
        | E::ImageBuilt { agent_id, .. }
        | E::VersionLive { agent_id, .. }
        | E::InstanceMoved { agent_id, .. }
        | E::InstanceGone { agent_id, .. } => Some(*agent_id),
        E::InstancePlaced(row) => Some(row.agent_id),
        E::ShardTaken(_)
        | E::ShardLed { .. }
        | E::NodePut(_)
        | E::JoinTokenPut(_)
        | E::JoinTokenGone(_)
        | E::DataKeyPut { .. }
        | E::GossipKeyTurned(_)
        | E::SessionEnded { .. }
        | E::SessionForgotten(_)
        | E::AutopilotPut(_)
        | E::OrganizationPut(_)
        | E::UserPut(_)
        | E::UserGone(_)
        | E::InvitationPut(_)
        | E::InvitationGone(_)
        | E::ApiKeyPut(_)
        | E::ApiKeyGone(_)
        | E::ApplicationPut(_)
        | E::ApplicationGone(_)
        | E::SecretPut(_)
        | E::SecretGone(_)
        | E::SigningKeyPut(_)
        | E::WebhookPut(_)
        | E::WebhookGone(_)
        | E::WebhookDisabled { .. }
        | E::HealthChanged { .. }
        | E::Told(_)
        | E::ToldOf(_)
        | E::CloudPut(_)
        | E::CloudGone(_)
        | E::UploadPut(_)
        | E::UploadGone(_)
        | E::KeysForgotten(_) => None,
    }
}

impl Observer for Watch {
    fn directory(&self, events: &[DirectoryEvent]) {
        self.bells.ring(None);
        for event in events {
            if let DirectoryEvent::AgentGone(id) = event {
                self.lose_agent(*id);
            }
            if matches!(event, DirectoryEvent::NodePut(_)) {
                lock(&self.touched).nodes = true;
                self.something.notify_one();
            }
            if let DirectoryEvent::VersionLive { agent_id, .. } = event {
                lock(&self.touched).live.insert(*agent_id);
            }
            if let DirectoryEvent::WebhookPut(row) = event {
                self.touch_hook(row.id, None);
            }
            if let DirectoryEvent::WebhookGone(id) = event {
                self.touch_hook(*id, None);
            }
            if let Some(id) = agent_of(event) {
                self.touch_agent(id);
            }
        }
    }

    fn shard(&self, shard: u16, events: &[ShardEvent]) {
        for event in events {
            match event {
                ShardEvent::JobAccepted(job) | ShardEvent::JobMoved(job) => {
                    self.touch_job(shard, job.id);
                    self.wake(Thing::Job(job.id));
                }
                ShardEvent::DeliveryQueued(row)
                | ShardEvent::DeliveryTried(row)
                | ShardEvent::DeliveryEnded(row)
                | ShardEvent::DeliveryAgain(row) => self.touch_hook(row.webhook, Some(row.id)),
                ShardEvent::JobFinished(job) => {
                    self.bells.ring(Some(shard));
                    self.touch_job(shard, job.id);
                    self.wake(Thing::Job(job.id));
                }
                ShardEvent::JobGone(_)
                | ShardEvent::CallBegun { .. }
                | ShardEvent::CallEnded { .. }
                | ShardEvent::CallWithdrawn(_)
                | ShardEvent::SessionPut(_)
                | ShardEvent::SessionGone(_)
                | ShardEvent::CodePut(_)
                | ShardEvent::ThrottlePut { .. }
                | ShardEvent::ThrottleGone(_)
                | ShardEvent::UsagePut { .. }
                | ShardEvent::Audited(_)
                | ShardEvent::EventKept(_)
                | ShardEvent::HookGone(_)
                | ShardEvent::Told(_)
                | ShardEvent::ToldOf(_)
                | ShardEvent::Swept(_) => {}
            }
        }
    }
}

/// What wakes the root.
pub enum RootMessage {
    /// Something was touched.
    Look,
    /// Look at everything, whatever was touched.
    Sweep,
    /// This node leads other shards than before.
    Leadership,
    /// A fallen actor's pause is over.
    Again(Named),
}

/// Whom an actor is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Named {
    /// An agent.
    Agent(AgentId),
    /// A job.
    Job(u16, JobId),
    /// A webhook.
    Webhook(WebhookId),
}

/// The root.
pub struct Root;

/// Whom the root looks after.
pub struct Children {
    world: Arc<World>,
    agents: BTreeMap<AgentId, ActorRef<AgentMessage>>,
    jobs: BTreeMap<JobId, (AgentId, ActorRef<JobMessage>)>,
    jobs_of: HashMap<AgentId, usize>,
    hooks: BTreeMap<WebhookId, ActorRef<WebhookMessage>>,
    names: HashMap<ActorId, Named>,
    falls: BTreeMap<Named, usize>,
    /// In whose name each actor acts.
    claims: BTreeMap<Named, Claim>,
    backlog: bool,
}

impl Actor for Root {
    type Msg = RootMessage;
    type State = Children;
    type Arguments = Arc<World>;

    async fn pre_start(
        &self,
        myself: ActorRef<RootMessage>,
        world: Arc<World>,
    ) -> Result<Children, ActorProcessingErr> {
        *lock(&world.watch.root) = Some(myself.get_cell());
        let (mut leading, me) = (world.ports.ledger.leading(), myself.clone());
        detach(async move {
            while leading.changed().await.is_ok() {
                if me.cast(RootMessage::Leadership).is_err() {
                    return;
                }
            }
        });
        let (watch, me) = (Arc::clone(&world.watch), myself.clone());
        detach(async move {
            loop {
                watch.something.notified().await;
                if me.cast(RootMessage::Look).is_err() {
                    return;
                }
            }
        });
        let every = world.settings.sweep_every;
        detach(async move {
            while myself.cast(RootMessage::Sweep).is_ok() {
                tokio::time::sleep(every).await;
            }
        });
        Ok(Children {
            world,
            agents: BTreeMap::new(),
            jobs: BTreeMap::new(),
            jobs_of: HashMap::new(),
            hooks: BTreeMap::new(),
            names: HashMap::new(),
            falls: BTreeMap::new(),
            claims: BTreeMap::new(),
            backlog: false,
        })
    }

    async fn handle(
        &self,
        myself: ActorRef<RootMessage>,
        message: RootMessage,
        children: &mut Children,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            RootMessage::Look => children.look(&myself).await,
            RootMessage::Sweep => children.sweep(&myself).await,
            RootMessage::Leadership => children.follow_leadership(&myself).await,
            RootMessage::Again(Named::Agent(id)) => children.wake_agent(id, &myself).await,
            RootMessage::Again(Named::Job(shard, id)) => {
                children.wake_job(shard, id, &myself).await;
            }
            RootMessage::Again(Named::Webhook(id)) => {
                children.wake_hook(id, vec![], &myself).await;
            }
        }
        Ok(())
    }

    async fn handle_supervisor_evt(
        &self,
        myself: ActorRef<RootMessage>,
        event: SupervisionEvent,
        children: &mut Children,
    ) -> Result<(), ActorProcessingErr> {
        match event {
            SupervisionEvent::ActorTerminated(cell, ..) => {
                if let Some(name) = children.left(cell.get_id()) {
                    children.falls.remove(&name);
                    children.after(name);
                }
            }
            SupervisionEvent::ActorFailed(cell, reason) => {
                if let Some(name) = children.left(cell.get_id()) {
                    children.fell(name, &reason, &myself);
                }
            }
            SupervisionEvent::ActorStarted(_) | SupervisionEvent::ProcessGroupChanged(_) => {}
        }
        Ok(())
    }
}

impl Children {
    async fn look(&mut self, myself: &ActorRef<RootMessage>) {
        let Touched { agents, reports, gone, live, nodes, jobs, hooks } = self.world.watch.take();
        if nodes {
            self.sweep(myself).await;
        }
        for id in agents {
            self.world.sync_routes(id);
            self.wake_agent(id, myself).await;
        }
        for id in reports {
            self.tell_owner(id);
        }
        for id in gone {
            self.forget(id);
        }
        for id in live {
            self.world.tend_images(id);
        }
        for (shard, id) in jobs {
            self.wake_job(shard, id, myself).await;
        }
        for (id, deliveries) in hooks {
            self.wake_hook(id, deliveries, myself).await;
        }
        if self.backlog {
            self.refill(myself).await;
        }
    }

    /// Another node owns the agent: it is to look at its instances.
    fn tell_owner(&self, id: AgentId) {
        let world = Arc::clone(&self.world);
        let shard = world.home_of(id);
        let Some(owner) = world.owner(shard).filter(|owner| *owner != world.node_id) else {
            return;
        };
        detach(async move {
            // One that does not hear looks by itself at its next sweep.
            let _ = world.ask_node(owner, Ask::Touch { agent: id }, ask::ANSWER_WITHIN).await;
        });
    }

    /// The row is gone: so goes what belonged to it.
    fn forget(&self, id: AgentId) {
        let world = Arc::clone(&self.world);
        world.routes.forget(id);
        world.meter.forget(id);
        world.copied.forget(id);
        detach(async move {
            world.ports.logs.forget(id);
            world.ports.series.forget(id);
            world.ports.runtime.forget_images(id, vec![]).await;
        });
    }

    /// Leaderships have moved: actors of shards that are led elsewhere, or in another term, end;
    /// those of new ones start.
    async fn follow_leadership(&mut self, myself: &ActorRef<RootMessage>) {
        let claims: Vec<(Named, Option<Claim>)> = self
            .claims
            .iter()
            .map(|(name, claim)| (*name, self.world.claim(claim.shard).filter(|now| now == claim)))
            .collect();
        for (name, _) in claims.into_iter().filter(|(_, claim)| claim.is_none()) {
            self.claims.remove(&name);
            match name {
                Named::Agent(id) => {
                    if let Some(actor) = self.agents.remove(&id) {
                        self.names.remove(&actor.get_id());
                        actor.stop(None);
                    }
                }
                Named::Webhook(id) => {
                    if let Some(actor) = self.hooks.remove(&id) {
                        self.names.remove(&actor.get_id());
                        actor.stop(None);
                    }
                }
                Named::Job(_, id) => {
                    if let Some((_, actor)) = self.jobs.get(&id).cloned() {
                        self.names.remove(&actor.get_id());
                        self.forget_job(id);
                        actor.stop(None);
                    }
                }
            }
        }
        self.sweep(myself).await;
    }

    async fn sweep(&mut self, myself: &ActorRef<RootMessage>) {
        for id in self.world.routes.agents() {
            self.world.sync_routes(id);
        }
        self.keep_metrics();
        self.observe_uptime();
        let with_work: Vec<AgentId> = {
            let directory = self.world.directory().read();
            let with_instances: BTreeSet<u128> =
                directory.instances.rows().map(|((agent, _), _)| *agent).collect();
            let has_work = |agent: &domain::agent::Agent| {
                let deploying = directory.is_deploying(agent);
                agent::has_work(agent, with_instances.contains(&agent.id.0), deploying)
            };
            let rows = directory.agents.rows().filter(|(_, agent)| has_work(agent));
            rows.map(|(id, _)| *id).collect()
        };
        for id in with_work {
            self.wake_agent(id, myself).await;
        }
        self.refill(myself).await;
        for id in self.hooks_with_work() {
            self.wake_hook(id, vec![], myself).await;
        }
        self.sweep_shards();
    }

    /// Lets the groups that this node leads forget what is old enough.
    fn sweep_shards(&self) {
        let world = Arc::clone(&self.world);
        let now = world.now();
        detach(async move {
            let leading = world.ports.ledger.leading().borrow().clone();
            for shard in leading.into_keys() {
                let Some(claim) = world.claim(shard) else { continue };
                for _ in 0..SWEEPS_AT_ONCE {
                    let due = world.ports.ledger.shard(shard).read().has_expired(now);
                    if !due
                        || world.ask_shard(shard, Command::Sweep, None, Some(claim)).await.is_err()
                    {
                        break;
                    }
                }
                end_lost_calls(&world, claim).await;
            }
            // One node is enough for this.
            let leads = world.ports.ledger.leads_directory();
            if leads && !world.directory().read().keys.expired(now).is_empty() {
                let _ = world.ask(domain::directory::Command::Sweep, None).await;
            }
        });
    }

    fn observe_uptime(&self) {
        let world = &self.world;
        let serving: Vec<(AgentId, u64)> = {
            let directory = world.directory().read();
            let agents = directory.agents.rows().filter(|(_, agent)| agent.is_serving());
            agents.map(|(id, agent)| (*id, u64::from(agent.spec.resources.cpu))).collect()
        };
        let elapsed = world.settings.sweep_every;
        let mut used: HashMap<AgentId, (u64, u64)> = HashMap::new();
        for handle in world.watch.instances.handles() {
            let (memory, cpu) = handle.usage();
            let sum = used.entry(handle.agent_id).or_default();
            *sum = (sum.0 + memory, sum.1 + cpu);
        }
        let millis = u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX);
        for (id, cores) in serving {
            let here = world.routes.pulses(id).len() as u64;
            let (memory_bytes, cpu_ms) = used.get(&id).copied().unwrap_or_default();
            let use_here = Gauges {
                memory_bytes,
                cpu_ms,
                cpu_allowed_ms: here * cores * millis,
                ..Gauges::default()
            };
            // The owner alone counts instances and time up; everybody what runs on it.
            let shard = world.home_of(id);
            let look = match world.claim(shard) {
                Some(_) => Gauges::look(world.routes.ready(id) as u64, elapsed),
                None if here == 0 => continue,
                None => Gauges::default(),
            };
            let Gauges { memory_bytes, cpu_ms, cpu_allowed_ms, .. } = use_here;
            world.meter.observe(
                id,
                Gauges { memory_bytes, cpu_ms, cpu_allowed_ms, ..look },
                world.now(),
            );
        }
    }

    fn keep_metrics(&self) {
        for (agent, at, bucket) in self.world.meter.close(self.world.now()) {
            self.world.ports.series.put(agent, at, bucket);
        }
    }

    /// Wakes an agent's actor, or starts it if there is work and this node leads its shard.
    async fn wake_agent(&mut self, id: AgentId, myself: &ActorRef<RootMessage>) {
        if let Some(actor) = self.agents.get(&id) {
            let _ = actor.cast(AgentMessage::Look);
            return;
        }
        let shard = self.world.home_of(id);
        let Some(claim) = self.world.claim(shard) else { return };
        let needed = {
            let directory = self.world.directory().read();
            directory.agents.get(&id).is_some_and(|agent| {
                let deploying = directory.is_deploying(&agent);
                agent::has_work(&agent, directory.instances_of(id).next().is_some(), deploying)
            })
        };
        if !needed {
            return;
        }
        let world = Arc::clone(&self.world);
        let arguments = AgentArguments { world, id, claim };
        match Actor::spawn_linked(None, AgentActor, arguments, myself.get_cell()).await {
            Ok((actor, _)) => {
                self.names.insert(actor.get_id(), Named::Agent(id));
                self.claims.insert(Named::Agent(id), claim);
                self.agents.insert(id, actor);
            }
            Err(error) => error!(agent_id = %id, %error, "an agent's actor did not start"),
        }
    }

    /// Webhooks whose shards are led here and that have deliveries on their way, but no actor.
    fn hooks_with_work(&self) -> Vec<WebhookId> {
        let leading = self.world.ports.ledger.leading().borrow().clone();
        let mut found = vec![];
        for shard in leading.into_keys() {
            let state = self.world.ports.ledger.shard(shard).read();
            let mut next = state.deliveries.rows().next().map(|(key, _)| key.0);
            while let Some(hook) = next {
                found.push(WebhookId(hook));
                let beyond = hook.checked_add(1).map(|next| (next, DeliveryId(0)));
                next = beyond
                    .and_then(|beyond| state.deliveries.rows_from(beyond).next())
                    .map(|(key, _)| key.0);
            }
        }
        found.retain(|id| !self.hooks.contains_key(id));
        found
    }

    /// Wakes a webhook's actor, or starts it if something is on its way and this node leads its shard.
    async fn wake_hook(
        &mut self,
        id: WebhookId,
        deliveries: Vec<DeliveryId>,
        myself: &ActorRef<RootMessage>,
    ) {
        if let Some(actor) = self.hooks.get(&id) {
            let _ = actor.cast(WebhookMessage::Look(deliveries));
            return;
        }
        let shard = self.world.home_of(id);
        let Some(claim) = self.world.claim(shard) else { return };
        let has_work = self.world.ports.ledger.shard(shard).read().pending_of(id).next().is_some();
        if !has_work {
            return;
        }
        let arguments = WebhookArguments { world: Arc::clone(&self.world), id, claim };
        match Actor::spawn_linked(None, WebhookActor, arguments, myself.get_cell()).await {
            Ok((actor, _)) => {
                self.names.insert(actor.get_id(), Named::Webhook(id));
                self.claims.insert(Named::Webhook(id), claim);
                self.hooks.insert(id, actor);
            }
            Err(error) => error!(webhook_id = %id, %error, "a webhook's actor did not start"),
        }
    }

    async fn wake_job(&mut self, shard: u16, id: JobId, myself: &ActorRef<RootMessage>) {
        if let Some((_, actor)) = self.jobs.get(&id) {
            let _ = actor.cast(JobMessage::Look);
            return;
        }
        let Some(claim) = self.world.claim(shard) else { return };
        let row = self.world.ports.ledger.shard(shard).read().jobs.get(&id);
        let Some(agent) = row.map(|row| row.agent_id) else { return };
        // A job that holds a slot already must go on: nobody else gives the slot back.
        let holds_slot = lock(&self.world.watch.handover).contains_key(&id);
        if !holds_slot && !self.has_room(agent) {
            self.backlog = true;
            return;
        }
        let arguments = JobArguments { world: Arc::clone(&self.world), id, claim };
        match Actor::spawn_linked(None, JobActor, arguments, myself.get_cell()).await {
            Ok((actor, _)) => {
                self.names.insert(actor.get_id(), Named::Job(shard, id));
                self.claims.insert(Named::Job(shard, id), claim);
                self.jobs.insert(id, (agent, actor));
                *self.jobs_of.entry(agent).or_default() += 1;
            }
            Err(error) => error!(job_id = %id, %error, "a job's actor did not start"),
        }
    }

    fn has_room(&self, agent: AgentId) -> bool {
        self.jobs.len() < JOB_ACTORS_MAX
            && self.jobs_of.get(&agent).is_none_or(|jobs| *jobs < JOB_ACTORS_PER_AGENT)
    }

    /// Starts actors of jobs that have none yet, oldest first.
    async fn refill(&mut self, myself: &ActorRef<RootMessage>) {
        let room = JOB_ACTORS_MAX.saturating_sub(self.jobs.len());
        if room == 0 {
            return;
        }
        let mut missing = vec![];
        let leading = self.world.ports.ledger.leading().borrow().clone();
        for shard in leading.into_keys() {
            let state = self.world.ports.ledger.shard(shard).read();
            let waiting = state
                .jobs
                .rows()
                .filter(|(id, job)| !self.jobs.contains_key(id) && self.has_room(job.agent_id));
            missing.extend(waiting.take(room).map(|(id, _)| (shard, *id)));
        }
        self.backlog = !missing.is_empty();
        missing.sort_by_key(|(_, id)| *id);
        for (shard, id) in missing.into_iter().take(room) {
            self.wake_job(shard, id, myself).await;
        }
    }

    fn left(&mut self, actor: ActorId) -> Option<Named> {
        let name = self.names.remove(&actor)?;
        self.claims.remove(&name);
        match name {
            Named::Agent(id) => drop(self.agents.remove(&id)),
            Named::Job(_, id) => self.forget_job(id),
            Named::Webhook(id) => drop(self.hooks.remove(&id)),
        }
        Some(name)
    }

    fn forget_job(&mut self, id: JobId) {
        let Some((agent, _)) = self.jobs.remove(&id) else { return };
        if let Some(jobs) = self.jobs_of.get_mut(&agent) {
            *jobs -= 1;
            if *jobs == 0 {
                self.jobs_of.remove(&agent);
            }
        }
    }

    /// An actor ended because it saw no work; what happened while it ended must not be missed.
    fn after(&self, name: Named) {
        match name {
            Named::Agent(id) => self.world.watch.touch_agent(id),
            Named::Job(shard, id) => self.world.watch.touch_job(shard, id),
            Named::Webhook(id) => self.world.watch.touch_hook(id, None),
        }
    }

    fn fell(
        &mut self,
        name: Named,
        reason: &dyn std::fmt::Display,
        myself: &ActorRef<RootMessage>,
    ) {
        let falls = self.falls.entry(name).or_default();
        let pause = RESTART_PAUSES[(*falls).min(RESTART_PAUSES.len() - 1)];
        *falls += 1;
        warn!(?name, %reason, ?pause, "an actor fell and is started again");
        let me = myself.clone();
        detach(async move {
            tokio::time::sleep(pause).await;
            let _ = me.cast(RootMessage::Again(name));
        });
    }
}

/// Keyed calls of a node that is gone, or past their time, are ended: nobody else would.
async fn end_lost_calls(world: &Arc<World>, claim: Claim) {
    let now = world.now();
    let running: Vec<(Keyed, Option<String>, bool)> = {
        let state = world.ports.ledger.shard(claim.shard).read();
        let running = state.keys.running.rows();
        running
            .map(|(hash, row)| {
                let key = Keyed { hash: *hash, fingerprint: row.fingerprint };
                (key, row.boot.clone(), invoke::is_overdue(row, now))
            })
            .collect()
    };
    let mut lives = BTreeMap::new();
    for (key, boot, is_overdue) in running {
        let boot = boot.unwrap_or_default();
        if !is_overdue && is_alive(world, &boot, &mut lives).await {
            continue;
        }
        let command = Command::EndCall { key, outcome: invoke::outcome_unknown() };
        let _ = world.ask_shard(claim.shard, command, None, Some(claim)).await;
    }
}

/// Whether the life of a node that began a call goes on. One that does not answer may be alive: its
/// calls end with their time, or when the node is given up.
async fn is_alive(
    world: &Arc<World>,
    boot: &str,
    lives: &mut BTreeMap<domain::NodeId, Option<String>>,
) -> bool {
    if boot == world.boot {
        return true;
    }
    let node = boot.split(':').next().and_then(|node| node.parse().ok());
    let Some(node) = node.filter(|node| *node != world.node_id) else { return false };
    if world.has_left(node) {
        return false;
    }
    let life = match lives.get(&node) {
        Some(life) => life.clone(),
        None => {
            let told = world.ask_node(node, Ask::Boot, ask::ANSWER_WITHIN).await;
            let life = match told {
                Ok(Answer::Boot(life)) => Some(life),
                Ok(_) | Err(_) => None,
            };
            lives.insert(node, life.clone());
            life
        }
    };
    life.is_none_or(|life| life == boot)
}

/// Starts the tree.
pub async fn start(world: Arc<World>) -> Result<ActorRef<RootMessage>, ractor::SpawnErr> {
    let (root, _) = Actor::spawn(None, Root, world).await?;
    Ok(root)
}
