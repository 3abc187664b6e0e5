//! The log of all groups in one redb file, behind one writer thread.
//!
//! The thread drains whatever waits, writes it in one transaction, syncs once and then answers all
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
use redb::{Database, ReadableDatabase as _, TableDefinition};
use serde::de::DeserializeOwned;
use tokio::sync::{Notify, oneshot};

use super::{
    checked::{self, Damaged},
    disk::{Pause, Scribe},
    fatal,
    scrub::{Pace, Scrubbed},
    types::{Entry, LogId, TypeConfig, Vote},
};

/// `(group, index)` → entry.
const ENTRIES: TableDefinition<'_, (u16, u64), &[u8]> = TableDefinition::new("entries");
/// `(group, which)` → vote, committed or purged.
const MARKS: TableDefinition<'_, (u16, u8), &[u8]> = TableDefinition::new("marks");

const VOTE: u8 = 1;
const COMMITTED: u8 = 2;
const PURGED: u8 = 3;

/// Flushed entries kept in memory per group, for whoever replicates or applies them: so many, and so
/// many bytes.
const ENTRIES_KEPT: usize = 1024;
const BYTES_KEPT: usize = 2 * 1024 * 1024;
/// Operations that one transaction takes.
const OPERATIONS_PER_COMMIT: usize = 4096;
/// How long `committed` waits for a transaction to ride with.
const COMMITTED_ALONE_AFTER: Duration = Duration::from_secs(1);

enum Operation {
    Append { log: GroupLog, entries: Vec<Entry>, done: IOFlushed<TypeConfig> },
    Mark { group: u16, which: u8, bytes: Vec<u8>, done: Option<oneshot::Sender<()>> },
    Truncate { group: u16, from: u64, done: oneshot::Sender<()> },
    Purge { group: u16, upto: LogId },
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
    database: Arc<Database>,
    operations: Mutex<mpsc::Sender<Operation>>,
    /// Wakes a writer that is a task.
    bell: Arc<Notify>,
}

impl LogFile {
    /// Starts the writer of an open file, as a thread of its own.
    pub fn start(database: Database) -> io::Result<Arc<Self>> {
        Self::start_with(database, Scribe::Thread)
    }

    /// Starts this writer of an open file.
    pub fn start_with(database: Database, scribe: Scribe) -> io::Result<Arc<Self>> {
        let database = Arc::new(database);
        let write = database.begin_write().map_err(io::Error::other)?;
        write.open_table(ENTRIES).map_err(io::Error::other)?;
        write.open_table(MARKS).map_err(io::Error::other)?;
        write.commit().map_err(io::Error::other)?;
        let (sender, receiver) = mpsc::channel();
        let figures = LogFigures::default();
        let writer = Writer {
            database: Arc::clone(&database),
            late: BTreeMap::new(),
            figures: figures.clone(),
        };
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
        Ok(Arc::new(Self { figures, database, operations: Mutex::new(sender), bell }))
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
    pub fn rewrite(&self, groups: &[Rewrite]) -> io::Result<()> {
        let rewrite = || -> Result<(), redb::Error> {
            let write = self.database.begin_write()?;
            {
                let mut entries = write.open_table(ENTRIES)?;
                let mut marks = write.open_table(MARKS)?;
                groups.iter().try_for_each(|one| one.write(&mut entries, &mut marks))?;
            }
            write.commit()?;
            Ok(())
        };
        rewrite().map_err(io::Error::other)
    }

    fn mark<T: DeserializeOwned>(&self, group: u16, which: u8) -> io::Result<Option<T>> {
        let read = self.database.begin_read().map_err(io::Error::other)?;
        let marks = read.open_table(MARKS).map_err(io::Error::other)?;
        let row = marks.get((group, which)).map_err(io::Error::other)?;
        let mark = row.map(|row| decoded(&mark_key(group, which), row.value()));
        mark.transpose()
    }

    fn last(&self, group: u16) -> io::Result<Option<LogId>> {
        let read = self.database.begin_read().map_err(io::Error::other)?;
        let entries = read.open_table(ENTRIES).map_err(io::Error::other)?;
        let range = entries.range((group, 0)..=(group, u64::MAX)).map_err(io::Error::other)?;
        let Some(row) = { range }.next_back() else { return Ok(None) };
        let (key, bytes) = row.map_err(io::Error::other)?;
        let entry: Entry = decoded(&entry_key(group, key.value().1), bytes.value())?;
        Ok(Some(entry.log_id()))
    }

    fn entries(&self, group: u16, from: u64, until: u64) -> io::Result<Vec<Entry>> {
        let read = self.database.begin_read().map_err(io::Error::other)?;
        let entries = read.open_table(ENTRIES).map_err(io::Error::other)?;
        let range = entries.range((group, from)..(group, until)).map_err(io::Error::other)?;
        let mut found: Vec<Entry> = vec![];
        for row in range {
            let (key, bytes) = row.map_err(io::Error::other)?;
            let index = key.value().1;
            if found.last().is_some_and(|last| last.index() + 1 != index) {
                return Err(io::Error::new(io::ErrorKind::InvalidData, Damaged));
            }
            found.push(decoded(&entry_key(group, index), bytes.value())?);
        }
        Ok(found)
    }

    /// Reads everything and ends the process if something is not what was written.
    fn scrub(&self) -> io::Result<u64> {
        let read = self.database.begin_read().map_err(io::Error::other)?;
        let mut pace = Pace::default();
        let entries = read.open_table(ENTRIES).map_err(io::Error::other)?;
        for row in entries.range::<(u16, u64)>(..).map_err(io::Error::other)? {
            let (key, row) = row.map_err(io::Error::other)?;
            let (group, index) = key.value();
            pace.after(checked::read(&entry_key(group, index), row.value())?);
        }
        let marks = read.open_table(MARKS).map_err(io::Error::other)?;
        for row in marks.range::<(u16, u8)>(..).map_err(io::Error::other)? {
            let (key, row) = row.map_err(io::Error::other)?;
            let (group, which) = key.value();
            pace.after(checked::read(&mark_key(group, which), row.value())?);
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
    fn write(
        &self,
        entries: &mut EntryTable<'_>,
        marks: &mut MarkTable<'_>,
    ) -> Result<(), redb::Error> {
        let group = self.group;
        if self.anew {
            entries.retain_in((group, 0)..=(group, u64::MAX), |_, _| false)?;
            marks.retain_in((group, 0)..=(group, u8::MAX), |_, _| false)?;
        }
        if let Some(upto) = self.purged {
            put_mark(marks, group, PURGED, &codec::encode(&upto))?;
            entries.retain_in((group, 0)..=(group, upto.index), |_, _| false)?;
        }
        for entry in &self.append {
            put_entry(entries, group, entry)?;
        }
        put_mark(marks, group, VOTE, &codec::encode(&self.vote))
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
    database: Arc<Database>,
    /// `committed` marks that ride with the next transaction.
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
            let rest = operations.try_iter().take(OPERATIONS_PER_COMMIT);
            self.carry_out(first.into_iter().chain(rest).collect());
        }
        // The node is stopping: nothing waits any more, the marks are still worth a write.
        if !self.late.is_empty() {
            let _ = self.commit(&[]);
        }
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
        if let Err(error) = self.commit(&batch) {
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
            | Operation::Purge { .. } => true,
        });
    }

    fn commit(&mut self, batch: &[Operation]) -> Result<(), redb::Error> {
        if batch.is_empty() && self.late.is_empty() {
            return Ok(());
        }
        let began = Instant::now();
        let mut write = self.database.begin_write()?;
        if is_left_unsynced(batch) {
            write.set_durability(redb::Durability::None).map_err(redb::Error::from)?;
        }
        {
            let mut entries = write.open_table(ENTRIES)?;
            let mut marks = write.open_table(MARKS)?;
            for operation in batch {
                operation.write(&mut entries, &mut marks)?;
            }
            for (group, bytes) in std::mem::take(&mut self.late) {
                put_mark(&mut marks, group, COMMITTED, &bytes)?;
            }
        }
        write.commit()?;
        self.figures.seconds.observe(began.elapsed().as_secs_f64());
        self.figures.entries.inc_by(batch.iter().map(Operation::entries).sum());
        Ok(())
    }
}

/// Never, unless a bug was planted.
fn is_left_unsynced(batch: &[Operation]) -> bool {
    let votes = |one: &Operation| matches!(one, Operation::Mark { which: VOTE, .. });
    planted::has(Bug::AcknowledgeBeforeSync)
        || planted::has(Bug::VoteUnsynced) && batch.iter().all(votes)
}

type EntryTable<'t> = redb::Table<'t, (u16, u64), &'static [u8]>;
type MarkTable<'t> = redb::Table<'t, (u16, u8), &'static [u8]>;

fn entry_key(group: u16, index: u64) -> Vec<u8> {
    [&group.to_be_bytes()[..], &index.to_be_bytes()].concat()
}

fn mark_key(group: u16, which: u8) -> [u8; 3] {
    let [high, low] = group.to_be_bytes();
    [high, low, which]
}

fn put_entry(table: &mut EntryTable<'_>, group: u16, entry: &Entry) -> Result<(), redb::Error> {
    let stored = checked::write(&entry_key(group, entry.index()), &codec::encode(entry));
    table.insert((group, entry.index()), stored.as_slice())?;
    Ok(())
}

fn put_mark(
    marks: &mut MarkTable<'_>,
    group: u16,
    which: u8,
    bytes: &[u8],
) -> Result<(), redb::Error> {
    let stored = checked::write(&mark_key(group, which), bytes);
    marks.insert((group, which), stored.as_slice())?;
    Ok(())
}

fn decoded<T: DeserializeOwned>(key: &[u8], stored: &[u8]) -> io::Result<T> {
    codec::decode(checked::read(key, stored)?).map_err(io::Error::other)
}

impl Operation {
    fn write(
        &self,
        table: &mut EntryTable<'_>,
        marks: &mut MarkTable<'_>,
    ) -> Result<(), redb::Error> {
        match self {
            Self::Append { log, entries, .. } => {
                for entry in entries {
                    put_entry(table, log.group, entry)?;
                }
            }
            Self::Mark { group, which, bytes, .. } => {
                put_mark(marks, *group, *which, bytes)?;
            }
            Self::Truncate { .. } if planted::has(Bug::TruncationForgotten) => {}
            Self::Truncate { group, from, .. } => {
                table.retain_in((*group, *from)..=(*group, u64::MAX), |_, _| false)?;
            }
            Self::Purge { group, upto } => {
                put_mark(marks, *group, PURGED, &codec::encode(upto))?;
                table.retain_in((*group, 0)..=(*group, upto.index), |_, _| false)?;
            }
        }
        Ok(())
    }

    fn entries(&self) -> u64 {
        match self {
            Self::Append { entries, .. } => entries.len() as u64,
            Self::Mark { .. } | Self::Truncate { .. } | Self::Purge { .. } => 0,
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
            Self::Truncate { done, .. } => {
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
    vote: Option<Vote>,
    committed: Option<LogId>,
    purged: Option<LogId>,
    last: Option<LogId>,
    /// Bytes appended since somebody asked to forget.
    grown: u64,
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

    /// Bytes appended since [`GroupLog::forget_growth`].
    pub fn grown_bytes(&self) -> u64 {
        self.tail().grown
    }

    /// A snapshot is on its way: growth counts from here.
    pub fn forget_growth(&self) {
        self.tail().grown = 0;
    }

    /// What is on disk may leave memory; the newest stay for whoever applies or replicates them.
    fn flushed(&self, entries: &[Entry]) {
        let Some(last) = entries.last() else { return };
        let mut tail = self.tail();
        let mut bytes: usize = tail.entries.values().map(size).sum();
        while tail.entries.len() > ENTRIES_KEPT || bytes > BYTES_KEPT {
            match tail.entries.first_key_value() {
                Some((index, entry)) if *index < last.index() => bytes -= size(entry),
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

fn size(entry: &Entry) -> usize {
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
            tail.grown += entries.iter().map(|entry| size(entry) as u64).sum::<u64>();
            tail.entries.extend(entries.iter().map(|entry| (entry.index(), entry.clone())));
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
            tail.entries.split_off(&from);
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
            tail.entries = tail.entries.split_off(&(upto.index + 1));
            tail.purged = tail.purged.max(Some(upto));
            tail.last = tail.last.max(Some(upto));
        }
        self.file.send(Operation::Purge { group: self.group, upto })
    }
}
