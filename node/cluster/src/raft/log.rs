//! The log of all groups in one file, behind one writer thread.
//!
//! The thread drains whatever waits, writes it as one frame, syncs once and then answers all
//! who wait: group commit across groups. Entries are readable from memory as soon as they are
//! handed over; they leave memory only after they are on disk. `save_vote` and `truncate_after` wait
//! for the disk, `purge` must not: a group whose core waits sends no heartbeats. A failed commit ends
//! the process, since a failed fsync can't be repeated with any meaning.

use std::{
    collections::BTreeMap,
    fmt::Debug,
    io,
    ops::{Bound, RangeBounds},
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc},
    thread,
    time::{Duration, Instant},
};

use domain::{
    codec,
    planted::{self, Bug},
};
use openraft::{
    EntryPayload, OptionalSend, RaftLogReader,
    entry::RaftEntry as _,
    storage::{IOFlushed, LogState, RaftLogStorage},
};
use prometheus_client::metrics::{counter::Counter, histogram::Histogram};
use serde::de::DeserializeOwned;
use tokio::sync::{Notify, oneshot};

use super::{
    checked::{self, damaged},
    disk::{Pause, Scribe},
    fatal,
    pace::Pace,
    scrub::{self, Scrubbed},
    types::{Entry, LogId, TypeConfig, Vote},
    wal::{Frame, Opened, Pen, Wal},
};

const VOTE: u8 = 1;
const COMMITTED: u8 = 2;
const PURGED: u8 = 3;

/// Flushed entries kept in memory per group, for whoever replicates or applies them: so many, and so
/// many bytes.
const ENTRIES_KEPT: usize = 1024;
const BYTES_KEPT: usize = 2 * 1024 * 1024;
/// Operations that one frame takes, and the bytes of entries after which it takes no more.
const OPERATIONS_PER_COMMIT: usize = 4096;
/// With so many operations more are probably on their way: whoever brings them is let run first, so that one sync
/// serves more of them. It costs nothing where processors are idle.
const CROWD: usize = 3;
/// How often a commit waits for that.
const YIELDS_MAX: usize = 3;
const BYTES_PER_COMMIT: usize = 64 * 1024 * 1024;
/// Bytes of entries that a replica is sent at once: it has a fraction of a second to write them and say so, or is sent
/// the same again.
const BYTES_AT_ONCE: usize = 1024 * 1024;
/// Entries that are read at once for that; twice as many each time, where they are small.
const ENTRIES_READ_AT_ONCE: u64 = 16;
/// How long `committed` waits for a frame to ride with.
const COMMITTED_ALONE_AFTER: Duration = Duration::from_secs(1);

enum Operation {
    Append { log: GroupLog, entries: Vec<Entry>, done: IOFlushed<TypeConfig> },
    Mark { group: u16, which: u8, bytes: Vec<u8>, done: Option<oneshot::Sender<()>> },
    Truncate { group: u16, from: u64, done: oneshot::Sender<()> },
    Purge { group: u16, upto: LogId },
    Rewrite { groups: Vec<Rewrite>, done: oneshot::Sender<()> },
}

/// What is measured of the file.
#[derive(Clone, Debug)]
pub struct LogFigures {
    /// Commits, by how long they took.
    pub seconds: Histogram,
    /// Entries that were appended.
    pub entries: Counter,
}

impl Default for LogFigures {
    fn default() -> Self {
        Self { seconds: Histogram::new(COMMIT_SECONDS), entries: Counter::default() }
    }
}

/// Bounds of the histogram of commits: half a millisecond to eight seconds.
pub const COMMIT_SECONDS: [f64; 8] = [0.0005, 0.001, 0.002, 0.008, 0.032, 0.128, 1.0, 8.0];

/// The file and its writer.
pub struct LogFile {
    figures: LogFigures,
    wal: Arc<Wal>,
    operations: Mutex<mpsc::Sender<Operation>>,
    /// Wakes a writer that is a task.
    bell: Arc<Notify>,
}

impl LogFile {
    /// Starts the writer of an open file, as a thread of its own.
    pub fn start(opened: Opened) -> io::Result<Arc<Self>> {
        Self::start_with(opened, Scribe::Thread)
    }

    /// Starts this writer of an open file.
    pub fn start_with(opened: Opened, scribe: Scribe) -> io::Result<Arc<Self>> {
        let Opened { wal, pen } = opened;
        let (sender, receiver) = mpsc::channel();
        let figures = LogFigures::default();
        let writer = Writer { pen, late: BTreeMap::new(), figures: figures.clone() };
        let bell = Arc::new(Notify::new());
        match scribe {
            Scribe::Thread => {
                let thread = thread::Builder::new().name("raft-log".to_owned());
                thread.spawn(move || writer.run(&receiver))?;
            }
            Scribe::Task(pace) => {
                tokio::spawn(writer.run_as_task(receiver, Arc::clone(&bell), pace));
            }
        }
        Ok(Arc::new(Self { figures, wal, operations: Mutex::new(sender), bell }))
    }

    /// What is measured of the file.
    pub fn figures(&self) -> LogFigures {
        self.figures.clone()
    }

    /// The log of one group, as the disk has it.
    pub fn group(self: &Arc<Self>, group: u16) -> io::Result<GroupLog> {
        let tail = Tail {
            vote: self.mark(group, VOTE)?,
            committed: self.mark(group, COMMITTED)?,
            purged: self.mark(group, PURGED)?,
            last: self.last(group)?,
            ..Tail::default()
        };
        Ok(GroupLog { group, file: Arc::clone(self), tail: Arc::new(Mutex::new(tail)) })
    }

    /// Changes the logs of a node that does not run, all at once.
    pub async fn rewrite(&self, groups: Vec<Rewrite>) -> io::Result<()> {
        let (done, receiver) = oneshot::channel();
        self.send(Operation::Rewrite { groups, done })?;
        receiver.await.map_err(|_| io::Error::other("the log's writer has stopped"))
    }

    fn mark<T: DeserializeOwned>(&self, group: u16, which: u8) -> io::Result<Option<T>> {
        let mark = self.wal.mark(group, which);
        mark.map(|bytes| codec::decode(&bytes).map_err(io::Error::other)).transpose()
    }

    fn last(&self, group: u16) -> io::Result<Option<LogId>> {
        let Some((index, stored)) = self.wal.last(group)? else { return Ok(None) };
        let entry: Entry = decoded(&entry_key(group, index), &stored)?;
        Ok(Some(entry.log_id()))
    }

    fn entries(&self, group: u16, from: u64, until: u64) -> io::Result<Vec<Entry>> {
        let mut found: Vec<Entry> = vec![];
        for (index, stored) in self.wal.entries(group, from, until)? {
            if found.last().is_some_and(|last| last.index() + 1 != index) {
                return Err(damaged());
            }
            found.push(decoded(&entry_key(group, index), &stored)?);
        }
        Ok(found)
    }

    /// Reads everything that is needed of the file.
    fn scrub(&self) -> io::Result<u64> {
        let (mut pace, mut at) = (Pace::of(scrub::BYTES_PER_SECOND), 0);
        while let Some((next, read)) = self.wal.look_through(at)? {
            pace.after(read);
            at = next;
        }
        Ok(pace.bytes)
    }

    fn send(&self, operation: Operation) -> io::Result<()> {
        let sender = self.operations.lock().unwrap_or_else(PoisonError::into_inner);
        let sent = sender.send(operation);
        self.bell.notify_one();
        sent.map_err(|_| io::Error::other("the log's writer has stopped"))
    }
}

/// What a log is to be, where Raft does not run.
pub struct Rewrite {
    /// Whose log.
    pub group: u16,
    /// The vote that is remembered.
    pub vote: Vote,
    /// Up to where the tables have everything; what the log has up to there goes.
    pub purged: Option<LogId>,
    /// What is appended.
    pub append: Vec<Entry>,
    /// Whether what was there goes first.
    pub anew: bool,
}

impl Rewrite {
    fn write(&self, frame: &mut Frame) {
        let group = self.group;
        if self.anew {
            frame.forget(group);
        }
        if let Some(upto) = self.purged {
            frame.mark(group, PURGED, &codec::encode(&upto));
            frame.purge(group, upto.index);
        }
        for entry in &self.append {
            put_entry(frame, group, entry);
        }
        frame.mark(group, VOTE, &codec::encode(&self.vote));
    }
}

impl Scrubbed for LogFile {
    fn name(&self) -> &'static str {
        "the raft log"
    }

    fn scrub(&self) -> io::Result<u64> {
        Self::scrub(self)
    }
}

struct Writer {
    pen: Pen,
    /// `committed` marks that ride with the next frame.
    late: BTreeMap<u16, Vec<u8>>,
    figures: LogFigures,
}

impl Writer {
    fn run(mut self, operations: &mpsc::Receiver<Operation>) {
        loop {
            let first = match operations.recv_timeout(COMMITTED_ALONE_AFTER) {
                Ok(first) => Some(first),
                Err(mpsc::RecvTimeoutError::Timeout) if self.late.is_empty() => continue,
                Err(mpsc::RecvTimeoutError::Timeout) => None,
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
            };
            self.carry_out(gathered(first, operations));
        }
        // The node is stopping: nothing waits any more. The marks are worth a write, and with a frame after it
        // the one before is known to have been whole.
        let _ = self.commit(&[], true);
    }

    async fn run_as_task(
        mut self,
        operations: mpsc::Receiver<Operation>,
        bell: Arc<Notify>,
        pace: Pause,
    ) {
        loop {
            let _ = tokio::time::timeout(COMMITTED_ALONE_AFTER, bell.notified()).await;
            tokio::time::sleep(pace()).await;
            self.carry_out(operations.try_iter().collect());
        }
    }

    fn carry_out(&mut self, mut batch: Vec<Operation>) {
        self.keep_late_marks(&mut batch);
        if let Err(error) = self.commit(&batch, false) {
            fatal("the raft log could not be written", &error);
        }
        batch.into_iter().for_each(Operation::answer);
    }

    /// A lone `committed` mark is not worth an fsync.
    fn keep_late_marks(&mut self, batch: &mut Vec<Operation>) {
        batch.retain_mut(|operation| match operation {
            Operation::Mark { group, which: COMMITTED, bytes, .. } => {
                self.late.insert(*group, std::mem::take(bytes));
                false
            }
            Operation::Mark { .. }
            | Operation::Append { .. }
            | Operation::Truncate { .. }
            | Operation::Purge { .. }
            | Operation::Rewrite { .. } => true,
        });
    }

    fn commit(&mut self, batch: &[Operation], is_last: bool) -> io::Result<()> {
        let mut frame = self.pen.frame();
        batch.iter().for_each(|operation| operation.write(&mut frame));
        for (group, bytes) in std::mem::take(&mut self.late) {
            frame.mark(group, COMMITTED, &bytes);
        }
        if frame.is_empty() && !is_last {
            return Ok(());
        }
        let began = Instant::now();
        self.pen.write(frame, !is_left_unsynced(batch))?;
        self.figures.seconds.observe(began.elapsed().as_secs_f64());
        self.figures.entries.inc_by(batch.iter().map(Operation::entries).sum());
        Ok(())
    }
}

/// What waits, as far as one frame takes it.
fn gathered(first: Option<Operation>, more: &mpsc::Receiver<Operation>) -> Vec<Operation> {
    let mut batch: Vec<Operation> = first.into_iter().collect();
    let mut bytes: usize = batch.iter().map(Operation::bytes).sum();
    let mut yields = 0;
    while batch.len() < OPERATIONS_PER_COMMIT && bytes < BYTES_PER_COMMIT {
        match more.try_recv() {
            Ok(next) => {
                bytes += next.bytes();
                batch.push(next);
            }
            // Who writes alone waits for nobody.
            Err(_) if batch.len() < CROWD || yields == YIELDS_MAX => break,
            Err(_) => {
                yields += 1;
                thread::yield_now();
            }
        }
    }
    batch
}

/// Never, unless a bug was planted.
fn is_left_unsynced(batch: &[Operation]) -> bool {
    let votes = |one: &Operation| matches!(one, Operation::Mark { which: VOTE, .. });
    planted::has(Bug::AcknowledgeBeforeSync)
        || planted::has(Bug::VoteUnsynced) && batch.iter().all(votes)
}

fn entry_key(group: u16, index: u64) -> [u8; 10] {
    let mut key = [0; 10];
    key[..2].copy_from_slice(&group.to_be_bytes());
    key[2..].copy_from_slice(&index.to_be_bytes());
    key
}

fn put_entry(frame: &mut Frame, group: u16, entry: &Entry) {
    frame.entry_with(group, entry.index(), |bytes| {
        let start = bytes.len() + checked::SUM_BYTES;
        bytes.resize(start, 0);
        codec::encode_onto(bytes, entry);
        let sum = checked::sum_of(&entry_key(group, entry.index()), &bytes[start..]);
        bytes[start - checked::SUM_BYTES..start].copy_from_slice(&sum);
    });
}

fn decoded<T: DeserializeOwned>(key: &[u8], stored: &[u8]) -> io::Result<T> {
    codec::decode(checked::read(key, stored)?).map_err(io::Error::other)
}

impl Operation {
    fn write(&self, frame: &mut Frame) {
        match self {
            Self::Append { log, entries, .. } => {
                entries.iter().for_each(|entry| put_entry(frame, log.group, entry));
            }
            Self::Mark { group, which, bytes, .. } => frame.mark(*group, *which, bytes),
            Self::Truncate { .. } if planted::has(Bug::TruncationForgotten) => {}
            Self::Truncate { group, from, .. } => frame.truncate(*group, *from),
            Self::Purge { group, upto } => {
                frame.mark(*group, PURGED, &codec::encode(upto));
                frame.purge(*group, upto.index);
            }
            Self::Rewrite { groups, .. } => groups.iter().for_each(|one| one.write(frame)),
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Append { entries, .. } => entries.iter().map(size).sum(),
            Self::Rewrite { groups, .. } => {
                groups.iter().flat_map(|one| &one.append).map(size).sum()
            }
            Self::Mark { .. } | Self::Truncate { .. } | Self::Purge { .. } => 0,
        }
    }

    fn entries(&self) -> u64 {
        match self {
            Self::Append { entries, .. } => entries.len() as u64,
            Self::Mark { .. }
            | Self::Truncate { .. }
            | Self::Purge { .. }
            | Self::Rewrite { .. } => 0,
        }
    }

    fn answer(self) {
        match self {
            Self::Append { log, entries, done } => {
                log.flushed(&entries);
                done.io_completed(Ok(()));
            }
            // Whoever waited may have been shut down; the write stands all the same.
            Self::Mark { done, .. } => {
                done.map(|done| done.send(()));
            }
            Self::Truncate { done, .. } | Self::Rewrite { done, .. } => {
                let _ = done.send(());
            }
            Self::Purge { .. } => {}
        }
    }
}

/// What a group's readers see without the disk.
#[derive(Default)]
struct Tail {
    entries: BTreeMap<u64, Entry>,
    /// Bytes of these entries.
    bytes: usize,
    vote: Option<Vote>,
    committed: Option<LogId>,
    purged: Option<LogId>,
    last: Option<LogId>,
    /// Bytes appended since somebody asked to forget.
    grown: u64,
}

impl Tail {
    fn put(&mut self, entry: Entry) {
        self.bytes += size(&entry);
        let before = self.entries.insert(entry.index(), entry);
        self.bytes -= before.as_ref().map_or(0, size);
    }

    fn keep(&mut self, cut: impl FnOnce(&mut BTreeMap<u64, Entry>)) {
        cut(&mut self.entries);
        self.bytes = self.entries.values().map(size).sum();
    }
}

/// The log of one group.
#[derive(Clone)]
pub struct GroupLog {
    group: u16,
    file: Arc<LogFile>,
    tail: Arc<Mutex<Tail>>,
}

impl GroupLog {
    fn tail(&self) -> MutexGuard<'_, Tail> {
        self.tail.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The last entry that is not kept any more: a snapshot has what came of it.
    pub fn purged(&self) -> Option<LogId> {
        self.tail().purged
    }

    /// Bytes appended since [`GroupLog::forget_growth`].
    pub fn grown_bytes(&self) -> u64 {
        self.tail().grown
    }

    /// The last entry that has so many bytes of log, and more, behind it; `None` if all entries have less.
    pub fn beyond(&self, bytes: u64) -> Option<u64> {
        self.file.wal.beyond(self.group, bytes)
    }

    /// A snapshot is on its way: growth counts from here.
    pub fn forget_growth(&self) {
        self.tail().grown = 0;
    }

    /// What is on disk may leave memory; the newest stay for whoever applies or replicates them.
    fn flushed(&self, entries: &[Entry]) {
        let Some(last) = entries.last() else { return };
        let mut tail = self.tail();
        while tail.entries.len() > ENTRIES_KEPT || tail.bytes > BYTES_KEPT {
            match tail.entries.first_key_value() {
                Some((index, entry)) if *index < last.index() => tail.bytes -= size(entry),
                _ => break,
            }
            tail.entries.pop_first();
        }
    }

    async fn write_and_wait(
        &self,
        operation: impl FnOnce(oneshot::Sender<()>) -> Operation,
    ) -> io::Result<()> {
        let (sender, receiver) = oneshot::channel();
        self.file.send(operation(sender))?;
        receiver.await.map_err(|_| io::Error::other("the log's writer has stopped"))
    }
}

/// Bytes of what an entry proposes.
pub(super) fn size(entry: &Entry) -> usize {
    match &entry.payload {
        EntryPayload::Normal(proposal) => proposal.0.len(),
        EntryPayload::Blank | EntryPayload::Membership(_) => 0,
    }
}

fn exclusive_bounds(range: &impl RangeBounds<u64>) -> (u64, u64) {
    let from = match range.start_bound() {
        Bound::Included(from) => *from,
        Bound::Excluded(from) => from + 1,
        Bound::Unbounded => 0,
    };
    let until = match range.end_bound() {
        Bound::Included(until) => until.saturating_add(1),
        Bound::Excluded(until) => *until,
        Bound::Unbounded => u64::MAX,
    };
    (from, until)
}

impl RaftLogReader<TypeConfig> for GroupLog {
    async fn try_get_log_entries<RB>(&mut self, range: RB) -> io::Result<Vec<Entry>>
    where
        RB: RangeBounds<u64> + Clone + Debug + OptionalSend,
    {
        let (from, until) = exclusive_bounds(&range);
        if from >= until {
            return Ok(vec![]);
        }
        // Memory first: what is not there any more has been on disk since before it left.
        let recent: Vec<Entry> =
            self.tail().entries.range(from..until).map(|(_, entry)| entry.clone()).collect();
        let edge = recent.first().map_or(until, |entry| entry.index());
        let floor = self.tail().purged.map_or(0, |purged| purged.index + 1);
        let from = from.max(floor);
        if from >= edge {
            return Ok(recent);
        }
        let mut entries = self.file.entries(self.group, from, edge)?;
        entries.extend(recent);
        Ok(entries)
    }

    async fn limited_get_log_entries(&mut self, start: u64, end: u64) -> io::Result<Vec<Entry>> {
        let (mut found, mut bytes) = (vec![], 0);
        let (mut from, mut stretch) = (start, ENTRIES_READ_AT_ONCE);
        while from < end && bytes < BYTES_AT_ONCE {
            let until = end.min(from.saturating_add(stretch));
            for entry in self.try_get_log_entries(from..until).await? {
                if bytes >= BYTES_AT_ONCE {
                    break;
                }
                bytes += size(&entry);
                found.push(entry);
            }
            (from, stretch) = (until, stretch.saturating_mul(2));
        }
        Ok(found)
    }

    async fn read_vote(&mut self) -> io::Result<Option<Vote>> {
        Ok(self.tail().vote)
    }
}

impl RaftLogStorage<TypeConfig> for GroupLog {
    type LogReader = Self;

    async fn get_log_state(&mut self) -> io::Result<LogState<TypeConfig>> {
        let tail = self.tail();
        Ok(LogState { last_purged_log_id: tail.purged, last_log_id: tail.last.or(tail.purged) })
    }

    async fn get_log_reader(&mut self) -> Self {
        self.clone()
    }

    async fn save_vote(&mut self, vote: &Vote) -> io::Result<()> {
        let bytes = codec::encode(vote);
        let group = self.group;
        self.write_and_wait(|done| Operation::Mark { group, which: VOTE, bytes, done: Some(done) })
            .await?;
        self.tail().vote = Some(*vote);
        Ok(())
    }

    async fn save_committed(&mut self, committed: Option<LogId>) -> io::Result<()> {
        self.tail().committed = committed;
        let Some(committed) = committed else { return Ok(()) };
        let bytes = codec::encode(&committed);
        self.file.send(Operation::Mark { group: self.group, which: COMMITTED, bytes, done: None })
    }

    async fn read_committed(&mut self) -> io::Result<Option<LogId>> {
        Ok(self.tail().committed)
    }

    async fn append<I>(&mut self, entries: I, done: IOFlushed<TypeConfig>) -> io::Result<()>
    where
        I: IntoIterator<Item = Entry> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        let entries: Vec<Entry> = entries.into_iter().collect();
        {
            let mut tail = self.tail();
            for entry in &entries {
                tail.grown += size(entry) as u64;
                tail.put(entry.clone());
            }
            if let Some(last) = entries.last() {
                tail.last = Some(last.log_id());
            }
        }
        self.file.send(Operation::Append { log: self.clone(), entries, done })
    }

    async fn truncate_after(&mut self, last: Option<LogId>) -> io::Result<()> {
        let from = last.map_or(0, |last| last.index + 1);
        {
            let mut tail = self.tail();
            tail.keep(|entries| {
                entries.split_off(&from);
            });
            if tail.last.is_some_and(|present| present.index >= from) {
                tail.last = last;
            }
        }
        let group = self.group;
        self.write_and_wait(|done| Operation::Truncate { group, from, done }).await
    }

    async fn purge(&mut self, upto: LogId) -> io::Result<()> {
        {
            let mut tail = self.tail();
            tail.keep(|entries| *entries = entries.split_off(&(upto.index + 1)));
            tail.purged = tail.purged.max(Some(upto));
            tail.last = tail.last.max(Some(upto));
        }
        self.file.send(Operation::Purge { group: self.group, upto })
    }
}
