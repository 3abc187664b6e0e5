//! What gossip means for the rest of the node: who falls silent is acted upon, after a grace, by
//! whoever leads.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};

use actors::{
    ports::{Clock as _, Ledger as _},
    root::RootMessage,
    world::World,
};
use bytes::Bytes;
use cluster::{
    RaftLedger,
    gossip::{Alive, seal::Keyring},
    peer::{
        Class,
        client::{CallError, PeerClient},
    },
};
use domain::{
    NodeId, autopilot::Autopilot, data_key::OF_CLUSTER, directory::Command, machine::Entry,
    node::NodeStatus,
};
use ractor::ActorRef;
use tokio::time::Instant;

use crate::{adapters::system::SystemClock, bootstrap};

/// Between looks at the members.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// What every member answers.
const ANY_QUESTION: &str = "/read/0";
/// How long the others may take to say whether this node is one of them.
const TOLD_WITHIN: Duration = Duration::from_secs(1);

/// Actors look again when a node comes or goes, and once more when its grace is over.
pub async fn follow_the_living(alive: Arc<Alive>, root: ActorRef<RootMessage>, grace: Duration) {
    let mut changes = alive.changes();
    let mut again: Option<Instant> = None;
    loop {
        let due = again.unwrap_or_else(|| Instant::now() + Duration::from_secs(3600));
        tokio::select! {
            changed = changes.changed() => {
                if changed.is_err() {
                    return;
                }
                changes.borrow_and_update();
                again = Some(Instant::now() + grace + Duration::from_millis(50));
            }
            () = tokio::time::sleep_until(due) => again = None,
        }
        if root.cast(RootMessage::Sweep).is_err() {
            return;
        }
    }
}

/// Makes the key that signs access tokens, unless there is one.
pub async fn make_signing_key(world: &World) -> anyhow::Result<()> {
    if !world.directory().read().signing_keys.is_empty() {
        return Ok(());
    }
    let key = Box::new(bootstrap::signing_key(&*world.sealer(OF_CLUSTER).await?)?);
    world.ask(Command::PutSigningKey { key, only_first: true }, None).await?.result?;
    Ok(())
}

/// The directory's leader writes down which members are gone for so long that their replicas are
/// replaced, and which of those are back.
pub async fn judge(ledger: Arc<RaftLedger>, alive: Arc<Alive>, unless_told: Autopilot) {
    let mut since: BTreeMap<(NodeId, bool), Instant> = BTreeMap::new();
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        if !ledger.leads_directory() {
            since.clear();
            continue;
        }
        let autopilot = ledger.directory().read().autopilot();
        let autopilot = autopilot.unwrap_or_else(|| unless_told.clone());
        let nodes: Vec<(NodeId, u64, NodeStatus)> = {
            let directory = ledger.directory().read();
            let rows = directory.nodes.rows();
            rows.map(|(id, node)| (*id, node.facts.raft_id, node.status)).collect()
        };
        for (id, raft_id, status) in nodes {
            let answers = alive.has(raft_id);
            since.remove(&(id, !answers));
            let (to, after) = match (status, answers) {
                (NodeStatus::Active | NodeStatus::Draining, false)
                    if autopilot.cleanup_dead_servers =>
                {
                    (NodeStatus::Dead, autopilot.dead_after_ms)
                }
                (NodeStatus::Dead, true) => (NodeStatus::Active, autopilot.stabilization_ms),
                (NodeStatus::Active | NodeStatus::Draining, _)
                | (NodeStatus::Dead, false)
                | (NodeStatus::Removed, _) => continue,
            };
            let began = *since.entry((id, answers)).or_insert_with(Instant::now);
            if began.elapsed() >= Duration::from_millis(after) {
                since.remove(&(id, answers));
                set_status(&ledger, id, to).await;
            }
        }
    }
}

/// Where the key of gossip belongs, as sealed values say it.
pub const GOSSIP_KEY_PLACE: &str = "cluster/gossip.key";

/// Gossip is sealed with the key that the directory has, from the moment that it is known here. The key
/// before opens for as long as others may not have heard.
pub async fn turn_keys(
    ledger: Arc<RaftLedger>,
    keyring: Arc<Keyring>,
    world: Arc<World>,
    folder: PathBuf,
) {
    let mut known = None;
    loop {
        tokio::time::sleep(LOOK_EVERY / 4).await;
        let newest = ledger
            .directory()
            .read()
            .gossip_keys
            .rows()
            .next_back()
            .map(|(turn, key)| (*turn, Vec::clone(key)));
        let Some((turn, sealed)) = newest.filter(|(turn, _)| known != Some(*turn)) else {
            continue;
        };
        known = Some(turn);
        let sealer = world.opener(OF_CLUSTER);
        let opened = sealer.and_then(|sealer| sealer.open(&sealed, GOSSIP_KEY_PLACE));
        let key = opened.ok().and_then(|text| crate::keys::parse(&text).ok());
        let Some(key) = key else {
            tracing::error!("the key of gossip in the directory can't be opened");
            continue;
        };
        keyring.turn(key);
        let kept =
            crate::keys::write_secret(&folder.join("gossip.key"), crate::hex(&key).as_bytes());
        if let Err(error) = kept {
            tracing::error!(%error, "the key of gossip could not be kept; the next start reads it again");
        }
    }
}

/// A node that was taken out has nothing left to do once its replicas are elsewhere: this returns then, and the node
/// is to end. One that slept through it hears of it from the others.
pub async fn heed_removal(ledger: Arc<RaftLedger>, peers: Arc<PeerClient>) {
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let own = ledger.directory().read().nodes.get(&ledger.node_id());
        let is_out = own.is_some_and(|node| node.status == NodeStatus::Removed);
        let is_over =
            is_out || !ledger.contact().knows_leaders && is_told_to_be_out(&ledger, &peers).await;
        if is_over && !ledger.is_needed() {
            tracing::warn!("this node was taken out of the cluster and ends");
            return;
        }
    }
}

/// Whether all others that answer say that this node was taken out and is missed nowhere, and they are a
/// majority.
async fn is_told_to_be_out(ledger: &RaftLedger, peers: &PeerClient) -> bool {
    let numbers = ledger.numbers();
    let others = numbers.iter().filter(|(id, _)| **id != ledger.node_id());
    let asked = others.map(|(_, number)| {
        peers.call(*number, Class::Beats, ANY_QUESTION, Bytes::new(), TOLD_WITHIN)
    });
    let answers = futures::future::join_all(asked).await;
    let said = |answer: &Result<Bytes, CallError>| match answer {
        Err(CallError::TakenOut) => Some(true),
        Ok(_) | Err(CallError::Refused(_) | CallError::Said(_)) => Some(false),
        Err(CallError::Unreached(_) | CallError::Broken(_)) => None,
    };
    let said: Vec<bool> = answers.iter().filter_map(said).collect();
    said.iter().all(|is_out| *is_out) && said.len() * 2 > answers.len()
}

async fn set_status(ledger: &RaftLedger, id: NodeId, to: NodeStatus) {
    tracing::warn!(node = %id, status = to.as_str(), "a member is judged");
    let command = Command::SetNodeStatus { id, to };
    let entry = Entry::new(SystemClock.now(), command);
    match ledger.change_directory(entry).await.map(|answer| answer.result) {
        Ok(Ok(_)) => {}
        Ok(Err(reason)) => tracing::info!(%reason, "the member stays as it was"),
        Err(error) => tracing::info!(%error, "the judgement was not agreed"),
    }
}
