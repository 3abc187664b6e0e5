//! Uploads: announce, receive, remove.

use domain::{
    UploadId,
    directory::{Command, Reply},
    idempotency::Keyed,
    upload::Upload,
};

use super::{Answered, Service, ServiceError};
use crate::ports::ByteStream;

/// Largest archive (`decisions` §8).
pub const ARCHIVE_BYTES_MAX: u64 = 250 * 1024 * 1024;

impl Service {
    /// Announces an upload.
    pub async fn create_upload(
        &self,
        upload: Upload,
        key: Option<Keyed>,
    ) -> Result<Answered<Upload>, ServiceError> {
        let id = upload.id;
        let answer = self.change(Command::CreateUpload(Box::new(upload)), key).await?;
        Ok(Answered { value: uploaded(id, answer.value)?, replayed: answer.replayed })
    }

    /// Takes an upload whose bytes come with it; durable on return. If they are refused there is no upload.
    pub async fn take_upload(
        &self,
        upload: Upload,
        bytes: ByteStream,
    ) -> Result<Upload, ServiceError> {
        let received = self.world.ports.blobs.receive(bytes, ARCHIVE_BYTES_MAX).await?;
        let upload = Upload { received: Some(received), ..upload };
        Ok(self.create_upload(upload, None).await?.value)
    }

    /// Takes the bytes of an announced upload; durable on return.
    pub async fn receive_upload(
        &self,
        id: UploadId,
        bytes: ByteStream,
    ) -> Result<Upload, ServiceError> {
        let known = self.directory().await?.read().uploads.get(&id);
        let known = known.ok_or(domain::Rejection::UploadNotFound(id))?;
        let max = known.size_bytes.map_or(ARCHIVE_BYTES_MAX, |size| size.min(ARCHIVE_BYTES_MAX));
        let received = match self.world.ports.blobs.receive(bytes, max).await {
            // More than announced is another archive than announced.
            Err(crate::ports::BlobError::TooLarge(most)) if most < ARCHIVE_BYTES_MAX => {
                return Err(domain::Rejection::UploadCorrupt.into());
            }
            received => received?,
        };
        let answer = self.change(Command::ReceiveUpload { id, received }, None).await?;
        uploaded(id, answer.value)
    }
}

fn uploaded(id: UploadId, reply: Reply) -> Result<Upload, ServiceError> {
    let Reply::Upload(upload) = reply else {
        return Err(domain::Rejection::UploadNotFound(id).into());
    };
    Ok(*upload)
}
