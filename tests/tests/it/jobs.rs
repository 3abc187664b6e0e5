//! Jobs: durable, waited for, canceled honestly, repeated, listed.

use std::time::{Duration, Instant};

use serde_json::json;
use tests::{Node, eventually, source::ECHO};

const SLOW: &str = "import time\ndef invoke(input, context):\n    time.sleep(input.get('seconds', 0))\n    if input.get('fail'):\n        raise RuntimeError('as asked')\n    return context['attempt']\n";

#[tokio::test]
async fn a_job_runs_to_its_end_and_is_waited_for() {
    let node = Node::start();
    let me = node.customer();
    let id = me.deploy("worker", &[("agent.py", SLOW)]).await;
    let job = me
        .job(&id, json!({ "input": { "seconds": 0.2 }, "options": { "metadata": { "k": "v" } } }))
        .await;
    let early = me.get(&format!("/v1/jobs/{job}")).await;
    assert_eq!(early.header("retry-after"), Some("1"));
    let done = me.ended(&job).await;
    assert_eq!(
        (&done["status"], &done["output"], &done["attempt"]),
        (&json!("completed"), &json!(1), &json!(1))
    );
    assert_eq!((&done["job_id"], &done["id"]), (&json!(job), &json!(job)));
    assert_eq!((&done["agent_version"], &done["metadata"]["k"]), (&json!("1"), &json!("v")));
    assert!(done["latency"]["run_ms"].as_u64().is_some_and(|ms| ms >= 200), "{done:#}");
    assert!(done.get("input").is_none());
    let shown = me.get(&format!("/v1/jobs/{job}?include=input")).await.data(200);
    assert_eq!(shown["input"], json!({ "seconds": 0.2 }));
}

#[tokio::test]
async fn a_job_is_tried_as_often_as_asked_and_no_more() {
    let node = Node::start();
    let me = node.customer();
    let id = me.deploy("failer", &[("agent.py", SLOW)]).await;
    let once = me.job(&id, json!({ "input": { "fail": true } })).await;
    let once = me.ended(&once).await;
    assert_eq!((&once["status"], &once["attempt"]), (&json!("failed"), &json!(1)));
    assert_eq!(once["error"]["code"], "AGENT_ERROR");
    let retry = json!({ "max_attempts": 3, "backoff": "fixed", "initial_ms": 10 });
    let thrice =
        me.job(&id, json!({ "input": { "fail": true }, "options": { "retry": retry } })).await;
    assert_eq!(me.ended(&thrice).await["attempt"], 3);
    let retry = json!({ "max_attempts": 3, "initial_ms": 10, "on": ["timeout"] });
    let picky =
        me.job(&id, json!({ "input": { "fail": true }, "options": { "retry": retry } })).await;
    assert_eq!(me.ended(&picky).await["attempt"], 1);
    let late =
        me.job(&id, json!({ "input": { "seconds": 5 }, "options": { "timeout": 0.2 } })).await;
    assert_eq!(me.ended(&late).await["error"]["code"], "JOB_TIMEOUT");
}

#[tokio::test]
async fn canceled_is_said_when_the_agent_has_let_go() {
    // A machine that does much else may need more than a second to confirm.
    let node = Node::with(&[("ROOST_INVOKE__CANCEL_WAIT", "5s")]);
    let me = node.customer();
    let awaits = "import asyncio\nasync def invoke(input, context):\n    await asyncio.sleep(30)\n";
    let polite = me.deploy("polite", &[("agent.py", awaits)]).await;
    let job = me.job(&polite, json!({})).await;
    running(&me, &job).await;
    let asked = me.call(&format!("/v1/jobs/{job}/cancel")).await.data(200);
    assert!(asked["cancel_requested_at"].is_string());
    let ended = me.ended(&job).await;
    assert_eq!(ended["status"], "canceled");
    let instances = me.get(&format!("/v1/agents/{polite}/instances")).await.data(200);
    let instance = &instances["items"][0];
    assert_eq!(
        (&instance["id"], &instance["status"]),
        (&ended["instance_id"], &json!("running")),
        "it confirmed and was not ended: {instances}"
    );
    me.call(&format!("/v1/jobs/{job}/cancel")).await.refused(409, "JOB_ALREADY_FINISHED");
    let deaf = me.deploy("deaf", &[("agent.py", SLOW)]).await;
    let job = me.job(&deaf, json!({ "input": { "seconds": 30 } })).await;
    running(&me, &job).await;
    me.call(&format!("/v1/jobs/{job}/cancel")).await.data(200);
    assert_eq!(me.ended(&job).await["status"], "canceled", "its instance was ended");
    let job = me.job(&deaf, json!({ "input": { "seconds": 30 } })).await;
    running(&me, &job).await;
    me.post(&format!("/v1/jobs/{job}/cancel"), &json!({ "mode": "force" })).await.data(200);
    assert_eq!(me.ended(&job).await["status"], "canceled");
}

async fn running(me: &tests::Customer, job: &str) {
    eventually("the job runs", async || {
        let job = me.get(&format!("/v1/jobs/{job}")).await.data(200);
        if job["status"] == "running" { Ok(()) } else { Err(job["status"].to_string()) }
    })
    .await;
}

#[tokio::test]
async fn a_job_is_accepted_while_its_agent_comes_up() {
    let node = Node::start();
    let me = node.customer();
    let wanted = me.wanted("early", &[("agent.py", ECHO)]).await;
    let agent = me.post("/v1/agents", &wanted).await.data(201);
    let id = agent["id"].as_str().expect("an id");
    let job = me.job(id, json!({ "input": "early" })).await;
    assert_eq!(me.ended(&job).await["output"]["echo"], "early");
}

#[tokio::test]
async fn ended_jobs_are_repeated_listed_and_removed() {
    let node = Node::start();
    let me = node.customer();
    let id = me.deploy("lister", &[("agent.py", ECHO)]).await;
    let mut jobs = vec![];
    for n in 0..5 {
        jobs.push(me.job(&id, json!({ "input": n })).await);
    }
    for job in &jobs {
        me.ended(job).await;
    }
    let again = me.call(&format!("/v1/jobs/{}/retry", jobs[2])).await.data(200);
    assert_eq!(again["retried_from"], json!(jobs[2]));
    let again = again["id"].as_str().expect("an id").to_owned();
    assert_eq!(me.ended(&again).await["output"]["echo"], 2);
    jobs.push(again);
    jobs.reverse();
    let mut seen = vec![];
    let mut path = format!("/v1/jobs?limit=2&agent_id={id}&status=completed");
    loop {
        let page = me.get(&path).await.data(200);
        let ids = page["items"].as_array().expect("items").iter();
        seen.extend(ids.filter_map(|job| job["id"].as_str()).map(str::to_owned));
        let Some(cursor) = page["next_cursor"].as_str() else { break };
        path = format!("/v1/jobs?limit=2&agent_id={id}&status=completed&cursor={cursor}");
    }
    assert_eq!(seen, jobs, "newest first, each once");
    me.delete(&format!("/v1/jobs/{}", jobs[0])).await.data(200);
    me.get(&format!("/v1/jobs/{}", jobs[0])).await.refused(404, "JOB_NOT_FOUND");
    let metrics = me.get(&format!("/v1/agents/{id}/metrics")).await.data(200);
    assert_eq!(
        (&metrics["summary"]["requests"], &metrics["summary"]["errors"]),
        (&json!(6), &json!(0))
    );
}

#[tokio::test]
async fn a_job_of_a_node_that_died_is_lost_unless_it_may_be_tried_again() {
    let mut node = Node::start();
    let me = node.customer();
    let id = me.deploy("survivor", &[("agent.py", SLOW)]).await;
    let once = me.job(&id, json!({ "input": { "seconds": 3 } })).await;
    let retry = json!({ "max_attempts": 2, "initial_ms": 10 });
    let twice =
        me.job(&id, json!({ "input": { "seconds": 3 }, "options": { "retry": retry } })).await;
    running(&me, &once).await;
    running(&me, &twice).await;
    node.kill();
    node.restart();
    let me = node.caller(&me.key);
    let once = me.ended(&once).await;
    assert_eq!((&once["status"], &once["error"]["code"]), (&json!("failed"), &json!("NODE_LOST")));
    let twice = me.ended(&twice).await;
    assert_eq!((&twice["status"], &twice["output"]), (&json!("completed"), &json!(2)));
}

#[tokio::test]
async fn canceled_is_not_said_while_the_agent_still_cleans_up() {
    let node = Node::start();
    let me = node.customer();
    let stubborn = "import asyncio\nasync def invoke(input, context):\n    try:\n        print('it began', flush=True)\n        await asyncio.sleep(30)\n    except asyncio.CancelledError:\n        await asyncio.sleep(0.5)\n        print('cleaned up', flush=True)\n        raise\n";
    let id = me.deploy("stubborn", &[("agent.py", stubborn)]).await;
    let said = async |word: &str| {
        eventually("the agent says so", async || {
            let lines = me.get(&format!("/v1/agents/{id}/logs?q={word}")).await.data(200);
            if lines["items"][0].is_object() { Ok(()) } else { Err(lines.to_string()) }
        })
        .await;
    };
    let job = me.job(&id, json!({})).await;
    running(&me, &job).await;
    // Sent is not begun: what never began has nothing to clean up.
    said("began").await;
    let began = Instant::now();
    me.call(&format!("/v1/jobs/{job}/cancel")).await.data(200);
    assert_eq!(me.ended(&job).await["status"], "canceled");
    assert!(began.elapsed() >= Duration::from_millis(450), "said before it was true");
    said("cleaned").await;
}

#[tokio::test]
async fn long_inputs_and_outputs_are_kept_beside_the_log() {
    let mut node = Node::with(&[
        ("ROOST_STORAGE__SWEEP_EVERY", "300ms"),
        ("ROOST_STORAGE__UNNAMED_AFTER", "1s"),
    ]);
    let me = node.customer();
    let code = "def invoke(input, context):\n    return input['text'] * input['times']\n";
    let id = me.deploy("long", &[("agent.py", code)]).await;
    let text = "x".repeat(100_000);
    let job = me.job(&id, json!({ "input": { "text": text, "times": 2 } })).await;
    let done = me.ended(&job).await;
    assert_eq!(done["output"].as_str().map(str::len), Some(200_000), "shown whole");
    assert_eq!(done["output_url"], format!("/v1/jobs/{job}/output"));
    let huge = me.job(&id, json!({ "input": { "text": text, "times": 100 } })).await;
    let done = me.ended(&huge).await;
    assert_eq!((&done["status"], &done["output"]), (&json!("completed"), &json!(null)), "too long");
    node.kill();
    node.restart();
    let me = node.caller(&me.key);
    // Several sweeps go by: what a job needs stays.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let whole = me.get(&format!("/v1/jobs/{huge}/output")).await;
    assert_eq!((whole.status, whole.body.as_str().map(str::len)), (200, Some(10_000_000)));
    let shown = me.get(&format!("/v1/jobs/{huge}?include=input")).await.data(200);
    assert_eq!(shown["input"]["text"], text);
    let listed = me.get("/v1/jobs").await.data(200);
    assert!(
        listed["items"]
            .as_array()
            .is_some_and(|jobs| jobs.iter().all(|job| job["output"].is_null()))
    );
    let again = me.call(&format!("/v1/jobs/{job}/retry")).await.data(200);
    let again = again["id"].as_str().expect("an id").to_owned();
    eventually("it runs again", async || {
        let job = me.ended(&again).await;
        if job["status"] == "completed" { Ok(()) } else { Err(format!("{job:#}")) }
    })
    .await;
    for job in [&job, &huge, &again] {
        me.delete(&format!("/v1/jobs/{job}")).await.data(200);
    }
    let blobs = node.data.path().join("blobs");
    eventually("what nobody needs is gone", async || {
        let files = walk(&blobs);
        // The archive of the agent stays.
        if files == 1 { Ok(()) } else { Err(format!("{files} blobs")) }
    })
    .await;
    me.get(&format!("/v1/jobs/{huge}/output")).await.refused(404, "JOB_NOT_FOUND");
}

fn walk(folder: &std::path::Path) -> usize {
    let entries = std::fs::read_dir(folder).expect("readable").flatten();
    entries.map(|entry| if entry.path().is_dir() { walk(&entry.path()) } else { 1 }).sum()
}

#[tokio::test]
async fn uploads_that_nothing_is_made_from_go() {
    let node = Node::with(&[
        ("ROOST_STORAGE__SWEEP_EVERY", "300ms"),
        ("ROOST_STORAGE__UNUSED_UPLOADS_AFTER", "1s"),
        ("ROOST_STORAGE__UNNAMED_AFTER", "1s"),
    ]);
    let me = node.customer();
    let id = me.deploy("keeper", &[("agent.py", ECHO)]).await;
    let unused = me.post("/v1/uploads", &json!({ "filename": "never.zip" })).await.data(201);
    let path = format!("/v1/uploads/{}", unused["id"].as_str().expect("an id"));
    eventually("it is gone", async || {
        let answer = me.get(&path).await;
        if answer.status == 404 { Ok(()) } else { Err(answer.body.to_string()) }
    })
    .await;
    let redeploy = json!({ "no_cache": true });
    me.post(&format!("/v1/agents/{id}/redeploy"), &redeploy).await.data(200);
    eventually("the used one still builds", async || {
        let agent = me.get(&format!("/v1/agents/{id}")).await.data(200);
        if agent["version"] == "2" { Ok(()) } else { Err(agent["deployment"].to_string()) }
    })
    .await;
}
