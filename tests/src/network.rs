//! A cluster whose nodes are machines of their own as far as the network goes: each in a network namespace,
//! all on one bridge. What one hears of another can be cut, in one direction too.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    os::fd::AsFd as _,
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicU8, Ordering::Relaxed},
};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde_json::Value;
use tempfile::TempDir;

use crate::{
    Customer,
    cluster::Room,
    node::{QUICK, binary, text},
};

/// The third part of the next network's addresses.
static NETWORKS: AtomicU8 = AtomicU8::new(1);

/// The last part of the address that a network's own machine has in it.
const OUTSIDE: u8 = 254;

/// What is special about a network.
#[derive(Default)]
pub struct Setup {
    /// Settings of its nodes.
    pub settings: Vec<(String, String)>,
    /// Nodes have addresses that look public, and are known by names alone.
    pub is_public: bool,
}

/// Where names are looked up in the namespaces: whoever wants to can answer there.
pub const NAME_SERVER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 53);

/// A running cluster; it and its network end with its value.
pub struct Network {
    number: u8,
    data: TempDir,
    setup: Setup,
    nodes: Vec<Option<Child>>,
    live_key: String,
    _room: Room,
}

fn ip(words: &[&str]) -> bool {
    let told = Command::new("ip").args(words).stdout(Stdio::null()).stderr(Stdio::null()).status();
    told.is_ok_and(|status| status.success())
}

impl Network {
    /// So many nodes; `None` where this machine lets nobody make networks.
    pub fn of(nodes: u8) -> Option<Self> {
        Self::with(nodes, Setup::default())
    }

    /// The same with something special.
    pub fn with(nodes: u8, setup: Setup) -> Option<Self> {
        let number = NETWORKS.fetch_add(1, Relaxed);
        let data = tempfile::tempdir().expect("a temporary folder");
        let (live_key, room) = (String::new(), Room::all());
        let mut this = Self { number, data, setup, nodes: vec![], live_key, _room: room };
        if !this.make_bridge() || !(0..nodes).all(|node| this.make_namespace(node)) {
            return None;
        }
        std::fs::write(this.data.path().join("secret"), "0123456789abcdef".repeat(4))
            .expect("written");
        this.nodes = (0..nodes).map(|_| None).collect();
        this.write_hosts();
        let starting: Vec<Child> = (0..usize::from(nodes)).map(|node| this.serve(node)).collect();
        for (node, mut child) in starting.into_iter().enumerate() {
            crate::cluster::first_line(&mut child);
            this.nodes[node] = Some(child);
        }
        let keys = std::fs::read(this.folder(0).join("first-keys.json")).expect("the first keys");
        let keys: Value = serde_json::from_slice(&keys).expect("JSON");
        this.live_key = text(&keys["live_key"]);
        Some(this)
    }

    fn bridge(&self) -> String {
        format!("rt{}-{}", self.number, std::process::id() % 100_000)
    }

    fn namespace(&self, node: u8) -> String {
        format!("{}-{node}", self.bridge())
    }

    /// A node's address.
    pub fn address(&self, node: u8) -> String {
        format!("{}.{}.{}", self.net(), self.number, node + 1)
    }

    /// Where all nodes reach the machine that their network is on, in the network with this number.
    pub fn outside_of(number: u8) -> String {
        format!("10.197.{number}.{OUTSIDE}")
    }

    /// The same of this network.
    pub fn outside(&self) -> String {
        format!("{}.{}.{OUTSIDE}", self.net(), self.number)
    }

    fn net(&self) -> &'static str {
        if self.setup.is_public { "45.197" } else { "10.197" }
    }

    /// What other nodes know a node by.
    pub fn host(&self, node: u8) -> String {
        if self.setup.is_public { format!("node-{node}.roost") } else { self.address(node) }
    }

    /// Files that `ip netns exec` puts in the place of those in /etc.
    fn own_files(&self, node: u8) -> PathBuf {
        PathBuf::from("/etc/netns").join(self.namespace(node))
    }

    fn write_hosts(&self) {
        let names = |node| format!("{} {}\n", self.address(node), self.host(node));
        let hosts: String = (0..self.len()).map(names).collect();
        for node in 0..self.len() {
            let folder = self.own_files(node);
            std::fs::create_dir_all(&folder).expect("a folder in /etc/netns");
            std::fs::write(folder.join("hosts"), format!("127.0.0.1 localhost\n{hosts}"))
                .expect("written");
            let server = NAME_SERVER.ip();
            let resolver = format!("nameserver {server}\noptions timeout:1 attempts:1\n");
            std::fs::write(folder.join("resolv.conf"), resolver).expect("written");
        }
    }

    /// Does something as if on a node's machine: what is bound there stays there.
    pub fn on<T: Send>(&self, node: u8, what: impl FnOnce() -> T + Send) -> T {
        let namespace = PathBuf::from("/run/netns").join(self.namespace(node));
        let enter = move || {
            let file = std::fs::File::open(namespace).expect("the namespace");
            let kind = Some(LinkNameSpaceType::Network);
            move_into_link_name_space(file.as_fd(), kind).expect("it can be entered");
            what()
        };
        // A thread of its own: it does not come back.
        std::thread::scope(|scope| scope.spawn(enter).join().expect("it is done"))
    }

    /// On a node's machine, every address there is leads to that machine itself, but for those of its
    /// neighbours.
    pub fn swallow_all(&self, node: u8) {
        let name = self.namespace(node);
        for family in ["-4", "-6"] {
            let route = ["route", "add", "local", "default", "dev", "lo", "table", "main"];
            assert!(ip(&[&[family, "-n", &name][..], &route].concat()), "a route for everything");
        }
    }

    fn make_bridge(&self) -> bool {
        let (bridge, own) = (self.bridge(), format!("{}/24", self.outside()));
        ip(&["link", "add", &bridge, "type", "bridge"])
            && ip(&["addr", "add", &own, "dev", &bridge])
            && ip(&["link", "set", &bridge, "up"])
            && self.pass("-I")
    }

    /// Docker drops what crosses a bridge that is not its own.
    fn pass(&self, change: &str) -> bool {
        let bridge = self.bridge();
        let mut command = Command::new("iptables");
        command.args(["-w", change, "FORWARD", "-i", &bridge, "-o", &bridge, "-j", "ACCEPT"]);
        command.stderr(Stdio::null()).status().is_ok_and(|status| status.success())
    }

    fn make_namespace(&self, node: u8) -> bool {
        let name = self.namespace(node);
        let (outer, inner) =
            (format!("rv{}x{node}-{}", self.number, std::process::id() % 10_000), "eth0");
        let address = format!("{}/24", self.address(node));
        ip(&["netns", "add", &name])
            && ip(&["link", "add", &outer, "type", "veth", "peer", "name", inner, "netns", &name])
            && ip(&["link", "set", &outer, "master", &self.bridge()])
            && ip(&["link", "set", &outer, "up"])
            && ip(&["-n", &name, "addr", "add", &address, "dev", inner])
            && ip(&["-n", &name, "link", "set", inner, "up"])
            && ip(&["-n", &name, "link", "set", "lo", "up"])
    }

    fn folder(&self, node: usize) -> PathBuf {
        self.data.path().join(format!("node-{node}"))
    }

    fn serve(&self, node: usize) -> Child {
        let place = u8::try_from(node).expect("few nodes");
        let peers = 0..self.len();
        let members: Vec<String> = peers.map(|one| format!("{}:8444", self.host(one))).collect();
        let own = self.address(place);
        Command::new("ip")
            .args(["netns", "exec", &self.namespace(place)])
            .arg(binary())
            .args(["serve", "--json", "--join", &members.join(",")])
            .args(["--clients", &format!("{own}:8443"), "--peer", &format!("{own}:8444")])
            .arg("--secret-file")
            .arg(self.data.path().join("secret"))
            .arg("--data")
            .arg(self.folder(node))
            .env("ROOST_CLUSTER__ADVERTISE", format!("{}:8444", self.host(place)))
            .env("ROOST_HTTP__NAMES", format!("[\"{own}\"]"))
            .envs(QUICK.iter().copied())
            .envs(self.setup.settings.iter().map(|(name, value)| (name, value)))
            .stdout(Stdio::piped())
            .stdin(Stdio::null())
            .spawn()
            .expect("the node starts")
    }

    /// Somebody with the live key at one node; no partition cuts clients off.
    pub fn customer(&self, node: u8) -> Customer {
        let authority = self.folder(usize::from(node)).join("tls/ca.pem");
        Customer::new(&format!("https://{}:8443", self.address(node)), &authority, &self.live_key)
    }

    /// From now on `deaf` hears nothing of `mute`.
    pub fn deafen(&self, deaf: u8, mute: u8) {
        self.filter(deaf, &["-A", "INPUT", "-s", &self.address(mute), "-j", "DROP"]);
    }

    /// Neither hears the other.
    pub fn cut(&self, one: u8, other: u8) {
        self.deafen(one, other);
        self.deafen(other, one);
    }

    /// Nobody hears this one, and it hears nobody.
    pub fn isolate(&self, node: u8) {
        (0..self.len()).filter(|other| *other != node).for_each(|other| self.cut(node, other));
    }

    /// Everybody hears everybody.
    pub fn heal(&self) {
        (0..self.len()).for_each(|node| self.filter(node, &["-F", "INPUT"]));
    }

    fn filter(&self, node: u8, rule: &[&str]) {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.namespace(node), "iptables", "-w"]).args(rule);
        let done = command.output().expect("ip runs");
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    }

    /// How many nodes there are.
    pub fn len(&self) -> u8 {
        u8::try_from(self.nodes.len()).unwrap_or(u8::MAX)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    fn signal(&self, node: u8, name: &str) {
        if let Some(child) = &self.nodes[usize::from(node)] {
            crate::cluster::signal(child.id(), name);
        }
    }

    /// Stops a node's clock.
    pub fn pause(&self, node: u8) {
        self.signal(node, "-STOP");
    }

    /// Lets it go on.
    pub fn go_on(&self, node: u8) {
        self.signal(node, "-CONT");
    }

    /// `kill -9`.
    pub fn kill(&mut self, node: u8) {
        if let Some(mut child) = self.nodes[usize::from(node)].take() {
            child.kill().expect("it can be killed");
            child.wait().expect("it is gone");
        }
    }

    /// Starts a node again that was killed; ready on return.
    pub fn restart(&mut self, node: u8) {
        let mut child = self.serve(usize::from(node));
        crate::cluster::first_line(&mut child);
        self.nodes[usize::from(node)] = Some(child);
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for node in 0..self.len() {
            self.go_on(node);
            self.signal(node, "-TERM");
        }
        self.nodes.iter_mut().flatten().for_each(crate::cluster::see_off);
        for node in 0..u8::try_from(self.nodes.len()).unwrap_or(u8::MAX).max(8) {
            ip(&["netns", "del", &self.namespace(node)]);
            let _ = std::fs::remove_dir_all(self.own_files(node));
        }
        self.pass("-D");
        ip(&["link", "del", &self.bridge()]);
    }
}
