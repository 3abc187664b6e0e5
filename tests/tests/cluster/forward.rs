//! Any node answers any call, wherever what it is about lives.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use tests::{Cluster, Customer, eventually, source::ECHO};

const WHO: &str = "
import json, os, time

def invoke(input, context):
    # In one piece: other threads print meanwhile.
    print(f\"asked {input.get('n')}\\n\", end='', flush=True)
    time.sleep(input.get('sleep', 0))
    return {'instance': os.environ['ROOST_INSTANCE_ID'], 'text': 'x' * input.get('size', 0)}
";

const STREAM: &str = "
import time

def invoke(input, context):
    for word in ['one', 'two', 'three']:
        yield word
        time.sleep(0.05)
";

/// Deploys with so many instances and waits until all of them run.
pub(crate) async fn deploy(me: &Customer, name: &str, code: &str, instances: usize) -> String {
    let mut wanted = me.wanted(name, &[("agent.py", code)]).await;
    wanted["scaling"] = json!({ "min_instances": instances, "max_instances": instances.max(1) });
    let id = me.deploy_as(&wanted).await;
    running(me, &id, instances).await;
    id
}

/// Waits until so many instances run; tells on which nodes.
pub(crate) async fn running(me: &Customer, id: &str, instances: usize) -> Vec<String> {
    eventually("all instances run", async || {
        let all = me.get(&format!("/v1/agents/{id}/instances")).await.data(200);
        let items = all["items"].as_array().expect("a list").clone();
        let on = |one: &Value| one["node_id"].as_str().unwrap_or_default().to_owned();
        let is_running = |one: &&Value| one["status"] == "running";
        let nodes: Vec<String> = items.iter().filter(is_running).map(on).collect();
        if nodes.len() == instances && items.len() == instances {
            Ok(nodes)
        } else {
            Err(all.to_string())
        }
    })
    .await
}

#[tokio::test]
async fn any_node_answers_any_call() {
    let cluster = Cluster::of(3);
    let [one, two, three] = [0, 1, 2].map(|node| cluster.customer(node));
    let id = deploy(&two, "who", WHO, 3).await;
    let nodes: BTreeSet<String> = running(&three, &id, 3).await.into_iter().collect();
    assert_eq!(nodes.len(), 3, "the instances spread over all nodes");
    let mut seen = BTreeSet::new();
    for me in [&one, &two, &three] {
        let agent = me.get(&format!("/v1/agents/{id}")).await.data(200);
        assert_eq!(agent["status"], "running");
        let calls = (0..12).map(|n| {
            let (input, id) = (json!({ "n": n, "sleep": 0.2 }), id.clone());
            async move { me.invoke(&id, &input).await.data(200) }
        });
        let calls: Vec<_> = calls.collect();
        for answer in futures::future::join_all(calls).await {
            seen.insert(answer["output"]["instance"].as_str().expect("a name").to_owned());
        }
    }
    assert_eq!(seen.len(), 3, "calls over one node reach instances of all nodes");
    a_write_is_seen_everywhere(&cluster, &id).await;
    jobs_are_one_list(&cluster, &id).await;
    logs_and_metrics_are_whole(&cluster, &id).await;
}

/// What one node acknowledged, every other node shows at once.
async fn a_write_is_seen_everywhere(cluster: &Cluster, id: &str) {
    for round in 0..30_usize {
        let writer = cluster.customer(round % 3);
        let reader = cluster.customer((round + 1) % 3);
        let note = json!({ "metadata": { "round": round.to_string() } });
        writer.patch(&format!("/v1/agents/{id}"), &note).await.data(200);
        let agent = reader.get(&format!("/v1/agents/{id}")).await.data(200);
        assert_eq!(agent["metadata"]["round"], round.to_string());
    }
}

/// Jobs are accepted anywhere and found from anywhere, long results included.
async fn jobs_are_one_list(cluster: &Cluster, id: &str) {
    let mut jobs = vec![];
    for n in 0..9_usize {
        let me = cluster.customer(n % 3);
        jobs.push(me.job(id, json!({ "input": { "n": n, "size": 100_000 } })).await);
    }
    for (n, job) in jobs.iter().enumerate() {
        let me = cluster.customer((n + 1) % 3);
        let ended = me.ended(job).await;
        assert_eq!(ended["status"], "completed", "{ended:#}");
        assert_eq!(ended["output"]["text"].as_str().map(str::len), Some(100_000));
    }
    for node in 0..3 {
        let listed = cluster.customer(node).get(&format!("/v1/jobs?agent_id={id}")).await.data(200);
        let listed = listed["items"].as_array().expect("a list").iter();
        let listed: BTreeSet<String> =
            listed.map(|job| job["job_id"].as_str().expect("an id").to_owned()).collect();
        assert_eq!(listed, jobs.iter().cloned().collect());
    }
}

async fn logs_and_metrics_are_whole(cluster: &Cluster, id: &str) {
    for node in 0..3 {
        let me = cluster.customer(node);
        // An answer does not wait for what its instance has printed.
        let lines = eventually("each line is there", async || {
            let path = format!("/v1/agents/{id}/logs?tail=1000&stream=stdout");
            let lines = me.get(&path).await.data(200)["items"].as_array().expect("a list").clone();
            if lines.len() < 36 + 9 { Err(json!(lines).to_string()) } else { Ok(lines) }
        })
        .await;
        let nodes: BTreeSet<&str> =
            lines.iter().filter_map(|line| line["node_id"].as_str()).collect();
        assert_eq!(nodes.len(), 3, "lines of every node");
        assert_eq!(lines.len(), 36 + 9, "each once");
        let times: Vec<&str> = lines.iter().filter_map(|line| line["timestamp"].as_str()).collect();
        assert!(times.is_sorted(), "oldest first: {times:?}");
        // What another node counts may be told half a second later.
        let agent = eventually("calls over all nodes are counted", async || {
            let agent = me.get(&format!("/v1/agents/{id}")).await.data(200);
            let is_whole = agent["metrics"]["requests_24h"] == 36 + 9;
            if is_whole { Ok(agent) } else { Err(agent["metrics"].to_string()) }
        })
        .await;
        assert_eq!(agent["scaling"]["current_instances"], 3);
        let metrics = me.get(&format!("/v1/agents/{id}/metrics")).await.data(200);
        assert_eq!(metrics["summary"]["requests"], 36 + 9);
    }
}

#[tokio::test]
async fn streams_and_the_agents_own_paths_cross_nodes() {
    let cluster = Cluster::of(3);
    let me = cluster.customer(0);
    let id = deploy(&me, "stream", STREAM, 1).await;
    let echo = deploy(&me, "echo", ECHO, 1).await;
    for node in 0..3 {
        let me = cluster.customer(node);
        let events = me.stream(&id, &json!(null)).await;
        let chunks: Vec<_> = events.iter().filter_map(|event| event["content"].as_str()).collect();
        assert_eq!(chunks, ["one", "two", "three"], "{events:?}");
        let path = format!("/v1/agents/{echo}/http/invoke");
        let body = json!({ "input": 7, "context": { "version": 1 } });
        let answer = me.post(&path, &body).await;
        assert_eq!((answer.status, &answer.body["output"]["echo"]), (200, &json!(7)), "{answer:?}");
        let answer = me.get(&format!("/v1/agents/{echo}/http/health")).await;
        assert_eq!(answer.status, 200);
    }
}

#[tokio::test]
async fn a_hundred_equal_posts_on_all_nodes_make_one_job() {
    let cluster = Cluster::of(3);
    let me = cluster.customer(0);
    let id = deploy(&me, "once", ECHO, 1).await;
    let posts = (0..100).map(|n| {
        let me = cluster.customer(n % 3);
        let path = format!("/v1/agents/{id}/invoke");
        let request = me.request(reqwest::Method::POST, &path).header("idempotency-key", "the one");
        let request = request.json(&json!({ "input": "once", "async": true }));
        async move { me.send(request).await.data(200)["job_id"].as_str().expect("an id").to_owned() }
    });
    let jobs: BTreeSet<String> = futures::future::join_all(posts).await.into_iter().collect();
    assert_eq!(jobs.len(), 1, "{jobs:?}");
    let listed = me.get(&format!("/v1/jobs?agent_id={id}")).await.data(200);
    assert_eq!(listed["items"].as_array().map(Vec::len), Some(1));
}

#[tokio::test]
async fn what_an_agent_wrote_is_read_from_its_copy_when_its_node_is_gone() {
    let mut cluster = Cluster::of(3);
    let id = deploy(&cluster.customer(0), "who", WHO, 1).await;
    let home = cluster.place(&running(&cluster.customer(0), &id, 1).await[0]);
    let (node, me) = (cluster.nodes[home].id.clone(), cluster.customer((home + 1) % 3));
    for n in 0..40 {
        me.invoke(&id, &json!({ "n": n })).await.data(200);
    }
    let path = format!("/v1/agents/{id}/logs?tail=1000&stream=stdout");
    let asked = async |me: &Customer| -> Vec<(String, String)> {
        let lines = me.get(&path).await.data(200)["items"].as_array().expect("a list").clone();
        let of = |line: &Value, field: &str| line[field].as_str().unwrap_or_default().to_owned();
        let lines = lines.iter().map(|line| (of(line, "node_id"), of(line, "message")));
        lines.filter(|(_, message)| message.starts_with("asked")).collect()
    };
    let wanted: Vec<_> = (0..40).map(|n| (node.clone(), format!("asked {n}"))).collect();
    eventually("all lines are there", async || {
        let lines = asked(&me).await;
        if lines == wanted { Ok(()) } else { Err(json!(lines).to_string()) }
    })
    .await;
    // Whoever keeps the copy is told twice a second.
    tokio::time::sleep(std::time::Duration::from_secs(2)).await;
    cluster.kill(home);
    for other in [1, 2] {
        // Also before anybody has taken the node for dead.
        let me = cluster.customer((home + other) % 3);
        assert_eq!(asked(&me).await, wanted, "its lines are read from the copy");
    }
    cluster.restart(&[home]);
    let me = cluster.customer(home);
    eventually("each line is told once when it is back", async || {
        let lines = asked(&me).await;
        if lines == wanted { Ok(()) } else { Err(json!(lines).to_string()) }
    })
    .await;
}

#[tokio::test]
async fn what_a_node_counted_is_counted_from_its_copy_when_it_is_gone() {
    let mut cluster = Cluster::of(3);
    let id = deploy(&cluster.customer(0), "who", WHO, 3).await;
    for node in 0..3 {
        for n in 0..10 * (node + 1) {
            cluster.customer(node).invoke(&id, &json!({ "n": n })).await.data(200);
        }
    }
    let counted = async |me: &Customer| -> (u64, u64) {
        let series = me.get(&format!("/v1/agents/{id}/metrics")).await.data(200);
        let agent = me.get(&format!("/v1/agents/{id}")).await.data(200);
        let of = |figure: &Value| figure.as_u64().unwrap_or_default();
        (of(&series["summary"]["requests"]), of(&agent["metrics"]["requests_24h"]))
    };
    let all_are_counted = async |me: &Customer| {
        eventually("all calls are counted, each once", async || {
            let found = counted(me).await;
            if found == (60, 60) { Ok(()) } else { Err(format!("{found:?}")) }
        })
        .await;
    };
    all_are_counted(&cluster.customer(0)).await;
    // A bucket is over after ten seconds, and goes to its keeper within two more on a machine that has the time;
    // nothing tells when it has arrived.
    tokio::time::sleep(std::time::Duration::from_secs(30)).await;
    for gone in [2, 1] {
        cluster.kill(gone);
        for other in 1..3 {
            all_are_counted(&cluster.customer((gone + other) % 3)).await;
        }
        cluster.restart(&[gone]);
        all_are_counted(&cluster.customer(gone)).await;
    }
}
