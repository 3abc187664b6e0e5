//! What operators see of the cluster.

use std::collections::BTreeMap;

use domain::node::Node;
use poem_openapi::Object;

/// The cluster at a glance.
#[derive(Clone, Debug, Object)]
pub struct ClusterBody {
    /// The node that leads the directory; null while there is none.
    pub leader: Option<String>,
    /// The directory's term.
    pub term: u64,
    /// Voters of the directory that must agree.
    pub quorum: u64,
    /// Voters that may be lost without losing the service.
    pub failure_tolerance: u64,
    /// Whether every member answers and every group has a leader.
    pub healthy: bool,
    /// Members by what is wanted of them.
    pub nodes: BTreeMap<String, u64>,
    /// How many shards there are.
    pub shards: u64,
    /// Releases that members run, with how many run each.
    pub versions: BTreeMap<String, u64>,
}

/// A node.
#[derive(Clone, Debug, Object)]
pub struct NodeBody {
    /// Its id.
    pub id: String,
    /// `active`, `draining`, `dead` or `removed`.
    pub status: String,
    /// Whether it answers.
    pub alive: bool,
    /// Whether it says that it is caught up and serves.
    pub ready: bool,
    /// Whether nothing of the service is on it any more but replicas: it may be removed.
    pub drained: bool,
    /// Where clients reach it.
    pub base_url: String,
    /// Where its peers reach it.
    pub peer_address: String,
    /// The release it runs.
    pub version: String,
    /// Words about it.
    pub labels: BTreeMap<String, String>,
    /// The runtimes that it has.
    pub providers: Vec<String>,
    /// What its instances may be promised.
    pub capacity: NodeCapacityBody,
    /// Instances on it.
    pub instances: u64,
    /// Shards that it leads.
    pub leads: Vec<u64>,
    /// When it joined.
    pub joined_at: String,
    /// Since when the status holds.
    pub since: String,
}

/// What a node has.
#[derive(Clone, Debug, Object)]
pub struct NodeCapacityBody {
    /// Cores.
    pub cpu: u64,
    /// MiB of memory.
    pub memory_mb: u64,
}

/// What the directory does not say of a node.
pub struct Observed {
    /// Whether it answers.
    pub alive: bool,
    /// Whether it serves.
    pub ready: bool,
    /// Instances on it.
    pub instances: u64,
    /// Shards that it leads.
    pub leads: Vec<u64>,
}

impl NodeBody {
    /// A node as operators see it.
    pub fn of(node: &Node, seen: Observed) -> Self {
        let Observed { alive, ready, instances, leads } = seen;
        let facts = &node.facts;
        Self {
            id: facts.id.to_string(),
            status: node.status.as_str().to_owned(),
            alive,
            ready: alive && ready,
            drained: instances == 0 && leads.is_empty(),
            base_url: facts.base_url.clone(),
            peer_address: facts.peer_address.clone(),
            version: facts.version.clone(),
            labels: facts.labels.clone(),
            providers: facts.providers.clone(),
            capacity: NodeCapacityBody { cpu: facts.cores, memory_mb: facts.memory_mb },
            instances,
            leads,
            joined_at: node.joined_at.to_string(),
            since: node.since.to_string(),
        }
    }
}

/// A replicated group.
#[derive(Clone, Debug, Object)]
pub struct ShardBody {
    /// `directory`, or the number of the shard.
    pub name: String,
    /// The node that leads it.
    pub leader: Option<String>,
    /// In which term.
    pub term: u64,
    /// Nodes that vote.
    pub voters: Vec<String>,
    /// Nodes that listen.
    pub learners: Vec<String>,
    /// The last entry on the node that answers, if it has a replica.
    pub last_index: Option<u64>,
    /// The last entry that was applied there.
    pub applied_index: Option<u64>,
    /// Where the node that answers leads: entries that each replica lacks; a replica that does not
    /// answer is missing.
    pub behind: BTreeMap<String, u64>,
}

/// The health of the cluster, server by server.
#[derive(Clone, Debug, Object)]
pub struct ClusterHealthBody {
    /// Whether every server is.
    pub healthy: bool,
    /// Voters that may be lost without losing the service.
    pub failure_tolerance: u64,
    /// The members.
    pub servers: Vec<ServerHealthBody>,
}

/// The health of one server.
#[derive(Clone, Debug, Object)]
pub struct ServerHealthBody {
    /// Its id.
    pub id: String,
    /// Whether it answers.
    pub healthy: bool,
    /// Whether it votes on the directory.
    pub voter: bool,
    /// Whether it leads the directory.
    pub leader: bool,
    /// `active`, `draining` or `dead`.
    pub status: String,
    /// Entries of the directory that it lacks, where the node that answers knows.
    pub behind: Option<u64>,
    /// Since when its status holds.
    pub stable_since: String,
}

/// A token that lets one node join.
#[derive(Clone, Debug, Object)]
pub struct JoinTokenBody {
    /// For `roost join --token`. It is shown once.
    pub token: String,
    /// The address to join at.
    pub address: String,
    /// Until when it is good.
    pub expires_at: String,
}
