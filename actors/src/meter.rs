//! Counts calls and what instances use: ten-second buckets for 24 hours and five-minute ones for 30
//! days, closed ones kept by [`crate::ports::Series`].
//!
//! Counters are not decisions: they live in memory and in what a node may lose, never in the log. A
//! crash forgets the bucket that was open.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use domain::{AgentId, NodeId, Timestamp, codec};
use hdrhistogram::{
    Histogram,
    serialization::{Deserializer, Serializer as _, V2Serializer},
};
use serde::{Deserialize, Serialize};

use crate::root::lock;

/// Length of a bucket.
pub const BUCKET: Duration = Duration::from_secs(10);
/// How far back `metrics` of an agent looks.
pub const DAY: Duration = Duration::from_secs(24 * 3600);
/// Longest latency that is told apart: one hour, in microseconds.
const LATENCY_MAX: u64 = 3_600_000_000;

/// One call, as it is counted.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    latency: Duration,
    failed: bool,
    tokens: u64,
    compute: Duration,
}

impl Sample {
    /// A call that reached an instance.
    pub fn ended(latency: Duration, well: bool, tokens: u64) -> Self {
        Self { latency, failed: !well, tokens, compute: latency }
    }

    /// A call that never reached one.
    pub fn refused(latency: Duration) -> Self {
        Self { latency, failed: true, tokens: 0, compute: Duration::ZERO }
    }
}

/// Everything counted in some stretch of time.
#[derive(Clone, Debug)]
pub struct Bucket {
    /// Calls.
    pub requests: u64,
    /// Calls without an output.
    pub errors: u64,
    /// Tokens as agents report them.
    pub tokens: u64,
    /// Time in agents.
    pub compute_ms: u64,
    /// Microseconds.
    pub latency: Histogram<u64>,
    /// What was seen of its instances.
    pub gauges: Gauges,
}

/// What an agent's instances were and used, added up over looks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Gauges {
    /// How often somebody looked.
    pub looks: u64,
    /// Ready instances, added up.
    pub instances: u64,
    /// The fewest.
    pub instances_min: u64,
    /// The most.
    pub instances_max: u64,
    /// Bytes of memory, added up.
    pub memory_bytes: u64,
    /// Processor time used, in milliseconds.
    pub cpu_ms: u64,
    /// Processor time that could have been used, in milliseconds.
    pub cpu_allowed_ms: u64,
    /// Calls that found no ready instance.
    pub cold_starts: u64,
    /// Time that the agent was meant to serve, in milliseconds.
    pub meant_ms: u64,
    /// Time that it did.
    pub up_ms: u64,
}

impl Gauges {
    /// What one look at `instances` ready ones saw.
    pub fn look(instances: u64, elapsed: Duration) -> Self {
        let elapsed = u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX);
        Self {
            looks: 1,
            instances,
            instances_min: instances,
            instances_max: instances,
            meant_ms: elapsed,
            up_ms: if instances > 0 { elapsed } else { 0 },
            ..Self::default()
        }
    }

    /// Adds another stretch of time.
    pub fn add(&mut self, other: &Self) {
        self.instances_min = match (self.looks, other.looks) {
            (0, _) => other.instances_min,
            (_, 0) => self.instances_min,
            _ => self.instances_min.min(other.instances_min),
        };
        self.instances_max = self.instances_max.max(other.instances_max);
        self.looks += other.looks;
        self.instances += other.instances;
        self.memory_bytes += other.memory_bytes;
        self.cpu_ms += other.cpu_ms;
        self.cpu_allowed_ms += other.cpu_allowed_ms;
        self.cold_starts += other.cold_starts;
        self.meant_ms += other.meant_ms;
        self.up_ms += other.up_ms;
    }

    /// Ready instances on average.
    pub fn instances_avg(&self) -> f64 {
        share(self.instances, self.looks)
    }

    /// Memory of all instances together on average, in MiB.
    pub fn memory_mb(&self) -> f64 {
        share(self.memory_bytes / (1024 * 1024), self.looks)
    }

    /// Used share of the cores that the instances may use.
    pub fn cpu_percent(&self) -> f64 {
        share(self.cpu_ms * 100, self.cpu_allowed_ms)
    }
}

#[expect(clippy::cast_precision_loss, reason = "a mean needs no more than 53 bits")]
fn share(of: u64, by: u64) -> f64 {
    if by == 0 { 0.0 } else { rounded(of as f64 / by as f64) }
}

impl Default for Bucket {
    fn default() -> Self {
        let latency = Histogram::new_with_bounds(1, LATENCY_MAX, 2);
        Self {
            requests: 0,
            errors: 0,
            tokens: 0,
            compute_ms: 0,
            latency: latency.expect("constant bounds are in order"),
            gauges: Gauges::default(),
        }
    }
}

/// A bucket as it is kept.
#[derive(Serialize, Deserialize)]
struct Stored {
    requests: u64,
    errors: u64,
    tokens: u64,
    compute_ms: u64,
    #[serde(with = "serde_bytes_vec")]
    latency: Vec<u8>,
    #[serde(default)]
    gauges: Gauges,
}

mod serde_bytes_vec {
    //! Bytes as bytes, not as a list of numbers.
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(bytes: &[u8], to: S) -> Result<S::Ok, S::Error> {
        to.serialize_bytes(bytes)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u8>, D::Error> {
        bytes::Bytes::deserialize(from).map(|bytes| bytes.to_vec())
    }
}

impl Bucket {
    fn count(&mut self, sample: Sample) {
        self.requests += 1;
        self.errors += u64::from(sample.failed);
        self.tokens += sample.tokens;
        self.compute_ms += u64::try_from(sample.compute.as_millis()).unwrap_or(u64::MAX);
        let micros = u64::try_from(sample.latency.as_micros()).unwrap_or(LATENCY_MAX);
        self.latency.saturating_record(micros.clamp(1, LATENCY_MAX));
    }

    /// Adds another stretch of time.
    pub fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.errors += other.errors;
        self.tokens += other.tokens;
        self.compute_ms += other.compute_ms;
        // Equal bounds always add.
        let _ = self.latency.add(&other.latency);
        self.gauges.add(&other.gauges);
    }

    /// Milliseconds below which this share of calls stayed.
    pub fn latency_ms(&self, quantile: f64) -> f64 {
        if self.requests == 0 { 0.0 } else { millis(self.latency.value_at_quantile(quantile)) }
    }

    /// Mean latency in milliseconds.
    pub fn mean_ms(&self) -> f64 {
        if self.requests == 0 { 0.0 } else { rounded(self.latency.mean() / 1000.0) }
    }

    /// The slowest call in milliseconds.
    pub fn max_ms(&self) -> f64 {
        millis(self.latency.max())
    }

    /// Share of calls without an output.
    pub fn error_percent(&self) -> f64 {
        if self.requests == 0 {
            return 0.0;
        }
        #[expect(clippy::cast_precision_loss, reason = "a share needs no more than 53 bits")]
        rounded(self.errors as f64 * 100.0 / self.requests as f64)
    }

    /// As it is kept, and told to other nodes.
    pub fn bytes(&self) -> Vec<u8> {
        let mut latency = vec![];
        let written = V2Serializer::new().serialize(&self.latency, &mut latency);
        written.expect("a histogram fits in memory");
        let Self { requests, errors, tokens, compute_ms, gauges, .. } = *self;
        codec::encode(&Stored { requests, errors, tokens, compute_ms, latency, gauges })
    }

    /// Reads what [`Bucket::bytes`] wrote.
    pub fn read(bytes: &[u8]) -> Option<Self> {
        let stored: Stored = codec::decode(bytes).ok()?;
        let latency = Deserializer::new().deserialize(&mut stored.latency.as_slice()).ok()?;
        let Stored { requests, errors, tokens, compute_ms, gauges, .. } = stored;
        let mut bucket = Self { requests, errors, tokens, compute_ms, gauges, ..Self::default() };
        let _ = bucket.latency.add::<Histogram<u64>>(latency);
        Some(bucket)
    }
}

#[expect(clippy::cast_precision_loss, reason = "latencies are far below 53 bits")]
fn millis(micros: u64) -> f64 {
    rounded(micros as f64 / 1000.0)
}

fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

/// What an agent's object shows of the last 24 hours.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Summary {
    /// Calls.
    pub requests: u64,
    /// Mean latency in milliseconds.
    pub avg_latency_ms: f64,
    /// Share of calls without an output.
    pub error_rate_percent: f64,
}

/// Calls of the last 24 hours, as they add up over nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    /// Calls.
    pub requests: u64,
    /// Calls without an output.
    pub errors: u64,
    /// Their latencies together, in microseconds.
    pub micros: u64,
}

impl Totals {
    /// Adds another node's.
    pub fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.errors += other.errors;
        self.micros += other.micros;
    }

    /// What is shown of them.
    pub fn summary(&self) -> Summary {
        let Self { requests, errors, micros } = *self;
        if requests == 0 {
            return Summary::default();
        }
        #[expect(clippy::cast_precision_loss, reason = "a share needs no more than 53 bits")]
        Summary {
            requests,
            avg_latency_ms: rounded(micros as f64 / requests as f64 / 1000.0),
            error_rate_percent: rounded(errors as f64 * 100.0 / requests as f64),
        }
    }
}

/// Share of time up; all of it for an agent that was never meant to serve.
pub fn uptime_percent((meant_ms, up_ms): (u64, u64)) -> f64 {
    if meant_ms == 0 { 100.0 } else { share(up_ms.saturating_mul(100), meant_ms) }
}

/// Five minutes of an agent, for its summary.
#[derive(Clone, Copy, Debug, Default)]
struct Coarse {
    at: u64,
    requests: u64,
    errors: u64,
    micros: u64,
}

const COARSE_MILLIS: u64 = 300_000;

#[derive(Default)]
struct Counted {
    open: HashMap<AgentId, (Timestamp, Bucket)>,
    days: HashMap<AgentId, Vec<Coarse>>,
    uptime: HashMap<AgentId, Uptime>,
}

impl Counted {
    fn bucket(&mut self, agent: AgentId, now: Timestamp) -> &mut Bucket {
        let start = floor(now, BUCKET);
        &mut self.open.entry(agent).or_insert_with(|| (start, Bucket::default())).1
    }
}

/// Time that an agent was meant to serve, and time that it did.
#[derive(Clone, Copy, Debug, Default)]
struct Uptime {
    meant: Duration,
    up: Duration,
}

/// Time after which older time counts half, so that a figure of 30 days needs two numbers.
const UPTIME_WINDOW: Duration = Duration::from_secs(30 * 24 * 3600);

/// All agents' counters on this node.
#[derive(Default)]
pub struct Meter(Mutex<Counted>);

/// A bucket that is over.
pub type Closed = (AgentId, Timestamp, Vec<u8>);

fn floor(at: Timestamp, step: Duration) -> Timestamp {
    let step = u64::try_from(step.as_millis()).unwrap_or(1).max(1);
    Timestamp::from_millis(at.millis() / step * step)
}

impl Meter {
    fn counted(&self) -> MutexGuard<'_, Counted> {
        lock(&self.0)
    }

    /// Counts a call.
    pub fn record(&self, agent: AgentId, sample: Sample, now: Timestamp) {
        let mut counted = self.counted();
        counted.bucket(agent, now).count(sample);
        coarse(counted.days.entry(agent).or_default(), sample, now);
    }

    /// Counts a call that found no ready instance.
    pub fn cold_start(&self, agent: AgentId, now: Timestamp) {
        let cold = Gauges { cold_starts: 1, ..Gauges::default() };
        self.counted().bucket(agent, now).gauges.add(&cold);
    }

    /// Takes the buckets that began before the one of `now`, for keeping.
    pub fn close(&self, now: Timestamp) -> Vec<Closed> {
        let current = floor(now, BUCKET);
        let mut counted = self.counted();
        let over = counted.open.extract_if(|_, (at, _)| *at < current);
        over.map(|(agent, (at, bucket))| (agent, at, bucket.bytes())).collect()
    }

    /// Counts a bucket that was kept before this start into the summary.
    pub fn restore(&self, agent: AgentId, at: Timestamp, bytes: &[u8]) {
        let Some(bucket) = Bucket::read(bytes) else { return };
        let mut counted = self.counted();
        let day = counted.days.entry(agent).or_default();
        let slot = coarse_slot(day, at);
        slot.requests += bucket.requests;
        slot.errors += bucket.errors;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "micros")]
        let micros = (bucket.mean_ms() * 1000.0) as u64;
        slot.micros += micros.saturating_mul(bucket.requests);
    }

    /// The last 24 hours of an agent, as far as its calls came in here.
    pub fn totals(&self, agent: AgentId, now: Timestamp) -> Totals {
        let counted = self.counted();
        let Some(day) = counted.days.get(&agent) else { return Totals::default() };
        let from = now.millis().saturating_sub(DAY.as_millis().try_into().unwrap_or(u64::MAX));
        let recent = day.iter().filter(|slot| slot.at + COARSE_MILLIS > from);
        recent.fold(Totals::default(), |mut sum, slot| {
            let Coarse { requests, errors, micros, .. } = *slot;
            sum.add(&Totals { requests, errors, micros });
            sum
        })
    }

    /// Counts what a look at an agent that is meant to serve saw.
    pub fn observe(&self, agent: AgentId, look: Gauges, now: Timestamp) {
        let mut counted = self.counted();
        counted.bucket(agent, now).gauges.add(&look);
        counted.uptime.entry(agent).or_default().add(&look);
    }

    /// Counts five minutes that were kept before this start into the uptime.
    pub fn restore_uptime(&self, agent: AgentId, bytes: &[u8]) {
        let Some(bucket) = Bucket::read(bytes) else { return };
        self.counted().uptime.entry(agent).or_default().add(&bucket.gauges);
    }

    /// Milliseconds that an agent was meant to serve, and that it did.
    pub fn uptime(&self, agent: AgentId) -> (u64, u64) {
        let counted = self.counted();
        let Some(Uptime { meant, up }) = counted.uptime.get(&agent) else { return (0, 0) };
        let millis = |time: &Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        (millis(meant), millis(up))
    }

    /// The open bucket of an agent, if calls came in it.
    pub fn open(&self, agent: AgentId) -> Option<(Timestamp, Bucket)> {
        self.counted().open.get(&agent).cloned()
    }

    /// A gone agent is not counted any more.
    pub fn forget(&self, agent: AgentId) {
        let mut counted = self.counted();
        counted.open.remove(&agent);
        counted.days.remove(&agent);
        counted.uptime.remove(&agent);
    }
}

/// What other nodes counted, as far as copies of it are kept here.
#[derive(Default)]
pub struct CopiedMeters(Mutex<HashMap<NodeId, Arc<Meter>>>);

impl CopiedMeters {
    fn kept(&self) -> MutexGuard<'_, HashMap<NodeId, Arc<Meter>>> {
        lock(&self.0)
    }

    /// What this node counted.
    pub fn of(&self, node: NodeId) -> Arc<Meter> {
        Arc::clone(self.kept().entry(node).or_default())
    }

    /// What these nodes counted, of those of which anything is kept.
    pub fn among(&self, nodes: &[NodeId]) -> Vec<Arc<Meter>> {
        let kept = self.kept();
        nodes.iter().filter_map(|node| kept.get(node).cloned()).collect()
    }

    /// A gone agent is not counted any more.
    pub fn forget(&self, agent: AgentId) {
        self.kept().values().for_each(|meter| meter.forget(agent));
    }
}

impl Uptime {
    fn add(&mut self, gauges: &Gauges) {
        self.meant += Duration::from_millis(gauges.meant_ms);
        self.up += Duration::from_millis(gauges.up_ms);
        if self.meant > UPTIME_WINDOW {
            *self = Self { meant: self.meant / 2, up: self.up / 2 };
        }
    }
}

/// A kept bucket and one more, as one.
pub fn merged(kept: Option<&[u8]>, more: &[u8]) -> Vec<u8> {
    let Some(mut bucket) = kept.and_then(Bucket::read) else { return more.to_vec() };
    if let Some(more) = Bucket::read(more) {
        bucket.add(&more);
    }
    bucket.bytes()
}

fn coarse(day: &mut Vec<Coarse>, sample: Sample, now: Timestamp) {
    let slot = coarse_slot(day, now);
    slot.requests += 1;
    slot.errors += u64::from(sample.failed);
    slot.micros += u64::try_from(sample.latency.as_micros()).unwrap_or(u64::MAX);
}

fn coarse_slot(day: &mut Vec<Coarse>, at: Timestamp) -> &mut Coarse {
    let start = at.millis() / COARSE_MILLIS * COARSE_MILLIS;
    let place = match day.binary_search_by_key(&start, |slot| slot.at) {
        Ok(place) => place,
        Err(place) => {
            day.insert(place, Coarse { at: start, ..Coarse::default() });
            if day.len() > 300 {
                day.remove(0);
                place.saturating_sub(1)
            } else {
                place
            }
        }
    };
    &mut day[place]
}

/// Reads kept buckets and lays them into steps.
pub fn steps(
    kept: &[(Timestamp, Vec<u8>)],
    open: Option<(Timestamp, Bucket)>,
    step: Duration,
) -> std::collections::BTreeMap<Timestamp, Bucket> {
    let mut steps = std::collections::BTreeMap::<Timestamp, Bucket>::new();
    let kept = kept.iter().filter_map(|(at, bytes)| Some((*at, Bucket::read(bytes)?)));
    for (at, bucket) in kept.chain(open) {
        steps.entry(floor(at, step)).or_default().add(&bucket);
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kept_bucket_reads_back_as_it_was() {
        let meter = Meter::default();
        let at = Timestamp::from_millis(1_000_000);
        for ms in 1..=100 {
            meter.record(AgentId(1), Sample::ended(Duration::from_millis(ms), ms != 7, 2), at);
        }
        assert!(meter.close(at).is_empty(), "the bucket is still open");
        let closed = meter.close(at.plus(BUCKET));
        let [(agent, start, bytes)] = closed.as_slice() else { panic!("one bucket") };
        assert_eq!((*agent, start.millis()), (AgentId(1), 1_000_000));
        let bucket = Bucket::read(bytes).expect("reads back");
        assert_eq!((bucket.requests, bucket.errors, bucket.tokens), (100, 1, 200));
        assert!((49.0..52.0).contains(&bucket.latency_ms(0.5)), "{}", bucket.latency_ms(0.5));
        let summary = meter.totals(AgentId(1), at).summary();
        assert_eq!((summary.requests, summary.error_rate_percent), (100, 1.0));
        assert_eq!(meter.totals(AgentId(1), at.plus(DAY * 2)).summary(), Summary::default());
    }

    #[test]
    fn looks_add_up_and_survive_being_kept() {
        let meter = Meter::default();
        let at = Timestamp::from_millis(1_000_000);
        let second = Duration::from_secs(1);
        for instances in [2, 0, 4] {
            let look = Gauges::look(instances, second);
            let used = Gauges { memory_bytes: 30 << 20, cpu_ms: 500, cpu_allowed_ms: 1000, ..look };
            meter.observe(AgentId(1), used, at);
        }
        meter.cold_start(AgentId(1), at);
        assert_eq!(uptime_percent(meter.uptime(AgentId(1))), 66.667);
        let closed = meter.close(at.plus(BUCKET)).remove(0).2;
        let twice = Bucket::read(&merged(Some(&closed), &closed)).expect("reads back").gauges;
        assert_eq!((twice.looks, twice.cold_starts), (6, 2));
        assert_eq!((twice.instances_min, twice.instances_max, twice.instances_avg()), (0, 4, 2.0));
        assert_eq!((twice.cpu_percent(), twice.memory_mb()), (50.0, 30.0));
        let later = Meter::default();
        later.restore_uptime(AgentId(1), &closed);
        assert_eq!(uptime_percent(later.uptime(AgentId(1))), 66.667);
    }
}
