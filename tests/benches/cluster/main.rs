//! What three nodes do together, beside three members of etcd on the same machine in the same run.
//!
//! `cargo build --release && cargo bench -p tests --bench cluster`, with ` -- growth`, ` -- load` or ` -- many` for what
//! takes long and is not in it: a large state on its way to a new node, ten minutes with every core taken, a
//! thousand instances; ` -- writes` is the comparison with etcd alone. Nodes, members, clients and the agent share the machine's cores, so ratios and times of
//! failover mean something, rates do not.

#![expect(clippy::print_stdout, reason = "a bench prints its figures")]

mod failover;
mod growth;
mod many;
mod taken;

use std::{
    fs,
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use tests::{
    Cluster, Customer,
    load::{Measured, load, resident_mib},
    peers::{self, etcd_client, etcd_get, etcd_put},
    source,
};

/// How long the nodes rest before their idleness is measured.
const REST: Duration = Duration::from_secs(10);
/// Ticks of the clock that processor time is counted in, per second (proc(5)).
const TICKS: f64 = 100.0;
/// Characters of what a write changes, as many as etcd is given.
const VALUE_LENGTH: usize = 256;

#[tokio::main]
async fn main() {
    let asked = |part: &str| std::env::args().any(|argument| argument == part);
    if asked("growth") {
        return growth::state_reaches_a_new_node().await;
    }
    if asked("load") {
        return taken::nobody_is_taken_for_dead().await;
    }
    if asked("many") {
        return many::instances().await;
    }
    let began = Instant::now();
    let mut cluster = Cluster::of(3);
    println!("three nodes ready and settled after {} ms", began.elapsed().as_millis());
    if asked("writes") {
        let id = deployed(&cluster.customer(0)).await;
        return writes_and_reads(&cluster, &id).await;
    }
    idle(&cluster).await;
    let me = cluster.customer(0);
    let id = deployed(&me).await;
    wrong_node(&cluster, &id).await;
    writes_and_reads(&cluster, &id).await;
    failover::of_the_directory(&mut cluster, &id).await;
}

async fn deployed(me: &Customer) -> String {
    let archive_url = me.upload(source::compiled_echo(10_000, &[])).await;
    let source = json!({ "type": "upload", "archive_url": archive_url });
    let wanted = json!({
        "name": "echo", "cloud_id": me.cloud().await, "source": source,
        "scaling": { "min_instances": 1, "max_instances": 1 },
    });
    me.deploy_as(&wanted).await
}

fn processor_ticks(pid: u32) -> f64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let after = stat.rsplit(')').next().unwrap_or_default();
    let fields: Vec<&str> = after.split_whitespace().collect();
    let ticks =
        |place: usize| fields.get(place).and_then(|field| field.parse().ok()).unwrap_or(0.0);
    ticks(11) + ticks(12)
}

async fn idle(cluster: &Cluster) {
    tokio::time::sleep(REST).await;
    let before: Vec<f64> = cluster.nodes.iter().map(|node| processor_ticks(node.pid)).collect();
    tokio::time::sleep(REST).await;
    for (node, before) in cluster.nodes.iter().zip(before) {
        let used = (processor_ticks(node.pid) - before) / TICKS / REST.as_secs_f64() * 100.0;
        println!("idle node: {used:.1} % of a core, {} MiB resident", resident_mib(node.pid));
    }
}

/// The same call over the node that runs the instance and over another one.
async fn wrong_node(cluster: &Cluster, id: &str) {
    let all = cluster.customer(0).get(&format!("/v1/agents/{id}/instances")).await.data(200);
    let home = cluster.place(all["items"][0]["node_id"].as_str().expect("a node"));
    let mut medians = vec![];
    for (what, node) in [("its own", home), ("another", (home + 1) % 3)] {
        let me = cluster.customer(node).http1();
        let calls = load(1, |_| async { drop(me.invoke(id, &Value::Null).await.data(200)) }).await;
        println!("sync invoke over {what} node, 1 client: {}", calls.shown());
        medians.push(calls.quantile(50));
    }
    println!("  a call over another node costs {} us more", medians[1].saturating_sub(medians[0]));
}

async fn writes_and_reads(cluster: &Cluster, id: &str) {
    let etcd = peers::etcd_of(3);
    if etcd.is_none() {
        println!("SKIPPED: etcd");
    }
    let etcd = etcd.unwrap_or_default();
    let (path, count) = (format!("/v1/agents/{id}"), AtomicUsize::new(0));
    // Over HTTP/1.1 each client has a connection of its own, as those of etcd have.
    let customers: Vec<Customer> = (0..3).map(|node| cluster.customer(node).http1()).collect();
    let nodes: Vec<u32> = cluster.nodes.iter().map(|node| node.pid).collect();
    for clients in [1, 64, 256] {
        let patch = |client: usize| {
            let (me, path) = (&customers[client % 3], &path);
            let note = format!("{:x>VALUE_LENGTH$}", count.fetch_add(1, Relaxed));
            async move { drop(me.patch(path, &json!({ "metadata": { "note": note } })).await.data(200)) }
        };
        let ours = Cost::of(&nodes, load(clients, patch)).await;
        let theirs = on_etcd(&etcd, clients, true).await;
        compared(&format!("writes, {clients:>3} clients"), &ours, theirs.as_ref());
    }
    for clients in [1, 64] {
        let get = |client: usize| {
            let (me, path) = (&customers[client % 3], &path);
            async move { drop(me.get(path).await.data(200)) }
        };
        let ours = Cost::of(&nodes, load(clients, get)).await;
        let theirs = on_etcd(&etcd, clients, false).await;
        compared(&format!("linearizable reads, {clients:>3} clients"), &ours, theirs.as_ref());
    }
    for (node, me) in customers.iter().enumerate() {
        let reads = load(1, |_| async { drop(me.get(&path).await.data(200)) }).await;
        println!("linearizable reads over node {node}, 1 client: {}", reads.shown());
    }
}

/// A load, and what a call of it took of the processors, in microseconds: they are shared, so this says more of a
/// busy machine than rates do.
struct Cost {
    load: Measured,
    servers: f64,
    clients: f64,
}

impl Cost {
    async fn of(servers: &[u32], load: impl Future<Output = Measured>) -> Self {
        let used = |pids: &[u32]| pids.iter().map(|pid| processor_ticks(*pid)).sum::<f64>();
        let us = [std::process::id()];
        let (before, ours) = (used(servers), used(&us));
        let load = load.await;
        #[expect(clippy::cast_precision_loss, reason = "a mean")]
        let each = |ticks: f64| ticks / TICKS * 1e6 / load.times.len() as f64;
        Self { servers: each(used(servers) - before), clients: each(used(&us) - ours), load }
    }

    fn shown(&self) -> String {
        format!(
            "{} ({:.0} + {:.0} us of processors)",
            self.load.shown(),
            self.servers,
            self.clients
        )
    }
}

/// The same load on etcd's members; `None` where there is no etcd.
async fn on_etcd(etcd: &[peers::Peer], clients: usize, writes: bool) -> Option<Cost> {
    let connections: Vec<_> = (0..clients).map(|_| etcd_client()).collect();
    let port = |client: usize| etcd.get(client % 3).map(|peer| peer.port);
    port(0)?;
    let call = |client: usize| {
        let (connection, port) = (&connections[client], port(client).unwrap_or_default());
        async move {
            match writes {
                true => etcd_put(connection, port, &format!("key-{client}")).await,
                false => etcd_get(connection, port, "key-0").await,
            }
        }
    };
    let members: Vec<u32> = etcd.iter().map(peers::Peer::pid).collect();
    Some(Cost::of(&members, load(clients, call)).await)
}

fn compared(what: &str, ours: &Cost, theirs: Option<&Cost>) {
    match theirs {
        Some(theirs) => println!(
            "{what}: {}; etcd {}: {:.2} x",
            ours.shown(),
            theirs.shown(),
            ours.load.rate / theirs.load.rate
        ),
        None => println!("{what}: {}", ours.shown()),
    }
}
