//! Rates: what every answer says of them, and that they hold.

use serde_json::json;
use tests::Node;

fn number(answer: &tests::Answer, name: &str) -> u64 {
    answer.header(name).and_then(|text| text.parse().ok()).unwrap_or_else(|| panic!("no {name}"))
}

#[tokio::test]
async fn every_answer_says_where_the_caller_stands() {
    let node = Node::with(&[("ROOST_RATE_LIMIT__TIERS__ENTERPRISE", "50/60")]);
    let customer = node.customer();
    let mut left = vec![];
    for path in ["/v1/clouds", "/v1/agents", "/v1/nothing", "/v1/agents/x", "/v1/clouds?limit=0"] {
        let answer = customer.get(path).await;
        assert_eq!(number(&answer, "x-ratelimit-limit"), 50, "{path}");
        assert!(number(&answer, "x-ratelimit-reset") > 1_700_000_000);
        left.push(number(&answer, "x-ratelimit-remaining"));
    }
    assert_eq!(left, [49, 48, 47, 46, 45], "every call counts once, whatever its answer");
    let stranger = node.caller("ic_live_nothing").get("/v1/clouds").await;
    assert_eq!((stranger.status, number(&stranger, "x-ratelimit-limit")), (401, 30));
    let open = customer.anonymous("/v1/auth/login", &json!({})).await;
    assert_eq!((open.status, number(&open, "x-ratelimit-limit")), (400, 30));
    for _ in 0..45 {
        customer.get("/v1/clouds").await.data(200);
    }
    let refused = customer.get("/v1/clouds").await;
    let seconds = number(&refused, "retry-after");
    assert!((1..=60).contains(&seconds), "{seconds}");
    assert_eq!(number(&refused, "x-ratelimit-remaining"), 0);
    let error = refused.refused(429, "RATE_LIMITED");
    assert_eq!(error["details"]["window"], "minute");
    assert_eq!(error["details"]["limit"], 50);
    // The sandbox has a budget of its own, and the node's health is nobody's call.
    node.tester().get("/v1/clouds").await.data(200);
    assert_eq!(customer.get("/healthz").await.status, 200);
}

#[tokio::test]
async fn the_limit_is_exact_for_parallel_callers_and_survives_a_kill() {
    let mut node = Node::with(&[("ROOST_RATE_LIMIT__TIERS__ENTERPRISE", "300/100000")]);
    let customer = node.customer();
    let calls = (0..400).map(|_| {
        let customer = customer.clone();
        async move { customer.get("/v1/clouds").await.status }
    });
    let statuses = futures::future::join_all(calls).await;
    let count = |wanted: u16| statuses.iter().filter(|status| **status == wanted).count();
    assert_eq!((count(200), count(429)), (300, 100));
    node.kill();
    node.restart();
    node.customer().get("/v1/clouds").await.refused(429, "RATE_LIMITED");
}

#[tokio::test]
async fn strangers_have_little_room_and_take_none_from_customers() {
    let node = Node::start();
    let stranger = node.caller("ic_live_wrong");
    let mut refused = 0;
    for _ in 0..40 {
        let answer = stranger.get("/v1/clouds").await;
        refused += usize::from(answer.status == 429);
        assert!(matches!(answer.status, 401 | 429));
    }
    assert_eq!(refused, 10);
    node.customer().get("/v1/clouds").await.data(200);
}

#[tokio::test]
async fn a_tier_can_be_changed_and_sets_quotas() {
    let node = Node::with(&[("ROOST_RATE_LIMIT__UNAUTHENTICATED_PER_MINUTE", "1000")]);
    let operator = node.customer();
    let wanted = json!({
        "name": "Small", "tier": "starter", "owner_email": "s@example.com",
        "owner_password": "a long password",
    });
    let org = operator.post("/v1/organizations", &wanted).await.data(201);
    let login = json!({ "email": "s@example.com", "password": "a long password" });
    let tokens = operator.anonymous("/v1/auth/login", &login).await.data(200);
    let small = node.caller(tokens["access_token"].as_str().expect("a token"));
    let cloud = small.cloud().await;
    let agent = |name: usize| {
        json!({ "name": format!("a{name}"), "cloud_id": cloud,
                "source": { "type": "github", "repo": "owner/none" } })
    };
    for number in 0..5 {
        small.post("/v1/agents", &agent(number)).await.data(201);
    }
    let error = small.post("/v1/agents", &agent(5)).await.refused(403, "QUOTA_EXCEEDED");
    assert_eq!(error["details"]["max"], 5);
    let answer = small.get("/v1/clouds").await;
    assert_eq!(number(&answer, "x-ratelimit-limit"), 60);
    let path = format!("/v1/organizations/{}", org["id"].as_str().expect("an id"));
    operator.patch(&path, &json!({ "tier": "pro" })).await.data(200);
    small.post("/v1/agents", &agent(5)).await.data(201);
}
