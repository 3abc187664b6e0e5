//! Inputs and outputs of jobs: short ones travel in the log, long ones are blobs that it names.

use std::{collections::BTreeSet, sync::Arc};

use bytes::Bytes;
use domain::job::{PAYLOAD_BYTES_MAX, Payload};
use futures::{FutureExt as _, StreamExt as _};

use crate::{
    ask::{self, Ask, Told},
    ports::BlobError,
    world::World,
};

/// Why a payload can't be read.
#[derive(Debug, thiserror::Error)]
pub enum PayloadError {
    /// Its blob is not here.
    #[error("the stored bytes are gone")]
    Gone,
    /// The disk said no.
    #[error("the stored bytes could not be read")]
    Disk(#[from] std::io::Error),
    /// They are not what was stored.
    #[error("the stored bytes are not text")]
    NotText,
}

impl World {
    /// Keeps a text: durable on return where it became a blob.
    pub async fn keep(&self, text: String) -> Result<Payload, BlobError> {
        if text.len() <= PAYLOAD_BYTES_MAX {
            return Ok(Payload::Here(text));
        }
        let most = text.len() as u64;
        let bytes = futures::stream::once(async { Ok(Bytes::from(text)) }.boxed());
        let kept = self.ports.blobs.receive(bytes.boxed(), most).await?;
        Ok(Payload::Blob { sha256: kept.sha256, bytes: kept.size_bytes })
    }

    /// The text of a payload.
    pub async fn text(&self, payload: &Payload) -> Result<String, PayloadError> {
        match payload {
            Payload::Here(text) => Ok(text.clone()),
            Payload::Blob { sha256, .. } => {
                let bytes = self.ports.blobs.read(sha256).await?.ok_or(PayloadError::Gone)?;
                String::from_utf8(bytes.into()).map_err(|_| PayloadError::NotText)
            }
        }
    }

    /// Says that a payload will be needed by something new; whether it is still there.
    pub async fn touch(&self, payload: &Payload) -> bool {
        match payload {
            Payload::Here(_) => true,
            Payload::Blob { sha256, .. } => self.ports.blobs.touch(sha256).await,
        }
    }

    /// Removes blobs that nothing names any more, and uploads that nothing was made from.
    pub async fn sweep_storage(self: &Arc<Self>) {
        self.hold_images().await;
        let unused_since = self.now().minus(self.settings.unused_uploads_after);
        let unused = self.directory().read().unused_uploads(unused_since);
        if !unused.is_empty() {
            let command = domain::directory::Command::SweepUploads { unused_since };
            let _ = self.ask(command, None).await;
        }
        let Some(needed) = self.needed_blobs().await else {
            tracing::debug!("blobs are not swept: not every shard says what it needs");
            return;
        };
        let missing = self.ports.blobs.keep_copies(needed.clone()).await;
        if missing > 0 {
            tracing::warn!(missing, "blobs are not on as many nodes as they should be");
        }
        let removed = self.ports.blobs.sweep(needed, self.settings.unnamed_blobs_after).await;
        if removed > 0 {
            tracing::info!(removed, "blobs that nothing needed are gone");
        }
    }

    /// Before this node leaves: whether everything that is here and needed is on other nodes, too.
    pub async fn hand_over_blobs(self: &Arc<Self>) -> bool {
        let Some(needed) = self.needed_blobs().await else { return false };
        self.ports.blobs.keep_copies(needed).await == 0
    }

    /// Everything that anything needs; `None` if a shard could not be asked.
    pub async fn needed_blobs(self: &Arc<Self>) -> Option<BTreeSet<String>> {
        let mut needed = self.directory().read().blobs();
        for shard in 0..self.ports.ledger.shards() {
            let of_shard = match self.needed_blobs_of(shard).await {
                Some(here) => here,
                None => {
                    let ask = Ask::NeededBlobs { shard };
                    match self.ask_node(self.owner(shard)?, ask, ask::ANSWER_WITHIN * 6).await {
                        Ok(Told::Blobs(there)) => there,
                        Ok(_) | Err(_) => return None,
                    }
                }
            };
            needed.extend(of_shard);
        }
        Some(needed)
    }

    /// What one shard needs, if this node has it.
    pub async fn needed_blobs_of(&self, shard: u16) -> Option<BTreeSet<String>> {
        let ledger = Arc::clone(&self.ports.ledger);
        if !ledger.has_shard(shard) || ledger.refresh_shard(shard).await.is_err() {
            return None;
        }
        // History is read from disk.
        let read = tokio::task::spawn_blocking(move || ledger.shard(shard).read().needed_blobs());
        Some(read.await.expect("reading rows does not panic"))
    }
}
