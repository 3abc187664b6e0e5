//! The other nodes, as actors see them: their ids become Raft numbers and addresses here.

use std::{io, sync::Arc, time::Duration};

use actors::ports::{ByteStream, Ledger as _, PeerError, PeerRequest, PeerResponse, Peers};
use bytes::Bytes;
use cluster::{
    RaftLedger,
    gossip::Alive,
    peer::{
        Class,
        client::{CallError, PeerClient},
    },
};
use domain::{NodeId, node::NodeStatus};
use futures::{FutureExt as _, StreamExt as _, TryStreamExt as _, future::BoxFuture};
use http::{Method, Request, StatusCode};
use http_body_util::BodyExt as _;

use crate::host::{OPERATE_PATH, Operation};

/// How long another node may take to do what an operator wants of all.
const OPERATED_WITHIN: Duration = Duration::from_secs(10);
/// How long another node may take to keep copies.
const KEPT_WITHIN: Duration = Duration::from_secs(5);
/// Where actors of other nodes are asked.
pub const ASK_PATH: &str = "/ask";

/// The way to other nodes.
pub struct NodePeers {
    /// The connections.
    pub client: Arc<PeerClient>,
    /// Who belongs.
    pub ledger: Arc<RaftLedger>,
    /// Who answers.
    pub alive: Arc<Alive>,
}

impl NodePeers {
    fn number(&self, node: NodeId) -> Result<u64, PeerError> {
        let number = self.ledger.number(node);
        number.ok_or_else(|| PeerError::Unreached("it does not belong to the cluster".to_owned()))
    }

    /// The other members that answer.
    pub fn others(&self) -> Vec<NodeId> {
        let members = self.ledger.numbers().into_iter();
        let others =
            members.filter(|(id, number)| *id != self.ledger.node_id() && self.alive.has(*number));
        others.map(|(id, _)| id).collect()
    }

    /// Whether a node is to stay: it is no member that drains or is taken for dead.
    pub fn stays(&self, node: NodeId) -> bool {
        let known = self.ledger.directory().read().nodes.get(&node);
        known.is_some_and(|node| node.status == NodeStatus::Active)
    }

    /// Whether there are other members, be they silent.
    pub fn has_others(&self) -> bool {
        self.ledger.numbers().keys().any(|id| *id != self.ledger.node_id())
    }

    /// The bytes that a node has under this path of its peer port; `None` if it has none.
    pub async fn fetch(&self, node: NodeId, path: &str) -> io::Result<Option<ByteStream>> {
        let response = self.send_bare(node, Method::GET, path).await?;
        let found = response.status() == StatusCode::OK;
        let bytes = response.into_body().into_data_stream().map_err(io::Error::other);
        Ok(found.then(|| bytes.boxed()))
    }

    /// Asks another node as an operator would.
    pub async fn operate(&self, node: NodeId, operation: &Operation) -> Result<Bytes, PeerError> {
        let question = Bytes::from(serde_json::to_vec(operation).unwrap_or_default());
        self.call(node, Class::Calls, OPERATE_PATH, question, OPERATED_WITHIN).await
    }

    /// Gives a batch to another node, which keeps a copy.
    pub async fn keep(&self, node: NodeId, path: &str, batch: Bytes) -> Result<(), PeerError> {
        self.call(node, Class::Bulk, path, batch, KEPT_WITHIN).await.map(drop)
    }

    async fn call(
        &self,
        node: NodeId,
        class: Class,
        path: &str,
        question: Bytes,
        within: Duration,
    ) -> Result<Bytes, PeerError> {
        let number = self.number(node)?;
        let answer = self.client.call(number, class, path, question, within).await;
        answer.map_err(explained)
    }

    /// Sends a request without a body.
    pub async fn send_bare(
        &self,
        node: NodeId,
        method: Method,
        path: &str,
    ) -> io::Result<PeerResponse> {
        let request = Request::builder()
            .method(method)
            .uri(format!("https://peer{path}"))
            .body(cluster::peer::whole(Bytes::new()))
            .map_err(io::Error::other)?;
        self.send_bulk(node, request).await.map_err(io::Error::other)
    }

    /// Sends bulk.
    pub async fn send_bulk(
        &self,
        node: NodeId,
        request: PeerRequest,
    ) -> Result<PeerResponse, PeerError> {
        let number = self.number(node)?;
        self.client.send(number, Class::Bulk, request).await.map_err(explained)
    }
}

fn explained(error: CallError) -> PeerError {
    match error {
        CallError::Unreached(cause) => PeerError::Unreached(cause),
        CallError::Broken(cause) => PeerError::Broken(cause),
        CallError::Said(reason) => PeerError::Refused(reason),
        error @ (CallError::TakenOut | CallError::Refused(_)) => {
            PeerError::Refused(error.to_string())
        }
    }
}

impl Peers for NodePeers {
    fn is_alive(&self, node: NodeId) -> bool {
        self.number(node).is_ok_and(|number| self.alive.has(number))
    }

    fn ask(
        &self,
        node: NodeId,
        question: Bytes,
        within: Duration,
    ) -> BoxFuture<'_, Result<Bytes, PeerError>> {
        self.call(node, Class::Calls, ASK_PATH, question, within).boxed()
    }

    fn pass(
        &self,
        node: NodeId,
        request: PeerRequest,
    ) -> BoxFuture<'_, Result<PeerResponse, PeerError>> {
        async move {
            let number = self.number(node)?;
            self.client.send(number, Class::Calls, request).await.map_err(explained)
        }
        .boxed()
    }
}
