//! Who is there: SWIM (foca) over sealed UDP datagrams. Gossip finds out who answers and how they are;
//! it decides nothing. What belongs and who leads is Raft's.
//!
//! One task owns the `Foca` value. A member is probed every 400 ms and a suspect has 900 ms to speak up: among three
//! nodes a dead one is probed within two turns, suspected at the end of the next and known 900 ms later, that is
//! within two and a half seconds.

pub mod load;
pub mod seal;

use std::{
    collections::{BTreeMap, BTreeSet, BinaryHeap},
    net::SocketAddr,
    num::NonZeroUsize,
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use foca::{
    AccumulatingRuntime, Foca, Identity, OwnedNotification, PeriodicParams, PostcardCodec, Timer,
};
use rand::rngs::StdRng;
use serde::{Deserialize, Serialize};
use tokio::{
    net::UdpSocket,
    sync::{mpsc, watch},
    time::{Instant, MissedTickBehavior},
};

use self::{
    load::{Load, Loads},
    seal::{Keyring, SEAL_BYTES},
};

/// Between probes of one member.
const PROBE_EVERY: Duration = Duration::from_millis(400);
/// How long a probed member may take before others are asked to probe it.
const ANSWER_WITHIN: Duration = Duration::from_millis(200);
/// How long a suspect may take to speak up.
const SUSPECT_FOR: Duration = Duration::from_millis(900);
/// How long the dead are remembered.
const DEAD_FOR: Duration = Duration::from_secs(15);
/// Largest datagram that passes everywhere.
const DATAGRAM_BYTES_MAX: usize = 1400;
/// Between greetings of members that are not known to be alive.
const GREET_EVERY: Duration = Duration::from_secs(1);
/// How long a member's name may take to be looked up.
const FOUND_WITHIN: Duration = Duration::from_secs(5);
/// Members that are found and not yet greeted.
const STRANGERS_MAX: usize = 64;
/// Datagrams heard before anything else is done: noise is thrown away faster than it comes, or it would crowd
/// out what members say.
const HEARD_AT_ONCE: usize = 256;
/// Between tellings of this node's load.
const LOAD_EVERY: Duration = Duration::from_secs(2);

/// A node as gossip names it. A newer life of a node wins over an older one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// The node in Raft's numbers.
    pub raft_id: u64,
    /// Where its datagrams go.
    pub address: SocketAddr,
    /// Which life of the node this is.
    pub life: u64,
}

impl Identity for Member {
    type Addr = u64;

    fn renew(&self) -> Option<Self> {
        Some(Self { life: self.life + 1, ..self.clone() })
    }

    fn addr(&self) -> u64 {
        self.raft_id
    }

    fn win_addr_conflict(&self, adversary: &Self) -> bool {
        self.life > adversary.life
    }
}

/// Who answers, and how they are.
pub struct Alive {
    me: u64,
    others: watch::Sender<BTreeSet<u64>>,
    loads: RwLock<BTreeMap<u64, Load>>,
}

impl Alive {
    /// For the node with this number, which is always alive to itself.
    pub fn new(me: u64) -> Arc<Self> {
        Arc::new(Self { me, others: watch::Sender::default(), loads: RwLock::default() })
    }

    /// Whether a node answers.
    pub fn has(&self, raft_id: u64) -> bool {
        raft_id == self.me || self.others.borrow().contains(&raft_id)
    }

    /// Hears of changes.
    pub fn changes(&self) -> watch::Receiver<BTreeSet<u64>> {
        self.others.subscribe()
    }

    /// What a node said of its load last.
    pub fn load(&self, raft_id: u64) -> Option<Load> {
        self.loads.read().unwrap_or_else(PoisonError::into_inner).get(&raft_id).copied()
    }

    fn set(&self, raft_id: u64, alive: bool) {
        self.others.send_if_modified(|others| match alive {
            true => others.insert(raft_id),
            false => others.remove(&raft_id),
        });
    }

    fn hear(&self, load: Load) {
        let mut loads = self.loads.write().unwrap_or_else(PoisonError::into_inner);
        loads.insert(load.raft_id, load);
    }
}

/// What gossip needs of the node.
pub struct Gossip {
    /// Where datagrams come and go.
    pub socket: UdpSocket,
    /// This node.
    pub me: Member,
    /// Seals and opens datagrams.
    pub keyring: Arc<Keyring>,
    /// Who answers.
    pub alive: Arc<Alive>,
    /// The other members, as the directory knows them.
    pub members: Arc<dyn Fn() -> Vec<(u64, String)> + Send + Sync>,
    /// This node's load.
    pub load: Box<dyn Fn() -> Load + Send>,
}

fn config() -> foca::Config {
    let few = NonZeroUsize::new(3).expect("three is not zero");
    let one = NonZeroUsize::MIN;
    let mut config = foca::Config::simple();
    config.probe_period = PROBE_EVERY;
    config.probe_rtt = ANSWER_WITHIN;
    config.num_indirect_probes = few;
    config.suspect_to_down_after = SUSPECT_FOR;
    config.remove_down_after = Some(DEAD_FOR);
    config.max_packet_size =
        NonZeroUsize::new(DATAGRAM_BYTES_MAX - SEAL_BYTES).expect("a seal is shorter");
    config.notify_down_members = true;
    config.periodic_gossip =
        Some(PeriodicParams { frequency: Duration::from_millis(200), num_members: few });
    config.periodic_announce =
        Some(PeriodicParams { frequency: Duration::from_secs(10), num_members: one });
    config.periodic_announce_to_down_members =
        Some(PeriodicParams { frequency: Duration::from_secs(5), num_members: one });
    config
}

/// A timer of foca's, soonest first.
struct Due(Instant, u64, Timer<Member>);

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        (self.0, self.1) == (other.0, other.1)
    }
}

impl Eq for Due {}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Due {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (other.0, other.1).cmp(&(self.0, self.1))
    }
}

struct Talker {
    foca: Foca<Member, PostcardCodec, StdRng, Loads>,
    runtime: AccumulatingRuntime<Member>,
    due: BinaryHeap<Due>,
    timers: u64,
    gossip: Gossip,
}

impl Gossip {
    /// Talks until told to stop, then says goodbye.
    pub async fn run(self, mut stop: watch::Receiver<bool>) {
        let alive = Arc::clone(&self.alive);
        let loads = Loads::new(move |load| alive.hear(load));
        let rng: StdRng = rand::make_rng();
        let foca =
            Foca::with_custom_broadcast(self.me.clone(), config(), rng, PostcardCodec, loads);
        let runtime = AccumulatingRuntime::default();
        let mut talker = Talker { foca, runtime, due: BinaryHeap::new(), timers: 0, gossip: self };
        let mut datagram = vec![0; DATAGRAM_BYTES_MAX + 1];
        let (found, mut strangers) = mpsc::channel(STRANGERS_MAX);
        let mut looks = std::pin::pin!(talker.gossip.strangers(found));
        let mut tell = tokio::time::interval(LOAD_EVERY);
        loop {
            let next = talker.due.peek().map(|due| due.0);
            let next = next.unwrap_or_else(|| Instant::now() + GREET_EVERY);
            tokio::select! {
                received = talker.gossip.socket.recv_from(&mut datagram) => match received {
                    Ok((length, _)) => talker.hear_all(&mut datagram, length),
                    // The other side of an earlier datagram is gone; UDP tells so here.
                    Err(error) => tracing::debug!(%error, "a datagram did not arrive"),
                },
                () = tokio::time::sleep_until(next) => talker.wake(),
                () = &mut looks => {}
                Some(stranger) = strangers.recv() => talker.greet(stranger),
                _ = tell.tick() => talker.tell_load(),
                () = told_to(&mut stop) => {
                    let _ = talker.foca.leave_cluster(&mut talker.runtime);
                    talker.flush().await;
                    return;
                }
            }
            talker.flush().await;
        }
    }
}

impl Gossip {
    /// Finds the addresses of members that are not known to be alive: at first, and after a partition. Beside
    /// what hears and answers, for names may take long to be looked up, and with a node its names may be gone.
    fn strangers(&self, found: mpsc::Sender<Member>) -> impl Future<Output = ()> + use<> {
        let (me, alive, members) =
            (self.me.raft_id, Arc::clone(&self.alive), Arc::clone(&self.members));
        async move {
            let mut looks = tokio::time::interval(GREET_EVERY);
            looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                looks.tick().await;
                let away = members().into_iter();
                let away = away.filter(|(raft_id, _)| *raft_id != me && !alive.has(*raft_id));
                let found = away.map(async |(raft_id, address)| {
                    let looked_up =
                        tokio::time::timeout(FOUND_WITHIN, tokio::net::lookup_host(address)).await;
                    let address = looked_up.ok()?.ok()?.next()?;
                    found.send(Member { raft_id, address, life: 0 }).await.ok()
                });
                futures::future::join_all(found).await;
            }
        }
    }
}

async fn told_to(stop: &mut watch::Receiver<bool>) {
    let _ = stop.wait_for(|stop| *stop).await;
}

impl Talker {
    /// Hears a datagram, and those that wait behind it.
    fn hear_all(&mut self, datagram: &mut [u8], mut length: usize) {
        for _ in 0..HEARD_AT_ONCE {
            self.hear(&datagram[..length]);
            let Ok((next, _)) = self.gossip.socket.try_recv_from(datagram) else { return };
            length = next;
        }
    }

    fn hear(&mut self, datagram: &[u8]) {
        let Some(message) = self.gossip.keyring.open(datagram) else { return };
        if let Err(error) = self.foca.handle_data(&message, &mut self.runtime) {
            tracing::debug!(?error, "a member's message was not understood");
        }
    }

    fn wake(&mut self) {
        let now = Instant::now();
        while self.due.peek().is_some_and(|due| due.0 <= now) {
            let Some(Due(_, _, timer)) = self.due.pop() else { return };
            if let Err(error) = self.foca.handle_timer(timer, &mut self.runtime) {
                tracing::debug!(?error, "a timer of gossip was not understood");
            }
        }
    }

    /// Says hello.
    fn greet(&mut self, stranger: Member) {
        let _ = self.foca.announce(stranger, &mut self.runtime);
    }

    fn tell_load(&mut self) {
        let load = Load { raft_id: self.gossip.me.raft_id, ..(self.gossip.load)() };
        self.gossip.alive.hear(load);
        let bytes = load.bytes();
        if let Err(error) = self.foca.add_broadcast(&bytes) {
            tracing::debug!(?error, "the load could not be told");
        }
    }

    /// Sends what is to be sent and sets what is to be woken.
    async fn flush(&mut self) {
        while let Some((to, message)) = self.runtime.to_send() {
            let sealed = self.gossip.keyring.seal(&message);
            // A lost datagram is what probes are for.
            let _ = self.gossip.socket.send_to(&sealed, to.address).await;
        }
        let now = Instant::now();
        while let Some((delay, timer)) = self.runtime.to_schedule() {
            self.timers += 1;
            self.due.push(Due(now + delay, self.timers, timer));
        }
        while let Some(notification) = self.runtime.to_notify() {
            self.notice(&notification);
        }
    }

    fn notice(&self, notification: &OwnedNotification<Member>) {
        match notification {
            OwnedNotification::MemberUp(member) => {
                tracing::info!(node = member.raft_id, "a node answers");
                self.gossip.alive.set(member.raft_id, true);
            }
            OwnedNotification::MemberDown(member) => {
                // An older life of it may be what went down.
                let lives = self.foca.iter_members().any(|one| one.id().raft_id == member.raft_id);
                if !lives {
                    tracing::info!(node = member.raft_id, "a node does not answer any more");
                    self.gossip.alive.set(member.raft_id, false);
                }
            }
            OwnedNotification::Rename(_, after) => self.gossip.alive.set(after.raft_id, true),
            OwnedNotification::Rejoin(_) => {
                tracing::info!("this node was taken for dead, and is back");
            }
            OwnedNotification::Active | OwnedNotification::Idle | OwnedNotification::Defunct => {}
        }
    }
}
