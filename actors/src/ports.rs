//! What actors need from the world, in their words. Each port has two implementations: the real one
//! and the one of the tests.

use std::{
    collections::BTreeMap,
    sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
};

use domain::{
    Rejection, Timestamp,
    directory::{self, Directory},
    event::{DirectoryEvent, ShardEvent},
    machine::{Answer, Entry},
    shard::{self, Shard},
};
use futures::future::BoxFuture;
use tokio::sync::watch;

/// The copy of a machine on this node. Readers see whole entries; the one writer is whoever applies
/// the log.
pub struct Replica<M>(Arc<RwLock<M>>);

impl<M> Clone for Replica<M> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<M: Default> Default for Replica<M> {
    fn default() -> Self {
        Self(Arc::new(RwLock::new(M::default())))
    }
}

impl<M> Replica<M> {
    /// The state as of the last applied entry. Never held across an `await`.
    pub fn read(&self) -> RwLockReadGuard<'_, M> {
        // A writer that panics ends the process, so a poisoned lock is not seen.
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// For the one who applies the log.
    pub fn write(&self) -> RwLockWriteGuard<'_, M> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why a proposal has no answer.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ProposeError {
    /// The machine said no.
    #[error(transparent)]
    Rejected(#[from] Rejection),
    /// Nothing was appended; a retry is safe and may help.
    #[error("the cluster has no leader right now")]
    Unavailable,
    /// It may or may not come to pass; a retry is safe with an idempotency key.
    #[error("the cluster did not confirm the change in time")]
    Unknown,
}

/// The replicated log and the state it makes.
pub trait Ledger: Send + Sync + 'static {
    /// This node's copy of the directory.
    fn directory(&self) -> &Replica<Directory>;
    /// This node's copy of one shard.
    fn shard(&self, shard: u16) -> &Replica<Shard>;
    /// How many shards there are.
    fn shards(&self) -> u16;
    /// The home shard of something with this name.
    fn home(&self, name: &[u8]) -> u16;
    /// Agrees on a change of the directory; on return it is durable and applied here.
    fn change_directory(
        &self,
        entry: Entry<directory::Command>,
    ) -> BoxFuture<'_, Result<Answer<directory::Reply>, ProposeError>>;
    /// Agrees on a change of one shard. With a claim in the entry it fails unless this node still
    /// leads the shard in that term.
    fn change_shard(
        &self,
        shard: u16,
        entry: Entry<shard::Command>,
    ) -> BoxFuture<'_, Result<Answer<shard::Reply>, ProposeError>>;
    /// Waits until [`Ledger::directory`] holds every change acknowledged before this call.
    fn refresh_directory(&self) -> BoxFuture<'_, Result<(), ProposeError>>;
    /// Waits until [`Ledger::shard`] holds every change acknowledged before this call.
    fn refresh_shard(&self, shard: u16) -> BoxFuture<'_, Result<(), ProposeError>>;
    /// The shards that this node leads now, with their terms.
    fn leading(&self) -> watch::Receiver<BTreeMap<u16, u64>>;
}

/// Hears what was applied, in order, right after it was applied. Must not block.
pub trait Observer: Send + Sync + 'static {
    /// Events of the directory.
    fn directory(&self, events: &[DirectoryEvent]);
    /// Events of one shard.
    fn shard(&self, shard: u16, events: &[ShardEvent]);
}

/// Tells the time. The only place that asks the machine for it.
pub trait Clock: Send + Sync + 'static {
    /// Now, by the wall clock.
    fn now(&self) -> Timestamp;
}

/// Throws dice. The only place that asks the machine for randomness.
pub trait Entropy: Send + Sync + 'static {
    /// 128 unpredictable bits.
    fn dice(&self) -> u128;
}
