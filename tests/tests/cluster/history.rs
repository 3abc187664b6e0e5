//! Histories of single objects are linearizable, also while nodes are killed, paused and restarted.
//!
//! Several clients read and write notes of one agent over all nodes. Every call is recorded with when
//! it began and ended; a write without an answer may have taken effect at any later time, or never.
//! Then there must be an order of all calls in which every read sees the write before it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use serde_json::json;
use tests::{Cluster, Customer, Network, eventually, skipped, source::ECHO};

use crate::forward::deploy;

/// One call of one register.
#[derive(Clone, Debug)]
struct Call {
    began: Duration,
    /// `None`: nobody knows whether and when it took effect.
    ended: Option<Duration>,
    action: Action,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Action {
    Write(u64),
    Read(u64),
}

/// When the calls about one value were made: its write and the reads that saw it.
struct Zone {
    /// When its write began.
    written: Duration,
    /// `None`: before everything.
    first_end: Option<Duration>,
    last_begin: Duration,
}

impl Zone {
    /// What every register holds at first.
    const INITIAL: Self =
        Self { written: Duration::ZERO, first_end: None, last_begin: Duration::ZERO };

    /// Of a write alone, and without an end.
    fn of(written: Duration) -> Self {
        Self { written, first_end: Some(Duration::MAX), last_begin: written }
    }

    fn add(&mut self, call: &Call) {
        self.first_end = self.first_end.min(Some(call.ended.unwrap_or(Duration::MAX)));
        self.last_begin = self.last_begin.max(call.began);
    }

    /// Whether a call about this value ended before one about the other began.
    fn precedes(&self, other: &Self) -> bool {
        self.first_end < Some(other.last_begin)
    }
}

/// Whether some order explains a history in which no value is written twice and 0 never.
///
/// In such an order all calls about one value stand together, so two values that both have a call
/// before one of the other rule it out, and nothing else does once no read ended before its write
/// began (Gibbons and Korach, "Testing Shared Memories", SIAM J. Comput. 26(4), 1997, section 4.1).
/// Unlike a search it stays quick however many writes were not answered.
fn is_linearizable(history: &[Call]) -> bool {
    let mut zones = BTreeMap::from([(0, Zone::INITIAL)]);
    for call in history {
        if let Action::Write(value) = call.action {
            let earlier = zones.insert(value, Zone::of(call.began));
            assert!(earlier.is_none(), "{value} is written once");
        }
    }
    for call in history {
        let (Action::Write(value) | Action::Read(value)) = call.action;
        let Some(zone) = zones.get_mut(&value) else { return false };
        if call.ended.is_some_and(|ended| ended < zone.written) {
            return false;
        }
        zone.add(call);
    }
    let zones: Vec<Zone> = zones.into_values().collect();
    let crosses = |one: &Zone, other: &Zone| one.precedes(other) && other.precedes(one);
    !(0..zones.len()).any(|one| zones[..one].iter().any(|other| crosses(&zones[one], other)))
}

/// The same for short histories by trying all orders (Wing and Gong, 1993).
fn some_order_explains(left: &[Call], value: u64) -> bool {
    let first_end = left.iter().filter_map(|call| call.ended).min();
    // What nobody saw the end of may never have been done.
    let Some(first_end) = first_end else { return true };
    (0..left.len()).filter(|place| left[*place].began <= first_end).any(|place| {
        let next = match left[place].action {
            Action::Read(seen) if seen != value => return false,
            Action::Write(next) | Action::Read(next) => next,
        };
        some_order_explains(&[&left[..place], &left[place + 1..]].concat(), next)
    })
}

fn call(began: u64, ended: u64, action: Action) -> Call {
    let millis = Duration::from_millis;
    Call { began: millis(began), ended: (ended > 0).then(|| millis(ended)), action }
}

#[test]
fn right_is_known_from_wrong() {
    use Action::{Read, Write};
    let fine = [call(0, 10, Write(1)), call(5, 15, Read(0)), call(12, 20, Read(1))];
    assert!(is_linearizable(&fine), "a read beside a write sees either");
    let stale = [call(0, 10, Write(1)), call(11, 15, Read(0))];
    assert!(!is_linearizable(&stale), "a read after a write sees it");
    let backwards = [call(0, 100, Write(1)), call(10, 20, Read(1)), call(30, 40, Read(0))];
    assert!(!is_linearizable(&backwards), "what was seen stays seen");
    let unknown = [call(0, 0, Write(1)), call(50, 60, Read(0)), call(70, 80, Read(1))];
    assert!(is_linearizable(&unknown), "a write without an answer may come late");
    let lost = [
        call(0, 10, Write(1)),
        call(20, 0, Write(2)),
        call(30, 40, Read(2)),
        call(50, 60, Read(1)),
    ];
    assert!(!is_linearizable(&lost), "and does not go away again");
    assert!(!is_linearizable(&[call(0, 10, Read(1))]), "nobody wrote that");
    let early = [call(0, 10, Read(1)), call(11, 20, Write(1))];
    assert!(!is_linearizable(&early), "nobody reads what is not written yet");
}

#[test]
fn short_histories_are_judged_as_by_trying_all_orders() {
    let mut dice = Dice(7);
    let mut judged = [0, 0];
    for _ in 0..20_000 {
        let history: Vec<Call> = (0..6).map(|n| any_call(&mut dice, n)).collect();
        let is_fine = is_linearizable(&history);
        assert_eq!(is_fine, some_order_explains(&history, 0), "{history:#?}");
        judged[usize::from(is_fine)] += 1;
    }
    assert!(judged.iter().all(|count| *count > 1000), "wrong and right ones: {judged:?}");
}

/// Three writes, some of them without an answer, and three reads of what they may have written.
fn any_call(dice: &mut Dice, place: u64) -> Call {
    let began = u64::from(dice.below(12));
    let lasts = 1 + u64::from(dice.below(8));
    let is_known = place >= 3 || dice.below(4) > 0;
    let action = match place {
        0..3 => Action::Write(place + 1),
        _ => Action::Read(u64::from(dice.below(4))),
    };
    call(began, if is_known { began + lasts } else { 0 }, action)
}

#[test]
fn many_writes_without_an_answer_are_judged_quickly() {
    let writes = (1..=500).map(|value| call(value, 0, Action::Write(value)));
    let reads =
        (1..=500).map(|value| call(1000 + 2 * value, 1001 + 2 * value, Action::Read(value)));
    let mut history: Vec<Call> = writes.chain(reads).collect();
    assert!(is_linearizable(&history), "each may have come just before it was read");
    history.push(call(5000, 5001, Action::Read(1)));
    assert!(!is_linearizable(&history), "and is gone when the next was read");
}

/// Registers that are read and written, each by a client at every node.
const REGISTERS: usize = 4;
/// Most writes of one client, and as many reads.
const ROUNDS: u64 = 13;

/// The history of one register.
type History = Arc<Mutex<Vec<Call>>>;

/// One client of one register.
struct Client {
    me: Customer,
    path: String,
    number: u64,
    began: Instant,
    until: Instant,
    history: History,
}

impl Client {
    fn keep(&self, at: Duration, is_known: bool, action: Action) {
        let ended = is_known.then(|| self.began.elapsed());
        let mut history = self.history.lock().unwrap_or_else(PoisonError::into_inner);
        history.push(Call { began: at, ended, action });
    }

    async fn write(&self, value: u64) {
        let at = self.began.elapsed();
        let write = self.me.request(reqwest::Method::PATCH, &self.path);
        let write = write.json(&json!({ "metadata": { "value": value.to_string() } }));
        let sent = write.timeout(Duration::from_secs(5)).send().await;
        let is_known = sent.is_ok_and(|answer| answer.status() == 200);
        self.keep(at, is_known, Action::Write(value));
    }

    async fn read(&self) {
        let at = self.began.elapsed();
        let read = self.me.request(reqwest::Method::GET, &self.path);
        let Ok(answer) = read.timeout(Duration::from_secs(5)).send().await else { return };
        if answer.status() != 200 {
            return;
        }
        let Ok(body) = answer.json::<serde_json::Value>().await else { return };
        let seen = body["data"]["metadata"]["value"].as_str().unwrap_or("0").parse();
        self.keep(at, true, Action::Read(seen.expect("a number")));
    }

    async fn go(self) {
        for round in 1..=ROUNDS {
            if Instant::now() >= self.until {
                return;
            }
            self.write(round * 10 + self.number).await;
            tokio::time::sleep(Duration::from_millis(100 + 37 * self.number)).await;
            self.read().await;
            tokio::time::sleep(Duration::from_millis(80)).await;
        }
    }
}

/// What clients at these nodes do and see while `faults` happen.
async fn record(
    customers: &[Customer],
    paths: &[String],
    lasts: Duration,
    faults: impl Future<Output = ()>,
) -> Vec<Vec<Call>> {
    let began = Instant::now();
    let histories: Vec<History> = paths.iter().map(|_| Arc::default()).collect();
    let mut clients = vec![];
    for (number, me) in customers.iter().enumerate() {
        for (path, history) in paths.iter().zip(&histories) {
            let client = Client {
                me: me.clone(),
                path: path.clone(),
                number: number as u64,
                began,
                until: began + lasts,
                history: Arc::clone(history),
            };
            clients.push(tokio::spawn(client.go()));
        }
    }
    faults.await;
    for client in clients {
        client.await.expect("a client that ends");
    }
    let whole = |history: &History| history.lock().unwrap_or_else(PoisonError::into_inner).clone();
    histories.iter().map(whole).collect()
}

/// Every history has an order that explains it; gives how many different values were read.
fn explain(histories: &[Vec<Call>]) -> usize {
    let mut values = BTreeSet::new();
    for history in histories {
        let reads = history.iter().filter_map(|call| match call.action {
            Action::Read(value) => Some(value),
            Action::Write(_) => None,
        });
        let reads: Vec<u64> = reads.collect();
        assert!(!reads.is_empty(), "no read was answered");
        values.extend(reads);
        assert!(is_linearizable(history), "no order explains {history:#?}");
    }
    values.len()
}

async fn pause(millis: u64) {
    tokio::time::sleep(Duration::from_millis(millis)).await;
}

#[tokio::test]
async fn notes_are_linearizable_while_nodes_die_and_come_back() {
    let mut cluster = Cluster::alone(3);
    let me = cluster.customer(0);
    let mut paths = vec![];
    for n in 0..REGISTERS {
        let agent = deploy(&me, &format!("register-{n}"), ECHO, 1).await;
        paths.push(format!("/v1/agents/{agent}"));
    }
    let customers: Vec<Customer> = (0..3).map(|node| cluster.customer(node)).collect();
    let faults = async {
        pause(800).await;
        cluster.kill(0);
        pause(1200).await;
        cluster.restart(&[0]);
        pause(600).await;
        cluster.pause(1);
        pause(1500).await;
        cluster.go_on(1);
        pause(500).await;
        cluster.kill(2);
        pause(900).await;
        cluster.restart(&[2]);
    };
    let seen = explain(&record(&customers, &paths, Duration::from_secs(9), faults).await);
    assert!(seen > 8, "the reads saw {seen} values in nine seconds");
}

/// How many histories are recorded under partitions, unless a longer run sets another number.
fn histories_wanted(usually: u64) -> u64 {
    tests::number_of("ROOST_HISTORIES", usually)
}

/// Numbers that are the same for the same seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, most: u8) -> u8 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        u8::try_from((self.0 >> 33) % u64::from(most)).expect("below 256")
    }
}

/// One thing that goes wrong for a while, then does not any more.
async fn go_wrong(network: &mut Network, dice: &mut Dice) {
    let (victim, kind) = (dice.below(network.len()), dice.below(6));
    let other = (victim + 1 + dice.below(network.len() - 1)) % network.len();
    let lasts = 500 + 100 * u64::from(dice.below(10));
    match kind {
        0 => network.isolate(victim),
        1 => network.cut(victim, other),
        // It still speaks, and hears of nobody; or the other way round.
        2 => (0..network.len())
            .filter(|one| *one != victim)
            .for_each(|one| network.deafen(victim, one)),
        3 => (0..network.len())
            .filter(|one| *one != victim)
            .for_each(|one| network.deafen(one, victim)),
        4 => network.pause(victim),
        _ => network.kill(victim),
    }
    pause(lasts).await;
    match kind {
        0..=3 => network.heal(),
        4 => network.go_on(victim),
        _ => network.restart(victim),
    }
}

#[tokio::test]
async fn notes_are_linearizable_while_the_network_of_three_is_cut() {
    while_the_network_is_cut(3, histories_wanted(10)).await;
}

/// The directory has five voters then, and no node has every shard.
#[tokio::test]
async fn notes_are_linearizable_while_the_network_of_five_is_cut() {
    while_the_network_is_cut(5, histories_wanted(4)).await;
}

async fn while_the_network_is_cut(nodes: u8, wanted: u64) {
    let Some(mut network) = Network::of(nodes) else { return skipped("netns") };
    let customers: Vec<Customer> = (0..network.len()).map(|node| network.customer(node)).collect();
    let mut seen = 0;
    for seed in 1..=wanted {
        let mut paths = vec![];
        for register in 0..REGISTERS {
            let name = json!({ "name": format!("register-{seed}-{register}") });
            let made = customers[0].post("/v1/clouds", &name).await.data(201);
            paths.push(format!("/v1/clouds/{}", made["id"].as_str().expect("an id")));
        }
        let mut dice = Dice(seed);
        let faults = async {
            for _ in 0..3 {
                pause(300).await;
                go_wrong(&mut network, &mut dice).await;
            }
        };
        let histories = record(&customers, &paths, Duration::from_secs(4), faults).await;
        seen += explain(&histories) as u64;
        everybody_is_back(&customers).await;
    }
    assert!(seen > 4 * wanted, "the reads saw {seen} values in all histories");
}

async fn everybody_is_back(customers: &[Customer]) {
    for me in customers {
        eventually("the node answers and all are there", async || {
            let answer = me.get("/v1/cluster").await;
            let is_whole = answer.status == 200 && answer.body["data"]["failure_tolerance"] == 1;
            if is_whole { Ok(()) } else { Err(format!("{answer:?}")) }
        })
        .await;
    }
}
