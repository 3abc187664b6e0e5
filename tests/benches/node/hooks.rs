//! Events on their way: how many deliveries a second reach a fast receiver, how soon one does, and what
//! those cost that wait for a receiver that is dead.

use std::{
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    time::{Duration, Instant},
};

use serde_json::json;
use tests::{
    Customer, Node, Receiver, eventually_within,
    load::{Measured, cpu_millis, load, resident_mib},
};

use crate::{
    deployed,
    work::{Puts, beside_etcd},
};

/// How long the last deliveries may take.
const ARRIVE_WITHIN: Duration = Duration::from_secs(120);
/// Single events whose way is timed.
const SINGLE: usize = 200;

/// Events that fill the lines of the receivers that do not take them, and how many of those there are.
const FILLING: usize = 10_000;
const DEAD: usize = 10;
/// How long a node's use of the processor is watched.
const WATCHED_FOR: Duration = Duration::from_secs(20);

/// A node that may call a receiver, and an agent whose changes are told.
struct Stage {
    receiver: Receiver,
    node: Node,
    me: Customer,
    path: String,
    changes: AtomicUsize,
}

impl Stage {
    async fn set(delays: &str) -> Self {
        let receiver = Receiver::start().await;
        let settings = receiver.settings(delays);
        let settings: Vec<(&str, &str)> =
            settings.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        let node = Node::with(&settings);
        let me = node.customer();
        let path = format!("/v1/agents/{}", deployed(&me).await);
        Self { receiver, node, me, path, changes: AtomicUsize::new(0) }
    }

    /// Makes a webhook; gives its path.
    async fn hook(&self, url: &str) -> String {
        let hook = json!({ "url": url, "events": ["agent.updated"] });
        let made = self.me.post("/v1/webhooks", &hook).await.data(201);
        format!("/v1/webhooks/{}", made["id"].as_str().expect("an id"))
    }

    async fn change(&self) {
        let note = self.changes.fetch_add(1, Relaxed).to_string();
        self.me.patch(&self.path, &json!({ "metadata": { "note": note } })).await.data(200);
    }

    fn came(&self, path: &str) -> usize {
        self.receiver.count(path)
    }

    /// Single events, one after the other: from the answer to the arrival.
    async fn singly(&self) -> Measured {
        let mut times = vec![];
        for _ in 0..SINGLE {
            let before = self.came("/ok");
            self.change().await;
            let committed = Instant::now();
            while self.came("/ok") == before {
                tokio::time::sleep(Duration::from_micros(100)).await;
            }
            times.push(committed.elapsed().as_micros());
        }
        Measured::of(times, Duration::from_secs(1))
    }
}

pub(crate) async fn deliveries(etcd: &Puts) {
    let stage = Stage::set("[\"1m\"]").await;
    stage.hook(&stage.receiver.url("/ok")).await;
    let single = stage.singly().await;
    println!(
        "webhooks, one at a time: from the answer to arrival p50 {} us, p99 {} us",
        single.quantile(50),
        single.quantile(99)
    );
    let began = Instant::now();
    load(64, |_| stage.change()).await;
    let caused = stage.changes.load(Relaxed);
    eventually_within("all arrive", ARRIVE_WITHIN, async || match stage.came("/ok") {
        got if got >= caused => Ok(()),
        got => Err(format!("{got} of {caused}")),
    })
    .await;
    #[expect(clippy::cast_precision_loss, reason = "a rate")]
    let rate = (caused - SINGLE) as f64 / began.elapsed().as_secs_f64();
    let beside = beside_etcd(rate, etcd);
    println!("webhooks, 64 clients that cause events: {rate:.0} deliveries/s{beside}");
    println!("  {} MiB resident at their end", resident_mib(stage.node.pid()));
}

/// Many deliveries wait: for their next attempt, and for a receiver that never answers.
pub(crate) async fn waiting() {
    let stage = Stage::set("[\"6h\"]").await;
    stage.hook(&stage.receiver.url("/ok")).await;
    let before = resident_mib(stage.node.pid());
    let quiet = stage.singly().await;
    // Another host than the one that answers.
    let dead = stage.receiver.url("/hang").replace("localhost", "127.0.0.1");
    let refusing = stage.receiver.url("/fail/99");
    for (what, url, events) in
        [("a dead receiver", dead, FILLING / 2), ("retries", refusing, FILLING)]
    {
        let mut hooks = vec![];
        for _ in 0..DEAD {
            hooks.push(stage.hook(&url).await);
        }
        let next = AtomicUsize::new(0);
        let fill = async || {
            while next.fetch_add(1, Relaxed) < events {
                stage.change().await;
            }
        };
        futures::future::join_all((0..64).map(|_| fill())).await;
        if what == "retries" {
            let wanted = events * DEAD;
            eventually_within("all were tried once", ARRIVE_WITHIN * 3, async || {
                match stage.came("/fail/99") {
                    tried if tried >= wanted => Ok(()),
                    tried => Err(format!("{tried} of {wanted}")),
                }
            })
            .await;
        }
        // What changes from here on is not theirs; what changed before has been passed on by now.
        for hook in &hooks {
            stage.me.patch(hook, &json!({ "events": ["agent.created"] })).await.data(200);
        }
        tokio::time::sleep(Duration::from_secs(2)).await;
        let loaded = stage.singly().await;
        let used = cpu_millis(stage.node.pid());
        tokio::time::sleep(WATCHED_FOR).await;
        let used = cpu_millis(stage.node.pid()) - used;
        println!(
            "{} deliveries wait for {what}: one at a time p50 {} us, p99 {} us (quiet {} and {}); {} MiB resident \
             ({before} before), {:.1} % of a core",
            events * DEAD,
            loaded.quantile(50),
            loaded.quantile(99),
            quiet.quantile(50),
            quiet.quantile(99),
            resident_mib(stage.node.pid()),
            f64::from(used) / WATCHED_FOR.as_secs_f64() / 10.0,
        );
        for hook in &hooks {
            stage.me.delete(hook).await.data(200);
        }
    }
}
