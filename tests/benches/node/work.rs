//! Durable work: jobs from accepted to fetched, and changes of a record, beside etcd's puts.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use serde_json::json;
use tests::{Customer, load::load, peers};

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
    let (path, count) = (format!("/v1/agents/{id}"), AtomicUsize::new(0));
    let patch = |_| async {
        let note = count.fetch_add(1, Relaxed).to_string();
        me.patch(&path, &json!({ "metadata": { "note": note } })).await.data(200);
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
    let failed = AtomicUsize::new(0);
    let job = |_| async {
        let job = me.post(&path, &json!({ "input": 1, "async": true })).await.data(200);
        let job = me.ended(job["job_id"].as_str().expect("an id")).await;
        failed.fetch_add(usize::from(job["status"] != "completed"), Relaxed);
    };
    for clients in [1, 64, 512] {
        let measured = load(clients, job).await;
        let beside = beside(measured.rate, yardstick, etcd);
        println!("durable jobs, {clients:>3} clients: {}; {beside}", measured.shown());
    }
    println!("  failed jobs: {}", failed.load(Relaxed));
}
