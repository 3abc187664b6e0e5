//! How the cluster looks after its own replicas, as its operator wants it: one row for all nodes. Until
//! there is one, every node goes by its settings.

use serde::{Deserialize, Serialize};

use crate::{directory::Directory, node::ZONE_LABEL};

/// See the fields.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Autopilot {
    /// Whether the replicas of a node that is silent for long are replaced at all.
    pub cleanup_dead_servers: bool,
    /// How long that is, in milliseconds.
    pub dead_after_ms: u64,
    /// A server that was not heard of for longer is not healthy, in milliseconds.
    pub last_contact_threshold_ms: u64,
    /// Entries that a replica may lack to be made a voter.
    pub max_trailing_logs: u64,
    /// How long a node that was given up must answer before it counts again, in milliseconds.
    pub stabilization_ms: u64,
    /// Fewer voters than this are never made of more, however long a node is dead.
    pub min_quorum: u64,
    /// The label that names a node's redundancy zone.
    pub redundancy_zone: String,
}

impl Default for Autopilot {
    fn default() -> Self {
        Self {
            cleanup_dead_servers: true,
            dead_after_ms: 600_000,
            last_contact_threshold_ms: 1000,
            max_trailing_logs: 1000,
            stabilization_ms: 10_000,
            min_quorum: 3,
            redundancy_zone: ZONE_LABEL.to_owned(),
        }
    }
}

impl Directory {
    /// What the operator wants, if that was ever said; the rest is up to each node's settings.
    pub fn autopilot(&self) -> Option<Autopilot> {
        self.autopilot.get(&0).map(|row| Autopilot::clone(&row))
    }
}
