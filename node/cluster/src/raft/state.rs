//! The tables of all groups in one redb file, written a little later than they change.
//!
//! Each group's rows are in a redb table of their own, so that a snapshot can arrive beside them and take
//! their place in one short transaction.
//!
//! A transaction holds the changed rows *and* how far the log was applied, so a durable commit is a
//! checkpoint: the log may be purged up to it, and a restart applies only what came after. A snapshot
//! is a read transaction. One writer at a time: the flusher's thread, or an installed snapshot.

use std::{
    io,
    ops::Bound,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use domain::{
    codec,
    planted::{self, Bug},
    table::{Backing, Change, Order, RawRow},
};
use futures::Stream;
use prometheus_client::metrics::histogram::Histogram;
use redb::{
    Database, ReadOnlyTable, ReadTransaction, ReadableDatabase as _, TableDefinition, TableError,
    TableHandle as _,
};
use serde::{Deserialize, Serialize};

use super::{
    checked,
    disk::Scribe,
    fatal,
    log::COMMIT_SECONDS,
    pace::Pace,
    received,
    scrub::{self, Scrubbed},
    types::{LogId, Membership},
};

/// `group` → [`Applied`].
const APPLIED: TableDefinition<'_, u16, &[u8]> = TableDefinition::new("applied");
/// What the names of tables with a group's rows begin with: `group, table, key` → row.
const ROWS: &str = "rows-";
/// What the names of tables begin with whose rows still arrive.
const ARRIVING: &str = "arriving-";
/// The one table of all groups in files of earlier builds.
const ROWS_OF_ALL: &str = "rows";

/// How often changed rows are written: a row that changes often is written once for all of that, and one that is
/// gone again by then not at all.
const FLUSH_EVERY: Duration = Duration::from_secs(1);
/// Bytes of applied entries after which they are written at once: until then their rows are in memory, and so much
/// of them fits into the half of the page cache that may wait to be written.
const FLUSH_BYTES: u64 = 2 * 1024 * 1024;

/// How far a group's log was applied to its tables.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Applied {
    /// The last applied entry.
    pub log: Option<LogId>,
    /// The last applied membership.
    pub membership: Membership,
}

impl Applied {
    /// The number of the last applied entry; 0 before the first.
    pub fn index(&self) -> u64 {
        self.log.map_or(0, |log| log.index)
    }
}

/// What one group hands to the flusher: its changes, and how far they go.
pub struct Dirty {
    /// Changed rows.
    pub changes: Vec<Change>,
    /// The state they belong to.
    pub applied: Applied,
}

/// A group's machine, as the flusher sees it.
pub trait Flush: Send + Sync {
    /// The group's number.
    fn group(&self) -> u16;
    /// Takes the changes; `None` if there were none.
    fn take(&self) -> Option<Dirty>;
    /// What was taken last is durable.
    fn written(&self);
}

/// What is measured of the file.
#[derive(Clone, Debug)]
pub struct StateFigures {
    /// Commits, by how long they took.
    pub seconds: Histogram,
}

/// The file, its groups and its flusher.
pub struct StateFile {
    figures: StateFigures,
    database: Database,
    scribe: Scribe,
    groups: Mutex<Vec<Arc<dyn Flush>>>,
    writing: Mutex<()>,
    stop: Mutex<bool>,
    wake: Condvar,
    arrivals: AtomicU64,
    /// Bytes of entries that were applied since the last flush.
    applied: AtomicU64,
}

impl StateFile {
    /// Starts the flusher of an open file, as a thread of its own.
    pub fn start(database: Database) -> io::Result<Arc<Self>> {
        Self::start_with(database, Scribe::Thread)
    }

    /// Starts this flusher of an open file.
    pub fn start_with(database: Database, scribe: Scribe) -> io::Result<Arc<Self>> {
        prepare(&database).map_err(io::Error::other)?;
        let file = Arc::new(Self {
            figures: StateFigures { seconds: Histogram::new(COMMIT_SECONDS) },
            database,
            scribe: scribe.clone(),
            groups: Mutex::new(vec![]),
            writing: Mutex::new(()),
            stop: Mutex::new(false),
            wake: Condvar::new(),
            arrivals: AtomicU64::new(0),
            applied: AtomicU64::new(0),
        });
        let flusher = Arc::downgrade(&file);
        match scribe {
            Scribe::Thread => {
                let thread = thread::Builder::new().name("state-flush".to_owned());
                thread.spawn(move || {
                    while let Some(file) = flusher.upgrade() {
                        if file.nap() {
                            break;
                        }
                        file.flush();
                    }
                })?;
            }
            Scribe::Task(pace) => {
                tokio::spawn(async move {
                    loop {
                        tokio::time::sleep(FLUSH_EVERY + pace()).await;
                        let Some(file) = flusher.upgrade() else { break };
                        file.flush();
                    }
                });
            }
        }
        Ok(file)
    }

    /// Who writes, and does what takes long.
    pub fn scribe(&self) -> &Scribe {
        &self.scribe
    }

    /// What is measured of the file.
    pub fn figures(&self) -> StateFigures {
        self.figures.clone()
    }

    /// Sleeps until the next flush is due; says whether the flusher shall end.
    fn nap(&self) -> bool {
        let stop = lock(&self.stop);
        let rests = |stop: &mut bool| !*stop && self.applied.load(Relaxed) < FLUSH_BYTES;
        let wake = self.wake.wait_timeout_while(stop, FLUSH_EVERY, rests);
        *wake.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Entries of so many bytes were applied.
    pub fn note_applied(&self, bytes: u64) {
        let before = self.applied.fetch_add(bytes, Relaxed);
        if before < FLUSH_BYTES && before + bytes >= FLUSH_BYTES {
            // Behind the lock the flusher is either before its look at the bytes or asleep.
            drop(lock(&self.stop));
            self.wake.notify_all();
        }
    }

    /// What tables there are, in order.
    #[cfg(test)]
    pub(super) fn table_names(&self) -> Vec<String> {
        let read = self.database.begin_read().expect("reads");
        read.list_tables().expect("reads").map(|table| table.name().to_owned()).collect()
    }

    /// Writes what has changed and ends the flusher.
    pub fn stop(&self) {
        *lock(&self.stop) = true;
        self.wake.notify_all();
        self.flush();
    }

    /// Adds a group to those that are written.
    pub fn register(&self, group: Arc<dyn Flush>) {
        lock(&self.groups).push(group);
    }

    /// Writes all changed rows of all groups in one durable transaction.
    pub fn flush(&self) {
        let _writing = lock(&self.writing);
        self.applied.store(0, Relaxed);
        let groups: Vec<Arc<dyn Flush>> = lock(&self.groups).clone();
        let dirty: Vec<_> =
            groups.iter().filter_map(|group| Some((group, group.take()?))).collect();
        if dirty.is_empty() {
            return;
        }
        let began = Instant::now();
        if let Err(error) = self.commit(dirty.iter().map(|(group, dirty)| (group.group(), dirty))) {
            fatal("the tables could not be written", &error);
        }
        dirty.iter().for_each(|(group, _)| group.written());
        self.figures.seconds.observe(began.elapsed().as_secs_f64());
        tracing::trace!(elapsed = ?began.elapsed(), groups = dirty.len(), "tables written");
    }

    fn commit<'d>(
        &self,
        groups: impl Iterator<Item = (u16, &'d Dirty)>,
    ) -> Result<(), redb::Error> {
        let write = self.database.begin_write()?;
        {
            let mut applied = write.open_table(APPLIED)?;
            for (group, dirty) in groups {
                let name = rows_of(group);
                let mut rows = write.open_table(table(&name))?;
                for change in &dirty.changes {
                    let key = row_key(group, change.table, &change.key);
                    match &change.row {
                        Some(row) => {
                            let stored = checked::write(&key, &row.bytes());
                            rows.insert(key.as_slice(), stored.as_slice())?
                        }
                        None => rows.remove(key.as_slice())?,
                    };
                }
                applied.insert(group, applied_row(group, &dirty.applied).as_slice())?;
            }
        }
        write.commit()?;
        Ok(())
    }

    /// What is durable of one group now.
    pub fn snapshot(self: &Arc<Self>, group: u16) -> io::Result<StateSnapshot> {
        let read = self.database.begin_read().map_err(io::Error::other)?;
        let scribe = self.scribe.clone();
        Ok(StateSnapshot(Rows::Written { group, read: Arc::new(read), scribe }))
    }

    /// Puts a snapshot in the place of all rows of `group`; `reload` runs before the next flush.
    pub fn install(
        &self,
        group: u16,
        applied: &Applied,
        from: &StateSnapshot,
        reload: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        let _writing = lock(&self.writing);
        match &from.0 {
            Rows::Arrived(arrived) => {
                self.put_in_place(group, applied, arrived).map_err(io::Error::other)?;
            }
            Rows::Written { .. } | Rows::Received(_) => {
                self.replace(group, applied, from, |_| true)?;
            }
        }
        reload()
    }

    fn put_in_place(
        &self,
        group: u16,
        applied: &Applied,
        arrived: &Arrived,
    ) -> Result<(), redb::Error> {
        let write = self.database.begin_write()?;
        let name = rows_of(group);
        write.delete_table(table(&name))?;
        write.rename_table(table(&arrived.name), table(&name))?;
        write.open_table(APPLIED)?.insert(group, applied_row(group, applied).as_slice())?;
        write.commit()?;
        Ok(())
    }

    /// A table for rows of this group that are on their way here.
    pub(super) fn arriving(self: &Arc<Self>, group: u16) -> Arrived {
        let name = format!("{ARRIVING}{group}-{}", self.arrivals.fetch_add(1, Relaxed));
        Arrived { file: Arc::clone(self), group, name, bytes: AtomicU64::new(0) }
    }

    /// The same where nobody else writes, with only the tables that are to be kept.
    pub(super) fn replace(
        &self,
        group: u16,
        applied: &Applied,
        from: &StateSnapshot,
        keep: impl Fn(u8) -> bool,
    ) -> io::Result<()> {
        let replace = || -> Result<(), redb::Error> {
            let write = self.database.begin_write()?;
            {
                let name = rows_of(group);
                write.delete_table(table(&name))?;
                let mut rows = write.open_table(table(&name))?;
                from.rows(|table, key, row| {
                    if keep(table) {
                        let key = row_key(group, table, key);
                        rows.insert(key.as_slice(), checked::write(&key, row).as_slice())?;
                    }
                    Ok(())
                })?;
                let mut marks = write.open_table(APPLIED)?;
                marks.insert(group, applied_row(group, applied).as_slice())?;
            }
            write.commit()?;
            Ok(())
        };
        replace().map_err(io::Error::other)
    }
}

impl Scrubbed for StateFile {
    fn name(&self) -> &'static str {
        "the tables"
    }

    fn scrub(&self) -> io::Result<u64> {
        let read = self.database.begin_read().map_err(io::Error::other)?;
        let mut pace = Pace::of(scrub::BYTES_PER_SECOND);
        for handle in read.list_tables().map_err(io::Error::other)? {
            if !handle.name().starts_with(ROWS) {
                continue;
            }
            let rows = read.open_table(table(handle.name())).map_err(io::Error::other)?;
            for row in rows.range::<&[u8]>(..).map_err(io::Error::other)? {
                let (key, row) = row.map_err(io::Error::other)?;
                pace.after(checked::read(key.value(), row.value())?.len());
            }
        }
        Ok(pace.bytes)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes what is missing of a file, and removes what an earlier life left half arrived.
fn prepare(database: &Database) -> Result<(), redb::Error> {
    let write = database.begin_write()?;
    write.open_table(APPLIED)?;
    let names: Vec<String> = write.list_tables()?.map(|table| table.name().to_owned()).collect();
    if names.iter().any(|name| name == ROWS_OF_ALL) {
        return Err(redb::Error::Io(io::Error::other(
            "state.redb was written by an earlier build, which kept its rows elsewhere: restore a backup of it, or \
             begin with an empty folder",
        )));
    }
    for name in names.iter().filter(|name| name.starts_with(ARRIVING)) {
        write.delete_table(table(name))?;
    }
    write.commit()?;
    Ok(())
}

fn table(name: &str) -> TableDefinition<'_, &'static [u8], &'static [u8]> {
    TableDefinition::new(name)
}

fn rows_of(group: u16) -> String {
    format!("{ROWS}{group}")
}

type RowsTable = ReadOnlyTable<&'static [u8], &'static [u8]>;

/// The rows of a group; `None` if nothing was written of it so far.
fn open_rows(read: &ReadTransaction, group: u16) -> Result<Option<RowsTable>, redb::Error> {
    match read.open_table(table(&rows_of(group))) {
        Err(TableError::TableDoesNotExist(_)) => Ok(None),
        rows => Ok(Some(rows?)),
    }
}

pub(super) fn row_key(group: u16, table: u8, key: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(3 + key.len());
    bytes.extend(group.to_be_bytes());
    bytes.push(table);
    bytes.extend(key);
    bytes
}

fn applied_row(group: u16, applied: &Applied) -> Vec<u8> {
    checked::write(&group.to_be_bytes(), &codec::encode(applied))
}

fn group_end(group: u16) -> Vec<u8> {
    let mut end = group.to_be_bytes().to_vec();
    end.push(u8::MAX);
    end
}

/// The rows of one group at one moment: read from this node's tables, or received from a peer.
#[derive(Clone)]
pub struct StateSnapshot(Rows);

#[derive(Clone)]
enum Rows {
    Written { group: u16, read: Arc<ReadTransaction>, scribe: Scribe },
    Received(Arc<received::ReceivedRows>),
    Arrived(Arc<Arrived>),
}

/// Rows that a peer sent, in a table beside the group's own; it goes with this value unless it was put in the place
/// of that.
pub struct Arrived {
    file: Arc<StateFile>,
    group: u16,
    name: String,
    bytes: AtomicU64,
}

impl Arrived {
    /// Of which group.
    pub(super) fn group(&self) -> u16 {
        self.group
    }

    /// How many bytes its rows have.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    /// Who writes.
    pub(super) fn scribe(&self) -> &Scribe {
        self.file.scribe()
    }

    /// Adds rows, each with what stands on disk for it; they are durable on return.
    pub(super) fn add(&self, rows: &[(Vec<u8>, Vec<u8>)]) -> io::Result<()> {
        let add = || -> Result<(), redb::Error> {
            let write = self.file.database.begin_write()?;
            {
                let mut arriving = write.open_table(table(&self.name))?;
                for (key, row) in rows {
                    self.bytes.fetch_add(row.len() as u64, Relaxed);
                    arriving.insert(key.as_slice(), row.as_slice())?;
                }
            }
            write.commit()?;
            Ok(())
        };
        add().map_err(io::Error::other)
    }
}

impl Drop for Arrived {
    fn drop(&mut self) {
        let (file, name) = (Arc::clone(&self.file), std::mem::take(&mut self.name));
        let remove = move || {
            let removed =
                file.database.begin_write().map_err(redb::Error::from).and_then(|write| {
                    if write.delete_table(table(&name))? {
                        write.commit()?;
                    }
                    Ok(())
                });
            if let Err(error) = removed {
                tracing::warn!(%error, "what arrived in vain of a snapshot stays until the next start");
            }
        };
        match self.file.scribe {
            // To free a large table takes a while, and this may be a task of the runtime.
            Scribe::Thread => drop(thread::spawn(remove)),
            Scribe::Task(_) => remove(),
        }
    }
}

impl std::fmt::Debug for StateSnapshot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.0 {
            Rows::Written { group, .. } => write!(f, "StateSnapshot(group {group})"),
            Rows::Received(rows) => write!(f, "StateSnapshot(received, {} bytes)", rows.bytes()),
            Rows::Arrived(rows) => write!(f, "StateSnapshot(arrived, {} bytes)", rows.bytes()),
        }
    }
}

impl StateSnapshot {
    /// What a peer sent, in a file.
    pub fn received(rows: received::ReceivedRows) -> Self {
        Self(Rows::Received(Arc::new(rows)))
    }

    /// What a peer sent, beside the rows that it is to replace.
    pub(super) fn arrived(rows: Arc<Arrived>) -> Self {
        Self(Rows::Arrived(rows))
    }

    /// How far the log was applied; `None` for a group that was never written.
    pub fn applied(&self) -> io::Result<Option<Applied>> {
        let Rows::Written { group, read, .. } = &self.0 else { return Ok(None) };
        let table = read.open_table(APPLIED).map_err(io::Error::other)?;
        let row = table.get(*group).map_err(io::Error::other)?;
        let read = |bytes: redb::AccessGuard<'_, &[u8]>| {
            let bytes = checked::read(&group.to_be_bytes(), bytes.value())?;
            codec::decode(bytes).map_err(io::Error::other)
        };
        row.map(read).transpose()
    }

    /// Visits all rows as `(table, key, row)`.
    pub fn rows(
        &self,
        mut visit: impl FnMut(u8, &[u8], &[u8]) -> Result<(), redb::Error>,
    ) -> Result<(), redb::Error> {
        let (group, read) = match &self.0 {
            Rows::Written { group, read, .. } => (*group, read),
            Rows::Received(rows) => return rows.rows(visit),
            Rows::Arrived(_) => {
                let message = "rows that arrived are read where they were put";
                return Err(redb::Error::Io(io::Error::other(message)));
            }
        };
        let Some(table) = open_rows(read, group)? else { return Ok(()) };
        let (start, end) = (row_key(group, 0, &[]), group_end(group));
        for row in table.range::<&[u8]>(start.as_slice()..end.as_slice())? {
            let (key, value) = row?;
            let key = key.value();
            if planted::has(Bug::SnapshotIncomplete) && key[..3] == [0, 0, 5] {
                continue;
            }
            visit(key[2], &key[3..], checked::read(key, value.value())?)?;
        }
        Ok(())
    }

    /// The whole of it as bytes for a peer, behind a head.
    pub fn stream(
        &self,
        head: bytes::Bytes,
    ) -> impl Stream<Item = io::Result<bytes::Bytes>> + use<> {
        let scribe = match &self.0 {
            Rows::Written { scribe, .. } => scribe.clone(),
            Rows::Received(_) | Rows::Arrived(_) => Scribe::Thread,
        };
        received::stream(self.clone(), head, &scribe)
    }
}

type Guards<'r> = (redb::AccessGuard<'r, &'static [u8]>, redb::AccessGuard<'r, &'static [u8]>);

/// Written rows of one group, for tables that read history back.
pub struct WrittenRows {
    /// Which group.
    pub group: u16,
    /// Where they are.
    pub file: Arc<StateFile>,
}

impl WrittenRows {
    fn read<T>(&self, read: impl FnOnce(&ReadTransaction) -> Result<T, redb::Error>) -> T {
        let answer =
            self.file.database.begin_read().map_err(redb::Error::from).and_then(|t| read(&t));
        match answer {
            Ok(answer) => answer,
            Err(error) => fatal("the tables could not be read", &error),
        }
    }
}

impl Backing for WrittenRows {
    fn get(&self, table: u8, key: &[u8]) -> Option<Vec<u8>> {
        let key = row_key(self.group, table, key);
        self.read(|read| {
            let Some(rows) = open_rows(read, self.group)? else { return Ok(None) };
            let row = rows.get(key.as_slice())?;
            let row = row.map(|row| checked::read(&key, row.value()).map(<[u8]>::to_vec));
            Ok(row.transpose()?)
        })
    }

    fn scan(&self, table: u8, from: Option<&[u8]>, order: Order, limit: usize) -> Vec<RawRow> {
        let first = row_key(self.group, table, &[]);
        let end = row_key(self.group, table + 1, &[]);
        let from = from.map(|key| row_key(self.group, table, key));
        let bounds: (Bound<&[u8]>, Bound<&[u8]>) = match (order, &from) {
            (Order::Ascending, Some(from)) => (Bound::Excluded(from), Bound::Excluded(&end)),
            (Order::Descending, Some(from)) => (Bound::Included(&first), Bound::Excluded(from)),
            (_, None) => (Bound::Included(&first), Bound::Excluded(&end)),
        };
        self.read(|read| {
            let Some(rows) = open_rows(read, self.group)? else { return Ok(vec![]) };
            let range = rows.range::<&[u8]>(bounds)?;
            let mut found = vec![];
            let mut keep = |row: Result<Guards<'_>, redb::StorageError>| {
                let (key, value) = row?;
                let row = checked::read(key.value(), value.value())?;
                found.push((key.value()[3..].to_vec(), row.to_vec()));
                Ok::<_, redb::Error>(())
            };
            match order {
                Order::Ascending => range.take(limit).try_for_each(&mut keep)?,
                Order::Descending => range.rev().take(limit).try_for_each(&mut keep)?,
            }
            Ok(found)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::raft::disk;

    /// A file with a table that an earlier life or build left.
    fn with_table(name: &str, folder: &tempfile::TempDir) -> Database {
        let database = disk::open(&folder.path().join("state.redb")).expect("opens");
        let write = database.begin_write().expect("begins");
        let insert = |mut rows: redb::Table<'_, &[u8], &[u8]>| {
            rows.insert(&b"key"[..], &b"row"[..]).expect("inserts");
        };
        insert(write.open_table(table(name)).expect("opens"));
        write.commit().expect("commits");
        database
    }

    #[test]
    fn what_arrived_in_part_before_the_node_died_is_removed() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = StateFile::start(with_table("arriving-3-0", &folder)).expect("starts");
        assert_eq!(file.table_names(), ["applied"]);
    }

    #[test]
    fn a_file_of_an_earlier_build_is_refused_and_not_taken_for_an_empty_one() {
        let folder = tempfile::tempdir().expect("a folder");
        let refused = StateFile::start(with_table("rows", &folder)).err().expect("it is refused");
        assert!(refused.to_string().contains("an earlier build"), "{refused}");
    }
}
