//! What operators see of the cluster.

use std::{collections::BTreeMap, time::Duration};

use domain::{
    autopilot::Autopilot,
    node::{DRAINS_WITHIN, Node, NodeStatus},
};
use poem_openapi::{Object, types::Any};
use serde_json::Value;

use crate::error::Problem;

/// The cluster at a glance.
#[derive(Clone, Debug, Object)]
pub struct ClusterBody {
    /// The node that leads the directory; null while there is none.
    pub leader: Option<String>,
    /// The directory's term.
    pub term: u64,
    /// Voters of the directory that must agree.
    pub quorum: u64,
    /// Nodes that may be lost at once, whichever they are, before some group can't go on.
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
    /// Of one that drains: when what has found no room elsewhere goes without anything in its place.
    pub drain_deadline: Option<String>,
}

/// How a node drains.
#[derive(Clone, Debug, Default, Object)]
pub struct DrainRequest {
    /// Seconds that instances have to find room elsewhere, up to 30 days: 3600 if left out.
    #[oai(validator(maximum(value = "2592000")))]
    pub deadline_s: Option<u64>,
    /// Whether they go at once, without waiting for others in their place. Calls in flight finish all the same.
    pub force: Option<bool>,
}

impl DrainRequest {
    /// How long instances have.
    pub fn within(&self) -> Result<Duration, Problem> {
        match (self.force, self.deadline_s) {
            (Some(true), Some(_)) => {
                Err(Problem::field("deadline_s", "has no meaning with force; send one of them"))
            }
            (Some(true), None) => Ok(Duration::ZERO),
            (_, seconds) => Ok(seconds.map_or(DRAINS_WITHIN, Duration::from_secs)),
        }
    }
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
        let drains_by = node.drains_by.filter(|_| node.status == NodeStatus::Draining);
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
            drain_deadline: drains_by.map(|by| by.to_string()),
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
    /// Nodes that may be lost at once, whichever they are, before some group can't go on.
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
    /// Entries of the directory that it lacks, where the node that answers leads it.
    pub behind: Option<u64>,
    /// The last entry of the directory that it has, where the node that answers leads it.
    pub last_index: Option<u64>,
    /// How long ago it answered the leader, where that is the node that answers.
    pub last_contact_ms: Option<u64>,
    /// Since when its status holds.
    pub stable_since: String,
}

/// How the cluster looks after its replicas.
#[derive(Clone, Debug, Object)]
pub struct ClusterConfigBody {
    /// Whether the replicas of a node that is silent for `dead_after_s` are replaced.
    pub cleanup_dead_servers: bool,
    /// After how long, in seconds.
    pub dead_after_s: u64,
    /// A server that was not heard of for longer is not healthy, in milliseconds.
    pub last_contact_threshold_ms: u64,
    /// Entries that a replica may lack to be made a voter.
    pub max_trailing_logs: u64,
    /// How long a node that was given up must answer before it counts again, in seconds.
    pub stabilization_s: u64,
    /// Fewer voters than this are never made of more, however long a node is dead.
    pub min_quorum: u64,
    /// The label that names a node's redundancy zone.
    pub redundancy_zone: String,
}

impl From<Autopilot> for ClusterConfigBody {
    fn from(row: Autopilot) -> Self {
        Self {
            cleanup_dead_servers: row.cleanup_dead_servers,
            dead_after_s: row.dead_after_ms / 1000,
            last_contact_threshold_ms: row.last_contact_threshold_ms,
            max_trailing_logs: row.max_trailing_logs,
            stabilization_s: row.stabilization_ms / 1000,
            min_quorum: row.min_quorum,
            redundancy_zone: row.redundancy_zone,
        }
    }
}

/// Say how the cluster looks after its replicas. What is left out takes its default.
#[derive(Clone, Debug, Object)]
pub struct PutClusterConfig {
    /// `true` if left out.
    pub cleanup_dead_servers: Option<bool>,
    /// 1 to 2592000; 600 if left out.
    #[oai(validator(minimum(value = "1"), maximum(value = "2592000")))]
    pub dead_after_s: Option<u64>,
    /// 100 to 60000; 1000 if left out.
    #[oai(validator(minimum(value = "100"), maximum(value = "60000")))]
    pub last_contact_threshold_ms: Option<u64>,
    /// 1 to 1000000; 1000 if left out.
    #[oai(validator(minimum(value = "1"), maximum(value = "1000000")))]
    pub max_trailing_logs: Option<u64>,
    /// 0 to 86400; 10 if left out.
    #[oai(validator(minimum(value = "0"), maximum(value = "86400")))]
    pub stabilization_s: Option<u64>,
    /// 1 to 5; 3 if left out.
    #[oai(validator(minimum(value = "1"), maximum(value = "5")))]
    pub min_quorum: Option<u64>,
    /// A label of `cluster.labels`; `zone` if left out.
    #[oai(validator(min_length = 1, max_length = 63))]
    pub redundancy_zone: Option<String>,
}

impl From<PutClusterConfig> for Autopilot {
    fn from(body: PutClusterConfig) -> Self {
        let unsaid = Self::default();
        let millis = |seconds: u64| seconds * 1000;
        Self {
            cleanup_dead_servers: body.cleanup_dead_servers.unwrap_or(unsaid.cleanup_dead_servers),
            dead_after_ms: body.dead_after_s.map_or(unsaid.dead_after_ms, millis),
            last_contact_threshold_ms: body
                .last_contact_threshold_ms
                .unwrap_or(unsaid.last_contact_threshold_ms),
            max_trailing_logs: body.max_trailing_logs.unwrap_or(unsaid.max_trailing_logs),
            stabilization_ms: body.stabilization_s.map_or(unsaid.stabilization_ms, millis),
            min_quorum: body.min_quorum.unwrap_or(unsaid.min_quorum),
            redundancy_zone: body.redundancy_zone.unwrap_or(unsaid.redundancy_zone),
        }
    }
}

/// Something about the cluster that changed.
#[derive(Clone, Debug, PartialEq, Object)]
pub struct ClusterEventBody {
    /// `cluster.seen` at first; then `node.joined`, `node.changed`, `node.removed`, `leader.changed`,
    /// `replicas.changed`.
    #[oai(rename = "type")]
    pub kind: String,
    /// When it was seen.
    pub timestamp: String,
    /// The node it is about, or the one that leads now.
    pub node_id: Option<String>,
    /// The group it is about: `directory`, or the number of a shard.
    pub group: Option<String>,
    /// How that is now: what GET /v1/cluster/nodes and GET /v1/cluster/shards show of it.
    pub data: Any<Value>,
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
