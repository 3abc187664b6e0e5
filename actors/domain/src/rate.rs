//! Rate limits: how many calls an organization has left, whichever nodes it calls.
//!
//! The organization's shard lends small batches of calls to nodes. A batch counts as used from the
//! moment it is lent until its node tells what became of it, or its time is over; so all nodes
//! together never allow more than the tier, also after a change of leader, since every batch is in
//! the log. The minute is sixty buckets of a second each; the day is the calendar's, in UTC.

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
    /// As of `at`: what is over is forgotten, batches past their time count as spent at its end.
    fn tidy(&mut self, at: Timestamp) {
        let over: Vec<NodeId> =
            self.lent.iter().filter(|(_, lent)| lent.until <= at).map(|(node, _)| *node).collect();
        for node in over {
            if let Some(lent) = self.lent.remove(&node) {
                self.count(lent.until.seconds(), lent.calls);
            }
        }
        let now = at.seconds();
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

    /// What to tell a node that was lent something.
    pub fn grant(&self, node: NodeId, allowance: Allowance, at: Timestamp) -> Option<Grant> {
        let lent = self.lent.get(&node)?.clone();
        let now = at.seconds();
        let oldest = self.seconds.keys().next().copied().unwrap_or(now);
        Some(Grant {
            minute_left: self.minute_left(allowance),
            minute_reset: oldest.max(now.saturating_sub(SECONDS - 1)) + SECONDS,
            day_left: self.day_left(allowance),
            day_reset: (now / DAY_SECONDS + 1) * DAY_SECONDS,
            held_elsewhere: self.held() - lent.calls,
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
    // A clock that runs behind must not count twice what is counted already.
    if let Some(spent) = spent {
        usage.settle(node, spent);
    }
    usage.tidy(at);
    if wanted > 0 {
        if let Some(unsettled) = usage.lent.remove(&node) {
            usage.count(at.seconds(), unsettled.calls);
        }
        usage.lend(node, wanted, allowance, at);
    }
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

    proptest! {
        /// Three nodes that spend what they hold, settle late or never, over two minutes: no minute
        /// sees more than the limit.
        #[test]
        fn no_minute_has_more_than_the_limit(
            steps in prop::collection::vec((0u8..3, 0u64..900, 1u64..40, 0u64..40, any::<bool>()), 1..200)
        ) {
            let allowance = Allowance { per_minute: 60, per_day: None };
            let (mut usage, mut now) = (Usage::default(), 0);
            let mut held: BTreeMap<u8, (Lent, BTreeMap<u64, u64>)> = BTreeMap::new();
            let mut calls: Vec<u64> = vec![];
            for (who, pause, wanted, spend, settles) in steps {
                now += pause;
                if let Some((lent, spent)) = held.get_mut(&who) {
                    let already: u64 = spent.values().sum();
                    let can = if at(now) < lent.until { lent.calls - already } else { 0 };
                    let count = spend.min(can);
                    *spent.entry(at(now).seconds()).or_default() += count;
                    calls.extend((0..count).map(|_| now));
                }
                if settles {
                    if let Some((lent, by_second)) = held.remove(&who) {
                        usage.settle(node(who), &Spent { number: lent.number, by_second });
                    }
                    usage.tidy(at(now));
                    usage.lend(node(who), wanted, allowance, at(now));
                    held.insert(who, (usage.lent[&node(who)].clone(), BTreeMap::new()));
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
