//! Uploads: archives that clients bring, kept by content.

use serde::{Deserialize, Serialize};

use crate::{
    Rejection, Timestamp, UploadId, account::Tenant, directory::Directory, event::DirectoryEvent,
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
