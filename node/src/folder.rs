//! The folder of a node: who may look into it, and that one node at a time uses it.

use std::{
    fs, io,
    os::unix::fs::PermissionsExt as _,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::Context as _;

/// How long a folder may still be locked by a node that is on its way out.
const LOCK_WAITED_FOR: Duration = Duration::from_secs(1);

/// Makes the folder; other users may pass through it to an image, and see nothing else.
pub fn prepare(data: &Path) -> io::Result<()> {
    fs::create_dir_all(data)?;
    fs::set_permissions(data, fs::Permissions::from_mode(0o711))?;
    for private in ["keys", "tls", "blobs", "logs", "log-copies", "series", "backups"] {
        fs::create_dir_all(data.join(private))?;
        fs::set_permissions(data.join(private), fs::Permissions::from_mode(0o700))?;
    }
    for passable in ["images", "run"] {
        fs::create_dir_all(data.join(passable))?;
        fs::set_permissions(data.join(passable), fs::Permissions::from_mode(0o711))?;
    }
    Ok(())
}

/// One node per folder: a second one is told so before it touches anything.
pub fn lock(data: &Path) -> anyhow::Result<fs::File> {
    let file =
        fs::OpenOptions::new().create(true).truncate(false).write(true).open(data.join("lock"))?;
    let until = Instant::now() + LOCK_WAITED_FOR;
    loop {
        let locked = rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive);
        match locked {
            Ok(()) => return Ok(file),
            // One that was just killed may take a moment to be gone.
            Err(_) if Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(error) => {
                return Err(error).with_context(|| {
                    format!(
                        "another node is using {}; stop it, or choose another --data",
                        data.display()
                    )
                });
            }
        }
    }
}
