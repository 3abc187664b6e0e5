//! The folder of an image while it comes to be: beside its place, and moved there whole once everything
//! in it is on the disk. A folder that is there is therefore a whole image, whatever became of the
//! build or of the node.

use std::{fs, io, os::unix::fs::PermissionsExt as _, path::Path, path::PathBuf};

use tempfile::TempDir;

/// What the names of such folders begin with.
const PREFIX: &str = ".unfinished-";
/// What the image's folder is called until it is in its place, and on its way between nodes.
pub const IMAGE: &str = "image";
/// Others may pass through to what they are to use, and see nothing else.
const PASSABLE: u32 = 0o711;

/// An image in the making; what was made goes with it unless it is finished.
pub struct Unfinished {
    outer: TempDir,
    images: PathBuf,
}

impl Unfinished {
    /// Beside the images of this folder.
    pub fn new(images: &Path) -> io::Result<Self> {
        let passable = fs::Permissions::from_mode(PASSABLE);
        let outer =
            tempfile::Builder::new().prefix(PREFIX).permissions(passable).tempdir_in(images)?;
        Ok(Self { outer, images: images.to_owned() })
    }

    /// Where the image is made. It does not exist yet.
    pub fn folder(&self) -> PathBuf {
        self.outer.path().join(IMAGE)
    }

    /// The folder that is around [`Self::folder`].
    pub fn around(&self) -> &Path {
        self.outer.path()
    }

    /// Moves the image to its place; what an earlier build of it left there goes.
    pub fn replace(&self, reference: &str) -> io::Result<()> {
        match fs::rename(self.images.join(reference), self.around().join("earlier")) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => self.finish(reference),
        }
    }

    /// Moves the image to its place, unless it came there meanwhile: it may be in use.
    pub fn finish(&self, reference: &str) -> io::Result<()> {
        let target = self.images.join(reference);
        // One call for all files: a folder of modules has thousands.
        rustix::fs::syncfs(fs::File::open(self.outer.path())?)?;
        let parent = target.parent().unwrap_or(&self.images);
        fs::create_dir_all(parent)?;
        fs::set_permissions(parent, fs::Permissions::from_mode(PASSABLE))?;
        match fs::rename(self.folder(), &target) {
            Err(_) if target.is_dir() => return Ok(()),
            renamed => renamed?,
        }
        fs::File::open(parent)?.sync_all()?;
        fs::File::open(&self.images)?.sync_all()
    }
}

/// Removes what an earlier life of the node left unfinished.
pub fn clear(images: &Path) -> io::Result<()> {
    for entry in fs::read_dir(images)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(PREFIX) {
            fs::remove_dir_all(entry.path())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(images: &Path, text: &str) -> Unfinished {
        let made = Unfinished::new(images).expect("works");
        fs::create_dir(made.folder()).expect("works");
        fs::write(made.folder().join("main.py"), text).expect("works");
        made
    }

    fn names(images: &Path) -> Vec<String> {
        let entries = fs::read_dir(images).expect("works");
        entries
            .map(|entry| entry.expect("works").file_name().to_string_lossy().into_owned())
            .collect()
    }

    #[test]
    fn an_image_is_there_whole_or_not_at_all() {
        let images = tempfile::tempdir().expect("works");
        drop(made(images.path(), "called off"));
        assert_eq!(names(images.path()), Vec::<String>::new());
        let text = || fs::read_to_string(images.path().join("agent/dep/main.py")).expect("works");
        // Two at a time take nothing from each other.
        let (first, second) = (made(images.path(), "first"), made(images.path(), "second"));
        second.finish("agent/dep").expect("works");
        first.finish("agent/dep").expect("works");
        drop(first);
        assert_eq!(text(), "second");
        drop(second);
        made(images.path(), "third").replace("agent/dep").expect("works");
        assert_eq!((names(images.path()), text().as_str()), (vec!["agent".to_owned()], "third"));
    }

    #[test]
    fn what_a_node_left_when_it_died_is_cleared() {
        let images = tempfile::tempdir().expect("works");
        made(images.path(), "first").finish("agent/dep").expect("works");
        std::mem::forget(made(images.path(), "half"));
        assert_eq!(names(images.path()).len(), 2);
        clear(images.path()).expect("works");
        assert_eq!(names(images.path()), ["agent"]);
    }
}
