//! Finds the leader of a group and does there what only a leader can do: agree on an entry, and say
//! up to where a read must wait. It keeps trying through an election until the caller's time is up,
//! so nobody outside ever hears "not leader".

use std::{io, sync::Arc, time::Duration};

use actors::ports::ProposeError;
use bytes::Bytes;
use domain::{
    codec,
    machine::{Answer, Machine},
    planted::{self, Bug},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::time::Instant;

use crate::{
    gate::Gate,
    peer::{
        Class,
        client::{CallError, PeerClient},
    },
    raft::{
        group::{Group, LeaderHint, NotWritten},
        network::unpack,
    },
};

/// Pause before the next look for a leader.
const LOOK_AGAIN: Duration = Duration::from_millis(15);
/// How long a leader may take to confirm that it still leads, before somebody else is asked.
const READ_ANSWER_WITHIN: Duration = Duration::from_millis(500);

/// What became of an entry. Between nodes the answer is encoded on its own.
#[derive(Debug, Serialize, Deserialize)]
pub enum ProposeReply<A> {
    /// It is agreed, and applied where the leader is.
    Written {
        /// Its place in the log.
        index: u64,
        /// The machine's answer.
        answer: A,
    },
    /// Another node leads. Nothing was appended.
    Elsewhere(Option<u64>),
    /// It leads and can't confirm it right now. Nothing was appended.
    NotNow,
    /// It may or may not come to pass.
    Unknown,
}

/// Up to where a read must wait.
#[derive(Debug, Serialize, Deserialize)]
pub enum ReadReply {
    /// Up to this entry.
    At(u64),
    /// Another node leads.
    Elsewhere(Option<u64>),
    /// It leads and can't confirm it right now.
    NotNow,
}

/// What it takes to write where the leader is.
pub struct Forwarder {
    group: u16,
    me: u64,
    peers: Arc<PeerClient>,
    deadline: Duration,
    hint: LeaderHint,
    /// Reads at once ask the leader once.
    reads: Gate<Result<u64, ProposeError>>,
}

impl Forwarder {
    /// For one group.
    pub fn new(
        group: u16,
        me: u64,
        peers: Arc<PeerClient>,
        deadline: Duration,
        hint: LeaderHint,
    ) -> Self {
        Self { group, me, peers, deadline, hint, reads: Gate::default() }
    }

    fn leader<M: Machine>(&self, group: &Group<M>, told: Option<u64>) -> Option<u64> {
        told.or_else(|| group.leader()).or_else(|| (self.hint)())
    }

    /// Agrees on an entry. One that may be repeated is, when its outcome is unknown.
    pub async fn propose<M: Machine>(
        &self,
        group: &Group<M>,
        proposal: Bytes,
        may_repeat: bool,
    ) -> Result<Answer<M::Reply>, ProposeError> {
        let until = Instant::now() + self.deadline;
        let (mut told, mut was_unknown) = (None, false);
        while Instant::now() < until {
            let outcome = match self.leader(group, told.take()) {
                // On the heap: whoever leads, as a rule, has no use for the room that a call between nodes takes.
                Some(leader) if leader != self.me => {
                    Box::pin(self.propose_there(leader, proposal.clone(), until)).await
                }
                _ => here(group.write(proposal.clone(), None, until).await),
            };
            match outcome {
                ProposeReply::Written { index, answer } => {
                    if group.is_member() {
                        group.applied(index, until).await;
                    }
                    return Ok(answer);
                }
                ProposeReply::Elsewhere(Some(leader)) if leader != self.me => told = Some(leader),
                ProposeReply::Elsewhere(_) | ProposeReply::NotNow => {}
                ProposeReply::Unknown if may_repeat => was_unknown = true,
                ProposeReply::Unknown => return Err(ProposeError::Unknown),
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
        Err(if was_unknown { ProposeError::Unknown } else { ProposeError::Unavailable })
    }

    async fn propose_there<R: DeserializeOwned>(
        &self,
        leader: u64,
        proposal: Bytes,
        until: Instant,
    ) -> ProposeReply<Answer<R>> {
        let path = format!("/propose/{}", self.group);
        let within = until.saturating_duration_since(Instant::now());
        match self.peers.message(leader, Class::Log, &path, proposal, within).await {
            Ok(bytes) => told(&bytes).unwrap_or(ProposeReply::Unknown),
            // It never got there.
            Err(
                CallError::Unreached(_)
                | CallError::TakenOut
                | CallError::Refused(_)
                | CallError::Said(_),
            ) => ProposeReply::NotNow,
            Err(CallError::Broken(_)) => ProposeReply::Unknown,
        }
    }

    /// Waits until this node's replica holds every change acknowledged before this call.
    pub async fn refresh<M: Machine>(&self, group: &Group<M>) -> Result<(), ProposeError> {
        if planted::has(Bug::StaleRead) {
            return Ok(());
        }
        let until = Instant::now() + self.deadline;
        let index = match group.leading_term() {
            Some(_) => self.read_index(group, until).await?,
            None => {
                let asked = Box::pin(self.reads.ask(self.read_index(group, until)));
                let late = |_| ProposeError::Unavailable;
                tokio::time::timeout_at(until, asked).await.map_err(late)??
            }
        };
        match group.applied(index, until).await {
            true => Ok(()),
            false => Err(ProposeError::Unavailable),
        }
    }

    async fn read_index<M: Machine>(
        &self,
        group: &Group<M>,
        until: Instant,
    ) -> Result<u64, ProposeError> {
        let mut told = None;
        while Instant::now() < until {
            let answer = match self.leader(group, told.take()) {
                Some(leader) if leader != self.me => Box::pin(self.read_there(leader)).await,
                _ => match tokio::time::timeout(READ_ANSWER_WITHIN, group.read_index()).await {
                    Ok(Ok(id)) => ReadReply::At(id.index),
                    Ok(Err(NotWritten::Elsewhere(leader))) => ReadReply::Elsewhere(leader),
                    Ok(Err(_)) | Err(_) => ReadReply::NotNow,
                },
            };
            match answer {
                ReadReply::At(index) => return Ok(index),
                ReadReply::Elsewhere(Some(leader)) if leader != self.me => told = Some(leader),
                ReadReply::Elsewhere(_) | ReadReply::NotNow => {}
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
        Err(ProposeError::Unavailable)
    }

    async fn read_there(&self, leader: u64) -> ReadReply {
        let path = format!("/read/{}", self.group);
        let answer =
            self.peers.message(leader, Class::Beats, &path, Bytes::new(), READ_ANSWER_WITHIN).await;
        answer.ok().and_then(|bytes| unpack(&bytes).ok()).unwrap_or(ReadReply::NotNow)
    }
}

/// What another node said.
fn told<R: DeserializeOwned>(bytes: &[u8]) -> io::Result<ProposeReply<Answer<R>>> {
    Ok(match unpack(bytes).map_err(io::Error::other)? {
        ProposeReply::Written { index, answer } => {
            let answer: Bytes = answer;
            let answer = codec::decode(&answer).map_err(io::Error::other)?;
            ProposeReply::Written { index, answer }
        }
        ProposeReply::Elsewhere(leader) => ProposeReply::Elsewhere(leader),
        ProposeReply::NotNow => ProposeReply::NotNow,
        ProposeReply::Unknown => ProposeReply::Unknown,
    })
}

fn here<R>(written: Result<(u64, Answer<R>), NotWritten>) -> ProposeReply<Answer<R>> {
    match written {
        Ok((index, answer)) => ProposeReply::Written { index, answer },
        Err(NotWritten::Elsewhere(leader)) => ProposeReply::Elsewhere(leader),
        Err(NotWritten::NotNow | NotWritten::NotOwner) => ProposeReply::NotNow,
        Err(NotWritten::Unknown) => ProposeReply::Unknown,
    }
}
