//! How a group reaches its peers: small messages over an exchange, snapshots as a stream.

use std::{
    cell::Cell,
    future::Future,
    sync::{
        Arc,
        atomic::{
            AtomicUsize,
            Ordering::{AcqRel, Acquire},
        },
    },
    time::Duration,
};

use bytes::Bytes;
use futures::StreamExt as _;
use http::Request;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use openraft::{
    BasicNode, OptionalSend, RPCTypes, RaftNetworkFactory, RaftNetworkV2,
    errors::{NetworkError, RPCError, ReplicationClosed, StreamingError, Timeout, Unreachable},
    network::RPCOption,
    raft::{
        AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, TransferLeaderRequest,
        TransferLeaderResponse, VoteRequest, VoteResponse,
    },
};
use serde::{Serialize, de::DeserializeOwned};

use super::{
    state::StateSnapshot,
    types::{SnapshotMeta, TypeConfig, Vote},
};
use crate::peer::{
    Class,
    client::{CallError, PeerClient},
};

/// The least time that a peer gets for small messages: an append is answered after its fsync.
const ANSWER_WITHIN: Duration = Duration::from_millis(75);
/// What a peer takes in beyond that in a second, at least.
const BYTES_PER_SECOND: u64 = 8 * 1024 * 1024;
/// How long a snapshot may take altogether.
pub const SNAPSHOT_WITHIN: Duration = Duration::from_secs(600);

/// What a snapshot's stream begins with.
#[derive(serde::Serialize, serde::Deserialize)]
pub struct SnapshotHead {
    /// In whose name it is sent.
    pub vote: Vote,
    /// What it holds.
    pub meta: SnapshotMeta,
}

/// Peers of one group, as this node reaches them.
#[derive(Clone)]
pub struct PeerNetwork {
    /// The connections.
    pub peers: Arc<PeerClient>,
    /// The group.
    pub group: u16,
    /// Its snapshots that are on their way from here.
    pub underway: Underway,
}

/// Counts snapshots of a group that are on their way to peers.
#[derive(Clone, Default)]
pub struct Underway(Arc<AtomicUsize>);

impl Underway {
    /// Whether one is on its way.
    pub fn any(&self) -> bool {
        self.0.load(Acquire) > 0
    }

    fn begin(&self) -> OnItsWay {
        self.0.fetch_add(1, AcqRel);
        OnItsWay(self.clone())
    }
}

/// One of them, until it has arrived or failed.
struct OnItsWay(Underway);

impl Drop for OnItsWay {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, AcqRel);
    }
}

/// The way to one peer.
pub struct Way {
    network: PeerNetwork,
    to: u64,
    class: Class,
}

impl PeerNetwork {
    fn way(&self, to: u64, node: &BasicNode, class: Class) -> Way {
        self.peers.book().hint(to, &node.addr);
        Way { network: self.clone(), to, class }
    }
}

impl RaftNetworkFactory<TypeConfig> for PeerNetwork {
    type Network = Way;

    async fn new_client(&mut self, to: u64, node: &BasicNode) -> Way {
        self.way(to, node, Class::Log)
    }

    async fn new_heartbeat_client(&mut self, to: u64, node: &BasicNode) -> Way {
        self.way(to, node, Class::Beats)
    }

    async fn new_snapshot_client(&mut self, to: u64, node: &BasicNode) -> Way {
        self.way(to, node, Class::Bulk)
    }
}

/// Frames between nodes of one release: compact, without names.
pub fn pack<T: Serialize>(value: &T) -> Bytes {
    /// Room that a thread keeps; a longer frame gives its room back.
    const SCRATCH_BYTES_MAX: usize = 256 * 1024;
    thread_local! {
        static SCRATCH: Cell<Vec<u8>> = const { Cell::new(vec![]) };
    }
    let mut scratch = SCRATCH.take();
    scratch.clear();
    let bytes = postcard::to_extend(value, scratch);
    let bytes = bytes.expect("our own frames have only encodable fields");
    let packed = Bytes::copy_from_slice(&bytes);
    if bytes.capacity() <= SCRATCH_BYTES_MAX {
        SCRATCH.set(bytes);
    }
    packed
}

/// Reads what [`pack`] wrote.
pub fn unpack<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, postcard::Error> {
    postcard::from_bytes(bytes)
}

impl Way {
    async fn ask<Q: Serialize, A: DeserializeOwned>(
        &self,
        class: Class,
        verb: &str,
        question: &Q,
        within: Duration,
    ) -> Result<A, RPCError<TypeConfig>> {
        let path = format!("/raft/{}/{verb}", self.network.group);
        let question = pack(question);
        let within = within + taken_in_within(question.len());
        let answer = self.network.peers.message(self.to, class, &path, question, within).await;
        let bytes = answer.map_err(|error| failed(&error))?;
        unpack(&bytes).map_err(|error| NetworkError::new(&error).into())
    }

    fn late(&self, action: RPCTypes, timeout: Duration) -> Timeout<TypeConfig> {
        Timeout { action, id: 0, target: self.to, timeout }
    }
}

/// How long a peer may take for the bytes of a question alone.
fn taken_in_within(bytes: usize) -> Duration {
    Duration::from_micros(bytes as u64 * 1_000_000 / BYTES_PER_SECOND)
}

fn failed(error: &CallError) -> RPCError<TypeConfig> {
    match error {
        CallError::Broken(_) => NetworkError::new(error).into(),
        CallError::Unreached(_)
        | CallError::TakenOut
        | CallError::Refused(_)
        | CallError::Said(_) => Unreachable::new(error).into(),
    }
}

impl RaftNetworkV2<TypeConfig> for Way {
    type SnapshotData = StateSnapshot;

    async fn append_entries(
        &mut self,
        request: AppendEntriesRequest<TypeConfig>,
        option: RPCOption,
    ) -> Result<AppendEntriesResponse<TypeConfig>, RPCError<TypeConfig>> {
        let within = option.hard_ttl().max(ANSWER_WITHIN);
        self.ask(self.class, "append", &request, within).await
    }

    async fn vote(
        &mut self,
        request: VoteRequest<TypeConfig>,
        option: RPCOption,
    ) -> Result<VoteResponse<TypeConfig>, RPCError<TypeConfig>> {
        self.ask(Class::Beats, "vote", &request, option.hard_ttl()).await
    }

    async fn pre_vote(
        &mut self,
        request: VoteRequest<TypeConfig>,
        option: RPCOption,
    ) -> Result<VoteResponse<TypeConfig>, RPCError<TypeConfig>> {
        self.ask(Class::Beats, "pre-vote", &request, option.hard_ttl()).await
    }

    async fn transfer_leader(
        &mut self,
        request: TransferLeaderRequest<TypeConfig>,
        option: RPCOption,
    ) -> Result<TransferLeaderResponse<TypeConfig>, RPCError<TypeConfig>> {
        self.ask(Class::Beats, "transfer", &request, option.hard_ttl()).await
    }

    async fn full_snapshot(
        &mut self,
        vote: Vote,
        snapshot: openraft::alias::SnapshotOf<TypeConfig, StateSnapshot>,
        cancel: impl Future<Output = ReplicationClosed> + OptionalSend + 'static,
        _: RPCOption,
    ) -> Result<SnapshotResponse<TypeConfig>, StreamingError<TypeConfig>> {
        let _on_its_way = self.network.underway.begin();
        let head = SnapshotHead { vote, meta: snapshot.meta };
        let rows = snapshot.snapshot.stream(pack(&head));
        let body = BodyExt::boxed(StreamBody::new(rows.map(|part| part.map(Frame::data))));
        let path = format!("https://peer/raft/{}/snapshot", self.network.group);
        let request = Request::post(path).body(body).expect("our own paths are paths");
        let send = async {
            let sent = self.network.peers.send(self.to, Class::Bulk, request).await;
            let response = sent.map_err(|error| StreamingError::from(failed(&error)))?;
            let status = response.status();
            let body = response.into_body().collect().await;
            let bytes = body.map_err(|error| NetworkError::new(&error))?.to_bytes();
            if !status.is_success() {
                let refused = CallError::Refused(status.as_u16());
                return Err(StreamingError::from(Unreachable::new(&refused)));
            }
            unpack(&bytes).map_err(|error| NetworkError::new(&error).into())
        };
        tokio::select! {
            biased;
            sent = send => sent,
            closed = cancel => Err(closed.into()),
            () = tokio::time::sleep(SNAPSHOT_WITHIN) => {
                Err(StreamingError::Timeout(self.late(RPCTypes::InstallSnapshot, SNAPSHOT_WITHIN)))
            }
        }
    }
}
