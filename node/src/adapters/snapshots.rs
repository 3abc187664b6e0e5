//! Backups that this node made and keeps, and the way to those of other nodes. One is made at a time: the
//! directory first and then the shards, so that nothing that was told of is missing from both.

use std::{
    collections::BTreeMap,
    fs, io,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak},
    time::Duration,
};

use actors::{
    ports::{ByteStream, Clock as _, Entropy as _, SnapshotRecord, SnapshotStatus, Snapshots},
    world::World,
};
use anyhow::Context as _;
use cluster::RaftLedger;
use domain::{SnapshotId, cloud::Provider};
use futures::{FutureExt as _, StreamExt as _, future::BoxFuture};
use http::{Method, StatusCode};
use sha2::{Digest as _, Sha256};
use tokio::{io::AsyncWriteExt as _, runtime::Handle};

use super::{
    backup::{Manifest, Writer},
    carry::{Carrier, saved_name},
    copies::CopiedBlobs,
    local::LocalRuntime,
    peers::NodePeers,
    system::{SystemClock, SystemDice},
};
use crate::{hex, keys::Keys};

/// Where backups are on a node's peer port; an id may follow.
pub const SNAPSHOTS_PATH: &str = "/snapshots/";
/// How long another node may take to tell of its backups.
const LIST_WITHIN: Duration = Duration::from_secs(3);
/// Longest such list.
const LIST_BYTES_MAX: usize = 4 * 1024 * 1024;

/// What a backup is made from.
pub struct Sources {
    /// What is agreed.
    pub ledger: Arc<RaftLedger>,
    /// Bulk.
    pub blobs: Arc<CopiedBlobs>,
    /// Images.
    pub runtime: Arc<LocalRuntime>,
    /// The other nodes.
    pub peers: Arc<NodePeers>,
    /// The keys of the cluster.
    pub keys: Keys,
}

/// The backups of one node.
pub struct Backups {
    folder: PathBuf,
    sources: Sources,
    /// Knows what is needed; set once it is there.
    world: OnceLock<Weak<World>>,
    /// The one that is being made, and those that failed since this node started.
    unready: Arc<Mutex<BTreeMap<SnapshotId, SnapshotRecord>>>,
    /// Where they are made: not on the thread of whoever asks for one.
    home: Handle,
}

impl Backups {
    /// Those below `folder`. What an earlier life left half-made goes.
    pub fn open(folder: PathBuf, sources: Sources) -> io::Result<Arc<Self>> {
        fs::create_dir_all(&folder)?;
        for entry in fs::read_dir(&folder)?.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if !name.ends_with(".json") && !name.ends_with(".backup") {
                fs::remove_file(entry.path())?;
            }
        }
        let (world, unready) = (OnceLock::new(), Arc::default());
        Ok(Arc::new(Self { folder, sources, world, unready, home: Handle::current() }))
    }

    /// From now on it is known what is needed.
    pub fn connect(&self, world: &Arc<World>) {
        let _ = self.world.set(Arc::downgrade(world));
    }

    fn unready(&self) -> MutexGuard<'_, BTreeMap<SnapshotId, SnapshotRecord>> {
        self.unready.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where the file of a ready one is.
    pub fn path(&self, id: SnapshotId) -> PathBuf {
        self.folder.join(format!("{id}.backup"))
    }

    fn about(&self, id: SnapshotId) -> PathBuf {
        self.folder.join(format!("{id}.json"))
    }

    /// Those of this node.
    pub fn here(&self) -> Vec<SnapshotRecord> {
        let mut all = self.unready().clone();
        let listed = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let about =
            listed.filter(|entry| entry.path().extension().is_some_and(|end| end == "json"));
        let ready = about.filter_map(|entry| {
            serde_json::from_slice::<SnapshotRecord>(&fs::read(entry.path()).ok()?).ok()
        });
        all.extend(ready.map(|one| (one.id, one)));
        all.into_values().collect()
    }

    /// Begins one; `None` while another one is being made.
    pub fn begin_here(self: &Arc<Self>) -> Option<SnapshotRecord> {
        let record = {
            let mut unready = self.unready();
            if unready.values().any(|one| one.status == SnapshotStatus::Creating) {
                return None;
            }
            let record = self.new_record();
            unready.insert(record.id, record.clone());
            record
        };
        let (this, made) = (Arc::clone(self), record.clone());
        self.home.spawn(async move { this.carry_out(made).await });
        Some(record)
    }

    fn new_record(&self) -> SnapshotRecord {
        let now = SystemClock.now();
        SnapshotRecord {
            id: SnapshotId::new(now, SystemDice.dice()),
            node_id: self.sources.ledger.node_id(),
            status: SnapshotStatus::Creating,
            created_at: now,
            bytes: 0,
            sha256: None,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            blobs: 0,
            images: 0,
            missing: vec![],
            error: None,
        }
    }

    async fn carry_out(&self, record: SnapshotRecord) {
        let id = record.id;
        match self.make(record.clone()).await {
            Ok(()) => {
                self.unready().remove(&id);
            }
            Err(error) => {
                tracing::warn!(%id, "the backup failed: {error:#}");
                let _ = fs::remove_file(self.path(id).with_extension("part"));
                let failed = SnapshotRecord {
                    status: SnapshotStatus::Failed,
                    error: Some(format!("{error:#}")),
                    ..record
                };
                self.unready().insert(id, failed);
            }
        }
    }

    async fn make(&self, mut record: SnapshotRecord) -> anyhow::Result<()> {
        let world = self.world.get().and_then(Weak::upgrade).context("the node is starting")?;
        let ledger = &self.sources.ledger;
        let shards = actors::ports::Ledger::shards(&**ledger);
        let before = world.directory().read().master_key();
        let part = self.path(record.id).with_extension("part");
        let mut writer = Writer::create(&part).context("the file of the backup")?;
        for number in 0..=shards {
            let export = ledger.export(number).await;
            let export = export.with_context(|| format!("group {number} can't be read"))?;
            writer = blocking(move || writer.group(number, &export).map(|()| writer)).await?;
        }
        let after = world.directory().read().master_key();
        let master = after.filter(|_| after == before).context(
            "the master key was changed meanwhile, or there is none yet; begin another backup",
        )?;
        let mut manifest = Manifest::new(
            record.id,
            record.created_at,
            record.node_id,
            shards,
            self.sources.keys.fingerprint(master),
        );
        writer = self.add_blobs(writer, &world, &mut manifest).await?;
        writer = self.add_images(writer, &world, &mut manifest).await?;
        (record.blobs, record.images) = (manifest.blobs, manifest.images);
        record.missing.clone_from(&manifest.missing);
        let (path, about) = (self.path(record.id), self.about(record.id));
        blocking(move || {
            writer.finish(&manifest)?;
            (record.bytes, record.sha256) = (fs::metadata(&part)?.len(), Some(sum_of(&part)?));
            fs::rename(&part, &path)?;
            record.status = SnapshotStatus::Ready;
            // Where this is, the backup is whole.
            crate::keys::write_secret(&about, &serde_json::to_vec_pretty(&record)?)
        })
        .await
    }

    async fn add_blobs(
        &self,
        mut writer: Writer,
        world: &Arc<World>,
        into: &mut Manifest,
    ) -> anyhow::Result<Writer> {
        let needed = world.needed_blobs().await.context("not every shard says what it needs")?;
        for sha256 in needed {
            if !self.sources.blobs.fetch(&sha256).await {
                into.missing.push(format!("blob {sha256}"));
                continue;
            }
            let path = self.sources.blobs.local.path(&sha256);
            let name = format!("blobs/{sha256}");
            writer = blocking(move || writer.file(&name, &path).map(|()| writer)).await?;
            into.blobs += 1;
        }
        Ok(writer)
    }

    async fn add_images(
        &self,
        mut writer: Writer,
        world: &Arc<World>,
        into: &mut Manifest,
    ) -> anyhow::Result<Writer> {
        let carrier = &self.sources.runtime.carrier;
        for (reference, (provider, image)) in world.live_images() {
            if !carrier.hold(provider, &image).await
                || !save(carrier, provider, &reference, writer.scratch()).await?
            {
                into.missing.push(format!("image {reference}"));
                continue;
            }
            let name = format!("images/{}", saved_name(provider, &reference));
            writer = blocking(move || {
                let scratch = writer.scratch().to_owned();
                writer.file(&name, &scratch)?;
                fs::remove_file(scratch).map(|()| writer)
            })
            .await?;
            into.images += 1;
        }
        Ok(writer)
    }

    /// Removes one of this node; whether it was there.
    pub fn remove_here(&self, id: SnapshotId) -> io::Result<bool> {
        let mut unready = self.unready();
        if unready.get(&id).is_some_and(|one| one.status == SnapshotStatus::Failed) {
            unready.remove(&id);
            return Ok(true);
        }
        match fs::remove_file(self.about(id)) {
            Ok(()) => fs::remove_file(self.path(id)).map(|()| true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The bytes of one of this node.
    pub async fn read_here(&self, id: SnapshotId) -> io::Result<Option<ByteStream>> {
        if !self.about(id).exists() {
            return Ok(None);
        }
        Ok(super::copies::pieces(&self.path(id)).await?.map(|bytes| bytes.boxed()))
    }

    async fn elsewhere(&self) -> Vec<SnapshotRecord> {
        let peers = &self.sources.peers;
        let asked = peers.others().into_iter().map(async |node| {
            let told = async {
                let bytes = peers.fetch(node, SNAPSHOTS_PATH).await.ok()??;
                let bytes = collect(bytes, LIST_BYTES_MAX).await?;
                serde_json::from_slice::<Vec<SnapshotRecord>>(&bytes).ok()
            };
            tokio::time::timeout(LIST_WITHIN, told).await.ok().flatten().unwrap_or_default()
        });
        futures::future::join_all(asked).await.concat()
    }
}

async fn collect(mut bytes: ByteStream, most: usize) -> Option<Vec<u8>> {
    let mut all = vec![];
    while let Some(part) = bytes.next().await {
        all.extend_from_slice(&part.ok()?);
        if all.len() > most {
            return None;
        }
    }
    Some(all)
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> anyhow::Result<T> {
    Ok(tokio::task::spawn_blocking(work).await??)
}

fn sum_of(path: &std::path::Path) -> io::Result<String> {
    let mut digest = Sha256::new();
    io::copy(&mut fs::File::open(path)?, &mut Digesting(&mut digest))?;
    Ok(hex(&digest.finalize()))
}

/// A digest as a place to write to.
struct Digesting<'d>(&'d mut Sha256);

impl io::Write for Digesting<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes an image of this node into a file; whether it was there.
async fn save(
    carrier: &Carrier,
    provider: Provider,
    reference: &str,
    path: &std::path::Path,
) -> anyhow::Result<bool> {
    let Some(mut bytes) = carrier.give(provider.as_str(), reference).await else {
        return Ok(false);
    };
    let mut file = tokio::fs::File::create(path).await?;
    while let Some(part) = bytes.next().await {
        file.write_all(&part?).await?;
    }
    file.flush().await?;
    Ok(true)
}

/// The port over [`Backups`].
pub struct SnapshotPort(pub Arc<Backups>);

impl Snapshots for SnapshotPort {
    fn begin(&self) -> BoxFuture<'_, Option<SnapshotRecord>> {
        async move { self.0.begin_here() }.boxed()
    }

    fn list(&self) -> BoxFuture<'_, Vec<SnapshotRecord>> {
        async move {
            let mut all = self.0.here();
            all.extend(self.0.elsewhere().await);
            all.sort_by_key(|one| std::cmp::Reverse(one.id));
            all
        }
        .boxed()
    }

    fn read(&self, record: SnapshotRecord) -> BoxFuture<'_, io::Result<Option<ByteStream>>> {
        async move {
            if record.node_id == self.0.sources.ledger.node_id() {
                return self.0.read_here(record.id).await;
            }
            let path = format!("{SNAPSHOTS_PATH}{}", record.id);
            self.0.sources.peers.fetch(record.node_id, &path).await
        }
        .boxed()
    }

    fn remove(&self, record: SnapshotRecord) -> BoxFuture<'_, io::Result<bool>> {
        async move {
            if record.node_id == self.0.sources.ledger.node_id() {
                return self.0.remove_here(record.id);
            }
            let path = format!("{SNAPSHOTS_PATH}{}", record.id);
            let peers = &self.0.sources.peers;
            match peers.send_bare(record.node_id, Method::DELETE, &path).await?.status() {
                StatusCode::OK => Ok(true),
                StatusCode::NOT_FOUND => Ok(false),
                other => Err(io::Error::other(format!("status {other}"))),
            }
        }
        .boxed()
    }
}
