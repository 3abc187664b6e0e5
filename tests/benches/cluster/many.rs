//! A thousand instances on three nodes: until they are placed, and until they run.

use std::time::{Duration, Instant};

use serde_json::json;
use tests::{Cluster, Customer, source};

const AGENTS: usize = 10;
const INSTANCES: usize = 100;

pub(crate) async fn instances() {
    let settings = [
        ("ROOST_RATE_LIMIT__ENABLED", "false"),
        // They are promised more than this machine has.
        ("ROOST_RUNTIME__CPU_OVERCOMMIT", "1000"),
    ];
    let cluster = Cluster::with(3, &settings);
    let me = cluster.customer(0);
    let archive_url = me.upload(source::compiled_echo(10_000, &[])).await;
    let cloud = me.cloud().await;
    let mut ids = vec![];
    for number in 0..AGENTS {
        let wanted = json!({
            "name": format!("many-{number}"), "cloud_id": cloud,
            "source": { "type": "upload", "archive_url": archive_url },
            "resources": { "cpu": 1, "memory_mb": 64 },
            "scaling": { "min_instances": 1, "max_instances": INSTANCES },
        });
        ids.push(me.deploy_as(&wanted).await);
    }
    let began = Instant::now();
    let more = json!({ "scaling": { "min_instances": INSTANCES, "max_instances": INSTANCES } });
    for id in &ids {
        me.patch(&format!("/v1/agents/{id}"), &more).await.data(200);
    }
    let (mut placed, mut run) = (None, None);
    while run.is_none() && began.elapsed() < Duration::from_secs(300) {
        let [all, running] = counted(&me, &ids).await;
        let whole = AGENTS * INSTANCES;
        placed = placed.or((all >= whole).then(|| began.elapsed()));
        run = (running >= whole).then(|| began.elapsed());
    }
    println!(
        "{} instances of {AGENTS} agents: placed after {placed:?}, running after {run:?}",
        AGENTS * INSTANCES
    );
}

/// Instances there are, and those that run.
async fn counted(me: &Customer, ids: &[String]) -> [usize; 2] {
    let mut counts = [0, 0];
    for id in ids {
        let all = me.get(&format!("/v1/agents/{id}/instances")).await.data(200);
        let all = all["items"].as_array().cloned().unwrap_or_default();
        counts[0] += all.len();
        counts[1] += all.iter().filter(|one| one["status"] == "running").count();
    }
    counts
}
