//! Opens a node's files so that what they acknowledge survives a power cut.

use std::{
    fs, io,
    path::Path,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use redb::{Builder, Database, DatabaseError, StorageBackend, StorageError};

use super::{
    checked::damaged,
    wal::{self, Opened, WholeFile},
};

/// The name of the file with the logs of all groups.
pub const LOG: &str = "raft.wal";

/// Page cache of one file.
const CACHE_BYTES: usize = 8 * 1024 * 1024;

/// How long a disk takes beyond the write itself, asked before each one.
pub type Pause = Arc<dyn Fn() -> Duration + Send + Sync>;

/// Who writes to a file.
#[derive(Clone)]
pub enum Scribe {
    /// A thread of its own.
    Thread,
    /// A task of the runtime that opens it, so that a simulation has one clock, and disks as slow as it wants.
    Task(Pause),
}

impl Scribe {
    /// Does what may take long: beside the runtime, or where it is called.
    pub async fn aside<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        match self {
            Self::Thread => tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?,
            Self::Task(_) => work(),
        }
    }
}

/// A process that was killed holds its files for a moment longer.
const FREE_WITHIN: Duration = Duration::from_secs(2);
/// Between looks whether they are free.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// Opens or makes a redb file, and makes its name durable: redb syncs the file, not its folder.
pub fn open(path: &Path) -> io::Result<Database> {
    durably(path, || {
        let opened = Builder::new().set_cache_size(CACHE_BYTES).create(path);
        opened.map_err(|error| match matches!(error, DatabaseError::DatabaseAlreadyOpen) {
            true => io::ErrorKind::WouldBlock.into(),
            false => explained(error),
        })
    })
}

/// Opens or makes the file of the log in the same way.
pub fn open_log(path: &Path) -> io::Result<Opened> {
    durably(path, || wal::open(WholeFile::open(path)?, wal::SEGMENT_BYTES))
}

/// Opens a file as soon as nobody else has it.
fn durably<T>(path: &Path, open: impl Fn() -> io::Result<T>) -> io::Result<T> {
    let is_new = !path.exists();
    let until = Instant::now() + FREE_WITHIN;
    let opened = loop {
        match open() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < until => {
                thread::sleep(LOOK_AGAIN);
            }
            opened => break opened?,
        }
    };
    if is_new && let Some(folder) = path.parent() {
        fs::File::open(folder)?.sync_all()?;
    }
    Ok(opened)
}

/// What redb finds damaged when it repairs a file is damage like any other.
fn explained(error: DatabaseError) -> io::Error {
    if let DatabaseError::Storage(StorageError::Corrupted(what)) = &error {
        tracing::error!(what, "a file of this node is damaged");
        return damaged();
    }
    io::Error::other(error)
}

/// Opens a store on another backend, such as one that records what a power cut could leave.
pub fn open_on(backend: impl StorageBackend) -> io::Result<Database> {
    Builder::new().set_cache_size(CACHE_BYTES).create_with_backend(backend).map_err(explained)
}
