//! The peer port's answers: Raft's messages, entries and reads of other nodes go to their group;
//! everything else is the node's own.

use std::sync::{Arc, OnceLock};

use actors::ports::Ledger as _;
use bytes::Bytes;
use domain::node::NodeStatus;
use futures::{FutureExt as _, future::BoxFuture};
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Limited};
use hyper::body::Incoming;

use crate::{
    ledger::RaftLedger,
    peer::{
        PeerBody,
        server::{Answerer, status},
        whole,
    },
    raft::answer::AnyGroup,
};

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

    async fn groups(&self, request: Request<Incoming>) -> Result<Bytes, StatusCode> {
        let path = request.uri().path().to_owned();
        let mut parts = path.split('/').skip(1);
        let (plane, number) = (parts.next().unwrap_or_default(), parts.next());
        let verb = parts.next().unwrap_or_default().to_owned();
        let group = number.and_then(|number| number.parse().ok());
        let group = group.and_then(|number| self.ledger.any_group(number));
        let group: Arc<dyn AnyGroup> = group.ok_or(StatusCode::NOT_FOUND)?;
        if plane == "raft" && verb == "snapshot" {
            return group.install(request.into_body()).await;
        }
        let body = Limited::new(request.into_body(), MESSAGE_BYTES_MAX).collect().await;
        let body = body.map_err(|_| StatusCode::BAD_REQUEST)?.to_bytes();
        match plane {
            "raft" => group.message(verb, body).await,
            "propose" => group.entry(body).await,
            "read" => group.read_point().await,
            _ => Err(StatusCode::NOT_FOUND),
        }
    }
}

impl Answerer for PeerPort {
    /// A node that knows nobody yet believes the certificate alone.
    fn belongs(&self, raft_id: u64) -> bool {
        let directory = self.ledger.directory().read();
        let removed = directory
            .node_by_raft_id(raft_id)
            .is_some_and(|node| node.status == NodeStatus::Removed);
        !removed
    }

    fn answer(
        self: Arc<Self>,
        from: u64,
        request: Request<Incoming>,
    ) -> BoxFuture<'static, Response<PeerBody>> {
        async move {
            let path = request.uri().path();
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
