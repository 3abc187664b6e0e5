//! `kill -9` at any moment loses nothing acknowledged.

use std::{collections::BTreeMap, time::Duration};

use serde_json::json;
use tests::{Node, source::ECHO};

#[tokio::test]
async fn what_was_acknowledged_survives_kill_9_again_and_again() {
    let mut node = Node::start();
    let mut me = node.customer();
    let id = me.deploy("ledger", &[("agent.py", ECHO)]).await;
    let mut clouds: BTreeMap<String, String> = BTreeMap::new();
    let mut jobs: Vec<String> = vec![];
    let mut note = 0_u64;
    for round in 0..5_u64 {
        let writes = async {
            for n in 0.. {
                let name = format!("c-{round}-{n}");
                let made =
                    me.request(reqwest::Method::POST, "/v1/clouds").json(&json!({ "name": name }));
                let Ok(made) = made.send().await else { return };
                let Ok(made) = made.json::<serde_json::Value>().await else { return };
                clouds.insert(name, made["data"]["id"].as_str().expect("made").to_owned());
                let body = json!({ "input": n, "async": true });
                let job = me
                    .request(reqwest::Method::POST, &format!("/v1/agents/{id}/invoke"))
                    .json(&body);
                let Ok(job) = job.send().await else { return };
                let Ok(job) = job.json::<serde_json::Value>().await else { return };
                jobs.push(job["data"]["job_id"].as_str().expect("accepted").to_owned());
                let patch = json!({ "metadata": { "note": (note + 1).to_string() } });
                let patched =
                    me.request(reqwest::Method::PATCH, &format!("/v1/agents/{id}")).json(&patch);
                let Ok(patched) = patched.send().await else { return };
                if patched.status() == 200 {
                    note += 1;
                }
            }
        };
        let _ = tokio::time::timeout(Duration::from_millis(300 + round * 170), writes).await;
        node.kill();
        node.restart();
        me = node.caller(&me.key);
        for (name, cloud) in &clouds {
            let found = me.get(&format!("/v1/clouds/{cloud}")).await.data(200);
            assert_eq!(found["name"], json!(name));
        }
        for job in &jobs {
            me.get(&format!("/v1/jobs/{job}")).await.data(200);
        }
        let agent = me.get(&format!("/v1/agents/{id}")).await.data(200);
        let kept: u64 =
            agent["metadata"]["note"].as_str().and_then(|text| text.parse().ok()).unwrap_or(0);
        // The last one may have been applied without its answer getting out.
        assert!(kept == note || kept == note + 1, "{kept} is not {note}");
        note = kept;
    }
    assert!(clouds.len() > 20 && jobs.len() > 20, "{} clouds, {} jobs", clouds.len(), jobs.len());
    for job in &jobs {
        let ended = me.ended(job).await;
        assert!(
            ended["status"] == "completed" || ended["error"]["code"] == "NODE_LOST",
            "{ended:#}"
        );
    }
}

#[tokio::test]
async fn a_second_node_on_the_same_folder_is_told_so_and_harms_nothing() {
    let node = Node::start();
    let me = node.customer();
    let id = me.deploy("first", &[("agent.py", ECHO)]).await;
    me.invoke(&id, &json!(1)).await.data(200);
    let second = node.second_start();
    assert!(!second.status.success());
    let said = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(said.contains("another node is using"), "{said}");
    assert_eq!(me.invoke(&id, &json!(2)).await.data(200)["output"]["echo"], 2);
}
