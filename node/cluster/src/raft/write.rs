//! Writes entries to the log of a group that this node leads.

use bytes::Bytes;
use domain::machine::{Answer, Machine};
use futures::StreamExt as _;
use openraft::{
    Raft,
    errors::{ClientWriteError, ForwardReason, ForwardToLeader},
    impls::ProgressResponder,
    raft::Leader,
};
use tokio::time::Instant;

use super::{
    machine::GroupMachine,
    types::{Proposal, TypeConfig},
};

/// Why this node did not write an entry.
#[derive(Clone, Debug)]
pub enum NotWritten {
    /// Another node leads, as far as this one knows. Nothing was appended.
    Elsewhere(Option<u64>),
    /// This node leads, in another term than was asked for.
    NotOwner,
    /// It leads and can't confirm it right now. Nothing was appended.
    NotNow,
    /// It may or may not come to pass.
    Unknown,
}

/// An entry's place in the log, and the machine's answer unless somebody here waited for it.
pub type Written<R> = Result<(u64, Option<Answer<R>>), NotWritten>;

/// Who writes to a group.
pub struct Writer<M: Machine>(pub(super) Raft<TypeConfig, GroupMachine<M>>);

impl<M: Machine> Clone for Writer<M> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<M: Machine> Writer<M> {
    /// Writes an entry if this node leads in this term; gives the machine's answer.
    pub async fn one(
        &self,
        proposal: Bytes,
        term: u64,
        until: Instant,
    ) -> Result<Answer<M::Reply>, NotWritten> {
        let written = tokio::time::timeout_at(until, self.one_in_term(Proposal(proposal), term));
        written.await.unwrap_or(Err(NotWritten::Unknown))
    }

    async fn one_in_term(
        &self,
        proposal: Proposal,
        term: u64,
    ) -> Result<Answer<M::Reply>, NotWritten> {
        let leader = lead(&self.0)?;
        if leader.term() != term {
            return Err(NotWritten::NotOwner);
        }
        let (responder, _committed, completed) = ProgressResponder::new();
        let write = self.0.write(proposal).responder(responder);
        write.with_leader(leader.to_committed_leader_id()).await.map_err(stopped)?;
        match completed.await {
            Ok(Ok(response)) => match response.data.take() {
                Some(answer) => Ok(answer),
                None => unreachable!("a command has an answer of its machine's kind"),
            },
            Ok(Err(error)) => Err(not_written(error)),
            Err(_) => Err(NotWritten::Unknown),
        }
    }

    /// Writes entries if this node leads; says for each of them what became of it, in their order.
    pub async fn all(&self, proposals: Vec<Bytes>, until: Instant) -> Vec<Written<M::Reply>> {
        let count = proposals.len();
        if let Err(why) = lead(&self.0) {
            return (0..count).map(|_| Err(why.clone())).collect();
        }
        let mut written = Vec::with_capacity(count);
        let writing = async {
            let proposals = proposals.into_iter().map(Proposal);
            let mut outcomes = self.0.client_write_many(proposals).await.map_err(stopped)?;
            while let Some(outcome) = outcomes.next().await {
                let outcome = outcome.map_err(stopped)?;
                let told = outcome.map(|done| (done.log_id.index, done.response.take()));
                written.push(told.map_err(not_written));
            }
            Ok::<_, NotWritten>(())
        };
        // What is not told of now may come to pass all the same.
        let _ = tokio::time::timeout_at(until, writing).await;
        written.resize_with(count, || Err(NotWritten::Unknown));
        written
    }
}

/// What this node leads by, if it does. After a restart the vote that it led by before is still the newest
/// that it knows, for as long as nobody else is elected; it does not lead by that any more.
pub(super) fn lead<M: Machine>(
    raft: &Raft<TypeConfig, GroupMachine<M>>,
) -> Result<Leader<TypeConfig, GroupMachine<M>>, NotWritten> {
    let leader = raft.as_leader().map_err(elsewhere)?;
    if raft.is_leader() { Ok(leader) } else { Err(NotWritten::Elsewhere(None)) }
}

/// The node stops; a group that has failed ends the process.
fn stopped(error: impl std::fmt::Display) -> NotWritten {
    tracing::debug!(%error, "the group has stopped");
    NotWritten::Unknown
}

fn not_written(error: ClientWriteError<TypeConfig>) -> NotWritten {
    match error {
        // Nothing was appended.
        ClientWriteError::ForwardToLeader(forward) => elsewhere(forward),
        ClientWriteError::LogEntryDiscarded(_)
        | ClientWriteError::ChangeMembershipError(_)
        | ClientWriteError::PreconditionFailed(_) => NotWritten::Unknown,
    }
}

/// Where an entry should go instead.
pub(super) fn elsewhere(forward: ForwardToLeader<TypeConfig>) -> NotWritten {
    match forward.reason {
        // It leads, but a quorum has not answered lately: asking around would find nobody else.
        ForwardReason::LeaseExpired => NotWritten::NotNow,
        ForwardReason::NotLeader | ForwardReason::LeadershipTransfer => {
            NotWritten::Elsewhere(forward.leader_id)
        }
    }
}
