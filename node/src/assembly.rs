//! The only file that knows every part: adapters meet ports here.

use std::{
    collections::BTreeSet,
    fs, io,
    net::SocketAddr,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use actors::{
    call::Service,
    instance::InstanceMessage,
    invocation::AgentClient,
    meter::Meter,
    ports::{Clock as _, Ledger as _, Runtime as _},
    root::{self, RootMessage, Watch},
    route::Routes,
    seal::Sealer,
    world::{Ports, World},
};
use anyhow::{Context as _, ensure};
use cluster::{RaftLedger, Settings as LedgerSettings};
use domain::{NodeId, OrgId, cloud::Provider, directory::Command};
use poem::Server;
use ractor::ActorRef;
use rustls::ServerConfig;
use tokio::{
    net::TcpListener,
    sync::watch,
    task::{JoinHandle, JoinSet},
};

use crate::{
    adapters::{
        blobs::FolderBlobs,
        builder::Builder,
        docker::DockerRuntime,
        door::Door,
        git::GitHost,
        isolation::Isolation,
        local::LocalRuntime,
        logs::{Retention, SegmentLogs},
        process::ProcessRuntime,
        series::SledSeries,
        source::Fetcher,
        system::{SystemClock, SystemDice, random_bytes},
        tls::{Certificates, local_names},
    },
    bootstrap::{self, DefaultClouds, FirstSecrets, NodeIdentity},
    config::Config,
    hex,
    keys::Keys,
};

/// Between looks at what this machine runs.
const TEND_EVERY: Duration = Duration::from_secs(5);
/// Between prunings of logs and metrics.
const PRUNE_EVERY: Duration = Duration::from_secs(60);
/// How long open requests may go on when the node stops.
const REQUESTS_END_WITHIN: Duration = Duration::from_secs(10);
/// How long actors may take to end.
const ACTORS_END_WITHIN: Duration = Duration::from_secs(5);
/// How long killed instances may take to be gone.
const INSTANCES_END_WITHIN: Duration = Duration::from_secs(5);
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
    door: JoinHandle<()>,
    requests: Arc<AtomicUsize>,
    tasks: JoinSet<()>,
    _lock: fs::File,
}

/// The adapters that are not behind the ledger.
struct Adapters {
    runtime: Arc<LocalRuntime>,
    blobs: Arc<FolderBlobs>,
    logs: Arc<SegmentLogs>,
    series: Arc<SledSeries>,
}

impl Adapters {
    async fn open(
        data: &Path,
        node: NodeId,
        config: &Config,
        program: &Path,
    ) -> anyhow::Result<Self> {
        let isolation = Isolation::probe(program, data, &format!("roost-{node}"));
        let missing: Vec<_> =
            config.runtime.minimum_isolation.iter().filter(|layer| !isolation.has(layer)).collect();
        ensure!(
            missing.is_empty(),
            "this machine lacks isolation that runtime.minimum_isolation asks for: {missing:?}"
        );
        let ports = config.runtime.port_first..=config.runtime.port_last;
        let process = Arc::new(ProcessRuntime::open(data, isolation, ports)?);
        let blobs = Arc::new(FolderBlobs::open(&data.join("blobs"))?);
        let git = GitHost { base_url: config.github.base_url.clone() };
        let fetcher = Arc::new(Fetcher { blobs: Arc::clone(&blobs), git });
        let builder =
            Builder::new(data, Arc::clone(&fetcher), Arc::clone(&process), config.ca_bundle());
        let docker = DockerRuntime::open(data, node, config.docker(), fetcher).await?;
        let retention =
            Retention { bytes: config.logs.megabytes * 1024 * 1024, age: config.logs.keep.0 };
        Ok(Self {
            runtime: Arc::new(LocalRuntime {
                process,
                builder: Arc::new(builder),
                docker: Arc::new(docker),
            }),
            blobs,
            logs: Arc::new(SegmentLogs::open(&data.join("logs"), retention)?),
            series: Arc::new(SledSeries::open(&data.join("series"))?),
        })
    }
}

/// Starts a node on `data`, listening on `address`; it is ready on return.
pub async fn start(data: &Path, address: SocketAddr, config: &Config) -> anyhow::Result<Node> {
    let program = std::env::current_exe().context("this program can't be found")?;
    start_with(data, address, config, &program).await
}

/// As [`start`], with another program for the step into an agent's process.
pub async fn start_with(
    data: &Path,
    address: SocketAddr,
    config: &Config,
    program: &Path,
) -> anyhow::Result<Node> {
    prepare(data).with_context(|| format!("the data folder {}", data.display()))?;
    let data = data.canonicalize()?;
    let lock = lock_folder(&data)?;
    let (identity, _) = NodeIdentity::open(&data, config.cluster.shards)?;
    let keys = Keys::open(&data.join("keys"))?;
    let certificates = Certificates::open(&data.join("tls"), &local_names())?;
    let adapters = Adapters::open(&data, identity.node_id, config, program).await?;
    let watch = Watch::new(config.actors().builds);
    let ledger = open_ledger(&data, identity, config, &watch).await?;
    let runtime = Arc::clone(&adapters.runtime);
    let secrets = bootstrap(&ledger, &keys, config, &runtime).await?;
    let isolation = adapters.runtime.process.isolation().layers.clone();
    let mut tasks = JoinSet::new();
    tasks.spawn(Arc::clone(&ledger).tend());
    tasks.spawn(tend(Arc::clone(&runtime), Arc::clone(&ledger)));
    tasks.spawn(prune(Arc::clone(&adapters.series), Arc::clone(&adapters.logs)));
    let world = world(adapters, Arc::clone(&ledger), watch, identity, &keys, config);
    tasks.spawn(sweep_storage(Arc::clone(&world)));
    let root = root::start(Arc::clone(&world)).await?;
    let open = open_door(&world, &keys, address, config, certificates.server_config()?).await?;
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
        door: open.task,
        requests: open.requests,
        tasks,
        _lock: lock,
    })
}

/// Everything that actors and calls reach for.
fn world(
    adapters: Adapters,
    ledger: Arc<RaftLedger>,
    watch: Arc<Watch>,
    identity: NodeIdentity,
    keys: &Keys,
    config: &Config,
) -> Arc<World> {
    let series = Arc::clone(&adapters.series);
    let world = Arc::new(World {
        ports: Ports {
            ledger,
            runtime: adapters.runtime,
            blobs: adapters.blobs,
            logs: adapters.logs,
            series: adapters.series,
            clock: Arc::new(SystemClock),
            entropy: Arc::new(SystemDice),
        },
        settings: config.actors(),
        node_id: identity.node_id,
        boot: hex(&random_bytes::<8>()),
        sealer: Sealer::new(&keys.master),
        routes: Routes::default(),
        client: AgentClient::default(),
        meter: Meter::default(),
        watch,
    });
    series.all().for_each(|(agent, at, bucket)| world.meter.restore(agent, at, &bucket));
    series.all_coarse().for_each(|(agent, bucket)| world.meter.restore_uptime(agent, &bucket));
    world
}

/// The front door, open.
struct OpenDoor {
    base_url: String,
    requests: Arc<AtomicUsize>,
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
}

async fn open_door(
    world: &Arc<World>,
    keys: &Keys,
    address: SocketAddr,
    config: &Config,
    certificate: Arc<ServerConfig>,
) -> anyhow::Result<OpenDoor> {
    let listener = TcpListener::bind(address).await.with_context(|| {
        format!("the address {address} is taken; choose another port with --port, or 0 for any")
    })?;
    let base_url = public_url(config, listener.local_addr()?);
    let (stop, stopped) = watch::channel(false);
    let requests = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&requests);
    let door = Door::new(listener, certificate);
    let task = tokio::spawn(serve(counted, world, keys, &base_url, door, stopped));
    Ok(OpenDoor { base_url, requests, stop, task })
}

/// Makes the folder; other users may pass through it to an image, and see nothing else.
fn prepare(data: &Path) -> io::Result<()> {
    fs::create_dir_all(data)?;
    fs::set_permissions(data, fs::Permissions::from_mode(0o711))?;
    for private in ["keys", "tls", "blobs", "logs", "series"] {
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
fn lock_folder(data: &Path) -> anyhow::Result<fs::File> {
    let file =
        fs::OpenOptions::new().create(true).truncate(false).write(true).open(data.join("lock"))?;
    rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).with_context(
        || format!("another node is using {}; stop it, or choose another --data", data.display()),
    )?;
    Ok(file)
}

async fn open_ledger(
    data: &Path,
    identity: NodeIdentity,
    config: &Config,
    watch: &Arc<Watch>,
) -> anyhow::Result<Arc<RaftLedger>> {
    let settings = LedgerSettings {
        node: identity.raft_id,
        shards: identity.shards,
        write_deadline: config.cluster.write_deadline.0,
        timeouts: Default::default(),
    };
    let opened = RaftLedger::open(data, settings, Arc::clone(watch) as _).await;
    let ledger = opened.context("the replicated log could not be opened")?;
    for private in ["raft.redb", "state.redb", "node.json"] {
        fs::set_permissions(data.join(private), fs::Permissions::from_mode(0o600))?;
    }
    Ok(ledger)
}

async fn bootstrap(
    ledger: &Arc<RaftLedger>,
    keys: &Keys,
    config: &Config,
    runtime: &LocalRuntime,
) -> anyhow::Result<Option<FirstSecrets>> {
    if !ledger.directory().read().organizations.is_empty() {
        return Ok(None);
    }
    let (first, secrets) = bootstrap::first(&keys.pepper, default_clouds(config, runtime))?;
    let command = Command::Bootstrap(Box::new(first));
    let entry = domain::machine::Entry { at: SystemClock.now(), claim: None, key: None, command };
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

fn public_url(config: &Config, address: SocketAddr) -> String {
    match config.http.public_url.trim_end_matches('/') {
        "" => format!("https://{}:{}", host_of(address), address.port()),
        url => url.to_owned(),
    }
}

fn host_of(address: SocketAddr) -> String {
    match address.ip() {
        ip if ip.is_unspecified() || ip.is_loopback() => "127.0.0.1".to_owned(),
        ip => ip.to_string(),
    }
}

fn serve(
    requests: Arc<AtomicUsize>,
    world: &Arc<World>,
    keys: &Keys,
    base_url: &str,
    door: Door,
    mut stopped: watch::Receiver<bool>,
) -> impl Future<Output = ()> + use<> {
    let shared = Arc::new(api::Shared {
        service: Service { world: Arc::clone(world) },
        settings: api::Settings {
            public_url: base_url.to_owned(),
            signing_key: keys.signing,
            pepper: keys.pepper,
        },
        requests,
    });
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
        let _ = self.stop.send(true);
        if tokio::time::timeout(REQUESTS_END_WITHIN, self.requests_are_served()).await.is_err() {
            tracing::warn!("some requests were cut off");
        }
        self.door.abort();
        // No actor may start an instance or write down an end from here on.
        let _ = self.root.stop_and_wait(None, Some(ACTORS_END_WITHIN)).await;
        self.tasks.shutdown().await;
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
        self.ledger.close().await;
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
        while self.requests.load(Relaxed) > 0 || self.world.routes.in_flight() > 0 {
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
