//! Events on their way: how many deliveries a second reach a fast receiver, and how soon one does.

use std::{
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    time::{Duration, Instant},
};

use serde_json::json;
use tests::{
    Node, Receiver, eventually,
    load::{Measured, load, resident_mib},
};

use crate::deployed;

/// How long the last deliveries may take.
const ARRIVE_WITHIN: Duration = Duration::from_secs(120);
/// Single events whose way is timed.
const SINGLE: usize = 200;

pub(crate) async fn deliveries(etcd: Option<f64>) {
    let receiver = Receiver::start().await;
    let settings = receiver.settings("[\"1m\"]");
    let settings: Vec<(&str, &str)> =
        settings.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    let node = Node::with(&settings);
    let me = node.customer();
    let id = deployed(&me).await;
    let hook = json!({ "url": receiver.url("/ok"), "events": ["agent.updated"] });
    me.post("/v1/webhooks", &hook).await.data(201);
    let (path, count) = (format!("/v1/agents/{id}"), AtomicUsize::new(0));
    let change = async || {
        let note = count.fetch_add(1, Relaxed).to_string();
        me.patch(&path, &json!({ "metadata": { "note": note } })).await.data(200);
    };
    let mut times = vec![];
    for number in 1..=SINGLE {
        change().await;
        let committed = Instant::now();
        while receiver.got().len() < number {
            tokio::time::sleep(Duration::from_micros(100)).await;
        }
        times.push(committed.elapsed().as_micros());
    }
    let single = Measured::of(times, Duration::from_secs(1));
    println!(
        "webhooks, one at a time: from the answer to arrival p50 {} us, p99 {} us",
        single.quantile(50),
        single.quantile(99)
    );
    let began = Instant::now();
    load(64, |_| change()).await;
    let caused = count.load(Relaxed);
    eventually("all arrive", ARRIVE_WITHIN, async || match receiver.got().len() {
        got if got >= caused => Ok(()),
        got => Err(format!("{got} of {caused}")),
    })
    .await;
    #[expect(clippy::cast_precision_loss, reason = "a rate")]
    let rate = (caused - SINGLE) as f64 / began.elapsed().as_secs_f64();
    let beside =
        etcd.map_or_else(String::new, |puts| format!(", {:.2} x etcd's puts", rate / puts));
    println!("webhooks, 64 clients that cause events: {rate:.0} deliveries/s{beside}");
    println!("  {} MiB resident at their end", resident_mib(node.pid()));
}
