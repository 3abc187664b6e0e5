//! A thousand instances on three nodes: until they are placed, and until they run.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tests::{Cluster, Customer, source};

const AGENTS: usize = 10;
const INSTANCES: usize = 100;
/// Between looks at what runs.
const LOOK_EVERY: Duration = Duration::from_millis(250);

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
    let (began, mut asked_at) = (Instant::now(), None);
    let more = json!({ "scaling": { "min_instances": INSTANCES, "max_instances": INSTANCES } });
    for id in &ids {
        let agent = me.patch(&format!("/v1/agents/{id}"), &more).await.data(200);
        asked_at = asked_at.or_else(|| millis_of_day(&agent["updated_at"]));
    }
    let until = began + Duration::from_secs(300);
    let all = loop {
        let all = rows(&me, &ids).await;
        let running = all.iter().filter(|one| one["status"] == "running").count();
        none_is_given_up(&me, running).await;
        if running >= AGENTS * INSTANCES || Instant::now() > until {
            break all;
        }
        tokio::time::sleep(LOOK_EVERY).await;
    };
    let run = began.elapsed();
    // As their nodes say: who looks all the time is in the way.
    let placed = all.iter().filter_map(|one| millis_of_day(&one["started_at"])).max();
    let placed = placed.zip(asked_at).map_or(0, |(placed, asked)| placed - asked);
    println!(
        "{} instances of {AGENTS} agents: placed after {placed} ms, running after {run:?}",
        all.len()
    );
}

/// Of a time such as `2026-01-01T12:34:56.789Z`.
fn millis_of_day(time: &Value) -> Option<i64> {
    let clock = time.as_str()?.split_once('T')?.1.trim_end_matches('Z');
    let mut parts = clock.split([':', '.']).map(|part| part.parse::<i64>().ok());
    let mut next = || parts.next().flatten();
    Some(((next()? * 60 + next()?) * 60 + next()?) * 1000 + next()?)
}

/// What ends one agent's instances would otherwise be a wait without an end.
async fn none_is_given_up(me: &Customer, running: usize) {
    let all = me.get(&format!("/v1/agents?limit={AGENTS}")).await.data(200);
    let agents = all["items"].as_array().expect("a page of agents");
    assert_eq!(agents.len(), AGENTS);
    for agent in agents {
        let (name, reason) = (&agent["name"], &agent["status_reason"]);
        assert_eq!(agent["status"], "running", "{running} instances run, but {name}: {reason}");
    }
}

async fn rows(me: &Customer, ids: &[String]) -> Vec<Value> {
    let mut rows = vec![];
    for id in ids {
        let all = me.get(&format!("/v1/agents/{id}/instances")).await.data(200);
        rows.extend(all["items"].as_array().cloned().unwrap_or_default());
    }
    rows
}
