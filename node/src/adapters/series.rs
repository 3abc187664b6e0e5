//! Closed buckets of metrics in sled: what a node may lose. sled does not sync on Linux, so nothing
//! acknowledged lives here; a store that does not open is wiped and begun anew.

use std::path::Path;

use actors::ports::Series;
use domain::{AgentId, Timestamp};

/// Cache of the store, in bytes.
const CACHE_BYTES: u64 = 8 * 1024 * 1024;
/// How long ten-second buckets are kept.
const KEPT_FOR: std::time::Duration = std::time::Duration::from_secs(24 * 3600);

/// Buckets by agent and time.
pub struct SledSeries {
    store: sled::Db,
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
        Ok(Self { store })
    }

    /// All kept buckets of the last day, for the summaries of a node that starts.
    pub fn all(&self) -> impl Iterator<Item = (AgentId, Timestamp, Vec<u8>)> {
        self.store.iter().flatten().filter_map(|(key, bucket)| {
            let (agent, at) = read_key(&key)?;
            Some((agent, at, bucket.to_vec()))
        })
    }

    /// Removes what is older than a day.
    pub fn prune(&self, now: Timestamp) {
        let oldest = now.millis().saturating_sub(u64::try_from(KEPT_FOR.as_millis()).unwrap_or(0));
        for key in self.store.iter().keys().flatten() {
            if read_key(&key).is_none_or(|(_, at)| at.millis() < oldest) {
                self.drop_key(&key);
            }
        }
    }

    fn drop_key(&self, key: &[u8]) {
        if let Err(error) = self.store.remove(key) {
            tracing::warn!(%error, "a metric bucket could not be removed");
        }
    }
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
        if let Err(error) = self.store.insert(key(agent, at), bucket) {
            tracing::warn!(%error, "a metric bucket is lost");
        }
    }

    fn range(&self, agent: AgentId, from: Timestamp, to: Timestamp) -> Vec<(Timestamp, Vec<u8>)> {
        let range = self.store.range(key(agent, from)..key(agent, to));
        range
            .flatten()
            .filter_map(|(key, bucket)| Some((read_key(&key)?.1, bucket.to_vec())))
            .collect()
    }

    fn forget(&self, agent: AgentId) {
        for key in self.store.scan_prefix(agent.0.to_be_bytes()).keys().flatten() {
            self.drop_key(&key);
        }
    }
}
