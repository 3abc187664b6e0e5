//! Uploads on the wire.

use std::collections::BTreeMap;

use actors::call::uploads::ARCHIVE_BYTES_MAX;
use domain::upload::Upload;
use poem_openapi::Object;

/// Announce an upload.
#[derive(Clone, Debug, Object)]
pub struct CreateUpload {
    /// Your name for it.
    #[oai(validator(min_length = 1, max_length = 255))]
    pub filename: String,
    /// Its length; the upload is refused if it differs.
    #[oai(validator(minimum(value = "1"), maximum(value = "262144000")))]
    pub size_bytes: Option<u64>,
    /// Its type.
    #[oai(validator(max_length = 255))]
    pub content_type: Option<String>,
    /// Its SHA-256 in lower-case hexadecimal; the upload is refused if it differs.
    #[oai(validator(max_length = 64, pattern = "^[0-9a-f]{64}$"))]
    pub sha256: Option<String>,
}

/// An upload.
#[derive(Clone, Debug, Object)]
pub struct UploadBody {
    /// Its id.
    pub id: String,
    /// `pending` or `ready`.
    pub status: String,
    /// Your name for it.
    pub filename: String,
    /// Send the bytes there; needs no key.
    pub upload_url: String,
    /// How to send them.
    pub method: String,
    /// Headers to send with them.
    pub headers: BTreeMap<String, String>,
    /// Give it as `source.archive_url`.
    pub archive_url: String,
    /// The most bytes.
    pub max_bytes: u64,
    /// Until when the addresses work.
    pub expires_at: String,
    /// Its length, once received.
    pub size_bytes: Option<u64>,
    /// Its SHA-256, once received.
    pub sha256: Option<String>,
    /// When it was announced.
    pub created_at: String,
    /// Live or test.
    pub livemode: bool,
}

impl UploadBody {
    /// An upload with its signed addresses.
    pub fn of(upload: &Upload, upload_url: String, archive_url: String) -> Self {
        let received = upload.received.as_ref();
        Self {
            id: upload.id.to_string(),
            status: if received.is_some() { "ready" } else { "pending" }.to_owned(),
            filename: upload.filename.clone(),
            upload_url,
            method: "PUT".to_owned(),
            headers: BTreeMap::new(),
            archive_url,
            max_bytes: ARCHIVE_BYTES_MAX,
            expires_at: upload.expires_at.to_string(),
            size_bytes: received.map(|received| received.size_bytes),
            sha256: received.map(|received| received.sha256.clone()),
            created_at: upload.created_at.to_string(),
            livemode: upload.tenant.mode.is_live(),
        }
    }
}
