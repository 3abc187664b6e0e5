//! Backups of the cluster, as operators see them.

use actors::ports::SnapshotRecord;
use poem_openapi::Object;

/// A snapshot.
#[derive(Clone, Debug, Object)]
pub struct SnapshotBody {
    /// Its id.
    pub id: String,
    /// `creating`, `ready` or `failed`.
    pub status: String,
    /// The node that made it and keeps it.
    pub node_id: String,
    /// When it was asked for.
    pub created_at: String,
    /// The release that made it.
    pub version: String,
    /// Its size, once it is ready.
    pub bytes: Option<u64>,
    /// SHA-256 of the file, once it is ready.
    pub sha256: Option<String>,
    /// Uploads and long payloads in it.
    pub blobs: u64,
    /// Built images in it.
    pub images: u64,
    /// What should be in it and was on no node that answered.
    pub missing: Vec<String>,
    /// Why it failed.
    pub error: Option<String>,
}

impl From<SnapshotRecord> for SnapshotBody {
    fn from(record: SnapshotRecord) -> Self {
        Self {
            id: record.id.to_string(),
            status: record.status.as_str().to_owned(),
            node_id: record.node_id.to_string(),
            created_at: record.created_at.to_string(),
            version: record.version,
            bytes: record.sha256.is_some().then_some(record.bytes),
            sha256: record.sha256,
            blobs: record.blobs,
            images: record.images,
            missing: record.missing,
            error: record.error,
        }
    }
}
