//! Events and webhooks: told in order, signed, tried again, and never to whom they must not go.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use tests::{Customer, Node, Receiver, eventually, source::ECHO};

const DELAYS: &str = "[\"200ms\", \"300ms\", \"400ms\", \"500ms\", \"600ms\"]";

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

async fn node_for(receiver: &Receiver) -> Node {
    let settings = receiver.settings(DELAYS);
    let settings: Vec<(&str, &str)> =
        settings.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    Node::with(&settings)
}

async fn hook(customer: &Customer, url: &str, events: &[&str]) -> Value {
    customer.post("/v1/webhooks", &json!({ "url": url, "events": events })).await.data(201)
}

async fn deliveries(customer: &Customer, hook: &Value, query: &str) -> Vec<Value> {
    let path = format!("/v1/webhooks/{}/deliveries{query}", text(&hook["id"]));
    customer.get(&path).await.data(200)["items"].as_array().cloned().unwrap_or_default()
}

async fn settled(customer: &Customer, hook: &Value, status: &str, count: usize) -> Vec<Value> {
    let what = format!("{count} deliveries are {status}");
    eventually(&what, async || {
        let rows = deliveries(customer, hook, &format!("?status={status}&limit=100")).await;
        if rows.len() == count { Ok(rows) } else { Err(format!("{rows:#?}")) }
    })
    .await
}

#[tokio::test]
async fn a_webhook_hears_of_an_agents_life_in_signed_requests() {
    let receiver = Receiver::start().await;
    let node = node_for(&receiver).await;
    let customer = node.customer();
    let made = hook(&customer, &receiver.url("/ok"), &["agent.*"]).await;
    let secret = text(&made["secret"]);
    assert!(secret.starts_with("whsec_"), "{made}");
    let id = customer.deploy("mail", &[("agent.py", ECHO)]).await;
    customer.call(&format!("/v1/agents/{id}/stop")).await.data(200);
    customer.settled(&id, "stopped").await;
    customer.delete(&format!("/v1/agents/{id}")).await.data(200);
    let got = receiver.wait_for("/ok", 5).await;
    let mut kinds: Vec<&str> = got.iter().map(|got| got.kind()).collect();
    kinds.sort_unstable();
    assert_eq!(
        kinds,
        ["agent.created", "agent.deleted", "agent.deployed", "agent.started", "agent.stopped"]
    );
    let of = |kind: &str| got.iter().find(|got| got.kind() == kind).expect(kind);
    let deployed = &of("agent.deployed").body;
    assert_eq!(deployed["data"]["agent_id"], id);
    assert_eq!(deployed["data"]["agent_name"], "mail");
    assert_eq!(deployed["data"]["version"], "1");
    assert_eq!(deployed["data"]["status"], "running");
    let endpoint = format!("{}/v1/agents/{id}/http", customer.base_url);
    assert_eq!(deployed["data"]["endpoint"], endpoint);
    assert_eq!(of("agent.stopped").body["data"]["reason"], "user");
    let me = customer.get("/v1/auth/me").await.data(200);
    let mut numbers = BTreeSet::new();
    for got in &got {
        assert!(got.id().starts_with("evt_"));
        assert_eq!(got.body["meta"]["account_id"], me["org_id"]);
        assert_eq!(got.body["meta"]["webhook_id"], made["id"]);
        numbers.insert(got.body["meta"]["sequence"].as_u64().expect("a number"));
        assert_eq!(got.header("x-service-signature"), got.signature(&secret));
        assert_eq!(got.header("content-type"), "application/json");
        assert_eq!(got.header("webhook-id"), got.id());
        assert!(got.header("webhook-signature").starts_with("v1,"));
    }
    assert_eq!(numbers.into_iter().collect::<Vec<_>>(), [1, 2, 3, 4, 5], "no gap");
    let rows = settled(&customer, &made, "succeeded", 5).await;
    assert_eq!(rows[0]["attempts"][0]["status_code"], 200);
    let events = customer.get("/v1/events?type=agent.*&sort=created_at").await.data(200);
    let listed: Vec<_> =
        events["items"].as_array().expect("events").iter().map(|e| text(&e["id"])).collect();
    let sent: BTreeSet<_> = got.iter().map(|got| got.id().to_owned()).collect();
    assert_eq!(listed.iter().cloned().collect::<BTreeSet<_>>(), sent);
    let one = customer.get(&format!("/v1/events/{}", listed[0])).await.data(200);
    assert_eq!(one["type"], "agent.created");
    // Test mode hears and sees nothing of it.
    assert_eq!(node.tester().get("/v1/events").await.data(200)["items"], json!([]));
    node.tester()
        .get(&format!("/v1/webhooks/{}", text(&made["id"])))
        .await
        .refused(404, "WEBHOOK_NOT_FOUND");
}

#[tokio::test]
async fn failed_deliveries_are_tried_again_with_the_same_body_and_a_fresh_signature() {
    let receiver = Receiver::start().await;
    let node = node_for(&receiver).await;
    let customer = node.customer();
    let second = hook(&customer, &receiver.url("/fail/1"), &["agent.created"]).await;
    let never = hook(&customer, &receiver.url("/fail/99"), &["agent.created"]).await;
    let redirected = hook(&customer, &receiver.url("/redirect"), &["agent.created"]).await;
    let reset = hook(&customer, &receiver.url("/reset"), &["agent.created"]).await;
    let ok = hook(&customer, &receiver.url("/ok"), &["agent.created"]).await;
    let cloud = customer.cloud().await;
    let wanted =
        json!({ "name": "x", "cloud_id": cloud, "source": { "type": "github", "repo": "a/b" } });
    customer.post("/v1/agents", &wanted).await.data(201);
    let got = receiver.wait_for("/fail/1", 2).await;
    assert_eq!(got[0].raw, got[1].raw);
    let secret = text(&second["secret"]);
    assert!(got.iter().all(|got| got.header("x-service-signature") == got.signature(&secret)));
    let row = &settled(&customer, &second, "succeeded", 1).await[0];
    let statuses: Vec<_> = row["attempts"]
        .as_array()
        .expect("attempts")
        .iter()
        .map(|a| a["status_code"].clone())
        .collect();
    assert_eq!(statuses, [json!(500), json!(200)]);
    let row = &settled(&customer, &never, "exhausted", 1).await[0];
    assert_eq!(row["attempts"].as_array().map(Vec::len), Some(6), "one and five retries");
    assert_eq!(row["attempts"][0]["response_body"], "sure");
    let row = &settled(&customer, &redirected, "exhausted", 1).await[0];
    assert_eq!(row["attempts"][0]["error"], "redirects are not followed");
    settled(&customer, &reset, "exhausted", 1).await;
    settled(&customer, &ok, "succeeded", 1).await;
    let shown = customer.get(&format!("/v1/webhooks/{}", text(&never["id"]))).await.data(200);
    assert_eq!(shown["stats"]["failed_24h"], 6);
    assert_eq!(shown["stats"]["consecutive_failures"], 6);
    assert_eq!(shown["active"], true, "one delivery given up disables nothing");

    // By hand once more, and all of a window.
    let hook_id = text(&never["id"]);
    let lost = text(&deliveries(&customer, &never, "?status=exhausted").await[0]["id"]);
    let path = format!("/v1/webhooks/{hook_id}/deliveries/{lost}");
    customer.call(&format!("{path}/redeliver")).await.data(200);
    eventually("it is tried by hand", async || {
        let row = customer.get(&path).await.data(200);
        let triggers: Vec<_> = row["attempts"]
            .as_array()
            .expect("attempts")
            .iter()
            .map(|a| text(&a["trigger"]))
            .collect();
        if triggers.contains(&"manual".to_owned()) { Ok(()) } else { Err(format!("{triggers:?}")) }
    })
    .await;
    let row = customer.get(&path).await.data(200);
    assert_eq!(row["payload"]["type"], "agent.created");
    let unknown = format!("/v1/webhooks/{hook_id}/deliveries/dlv_00000000000000000000000000");
    customer.get(&unknown).await.refused(404, "DELIVERY_NOT_FOUND");
}

#[tokio::test]
async fn failures_and_jobs_are_told_of_too() {
    let receiver = Receiver::start().await;
    let node = node_for(&receiver).await;
    let customer = node.customer();
    let agent =
        customer.deploy("jobs", &[("agent.py", "def invoke(i, c):\n    return 1 / i\n")]).await;
    let unheard = customer.job(&agent, json!({ "input": 1 })).await;
    customer.ended(&unheard).await;
    let made =
        hook(&customer, &receiver.url("/ok"), &["job.*", "agent.failed", "deployment.rolled_back"])
            .await;
    let good = customer.job(&agent, json!({ "input": 2 })).await;
    let bad = customer.job(&agent, json!({ "input": 0 })).await;
    let wanted = customer.wanted("broken", &[("agent.py", "import nothing_like_this\n")]).await;
    let broken = customer.post("/v1/agents", &wanted).await.data(201);
    customer.settled(&text(&broken["id"]), "failed").await;
    let archive =
        customer.upload(tests::source::tar_gz(&[("agent.py", "raise SystemExit(3)\n")])).await;
    let source = json!({ "source": { "type": "upload", "archive_url": archive } });
    customer.post(&format!("/v1/agents/{agent}/redeploy"), &source).await.data(200);
    let got = receiver.wait_for("/ok", 5).await;
    let of = |kind: &str, id: &str| {
        got.iter()
            .find(|got| got.kind() == kind && got.body["data"].to_string().contains(id))
            .unwrap_or_else(|| panic!("no {kind} of {id}"))
    };
    assert_eq!(of("job.completed", &good).body["data"]["status"], "completed");
    assert_eq!(of("job.failed", &bad).body["data"]["error"]["code"], "AGENT_ERROR");
    let failed = of("agent.failed", &text(&broken["id"]));
    assert!(failed.body["data"]["error"]["code"].is_string());
    assert!(text(&failed.body["data"]["logs_url"]).ends_with("/logs"));
    let rolled = of("agent.failed", &agent);
    assert!(text(&rolled.body["data"]["error"]["details"]).starts_with("rolled back"));
    of("deployment.rolled_back", &agent);
    assert!(!got.iter().any(|got| got.raw.contains(&unheard)));
    let kept = customer.get("/v1/events?type=job.*").await.data(200);
    assert_eq!(kept["items"].as_array().map(Vec::len), Some(2), "unheard jobs are not kept");
    assert!(made["id"].is_string());
}

#[tokio::test]
async fn secrets_rotate_receivers_go_and_tests_are_answered_at_once() {
    let receiver = Receiver::start().await;
    let node = node_for(&receiver).await;
    let customer = node.customer();
    let own = json!({
        "url": receiver.url("/ok"), "events": ["agent.created"], "secret": "my own old secret".replace(' ', "-"),
    });
    let made = customer.post("/v1/webhooks", &own).await.data(201);
    let path = format!("/v1/webhooks/{}", text(&made["id"]));
    assert_eq!(customer.get(&path).await.data(200)["secret_hint"], "cret");
    let rotated = customer.call(&format!("{path}/rotate-secret")).await.data(200);
    let (old, new) = (text(&made["secret"]), text(&rotated["secret"]));
    let attempt = customer.call(&format!("{path}/test")).await.data(200);
    assert_eq!((&attempt["status_code"], &attempt["succeeded"]), (&json!(200), &json!(true)));
    let got = receiver.wait_for("/ok", 1).await.remove(0);
    assert_eq!(got.header("x-service-signature"), got.signature(&new));
    assert_eq!(got.header("x-service-signature-previous"), got.signature(&old));
    assert_eq!(got.header("webhook-signature").split(' ').count(), 2);
    assert_eq!(got.body["data"]["test"], true);
    let at_once = json!({ "grace_period_seconds": 0 });
    customer.post(&format!("{path}/rotate-secret"), &at_once).await.data(200);
    customer.call(&format!("{path}/test")).await.data(200);
    let got = receiver.wait_for("/ok", 2).await.remove(1);
    assert_eq!(got.header("x-service-signature-previous"), "");

    let gone = hook(&customer, &receiver.url("/gone"), &["agent.created"]).await;
    let off = json!({ "url": receiver.url("/off"), "events": ["*"], "active": false });
    let off = customer.post("/v1/webhooks", &off).await.data(201);
    let watcher = hook(&customer, &receiver.url("/watch"), &["webhook.disabled"]).await;
    let since = text(&customer.get("/v1/clouds").await.body["meta"]["timestamp"]);
    let cloud = customer.cloud().await;
    let wanted =
        json!({ "name": "x", "cloud_id": cloud, "source": { "type": "github", "repo": "a/b" } });
    customer.post("/v1/agents", &wanted).await.data(201);
    receiver.wait_for("/gone", 1).await;
    let told = receiver.wait_for("/watch", 1).await.remove(0);
    assert_eq!(told.body["data"]["webhook_id"], gone["id"]);
    let path = format!("/v1/webhooks/{}", text(&gone["id"]));
    let shown = customer.get(&path).await.data(200);
    assert_eq!(shown["active"], false);
    assert_eq!(shown["disabled_reason"], "the receiver answered 410 Gone");
    let enabled = customer.call(&format!("{path}/enable")).await.data(200);
    assert_eq!((&enabled["active"], &enabled["disabled_at"]), (&json!(true), &Value::Null));
    assert!(watcher["id"].is_string());

    // What happened while a webhook was off is sent when it is asked for.
    let path = format!("/v1/webhooks/{}", text(&off["id"]));
    customer.call(&format!("{path}/enable")).await.data(200);
    let window = json!({ "since": since, "only_failed": false });
    let recovered = customer.post(&format!("{path}/recover"), &window).await.data(200);
    assert!(recovered["deliveries"].as_u64() >= Some(1), "{recovered}");
    let got = receiver.wait_for("/off", 2).await;
    assert!(got.iter().any(|got| got.kind() == "agent.created"));
    customer.delete(&path).await.data(200);
    customer.get(&path).await.refused(404, "WEBHOOK_NOT_FOUND");
}

#[tokio::test]
async fn deliveries_survive_a_kill_and_a_slow_receiver_delays_no_other() {
    let receiver = Receiver::start().await;
    let mut node = node_for(&receiver).await;
    let customer = node.customer();
    let hanging = hook(&customer, &receiver.url("/hang"), &["agent.created"]).await;
    let later = hook(&customer, &receiver.url("/fail/2"), &["agent.created"]).await;
    let cloud = customer.cloud().await;
    let wanted =
        json!({ "name": "x", "cloud_id": cloud, "source": { "type": "github", "repo": "a/b" } });
    customer.post("/v1/agents", &wanted).await.data(201);
    receiver.wait_for("/fail/2", 1).await;
    node.kill();
    node.restart();
    let customer = node.customer();
    receiver.wait_for("/fail/2", 3).await;
    let row = &settled(&customer, &later, "succeeded", 1).await[0];
    assert!(row["attempts"].as_array().is_some_and(|all| all.len() >= 2), "{row:#}");
    assert_eq!(deliveries(&customer, &hanging, "?status=pending").await.len(), 1);
}

#[tokio::test]
async fn nothing_is_sent_to_addresses_of_our_own() {
    let receiver = Receiver::start().await;
    // This node may not call private addresses.
    let authority = receiver.authority();
    let authority = authority.to_str().expect("a path");
    let node = Node::with(&[
        ("ROOST_OUTBOUND__CA_BUNDLE", authority),
        ("ROOST_WEBHOOKS__RETRY_DELAYS", DELAYS),
    ]);
    let customer = node.customer();
    let port = receiver.url("").rsplit_once(':').map(|(_, port)| port.to_owned()).expect("a port");
    for host in [
        "localhost",
        "127.0.0.1",
        "127.1",
        "0x7f000001",
        "2130706433",
        "0",
        "[::1]",
        "[::ffff:127.0.0.1]",
    ] {
        let url = format!("https://{host}:{port}/ok");
        let made =
            customer.post("/v1/webhooks", &json!({ "url": url, "events": ["*"] })).await.data(201);
        let path = format!("/v1/webhooks/{}", text(&made["id"]));
        let attempt = customer.call(&format!("{path}/test")).await.data(200);
        assert_eq!(attempt["status_code"], Value::Null, "{host}");
        let error = text(&attempt["error"]);
        assert!(error.contains("refused") || error.contains("resolved"), "{host}: {error}");
        customer.delete(&path).await.data(200);
    }
    assert_eq!(receiver.connections(), 0, "somebody was called");
}

#[tokio::test]
async fn wrong_webhooks_are_refused() {
    let node = Node::start();
    let customer = node.customer();
    let good = json!({ "url": "https://receiver.example/hook", "events": ["agent.deployed"] });
    let set = |name: &str, value: Value| {
        let mut body = good.clone();
        body[name] = value;
        body
    };
    let long = format!("https://receiver.example/{}", "x".repeat(2048));
    for (body, code) in [
        (set("url", json!("http://receiver.example/hook")), "INVALID_URL"),
        (set("url", json!("https://user:pw@receiver.example/hook")), "INVALID_URL"),
        (set("url", json!("ftp://receiver.example")), "INVALID_URL"),
        (set("url", json!("receiver.example")), "INVALID_URL"),
        (set("url", json!("https://")), "INVALID_URL"),
        (set("url", json!("https://receiver.example/a b")), "INVALID_URL"),
        (set("url", json!(long)), "VALIDATION_ERROR"),
        (set("url", json!("")), "VALIDATION_ERROR"),
        (set("url", json!(7)), "VALIDATION_ERROR"),
        (set("url", Value::Null), "VALIDATION_ERROR"),
        (set("events", json!(["agent.exploded"])), "UNSUPPORTED_EVENT_TYPE"),
        (set("events", json!(["agents.*"])), "UNSUPPORTED_EVENT_TYPE"),
        (set("events", json!([""])), "UNSUPPORTED_EVENT_TYPE"),
        (set("events", json!([])), "VALIDATION_ERROR"),
        (set("events", json!("agent.deployed")), "VALIDATION_ERROR"),
        (set("events", json!([1])), "VALIDATION_ERROR"),
        (set("secret", json!("short")), "VALIDATION_ERROR"),
        (set("secret", json!("with a space in it")), "VALIDATION_ERROR"),
        (set("secret", json!("x".repeat(257))), "VALIDATION_ERROR"),
        (set("active", json!("yes")), "VALIDATION_ERROR"),
        (set("ordering", json!("strict")), "VALIDATION_ERROR"),
        (set("rate_limit_per_s", json!(0)), "VALIDATION_ERROR"),
        (set("rate_limit_per_s", json!(1001)), "VALIDATION_ERROR"),
        (set("description", json!("x".repeat(501))), "VALIDATION_ERROR"),
        (set("metadata", json!({ "": "x" })), "VALIDATION_ERROR"),
        (set("headers", json!({})), "VALIDATION_ERROR"),
    ] {
        let answer = customer.post("/v1/webhooks", &body).await;
        assert_eq!((answer.status, answer.code()), (400, code), "{body}: {:#}", answer.body);
    }
    let made = customer.post("/v1/webhooks", &good).await.data(201);
    let path = format!("/v1/webhooks/{}", text(&made["id"]));
    for (body, code) in [
        (json!({ "url": "http://x" }), "INVALID_URL"),
        (json!({ "events": ["nothing"] }), "UNSUPPORTED_EVENT_TYPE"),
        (json!({ "secret": "12345678" }), "VALIDATION_ERROR"),
        (json!({ "active": 1 }), "VALIDATION_ERROR"),
    ] {
        customer.patch(&path, &body).await.refused(400, code);
    }
    let patched = customer
        .patch(&path, &json!({ "active": false, "metadata": { "a": "b" } }))
        .await
        .data(200);
    assert_eq!((&patched["active"], &patched["disabled_reason"]), (&json!(false), &json!("user")));
    for (tail, body) in [
        ("recover", json!({ "since": "yesterday" })),
        ("recover", json!({})),
        ("recover", json!({ "since": "2026-01-02T00:00:00Z", "until": "2026-01-01T00:00:00Z" })),
        ("rotate-secret", json!({ "grace_period_seconds": 604_801 })),
        ("test", json!({ "event_type": "agent.*" })),
    ] {
        customer.post(&format!("{path}/{tail}"), &body).await.refused(400, "VALIDATION_ERROR");
    }
    customer.get(&format!("{path}/deliveries?status=lost")).await.refused(400, "VALIDATION_ERROR");
    customer.get("/v1/events?type=nothing").await.refused(400, "VALIDATION_ERROR");
    customer.get("/v1/events/evt_x").await.refused(404, "EVENT_NOT_FOUND");
    let types = customer.get("/v1/event-types").await.data(200);
    assert!(types["items"].as_array().is_some_and(|all| all.len() >= 11), "{types}");
}
