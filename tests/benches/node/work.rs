//! Durable work: jobs from accepted to fetched, and changes of a record, beside etcd's puts. As with etcd each
//! client has a connection of its own and reads no more of an answer than it needs.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use bytes::Bytes;
use reqwest::{Method, RequestBuilder};
use serde_json::{Value, json};
use tests::{Customer, load::load, peers};

async fn whole(request: RequestBuilder) -> Bytes {
    let answer = request.send().await.expect("answers");
    assert_eq!(answer.status(), 200);
    answer.bytes().await.expect("whole")
}

/// Puts of 256 bytes a second with 64 clients, each with a connection of its own.
pub(crate) async fn etcd() -> Option<f64> {
    let Some(etcd) = peers::etcd() else {
        println!("SKIPPED: etcd");
        return None;
    };
    let clients: Vec<_> = (0..64).map(|_| peers::etcd_client()).collect();
    let puts = load(64, |client| {
        let key = format!("key-{client}");
        let connection = &clients[client];
        async move { peers::etcd_put(connection, etcd.port, &key).await }
    })
    .await;
    println!("etcd puts, 64 clients: {}", puts.shown());
    Some(puts.rate)
}

fn beside(rate: f64, yardstick: f64, etcd: Option<f64>) -> String {
    let etcd = etcd.map_or_else(String::new, |puts| format!(", {:.2} x etcd's puts", rate / puts));
    format!("{:.2} x one fdatasync after the other{etcd}", rate / yardstick)
}

/// `PATCH` of an agent's metadata.
pub(crate) async fn changes(me: &Customer, id: &str, yardstick: f64, etcd: Option<f64>) {
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
pub(crate) async fn jobs(me: &Customer, id: &str, yardstick: f64, etcd: Option<f64>) {
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
