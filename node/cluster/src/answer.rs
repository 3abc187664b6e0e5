//! The peer port's answers: Raft's messages, entries and reads of other nodes go to their group;
//! everything else is the node's own.

use std::sync::{Arc, OnceLock};

use actors::ports::Ledger as _;
use bytes::Bytes;
use domain::node::NodeStatus;
use futures::{FutureExt as _, StreamExt as _, future::BoxFuture};
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Limited, StreamBody};
use hyper::body::{Frame, Incoming};

use crate::{
    ledger::RaftLedger,
    peer::{
        PeerBody,
        exchange::{self, EXCHANGE_PATH},
        server::{Answerer, Standing, status},
        whole,
    },
    raft::{answer::AnyGroup, network::pack},
};

/// Where a group's tables are; its number follows.
pub const EXPORT_PATH: &str = "/export/";
/// What a snapshot's path ends with.
const SNAPSHOT: &str = "/snapshot";

/// Longest message between groups: a full batch of the longest entries.
const MESSAGE_BYTES_MAX: usize = 160 * 1024 * 1024;

/// What the node itself answers.
pub trait Host: Send + Sync + 'static {
    /// A request of another node.
    fn answer(
        self: Arc<Self>,
        from: u64,
        request: Request<Incoming>,
    ) -> BoxFuture<'static, Response<PeerBody>>;
    /// What is measured on this node.
    fn metrics(&self) -> Response<PeerBody>;
    /// A request of a stranger that would join.
    fn join(self: Arc<Self>, request: Request<Incoming>) -> BoxFuture<'static, Response<PeerBody>>;
}

/// The peer port of a node.
pub struct PeerPort {
    ledger: Arc<RaftLedger>,
    host: OnceLock<Arc<dyn Host>>,
}

impl PeerPort {
    /// In front of these groups.
    pub fn new(ledger: Arc<RaftLedger>) -> Arc<Self> {
        Arc::new(Self { ledger, host: OnceLock::new() })
    }

    /// From now on the node answers too.
    pub fn open(&self, host: Arc<dyn Host>) {
        let _ = self.host.set(host);
    }

    /// The tables of a group for a backup that another node makes.
    async fn export(&self, number: &str) -> Response<PeerBody> {
        let group = number.parse().ok().and_then(|number| self.ledger.any_group(number));
        let Some(group) = group.filter(|group| group.is_here()) else {
            return status(StatusCode::NOT_FOUND);
        };
        match group.export().await {
            Ok(export) => {
                let head = pack(&(export.term, export.index));
                let parts = export.rows.stream(head).map(|part| part.map(Frame::data));
                Response::new(http_body_util::BodyExt::boxed(StreamBody::new(parts)))
            }
            Err(error) => {
                tracing::info!(%error, "a group can't be backed up from here");
                status(StatusCode::SERVICE_UNAVAILABLE)
            }
        }
    }

    async fn groups(&self, request: Request<Incoming>) -> Result<Bytes, StatusCode> {
        let path = request.uri().path().to_owned();
        if let Some(number) =
            path.strip_prefix("/raft/").and_then(|rest| rest.strip_suffix(SNAPSHOT))
        {
            return self.group(number)?.install(request.into_body()).await;
        }
        let body = Limited::new(request.into_body(), MESSAGE_BYTES_MAX).collect().await;
        let body = body.map_err(|_| StatusCode::BAD_REQUEST)?.to_bytes();
        self.message(&path, body).await
    }

    /// What a group answers to a message, be it a request of its own or part of an exchange.
    async fn message(&self, path: &str, body: Bytes) -> Result<Bytes, StatusCode> {
        let mut parts = path.split('/').skip(1);
        let plane = parts.next().unwrap_or_default();
        let group = self.group(parts.next().unwrap_or_default())?;
        match (plane, parts.next()) {
            ("raft", Some(verb)) => group.message(verb.to_owned(), body).await,
            ("propose", None) => group.entries(body).await,
            ("read", None) => group.read_point().await,
            _ => Err(StatusCode::NOT_FOUND),
        }
    }

    fn group(&self, number: &str) -> Result<Arc<dyn AnyGroup>, StatusCode> {
        let group = number.parse().ok().and_then(|number| self.ledger.any_group(number));
        group.ok_or(StatusCode::NOT_FOUND)
    }

    /// What groups of another node say all the time. Whether it still belongs is looked at for each message.
    fn exchange(self: Arc<Self>, from: u64, request: Request<Incoming>) -> Response<PeerBody> {
        Response::new(exchange::attend(request.into_body(), move |path, body| {
            let port = Arc::clone(&self);
            async move {
                match port.standing(from) {
                    Standing::Member => port.message(&path, body).await,
                    Standing::Leaving => Err(StatusCode::UNAUTHORIZED),
                    Standing::Gone => Err(StatusCode::GONE),
                }
            }
        }))
    }
}

impl Answerer for PeerPort {
    /// A node that knows nobody yet believes the certificate alone.
    fn standing(&self, raft_id: u64) -> Standing {
        let is_out = {
            let directory = self.ledger.directory().read();
            let known = directory.node_by_raft_id(raft_id);
            known.is_some_and(|node| node.status == NodeStatus::Removed)
        };
        match is_out {
            false => Standing::Member,
            true if self.ledger.counts_on(raft_id) => Standing::Leaving,
            true => Standing::Gone,
        }
    }

    fn answer(
        self: Arc<Self>,
        from: u64,
        request: Request<Incoming>,
    ) -> BoxFuture<'static, Response<PeerBody>> {
        async move {
            let path = request.uri().path();
            if path == EXCHANGE_PATH {
                return self.exchange(from, request);
            }
            if let Some(number) = path.strip_prefix(EXPORT_PATH) {
                return self.export(number).await;
            }
            let is_groups = ["/raft/", "/propose/", "/read/"];
            if is_groups.iter().any(|plane| path.starts_with(plane)) {
                return match self.groups(request).await {
                    Ok(bytes) => Response::new(whole(bytes)),
                    Err(code) => status(code),
                };
            }
            match self.host.get() {
                Some(host) => Arc::clone(host).answer(from, request).await,
                None => status(StatusCode::SERVICE_UNAVAILABLE),
            }
        }
        .boxed()
    }

    fn metrics(&self) -> Response<PeerBody> {
        let host = self.host.get();
        host.map_or_else(|| status(StatusCode::SERVICE_UNAVAILABLE), |host| host.metrics())
    }

    fn join(self: Arc<Self>, request: Request<Incoming>) -> BoxFuture<'static, Response<PeerBody>> {
        async move {
            match self.host.get() {
                Some(host) => Arc::clone(host).join(request).await,
                None => status(StatusCode::SERVICE_UNAVAILABLE),
            }
        }
        .boxed()
    }
}
