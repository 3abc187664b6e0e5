//! Nodes: the machines that belong to the cluster. Gossip says who answers; this says who belongs,
//! and what the operator wants of each. Join tokens are here too: a node belongs once it redeemed one.

use std::{collections::BTreeMap, time::Duration};

use serde::{Deserialize, Serialize};

use crate::{
    NodeId, Rejection, Timestamp, directory::Directory, event::DirectoryEvent, instance::Instance,
    machine::Claim,
};

/// The label that names a node's redundancy zone unless the operator says otherwise.
pub const ZONE_LABEL: &str = "zone";
/// How long instances of a draining node wait for others in their place, unless its operator says otherwise.
pub const DRAINS_WITHIN: Duration = Duration::from_secs(3600);
/// Join tokens that wait to be redeemed at once.
pub const TOKENS_MAX: usize = 1000;

/// What is wanted of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NodeStatus {
    /// It leads, stores and runs whatever falls to it.
    Active,
    /// Leaderships and instances move away and no new ones come.
    Draining,
    /// It was silent for so long that its replicas are replaced; it is active again when it is back.
    Dead,
    /// It left, or was taken out. Its certificate opens nothing any more.
    Removed,
}

impl NodeStatus {
    /// The word used in bodies.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Draining => "draining",
            Self::Dead => "dead",
            Self::Removed => "removed",
        }
    }
}

/// What a node says of itself when it starts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeFacts {
    /// The node.
    pub id: NodeId,
    /// The node in Raft's numbers: new with every new data folder.
    pub raft_id: u64,
    /// Where its peers reach it, as `host:port`: TCP for calls, UDP for gossip.
    pub peer_address: String,
    /// Where clients reach it.
    pub base_url: String,
    /// The release it runs.
    pub version: String,
    /// Free words such as `zone=a`.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// Cores that its instances may be promised.
    pub cores: u64,
    /// MiB of memory that its instances may be promised.
    pub memory_mb: u64,
    /// The runtimes that it has.
    #[serde(default)]
    pub providers: Vec<String>,
}

/// A node of the cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// What it said of itself last.
    pub facts: NodeFacts,
    /// What is wanted of it.
    pub status: NodeStatus,
    /// When it came to belong.
    pub joined_at: Timestamp,
    /// Since when the status holds.
    pub since: Timestamp,
    /// While it drains, also where it is taken for dead meanwhile: when what is still on it goes without
    /// anything in its place.
    pub drains_by: Option<Timestamp>,
}

impl Node {
    /// Its zone, which this label names; a node without one is a zone of its own.
    pub fn zone(&self, label: &str) -> String {
        let own = || self.facts.id.to_string();
        self.facts.labels.get(label).cloned().unwrap_or_else(own)
    }

    /// What it is when it is back from the dead: what was wanted of it still is.
    fn back(&self) -> NodeStatus {
        match self.drains_by {
            Some(_) => NodeStatus::Draining,
            None => NodeStatus::Active,
        }
    }

    /// Whether it belongs to the cluster and is not known to be gone.
    pub fn is_member(&self) -> bool {
        match self.status {
            NodeStatus::Active | NodeStatus::Draining => true,
            NodeStatus::Dead | NodeStatus::Removed => false,
        }
    }
}

/// Who leads a shard, as it told the directory when it took over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leader {
    /// The node.
    pub node: NodeId,
    /// In which term.
    pub term: u64,
}

/// A token that is good for one join. The token itself is not kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinToken {
    /// SHA-256 of the token.
    pub hash: [u8; 32],
    /// Until when it is good.
    pub expires_at: Timestamp,
}

impl Directory {
    /// The nodes that belong and are not known to be gone, oldest first.
    pub fn members(&self) -> Vec<Node> {
        let members = self.nodes.rows().filter(|(_, node)| node.is_member());
        members.map(|(_, node)| Node::clone(node)).collect()
    }

    /// The node with this number.
    pub fn node_by_raft_id(&self, raft_id: u64) -> Option<&Node> {
        let mut nodes = self.nodes.rows().map(|(_, node)| &**node);
        nodes.find(|node| node.facts.raft_id == raft_id)
    }

    /// The instances of one node.
    pub fn instances_on(&self, node: NodeId) -> impl Iterator<Item = &Instance> {
        let rows = self.instances.rows().map(|(_, row)| &**row);
        rows.filter(move |row| row.node_id == node)
    }
}

/// A node has started: its facts are the newest, and one that was thought dead is not.
pub(crate) fn register(
    state: &Directory,
    facts: &NodeFacts,
    at: Timestamp,
) -> Result<Vec<DirectoryEvent>, Rejection> {
    let known = state.nodes.get(&facts.id);
    let node = match known.as_deref() {
        // The very first node of a cluster is nobody's guest.
        None if state.nodes.is_empty() => admitted(facts, at),
        None => return Err(Rejection::NodeRemoved(facts.id)),
        Some(node) if node.status == NodeStatus::Removed => {
            return Err(Rejection::NodeRemoved(facts.id));
        }
        Some(node) if node.status == NodeStatus::Dead => {
            Node { facts: facts.clone(), status: node.back(), since: at, ..node.clone() }
        }
        Some(node) => Node { facts: facts.clone(), ..node.clone() },
    };
    Ok(vec![DirectoryEvent::NodePut(Box::new(node))])
}

fn admitted(facts: &NodeFacts, at: Timestamp) -> Node {
    let status = NodeStatus::Active;
    Node { facts: facts.clone(), status, joined_at: at, since: at, drains_by: None }
}

/// A token is worth one join: what redeems it comes to belong, and the token is gone.
pub(crate) fn redeem(
    state: &Directory,
    hash: &[u8; 32],
    facts: &NodeFacts,
    at: Timestamp,
) -> Result<Vec<DirectoryEvent>, Rejection> {
    let good = state.join_tokens.get(hash).is_some_and(|token| token.expires_at > at);
    let is_new = state.nodes.get(&facts.id).is_none()
        && state.nodes.rows().all(|(_, node)| node.facts.raft_id != facts.raft_id);
    if !good || !is_new {
        return Err(Rejection::JoinTokenInvalid);
    }
    Ok(vec![
        DirectoryEvent::JoinTokenGone(*hash),
        DirectoryEvent::NodePut(Box::new(admitted(facts, at))),
    ])
}

/// Adds a token; those whose time is over go.
pub(crate) fn mint_token(
    state: &Directory,
    token: &JoinToken,
    at: Timestamp,
) -> Result<Vec<DirectoryEvent>, Rejection> {
    let over = state.join_tokens.rows().filter(|(_, token)| token.expires_at <= at);
    let mut events: Vec<_> = over.map(|(hash, _)| DirectoryEvent::JoinTokenGone(*hash)).collect();
    if state.join_tokens.len() - events.len() >= TOKENS_MAX {
        return Err(Rejection::TooManyJoinTokens);
    }
    events.push(DirectoryEvent::JoinTokenPut(Box::new(token.clone())));
    Ok(events)
}

/// The operator, or the leader that misses a node, wants something else of it.
pub(crate) fn set_status(
    state: &Directory,
    id: NodeId,
    to: NodeStatus,
    at: Timestamp,
) -> Result<Vec<DirectoryEvent>, Rejection> {
    let node = state.nodes.get(&id).ok_or(Rejection::NodeNotFound(id))?;
    if node.status == to {
        return Ok(vec![]);
    }
    let from: &[NodeStatus] = match to {
        NodeStatus::Active => &[NodeStatus::Draining, NodeStatus::Dead],
        NodeStatus::Draining => &[NodeStatus::Active],
        NodeStatus::Dead => &[NodeStatus::Active, NodeStatus::Draining],
        NodeStatus::Removed => &[NodeStatus::Draining, NodeStatus::Dead],
    };
    if !from.contains(&node.status) {
        return Err(Rejection::InvalidState {
            current: node.status.as_str().to_owned(),
            allowed: from.iter().map(|status| status.as_str().to_owned()).collect(),
        });
    }
    let runs = state.instances_on(id).next().is_some();
    if to == NodeStatus::Removed && node.status != NodeStatus::Dead && runs {
        return Err(Rejection::NodeInUse(id));
    }
    let others = state.nodes.rows().any(|(other, row)| *other != id && row.is_member());
    let stays = matches!(to, NodeStatus::Active);
    if !stays && !others {
        return Err(Rejection::LastNode);
    }
    let (status, drains_by) = match to {
        NodeStatus::Active if node.status == NodeStatus::Dead => (node.back(), node.drains_by),
        NodeStatus::Active => (to, None),
        NodeStatus::Draining => (to, Some(at.plus(DRAINS_WITHIN))),
        NodeStatus::Dead | NodeStatus::Removed => (to, node.drains_by),
    };
    let node = Node { status, since: at, drains_by, ..Node::clone(&node) };
    Ok(vec![DirectoryEvent::NodePut(Box::new(node))])
}

/// A node is to drain by this time; one that drains may be given another.
pub(crate) fn drain(
    state: &Directory,
    id: NodeId,
    by: Timestamp,
    at: Timestamp,
) -> Result<Vec<DirectoryEvent>, Rejection> {
    let known = state.nodes.get(&id).ok_or(Rejection::NodeNotFound(id))?;
    let began = set_status(state, id, NodeStatus::Draining, at)?;
    let since = if began.is_empty() { known.since } else { at };
    let node =
        Node { status: NodeStatus::Draining, since, drains_by: Some(by), ..Node::clone(&known) };
    Ok(vec![DirectoryEvent::NodePut(Box::new(node))])
}

/// A shard's new leader says who it is; the claim says in which term.
pub(crate) fn lead(node: NodeId, claim: Option<Claim>) -> Vec<DirectoryEvent> {
    claim
        .map(|claim| {
            vec![DirectoryEvent::ShardTaken(claim), DirectoryEvent::ShardLed { claim, node }]
        })
        .unwrap_or_default()
}
