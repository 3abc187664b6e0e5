//! Everything that actors and calls reach for, in one handle.

use std::{net::IpAddr, sync::Arc};

use domain::{
    ApiKeyId, NodeId, Timestamp,
    audit::Audited,
    directory::{self, Directory},
    idempotency::Keyed,
    machine::{Answer, Claim, Entry},
    shard,
};
use tokio::sync::Semaphore;

use crate::{
    attempt::Attempts,
    call::Queues,
    connection::AgentClient,
    figures::Elsewhere,
    flight::Flights,
    limiter::Limiter,
    meter::{CopiedMeters, Meter},
    minute::Minutes,
    ports::{
        Blobs, Clock, ClusterView, Entropy, Ledger, Logs, Outbound, Peers, ProposeError, Runtime,
        Series, Snapshots,
    },
    replica::Replica,
    root::Watch,
    route::Routes,
    seal::Keychain,
    sending::Sending,
    settings::Settings,
    vouching::Vouching,
};

/// The ports, as a node hands them over.
#[derive(Clone)]
pub struct Ports {
    /// What is agreed.
    pub ledger: Arc<dyn Ledger>,
    /// What builds and runs.
    pub runtime: Arc<dyn Runtime>,
    /// Bulk.
    pub blobs: Arc<dyn Blobs>,
    /// What agents write.
    pub logs: Arc<dyn Logs>,
    /// Closed buckets of metrics.
    pub series: Arc<dyn Series>,
    /// The time.
    pub clock: Arc<dyn Clock>,
    /// Randomness.
    pub entropy: Arc<dyn Entropy>,
    /// The other nodes.
    pub peers: Arc<dyn Peers>,
    /// The cluster, for its operators.
    pub cluster: Arc<dyn ClusterView>,
    /// The world outside.
    pub outbound: Arc<dyn Outbound>,
    /// Backups of the cluster.
    pub snapshots: Arc<dyn Snapshots>,
}

/// Everything there is.
pub struct World {
    /// The ports.
    pub ports: Ports,
    /// Times and limits.
    pub settings: Settings,
    /// This node.
    pub node_id: NodeId,
    /// This life of this node: its id, and a word that is another one after every start.
    pub boot: String,
    /// Opens what secrets are sealed with.
    pub keychain: Keychain,
    /// The way to instances.
    pub routes: Routes,
    /// Calls agents.
    pub client: AgentClient,
    /// Counts calls.
    pub meter: Meter,
    /// Who waits for what.
    pub watch: Arc<Watch>,
    /// Attempts of jobs that run on this node.
    pub attempts: Attempts,
    /// Deliveries that this node has under way.
    pub sending: Arc<Sending>,
    /// Rates of calls.
    pub limiter: Limiter,
    /// Calls without credentials.
    pub addresses: Minutes<IpAddr>,
    /// Calls with keys that have a limit of their own.
    pub key_calls: Minutes<ApiKeyId>,
    /// Calls in flight.
    pub flights: Flights,
    /// What other nodes know of agents.
    pub elsewhere: Elsewhere,
    /// What silent nodes counted, as far as copies of it are kept here.
    pub copied: CopiedMeters,
    /// Jobs that wait on other nodes.
    pub queues: Queues,
    /// Whether this node may say whose a key is.
    pub vouching: Vouching,
    /// Turns of instances to come up.
    pub starts: Arc<Semaphore>,
}

impl World {
    /// A node's world before anything has happened in it. `boot` names this life of the node.
    pub fn new(
        ports: Ports,
        settings: Settings,
        (node_id, boot): (NodeId, String),
        keychain: Keychain,
        watch: Arc<Watch>,
    ) -> Self {
        let starts = Arc::new(Semaphore::new(settings.starts));
        Self {
            ports,
            settings,
            starts,
            node_id,
            boot,
            keychain,
            routes: Routes::default(),
            client: AgentClient::default(),
            meter: Meter::default(),
            watch,
            attempts: Attempts::default(),
            sending: Arc::default(),
            limiter: Limiter::default(),
            addresses: Minutes::default(),
            key_calls: Minutes::default(),
            flights: Flights::default(),
            elsewhere: Elsewhere::default(),
            copied: CopiedMeters::default(),
            queues: Queues::default(),
            vouching: Vouching::default(),
        }
    }

    /// The shard that an object lives in, by its id.
    pub(crate) fn home_of(&self, id: impl std::fmt::Display) -> u16 {
        self.ports.ledger.home(id.to_string().as_bytes())
    }

    /// Now.
    pub fn now(&self) -> Timestamp {
        self.ports.clock.now()
    }

    /// A new id of any kind.
    pub fn mint<T>(&self, make: impl FnOnce(Timestamp, u128) -> T) -> T {
        make(self.now(), self.ports.entropy.id())
    }

    /// This node's copy of the directory.
    pub fn directory(&self) -> &Replica<Directory> {
        self.ports.ledger.directory()
    }

    /// A client's change of the directory.
    pub async fn ask(
        &self,
        command: directory::Command,
        key: Option<Keyed>,
    ) -> Result<Answer<directory::Reply>, ProposeError> {
        self.ask_audited(command, key, None).await
    }

    /// A client's change of the directory, with its row of the audit log.
    pub(crate) async fn ask_audited(
        &self,
        command: directory::Command,
        key: Option<Keyed>,
        audit: Option<Arc<Audited>>,
    ) -> Result<Answer<directory::Reply>, ProposeError> {
        let entry = Entry { key, audit, ..Entry::new(self.now(), command) };
        self.ports.ledger.change_directory(entry).await
    }

    /// An actor's change of the directory, in the name of its shard.
    pub async fn report(
        &self,
        claim: Claim,
        command: directory::Command,
    ) -> Result<directory::Reply, ProposeError> {
        let entry = Entry { claim: Some(claim), ..Entry::new(self.now(), command) };
        Ok(self.ports.ledger.change_directory(entry).await?.result?)
    }

    /// A change of one shard.
    pub async fn ask_shard(
        &self,
        shard: u16,
        command: shard::Command,
        key: Option<Keyed>,
        claim: Option<Claim>,
    ) -> Result<Answer<shard::Reply>, ProposeError> {
        let entry = Entry { claim, key, ..Entry::new(self.now(), command) };
        self.ports.ledger.change_shard(shard, entry).await
    }

    /// Who leads a shard, as it told the directory when it took over.
    pub fn owner(&self, shard: u16) -> Option<NodeId> {
        self.directory().read().leaders.get(&u64::from(shard)).map(|leader| leader.node)
    }

    /// Whether a claim is as good as the newest that this node knows.
    pub fn is_current(&self, claim: Claim) -> bool {
        let known = self.directory().read().claims.get(&u64::from(claim.shard));
        known.is_none_or(|known| claim.term >= known.term)
    }

    /// The claim of this node to a shard it leads.
    pub fn claim(&self, shard: u16) -> Option<Claim> {
        let term = *self.ports.ledger.leading().borrow().get(&shard)?;
        Some(Claim { shard, term })
    }
}
