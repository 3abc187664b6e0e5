//! The cluster as its operators see it: Raft's numbers become the ids of nodes.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use actors::ports::{
    Clock as _, ClusterView, Contact, GroupView, Ledger as _, NewToken, ProposeError,
};
use cluster::{RaftLedger, gossip::Alive, raft::group::View};
use domain::{NodeId, directory::Command, machine::Entry, node::JoinToken};
use futures::{FutureExt as _, future::BoxFuture};

use super::{authority::Authority, system::SystemClock};
use crate::join::{GOOD_FOR, Token};

/// What one node knows of its cluster.
pub struct NodeView {
    /// What is agreed.
    pub ledger: Arc<RaftLedger>,
    /// Who answers.
    pub alive: Arc<Alive>,
    /// Who signs.
    pub authority: Authority,
}

impl ClusterView for NodeView {
    fn alive(&self) -> BTreeSet<NodeId> {
        let members = self.ledger.numbers().into_iter();
        members.filter(|(_, number)| self.alive.has(*number)).map(|(id, _)| id).collect()
    }

    fn ready(&self) -> BTreeSet<NodeId> {
        let members = self.ledger.numbers().into_iter();
        let says = |number: u64| self.alive.load(number).is_some_and(|load| load.ready);
        members.filter(|(_, number)| says(*number)).map(|(id, _)| id).collect()
    }

    fn groups(&self) -> Vec<GroupView> {
        let views = self.ledger.views();
        let directory = self.ledger.directory().read();
        let ids: BTreeMap<u64, NodeId> =
            directory.nodes.rows().map(|(id, node)| (node.facts.raft_id, *id)).collect();
        let of_shard = |shard: u16| directory.leaders.get(&u64::from(shard)).map(|one| *one);
        let view = |(number, (view, is_here)): (u16, (View, bool))| {
            let shard = number.checked_sub(1);
            let told = shard.and_then(of_shard);
            let name = |id: &u64| ids.get(id).copied();
            GroupView {
                shard,
                leader: view
                    .leader
                    .and_then(|leader| name(&leader))
                    .or_else(|| told.filter(|_| !is_here).map(|told| told.node)),
                term: if is_here { view.term } else { told.map_or(0, |told| told.term) },
                voters: view.voters.iter().filter_map(name).collect(),
                learners: view.learners.iter().filter_map(name).collect(),
                last_index: is_here.then_some(view.last_index),
                applied_index: is_here.then_some(view.applied_index),
                contact: view.contact.iter().filter_map(|(id, n)| Some((name(id)?, *n))).collect(),
                behind: view.behind.iter().filter_map(|(id, n)| Some((name(id)?, *n))).collect(),
            }
        };
        (0..).zip(views).map(view).collect()
    }

    fn contact(&self) -> Contact {
        self.ledger.contact()
    }

    fn mint_token(&self) -> BoxFuture<'_, Result<NewToken, ProposeError>> {
        async move {
            let token = Token::new(&self.authority).map_err(|_| ProposeError::Unavailable)?;
            let at = SystemClock.now();
            let expires_at = at.plus(GOOD_FOR);
            let kept = Box::new(JoinToken { hash: token.hash(), expires_at });
            let command = Command::MintJoinToken(kept);
            let entry = Entry::new(at, command);
            self.ledger.change_directory(entry).await?.result?;
            let own = self.ledger.directory().read().nodes.get(&self.ledger.node_id());
            let address = own.map(|node| node.facts.peer_address.clone()).unwrap_or_default();
            Ok(NewToken { token: token.to_string(), address, expires_at })
        }
        .boxed()
    }
}
