//! Images from node to node. A built folder travels as a compressed archive, a container's image as
//! the engine saves it; neither is kept as a file on the way.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use domain::{cloud::Provider, deployment::Image};
use futures::{StreamExt as _, stream};
use tokio::sync::mpsc;

use super::{
    copies::pieces,
    docker::DockerRuntime,
    peers::NodePeers,
    unfinished::{IMAGE, Unfinished},
};
use crate::hex;

/// Where images are on a node's peer port; runtime and reference follow.
pub const IMAGES_PATH: &str = "/images/";
/// How long an image may take to arrive.
const ARRIVES_WITHIN: Duration = Duration::from_secs(600);
/// Pieces that wait for a slow peer.
const PIECES_WAITING: usize = 8;
/// The fastest level that is worth it between machines.
const ZSTD_LEVEL: i32 = 1;

/// A stream of an image's bytes.
pub type ImageStream = stream::BoxStream<'static, io::Result<Bytes>>;

/// The folder of images that a restored backup brought and that nothing needed yet.
pub const SAVED: &str = "saved";

/// What the file of a saved image is called.
pub fn saved_name(provider: Provider, reference: &str) -> String {
    format!("{}-{}", provider.as_str(), hex(reference.as_bytes()))
}

/// Brings images here, and gives them away.
pub struct Carrier {
    images: PathBuf,
    saved: PathBuf,
    docker: Arc<DockerRuntime>,
    peers: std::sync::OnceLock<Arc<NodePeers>>,
}

impl Carrier {
    /// For the images below `data`, and those of the engine.
    pub fn new(data: &Path, docker: Arc<DockerRuntime>) -> Self {
        let (images, saved) = (data.join("images"), data.join(SAVED));
        Self { images, saved, docker, peers: std::sync::OnceLock::new() }
    }

    /// From now on there are others.
    pub fn connect(&self, peers: Arc<NodePeers>) {
        let _ = self.peers.set(peers);
    }

    /// Makes sure that an image is here; whether it is.
    pub async fn hold(&self, provider: Provider, image: &Image) -> bool {
        if self.is_here(provider, image).await {
            return true;
        }
        match self.take_saved(provider, image).await {
            Ok(true) => return true,
            Ok(false) => {}
            Err(error) => tracing::warn!(%error, "a saved image could not be loaded"),
        }
        let Some(peers) = self.peers.get() else { return false };
        for node in peers.others() {
            let path = format!("{IMAGES_PATH}{}/{}", provider.as_str(), image.reference);
            let arrives = self.fetch(peers, node, &path, provider, image);
            match tokio::time::timeout(ARRIVES_WITHIN, arrives).await {
                Ok(Ok(true)) => return true,
                Ok(Ok(false)) => {}
                Ok(Err(error)) => tracing::info!(%node, %error, "an image could not be fetched"),
                Err(_) => tracing::info!(%node, "an image took too long"),
            }
        }
        false
    }

    async fn is_here(&self, provider: Provider, image: &Image) -> bool {
        match provider {
            Provider::Docker => self.docker.has_image(&image.reference).await,
            Provider::Process | Provider::Sandbox => self.images.join(&image.reference).is_dir(),
        }
    }

    async fn fetch(
        &self,
        peers: &NodePeers,
        node: domain::NodeId,
        path: &str,
        provider: Provider,
        image: &Image,
    ) -> io::Result<bool> {
        let Some(bytes) = peers.fetch(node, path).await? else { return Ok(false) };
        self.take_in(bytes, provider, image).await
    }

    /// An image that a restored backup brought.
    async fn take_saved(&self, provider: Provider, image: &Image) -> io::Result<bool> {
        let path = self.saved.join(saved_name(provider, &image.reference));
        let Some(bytes) = pieces(&path).await? else { return Ok(false) };
        let is_here = self.take_in(bytes.boxed(), provider, image).await?;
        if is_here {
            // Whoever loaded it at the same time may have been faster.
            let _ = fs::remove_file(path);
        }
        Ok(is_here)
    }

    async fn take_in(
        &self,
        bytes: ImageStream,
        provider: Provider,
        image: &Image,
    ) -> io::Result<bool> {
        match provider {
            Provider::Docker => self.docker.load_image(bytes).await.map_err(io::Error::other)?,
            Provider::Process | Provider::Sandbox => self.unpack(bytes, &image.reference).await?,
        }
        Ok(self.is_here(provider, image).await)
    }

    /// An image of this node for another one; `None` if it is not here.
    pub async fn give(&self, provider: &str, reference: &str) -> Option<ImageStream> {
        if provider == Provider::Docker.as_str() {
            return self.docker.save_image(reference).await;
        }
        let inside =
            reference.split('/').all(|part| !part.is_empty() && part != ".." && part != ".");
        let folder = self.images.join(reference);
        (inside && folder.is_dir()).then(|| pack(folder))
    }

    async fn unpack(&self, mut bytes: ImageStream, reference: &str) -> io::Result<()> {
        let (sender, receiver) = mpsc::channel::<Bytes>(PIECES_WAITING);
        let incoming = Unfinished::new(&self.images)?;
        let reference = reference.to_owned();
        let unpacked =
            tokio::task::spawn_blocking(move || unpack_all(receiver, &incoming, &reference));
        while let Some(part) = bytes.next().await {
            if sender.send(part?).await.is_err() {
                break;
            }
        }
        drop(sender);
        unpacked.await.map_err(io::Error::other)?
    }
}

fn unpack_all(
    pieces: mpsc::Receiver<Bytes>,
    incoming: &Unfinished,
    reference: &str,
) -> io::Result<()> {
    let mut archive = tar::Archive::new(zstd::Decoder::new(Pieces { pieces, now: Bytes::new() })?);
    archive.set_preserve_permissions(true);
    archive.set_preserve_ownerships(true);
    // Whatever leaves the folder is refused by the library; what comes is what a peer packed.
    archive.unpack(incoming.around())?;
    incoming.finish(reference)
}

/// Received pieces as a reader.
struct Pieces {
    pieces: mpsc::Receiver<Bytes>,
    now: Bytes,
}

impl io::Read for Pieces {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.now.is_empty() {
            match self.pieces.blocking_recv() {
                Some(next) => self.now = next,
                None => return Ok(0),
            }
        }
        let part = self.now.split_to(into.len().min(self.now.len()));
        into[..part.len()].copy_from_slice(&part);
        Ok(part.len())
    }
}

/// A folder as a stream.
fn pack(folder: PathBuf) -> ImageStream {
    let (sender, mut receiver) = mpsc::channel(PIECES_WAITING);
    tokio::task::spawn_blocking(move || {
        let packed = || -> io::Result<()> {
            let writer = io::BufWriter::with_capacity(256 * 1024, Sends(sender.clone()));
            let mut archive = tar::Builder::new(zstd::Encoder::new(writer, ZSTD_LEVEL)?);
            archive.follow_symlinks(false);
            archive.append_dir_all(IMAGE, &folder)?;
            let mut writer = archive.into_inner()?.finish()?;
            io::Write::flush(&mut writer)
        };
        if let Err(error) = packed() {
            let _ = sender.blocking_send(Err(error));
        }
    });
    stream::poll_fn(move |cx| receiver.poll_recv(cx)).boxed()
}

/// Pieces to send as a writer.
struct Sends(mpsc::Sender<io::Result<Bytes>>);

impl io::Write for Sends {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let piece = Bytes::copy_from_slice(bytes);
        self.0.blocking_send(Ok(piece)).map_err(|_| io::ErrorKind::BrokenPipe)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
