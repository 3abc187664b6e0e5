//! Runs an installer of dependencies in the same cage as an instance, with the image's folder to
//! write to.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::Stdio,
    sync::Arc,
};

use actors::ports::{Channel, LineSink};
use domain::deployment::Failure;
use tokio::{
    io::{AsyncRead, BufReader},
    sync::oneshot,
};

use super::{
    isolation::{self, FIRST_UID},
    process::{ProcessRuntime, program_prefix, read_line},
    recipe::build_failed,
};
use crate::exec::Cage;

/// Processes and threads of an installer.
const INSTALLER_PROCESSES_MAX: u64 = 512;
/// Users that builds run as, beyond those of instances; two builds seldom share one.
const BUILD_UIDS: u32 = 65_536;
/// Lines of an installer's output that a failure shows.
pub const LAST_LINES: usize = 20;

/// A command line that installs dependencies.
pub struct Installer {
    /// The command line.
    pub command: Vec<String>,
    /// Of which language.
    pub language: &'static str,
}
/// A run of an installer.
pub struct Install<'b> {
    /// As whom.
    pub uid: u32,
    /// Spawns it.
    pub process: &'b ProcessRuntime,
    /// What it may write to.
    pub folder: &'b Path,
    /// Hears its output.
    pub log: &'b LineSink,
    /// Authorities that it trusts.
    pub ca_bundle: Option<&'b Path>,
}

/// An installer at work; it ends with its value.
pub struct Run {
    /// Its process.
    pub child: tokio::process::Child,
    group: Option<rustix::process::Pid>,
    words: Vec<oneshot::Receiver<Vec<String>>>,
}

impl Drop for Run {
    /// A build that is called off leaves nothing running.
    fn drop(&mut self) {
        if let Some(group) = self.group {
            let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        }
    }
}

impl Run {
    /// The end of what it wrote.
    pub async fn last_words(&mut self) -> String {
        let mut words = vec![];
        for part in self.words.drain(..) {
            words.extend(part.await.unwrap_or_default());
        }
        words.join("\n")
    }
}

impl Install<'_> {
    /// Begins.
    pub async fn start(&self, installer: &Installer) -> Result<Run, Failure> {
        self.launch(installer)
            .await
            .map_err(|error| build_failed(format!("the installer could not be started: {error}")))
    }

    async fn launch(&self, installer: &Installer) -> io::Result<Run> {
        let isolation = self.process.isolation();
        let uid = isolation.has("uid").then_some(self.uid);
        let scratch = self.folder.join(".roost/tmp");
        fs::create_dir_all(&scratch)?;
        give_away(self.folder, uid)?;
        let prefix = program_prefix(Path::new(&installer.command[0]));
        let prefix = prefix.iter().map(PathBuf::as_path);
        let readable: Vec<&Path> = prefix.chain(self.ca_bundle).collect();
        let cage = Cage {
            command: installer.command.clone(),
            folder: self.folder.to_owned(),
            layers: isolation.layers.clone(),
            uid,
            readable: isolation::readable(&readable),
            writable: isolation::writable(&[self.folder]),
            port: None,
            parent: std::process::id(),
            groups: vec![],
            processes: Some(INSTALLER_PROCESSES_MAX),
            address_space: None,
        };
        let mut command = isolation.command(&cage);
        isolation::set_variable(&mut command, "PATH", "/usr/local/bin:/usr/bin:/bin");
        isolation::set_variable(&mut command, "LANG", "C.UTF-8");
        isolation::set_variable(&mut command, "HOME", &scratch);
        isolation::set_variable(&mut command, "TMPDIR", &scratch);
        for name in [
            "PIP_CERT",
            "PIP_INDEX_URL",
            "SSL_CERT_FILE",
            "NODE_EXTRA_CA_CERTS",
            "HTTPS_PROXY",
            "HTTP_PROXY",
            "NO_PROXY",
            "NPM_CONFIG_REGISTRY",
        ] {
            if let Some(value) = std::env::var_os(name) {
                isolation::set_variable(&mut command, name, value);
            }
        }
        if let Some(bundle) = self.ca_bundle {
            for name in ["PIP_CERT", "SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS"] {
                isolation::set_variable(&mut command, name, bundle);
            }
        }
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        tracing::debug!(language = installer.language, "installing dependencies");
        let mut child = self.process.spawn(command).await?;
        let group =
            child.id().and_then(|pid| rustix::process::Pid::from_raw(i32::try_from(pid).ok()?));
        let words = vec![
            self.read(child.stdout.take(), Channel::Stdout),
            self.read(child.stderr.take(), Channel::Stderr),
        ];
        Ok(Run { child, group, words })
    }

    fn read(
        &self,
        from: Option<impl AsyncRead + Unpin + Send + 'static>,
        channel: Channel,
    ) -> oneshot::Receiver<Vec<String>> {
        let (sender, receiver) = oneshot::channel();
        let log = Arc::clone(self.log);
        if let Some(from) = from {
            tokio::spawn(async move {
                let (mut reader, mut bytes) = (BufReader::new(from), vec![]);
                let mut last = vec![];
                while let Ok(1..) = read_line(&mut reader, &mut bytes).await {
                    let line = String::from_utf8_lossy(&bytes).trim_end().to_owned();
                    bytes.clear();
                    log(channel, line.clone());
                    last.push(line);
                    if last.len() > LAST_LINES {
                        last.remove(0);
                    }
                }
                let _ = sender.send(last);
            });
        }
        receiver
    }
}

/// The user of the build in this folder.
pub fn build_uid(folder: &Path) -> u32 {
    let name = folder.file_name().unwrap_or_default().as_encoded_bytes();
    FIRST_UID + BUILD_UIDS + crc32c::crc32c(name) % BUILD_UIDS
}

fn give_away(path: &Path, uid: Option<u32>) -> io::Result<()> {
    std::os::unix::fs::lchown(path, uid, uid)?;
    if fs::symlink_metadata(path)?.is_dir() {
        for entry in fs::read_dir(path)? {
            give_away(&entry?.path(), uid)?;
        }
    }
    Ok(())
}
