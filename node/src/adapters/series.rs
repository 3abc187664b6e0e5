//! Closed buckets of metrics in sled: what a node may lose. sled does not sync on Linux, so nothing
//! acknowledged lives here; a store that does not open is wiped and begun anew.

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use actors::{meter, ports::Clock as _};
use domain::{AgentId, NodeId, Timestamp};

use super::{logs::lock, system::SystemClock};

/// Cache of the store, in bytes.
const CACHE_BYTES: u64 = 8 * 1024 * 1024;
/// How long ten-second buckets are kept.
const KEPT_FOR: Duration = Duration::from_secs(24 * 3600);
/// Length of the buckets that they are added up to, and how long those are kept.
const COARSE: Duration = Duration::from_secs(300);
const COARSE_KEPT_FOR: Duration = Duration::from_secs(30 * 24 * 3600);

/// What the trees of copies are named after; the node that counted follows.
const COPIED: [&str; 2] = ["fine-", "coarse-"];

/// Buckets of this node, and copies of others' buckets.
pub struct SledSeries {
    store: sled::Db,
    own: Buckets,
    copies: Mutex<BTreeMap<NodeId, Buckets>>,
    /// Before this time, in milliseconds since 1970, only coarse buckets are left.
    fine_from: AtomicU64,
}

/// What one node counted, by agent and time.
#[derive(Clone)]
struct Buckets {
    fine: sled::Tree,
    coarse: sled::Tree,
}

/// A bucket of an agent, as it is kept.
type Kept = (AgentId, Timestamp, Vec<u8>);

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
        let own = Buckets { fine: (*store).clone(), coarse: store.open_tree("coarse")? };
        let this = Self { store, own, copies: Mutex::default(), fine_from: AtomicU64::new(0) };
        for name in this.store.tree_names() {
            let name = String::from_utf8_lossy(&name).into_owned();
            if let Some(node) = name.strip_prefix(COPIED[0]).and_then(|node| node.parse().ok()) {
                this.of_node(node)?;
            }
        }
        this.prune(SystemClock.now());
        Ok(this)
    }

    /// What is kept of another node.
    fn of_node(&self, node: NodeId) -> sled::Result<Buckets> {
        let mut copies = lock(&self.copies);
        if let Some(buckets) = copies.get(&node) {
            return Ok(buckets.clone());
        }
        let [fine, coarse] = COPIED.map(|kind| self.store.open_tree(format!("{kind}{node}")));
        let buckets = Buckets { fine: fine?, coarse: coarse? };
        Ok(copies.entry(node).or_insert(buckets).clone())
    }

    /// The nodes of which something is kept here.
    pub fn copied(&self) -> Vec<NodeId> {
        lock(&self.copies).keys().copied().collect()
    }

    /// Whose buckets are meant: this node's own, or those kept of another one.
    fn of(&self, node: Option<NodeId>) -> Option<Buckets> {
        match node {
            None => Some(self.own.clone()),
            Some(node) => lock(&self.copies).get(&node).cloned(),
        }
    }

    /// All five-minute buckets, for the uptime that a node starts with.
    pub fn all_coarse(&self, node: Option<NodeId>) -> impl Iterator<Item = Kept> + use<> {
        self.of(node).into_iter().flat_map(|buckets| all(&buckets.coarse))
    }

    /// All kept buckets of the last day, for the summaries of a node that starts.
    pub fn all_fine(&self, node: Option<NodeId>) -> impl Iterator<Item = Kept> + use<> {
        self.of(node).into_iter().flat_map(|buckets| all(&buckets.fine))
    }

    /// Removes what is old enough.
    pub fn prune(&self, now: Timestamp) {
        let fine = now.minus(KEPT_FOR);
        self.fine_from.store(fine.millis(), Relaxed);
        for Buckets { fine: tree, coarse } in self.everybodys() {
            drop_older(&tree, fine);
            drop_older(&coarse, now.minus(COARSE_KEPT_FOR));
        }
    }

    fn everybodys(&self) -> Vec<Buckets> {
        let copies = lock(&self.copies);
        std::iter::once(&self.own).chain(copies.values()).cloned().collect()
    }

    /// Keeps a bucket that this node counted.
    pub fn put(&self, agent: AgentId, at: Timestamp, bucket: &[u8]) -> sled::Result<()> {
        self.own.put(agent, at, bucket)
    }

    /// Keeps a bucket that another node counted; whether it was not here yet.
    pub fn keep(
        &self,
        node: NodeId,
        agent: AgentId,
        at: Timestamp,
        bucket: &[u8],
    ) -> sled::Result<bool> {
        let buckets = self.of_node(node)?;
        let is_here = buckets.fine.get(key(agent, at))?.is_some_and(|kept| kept == bucket);
        if !is_here {
            buckets.put(agent, at, bucket)?;
        }
        Ok(!is_here)
    }

    /// Buckets of a stretch of time, oldest first; of the last day, those of ten seconds.
    pub fn range(
        &self,
        node: Option<NodeId>,
        agent: AgentId,
        from: Timestamp,
        to: Timestamp,
    ) -> Vec<(Timestamp, Vec<u8>)> {
        let Some(Buckets { fine, coarse }) = self.of(node) else { return vec![] };
        let border = Timestamp::from_millis(self.fine_from.load(Relaxed));
        let mut found = between(&coarse, agent, from, to.min(border));
        found.extend(between(&fine, agent, from.max(border), to));
        found
    }

    /// Removes the buckets of a gone agent, be they copies.
    pub fn forget(&self, agent: AgentId) {
        for Buckets { fine, coarse } in self.everybodys() {
            for tree in [fine, coarse] {
                for key in tree.scan_prefix(agent.0.to_be_bytes()).keys().flatten() {
                    drop_key(&tree, &key);
                }
            }
        }
    }
}

impl Buckets {
    fn put(&self, agent: AgentId, at: Timestamp, bucket: &[u8]) -> sled::Result<()> {
        let step = u64::try_from(COARSE.as_millis()).unwrap_or(u64::MAX);
        let start = Timestamp::from_millis(at.millis() / step * step);
        let merge = |kept: Option<&[u8]>| Some(meter::merged(kept, bucket));
        self.coarse.update_and_fetch(key(agent, start), merge)?;
        self.fine.insert(key(agent, at), bucket).map(drop)
    }
}

fn all(tree: &sled::Tree) -> impl Iterator<Item = Kept> + use<> {
    tree.iter().flatten().filter_map(|(key, bucket)| {
        let (agent, at) = read_key(&key)?;
        Some((agent, at, bucket.to_vec()))
    })
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
                series.put(agent, at, &bucket(at)).expect("it is kept");
            }
        }
        series.prune(now);
        let found = series.range(None, agent, hours(48), now);
        assert_eq!(found.len(), 1 + 30, "one of five minutes, thirty of ten seconds");
        let restored = Meter::default();
        let coarse = series.all_coarse(None);
        coarse.for_each(|(agent, _, bytes)| restored.restore_uptime(agent, &bytes));
        assert_eq!(actors::meter::uptime_percent(restored.uptime(agent)), 100.0);
        series.prune(now.plus(COARSE_KEPT_FOR));
        assert!(series.range(None, agent, hours(48), now).is_empty());
    }
}
