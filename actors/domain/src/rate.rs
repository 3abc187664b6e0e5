//! Rate limits: how many calls an organization has left, whichever nodes it calls.
//!
//! The organization's shard lends small batches of calls to nodes. A batch counts as used from the
//! moment it is lent until its node tells what became of it, be it late; so all nodes together never
//! allow more than the tier, also after a change of leader, since every batch is in the log. A node
//! whose answer was lost is lent the same batch again. The minute is sixty buckets of a second each; the
//! day is the calendar's, in UTC.

use std::{collections::BTreeMap, time::Duration};

use serde::{Deserialize, Serialize};

use crate::{NodeId, Rejection, Timestamp, account::Tenant, event::ShardEvent, shard::Shard};

/// How long a node may spend what it was lent.
pub const LENT_FOR: Duration = Duration::from_secs(2);
/// Buckets of the minute.
const SECONDS: u64 = 60;
const DAY_SECONDS: u64 = 86_400;

/// How many calls a tier allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Allowance {
    /// In any minute.
    pub per_minute: u64,
    /// In a day; `None` is no limit.
    pub per_day: Option<u64>,
}

/// A batch that a node was lent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lent {
    /// Its number, new with every batch of the organization.
    pub number: u64,
    /// How many calls.
    pub calls: u64,
    /// Until when they may be spent.
    pub until: Timestamp,
}

/// What a node spent of a batch, by second since 1970.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spent {
    /// Of which batch.
    pub number: u64,
    /// Calls by second.
    pub by_second: BTreeMap<u64, u64>,
}

/// What an organization has used.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Calls of the last minute by second since 1970.
    pub seconds: BTreeMap<u64, u64>,
    /// The day since 1970 that is counted.
    pub day: u64,
    /// Calls of that day.
    pub today: u64,
    /// What nodes hold.
    pub lent: BTreeMap<NodeId, Lent>,
    /// The number of the last batch.
    pub number: u64,
}

/// What a node is told with a batch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// The batch; of no calls where none were left.
    pub lent: Lent,
    /// Calls left this minute beside the batch.
    pub minute_left: u64,
    /// When the oldest counted second leaves the minute.
    pub minute_reset: u64,
    /// Calls left today beside the batch; `None` is no limit.
    pub day_left: Option<u64>,
    /// When the day ends.
    pub day_reset: u64,
    /// Calls that other nodes hold: they may come back.
    pub held_elsewhere: u64,
}

impl Usage {
    /// As of `at`: what is over is forgotten. A batch that nobody has told of counts as spent at the end of
    /// its time, so it is over a minute later.
    fn tidy(&mut self, at: Timestamp) {
        let now = at.seconds();
        let is_over = |lent: &Lent| lent.until.seconds() + SECONDS <= now;
        let over = self.lent.iter().filter(|(_, lent)| is_over(lent)).map(|(node, _)| *node);
        for node in over.collect::<Vec<_>>() {
            self.count_as_spent(node);
        }
        self.seconds.retain(|second, _| *second + SECONDS > now);
        if self.day < now / DAY_SECONDS {
            (self.day, self.today) = (now / DAY_SECONDS, 0);
        }
    }

    fn count(&mut self, second: u64, calls: u64) {
        if calls == 0 {
            return;
        }
        *self.seconds.entry(second).or_default() += calls;
        match (second / DAY_SECONDS).cmp(&self.day) {
            std::cmp::Ordering::Less => {}
            std::cmp::Ordering::Equal => self.today += calls,
            std::cmp::Ordering::Greater => (self.day, self.today) = (second / DAY_SECONDS, calls),
        }
    }

    fn count_as_spent(&mut self, node: NodeId) {
        if let Some(lent) = self.lent.remove(&node) {
            self.count(lent.until.seconds(), lent.calls);
        }
    }

    /// A node tells what it spent; the rest comes back.
    fn settle(&mut self, node: NodeId, spent: &Spent) {
        let Some(lent) = self.lent.get(&node).filter(|lent| lent.number == spent.number).cloned()
        else {
            return;
        };
        self.lent.remove(&node);
        let mut left = lent.calls;
        for (second, calls) in &spent.by_second {
            let calls = (*calls).min(left);
            left -= calls;
            self.count(*second, calls);
        }
    }

    fn held(&self) -> u64 {
        self.lent.values().map(|lent| lent.calls).sum()
    }

    fn minute_left(&self, allowance: Allowance) -> u64 {
        let counted: u64 = self.seconds.values().sum();
        allowance.per_minute.saturating_sub(counted + self.held())
    }

    fn day_left(&self, allowance: Allowance) -> Option<u64> {
        Some(allowance.per_day?.saturating_sub(self.today + self.held()))
    }

    /// Lends what is there, at most `wanted`.
    fn lend(&mut self, node: NodeId, wanted: u64, allowance: Allowance, at: Timestamp) {
        let left = self.minute_left(allowance);
        let left = self.day_left(allowance).map_or(left, |day| day.min(left));
        self.number += 1;
        let lent = Lent { number: self.number, calls: wanted.min(left), until: at.plus(LENT_FOR) };
        self.lent.insert(node, lent);
    }

    /// Whether a node that tells this has not heard of what it was lent last, or its question comes late.
    fn is_unheard(&self, node: NodeId, spent: Option<&Spent>, at: Timestamp) -> bool {
        let (Some(lent), Some(spent)) = (self.lent.get(&node), spent) else { return false };
        spent.number < lent.number && lent.calls > 0 && at < lent.until
    }

    /// A node asks for calls, and tells what it spent of the last ones it knows of.
    fn ask(
        &mut self,
        node: NodeId,
        (wanted, allowance): (u64, Allowance),
        spent: Option<&Spent>,
        at: Timestamp,
    ) {
        // First of all: a clock that runs behind must not count twice what is counted already.
        if let Some(spent) = spent {
            self.settle(node, spent);
        }
        self.tidy(at);
        if wanted > 0 && !self.is_unheard(node, spent, at) {
            self.count_as_spent(node);
            self.lend(node, wanted, allowance, at);
        }
    }

    /// What to tell a node that was lent something.
    pub fn grant(&self, node: NodeId, allowance: Allowance, at: Timestamp) -> Option<Grant> {
        let lent = self.lent.get(&node)?.clone();
        let now = at.seconds();
        let untold = self.lent.values().filter(|lent| lent.calls > 0);
        let used = self.seconds.keys().copied().chain(untold.map(|lent| lent.until.seconds()));
        let oldest = used.min().unwrap_or(now).min(now);
        let others = self.lent.iter().filter(|(other, lent)| **other != node && at < lent.until);
        Some(Grant {
            minute_left: self.minute_left(allowance),
            minute_reset: oldest.max(now.saturating_sub(SECONDS - 1)) + SECONDS,
            day_left: self.day_left(allowance),
            day_reset: (now / DAY_SECONDS + 1) * DAY_SECONDS,
            held_elsewhere: others.map(|(_, lent)| lent.calls).sum(),
            lent,
        })
    }
}

/// A node asks for calls, and tells what it spent of the last ones.
pub(crate) fn lend(
    state: &Shard,
    tenant: Tenant,
    node: NodeId,
    (wanted, allowance): (u64, Allowance),
    spent: Option<&Spent>,
    at: Timestamp,
) -> Result<Vec<ShardEvent>, Rejection> {
    let row = state.usage.get(&key(tenant));
    let mut usage = row.map(|row| Usage::clone(&row)).unwrap_or_default();
    usage.ask(node, (wanted, allowance), spent, at);
    Ok(vec![ShardEvent::UsagePut { tenant, usage }])
}

/// The key of a tenant's row.
pub fn key(tenant: Tenant) -> String {
    format!("{}/{}", tenant.org, if tenant.mode.is_live() { "live" } else { "test" })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMIT: Allowance = Allowance { per_minute: 60, per_day: Some(100) };

    fn at(millis: u64) -> Timestamp {
        Timestamp::from_millis(1_700_006_400_000 + millis)
    }

    fn node(number: u8) -> NodeId {
        NodeId(u128::from(number))
    }

    #[test]
    fn what_is_lent_is_used_until_it_comes_back() {
        let mut usage = Usage::default();
        usage.lend(node(1), 50, LIMIT, at(0));
        usage.lend(node(2), 50, LIMIT, at(0));
        assert_eq!(usage.lent[&node(2)].calls, 10);
        let spent = Spent { number: 1, by_second: [(at(0).seconds(), 5)].into() };
        usage.settle(node(1), &spent);
        assert_eq!(usage.minute_left(LIMIT), 45);
        usage.settle(node(1), &spent);
        assert_eq!(usage.minute_left(LIMIT), 45, "told twice is counted once");
        usage.tidy(at(2000));
        assert_eq!(usage.minute_left(LIMIT), 45, "a silent node's batch counts as spent");
        usage.tidy(at(62_000));
        assert_eq!((usage.minute_left(LIMIT), usage.day_left(LIMIT)), (60, Some(85)));
        usage.tidy(at(86_400_000));
        assert_eq!(usage.day_left(LIMIT), Some(100));
    }

    /// A node as the limiter plays it: what it was lent last of all that it has heard of.
    #[derive(Default)]
    struct Borrower {
        lent: Option<Lent>,
        spent: BTreeMap<u64, u64>,
        is_settled: bool,
    }

    impl Borrower {
        fn spend(&mut self, wanted: u64, now: u64) -> u64 {
            let Some(lent) = self.lent.as_ref().filter(|_| !self.is_settled) else { return 0 };
            let already: u64 = self.spent.values().sum();
            let can = if at(now) < lent.until { lent.calls - already } else { 0 };
            *self.spent.entry(at(now).seconds()).or_default() += wanted.min(can);
            wanted.min(can)
        }

        /// Nothing of what it tells of is spent from now on.
        fn tell(&mut self) -> Option<Spent> {
            self.is_settled = true;
            let by_second = self.spent.clone();
            self.lent.as_ref().map(|lent| Spent { number: lent.number, by_second })
        }
    }

    #[test]
    fn an_answer_that_was_lost_or_a_node_that_tells_late_costs_no_calls() {
        let (mut usage, mut first) = (Usage::default(), Borrower::default());
        usage.ask(node(1), (20, LIMIT), None, at(0));
        first.lent = usage.lent.get(&node(1)).cloned();
        assert_eq!(first.spend(5, 100), 5);
        let told = first.tell();
        usage.ask(node(1), (30, LIMIT), told.as_ref(), at(200));
        let unheard = usage.lent[&node(1)].clone();
        usage.ask(node(1), (30, LIMIT), told.as_ref(), at(400));
        assert_eq!((&usage.lent[&node(1)], usage.minute_left(LIMIT)), (&unheard, 25));
        // It spends nothing of it, and says so long after its time.
        let nothing = Spent { number: unheard.number, by_second: BTreeMap::new() };
        usage.ask(node(2), (1, LIMIT), None, at(9_000));
        let grant = usage.grant(node(2), LIMIT, at(9_000)).expect("it was lent a call");
        assert_eq!((grant.minute_left, grant.held_elsewhere), (24, 0), "nobody waits for it");
        usage.ask(node(1), (0, LIMIT), Some(&nothing), at(9_500));
        assert_eq!(usage.minute_left(LIMIT), 54);
    }

    #[test]
    fn what_a_node_that_began_anew_was_lent_counts_as_spent() {
        let mut usage = Usage::default();
        usage.ask(node(1), (20, LIMIT), None, at(0));
        usage.ask(node(1), (20, LIMIT), None, at(500));
        assert_eq!(usage.minute_left(LIMIT), 20);
        usage.ask(node(1), (0, LIMIT), None, at(63_000));
        assert_eq!((usage.minute_left(LIMIT), usage.day_left(LIMIT)), (60, Some(60)));
    }

    proptest! {
        /// Three nodes that spend what they hold, tell of it late or never, lose answers, begin anew, and whose
        /// questions arrive a second time after others, over two minutes: no minute sees more than the limit.
        #[test]
        fn no_minute_has_more_than_the_limit(
            steps in prop::collection::vec(
                (0u8..3, 0u64..900, 1u64..40, 0u64..40, any::<bool>(), 0u8..10), 1..200)
        ) {
            let allowance = Allowance { per_minute: 60, per_day: None };
            let (mut usage, mut now) = (Usage::default(), 0);
            let mut nodes: BTreeMap<u8, Borrower> = BTreeMap::new();
            let mut earlier: BTreeMap<u8, Spent> = BTreeMap::new();
            let mut calls: Vec<u64> = vec![];
            for (who, pause, wanted, spend, tells, fate) in steps {
                now += pause;
                let one = nodes.entry(who).or_default();
                calls.extend((0..one.spend(spend, now)).map(|_| now));
                if fate == 0 {
                    *one = Borrower::default();
                }
                if fate == 1 && let Some(late) = earlier.get(&who) {
                    usage.ask(node(who), (wanted, allowance), Some(late), at(now));
                }
                if tells {
                    let told = one.tell();
                    usage.ask(node(who), (wanted, allowance), told.as_ref(), at(now));
                    if fate > 3 {
                        let lent = usage.lent.get(&node(who)).cloned();
                        *one = Borrower { lent, ..Borrower::default() };
                    }
                    earlier.extend(told.map(|told| (who, told)));
                }
            }
            for first in &calls {
                // A bucket is a whole second: a minute of buckets holds at least 59 seconds.
                let in_minute = calls.iter().filter(|at| (*first..first + 59_000).contains(at));
                prop_assert!(in_minute.count() <= 60);
            }
        }
    }
}
