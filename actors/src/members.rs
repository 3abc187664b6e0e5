//! The other nodes, as actors need them: who belongs, who answers, and asking several at once.

use std::{sync::Arc, time::Duration};

use domain::{
    NodeId,
    node::{Node, NodeStatus},
};
use sha2::{Digest as _, Sha256};

use crate::{
    ask::{Ask, Told},
    world::World,
};

impl World {
    /// The other nodes that belong to the cluster and answer, as far as this one knows.
    pub fn others(&self) -> Vec<NodeId> {
        let directory = self.directory().read();
        let rows = directory.nodes.rows().filter(|(_, node)| node.is_member());
        let others = rows.map(|(id, _)| *id).filter(|id| *id != self.node_id);
        others.filter(|id| self.ports.peers.is_alive(*id)).collect()
    }

    /// The other nodes that belong to the cluster or did so once, whether they answer or not.
    pub fn ever(&self) -> Vec<NodeId> {
        let directory = self.directory().read();
        directory.nodes.rows().map(|(id, _)| *id).filter(|id| *id != self.node_id).collect()
    }

    /// Those of them that do not answer, or belong no more: who keeps copies speaks for them.
    pub fn silent(&self) -> Vec<NodeId> {
        let directory = self.directory().read();
        let rows = directory.nodes.rows().filter(|(id, _)| **id != self.node_id);
        let answers = |id, node: &Node| node.is_member() && self.ports.peers.is_alive(id);
        rows.filter(|(id, node)| !answers(**id, node)).map(|(id, _)| *id).collect()
    }

    /// The node that keeps something of this name in memory for all; `None` if it is this one. Members that
    /// answer take part, so another one keeps it when that one dies (rendezvous hashing).
    pub fn keeper(&self, name: &[u8]) -> Option<NodeId> {
        let weight = |node: &NodeId| -> [u8; 32] {
            Sha256::new().chain_update(name).chain_update(node.0.to_be_bytes()).finalize().into()
        };
        let all = self.others().into_iter().chain([self.node_id]);
        all.max_by_key(weight).filter(|node| *node != self.node_id)
    }

    /// Whether a node belongs to the cluster no more, whatever it does.
    pub fn has_left(&self, node: NodeId) -> bool {
        let directory = self.directory().read();
        match directory.nodes.get(&node) {
            Some(node) => match node.status {
                NodeStatus::Active | NodeStatus::Draining => false,
                NodeStatus::Dead | NodeStatus::Removed => true,
            },
            // A node that was never registered is one from before there were clusters: this one.
            None => node != self.node_id,
        }
    }

    /// Asks all of these at once; those who do not answer in time are missing.
    pub async fn ask_all(
        self: &Arc<Self>,
        nodes: impl IntoIterator<Item = NodeId>,
        ask: &Ask,
        within: Duration,
    ) -> Vec<(NodeId, Told)> {
        let questions = nodes.into_iter().map(|node| {
            let (world, ask) = (Arc::clone(self), ask.clone());
            async move {
                match world.ask_node(node, ask, within).await {
                    Ok(told) => Some((node, told)),
                    Err(error) => {
                        tracing::debug!(%node, %error, "a node did not answer");
                        None
                    }
                }
            }
        });
        futures::future::join_all(questions).await.into_iter().flatten().collect()
    }
}
