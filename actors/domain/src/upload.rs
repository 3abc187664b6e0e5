//! Uploads: archives that clients bring, kept by content.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::{
    Rejection, Timestamp, UploadId, account::Tenant, agent::Source, directory::Directory,
    event::DirectoryEvent,
};

/// What arrived.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Received {
    /// Its length.
    pub size_bytes: u64,
    /// SHA-256, lower-case hexadecimal: the name of the blob.
    pub sha256: String,
}

/// An archive, announced or received.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Upload {
    /// Its id.
    pub id: UploadId,
    /// Whose it is.
    pub tenant: Tenant,
    /// The client's name for it.
    pub filename: String,
    /// The announced size, if any.
    pub size_bytes: Option<u64>,
    /// The announced type, if any.
    pub content_type: Option<String>,
    /// The announced SHA-256, if any.
    pub sha256: Option<String>,
    /// What arrived; `None` while pending.
    pub received: Option<Received>,
    /// When it was announced.
    pub created_at: Timestamp,
    /// Until when its URLs work.
    pub expires_at: Timestamp,
}

/// Uploads removed by one sweep at most.
const SWEPT_AT_ONCE: usize = 100;

impl Directory {
    /// Uploads from before `since` that no agent, deployment or version was made from.
    pub fn unused_uploads(&self, since: Timestamp) -> Vec<UploadId> {
        let old = self.uploads.rows().filter(|(_, upload)| upload.created_at < since);
        let mut old: BTreeSet<UploadId> = old.map(|(id, _)| *id).collect();
        if old.is_empty() {
            return vec![];
        }
        for source in self.sources() {
            if let Source::Upload { upload_id, .. } = source {
                old.remove(&upload_id);
            }
        }
        old.into_iter().take(SWEPT_AT_ONCE).collect()
    }

    /// Every source that something was or may be built from.
    fn sources(&self) -> impl Iterator<Item = Source> {
        let agents = self.agents.rows().map(|(_, row)| row.spec.source.clone());
        let deployments = self.deployments.rows().map(|(_, row)| row.spec.source.clone());
        let versions = self.versions.rows().map(|(_, row)| row.spec.source.clone());
        agents.chain(deployments).chain(versions)
    }

    /// The blobs that uploads and sources need.
    pub fn blobs(&self) -> BTreeSet<String> {
        let received = self.uploads.rows().filter_map(|(_, upload)| upload.received.clone());
        let archives = self.sources().filter_map(|source| match source {
            Source::Upload { sha256, .. } => Some(sha256),
            Source::Github { .. } | Source::Docker { .. } => None,
        });
        received.map(|received| received.sha256).chain(archives).collect()
    }
}

pub(crate) fn sweep(state: &Directory, unused_since: Timestamp) -> Vec<DirectoryEvent> {
    state.unused_uploads(unused_since).into_iter().map(DirectoryEvent::UploadGone).collect()
}

pub(crate) fn receive(
    state: &Directory,
    id: UploadId,
    received: &Received,
) -> Result<Vec<DirectoryEvent>, Rejection> {
    let upload = state.uploads.get(&id).ok_or(Rejection::UploadNotFound(id))?;
    if let Some(before) = &upload.received {
        // The same bytes twice are one upload; other bytes under one URL are not.
        return if before == received { Ok(vec![]) } else { Err(Rejection::UploadCorrupt) };
    }
    let size_differs = upload.size_bytes.is_some_and(|size| size != received.size_bytes);
    let hash_differs = upload.sha256.as_ref().is_some_and(|hash| *hash != received.sha256);
    if size_differs || hash_differs {
        return Err(Rejection::UploadCorrupt);
    }
    let mut upload = Upload::clone(&upload);
    upload.received = Some(received.clone());
    Ok(vec![DirectoryEvent::UploadPut(Box::new(upload))])
}
