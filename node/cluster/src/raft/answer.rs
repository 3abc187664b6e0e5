//! What a group answers its peers.

use std::{io, sync::Arc};

use bytes::Bytes;
use domain::machine::Machine;
use futures::{FutureExt as _, StreamExt as _, future::BoxFuture};
use http::StatusCode;
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use openraft::{raft::AppendEntriesResponse, storage::Snapshot};
use serde::{Serialize, de::DeserializeOwned};

use super::{
    arrival,
    group::{Export, Group},
    network::{SnapshotHead, pack, unpack},
    state::StateSnapshot,
};

/// An answer, or the status that says why not.
pub type Answered = Result<Bytes, StatusCode>;

/// A group, whichever machine it is for.
pub trait AnyGroup: Send + Sync {
    /// A message of Raft.
    fn message(self: Arc<Self>, verb: String, body: Bytes) -> BoxFuture<'static, Answered>;
    /// A snapshot.
    fn install(self: Arc<Self>, body: Incoming) -> BoxFuture<'static, Answered>;
    /// Entries to agree on.
    fn entries(self: Arc<Self>, proposals: Bytes) -> BoxFuture<'static, Answered>;
    /// Up to where a read must wait.
    fn read_point(self: Arc<Self>) -> BoxFuture<'static, Answered>;
    /// The tables of this node's replica.
    fn export(self: Arc<Self>) -> BoxFuture<'static, io::Result<Export>>;
    /// Whether this node has a replica.
    fn is_here(&self) -> bool;
}

fn read<T: DeserializeOwned>(body: &[u8]) -> Result<T, StatusCode> {
    unpack(body).map_err(|_| StatusCode::BAD_REQUEST)
}

fn said<T: Serialize, E: std::fmt::Display>(answer: Result<T, E>) -> Answered {
    match answer {
        Ok(answer) => Ok(pack(&answer)),
        Err(error) => {
            tracing::debug!(%error, "a message of a peer could not be answered");
            Err(StatusCode::SERVICE_UNAVAILABLE)
        }
    }
}

impl<M: Machine> AnyGroup for Group<M> {
    fn message(self: Arc<Self>, verb: String, body: Bytes) -> BoxFuture<'static, Answered> {
        async move {
            match verb.as_str() {
                "append" => {
                    let answer = self.raft.append_entries(read(&body)?).await;
                    if answer.as_ref().is_ok_and(AppendEntriesResponse::is_success) {
                        self.hear();
                    }
                    said(answer)
                }
                "vote" => said(self.raft.vote(read(&body)?).await),
                "pre-vote" => said(self.raft.pre_vote(read(&body)?).await),
                "transfer" => said(self.raft.handle_transfer_leader(read(&body)?).await),
                _ => Err(StatusCode::NOT_FOUND),
            }
        }
        .boxed()
    }

    fn install(self: Arc<Self>, body: Incoming) -> BoxFuture<'static, Answered> {
        async move {
            let parts = body.into_data_stream();
            let parts = parts.map(|part| part.map_err(io::Error::other)).boxed();
            let arrived = arrival::take(&self.shared.state, self.number, parts).await;
            let (head, rows) = arrived.map_err(|error| {
                tracing::warn!(%error, group = self.number, "a snapshot did not arrive");
                StatusCode::BAD_REQUEST
            })?;
            let SnapshotHead { vote, meta } = read(&head)?;
            tracing::info!(group = self.number, bytes = rows.bytes(), "a snapshot has arrived");
            let snapshot = Snapshot { meta, snapshot: StateSnapshot::arrived(rows) };
            said(self.raft.install_full_snapshot(vote, snapshot).await)
        }
        .boxed()
    }

    fn entries(self: Arc<Self>, proposals: Bytes) -> BoxFuture<'static, Answered> {
        async move { Ok(pack(&self.answer_propose(read(&proposals)?).await)) }.boxed()
    }

    fn read_point(self: Arc<Self>) -> BoxFuture<'static, Answered> {
        async move { Ok(pack(&self.answer_read().await)) }.boxed()
    }

    fn export(self: Arc<Self>) -> BoxFuture<'static, io::Result<Export>> {
        async move { Group::export(&self).await }.boxed()
    }

    fn is_here(&self) -> bool {
        self.is_member()
    }
}
