//! `/v1/cluster/snapshots`: backups of the whole cluster. Restoring is a command on a new machine: a
//! cluster that runs can't be given another past under its clients' feet.

use actors::ports::{SnapshotRecord, SnapshotStatus};
use domain::{Rejection, SnapshotId};
use http::StatusCode;
use poem::{Body, Request};
use poem_openapi::{
    ApiResponse, OpenApi,
    param::Path,
    payload::{Binary, Json},
};
use serde_json::json;

use crate::{
    Handle,
    body::snapshot::SnapshotBody,
    caller::Caller,
    envelope::{Deleted, Page, Success},
    error::{ApiError, Problem, path_id},
};

pub(crate) struct SnapshotsApi(pub(crate) Handle);

type Result<T> = std::result::Result<T, ApiError>;

/// A snapshot that was begun.
#[derive(ApiResponse)]
pub(crate) enum SnapshotCreated {
    /// The snapshot; look at `status`.
    #[oai(status = 201)]
    Created(Json<Success<SnapshotBody>>, #[oai(header = "Location")] String),
}

/// The file of a snapshot.
#[derive(ApiResponse)]
pub(crate) enum SnapshotArchive {
    /// What `roost cluster restore` takes.
    #[oai(status = 200, content_type = "application/octet-stream")]
    Archive(Binary<Body>, #[oai(header = "Content-Disposition")] String),
}

#[OpenApi(prefix_path = "/v1/cluster", tag = "crate::document::Tag::Cluster")]
impl SnapshotsApi {
    /// List the snapshots
    ///
    /// Of all nodes that answer, the newest first.
    #[oai(path = "/snapshots", method = "get", operation_id = "listSnapshots")]
    async fn list(&self, _caller: Caller) -> Result<Json<Success<Page<SnapshotBody>>>> {
        let all = self.0.service.world.ports.snapshots.list().await;
        let items = all.into_iter().map(SnapshotBody::from).collect();
        Ok(Json(Success::of(Page { items, has_more: false, next_cursor: None })))
    }

    /// Take a snapshot
    ///
    /// Everything that the cluster has agreed on, the uploads and long payloads that this
    /// names and the images of live versions, but not the keys: keep a copy of the folder
    /// `keys` of any node elsewhere. The node that answers makes and keeps it, one at a time.
    #[oai(path = "/snapshots", method = "post", operation_id = "createSnapshot")]
    async fn create(&self, _caller: Caller, request: &Request) -> Result<SnapshotCreated> {
        if request.headers().contains_key("idempotency-key") {
            let why = "is not taken here: look at GET /v1/cluster/snapshots before you ask again";
            return Err(Problem::field("Idempotency-Key", why).into());
        }
        let begun = self.0.service.world.ports.snapshots.begin().await;
        let record = begun.ok_or_else(|| {
            let message = "this node makes a snapshot already; wait until it is ready";
            Problem::new(StatusCode::CONFLICT, "INVALID_STATE", message)
                .with(json!({ "current": "creating" }))
        })?;
        let location = format!("/v1/cluster/snapshots/{}", record.id);
        Ok(SnapshotCreated::Created(Json(Success::of(record.into())), location))
    }

    /// Get a snapshot
    #[oai(path = "/snapshots/:id", method = "get", operation_id = "getSnapshot")]
    async fn get(
        &self,
        _caller: Caller,
        /// The snapshot.
        id: Path<String>,
    ) -> Result<Json<Success<SnapshotBody>>> {
        Ok(Json(Success::of(self.find(&id).await?.into())))
    }

    /// Download a snapshot
    ///
    /// The file that `roost cluster restore` takes.
    #[oai(path = "/snapshots/:id/archive", method = "get", operation_id = "getSnapshotArchive")]
    async fn archive(
        &self,
        _caller: Caller,
        /// The snapshot.
        id: Path<String>,
    ) -> Result<SnapshotArchive> {
        let record = self.find(&id).await?;
        if record.status != SnapshotStatus::Ready {
            return Err(Problem::from(not_in(&record, "ready")).into());
        }
        let (id, missing) = (record.id, not_found(record.id));
        let bytes = self.0.service.world.ports.snapshots.read(record).await.map_err(unreadable)?;
        let body = Body::from_bytes_stream(bytes.ok_or(missing)?);
        let name = format!("attachment; filename=\"{id}.backup\"");
        Ok(SnapshotArchive::Archive(Binary(body), name))
    }

    /// Delete a snapshot
    #[oai(path = "/snapshots/:id", method = "delete", operation_id = "deleteSnapshot")]
    async fn delete(
        &self,
        _caller: Caller,
        /// The snapshot.
        id: Path<String>,
    ) -> Result<Json<Success<Deleted>>> {
        let record = self.find(&id).await?;
        if record.status == SnapshotStatus::Creating {
            return Err(Problem::from(not_in(&record, "ready, failed")).into());
        }
        let id = record.id;
        let removed = self.0.service.world.ports.snapshots.remove(record).await;
        if !removed.map_err(unreadable)? {
            return Err(not_found(id).into());
        }
        Ok(Json(Success::of(Deleted::of(id))))
    }
}

impl SnapshotsApi {
    async fn find(&self, id: &str) -> std::result::Result<SnapshotRecord, Problem> {
        let id: SnapshotId = path_id("snapshot", id)?;
        let all = self.0.service.world.ports.snapshots.list().await;
        all.into_iter().find(|one| one.id == id).ok_or_else(|| not_found(id))
    }
}

fn not_found(id: SnapshotId) -> Problem {
    let message = "the snapshot does not exist, or the node that keeps it does not answer";
    let details = json!({ "snapshot_id": id });
    Problem::new(StatusCode::NOT_FOUND, "SNAPSHOT_NOT_FOUND", message).with(details)
}

fn not_in(record: &SnapshotRecord, allowed: &str) -> Rejection {
    Rejection::InvalidState {
        current: record.status.as_str().to_owned(),
        allowed: allowed.split(", ").map(str::to_owned).collect(),
    }
}

fn unreadable(error: std::io::Error) -> Problem {
    tracing::warn!(%error, "a snapshot could not be reached");
    let message = "the node that keeps the snapshot does not answer; retry in a moment";
    Problem::new(StatusCode::SERVICE_UNAVAILABLE, "OWNER_UNAVAILABLE", message).retry_after(1)
}
