//! Finds the leader of a group and does there what only a leader can do: agree on an entry, and say
//! up to where a read must wait. It keeps trying through an election until the caller's time is up,
//! so nobody outside ever hears "not leader".

use std::{sync::Arc, time::Duration};

use actors::ports::ProposeError;
use bytes::Bytes;
use domain::{
    codec,
    machine::{Answer, Entry, Machine},
    planted::{self, Bug},
};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::{
    batch::{Batches, Question},
    gate::Gate,
    peer::{
        Class,
        client::{CallError, PeerClient},
    },
    raft::{
        awaited::Ticket,
        group::{Group, LeaderHint},
        network::{pack, unpack},
        write::{NotWritten, Writer, Written},
    },
};

/// Pause before the next look for a leader.
const LOOK_AGAIN: Duration = Duration::from_millis(15);
/// How long a leader may take to confirm that it still leads, before somebody else is asked.
const READ_ANSWER_WITHIN: Duration = Duration::from_millis(500);

/// Entries that a node asks the leader to agree on.
#[derive(Debug, Serialize, Deserialize)]
pub struct Proposals {
    /// Which node.
    pub from: u64,
    /// What it asks for.
    pub asked: Vec<Asked>,
}

/// One of them.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Asked {
    /// The entry.
    pub entry: Bytes,
    /// Whether the machine's answer is to come back; whoever has a replica gets it from that.
    pub wants_answer: bool,
    /// How long somebody waits for it.
    #[serde(skip)]
    until: Option<Instant>,
}

impl Question for Asked {
    fn bytes(&self) -> usize {
        self.entry.len()
    }
}

/// What became of an entry.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum ProposeReply {
    /// It is agreed, and applied where the leader is.
    Written {
        /// Its place in the log.
        index: u64,
        /// The machine's answer, encoded on its own, for whoever wanted it.
        answer: Option<Bytes>,
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
    /// Entries at once go to the leader together.
    proposals: Arc<Batches<Asked, ProposeReply>>,
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
        let proposals = Arc::default();
        Self { group, me, peers, deadline, hint, proposals, reads: Gate::default() }
    }

    fn leader<M: Machine>(&self, group: &Group<M>, told: Option<u64>) -> Option<u64> {
        told.or_else(|| group.leader()).or_else(|| (self.hint)())
    }

    /// Agrees on an entry. One that may be repeated is, when its outcome is unknown.
    pub async fn propose<M: Machine>(
        &self,
        group: &Group<M>,
        mut entry: Entry<M::Command>,
    ) -> Result<Answer<M::Reply>, ProposeError> {
        let until = Instant::now() + self.deadline;
        let mut ticket = group.ticket();
        entry.origin = Some(ticket.origin());
        let (proposal, may_repeat) = (Bytes::from(codec::encode(&entry)), entry.key.is_some());
        drop(entry);
        let (mut told, mut was_unknown) = (None, false);
        while Instant::now() < until {
            let leader = self.leader(group, told.take()).unwrap_or(self.me);
            let outcome = tokio::select! {
                biased;
                answer = ticket.answer() => return Ok(answer),
                outcome = self.ask(group, leader, proposal.clone(), until) => outcome,
            };
            match outcome {
                ProposeReply::Written { index, answer } => {
                    return self.answered(group, index, answer, ticket, until).await;
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

    /// The answer to an entry that is written: the one that the leader sent, or this replica's own.
    async fn answered<M: Machine>(
        &self,
        group: &Group<M>,
        index: u64,
        sent: Option<Bytes>,
        mut ticket: Ticket<M::Reply>,
        until: Instant,
    ) -> Result<Answer<M::Reply>, ProposeError> {
        if sent.is_none() || group.is_member() {
            group.applied(index, until).await;
        }
        let own = ticket.is_answered();
        // A replica that was sent the tables as they are after an entry never applies it.
        let answer = own.or_else(|| codec::decode(&sent?).ok());
        answer.ok_or(ProposeError::Unknown)
    }

    /// What becomes of an entry that goes to this leader with whatever else does.
    async fn ask<M: Machine>(
        &self,
        group: &Group<M>,
        leader: u64,
        entry: Bytes,
        until: Instant,
    ) -> ProposeReply {
        let asked = Asked { entry, wants_answer: !group.is_member(), until: Some(until) };
        let spawn = |task| drop(self.peers.at_home(task));
        let carrier = Carrier {
            group: self.group,
            me: self.me,
            peers: Arc::clone(&self.peers),
            writer: group.writer(),
        };
        let carry = move |asked| carrier.clone().carry(leader, asked);
        let told = self.proposals.ask(leader, asked, spawn, carry);
        match tokio::time::timeout_at(until, told).await {
            Ok(Some(told)) => told,
            Ok(None) | Err(_) => ProposeReply::Unknown,
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

/// Takes entries to a leader.
struct Carrier<M: Machine> {
    group: u16,
    me: u64,
    peers: Arc<PeerClient>,
    writer: Writer<M>,
}

impl<M: Machine> Clone for Carrier<M> {
    fn clone(&self) -> Self {
        let (peers, writer) = (Arc::clone(&self.peers), self.writer.clone());
        Self { group: self.group, me: self.me, peers, writer }
    }
}

impl<M: Machine> Carrier<M> {
    async fn carry(self, leader: u64, asked: Vec<Asked>) -> Vec<ProposeReply> {
        let (count, until) = (asked.len(), asked.iter().filter_map(|one| one.until).max());
        let until = until.unwrap_or_else(Instant::now);
        if leader == self.me {
            let entries = asked.into_iter().map(|one| one.entry).collect();
            let written = self.writer.all(entries, until).await;
            return written.into_iter().map(|one| told(one, false)).collect();
        }
        self.carry_there(leader, asked, until)
            .await
            .unwrap_or_else(|failed| (0..count).map(|_| failed.clone()).collect())
    }

    async fn carry_there(
        &self,
        leader: u64,
        asked: Vec<Asked>,
        until: Instant,
    ) -> Result<Vec<ProposeReply>, ProposeReply> {
        let path = format!("/propose/{}", self.group);
        let within = until.saturating_duration_since(Instant::now());
        let proposals = pack(&Proposals { from: self.me, asked });
        match self.peers.message(leader, Class::Log, &path, proposals, within).await {
            Ok(bytes) => unpack(&bytes).map_err(|_| ProposeReply::Unknown),
            // It never got there.
            Err(
                CallError::Unreached(_)
                | CallError::TakenOut
                | CallError::Refused(_)
                | CallError::Said(_),
            ) => Err(ProposeReply::NotNow),
            Err(CallError::Broken(_)) => Err(ProposeReply::Unknown),
        }
    }
}

/// What became of an entry, with the machine's answer for whoever wants it.
pub fn told<R: Serialize>(written: Written<R>, wants_answer: bool) -> ProposeReply {
    match written {
        Ok((index, answer)) => {
            let answer = answer.filter(|_| wants_answer);
            let answer = answer.map(|answer| Bytes::from(codec::encode(&answer)));
            ProposeReply::Written { index, answer }
        }
        Err(NotWritten::Elsewhere(leader)) => ProposeReply::Elsewhere(leader),
        Err(NotWritten::NotNow | NotWritten::NotOwner) => ProposeReply::NotNow,
        Err(NotWritten::Unknown) => ProposeReply::Unknown,
    }
}
