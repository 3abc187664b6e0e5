//! What the platform adds: figures of one run on one machine, so that ratios mean something.
//!
//! `cargo build --release && cargo bench --bench node`. The agent is a static echo server compiled on
//! the spot, so what is measured is the way to it.

#![expect(clippy::print_stdout, reason = "a bench prints its figures")]

use std::{
    fs,
    io::Write as _,
    os::unix::fs::FileExt as _,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use reqwest::Client;
use serde_json::{Value, json};
use tests::{Customer, Node, source};

/// Calls a second and latencies in microseconds of `clients` who call for a while.
async fn load<F: Future<Output = ()>>(clients: usize, call: impl Fn() -> F) -> (f64, Vec<u128>) {
    const FOR: Duration = Duration::from_secs(4);
    let began = Instant::now();
    let one = async || {
        let mut latencies = vec![];
        while began.elapsed() < FOR {
            let start = Instant::now();
            call().await;
            latencies.push(start.elapsed().as_micros());
        }
        latencies
    };
    let all = futures::future::join_all((0..clients).map(|_| one())).await;
    let mut latencies: Vec<u128> = all.into_iter().flatten().collect();
    latencies.sort_unstable();
    #[expect(clippy::cast_precision_loss, reason = "a rate")]
    let rate = latencies.len() as f64 / began.elapsed().as_secs_f64();
    (rate, latencies)
}

fn quantile(sorted: &[u128], percent: usize) -> u128 {
    sorted.get(sorted.len() * percent / 100).copied().unwrap_or_default()
}

fn resident_mib(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok()).unwrap_or(0)
        / 1024
}

/// One write and one fdatasync after the other, on the disk that the node uses.
fn syncs_per_second(folder: &std::path::Path) -> f64 {
    let mut file = fs::File::create(folder.join("sync-yardstick")).expect("a file");
    file.write_all(&[0; 4096]).expect("written");
    let began = Instant::now();
    let mut count = 0_u32;
    while began.elapsed() < Duration::from_secs(2) {
        file.write_all_at(&[1; 256], 0).expect("written");
        file.sync_data().expect("synced");
        count += 1;
    }
    f64::from(count) / began.elapsed().as_secs_f64()
}

async fn synchronous(me: &Customer, id: &str, port: u64) {
    let plain = Client::builder().build().expect("a client");
    let direct_url = format!("http://127.0.0.1:{port}/invoke");
    let direct = || async {
        let answer = plain.post(&direct_url).json(&json!({ "input": 1 })).send().await;
        answer.expect("answers").bytes().await.expect("whole");
    };
    let me = me.http1();
    let path = format!("/v1/agents/{id}/invoke");
    let through = || async {
        let request = me.request(reqwest::Method::POST, &path).json(&json!({ "input": 1 }));
        request.send().await.expect("answers").bytes().await.expect("whole");
    };
    for clients in [1, 64] {
        let (direct_rate, direct_times) = load(clients, direct).await;
        let (rate, times) = load(clients, through).await;
        println!(
            "sync invoke, {clients:>3} clients: p50 {} us, p99 {} us, {rate:.0}/s; direct p50 {} us, p99 {} us, {direct_rate:.0}/s; added p50 {} us, ratio {:.2}",
            quantile(&times, 50),
            quantile(&times, 99),
            quantile(&direct_times, 50),
            quantile(&direct_times, 99),
            quantile(&times, 50).saturating_sub(quantile(&direct_times, 50)),
            rate / direct_rate,
        );
    }
}

async fn durable(me: &Customer, id: &str, yardstick: f64) {
    let path = format!("/v1/agents/{id}/invoke");
    let failed = Arc::new(AtomicUsize::new(0));
    let job = || async {
        let job = me.post(&path, &json!({ "input": 1, "async": true })).await.data(200);
        let job = me.ended(job["job_id"].as_str().expect("an id")).await;
        failed.fetch_add(usize::from(job["status"] != "completed"), Relaxed);
    };
    for clients in [1, 64, 256] {
        let (rate, times) = load(clients, job).await;
        println!(
            "durable jobs, {clients:>3} clients: {rate:.0}/s accepted, run and fetched, p50 {} us, p99 {} us; {:.2} x one fdatasync per operation",
            quantile(&times, 50),
            quantile(&times, 99),
            rate / yardstick,
        );
    }
    println!("failed jobs: {}", failed.load(Relaxed));
}

async fn control(me: &Customer, id: &str, yardstick: f64) {
    let (path, count) = (format!("/v1/agents/{id}"), AtomicUsize::new(0));
    let patch = || async {
        let note = count.fetch_add(1, Relaxed).to_string();
        me.patch(&path, &json!({ "metadata": { "note": note } })).await.data(200);
    };
    for clients in [1, 64] {
        let (rate, times) = load(clients, patch).await;
        println!(
            "PATCH of metadata, {clients:>3} clients: {rate:.0}/s, p50 {} us, p99 {} us; {:.2} x one fdatasync per operation",
            quantile(&times, 50),
            quantile(&times, 99),
            rate / yardstick
        );
    }
}

#[tokio::main]
async fn main() {
    let began = Instant::now();
    let node = Node::start();
    println!(
        "dev ready after {} ms, {} MiB resident",
        began.elapsed().as_millis(),
        resident_mib(node.pid())
    );
    let me = node.customer();
    let archive_url = me.upload(source::compiled_echo(512, &[])).await;
    let source = json!({ "type": "upload", "archive_url": archive_url });
    let wanted = json!({ "name": "echo", "cloud_id": me.cloud().await, "source": source });
    let began = Instant::now();
    let id = me.deploy_as(&wanted).await;
    println!("deployed after {} ms", began.elapsed().as_millis());
    let port = me.invoke(&id, &Value::Null).await.data(200)["output"].as_u64().expect("a port");
    let yardstick = syncs_per_second(node.data.path());
    println!("one fdatasync after the other: {yardstick:.0}/s");
    synchronous(&me, &id, port).await;
    control(&me, &id, yardstick).await;
    durable(&me, &id, yardstick).await;
    println!("{} MiB resident afterwards", resident_mib(node.pid()));
}
