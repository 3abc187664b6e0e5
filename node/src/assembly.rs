//! The only file that knows every part: adapters meet ports here.

use std::{
    collections::BTreeSet,
    fs,
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
    gossip::{Alive, seal::Keyring},
    peer::{self},
    raft::{disk::LOG, group::Snapshots, step},
};
use domain::{
    NodeId, OrgId, Rejection, cloud::Provider, directory::Command, machine::Entry, node::NodeFacts,
};
use ractor::ActorRef;
use tokio::{net::TcpListener, sync::watch};

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
        log_copies::CopiedLogs,
        logs::{Retention, SegmentLogs},
        metrics::Metrics,
        peers::NodePeers,
        port::PortRange,
        process::ProcessRuntime,
        series::SledSeries,
        series_copies::CopiedSeries,
        snapshots::{Backups, SnapshotPort, Sources},
        source::Fetcher,
        system::{SystemClock, SystemDice, random_bytes},
        tls::{Certificates, local_names},
    },
    bootstrap::{self, DefaultClouds, FirstSecrets},
    config::Config,
    folder, hex,
    host::NodeHost,
    identity::NodeIdentity,
    keys::Keys,
    masters::{self, Masters},
    reach::{OpenPeers, Reach, gossip, listen, open_peers},
    starting::Starting,
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
/// Moments at which groups look at their clocks, between two heartbeats.
const STEPS_OF_A_BEAT: u32 = 5;
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
    _door: Door,
    traffic: Arc<Traffic>,
    tasks: Tasks,
    _lock: fs::File,
}

/// The adapters that are not behind the ledger.
struct Adapters {
    runtime: Arc<LocalRuntime>,
    blobs: Arc<CopiedBlobs>,
    logs: Arc<CopiedLogs>,
    series: Arc<CopiedSeries>,
}

impl Adapters {
    async fn open(
        data: &Path,
        identity: &NodeIdentity,
        config: &Config,
        program: &Path,
        starting: &Starting,
    ) -> anyhow::Result<Self> {
        let node = identity.node_id;
        starting.next("trying what isolation this machine has");
        let isolation = Isolation::probe(program, data, &format!("roost-{node}"));
        let missing: Vec<_> =
            config.runtime.minimum_isolation.iter().filter(|layer| !isolation.has(layer)).collect();
        ensure!(
            missing.is_empty(),
            "this machine lacks isolation that runtime.minimum_isolation asks for: {missing:?}"
        );
        starting.next("clearing away what an earlier life left behind");
        let ports = PortRange::new(config.runtime.port_first..=config.runtime.port_last);
        let process = ProcessRuntime::open(data, isolation, ports)
            .context("what an earlier life left behind could not be cleared away")?;
        let process = Arc::new(process);
        let blobs = FolderBlobs::open(&data.join("blobs")).context("the folder of blobs")?;
        let blobs = CopiedBlobs::new(Arc::new(blobs));
        let git = GitHost { base_url: config.github.base_url.clone() };
        let fetcher = Arc::new(Fetcher { blobs: Arc::clone(&blobs), git });
        let builder =
            Builder::new(data, Arc::clone(&fetcher), Arc::clone(&process), config.ca_bundle());
        starting.next("asking for a Docker engine");
        let docker = Arc::new(DockerRuntime::open(data, node, config.docker(), fetcher).await?);
        starting.next("opening logs and series");
        let carrier = Carrier::new(data, Arc::clone(&docker));
        let retention =
            Retention { bytes: config.logs.megabytes * 1024 * 1024, age: config.logs.keep.0 };
        let logs = SegmentLogs::open(&data.join("logs"), retention, identity.raft_id)?;
        Ok(Self {
            runtime: Arc::new(LocalRuntime {
                process,
                builder: Arc::new(builder),
                docker,
                carrier,
            }),
            blobs,
            logs: CopiedLogs::new(logs, node, data, retention),
            series: CopiedSeries::new(SledSeries::open(&data.join("series"))?, node),
        })
    }
}

impl Adapters {
    /// From now on there are others, who keep copies.
    fn connect(&self, peers: &Arc<NodePeers>, tasks: &mut Tasks) {
        self.blobs.connect(Arc::clone(peers));
        self.runtime.carrier.connect(Arc::clone(peers));
        self.logs.courier.connect(Arc::clone(peers));
        self.series.courier.connect(Arc::clone(peers));
        let (logs, series) = (Arc::clone(&self.logs), Arc::clone(&self.series));
        tasks.spawn("copies of logs", async move { logs.courier.run().await });
        tasks.spawn("copies of series", async move { series.courier.run().await });
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
    folder::prepare(data).with_context(|| format!("the data folder {}", data.display()))?;
    NodeIdentity::read_or_found(data, config.cluster.shards)?;
    let peers = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let (taken_out, _) = watch::channel(false);
    serve_at(Place { data, clients: address, peers, advertise: "", taken_out }, config).await
}

/// What a node has before it hears of others.
struct Ground {
    data: PathBuf,
    lock: fs::File,
    identity: NodeIdentity,
    keys: Keys,
    authority: Authority,
    adapters: Adapters,
    door: TcpListener,
    peers: OpenPeers,
    base_url: String,
    tls: Certificates,
}

impl Ground {
    async fn open(place: &Place<'_>, config: &Config, starting: &Starting) -> anyhow::Result<Self> {
        let folder = place.data.display();
        let program = std::env::current_exe().context("this program can't be found")?;
        let mut identity = NodeIdentity::read(place.data)?.with_context(|| {
            format!("{folder} belongs to no node; begin with `roost init` or `roost join`")
        })?;
        folder::prepare(place.data).with_context(|| format!("the data folder {folder}"))?;
        let data = place.data.canonicalize()?;
        let lock = folder::lock(&data)?;
        let keys = Keys::open(&data.join("keys"))?;
        let authority = Authority::open(&data.join("keys"))?;
        let adapters = Adapters::open(&data, &identity, config, &program, starting).await?;
        starting.next("listening");
        let door = listen(place.clients, "--port").await?;
        let peers = open_peers(&data, &mut identity, place, &authority).await?;
        let host = identity.peer_address.rsplit_once(':').map_or("127.0.0.1", |(host, _)| host);
        let base_url = public_url(config, door.local_addr()?, host);
        let tls = Certificates::open(&data.join("tls"), &front_names(host, config), &authority)?;
        Ok(Self { data, lock, identity, keys, authority, adapters, door, peers, base_url, tls })
    }
}

/// Starts the node that `data` belongs to. It is ready on return.
pub async fn serve_at(place: Place<'_>, config: &Config) -> anyhow::Result<Node> {
    let starting = Starting::with("opening the data folder")?;
    let Ground { data, lock, mut identity, keys, authority, adapters, door, peers, base_url, tls } =
        Ground::open(&place, config, &starting).await?;
    let ca_cert = tls.authority.clone();
    let watch = Watch::new(config.actors().builds);
    starting.next("opening the replicated log");
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
    starting.next("telling a majority of the cluster where this node is");
    register(&ledger, facts(&identity, &base_url, config, &runtime)).await?;
    starting.next("waiting until every shard has a leader");
    ledger.ready().await;
    masters::check(&ledger, &keys.masters)?;
    starting.next("writing what a new cluster begins with");
    let secrets = bootstrap(&ledger, &identity, &keys, config, &runtime).await?;
    starting.next("starting the actors");
    let isolation = adapters.runtime.process.isolation().layers.clone();
    tasks.spawn("the runtime", tend(Arc::clone(&runtime), Arc::clone(&ledger)));
    tasks.spawn("series and logs", prune(Arc::clone(&adapters.series), Arc::clone(&adapters.logs)));
    adapters.connect(&reach.peers, &mut tasks);
    let (logs, series) = (Arc::clone(&adapters.logs), Arc::clone(&adapters.series));
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
        logs,
        series,
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
    starting.next("making a key that signs access tokens");
    if let Err(error) = steward::make_signing_key(&world).await {
        tracing::warn!(%error, "there is no key for access tokens yet; logins fail until there is");
    }
    starting.next("opening the front door");
    let settings = interface(config, &keys, base_url.clone())?;
    let service = Service { world: Arc::clone(&world) };
    let shared = Arc::new(api::Shared::new(service, settings, Arc::clone(&traffic)));
    let (routes, tls) = (api::routes(&shared), tls.server_config()?);
    let (door, accepting) = Door::open(door, tls, Arc::clone(&world), routes, stopped)?;
    tasks.spawn("the front door", accepting);
    Ok(Node {
        node_id: identity.node_id,
        base_url,
        ca_cert,
        org_id: first_organization(&world)?,
        data,
        secrets,
        isolation,
        world,
        runtime,
        ledger,
        root,
        stop,
        closed,
        _door: door,
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
    series.restore(&world.meter, &world.copied);
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
    for private in [LOG, "state.redb", "node.json"] {
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

async fn prune(series: Arc<CopiedSeries>, logs: Arc<CopiedLogs>) {
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
        self.world.watch.instances.end_with_the_node();
        // Gossip says goodbye before all else, so that nothing is handed back.
        let _ = self.stop.send(true);
        self.ledger.hand_over_all().await;
        self.world.routes.close();
        if tokio::time::timeout(REQUESTS_END_WITHIN, self.requests_are_served()).await.is_err() {
            tracing::warn!("some requests were cut off");
        }
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
