//! Calls in flight: how many an organization may have at once, on all nodes together. Every organization
//! has one node that keeps count; the others hold shares of the limit, as large as what they had in flight
//! lately, so a call asks nobody unless its node has more in flight than in the last second. When the limit
//! is near, shares that nobody uses are called back. Counts are in memory alone: a keeper that is new
//! asks the others what they hold, and a node that can ask nobody has its even part.
//!
//! A keeper never counts less than a node may use: what nodes ask and report is numbered in the order in which
//! it was true, and a report from before a grant that is still on its way does not undo that grant.
//!
//! Nobody is refused for what was in flight before the call came: a refusal comes from a look at all nodes that
//! is younger than the call. Looks are bounded, so calls over the limit wait for the next one.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use domain::{NodeId, Rejection, Timestamp, account::Tenant};
use futures::StreamExt as _;
use serde::{Deserialize, Serialize};

use crate::{
    ask::{Ask, Told},
    root::lock,
    world::World,
};

/// Between tellings of how much is in use.
const TELL_EVERY: Duration = Duration::from_secs(1);
/// Tenants whose keepers are told at once.
const TOLD_AT_ONCE: usize = 64;
/// How long a share is counted without word from its node.
const HELD_FOR: Duration = Duration::from_secs(5);
/// How long a node may take to say what it holds.
const TOLD_WITHIN: Duration = Duration::from_millis(800);
/// How long a keeper may take to answer: it may ask the others first, and for somebody else before that.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);
/// Between callings back; a question waits for the next one.
const CALL_BACK_EVERY: Duration = Duration::from_millis(100);

/// Calls in flight, as one node knows them.
#[derive(Default)]
pub struct Flights {
    here: Mutex<HashMap<Tenant, Here>>,
    /// The newest number of a question or report.
    number: AtomicU64,
    kept: Mutex<HashMap<Tenant, Arc<tokio::sync::Mutex<Kept>>>>,
}

/// What this node has of a tenant.
#[derive(Default)]
struct Here {
    in_flight: u64,
    /// Who waits for a larger share.
    waiting: u64,
    share: u64,
    /// Most in flight since the keeper was told last.
    peak: u64,
    asking: Arc<tokio::sync::Mutex<()>>,
    /// The number of the question that is under way.
    asked: Option<u64>,
    /// How many have ever waited for a larger share.
    came: u64,
    /// How many of them the last refusal was for: all that had come when it was asked for.
    refused: u64,
}

/// What a node holds, as it says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// Calls that it may have in flight.
    pub calls: u64,
    /// Later ones of a node have higher numbers; one that was true before a question has a lower one.
    pub number: u64,
}

/// What this node keeps of a tenant for all.
#[derive(Default)]
struct Kept {
    shares: BTreeMap<NodeId, (Share, Timestamp)>,
    is_known: bool,
    called_back_at: Timestamp,
}

impl Kept {
    /// What nodes but this one hold.
    fn elsewhere(&self, node: NodeId) -> u64 {
        let others = self.shares.iter().filter(|(holder, _)| **holder != node);
        others.map(|(_, (share, _))| share.calls).sum()
    }

    /// Writes down what a node says, unless it has said something since.
    fn note(&mut self, node: NodeId, share: Share, at: Timestamp) {
        let known = self.shares.entry(node).or_insert((share, at));
        if share.number >= known.0.number {
            *known = (share, at);
        }
    }

    /// What a node gets that wants as much; no less than it has.
    fn grant(&mut self, node: NodeId, wanted: Share, most: u64, at: Timestamp) -> u64 {
        let room = most.saturating_sub(self.elsewhere(node));
        let calls = match self.shares.get(&node) {
            // It does not wait for this answer any more.
            Some((known, _)) if known.number > wanted.number => return 0,
            Some((known, _)) => wanted.calls.min(room).max(known.calls),
            None => wanted.calls.min(room),
        };
        self.shares.insert(node, (Share { calls, number: wanted.number }, at));
        calls
    }
}

/// One call in flight, for as long as this is.
pub struct Flight {
    world: Arc<World>,
    tenant: Option<Tenant>,
}

impl Drop for Flight {
    fn drop(&mut self) {
        let Some(tenant) = self.tenant else { return };
        if let Some(here) = lock(&self.world.flights.here).get_mut(&tenant) {
            here.in_flight -= 1;
        }
    }
}

impl Here {
    fn take(&mut self) -> bool {
        let has_room = self.in_flight < self.share;
        if has_room {
            self.in_flight += 1;
            self.peak = self.peak.max(self.in_flight);
        }
        has_room
    }
}

impl Flights {
    fn take(&self, tenant: Tenant) -> bool {
        self.with(tenant, Here::take)
    }

    fn with<T>(&self, tenant: Tenant, change: impl FnOnce(&mut Here) -> T) -> T {
        change(lock(&self.here).entry(tenant).or_default())
    }

    /// What this node holds; nothing that is not in use if it is called back.
    pub(crate) fn share(&self, tenant: Tenant, call_back: bool, now: Timestamp) -> Share {
        let mut here = lock(&self.here);
        let Some(here) = here.get_mut(&tenant) else {
            return Share { calls: 0, number: self.next_number(now) };
        };
        if call_back {
            here.share = here.in_flight;
        }
        // The answer to a question that is under way comes after this.
        let number = here.asked.map_or_else(|| self.next_number(now), |asked| asked - 1);
        Share { calls: here.share, number }
    }

    /// Higher than any before, also of an earlier life of this node.
    fn next_number(&self, now: Timestamp) -> u64 {
        let after = |last: u64| (last + 1).max(now.millis());
        let last = self.number.fetch_update(Relaxed, Relaxed, |last| Some(after(last)));
        after(last.unwrap_or_else(|last| last))
    }

    /// Begins a question for a larger share: by as much as is waited for. Room that is free in the share
    /// now may be taken before the answer comes.
    fn begin_asking(&self, tenant: Tenant, most: u64, now: Timestamp) -> Share {
        let mut here = lock(&self.here);
        let here = here.entry(tenant).or_default();
        let number = self.next_number(now);
        here.asked = Some(number);
        let calls = here.share.max(here.in_flight) + here.waiting;
        Share { calls: calls.min(most), number }
    }

    /// Cuts shares to what was used since the last look; tenants without calls are forgotten.
    fn settle(&self) -> Vec<Tenant> {
        let mut here = lock(&self.here);
        let settled = here.iter_mut().map(|(tenant, one)| {
            one.share = one.peak.max(one.in_flight).min(one.share);
            one.peak = one.in_flight;
            *tenant
        });
        let settled = settled.collect();
        here.retain(|_, one| one.share > 0 || one.waiting > 0 || one.in_flight > 0);
        settled
    }
}

impl World {
    /// Begins a call of a tenant, if it has not too many already.
    pub async fn fly(self: &Arc<Self>, tenant: Tenant) -> Result<Flight, Rejection> {
        let world = Arc::clone(self);
        if !self.settings.rates.enabled {
            return Ok(Flight { world, tenant: None });
        }
        if self.flights.take(tenant) || self.fly_slowly(tenant).await {
            return Ok(Flight { world, tenant: Some(tenant) });
        }
        Err(Rejection::TooManyInFlight { max: self.in_flight_max(tenant) })
    }

    /// Most calls that a tenant may have in flight, on all nodes together.
    pub(crate) fn in_flight_max(&self, tenant: Tenant) -> u64 {
        self.directory().read().tier(tenant.org).in_flight_max()
    }

    async fn fly_slowly(self: &Arc<Self>, tenant: Tenant) -> bool {
        let (asking, number) = self.flights.with(tenant, |here| {
            here.waiting += 1;
            here.came += 1;
            (Arc::clone(&here.asking), here.came)
        });
        let _waits = Waits { world: self, tenant };
        let _turn = asking.lock().await;
        if self.flights.take(tenant) {
            return true;
        }
        let came = self.flights.with(tenant, |here| (number > here.refused).then_some(here.came));
        let Some(came) = came else { return false };
        let most = self.in_flight_max(tenant);
        let _asks = Asks { world: self, tenant };
        let wanted = self.flights.begin_asking(tenant, most, self.now());
        let share = self.ask_share(tenant, wanted, most).await;
        self.flights.with(tenant, |here| {
            // Together with the share: what is said from now on comes after the answer.
            here.asked = None;
            here.share = share.max(here.in_flight);
            // At once: a share that nobody uses is cut.
            let has_room = here.take();
            if !has_room {
                here.refused = came;
            }
            has_room
        })
    }

    fn keeper_of(&self, tenant: Tenant) -> Option<NodeId> {
        self.keeper(format!("flights {} {}", tenant.org, tenant.mode.is_live()).as_bytes())
    }

    async fn ask_share(self: &Arc<Self>, tenant: Tenant, wanted: Share, most: u64) -> u64 {
        let node = self.node_id;
        let Some(keeper) = self.keeper_of(tenant) else {
            return self.grant_share(tenant, node, wanted, most).await;
        };
        let ask = Ask::Share { tenant, node, wanted };
        match self.ask_other(keeper, ask, ANSWER_WITHIN).await {
            Ok(Told::Share(share)) => share.calls,
            Ok(_) | Err(_) => {
                let even = (most / (self.others().len() as u64 + 1)).max(1);
                wanted.calls.min(even).max(self.flights.with(tenant, |here| here.share))
            }
        }
    }

    /// As much of the limit as another node wants and is left.
    pub(crate) async fn grant_share(
        self: &Arc<Self>,
        tenant: Tenant,
        node: NodeId,
        wanted: Share,
        most: u64,
    ) -> u64 {
        let asked_at = self.now();
        let kept = Arc::clone(lock(&self.flights.kept).entry(tenant).or_default());
        let mut kept = kept.lock().await;
        if !kept.is_known {
            kept.is_known = self.look_at_shares(tenant, &mut kept, node, false).await;
        }
        let (now, known) = (self.now(), kept.shares.len());
        kept.shares.retain(|_, (_, at)| now.since(*at) < HELD_FOR);
        // A node that was not heard of may only have been slow.
        kept.is_known &= kept.shares.len() == known;
        let is_near = wanted.calls + kept.elsewhere(node) > most;
        // What was called back before the question may have been in use then: nobody is refused for that.
        if is_near && kept.called_back_at <= asked_at {
            let since = now.since(kept.called_back_at);
            tokio::time::sleep(CALL_BACK_EVERY.saturating_sub(since)).await;
            kept.called_back_at = self.now();
            self.look_at_shares(tenant, &mut kept, node, true).await;
        }
        kept.grant(node, wanted, most, self.now())
    }

    /// Writes down what a node uses, be it more than it should.
    pub(crate) async fn note_share(&self, tenant: Tenant, node: NodeId, share: Share) {
        let kept = Arc::clone(lock(&self.flights.kept).entry(tenant).or_default());
        kept.lock().await.note(node, share, self.now());
    }

    /// Asks all but `but` what they hold; says whether all have answered.
    async fn look_at_shares(
        &self,
        tenant: Tenant,
        kept: &mut Kept,
        but: NodeId,
        call_back: bool,
    ) -> bool {
        let now = self.now();
        if but != self.node_id {
            kept.note(self.node_id, self.flights.share(tenant, call_back, now), now);
        }
        let others = self.others().into_iter().filter(|node| *node != but);
        let told = futures::future::join_all(others.map(async |node| {
            let ask = Ask::HeldShare { tenant, call_back };
            (node, self.ask_other(node, ask, TOLD_WITHIN).await)
        }));
        let mut have_all_answered = true;
        for (node, told) in told.await {
            match told {
                Ok(Told::Share(share)) => kept.note(node, share, now),
                Ok(_) | Err(_) => have_all_answered = false,
            }
        }
        have_all_answered
    }

    /// Tells keepers what is in use, for as long as the node runs.
    pub async fn tend_flights(self: Arc<Self>) {
        loop {
            tokio::time::sleep(TELL_EVERY).await;
            let told = self.flights.settle().into_iter().map(|tenant| self.tell_share(tenant));
            // One keeper that hangs holds up no other.
            futures::stream::iter(told).for_each_concurrent(TOLD_AT_ONCE, |telling| telling).await;
            self.forget_kept();
        }
    }

    async fn tell_share(&self, tenant: Tenant) {
        let (node, share) = (self.node_id, self.flights.share(tenant, false, self.now()));
        match self.keeper_of(tenant) {
            None => self.note_share(tenant, node, share).await,
            Some(keeper) => {
                let ask = Ask::NoteShare { tenant, node, share };
                // A keeper that does not hear of it asks when it matters.
                let _ = self.ask_other(keeper, ask, ANSWER_WITHIN).await;
            }
        }
    }

    /// What nobody has told of for long is forgotten: this node may be its keeper no more.
    fn forget_kept(&self) {
        let now = self.now();
        lock(&self.flights.kept).retain(|_, kept| {
            let Ok(kept) = kept.try_lock() else { return true };
            let mut shares = kept.shares.values();
            shares.any(|(share, at)| share.calls > 0 && now.since(*at) < HELD_FOR)
        });
    }
}

/// A call that waits for a larger share, for as long as it does.
struct Waits<'w> {
    world: &'w World,
    tenant: Tenant,
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.world.flights.with(self.tenant, |here| here.waiting -= 1);
    }
}

/// A question that is under way. Whoever asked it may go away; then its answer is not used.
struct Asks<'w> {
    world: &'w World,
    tenant: Tenant,
}

impl Drop for Asks<'_> {
    fn drop(&mut self) {
        self.world.flights.with(self.tenant, |here| here.asked = None);
    }
}

#[cfg(test)]
mod tests {
    use domain::{OrgId, account::Mode};

    use super::*;

    const AT: Timestamp = Timestamp::MAX;

    const NODES: [NodeId; 2] = [NodeId(1), NodeId(2)];

    fn share(calls: u64, number: u64) -> Share {
        Share { calls, number }
    }

    #[test]
    fn a_report_from_before_a_grant_does_not_undo_it() {
        let mut kept = Kept::default();
        assert_eq!(kept.grant(NODES[0], share(15, 7), 20, AT), 15);
        kept.note(NODES[0], share(0, 6), AT);
        assert_eq!(kept.grant(NODES[1], share(20, 3), 20, AT), 5);
        kept.note(NODES[0], share(2, 8), AT);
        assert_eq!(kept.grant(NODES[1], share(20, 4), 20, AT), 18);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn nobody_is_refused_because_shares_are_cut_meanwhile() {
        let settings = crate::settings::Settings::default();
        assert!(settings.rates.enabled);
        let world = crate::fakes::FakeNode::new(settings).world;
        let tenant = Tenant { org: OrgId(1), mode: Mode::Live };
        let cut = Arc::clone(&world);
        let cutting = tokio::spawn(async move {
            loop {
                cut.flights.settle();
                tokio::task::yield_now().await;
            }
        });
        for _ in 0..500 {
            let calls = (0..8).map(|_| {
                let world = Arc::clone(&world);
                tokio::spawn(async move { world.fly(tenant).await.map(drop) })
            });
            for call in futures::future::join_all(calls).await {
                assert_eq!(call.expect("it ends"), Ok(()));
            }
        }
        cutting.abort();
    }

    #[tokio::test]
    async fn who_asks_has_room_though_others_came_and_went_meanwhile() {
        let world = crate::fakes::FakeNode::new(crate::settings::Settings::default()).world;
        let tenant = Tenant { org: OrgId(1), mode: Mode::Live };
        let first = world.fly(tenant).await.expect("it is far from the limit");
        let kept = Arc::clone(&lock(&world.flights.kept)[&tenant]);
        let answer = kept.lock().await;
        let mut asking = std::pin::pin!(world.fly(tenant));
        assert!(futures::poll!(&mut asking).is_pending());
        drop(first);
        let _taken = world.fly(tenant).await.expect("the first has gone");
        drop(answer);
        assert_eq!(asking.await.map(drop), Ok(()));
    }

    #[test]
    fn a_question_that_nobody_waits_for_gets_nothing() {
        let mut kept = Kept::default();
        kept.note(NODES[0], share(3, 9), AT);
        assert_eq!(kept.grant(NODES[0], share(20, 8), 20, AT), 0);
        assert_eq!(kept.elsewhere(NODES[1]), 3);
    }

    #[test]
    fn a_node_keeps_what_it_may_be_using() {
        let mut kept = Kept::default();
        kept.note(NODES[0], share(12, 1), AT);
        kept.note(NODES[1], share(8, 1), AT);
        assert_eq!(kept.grant(NODES[0], share(10, 2), 20, AT), 12);
        assert_eq!(kept.grant(NODES[1], share(9, 2), 20, AT), 8);
    }

    #[test]
    fn what_is_said_while_a_question_is_under_way_comes_before_its_answer() {
        let (flights, tenant) = (Flights::default(), Tenant { org: OrgId(1), mode: Mode::Live });
        let before = flights.share(tenant, false, AT);
        let asked = flights.begin_asking(tenant, 20, AT);
        let meanwhile = flights.share(tenant, true, AT);
        assert!(before.number <= meanwhile.number && meanwhile.number < asked.number);
        flights.with(tenant, |here| here.asked = None);
        assert!(flights.share(tenant, false, AT).number > asked.number);
    }
}
