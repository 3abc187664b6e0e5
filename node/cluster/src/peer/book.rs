//! Where each node is reached. Raft keeps an address with every member, but a node may come back
//! elsewhere: what the directory says of it, and what it says itself, wins.

use std::{
    collections::HashMap,
    sync::{PoisonError, RwLock},
};

/// Raft node number → `host:port`.
#[derive(Default)]
pub struct AddressBook(RwLock<HashMap<u64, String>>);

impl AddressBook {
    /// The last known address.
    pub fn get(&self, raft_id: u64) -> Option<String> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).get(&raft_id).cloned()
    }

    /// Some other node, another one each time: to ask where no leader is known.
    pub fn somebody_but(&self, raft_id: u64, turn: usize) -> Option<u64> {
        let book = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let mut others: Vec<u64> = book.keys().copied().filter(|id| *id != raft_id).collect();
        others.sort_unstable();
        others.get(turn % others.len().max(1)).copied()
    }

    /// A better address.
    pub fn put(&self, raft_id: u64, address: &str) {
        if address.is_empty() || self.get(raft_id).as_deref() == Some(address) {
            return;
        }
        let mut book = self.0.write().unwrap_or_else(PoisonError::into_inner);
        book.insert(raft_id, address.to_owned());
    }

    /// An address where none is known.
    pub fn hint(&self, raft_id: u64, address: &str) {
        if self.get(raft_id).is_none() {
            self.put(raft_id, address);
        }
    }
}
