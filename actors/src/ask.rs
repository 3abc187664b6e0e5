//! What one node may ask of another, and how it answers. The certificate of the asking node was
//! checked before; whatever starts, drains or ends an instance carries a claim besides, and one that
//! is older than the newest known is refused.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use domain::{
    AgentId, ApiKeyId, InstanceId, JobId, NodeId, Rejection, Timestamp, account::Tenant,
    agent::plan::Seen, codec, idempotency::Keyed, job::Job, machine::Claim, table::Order,
};
use serde::{Deserialize, Serialize};

use crate::{
    attempt::Held,
    call::{JobFilter, JobsWanted, MetricsRange, Records, RecordsWanted, Service, ServiceError},
    flight::Share,
    instance::Ended,
    limiter::Admission,
    meter::Totals,
    ports::{LogLine, LogQuery, PeerError},
    sending::Begun,
    world::World,
};

/// How long a node may take for a question that needs no waiting.
pub const ANSWER_WITHIN: Duration = Duration::from_secs(5);

/// A question.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[expect(missing_docs, reason = "fields are named after what they hold")]
pub enum Ask {
    /// Which life of yours is this?
    Boot,
    /// Start an instance that the directory has placed on you.
    Start { claim: Claim, agent: AgentId, instance: InstanceId, adopt: bool },
    /// Let it finish its calls, then end it.
    Drain { claim: Claim, instance: InstanceId, timeout: Duration },
    /// The ends of these are known; forget them.
    Dismiss { claim: Claim, instances: Vec<InstanceId> },
    /// What do you see of this agent's instances?
    Observe { agent: AgentId },
    /// An instance of this agent, which you own, has moved.
    Touch { agent: AgentId },
    /// Run an attempt of a job in an instance of yours.
    BeginAttempt { claim: Claim, job: Box<Job>, instance: InstanceId },
    /// How does the attempt end? Wait for it a while.
    AwaitAttempt { job: JobId, epoch: u64, within: Duration },
    /// The attempt is not wanted any more.
    CancelAttempt { claim: Claim, job: JobId, epoch: u64, by_force: bool },
    /// The end of the attempt is committed.
    ForgetAttempt { job: JobId, epoch: u64 },
    /// A job of a shard that you have.
    Job { tenant: Tenant, id: JobId, wait: Option<Duration> },
    /// Jobs of shards that you have.
    Jobs {
        shards: Vec<u16>,
        tenant: Tenant,
        filter: JobFilter,
        from: Option<JobId>,
        ascending: bool,
        limit: usize,
    },
    /// Records of a shard that you have.
    Records { shard: u16, wanted: RecordsWanted },
    /// Whether a key of a shard that you have was seen.
    Seen { shard: u16, key: Keyed },
    /// The blobs that a shard needs.
    NeededBlobs { shard: u16 },
    /// Lines of an agent's log that you have.
    Logs { agent: AgentId, query: LogQuery },
    /// Lines of an agent's log that you keep of these nodes, which do not answer.
    LogCopies { nodes: Vec<NodeId>, agent: AgentId, query: LogQuery },
    /// What you counted of an agent, and what you keep of these nodes, which do not answer.
    Metrics {
        agent: AgentId,
        range: MetricsRange,
        #[serde(default)]
        silent: Vec<NodeId>,
    },
    /// What you know of these agents beside the directory, and of what those nodes counted, which do not answer.
    Figures {
        agents: Vec<AgentId>,
        #[serde(default)]
        silent: Vec<NodeId>,
    },
    /// Count a call without credentials.
    CountAddress(IpAddr),
    /// Count a call with a key that may make so many a minute.
    CountKey { key: ApiKeyId, most: u64 },
    /// So many calls of a tenant may be in flight on this node, of those that you keep count of.
    Share { tenant: Tenant, node: NodeId, wanted: Share },
    /// So many are in use on this node.
    NoteShare { tenant: Tenant, node: NodeId, share: Share },
    /// How many may be in flight on yours? What is not in use may be called back.
    HeldShare { tenant: Tenant, call_back: bool },
    /// How many jobs of a tenant wait in shards that you have?
    Queued { shards: Vec<u16>, tenant: Tenant },
    /// What have you under way of a shard that somebody else leads by now?
    Sending { claim: Claim },
}

/// An answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Told {
    /// It is done, or under way.
    Done,
    /// The claim is old.
    NotOwner,
    /// There is no such thing here.
    Unknown,
    /// Not now: there is no room.
    Busy,
    /// It can't be looked through in the time there is.
    TooLong,
    /// Which life this is.
    Boot(String),
    /// What is seen of instances.
    Observed(Vec<Observed>),
    /// Where an attempt is.
    Attempt(Held),
    /// A job.
    Job(Result<Box<Job>, Rejection>),
    /// Jobs.
    Jobs(Vec<Job>),
    /// Records.
    Records(Records),
    /// Whether a key was seen.
    Seen(bool),
    /// Names of blobs.
    Blobs(BTreeSet<String>),
    /// Lines, and whether there are more.
    Logs(Vec<LogLine>, bool),
    /// Lines of other nodes, and whether there are more.
    LogCopies(Vec<(NodeId, LogLine)>, bool),
    /// Steps, as encoded buckets.
    Metrics(Vec<(Timestamp, Bytes)>),
    /// What is known of agents.
    Figures(Vec<Figures>),
    /// Deliveries that are under way.
    Sending(Vec<Begun>),
    /// Whether a call may go on.
    Counted(Admission),
    /// Calls that may be in flight.
    Share(Share),
    /// Jobs that wait.
    Queued(u64),
}

/// An instance as its node sees it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Observed {
    /// Which one.
    pub id: InstanceId,
    /// Where it is.
    pub seen: Seen,
    /// The layers of isolation that hold for it.
    pub isolation: Vec<String>,
    /// How it ended, if it did.
    pub ended: Ended,
}

/// A ready instance as its node sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pulse {
    /// Which one.
    pub instance: InstanceId,
    /// Whether its last health check went well.
    pub healthy: bool,
    /// When it last answered one.
    pub last_check: Timestamp,
    /// Calls in it.
    pub in_flight: u32,
}

/// What one node knows of an agent beside the directory.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Figures {
    /// The agent.
    pub agent: AgentId,
    /// Calls of the last 24 hours that came in over this node, or over one that it speaks for.
    pub totals: Totals,
    /// Time that it was meant to serve and time that it did, in milliseconds, as its owners saw it.
    pub uptime: (u64, u64),
    /// Its ready instances here.
    pub pulses: Vec<Pulse>,
    /// Calls that wait here for a slot.
    pub waiting: usize,
}

impl World {
    /// Asks a node, be it this one.
    pub async fn ask_node(
        self: &Arc<Self>,
        node: NodeId,
        ask: Ask,
        within: Duration,
    ) -> Result<Told, PeerError> {
        if node == self.node_id {
            // It answers questions of every kind: who asks one should not have to hold them all.
            return Ok(Box::pin(self.answer(ask)).await);
        }
        self.ask_other(node, ask, within).await
    }

    /// Asks another node.
    pub(crate) async fn ask_other(
        &self,
        node: NodeId,
        ask: Ask,
        within: Duration,
    ) -> Result<Told, PeerError> {
        let question = Bytes::from(codec::encode(&ask));
        let answer = self.ports.peers.ask(node, question, within).await?;
        codec::decode(&answer).map_err(|error| PeerError::Broken(error.to_string()))
    }

    /// Answers another node; the bytes of its question may be anything.
    pub async fn answer_bytes(self: &Arc<Self>, question: &[u8]) -> Option<Bytes> {
        let ask: Ask = codec::decode(question).ok()?;
        Some(Bytes::from(codec::encode(&self.answer(ask).await)))
    }

    async fn answer(self: &Arc<Self>, ask: Ask) -> Told {
        match ask {
            Ask::Boot => Told::Boot(self.boot.clone()),
            Ask::Start { claim, .. }
            | Ask::Drain { claim, .. }
            | Ask::Dismiss { claim, .. }
            | Ask::BeginAttempt { claim, .. }
            | Ask::CancelAttempt { claim, .. }
                if !self.is_current(claim) =>
            {
                Told::NotOwner
            }
            Ask::Start { agent, instance, adopt, .. } => self.start(agent, instance, adopt).await,
            Ask::Drain { instance, timeout, .. } => self.drain(instance, timeout),
            Ask::Dismiss { instances, .. } => {
                instances.into_iter().for_each(|id| drop(self.watch.instances.remove(id)));
                Told::Done
            }
            Ask::Observe { agent } => Told::Observed(self.watch.instances.observed(agent)),
            Ask::Sending { claim } => Told::Sending(self.sending.tell(claim)),
            Ask::Touch { agent } => {
                self.watch.touch_agent(agent);
                Told::Done
            }
            Ask::BeginAttempt { job, instance, .. } => self.begin_attempt(*job, instance),
            Ask::AwaitAttempt { job, epoch, within } => {
                Told::Attempt(self.attempts.wait(job, epoch, within).await)
            }
            Ask::CancelAttempt { job, epoch, by_force, .. } => {
                self.attempts.cancel(job, epoch, by_force);
                Told::Done
            }
            Ask::ForgetAttempt { job, epoch } => {
                self.attempts.forget(job, epoch);
                Told::Done
            }
            Ask::CountAddress(address) => Told::Counted(self.count_address_here(address)),
            Ask::CountKey { key, most } => Told::Counted(self.count_key_here(key, most)),
            Ask::Share { tenant, node, wanted } => {
                let most = self.in_flight_max(tenant);
                let calls = self.grant_share(tenant, node, wanted, most).await;
                Told::Share(Share { calls, number: wanted.number })
            }
            Ask::NoteShare { tenant, node, share } => {
                self.note_share(tenant, node, share).await;
                Told::Done
            }
            Ask::HeldShare { tenant, call_back } => {
                Told::Share(self.flights.share(tenant, call_back, self.now()))
            }
            Ask::Queued { shards, tenant } => Told::Queued(self.queued_here(&shards, tenant)),
            reading @ (Ask::Job { .. }
            | Ask::Jobs { .. }
            | Ask::Records { .. }
            | Ask::Seen { .. }
            | Ask::NeededBlobs { .. }
            | Ask::Logs { .. }
            | Ask::LogCopies { .. }
            | Ask::Metrics { .. }
            | Ask::Figures { .. }) => self.answer_reader(reading).await,
        }
    }

    /// Questions that change nothing.
    async fn answer_reader(self: &Arc<Self>, ask: Ask) -> Told {
        let service = Service { world: Arc::clone(self) };
        match ask {
            Ask::Job { tenant, id, wait } => match service.job_here(tenant, id, wait).await {
                Ok(job) => Told::Job(Ok(Box::new(Job::clone(&job)))),
                Err(ServiceError::Rejected(reason)) => Told::Job(Err(reason)),
                Err(_) => Told::Busy,
            },
            Ask::Jobs { shards, tenant, filter, from, ascending, limit } => {
                let order = Order::ascending(ascending);
                let wanted = JobsWanted { tenant, filter, from, order, limit };
                match service.jobs_here(shards, wanted).await {
                    Ok(jobs) => Told::Jobs(jobs.iter().map(|job| Job::clone(job)).collect()),
                    Err(ServiceError::TooLong) => Told::TooLong,
                    Err(_) => Told::Busy,
                }
            }
            Ask::Records { shard, wanted } => match service.records_here(shard, wanted).await {
                Ok(records) => Told::Records(records),
                Err(ServiceError::TooLong) => Told::TooLong,
                Err(_) => Told::Busy,
            },
            Ask::Seen { shard, key } => match service.was_seen_here(shard, &key).await {
                Ok(seen) => Told::Seen(seen),
                Err(_) => Told::Busy,
            },
            Ask::NeededBlobs { shard } => {
                self.needed_blobs_of(shard).await.map_or(Told::Busy, Told::Blobs)
            }
            Ask::Logs { agent, query } => {
                let (lines, more) = self.ports.logs.read(agent, query).await;
                Told::Logs(lines, more)
            }
            Ask::LogCopies { nodes, agent, query } => {
                let (lines, more) = self.ports.logs.read_copies(nodes, agent, query).await;
                Told::LogCopies(lines, more)
            }
            Ask::Metrics { agent, range, silent } => {
                Told::Metrics(service.metrics_here(agent, range, silent).await)
            }
            Ask::Figures { agents, silent } => {
                let figures = agents.into_iter().map(|agent| self.figures_here(agent, &silent));
                Told::Figures(figures.collect())
            }
            Ask::Boot
            | Ask::Start { .. }
            | Ask::Drain { .. }
            | Ask::Dismiss { .. }
            | Ask::Observe { .. }
            | Ask::Sending { .. }
            | Ask::CountAddress(_)
            | Ask::CountKey { .. }
            | Ask::Share { .. }
            | Ask::NoteShare { .. }
            | Ask::HeldShare { .. }
            | Ask::Queued { .. }
            | Ask::Touch { .. }
            | Ask::BeginAttempt { .. }
            | Ask::AwaitAttempt { .. }
            | Ask::CancelAttempt { .. }
            | Ask::ForgetAttempt { .. } => Told::Unknown,
        }
    }

    /// What this node knows of an agent, and keeps of what these nodes counted.
    pub fn figures_here(&self, agent: AgentId, silent: &[NodeId]) -> Figures {
        let (mut totals, mut uptime) =
            (self.meter.totals(agent, self.now()), self.meter.uptime(agent));
        for meter in self.copied.among(silent) {
            totals.add(&meter.totals(agent, self.now()));
            let (meant, up) = meter.uptime(agent);
            uptime = (uptime.0 + meant, uptime.1 + up);
        }
        let (pulses, waiting) = (self.routes.pulses(agent), self.routes.waiting(agent));
        Figures { agent, totals, uptime, pulses, waiting }
    }
}
