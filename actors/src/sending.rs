//! Attempts of deliveries that a node has under way. Leadership may move while a request is on its way:
//! whoever owns the webhook next asks what is, and sends none of it twice. How such an attempt ends is
//! written down by the node that made it, owner or not; it is what happened.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use domain::{DeliveryId, NodeId, machine::Claim};
use tokio::{sync::OnceCell, time::Instant};

use crate::{
    ask::{Ask, Told},
    root::lock,
    world::World,
};

/// How long a node may take to tell; one that does not is taken for dead.
const TOLD_WITHIN: Duration = Duration::from_secs(2);
/// Longer than any attempt and the wait for its turn: what is not known to have ended by then, has.
pub const UNDER_WAY_FOR: Duration = Duration::from_secs(80);

/// What this node has under way, and what it heard of others.
#[derive(Default)]
pub struct Sending(Mutex<State>);

/// A delivery that is under way, and how many attempts of it were written down when this one began: once
/// there are more, it is over.
pub type Begun = (DeliveryId, usize);

#[derive(Default)]
struct State {
    under_way: HashMap<DeliveryId, (u16, usize)>,
    /// Owners with an older term than this begin nothing here any more.
    since: HashMap<u16, u64>,
    elsewhere: HashMap<u16, (u64, Arc<OnceCell<Elsewhere>>)>,
}

struct Elsewhere {
    until: Instant,
    deliveries: Vec<(Begun, NodeId)>,
}

/// One attempt; it is under way for as long as this lives.
pub struct UnderWay {
    sending: Arc<Sending>,
    id: DeliveryId,
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        lock(&self.sending.0).under_way.remove(&self.id);
    }
}

impl Sending {
    /// Begins an attempt; `None` if a newer owner has asked what is under way, or if it is already.
    pub fn begin(self: &Arc<Self>, claim: Claim, (id, attempts): Begun) -> Option<UnderWay> {
        let mut state = lock(&self.0);
        let is_old = state.since.get(&claim.shard).is_some_and(|since| *since > claim.term);
        if is_old || state.under_way.contains_key(&id) {
            return None;
        }
        state.under_way.insert(id, (claim.shard, attempts));
        Some(UnderWay { sending: Arc::clone(self), id })
    }

    /// What is under way of a shard, for its new owner: older ones begin nothing here from now on.
    pub fn tell(&self, claim: Claim) -> Vec<Begun> {
        let mut state = lock(&self.0);
        let since = state.since.entry(claim.shard).or_default();
        *since = claim.term.max(*since);
        state.of(claim.shard).collect()
    }

    /// What is under way here of a shard.
    pub fn of(&self, shard: u16) -> Vec<Begun> {
        lock(&self.0).of(shard).collect()
    }

    /// Whether a delivery is under way here.
    pub fn has(&self, id: DeliveryId) -> bool {
        lock(&self.0).under_way.contains_key(&id)
    }

    /// How many are.
    pub fn count(&self) -> usize {
        lock(&self.0).under_way.len()
    }

    fn asked(&self, claim: Claim) -> Arc<OnceCell<Elsewhere>> {
        let mut state = lock(&self.0);
        let known = state.elsewhere.entry(claim.shard).or_default();
        if known.0 != claim.term {
            *known = (claim.term, Arc::default());
        }
        Arc::clone(&known.1)
    }
}

impl State {
    fn of(&self, shard: u16) -> impl Iterator<Item = Begun> {
        let own = self.under_way.iter().filter(move |(_, (of, _))| *of == shard);
        own.map(|(id, (_, attempts))| (*id, *attempts))
    }
}

impl World {
    /// Deliveries of a shard that other nodes have under way, from when they led it. Asked once in a term.
    pub(crate) async fn under_way_elsewhere(
        self: &Arc<Self>,
        claim: Claim,
    ) -> Vec<(Begun, NodeId)> {
        let cell = self.sending.asked(claim);
        let known = cell
            .get_or_init(async || Elsewhere {
                until: Instant::now() + UNDER_WAY_FOR,
                deliveries: self.ask_what_is_under_way(claim).await,
            })
            .await;
        if Instant::now() < known.until { known.deliveries.clone() } else { vec![] }
    }

    async fn ask_what_is_under_way(self: &Arc<Self>, claim: Claim) -> Vec<(Begun, NodeId)> {
        let asked = self.others().into_iter().map(async |node| {
            match self.ask_node(node, Ask::Sending { claim }, TOLD_WITHIN).await {
                Ok(Told::Sending(all)) => all.into_iter().map(|one| (one, node)).collect(),
                Ok(_) | Err(_) => vec![],
            }
        });
        futures::future::join_all(asked).await.concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_owner_begins_nothing_once_a_newer_one_has_asked() {
        let sending = Arc::new(Sending::default());
        let claim = |term| Claim { shard: 3, term };
        let first = sending.begin(claim(5), (DeliveryId(1), 2)).expect("it leads");
        assert!(sending.begin(claim(5), (DeliveryId(1), 2)).is_none(), "once at a time");
        assert_eq!(sending.tell(claim(6)), [(DeliveryId(1), 2)]);
        assert!(sending.begin(claim(5), (DeliveryId(2), 0)).is_none(), "it leads no more");
        assert!(sending.begin(Claim { shard: 4, term: 5 }, (DeliveryId(2), 0)).is_some());
        assert!(sending.begin(claim(6), (DeliveryId(3), 0)).is_some());
        drop(first);
        assert!(!sending.has(DeliveryId(1)));
        assert_eq!(sending.count(), 0);
    }
}
