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
    /// `around` removes the folder when it is dropped, which is not before the last write to it, also
    /// where the caller gave up.
    pub async fn fetch<A: Send + Sync + 'static>(
        &self,
        source: &Source,
        folder: &Path,
        around: &Arc<A>,
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
                let around = Arc::clone(around);
                let unpacked = tokio::task::spawn_blocking(move || {
                    let unpacked = archive::unpack(&archive, &target);
                    drop(around);
                    unpacked
                });
                let unpacked = unpacked.await.map_err(|error| build_failed(error.to_string()))?;
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::adapters::{blobs::FolderBlobs, unfinished::Unfinished};

    const FILES: usize = 20_000;

    fn archive(path: &Path) {
        fs::create_dir_all(path.parent().expect("it has a parent")).expect("works");
        let file = zstd::Encoder::new(fs::File::create(path).expect("works"), 1).expect("works");
        let mut archive = tar::Builder::new(file.auto_finish());
        for number in 0..FILES {
            let mut header = tar::Header::new_gnu();
            header.set_size(1);
            archive.append_data(&mut header, format!("file-{number}"), &b"x"[..]).expect("works");
        }
        archive.finish().expect("works");
    }

    #[tokio::test]
    async fn a_build_that_is_called_off_leaves_nothing_although_it_still_unpacks() {
        let data = tempfile::tempdir().expect("works");
        let local = Arc::new(FolderBlobs::open(&data.path().join("blobs")).expect("works"));
        let path = local.path("ab");
        let git = GitHost { base_url: String::new() };
        let fetcher = Fetcher { blobs: CopiedBlobs::new(local), git };
        archive(&path);
        let sha256 =
            crate::hex(&<sha2::Sha256 as sha2::Digest>::digest(fs::read(&path).expect("works")));
        fs::create_dir_all(fetcher.blobs.local.path(&sha256).parent().expect("it has a parent"))
            .expect("works");
        fs::rename(path, fetcher.blobs.local.path(&sha256)).expect("works");
        let source = Source::Upload { upload_id: domain::UploadId(1), sha256 };
        let images = data.path().join("images");
        fs::create_dir(&images).expect("works");
        let count = |folder: &Path| fs::read_dir(folder).expect("works").count();

        let unfinished = Arc::new(Unfinished::new(&images).expect("works"));
        let folder = unfinished.folder();
        fs::create_dir(&folder).expect("works");
        let log: LineSink = Arc::new(|_, _| {});
        let begun = async {
            while count(&folder) == 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::select! {
            _ = fetcher.fetch(&source, &folder, &unfinished, &log) => panic!("too fast to call off"),
            () = begun => {}
        }
        drop(unfinished);
        assert!(count(&folder) < FILES, "it still unpacks, to a folder that is still there");
        while count(&images) > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert!(!folder.exists());
    }
}
