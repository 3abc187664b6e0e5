//! What a data folder knows of its node. It is made with the folder, by founding a cluster or by
//! joining one; the numbers never change. A new folder is a new node: a log that was lost must not
//! come back under an old number, since others remember what it once had.

use std::{fs, path::Path};

use actors::ports::{Clock as _, Entropy as _};
use anyhow::Context as _;
use cluster::raft::disk::LOG;
use domain::NodeId;
use serde::{Deserialize, Serialize};

use crate::{
    adapters::system::{SystemClock, SystemDice, random_bytes},
    keys::write_secret,
};

/// See the fields.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NodeIdentity {
    /// The node.
    pub node_id: NodeId,
    /// The node in Raft's numbers.
    pub raft_id: u64,
    /// How many shards the cluster has.
    pub shards: u16,
    /// Whether it founded its cluster; any other node waits to be taken in.
    #[serde(default = "yes")]
    pub founds: bool,
    /// Where its peers reached it last, as `host:port`.
    #[serde(default)]
    pub peer_address: String,
    /// Whether it has had a log: a folder that lost it must not come back.
    #[serde(default)]
    pub has_log: bool,
    /// Other nodes that it was told of when it joined.
    #[serde(default)]
    pub seeds: Vec<(u64, String)>,
}

fn yes() -> bool {
    true
}

impl NodeIdentity {
    fn path(data: &Path) -> std::path::PathBuf {
        data.join("node.json")
    }

    /// A new node with numbers of its own.
    pub fn new(shards: u16, founds: bool) -> Self {
        Self {
            node_id: NodeId::new(SystemClock.now(), SystemDice.dice()),
            raft_id: u64::from_be_bytes(random_bytes()) >> 1,
            shards,
            founds,
            peer_address: String::new(),
            has_log: false,
            seeds: vec![],
        }
    }

    /// Of this folder, if it belongs to a node.
    pub fn read(data: &Path) -> anyhow::Result<Option<Self>> {
        let path = Self::path(data);
        if path.exists() {
            let text = fs::read(&path)?;
            let known: Self = serde_json::from_slice(&text).context("node.json is damaged")?;
            anyhow::ensure!(
                !known.has_log || data.join(LOG).exists(),
                "{} has lost its log: a node whose disk is gone must not come back under its old \
                 number; take it out with `roost cluster remove` and join with an empty folder",
                data.display()
            );
            return Ok(Some(known));
        }
        let has_state = data.join(LOG).exists();
        anyhow::ensure!(
            !has_state,
            "{} has a log but no node.json: restore it, or start with an empty folder",
            data.display()
        );
        Ok(None)
    }

    /// Of this folder; an empty one becomes the first node of a new cluster.
    pub fn read_or_found(data: &Path, shards: u16) -> anyhow::Result<Self> {
        if let Some(known) = Self::read(data)? {
            return Ok(known);
        }
        let new = Self::new(shards, true);
        new.write(data)?;
        Ok(new)
    }

    /// Keeps it; durable on return.
    pub fn write(&self, data: &Path) -> anyhow::Result<()> {
        fs::create_dir_all(data)?;
        write_secret(&Self::path(data), &serde_json::to_vec_pretty(self)?)?;
        Ok(())
    }
}
