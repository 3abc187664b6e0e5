//! Rates: what every answer says of them, and that they hold.

use std::time::Duration;

use serde_json::json;
use tests::{Node, skipped};

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
async fn a_key_may_have_a_limit_of_its_own() {
    let node = Node::start();
    let owner = node.customer();
    let made = owner.post("/v1/api-keys", &json!({ "name": "slow", "rate_limit": 3 })).await;
    let made = made.data(201);
    assert_eq!(made["rate_limit"], 3);
    let path = format!("/v1/api-keys/{}", made["id"].as_str().expect("an id"));
    let slow = node.caller(made["key"].as_str().expect("a key"));
    let heir = slow.post("/v1/api-keys", &json!({ "name": "heir" })).await;
    assert_eq!(heir.header("x-ratelimit-limit"), Some("3"));
    assert_eq!(heir.header("x-ratelimit-remaining"), Some("2"));
    assert_eq!(heir.data(201)["rate_limit"], 3, "nobody gives more than they have");
    let wide = json!({ "rate_limit": 4 });
    slow.patch(&path, &wide).await.refused(403, "INSUFFICIENT_SCOPE");
    slow.get("/v1/clouds").await.data(200);
    let refused = slow.get("/v1/clouds").await;
    assert!(refused.header("retry-after").is_some());
    let refused = refused.refused(429, "RATE_LIMITED");
    assert_eq!(
        (&refused["details"]["window"], &refused["details"]["limit"]),
        (&json!("minute"), &json!(3))
    );
    owner.get("/v1/clouds").await.data(200);
    for wrong in [json!(0), json!(1_000_001), json!("3"), json!(1.5), json!(-1)] {
        owner.patch(&path, &json!({ "rate_limit": wrong })).await.refused(400, "VALIDATION_ERROR");
    }
    let free = owner.patch(&path, &json!({ "rate_limit": null })).await.data(200);
    assert_eq!(free["rate_limit"], json!(null));
    slow.get("/v1/clouds").await.data(200);
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
    let small = operator.organization("small", "starter").await;
    let orgs = operator.get("/v1/organizations").await.data(200);
    let org =
        orgs["items"].as_array().and_then(|all| all.iter().find(|org| org["name"] == "small"));
    let org = org.expect("it is in the list").clone();
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

/// Waits as many seconds as it is told.
const SLEEPS: [(&str, &str); 1] = [(
    "agent.py",
    "import time\ndef invoke(input, context):\n    time.sleep(input or 0)\n    return 'done'\n",
)];

/// Between two tries of a call that was refused.
const BETWEEN_TRIES: Duration = Duration::from_millis(10);
/// Looks for a refusal.
const LOOKS: usize = 400;

#[tokio::test]
async fn a_tier_bounds_calls_in_flight_and_jobs_that_wait() {
    let node = Node::with(&[("ROOST_RATE_LIMIT__TIERS__STARTER", "100000/1000000")]);
    let small = node.customer().organization("small", "starter").await;
    let mut wanted = small.wanted("sleeper", &SLEEPS).await;
    wanted["scaling"] = json!({ "min_instances": 1, "max_instances": 1 });
    let agent = small.deploy_as(&wanted).await;

    // What is passed through is counted with calls: while twenty are in flight it is refused, then it is not.
    let twenty = async {
        let calls = (0..20).map(|_| async {
            // A look has the last seat for a moment now and then.
            while small.invoke(&agent, &json!(2)).await.status == 429 {
                tokio::time::sleep(BETWEEN_TRIES).await;
            }
        });
        futures::future::join_all(calls).await;
    };
    let health = format!("/v1/agents/{agent}/http/health");
    let looks = async {
        for _ in 0..LOOKS {
            let answer = small.get(&health).await;
            if answer.status != 200 {
                return answer;
            }
            tokio::time::sleep(BETWEEN_TRIES * 5).await;
        }
        panic!("what is passed through is never refused");
    };
    let ((), full) = tokio::join!(twenty, looks);
    let error = full.refused(429, "RATE_LIMITED");
    assert_eq!(error["details"], json!({ "window": "in_flight", "limit": 20 }));
    assert_eq!(small.get(&health).await.status, 200);

    // Twenty at once and no more.
    let calls = (0..30).map(|_| {
        let (small, agent) = (small.clone(), agent.clone());
        async move { small.invoke(&agent, &json!(3)).await }
    });
    let answers = futures::future::join_all(calls).await;
    let (mut allowed, mut refused) = (0, 0);
    for answer in answers {
        if answer.status == 200 {
            allowed += 1;
            continue;
        }
        refused += 1;
        assert_eq!(answer.header("retry-after"), Some("1"));
        let error = answer.refused(429, "RATE_LIMITED");
        assert_eq!(error["details"], json!({ "window": "in_flight", "limit": 20 }));
    }
    assert_eq!((allowed, refused), (20, 10));

    // A thousand jobs may wait beside those that run.
    let path = format!("/v1/agents/{agent}/invoke");
    let job = json!({ "async": true, "input": 100 });
    let mut accepted = 0;
    let refused = loop {
        let posts = (0..32).map(|_| small.post(&path, &job));
        let answers = futures::future::join_all(posts).await;
        accepted += answers.iter().filter(|answer| answer.status == 200).count();
        if let Some(refused) = answers.into_iter().find(|answer| answer.status != 200) {
            break refused;
        }
    };
    let error = refused.refused(429, "RATE_LIMITED");
    assert_eq!(error["details"], json!({ "window": "queued_jobs", "limit": 1000 }));
    // Calls that are accepted at the same moment see the same count.
    assert!((1000..1100).contains(&accepted), "{accepted}");
}

#[tokio::test]
async fn a_tier_bounds_builds_at_once_and_others_wait() {
    let node = Node::with(&[("ROOST_RATE_LIMIT__TIERS__STARTER", "100000/1000000")]);
    let small = node.customer().organization("small", "starter").await;
    // Builds that take a while; that they fail in the end is of no matter.
    let files = [
        ("agent.py", "def invoke(input, context):\n    return 1\n"),
        ("requirements.txt", "./slow\n"),
        ("slow/setup.py", "import time\ntime.sleep(1)\nraise SystemExit('enough')\n"),
    ];
    for number in 0..3 {
        let wanted = small.wanted(&format!("a{number}"), &files).await;
        small.post("/v1/agents", &wanted).await.data(201);
    }
    let mut building = vec![];
    let ended = loop {
        let listed = small.get("/v1/agents").await.data(200);
        let all = listed["items"].as_array().expect("agents").clone();
        let now = |status: &str| all.iter().filter(|agent| agent["status"] == status).count();
        building.push(now("building"));
        if now("failed") == 3 {
            break all;
        }
        tokio::time::sleep(std::time::Duration::from_millis(150)).await;
    };
    let why = ended[0]["deployment"]["error"].to_string();
    if why.contains("No module named pip") || why.contains("not on this node") {
        return skipped("pip");
    }
    assert_eq!(building.iter().max(), Some(&1), "{building:?}");
}
