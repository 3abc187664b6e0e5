//! One Raft group on this node: it proposes, answers its peers, and keeps its replicas as they should
//! be while this node leads it.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{
            AtomicBool, AtomicU64,
            Ordering::{Acquire, Relaxed, Release},
        },
    },
    time::Duration,
};

use actors::{ports::ProposeError, replica::Replica};
use bytes::Bytes;
use domain::{
    codec,
    machine::{Answer, Entry, Machine},
    planted::{self, Bug},
};
use futures::{
    FutureExt as _,
    future::{self, BoxFuture},
};
use openraft::{
    BasicNode, ChangeMembers, Config, Instant as _, Raft, ReadPolicy, SnapshotPolicy,
    async_runtime::watch::WatchReceiver as _, metrics::RaftMetrics, raft::Leader,
};
use tokio::time::Instant;

use super::{
    awaited::{Awaited, Ticket},
    checked::damaged,
    fatal,
    log::{GroupLog, LogFile},
    machine::{GroupMachine, Listener, Progress},
    members::{LEADS_WITHIN, Present, Step, Wanted, next_step},
    network::{PeerNetwork, Underway},
    state::{StateFile, StateSnapshot},
    types::{LogId, Runtime, TypeConfig},
    write::{NotWritten, Writer, elsewhere, lead},
};
use crate::{
    forward::{self, Forwarder, Proposals, ProposeReply, ReadReply},
    gate::Gate,
    peer::client::PeerClient,
};

/// How long a change of the replicas may take; a new one catches up in the background.
const CHANGE_WITHIN: Duration = Duration::from_secs(10);
/// How long a replica that answered last counts as answering.
const ANSWERED_WITHIN: Duration = Duration::from_secs(2);
/// Between hand-overs of a leadership that only serve its spreading.
const TRANSFER_EVERY: Duration = Duration::from_secs(5);

/// No term comes that far.
const NO_TERM: u64 = u64::MAX;
/// How long a hand-over may take.
const HANDED_OVER_WITHIN: Duration = Duration::from_secs(1);

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

impl Timeouts {
    /// After so long without a word of it, a leader may be another one.
    pub fn silence(self) -> Duration {
        Duration::from_millis(self.election_max * 2)
    }
}

impl Default for Timeouts {
    fn default() -> Self {
        Self { heartbeat: 100, election_min: 250, election_max: 400 }
    }
}

/// What all groups of a node share.
#[derive(Clone)]
pub struct Shared {
    /// This node's number.
    pub node: u64,
    /// Logs.
    pub log: Arc<LogFile>,
    /// Tables.
    pub state: Arc<StateFile>,
    /// The other nodes.
    pub peers: Arc<PeerClient>,
    /// Where snapshots arrive.
    pub incoming: PathBuf,
    /// Beats and elections.
    pub timeouts: Timeouts,
    /// How long a change may take before its outcome is called unknown.
    pub deadline: Duration,
    /// When snapshots are due.
    pub snapshots: Snapshots,
    /// Where chance begins: the same seed, clock and messages give the same elections.
    pub seed: u64,
}

/// When a snapshot is due, and what it leaves of the log.
#[derive(Clone, Copy, Debug)]
pub struct Snapshots {
    /// After so many entries.
    pub entries: u64,
    /// After so many bytes of log.
    pub bytes: u64,
    /// Entries that stay for replicas that lag.
    pub kept: u64,
    /// Bytes of log that these entries may have, but for those that a replica that answers still lacks.
    pub kept_bytes: u64,
    /// Bytes of log that stay, at most, for a replica that answers and lags further than that.
    pub held: u64,
}

impl Snapshots {
    /// Whether the log is to be cut, so many entries and bytes after the last time; `lag` tells what the replica
    /// that lags most lacks.
    ///
    /// One that a snapshot is on its way to lacks more than what stays. A log that is cut meanwhile does not reach
    /// back to that snapshot any more, and the replica needs another one: for ever, where changes come fast enough.
    fn are_due(&self, entries: u64, bytes: u64, lag: impl FnOnce() -> u64) -> bool {
        let is_long = entries >= self.entries || entries > 0 && bytes >= self.bytes;
        is_long && (bytes >= self.held || lag() <= self.kept)
    }
}

impl Default for Snapshots {
    fn default() -> Self {
        Self {
            entries: 10_000,
            bytes: 16 * 1024 * 1024,
            kept: 5000,
            kept_bytes: 16 * 1024 * 1024,
            held: 1024 * 1024 * 1024,
        }
    }
}

/// Names the leader of a group that this node is not part of.
pub type LeaderHint = Arc<dyn Fn() -> Option<u64> + Send + Sync>;

/// One group on this node.
pub struct Group<M: Machine> {
    /// 0 is the directory; shard `n` is `n + 1`.
    pub number: u16,
    pub(super) raft: Raft<TypeConfig, GroupMachine<M>>,
    replica: Replica<M>,
    progress: Arc<Progress>,
    awaited: Arc<Awaited<M::Reply>>,
    log: GroupLog,
    pub(super) shared: Shared,
    forwarder: Forwarder,
    /// Reads at once, of this node and others, ask the replicas once.
    reads: Gate<Result<LogId, NotWritten>>,
    transferred: Mutex<Option<Instant>>,
    is_wanted: AtomicBool,
    heard: Mutex<Option<Instant>>,
    /// The newest term of this node in which it surely had every change from before.
    caught_up: AtomicU64,
    underway: Underway,
    /// The snapshot behind which the log was cut last.
    cut_behind: AtomicU64,
}

impl<M: Machine> Group<M> {
    /// Opens the group. The node that founds a cluster is its first voter; any other waits until the
    /// group's leader takes it in. Fails where what is on disk is damaged.
    pub async fn open(
        number: u16,
        shared: &Shared,
        founds: Option<&str>,
        listener: Listener<M::Event>,
        hint: LeaderHint,
    ) -> io::Result<Self> {
        let machine = GroupMachine::<M>::open(number, &shared.state, listener)?;
        let (replica, progress) = (machine.replica(), machine.progress());
        let awaited = machine.awaited();
        let log = shared.log.group(number)?;
        if machine.written() < log.purged() {
            // Tables that were damaged have gone back to a version from before the log was cut.
            return Err(damaged());
        }
        let config = config(number, shared).map_err(io::Error::other)?;
        let underway = Underway::default();
        let peers = Arc::clone(&shared.peers);
        let network = PeerNetwork { peers, group: number, underway: underway.clone() };
        let started = Raft::new(shared.node, Arc::new(config), network, log.clone(), machine);
        let seed = shared.seed.wrapping_add(u64::from(number));
        let raft = Runtime::scope(seed, started).await.map_err(io::Error::other)?;
        if let Some(address) = founds
            && !raft.is_initialized().await.map_err(io::Error::other)?
        {
            let members = BTreeMap::from([(shared.node, BasicNode::new(address))]);
            raft.initialize(members).await.map_err(io::Error::other)?;
        } else if is_only_voter(&raft, shared.node) {
            // There is nobody to wait for.
            raft.trigger().elect(false).await.map_err(io::Error::other)?;
        }
        let forwarder =
            Forwarder::new(number, shared.node, Arc::clone(&shared.peers), shared.deadline, hint);
        let (shared, transferred) = (shared.clone(), Mutex::default());
        let is_wanted = AtomicBool::new(true);
        let heard = Mutex::default();
        Ok(Self {
            number,
            raft,
            replica,
            progress,
            awaited,
            log,
            shared,
            forwarder,
            reads: Gate::default(),
            transferred,
            is_wanted,
            heard,
            caught_up: AtomicU64::new(NO_TERM),
            underway,
            cut_behind: AtomicU64::new(0),
        })
    }

    /// The state, for readers.
    pub fn replica(&self) -> &Replica<M> {
        &self.replica
    }

    /// Agrees on an entry, wherever the leader is. With `term`, only if this node leads in that term.
    /// On return it is applied here, where this node has a replica.
    pub async fn propose(
        &self,
        entry: Entry<M::Command>,
        term: Option<u64>,
    ) -> Result<Answer<M::Reply>, ProposeError> {
        match term {
            Some(term) => self.propose_here(Bytes::from(codec::encode(&entry)), term).await,
            None => self.forwarder.propose(self, entry).await,
        }
    }

    async fn propose_here(
        &self,
        proposal: Bytes,
        term: u64,
    ) -> Result<Answer<M::Reply>, ProposeError> {
        let until = Instant::now() + self.shared.deadline;
        loop {
            match self.writer().one(proposal.clone(), term, until).await {
                Ok(answer) => return Ok(answer),
                Err(NotWritten::NotOwner | NotWritten::Elsewhere(_)) => {
                    return Err(ProposeError::Rejected(domain::Rejection::NotOwner));
                }
                Err(NotWritten::NotNow) if Instant::now() < until => {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
                Err(NotWritten::NotNow) => return Err(ProposeError::Unavailable),
                Err(NotWritten::Unknown) => return Err(ProposeError::Unknown),
            }
        }
    }

    /// Waits until the replica holds every change acknowledged before this call.
    pub fn refresh(&self) -> BoxFuture<'_, Result<(), ProposeError>> {
        let term = self.leading_term();
        if term.is_some_and(|term| self.leads_alone(term)) {
            return future::ready(Ok(())).boxed();
        }
        let waiting = async move {
            self.forwarder.refresh(self).await?;
            if let Some(term) = term {
                self.caught_up.store(term, Release);
            }
            Ok(())
        };
        waiting.boxed()
    }

    /// Whether a leader of this term needs no question to know that it has everything: it had all from before
    /// once, what it acknowledged since was applied here before that, and nobody comes to lead without its vote.
    fn leads_alone(&self, term: u64) -> bool {
        self.caught_up.load(Acquire) == term && is_only_voter(&self.raft, self.shared.node)
    }

    /// Who writes here where this node leads.
    pub(crate) fn writer(&self) -> Writer<M> {
        Writer(self.raft.clone())
    }

    /// A name for a proposal of this node, and the right to its answer.
    pub(crate) fn ticket(&self) -> Ticket<M::Reply> {
        self.awaited.ticket(self.shared.node)
    }

    /// Up to where a linearizable read must wait, if this node leads.
    pub(crate) async fn read_index(&self) -> Result<LogId, NotWritten> {
        self.lead()?;
        self.reads.ask(self.confirm_lead()).await
    }

    async fn confirm_lead(&self) -> Result<LogId, NotWritten> {
        let linearizer = self.raft.get_read_linearizer(ReadPolicy::ReadIndex).await;
        match linearizer {
            Ok(linearizer) => Ok(*linearizer.read_log_id().log_id()),
            Err(error) => match error.into_api_error() {
                Some(openraft::errors::LinearizableReadError::ForwardToLeader(forward)) => {
                    Err(elsewhere(forward))
                }
                Some(openraft::errors::LinearizableReadError::QuorumNotEnough(_)) | None => {
                    Err(NotWritten::NotNow)
                }
            },
        }
    }

    /// Waits until an entry is applied here.
    pub(crate) async fn applied(&self, index: u64, until: Instant) -> bool {
        tokio::time::timeout_at(until, self.progress.wait(index)).await.is_ok()
    }

    /// Whether this node has a replica of the group.
    ///
    /// One that was taken out of the group does not hear of it: what the members should be tells.
    pub fn is_member(&self) -> bool {
        self.is_wanted.load(Relaxed) && self.believes_to_be_member()
    }

    /// Says whether this node should have a replica.
    pub fn set_wanted(&self, is_wanted: bool) {
        self.is_wanted.store(is_wanted, Relaxed);
    }

    fn believes_to_be_member(&self) -> bool {
        self.has_replica(self.shared.node)
    }

    /// Whether a node has a replica, as far as this one knows.
    fn has_replica(&self, node: u64) -> bool {
        let metrics = self.raft.metrics();
        let metrics = metrics.borrow_watched();
        let mut nodes = metrics.membership_config.membership().nodes();
        nodes.any(|(id, _)| *id == node)
    }

    /// The leader, as far as this node knows.
    pub fn leader(&self) -> Option<u64> {
        self.raft.metrics().borrow_watched().current_leader
    }

    /// The leader of the group has just spoken.
    pub(super) fn hear(&self) {
        self.remember(Duration::ZERO);
    }

    /// So long ago what this node has was the newest.
    fn remember(&self, ago: Duration) {
        let at = Instant::now().checked_sub(ago);
        let mut heard = self.heard.lock().unwrap_or_else(PoisonError::into_inner);
        *heard = (*heard).max(at);
    }

    /// How long ago the group's leader was heard of last; where this node leads, how long ago a
    /// majority was. `None` if never since this node started.
    pub fn heard(&self) -> Option<Duration> {
        if self.leading_term().is_some() {
            let ago = match is_only_voter(&self.raft, self.shared.node) {
                true => Duration::ZERO,
                false => self.raft.metrics().borrow_watched().last_quorum_acked?.elapsed(),
            };
            // Once it leads no more, and before it hears of another, that is what it knows.
            self.remember(ago);
            return Some(ago);
        }
        self.heard_of_others()
    }

    /// How old what is known here may be. Until a new leader's first beat is answered, that is told by what it
    /// heard of the one before.
    pub fn known_since(&self) -> Option<Duration> {
        self.heard().or_else(|| self.heard_of_others())
    }

    fn heard_of_others(&self) -> Option<Duration> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner).map(|heard| heard.elapsed())
    }

    /// Whether this node leads, and in which term.
    pub fn leading_term(&self) -> Option<u64> {
        self.lead().ok().map(|leader| leader.term())
    }

    fn lead(&self) -> Result<Leader<TypeConfig, GroupMachine<M>>, NotWritten> {
        lead(&self.raft)
    }

    /// Whether this node leads in this term and nobody else can in a later one: a majority was heard of so lately
    /// that it still votes for nobody (the leader's lease).
    pub fn leads_for_sure(&self, term: u64) -> bool {
        let lease = Duration::from_millis(self.shared.timeouts.election_max);
        self.leading_term() == Some(term) && self.heard().is_some_and(|heard| heard < lease)
    }

    /// Hears of changes of leadership and membership from now on.
    pub fn changes(&self) -> Changes {
        Changes(self.raft.server_metrics())
    }

    /// Takes a snapshot if the log has grown enough, so that it can be purged. Ends the process if
    /// the group has failed: a group that is broken must not look alive.
    pub async fn tend(&self) {
        let _ = self.heard();
        let metrics = self.raft.metrics().borrow_watched().clone();
        if let Err(error) = &metrics.running_state {
            fatal("a raft group has failed", error);
        }
        let applied = metrics.last_applied.map_or(0, |id| id.index);
        let kept_from = metrics.snapshot.map_or(0, |id| id.index);
        let entries = applied.saturating_sub(kept_from);
        if self.shared.snapshots.are_due(entries, self.log.grown_bytes(), || self.lag()) {
            self.snapshot().await;
        }
        self.cut(kept_from, metrics.last_log_index.unwrap_or(0)).await;
    }

    /// Cuts the log behind a new snapshot to as many bytes as may stay. Raft itself counts entries, of which five
    /// thousand may be gigabytes.
    async fn cut(&self, snapshot: u64, last: u64) {
        if self.underway.any() || self.cut_behind.swap(snapshot, Relaxed) == snapshot {
            return;
        }
        let Some(beyond) = self.log.beyond(self.shared.snapshots.kept_bytes) else { return };
        let upto = beyond.min(snapshot).min(last.saturating_sub(self.lag()));
        if upto == 0 {
            return;
        }
        if let Err(error) = self.raft.trigger().purge_log(upto).await {
            tracing::warn!(%error, group = self.number, "the log is not cut");
        }
    }

    /// How many entries the replica that lags most lacks, of those that answer; all there are while a snapshot is on
    /// its way to one, and none where this node does not lead.
    fn lag(&self) -> u64 {
        let Some(present) = self.present() else { return 0 };
        // One that installs a snapshot answers nothing for seconds.
        let most = present.behind.into_values().max().unwrap_or(0);
        if self.underway.any() { u64::MAX } else { most }
    }

    /// The tables of this node's replica with every change acknowledged before this call, and the
    /// place in the log that they belong to.
    pub async fn export(&self) -> io::Result<Export> {
        self.refresh().await.map_err(io::Error::other)?;
        let (file, group) = (Arc::clone(&self.shared.state), self.number);
        let read = move || {
            file.flush();
            let rows = file.snapshot(group)?;
            let applied = rows.applied()?.unwrap_or_default();
            let place = applied.log.ok_or_else(|| io::Error::other("the group is empty"))?;
            Ok(Export { term: place.committed_leader_id().term, index: place.index, rows })
        };
        self.shared.state.scribe().aside(read).await
    }

    async fn snapshot(&self) {
        self.log.forget_growth();
        if let Err(error) = self.raft.trigger().snapshot().await {
            tracing::warn!(%error, group = self.number, "no snapshot");
        }
    }

    /// Takes one step towards the replicas that the group should have, if this node leads it.
    /// A replica that lacks at most `trailing` entries may vote.
    pub async fn reconcile(&self, wanted: &Wanted, trailing: u64) {
        let Some(present) = self.present() else { return };
        let present = Present { trailing, ..present };
        let Some(step) = next_step(&present, wanted) else { return };
        let changed = tokio::time::timeout(CHANGE_WITHIN, self.take(step.clone(), &present));
        match changed.await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                tracing::info!(%error, group = self.number, ?step, "replicas stay as they are");
            }
            Err(_) => tracing::info!(group = self.number, ?step, "replicas change slowly"),
        }
    }

    async fn take(&self, step: Step, present: &Present) -> io::Result<()> {
        if !matches!(step, Step::Transfer(_)) {
            tracing::info!(group = self.number, ?step, "replicas are not yet as they should be");
        }
        match step {
            Step::AddLearner(id) => {
                let address = self.shared.peers.book().get(id).unwrap_or_default();
                let added = self.raft.add_learner(id, BasicNode::new(address), false).await;
                added.map(drop).map_err(io::Error::other)
            }
            Step::SetVoters(voters) => {
                let set =
                    self.raft.change_membership(ChangeMembers::ReplaceAllVoters(voters), true);
                set.await.map(drop).map_err(io::Error::other)
            }
            Step::Drop(ids) => {
                let change = ChangeMembers::RemoveNodes(ids);
                self.raft.change_membership(change, true).await.map(drop).map_err(io::Error::other)
            }
            Step::Transfer(to) => self.hand_over(to, present).await,
        }
    }

    /// Hands the leadership on, not too often: a group without a leader serves nobody.
    async fn hand_over(&self, to: u64, present: &Present) -> io::Result<()> {
        {
            let mut last = self.transferred.lock().unwrap_or_else(PoisonError::into_inner);
            if last.is_some_and(|last| last.elapsed() < TRANSFER_EVERY) {
                return Ok(());
            }
            *last = Some(Instant::now());
        }
        tracing::info!(group = self.number, to, from = present.me, "the leadership is handed over");
        self.raft.trigger().transfer_leader(to).await.map_err(io::Error::other)
    }

    /// Hands the leadership to whoever can take it, and waits until that is done.
    pub async fn hand_over_now(&self) {
        let Some(present) = self.present() else { return };
        let others = present.voters.iter().filter(|id| **id != present.me);
        let near = others.filter_map(|id| Some((*present.behind.get(id)?, *id)));
        let Some((_, heir)) = near.min().filter(|(behind, _)| *behind <= LEADS_WITHIN) else {
            return;
        };
        if self.raft.trigger().transfer_leader(heir).await.is_err() {
            return;
        }
        let until = Instant::now() + HANDED_OVER_WITHIN;
        while self.leading_term().is_some() && Instant::now() < until {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// The replicas as the leader sees them; `None` if this node does not lead.
    pub fn present(&self) -> Option<Present> {
        self.lead().ok()?;
        let metrics = self.raft.metrics().borrow_watched().clone();
        let config = metrics.membership_config.membership();
        let voters: BTreeSet<u64> = config.voter_ids().collect();
        let learners: BTreeSet<u64> = config.learner_ids().collect();
        let joint = config.get_joint_config();
        let half_way = joint.last().filter(|_| joint.len() > 1).cloned();
        let committed = metrics.committed_membership_config.log_id();
        let in_flux = committed != metrics.membership_config.log_id();
        let last = metrics.last_log_index.unwrap_or(0);
        let answers =
            |id: &u64| {
                *id == self.shared.node
                    || metrics.heartbeat.as_ref().and_then(|beats| beats.get(id)).is_some_and(
                        |at| at.as_ref().is_some_and(|at| at.elapsed() < ANSWERED_WITHIN),
                    )
            };
        let matched = metrics.replication.clone().unwrap_or_default();
        let behind = matched
            .into_iter()
            .filter(|(id, _)| answers(id))
            .map(|(id, at)| (id, last.saturating_sub(at.map_or(0, |at| at.index))))
            .collect();
        let (me, trailing) = (self.shared.node, 0);
        Some(Present { me, voters, learners, in_flux, half_way, behind, trailing })
    }

    /// What the group looks like from here, for operators.
    pub fn view(&self) -> View {
        let metrics = self.raft.metrics().borrow_watched().clone();
        let config = metrics.membership_config.membership();
        let silence = self.shared.timeouts.silence();
        let is_heard = self.heard().is_some_and(|heard| heard <= silence);
        View {
            leader: metrics.current_leader.filter(|_| is_heard),
            term: metrics.current_term,
            voters: config.voter_ids().collect(),
            learners: config.learner_ids().collect(),
            last_index: metrics.last_log_index.unwrap_or(0),
            applied_index: metrics.last_applied.map_or(0, |id| id.index),
            behind: self.present().map(|present| present.behind).unwrap_or_default(),
            contact: self.contact(&metrics),
        }
    }

    /// How long ago each replica answered, if this node leads.
    fn contact(&self, metrics: &RaftMetrics<TypeConfig>) -> BTreeMap<u64, Duration> {
        let Some(beats) = metrics.heartbeat.as_ref().filter(|_| self.leading_term().is_some())
        else {
            return BTreeMap::new();
        };
        let own = (self.shared.node, Duration::ZERO);
        let others = beats.iter().filter_map(|(id, at)| Some((*id, at.as_ref()?.elapsed())));
        others.filter(|(id, _)| *id != own.0).chain([own]).collect()
    }

    /// Entries of another node that found this one to lead.
    pub(crate) async fn answer_propose(&self, proposals: Proposals) -> Vec<ProposeReply> {
        let until = Instant::now() + self.shared.deadline;
        // Whoever has no replica gets no answer but this one.
        let is_told = self.has_replica(proposals.from);
        let (entries, wants): (Vec<_>, Vec<_>) = proposals
            .asked
            .into_iter()
            .map(|one| (one.entry, one.wants_answer || !is_told))
            .unzip();
        let written = self.writer().all(entries, until).await;
        written.into_iter().zip(wants).map(|(one, wants)| forward::told(one, wants)).collect()
    }

    /// Up to where another node's read must wait.
    pub(crate) async fn answer_read(&self) -> ReadReply {
        match tokio::time::timeout(self.shared.deadline, self.read_index()).await {
            Ok(Ok(id)) => ReadReply::At(id.index),
            Ok(Err(NotWritten::Elsewhere(leader))) => ReadReply::Elsewhere(leader),
            Ok(Err(_)) | Err(_) => ReadReply::NotNow,
        }
    }

    /// Ends the group's tasks.
    pub async fn shutdown(&self) {
        let _ = self.raft.shutdown().await;
    }
}

/// The tables of a group, and the last entry that they hold.
pub struct Export {
    /// The entry's term.
    pub term: u64,
    /// Its index.
    pub index: u64,
    /// The tables.
    pub rows: StateSnapshot,
}

/// Changes of leadership and membership.
pub struct Changes(ServerMetrics);

type ServerMetrics =
    openraft::alias::WatchReceiverOf<TypeConfig, openraft::metrics::RaftServerMetrics<TypeConfig>>;

impl Changes {
    /// Returns when something may have changed since the last time.
    pub async fn next(&mut self) {
        // A group that ended is noticed by `tend`.
        if self.0.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

/// A group as one of its nodes sees it.
#[derive(Clone, Debug)]
pub struct View {
    /// The leader, if it was heard of lately; where this node leads, if a majority was.
    pub leader: Option<u64>,
    /// The term.
    pub term: u64,
    /// Those who vote.
    pub voters: BTreeSet<u64>,
    /// Those who listen.
    pub learners: BTreeSet<u64>,
    /// The last entry here.
    pub last_index: u64,
    /// The last applied entry here.
    pub applied_index: u64,
    /// On the leader: how many entries each replica lacks.
    pub behind: BTreeMap<u64, u64>,
    /// On the leader: how long ago each replica answered.
    pub contact: BTreeMap<u64, Duration>,
}

fn is_only_voter<M: Machine>(raft: &Raft<TypeConfig, GroupMachine<M>>, node: u64) -> bool {
    let metrics = raft.metrics();
    let metrics = metrics.borrow_watched();
    let mut voters = metrics.membership_config.membership().voter_ids();
    voters.next() == Some(node) && voters.all(|voter| voter == node)
}

fn config(number: u16, shared: &Shared) -> Result<Config, openraft::ConfigError> {
    let timeouts = shared.timeouts;
    Config {
        cluster_name: format!("roost-{number}"),
        heartbeat_interval: timeouts.heartbeat,
        heartbeat_min_interval: Some(timeouts.heartbeat),
        election_timeout_min: timeouts.election_min,
        election_timeout_max: timeouts.election_max,
        enable_pre_vote: Some(true),
        // Followers may have entries that this node lost with its power, before they were synced: in the
        // same term it would give their places to others.
        enable_leader_restore: Some(planted::has(Bug::LeaderRestored)),
        max_payload_entries: 1024,
        snapshot_policy: SnapshotPolicy::Never,
        max_in_snapshot_log_to_keep: shared.snapshots.kept,
        purge_batch_size: 512,
        install_snapshot_timeout: 600_000,
        backoff: "50ms 100ms 200ms 300ms 500ms".to_owned(),
        ..Config::default()
    }
    .validate()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_is_not_cut_while_a_replica_needs_it() {
        let snapshots =
            Snapshots { entries: 100, bytes: 1000, kept: 50, held: 5000, ..Snapshots::default() };
        for (entries, bytes, lag, are_due) in [
            (0, 4000, 0, false),
            (99, 999, 0, false),
            (100, 0, 0, true),
            (1, 1000, 0, true),
            (100, 1000, 50, true),
            // On its way to a replica, or from a snapshot to the newest entry.
            (100, 1000, 51, false),
            (100_000, 4999, 100_000, false),
            // Nobody waits for ever.
            (100_000, 5000, 100_000, true),
        ] {
            let found = snapshots.are_due(entries, bytes, || lag);
            assert_eq!(found, are_due, "{entries} {bytes} {lag}");
        }
    }
}
