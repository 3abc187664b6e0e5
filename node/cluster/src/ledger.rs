//! The ledger that actors see, over the Raft groups of this node.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, OnceLock, PoisonError, RwLock,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use actors::{
    ports::{Contact, Ledger, Observer, ProposeError},
    replica::Replica,
};
use domain::{
    NodeId, Timestamp,
    directory::{self, Directory},
    machine::{Answer, Claim, Entry},
    shard::{self, Shard},
};
use futures::{FutureExt as _, TryStreamExt as _, future::BoxFuture};
use http_body_util::BodyExt as _;
use tokio::{sync::watch, task::JoinSet, time::Instant};

use crate::{
    answer::EXPORT_PATH,
    gossip::Alive,
    peer::{Class, client::PeerClient},
    placement::{self, Spot},
    raft::{
        answer::AnyGroup,
        disk::{self, LOG},
        group::{Export, Group, LeaderHint, Shared, Snapshots, Timeouts, View},
        log::{LogFigures, LogFile},
        members::Wanted,
        network::unpack,
        received, scrub,
        state::{StateFigures, StateFile, StateSnapshot},
    },
};

/// How often groups are looked after.
const TEND_EVERY: Duration = Duration::from_secs(1);
/// How often a start that waits for owners of shards says so.
const SAID_EVERY: Duration = Duration::from_secs(5);
/// How often replicas are compared with what they should be.
const RECONCILE_EVERY: Duration = Duration::from_millis(300);
/// A node that is out is needed for as long after a leader's last word.
const NEEDED_FOR: Duration = Duration::from_secs(5);

/// How a node's ledger is set up.
#[derive(Clone, Debug)]
pub struct Settings {
    /// This node.
    pub node_id: NodeId,
    /// This node in Raft's numbers; new with every new data folder.
    pub node: u64,
    /// How many shards; fixed when the cluster is made.
    pub shards: u16,
    /// Where this node is reached, if it founds the cluster.
    pub founds: Option<String>,
    /// How long a change may take before its outcome is called unknown.
    pub write_deadline: Duration,
    /// Beats and elections.
    pub timeouts: Timeouts,
    /// When logs are cut.
    pub snapshots: Snapshots,
    /// Where chance begins.
    pub seed: u64,
}

/// What a node keeps of its groups.
pub struct Storage {
    /// Their logs.
    pub log: Arc<LogFile>,
    /// Their tables.
    pub state: Arc<StateFile>,
    /// The folder where snapshots arrive.
    pub incoming: PathBuf,
}

impl Storage {
    /// Opens those below `folder`, and looks through them for damage now and then.
    pub fn open(folder: &Path) -> io::Result<Self> {
        let log = LogFile::start(disk::open_log(&folder.join(LOG))?)?;
        let state = StateFile::start(disk::open(&folder.join("state.redb"))?)?;
        scrub::start(vec![Arc::clone(&log) as _, Arc::clone(&state) as _])?;
        Ok(Self { log, state, incoming: folder.join("snapshots") })
    }
}

/// The directory group and all shard groups of this node.
pub struct RaftLedger {
    node_id: NodeId,
    directory: Arc<Group<Directory>>,
    shards: Vec<Arc<Group<Shard>>>,
    shared: Shared,
    leading: watch::Sender<BTreeMap<u16, u64>>,
    /// The members in Raft's numbers, for those who hold the directory already.
    numbers: RwLock<BTreeMap<NodeId, u64>>,
    /// Who answers, once gossip has begun.
    alive: OnceLock<Arc<Alive>>,
    plan: Mutex<Plan>,
}

/// The replicas that the present members make; computed anew when they change.
#[derive(Default)]
struct Plan {
    spots: Vec<Spot>,
    directory: Wanted,
    shards: Vec<Wanted>,
}

impl RaftLedger {
    /// Opens all groups that are kept there.
    pub async fn open(
        storage: Storage,
        settings: Settings,
        observer: Arc<dyn Observer>,
        peers: Arc<PeerClient>,
    ) -> io::Result<Arc<Self>> {
        let Settings { node_id, node, shards, founds, write_deadline, .. } = settings;
        let shared = Shared {
            node,
            log: storage.log,
            state: storage.state,
            peers,
            incoming: storage.incoming,
            timeouts: settings.timeouts,
            deadline: write_deadline,
            snapshots: settings.snapshots,
            seed: settings.seed,
        };
        let _ = std::fs::remove_dir_all(&shared.incoming);
        let founds = founds.as_deref();
        let hears = Arc::clone(&observer);
        let listener = Arc::new(move |events: &[_]| hears.directory(events));
        let (book, turn) = (Arc::clone(&shared.peers), AtomicUsize::new(0));
        let somebody: LeaderHint =
            Arc::new(move || book.book().somebody_but(node, turn.fetch_add(1, Relaxed)));
        let directory = Arc::new(Group::open(0, &shared, founds, listener, somebody).await?);
        let mut groups = Vec::with_capacity(usize::from(shards));
        for shard in 0..shards {
            let hears = Arc::clone(&observer);
            let listener = Arc::new(move |events: &[_]| hears.shard(shard, events));
            let known = directory.replica().clone();
            let hint: LeaderHint = Arc::new(move || leader_of(&known.read(), shard));
            let group = Group::open(shard + 1, &shared, founds, listener, hint).await?;
            groups.push(Arc::new(group));
        }
        let ledger = Arc::new(Self {
            node_id,
            directory,
            shards: groups,
            shared,
            leading: watch::Sender::default(),
            numbers: RwLock::default(),
            alive: OnceLock::new(),
            plan: Mutex::default(),
        });
        ledger.learn_addresses();
        ledger.wanted();
        Ok(ledger)
    }

    /// Looks after the groups until dropped: shards are taken over and given up as leadership moves,
    /// replicas follow the members, snapshots are taken when logs have grown, and the process ends
    /// if a group has failed.
    pub async fn run(self: Arc<Self>) {
        let mut tasks = JoinSet::new();
        for shard in 0..self.shards() {
            tasks.spawn(Arc::clone(&self).follow_leadership(shard));
        }
        tasks.spawn(Arc::clone(&self).follow_members());
        tasks.spawn(async move {
            loop {
                tokio::time::sleep(TEND_EVERY).await;
                self.directory.tend().await;
                for group in &self.shards {
                    group.tend().await;
                }
            }
        });
        // None of them ends; a panic in one must not go unnoticed.
        if let Some(Err(error)) = tasks.join_next().await
            && error.is_panic()
        {
            crate::raft::fatal("a task of the ledger has failed", &error);
        }
    }

    /// Waits until the directory can be read and every shard has an owner.
    pub async fn ready(&self) {
        loop {
            if self.refresh_directory().await.is_ok() {
                break;
            }
            tracing::warn!("waiting for a majority of the cluster");
        }
        let (mut leading, mut said) = (self.leading.subscribe(), Instant::now());
        for shard in 0..self.shards() {
            loop {
                let led = self.group(shard).leading_term();
                let is_owned = match led {
                    Some(_) => leading.borrow_and_update().contains_key(&shard),
                    None => leader_of(&self.directory().read(), shard).is_some(),
                };
                if is_owned {
                    break;
                }
                if said.elapsed() >= SAID_EVERY {
                    said = Instant::now();
                    tracing::warn!(shard, ?led, "waiting for an owner of the shard");
                }
                let _ = tokio::time::timeout(RECONCILE_EVERY, leading.changed()).await;
            }
        }
    }

    async fn follow_leadership(self: Arc<Self>, shard: u16) {
        let group = Arc::clone(&self.shards[usize::from(shard)]);
        let mut changes = group.changes();
        let mut led = None;
        loop {
            let term = group.leading_term();
            if term != led {
                if led.take().is_some() {
                    self.leading.send_modify(|leading| {
                        leading.remove(&shard);
                    });
                }
                let Some(term) = term else { continue };
                let taken = tokio::select! {
                    taken = self.take(shard, term) => taken,
                    () = lost(&group, term) => continue,
                };
                match taken {
                    Ok(()) if group.leading_term() == Some(term) => {
                        led = Some(term);
                        self.leading.send_modify(|leading| {
                            leading.insert(shard, term);
                        });
                    }
                    Ok(()) => {}
                    Err(error) => {
                        tracing::info!(%error, shard, term, "the shard could not be taken over");
                        tokio::time::sleep(RECONCILE_EVERY / 3).await;
                    }
                }
                continue;
            }
            let _ = tokio::time::timeout(TEND_EVERY, changes.next()).await;
        }
    }

    /// A new leader first knows all that was agreed, then tells the directory: older terms are
    /// refused from then on. Only then do actors start.
    async fn take(&self, shard: u16, term: u64) -> Result<(), ProposeError> {
        self.group(shard).refresh().await?;
        let claim = Some(Claim { shard, term });
        let command = directory::Command::Lead { node: self.node_id };
        let entry = Entry { claim, ..Entry::new(Timestamp::default(), command) };
        self.directory.propose(entry, None).await?.result?;
        tracing::info!(shard, term, "this node owns the shard");
        Ok(())
    }

    /// From now on nobody is handed a leadership who does not answer, or has said goodbye.
    pub fn heed(&self, alive: Arc<Alive>) {
        let _ = self.alive.set(alive);
    }

    async fn follow_members(self: Arc<Self>) {
        loop {
            tokio::time::sleep(RECONCILE_EVERY).await;
            self.learn_addresses();
            let (mut directory, mut shards) = self.wanted();
            if let Some(alive) = self.alive.get() {
                for wanted in shards.iter_mut().chain([&mut directory]) {
                    wanted.leaders.retain(|id| alive.has(*id));
                }
            }
            let trailing =
                self.directory().read().autopilot().unwrap_or_default().max_trailing_logs;
            self.directory.reconcile(&directory, trailing).await;
            let steps =
                self.shards.iter().zip(&shards).map(|(group, one)| group.reconcile(one, trailing));
            futures::future::join_all(steps).await;
        }
    }

    fn learn_addresses(&self) {
        let directory = self.directory().read();
        for (_, node) in directory.nodes.rows() {
            self.shared.peers.book().put(node.facts.raft_id, &node.facts.peer_address);
        }
        let members = directory.nodes.rows().filter(|(_, node)| node.is_member());
        let members = members.map(|(id, node)| (*id, node.facts.raft_id)).collect();
        let mut numbers = self.numbers.write().unwrap_or_else(PoisonError::into_inner);
        if *numbers != members {
            *numbers = members;
        }
    }

    /// A member in Raft's numbers. Reads no directory, so it may be asked while that is held.
    pub fn number(&self, node: NodeId) -> Option<u64> {
        self.numbers.read().unwrap_or_else(PoisonError::into_inner).get(&node).copied()
    }

    /// All members in Raft's numbers.
    pub fn numbers(&self) -> BTreeMap<NodeId, u64> {
        self.numbers.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn wanted(&self) -> (Wanted, Vec<Wanted>) {
        let spots = Spot::all(&self.directory().read());
        let mut plan = self.plan.lock().unwrap_or_else(PoisonError::into_inner);
        if plan.spots != spots {
            plan.directory = placement::directory(&spots);
            plan.shards = placement::shards(&spots, self.shards());
            for (group, wanted) in self.shards.iter().zip(&plan.shards) {
                group.set_wanted(
                    wanted.voters.is_empty() || wanted.voters.contains(&self.shared.node),
                );
            }
            plan.spots = spots;
        }
        (plan.directory.clone(), plan.shards.clone())
    }

    /// Whether every group has the replicas that it should have, as far as this node can tell from
    /// the groups that it is part of.
    pub fn is_settled(&self) -> bool {
        let (directory, shards) = self.wanted();
        let fits = |view: View, wanted: &Wanted| {
            view.leader.is_some()
                && view.voters == wanted.voters
                && view.learners == wanted.learners
        };
        let mut groups = self.shards.iter().zip(&shards);
        fits(self.directory.view(), &directory)
            && groups.all(|(group, wanted)| !group.is_member() || fits(group.view(), wanted))
    }

    /// What each group looks like from here: the directory first, then the shards.
    /// Each with whether this node has a replica of it; where it has none, the members are those
    /// that the group should have.
    pub fn views(&self) -> Vec<(View, bool)> {
        let (_, wanted) = self.wanted();
        let shards = self.shards.iter().zip(wanted).map(|(group, wanted)| {
            let (view, is_here) = (group.view(), group.is_member());
            let planned = View { voters: wanted.voters, ..view.clone() };
            (if is_here { view } else { planned }, is_here)
        });
        let directory = (self.directory.view(), self.directory.is_member());
        std::iter::once(directory).chain(shards).collect()
    }

    /// How near this node is to the leaders of the groups that it has replicas of.
    pub fn contact(&self) -> Contact {
        let shards = self.shards.iter().filter(|group| group.is_member());
        let shards = shards.map(|one| one.known_since());
        let all = std::iter::once(self.directory.known_since()).chain(shards);
        let last = all.collect::<Option<Vec<Duration>>>().and_then(|all| all.into_iter().max());
        let lately = self.shared.timeouts.silence();
        Contact { knows_leaders: last.is_some_and(|last| last <= lately), last }
    }

    /// Whether a group counts on this node's vote, and its leader on this node's answers.
    pub fn is_needed(&self) -> bool {
        let number = self.shared.node;
        let here = self.shards.iter().map(|group| (group.view(), group.heard()));
        let mut all = std::iter::once((self.directory.view(), self.directory.heard())).chain(here);
        all.any(|(view, heard)| {
            let is_led = heard.is_some_and(|heard| heard <= NEEDED_FOR);
            view.voters.contains(&number) && is_led
        })
    }

    /// Whether a group that this node has a replica of has one at the node with this number, too.
    pub fn counts_on(&self, raft_id: u64) -> bool {
        let views =
            std::iter::once(self.directory.view()).chain(self.shards.iter().map(|one| one.view()));
        views
            .into_iter()
            .any(|view| view.voters.contains(&raft_id) || view.learners.contains(&raft_id))
    }

    /// What is measured of the two files.
    pub fn figures(&self) -> (LogFigures, StateFigures) {
        (self.shared.log.figures(), self.shared.state.figures())
    }

    /// This node.
    pub fn node_id(&self) -> NodeId {
        self.node_id
    }

    /// The group with this number, for peers.
    pub fn any_group(&self, number: u16) -> Option<Arc<dyn AnyGroup>> {
        match number.checked_sub(1) {
            None => Some(Arc::clone(&self.directory) as _),
            Some(shard) => self
                .shards
                .get(usize::from(shard))
                .map(|group| Arc::clone(group) as Arc<dyn AnyGroup>),
        }
    }

    /// The tables of a group, from here or from a node that has them.
    pub async fn export(&self, number: u16) -> io::Result<Export> {
        let group = self.any_group(number).ok_or(io::ErrorKind::NotFound)?;
        if group.is_here() {
            return group.export().await;
        }
        let wanted = number.checked_sub(1).map(|shard| self.wanted().1[usize::from(shard)].clone());
        let mut last = io::Error::other("no node has it");
        for node in wanted.unwrap_or_default().voters {
            match self.export_from(node, number).await {
                Ok(export) => return Ok(export),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    async fn export_from(&self, node: u64, number: u16) -> io::Result<Export> {
        let request = http::Request::get(format!("https://peer{EXPORT_PATH}{number}"))
            .body(crate::peer::whole(bytes::Bytes::new()))
            .map_err(io::Error::other)?;
        let answer = self.shared.peers.send(node, Class::Bulk, request).await;
        let answer = answer.map_err(io::Error::other)?;
        if !answer.status().is_success() {
            return Err(io::Error::other(format!("status {}", answer.status())));
        }
        let parts = answer.into_body().into_data_stream().map_err(io::Error::other);
        let (head, rows) =
            received::receive(&self.shared.incoming, parts, self.shared.state.scribe()).await?;
        let (term, index) = unpack(&head).map_err(io::Error::other)?;
        Ok(Export { term, index, rows: StateSnapshot::received(rows) })
    }

    /// Hands every leadership on, so that a node that stops leaves no group without a leader. Those
    /// that nobody else can take stay.
    pub async fn hand_over_all(&self) {
        self.directory.hand_over_now().await;
        futures::future::join_all(self.shards.iter().map(|group| group.hand_over_now())).await;
    }

    /// Ends all groups and writes what is not written yet.
    pub async fn close(&self) {
        self.directory.shutdown().await;
        for group in &self.shards {
            group.shutdown().await;
        }
        let state = Arc::clone(&self.shared.state);
        let _ = tokio::task::spawn_blocking(move || state.stop()).await;
    }

    fn group(&self, shard: u16) -> &Group<Shard> {
        &self.shards[usize::from(shard)]
    }
}

/// Until this node does not lead the group in this term any more.
async fn lost(group: &Group<Shard>, term: u64) {
    let mut changes = group.changes();
    while group.leading_term() == Some(term) {
        let _ = tokio::time::timeout(TEND_EVERY, changes.next()).await;
    }
}

/// Who leads a shard, as it told the directory.
fn leader_of(directory: &Directory, shard: u16) -> Option<u64> {
    let leader = directory.leaders.get(&u64::from(shard))?;
    directory.nodes.get(&leader.node).map(|node| node.facts.raft_id)
}

impl Ledger for RaftLedger {
    fn directory(&self) -> &Replica<Directory> {
        self.directory.replica()
    }

    fn shard(&self, shard: u16) -> &Replica<Shard> {
        self.group(shard).replica()
    }

    fn shards(&self) -> u16 {
        u16::try_from(self.shards.len()).unwrap_or(u16::MAX)
    }

    fn home(&self, name: &[u8]) -> u16 {
        placement::shard_of(name, self.shards())
    }

    fn change_directory(
        &self,
        entry: Entry<directory::Command>,
    ) -> BoxFuture<'_, Result<Answer<directory::Reply>, ProposeError>> {
        async move { self.directory.propose(entry, None).await }.boxed()
    }

    fn change_shard(
        &self,
        shard: u16,
        entry: Entry<shard::Command>,
    ) -> BoxFuture<'_, Result<Answer<shard::Reply>, ProposeError>> {
        let term = entry.claim.map(|claim| claim.term);
        async move { self.group(shard).propose(entry, term).await }.boxed()
    }

    fn refresh_directory(&self) -> BoxFuture<'_, Result<(), ProposeError>> {
        self.directory.refresh()
    }

    fn refresh_shard(&self, shard: u16) -> BoxFuture<'_, Result<(), ProposeError>> {
        self.group(shard).refresh()
    }

    fn has_shard(&self, shard: u16) -> bool {
        self.group(shard).is_member()
    }

    fn leading(&self) -> watch::Receiver<BTreeMap<u16, u64>> {
        self.leading.subscribe()
    }

    fn holds(&self, claim: Claim) -> bool {
        self.group(claim.shard).leads_for_sure(claim.term)
    }

    fn leads_directory(&self) -> bool {
        self.directory.leading_term().is_some()
    }
}
