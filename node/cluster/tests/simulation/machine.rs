//! One simulated machine: its disks, its clock, and the node that runs on it.

use std::{
    io,
    net::{IpAddr, Ipv4Addr},
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use actors::{
    fakes::world_over,
    ports::{Clock, Ledger as _, Observer},
    settings::Settings as ActorSettings,
};
use cluster::{
    RaftLedger, Settings, Storage,
    answer::PeerPort,
    peer::{
        book::AddressBook,
        client::{Dial, Line, PeerClient},
        server::{self, Answerer},
    },
    raft::{
        disk::{self, Scribe},
        group::{Snapshots, Timeouts},
        log::LogFile,
        state::StateFile,
        wal,
    },
};
use domain::{
    NodeId, Timestamp,
    directory::Command,
    event::{DirectoryEvent, ShardEvent},
    machine::Entry,
    node::{JoinToken, NodeFacts},
};
use futures::FutureExt as _;
use tempfile::TempDir;

use crate::{client, dice::Dice, disk::Disk, world::World};

const PORT: u16 = 8444;
/// Nodes that a cluster is made of; further ones join later.
pub(crate) const FOUNDERS: usize = 3;
/// Clients at one node.
const CLIENTS: u64 = 3;
/// A disk's write takes up to this long beside what its machine's slowness adds.
const WRITE_MICROS: u64 = 800;

/// One of them.
pub(crate) struct Machine {
    /// Its place among the machines.
    pub(crate) number: usize,
    log: Disk,
    state: Disk,
    folder: TempDir,
    /// How much longer its disk takes at most.
    pub(crate) slow_millis: Arc<AtomicU64>,
    /// How far its clock is ahead.
    pub(crate) ahead_millis: AtomicU64,
    /// Whether it has power.
    pub(crate) is_up: AtomicBool,
    lives: AtomicU64,
    node: Mutex<Weak<RaftLedger>>,
    tables: Mutex<Weak<StateFile>>,
}

impl Machine {
    /// A new machine.
    pub(crate) fn new(number: usize) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let (log, state, slow_millis, ahead_millis) = Default::default();
        let (is_up, lives, node, tables) = Default::default();
        Self { number, log, state, folder, slow_millis, ahead_millis, is_up, lives, node, tables }
    }

    /// What it is called in the network.
    pub(crate) fn name(&self) -> String {
        format!("node-{}", self.number)
    }

    /// Its node in Raft's numbers.
    pub(crate) fn raft_id(&self) -> u64 {
        self.number as u64 + 1
    }

    /// Its node.
    pub(crate) fn node_id(&self) -> NodeId {
        NodeId(u128::from(self.raft_id()))
    }

    /// The node that runs on it, if one does.
    pub(crate) fn node(&self) -> Option<Arc<RaftLedger>> {
        let node = self.node.lock().unwrap_or_else(PoisonError::into_inner);
        node.upgrade().filter(|_| self.is_up.load(Relaxed))
    }

    /// Its tables, if a node runs.
    pub(crate) fn tables(&self) -> Option<Arc<StateFile>> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner).upgrade()
    }

    /// The power goes.
    pub(crate) fn lose_power(&self, dice: &mut Dice) {
        self.is_up.store(false, Relaxed);
        self.log.lose_power(dice);
        self.state.lose_power(dice);
    }

    /// Writes to its disks as fast as they are.
    fn scribe(&self, seed: u64, stream: u64) -> Scribe {
        let (slow, dice) = (Arc::clone(&self.slow_millis), Mutex::new(Dice::new(seed, stream)));
        Scribe::Task(Arc::new(move || {
            let mut dice = dice.lock().unwrap_or_else(PoisonError::into_inner);
            let slow = slow.load(Relaxed) * 1000;
            Duration::from_micros(dice.below(WRITE_MICROS + slow))
        }))
    }

    fn facts(&self) -> NodeFacts {
        NodeFacts {
            id: self.node_id(),
            raft_id: self.raft_id(),
            peer_address: format!("{}:{PORT}", self.name()),
            base_url: format!("https://{}", self.name()),
            version: "0".to_owned(),
            labels: Default::default(),
            cores: 1,
            memory_mb: 1,
            providers: vec![],
        }
    }
}

/// A machine's clock.
struct Wall(Arc<World>, usize);

impl Clock for Wall {
    fn now(&self) -> Timestamp {
        self.0.clock(self.1)
    }
}

struct Deaf;

impl Observer for Deaf {
    fn directory(&self, _: &[DirectoryEvent]) {}
    fn shard(&self, _: u16, _: &[ShardEvent]) {}
}

fn dial() -> Dial {
    Arc::new(|address| {
        async move {
            let stream = turmoil::net::TcpStream::connect(address).await?;
            Ok(Box::new(stream) as Box<dyn Line>)
        }
        .boxed()
    })
}

/// One life of a node: from its start until its machine loses power.
pub(crate) async fn live(world: Arc<World>, number: usize) -> turmoil::Result {
    let machine = &world.machines[number];
    let life = machine.lives.fetch_add(1, Relaxed);
    machine.is_up.store(true, Relaxed);
    let ledger = open(&world, machine, life).await?;
    *machine.node.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(&ledger);
    let port = PeerPort::new(Arc::clone(&ledger));
    tokio::spawn(listen(Arc::clone(&world), port));
    tokio::spawn(Arc::clone(&ledger).run());
    let clock = Arc::new(Wall(Arc::clone(&world), number));
    let acting =
        world_over(Arc::clone(&ledger) as _, clock, ActorSettings::default(), machine.node_id());
    tokio::spawn(acting.relay());
    if number == 0 && life == 0 {
        found(&world, &ledger).await;
    } else {
        ledger.ready().await;
        let register = Command::RegisterNode(Box::new(machine.facts()));
        let _ = ledger.change_directory(Entry::new(world.clock(number), register)).await;
    }
    let clients = (0..CLIENTS).map(|client| {
        let stream = (life << 16) | (machine.raft_id() << 8) | client;
        let dice = Dice::new(world.seed, stream);
        client::work(Arc::clone(&world), number, Arc::clone(&ledger), dice)
    });
    futures::future::join_all(clients).await;
    std::future::pending().await
}

/// So small that segments of the log are used again.
const LOG_SEGMENT: u64 = 16 * 1024;

async fn open(world: &World, machine: &Machine, life: u64) -> io::Result<Arc<RaftLedger>> {
    let seed = Dice::new(world.seed, (life << 8) | machine.raft_id()).next();
    let log = LogFile::start_with(
        wal::open(machine.log.powered(), LOG_SEGMENT)?,
        machine.scribe(seed, 1),
    )?;
    let state =
        StateFile::start_with(disk::open_on(machine.state.powered())?, machine.scribe(seed, 2))?;
    *machine.tables.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(&state);
    let book = Arc::new(AddressBook::default());
    for other in &world.machines[..FOUNDERS] {
        book.put(other.raft_id(), &other.facts().peer_address);
    }
    let founder = machine.number == 0;
    let settings = Settings {
        node_id: machine.node_id(),
        node: machine.raft_id(),
        shards: world.shards,
        founds: founder.then(|| machine.facts().peer_address),
        write_deadline: Duration::from_secs(5),
        timeouts: Timeouts::default(),
        snapshots: Snapshots {
            entries: 60,
            bytes: 64 * 1024,
            kept: 10,
            kept_bytes: 512,
            held: 256 * 1024,
        },
        seed,
    };
    let client = PeerClient::over(dial(), machine.raft_id(), book);
    let storage = Storage { log, state, incoming: machine.folder.path().join("incoming") };
    RaftLedger::open(storage, settings, Arc::new(Deaf), client).await
}

async fn listen(world: Arc<World>, port: Arc<PeerPort>) -> io::Result<()> {
    let listener =
        turmoil::net::TcpListener::bind((IpAddr::from(Ipv4Addr::UNSPECIFIED), PORT)).await?;
    loop {
        let (stream, from) = listener.accept().await?;
        let name = turmoil::reverse_lookup(from.ip()).unwrap_or_default();
        let Some(other) = world.machines.iter().find(|machine| machine.name() == name) else {
            continue;
        };
        let answerer = Arc::clone(&port) as Arc<dyn Answerer>;
        tokio::spawn(server::attend(Box::new(stream), other.raft_id(), answerer));
    }
}

/// The first node makes the cluster and lets the others in.
async fn found(world: &World, ledger: &RaftLedger) {
    let me = Command::RegisterNode(Box::new(world.machines[0].facts()));
    agree(world, ledger, me).await;
    for machine in &world.machines[1..FOUNDERS] {
        let [mint, redeem] = admission(world, machine);
        agree(world, ledger, mint).await;
        agree(world, ledger, redeem).await;
    }
}

/// What lets a machine's node in.
pub(crate) fn admission(world: &World, machine: &Machine) -> [Command; 2] {
    let hash = [u8::try_from(machine.number).expect("few machines"); 32];
    let expires_at = world.clock(0).plus(Duration::from_secs(48 * 3600));
    let facts = Box::new(machine.facts());
    [
        Command::MintJoinToken(Box::new(JoinToken { hash, expires_at })),
        Command::RedeemJoinToken { hash, facts },
    ]
}

async fn agree(world: &World, ledger: &RaftLedger, command: Command) {
    loop {
        let entry = Entry::new(world.clock(0), command.clone());
        match ledger.change_directory(entry).await {
            Ok(answer) => {
                answer.result.expect("a founder may do that");
                return;
            }
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
}
