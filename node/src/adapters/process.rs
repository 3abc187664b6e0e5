//! The `process` runtime: an instance is a supervised child in its own session, locked into as many
//! layers as the machine has.
//!
//! Children are spawned from one thread that lives as long as the node, because the death signal
//! fires when the spawning *thread* ends. When the main process of an instance ends, its whole group
//! is killed. What an earlier life of the node left is killed at start, by pid and start time.

use std::{
    collections::BTreeMap,
    fs, io,
    net::{Ipv4Addr, SocketAddr},
    os::unix::{fs::PermissionsExt as _, process::ExitStatusExt as _},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, mpsc},
};

use actors::ports::{Channel, Exit, Process, StartRequest, Started};
use domain::{cloud::Provider, deployment::Failure};
use futures::FutureExt as _;
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncRead, BufReader},
    process::{Child, Command},
    sync::{mpsc as channel, oneshot},
};

use super::{
    cgroup::{Group, Limits},
    isolation::{self, FIRST_UID, Isolation},
    port::PortRange,
    unfinished,
};
use crate::exec::Cage;

/// Lines of output that wait for the log.
const OUTPUT_LINES_WAITING: usize = 1024;
/// What a sandbox instance gets at most: MiB, and thousandths of a core.
const SANDBOX_MEMORY_MB: u32 = 256;
const SANDBOX_CPU_MILLIS: u64 = 500;
/// Processes and threads of one instance; more if it takes that many calls at once.
const PROCESSES_MAX: u64 = 512;
/// Address space beyond the memory limit, where only rlimits bound it: interpreters reserve much
/// more than they use.
const ADDRESS_SPACE_FACTOR: u64 = 16;

/// Starts instances as processes.
pub struct ProcessRuntime {
    isolation: Isolation,
    images: PathBuf,
    work: PathBuf,
    ports: PortRange,
    spawner: Mutex<mpsc::Sender<Spawn>>,
}

type Spawn = (Command, oneshot::Sender<io::Result<Child>>);

impl ProcessRuntime {
    /// Below `data`; ends what an earlier life left.
    pub fn open(data: &Path, isolation: Isolation, ports: PortRange) -> io::Result<Self> {
        let (images, work) = (data.join("images"), data.join("run"));
        fs::create_dir_all(&images)?;
        unfinished::clear(&images)?;
        fs::create_dir_all(&work)?;
        end_leftovers(&work)?;
        let (sender, receiver) = mpsc::channel::<Spawn>();
        let runtime = tokio::runtime::Handle::current();
        std::thread::Builder::new().name("spawner".to_owned()).spawn(move || {
            let _entered = runtime.enter();
            for (mut command, reply) in receiver {
                // A caller that went away takes no child with it.
                let _ = reply.send(command.kill_on_drop(true).spawn());
            }
        })?;
        Ok(Self { isolation, images, work, ports, spawner: Mutex::new(sender) })
    }

    /// The layers that hold on this machine.
    pub fn isolation(&self) -> &Isolation {
        &self.isolation
    }

    /// Spawns from the thread that never ends.
    pub async fn spawn(&self, command: std::process::Command) -> io::Result<Child> {
        let (sender, receiver) = oneshot::channel();
        {
            let spawner = self.spawner.lock().unwrap_or_else(PoisonError::into_inner);
            spawner
                .send((Command::from(command), sender))
                .map_err(|_| io::Error::other("the spawning thread has ended"))?;
        }
        receiver.await.map_err(|_| io::Error::other("the spawning thread has ended"))?
    }

    /// Starts an instance.
    pub async fn start(&self, request: StartRequest) -> Result<Started, Failure> {
        let missing: Vec<_> = request
            .image
            .isolation_minimum
            .iter()
            .filter(|layer| !self.isolation.has(layer))
            .cloned()
            .collect();
        if !missing.is_empty() {
            let message = format!(
                "this node lacks the isolation that agent.toml asks for: {}",
                missing.join(", ")
            );
            return Err(Failure::new("NO_CAPACITY", message));
        }
        self.launch(request).await.map_err(|error| {
            Failure::new("NO_CAPACITY", format!("the instance could not be started: {error}"))
        })
    }

    async fn launch(&self, request: StartRequest) -> io::Result<Started> {
        let taken = self.ports.take()?;
        let port = taken.number;
        let work = self.work.join(request.instance_id.to_string());
        fs::create_dir_all(&work)?;
        let uid = self.isolation.has("uid").then(|| FIRST_UID + u32::from(port));
        std::os::unix::fs::chown(&work, uid, uid)?;
        fs::set_permissions(&work, fs::Permissions::from_mode(0o700))?;
        let image = self.images.join(&request.image.reference);
        let group = self.group(&request)?;
        let doors = group.as_ref().map(Group::doors).unwrap_or_default();
        let cage = Cage { groups: doors, ..self.cage(&request, &image, &work, port, uid) };
        let mut command = self.isolation.command(&cage);
        for (name, value) in environment(&request, &image, &work, port) {
            isolation::set_variable(&mut command, &name, value);
        }
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
        let spawned = self.spawn(command).await;
        let mut child = spawned.inspect_err(|_| {
            group.as_ref().inspect(|group| group.end());
        })?;
        let pid = child.id().and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
        let pid = pid.ok_or_else(|| io::Error::other("the process ended at once"))?;
        record(&work, pid)?;
        let (sender, output) = channel::channel(OUTPUT_LINES_WAITING);
        pump(child.stdout.take(), Channel::Stdout, sender.clone());
        pump(child.stderr.take(), Channel::Stderr, sender);
        Ok(Started {
            address: SocketAddr::from((Ipv4Addr::LOCALHOST, port)),
            isolation: self.isolation.layers.clone(),
            output,
            exit: ended(child, pid, request.instance_id.to_string(), work, group.clone())
                // The port is nobody else's until nothing of the instance is left.
                .inspect(move |_| drop(taken))
                .boxed(),
            process: Arc::new(Session { pid, port, group }),
        })
    }

    /// A control group with the limits of this instance, where this machine has any.
    fn group(&self, request: &StartRequest) -> io::Result<Option<Group>> {
        let Some(cgroups) = &self.isolation.cgroups else { return Ok(None) };
        let limits = Limits {
            memory_bytes: memory_bytes(request),
            cpu_millis: match request.provider {
                Provider::Sandbox => SANDBOX_CPU_MILLIS,
                Provider::Process | Provider::Docker => u64::from(request.resources.cpu) * 1000,
            },
            processes: processes(request),
        };
        cgroups.create(&request.instance_id.to_string(), &limits).map(Some)
    }

    fn cage(
        &self,
        request: &StartRequest,
        image: &Path,
        work: &Path,
        port: u16,
        uid: Option<u32>,
    ) -> Cage {
        // Where the memory itself is bounded, address space is free.
        let bounded = self.isolation.has("memory");
        let program = request.image.command.first().map(PathBuf::from);
        // Its own programs are below the image's folder.
        let outside = program.as_deref().filter(|program| program.is_absolute());
        let prefix = outside.and_then(program_prefix);
        let mut readable = vec![image];
        readable.extend(prefix.as_deref());
        Cage {
            command: request.image.command.clone(),
            folder: image.to_owned(),
            layers: self.isolation.layers.clone(),
            uid,
            readable: isolation::readable(&readable),
            writable: isolation::writable(&[work]),
            port: Some(port),
            parent: std::process::id(),
            groups: vec![],
            processes: Some(processes(request)),
            address_space: (!bounded).then(|| memory_bytes(request) * ADDRESS_SPACE_FACTOR),
        }
    }
}

fn memory_bytes(request: &StartRequest) -> u64 {
    let memory_mb = match request.provider {
        Provider::Sandbox => request.resources.memory_mb.min(SANDBOX_MEMORY_MB),
        Provider::Process | Provider::Docker => request.resources.memory_mb,
    };
    u64::from(memory_mb) * 1024 * 1024
}

fn processes(request: &StartRequest) -> u64 {
    PROCESSES_MAX.max(u64::from(request.image.concurrency) * 2)
}

/// Where an interpreter keeps its library: beside its `bin`.
pub fn program_prefix(program: &Path) -> Option<PathBuf> {
    let program = program.canonicalize().ok()?;
    program.parent()?.parent().filter(|prefix| prefix.parent().is_some()).map(Path::to_owned)
}

fn environment(
    request: &StartRequest,
    image: &Path,
    work: &Path,
    port: u16,
) -> BTreeMap<String, std::ffi::OsString> {
    let mut variables = BTreeMap::new();
    let mut set = |name: &str, value: std::ffi::OsString| {
        variables.insert(name.to_owned(), value);
    };
    set("PATH", "/usr/local/bin:/usr/bin:/bin".into());
    set("HOME", work.into());
    set("TMPDIR", work.into());
    set("LANG", "C.UTF-8".into());
    set("PYTHONUNBUFFERED", "1".into());
    set("PYTHONDONTWRITEBYTECODE", "1".into());
    set("PYTHONPATH", image.join(".roost/deps").into());
    for (name, value) in &request.environment {
        set(name, value.into());
    }
    set("PORT", port.to_string().into());
    variables
}

fn pump(
    from: Option<impl AsyncRead + Unpin + Send + 'static>,
    channel: Channel,
    to: channel::Sender<(Channel, String)>,
) {
    let Some(from) = from else { return };
    tokio::spawn(async move {
        let mut reader = BufReader::new(from);
        let mut line = vec![];
        // A line without an end is cut, so that it can't fill the memory.
        while let Ok(1..) = read_line(&mut reader, &mut line).await {
            let text = String::from_utf8_lossy(&line).trim_end_matches(['\r', '\n']).to_owned();
            if to.send((channel, text)).await.is_err() {
                return;
            }
            line.clear();
        }
    });
}

/// A line, or as much of it as one may be long.
pub async fn read_line(
    reader: &mut BufReader<impl AsyncRead + Unpin>,
    line: &mut Vec<u8>,
) -> io::Result<usize> {
    use tokio::io::AsyncReadExt as _;
    let most = actors::log_line::LINE_BYTES_MAX as u64;
    reader.take(most).read_until(b'\n', line).await
}

async fn ended(
    mut child: Child,
    pid: Pid,
    instance: String,
    work: PathBuf,
    group: Option<Group>,
) -> Exit {
    let status = child.wait().await;
    // What it started must not outlive it, even in a session of its own.
    let _ = kill_process_group(pid, Signal::KILL);
    let cleared = tokio::task::spawn_blocking(move || {
        let out_of_memory = group.as_ref().is_some_and(Group::ran_out_of_memory);
        kill_all_of(&instance);
        group.inspect(Group::end);
        out_of_memory
    });
    let out_of_memory = cleared.await.unwrap_or_default();
    let _ = tokio::fs::remove_dir_all(&work).await;
    let _ = tokio::fs::remove_file(work.with_extension("pid")).await;
    match status {
        Ok(status) => Exit { code: status.code(), signal: status.signal(), out_of_memory },
        Err(_) => Exit { code: None, signal: None, out_of_memory },
    }
}

/// The session of an instance.
struct Session {
    pid: Pid,
    port: u16,
    group: Option<Group>,
}

impl Session {
    /// To the whole group; to the process alone while it has not made its group yet.
    fn signal(&self, signal: Signal) {
        if kill_process_group(self.pid, signal).is_err() {
            let _ = rustix::process::kill_process(self.pid, signal);
        }
    }
}

impl Process for Session {
    fn terminate(&self) {
        self.signal(Signal::TERM);
    }

    fn kill(&self) {
        self.signal(Signal::KILL);
    }

    fn listens(&self) -> bool {
        let listening = listening_inodes(self.port);
        let own = match &self.group {
            Some(group) => group.processes(),
            None => processes_of_session(self.pid.as_raw_nonzero().get()),
        };
        // Where the kernel tells nothing of sockets there is nothing to compare.
        listening.is_empty()
            || own.into_iter().flat_map(sockets_of).any(|one| listening.contains(&one))
    }

    fn usage(&self) -> Option<(u64, u64)> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid.as_raw_nonzero())).ok()?;
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        let number = |place: usize| fields.get(place)?.parse::<u64>().ok();
        let page = rustix::param::page_size() as u64;
        let tick = 1000 / rustix::param::clock_ticks_per_second();
        let group = self.group.as_ref();
        let memory = group.and_then(Group::memory_bytes);
        let cpu = group.and_then(Group::cpu_millis);
        Some((
            memory.unwrap_or(number(21)? * page),
            cpu.unwrap_or((number(11)? + number(12)?) * tick),
        ))
    }
}

/// Sockets that listen on this port, by inode (proc(5), `/proc/net/tcp`).
fn listening_inodes(port: u16) -> Vec<u64> {
    const LISTEN: &str = "0A";
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"]
        .map(|path| fs::read_to_string(path).unwrap_or_default());
    let of_line = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let local = fields.get(1)?.rsplit_once(':')?.1;
        let is_it = u16::from_str_radix(local, 16) == Ok(port) && fields.get(3) == Some(&LISTEN);
        fields.get(9)?.parse().ok().filter(|_| is_it)
    };
    tables.iter().flat_map(|table| table.lines().skip(1)).filter_map(of_line).collect()
}

/// The processes of a session.
fn processes_of_session(session: i32) -> Vec<i32> {
    let mut found = vec![];
    for process in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let stat = fs::read_to_string(process.path().join("stat")).unwrap_or_default();
        let own = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(3));
        if own.and_then(|own| own.parse::<i32>().ok()) == Some(session) {
            found.push(pid);
        }
    }
    found
}

/// Sockets that a process holds open, by inode.
fn sockets_of(pid: i32) -> Vec<u64> {
    let files = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let inodes = files.filter_map(|file| {
        let target = fs::read_link(file.path()).ok()?;
        target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse::<u64>().ok()
    });
    inodes.collect()
}

/// When a process began, in ticks since boot: tells it from a later one with its number.
fn start_time(pid: i32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

fn record(work: &Path, pid: Pid) -> io::Result<()> {
    let number = pid.as_raw_nonzero().get();
    let began = start_time(number).unwrap_or_default();
    fs::write(work.with_extension("pid"), format!("{number} {began}"))
}

/// Ends every process that carries this instance's id among its variables.
fn kill_all_of(instance: &str) {
    let mark = format!("ROOST_INSTANCE_ID={instance}");
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let pid =
            entry.file_name().to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw);
        let variables = fs::read(entry.path().join("environ")).unwrap_or_default();
        let is_of_instance = variables.split(|byte| *byte == 0).any(|one| one == mark.as_bytes());
        if let Some(pid) = pid.filter(|_| is_of_instance) {
            let _ = rustix::process::kill_process(pid, Signal::KILL);
        }
    }
}

/// Ends processes that an earlier life of this node had started.
fn end_leftovers(work: &Path) -> io::Result<()> {
    for entry in fs::read_dir(work)? {
        let path = entry?.path();
        if path.extension().is_some_and(|ending| ending == "pid") {
            let text = fs::read_to_string(&path)?;
            let mut words = text.split_whitespace();
            let pid = words.next().and_then(|word| word.parse::<i32>().ok());
            let began = words.next().and_then(|word| word.parse::<u64>().ok());
            if let (Some(number), Some(pid)) = (pid, pid.and_then(Pid::from_raw))
                && began.is_some()
                && start_time(number) == began
            {
                let _ = kill_process_group(pid, Signal::KILL);
            }
            if let Some(instance) = path.file_stem().and_then(|name| name.to_str()) {
                kill_all_of(instance);
            }
            fs::remove_file(&path)?;
        } else if path.is_dir() {
            fs::remove_dir_all(&path)?;
        }
    }
    Ok(())
}
