//! The way from a call to an instance: a table in memory, one slot per call, a bounded queue per
//! agent. The hot path takes no lock for long and touches no log.

use std::{
    collections::{BTreeMap, HashMap},
    net::SocketAddr,
    sync::{
        Arc, Mutex, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use domain::{AgentId, InstanceId, NodeId, Timestamp, agent::Agent, instance::InstanceStatus};
use ractor::ActorRef;
use tokio::{sync::Notify, time::Instant};

use crate::{
    ask::{Pulse, Told},
    instance::InstanceMessage,
    world::World,
};

/// How long an instance of another node that had no free slot is not asked again.
const BUSY_FOR: Duration = Duration::from_millis(20);

/// Where an instance is.
pub enum Place {
    /// On this node.
    Here {
        /// Where it listens.
        address: SocketAddr,
        /// Whoever looks after it.
        actor: ActorRef<InstanceMessage>,
    },
    /// On another node, which counts its slots; what is counted here are this node's own calls.
    There(NodeId),
}

/// One ready instance.
pub struct Endpoint {
    /// The agent.
    pub agent_id: AgentId,
    /// The instance.
    pub id: InstanceId,
    /// Its version.
    pub version: u64,
    /// Where it is.
    pub place: Place,
    /// Path of invocations.
    pub invoke_path: String,
    /// Calls at once.
    pub concurrency: u32,
    /// When it last answered a health check.
    pub last_check: AtomicU64,
    /// Whether its last health check went well.
    pub healthy: AtomicBool,
    accepting: AtomicBool,
    doubted: AtomicBool,
    in_flight: AtomicU32,
    unwanted: AtomicU32,
    idle: Notify,
    busy: Mutex<Option<Instant>>,
}

/// What an endpoint is made of.
pub struct NewEndpoint {
    /// The agent.
    pub agent_id: AgentId,
    /// The instance.
    pub id: InstanceId,
    /// Its version.
    pub version: u64,
    /// Where it is.
    pub place: Place,
    /// Path of invocations.
    pub invoke_path: String,
    /// Calls at once.
    pub concurrency: u32,
}

impl Endpoint {
    /// An endpoint that takes calls.
    pub fn new(new: NewEndpoint, now: Timestamp) -> Arc<Self> {
        let NewEndpoint { agent_id, id, version, place, invoke_path, concurrency } = new;
        Arc::new(Self {
            agent_id,
            id,
            version,
            place,
            invoke_path,
            concurrency,
            last_check: AtomicU64::new(now.millis()),
            healthy: AtomicBool::new(true),
            accepting: AtomicBool::new(true),
            doubted: AtomicBool::new(false),
            in_flight: AtomicU32::new(0),
            unwanted: AtomicU32::new(0),
            idle: Notify::new(),
            busy: Mutex::new(None),
        })
    }

    /// The node that it is on, if that is another one.
    pub fn node(&self) -> Option<NodeId> {
        match self.place {
            Place::Here { .. } => None,
            Place::There(node) => Some(node),
        }
    }

    fn is_here(&self) -> bool {
        self.node().is_none()
    }

    /// Tells its actor something, where that is on this node.
    pub fn tell(&self, message: InstanceMessage) {
        if let Place::Here { actor, .. } = &self.place {
            // One that has ended needs to hear nothing.
            let _ = actor.cast(message);
        }
    }

    /// Its node had no free slot: it is left alone for a moment.
    pub fn mark_busy(&self) {
        *self.busy.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now() + BUSY_FOR);
    }

    fn is_busy(&self) -> bool {
        if self.is_here() {
            return false;
        }
        let busy = *self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        busy.is_some_and(|until| Instant::now() < until)
    }

    /// Calls in it now.
    pub fn in_flight(&self) -> u32 {
        self.in_flight.load(Relaxed)
    }

    /// Calls in it that were canceled and that it does not let go of.
    pub fn unwanted(&self) -> u32 {
        self.unwanted.load(Relaxed)
    }

    /// One more call is not wanted any more.
    pub fn give_up_on_one(&self) {
        self.unwanted.fetch_add(1, Relaxed);
    }

    /// A connection to it broke: it may be about to be gone. Until its actor has looked it gets no new calls,
    /// for they would end like this one.
    pub fn doubt(&self) {
        if self.is_here() && !self.doubted.swap(true, Relaxed) {
            self.tell(InstanceMessage::Doubted);
        }
    }

    /// Whether it takes calls, if it has room.
    fn is_ready(&self) -> bool {
        self.accepting.load(Relaxed) && !self.doubted.load(Relaxed)
    }

    /// Takes no new calls from now on.
    pub fn close(&self) {
        self.accepting.store(false, Relaxed);
    }

    /// Waits until its last call has ended.
    pub async fn drained(&self) {
        loop {
            let idle = self.idle.notified();
            tokio::pin!(idle);
            idle.as_mut().enable();
            if self.in_flight() == 0 {
                return;
            }
            idle.await;
        }
    }

    fn try_enter(&self) -> bool {
        self.is_ready()
            && !self.is_busy()
            && self
                .in_flight
                .fetch_update(Relaxed, Relaxed, |now| (now < self.concurrency).then_some(now + 1))
                .is_ok()
    }
}

/// One agent's instances and those who wait for them.
#[derive(Default)]
pub struct AgentRoute {
    endpoints: RwLock<Vec<Arc<Endpoint>>>,
    waiting: AtomicUsize,
    freed: Notify,
}

impl AgentRoute {
    /// Its ready instances.
    pub fn endpoints(&self) -> Vec<Arc<Endpoint>> {
        self.endpoints.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Calls that wait for a slot.
    pub fn waiting(&self) -> usize {
        self.waiting.load(Relaxed)
    }

    fn has_ready(&self) -> bool {
        let endpoints = self.endpoints.read().unwrap_or_else(PoisonError::into_inner);
        endpoints.iter().any(|endpoint| endpoint.is_ready())
    }

    /// A slot of the least loaded instance, if one is free.
    fn try_take(self: &Arc<Self>, serves: Serves, node: &Arc<AtomicUsize>) -> Option<Slot> {
        let endpoints = self.endpoints.read().unwrap_or_else(PoisonError::into_inner);
        let others_wait = serves.is_complete(&endpoints);
        let mut by_load: Vec<_> = endpoints.iter().collect();
        by_load.sort_by_key(|endpoint| {
            let is_other = others_wait && Some(endpoint.version) != serves.version;
            (is_other, endpoint.in_flight(), !endpoint.is_here())
        });
        let endpoint = by_load.into_iter().find(|endpoint| endpoint.try_enter())?;
        Some(self.slot(endpoint, node))
    }

    fn slot(self: &Arc<Self>, endpoint: &Arc<Endpoint>, node: &Arc<AtomicUsize>) -> Slot {
        node.fetch_add(1, Relaxed);
        Slot { endpoint: Arc::clone(endpoint), route: Arc::clone(self), node: Arc::clone(node) }
    }

    /// Whether an instance elsewhere may have room again soon, though nobody will say so.
    fn has_busy(&self) -> bool {
        let endpoints = self.endpoints.read().unwrap_or_else(PoisonError::into_inner);
        endpoints.iter().any(|endpoint| !endpoint.is_here())
    }
}

/// A place for one call in one instance; dropping it gives it back.
pub struct Slot {
    /// The instance.
    pub endpoint: Arc<Endpoint>,
    route: Arc<AgentRoute>,
    node: Arc<AtomicUsize>,
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.node.fetch_sub(1, Relaxed);
        if self.endpoint.in_flight.fetch_sub(1, Relaxed) == 1 {
            self.endpoint.idle.notify_waiters();
        }
        self.route.freed.notify_one();
    }
}

/// Why there is no slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoSlot {
    /// The queue is full although instances are ready.
    #[error("too many calls are waiting for this agent; retry in a moment")]
    Overloaded,
    /// No instance became ready in time.
    #[error("no instance of the agent is ready; retry in a moment")]
    Unavailable,
    /// The call's own time is over.
    #[error(
        "the call waited for a free instance until its timeout; raise options.timeout or scale up"
    )]
    Timeout,
}

/// All agents' routes on this node.
#[derive(Default)]
pub struct Routes {
    agents: RwLock<HashMap<AgentId, Arc<AgentRoute>>>,
    in_flight: Arc<AtomicUsize>,
}

/// The version that calls go to. Once as many of its instances are ready as are wanted, instances
/// of any other version (one that is watched before it takes over, one that drains) get a call only
/// where these have no room: the first answer after a deployment is `live` is the new version's.
#[derive(Clone, Copy, Debug, Default)]
pub struct Serves {
    /// The live version.
    pub version: Option<u64>,
    /// Its instances, when all are up.
    pub wanted: usize,
}

impl Serves {
    /// What the agent's record says.
    pub fn by(agent: &Agent) -> Self {
        Self { version: agent.version, wanted: agent.scaling.wanted() }
    }

    fn is_complete(self, endpoints: &[Arc<Endpoint>]) -> bool {
        let ready =
            |one: &&Arc<Endpoint>| Some(one.version) == self.version && one.accepting.load(Relaxed);
        endpoints.iter().filter(ready).count() >= self.wanted
    }
}

/// How long and how deep a call may wait.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Where it goes.
    pub serves: Serves,
    /// The call's own end.
    pub deadline: Instant,
    /// How long to wait while nothing is ready.
    pub ready_wait: Duration,
    /// Calls that may wait for one agent.
    pub queue: usize,
}

impl Routes {
    /// One agent's route, made if need be.
    pub fn of(&self, agent: AgentId) -> Arc<AgentRoute> {
        let known = self.agents.read().unwrap_or_else(PoisonError::into_inner).get(&agent).cloned();
        known.unwrap_or_else(|| {
            let mut agents = self.agents.write().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(agents.entry(agent).or_default())
        })
    }

    /// One agent's route, if it has one.
    pub fn known(&self, agent: AgentId) -> Option<Arc<AgentRoute>> {
        self.agents.read().unwrap_or_else(PoisonError::into_inner).get(&agent).cloned()
    }

    /// Calls in flight on this node.
    pub fn in_flight(&self) -> usize {
        self.in_flight.load(Relaxed)
    }

    /// An instance is ready.
    pub fn add(&self, endpoint: Arc<Endpoint>) {
        let route = self.of(endpoint.agent_id);
        route.endpoints.write().unwrap_or_else(PoisonError::into_inner).push(endpoint);
        route.freed.notify_waiters();
    }

    /// An instance that was doubted is there after all.
    pub fn trust(&self, endpoint: &Endpoint) {
        endpoint.doubted.store(false, Relaxed);
        if let Some(route) = self.known(endpoint.agent_id) {
            route.freed.notify_waiters();
        }
    }

    /// An instance takes no calls any more.
    pub fn remove(&self, agent: AgentId, id: InstanceId) {
        let Some(route) = self.known(agent) else { return };
        let mut endpoints = route.endpoints.write().unwrap_or_else(PoisonError::into_inner);
        endpoints.retain(|endpoint| {
            if endpoint.id == id {
                endpoint.close();
            }
            endpoint.id != id
        });
    }

    /// A gone agent needs no route.
    pub fn forget(&self, agent: AgentId) {
        self.agents.write().unwrap_or_else(PoisonError::into_inner).remove(&agent);
    }

    /// A slot of one instance of this node, for a call that came over another.
    pub fn take_of(&self, agent: AgentId, id: InstanceId) -> Result<Slot, Told> {
        let route = self.known(agent).ok_or(Told::Unknown)?;
        let endpoints = route.endpoints.read().unwrap_or_else(PoisonError::into_inner);
        let endpoint = endpoints.iter().find(|one| one.id == id && one.is_here());
        let endpoint = endpoint.ok_or(Told::Unknown)?;
        match endpoint.try_enter() {
            true => Ok(route.slot(endpoint, &self.in_flight)),
            false => Err(Told::Busy),
        }
    }

    /// These are the instances that other nodes run for an agent; any other is not there any more.
    pub fn set_others(&self, agent: AgentId, others: Vec<NewEndpoint>, now: Timestamp) {
        if others.is_empty() && self.known(agent).is_none() {
            return;
        }
        let route = self.of(agent);
        let mut is_new = false;
        {
            let mut endpoints = route.endpoints.write().unwrap_or_else(PoisonError::into_inner);
            endpoints.retain(|one| {
                let stays = one.is_here() || others.iter().any(|other| other.id == one.id);
                if !stays {
                    one.close();
                }
                stays
            });
            for other in others {
                if endpoints.iter().all(|one| one.id != other.id) {
                    is_new = true;
                    endpoints.push(Endpoint::new(other, now));
                }
            }
        }
        if is_new {
            route.freed.notify_waiters();
        }
    }

    /// An agent's ready instances, wherever they are.
    pub fn ready(&self, agent: AgentId) -> usize {
        self.known(agent).map_or(0, |route| route.endpoints().len())
    }

    /// Instances of this node take no new calls: the node stops.
    pub fn close(&self) {
        for agent in self.agents() {
            let endpoints = self.known(agent).map(|route| route.endpoints()).unwrap_or_default();
            endpoints.iter().filter(|one| one.is_here()).for_each(|one| one.close());
        }
    }

    /// The agents that have a route.
    pub fn agents(&self) -> Vec<AgentId> {
        self.agents.read().unwrap_or_else(PoisonError::into_inner).keys().copied().collect()
    }

    /// An agent's ready instances of this node.
    pub fn pulses(&self, agent: AgentId) -> Vec<Pulse> {
        let endpoints = self.known(agent).map(|route| route.endpoints()).unwrap_or_default();
        let pulse = |one: &Arc<Endpoint>| Pulse {
            instance: one.id,
            healthy: one.healthy.load(Relaxed),
            last_check: Timestamp::from_millis(one.last_check.load(Relaxed)),
            in_flight: one.in_flight(),
        };
        endpoints.iter().filter(|one| one.is_here()).map(pulse).collect()
    }

    /// A slot at once, or none; those who wait already go first.
    pub fn try_take(&self, agent: AgentId, serves: Serves) -> Option<Slot> {
        self.known(agent).filter(|route| route.waiting() == 0)?.try_take(serves, &self.in_flight)
    }

    /// A slot that is free now, while the node has fewer than `most` calls in flight.
    pub fn take_at_once(
        &self,
        agent: AgentId,
        serves: Serves,
        most: usize,
    ) -> Result<Option<Slot>, NoSlot> {
        let route = self.of(agent);
        if self.in_flight() >= most {
            return Err(NoSlot::Overloaded);
        }
        Ok(route.try_take(serves, &self.in_flight))
    }

    /// A slot after a wait, where none was to be had at once.
    pub async fn wait_for(&self, agent: AgentId, patience: Patience) -> Result<Slot, NoSlot> {
        let route = self.of(agent);
        let Some(_place) = InLine::take(&route, patience.queue) else {
            return Err(if route.has_ready() { NoSlot::Overloaded } else { NoSlot::Unavailable });
        };
        self.wait(&route, patience).await
    }

    async fn wait(&self, route: &Arc<AgentRoute>, patience: Patience) -> Result<Slot, NoSlot> {
        let ready_by = patience.deadline.min(Instant::now() + patience.ready_wait);
        loop {
            let freed = route.freed.notified();
            tokio::pin!(freed);
            freed.as_mut().enable();
            if let Some(slot) = route.try_take(patience.serves, &self.in_flight) {
                return Ok(slot);
            }
            let until = if route.has_ready() { patience.deadline } else { ready_by };
            if route.has_busy() && Instant::now() + BUSY_FOR < until {
                let _ = tokio::time::timeout(BUSY_FOR, freed).await;
                continue;
            }
            if tokio::time::timeout_at(until, freed).await.is_err() {
                return Err(match route.has_ready() {
                    true => NoSlot::Timeout,
                    false => NoSlot::Unavailable,
                });
            }
        }
    }
}

/// A place in the queue.
struct InLine<'r>(&'r AgentRoute);

impl<'r> InLine<'r> {
    fn take(route: &'r AgentRoute, most: usize) -> Option<Self> {
        let taken =
            route.waiting.fetch_update(Relaxed, Relaxed, |now| (now < most).then_some(now + 1));
        taken.ok().map(|_| Self(route))
    }
}

impl Drop for InLine<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Relaxed);
    }
}

/// What is known of an agent's instances beside the directory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// `healthy`, `degraded`, `unhealthy` or `unknown`.
    pub status: &'static str,
    /// Whether any call is in flight.
    pub busy: bool,
    /// When an instance last answered.
    pub last_check: Option<Timestamp>,
    /// Ready instances.
    pub ready: usize,
    /// Calls per instance.
    pub in_flight: BTreeMap<InstanceId, u32>,
}

impl Health {
    /// What these instances make of their agent.
    pub fn of(pulses: &[Pulse]) -> Self {
        let healthy = pulses.iter().filter(|pulse| pulse.healthy).count();
        let status = match (pulses.len(), healthy) {
            (0, _) => "unknown",
            (all, good) if all == good => "healthy",
            (_, 0) => "unhealthy",
            _ => "degraded",
        };
        Self {
            status,
            busy: pulses.iter().any(|pulse| pulse.in_flight > 0),
            last_check: pulses.iter().map(|pulse| pulse.last_check).max(),
            ready: pulses.len(),
            in_flight: pulses.iter().map(|pulse| (pulse.instance, pulse.in_flight)).collect(),
        }
    }
}

impl Routes {
    /// Whether an agent has no ready instance.
    pub fn is_cold(&self, agent: AgentId) -> bool {
        self.known(agent).is_none_or(|route| !route.has_ready())
    }

    /// Calls of an agent that wait for a slot.
    pub fn waiting(&self, agent: AgentId) -> usize {
        self.known(agent).map_or(0, |route| route.waiting())
    }
}

impl World {
    /// The version of an agent that calls go to, by this node's copy of the directory.
    pub fn serves(&self, agent: AgentId) -> Serves {
        let row = self.directory().read().agents.get(&agent);
        row.map_or_else(Serves::default, |row| Serves::by(&row))
    }

    /// Brings an agent's route up to what the directory says that other nodes run.
    pub fn sync_routes(&self, agent: AgentId) {
        let others: Vec<NewEndpoint> = {
            let directory = self.directory().read();
            let rows = directory.instances_of(agent).filter(|row| {
                row.node_id != self.node_id
                    && row.status == InstanceStatus::Running
                    && self.ports.peers.is_alive(row.node_id)
            });
            rows.filter_map(|row| {
                let deployment = directory.deployment(agent, row.deployment_id);
                let image = deployment.and_then(|one| one.image.clone());
                let image =
                    image.or_else(|| Some(directory.version(agent, row.version)?.image.clone()))?;
                Some(NewEndpoint {
                    agent_id: agent,
                    id: row.id,
                    version: row.version,
                    place: Place::There(row.node_id),
                    invoke_path: image.invoke_path,
                    concurrency: image.concurrency,
                })
            })
            .collect()
        };
        self.routes.set_others(agent, others, self.now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Stage {
        routes: Routes,
        agent: AgentId,
    }

    impl Stage {
        fn with(versions: &[u64]) -> Self {
            let agent = AgentId(1);
            let routes = Routes::default();
            let endpoint = |(n, version): (usize, &u64)| NewEndpoint {
                agent_id: agent,
                id: InstanceId(n as u128),
                version: *version,
                place: Place::There(NodeId(2)),
                invoke_path: "/invoke".to_owned(),
                concurrency: 2,
            };
            routes.set_others(
                agent,
                versions.iter().enumerate().map(endpoint).collect(),
                Timestamp::default(),
            );
            Self { routes, agent }
        }

        /// Versions that calls get, each held on to.
        fn calls(&self, version: u64, wanted: usize, calls: usize) -> Vec<u64> {
            let serves = Serves { version: Some(version), wanted };
            let slots = (0..calls).map(|_| self.routes.try_take(self.agent, serves));
            let slots: Vec<_> = slots.flatten().collect();
            slots.iter().map(|slot| slot.endpoint.version).collect()
        }
    }

    #[test]
    fn the_live_version_answers_once_all_its_instances_are_ready() {
        let stage = Stage::with(&[1, 2]);
        assert_eq!(stage.calls(1, 1, 2), [1, 1], "the second is only watched");
        assert_eq!(stage.calls(2, 1, 2), [2, 2], "it took over");
        assert_eq!(stage.calls(2, 1, 5), [2, 2, 1, 1], "the first helps while it drains");
    }

    #[test]
    fn a_version_half_up_shares_the_calls() {
        let stage = Stage::with(&[1, 1, 2]);
        let mut calls = stage.calls(2, 2, 3);
        calls.sort_unstable();
        assert_eq!(calls, [1, 1, 2], "the least busy instance is next");
    }
}
