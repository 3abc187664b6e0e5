//! A whole cluster in one thread, on simulated machines: the real ledger, groups, log and tables over
//! a simulated network (turmoil), disks that forget what was not synced, and clocks that jump. All
//! chance comes from a seed, so what a seed shows can be looked at again:
//!
//! ```text
//! ROOST_SEED=17 cargo test -p cluster --test simulation -- --nocapture     # one seed, with its trace
//! ROOST_SEEDS=10000 cargo test --release -p cluster --test simulation      # many
//! ```
//!
//! What must hold, whatever fails: no acknowledged write is lost, by key and by number; what waits in an outbox arrives; a read shows what
//! was acknowledged before it began; two calls under one key are one; a term has one leader; nobody who
//! was deposed still writes in an owner's name; and when everything is well again, all replicas of a
//! group agree byte for byte.

#![expect(clippy::print_stdout, reason = "the trace of a seed that failed is what there is to see")]

mod client;
mod dice;
mod disk;
mod faults;
mod machine;
mod world;

use std::{
    collections::{BTreeMap, BTreeSet},
    env,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
        mpsc,
    },
    time::Duration,
};

use actors::ports::Ledger as _;
use cluster::{RaftLedger, raft::state::StateFile};
use domain::{AuditId, OrgId};
use turmoil::{Builder, Sim};

use crate::{
    client::{CARRIED, TOLD},
    dice::Dice,
    faults::Faults,
    machine::{FOUNDERS, Machine, live},
    world::{Place, Twins, World},
};

/// Seeds that are tried where nobody says how many: an unoptimized build takes its time.
const SEEDS: u64 = if cfg!(debug_assertions) { 8 } else { 200 };
/// Simulated time: between two looks at the world, with faults, and at most until all is well.
const TICK: Duration = Duration::from_millis(2);
const FAULTS_MILLIS: u64 = 4_000;
const SETTLED_WITHIN_MILLIS: u64 = 60_000;
/// Real time after which a seed has come to a loop without an end.
const SEED_WITHIN: Duration = Duration::from_secs(120);
/// How often it is looked who leads.
const LOOK_EVERY: u64 = 10;

struct Outcome {
    trace: Vec<String>,
    violations: Vec<String>,
    counts: BTreeMap<&'static str, u64>,
}

fn simulation(seed: u64) -> Sim<'static> {
    let mut builder = Builder::new();
    builder
        .rng_seed(seed)
        .tick_duration(TICK)
        .min_message_latency(Duration::from_micros(100))
        .max_message_latency(Duration::from_millis(8))
        .simulation_duration(Duration::from_secs(3600))
        .tcp_capacity(4096)
        .enable_random_order();
    builder.build()
}

/// In a thread of its own: tokio and turmoil keep some things per thread.
fn run_afresh(seed: u64) -> Outcome {
    let (ended, outcome) = mpsc::channel();
    std::thread::spawn(move || ended.send(run(seed)));
    outcome
        .recv_timeout(SEED_WITHIN)
        .unwrap_or_else(|error| panic!("seed {seed} came to no end: {error}"))
}

fn run(seed: u64) -> Outcome {
    let mut dice = Dice::new(seed, 0);
    let count = FOUNDERS + usize::from(dice.is(1, 2));
    let shards = u16::try_from(dice.between(1, 3)).expect("few");
    let machines = (0..count).map(Machine::new).collect();
    let world = Arc::new(World::new(seed, shards, machines));
    let mut sim = simulation(seed);
    for machine in &world.machines {
        let (world, number) = (Arc::clone(&world), machine.number);
        sim.host(machine.name(), move || live(Arc::clone(&world), number));
    }
    let mut faults = Faults::new(seed);
    let ended = go(&mut sim, &world, &mut faults);
    if let Err(error) = ended {
        world.violated(format!("a node ended: {error}"));
    }
    drop(sim);
    let (trace, violations, counts) = world.end();
    Outcome { trace, violations, counts }
}

fn go(sim: &mut Sim<'_>, world: &World, faults: &mut Faults) -> turmoil::Result {
    let mut millis = 0;
    // The cluster comes to be without faults: those of a cluster of one are another test's.
    while millis < SETTLED_WITHIN_MILLIS && !are_settled(world) {
        step(sim, world, &mut millis)?;
    }
    let began = millis;
    while millis < began + FAULTS_MILLIS {
        step(sim, world, &mut millis)?;
        faults.step(sim, world, millis - began);
    }
    faults.heal(sim, world);
    world.is_over.store(true, Relaxed);
    let healed = millis;
    while millis < healed + SETTLED_WITHIN_MILLIS {
        step(sim, world, &mut millis)?;
        if millis.is_multiple_of(100) && millis > healed + 1000 && are_equal(world) {
            world.note("all replicas are equal");
            check_all(world);
            return Ok(());
        }
    }
    world.violated("the cluster does not come to rest".to_owned());
    describe(world);
    check_all(world);
    Ok(())
}

fn step(sim: &mut Sim<'_>, world: &World, millis: &mut u64) -> turmoil::Result {
    sim.step()?;
    *millis += u64::try_from(TICK.as_millis()).expect("short");
    world.millis.store(*millis, Relaxed);
    if millis.is_multiple_of(LOOK_EVERY) {
        for machine in &world.machines {
            let Some(node) = machine.node() else { continue };
            for (group, (view, _)) in (0..).zip(node.views()) {
                if view.leader == Some(machine.raft_id()) {
                    world.leads(group, view.term, machine.raft_id());
                }
            }
        }
    }
    Ok(())
}

/// The machines whose nodes run and belong to the cluster, and these nodes.
fn members(world: &World) -> Vec<(&Machine, Arc<RaftLedger>)> {
    let running = world.machines.iter().filter_map(|machine| Some((machine, machine.node()?)));
    let belongs = |(machine, node): &(&Machine, Arc<RaftLedger>)| {
        node.directory().read().nodes.contains(&machine.node_id())
    };
    running.filter(belongs).collect()
}

fn are_settled(world: &World) -> bool {
    let founders = world.machines[..FOUNDERS].iter();
    let nodes: Option<Vec<_>> = founders.map(Machine::node).collect();
    nodes.is_some_and(|nodes| {
        nodes.iter().all(|node| node.is_settled() && node.numbers().len() >= FOUNDERS)
    })
}

/// Whether every group's replicas have applied the same entries, and nothing waits in an outbox.
fn are_equal(world: &World) -> bool {
    let members = members(world);
    if !are_settled(world) || !members.iter().all(|(_, node)| node.is_settled()) {
        return false;
    }
    let mut applied: BTreeMap<usize, BTreeSet<u64>> = BTreeMap::new();
    for (_, node) in members {
        if node.directory().read().outbox.oldest(1, |_| false).up_to.is_some() {
            return false;
        }
        for (group, (view, is_here)) in node.views().into_iter().enumerate() {
            if is_here {
                applied.entry(group).or_default().extend([view.applied_index, view.last_index]);
            }
        }
    }
    applied.values().all(|indexes| indexes.len() == 1)
}

/// What must hold at the end.
fn check_all(world: &World) {
    let mut replicas = BTreeMap::new();
    for (machine, node) in members(world) {
        check_items(world, machine, &node);
        let Some(tables) = machine.tables() else { continue };
        tables.flush();
        let here = (0..=world.shards).filter(|group| *group == 0 || node.has_shard(group - 1));
        for group in here {
            let (applied, rows) = rows(&tables, group);
            compare(world, &mut replicas, (group, applied), (machine.number, rows));
        }
    }
}

/// Everything that was acknowledged is on a node, and of twins one.
fn check_items(world: &World, machine: &Machine, node: &RaftLedger) {
    for (place, item) in world.kept() {
        if !has(node, place, item) {
            world.violated(format!("{item} of {place:?} is not on node-{}", machine.number));
        }
    }
    for Twins { items, is_acked } in world.twins() {
        let there = items.iter().filter(|item| has(node, Place::Directory, **item)).count();
        if there > 1 || (is_acked && there == 0) {
            world.violated(format!("{there} of {items:?} came to be under one key"));
        }
    }
    let home = node.home(CARRIED.to_string().as_bytes());
    for row in world.carried() {
        if !has_row(node, home, CARRIED, row) {
            world.violated(format!("row {row} did not arrive on node-{}", machine.number));
        }
    }
}

/// A replica that has applied as much as another one of its group has the same rows.
fn compare(
    world: &World,
    replicas: &mut BTreeMap<(u16, String), (usize, Rows)>,
    (group, applied): (u16, String),
    (second, rows): (usize, Rows),
) {
    let Some((first, others)) = replicas.get(&(group, applied.clone())) else {
        replicas.insert((group, applied), (second, rows));
        return;
    };
    if let Some(differs) = difference(others, &rows) {
        world.violated(format!(
            "group {group} differs at {applied} on node-{first} and node-{second}: {differs}"
        ));
    }
}

/// Notes what every node knows of every group.
fn describe(world: &World) {
    for machine in &world.machines {
        let Some(node) = machine.node() else {
            world.note(&format!("node-{} does not run", machine.number));
            continue;
        };
        for (group, (view, is_here)) in node.views().into_iter().enumerate() {
            world.note(&format!("node-{} group {group}, here {is_here}: {view:?}", machine.number));
        }
    }
}

fn has(node: &RaftLedger, place: Place, item: u64) -> bool {
    match place {
        Place::Directory => node.directory().read().data_keys.contains(&OrgId(u128::from(item))),
        Place::Shard(shard) => has_row(node, shard, TOLD, item),
    }
}

/// Whether a shard has a row, as far as this node has the shard.
fn has_row(node: &RaftLedger, shard: u16, org: OrgId, row: u64) -> bool {
    let key = (org.0, AuditId(u128::from(row)));
    !node.has_shard(shard) || node.shard(shard).read().audit.contains(&key)
}

/// Rows by table and key.
type Rows = BTreeMap<(u8, Vec<u8>), Vec<u8>>;

fn rows(tables: &Arc<StateFile>, group: u16) -> (String, Rows) {
    let snapshot = tables.snapshot(group).expect("is readable");
    let applied = snapshot.applied().expect("is readable").unwrap_or_default();
    let mut rows = Rows::new();
    let read = snapshot.rows(|table, key, row| {
        rows.insert((table, key.to_vec()), row.to_vec());
        Ok(())
    });
    read.expect("is readable");
    (applied.log.map_or_else(String::new, |log| log.to_string()), rows)
}

/// The first row that only one has, or that is another.
fn difference(one: &Rows, other: &Rows) -> Option<String> {
    let keys: BTreeSet<_> = one.keys().chain(other.keys()).collect();
    let key = keys.into_iter().find(|key| one.get(*key) != other.get(*key))?;
    let text = |row: Option<&Vec<u8>>| {
        row.map_or("nothing".to_owned(), |row| String::from_utf8_lossy(row).into_owned())
    };
    let (table, name) = (key.0, String::from_utf8_lossy(&key.1).into_owned());
    let (one, other) = (text(one.get(key)), text(other.get(key)));
    Some(format!("row {name:?} of table {table} is {one:?} and {other:?}"))
}

fn asked(name: &str) -> Option<u64> {
    env::var(name).ok()?.parse().ok()
}

#[test]
fn what_is_promised_holds_whatever_fails() {
    let only = asked("ROOST_SEED");
    let seeds = only.map_or(0..asked("ROOST_SEEDS").unwrap_or(SEEDS), |seed| seed..seed + 1);
    let (next, end) = (AtomicU64::new(seeds.start), seeds.end);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let outcomes: Vec<(u64, Outcome)> = std::thread::scope(|scope| {
        let work = || {
            let mut done = vec![];
            loop {
                let seed = next.fetch_add(1, Relaxed);
                if seed >= end {
                    return done;
                }
                done.push((seed, run_afresh(seed)));
            }
        };
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        threads.into_iter().flat_map(|one| one.join().expect("no panic")).collect()
    });
    let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
    for (seed, outcome) in &outcomes {
        if only.is_some() || !outcome.violations.is_empty() {
            println!("seed {seed}:\n{}", outcome.trace.join("\n"));
        }
        outcome.counts.iter().for_each(|(what, count)| *counts.entry(what).or_default() += count);
    }
    println!("{} seeds: {counts:?}", outcomes.len());
    let wrong: Vec<_> = outcomes
        .iter()
        .filter(|(_, outcome)| !outcome.violations.is_empty())
        .map(|(seed, outcome)| (seed, &outcome.violations[0]))
        .collect();
    assert!(wrong.is_empty(), "{} seeds: {wrong:?}", wrong.len());
}

#[test]
fn the_same_seed_gives_the_same_trace() {
    // Without it tokio takes its dice from the machine; `.cargo/config.toml` sets it.
    if !cfg!(tokio_unstable) {
        let required = env::var("ROOST_REQUIRE").unwrap_or_default();
        assert!(!required.split(',').any(|part| part == "tokio_unstable"), "RUSTFLAGS hides it");
        println!("SKIPPED: tokio_unstable");
        return;
    }
    for seed in [1, 2] {
        let [first, second] = [run_afresh(seed), run_afresh(seed)].map(|outcome| outcome.trace);
        let differs = first.iter().zip(&second).position(|(one, other)| one != other);
        assert!(
            differs.is_none() && first.len() == second.len(),
            "seed {seed} differs at line {differs:?}: {:?} and {:?}",
            differs.map(|at| &first[at]),
            differs.map(|at| &second[at]),
        );
        assert!(first.len() > 100, "{} lines", first.len());
    }
}
