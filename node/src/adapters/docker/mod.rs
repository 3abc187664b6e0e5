//! The `docker` runtime: agents as containers of the engine on this machine.
//!
//! What this node starts carries its label, so that it finds its own again after a restart and leaves
//! everybody else's alone. Containers outlive a crash of the node and are adopted; those that no
//! instance row names are removed.

mod carry;
mod container;
mod engine;
mod image;
mod variables;

use std::{
    fs, io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use domain::{NodeId, deployment::Failure};

pub use engine::Engine;

use super::{local::no_gpu, source::Fetcher};
use variables::VariableFiles;

/// The static program that containers are entered by; empty where it could not be built.
const ENTER: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/enter"));

/// What an image source and a built one are made with.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where the engine listens.
    pub socket: PathBuf,
    /// `from=to`: pull from `to` first what `from` would serve.
    pub registries: Vec<(String, String)>,
    /// Whether an image that only this machine's engine has may be deployed.
    pub local_images: bool,
    /// Base images by language; `{version}` stands for the language's version.
    pub base_images: Vec<(&'static str, String)>,
    /// Authorities that installers trust.
    pub ca_bundle: Option<PathBuf>,
}

/// Builds and runs containers.
pub struct DockerRuntime {
    engine: Arc<Engine>,
    node: String,
    settings: Settings,
    fetcher: Arc<Fetcher>,
    variables: VariableFiles,
    builds: PathBuf,
    /// One file per container that is not gone yet: how far its log was read.
    run: PathBuf,
    enter: PathBuf,
    network: tokio::sync::OnceCell<String>,
    /// Shared by every start that is under way.
    underway: Arc<()>,
}

impl DockerRuntime {
    /// Below `data`; the engine need not be there yet.
    pub async fn open(
        data: &Path,
        node: NodeId,
        settings: Settings,
        fetcher: Arc<Fetcher>,
    ) -> io::Result<Self> {
        let (builds, run, enter) = (data.join("builds"), data.join("docker"), data.join("enter"));
        let _ = fs::remove_dir_all(&builds);
        for folder in [&builds, &run] {
            fs::create_dir_all(folder)?;
            fs::set_permissions(folder, fs::Permissions::from_mode(0o700))?;
        }
        // A container of an earlier life may be running the old file.
        let _ = fs::remove_file(&enter);
        fs::write(&enter, ENTER)?;
        fs::set_permissions(&enter, fs::Permissions::from_mode(0o755))?;
        let engine = Arc::new(Engine::new(settings.socket.clone()));
        engine.look().await;
        Ok(Self {
            engine,
            node: node.to_string(),
            settings,
            fetcher,
            variables: VariableFiles::new(node),
            builds,
            run,
            enter,
            network: tokio::sync::OnceCell::new(),
            underway: Arc::default(),
        })
    }

    /// The engine.
    pub fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// Why containers can't be run here now.
    pub fn lack(&self, gpu: bool) -> Option<Failure> {
        if ENTER.is_empty() {
            return Some(Failure::new(
                "NO_CAPACITY",
                "this build of roost lacks its helper for containers; build it where static glibc (libc6-dev) is installed",
            ));
        }
        match self.engine.here() {
            Ok(here) if gpu && !here.has_gpu => Some(no_gpu()),
            Ok(_) => None,
            Err(failure) => Some(failure),
        }
    }
}
