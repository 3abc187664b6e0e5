//! What a node answers on its peer port beside Raft: nodes that would join, calls of other nodes'
//! actors, and the operator's commands, which come with the certificate of a node's own folder.

use std::{sync::Arc, time::Duration};

use actors::{
    ask::Told,
    invocation::{CallError, INSTANCES_PATH, REFUSED_HEADER},
    ports::{Blobs as _, Clock as _, Ledger as _, LogLine, failure_tolerance},
    route::Slot,
    seal::Sealer,
    world::World,
};
use bytes::Bytes;
use cluster::{
    RaftLedger,
    answer::Host,
    gossip::Alive,
    peer::{PeerBody, client::FROM, server::status, whole},
};
use domain::{
    NodeId, Rejection, SnapshotId,
    data_key::OF_CLUSTER,
    directory::Command,
    machine::Entry,
    node::{NodeStatus, ZONE_LABEL},
};
use futures::{FutureExt as _, StreamExt as _, TryStreamExt as _, future::BoxFuture};
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Limited, StreamBody};
use hyper::body::{Frame, Incoming};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Value, json};

use crate::{
    adapters::{
        authority::Authority,
        carry::{IMAGES_PATH, ImageStream},
        copies::{BLOBS_PATH, CopiedBlobs},
        courier::{BATCH_BYTES_MAX, Batch, Carried},
        local::LocalRuntime,
        log_copies::CopiedLogs,
        metrics::{self, Metrics},
        peers::ASK_PATH,
        series_copies::{ClosedBucket, CopiedSeries},
        snapshots::{Backups, SNAPSHOTS_PATH},
        system::{SystemClock, SystemDice, random_bytes},
        view::NodeView,
    },
    bootstrap, hex,
    join::{JoinReply, JoinRequest, Token},
    keys::Keys,
    masters::{self, Masters},
    steward::GOSSIP_KEY_PLACE,
};

/// Longest request of an operator or of a node that joins.
const REQUEST_BYTES_MAX: usize = 64 * 1024;
/// Longest question of another node's actors: a job's attempt with its headers and notes.
const ASK_BYTES_MAX: usize = 16 * 1024 * 1024;
/// Longest input of a call that is passed on, with what is around it.
const INPUT_BYTES_MAX: usize = 128 * 1024 * 1024;
/// Where operators ask.
pub const OPERATE_PATH: &str = "/operate";

/// What an operator may ask of a node.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Operation {
    /// A token for one join.
    Token,
    /// What the cluster looks like from this node.
    Status,
    /// All nodes.
    Nodes,
    /// All replicated groups.
    Shards,
    /// Begins a backup.
    Backup,
    /// How far a backup is.
    BackupState(SnapshotId),
    /// Another key for gossip.
    RotateGossipKey,
    /// Another master key.
    RotateMasterKey,
    /// There will be this master key: keep it, or say that it is here already.
    LearnMasterKey(masters::Told),
    /// Another key for access tokens.
    RotateSigningKey,
    /// A node drains: this one, if none is named.
    Drain {
        /// Which node.
        node: Option<NodeId>,
        /// How long instances have to find room elsewhere.
        within: Duration,
    },
    /// Something else is wanted of a node: of this one, if none is named.
    Set {
        /// Which node.
        node: Option<NodeId>,
        /// What is wanted.
        to: NodeStatus,
    },
}

/// The host of one node.
pub struct NodeHost {
    /// Everything that actors reach for.
    pub world: Arc<World>,
    /// What is agreed.
    pub ledger: Arc<RaftLedger>,
    /// What runs agents here.
    pub runtime: Arc<LocalRuntime>,
    /// Bulk of this node.
    pub blobs: Arc<CopiedBlobs>,
    /// Logs of this node, and copies of others'.
    pub logs: Arc<CopiedLogs>,
    /// What this node counted, and copies of what others did.
    pub series: Arc<CopiedSeries>,
    /// What is measured.
    pub metrics: Metrics,
    /// What operators see.
    pub view: Arc<NodeView>,
    /// Backups of this node.
    pub backups: Arc<Backups>,
    /// Who answers.
    pub alive: Arc<Alive>,
    /// What every member must know.
    pub keys: Keys,
    /// The master keys of this node.
    pub masters: Arc<Masters>,
    /// Who signs.
    pub authority: Authority,
    /// How many shards there are.
    pub shards: u16,
}

impl NodeHost {
    async fn change(&self, command: Command) -> Result<(), String> {
        let entry = Entry::new(SystemClock.now(), command);
        let answer = self.ledger.change_directory(entry).await;
        answer.map_err(|error| error.to_string())?.result.map_err(|reason| reason.to_string())?;
        Ok(())
    }

    /// A new token; the directory keeps its hash.
    async fn token(&self) -> Result<Value, String> {
        let made =
            self.world.ports.cluster.mint_token().await.map_err(|error| error.to_string())?;
        let expires_at = made.expires_at.to_string();
        Ok(json!({ "token": made.token, "address": made.address, "expires_at": expires_at }))
    }

    async fn redeem(&self, request: JoinRequest) -> Result<JoinReply, String> {
        let hash = Token::hash_of(&request.secret)
            .ok_or_else(|| Rejection::JoinTokenInvalid.to_string())?;
        let facts = Box::new(request.facts);
        self.change(Command::RedeemJoinToken { hash, facts }).await?;
        let members = {
            let directory = self.world.directory().read();
            let members = directory.nodes.rows().filter(|(_, node)| node.is_member());
            let address =
                |node: &domain::node::Node| (node.facts.raft_id, node.facts.peer_address.clone());
            members.map(|(_, node)| address(node)).collect()
        };
        let masters = self.masters.told(&self.world.keychain);
        Ok(JoinReply::new(&self.authority, &self.keys, &masters, self.shards, members))
    }

    async fn operate(&self, operation: Operation) -> Result<Value, String> {
        match operation {
            Operation::Token => self.token().await,
            Operation::Status => Ok(self.status()),
            Operation::Nodes => Ok(self.nodes()),
            Operation::Shards => Ok(self.groups()),
            Operation::Backup => match self.backups.begin_here() {
                Some(record) => self.backup_state(record.id),
                None => Err("a backup is being made here already".to_owned()),
            },
            Operation::BackupState(id) => self.backup_state(id),
            Operation::RotateMasterKey => masters::rotate(self).await,
            Operation::LearnMasterKey(told) => self.masters.learn(&self.world.keychain, &told),
            Operation::RotateSigningKey => self.rotate_signing_key().await,
            Operation::RotateGossipKey => self.rotate_gossip_key().await,
            Operation::Drain { node, within } => {
                self.drain(node.unwrap_or(self.world.node_id), within).await
            }
            Operation::Set { node, to } => self.set(node.unwrap_or(self.world.node_id), to).await,
        }
    }

    async fn sealer(&self) -> Result<Arc<Sealer>, String> {
        self.world.sealer(OF_CLUSTER).await.map_err(|error| error.to_string())
    }

    async fn rotate_signing_key(&self) -> Result<Value, String> {
        let sealer = self.sealer().await?;
        let key = bootstrap::signing_key(&sealer).map_err(|error| error.to_string())?;
        let key = Box::new(key);
        self.change(Command::PutSigningKey { key, only_first: false }).await?;
        Ok(json!({}))
    }

    async fn rotate_gossip_key(&self) -> Result<Value, String> {
        let key = hex(&random_bytes::<32>());
        let sealed = self.sealer().await?.seal(&key, GOSSIP_KEY_PLACE, &SystemDice);
        self.change(Command::TurnGossipKey { sealed }).await?;
        Ok(json!({}))
    }

    async fn drain(&self, id: NodeId, within: Duration) -> Result<Value, String> {
        let by = self.world.now().plus(within);
        self.change(Command::DrainNode { id, by }).await?;
        Ok(json!({ "node_id": id, "by": by.to_string() }))
    }

    async fn set(&self, id: NodeId, to: NodeStatus) -> Result<Value, String> {
        // Whoever goes takes its disk along.
        let goes = id == self.world.node_id && to == NodeStatus::Removed;
        if goes && !self.world.hand_over_blobs().await {
            return Err("some stored files have no copy on another node yet; try again".to_owned());
        }
        self.change(Command::SetNodeStatus { id, to }).await?;
        Ok(json!({ "node_id": id, "status": to.as_str() }))
    }

    /// A backup with the file that it is in.
    fn backup_state(&self, id: SnapshotId) -> Result<Value, String> {
        let all = self.backups.here();
        let record = all.iter().find(|one| one.id == id).ok_or("there is no such backup here")?;
        Ok(json!({ "record": record, "path": self.backups.path(id) }))
    }

    /// A list of this node's backups, one of them, or the end of one.
    async fn backup(&self, id: &str, method: &http::Method) -> Response<PeerBody> {
        if id.is_empty() {
            return said(Ok(self.backups.here()));
        }
        let Ok(id) = id.parse() else { return status(StatusCode::NOT_FOUND) };
        let found = if method == http::Method::DELETE {
            self.backups.remove_here(id).map(|was_there| was_there.then(|| status(StatusCode::OK)))
        } else {
            let bytes = self.backups.read_here(id).await;
            bytes.map(|bytes| bytes.map(|bytes| streamed(SyncStream(std::sync::Mutex::new(bytes)))))
        };
        match found {
            Ok(answer) => answer.unwrap_or_else(|| status(StatusCode::NOT_FOUND)),
            Err(error) => {
                tracing::warn!(%error, "a backup could not be reached");
                status(StatusCode::INTERNAL_SERVER_ERROR)
            }
        }
    }

    fn nodes(&self) -> Value {
        let directory = self.world.directory().read();
        let shown = directory.nodes.rows().map(|(id, node)| {
            let leads = directory.leaders.rows().filter(|(_, leader)| leader.node == *id).count();
            json!({
                "id": id,
                "status": node.status.as_str(),
                "alive": self.alive.has(node.facts.raft_id),
                "base_url": node.facts.base_url,
                "peer_address": node.facts.peer_address,
                "version": node.facts.version,
                "instances": directory.instances_on(*id).count(),
                "leads": leads,
                "zone": node.facts.labels.get(ZONE_LABEL),
            })
        });
        Value::Array(shown.collect())
    }

    fn groups(&self) -> Value {
        let groups = self.world.ports.cluster.groups().into_iter().map(|group| {
            json!({
                "name": group.name(),
                "leader": group.leader,
                "term": group.term,
                "voters": group.voters,
                "learners": group.learners,
                "applied_index": group.applied_index,
            })
        });
        Value::Array(groups.collect())
    }

    fn leader(&self) -> Option<NodeId> {
        self.world.ports.cluster.groups().first().and_then(|group| group.leader)
    }

    fn status(&self) -> Value {
        let cluster = &self.world.ports.cluster;
        let failure_tolerance = failure_tolerance(&cluster.groups(), &cluster.alive());
        let members = self.world.directory().read().members();
        let alive = members.iter().filter(|node| self.alive.has(node.facts.raft_id));
        json!({
            "node_id": self.world.node_id,
            "settled": self.ledger.is_settled(),
            "alive": alive.count(),
            "members": members.len(),
            "leader": self.leader(),
            "failure_tolerance": failure_tolerance,
        })
    }
}

async fn body(request: Request<Incoming>, most: usize) -> Option<Bytes> {
    Limited::new(request.into_body(), most).collect().await.ok().map(|body| body.to_bytes())
}

/// Keeps copies of what another node has.
async fn keep<T: DeserializeOwned + Send + 'static, E: std::fmt::Display + Send + 'static>(
    request: Request<Incoming>,
    keep: impl FnOnce(Batch<T>) -> Result<(), E> + Send + 'static,
) -> Response<PeerBody> {
    let path = request.uri().path().to_owned();
    let bytes = body(request, BATCH_BYTES_MAX).await.unwrap_or_default();
    let Ok(batch) = domain::codec::decode(&bytes) else {
        return status(StatusCode::BAD_REQUEST);
    };
    match tokio::task::spawn_blocking(move || keep(batch)).await {
        Ok(Ok(())) => status(StatusCode::OK),
        Ok(Err(error)) => {
            tracing::warn!(%error, path, "copies could not be kept");
            status(StatusCode::INSUFFICIENT_STORAGE)
        }
        Err(_) => status(StatusCode::INTERNAL_SERVER_ERROR),
    }
}

fn said<T: Serialize>(answer: Result<T, String>) -> Response<PeerBody> {
    match answer {
        Ok(answer) => Response::new(whole(serde_json::to_vec(&answer).unwrap_or_default())),
        Err(reason) => {
            let mut response = Response::new(whole(reason));
            *response.status_mut() = StatusCode::CONFLICT;
            response
        }
    }
}

impl NodeHost {
    async fn dispatch(self: Arc<Self>, request: Request<Incoming>) -> Response<PeerBody> {
        let path = request.uri().path();
        if path == ASK_PATH {
            return self.ask(request).await;
        }
        if let Some(rest) = path.strip_prefix(INSTANCES_PATH) {
            let rest = rest.to_owned();
            return self.to_instance(&rest, request).await;
        }
        if let Some(sha256) = path.strip_prefix(BLOBS_PATH) {
            let sha256 = sha256.to_owned();
            return self.blob(&sha256, request).await;
        }
        if let Some(image) = path.strip_prefix(IMAGES_PATH) {
            return self.image(image).await;
        }
        if let Some(id) = path.strip_prefix(SNAPSHOTS_PATH) {
            return self.backup(id, request.method()).await;
        }
        if path == LogLine::PATH {
            let logs = Arc::clone(&self.logs);
            return keep(request, move |batch| logs.keep(batch)).await;
        }
        if path == ClosedBucket::PATH {
            return keep(request, move |batch| self.keep_series(batch)).await;
        }
        if path == OPERATE_PATH {
            let bytes = body(request, REQUEST_BYTES_MAX).await.unwrap_or_default();
            return match serde_json::from_slice(&bytes) {
                Ok(operation) => said(self.operate(operation).await),
                Err(_) => status(StatusCode::BAD_REQUEST),
            };
        }
        status(StatusCode::NOT_FOUND)
    }

    /// What another node counted; of an agent that is gone nothing, since nobody would forget it any more.
    fn keep_series(&self, mut batch: Batch<ClosedBucket>) -> sled::Result<()> {
        {
            let directory = self.world.directory().read();
            batch.parcels.retain(|(id, _)| directory.agents.contains(id));
        }
        self.series.keep(batch, &self.world.copied)
    }

    /// A question of another node's actors.
    async fn ask(&self, request: Request<Incoming>) -> Response<PeerBody> {
        let Some(question) = body(request, ASK_BYTES_MAX).await else {
            return status(StatusCode::PAYLOAD_TOO_LARGE);
        };
        match self.world.answer_bytes(&question).await {
            Some(answer) => Response::new(whole(answer)),
            None => status(StatusCode::BAD_REQUEST),
        }
    }

    /// A call of an agent that came in over another node.
    async fn to_instance(&self, rest: &str, request: Request<Incoming>) -> Response<PeerBody> {
        let mut parts = rest.splitn(3, '/');
        let agent = parts.next().and_then(|text| text.parse().ok());
        let instance = parts.next().and_then(|text| text.parse().ok());
        let (Some(agent), Some(instance)) = (agent, instance) else {
            return status(StatusCode::NOT_FOUND);
        };
        let query = request.uri().query().map(|query| format!("?{query}")).unwrap_or_default();
        let path = format!("/{}{query}", parts.next().unwrap_or_default());
        let slot = match self.world.routes.take_of(agent, instance) {
            Ok(slot) => slot,
            Err(Told::Busy) => return refused("busy"),
            Err(_) => return refused("gone"),
        };
        let (mut head, incoming) = request.into_parts();
        let Ok(path) = path.parse() else { return status(StatusCode::BAD_REQUEST) };
        head.uri = path;
        head.version = http::Version::HTTP_11;
        head.headers.remove(FROM);
        let input = Limited::new(incoming, INPUT_BYTES_MAX).collect().await;
        let Ok(input) = input else { return status(StatusCode::PAYLOAD_TOO_LARGE) };
        let call = Request::from_parts(head, input.to_bytes());
        match self.world.send_to(&slot.endpoint, call).await {
            Ok(answer) => passed(answer, slot),
            Err(CallError::Unreached) => {
                self.world.give_up(&slot);
                refused("gone")
            }
            Err(_) => refused("broken"),
        }
    }

    /// Gives a blob, or takes a copy of one.
    async fn blob(&self, sha256: &str, request: Request<Incoming>) -> Response<PeerBody> {
        let is_name = sha256.len() == 64 && sha256.bytes().all(|byte| byte.is_ascii_hexdigit());
        if !is_name {
            return status(StatusCode::NOT_FOUND);
        }
        if request.method() == http::Method::PUT {
            let bytes = request.into_body().into_data_stream().map_err(std::io::Error::other);
            return match self.blobs.local.receive(bytes.boxed(), u64::MAX).await {
                Ok(received) if received.sha256 == sha256 => status(StatusCode::OK),
                Ok(_) => status(StatusCode::BAD_REQUEST),
                Err(error) => {
                    tracing::warn!(%error, "a copy could not be kept");
                    status(StatusCode::INSUFFICIENT_STORAGE)
                }
            };
        }
        match self.blobs.stream(sha256).await {
            Ok(Some(_)) if request.method() == http::Method::HEAD => status(StatusCode::OK),
            Ok(Some(bytes)) => streamed(bytes),
            Ok(None) => status(StatusCode::NOT_FOUND),
            Err(error) => {
                tracing::warn!(%error, "a blob could not be read");
                status(StatusCode::INTERNAL_SERVER_ERROR)
            }
        }
    }

    async fn image(&self, image: &str) -> Response<PeerBody> {
        let Some((provider, reference)) = image.split_once('/') else {
            return status(StatusCode::NOT_FOUND);
        };
        match self.runtime.carrier.give(provider, reference).await {
            Some(bytes) => streamed(SyncStream(std::sync::Mutex::new(bytes))),
            None => status(StatusCode::NOT_FOUND),
        }
    }
}

/// A body must be shareable between threads; this one is only ever read by one.
struct SyncStream(std::sync::Mutex<ImageStream>);

impl futures::Stream for SyncStream {
    type Item = std::io::Result<Bytes>;

    fn poll_next(
        self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Self::Item>> {
        let this = self.get_mut();
        this.0.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner).poll_next_unpin(cx)
    }
}

fn streamed(
    bytes: impl futures::Stream<Item = std::io::Result<Bytes>> + Send + Sync + 'static,
) -> Response<PeerBody> {
    Response::new(BodyExt::boxed(StreamBody::new(bytes.map_ok(Frame::data))))
}

/// Why a call was not passed on; the agent saw nothing of it unless it is `broken`.
fn refused(why: &'static str) -> Response<PeerBody> {
    let mut response = status(StatusCode::SERVICE_UNAVAILABLE);
    response.headers_mut().insert(REFUSED_HEADER, http::HeaderValue::from_static(why));
    response
}

/// An agent's answer on its way to another node; the slot goes back when it has passed.
fn passed(answer: Response<Incoming>, slot: Slot) -> Response<PeerBody> {
    let (mut head, body) = answer.into_parts();
    head.version = http::Version::HTTP_2;
    // Words between nodes are not the agent's to say, and HTTP/2 has no words about connections.
    for name in [REFUSED_HEADER, "connection", "keep-alive", "transfer-encoding", "upgrade"] {
        head.headers.remove(name);
    }
    let body = body.map_err(std::io::Error::other).map_frame(move |frame| {
        let _held = &slot;
        frame
    });
    Response::from_parts(head, BodyExt::boxed(body))
}

impl Host for NodeHost {
    fn answer(
        self: Arc<Self>,
        _: u64,
        request: Request<Incoming>,
    ) -> BoxFuture<'static, Response<PeerBody>> {
        self.dispatch(request).boxed()
    }

    /// Read when it is asked for.
    fn metrics(&self) -> Response<PeerBody> {
        let text = self.metrics.text(&self.world, &self.ledger, &self.view);
        let mut response = Response::new(whole(text));
        let kind = http::HeaderValue::from_static(metrics::CONTENT_TYPE);
        response.headers_mut().insert(http::header::CONTENT_TYPE, kind);
        response
    }

    fn join(self: Arc<Self>, request: Request<Incoming>) -> BoxFuture<'static, Response<PeerBody>> {
        async move {
            let bytes = body(request, REQUEST_BYTES_MAX).await.unwrap_or_default();
            match serde_json::from_slice(&bytes) {
                Ok(request) => said(self.redeem(request).await),
                Err(_) => status(StatusCode::BAD_REQUEST),
            }
        }
        .boxed()
    }
}
