//! What nodes say of their load, spread with gossip: soft state, good for choosing and showing, never
//! for truth.

use foca::{BroadcastHandler, Invalidates};
use serde::{Deserialize, Serialize};

/// How busy a node is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Load {
    /// The node in Raft's numbers.
    pub raft_id: u64,
    /// Grows with every telling.
    pub at: u64,
    /// Instances that it runs.
    pub instances: u32,
    /// Calls in flight.
    pub in_flight: u32,
    /// Whether it is caught up and serves.
    pub ready: bool,
}

impl Load {
    /// As it is sent.
    pub fn bytes(&self) -> Vec<u8> {
        postcard::to_stdvec(self).expect("a load has only encodable fields")
    }
}

/// A newer telling of a node makes its older ones void.
pub struct Telling {
    raft_id: u64,
    at: u64,
}

impl Invalidates for Telling {
    fn invalidates(&self, other: &Self) -> bool {
        self.raft_id == other.raft_id && self.at >= other.at
    }
}

/// Takes tellings in, and passes on those that are news.
pub struct Loads {
    newest: std::collections::BTreeMap<u64, u64>,
    hear: Box<dyn Fn(Load) + Send>,
}

impl Loads {
    /// Hands news on to `hear`.
    pub fn new(hear: impl Fn(Load) + Send + 'static) -> Self {
        Self { newest: Default::default(), hear: Box::new(hear) }
    }
}

/// Bytes that are no telling.
#[derive(Debug, thiserror::Error)]
#[error("this is no telling of a load")]
pub struct NotALoad;

impl<T> BroadcastHandler<T> for Loads {
    type Key = Telling;
    type Error = NotALoad;

    fn receive_item(
        &mut self,
        data: &[u8],
        _: Option<&T>,
    ) -> Result<Option<Self::Key>, Self::Error> {
        let load: Load = postcard::from_bytes(data).map_err(|_| NotALoad)?;
        let known = self.newest.get(&load.raft_id).copied();
        if known.is_some_and(|known| known >= load.at) {
            return Ok(None);
        }
        self.newest.insert(load.raft_id, load.at);
        (self.hear)(load);
        Ok(Some(Telling { raft_id: load.raft_id, at: load.at }))
    }
}
