//! From a source to a folder: unpacks an upload, or clones a repository and takes a part of it.

use std::{fs, io, path::Path, sync::Arc};

use actors::ports::{Channel, LineSink};
use domain::{agent::Source, deployment::Failure};

use super::{archive, copies::CopiedBlobs, git::GitHost, recipe::build_failed};

/// Fetches sources.
pub struct Fetcher {
    /// Uploads.
    pub blobs: Arc<CopiedBlobs>,
    /// Repositories.
    pub git: GitHost,
}

impl Fetcher {
    /// Fills an empty folder; answers the commit of a repository. A ready image has no folder to fill.
    pub async fn fetch(
        &self,
        source: &Source,
        folder: &Path,
        log: &LineSink,
    ) -> Result<Option<String>, Failure> {
        match source {
            Source::Upload { upload_id, sha256 } => {
                log(Channel::Stdout, format!("unpacking {upload_id}"));
                if !self.blobs.fetch_whole(sha256).await.unwrap_or_default() {
                    return Err(build_failed(
                        "the uploaded archive is gone; upload it again".to_owned(),
                    ));
                }
                let (archive, target) = (self.blobs.local.path(sha256), folder.to_owned());
                let unpacked =
                    tokio::task::spawn_blocking(move || archive::unpack(&archive, &target)).await;
                let unpacked = unpacked.map_err(|error| build_failed(error.to_string()))?;
                unpacked.map_err(|error| build_failed(error.to_string())).map(|()| None)
            }
            Source::Github { repo, branch, path } => {
                let shown = branch.as_deref().unwrap_or("the default branch");
                log(Channel::Stdout, format!("fetching {repo} at {shown}"));
                let clone = folder.join(".roost-clone");
                let fetched = self.git.fetch(repo, branch.as_deref(), &clone).await?;
                log(Channel::Stdout, format!("at commit {}", fetched.commit));
                take_path(&clone, path.as_deref(), folder)?;
                Ok(Some(fetched.commit))
            }
            Source::Docker { .. } => Err(build_failed(
                "a docker image can't run in a process cloud; choose a docker cloud",
            )),
        }
    }
}

/// Moves the wanted part of a clone to where an image is expected.
fn take_path(clone: &Path, path: Option<&str>, folder: &Path) -> Result<(), Failure> {
    let wanted = path.map_or_else(|| clone.to_owned(), |path| clone.join(path.trim_matches('/')));
    let inside = wanted.canonicalize().ok().zip(clone.canonicalize().ok());
    if !inside.is_some_and(|(wanted, clone)| wanted.starts_with(clone) && wanted.is_dir()) {
        let message = "source.path is not a folder of the repository";
        return Err(Failure::new("SOURCE_FETCH_FAILED", message));
    }
    let moved = || -> io::Result<()> {
        for entry in fs::read_dir(&wanted)? {
            let entry = entry?;
            fs::rename(entry.path(), folder.join(entry.file_name()))?;
        }
        fs::remove_dir_all(clone)
    };
    moved().map_err(|error| build_failed(format!("the source could not be written: {error}")))
}
