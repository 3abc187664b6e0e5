//! A group's machine under openraft: entries in, answers and events out.
//!
//! A panic in `apply` ends the process. Left alone, such a group would stay leader, keep its
//! followers quiet and apply nothing.

use std::{
    collections::BTreeMap,
    io,
    panic::AssertUnwindSafe,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{
            AtomicU64,
            Ordering::{Acquire, Relaxed, Release},
        },
    },
};

use actors::replica::Replica;
use domain::{
    codec,
    machine::{self, Answer, Machine, Origin},
};
use futures::{FutureExt as _, Stream, StreamExt as _};
use openraft::{
    EntryPayload, OptionalSend, RaftSnapshotBuilder,
    alias::SnapshotOf,
    entry::RaftEntry as _,
    storage::{EntryResponder, RaftStateMachine, Snapshot},
};
use tokio::sync::oneshot;

use super::{
    awaited::Awaited,
    fatal,
    state::{Applied, Dirty, Flush, StateFile, StateSnapshot, WrittenRows},
    types::{Answered, Entry, LogId, Membership, SnapshotMeta, TypeConfig},
};

/// Entries applied under one lock.
const ENTRIES_AT_ONCE: usize = 64;

/// Hears a group's events.
pub type Listener<E> = Arc<dyn Fn(&[E]) + Send + Sync>;

/// One group's replica, between openraft and the state file.
pub struct GroupMachine<M: Machine> {
    held: Arc<Held<M>>,
    listener: Listener<M::Event>,
    awaited: Arc<Awaited<M::Reply>>,
}

/// Up to where entries are applied, and who waits for that. Each waits for an entry of its own: whoever comes later is
/// not woken for it.
#[derive(Default)]
pub struct Progress {
    /// The number of the last applied entry.
    index: AtomicU64,
    waiting: Mutex<Waiting>,
    next: AtomicU64,
}

/// Who waits, by the entry and a number of their own.
type Waiting = BTreeMap<(u64, u64), oneshot::Sender<()>>;

/// Whoever is not waiting any more has no place among those who are.
struct Place<'p> {
    progress: &'p Progress,
    key: (u64, u64),
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.progress.waiting().remove(&self.key);
    }
}

impl Progress {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Everything up to this entry is applied.
    fn reach(&self, index: u64) {
        let reached = {
            let mut waiting = self.waiting();
            self.index.store(index, Release);
            let later = waiting.split_off(&(index.saturating_add(1), 0));
            std::mem::replace(&mut *waiting, later)
        };
        for waits in reached.into_values() {
            // Whoever waited may have given up.
            let _ = waits.send(());
        }
    }

    /// Returns once this entry is applied.
    pub async fn wait(&self, index: u64) {
        if self.index.load(Acquire) >= index {
            return;
        }
        let key = (index, self.next.fetch_add(1, Relaxed));
        let receiver = {
            let mut waiting = self.waiting();
            if self.index.load(Acquire) >= index {
                return;
            }
            let (sender, receiver) = oneshot::channel();
            waiting.insert(key, sender);
            receiver
        };
        let _place = Place { progress: self, key };
        // It is dropped only with the replica.
        let _ = receiver.await;
    }
}

/// The replica and how far it is; taken together under the replica's lock.
struct Held<M> {
    group: u16,
    replica: Replica<M>,
    progress: Arc<Progress>,
    applied: Mutex<Applied>,
    flushed: Mutex<Option<LogId>>,
    file: Arc<StateFile>,
}

impl<M: Machine> GroupMachine<M> {
    /// The group as the state file has it.
    pub fn open(
        group: u16,
        file: &Arc<StateFile>,
        listener: Listener<M::Event>,
    ) -> io::Result<Self> {
        let replica = Replica::<M>::default();
        let snapshot = file.snapshot(group)?;
        let applied = snapshot.applied()?.unwrap_or_default();
        load(&mut *replica.write(), group, file, &snapshot)?;
        let flushed = Mutex::new(applied.log);
        let progress = Arc::new(Progress::default());
        progress.reach(applied.index());
        let held = Arc::new(Held {
            group,
            replica,
            progress,
            applied: Mutex::new(applied),
            flushed,
            file: Arc::clone(file),
        });
        file.register(Arc::clone(&held) as Arc<dyn Flush>);
        Ok(Self { held, listener, awaited: Arc::default() })
    }

    /// Who waits for the answers to proposals of this node.
    pub fn awaited(&self) -> Arc<Awaited<M::Reply>> {
        Arc::clone(&self.awaited)
    }

    /// The state, for readers.
    pub fn replica(&self) -> Replica<M> {
        self.held.replica.clone()
    }

    /// The last entry that the tables on disk have.
    pub fn written(&self) -> Option<LogId> {
        *self.held.flushed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How far it is, for whoever waits.
    pub fn progress(&self) -> Arc<Progress> {
        Arc::clone(&self.held.progress)
    }

    /// Applies entries under one lock and hands out what came of them.
    fn apply_batch(&self, batch: Vec<EntryResponder<TypeConfig>>) {
        let mut events = vec![];
        let (mut answers, mut done) =
            (Vec::with_capacity(batch.len()), Vec::with_capacity(batch.len()));
        let bytes = batch.iter().map(|(entry, _)| super::log::size(entry) as u64).sum();
        let reached;
        {
            let mut machine = self.held.replica.write();
            let mut applied = self.held.applied();
            for (entry, responder) in batch {
                applied.log = Some(entry.log_id());
                let answer = apply_one(&mut *machine, &mut applied, entry, &mut events);
                let left = answer.and_then(|(answer, origin)| {
                    match origin.and_then(|origin| self.awaited.take(origin)) {
                        Some(waits) => {
                            answers.push((waits, answer));
                            None
                        }
                        None => Some(answer),
                    }
                });
                let left = left.map_or_else(Answered::default, Answered::with);
                done.extend(responder.map(|responder| (responder, left)));
            }
            reached = applied.index();
        }
        self.held.file.note_applied(bytes);
        if !events.is_empty() {
            (self.listener)(&events);
        }
        for (waits, answer) in answers {
            // Whoever waited may have given up.
            let _ = waits.send(answer);
        }
        for (responder, answer) in done {
            responder.send(answer);
        }
        self.held.progress.reach(reached);
    }
}

/// What a command was answered, and who proposed it.
pub(super) type Applying<M> = (Answer<<M as Machine>::Reply>, Option<Origin>);

pub(super) fn apply_one<M: Machine>(
    machine: &mut M,
    applied: &mut Applied,
    entry: Entry,
    events: &mut Vec<M::Event>,
) -> Option<Applying<M>> {
    let log_id = entry.log_id();
    match entry.payload {
        EntryPayload::Blank => None,
        EntryPayload::Membership(membership) => {
            applied.membership = Membership::new(Some(log_id), membership);
            None
        }
        EntryPayload::Normal(proposal) => match codec::decode(&proposal.0) {
            Ok(entry) => {
                let (answer, happened) = machine::apply(machine, &entry);
                events.extend(happened);
                Some((answer, entry.origin))
            }
            Err(error) => unreachable!("the agreed entry {log_id} is not readable: {error}"),
        },
    }
}

pub(super) fn load<M: Machine>(
    machine: &mut M,
    group: u16,
    file: &Arc<StateFile>,
    snapshot: &StateSnapshot,
) -> io::Result<()> {
    let backing = Arc::new(WrittenRows { group, file: Arc::clone(file) });
    let mut unreadable = None;
    {
        let mut tables = machine.tables();
        for table in &mut tables {
            table.clear();
            table.set_backing(backing.clone());
        }
        snapshot
            .rows(|number, key, row| {
                let table = tables.iter_mut().find(|table| table.number() == number);
                if let Some(table) = table.filter(|table| !table.is_history())
                    && let Err(error) = table.load(key, row)
                {
                    unreadable.get_or_insert(error);
                }
                Ok(())
            })
            .map_err(io::Error::other)?;
    }
    machine.reindex();
    unreadable.map_or(Ok(()), |error| Err(io::Error::other(error)))
}

impl<M: Machine> Held<M> {
    fn applied(&self) -> MutexGuard<'_, Applied> {
        self.applied.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<M: Machine> Flush for Held<M> {
    fn group(&self) -> u16 {
        self.group
    }

    fn take(&self) -> Option<Dirty> {
        let mut machine = self.replica.write();
        let applied = self.applied().clone();
        let mut flushed = self.flushed.lock().unwrap_or_else(PoisonError::into_inner);
        if *flushed == applied.log {
            return None;
        }
        *flushed = applied.log;
        let mut changes = vec![];
        machine.tables().iter_mut().for_each(|table| table.take_changes(&mut changes));
        Some(Dirty { changes, applied })
    }

    fn written(&self) {
        let mut machine = self.replica.write();
        machine.tables().iter_mut().for_each(|table| table.written());
    }
}

/// Makes snapshots: a flush, then a read transaction.
pub struct SnapshotBuilder {
    group: u16,
    file: Arc<StateFile>,
}

impl SnapshotBuilder {
    async fn build(&self) -> io::Result<Option<SnapshotOf<TypeConfig, StateSnapshot>>> {
        let (file, group) = (Arc::clone(&self.file), self.group);
        let build = move || {
            file.flush();
            let snapshot = file.snapshot(group)?;
            Ok((snapshot.applied()?, snapshot))
        };
        let (applied, snapshot) = self.file.scribe().aside(build).await?;
        let Some(applied) = applied.filter(|applied| applied.log.is_some()) else {
            return Ok(None);
        };
        let meta = SnapshotMeta { last_log_id: applied.log, last_membership: applied.membership };
        Ok(Some(Snapshot { meta, snapshot }))
    }
}

impl RaftSnapshotBuilder<TypeConfig> for SnapshotBuilder {
    type SnapshotData = StateSnapshot;

    async fn build_snapshot(&mut self) -> io::Result<SnapshotOf<TypeConfig, StateSnapshot>> {
        match self.build().await? {
            Some(snapshot) => Ok(snapshot),
            None => Ok(Snapshot {
                meta: SnapshotMeta::default(),
                snapshot: self.file.snapshot(self.group)?,
            }),
        }
    }
}

impl<M: Machine> RaftStateMachine<TypeConfig> for GroupMachine<M> {
    type SnapshotData = StateSnapshot;
    type SnapshotBuilder = SnapshotBuilder;

    async fn applied_state(&mut self) -> io::Result<(Option<LogId>, Membership)> {
        let applied = self.held.applied().clone();
        Ok((applied.log, applied.membership))
    }

    async fn apply<Strm>(&mut self, entries: Strm) -> io::Result<()>
    where
        Strm: Stream<Item = io::Result<EntryResponder<TypeConfig>>> + Unpin + OptionalSend,
    {
        let work = async {
            let mut batches = entries.ready_chunks(ENTRIES_AT_ONCE);
            while let Some(batch) = batches.next().await {
                self.apply_batch(batch.into_iter().collect::<io::Result<Vec<_>>>()?);
                tokio::task::yield_now().await;
            }
            Ok(())
        };
        match AssertUnwindSafe(work).catch_unwind().await {
            Ok(done) => done,
            Err(_) => fatal("an agreed entry could not be applied", &"panic in apply"),
        }
    }

    async fn get_snapshot_builder(&mut self) -> SnapshotBuilder {
        SnapshotBuilder { group: self.held.group, file: Arc::clone(&self.held.file) }
    }

    async fn install_snapshot(
        &mut self,
        meta: &SnapshotMeta,
        snapshot: StateSnapshot,
    ) -> io::Result<()> {
        let applied = Applied { log: meta.last_log_id, membership: meta.last_membership.clone() };
        let held = Arc::clone(&self.held);
        let install = move || {
            // Beside the machine that is there: who reads it waits for the exchange alone. A large state takes
            // seconds to load, in which a node that can't read answers nobody.
            let reload = || {
                let mut machine = M::default();
                load(&mut machine, held.group, &held.file, &held.file.snapshot(held.group)?)?;
                let before = {
                    let mut replica = held.replica.write();
                    *held.flushed.lock().unwrap_or_else(PoisonError::into_inner) = applied.log;
                    *held.applied() = applied.clone();
                    std::mem::replace(&mut *replica, machine)
                };
                held.progress.reach(applied.index());
                drop(before);
                Ok(())
            };
            held.file.install(held.group, &applied, &snapshot, reload)
        };
        self.held.file.scribe().aside(install).await
    }

    async fn get_current_snapshot(
        &mut self,
    ) -> io::Result<Option<SnapshotOf<TypeConfig, StateSnapshot>>> {
        self.get_snapshot_builder().await.build().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn each_waits_for_an_entry_of_their_own_and_leaves_no_place_behind() {
        let progress = Arc::new(Progress::default());
        progress.reach(3);
        progress.wait(3).await;
        let waits = |index| {
            let progress = Arc::clone(&progress);
            tokio::spawn(async move { progress.wait(index).await })
        };
        let (five, nine) = (waits(5), waits(9));
        while progress.waiting().len() < 2 {
            tokio::task::yield_now().await;
        }
        progress.reach(7);
        five.await.expect("it was reached");
        assert!(!nine.is_finished());
        nine.abort();
        nine.await.expect_err("it gave up");
        assert!(progress.waiting().is_empty());
    }
}
