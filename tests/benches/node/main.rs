//! What the platform adds: figures of one run on one machine, beside peers, so that ratios mean
//! something.
//!
//! `cargo build --release && cargo bench -p tests --bench node`, with ` -- keys`,
//! ` -- calls` or ` -- work` for that part alone. The agent is a static echo server compiled on the spot, so what is
//! measured is the way to it. Client, node, agent and peers share the machine's cores.

#![expect(clippy::print_stdout, reason = "a bench prints its figures")]

mod calls;
mod hooks;
mod keys;
mod many;
mod work;

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tests::{
    Customer, Node,
    load::{resident_mib, syncs_per_second},
    source,
};

/// How long a node rests before its memory is read.
const REST: Duration = Duration::from_secs(15);

async fn deployed(me: &Customer) -> String {
    let archive_url = me.upload(source::compiled_echo(10_000, &[])).await;
    let source = json!({ "type": "upload", "archive_url": archive_url });
    let wanted = json!({ "name": "echo", "cloud_id": me.cloud().await, "source": source });
    me.deploy_as(&wanted).await
}

#[tokio::main]
async fn main() {
    let is_asked = |part: &str| std::env::args().any(|argument| argument == part);
    if is_asked("keys") {
        keys::logins().await;
        return keys::many().await;
    }
    if is_asked("work") {
        at_work().await;
        return;
    }
    let began = Instant::now();
    let node = Node::start();
    println!("dev ready after {} ms", began.elapsed().as_millis());
    tokio::time::sleep(REST).await;
    println!("idle: {} MiB resident", resident_mib(node.pid()));
    let me = node.customer();
    let id = deployed(&me).await;
    let only_calls = is_asked("calls");
    if !only_calls {
        many::starts(&me, &id).await;
    }
    // Of the instance that runs now: starts begin new ones.
    let port = me.invoke(&id, &Value::Null).await.data(200)["output"].as_u64().expect("a port");
    calls::synchronous(&node, &me, &id, port).await;
    calls::in_two_parts(&me).await;
    calls::streamed(&node, &me, &id, port).await;
    if only_calls {
        return;
    }
    drop(node);
    let etcd = at_work().await;
    hooks::deliveries(&etcd).await;
    hooks::waiting().await;
    keys::logins().await;
    keys::many().await;
    many::many(&mut Node::start()).await;
}

/// Changes and jobs beside etcd, and how many puts that takes in a second.
async fn at_work() -> work::Puts {
    let node = Node::start();
    let me = node.customer();
    let id = deployed(&me).await;
    let etcd = work::etcd().await;
    let yardstick = syncs_per_second(node.data.path());
    println!("one fdatasync after the other: {yardstick:.0}/s");
    work::changes(&me, &id, yardstick, &etcd).await;
    drop(node);
    let node = Node::start();
    let me = node.customer();
    let id = deployed(&me).await;
    work::jobs(&me, &id, yardstick, &etcd).await;
    println!("  {} MiB resident at their end", resident_mib(node.pid()));
    etcd
}
