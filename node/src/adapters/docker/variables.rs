//! The variables of containers, as files in memory that are mounted read-only: never on a disk, and
//! never in the engine's record of a container. After a reboot they are gone and the instance is
//! made anew.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{self, Write as _},
    os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _},
    path::PathBuf,
};

use domain::{InstanceId, NodeId};

/// Where Linux has a file system in memory that every user may write to.
const MEMORY: &str = "/dev/shm";
/// Its kind (statfs(2), `TMPFS_MAGIC`).
const TMPFS: u64 = 0x0102_1994;

/// One file per container of this node.
#[derive(Clone)]
pub(super) struct VariableFiles(PathBuf);

impl VariableFiles {
    /// Of this node.
    pub(super) fn new(node: NodeId) -> Self {
        Self(PathBuf::from(MEMORY).join(format!("roost-{node}")))
    }

    fn path(&self, instance: InstanceId) -> PathBuf {
        self.0.join(instance.to_string())
    }

    /// Writes the file of a container. The folder is closed to others, so that the file itself may
    /// be read by whatever user the image runs as.
    pub(super) fn write(
        &self,
        instance: InstanceId,
        variables: &BTreeMap<String, String>,
    ) -> io::Result<PathBuf> {
        let kind = rustix::fs::statfs(MEMORY)?.f_type;
        if u64::try_from(kind) != Ok(TMPFS) {
            return Err(io::Error::other(format!(
                "{MEMORY} is not in memory; mount a tmpfs there, so that no secret is written to a disk"
            )));
        }
        fs::create_dir_all(&self.0)?;
        fs::set_permissions(&self.0, fs::Permissions::from_mode(0o700))?;
        let path = self.path(instance);
        let mut file = fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o444)
            .open(&path)?;
        for (name, value) in variables {
            file.write_all(name.as_bytes())?;
            file.write_all(b"=")?;
            file.write_all(value.as_bytes())?;
            file.write_all(&[0])?;
        }
        Ok(path)
    }

    /// Removes the file of a container, and the folder with the last one.
    pub(super) fn remove(&self, instance: InstanceId) {
        let _ = fs::remove_file(self.path(instance));
        let _ = fs::remove_dir(&self.0);
    }

    /// Removes all of them; for a node that ends with all its containers.
    pub(super) fn clear(&self) {
        let _ = fs::remove_dir_all(&self.0);
    }

    /// Removes the files of all but these.
    pub(super) fn keep(&self, known: &BTreeSet<String>) {
        for entry in fs::read_dir(&self.0).into_iter().flatten().flatten() {
            if !known.contains(&*entry.file_name().to_string_lossy()) {
                let _ = fs::remove_file(entry.path());
            }
        }
        let _ = fs::remove_dir(&self.0);
    }
}
