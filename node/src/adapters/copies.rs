//! Bulk on more than one node: what is received here is acknowledged when another node has it too,
//! and what is not here is fetched from whoever has it. Every blob has two nodes that should hold it; whoever has
//! one sees to it that they do, so when a node goes another one takes its part.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    sync::{Arc, Mutex, OnceLock, PoisonError},
    time::Duration,
};

use actors::ports::{BlobError, Blobs, ByteStream};
use bytes::Bytes;
use domain::{NodeId, upload::Received};
use futures::{FutureExt as _, TryStreamExt as _, future::BoxFuture, stream};
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use sha2::{Digest as _, Sha256};
use tokio::io::AsyncReadExt as _;

use super::{blobs::FolderBlobs, peers::NodePeers};

/// Where blobs are on a node's peer port; the name follows.
pub const BLOBS_PATH: &str = "/blobs/";
/// Bytes read from disk at once.
const PIECE_BYTES: usize = 256 * 1024;
/// Nodes that have a blob.
const HOLDERS: usize = 2;
/// How long a node may take to say whether it has a blob.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// How long one copy may take.
const COPY_WITHIN: Duration = Duration::from_secs(120);

/// Blobs of this node with copies on others.
pub struct CopiedBlobs {
    /// Those of this node.
    pub local: Arc<FolderBlobs>,
    peers: OnceLock<Arc<NodePeers>>,
    known: Mutex<Known>,
}

/// Who was found to have what, as long as the same nodes are there.
#[derive(Default)]
struct Known {
    nodes: Vec<NodeId>,
    holders: BTreeMap<String, BTreeSet<NodeId>>,
}

impl CopiedBlobs {
    /// Over the blobs of this node.
    pub fn new(local: Arc<FolderBlobs>) -> Arc<Self> {
        Arc::new(Self { local, peers: OnceLock::new(), known: Mutex::default() })
    }

    /// From now on there are others.
    pub fn connect(&self, peers: Arc<NodePeers>) {
        let _ = self.peers.set(peers);
    }

    /// Makes sure that a blob is here; whether it is.
    pub async fn fetch(&self, sha256: &str) -> bool {
        if self.local.path(sha256).exists() {
            return true;
        }
        self.fetch_from_others(sha256).await
    }

    /// Makes sure that a blob is here and is what it was; whether it is.
    pub async fn fetch_whole(&self, sha256: &str) -> io::Result<bool> {
        if self.local.path(sha256).exists() && self.local.is_whole(sha256).await? {
            return Ok(true);
        }
        // What arrives is checked on its way.
        Ok(self.fetch_from_others(sha256).await)
    }

    async fn fetch_from_others(&self, sha256: &str) -> bool {
        let Some(peers) = self.peers.get() else { return false };
        for node in peers.others() {
            match tokio::time::timeout(COPY_WITHIN, self.fetch_from(peers, node, sha256)).await {
                Ok(Ok(true)) => return true,
                Ok(Ok(false)) => {}
                Ok(Err(error)) => tracing::info!(%node, %error, "a blob could not be fetched"),
                Err(_) => tracing::info!(%node, "a blob took too long"),
            }
        }
        false
    }

    async fn fetch_from(&self, peers: &NodePeers, node: NodeId, sha256: &str) -> io::Result<bool> {
        let found = peers.fetch(node, &format!("{BLOBS_PATH}{sha256}")).await?;
        let Some(bytes) = found else { return Ok(false) };
        let received = self.local.receive(bytes, u64::MAX).await.map_err(io::Error::other)?;
        // Other bytes under this name would be a lie; they are swept as unnamed.
        Ok(received.sha256 == sha256)
    }

    /// Gives a copy to one other node.
    async fn copy(&self, received: &Received) -> Result<(), BlobError> {
        let Some(peers) = self.peers.get().filter(|peers| peers.has_others()) else {
            return Ok(());
        };
        for node in takers(peers, &received.sha256) {
            let copied = self.copy_to(peers, node, &received.sha256);
            match tokio::time::timeout(COPY_WITHIN, copied).await {
                Ok(Ok(())) => return Ok(()),
                Ok(Err(error)) => tracing::info!(%node, %error, "a copy was not taken"),
                Err(_) => tracing::info!(%node, "a copy took too long"),
            }
        }
        Err(BlobError::NoCopy)
    }

    /// The nodes that should have a blob, the same from wherever one looks.
    fn holders(&self, peers: &NodePeers, sha256: &str) -> Vec<NodeId> {
        let mut all = peers.others();
        all.push(peers.ledger.node_id());
        all.retain(|node| peers.stays(*node));
        let mut all = ranked(all, sha256);
        all.truncate(HOLDERS);
        all
    }

    /// Whether a node has a blob, by its own word or since it was told lately.
    async fn has(&self, peers: &NodePeers, node: NodeId, sha256: &str) -> bool {
        {
            let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            let nodes = peers.others();
            if known.nodes != nodes {
                *known = Known { nodes, ..Known::default() };
            }
            if known.holders.get(sha256).is_some_and(|holders| holders.contains(&node)) {
                return true;
            }
        }
        let path = format!("{BLOBS_PATH}{sha256}");
        let asked = peers.send_bare(node, Method::HEAD, &path);
        let has = match tokio::time::timeout(ANSWER_WITHIN, asked).await {
            Ok(Ok(answer)) => answer.status() == StatusCode::OK,
            Ok(Err(_)) | Err(_) => false,
        };
        if has {
            self.note(node, sha256);
        }
        has
    }

    fn note(&self, node: NodeId, sha256: &str) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.holders.entry(sha256.to_owned()).or_default().insert(node);
    }

    /// Gives a copy to every node that should have one and has none; how many still have none.
    async fn spread(&self, peers: &NodePeers, sha256: &str) -> u64 {
        let mut missing = 0;
        for node in self.holders(peers, sha256) {
            if node == peers.ledger.node_id() || self.has(peers, node, sha256).await {
                continue;
            }
            match tokio::time::timeout(COPY_WITHIN, self.copy_to(peers, node, sha256)).await {
                Ok(Ok(())) => self.note(node, sha256),
                Ok(Err(error)) => {
                    tracing::info!(%node, %error, "a copy was not taken");
                    missing += 1;
                }
                Err(_) => missing += 1,
            }
        }
        missing
    }

    async fn copy_to(&self, peers: &NodePeers, node: NodeId, sha256: &str) -> io::Result<()> {
        let bytes = self.stream(sha256).await?.ok_or(io::ErrorKind::NotFound)?;
        let body = BodyExt::boxed(StreamBody::new(bytes.map_ok(Frame::data)));
        let request = Request::put(format!("https://peer{BLOBS_PATH}{sha256}"))
            .body(body)
            .map_err(io::Error::other)?;
        let response = peers.send_bulk(node, request).await.map_err(io::Error::other)?;
        match response.status() {
            StatusCode::OK => Ok(()),
            other => Err(io::Error::other(format!("status {other}"))),
        }
    }

    /// A blob of this node, piece by piece.
    pub async fn stream(
        &self,
        sha256: &str,
    ) -> io::Result<Option<impl futures::Stream<Item = io::Result<Bytes>> + Send + Sync + use<>>>
    {
        pieces(&self.local.path(sha256)).await
    }
}

/// The other nodes in the order in which they are asked to take a copy of something of this name.
pub fn takers(peers: &NodePeers, name: &str) -> Vec<NodeId> {
    let mut others = ranked(peers.others(), name);
    // Who is on its way out would have to hand it on.
    others.sort_by_key(|node| !peers.stays(*node));
    others
}

/// Nodes in the order in which they are to have something of this name (rendezvous hashing).
fn ranked(mut nodes: Vec<NodeId>, name: &str) -> Vec<NodeId> {
    nodes.sort_by_cached_key(|node| -> [u8; 32] {
        Sha256::new().chain_update(name).chain_update(node.0.to_be_bytes()).finalize().into()
    });
    nodes
}

/// A file, piece by piece; `None` if it is not there.
pub async fn pieces(
    path: &std::path::Path,
) -> io::Result<Option<impl futures::Stream<Item = io::Result<Bytes>> + Send + Sync + use<>>> {
    let file = match tokio::fs::File::open(path).await {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    Ok(Some(stream::try_unfold(file, |mut file| async move {
        let mut piece = Vec::with_capacity(PIECE_BYTES);
        let read = (&mut file).take(PIECE_BYTES as u64).read_to_end(&mut piece).await?;
        Ok((read > 0).then(|| (Bytes::from(piece), file)))
    })))
}

impl Blobs for CopiedBlobs {
    fn receive(&self, bytes: ByteStream, max: u64) -> BoxFuture<'_, Result<Received, BlobError>> {
        async move {
            let received = self.local.receive(bytes, max).await?;
            self.copy(&received).await?;
            Ok(received)
        }
        .boxed()
    }

    fn read(&self, sha256: &str) -> BoxFuture<'_, io::Result<Option<Bytes>>> {
        let sha256 = sha256.to_owned();
        async move {
            if !self.fetch_whole(&sha256).await? {
                return Ok(None);
            }
            self.local.read(&sha256).await
        }
        .boxed()
    }

    fn touch(&self, sha256: &str) -> BoxFuture<'_, bool> {
        let sha256 = sha256.to_owned();
        async move { self.fetch(&sha256).await && self.local.touch(&sha256).await }.boxed()
    }

    fn keep_copies(&self, needed: BTreeSet<String>) -> BoxFuture<'_, u64> {
        async move {
            let Some(peers) = self.peers.get().filter(|peers| peers.has_others()) else { return 0 };
            let mut missing = 0;
            for sha256 in needed {
                if self.local.path(&sha256).exists() {
                    missing += self.spread(peers, &sha256).await;
                }
            }
            missing
        }
        .boxed()
    }

    fn sweep(&self, needed: BTreeSet<String>, grace: Duration) -> BoxFuture<'_, u64> {
        self.local.sweep(needed, grace)
    }
}
