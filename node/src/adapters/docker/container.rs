//! Containers: started with everything taken away that an agent does not need, watched, adopted
//! after a restart of the node, and removed.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use actors::ports::{Channel, Clock as _, Exit, Process, StartRequest, Started};
use bollard::{
    Docker,
    container::LogOutput,
    errors::Error,
    models::{
        ContainerCreateBody, DeviceRequest, HealthConfig, HostConfig, HostConfigLogConfig,
        NetworkCreateRequest, PortBinding,
    },
    query_parameters::{
        CreateContainerOptionsBuilder, KillContainerOptionsBuilder, ListContainersOptionsBuilder,
        LogsOptionsBuilder, RemoveContainerOptionsBuilder, StartContainerOptions,
        StatsOptionsBuilder, WaitContainerOptionsBuilder,
    },
};
use domain::{InstanceId, agent::plan::IMAGE_PULL_FAILED, deployment::Failure};
use futures::{FutureExt as _, StreamExt as _};
use tokio::{
    runtime::Handle,
    sync::{mpsc, oneshot},
    task::JoinHandle,
    time::Instant,
};

use super::{DockerRuntime, Engine, variables::VariableFiles};
use crate::adapters::system::SystemClock;

/// Lines of output that wait for the log.
const OUTPUT_LINES_WAITING: usize = 1024;
/// Processes and threads of one container; more if it takes that many calls at once.
const PROCESSES_MAX: u64 = 512;
/// The engine's own copy of a container's output: it only bridges a restart of the node.
const ENGINE_LOG: [(&str, &str); 2] = [("max-size", "10m"), ("max-file", "2")];
/// How much a container may write to its `/tmp`, which counts as memory.
const SCRATCH: &str = "rw,nosuid,nodev,exec,size=256m,mode=1777";
/// How long the end of a container's output may take to arrive after its end.
const OUTPUT_ENDS_WITHIN: Duration = Duration::from_secs(2);
/// How long starts that are under way may take when the node ends.
const STARTS_END_WITHIN: Duration = Duration::from_secs(10);
/// Between questions to an engine that broke off.
const ASK_AGAIN: Duration = Duration::from_millis(500);
/// Between notes of how far a log was read; after a crash, lines of that time may come twice.
const NOTE_EVERY: Duration = Duration::from_millis(250);
/// A container younger than this may be waiting for its row to be seen.
const YOUNG: Duration = Duration::from_secs(30);

/// Labels of what this node runs.
const NODE_LABEL: &str = "roost.node";
const INSTANCE_LABEL: &str = "roost.instance";

/// Where a container finds what is mounted into it.
const ENTER_INSIDE: &str = "/.roost-enter/enter";
const VARIABLES_INSIDE: &str = "/.roost-enter/variables";

fn name_of(instance: InstanceId) -> String {
    format!("roost-{instance}")
}

fn not_started(error: &dyn std::fmt::Display) -> Failure {
    Failure::new("NO_CAPACITY", format!("the container could not be started: {error}"))
}

fn not_created(error: &Error) -> Failure {
    if is_missing(error) {
        let message = "the image is no longer on this node; redeploy to build or pull it again";
        return Failure::new(IMAGE_PULL_FAILED, message);
    }
    not_started(error)
}

fn is_missing(error: &Error) -> bool {
    matches!(error, Error::DockerResponseServerError { status_code: 404, .. })
}

impl DockerRuntime {
    /// Starts a container, or finds the one of an earlier life of this node.
    pub async fn start(self: &Arc<Self>, request: StartRequest) -> Result<Started, Failure> {
        if let Some(lack) = self.lack(request.resources.gpu.is_some()) {
            return Err(lack);
        }
        let docker = self.engine.here()?.docker;
        let name = name_of(request.instance_id);
        let layers = self.layers(&request);
        let missing: Vec<_> = request
            .image
            .isolation_minimum
            .iter()
            .filter(|layer| !layers.contains(layer))
            .collect();
        if !missing.is_empty() {
            return Err(Failure::new(
                "NO_CAPACITY",
                format!(
                    "a container here lacks the isolation that agent.toml asks for: {missing:?}"
                ),
            ));
        }
        if !request.adopt {
            self.launch_to_the_end(&docker, &request, &name).await?;
        }
        let found = self.found(&docker, &request, &name, layers).await;
        if found.is_err() {
            self.clear(&docker, &request).await;
        }
        found
    }

    /// A start that nobody waits for any more is carried through and then taken back: the engine
    /// does not break off either.
    async fn launch_to_the_end(
        self: &Arc<Self>,
        docker: &Docker,
        request: &StartRequest,
        name: &str,
    ) -> Result<(), Failure> {
        let (sender, receiver) = oneshot::channel();
        let (this, docker) = (Arc::clone(self), docker.clone());
        let (request, name) = (request.clone(), name.to_owned());
        tokio::spawn(async move {
            let _underway = Arc::clone(&this.underway);
            let launched = this.launch(&docker, &request, &name).await;
            let failed = launched.is_err();
            if sender.send(launched).is_err() || failed {
                this.clear(&docker, &request).await;
            }
        });
        receiver.await.unwrap_or_else(|_| Err(not_started(&"its start was given up")))
    }

    async fn launch(
        &self,
        docker: &Docker,
        request: &StartRequest,
        name: &str,
    ) -> Result<(), Failure> {
        let network = self.network(docker).await?;
        let variables = self.variables.write(request.instance_id, &environment(request));
        let variables = variables.map_err(|error| not_started(&error))?;
        let body = self.container(request, &network, &variables);
        let options = CreateContainerOptionsBuilder::default().name(name).build();
        let created = docker.create_container(Some(options), body).await;
        created.map_err(|error| not_created(&error))?;
        let started = docker.start_container(name, None::<StartContainerOptions>).await;
        started.map_err(|error| not_started(&error))
    }

    fn container(
        &self,
        request: &StartRequest,
        network: &str,
        variables: &Path,
    ) -> ContainerCreateBody {
        let image = &request.image;
        let words = |words: &[&str]| Some(words.iter().map(|word| (*word).to_owned()).collect());
        let labels = [
            (NODE_LABEL, self.node.clone()),
            (INSTANCE_LABEL, request.instance_id.to_string()),
            ("roost.agent", request.agent_id.to_string()),
            ("roost.version", request.version.to_string()),
        ];
        ContainerCreateBody {
            image: Some(image.reference.clone()),
            entrypoint: words(&[ENTER_INSIDE, VARIABLES_INSIDE]),
            cmd: Some(image.command.clone()),
            labels: Some(labels.map(|(name, value)| (name.to_owned(), value)).into()),
            exposed_ports: Some(vec![port_name(request)]),
            // The platform asks by itself.
            healthcheck: Some(HealthConfig { test: words(&["NONE"]), ..HealthConfig::default() }),
            host_config: Some(self.limits(request, network, variables)),
            ..ContainerCreateBody::default()
        }
    }

    fn limits(&self, request: &StartRequest, network: &str, variables: &Path) -> HostConfig {
        let resources = &request.resources;
        let bytes = i64::from(resources.memory_mb) * 1024 * 1024;
        let processes = PROCESSES_MAX.max(u64::from(request.image.concurrency) * 2);
        let binding = PortBinding {
            host_ip: Some(Ipv4Addr::LOCALHOST.to_string()),
            host_port: Some("0".to_owned()),
        };
        let mount = |from: &Path, to: &str| format!("{}:{to}:ro", from.display());
        let engine_log = ENGINE_LOG.map(|(name, value)| (name.to_owned(), value.to_owned()));
        HostConfig {
            memory: Some(bytes),
            memory_swap: Some(bytes),
            nano_cpus: Some(i64::from(resources.cpu) * 1_000_000_000),
            pids_limit: i64::try_from(processes).ok(),
            device_requests: resources.gpu.as_ref().map(|gpu| vec![devices(gpu)]),
            network_mode: Some(network.to_owned()),
            port_bindings: Some(HashMap::from([(port_name(request), Some(vec![binding]))])),
            binds: Some(vec![mount(&self.enter, ENTER_INSIDE), mount(variables, VARIABLES_INSIDE)]),
            cap_drop: Some(vec!["ALL".to_owned()]),
            security_opt: Some(vec!["no-new-privileges".to_owned()]),
            readonly_rootfs: Some(is_read_only(request)),
            tmpfs: is_read_only(request)
                .then(|| HashMap::from([("/tmp".to_owned(), SCRATCH.to_owned())])),
            init: Some(true),
            log_config: Some(HostConfigLogConfig {
                typ: Some("json-file".to_owned()),
                config: Some(HashMap::from(engine_log)),
            }),
            ..HostConfig::default()
        }
    }

    /// What holds for a container of this request.
    fn layers(&self, request: &StartRequest) -> Vec<String> {
        let has_seccomp = self.engine.here().is_ok_and(|here| here.has_seccomp);
        let always =
            ["container", "capabilities", "no_new_privs", "network", "memory", "cpu", "pids"];
        let maybe = [("seccomp", has_seccomp), ("read_only_root", is_read_only(request))];
        let maybe = maybe.into_iter().filter(|(_, holds)| *holds).map(|(name, _)| name);
        always.into_iter().chain(maybe).map(str::to_owned).collect()
    }

    /// A network of this node's own, on which containers can't reach each other.
    async fn network(&self, docker: &Docker) -> Result<String, Failure> {
        let name = self.network_name();
        let made = self.network.get_or_try_init(|| async {
            if docker.inspect_network(&name, None).await.is_ok() {
                return Ok(name.clone());
            }
            let closed = ("com.docker.network.bridge.enable_icc".to_owned(), "false".to_owned());
            let request = NetworkCreateRequest {
                name: name.clone(),
                driver: Some("bridge".to_owned()),
                options: Some(HashMap::from([closed])),
                labels: Some(HashMap::from([(NODE_LABEL.to_owned(), self.node.clone())])),
                ..NetworkCreateRequest::default()
            };
            docker.create_network(request).await.map(|_| name.clone())
        });
        made.await.cloned().map_err(|error: Error| not_started(&error))
    }

    fn network_name(&self) -> String {
        format!("roost-{}", self.node)
    }

    async fn found(
        &self,
        docker: &Docker,
        request: &StartRequest,
        name: &str,
        layers: Vec<String>,
    ) -> Result<Started, Failure> {
        let found = docker.inspect_container(name, None).await;
        let found = found.map_err(|error| not_started(&error))?;
        let ports = found.network_settings.and_then(|network| network.ports).unwrap_or_default();
        let bound = ports.get(&port_name(request)).cloned().flatten().unwrap_or_default();
        let port = bound.iter().find_map(|one| one.host_port.as_ref()?.parse::<u16>().ok());
        let running = found.state.and_then(|state| state.running).unwrap_or_default();
        let port = match (port, running || !request.adopt) {
            (Some(port), true) => port,
            // It ended at once: its output and its end are still to be told.
            (None, _) if !request.adopt => 0,
            _ => return Err(not_started(&"it is no longer running")),
        };
        let container = Arc::new(Container {
            docker: docker.clone(),
            name: name.to_owned(),
            usage: Usage::default(),
            handle: Handle::current(),
        });
        let note = self.run.join(request.instance_id.to_string());
        let (sender, output) = mpsc::channel(OUTPUT_LINES_WAITING);
        let reader = Reader { docker: docker.clone(), name: name.to_owned(), note: note.clone() };
        let read = tokio::spawn(reader.run(sender));
        let measured = tokio::spawn(Arc::clone(&container).measure());
        let end = End {
            engine: Arc::clone(&self.engine),
            docker: docker.clone(),
            name: name.to_owned(),
            instance: request.instance_id,
            note,
            read,
            measured,
            variables: self.variables.clone(),
        };
        Ok(Started {
            address: SocketAddr::from((Ipv4Addr::LOCALHOST, port)),
            isolation: layers,
            output,
            exit: end.wait().boxed(),
            process: container,
        })
    }

    /// Nothing of a failed start stays.
    async fn clear(&self, docker: &Docker, request: &StartRequest) {
        self.variables.remove(request.instance_id);
        remove(docker, &name_of(request.instance_id)).await;
        let _ = fs::remove_file(self.run.join(request.instance_id.to_string()));
    }

    /// Removes containers of this node that no instance row names.
    pub async fn sweep(&self, known: &BTreeSet<String>) {
        let Ok(here) = self.engine.here() else { return };
        let now = i64::try_from(SystemClock.now().seconds()).unwrap_or_default();
        let mut present = known.clone();
        for container in self.containers(&here.docker).await {
            let age = now - container.created;
            let young = u64::try_from(age).is_ok_and(|age| Duration::from_secs(age) < YOUNG);
            if !known.contains(&container.instance) && !young {
                remove(&here.docker, &container.id).await;
                let _ = fs::remove_file(self.run.join(&container.instance));
            }
            present.insert(container.instance);
        }
        self.variables.keep(&present);
    }

    /// What this node has started, running or not.
    async fn containers(&self, docker: &Docker) -> Vec<Own> {
        let filters = HashMap::from([("label", vec![format!("{NODE_LABEL}={}", self.node)])]);
        let options = ListContainersOptionsBuilder::default().all(true).filters(&filters).build();
        let found = docker.list_containers(Some(options)).await.unwrap_or_default();
        let own = found.into_iter().filter_map(|container| {
            let instance = container.labels?.remove(INSTANCE_LABEL)?;
            Some(Own { id: container.id?, instance, created: container.created? })
        });
        own.collect()
    }

    /// Removes what is left, a container whose start was broken off too; for a node that ends with
    /// all its containers.
    pub async fn close(&self) {
        let until = Instant::now() + STARTS_END_WITHIN;
        while Arc::strong_count(&self.underway) > 1 && Instant::now() < until {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        self.variables.clear();
        let Ok(here) = self.engine.here() else { return };
        for container in self.containers(&here.docker).await {
            remove(&here.docker, &container.id).await;
        }
        if let Some(network) = self.network.get() {
            let _ = here.docker.remove_network(network).await;
        }
    }
}

/// A container of this node.
struct Own {
    id: String,
    instance: String,
    /// In seconds since 1970.
    created: i64,
}

/// The platform's own images never write outside of `/tmp`; others may be asked not to.
fn is_read_only(request: &StartRequest) -> bool {
    let asked = request.image.isolation_minimum.iter().any(|layer| layer == "read_only_root");
    asked || request.image.read_only_root
}

fn devices(gpu: &domain::agent::Gpu) -> DeviceRequest {
    DeviceRequest {
        count: Some(i64::from(gpu.count)),
        capabilities: Some(vec![vec!["gpu".to_owned()]]),
        ..DeviceRequest::default()
    }
}

fn port_of(request: &StartRequest) -> u16 {
    request.image.port.unwrap_or_default()
}

fn port_name(request: &StartRequest) -> String {
    format!("{}/tcp", port_of(request))
}

fn environment(request: &StartRequest) -> BTreeMap<String, String> {
    let mut variables = request.environment.clone();
    variables.insert("ROOST_BIND".to_owned(), Ipv4Addr::UNSPECIFIED.to_string());
    variables.insert("PORT".to_owned(), port_of(request).to_string());
    variables
}

async fn remove(docker: &Docker, name: &str) {
    let options = RemoveContainerOptionsBuilder::default().force(true).v(true).build();
    let _ = docker.remove_container(name, Some(options)).await;
}

/// The latest measurements of a container.
#[derive(Default)]
struct Usage {
    memory_bytes: AtomicU64,
    cpu_millis: AtomicU64,
}

/// A container that was started or found.
struct Container {
    docker: Docker,
    name: String,
    usage: Usage,
    handle: Handle,
}

impl Container {
    fn signal(&self, signal: &'static str) {
        let (docker, name) = (self.docker.clone(), self.name.clone());
        self.handle.spawn(async move {
            let options = KillContainerOptionsBuilder::default().signal(signal).build();
            let _ = docker.kill_container(&name, Some(options)).await;
        });
    }

    /// Takes down what the engine measures once a second, for as long as it does.
    async fn measure(self: Arc<Self>) {
        let options = StatsOptionsBuilder::default().stream(true).build();
        let mut frames = self.docker.stats(&self.name, Some(options)).boxed();
        while let Some(Ok(frame)) = frames.next().await {
            let memory = frame.memory_stats.and_then(|memory| memory.usage).unwrap_or_default();
            let cpu =
                frame.cpu_stats.and_then(|cpu| cpu.cpu_usage?.total_usage).unwrap_or_default();
            self.usage.memory_bytes.store(memory, Relaxed);
            self.usage.cpu_millis.store(cpu / 1_000_000, Relaxed);
        }
    }
}

impl Process for Container {
    fn terminate(&self) {
        self.signal("SIGTERM");
    }

    fn kill(&self) {
        self.signal("SIGKILL");
    }

    fn listens(&self) -> bool {
        // The port was given to this container by the engine.
        true
    }

    fn usage(&self) -> Option<(u64, u64)> {
        let memory = self.usage.memory_bytes.load(Relaxed);
        (memory > 0).then(|| (memory, self.usage.cpu_millis.load(Relaxed)))
    }
}

/// Reads a container's output from where it was left.
struct Reader {
    docker: Docker,
    name: String,
    note: PathBuf,
}

impl Reader {
    async fn run(self, to: mpsc::Sender<(Channel, String)>) {
        // The engine's times have nine digits, so they order as texts.
        let after = fs::read_to_string(&self.note).unwrap_or_default();
        let _ = fs::write(&self.note, &after);
        let options = LogsOptionsBuilder::default().follow(true).stdout(true).stderr(true);
        let mut output =
            self.docker.logs(&self.name, Some(options.timestamps(true).build())).boxed();
        let (mut noted, mut last) = (Instant::now(), after.clone());
        while let Some(Ok(part)) = output.next().await {
            let (channel, bytes) = match part {
                LogOutput::StdErr { message } => (Channel::Stderr, message),
                LogOutput::StdOut { message }
                | LogOutput::StdIn { message }
                | LogOutput::Console { message } => (Channel::Stdout, message),
            };
            let text = String::from_utf8_lossy(&bytes);
            let (time, line) = text.split_once(' ').unwrap_or(("", &text));
            if time <= after.as_str() {
                continue;
            }
            time.clone_into(&mut last);
            let line = line.trim_end_matches(['\r', '\n']).to_owned();
            if to.send((channel, line)).await.is_err() {
                break;
            }
            if noted.elapsed() >= NOTE_EVERY {
                let _ = tokio::fs::write(&self.note, &last).await;
                noted = Instant::now();
            }
        }
        let _ = tokio::fs::write(&self.note, &last).await;
    }
}

/// Waits for the end of a container and removes what is left of it.
struct End {
    engine: Arc<Engine>,
    docker: Docker,
    name: String,
    instance: InstanceId,
    note: PathBuf,
    read: JoinHandle<()>,
    measured: JoinHandle<()>,
    variables: VariableFiles,
}

impl End {
    async fn wait(self) -> Exit {
        let exit = self.exit().await;
        let _ = tokio::time::timeout(OUTPUT_ENDS_WITHIN, self.read).await;
        self.measured.abort();
        remove(&self.docker, &self.name).await;
        self.variables.remove(self.instance);
        let _ = tokio::fs::remove_file(&self.note).await;
        exit
    }

    async fn exit(&self) -> Exit {
        const UNKNOWN: Exit = Exit { code: None, signal: None, out_of_memory: false };
        loop {
            let options = WaitContainerOptionsBuilder::default().condition("not-running").build();
            // Its answer is read from the container itself: an error is also a non-zero code.
            let _ = self.docker.wait_container(&self.name, Some(options)).next().await;
            match self.docker.inspect_container(&self.name, None).await {
                Ok(found) => {
                    let state = found.state.unwrap_or_default();
                    if state.running != Some(true) {
                        return exit_of(&state);
                    }
                }
                Err(error) if is_missing(&error) => return UNKNOWN,
                // The engine is away; its containers may yet be running.
                Err(_) => self.engine.look().await,
            }
            tokio::time::sleep(ASK_AGAIN).await;
        }
    }
}

/// Codes above 128 are signals (the shell's rule, which the engine follows).
fn exit_of(state: &bollard::models::ContainerState) -> Exit {
    let code = state.exit_code.and_then(|code| i32::try_from(code).ok());
    let signal = code.filter(|code| (129..=192).contains(code)).map(|code| code - 128);
    Exit {
        code: code.filter(|_| signal.is_none()),
        signal,
        out_of_memory: state.oom_killed.unwrap_or_default(),
    }
}
