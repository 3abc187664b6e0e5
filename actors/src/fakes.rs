//! The ports as actor tests have them: a ledger in memory with the real rules inside, agents that do
//! as they are told, and a clock that is wound by hand. Fast, so that stories about time, crashes and
//! lost leadership can be told by the dozen.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::Bytes;
use domain::{
    AgentId, NodeId, Timestamp,
    agent::{RuntimeSpec, plan::IMAGE_PULL_FAILED},
    cloud::Provider,
    deployment::{Failure, Image},
    directory::{self, Directory},
    machine::{self, Answer, Claim, Entry},
    shard::{self, Shard},
    upload::Received,
};
use futures::{FutureExt as _, StreamExt as _, future::BoxFuture};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::{TcpListener, TcpStream},
    sync::{broadcast, mpsc, watch},
};

use crate::{
    ports::{
        BlobError, Blobs, BuildRequest, ByteStream, Clock, ClusterView, Contact, Entropy, Exit,
        GroupView, Ledger, LineSink, LogLine, LogQuery, Logs, NewToken, Observer as _, Outbound,
        OutboundAnswer, OutboundError, OutboundRequest, PeerError, PeerRequest, PeerResponse,
        Peers, Process, ProposeError, Runtime, Series, SnapshotRecord, Snapshots, StartRequest,
        Started,
    },
    replica::Replica,
    root::{Watch, lock},
    seal::{Keychain, MasterKey},
    settings::Settings,
    world::{Ports, World},
};

/// A ledger in this process's memory: every change is agreed at once, unless it was told otherwise.
pub struct MemoryLedger {
    directory: Replica<Directory>,
    shards: Vec<Replica<Shard>>,
    watch: Arc<Watch>,
    leading: watch::Sender<BTreeMap<u16, u64>>,
    broken: AtomicBool,
}

impl MemoryLedger {
    fn new(shards: u16, watch: Arc<Watch>) -> Self {
        let leading = (0..shards).map(|shard| (shard, 1)).collect();
        let this = Self {
            directory: Replica::default(),
            shards: (0..shards).map(|_| Replica::default()).collect(),
            watch,
            leading: watch::Sender::new(leading),
            broken: AtomicBool::new(false),
        };
        (0..shards).for_each(|shard| this.take(Claim { shard, term: 1 }));
        this
    }

    fn take(&self, claim: Claim) {
        let command = directory::Command::Take;
        let entry = Entry { claim: Some(claim), ..Entry::new(Timestamp::default(), command) };
        let _ = machine::apply(&mut *self.directory.write(), &entry);
    }

    /// Another node leads every shard from now on: what actors of this one ask for is refused.
    pub fn depose(&self) {
        for shard in 0..self.shards() {
            self.take(Claim { shard, term: 2 });
        }
    }

    /// Whether proposals go unanswered, as without a majority.
    pub fn set_broken(&self, broken: bool) {
        self.broken.store(broken, Relaxed);
    }

    fn available(&self) -> Result<(), ProposeError> {
        if self.broken.load(Relaxed) { Err(ProposeError::Unavailable) } else { Ok(()) }
    }
}

impl Ledger for MemoryLedger {
    fn directory(&self) -> &Replica<Directory> {
        &self.directory
    }

    fn shard(&self, shard: u16) -> &Replica<Shard> {
        &self.shards[usize::from(shard)]
    }

    fn shards(&self) -> u16 {
        u16::try_from(self.shards.len()).unwrap_or(u16::MAX)
    }

    fn home(&self, name: &[u8]) -> u16 {
        name.iter().fold(0, |sum: u16, byte| sum.wrapping_mul(31).wrapping_add(u16::from(*byte)))
            % self.shards()
    }

    fn change_directory(
        &self,
        entry: Entry<directory::Command>,
    ) -> BoxFuture<'_, Result<Answer<directory::Reply>, ProposeError>> {
        async move {
            self.available()?;
            let (answer, events) = machine::apply(&mut *self.directory.write(), &entry);
            self.watch.directory(&events);
            Ok(answer)
        }
        .boxed()
    }

    fn change_shard(
        &self,
        shard: u16,
        entry: Entry<shard::Command>,
    ) -> BoxFuture<'_, Result<Answer<shard::Reply>, ProposeError>> {
        async move {
            self.available()?;
            let (answer, events) = machine::apply(&mut *self.shard(shard).write(), &entry);
            self.watch.shard(shard, &events);
            Ok(answer)
        }
        .boxed()
    }

    fn refresh_directory(&self) -> BoxFuture<'_, Result<(), ProposeError>> {
        async move { self.available() }.boxed()
    }

    fn refresh_shard(&self, _: u16) -> BoxFuture<'_, Result<(), ProposeError>> {
        async move { self.available() }.boxed()
    }

    fn has_shard(&self, _: u16) -> bool {
        true
    }

    fn leading(&self) -> watch::Receiver<BTreeMap<u16, u64>> {
        self.leading.subscribe()
    }

    fn holds(&self, claim: Claim) -> bool {
        self.leading.borrow().get(&claim.shard) == Some(&claim.term)
    }

    fn leads_directory(&self) -> bool {
        true
    }
}

/// Goes only when it is wound.
#[derive(Default)]
pub struct HandClock(AtomicU64);

impl HandClock {
    /// When every story begins.
    const BEGINS: u64 = 1_700_000_000_000;

    /// Lets time pass.
    pub fn wind(&self, by: Duration) {
        self.0.fetch_add(u64::try_from(by.as_millis()).unwrap_or(u64::MAX), Relaxed);
    }
}

impl Clock for HandClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_millis(Self::BEGINS + self.0.load(Relaxed))
    }
}

/// Counts instead of throwing: every story goes the same way.
#[derive(Default)]
pub struct Counter(AtomicU64);

impl Entropy for Counter {
    fn dice(&self) -> u128 {
        u128::from(self.0.fetch_add(1, Relaxed)) << 20
    }
}

/// What a fake agent does when it is started or called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Behavior {
    /// Comes up and answers what it was asked.
    Answers,
    /// Comes up, and never answers a call.
    Hangs,
    /// Ends as soon as it is started.
    Crashes,
    /// Ends for its use of memory.
    Eats,
    /// Never listens.
    Sleeps,
    /// Can't be started.
    Refused,
    /// Can't be started, for nobody who answers has its image.
    Missing,
}

/// Builds at once and runs agents in this process.
#[derive(Default)]
pub struct Containers {
    behavior: Mutex<VecDeque<Behavior>>,
    failing_builds: Mutex<VecDeque<Failure>>,
    running: Arc<Mutex<HashMap<String, watch::Sender<Option<Exit>>>>>,
    starts: AtomicU64,
    calls: Arc<AtomicU64>,
    builds: AtomicU64,
    adopts: AtomicBool,
}

impl Containers {
    /// What the next instances do, one after the other; all others answer.
    pub fn next(&self, behavior: impl IntoIterator<Item = Behavior>) {
        lock(&self.behavior).extend(behavior);
    }

    /// The next build fails so.
    pub fn fail_build(&self, failure: Failure) {
        lock(&self.failing_builds).push_back(failure);
    }

    /// Instances running now.
    pub fn running(&self) -> usize {
        lock(&self.running).len()
    }

    /// Instances started so far.
    pub fn starts(&self) -> u64 {
        self.starts.load(Relaxed)
    }

    /// Calls that have reached an instance so far.
    pub fn calls(&self) -> u64 {
        self.calls.load(Relaxed)
    }

    /// Builds begun so far.
    pub fn builds(&self) -> u64 {
        self.builds.load(Relaxed)
    }

    /// Ends all instances, as a crash of theirs.
    pub fn crash_all(&self) {
        let exit = Exit { code: Some(1), signal: None, out_of_memory: false };
        for one in lock(&self.running).values() {
            let _ = one.send(Some(exit));
        }
    }

    /// Whether instances outlive the node.
    pub fn set_adopts(&self, adopts: bool) {
        self.adopts.store(adopts, Relaxed);
    }

    async fn launch(&self, request: StartRequest) -> Result<Started, Failure> {
        self.starts.fetch_add(1, Relaxed);
        let behavior = lock(&self.behavior).pop_front().unwrap_or(Behavior::Answers);
        if behavior == Behavior::Refused {
            return Err(Failure::new("NO_CAPACITY", "there is no room"));
        }
        if behavior == Behavior::Missing {
            return Err(Failure::new(IMAGE_PULL_FAILED, "nobody has it"));
        }
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let address = listener.local_addr().expect("it has an address");
        let (ended, mut exited) = watch::channel(None);
        let name = request.instance_id.to_string();
        let early = match behavior {
            Behavior::Crashes => Some(Exit { code: Some(1), signal: None, out_of_memory: false }),
            Behavior::Eats => Some(Exit { code: None, signal: Some(9), out_of_memory: true }),
            Behavior::Answers
            | Behavior::Hangs
            | Behavior::Sleeps
            | Behavior::Refused
            | Behavior::Missing => None,
        };
        if early.is_some() {
            let _ = ended.send(early);
        }
        let serving = match behavior {
            Behavior::Answers | Behavior::Hangs => {
                let calls = Arc::clone(&self.calls);
                Some(tokio::spawn(serve(listener, calls, behavior == Behavior::Hangs)))
            }
            Behavior::Crashes
            | Behavior::Eats
            | Behavior::Sleeps
            | Behavior::Refused
            | Behavior::Missing => None,
        };
        lock(&self.running).insert(name.clone(), ended);
        let running = Arc::clone(&self.running);
        let process = Arc::new(FakeProcess { running: Arc::clone(&running), name: name.clone() });
        let exit = async move {
            let exit = exited.wait_for(Option::is_some).await.ok().and_then(|exit| *exit);
            lock(&running).remove(&name);
            if let Some(serving) = serving {
                serving.abort();
            }
            exit.unwrap_or(Exit { code: None, signal: None, out_of_memory: false })
        };
        Ok(started(address, process, exit.boxed()))
    }
}

fn started(
    address: SocketAddr,
    process: Arc<dyn Process>,
    exit: BoxFuture<'static, Exit>,
) -> Started {
    let (_, output) = mpsc::channel(1);
    Started { address, isolation: vec!["fake".to_owned()], output, exit, process }
}

struct FakeProcess {
    running: Arc<Mutex<HashMap<String, watch::Sender<Option<Exit>>>>>,
    name: String,
}

impl FakeProcess {
    fn end(&self, signal: i32) {
        if let Some(ended) = lock(&self.running).get(&self.name) {
            let exit = Exit { code: None, signal: Some(signal), out_of_memory: false };
            let _ = ended.send(Some(exit));
        }
    }
}

impl Process for FakeProcess {
    fn terminate(&self) {
        self.end(15);
    }

    fn kill(&self) {
        self.end(9);
    }

    fn listens(&self) -> bool {
        true
    }

    fn usage(&self) -> Option<(u64, u64)> {
        Some((1 << 20, 1))
    }
}

/// Answers every request, or none but health checks. Its connections end with it.
async fn serve(listener: TcpListener, calls: Arc<AtomicU64>, hangs: bool) {
    let mut connections = tokio::task::JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        connections.spawn(converse(stream, Arc::clone(&calls), hangs));
    }
}

async fn converse(stream: TcpStream, calls: Arc<AtomicU64>, hangs: bool) {
    let mut stream = BufReader::new(stream);
    loop {
        let (mut length, mut line, mut first) = (0, String::new(), None);
        loop {
            line.clear();
            if !matches!(stream.read_line(&mut line).await, Ok(1..)) {
                return;
            }
            let text = line.trim().to_ascii_lowercase();
            first.get_or_insert_with(|| text.clone());
            if let Some(value) = text.strip_prefix("content-length:") {
                length = value.trim().parse().unwrap_or_default();
            }
            if text.is_empty() {
                break;
            }
        }
        let mut body = vec![0; length];
        if stream.read_exact(&mut body).await.is_err() {
            return;
        }
        let is_call = first.is_some_and(|first| first.starts_with("post"));
        calls.fetch_add(u64::from(is_call), Relaxed);
        if is_call && hangs {
            std::future::pending::<()>().await;
        }
        let answer = "{\"output\":\"done\"}";
        let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: ";
        let whole = format!("{head}{}\r\n\r\n{answer}", answer.len());
        if stream.get_mut().write_all(whole.as_bytes()).await.is_err() {
            return;
        }
    }
}

impl Runtime for Containers {
    fn lack(&self, provider: Provider, gpu: bool) -> Option<Failure> {
        let lacks = gpu || provider == Provider::Docker;
        lacks.then(|| Failure::new("NO_CAPACITY", "this machine has no such thing"))
    }

    fn adopts(&self, _: Provider) -> bool {
        self.adopts.load(Relaxed)
    }

    fn build(&self, request: BuildRequest, _: LineSink) -> BoxFuture<'_, Result<Image, Failure>> {
        self.builds.fetch_add(1, Relaxed);
        let failure = lock(&self.failing_builds).pop_front();
        async move {
            match failure {
                Some(failure) => Err(failure),
                None => Ok(image(&request)),
            }
        }
        .boxed()
    }

    fn start(&self, request: StartRequest) -> BoxFuture<'_, Result<Started, Failure>> {
        if request.adopt {
            let gone = Failure::new("NO_CAPACITY", "it is no longer running");
            return async move { Err(gone) }.boxed();
        }
        self.launch(request).boxed()
    }

    fn hold(&self, _: Provider, _: Image) -> BoxFuture<'_, bool> {
        async { true }.boxed()
    }

    fn forget_images(&self, _: AgentId, _: Vec<String>) -> BoxFuture<'_, ()> {
        async {}.boxed()
    }
}

fn image(request: &BuildRequest) -> Image {
    Image {
        reference: format!("{}/{}", request.agent_id, request.deployment_id),
        runtime: RuntimeSpec::default(),
        command: vec!["agent".to_owned()],
        port: None,
        health_path: "/health".to_owned(),
        invoke_path: "/invoke".to_owned(),
        concurrency: 2,
        isolation_minimum: vec![],
        read_only_root: false,
        commit: None,
        digest: None,
    }
}

/// Keeps bytes in memory.
#[derive(Default)]
pub struct MemoryBlobs(Mutex<BTreeMap<String, Bytes>>);

impl Blobs for MemoryBlobs {
    fn receive(&self, mut bytes: ByteStream, _: u64) -> BoxFuture<'_, Result<Received, BlobError>> {
        async move {
            let mut whole = vec![];
            while let Some(part) = bytes.next().await {
                whole.extend_from_slice(&part.map_err(BlobError::Broken)?);
            }
            let mut kept = lock(&self.0);
            let sha256 = format!("{:064x}", kept.len());
            let size_bytes = whole.len() as u64;
            kept.insert(sha256.clone(), whole.into());
            Ok(Received { size_bytes, sha256 })
        }
        .boxed()
    }

    fn read(&self, sha256: &str) -> BoxFuture<'_, std::io::Result<Option<Bytes>>> {
        let found = lock(&self.0).get(sha256).cloned();
        async move { Ok(found) }.boxed()
    }

    fn touch(&self, sha256: &str) -> BoxFuture<'_, bool> {
        let found = lock(&self.0).contains_key(sha256);
        async move { found }.boxed()
    }

    fn keep_copies(&self, _: BTreeSet<String>) -> BoxFuture<'_, u64> {
        async { 0 }.boxed()
    }

    fn sweep(&self, needed: BTreeSet<String>, _: Duration) -> BoxFuture<'_, u64> {
        let mut kept = lock(&self.0);
        let before = kept.len();
        kept.retain(|name, _| needed.contains(name));
        let removed = (before - kept.len()) as u64;
        async move { removed }.boxed()
    }
}

/// Keeps lines in memory.
#[derive(Default)]
pub struct MemoryLogs(Mutex<Vec<(AgentId, LogLine)>>);

impl Logs for MemoryLogs {
    fn append(&self, agent: AgentId, line: LogLine) {
        lock(&self.0).push((agent, line));
    }

    fn read(&self, agent: AgentId, query: LogQuery) -> BoxFuture<'_, (Vec<LogLine>, bool)> {
        let lines = lock(&self.0);
        let own = lines.iter().filter(|(of, line)| *of == agent && query.takes(line));
        let found = own.map(|(_, line)| line.clone()).collect();
        async move { (found, false) }.boxed()
    }

    fn read_copies(
        &self,
        _: Vec<NodeId>,
        _: AgentId,
        _: LogQuery,
    ) -> BoxFuture<'_, (Vec<(NodeId, LogLine)>, bool)> {
        async { (vec![], false) }.boxed()
    }

    fn follow(&self, _: AgentId) -> broadcast::Receiver<LogLine> {
        broadcast::channel(1).1
    }

    fn forget(&self, agent: AgentId) {
        lock(&self.0).retain(|(of, _)| *of != agent);
    }
}

/// Forgets metrics.
pub struct NoSeries;

impl Series for NoSeries {
    fn put(&self, _: AgentId, _: Timestamp, _: Vec<u8>) {}

    fn range(
        &self,
        _: Option<NodeId>,
        _: AgentId,
        _: Timestamp,
        _: Timestamp,
    ) -> Vec<(Timestamp, Vec<u8>)> {
        vec![]
    }

    fn forget(&self, _: AgentId) {}
}

/// A cluster of one has no peers.
struct Nobody;

impl Peers for Nobody {
    fn is_alive(&self, _: NodeId) -> bool {
        false
    }

    fn ask(&self, _: NodeId, _: Bytes, _: Duration) -> BoxFuture<'_, Result<Bytes, PeerError>> {
        async { Err(PeerError::Unreached("there is nobody".to_owned())) }.boxed()
    }

    fn pass(&self, _: NodeId, _: PeerRequest) -> BoxFuture<'_, Result<PeerResponse, PeerError>> {
        async { Err(PeerError::Unreached("there is nobody".to_owned())) }.boxed()
    }
}

impl ClusterView for Nobody {
    fn alive(&self) -> BTreeSet<NodeId> {
        BTreeSet::new()
    }

    fn ready(&self) -> BTreeSet<NodeId> {
        BTreeSet::new()
    }

    fn groups(&self) -> Vec<GroupView> {
        vec![]
    }

    fn contact(&self) -> Contact {
        Contact { knows_leaders: true, last: Some(std::time::Duration::ZERO) }
    }

    fn mint_token(&self) -> BoxFuture<'_, Result<NewToken, ProposeError>> {
        async { Err(ProposeError::Unavailable) }.boxed()
    }
}

impl Snapshots for Nobody {
    fn begin(&self) -> BoxFuture<'_, Option<SnapshotRecord>> {
        async { None }.boxed()
    }

    fn list(&self) -> BoxFuture<'_, Vec<SnapshotRecord>> {
        async { vec![] }.boxed()
    }

    fn read(&self, _: SnapshotRecord) -> BoxFuture<'_, std::io::Result<Option<ByteStream>>> {
        async { Ok(None) }.boxed()
    }

    fn remove(&self, _: SnapshotRecord) -> BoxFuture<'_, std::io::Result<bool>> {
        async { Ok(false) }.boxed()
    }
}

/// A node without anything real in it but the rules and the actors.
pub struct FakeNode {
    /// What the actors reach for.
    pub world: Arc<World>,
    /// What is agreed.
    pub ledger: Arc<MemoryLedger>,
    /// What runs.
    pub containers: Arc<Containers>,
    /// The time.
    pub clock: Arc<HandClock>,
    /// What was written.
    pub logs: Arc<MemoryLogs>,
    /// Who is called.
    pub receiver: Arc<Receiver>,
}

/// Somebody outside who answers as told, and keeps what they got.
#[derive(Default)]
pub struct Receiver {
    answers: Mutex<VecDeque<Result<OutboundAnswer, OutboundError>>>,
    got: Mutex<Vec<OutboundRequest>>,
}

impl Receiver {
    /// Answers the next request with this status; requests beyond those told are answered 200.
    pub fn answer(&self, status: u16, retry_after: Option<Duration>) {
        let answer = OutboundAnswer { status, body: "told".to_owned(), retry_after };
        lock(&self.answers).push_back(Ok(answer));
    }

    /// What came so far.
    pub fn got(&self) -> Vec<OutboundRequest> {
        lock(&self.got).clone()
    }
}

impl Outbound for Receiver {
    fn post(
        &self,
        request: OutboundRequest,
    ) -> BoxFuture<'_, Result<OutboundAnswer, OutboundError>> {
        lock(&self.got).push(request);
        let well = OutboundAnswer { status: 200, body: String::new(), retry_after: None };
        let answer = lock(&self.answers).pop_front().unwrap_or(Ok(well));
        async move { answer }.boxed()
    }
}

fn world(ports: Ports, settings: Settings, node_id: NodeId, watch: Arc<Watch>) -> World {
    let boot = format!("{node_id}:first");
    let keychain = Keychain::new(vec![MasterKey::new([7; 32])]);
    World::new(ports, settings, (node_id, boot), keychain, watch)
}

/// A node's world over another ledger and another clock; everything else is as here.
pub fn world_over(
    ledger: Arc<dyn Ledger>,
    clock: Arc<dyn Clock>,
    settings: Settings,
    node_id: NodeId,
) -> Arc<World> {
    let watch = Watch::new(settings.builds);
    let ports = Ports { ledger, clock, ..FakeNode::new(settings.clone()).world.ports.clone() };
    Arc::new(world(ports, settings, node_id, watch))
}

impl FakeNode {
    /// With these settings; nothing acts until [`crate::root::start`].
    pub fn new(settings: Settings) -> Self {
        let watch = Watch::new(settings.builds);
        let ledger = Arc::new(MemoryLedger::new(2, Arc::clone(&watch)));
        let containers = Arc::new(Containers::default());
        let clock = Arc::new(HandClock::default());
        let logs = Arc::new(MemoryLogs::default());
        let receiver = Arc::new(Receiver::default());
        let ports = Ports {
            ledger: Arc::clone(&ledger) as _,
            runtime: Arc::clone(&containers) as _,
            blobs: Arc::new(MemoryBlobs::default()),
            logs: Arc::clone(&logs) as _,
            series: Arc::new(NoSeries),
            clock: Arc::clone(&clock) as _,
            entropy: Arc::new(Counter::default()),
            peers: Arc::new(Nobody),
            cluster: Arc::new(Nobody),
            outbound: Arc::clone(&receiver) as _,
            snapshots: Arc::new(Nobody),
        };
        let world = Arc::new(world(ports, settings, NodeId(1), watch));
        Self { world, ledger, containers, clock, logs, receiver }
    }
}
