//! The only file that knows every part: adapters meet ports here.

use std::{
    collections::BTreeSet,
    fs, io,
    net::{Ipv4Addr, SocketAddr},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use actors::{
    call::Service,
    instance::InstanceMessage,
    ports::{Clock as _, Ledger as _, Runtime as _},
    root::{self, RootMessage, Watch},
    seal::Keychain,
    settings::Settings,
    world::{Ports, World},
};
use anyhow::{Context as _, ensure};
use api::Traffic;
use cluster::{
    RaftLedger, Settings as LedgerSettings, Storage,
    answer::PeerPort,
    gossip::{Alive, Gossip, Member, load::Load, seal::Keyring},
    peer::{self, book::AddressBook, client::PeerClient},
    raft::{group::Snapshots, step},
};
use domain::{
    NodeId, OrgId, Rejection, cloud::Provider, directory::Command, machine::Entry, node::NodeFacts,
};
use poem::Server;
use ractor::ActorRef;
use rustls::ServerConfig;
use tokio::{
    net::{TcpListener, UdpSocket},
    sync::watch,
    task::JoinHandle,
};

use crate::{
    adapters::{
        authority::Authority,
        blobs::FolderBlobs,
        builder::Builder,
        carry::Carrier,
        copies::CopiedBlobs,
        docker::DockerRuntime,
        door::Door,
        git::GitHost,
        isolation::Isolation,
        local::LocalRuntime,
        logs::{Retention, SegmentLogs},
        metrics::Metrics,
        outbound::HttpsOutbound,
        peers::NodePeers,
        process::ProcessRuntime,
        series::SledSeries,
        snapshots::{Backups, SnapshotPort, Sources},
        source::Fetcher,
        system::{SystemClock, SystemDice, random_bytes},
        tls::{Certificates, local_names},
        view::NodeView,
    },
    bootstrap::{self, DefaultClouds, FirstSecrets},
    config::Config,
    hex,
    host::NodeHost,
    identity::NodeIdentity,
    keys::Keys,
    masters::{self, Masters},
    steward,
    tasks::Tasks,
};

/// Between looks at what this machine runs.
const TEND_EVERY: Duration = Duration::from_secs(5);
/// Between prunings of logs and metrics.
const PRUNE_EVERY: Duration = Duration::from_secs(60);
/// How long open requests may go on when the node stops.
const REQUESTS_END_WITHIN: Duration = Duration::from_secs(10);
/// How long deliveries that are under way may take.
const DELIVERIES_END_WITHIN: Duration = Duration::from_secs(3);
/// How long actors may take to end.
const ACTORS_END_WITHIN: Duration = Duration::from_secs(5);
/// How long killed instances may take to be gone.
const INSTANCES_END_WITHIN: Duration = Duration::from_secs(5);
/// How long a folder may still be locked by a node that is on its way out.
const LOCK_WAITED_FOR: Duration = Duration::from_secs(1);
/// Moments at which groups look at their clocks, between two heartbeats.
const STEPS_OF_A_BEAT: u32 = 5;
/// Ports tried for a node that may have any.
const PORT_TRIES: u32 = 20;
/// Datagrams that may wait to be heard.
const DATAGRAMS_BYTES: usize = 1 << 20;
/// How long an idle connection stays open.
const IDLE_CONNECTION: Duration = Duration::from_secs(120);
/// Requests at once on one HTTP/2 connection.
const HTTP2_STREAMS_MAX: u32 = 256;

/// A running node.
pub struct Node {
    /// Its id.
    pub node_id: NodeId,
    /// Where it is reached, without a slash at the end.
    pub base_url: String,
    /// The authority of its certificate.
    pub ca_cert: PathBuf,
    /// Its folder.
    pub data: PathBuf,
    /// The first organization.
    pub org_id: OrgId,
    /// What is printed once; `None` after the first start.
    pub secrets: Option<FirstSecrets>,
    /// The layers of isolation of this machine.
    pub isolation: Vec<String>,
    world: Arc<World>,
    runtime: Arc<LocalRuntime>,
    ledger: Arc<RaftLedger>,
    root: ActorRef<RootMessage>,
    stop: watch::Sender<bool>,
    closed: watch::Sender<bool>,
    door: JoinHandle<()>,
    traffic: Arc<Traffic>,
    tasks: Tasks,
    _lock: fs::File,
}

/// The adapters that are not behind the ledger.
struct Adapters {
    runtime: Arc<LocalRuntime>,
    blobs: Arc<CopiedBlobs>,
    logs: Arc<SegmentLogs>,
    series: Arc<SledSeries>,
}

impl Adapters {
    async fn open(
        data: &Path,
        identity: &NodeIdentity,
        config: &Config,
        program: &Path,
    ) -> anyhow::Result<Self> {
        let node = identity.node_id;
        let isolation = Isolation::probe(program, data, &format!("roost-{node}"));
        let missing: Vec<_> =
            config.runtime.minimum_isolation.iter().filter(|layer| !isolation.has(layer)).collect();
        ensure!(
            missing.is_empty(),
            "this machine lacks isolation that runtime.minimum_isolation asks for: {missing:?}"
        );
        let ports = config.runtime.port_first..=config.runtime.port_last;
        let process = ProcessRuntime::open(data, isolation, ports)
            .context("what an earlier life left behind could not be cleared away")?;
        let process = Arc::new(process);
        let blobs = FolderBlobs::open(&data.join("blobs")).context("the folder of blobs")?;
        let blobs = CopiedBlobs::new(Arc::new(blobs));
        let git = GitHost { base_url: config.github.base_url.clone() };
        let fetcher = Arc::new(Fetcher { blobs: Arc::clone(&blobs), git });
        let builder =
            Builder::new(data, Arc::clone(&fetcher), Arc::clone(&process), config.ca_bundle());
        let docker = Arc::new(DockerRuntime::open(data, node, config.docker(), fetcher).await?);
        let carrier = Carrier::new(data, Arc::clone(&docker));
        let retention =
            Retention { bytes: config.logs.megabytes * 1024 * 1024, age: config.logs.keep.0 };
        Ok(Self {
            runtime: Arc::new(LocalRuntime {
                process,
                builder: Arc::new(builder),
                docker,
                carrier,
            }),
            blobs,
            logs: Arc::new(SegmentLogs::open(&data.join("logs"), retention, identity.raft_id)?),
            series: Arc::new(SledSeries::open(&data.join("series"))?),
        })
    }
}

/// Where a node is started.
pub struct Place<'a> {
    /// Its folder.
    pub data: &'a Path,
    /// Where it listens for clients.
    pub clients: SocketAddr,
    /// Where it listens for other nodes. Port 0 is the one it had before, or any.
    pub peers: SocketAddr,
    /// What other nodes are told of that, as `host:port`; the listening address if empty.
    pub advertise: &'a str,
    /// Told when the node was taken out of its cluster and has nothing left to do; also before it is ready.
    pub taken_out: watch::Sender<bool>,
}

/// Starts a node on `data`, listening on `address`, for nobody but this machine; an empty folder
/// becomes a cluster of one. It is ready on return.
pub async fn start(data: &Path, address: SocketAddr, config: &Config) -> anyhow::Result<Node> {
    prepare(data).with_context(|| format!("the data folder {}", data.display()))?;
    NodeIdentity::read_or_found(data, config.cluster.shards)?;
    let peers = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let (taken_out, _) = watch::channel(false);
    serve_at(Place { data, clients: address, peers, advertise: "", taken_out }, config).await
}

/// Starts the node that `data` belongs to. It is ready on return.
pub async fn serve_at(place: Place<'_>, config: &Config) -> anyhow::Result<Node> {
    let program = std::env::current_exe().context("this program can't be found")?;
    let mut identity = NodeIdentity::read(place.data)?.with_context(|| {
        let folder = place.data.display();
        format!("{folder} belongs to no node; begin with `roost init` or `roost join`")
    })?;
    prepare(place.data).with_context(|| format!("the data folder {}", place.data.display()))?;
    let data = place.data.canonicalize()?;
    let lock = lock_folder(&data)?;
    let keys = Keys::open(&data.join("keys"))?;
    let authority = Authority::open(&data.join("keys"))?;
    let adapters = Adapters::open(&data, &identity, config, &program).await?;
    let door = listen(place.clients, "--port").await?;
    let peers = open_peers(&data, &mut identity, &place, &authority).await?;
    let host = identity.peer_address.rsplit_once(':').map_or("127.0.0.1", |(host, _)| host);
    let base_url = public_url(config, door.local_addr()?, host);
    let certificates =
        Certificates::open(&data.join("tls"), &front_names(host, config), &authority)?;
    let watch = Watch::new(config.actors().builds);
    let ledger = open_ledger(&data, &mut identity, config, &watch, &peers).await?;
    let port = PeerPort::new(Arc::clone(&ledger));
    let (stop, stopped) = watch::channel(false);
    // Peers are answered until the log is closed.
    let (closed, closing) = watch::channel(false);
    let mut tasks = Tasks::default();
    tasks.spawn(
        "the peer port",
        peer::server::serve(peers.listener, peers.tls, Arc::clone(&port) as _, closing),
    );
    tasks.spawn("the ledger", Arc::clone(&ledger).run());
    let (alive, ready) = (Alive::new(identity.raft_id), Arc::new(AtomicBool::new(false)));
    ledger.heed(Arc::clone(&alive));
    let keyring = Arc::new(Keyring::new(keys.gossip));
    let gossip = gossip(peers.socket, &identity, &keyring, &ledger, &alive, &watch, &ready).await?;
    tasks.spawn("gossip", gossip.run(stopped.clone()));
    let runtime = Arc::clone(&adapters.runtime);
    let reach = Reach::new(peers.client, &ledger, &alive, &authority, config)?;
    let removal = steward::heed_removal(Arc::clone(&ledger), Arc::clone(&reach.peers.client));
    let taken_out = place.taken_out.clone();
    tasks.spawn("what heeds a removal", async move {
        removal.await;
        taken_out.send_replace(true);
    });
    // First of all the others must know where this node is.
    register(&ledger, facts(&identity, &base_url, config, &runtime)).await?;
    ledger.ready().await;
    masters::check(&ledger, &keys.masters)?;
    let secrets = bootstrap(&ledger, &identity, &keys, config, &runtime).await?;
    let isolation = adapters.runtime.process.isolation().layers.clone();
    tasks.spawn("the runtime", tend(Arc::clone(&runtime), Arc::clone(&ledger)));
    tasks.spawn("series and logs", prune(Arc::clone(&adapters.series), Arc::clone(&adapters.logs)));
    adapters.blobs.connect(Arc::clone(&reach.peers));
    adapters.runtime.carrier.connect(Arc::clone(&reach.peers));
    let blobs = Arc::clone(&adapters.blobs);
    let backups = open_backups(&data, &adapters, &ledger, &reach, &keys)?;
    let settings = Settings { public_url: base_url.clone(), ..config.actors() };
    let (reach_view, own_peers) = (Arc::clone(&reach.view), Arc::clone(&reach.peers));
    let reach = (reach, Arc::clone(&backups));
    let world = world(adapters, Arc::clone(&ledger), reach, watch, settings, &identity, &keys);
    backups.connect(&world);
    let root = root::start(Arc::clone(&world)).await?;
    let traffic = Arc::new(Traffic::default());
    let (log, state) = ledger.figures();
    let metrics = Metrics { traffic: Arc::clone(&traffic), log, state, began: Instant::now() };
    let masters = Masters::new(data.join("keys"), own_peers)?;
    let host = NodeHost {
        metrics,
        view: reach_view,
        world: Arc::clone(&world),
        ledger: Arc::clone(&ledger),
        runtime: Arc::clone(&runtime),
        blobs,
        backups,
        alive: Arc::clone(&alive),
        keys: keys.clone(),
        masters: Arc::clone(&masters),
        authority,
        shards: identity.shards,
    };
    port.open(Arc::new(host));
    ready.store(true, Relaxed);
    let keepers = Keepers { world: &world, ledger: &ledger, masters, alive, keyring };
    keepers.start(&mut tasks, &root, data.join("keys"));
    tasks.spawn("the actors", heed_root(root.clone(), stopped.clone()));
    if let Err(error) = steward::make_signing_key(&world).await {
        tracing::warn!(%error, "there is no key for access tokens yet; logins fail until there is");
    }
    let settings = interface(config, &keys, base_url)?;
    let served = Arc::clone(&traffic);
    let open =
        open_door(served, &world, settings, door, certificates.server_config()?, stop, stopped);
    Ok(Node {
        node_id: identity.node_id,
        base_url: open.base_url,
        ca_cert: certificates.authority,
        org_id: first_organization(&world)?,
        data,
        secrets,
        isolation,
        world,
        runtime,
        ledger,
        root,
        stop: open.stop,
        closed,
        door: open.task,
        traffic,
        tasks,
        _lock: lock,
    })
}

/// What clients may call this node by.
fn front_names(host: &str, config: &Config) -> Vec<String> {
    let own = local_names().into_iter().chain([host.trim_matches(['[', ']']).to_owned()]);
    own.chain(config.http.names.clone()).collect()
}

/// The way to others: nodes, the cluster as a whole, the world outside.
struct Reach {
    peers: Arc<NodePeers>,
    view: Arc<NodeView>,
    outbound: Arc<HttpsOutbound>,
}

impl Reach {
    fn new(
        client: Arc<PeerClient>,
        ledger: &Arc<RaftLedger>,
        alive: &Arc<Alive>,
        authority: &Authority,
        config: &Config,
    ) -> anyhow::Result<Self> {
        let (bundle, own) = (config.outbound_bundle(), Some(Arc::clone(ledger)));
        let outbound = HttpsOutbound::new(config.outbound_allowed()?, bundle.as_deref(), own)?;
        Ok(Self {
            peers: Arc::new(NodePeers {
                client,
                ledger: Arc::clone(ledger),
                alive: Arc::clone(alive),
            }),
            view: Arc::new(NodeView {
                ledger: Arc::clone(ledger),
                alive: Arc::clone(alive),
                authority: authority.clone(),
            }),
            outbound: Arc::new(outbound),
        })
    }
}

/// Who looks after the node for as long as it runs.
struct Keepers<'n> {
    world: &'n Arc<World>,
    ledger: &'n Arc<RaftLedger>,
    masters: Arc<Masters>,
    alive: Arc<Alive>,
    keyring: Arc<Keyring>,
}

impl Keepers<'_> {
    fn start(self, tasks: &mut Tasks, root: &ActorRef<RootMessage>, keys: PathBuf) {
        let Self { world, ledger, masters, alive, keyring } = self;
        let grace = world.settings.replacement_grace;
        tasks.spawn(
            "what follows the living",
            steward::follow_the_living(Arc::clone(&alive), root.clone(), grace),
        );
        tasks.spawn("master keys", masters::forget_old(masters, Arc::clone(world)));
        tasks.spawn(
            "keys of gossip",
            steward::turn_keys(Arc::clone(ledger), keyring, Arc::clone(world), keys),
        );
        tasks.spawn(
            "the autopilot",
            steward::judge(Arc::clone(ledger), alive, world.settings.autopilot()),
        );
        tasks.spawn("stored files", sweep_storage(Arc::clone(world)));
        tasks.spawn("what vouches for keys", Arc::clone(world).tend_vouching());
        tasks.spawn("rates", Arc::clone(world).tend_rates());
        tasks.spawn("calls in flight", Arc::clone(world).tend_flights());
        tasks.spawn("the relay", Arc::clone(world).relay());
    }
}

async fn listen(address: SocketAddr, option: &str) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address).await.with_context(|| {
        format!("the address {address} is taken; choose another port with {option}, or 0 for any")
    })
}

/// The peer port, open, and the way to others.
struct OpenPeers {
    listener: TcpListener,
    socket: UdpSocket,
    tls: Arc<ServerConfig>,
    client: Arc<PeerClient>,
}

/// Opens the peer port where this node was reached before, if it may choose.
async fn open_peers(
    data: &Path,
    identity: &mut NodeIdentity,
    place: &Place<'_>,
    authority: &Authority,
) -> anyhow::Result<OpenPeers> {
    let before = identity.peer_address.rsplit(':').next().and_then(|port| port.parse().ok());
    let mut address = place.peers;
    if address.port() == 0 {
        address.set_port(before.unwrap_or(0));
    }
    let (listener, socket) = listen_to_peers(address).await?;
    let bound = listener.local_addr()?;
    let advertised = match place.advertise {
        "" if bound.ip().is_unspecified() => format!("{}:{}", outbound_address(), bound.port()),
        "" => bound.to_string(),
        told => told.to_owned(),
    };
    if identity.peer_address != advertised {
        identity.peer_address = advertised;
        identity.write(data)?;
    }
    let book = Arc::new(AddressBook::default());
    identity.seeds.iter().for_each(|(raft_id, address)| book.put(*raft_id, address));
    let own = authority.peer_identity(&data.join("keys"), identity.raft_id)?;
    let client = PeerClient::new(own.client()?, identity.raft_id, book);
    Ok(OpenPeers { listener, socket, tls: own.server()?, client })
}

/// The same port for calls and for gossip.
async fn listen_to_peers(address: SocketAddr) -> anyhow::Result<(TcpListener, UdpSocket)> {
    let mut tries = 0;
    loop {
        let listener = listen(address, "--peer").await?;
        let port = listener.local_addr()?.port();
        match UdpSocket::bind(SocketAddr::new(address.ip(), port)).await {
            Ok(socket) => {
                // The kernel gives as much of it as the machine allows.
                let _ = rustix::net::sockopt::set_socket_recv_buffer_size(&socket, DATAGRAMS_BYTES);
                return Ok((listener, socket));
            }
            // Somebody else has that port for datagrams: any other will do.
            Err(_) if address.port() == 0 && tries < PORT_TRIES => tries += 1,
            Err(error) => {
                return Err(error).with_context(|| format!("UDP port {port} is taken"));
            }
        }
    }
}

async fn gossip(
    socket: UdpSocket,
    identity: &NodeIdentity,
    keyring: &Arc<Keyring>,
    ledger: &Arc<RaftLedger>,
    alive: &Arc<Alive>,
    watch: &Arc<Watch>,
    ready: &Arc<AtomicBool>,
) -> anyhow::Result<Gossip> {
    let address = tokio::net::lookup_host(&identity.peer_address).await.ok();
    let address = address.and_then(|mut found| found.next()).with_context(|| {
        format!("cluster.advertise: {} leads nowhere; use host:port", identity.peer_address)
    })?;
    let life = SystemClock.now().millis();
    let me = Member { raft_id: identity.raft_id, address, life };
    let (known, seeds) = (Arc::clone(ledger), identity.seeds.clone());
    let members = move || {
        let directory = known.directory().read();
        let members = directory.nodes.rows().filter(|(_, node)| node.is_member());
        let address =
            |node: &domain::node::Node| (node.facts.raft_id, node.facts.peer_address.clone());
        let members: Vec<_> = members.map(|(_, node)| address(node)).collect();
        if members.is_empty() { seeds.clone() } else { members }
    };
    let (watch, ready) = (Arc::clone(watch), Arc::clone(ready));
    let load = move || Load {
        at: SystemClock.now().millis(),
        instances: u32::try_from(watch.instances.handles().len()).unwrap_or(u32::MAX),
        ready: ready.load(Relaxed),
        ..Load::default()
    };
    Ok(Gossip {
        socket,
        me,
        keyring: Arc::clone(keyring),
        alive: Arc::clone(alive),
        members: Arc::new(members),
        load: Box::new(load),
    })
}

/// The address that this machine would send from; nothing is sent.
fn outbound_address() -> std::net::IpAddr {
    let asked = std::net::UdpSocket::bind("0.0.0.0:0").and_then(|socket| {
        socket.connect("192.0.2.1:9")?;
        socket.local_addr()
    });
    asked.map_or(Ipv4Addr::LOCALHOST.into(), |address| address.ip())
}

/// What this node tells the cluster of itself.
pub fn facts(
    identity: &NodeIdentity,
    base_url: &str,
    config: &Config,
    runtime: &LocalRuntime,
) -> NodeFacts {
    let capacity = config.actors().capacity;
    let providers = [Provider::Process, Provider::Sandbox, Provider::Docker];
    let has = |provider: &Provider| runtime.lack(*provider, false).is_none();
    NodeFacts {
        id: identity.node_id,
        raft_id: identity.raft_id,
        peer_address: identity.peer_address.clone(),
        base_url: base_url.to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        labels: config.labels(),
        cores: capacity.cores,
        memory_mb: capacity.memory_mb,
        providers: providers
            .iter()
            .filter(|one| has(one))
            .map(|one| one.as_str().to_owned())
            .collect(),
    }
}

/// Between tries to be known to the cluster.
const REGISTERED_AGAIN_AFTER: Duration = Duration::from_millis(200);

async fn register(ledger: &RaftLedger, facts: NodeFacts) -> anyhow::Result<()> {
    let known = ledger.directory().read().nodes.get(&facts.id);
    if known.is_some_and(|node| node.facts == facts && node.is_member()) {
        return Ok(());
    }
    let never = || std::future::pending();
    let command = Command::RegisterNode(Box::new(facts));
    loop {
        let command = command.clone();
        let entry = Entry::new(SystemClock.now(), command);
        match ledger.change_directory(entry).await {
            // Groups may still count on it; its end is told from elsewhere.
            Ok(answer) if matches!(answer.result, Err(Rejection::NodeRemoved(_))) => never().await,
            Ok(answer) => {
                answer.result?;
                return Ok(());
            }
            Err(error) => tracing::warn!(%error, "waiting for a majority of the cluster"),
        }
        tokio::time::sleep(REGISTERED_AGAIN_AFTER).await;
    }
}

/// Everything that actors and calls reach for.
fn world(
    adapters: Adapters,
    ledger: Arc<RaftLedger>,
    (reach, backups): (Reach, Arc<Backups>),
    watch: Arc<Watch>,
    settings: Settings,
    identity: &NodeIdentity,
    keys: &Keys,
) -> Arc<World> {
    let series = Arc::clone(&adapters.series);
    let ports = Ports {
        ledger,
        runtime: adapters.runtime,
        blobs: adapters.blobs,
        logs: adapters.logs,
        series: adapters.series,
        clock: Arc::new(SystemClock),
        entropy: Arc::new(SystemDice),
        peers: reach.peers,
        cluster: reach.view,
        outbound: reach.outbound,
        snapshots: Arc::new(SnapshotPort(backups)),
    };
    let boot = format!("{}:{}", identity.node_id, hex(&random_bytes::<8>()));
    let keychain = Keychain::new(keys.masters.clone());
    let world = Arc::new(World::new(ports, settings, (identity.node_id, boot), keychain, watch));
    series.all().for_each(|(agent, at, bucket)| world.meter.restore(agent, at, &bucket));
    series.all_coarse().for_each(|(agent, bucket)| world.meter.restore_uptime(agent, &bucket));
    world
}

fn open_backups(
    data: &Path,
    adapters: &Adapters,
    ledger: &Arc<RaftLedger>,
    reach: &Reach,
    keys: &Keys,
) -> anyhow::Result<Arc<Backups>> {
    let sources = Sources {
        ledger: Arc::clone(ledger),
        blobs: Arc::clone(&adapters.blobs),
        runtime: Arc::clone(&adapters.runtime),
        peers: Arc::clone(&reach.peers),
        keys: keys.clone(),
    };
    Backups::open(data.join("backups"), sources).context("the folder of backups")
}

/// What the interface goes by.
fn interface(config: &Config, keys: &Keys, base_url: String) -> anyhow::Result<api::Settings> {
    let auth_url = Some(config.auth_url.trim_end_matches('/')).filter(|url| !url.is_empty());
    Ok(api::Settings {
        auth_url: auth_url.map_or_else(|| base_url.clone(), str::to_owned),
        public_url: base_url,
        signing_key: keys.signing,
        pepper: keys.pepper,
        cors_origins: config.http.cors_origins.clone(),
        trusted_proxies: config.trusted_proxies(),
        default_tier: config.default_tier()?,
    })
}

/// The front door, open.
struct OpenDoor {
    base_url: String,
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
}

fn open_door(
    traffic: Arc<Traffic>,
    world: &Arc<World>,
    settings: api::Settings,
    listener: TcpListener,
    certificate: Arc<ServerConfig>,
    stop: watch::Sender<bool>,
    stopped: watch::Receiver<bool>,
) -> OpenDoor {
    let door = Door::new(listener, certificate, Arc::clone(world));
    let base_url = settings.public_url.clone();
    let task = tokio::spawn(serve(traffic, world, settings, door, stopped));
    OpenDoor { base_url, stop, task }
}

/// Makes the folder; other users may pass through it to an image, and see nothing else.
fn prepare(data: &Path) -> io::Result<()> {
    fs::create_dir_all(data)?;
    fs::set_permissions(data, fs::Permissions::from_mode(0o711))?;
    for private in ["keys", "tls", "blobs", "logs", "series", "backups"] {
        fs::create_dir_all(data.join(private))?;
        fs::set_permissions(data.join(private), fs::Permissions::from_mode(0o700))?;
    }
    for passable in ["images", "run"] {
        fs::create_dir_all(data.join(passable))?;
        fs::set_permissions(data.join(passable), fs::Permissions::from_mode(0o711))?;
    }
    Ok(())
}

/// One node per folder: a second one is told so before it touches anything.
pub fn lock_folder(data: &Path) -> anyhow::Result<fs::File> {
    let file =
        fs::OpenOptions::new().create(true).truncate(false).write(true).open(data.join("lock"))?;
    let until = std::time::Instant::now() + LOCK_WAITED_FOR;
    loop {
        let locked = rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive);
        match locked {
            Ok(()) => return Ok(file),
            // One that was just killed may take a moment to be gone.
            Err(_) if std::time::Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(error) => {
                return Err(error).with_context(|| {
                    format!(
                        "another node is using {}; stop it, or choose another --data",
                        data.display()
                    )
                });
            }
        }
    }
}

async fn open_ledger(
    data: &Path,
    identity: &mut NodeIdentity,
    config: &Config,
    watch: &Arc<Watch>,
    peers: &OpenPeers,
) -> anyhow::Result<Arc<RaftLedger>> {
    let settings = LedgerSettings {
        node_id: identity.node_id,
        node: identity.raft_id,
        shards: identity.shards,
        founds: identity.founds.then(|| identity.peer_address.clone()),
        write_deadline: config.cluster.write_deadline.0,
        timeouts: config.timeouts(),
        snapshots: Snapshots::default(),
        seed: u64::from_be_bytes(random_bytes()),
    };
    step::keep(config.cluster.heartbeat.0 / STEPS_OF_A_BEAT);
    let client = Arc::clone(&peers.client);
    let storage = Storage::open(data).context("the replicated log could not be opened")?;
    let opened = RaftLedger::open(storage, settings, Arc::clone(watch) as _, client).await;
    let ledger = opened.context("the replicated log could not be opened")?;
    for private in ["raft.redb", "state.redb", "node.json"] {
        fs::set_permissions(data.join(private), fs::Permissions::from_mode(0o600))?;
    }
    if !identity.has_log {
        identity.has_log = true;
        identity.write(data)?;
    }
    Ok(ledger)
}

async fn bootstrap(
    ledger: &Arc<RaftLedger>,
    identity: &NodeIdentity,
    keys: &Keys,
    config: &Config,
    runtime: &LocalRuntime,
) -> anyhow::Result<Option<FirstSecrets>> {
    if !identity.founds || !ledger.directory().read().organizations.is_empty() {
        return Ok(None);
    }
    let clouds = default_clouds(config, runtime);
    let (first, secrets) = bootstrap::first(&keys.pepper, clouds, config.default_tier()?)?;
    let command = Command::Bootstrap(Box::new(first));
    let entry = Entry::new(SystemClock.now(), command);
    ledger.change_directory(entry).await?.result?;
    Ok(Some(secrets))
}

/// The default cloud, and one for containers where an engine answers.
fn default_clouds(config: &Config, runtime: &LocalRuntime) -> DefaultClouds {
    let default = match config.runtime.default_provider.as_str() {
        "docker" => Provider::Docker,
        _ => Provider::Process,
    };
    DefaultClouds { default, has_engine: runtime.lack(Provider::Docker, false).is_none() }
}

fn first_organization(world: &World) -> anyhow::Result<OrgId> {
    let directory = world.directory().read();
    let first = directory.organizations.rows().next().map(|(id, _)| *id);
    first.context("the directory has no organization")
}

fn public_url(config: &Config, address: SocketAddr, advertised: &str) -> String {
    match config.http.public_url.trim_end_matches('/') {
        "" if address.ip().is_unspecified() => format!("https://{advertised}:{}", address.port()),
        "" => format!("https://{address}"),
        url => url.to_owned(),
    }
}

fn serve(
    traffic: Arc<Traffic>,
    world: &Arc<World>,
    settings: api::Settings,
    door: Door,
    mut stopped: watch::Receiver<bool>,
) -> impl Future<Output = ()> + use<> {
    let service = Service { world: Arc::clone(world) };
    let shared = Arc::new(api::Shared::new(service, settings, traffic));
    let routes = api::routes(&shared);
    async move {
        let until = async move {
            let _ = stopped.wait_for(|stopped| *stopped).await;
        };
        let server = Server::new(door)
            .idle_timeout(IDLE_CONNECTION)
            .http2_max_concurrent_streams(Some(HTTP2_STREAMS_MAX));
        let served =
            server.run_with_graceful_shutdown(routes, until, Some(REQUESTS_END_WITHIN)).await;
        if let Err(error) = served {
            tracing::error!(%error, "the front door has closed");
        }
    }
}

/// Keeps an eye on the engine and removes containers that nobody wants.
async fn tend(runtime: Arc<LocalRuntime>, ledger: Arc<RaftLedger>) {
    loop {
        let known: BTreeSet<String> = {
            let directory = ledger.directory().read();
            directory.instances.rows().map(|(_, row)| row.id.to_string()).collect()
        };
        runtime.tend(&known).await;
        tokio::time::sleep(TEND_EVERY).await;
    }
}

/// No actor has anybody above it once the root has ended.
async fn heed_root(root: ActorRef<RootMessage>, stopped: watch::Receiver<bool>) {
    let _ = root.wait(None).await;
    assert!(*stopped.borrow(), "the root of all actors has ended");
}

async fn sweep_storage(world: Arc<World>) {
    loop {
        tokio::time::sleep(world.settings.storage_sweep_every).await;
        world.sweep_storage().await;
    }
}

async fn prune(series: Arc<SledSeries>, logs: Arc<SegmentLogs>) {
    loop {
        tokio::time::sleep(PRUNE_EVERY).await;
        let (series, logs) = (Arc::clone(&series), Arc::clone(&logs));
        let now = SystemClock.now();
        let pruned = tokio::task::spawn_blocking(move || {
            series.prune(now);
            logs.prune(now);
        });
        let _ = pruned.await;
    }
}

impl Node {
    /// Ends requests, then actors, then instances, then the log. Nothing of it is left running. Jobs
    /// that are under way are taken up again, or end as lost, when the node comes back: exactly as
    /// after a crash.
    pub async fn stop(mut self) {
        // Gossip says goodbye first, so that nothing is handed back.
        let _ = self.stop.send(true);
        self.ledger.hand_over_all().await;
        self.world.routes.close();
        if tokio::time::timeout(REQUESTS_END_WITHIN, self.requests_are_served()).await.is_err() {
            tracing::warn!("some requests were cut off");
        }
        self.door.abort();
        // No actor may start an instance or write down an end from here on.
        let _ = self.root.stop_and_wait(None, Some(ACTORS_END_WITHIN)).await;
        self.deliveries_end().await;
        let instances = self.world.watch.instances.handles();
        for handle in &instances {
            let _ = handle.actor.cast(InstanceMessage::Kill);
        }
        let gone = self.adapters_are_quiet();
        if tokio::time::timeout(INSTANCES_END_WITHIN, gone).await.is_err() {
            tracing::warn!("some instances did not end in time");
        }
        self.runtime.docker.close().await;
        if let Some(cgroups) = &self.runtime.process.isolation().cgroups {
            cgroups.close();
        }
        let _ = self.closed.send(true);
        self.tasks.shutdown().await;
        self.ledger.close().await;
    }

    /// What was sent to receivers shall be written down, or it is sent once more.
    async fn deliveries_end(&self) {
        let until = tokio::time::Instant::now() + DELIVERIES_END_WITHIN;
        while self.world.sending.count() > 0 && tokio::time::Instant::now() < until {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// The groups of this node.
    pub fn ledger(&self) -> &Arc<RaftLedger> {
        &self.ledger
    }

    /// Whether containers run here, for people.
    pub fn containers(&self) -> String {
        match self.runtime.lack(Provider::Docker, false) {
            None => "a Docker engine answers: clouds with the provider docker run here".to_owned(),
            Some(lack) => format!("none: {}", lack.message),
        }
    }

    /// Waits until no request and no call is under way. Idle connections are not waited for.
    async fn requests_are_served(&self) {
        while self.traffic.open.load(Relaxed) > 0 || self.world.routes.in_flight() > 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Waits until no process of an instance is recorded any more.
    async fn adapters_are_quiet(&self) {
        for folder in ["run", "docker"].map(|name| self.data.join(name)) {
            while fs::read_dir(&folder).is_ok_and(|mut entries| entries.next().is_some()) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
    }
}
