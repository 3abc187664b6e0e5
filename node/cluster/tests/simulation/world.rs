//! What is known outside of the simulated machines: what was asked and answered, and what must hold.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
};

use domain::{Timestamp, node::NodeStatus};

use crate::machine::Machine;

/// When simulated clocks begin.
const EPOCH_MILLIS: u64 = 1_700_000_000_000;

/// Where something is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Place {
    /// The directory.
    Directory,
    /// A shard.
    Shard(u16),
}

/// Something that is written once: the first value stays.
#[derive(Debug, Default)]
struct Item {
    values: BTreeSet<u64>,
    /// When a write of it was acknowledged first.
    acked: Option<u64>,
    /// When a read that found it ended first.
    seen: Option<u64>,
    value: Option<u64>,
}

/// Two writes under one idempotency key.
#[derive(Clone, Debug, Default)]
pub(crate) struct Twins {
    /// What the two would write.
    pub(crate) items: BTreeSet<u64>,
    /// Whether one was acknowledged.
    pub(crate) is_acked: bool,
}

#[derive(Default)]
struct Log {
    /// Counts events, so that "before" has a meaning.
    clock: u64,
    trace: Vec<String>,
    items: BTreeMap<(Place, u64), Item>,
    twins: BTreeMap<u64, Twins>,
    /// Rows that wait in an outbox, or have waited there.
    carried: BTreeSet<u64>,
    /// The highest term whose claim was granted, and when that was known.
    granted: BTreeMap<(Place, u16), Vec<(u64, u64)>>,
    /// Who led a group in a term.
    led: BTreeMap<(u16, u64), u64>,
    violations: Vec<String>,
    counts: BTreeMap<&'static str, u64>,
    orders: Vec<(usize, NodeStatus)>,
    next: u64,
}

/// All of it.
pub(crate) struct World {
    /// Where chance begins.
    pub(crate) seed: u64,
    /// Shards of the cluster.
    pub(crate) shards: u16,
    /// The machines; those beyond the first three join late.
    pub(crate) machines: Vec<Machine>,
    /// Whether clients shall stop.
    pub(crate) is_over: AtomicBool,
    /// Simulated milliseconds.
    pub(crate) millis: AtomicU64,
    log: Mutex<Log>,
}

impl World {
    /// Before anything has happened.
    pub(crate) fn new(seed: u64, shards: u16, machines: Vec<Machine>) -> Self {
        let (is_over, millis, log) = Default::default();
        Self { seed, shards, machines, is_over, millis, log }
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a machine's clock shows.
    pub(crate) fn clock(&self, machine: usize) -> Timestamp {
        let ahead = self.machines[machine].ahead_millis.load(Relaxed);
        Timestamp::from_millis((EPOCH_MILLIS + self.millis.load(Relaxed)).saturating_add(ahead))
    }

    /// Writes down what happened.
    pub(crate) fn note(&self, what: &str) {
        let line = format!("{:>6} {what}", self.millis.load(Relaxed));
        self.log().trace.push(line);
    }

    /// Counts what happened.
    pub(crate) fn count(&self, what: &'static str) {
        *self.log().counts.entry(what).or_default() += 1;
    }

    /// A moment: later ones are greater.
    pub(crate) fn moment(&self) -> u64 {
        let mut log = self.log();
        log.clock += 1;
        log.clock
    }

    /// A number that was never given before.
    pub(crate) fn fresh(&self) -> u64 {
        let mut log = self.log();
        log.next += 1;
        log.next
    }

    /// Something must not be.
    pub(crate) fn violated(&self, what: String) {
        self.note(&what);
        self.log().violations.push(what);
    }

    /// A write begins.
    pub(crate) fn wanted(&self, place: Place, item: u64, value: u64) {
        self.log().items.entry((place, item)).or_default().values.insert(value);
    }

    /// A write was acknowledged.
    pub(crate) fn acknowledged(&self, place: Place, item: u64) {
        let now = self.moment();
        let mut log = self.log();
        log.items.entry((place, item)).or_default().acked.get_or_insert(now);
    }

    /// Two writes begin under one key.
    pub(crate) fn wanted_once(&self, key: u64, item: u64) {
        self.wanted(Place::Directory, item, item);
        self.log().twins.entry(key).or_default().items.insert(item);
    }

    /// One of them was acknowledged.
    pub(crate) fn acknowledged_once(&self, key: u64) {
        self.log().twins.entry(key).or_default().is_acked = true;
    }

    /// Something that was written, or will be.
    pub(crate) fn some_item(&self, place: Place, dice: &mut crate::dice::Dice) -> Option<u64> {
        let log = self.log();
        let items = log.items.range((place, 0)..=(place, u64::MAX));
        let items: Vec<u64> = items.map(|((_, item), _)| *item).collect();
        // Mostly what is new: old things have been looked at.
        let recent = items.len().saturating_sub(if dice.is(3, 4) { 12 } else { items.len() });
        dice.pick(&items[recent..]).copied()
    }

    /// A row is in an outbox.
    pub(crate) fn to_be_carried(&self, row: u64) {
        self.log().carried.insert(row);
    }

    /// Rows that must have arrived in the end.
    pub(crate) fn carried(&self) -> BTreeSet<u64> {
        self.log().carried.clone()
    }

    /// A linearizable read that began at `began` found this.
    pub(crate) fn read(&self, place: Place, item: u64, began: u64, found: Option<u64>) {
        let now = self.moment();
        let mut log = self.log();
        let Some(known) = log.items.get_mut(&(place, item)) else { return };
        let wrong = match found {
            None => {
                let since = known.acked.into_iter().chain(known.seen).min();
                since
                    .filter(|since| *since < began)
                    .map(|_| format!("{item} of {place:?} was there and is not any more"))
            }
            Some(value) => {
                known.seen.get_or_insert(now);
                let first = *known.value.get_or_insert(value);
                (first != value || !known.values.contains(&value))
                    .then(|| format!("{item} of {place:?} was {first} and is {value}"))
            }
        };
        drop(log);
        if let Some(wrong) = wrong {
            self.violated(wrong);
        }
    }

    /// A write in the name of a shard's owner was granted; it began at `began`.
    pub(crate) fn granted(&self, place: Place, shard: u16, term: u64, began: u64) {
        let now = self.moment();
        let mut log = self.log();
        let granted = log.granted.entry((place, shard)).or_default();
        let newer = granted.iter().find(|(newer, at)| *newer > term && *at < began).copied();
        granted.push((term, now));
        drop(log);
        if let Some((newer, _)) = newer {
            self.violated(format!(
                "the owner of shard {shard} in term {term} wrote to {place:?} after that of term {newer}"
            ));
        }
    }

    /// A node believes that it leads.
    pub(crate) fn leads(&self, group: u16, term: u64, node: u64) {
        let mut log = self.log();
        let before = *log.led.entry((group, term)).or_insert(node);
        drop(log);
        if before != node {
            self.violated(format!("group {group} had two leaders in term {term}"));
        }
    }

    /// The operator wants something of a node.
    pub(crate) fn order(&self, machine: usize, status: NodeStatus) {
        self.log().orders.push((machine, status));
    }

    /// Takes an order to carry out.
    pub(crate) fn take_order(&self) -> Option<(usize, NodeStatus)> {
        self.log().orders.pop()
    }

    /// What must be in a replica at the end.
    pub(crate) fn kept(&self) -> BTreeSet<(Place, u64)> {
        let log = self.log();
        let kept = log.items.iter().filter(|(_, item)| item.acked.or(item.seen).is_some());
        kept.map(|(at, _)| *at).collect()
    }

    /// Of which things one must be there, and no more.
    pub(crate) fn twins(&self) -> Vec<Twins> {
        self.log().twins.values().cloned().collect()
    }

    /// What happened, what was wrong, and how much of what there was.
    pub(crate) fn end(&self) -> (Vec<String>, Vec<String>, BTreeMap<&'static str, u64>) {
        let mut log = self.log();
        let leaders = log.led.len() as u64;
        log.counts.insert("terms", leaders);
        (
            std::mem::take(&mut log.trace),
            std::mem::take(&mut log.violations),
            std::mem::take(&mut log.counts),
        )
    }
}
