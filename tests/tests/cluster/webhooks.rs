//! Webhooks on three nodes: nothing is lost and hardly anything doubled when one dies.

use std::{collections::BTreeMap, time::Duration};

use serde_json::{Value, json};
use tests::{Cluster, Receiver, eventually};

const DELAYS: &str = "[\"300ms\", \"500ms\", \"1s\", \"2s\", \"3s\"]";
const AGENTS: usize = 60;

#[tokio::test]
async fn every_event_arrives_although_a_node_dies() {
    let receiver = Receiver::start().await;
    let settings = receiver.settings(DELAYS);
    let settings: Vec<(&str, &str)> =
        settings.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    let cluster = Cluster::with(3, &settings);
    let me = cluster.customer(0);
    let paths = ["/ok", "/fail/1", "/fail/2", "/hang", "/reset"];
    let mut hooks = vec![];
    for path in paths {
        let body = json!({ "url": receiver.url(path), "events": ["agent.created"] });
        hooks.push(me.post("/v1/webhooks", &body).await.data(201));
    }
    let cloud = me.cloud().await;
    let mut made = vec![];
    for number in 0..AGENTS {
        if number == AGENTS / 2 {
            cluster.kill(2);
        }
        let wanted = json!({
            "name": format!("a{number}"), "cloud_id": cloud,
            "source": { "type": "github", "repo": "owner/none" },
        });
        let id: String = eventually("an agent is accepted", Duration::from_secs(15), async || {
            let answer = cluster.customer(number % 2).post("/v1/agents", &wanted).await;
            match answer.status {
                201 => Ok(answer.body["data"]["id"].as_str().unwrap_or_default().to_owned()),
                // It was accepted, and the answer lost.
                409 => Ok(String::new()),
                status => Err(format!("{status} {}", answer.code())),
            }
        })
        .await;
        made.push(id);
    }
    for path in ["/ok", "/fail/1", "/fail/2"] {
        let attempts = 1 + path.strip_prefix("/fail/").and_then(|n| n.parse().ok()).unwrap_or(0);
        eventually(&format!("{path} has everything"), Duration::from_secs(60), async || {
            let mut seen: BTreeMap<String, usize> = BTreeMap::new();
            for got in receiver.got().into_iter().filter(|got| got.path == path) {
                let agent = got.body["data"]["agent_id"].as_str().unwrap_or_default().to_owned();
                *seen.entry(agent).or_default() += 1;
            }
            let missing = made.iter().filter(|id| !id.is_empty());
            let missing = missing.filter(|id| seen.get(*id).is_none_or(|n| *n < attempts)).count();
            let doubled: usize = seen.values().map(|count| count.saturating_sub(attempts)).sum();
            // At most what one webhook had under way on the dead node is sent once more.
            assert!(doubled <= 32, "{doubled} deliveries came once more");
            if missing == 0 { Ok(()) } else { Err(format!("{missing} of {AGENTS} are missing")) }
        })
        .await;
    }
    let path =
        format!("/v1/webhooks/{}/deliveries?status=succeeded&limit=100", text(&hooks[0]["id"]));
    let rows: Vec<Value> =
        eventually("all are written down", Duration::from_secs(20), async || {
            let data = me.get(&path).await.data(200);
            let rows = data["items"].as_array().cloned().unwrap_or_default();
            if rows.len() == AGENTS { Ok(rows) } else { Err(format!("{} rows", rows.len())) }
        })
        .await;
    let mut numbers: Vec<u64> = rows.iter().filter_map(|row| row["sequence"].as_u64()).collect();
    numbers.sort_unstable();
    assert_eq!(numbers, (1..=AGENTS as u64).collect::<Vec<_>>(), "no number is missing or twice");
    let events = me.get("/v1/events?type=agent.created&limit=100").await.data(200);
    assert_eq!(events["items"].as_array().map(Vec::len), Some(AGENTS));
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}
