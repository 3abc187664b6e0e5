//! A file that one process has for itself.

use std::{
    fs::{File, OpenOptions, TryLockError},
    io,
    os::unix::fs::FileExt as _,
    path::Path,
};

use redb::StorageBackend;

/// A file that nobody else may open this way meanwhile.
#[derive(Debug)]
pub struct WholeFile(File);

impl WholeFile {
    /// Opens or makes it. [`io::ErrorKind::WouldBlock`] while another process has it.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
        match file.try_lock() {
            Ok(()) => Ok(Self(file)),
            Err(TryLockError::WouldBlock) => {
                let told = format!("another process has {}", path.display());
                Err(io::Error::new(io::ErrorKind::WouldBlock, told))
            }
            Err(TryLockError::Error(error)) => Err(error),
        }
    }
}

impl StorageBackend for WholeFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(out, offset)
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        self.0.set_len(length)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.0.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.write_all_at(data, offset)
    }
}
