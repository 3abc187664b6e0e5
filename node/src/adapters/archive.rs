//! Unpacks what strangers send: tar.gz, tar.zst and zip, told apart by their first bytes.
//!
//! No entry may leave the folder, be a link or a device, or make the whole too large; names are
//! checked before anything is written, and what was written of a refused archive is removed by the
//! caller.

use std::{
    fs::{self, File},
    io::{self, Read, Seek as _},
    os::unix::fs::PermissionsExt as _,
    path::{Component, Path, PathBuf},
};

/// Bytes of all files together, unpacked (`decisions` §8).
pub const UNPACKED_BYTES_MAX: u64 = 750 * 1024 * 1024;
/// Files and folders.
pub const ENTRIES_MAX: usize = 50_000;
/// Characters of one path.
const PATH_CHARS_MAX: usize = 1024;

/// Why an archive is not unpacked.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// Neither of the three formats.
    #[error("the archive is neither tar.gz, tar.zst nor zip")]
    Unknown,
    /// A path that leads out of the archive.
    #[error("the archive has the path `{0}`, which leads out of it")]
    Escapes(String),
    /// A link, device, pipe or socket.
    #[error("the archive has `{0}`, which is neither a file nor a folder")]
    NotAFile(String),
    /// More bytes than allowed.
    #[error("the archive holds more than {} MiB", UNPACKED_BYTES_MAX / 1024 / 1024)]
    TooLarge,
    /// More entries than allowed.
    #[error("the archive holds more than {ENTRIES_MAX} files")]
    TooMany,
    /// Damaged.
    #[error("the archive is damaged: {0}")]
    Damaged(String),
    /// Our own disk.
    #[error("the archive could not be unpacked")]
    Disk(#[source] io::Error),
}

/// Unpacks `archive` into `folder`, which must exist and be empty. A single top folder that holds
/// everything is left out, as archives of repositories have one.
pub fn unpack(archive: &Path, folder: &Path) -> Result<(), ArchiveError> {
    let mut file = File::open(archive).map_err(ArchiveError::Disk)?;
    let mut magic = [0; 4];
    let read = file.read(&mut magic).map_err(ArchiveError::Disk)?;
    file.rewind().map_err(ArchiveError::Disk)?;
    let mut target = Target { folder, bytes: 0, entries: 0 };
    match &magic[..read] {
        [0x1f, 0x8b, ..] => target.tar(flate2::read::MultiGzDecoder::new(file))?,
        [0x28, 0xb5, 0x2f, 0xfd] => {
            target.tar(zstd::Decoder::new(file).map_err(ArchiveError::Disk)?)?;
        }
        [b'P', b'K', 3 | 5, 4 | 6] => target.zip(file)?,
        _ => return Err(ArchiveError::Unknown),
    }
    lift_single_folder(folder).map_err(ArchiveError::Disk)
}

/// Bytes of a whole unpacked stream: the files and what describes them.
const STREAM_BYTES_MAX: u64 = UNPACKED_BYTES_MAX + 100 * 1024 * 1024;
/// Bytes of one record that describes an entry.
const EXTENSION_BYTES_MAX: u64 = 64 * 1024;

/// A reader that ends with an error instead of going on for ever.
struct Bounded<R> {
    reader: R,
    left: u64,
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.reader.read(into)?;
        self.left = self.left.checked_sub(read as u64).ok_or_else(|| {
            io::Error::other(format!("it unpacks to more than {} MiB", STREAM_BYTES_MAX >> 20))
        })?;
        Ok(read)
    }
}

fn extension(entry: &mut impl Read) -> Result<String, ArchiveError> {
    let mut bytes = vec![];
    entry.take(EXTENSION_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(damaged)?;
    if bytes.len() as u64 > EXTENSION_BYTES_MAX {
        return Err(damaged("a record that describes an entry is too long"));
    }
    Ok(String::from_utf8_lossy(&bytes).trim_end_matches('\0').to_owned())
}

/// The path that a PAX record names: lines of `length key=value`.
fn pax_path(records: &str) -> Option<String> {
    let value = |line: &str| line.split_once(' ')?.1.strip_prefix("path=").map(str::to_owned);
    records.lines().find_map(value)
}

struct Target<'f> {
    folder: &'f Path,
    bytes: u64,
    entries: usize,
}

fn damaged(error: impl std::fmt::Display) -> ArchiveError {
    ArchiveError::Damaged(error.to_string())
}

impl Target<'_> {
    fn tar(&mut self, reader: impl Read) -> Result<(), ArchiveError> {
        // Raw entries, since the library reads extension records of any length into memory.
        let mut archive = tar::Archive::new(Bounded { reader, left: STREAM_BYTES_MAX });
        let mut long_name = None;
        for entry in archive.entries().map_err(damaged)?.raw(true) {
            let mut entry = entry.map_err(damaged)?;
            let kind = entry.header().entry_type();
            if kind.is_gnu_longname() || kind.is_pax_local_extensions() {
                let text = extension(&mut entry)?;
                long_name = if kind.is_gnu_longname() { Some(text) } else { pax_path(&text) };
                continue;
            }
            if kind.is_pax_global_extensions() {
                continue;
            }
            let own = || String::from_utf8_lossy(&entry.header().path_bytes()).into_owned();
            let name = long_name.take().unwrap_or_else(own);
            let path = self.place(&name)?;
            if kind.is_dir() {
                self.make_folder(&path)?;
            } else if kind.is_file() || kind == tar::EntryType::Continuous {
                let mode = entry.header().mode().unwrap_or(0o644);
                self.write(&path, &mut entry, mode)?;
            } else {
                return Err(ArchiveError::NotAFile(name));
            }
        }
        Ok(())
    }

    fn zip(&mut self, file: File) -> Result<(), ArchiveError> {
        let mut archive = zip::ZipArchive::new(file).map_err(damaged)?;
        for place in 0..archive.len() {
            let mut entry = archive.by_index(place).map_err(damaged)?;
            let name = entry.name().map_err(damaged)?.into_owned();
            let path = self.place(&name)?;
            let mode = entry.unix_mode().unwrap_or(0o644);
            if entry.is_dir() {
                self.make_folder(&path)?;
            } else if mode & 0o170_000 == 0 || mode & 0o170_000 == 0o100_000 {
                self.write(&path, &mut entry, mode)?;
            } else {
                return Err(ArchiveError::NotAFile(name));
            }
        }
        Ok(())
    }

    /// Where an entry goes; counts it.
    fn place(&mut self, name: &str) -> Result<PathBuf, ArchiveError> {
        self.entries += 1;
        if self.entries > ENTRIES_MAX {
            return Err(ArchiveError::TooMany);
        }
        let escapes = || ArchiveError::Escapes(name.chars().take(200).collect());
        if name.len() > PATH_CHARS_MAX || name.contains(['\\', '\0']) {
            return Err(escapes());
        }
        let mut path = self.folder.to_owned();
        for part in Path::new(name).components() {
            match part {
                Component::Normal(part) => path.push(part),
                Component::CurDir => {}
                Component::Prefix(_) | Component::RootDir | Component::ParentDir => {
                    return Err(escapes());
                }
            }
        }
        Ok(path)
    }

    fn make_folder(&self, path: &Path) -> Result<(), ArchiveError> {
        use io::ErrorKind as K;
        match fs::create_dir_all(path) {
            Err(error) if matches!(error.kind(), K::NotADirectory | K::AlreadyExists) => {
                Err(damaged(format!("{} is both a file and a folder", self.shown(path))))
            }
            made => made.map_err(ArchiveError::Disk),
        }
    }

    /// A path as the archive has it.
    fn shown(&self, path: &Path) -> String {
        path.strip_prefix(self.folder).unwrap_or(path).display().to_string()
    }

    fn write(&mut self, path: &Path, from: &mut impl Read, mode: u32) -> Result<(), ArchiveError> {
        if let Some(parent) = path.parent() {
            self.make_folder(parent)?;
        }
        // A new file only: an entry must not write through what an earlier one left.
        let file = File::options().write(true).create_new(true).open(path);
        let mut file = match file {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                return Err(damaged(format!("two entries named {}", self.shown(path))));
            }
            file => file.map_err(ArchiveError::Disk)?,
        };
        let room = UNPACKED_BYTES_MAX - self.bytes;
        let copied = io::copy(&mut from.take(room + 1), &mut file).map_err(damaged)?;
        if copied > room {
            return Err(ArchiveError::TooLarge);
        }
        self.bytes += copied;
        let mode = if mode & 0o111 == 0 { 0o644 } else { 0o755 };
        file.set_permissions(fs::Permissions::from_mode(mode)).map_err(ArchiveError::Disk)
    }
}

fn lift_single_folder(folder: &Path) -> io::Result<()> {
    let entries: Vec<_> = fs::read_dir(folder)?.collect::<io::Result<_>>()?;
    let [only] = entries.as_slice() else { return Ok(()) };
    if !only.file_type()?.is_dir() {
        return Ok(());
    }
    let aside = folder.join(".roost-top");
    fs::rename(only.path(), &aside)?;
    for entry in fs::read_dir(&aside)? {
        let entry = entry?;
        fs::rename(entry.path(), folder.join(entry.file_name()))?;
    }
    fs::remove_dir(&aside)
}
