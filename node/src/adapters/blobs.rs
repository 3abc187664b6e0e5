//! Bulk on disk, named by its SHA-256: `blobs/ab/abcdef…`. A blob is synced before it gets its name,
//! so a name always means whole bytes.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use actors::ports::{BlobError, Blobs, ByteStream};
use bytes::Bytes;
use domain::upload::Received;
use futures::{FutureExt as _, StreamExt as _, future::BoxFuture};
use sha2::{Digest as _, Sha256};
use tokio::io::AsyncWriteExt as _;

use super::system::random_bytes;
use crate::hex;

/// Bytes that are checked at once.
const PIECE_BYTES: usize = 64 * 1024;

/// Blobs below a folder.
pub struct FolderBlobs {
    folder: PathBuf,
    /// Held while a blob gets its name, is touched or is removed: what was just asked for never goes.
    naming: Arc<Mutex<()>>,
}

impl FolderBlobs {
    /// Below this folder, made if need be. What an earlier life left half-written goes.
    pub fn open(folder: &Path) -> io::Result<Self> {
        let incoming = folder.join("incoming");
        if incoming.exists() {
            fs::remove_dir_all(&incoming)?;
        }
        fs::create_dir_all(&incoming)?;
        Ok(Self { folder: folder.to_owned(), naming: Arc::default() })
    }

    /// Where the bytes of this name are, or would be.
    pub fn path(&self, sha256: &str) -> PathBuf {
        self.folder.join(&sha256[..2.min(sha256.len())]).join(sha256)
    }

    /// Whether the bytes of this name are what the name says; others are put aside, where a sweep takes them.
    pub async fn is_whole(&self, sha256: &str) -> io::Result<bool> {
        let (path, name) = (self.path(sha256), sha256.to_owned());
        let checked = tokio::task::spawn_blocking(move || {
            let (mut file, mut digest) = (fs::File::open(&path)?, Sha256::new());
            let mut piece = vec![0; PIECE_BYTES];
            loop {
                let length = io::Read::read(&mut file, &mut piece)?;
                if length == 0 {
                    break;
                }
                digest.update(&piece[..length]);
            }
            let is_whole = hex(&digest.finalize()) == name;
            if !is_whole {
                tracing::error!(
                    blob = name,
                    "a blob on this disk is not what was stored; it is put aside"
                );
                fs::rename(&path, path.with_extension("wrong"))?;
            }
            Ok(is_whole)
        });
        checked.await.map_err(io::Error::other).flatten()
    }

    async fn keep(&self, mut bytes: ByteStream, max: u64) -> Result<Received, BlobError> {
        let incoming = self.folder.join("incoming").join(hex(&random_bytes::<16>()));
        // Goes unless it got its name, even when the sender's connection took this task with it.
        let _half = HalfWritten(incoming.clone());
        self.write(&incoming, &mut bytes, max).await
    }

    async fn write(
        &self,
        incoming: &Path,
        bytes: &mut ByteStream,
        max: u64,
    ) -> Result<Received, BlobError> {
        let mut file = tokio::fs::File::create(incoming).await.map_err(BlobError::Disk)?;
        let (mut digest, mut size_bytes) = (Sha256::new(), 0_u64);
        while let Some(part) = bytes.next().await {
            let part = part.map_err(BlobError::Broken)?;
            size_bytes += part.len() as u64;
            if size_bytes > max {
                return Err(BlobError::TooLarge(max));
            }
            digest.update(&part);
            file.write_all(&part).await.map_err(BlobError::Disk)?;
        }
        file.sync_all().await.map_err(BlobError::Disk)?;
        let sha256 = hex(&digest.finalize());
        let path = self.path(&sha256);
        let parent = path.parent().unwrap_or(&self.folder).to_owned();
        let from = incoming.to_owned();
        let naming = Arc::clone(&self.naming);
        let named = tokio::task::spawn_blocking(move || {
            fs::create_dir_all(&parent)?;
            {
                let _naming = naming.lock().unwrap_or_else(PoisonError::into_inner);
                fs::rename(&from, &path)?;
            }
            fs::File::open(&parent)?.sync_all()?;
            // The folder may be new itself.
            parent.parent().map_or(Ok(()), |above| fs::File::open(above)?.sync_all())
        });
        named.await.map_err(io::Error::other).flatten().map_err(BlobError::Disk)?;
        Ok(Received { size_bytes, sha256 })
    }
}

/// Removes what is neither young nor needed.
fn sweep(
    folder: &Path,
    naming: &Mutex<()>,
    needed: &BTreeSet<String>,
    grace: Duration,
) -> io::Result<u64> {
    let mut removed = 0;
    for prefix in fs::read_dir(folder)?.flatten().filter(|entry| entry.file_name().len() == 2) {
        for blob in fs::read_dir(prefix.path())?.flatten() {
            if needed.contains(&*blob.file_name().to_string_lossy()) {
                continue;
            }
            let _naming = naming.lock().unwrap_or_else(PoisonError::into_inner);
            let age = fs::metadata(blob.path())?.modified()?.elapsed().unwrap_or_default();
            if age >= grace {
                fs::remove_file(blob.path())?;
                removed += 1;
            }
        }
    }
    Ok(removed)
}

/// A file that must not stay where it is.
struct HalfWritten(PathBuf);

impl Drop for HalfWritten {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

impl Blobs for FolderBlobs {
    fn receive(&self, bytes: ByteStream, max: u64) -> BoxFuture<'_, Result<Received, BlobError>> {
        self.keep(bytes, max).boxed()
    }

    fn read(&self, sha256: &str) -> BoxFuture<'_, io::Result<Option<Bytes>>> {
        let path = self.path(sha256);
        async move {
            match tokio::fs::read(&path).await {
                Ok(bytes) => Ok(Some(Bytes::from(bytes))),
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
                Err(error) => Err(error),
            }
        }
        .boxed()
    }

    fn touch(&self, sha256: &str) -> BoxFuture<'_, bool> {
        let (path, naming) = (self.path(sha256), Arc::clone(&self.naming));
        let touched = tokio::task::spawn_blocking(move || {
            let _naming = naming.lock().unwrap_or_else(PoisonError::into_inner);
            let now = rustix::fs::Timestamps {
                last_access: rustix::fs::Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_NOW },
                last_modification: rustix::fs::Timespec {
                    tv_sec: 0,
                    tv_nsec: rustix::fs::UTIME_NOW,
                },
            };
            let flags = rustix::fs::AtFlags::empty();
            rustix::fs::utimensat(rustix::fs::CWD, &path, &now, flags).is_ok()
        });
        async move { touched.await.unwrap_or_default() }.boxed()
    }

    /// One node has no others.
    fn keep_copies(&self, _: BTreeSet<String>) -> BoxFuture<'_, u64> {
        async { 0 }.boxed()
    }

    fn sweep(&self, needed: BTreeSet<String>, grace: Duration) -> BoxFuture<'_, u64> {
        let (folder, naming) = (self.folder.clone(), Arc::clone(&self.naming));
        let swept = tokio::task::spawn_blocking(move || sweep(&folder, &naming, &needed, grace));
        async move {
            let swept = swept.await.map_err(io::Error::other).flatten();
            swept.unwrap_or_else(|error| {
                tracing::warn!(%error, "blobs could not be swept");
                0
            })
        }
        .boxed()
    }
}
