//! A cluster as its operator has it: `roost dev --nodes N --json`, real processes that come together
//! by tokens; any of them may be killed, paused and started again.

use std::{
    io::{BufRead as _, BufReader},
    path::PathBuf,
    process::{Child, Command, Output, Stdio},
    sync::{Condvar, Mutex, PoisonError, mpsc},
    time::{Duration, Instant},
};

use serde_json::Value;
use tempfile::TempDir;

use crate::{
    Customer, eventually,
    node::{QUICK, binary, text},
};

/// Nodes of clusters at once: more would only take each other's processors.
const AT_ONCE: usize = 6;
/// What a cluster counts at least: small ones are there to grow.
const COUNTS_AT_LEAST: usize = 3;
static RUNNING: (Mutex<usize>, Condvar) = (Mutex::new(0), Condvar::new());

/// A running cluster; it ends with its value.
pub struct Cluster {
    dev: Child,
    /// Its folder.
    pub data: TempDir,
    /// Its nodes.
    pub nodes: Vec<Member>,
    settings: Vec<(String, String)>,
    live_key: String,
    test_key: String,
    again: Vec<Child>,
    _room: Room,
}

/// One node of it.
pub struct Member {
    /// Its id.
    pub id: String,
    /// Where it is reached.
    pub base_url: String,
    /// Its process.
    pub pid: u32,
    folder: PathBuf,
}

/// Room for the nodes of a cluster; it is free again with its value.
pub(crate) struct Room(usize);

impl Room {
    /// Waits until there is nobody else.
    pub(crate) fn all() -> Self {
        Self::wait_for(AT_ONCE)
    }

    /// Waits until there is so much.
    pub(crate) fn wait_for(nodes: usize) -> Self {
        let nodes = nodes.clamp(COUNTS_AT_LEAST, AT_ONCE);
        let (count, free) = &RUNNING;
        let count = count.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = free.wait_while(count, |count| *count + nodes > AT_ONCE);
        *taken.unwrap_or_else(PoisonError::into_inner) += nodes;
        Self(nodes)
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        let (count, free) = &RUNNING;
        *count.lock().unwrap_or_else(PoisonError::into_inner) -= self.0;
        free.notify_all();
    }
}

pub(crate) fn signal(pid: u32, name: &str) {
    let sent = Command::new("kill").args([name, &pid.to_string()]).stderr(Stdio::null()).status();
    assert!(sent.is_ok(), "signals can be sent");
}

fn is_gone(pid: u32) -> bool {
    let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = state.rsplit(')').next().unwrap_or_default().trim().chars().next();
    matches!(state, None | Some('Z'))
}

/// Waits a while for the end of a process that was told to end; then it is killed.
pub(crate) fn see_off(child: &mut Child) {
    for _ in 0..200 {
        if matches!(child.try_wait(), Ok(Some(_)) | Err(_)) {
            return;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    let _ = child.kill();
    let _ = child.wait();
}

/// How long a start may take on a machine that does much else.
const READY_WITHIN: Duration = Duration::from_secs(120);

/// What a started program says first, when it is ready; one that isn't in time is killed.
pub(crate) fn first_line(child: &mut Child) -> Value {
    let out = child.stdout.take().expect("its output is ours");
    let (tell, told) = mpsc::channel();
    std::thread::spawn(move || {
        let mut line = String::new();
        let read = BufReader::new(out).read_line(&mut line);
        // Nobody listens any more when it comes too late.
        let _ = tell.send(read.map(|_| line));
    });
    let Ok(line) = told.recv_timeout(READY_WITHIN) else {
        let _ = child.kill();
        panic!("no node was ready after {READY_WITHIN:?}");
    };
    let line = line.expect("its output can be read");
    let ready = serde_json::from_str(&line);
    ready.unwrap_or_else(|error| panic!("not the line of a ready node: {line:?}: {error}"))
}

impl Cluster {
    /// So many nodes with short times.
    pub fn of(nodes: usize) -> Self {
        Self::with(nodes, &[])
    }

    /// So many nodes with short times and no other cluster beside them, for stories that count how much
    /// gets done.
    pub fn alone(nodes: usize) -> Self {
        Self::within(Room::all(), nodes, &[])
    }

    /// So many nodes with short times that have little to do: they leave room for another cluster.
    pub fn at_rest(nodes: usize) -> Self {
        Self::within(Room::wait_for(COUNTS_AT_LEAST), nodes, &[])
    }

    /// So many nodes with short times and these settings.
    pub fn with(nodes: usize, settings: &[(&str, &str)]) -> Self {
        Self::within(Room::wait_for(nodes), nodes, settings)
    }

    fn within(room: Room, nodes: usize, settings: &[(&str, &str)]) -> Self {
        let settings: Vec<_> = QUICK
            .iter()
            .chain(&[("ROOST_CLUSTER__REPLACEMENT_GRACE", "2s")])
            .chain(settings)
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
        let data = tempfile::tempdir().expect("a temporary folder");
        let mut dev = Command::new(binary())
            .args(["dev", "--json", "--port", "0", "--nodes", &nodes.to_string(), "--data"])
            .arg(data.path())
            .envs(settings.iter().map(|(name, value)| (name, value)))
            .stdout(Stdio::piped())
            .stdin(Stdio::null())
            .spawn()
            .expect("the cluster starts");
        let ready = first_line(&mut dev);
        let member = |(place, node): (usize, &Value)| Member {
            id: text(&node["node_id"]),
            base_url: text(&node["base_url"]),
            pid: u32::try_from(node["pid"].as_u64().expect("a pid")).expect("a pid"),
            folder: match nodes {
                1 => data.path().to_owned(),
                _ => data.path().join(format!("node-{}", place + 1)),
            },
        };
        let listed = ready["nodes"].as_array().expect("nodes");
        let nodes = listed.iter().enumerate().map(member).collect();
        let (live_key, test_key) = (text(&ready["live_key"]), text(&ready["test_key"]));
        Self { dev, data, nodes, settings, live_key, test_key, again: vec![], _room: room }
    }

    /// Somebody with the live key, at one node.
    pub fn customer(&self, node: usize) -> Customer {
        self.caller(node, &self.live_key)
    }

    /// Somebody with the test key, at one node.
    pub fn tester(&self, node: usize) -> Customer {
        self.caller(node, &self.test_key)
    }

    /// Somebody with this key or token at one node.
    pub fn caller(&self, node: usize, key: &str) -> Customer {
        let authority = self.nodes[node].folder.join("tls/ca.pem");
        Customer::new(&self.nodes[node].base_url, &authority, key)
    }

    /// The place of the node with this id.
    pub fn place(&self, id: &str) -> usize {
        self.nodes.iter().position(|node| node.id == id).expect("a node of this cluster")
    }

    /// The folder of a node.
    pub fn folder(&self, node: usize) -> &std::path::Path {
        &self.nodes[node].folder
    }

    /// `kill -9`.
    pub fn kill(&self, node: usize) {
        let pid = self.nodes[node].pid;
        signal(pid, "-KILL");
        while !is_gone(pid) {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until a node's process has ended by itself.
    pub async fn ends(&self, node: usize) {
        let pid = self.nodes[node].pid;
        eventually("the process ends by itself", async || {
            if is_gone(pid) { Ok(()) } else { Err("it goes on".to_owned()) }
        })
        .await;
    }

    /// SIGTERM, and waits for the end.
    pub fn terminate(&self, node: usize) {
        let pid = self.nodes[node].pid;
        signal(pid, "-TERM");
        while !is_gone(pid) {
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Stops a node's clock.
    pub fn pause(&self, node: usize) {
        signal(self.nodes[node].pid, "-STOP");
    }

    /// Lets it go on.
    pub fn go_on(&self, node: usize) {
        signal(self.nodes[node].pid, "-CONT");
    }

    /// Starts nodes again that were killed or terminated; ready on return.
    pub fn restart(&mut self, nodes: &[usize]) {
        let starting: Vec<(usize, Child)> =
            nodes.iter().map(|node| (*node, self.serve(*node))).collect();
        for (node, mut child) in starting {
            let ready = first_line(&mut child);
            assert_eq!(text(&ready["node_id"]), self.nodes[node].id, "it is the same node");
            self.nodes[node].pid = child.id();
            self.again.push(child);
        }
    }

    /// Starts the node of a folder that was made beside this cluster; gives its place.
    pub fn adopt(&mut self, folder: PathBuf) -> usize {
        let base_url = "https://127.0.0.1:0".to_owned();
        self.nodes.push(Member { id: String::new(), base_url, pid: 0, folder });
        let place = self.nodes.len() - 1;
        let mut child = self.serve(place);
        let ready = first_line(&mut child);
        let member = &mut self.nodes[place];
        member.id = text(&ready["node_id"]);
        member.base_url = text(&ready["base_url"]);
        member.pid = child.id();
        self.again.push(child);
        place
    }

    /// Starts a node that can't start; what it says.
    pub fn start_and_fail(&self, node: usize) -> String {
        let output = self.start_for(node, Duration::from_secs(20));
        assert!(!output.status.success(), "it must not start");
        String::from_utf8_lossy(&output.stderr).into_owned()
    }

    /// Starts a node that does not become ready, and tells it to stop after a while; what it says.
    pub fn start_in_vain(&self, node: usize, within: Duration) -> String {
        let output = self.start_for(node, within);
        assert_eq!(String::from_utf8_lossy(&output.stdout), "", "it must not be ready");
        assert!(output.status.success(), "it stops when it is told to: {}", output.status);
        String::from_utf8_lossy(&output.stderr).into_owned()
    }

    /// Runs a node until it ends by itself, or is told to after a while.
    fn start_for(&self, node: usize, within: Duration) -> Output {
        let mut command = self.command(node);
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut child = child.expect("it runs");
        let until = Instant::now() + within;
        while matches!(child.try_wait(), Ok(None)) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(50));
        }
        if matches!(child.try_wait(), Ok(None)) {
            signal(child.id(), "-TERM");
            see_off(&mut child);
        }
        child.wait_with_output().expect("it has ended")
    }

    /// A setting of nodes that are started from now on.
    pub fn set(&mut self, name: &str, value: &str) {
        self.settings.retain(|(known, _)| known != name);
        self.settings.push((name.to_owned(), value.to_owned()));
    }

    fn serve(&self, node: usize) -> Child {
        self.command(node).stdout(Stdio::piped()).spawn().expect("the node starts")
    }

    fn command(&self, node: usize) -> Command {
        let address = self.nodes[node].base_url.trim_start_matches("https://").to_owned();
        let mut command = Command::new(binary());
        command
            .args(["serve", "--json", "--peer", "127.0.0.1:0", "--clients", &address, "--data"])
            .arg(&self.nodes[node].folder)
            .envs(self.settings.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null());
        command
    }

    /// A command of the operator on the machine of a node.
    pub fn operate(&self, node: usize, command: &[&str]) -> Output {
        let mut operator = Command::new(binary());
        operator.args(command).arg("--data").arg(&self.nodes[node].folder);
        operator.stdin(Stdio::null()).output().expect("it runs")
    }

    /// A new node by a token: its folder, its process and where it is reached.
    pub fn grow(&mut self) {
        self.grow_at(0);
    }

    /// The same with a token of this node; gives the new node's place.
    pub fn grow_at(&mut self, node: usize) -> usize {
        let token = self.operate(node, &["token"]);
        assert!(token.status.success(), "{}", String::from_utf8_lossy(&token.stderr));
        let said = String::from_utf8_lossy(&token.stderr).into_owned();
        let address = said.lines().find_map(|line| line.split("--token").nth(1)).expect("a hint");
        let address = address.split_whitespace().last().expect("an address").to_owned();
        let token = String::from_utf8_lossy(&token.stdout).trim().to_owned();
        let folder = self.data.path().join(format!("joined-{}", self.nodes.len() + 1));
        let joined = Command::new(binary())
            .args(["join", "--token", &token, &address, "--data"])
            .arg(&folder)
            .output()
            .expect("it runs");
        assert!(joined.status.success(), "{}", String::from_utf8_lossy(&joined.stderr));
        self.adopt(folder)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // A graceful end first, so that no agent's process is left for the next test to meet.
        self.nodes.iter().filter(|node| node.pid > 0).for_each(|node| {
            signal(node.pid, "-CONT");
            signal(node.pid, "-TERM");
        });
        signal(self.dev.id(), "-TERM");
        self.again.iter_mut().chain([&mut self.dev]).for_each(see_off);
    }
}
