//! The file of a backup: a zstd-compressed tar of every group's tables, of the bulk that they name and of
//! the images of live versions. Its last entry is the manifest, so a file without one is not whole. The
//! cluster's keys are not in it: whoever finds a backup can read no secret and forge no token. The
//! manifest has a fingerprint of them, so that a restore with others is refused.

use std::{
    fs, io,
    path::{Component, Path, PathBuf},
};

use anyhow::{Context as _, bail, ensure};
use cluster::raft::{group::Export, network::pack, received};
use domain::{NodeId, SnapshotId, Timestamp};
use serde::{Deserialize, Serialize};

/// What this release writes and reads.
const FORMAT: u32 = 1;
const ZSTD_LEVEL: i32 = 3;
/// The last entry.
const MANIFEST: &str = "manifest.json";

/// What a backup holds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Manifest {
    /// The shape of the file.
    pub format: u32,
    /// The backup.
    pub id: SnapshotId,
    /// When it was begun.
    pub created_at: Timestamp,
    /// The node that made it.
    pub node_id: NodeId,
    /// The release that made it.
    pub version: String,
    /// How many shards the cluster has.
    pub shards: u16,
    /// Tells whether keys are those of the cluster.
    pub keys: String,
    /// Uploads and long payloads.
    pub blobs: u64,
    /// Images.
    pub images: u64,
    /// What should be in it and was nowhere.
    pub missing: Vec<String>,
}

/// A file that is being written.
pub struct Writer {
    archive: tar::Builder<zstd::Encoder<'static, fs::File>>,
    scratch: PathBuf,
}

impl Writer {
    /// A new file, and a place beside it for what is on its way into it.
    pub fn create(path: &Path) -> io::Result<Self> {
        use std::os::unix::fs::OpenOptionsExt as _;
        let mut options = fs::OpenOptions::new();
        let file = options.write(true).create(true).truncate(true).mode(0o600).open(path)?;
        let mut packed = zstd::Encoder::new(file, ZSTD_LEVEL)?;
        packed.include_checksum(true)?;
        Ok(Self { archive: tar::Builder::new(packed), scratch: path.with_extension("entry") })
    }

    /// Adds a group.
    pub fn group(&mut self, number: u16, export: &Export) -> io::Result<()> {
        let mut entry = fs::File::create(&self.scratch)?;
        let head = pack(&(export.term, export.index));
        received::write(&export.rows, &head, |piece| io::Write::write_all(&mut entry, &piece))?;
        self.file(&format!("groups/{number}"), &self.scratch.clone())?;
        fs::remove_file(&self.scratch)
    }

    /// Adds a file.
    pub fn file(&mut self, name: &str, path: &Path) -> io::Result<()> {
        self.archive.append_path_with_name(path, name)
    }

    /// Where something may be before it is added.
    pub fn scratch(&self) -> &Path {
        &self.scratch
    }

    /// Adds the manifest and makes the file durable.
    pub fn finish(mut self, manifest: &Manifest) -> io::Result<()> {
        let text = serde_json::to_vec_pretty(manifest)?;
        let mut header = tar::Header::new_gnu();
        header.set_size(text.len() as u64);
        header.set_mode(0o600);
        header.set_cksum();
        self.archive.append_data(&mut header, MANIFEST, text.as_slice())?;
        self.archive.into_inner()?.finish()?.sync_all()
    }
}

/// Unpacks a backup into a folder and gives its manifest. What does not end with one is refused.
pub fn unpack(file: &Path, into: &Path) -> anyhow::Result<Manifest> {
    let shown = file.display();
    let opened = fs::File::open(file).with_context(|| format!("the backup {shown}"))?;
    let damaged = || format!("{shown} is no whole backup");
    let mut archive = tar::Archive::new(zstd::Decoder::new(opened).with_context(damaged)?);
    for entry in archive.entries().with_context(damaged)? {
        let mut entry = entry.with_context(damaged)?;
        let name = entry.path().with_context(damaged)?.into_owned();
        let is_plain = name.components().all(|part| matches!(part, Component::Normal(_)));
        ensure!(is_plain && entry.header().entry_type().is_file(), "{shown} is no backup of ours");
        let target = into.join(&name);
        if let Some(parent) = target.parent() {
            fs::create_dir_all(parent)?;
        }
        io::copy(&mut entry, &mut fs::File::create(&target)?).with_context(damaged)?;
    }
    // The checksum of the compressed whole stands behind the last entry.
    io::copy(&mut archive.into_inner(), &mut io::sink()).with_context(damaged)?;
    let Ok(text) = fs::read(into.join(MANIFEST)) else { bail!(damaged()) };
    let manifest: Manifest = serde_json::from_slice(&text).with_context(damaged)?;
    ensure!(
        manifest.format == FORMAT,
        "{shown} has format {}; this release reads {FORMAT}",
        manifest.format
    );
    Ok(manifest)
}

impl Manifest {
    /// Of a backup that is being made.
    pub fn new(
        id: SnapshotId,
        created_at: Timestamp,
        node_id: NodeId,
        shards: u16,
        keys: String,
    ) -> Self {
        Self {
            format: FORMAT,
            id,
            created_at,
            node_id,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            shards,
            keys,
            blobs: 0,
            images: 0,
            missing: vec![],
        }
    }
}
