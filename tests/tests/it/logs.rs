//! Logs and metrics: what an agent wrote and did.

use std::{collections::BTreeSet, time::Duration};

use futures::StreamExt as _;
use reqwest::Method;
use serde_json::{Value, json};
use tests::{Node, eventually};

const WRITER: &str = r#"
import json, sys

def invoke(input, context):
    for n in range(input["lines"]):
        print(json.dumps({"level": "warn" if n % 2 else "debug", "msg": f"line {n}", "request_id": context["request_id"], "n": n}), flush=True)
    print("plain", flush=True)
    print("loud", file=sys.stderr, flush=True)
    return input["lines"]
"#;

#[tokio::test]
async fn lines_are_parsed_filtered_and_paged() {
    let node = Node::start();
    let me = node.customer();
    let id = me.deploy("writer", &[("agent.py", WRITER)]).await;
    let request_id =
        me.invoke(&id, &json!({ "lines": 10 })).await.body["meta"]["request_id"].clone();
    let request_id = request_id.as_str().expect("an id").to_owned();
    let lines = async |query: &str| {
        let page = me.get(&format!("/v1/agents/{id}/logs?{query}")).await.data(200);
        page["items"].as_array().cloned().unwrap_or_default()
    };
    eventually("all lines are there", async || {
        let all = lines("stream=stdout,stderr&tail=5000").await.len();
        if all == 12 { Ok(()) } else { Err(all.to_string()) }
    })
    .await;
    let of_request = lines(&format!("request_id={request_id}")).await;
    assert_eq!(of_request.len(), 10);
    let first = &of_request[0];
    assert_eq!(
        (&first["level"], &first["message"], &first["fields"]["n"]),
        (&json!("debug"), &json!("line 0"), &json!(0))
    );
    assert!(first["instance_id"].as_str().is_some_and(|id| id.starts_with("inst_")));
    assert_eq!((&first["version"], &first["stream"]), (&json!("1"), &json!("stdout")));
    assert_eq!(lines("level=warn").await.len(), 5);
    assert_eq!(lines("min_level=warn&stream=stdout,stderr").await.len(), 6);
    let loud = lines("stream=stderr").await;
    assert_eq!((loud.len(), &loud[0]["level"]), (1, &json!("error")));
    assert_eq!(lines("q=line 3").await.len(), 1);
    let last = lines("tail=1&stream=stdout").await;
    assert_eq!(last[0]["message"], "plain");
    let mut seen = vec![];
    let mut path = format!("/v1/agents/{id}/logs?tail=4&since=2020-01-01T00:00:00Z&stream=stdout");
    loop {
        let page = me.get(&path).await.data(200);
        let items = page["items"].as_array().cloned().unwrap_or_default();
        seen.extend(items.iter().map(|line| line["message"].clone()));
        if page["has_more"] != true {
            break;
        }
        let cursor = page["next_cursor"].as_str().expect("a cursor");
        path = format!("/v1/agents/{id}/logs?tail=4&stream=stdout&cursor={cursor}");
    }
    assert_eq!((seen.len(), seen.last()), (11, Some(&json!("plain"))));
}

#[tokio::test]
async fn lines_of_calls_at_once_do_not_mix() {
    let node = Node::start();
    let me = node.customer();
    let talks = "import sys\ndef invoke(input, context):\n    for n in range(300):\n        print('call', input, 'line', n)\n    sys.stdout.write('no end')\n";
    let toml = "[scaling]\nconcurrency = 8\n";
    let id = me.deploy("talks", &[("agent.py", talks), ("agent.toml", toml)]).await;
    let calls: Vec<_> = (0..8).map(|call| json!(call)).collect();
    let calls = calls.iter().map(async |call| me.invoke(&id, call).await.data(200));
    futures::future::join_all(calls).await;
    eventually("every line is whole", async || {
        let page = me.get(&format!("/v1/agents/{id}/logs?tail=5000&stream=stdout")).await.data(200);
        let all = page["items"].as_array().expect("lines").iter();
        // What has no end is shown when its call ends, before the next line.
        let told = all.filter_map(|line| line["message"].as_str()?.split("no end").last());
        let told: BTreeSet<&str> = told.collect();
        let line = |n: usize| format!("call {} line {}", n / 300, n % 300);
        match (0..2400).find(|n| !told.contains(&*line(*n))) {
            None => Ok(()),
            Some(n) => Err(format!("{} of {}", line(n), told.len())),
        }
    })
    .await;
}

#[tokio::test]
async fn followed_lines_come_once_each_and_the_stream_ends_with_the_agent() {
    let node = Node::start();
    let me = node.customer();
    let id = me.deploy("followed", &[("agent.py", WRITER)]).await;
    let request =
        me.request(Method::GET, &format!("/v1/agents/{id}/logs?follow=true&stream=stdout"));
    let response = request.header("accept", "text/event-stream").send().await.expect("answers");
    assert!(
        response.headers()["content-type"]
            .to_str()
            .is_ok_and(|kind| kind.starts_with("text/event-stream"))
    );
    let mut bytes = response.bytes_stream();
    for _ in 0..3 {
        me.invoke(&id, &json!({ "lines": 20 })).await.data(200);
    }
    let mut text = String::new();
    let mut deleted = false;
    while let Ok(Some(part)) = tokio::time::timeout(Duration::from_secs(120), bytes.next()).await {
        text.push_str(&String::from_utf8_lossy(&part.expect("whole")));
        if text.matches("\"message\":\"plain\"").count() == 3 && !deleted {
            deleted = true;
            me.delete(&format!("/v1/agents/{id}")).await.data(200);
        }
    }
    assert!(
        text.contains("event: end") || text.contains("event:end"),
        "{}",
        &text[text.len().saturating_sub(300)..]
    );
    let ids: Vec<u64> = text
        .lines()
        .filter_map(|line| line.strip_prefix("id:"))
        .filter_map(|id| id.trim().parse().ok())
        .collect();
    assert_eq!(ids.len(), 63);
    assert!(ids.is_sorted_by(|one, next| one < next), "each once, in order");
}

#[tokio::test]
async fn build_logs_and_logs_of_dead_instances_are_kept() {
    let mut node = Node::start();
    let me = node.customer();
    let id = me.deploy("keeper", &[("agent.py", WRITER)]).await;
    me.invoke(&id, &json!({ "lines": 1 })).await.data(200);
    let dep =
        me.get(&format!("/v1/agents/{id}/deployments")).await.data(200)["items"][0]["id"].clone();
    let dep = dep.as_str().expect("an id").to_owned();
    let path = format!("/v1/agents/{id}/logs?stream=stdout");
    // An answer does not wait for what the instance has printed.
    eventually("the line is there", async || {
        let lines = me.get(&path).await.data(200);
        if lines["items"][0]["message"] == "line 0" { Ok(()) } else { Err(lines.to_string()) }
    })
    .await;
    node.kill();
    node.restart();
    let me = node.caller(&me.key);
    let build = me.get(&format!("/v1/agents/{id}/deployments/{dep}/logs")).await.data(200);
    let words: Vec<&Value> =
        build["items"].as_array().expect("items").iter().map(|line| &line["message"]).collect();
    assert!(
        words
            .iter()
            .any(|word| word.as_str().is_some_and(|word| word.starts_with("start command"))),
        "{words:?}"
    );
    let old = me.get(&path).await.data(200);
    assert_eq!(old["items"][0]["message"], "line 0");
}

#[tokio::test]
async fn metrics_count_calls_over_time() {
    let node = Node::start();
    let me = node.customer();
    let id = me.deploy("counted", &[("agent.py", WRITER)]).await;
    for _ in 0..5 {
        me.invoke(&id, &json!({ "lines": 0 })).await.data(200);
    }
    me.invoke(&id, &json!({})).await.refused(502, "AGENT_ERROR");
    let metrics = me.get(&format!("/v1/agents/{id}/metrics?step=10")).await.data(200);
    let summary = &metrics["summary"];
    assert_eq!((&summary["requests"], &summary["errors"]), (&json!(6), &json!(1)));
    assert!(summary["latency_ms"]["p99"].as_f64().is_some_and(|ms| ms > 0.0));
    let requests = metrics["series"]
        .as_array()
        .and_then(|all| all.iter().find(|one| one["name"] == "requests"));
    let points = requests.and_then(|one| one["points"].as_array()).cloned().unwrap_or_default();
    let total: u64 = points.iter().filter_map(|point| point[1].as_u64()).sum();
    assert_eq!(total, 6);
    let path = format!("/v1/agents/{id}/metrics?step=10");
    eventually("somebody looked at the instance", async || {
        let summary = me.get(&path).await.data(200)["summary"].clone();
        let memory = summary["memory_mb"].as_f64().unwrap_or_default();
        let one = summary["instances"]["max"] == 1 && summary["cpu_percent"].is_number();
        if one && memory > 1.0 { Ok(()) } else { Err(summary.to_string()) }
    })
    .await;
    me.get(&format!("/v1/agents/{id}/metrics?from=2026-01-02T00:00:00Z&to=2026-01-01T00:00:00Z"))
        .await
        .refused(400, "VALIDATION_ERROR");
}
