//! Everything that actors and calls reach for, in one handle.

use std::sync::Arc;

use domain::{
    NodeId, Timestamp,
    directory::{self, Directory},
    idempotency::Keyed,
    machine::{Answer, Claim, Entry},
    shard,
};

use crate::{
    attempt::Attempts,
    invocation::AgentClient,
    limiter::Limiter,
    meter::Meter,
    ports::{
        Blobs, Clock, ClusterView, Entropy, Ledger, Logs, Outbound, Peers, ProposeError, Replica,
        Runtime, Series, Snapshots,
    },
    root::Watch,
    route::Routes,
    seal::Sealer,
    sending::Sending,
    settings::Settings,
};

/// The ports, as a node hands them over.
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
    /// Seals secrets.
    pub sealer: Sealer,
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
}

impl World {
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
        make(self.now(), self.ports.entropy.dice())
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
        let entry = Entry { at: self.now(), claim: None, key, command };
        self.ports.ledger.change_directory(entry).await
    }

    /// An actor's change of the directory, in the name of its shard.
    pub async fn report(
        &self,
        claim: Claim,
        command: directory::Command,
    ) -> Result<directory::Reply, ProposeError> {
        let entry = Entry { at: self.now(), claim: Some(claim), key: None, command };
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
        let entry = Entry { at: self.now(), claim, key, command };
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
