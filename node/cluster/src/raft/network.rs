//! How a group would reach its peers. A cluster of one has none: every address is unreachable, and
//! a group that asked for one anyway is told so at once.

use openraft::{
    BasicNode, OptionalSend, RaftNetworkFactory, RaftNetworkV2,
    errors::{RPCError, ReplicationClosed, StreamingError, Unreachable},
    network::RPCOption,
    raft::{
        AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, VoteRequest, VoteResponse,
    },
};

use super::{
    state::StateSnapshot,
    types::{TypeConfig, Vote},
};

/// A network without peers.
#[derive(Clone, Copy, Default)]
pub struct Alone;

fn unreachable() -> Unreachable<TypeConfig> {
    Unreachable::new(&std::io::Error::other("this node has no peers"))
}

impl RaftNetworkFactory<TypeConfig> for Alone {
    type Network = Self;

    async fn new_client(&mut self, _: u64, _: &BasicNode) -> Self {
        Self
    }
}

impl RaftNetworkV2<TypeConfig> for Alone {
    type SnapshotData = StateSnapshot;

    async fn append_entries(
        &mut self,
        _: AppendEntriesRequest<TypeConfig>,
        _: RPCOption,
    ) -> Result<AppendEntriesResponse<TypeConfig>, RPCError<TypeConfig>> {
        Err(unreachable().into())
    }

    async fn vote(
        &mut self,
        _: VoteRequest<TypeConfig>,
        _: RPCOption,
    ) -> Result<VoteResponse<TypeConfig>, RPCError<TypeConfig>> {
        Err(unreachable().into())
    }

    async fn pre_vote(
        &mut self,
        _: VoteRequest<TypeConfig>,
        _: RPCOption,
    ) -> Result<VoteResponse<TypeConfig>, RPCError<TypeConfig>> {
        Err(unreachable().into())
    }

    async fn full_snapshot(
        &mut self,
        _: Vote,
        _: openraft::alias::SnapshotOf<TypeConfig, StateSnapshot>,
        _: impl Future<Output = ReplicationClosed> + OptionalSend + 'static,
        _: RPCOption,
    ) -> Result<SnapshotResponse<TypeConfig>, StreamingError<TypeConfig>> {
        Err(unreachable().into())
    }
}
