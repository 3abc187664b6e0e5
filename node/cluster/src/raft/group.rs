//! One Raft group: proposals in, answers out.

use std::{collections::BTreeMap, io, sync::Arc, time::Duration};

use actors::ports::{ProposeError, Replica};
use bytes::Bytes;
use domain::{
    codec,
    machine::{Answer, Entry, Machine},
};
use openraft::{
    BasicNode, Config, Raft, ReadPolicy, SnapshotPolicy,
    async_runtime::watch::WatchReceiver as _,
    errors::{ClientWriteError, LinearizableReadError, RaftError},
    impls::ProgressResponder,
};

use super::{
    fatal,
    log::LogFile,
    machine::{GroupMachine, Listener},
    network::Alone,
    state::StateFile,
    types::{Proposal, TypeConfig},
};

/// Entries after which a snapshot is due.
const ENTRIES_PER_SNAPSHOT: u64 = 10_000;

/// The times a group goes by, in milliseconds; measured, see the README.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// Between beats of a leader.
    pub heartbeat: u64,
    /// Least wait before an election.
    pub election_min: u64,
    /// Greatest wait before an election; also the leader's lease.
    pub election_max: u64,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self { heartbeat: 100, election_min: 250, election_max: 400 }
    }
}

/// The stores that all groups of a node share.
#[derive(Clone)]
pub struct Stores {
    /// Logs.
    pub log: Arc<LogFile>,
    /// Tables.
    pub state: Arc<StateFile>,
}

/// One group on this node.
pub struct Group<M: Machine> {
    number: u16,
    raft: Raft<TypeConfig, GroupMachine<M>>,
    replica: Replica<M>,
    deadline: Duration,
}

impl<M: Machine> Group<M> {
    /// Opens the group; a fresh one elects itself.
    pub async fn open(
        number: u16,
        node: u64,
        stores: &Stores,
        timeouts: Timeouts,
        deadline: Duration,
        listener: Listener<M::Event>,
    ) -> io::Result<Self> {
        let machine = GroupMachine::<M>::open(number, &stores.state, listener)?;
        let replica = machine.replica();
        let log = stores.log.group(number)?;
        let config = config(number, timeouts).map_err(io::Error::other)?;
        let raft = Raft::new(node, Arc::new(config), Alone, log, machine)
            .await
            .map_err(io::Error::other)?;
        if !raft.is_initialized().await.map_err(io::Error::other)? {
            let members = BTreeMap::from([(node, BasicNode::new(""))]);
            raft.initialize(members).await.map_err(io::Error::other)?;
        }
        Ok(Self { number, raft, replica, deadline })
    }

    /// The state, for readers.
    pub fn replica(&self) -> &Replica<M> {
        &self.replica
    }

    /// Waits until the group has a leader, and tells which term it is in.
    pub async fn leader_elected(&self, within: Duration) -> io::Result<u64> {
        let wait = self.raft.wait(Some(within));
        wait.metrics(|m| m.current_leader.is_some(), "a leader").await.map_err(io::Error::other)?;
        Ok(self.raft.metrics().borrow_watched().current_term)
    }

    /// Agrees on an entry. With `term`, only if this node leads in that term.
    pub async fn propose(
        &self,
        entry: &Entry<M::Command>,
        term: Option<u64>,
    ) -> Result<Answer<M::Reply>, ProposeError> {
        let proposal = Proposal(Bytes::from(codec::encode(entry)));
        let written = tokio::time::timeout(self.deadline, self.write(proposal, term)).await;
        let bytes = written.map_err(|_| ProposeError::Unknown)??;
        match codec::decode(&bytes) {
            Ok(answer) => Ok(answer),
            Err(error) => unreachable!("our own answer is not readable: {error}"),
        }
    }

    async fn write(&self, proposal: Proposal, term: Option<u64>) -> Result<Bytes, ProposeError> {
        let (responder, _committed, completed) = ProgressResponder::new();
        let write = self.raft.write(proposal).responder(responder);
        let write = match term {
            Some(term) => {
                let leader = self.raft.as_leader().map_err(|_| ProposeError::Unavailable)?;
                if leader.term() != term {
                    return Err(ProposeError::Rejected(domain::Rejection::NotOwner));
                }
                write.with_leader(leader.to_committed_leader_id())
            }
            None => write,
        };
        write.await.map_err(|error| self.stopped(&error))?;
        match completed.await {
            Ok(Ok(response)) => Ok(response.data.0),
            // In these nothing was appended.
            Ok(Err(ClientWriteError::ForwardToLeader(_))) => Err(ProposeError::Unavailable),
            Ok(Err(_)) | Err(_) => Err(ProposeError::Unknown),
        }
    }

    /// Waits until the replica holds every change acknowledged before this call.
    pub async fn refresh(&self) -> Result<(), ProposeError> {
        let read = self.raft.ensure_linearizable(ReadPolicy::ReadIndex);
        match tokio::time::timeout(self.deadline, read).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(RaftError::APIError(LinearizableReadError::ForwardToLeader(_)))) | Err(_) => {
                Err(ProposeError::Unavailable)
            }
            Ok(Err(error)) => {
                tracing::warn!(%error, group = self.number, "a read was not confirmed");
                Err(ProposeError::Unavailable)
            }
        }
    }

    fn stopped(&self, error: &dyn std::fmt::Display) -> ProposeError {
        tracing::warn!(%error, group = self.number, "the group has stopped");
        ProposeError::Unknown
    }

    /// Whether this node leads, and in which term.
    pub fn leading_term(&self) -> Option<u64> {
        self.raft.as_leader().ok().map(|leader| leader.term())
    }

    /// Takes a snapshot if the log has grown enough, so that it can be purged. Ends the process if
    /// the group has failed: a group that is broken must not look alive.
    pub async fn tend(&self) {
        let metrics = self.raft.metrics().borrow_watched().clone();
        if let Err(error) = &metrics.running_state {
            fatal("a raft group has failed", error);
        }
        let applied = metrics.last_applied.map_or(0, |id| id.index);
        let kept_from = metrics.snapshot.map_or(0, |id| id.index);
        if applied.saturating_sub(kept_from) >= ENTRIES_PER_SNAPSHOT
            && let Err(error) = self.raft.trigger().snapshot().await
        {
            tracing::warn!(%error, group = self.number, "no snapshot");
        }
    }

    /// Ends the group's tasks.
    pub async fn shutdown(&self) {
        let _ = self.raft.shutdown().await;
    }
}

fn config(number: u16, timeouts: Timeouts) -> Result<Config, openraft::ConfigError> {
    Config {
        cluster_name: format!("roost-{number}"),
        heartbeat_interval: timeouts.heartbeat,
        heartbeat_min_interval: Some(timeouts.heartbeat),
        election_timeout_min: timeouts.election_min,
        election_timeout_max: timeouts.election_max,
        enable_pre_vote: Some(true),
        max_payload_entries: 1024,
        snapshot_policy: SnapshotPolicy::Never,
        max_in_snapshot_log_to_keep: 5000,
        purge_batch_size: 512,
        install_snapshot_timeout: 60_000,
        backoff: "50ms 100ms 200ms 300ms 500ms".to_owned(),
        ..Config::default()
    }
    .validate()
}
