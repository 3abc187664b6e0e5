//! `roost cluster backup` and `restore`: the whole of a cluster into a file, and a new cluster from one. A
//! restored cluster has new machines, a new authority and everything else that the old one had; the
//! keys come from where the operator keeps them.

use std::{
    fs,
    os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use actors::ports::{SnapshotRecord, SnapshotStatus};
use anyhow::{Context as _, bail, ensure};
use cluster::raft::{
    disk::Scribe,
    network::unpack,
    offline::{Alone, Files, log_id},
    received,
    state::StateSnapshot,
};
use domain::directory::TABLES_OF_MACHINES;
use futures::StreamExt as _;
use serde_json::Value;

use crate::{
    adapters::{
        backup::{self, Manifest},
        carry::SAVED,
        copies::pieces,
    },
    cli::{print, say},
    host::Operation,
    identity::NodeIdentity,
    keys::Keys,
    operate,
};

/// Between looks whether a backup is ready.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// Between words of progress.
const SAY_EVERY: Duration = Duration::from_secs(5);

/// What `backup` takes.
#[derive(clap::Args)]
pub struct Backup {
    /// The file to write; it must not exist.
    file: PathBuf,
    /// The folder of a node that runs on this machine.
    #[arg(long, default_value = "roost-data", value_name = "DIR")]
    data: PathBuf,
}

/// What `restore` takes.
#[derive(clap::Args)]
pub struct Restore {
    /// A file that `backup` wrote, or that GET /v1/cluster/snapshots/{id}/archive gave.
    file: PathBuf,
    /// The folder with the old cluster's pepper.key, master.key and signing.key: `keys` below the folder of
    /// any of its nodes, or your copy of it.
    #[arg(long, value_name = "DIR")]
    keys: PathBuf,
    /// The folder of the new cluster's first node; it must be new or empty.
    #[arg(long, default_value = "roost-data", value_name = "DIR")]
    data: PathBuf,
}

/// Backs the cluster up into a file.
pub async fn take(arguments: Backup) -> anyhow::Result<ExitCode> {
    let (file, data) = (&arguments.file, &arguments.data);
    let mut kept = fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(file)
        .with_context(|| format!("the file {}", file.display()))?;
    let taken = taken(data, &mut kept).await;
    if taken.is_err() {
        let _ = fs::remove_file(file);
    }
    let record = taken?;
    print(&format!("{}\n", file.display()));
    say(&format!(
        "{} bytes: all groups, {} blobs, {} images.",
        record.bytes, record.blobs, record.images
    ));
    for missing in &record.missing {
        say(&format!("  missing: {missing}; no node that answers has it"));
    }
    say(&format!(
        "The keys are NOT in it. Keep a copy of {} elsewhere;",
        data.join("keys").display()
    ));
    say(&format!("`roost cluster restore {} --keys DIR --data NEW` asks for it.", file.display()));
    Ok(ExitCode::SUCCESS)
}

async fn taken(data: &Path, into: &mut fs::File) -> anyhow::Result<SnapshotRecord> {
    let mut state = operate::ask(data, &Operation::Backup).await?;
    let began = tokio::time::Instant::now();
    let mut said = began;
    loop {
        let record: SnapshotRecord = serde_json::from_value(state["record"].clone())?;
        match record.status {
            SnapshotStatus::Ready => {
                let path = PathBuf::from(path_of(&state)?);
                let copied = copy(&path, into);
                let _ = fs::remove_file(path.with_extension("json"));
                let _ = fs::remove_file(&path);
                copied.with_context(|| format!("the backup {}", path.display()))?;
                return Ok(record);
            }
            SnapshotStatus::Failed => bail!("{}", record.error.unwrap_or_default()),
            SnapshotStatus::Creating => {}
        }
        if said.elapsed() >= SAY_EVERY {
            say(&format!("  still at it, {} s", began.elapsed().as_secs()));
            said = tokio::time::Instant::now();
        }
        tokio::time::sleep(LOOK_EVERY).await;
        state = operate::ask(data, &Operation::BackupState(record.id)).await?;
    }
}

fn path_of(state: &Value) -> anyhow::Result<&str> {
    state["path"].as_str().context("the node did not say where the backup is")
}

fn copy(from: &Path, into: &mut fs::File) -> std::io::Result<()> {
    std::io::copy(&mut fs::File::open(from)?, into)?;
    into.sync_all()
}

/// Makes a folder the first node of a new cluster that has what a backup has.
pub async fn restore(arguments: Restore) -> anyhow::Result<ExitCode> {
    let (file, data) = (&arguments.file, &arguments.data);
    let is_new = fs::read_dir(data).map_or(true, |mut entries| entries.next().is_none());
    ensure!(is_new, "{} is not empty; a restore begins with a new folder", data.display());
    let keys = Keys::kept(&arguments.keys)?;
    let staging = data.join(".restore");
    fs::create_dir_all(&staging)?;
    fs::set_permissions(data, fs::Permissions::from_mode(0o700))?;
    say(&format!("reading {}", file.display()));
    let restored = restored(file, &staging, &keys, data).await;
    if restored.is_err() {
        // A folder with half a cluster in it must not be started.
        let _ = fs::remove_dir_all(data);
    }
    let (manifest, identity) = restored?;
    fs::remove_dir_all(&staging)?;
    say(&format!(
        "{} has what the cluster had at {}, {} blobs and {} images with it.",
        identity.node_id, manifest.created_at, manifest.blobs, manifest.images
    ));
    for missing in &manifest.missing {
        say(&format!("  the backup lacks {missing}"));
    }
    say(&format!(
        "Next: `roost serve --data {}`; keys and passwords are the old ones,",
        data.display()
    ));
    say(&format!(
        "the authority is new: clients must trust {}.",
        data.join("tls/ca.pem").display()
    ));
    say("Stop what is left of the old cluster first: both would send the same webhooks.");
    Ok(ExitCode::SUCCESS)
}

async fn restored(
    file: &Path,
    staging: &Path,
    keys: &Keys,
    data: &Path,
) -> anyhow::Result<(Manifest, NodeIdentity)> {
    let (from, into) = (file.to_owned(), staging.to_owned());
    let manifest = tokio::task::spawn_blocking(move || backup::unpack(&from, &into)).await??;
    ensure!(
        keys.fit(&manifest.keys),
        "these are not the keys of the cluster that {} is a backup of",
        file.display()
    );
    let mut identity = NodeIdentity::new(manifest.shards, true);
    begin_groups(staging, data, &manifest, &identity).await?;
    move_blobs(&staging.join("blobs"), &data.join("blobs"))?;
    let images = staging.join("images");
    if images.exists() {
        fs::rename(images, data.join(SAVED))?;
    }
    keys.write(&data.join("keys"))?;
    identity.has_log = true;
    // The identity comes last: where it is, everything is.
    identity.write(data)?;
    Ok((manifest, identity))
}

async fn begin_groups(
    staging: &Path,
    data: &Path,
    manifest: &Manifest,
    identity: &NodeIdentity,
) -> anyhow::Result<()> {
    let files = Files::open(data).context("the new logs")?;
    for group in 0..=manifest.shards {
        let path = staging.join(format!("groups/{group}"));
        let bytes = pieces(&path).await?.with_context(|| format!("group {group} is missing"))?;
        let (head, rows) = received::receive(staging, bytes.boxed(), &Scribe::Thread)
            .await
            .with_context(|| format!("group {group}"))?;
        let (term, index) = unpack(&head).with_context(|| format!("group {group}"))?;
        let alone = Alone { group, node: identity.raft_id, address: "" };
        let keep = |table| group > 0 || !TABLES_OF_MACHINES.contains(&table);
        files.begin(&alone, log_id(term, index), &StateSnapshot::received(rows), keep).await?;
    }
    Ok(())
}

fn move_blobs(from: &Path, to: &Path) -> anyhow::Result<()> {
    for blob in fs::read_dir(from).into_iter().flatten() {
        let blob = blob?;
        let name = blob.file_name().to_string_lossy().into_owned();
        let folder = to.join(&name[..2.min(name.len())]);
        fs::create_dir_all(&folder)?;
        fs::File::open(blob.path())?.sync_all()?;
        fs::rename(blob.path(), folder.join(name))?;
        fs::File::open(&folder)?.sync_all()?;
    }
    Ok(())
}
