//! Fetches a branch of a repository with the machine's own `git`, which may use exactly the protocol
//! of the configured base address and asks nobody anything.

use std::{path::Path, process::Stdio, time::Duration};

use domain::deployment::Failure;
use tokio::process::Command;

/// How much of git's complaint is shown.
const COMPLAINT_CHARS: usize = 1000;

/// Most bytes of a clone, its history included: twice what an archive may unpack to.
const CLONE_BYTES_MAX: u64 = 2 * super::archive::UNPACKED_BYTES_MAX;
/// Between measurements of a clone that is under way.
const MEASURED_EVERY: Duration = Duration::from_millis(500);

/// What was fetched.
pub struct Fetched {
    /// The commit's full hash.
    pub commit: String,
}

/// Where repositories are.
#[derive(Clone, Debug)]
pub struct GitHost {
    /// `https://github.com`, or a local server, or `file:///srv/git`.
    pub base_url: String,
}

impl GitHost {
    /// Clones `owner/repository` at `branch` (or its default) into `folder`, which must not exist.
    pub async fn fetch(
        &self,
        repo: &str,
        branch: Option<&str>,
        folder: &Path,
    ) -> Result<Fetched, Failure> {
        let base = self.base_url.trim_end_matches('/');
        let first = self.clone(&format!("{base}/{repo}.git"), branch, folder).await;
        if let Err(failure) = first {
            let second = self.clone(&format!("{base}/{repo}"), branch, folder).await;
            second.map_err(|_| failure)?;
        }
        let commit = self.run(git().arg("-C").arg(folder).args(["rev-parse", "HEAD"])).await?;
        let _ = tokio::fs::remove_dir_all(folder.join(".git")).await;
        Ok(Fetched { commit: commit.trim().to_owned() })
    }

    async fn clone(&self, url: &str, branch: Option<&str>, folder: &Path) -> Result<(), Failure> {
        let protocol = url.split_once("://").map_or("https", |(protocol, _)| protocol);
        let mut command = git();
        command
            .args([
                "-c",
                "protocol.allow=never",
                "-c",
                &format!("protocol.{protocol}.allow=always"),
            ])
            .args(["-c", "core.hooksPath=/dev/null", "-c", "core.symlinks=false"])
            .args(["clone", "--quiet", "--depth", "1", "--single-branch", "--no-tags"]);
        if let Some(branch) = branch {
            command.args(["--branch", branch]);
        }
        command.arg("--").arg(url).arg(folder);
        tokio::select! {
            cloned = self.run(&mut command) => cloned.map(drop),
            // The command ends with its future.
            () = grows_beyond(folder, CLONE_BYTES_MAX) => Err(Failure::new(
                "SOURCE_FETCH_FAILED",
                format!("the repository is larger than {} MiB; make it smaller", CLONE_BYTES_MAX >> 20),
            )),
        }
    }

    async fn run(&self, command: &mut Command) -> Result<String, Failure> {
        let output = command.output().await.map_err(|error| {
            Failure::new(
                "SOURCE_FETCH_FAILED",
                format!("git could not be started: {error}; install git"),
            )
        })?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        let words = String::from_utf8_lossy(&output.stderr);
        let message =
            "the repository or branch could not be fetched; check source.repo and source.branch";
        Err(Failure {
            details: words.trim().chars().take(COMPLAINT_CHARS).collect(),
            ..Failure::new("SOURCE_FETCH_FAILED", message)
        })
    }
}

/// Waits until a folder holds more than this.
async fn grows_beyond(folder: &Path, most: u64) {
    loop {
        tokio::time::sleep(MEASURED_EVERY).await;
        let folder = folder.to_owned();
        let bytes = tokio::task::spawn_blocking(move || bytes_below(&folder)).await;
        if bytes.is_ok_and(|bytes| bytes > most) {
            return;
        }
    }
}

/// What the files below a folder take; what is being made or removed meanwhile may be missed.
fn bytes_below(folder: &Path) -> u64 {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let sizes = entries.map(|entry| match entry.file_type() {
        Ok(kind) if kind.is_dir() => bytes_below(&entry.path()),
        _ => entry.metadata().map_or(0, |meta| meta.len()),
    });
    sizes.sum()
}

/// A git that knows nothing of whoever runs this node.
fn git() -> Command {
    let mut command = Command::new("git");
    command
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .env("GIT_TERMINAL_PROMPT", "0")
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .env("HOME", "/nonexistent")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    if let Some(bundle) = std::env::var_os("SSL_CERT_FILE") {
        command.env("GIT_SSL_CAINFO", bundle);
    }
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_folder_that_grows_is_noticed() {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::create_dir(folder.path().join("objects")).expect("made");
        std::fs::write(folder.path().join("objects/pack"), [0; 3000]).expect("written");
        assert_eq!(bytes_below(folder.path()), 3000);
        let small = tokio::time::timeout(MEASURED_EVERY * 3, grows_beyond(folder.path(), 3000));
        assert!(small.await.is_err(), "as much as allowed is allowed");
        grows_beyond(folder.path(), 2999).await;
    }
}
