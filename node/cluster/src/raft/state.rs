//! The tables of all groups in one redb file, written a little later than they change.
//!
//! A transaction holds the changed rows *and* how far the log was applied, so a durable commit is a
//! checkpoint: the log may be purged up to it, and a restart applies only what came after. A snapshot
//! is a read transaction. One writer at a time: the flusher's thread, or an installed snapshot.

use std::{
    io,
    ops::Bound,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
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
use redb::{Database, ReadTransaction, ReadableDatabase as _, TableDefinition};
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

/// `group, table, key` → row.
const ROWS: TableDefinition<'_, &[u8], &[u8]> = TableDefinition::new("rows");
/// `group` → [`Applied`].
const APPLIED: TableDefinition<'_, u16, &[u8]> = TableDefinition::new("applied");

/// How often changed rows are written.
const FLUSH_EVERY: Duration = Duration::from_millis(200);

/// How far a group's log was applied to its tables.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Applied {
    /// The last applied entry.
    pub log: Option<LogId>,
    /// The last applied membership.
    pub membership: Membership,
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
}

impl StateFile {
    /// Starts the flusher of an open file, as a thread of its own.
    pub fn start(database: Database) -> io::Result<Arc<Self>> {
        Self::start_with(database, Scribe::Thread)
    }

    /// Starts this flusher of an open file.
    pub fn start_with(database: Database, scribe: Scribe) -> io::Result<Arc<Self>> {
        let write = database.begin_write().map_err(io::Error::other)?;
        write.open_table(ROWS).map_err(io::Error::other)?;
        write.open_table(APPLIED).map_err(io::Error::other)?;
        write.commit().map_err(io::Error::other)?;
        let file = Arc::new(Self {
            figures: StateFigures { seconds: Histogram::new(COMMIT_SECONDS) },
            database,
            scribe: scribe.clone(),
            groups: Mutex::new(vec![]),
            writing: Mutex::new(()),
            stop: Mutex::new(false),
            wake: Condvar::new(),
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
        let wake = self.wake.wait_timeout_while(stop, FLUSH_EVERY, |stop| !*stop);
        *wake.unwrap_or_else(PoisonError::into_inner).0
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
            let mut rows = write.open_table(ROWS)?;
            let mut applied = write.open_table(APPLIED)?;
            for (group, dirty) in groups {
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
        let pace = match self.scribe {
            Scribe::Thread => Pace::of(received::BYTES_PER_SECOND),
            Scribe::Task(_) => Pace::unbound(),
        };
        self.replace(group, applied, from, pace, |_| true)?;
        reload()
    }

    /// The same where nobody else writes, with only the tables that are to be kept.
    pub(super) fn replace(
        &self,
        group: u16,
        applied: &Applied,
        from: &StateSnapshot,
        mut pace: Pace,
        keep: impl Fn(u8) -> bool,
    ) -> io::Result<()> {
        let mut replace = || -> Result<(), redb::Error> {
            let write = self.database.begin_write()?;
            {
                let mut rows = write.open_table(ROWS)?;
                let end = group_end(group);
                rows.retain_in::<&[u8], _>(
                    (
                        Bound::Included(row_key(group, 0, &[]).as_slice()),
                        Bound::Excluded(end.as_slice()),
                    ),
                    |_, _| false,
                )?;
                from.rows(|table, key, row| {
                    pace.after(row.len());
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
        let rows = read.open_table(ROWS).map_err(io::Error::other)?;
        let mut pace = Pace::of(scrub::BYTES_PER_SECOND);
        for row in rows.range::<&[u8]>(..).map_err(io::Error::other)? {
            let (key, row) = row.map_err(io::Error::other)?;
            pace.after(checked::read(key.value(), row.value())?.len());
        }
        Ok(pace.bytes)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn row_key(group: u16, table: u8, key: &[u8]) -> Vec<u8> {
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
}

impl std::fmt::Debug for StateSnapshot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.0 {
            Rows::Written { group, .. } => write!(f, "StateSnapshot(group {group})"),
            Rows::Received(rows) => write!(f, "StateSnapshot(received, {} bytes)", rows.bytes()),
        }
    }
}

impl StateSnapshot {
    /// What a peer sent.
    pub fn received(rows: received::ReceivedRows) -> Self {
        Self(Rows::Received(Arc::new(rows)))
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
        };
        let table = read.open_table(ROWS)?;
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
            Rows::Received(_) => Scribe::Thread,
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
            let rows = read.open_table(ROWS)?;
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
            let rows = read.open_table(ROWS)?;
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
