//! Durable work: jobs from accepted to fetched, and changes of a record, beside etcd's puts. As with etcd each
//! client has a connection of its own and reads no more of an answer than it needs.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use bytes::Bytes;
use reqwest::{Method, RequestBuilder};
use serde_json::{Value, json};
use tests::{
    Customer,
    load::load,
    peers::{Etcd, Wire},
};

async fn whole(request: RequestBuilder) -> Bytes {
    let answer = request.send().await.expect("answers");
    assert_eq!(answer.status(), 200);
    answer.bytes().await.expect("whole")
}

/// Puts of 256 bytes a second with 64 clients, each with a connection of its own; empty where there is no
/// etcd.
pub(crate) type Puts = Vec<(Wire, f64)>;

pub(crate) async fn etcd() -> Puts {
    let mut all = vec![];
    for wire in Wire::ALL {
        let Some(etcd) = Etcd::start(1, wire) else {
            println!("SKIPPED: etcd");
            continue;
        };
        let clients: Vec<_> = (0..64).map(|client| etcd.client(client)).collect();
        let put = |client: usize| {
            let (connection, key) = (&clients[client], format!("key-{client}"));
            async move { connection.put(&key).await }
        };
        let puts = load(64, put).await;
        println!("{}, puts, 64 clients: {}", wire.shown(), puts.shown());
        all.push((wire, puts.rate));
    }
    all
}

/// How a rate compares with etcd's puts.
pub(crate) fn beside_etcd(rate: f64, etcd: &Puts) -> String {
    let one = |(wire, puts): &(Wire, f64)| format!(", {:.2} x {}", rate / puts, wire.shown());
    etcd.iter().map(one).collect()
}

fn beside(rate: f64, yardstick: f64, etcd: &Puts) -> String {
    format!("{:.2} x one fdatasync after the other{}", rate / yardstick, beside_etcd(rate, etcd))
}

/// `PATCH` of an agent's metadata.
pub(crate) async fn changes(me: &Customer, id: &str, yardstick: f64, etcd: &Puts) {
    let (path, count, me) = (format!("/v1/agents/{id}"), AtomicUsize::new(0), me.http1());
    let patch = |_| async {
        let note = count.fetch_add(1, Relaxed).to_string();
        let body = json!({ "metadata": { "note": note } });
        whole(me.request(Method::PATCH, &path).json(&body)).await;
    };
    for clients in [1, 64] {
        let measured = load(clients, patch).await;
        let beside = beside(measured.rate, yardstick, etcd);
        println!("PATCH of metadata, {clients:>2} clients: {}; {beside}", measured.shown());
    }
}

/// Jobs: accepted, run and fetched by a waiting `GET`.
pub(crate) async fn jobs(me: &Customer, id: &str, yardstick: f64, etcd: &Puts) {
    let path = format!("/v1/agents/{id}/invoke");
    let (failed, me) = (AtomicUsize::new(0), me.http1());
    let body = json!({ "input": 1, "async": true });
    let completed = br#""status":"completed""#;
    let job = |_| async {
        let job = whole(me.request(Method::POST, &path).json(&body)).await;
        let job: Value = serde_json::from_slice(&job).expect("JSON");
        let id = job["data"]["job_id"].as_str().expect("an id");
        let job = whole(me.request(Method::GET, &format!("/v1/jobs/{id}?wait=60"))).await;
        let is_completed = job.windows(completed.len()).any(|part| part == completed);
        failed.fetch_add(usize::from(!is_completed), Relaxed);
    };
    for clients in [1, 64, 512] {
        let measured = load(clients, job).await;
        let beside = beside(measured.rate, yardstick, etcd);
        println!("durable jobs, {clients:>3} clients: {}; {beside}", measured.shown());
    }
    println!("  failed jobs: {}", failed.load(Relaxed));
}
