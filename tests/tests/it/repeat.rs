//! Idempotency keys: the same call twice is one call.

use reqwest::Method;
use serde_json::{Value, json};
use tests::{Answer, Customer, Node, eventually, source::ECHO};

const COUNTS: &str = "count = 0\ndef invoke(input, context):\n    global count\n    count += 1\n    if input == 'fail':\n        raise ValueError(count)\n    return count\n";

async fn keyed(me: &Customer, key: &str, path: &str, body: &Value) -> Answer {
    me.send(me.request(Method::POST, path).header("idempotency-key", key).json(body)).await
}

#[tokio::test]
async fn a_repeated_create_makes_one_agent() {
    let node = Node::start();
    let me = node.customer();
    let wanted = me.wanted("once", &[("agent.py", ECHO)]).await;
    let first = keyed(&me, "k1", "/v1/agents", &wanted).await;
    assert_eq!(first.header("idempotency-replayed"), None);
    let first = first.data(201);
    let again = keyed(&me, "k1", "/v1/agents", &wanted).await;
    assert_eq!(again.header("idempotency-replayed"), Some("true"));
    assert_eq!(again.data(201)["id"], first["id"]);
    let mut other = wanted.clone();
    other["name"] = json!("other");
    keyed(&me, "k1", "/v1/agents", &other).await.refused(400, "IDEMPOTENCY_KEY_REUSED");
    keyed(&me, "k2", "/v1/agents", &wanted).await.refused(409, "AGENT_NAME_TAKEN");
    me.delete(&format!("/v1/agents/{}", first["id"].as_str().expect("an id"))).await.data(200);
    let still = keyed(&me, "k2", "/v1/agents", &wanted).await;
    still.refused(409, "AGENT_NAME_TAKEN");
    let test = node.tester();
    let cloud = json!({ "name": "mode" });
    let live = keyed(&me, "k3", "/v1/clouds", &cloud).await.data(201)["id"].clone();
    assert_ne!(
        keyed(&test, "k3", "/v1/clouds", &cloud).await.data(201)["id"],
        live,
        "a key is of one mode"
    );
}

#[tokio::test]
async fn a_hundred_equal_jobs_at_once_are_one() {
    let node = Node::start();
    let me = node.customer();
    let id = me.deploy("one", &[("agent.py", COUNTS)]).await;
    let path = format!("/v1/agents/{id}/invoke");
    let body = json!({ "input": 1, "async": true });
    let calls = (0..100).map(|_| keyed(&me, "job", &path, &body));
    let answers = futures::future::join_all(calls).await;
    let ids: std::collections::BTreeSet<String> =
        answers.into_iter().map(|answer| answer.data(200)["job_id"].to_string()).collect();
    assert_eq!(ids.len(), 1, "{ids:?}");
    let job = ids.first().map(|id| id.trim_matches('"').to_owned()).expect("one");
    assert_eq!(me.ended(&job).await["output"], 1);
    assert_eq!(me.invoke(&id, &json!(1)).await.data(200)["output"], 2, "the agent saw one job");
}

#[tokio::test]
async fn a_repeated_call_never_reaches_the_agent_twice() {
    let mut node = Node::start();
    let me = node.customer();
    let id = me.deploy("sync", &[("agent.py", COUNTS)]).await;
    let path = format!("/v1/agents/{id}/invoke");
    let body = json!({ "input": "count" });
    assert_eq!(keyed(&me, "a", &path, &body).await.data(200)["output"], 1);
    let again = keyed(&me, "a", &path, &body).await;
    assert_eq!(again.header("idempotency-replayed"), Some("true"));
    assert_eq!(again.data(200)["output"], 1);
    let fail = json!({ "input": "fail" });
    let first = keyed(&me, "b", &path, &fail).await.refused(502, "AGENT_ERROR");
    let again = keyed(&me, "b", &path, &fail).await.refused(502, "AGENT_ERROR");
    assert_eq!(first["details"], again["details"], "a failure after the call went out is kept");
    assert_eq!(keyed(&me, "c", &path, &body).await.data(200)["output"], 3);
    node.kill();
    node.restart();
    let me = node.caller(&me.key);
    assert_eq!(keyed(&me, "a", &path, &body).await.data(200)["output"], 1, "kept over kill -9");
}

#[tokio::test]
async fn a_keyed_call_whose_node_died_is_ended_as_unknown() {
    let mut node = Node::start();
    let me = node.customer();
    let slow = "import time\ndef invoke(input, context):\n    print('it began', flush=True)\n    time.sleep(600)\n";
    let id = me.deploy("gone", &[("agent.py", slow)]).await;
    let path = format!("/v1/agents/{id}/invoke");
    let body = json!({ "input": 1 });
    let begun = eventually("the call is at the agent", async || {
        let lines = me.get(&format!("/v1/agents/{id}/logs?q=began")).await.data(200);
        if lines["items"][0].is_object() { Ok(()) } else { Err(lines.to_string()) }
    });
    tokio::select! {
        answer = keyed(&me, "lost", &path, &body) => panic!("it ended: {answer:?}"),
        () = begun => {}
    }
    keyed(&me, "lost", &path, &body).await.refused(409, "IDEMPOTENCY_IN_PROGRESS");
    node.kill();
    node.restart();
    let me = node.caller(&me.key);
    let ended = eventually("the call is ended", async || {
        let answer = keyed(&me, "lost", &path, &body).await;
        if answer.status == 502 { Ok(answer) } else { Err(format!("{}", answer.body)) }
    })
    .await;
    assert_eq!(ended.refused(502, "AGENT_ERROR")["details"]["reason"], "outcome_unknown");
}

#[tokio::test]
async fn a_stream_takes_no_key() {
    let node = Node::start();
    let me = node.customer();
    let id = me.deploy("stream", &[("agent.py", ECHO)]).await;
    let request = me.request(Method::POST, &format!("/v1/agents/{id}/invoke"));
    let request = request.header("accept", "text/event-stream").header("idempotency-key", "x");
    me.send(request.json(&json!({}))).await.refused(400, "VALIDATION_ERROR");
}

#[tokio::test]
async fn a_long_answer_is_kept_beside_the_log_for_its_repetition() {
    let mut node = Node::with(&[
        ("ROOST_STORAGE__SWEEP_EVERY", "200ms"),
        ("ROOST_STORAGE__UNNAMED_AFTER", "500ms"),
    ]);
    let me = node.customer();
    let code = "count = 0\ndef invoke(input, context):\n    global count\n    count += 1\n    return str(count) * input\n";
    let id = me.deploy("long", &[("agent.py", code)]).await;
    let (path, body) = (format!("/v1/agents/{id}/invoke"), json!({ "input": 300_000 }));
    let first = keyed(&me, "long", &path, &body).await.data(200);
    assert_eq!(first["output"].as_str().map(str::len), Some(300_000));
    node.kill();
    node.restart();
    let me = node.caller(&me.key);
    tokio::time::sleep(std::time::Duration::from_secs(2)).await;
    let again = keyed(&me, "long", &path, &body).await;
    assert_eq!(again.header("idempotency-replayed"), Some("true"));
    assert_eq!(again.data(200)["output"], first["output"], "several sweeps went by");
}

/// Answers that hold a secret are repeated too, although the secret is kept nowhere.
#[tokio::test]
async fn a_repeated_call_is_answered_with_the_same_secret() {
    let node = Node::start();
    let customer = node.customer();
    let hook = json!({ "url": "https://receiver.example/hook", "events": ["*"] });
    let app =
        json!({ "name": "x", "redirect_uris": ["https://a.example/"], "scopes": ["agents:read"] });
    for (path, body, secret) in [
        ("/v1/api-keys", json!({ "name": "x" }), "key"),
        ("/v1/webhooks", hook, "secret"),
        ("/v1/oauth/applications", app, "client_secret"),
        ("/v1/invitations", json!({ "email": "a@b.example", "role": "viewer" }), "token"),
    ] {
        let send = |key: &'static str| {
            let request = customer.request(reqwest::Method::POST, path).json(&body);
            customer.send(request.header("idempotency-key", key))
        };
        let (first, again) = (send("one").await, send("one").await);
        assert_eq!(again.header("idempotency-replayed"), Some("true"), "{path}");
        let (first, again) = (first.data(201), again.data(201));
        assert_eq!(first, again, "{path}");
        assert!(first[secret].is_string(), "{path}: {first}");
        if path == "/v1/api-keys" {
            let key = first["key"].as_str().expect("a key");
            node.caller(key).get("/v1/clouds").await.data(200);
            assert_ne!(send("two").await.data(201)["key"], first["key"]);
        }
    }
}

#[tokio::test]
async fn a_repeated_removal_is_answered_as_the_first_and_says_so() {
    let node = Node::start();
    let me = node.customer();
    let key = me.post("/v1/api-keys", &json!({ "name": "gone" })).await.data(201);
    let id = key["id"].as_str().expect("an id").to_owned();
    let with_key =
        |method: Method, path: &str| me.request(method, path).header("idempotency-key", "remove-1");
    let path = format!("/v1/api-keys/{id}");
    for is_replay in [None, Some("true")] {
        let answer = me.send(with_key(Method::DELETE, &path)).await;
        assert_eq!(answer.header("idempotency-replayed"), is_replay);
        assert_eq!(answer.data(200), json!({ "id": id, "deleted": true }));
    }
    let value = json!({ "value": "v" });
    for is_replay in [None, Some("true")] {
        let answer = me.send(with_key(Method::PUT, "/v1/secrets/TOKEN").json(&value)).await;
        assert_eq!(answer.header("idempotency-replayed"), is_replay);
        assert_eq!(answer.data(200)["version"], 1);
    }
}
