//! The copy of a machine on this node: many look at it, one applies the log to it.
//!
//! Whoever looks twice at once waits for a writer that waits for the end of the first look, and neither goes on;
//! so do two threads that look at two copies in opposite orders while writers wait. So a thread looks at the
//! directory first, then at one shard at most. Builds with debug assertions, which all tests use, panic at a look
//! that breaks this, whether a writer waits or not.

use std::{
    ops::Deref,
    sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
};

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

impl<M: 'static> Replica<M> {
    /// The state as of the last applied entry. Never held across an `await`.
    #[track_caller]
    pub fn read(&self) -> Look<'_, M> {
        let turn = Turn::of::<M>();
        // A writer that panics ends the process, so a poisoned lock is not seen.
        Look { state: self.0.read().unwrap_or_else(PoisonError::into_inner), _turn: turn }
    }

    /// For the one who applies the log.
    #[track_caller]
    pub fn write(&self) -> RwLockWriteGuard<'_, M> {
        drop(Turn::of::<M>());
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A look at a machine; nothing is applied until it ends.
pub struct Look<'r, M> {
    state: RwLockReadGuard<'r, M>,
    _turn: Turn,
}

impl<M> Deref for Look<'_, M> {
    type Target = M;

    fn deref(&self) -> &M {
        &self.state
    }
}

/// A thread's turn to look at the directory or at a shard.
struct Turn {
    #[cfg(debug_assertions)]
    of: usize,
}

#[cfg(not(debug_assertions))]
impl Turn {
    fn of<M: 'static>() -> Self {
        Self {}
    }
}

#[cfg(debug_assertions)]
mod order {
    use std::{any::TypeId, cell::Cell, panic::Location};

    use domain::directory::Directory;

    use super::Turn;

    thread_local! {
        /// Where this thread began to look at the directory, and where at a shard.
        static LOOKS: [Cell<Option<&'static Location<'static>>>; 2] = const { [Cell::new(None), Cell::new(None)] };
    }

    impl Turn {
        #[track_caller]
        pub(super) fn of<M: 'static>() -> Self {
            let of = usize::from(TypeId::of::<M>() != TypeId::of::<Directory>());
            let here = Location::caller();
            LOOKS.with(|looks| {
                let earlier = looks[of..].iter().find_map(Cell::get);
                assert!(
                    earlier.is_none(),
                    "a look at {here} inside of that at {earlier:?} can wait for ever"
                );
                looks[of].set(Some(here));
            });
            Self { of }
        }
    }

    impl Drop for Turn {
        fn drop(&mut self) {
            LOOKS.with(|looks| looks[self.of].set(None));
        }
    }
}

#[cfg(test)]
mod tests {
    use domain::{directory::Directory, shard::Shard};

    use super::*;

    #[test]
    fn the_directory_then_a_shard_is_fine() {
        let (directory, shard) = (Replica::<Directory>::default(), Replica::<Shard>::default());
        drop(directory.write());
        for _ in 0..2 {
            let _first = directory.read();
            let _second = shard.read();
        }
    }

    #[test]
    #[should_panic(expected = "can wait for ever")]
    fn nobody_looks_twice_at_the_directory() {
        let directory = Replica::<Directory>::default();
        let _first = directory.read();
        let _second = directory.read();
    }

    #[test]
    #[should_panic(expected = "can wait for ever")]
    fn nobody_looks_at_the_directory_from_a_shard() {
        let (directory, shard) = (Replica::<Directory>::default(), Replica::<Shard>::default());
        let _first = shard.read();
        let _second = directory.read();
    }

    #[test]
    #[should_panic(expected = "can wait for ever")]
    fn nobody_looks_at_two_shards() {
        let (one, other) = (Replica::<Shard>::default(), Replica::<Shard>::default());
        let _first = one.read();
        let _second = other.read();
    }
}
