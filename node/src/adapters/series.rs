//! Closed buckets of metrics in sled: what a node may lose. sled does not sync on Linux, so nothing
//! acknowledged lives here; a store that does not open is wiped and begun anew.

use std::{
    path::Path,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use actors::{
    meter,
    ports::{Clock as _, Series},
};
use domain::{AgentId, Timestamp};

use super::system::SystemClock;

/// Cache of the store, in bytes.
const CACHE_BYTES: u64 = 8 * 1024 * 1024;
/// How long ten-second buckets are kept.
const KEPT_FOR: Duration = Duration::from_secs(24 * 3600);
/// Length of the buckets that they are added up to, and how long those are kept.
const COARSE: Duration = Duration::from_secs(300);
const COARSE_KEPT_FOR: Duration = Duration::from_secs(30 * 24 * 3600);

/// Buckets by agent and time.
pub struct SledSeries {
    store: sled::Db,
    coarse: sled::Tree,
    /// Before this time, in milliseconds since 1970, only coarse buckets are left.
    fine_from: AtomicU64,
}

impl SledSeries {
    /// Opens the store; one that is damaged is wiped.
    pub fn open(path: &Path) -> anyhow::Result<Self> {
        let config = sled::Config::new().path(path).cache_capacity(CACHE_BYTES);
        let store = match config.open() {
            Ok(store) => store,
            Err(error) => {
                tracing::warn!(%error, "the metric store is damaged and begins anew");
                std::fs::remove_dir_all(path)?;
                config.open()?
            }
        };
        let coarse = store.open_tree("coarse")?;
        let this = Self { store, coarse, fine_from: AtomicU64::new(0) };
        this.prune(SystemClock.now());
        Ok(this)
    }

    /// All five-minute buckets, for the uptime that a node starts with.
    pub fn all_coarse(&self) -> impl Iterator<Item = (AgentId, Vec<u8>)> {
        self.coarse.iter().flatten().filter_map(|(key, bucket)| {
            let (agent, _) = read_key(&key)?;
            Some((agent, bucket.to_vec()))
        })
    }

    /// All kept buckets of the last day, for the summaries of a node that starts.
    pub fn all(&self) -> impl Iterator<Item = (AgentId, Timestamp, Vec<u8>)> {
        self.store.iter().flatten().filter_map(|(key, bucket)| {
            let (agent, at) = read_key(&key)?;
            Some((agent, at, bucket.to_vec()))
        })
    }

    /// Removes what is old enough.
    pub fn prune(&self, now: Timestamp) {
        let fine = now.minus(KEPT_FOR);
        self.fine_from.store(fine.millis(), Relaxed);
        drop_older(&self.store, fine);
        drop_older(&self.coarse, now.minus(COARSE_KEPT_FOR));
    }

    fn add_up(&self, agent: AgentId, at: Timestamp, bucket: &[u8]) -> sled::Result<()> {
        let step = u64::try_from(COARSE.as_millis()).unwrap_or(u64::MAX);
        let at = Timestamp::from_millis(at.millis() / step * step);
        let merge = |kept: Option<&[u8]>| Some(meter::merged(kept, bucket));
        self.coarse.update_and_fetch(key(agent, at), merge).map(drop)
    }
}

fn drop_older(tree: &sled::Tree, than: Timestamp) {
    for key in tree.iter().keys().flatten() {
        if read_key(&key).is_none_or(|(_, at)| at < than) {
            drop_key(tree, &key);
        }
    }
}

fn drop_key(tree: &sled::Tree, key: &[u8]) {
    if let Err(error) = tree.remove(key) {
        tracing::warn!(%error, "a metric bucket could not be removed");
    }
}

fn between(
    tree: &sled::Tree,
    agent: AgentId,
    from: Timestamp,
    to: Timestamp,
) -> Vec<(Timestamp, Vec<u8>)> {
    if from >= to {
        return vec![];
    }
    let found = tree.range(key(agent, from)..key(agent, to)).flatten();
    found.filter_map(|(key, bucket)| Some((read_key(&key)?.1, bucket.to_vec()))).collect()
}

fn key(agent: AgentId, at: Timestamp) -> Vec<u8> {
    [agent.0.to_be_bytes().as_slice(), &at.millis().to_be_bytes()].concat()
}

fn read_key(key: &[u8]) -> Option<(AgentId, Timestamp)> {
    let (agent, at) = key.split_first_chunk::<16>()?;
    let at = u64::from_be_bytes(at.try_into().ok()?);
    Some((AgentId(u128::from_be_bytes(*agent)), Timestamp::from_millis(at)))
}

impl Series for SledSeries {
    fn put(&self, agent: AgentId, at: Timestamp, bucket: Vec<u8>) {
        let kept = self.add_up(agent, at, &bucket);
        if let Err(error) = kept.and_then(|()| self.store.insert(key(agent, at), bucket)) {
            tracing::warn!(%error, "a metric bucket is lost");
        }
    }

    fn range(&self, agent: AgentId, from: Timestamp, to: Timestamp) -> Vec<(Timestamp, Vec<u8>)> {
        let border = Timestamp::from_millis(self.fine_from.load(Relaxed));
        let mut found = between(&self.coarse, agent, from, to.min(border));
        found.extend(between(&self.store, agent, from.max(border), to));
        found
    }

    fn forget(&self, agent: AgentId) {
        for tree in [&*self.store, &self.coarse] {
            for key in tree.scan_prefix(agent.0.to_be_bytes()).keys().flatten() {
                drop_key(tree, &key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use actors::meter::{Gauges, Meter};

    use super::*;

    #[test]
    fn old_figures_are_five_minutes_long_and_new_ones_ten_seconds() {
        let folder = tempfile::tempdir().expect("a folder");
        let series = SledSeries::open(folder.path()).expect("opens");
        let (agent, now) = (AgentId(1), SystemClock.now());
        let hours = |hours: u64| now.minus(Duration::from_secs(hours * 3600));
        let bucket = |at: Timestamp| {
            let meter = Meter::default();
            meter.observe(agent, Gauges::look(1, Duration::from_secs(10)), at);
            meter.close(at.plus(Duration::from_secs(10))).remove(0).2
        };
        for hour in [2, 30] {
            let start = Timestamp::from_millis(hours(hour).millis() / 300_000 * 300_000);
            for part in 0..30 {
                let at = start.plus(Duration::from_secs(part * 10));
                series.put(agent, at, bucket(at));
            }
        }
        series.prune(now);
        let found = series.range(agent, hours(48), now);
        assert_eq!(found.len(), 1 + 30, "one of five minutes, thirty of ten seconds");
        let restored = Meter::default();
        series.all_coarse().for_each(|(agent, bytes)| restored.restore_uptime(agent, &bytes));
        assert_eq!(actors::meter::uptime_percent(restored.uptime(agent)), 100.0);
        series.prune(now.plus(COARSE_KEPT_FOR));
        assert!(series.range(agent, hours(48), now).is_empty());
    }
}
