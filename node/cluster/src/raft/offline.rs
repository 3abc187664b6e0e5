//! The files of a node that does not run. Two things are done to them, both where Raft itself can't
//! help: a node that lost the majority of its groups for good becomes a cluster of one, and a new
//! node begins with the tables of a backup.
//!
//! Whatever the log of a survivor holds is kept, agreed or not, as a majority may have agreed on it.
//! What is written begins a term of its own, so nothing that an old leader still says is believed.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::Path,
    sync::Arc,
};

use bytes::Bytes;
use domain::{codec, directory::Directory, machine::Machine as _};
use openraft::{
    BasicNode, EntryPayload, RaftLogReader as _, entry::RaftEntry as _,
    storage::RaftLogStorage as _, vote::leader_id_std::CommittedLeaderId,
};

use super::{
    disk::{self, LOG},
    log::{LogFile, Rewrite},
    machine::{apply_one, load},
    state::{Applied, StateFile, StateSnapshot},
    types::{Entry, LogId, Membership, Proposal, Vote},
};

/// The groups of a node that does not run.
pub struct Files {
    log: Arc<LogFile>,
    state: Arc<StateFile>,
}

/// A group in such files.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// The highest term that was heard of.
    pub term: u64,
    /// The last entry.
    pub last: Option<LogId>,
    /// Who belongs to it, as far as its log tells.
    pub membership: Membership,
    applied: Applied,
}

impl Found {
    /// Whether the node with this number has a replica.
    pub fn has(&self, node: u64) -> bool {
        self.last.is_some() && self.membership.membership().nodes().any(|(id, _)| *id == node)
    }

    /// Those who vote.
    pub fn voters(&self) -> BTreeSet<u64> {
        self.membership.membership().voter_ids().collect()
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        self.state.stop();
    }
}

/// A group with this node alone in it.
pub struct Alone<'a> {
    /// Its number.
    pub group: u16,
    /// The node.
    pub node: u64,
    /// Where the node is reached.
    pub address: &'a str,
}

impl Alone<'_> {
    fn membership(&self) -> io::Result<openraft::Membership<u64, BasicNode>> {
        let nodes = BTreeMap::from([(self.node, BasicNode::new(self.address))]);
        openraft::Membership::new(vec![BTreeSet::from([self.node])], nodes)
            .map_err(io::Error::other)
    }
}

impl Files {
    /// Opens the files of `folder`; those of a new node are made.
    pub fn open(folder: &Path) -> io::Result<Self> {
        Ok(Self {
            log: LogFile::start(disk::open_log(&folder.join(LOG))?)?,
            state: StateFile::start(disk::open(&folder.join("state.redb"))?)?,
        })
    }

    /// What is there of a group.
    pub async fn group(&self, group: u16) -> io::Result<Found> {
        let applied = self.state.snapshot(group)?.applied()?.unwrap_or_default();
        let mut log = self.log.group(group)?;
        let vote = log.read_vote().await?.map_or(0, |vote| vote.leader_id.term);
        let entries = log.try_get_log_entries(0..u64::MAX).await?;
        let mut membership = applied.membership.clone();
        for entry in &entries {
            if let EntryPayload::Membership(newer) = &entry.payload
                && membership.log_id().is_none_or(|known| known < entry.log_id())
            {
                membership = Membership::new(Some(entry.log_id()), newer.clone());
            }
        }
        let last = entries.last().map(Entry::log_id).max(applied.log);
        let term = vote.max(last.map_or(0, |last| last.committed_leader_id().term));
        Ok(Found { term, last, membership, applied })
    }

    /// The directory with everything that its log holds.
    pub async fn directory(&self) -> io::Result<Directory> {
        let mut directory = Directory::default();
        let snapshot = self.state.snapshot(0)?;
        load(&mut directory, 0, &self.state, &snapshot)?;
        let mut applied = snapshot.applied()?.unwrap_or_default();
        let from = applied.log.map_or(0, |log| log.index + 1);
        for entry in self.log.group(0)?.try_get_log_entries(from..u64::MAX).await? {
            apply_one(&mut directory, &mut applied, entry, &mut vec![]);
        }
        directory.reindex();
        Ok(directory)
    }

    /// Puts another node's replica of a group in the place of what is here of it.
    pub async fn copy(&self, group: u16, from: &Self) -> io::Result<()> {
        let found = from.group(group).await?;
        let rows = from.state.snapshot(group)?;
        self.state.replace(group, &found.applied, &rows, |_| true)?;
        let mut log = from.log.group(group)?;
        let purged = log.get_log_state().await?.last_purged_log_id;
        let append = log.try_get_log_entries(0..u64::MAX).await?;
        let vote = Vote::new(found.term, 0);
        self.log.rewrite(vec![Rewrite { group, vote, purged, append, anew: true }]).await
    }

    /// Makes this node the one member of these groups. `said` is agreed on in the first of them right
    /// after that. All of it happens, or nothing.
    pub async fn stand_alone(&self, groups: &[Alone<'_>], said: &[Bytes]) -> io::Result<()> {
        let mut rewrites = vec![];
        for (place, alone) in groups.iter().enumerate() {
            let found = self.group(alone.group).await?;
            let leader = CommittedLeaderId::new(found.term + 1);
            let payloads = std::iter::once(EntryPayload::Membership(alone.membership()?));
            let said = said.iter().filter(|_| place == 0).cloned();
            let payloads = payloads.chain(said.map(|one| EntryPayload::Normal(Proposal(one))));
            let first = found.last.map_or(0, |last| last.index + 1);
            let append = (first..).zip(payloads).map(|(index, payload)| {
                openraft::entry::RaftEntry::new(LogId::new(leader, index), payload)
            });
            rewrites.push(Rewrite {
                group: alone.group,
                vote: Vote::new(found.term + 1, alone.node),
                // Tables may be ahead of the log: then the log begins after them.
                purged: found.applied.log.filter(|applied| found.last == Some(*applied)),
                append: append.collect(),
                anew: false,
            });
        }
        self.log.rewrite(rewrites).await
    }

    /// Begins a group with these tables, but for those that `keep` leaves out, and this node alone.
    pub async fn begin(
        &self,
        alone: &Alone<'_>,
        last: LogId,
        rows: &StateSnapshot,
        keep: impl Fn(u8) -> bool,
    ) -> io::Result<()> {
        let membership = Membership::new(Some(last), alone.membership()?);
        let applied = Applied { log: Some(last), membership };
        self.state.replace(alone.group, &applied, rows, keep)?;
        let term = last.committed_leader_id().term;
        let vote = Vote::new(term, alone.node);
        let purged = Some(last);
        let group = alone.group;
        self.log.rewrite(vec![Rewrite { group, vote, purged, append: vec![], anew: true }]).await
    }
}

/// The place in a log that a backup tells of.
pub fn log_id(term: u64, index: u64) -> LogId {
    LogId::new(CommittedLeaderId::new(term), index)
}

/// An entry that nobody else proposes.
pub fn proposal<C: serde::Serialize>(entry: &domain::machine::Entry<C>) -> Bytes {
    Bytes::from(codec::encode(entry))
}
