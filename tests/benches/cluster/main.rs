//! What three nodes do together, beside three members of etcd on the same machine in the same run.
//!
//! `cargo build --release && cargo bench -p tests --bench cluster`, with ` -- growth`, ` -- load` or
//! ` -- many` for what takes long and is not in it: a large state on its way to a new node, ten minutes with
//! every core taken, a thousand instances; ` -- writes` is the comparison with etcd alone, which speaks once as
//! nodes do (TLS everywhere) and once in clear text.
//!
//! Nodes, members, clients and the agent share the machine's cores, so ratios and times of failover mean
//! something, rates do not.

#![expect(clippy::print_stdout, reason = "a bench prints its figures")]

mod failover;
mod growth;
mod many;
mod taken;

use std::{
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    time::{Duration, Instant},
};

use reqwest::Method;
use serde_json::{Value, json};
use tests::{
    Cluster, Customer,
    load::{Measured, cpu_millis, load, resident_mib},
    peers::{Etcd, Wire},
    source,
};

/// How long the nodes rest before their idleness is measured.
const REST: Duration = Duration::from_secs(10);
/// How often each load is measured, in turns: what the machine gives changes from minute to minute.
const ROUNDS: usize = 3;
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

async fn idle(cluster: &Cluster) {
    tokio::time::sleep(REST).await;
    let before: Vec<u32> = cluster.nodes.iter().map(|node| cpu_millis(node.pid)).collect();
    tokio::time::sleep(REST).await;
    for (node, before) in cluster.nodes.iter().zip(before) {
        let used = f64::from(cpu_millis(node.pid) - before) / 1000.0 / REST.as_secs_f64() * 100.0;
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
    let etcd: Vec<(Wire, Etcd)> =
        Wire::ALL.iter().filter_map(|wire| Some((*wire, Etcd::start(3, *wire)?))).collect();
    if etcd.is_empty() {
        println!("SKIPPED: etcd");
    }
    let (path, count) = (format!("/v1/agents/{id}"), AtomicUsize::new(0));
    // Over HTTP/1.1 each client has a connection of its own, as those of etcd have.
    let customers: Vec<Customer> = (0..3).map(|node| cluster.customer(node).http1()).collect();
    let nodes: Vec<u32> = cluster.nodes.iter().map(|node| node.pid).collect();
    for (call, clients) in
        [(Call::Write, 1), (Call::Write, 64), (Call::Write, 256), (Call::Read, 1), (Call::Read, 64)]
    {
        let (mut ours, mut theirs) = (vec![], etcd.iter().map(|_| vec![]).collect::<Vec<_>>());
        for _ in 0..ROUNDS {
            let one = |client: usize| {
                let (me, path) = (&customers[client % 3], &path);
                let note = format!("{:x>VALUE_LENGTH$}", count.fetch_add(1, Relaxed));
                let change = json!({ "metadata": { "note": note } });
                let request = match call {
                    Call::Write => me.request(Method::PATCH, path).json(&change),
                    Call::Read => me.request(Method::GET, path),
                };
                me.done(request)
            };
            ours.push(Cost::of(&nodes, load(clients, one)).await);
            for ((_, etcd), measured) in etcd.iter().zip(&mut theirs) {
                measured.push(on_etcd(etcd, clients, call).await);
            }
        }
        let ours = Cost::together(ours);
        println!("{}, {clients:>3} clients: {}", call.shown(), ours.shown());
        for ((wire, _), theirs) in etcd.iter().zip(theirs) {
            let theirs = Cost::together(theirs);
            let ratio = ours.load.rate / theirs.load.rate;
            println!("  {ratio:.2} x {}: {}", wire.shown(), theirs.shown());
        }
    }
    for (node, me) in customers.iter().enumerate() {
        let reads = load(1, |_| me.done(me.request(Method::GET, &path))).await;
        println!("linearizable reads over node {node}, 1 client: {}", reads.shown());
    }
}

/// What is compared.
#[derive(Clone, Copy)]
enum Call {
    Write,
    Read,
}

impl Call {
    fn shown(self) -> &'static str {
        match self {
            Self::Write => "writes",
            Self::Read => "linearizable reads",
        }
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
        let used =
            |pids: &[u32]| pids.iter().map(|pid| f64::from(cpu_millis(*pid)) * 1000.0).sum::<f64>();
        let us = [std::process::id()];
        let (before, ours) = (used(servers), used(&us));
        let load = load.await;
        Self { servers: used(servers) - before, clients: used(&us) - ours, load }
    }

    /// Several, as if they were one.
    fn together(all: Vec<Self>) -> Self {
        let servers = all.iter().map(|one| one.servers).sum();
        let clients = all.iter().map(|one| one.clients).sum();
        Self {
            load: Measured::together(all.into_iter().map(|one| one.load).collect()),
            servers,
            clients,
        }
    }

    fn shown(&self) -> String {
        #[expect(clippy::cast_precision_loss, reason = "a mean")]
        let each = |micros: f64| micros / self.load.times.len() as f64;
        let (servers, clients) = (each(self.servers), each(self.clients));
        format!("{} ({servers:.0} + {clients:.0} us of processors)", self.load.shown())
    }
}

/// The same load on etcd's members.
async fn on_etcd(etcd: &Etcd, clients: usize, call: Call) -> Cost {
    let connections: Vec<_> = (0..clients).map(|client| etcd.client(client)).collect();
    let one = |client: usize| {
        let connection = &connections[client];
        async move {
            match call {
                Call::Write => connection.put(&format!("key-{client}")).await,
                Call::Read => connection.get("key-0").await,
            }
        }
    };
    Cost::of(&etcd.pids(), load(clients, one)).await
}
