//! What one node has to say, on its way to a second copy on another one: it waits here, goes out in batches, and
//! waits again if nobody took it. What is of one agent goes to one node, in its order.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use actors::ports::PeerError;
use bytes::Bytes;
use domain::{AgentId, NodeId, codec};
use serde::{Deserialize, Serialize};

use super::{copies::takers, logs::lock, peers::NodePeers};

/// Most bytes of a batch, as it arrives.
pub const BATCH_BYTES_MAX: usize = 8 * 1024 * 1024;
/// Between batches: what came up since the last one goes with it.
const CARRIED_EVERY: Duration = Duration::from_millis(500);
/// Bytes of parcels in one batch, by [`Carried::weight`].
const BATCH_BYTES: usize = 1024 * 1024;
/// Bytes of parcels that wait for a node that does not take them; older ones are then without a copy.
const WAITING_BYTES_MAX: usize = 8 * 1024 * 1024;

/// What is carried.
pub trait Carried: Serialize + Send {
    /// Where it is taken in on a node's peer port.
    const PATH: &'static str;
    /// Whether two nodes may both have it. Where not, one that may have arrived goes to no other node.
    const MAY_BE_TWICE: bool;
    /// About how much memory it takes, and how many bytes on its way.
    fn weight(&self) -> usize;
}

/// Parcels of one node, for another one to keep.
#[derive(Serialize, Deserialize)]
pub struct Batch<T> {
    /// Where they come from.
    pub node: NodeId,
    /// What it is of which agent, in its order.
    #[serde(rename = "lines")]
    pub parcels: Vec<(AgentId, T)>,
}

/// One that has no copy yet, as far as is known.
struct Parcel<T> {
    agent: AgentId,
    content: T,
    /// The node that was given it and did not say whether it took it.
    given: Option<NodeId>,
}

/// Parcels in their order.
struct Waiting<T> {
    parcels: VecDeque<Parcel<T>>,
    bytes: usize,
}

impl<T> Default for Waiting<T> {
    fn default() -> Self {
        Self { parcels: VecDeque::new(), bytes: 0 }
    }
}

impl<T: Carried> Waiting<T> {
    /// One more; the oldest go if there is no room.
    fn push(&mut self, agent: AgentId, content: T) {
        self.bytes += content.weight();
        self.parcels.push_back(Parcel { agent, content, given: None });
        self.make_room();
    }

    /// Puts parcels in front again.
    fn put_back(&mut self, parcels: Vec<Parcel<T>>) {
        for parcel in parcels.into_iter().rev() {
            self.bytes += parcel.content.weight();
            self.parcels.push_front(parcel);
        }
        self.make_room();
    }

    fn make_room(&mut self) {
        while self.bytes > WAITING_BYTES_MAX
            && let Some(parcel) = self.parcels.pop_front()
        {
            self.bytes -= parcel.content.weight();
        }
    }
}

/// Carries what one node has.
pub struct Courier<T> {
    node: NodeId,
    waiting: Mutex<Waiting<T>>,
    /// Whether there is anybody to keep a copy.
    is_wanted: AtomicBool,
    peers: OnceLock<Arc<NodePeers>>,
}

impl<T: Carried> Courier<T> {
    /// For what this node has.
    pub fn new(node: NodeId) -> Self {
        Self {
            node,
            waiting: Mutex::default(),
            is_wanted: AtomicBool::new(false),
            peers: OnceLock::new(),
        }
    }

    /// From now on there are others.
    pub fn connect(&self, peers: Arc<NodePeers>) {
        let _ = self.peers.set(peers);
    }

    /// Takes a parcel, if there is anybody to give it to.
    pub fn push(&self, agent: AgentId, content: T) {
        if self.is_wanted.load(Relaxed) {
            lock(&self.waiting).push(agent, content);
        }
    }

    /// Carries until dropped.
    pub async fn run(&self) {
        loop {
            if let Some(peers) = self.peers.get() {
                self.is_wanted.store(peers.has_others(), Relaxed);
                self.carry(peers).await;
            }
            tokio::time::sleep(CARRIED_EVERY).await;
        }
    }

    async fn carry(&self, peers: &NodePeers) {
        let waiting = std::mem::take(&mut *lock(&self.waiting));
        let mut keepers = BTreeMap::new();
        let keeper = |agent: AgentId| {
            *keepers
                .entry(agent)
                .or_insert_with(|| takers(peers, &agent.to_string()).first().copied())
        };
        let (by_keeper, mut left) = sorted(waiting.parcels, keeper);
        for (node, parcels) in by_keeper {
            left.extend(self.carry_to(peers, node, parcels).await);
        }
        lock(&self.waiting).put_back(left);
    }

    /// Gives parcels to a node, in their order; those that it did not take come back.
    async fn carry_to(
        &self,
        peers: &NodePeers,
        node: NodeId,
        parcels: Vec<Parcel<T>>,
    ) -> Vec<Parcel<T>> {
        let mut left = parcels;
        while !left.is_empty() {
            let rest = left.split_off(first_batch(&left));
            let given: Vec<Option<NodeId>> = left.iter().map(|parcel| parcel.given).collect();
            let parcels = left.into_iter().map(|parcel| (parcel.agent, parcel.content)).collect();
            let batch = Batch { node: self.node, parcels };
            let taken = peers.keep(node, T::PATH, Bytes::from(codec::encode(&batch))).await;
            left = rest;
            if let Err(error) = taken {
                tracing::debug!(%node, %error, path = T::PATH, "parcels were not taken");
                let now = (!matches!(error, PeerError::Unreached(_))).then_some(node);
                let again = batch.parcels.into_iter().zip(given);
                let again = again.map(|((agent, content), before)| Parcel {
                    agent,
                    content,
                    given: now.or(before),
                });
                return again.chain(left).collect();
            }
        }
        left
    }
}

/// What each node gets.
type Loads<T> = BTreeMap<NodeId, Vec<Parcel<T>>>;

/// Who gets what, and what nobody gets now.
fn sorted<T: Carried>(
    parcels: VecDeque<Parcel<T>>,
    mut keeper: impl FnMut(AgentId) -> Option<NodeId>,
) -> (Loads<T>, Vec<Parcel<T>>) {
    let (mut by_keeper, mut left) = (Loads::new(), vec![]);
    for parcel in parcels {
        match (keeper(parcel.agent), parcel.given) {
            (Some(node), Some(given)) if given != node && !T::MAY_BE_TWICE => {}
            (Some(node), _) => by_keeper.entry(node).or_default().push(parcel),
            (None, _) => left.push(parcel),
        }
    }
    (by_keeper, left)
}

/// How many of these parcels one batch takes.
fn first_batch<T: Carried>(parcels: &[Parcel<T>]) -> usize {
    let mut bytes = 0;
    let fits = |parcel: &&Parcel<T>| {
        bytes += parcel.content.weight();
        bytes <= BATCH_BYTES
    };
    parcels.iter().take_while(fits).count().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const AGENT: AgentId = AgentId(1);

    /// So many bytes.
    #[derive(Debug, PartialEq, Eq, Serialize)]
    struct Heavy(usize);

    impl Carried for Heavy {
        const PATH: &'static str = "/heavy";
        const MAY_BE_TWICE: bool = true;

        fn weight(&self) -> usize {
            self.0
        }
    }

    /// One that counts.
    #[derive(Debug, PartialEq, Eq, Serialize)]
    struct Once;

    impl Carried for Once {
        const PATH: &'static str = "/once";
        const MAY_BE_TWICE: bool = false;

        fn weight(&self) -> usize {
            1
        }
    }

    fn parcel<T>(content: T, given: Option<NodeId>) -> Parcel<T> {
        Parcel { agent: AGENT, content, given }
    }

    #[test]
    fn a_batch_ends_before_it_is_too_long_and_has_a_parcel_at_least() {
        let halves: Vec<_> = (0..5).map(|_| parcel(Heavy(BATCH_BYTES / 2), None)).collect();
        assert_eq!(first_batch(&halves), 2);
        let longer = [parcel(Heavy(BATCH_BYTES * 2), None), parcel(Heavy(1), None)];
        assert_eq!(first_batch(&longer), 1);
    }

    #[test]
    fn parcels_that_were_not_taken_wait_in_front_and_the_oldest_go() {
        let mut waiting = Waiting::default();
        let weights = |waiting: &Waiting<Heavy>| -> Vec<usize> {
            waiting.parcels.iter().map(|parcel| parcel.content.0).collect()
        };
        waiting.push(AGENT, Heavy(3));
        waiting.put_back(vec![parcel(Heavy(1), None), parcel(Heavy(2), None)]);
        assert_eq!(weights(&waiting), [1, 2, 3]);
        waiting.push(AGENT, Heavy(WAITING_BYTES_MAX - 3));
        assert_eq!(weights(&waiting), [3, WAITING_BYTES_MAX - 3], "the oldest went");
        assert_eq!(waiting.bytes, WAITING_BYTES_MAX);
        waiting.put_back(vec![parcel(Heavy(2), None)]);
        assert_eq!(
            weights(&waiting),
            [3, WAITING_BYTES_MAX - 3],
            "there is no room for older ones"
        );
    }

    #[test]
    fn what_counts_goes_to_no_second_node_once_it_may_have_arrived() {
        let [a, b] = [NodeId(1), NodeId(2)];
        let kept = |given, keeper: Option<NodeId>| {
            let (by_keeper, left) = sorted(VecDeque::from([parcel(Once, given)]), |_| keeper);
            (by_keeper.into_keys().collect::<Vec<_>>(), left.len())
        };
        assert_eq!(kept(None, Some(b)), (vec![b], 0));
        assert_eq!(kept(Some(b), Some(b)), (vec![b], 0), "there it is known by its place");
        assert_eq!(kept(Some(a), Some(b)), (vec![], 0), "both would have it");
        assert_eq!(kept(Some(a), None), (vec![], 1), "it may come back");
        let lines = VecDeque::from([parcel(Heavy(1), Some(a))]);
        assert!(sorted(lines, |_| Some(b)).0.contains_key(&b), "of others two may be there");
    }
}
