//! Who may do what: keys, people, roles and organizations.

use std::{collections::BTreeSet, time::Duration};

use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tests::{
    Customer, Node, eventually,
    oauth::{self, App},
    source::ECHO,
};

async fn new_key(of: &Customer, wanted: Value) -> Value {
    of.post("/v1/api-keys", &wanted).await.data(201)
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn login_of(node: &Node) -> (String, String) {
    (node.email.clone(), node.password.clone())
}

async fn log_in(customer: &Customer, email: &str, password: &str) -> tests::Answer {
    let body = json!({ "email": email, "password": password });
    customer.anonymous("/v1/auth/login", &body).await
}

#[tokio::test]
async fn a_key_does_what_its_scopes_say_until_it_is_revoked() {
    let node = Node::start();
    let owner = node.customer();
    let made = new_key(&owner, json!({ "name": "reader", "scopes": ["clouds:read"] })).await;
    let (id, key) = (text(&made["id"]).to_owned(), text(&made["key"]).to_owned());
    assert!(key.starts_with("ic_live_"), "{made}");
    assert_eq!(key[key.len() - 4..], *text(&made["last4"]));
    let reader = node.caller(&key);
    reader.get("/v1/clouds").await.data(200);
    let error = reader.get("/v1/agents").await.refused(403, "INSUFFICIENT_SCOPE");
    assert_eq!(error["details"]["required"], json!(["agents:read"]));
    assert_eq!(error["details"]["granted"], json!(["clouds:read"]));
    reader.get("/v1/api-keys").await.refused(403, "INSUFFICIENT_SCOPE");

    let shown = owner.get(&format!("/v1/api-keys/{id}")).await.data(200);
    assert!(shown.get("key").is_none_or(Value::is_null), "a key is shown once: {shown}");
    assert!(shown["last_used_at"].is_string(), "{shown}");
    let wider = json!({ "scopes": ["agents:read"] });
    owner.patch(&format!("/v1/api-keys/{id}"), &wider).await.data(200);
    reader.get("/v1/agents").await.data(200);
    reader.get("/v1/clouds").await.refused(403, "INSUFFICIENT_SCOPE");

    owner.delete(&format!("/v1/api-keys/{id}")).await.data(200);
    reader.get("/v1/agents").await.refused(401, "INVALID_API_KEY");
    owner.get(&format!("/v1/api-keys/{id}")).await.refused(404, "API_KEY_NOT_FOUND");
}

#[tokio::test]
async fn nobody_hands_on_more_than_they_have() {
    let node = Node::start();
    let owner = node.customer();
    let made = new_key(&owner, json!({ "name": "admin of keys", "scopes": ["admin:*"] })).await;
    let admin = node.caller(text(&made["key"]));
    let reader = json!({ "name": "x", "scopes": ["agents:read"] });
    admin.post("/v1/api-keys", &reader).await.data(201);
    // A person with less than everything makes no keys at all; an application neither.
    let wrong = json!({ "name": "x", "scopes": ["agents:fly"] });
    owner.post("/v1/api-keys", &wrong).await.refused(400, "VALIDATION_ERROR");
    let live = json!({ "name": "x", "mode": "live" });
    node.tester().post("/v1/api-keys", &live).await.refused(400, "VALIDATION_ERROR");
    let test = new_key(&node.tester(), json!({ "name": "x" })).await;
    assert!(text(&test["key"]).starts_with("ic_test_"), "{test}");
}

#[tokio::test]
async fn a_rotated_key_has_its_grace() {
    let node = Node::start();
    let owner = node.customer();
    let made = new_key(&owner, json!({ "name": "r", "scopes": ["clouds:read"] })).await;
    let (id, old) = (text(&made["id"]), node.caller(text(&made["key"])));
    let path = format!("/v1/api-keys/{id}/rotate");
    let graceful = owner.post(&path, &json!({ "grace_period_seconds": 600 })).await.data(200);
    let middle = node.caller(text(&graceful["key"]));
    old.get("/v1/clouds").await.data(200);
    middle.get("/v1/clouds").await.data(200);
    let at_once = owner.call(&path).await.data(200);
    old.get("/v1/clouds").await.refused(401, "INVALID_API_KEY");
    middle.get("/v1/clouds").await.refused(401, "INVALID_API_KEY");
    node.caller(text(&at_once["key"])).get("/v1/clouds").await.data(200);
}

#[tokio::test]
async fn a_key_may_be_bound_to_addresses_agents_and_time() {
    let node = Node::start();
    let owner = node.customer();
    let elsewhere =
        new_key(&owner, json!({ "name": "a", "allowed_ips": ["203.0.113.0/24", "2001:db8::/32"] }))
            .await;
    let error = node.caller(text(&elsewhere["key"])).get("/v1/clouds").await;
    let error = error.refused(403, "IP_NOT_ALLOWED");
    assert_eq!(error["details"]["address"], "127.0.0.1");
    let here = new_key(&owner, json!({ "name": "b", "allowed_ips": ["127.0.0.0/8", "::1"] })).await;
    node.caller(text(&here["key"])).get("/v1/clouds").await.data(200);
    let wrong = json!({ "name": "c", "allowed_ips": ["10.0.0.0/33"] });
    owner.post("/v1/api-keys", &wrong).await.refused(400, "VALIDATION_ERROR");

    let past = json!({ "name": "d", "expires_at": "2020-01-01T00:00:00Z" });
    owner.post("/v1/api-keys", &past).await.refused(400, "VALIDATION_ERROR");

    let (mine, other) = (
        owner.deploy("mine", &[("agent.py", ECHO)]).await,
        owner.deploy("other", &[("agent.py", ECHO)]).await,
    );
    let bound = new_key(&owner, json!({ "name": "e", "agent_ids": [mine] })).await;
    let bound = node.caller(text(&bound["key"]));
    bound.invoke(&mine, &json!("hello")).await.data(200);
    bound.invoke(&other, &json!("hello")).await.refused(404, "AGENT_NOT_FOUND");
    bound.get(&format!("/v1/agents/{other}")).await.refused(404, "AGENT_NOT_FOUND");
    let seen = bound.get("/v1/agents").await.data(200);
    assert_eq!(seen["items"].as_array().map(Vec::len), Some(1), "{seen}");
    let job = owner.job(&other, json!({ "input": 1 })).await;
    bound.get(&format!("/v1/jobs/{job}")).await.refused(404, "JOB_NOT_FOUND");
    bound.get("/v1/clouds").await.refused(403, "INSUFFICIENT_SCOPE");
}

#[tokio::test]
async fn people_log_in_refresh_and_log_out() {
    let node = Node::start();
    let customer = node.customer();
    let (email, password) = login_of(&node);
    let answer = log_in(&customer, &email, &password).await;
    assert_eq!(answer.header("cache-control"), Some("no-store"));
    // The specification shows both an envelope and bare fields.
    assert_eq!(answer.body["access_token"], answer.body["data"]["access_token"]);
    let tokens = answer.data(200);
    assert_eq!(tokens["token_type"], "Bearer");
    assert_eq!(tokens["expires_in"], 3600);
    let person = node.caller(text(&tokens["access_token"]));
    let me = person.get("/v1/auth/me").await.data(200);
    assert_eq!((text(&me["email"]), text(&me["role"])), (email.as_str(), "owner"));
    person.get("/v1/agents").await.data(200);

    let refresh = |token: &str| {
        let (customer, body) = (customer.clone(), json!({ "refresh_token": token }));
        async move { customer.anonymous("/v1/auth/refresh", &body).await }
    };
    let first = text(&tokens["refresh_token"]).to_owned();
    let next = refresh(&first).await.data(200);
    let second = text(&next["refresh_token"]).to_owned();
    assert_ne!(first, second);
    // The answer was lost: the same client gets the same token again.
    let again = refresh(&first).await.data(200);
    assert_eq!(text(&again["refresh_token"]), second);
    let third = text(&refresh(&second).await.data(200)["refresh_token"]).to_owned();
    // Two generations old: somebody else has a copy. The whole session ends.
    refresh(&first).await.refused(401, "REFRESH_TOKEN_REUSED");
    refresh(&third).await.refused(401, "INVALID_CREDENTIALS");

    let tokens = log_in(&customer, &email, &password).await.data(200);
    let person = node.caller(text(&tokens["access_token"]));
    person.get("/v1/auth/me").await.data(200);
    person.call("/v1/auth/logout").await.data(200);
    person.get("/v1/auth/me").await.refused(401, "TOKEN_EXPIRED");
    refresh(text(&tokens["refresh_token"])).await.refused(401, "INVALID_CREDENTIALS");
    for forged in ["", "ir.x.y.1.z", &format!("{third}x")] {
        let answer = refresh(forged).await;
        assert!(answer.status == 401 || answer.status == 400, "{forged}: {:#}", answer.body);
    }
}

#[tokio::test]
async fn five_wrong_passwords_pause_the_sixth_even_if_it_is_right() {
    let node = Node::with(&[("ROOST_RATE_LIMIT__UNAUTHENTICATED_PER_MINUTE", "1000")]);
    let customer = node.customer();
    let (email, password) = login_of(&node);
    let unknown = log_in(&customer, "nobody@example.com", "wrong-password").await;
    let wrong = log_in(&customer, &email, "wrong-password").await;
    assert_eq!(unknown.status, 401);
    assert_eq!(unknown.body["error"], wrong.body["error"], "unknown people are answered alike");
    for _ in 0..4 {
        log_in(&customer, &email, "wrong-password").await.refused(401, "INVALID_CREDENTIALS");
    }
    let paused = log_in(&customer, &email, &password).await;
    let seconds: u64 = paused.header("retry-after").and_then(|s| s.parse().ok()).unwrap_or(0);
    assert!((800..=900).contains(&seconds), "{seconds}");
    paused.refused(429, "LOGIN_THROTTLED");
    log_in(&customer, &email, "wrong-password").await.refused(429, "LOGIN_THROTTLED");
}

/// The owner's address belongs to the first organization before, and to a second one with another password.
#[tokio::test]
async fn one_address_has_an_account_of_its_own_in_each_organization() {
    let node = Node::with(&[("ROOST_RATE_LIMIT__UNAUTHENTICATED_PER_MINUTE", "1000")]);
    let first = node.customer();
    let (email, password) = login_of(&node);
    let first_org = text(&first.get("/v1/auth/me").await.data(200)["org_id"]).to_owned();
    let second = first.organization("second", "pro").await;
    let org = text(&second.get("/v1/auth/me").await.data(200)["org_id"]).to_owned();
    // Whether an address is known elsewhere is nobody's to see: it can be invited, changed to, and made an owner.
    let asked = json!({ "email": email, "role": "viewer" });
    let invitation = second.post("/v1/invitations", &asked).await.data(201);
    let accept = json!({ "token": invitation["token"], "password": "another one" });
    let account = first.anonymous("/v1/invitations/accept", &accept).await.data(201);
    assert_eq!(account["email"], email.as_str());
    let path = format!("/v1/users/{}", text(&account["id"]));
    second.patch(&path, &json!({ "email": "elsewhere@example.com" })).await.data(200);
    second.patch(&path, &json!({ "email": email })).await.data(200);
    let own = json!({ "email": "second@example.com" });
    second.patch(&path, &own).await.refused(409, "EMAIL_TAKEN");
    let third = json!({
        "name": "third", "tier": "pro", "owner_email": email, "owner_password": "a third one",
    });
    first.post("/v1/organizations", &third).await.data(201);

    let log_in = async |password: &str, org: Option<&str>| {
        let mut body = json!({ "email": email, "password": password });
        if let Some(org) = org {
            body["org_id"] = json!(org);
        }
        first.anonymous("/v1/auth/login", &body).await
    };
    for (password, named, reached) in [
        (password.as_str(), None, &first_org),
        (password.as_str(), Some(&first_org), &first_org),
        ("another one", Some(&org), &org),
    ] {
        let tokens = log_in(password, named.map(String::as_str)).await.data(200);
        let me = node.caller(text(&tokens["access_token"])).get("/v1/auth/me").await.data(200);
        assert_eq!(text(&me["org_id"]), reached);
    }
    for named in ["", "second", "user_00000000000000000000000000"] {
        log_in(&password, Some(named)).await.refused(400, "VALIDATION_ERROR");
    }
    let unknown = "org_00000000000000000000000000";
    // Five wrong ones in all, wherever: a right one elsewhere forgets none of them.
    for (password, named) in [
        (password.as_str(), Some(org.as_str())),
        (password.as_str(), Some(unknown)),
        ("another one", Some(first_org.as_str())),
        ("another one", None),
    ] {
        log_in(password, named).await.refused(401, "INVALID_CREDENTIALS");
    }
    log_in("another one", Some(&org)).await.data(200);
    for _ in 0..2 {
        log_in("wrong-password", Some(&org)).await.refused(401, "INVALID_CREDENTIALS");
    }
    for (password, named) in [(password.as_str(), None), ("another one", Some(org.as_str()))] {
        log_in(password, named).await.refused(429, "LOGIN_THROTTLED");
    }
}

#[tokio::test]
async fn people_are_invited_have_a_role_and_go() {
    let node = Node::with(&[("ROOST_RATE_LIMIT__UNAUTHENTICATED_PER_MINUTE", "1000")]);
    let owner = node.customer();
    let asked = json!({ "email": "Ada@Example.com", "role": "viewer" });
    let invitation = owner.post("/v1/invitations", &asked).await.data(201);
    assert_eq!(invitation["email"], "ada@example.com");
    let accept =
        json!({ "token": invitation["token"], "password": "correct horse", "name": "Ada" });
    let short = json!({ "token": invitation["token"], "password": "short" });
    owner.anonymous("/v1/invitations/accept", &short).await.refused(400, "VALIDATION_ERROR");
    let ada = owner.anonymous("/v1/invitations/accept", &accept).await.data(201);
    owner.anonymous("/v1/invitations/accept", &accept).await.refused(400, "INVALID_GRANT");
    owner.post("/v1/invitations", &asked).await.refused(409, "EMAIL_TAKEN");

    let tokens = log_in(&owner, "ADA@example.com", "correct horse").await.data(200);
    let person = node.caller(text(&tokens["access_token"]));
    person.get("/v1/agents").await.data(200);
    person.post("/v1/clouds", &json!({ "name": "x" })).await.refused(403, "INSUFFICIENT_SCOPE");
    person.get("/v1/users").await.refused(403, "INSUFFICIENT_SCOPE");

    // A role that grows does not widen old tokens; one that shrinks narrows them at once.
    let path = format!("/v1/users/{}", text(&ada["id"]));
    owner.patch(&path, &json!({ "role": "invoker" })).await.data(200);
    person.get("/v1/clouds").await.refused(403, "INSUFFICIENT_SCOPE");
    owner.patch(&path, &json!({ "role": "admin" })).await.data(200);
    let tokens = log_in(&owner, "ada@example.com", "correct horse").await.data(200);
    let admin = node.caller(text(&tokens["access_token"]));
    admin.get("/v1/users").await.data(200);
    // An admin makes and unmakes no owner, by no detour.
    let made = new_key(&admin, json!({ "name": "detour" })).await;
    let again = new_key(&node.caller(text(&made["key"])), json!({ "name": "longer detour" })).await;
    for key in [&made, &again] {
        let detour = node.caller(text(&key["key"]));
        detour.patch(&path, &json!({ "role": "owner" })).await.refused(403, "INSUFFICIENT_SCOPE");
        let owner = json!({ "email": "x@example.com", "role": "owner" });
        detour.post("/v1/invitations", &owner).await.refused(403, "INSUFFICIENT_SCOPE");
    }
    let tester = node.tester();
    let owner_to_be = json!({ "email": "x@example.com", "role": "owner" });
    tester.post("/v1/invitations", &owner_to_be).await.refused(403, "TEST_MODE_ONLY");
    tester.patch(&path, &json!({ "name": "x" })).await.refused(403, "TEST_MODE_ONLY");
    admin.patch(&path, &json!({ "role": "owner" })).await.refused(403, "INSUFFICIENT_SCOPE");
    let first = first_owner(&admin).await;
    let theirs = json!({ "email": "y@example.com" });
    admin.patch(&first, &theirs).await.refused(403, "INSUFFICIENT_SCOPE");
    admin.delete(&first).await.refused(403, "INSUFFICIENT_SCOPE");
    owner.delete(&first).await.refused(409, "INVALID_STATE");
    let taken = json!({ "email": "ada@example.com" });
    owner.patch(&first, &taken).await.refused(409, "EMAIL_TAKEN");

    let change = json!({ "current_password": "correct horse", "new_password": "battery staple" });
    admin.post("/v1/auth/password", &change).await.data(200);
    admin.get("/v1/users").await.refused(401, "INVALID_API_KEY");
    log_in(&owner, "ada@example.com", "correct horse").await.refused(401, "INVALID_CREDENTIALS");
    let tokens = log_in(&owner, "ada@example.com", "battery staple").await.data(200);
    let admin = node.caller(text(&tokens["access_token"]));
    admin.get("/v1/users").await.data(200);
    owner.delete(&path).await.data(200);
    admin.get("/v1/users").await.refused(401, "INVALID_API_KEY");
}

#[tokio::test]
async fn organizations_do_not_see_each_other() {
    let node = Node::with(&[("ROOST_RATE_LIMIT__UNAUTHENTICATED_PER_MINUTE", "1000")]);
    let first = node.customer();
    let wanted = json!({
        "name": "Second", "tier": "pro", "owner_email": "bob@example.com",
        "owner_password": "a long password",
    });
    let org = first.post("/v1/organizations", &wanted).await.data(201);
    assert_eq!((text(&org["tier"]), &org["is_operator"]), ("pro", &json!(false)));
    first.post("/v1/organizations", &wanted).await.refused(409, "ORGANIZATION_NAME_TAKEN");
    let tokens = log_in(&first, "bob@example.com", "a long password").await.data(200);
    let bob = node.caller(text(&tokens["access_token"]));
    let key = new_key(&bob, json!({ "name": "bob's" })).await;
    let second = node.caller(text(&key["key"]));

    // Everything of the first organization is not there for the second, and the other way round.
    let agent = first.deploy("mine", &[("agent.py", ECHO)]).await;
    let cloud = first.cloud().await;
    let own_key = text(&first.get("/v1/api-keys").await.data(200)["items"][0]["id"]).to_owned();
    first.put("/v1/secrets/TOKEN", &json!({ "value": "v" })).await.data(200);
    let unknown = "agent_00000000000000000000000000";
    for (path, code) in [
        (format!("/v1/agents/{agent}"), "AGENT_NOT_FOUND"),
        (format!("/v1/agents/{unknown}"), "AGENT_NOT_FOUND"),
        (format!("/v1/agents/{agent}/logs"), "AGENT_NOT_FOUND"),
        (format!("/v1/agents/{agent}/metrics"), "AGENT_NOT_FOUND"),
        (format!("/v1/clouds/{cloud}"), "CLOUD_NOT_FOUND"),
        (format!("/v1/api-keys/{own_key}"), "API_KEY_NOT_FOUND"),
        ("/v1/secrets/TOKEN".to_owned(), "SECRET_NOT_FOUND"),
    ] {
        second.get(&path).await.refused(404, code);
    }
    second.invoke(&agent, &json!(1)).await.refused(404, "AGENT_NOT_FOUND");
    assert_eq!(second.get("/v1/agents").await.data(200)["items"], json!([]));
    assert_eq!(second.get("/v1/users").await.data(200)["items"].as_array().map(Vec::len), Some(1));
    // Only the first looks after the cluster.
    second.get("/v1/cluster").await.refused(403, "INSUFFICIENT_SCOPE");
    second.get("/v1/organizations").await.refused(403, "INSUFFICIENT_SCOPE");
    node.tester().get("/v1/cluster").await.refused(403, "TEST_MODE_ONLY");
    // Its tier is its own.
    let limit = second.get("/v1/clouds").await;
    assert_eq!(limit.header("x-ratelimit-limit"), Some("300"));
    let rows = second.get("/v1/audit-log").await.data(200);
    let targets: Vec<_> = rows["items"].as_array().expect("rows").iter().collect();
    assert!(targets.iter().all(|row| row["target"] != format!("/v1/agents/{agent}")), "{rows}");
}

/// How often a time of the first kind is longer than one of the second: 0.5 if nothing tells them apart
/// (the area under the ROC curve, by Mann and Whitney).
fn told_apart(first: &[u128], second: &[u128]) -> f64 {
    let wins = |one: &u128| -> u64 {
        second.iter().map(|other| 2 * u64::from(one > other) + u64::from(one == other)).sum()
    };
    let (wins, pairs) = (first.iter().map(wins).sum::<u64>(), 2 * first.len() * second.len());
    #[expect(clippy::cast_precision_loss, reason = "a ratio")]
    let share = wins as f64 / pairs as f64;
    share
}

/// Where things of each kind are that have an id.
async fn one_of_each(of: &Customer) -> Vec<String> {
    let agent = of.deploy("echo", &[("agent.py", tests::source::ECHO)]).await;
    let made = async |path: &str, body: Value, status: u16| {
        let made = of.post(path, &body).await.data(status);
        text(&made["id"]).to_owned()
    };
    let listed = async |path: &str| {
        let all = of.get(path).await.data(200);
        text(&all["items"][0]["id"]).to_owned()
    };
    // So many that some have ended in every shard, as where anybody works.
    let mut job = String::new();
    for _ in 0..64 {
        job = of.job(&agent, json!({ "input": 1 })).await;
        of.ended(&job).await;
    }
    let hook = json!({ "url": "https://example.com/hook", "events": ["*"] });
    let upload = json!({ "filename": "agent.tar.gz", "size_bytes": 10 });
    vec![
        format!("/v1/clouds/{}", of.cloud().await),
        format!("/v1/webhooks/{}", made("/v1/webhooks", hook, 201).await),
        format!("/v1/uploads/{}", made("/v1/uploads", upload, 201).await),
        format!("/v1/api-keys/{}", text(&new_key(of, json!({ "name": "one" })).await["id"])),
        format!("/v1/jobs/{job}"),
        format!("/v1/users/{}", listed("/v1/users").await),
        format!("/v1/agents/{agent}"),
        format!("/v1/events/{}", listed("/v1/events").await),
    ]
}

#[tokio::test]
async fn what_belongs_to_others_takes_as_long_as_what_is_not_there() {
    let node = Node::with(&[("ROOST_RATE_LIMIT__TIERS__ENTERPRISE", "1000000/100000000")]);
    let first = node.customer();
    let second = first.organization("second", "enterprise").await;
    for foreign in one_of_each(&first).await {
        // The same but for its last letters.
        let unknown = format!("{}00", &foreign[..foreign.len() - 2]);
        let mut times: [Vec<u128>; 2] = Default::default();
        for turn in 0..2000 {
            // In changing order, so that what warms up does so for both.
            let place = (turn + turn / 2) % 2;
            let began = std::time::Instant::now();
            let answer = second.get([&foreign, &unknown][place]).await;
            times[place].push(began.elapsed().as_micros());
            assert_eq!(answer.status, 404);
        }
        let area = told_apart(&times[0], &times[1]);
        assert!((0.45..=0.55).contains(&area), "{foreign}: the area is {area:.3}");
    }
}

#[tokio::test]
async fn a_stream_ends_with_the_key_that_opened_it() {
    let node = Node::start();
    let owner = node.customer();
    let agent = owner.deploy("echo", &[("agent.py", tests::source::ECHO)]).await;
    let mut open = vec![];
    for path in [format!("/v1/agents/{agent}/logs?follow=true"), "/v1/cluster/events".to_owned()] {
        let key = new_key(&owner, json!({ "name": "follower" })).await;
        let request = node.caller(text(&key["key"])).request(reqwest::Method::GET, &path);
        let request = request.header("accept", "text/event-stream");
        let response = request.send().await.expect("it answers");
        assert_eq!(response.status(), 200, "{path}");
        let reading = tokio::spawn(response.bytes());
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert!(!reading.is_finished(), "{path} goes on while its key is good");
        owner.delete(&format!("/v1/api-keys/{}", text(&key["id"]))).await.data(200);
        open.push((path, reading));
    }
    for (path, reading) in open {
        let ended = tokio::time::timeout(Duration::from_secs(60), reading).await;
        assert!(ended.is_ok(), "{path} goes on without its key");
    }
}

/// Guesses of passwords that are timed, for known and unknown addresses together.
const GUESSES: usize = 2000;

#[tokio::test]
async fn a_guess_takes_as_long_for_somebody_as_for_nobody() {
    let node = Node::with(&[
        ("ROOST_RATE_LIMIT__UNAUTHENTICATED_PER_MINUTE", "100000"),
        ("ROOST_HTTP__TRUSTED_PROXIES", "[\"127.0.0.1\"]"),
    ]);
    let me = node.customer();
    me.organization("second", "pro").await;
    let mut times: [Vec<u128>; 2] = Default::default();
    let mut said = BTreeSet::new();
    for turn in 0..GUESSES {
        let place = (turn + turn / 2) % 2;
        let email = ["second@example.com", "nobody@example.com"][place];
        // From another address each time, so that nobody is made to wait.
        let from = format!("203.0.{}.{}", turn / 250, turn % 250 + 1);
        let guess = json!({ "email": email, "password": format!("guess {turn}") });
        let request = me.client.post(format!("{}/v1/auth/login", me.base_url));
        let request = request.header("x-forwarded-for", from).json(&guess);
        let began = std::time::Instant::now();
        let answer = me.send(request).await;
        times[place].push(began.elapsed().as_micros());
        let names: Vec<String> = answer.headers.keys().map(ToString::to_string).collect();
        said.insert(format!("{:?} {:?}", names, answer.refused(401, "INVALID_CREDENTIALS")));
    }
    assert_eq!(said.len(), 1, "{said:?}");
    let area = told_apart(&times[0], &times[1]);
    assert!((0.45..=0.55).contains(&area), "the area is {area:.3}");
}

/// The process that hashes passwords for a node, and how much it gives way.
fn hasher_of(node: u32) -> Option<(u32, i64)> {
    let processes = std::fs::read_dir("/proc").expect("a /proc").flatten();
    let mut ids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    ids.find_map(|pid| {
        let command = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).ok()?;
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // proc(5): behind the name come the state, the parent and, as the 17th, the nice value.
        let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split(' ').collect();
        let is_its = command.contains("__hash") && *fields.get(1)? == node.to_string();
        is_its.then_some((pid, fields.get(16)?.parse().ok()?))
    })
}

#[tokio::test]
async fn passwords_are_hashed_by_a_process_that_gives_way_and_is_replaced_and_ends_with_its_node() {
    let mut node = Node::start();
    let customer = node.customer();
    let (email, password) = login_of(&node);
    assert_eq!(hasher_of(node.pid()), None, "there is no need of it yet");
    log_in(&customer, &email, &password).await.data(200);
    let (first, nice) = hasher_of(node.pid()).expect("a process that hashes");
    assert_eq!(nice, 10);
    if let Ok(group) = std::fs::read_to_string(format!("/proc/{first}/autogroup")) {
        assert!(group.trim_end().ends_with("nice 10"), "{group}");
    }
    let killed = std::process::Command::new("kill").args(["-9", &first.to_string()]).status();
    assert!(killed.is_ok_and(|status| status.success()));
    log_in(&customer, &email, "another password").await.refused(401, "INVALID_CREDENTIALS");
    log_in(&customer, &email, &password).await.data(200);
    let (second, _) = hasher_of(node.pid()).expect("another process that hashes");
    assert_ne!(first, second);
    node.kill();
    eventually("it ends with its node", async || {
        match std::fs::read_to_string(format!("/proc/{second}/cmdline")) {
            Ok(command) if command.contains("__hash") => Err(command),
            Ok(_) | Err(_) => Ok(()),
        }
    })
    .await;
}

#[tokio::test]
async fn every_change_is_in_the_audit_log_and_refused_ones_are_summed_up() {
    let node = Node::start();
    let owner = node.customer();
    let made = owner.post("/v1/clouds", &json!({ "name": "audited" })).await.data(201);
    let reader = new_key(&owner, json!({ "name": "r", "scopes": ["clouds:read"] })).await;
    let reader = node.caller(text(&reader["key"]));
    for _ in 0..5 {
        reader
            .post("/v1/clouds", &json!({ "name": "no" }))
            .await
            .refused(403, "INSUFFICIENT_SCOPE");
    }
    let rows = owner.get("/v1/audit-log?action=createCloud&outcome=succeeded").await.data(200);
    let row = &rows["items"][0];
    assert_eq!(row["target"], "/v1/clouds");
    assert_eq!(row["actor"]["type"], "api_key");
    assert_eq!(row["actor"]["ip"], "127.0.0.1");
    assert!(text(&row["request_id"]).starts_with("req_"));
    assert_eq!(text(&row["hash"]).len(), 64);
    let path = "/v1/audit-log?outcome=INSUFFICIENT_SCOPE";
    eventually("refused calls are summed up", async || {
        let rows = owner.get(path).await.data(200);
        let rows = rows["items"].as_array().cloned().unwrap_or_default();
        let sum: u64 = rows.iter().filter_map(|row| row["count"].as_u64()).sum();
        if sum == 5 && rows.len() < 5 { Ok(()) } else { Err(format!("{rows:?}")) }
    })
    .await;
    assert!(made["id"].is_string());
    check_chain(&owner).await;
    owner.get("/v1/audit-log?limit=1").await.data(200);
    owner.get("/v1/audit-log?since=yesterday").await.refused(400, "VALIDATION_ERROR");
    reader.get("/v1/audit-log").await.refused(403, "INSUFFICIENT_SCOPE");
}

#[tokio::test]
async fn changes_that_are_turned_away_at_the_door_are_in_the_audit_log() {
    let node = Node::start();
    let owner = node.customer();
    let bound = new_key(&owner, json!({ "name": "b", "allowed_ips": ["203.0.113.1"] })).await;
    let slow = new_key(&owner, json!({ "name": "s", "rate_limit": 1 })).await;
    let cloud = json!({ "name": "never" });
    for (key, code, status) in [(&bound, "IP_NOT_ALLOWED", 403), (&slow, "RATE_LIMITED", 429)] {
        let caller = node.caller(text(&key["key"]));
        // Reads are not written down, so one more or less of them says nothing.
        caller.get("/v1/clouds").await;
        caller.post("/v1/clouds", &cloud).await.refused(status, code);
        let path = format!("/v1/audit-log?action=createCloud&outcome={code}");
        eventually("it is written down", async || {
            let rows = owner.get(&path).await.data(200);
            let actors: Vec<_> = rows["items"].as_array().expect("rows").iter().collect();
            match actors.as_slice() {
                [row] if row["actor"]["id"] == key["id"] && row["count"] == 1 => Ok(()),
                rows => Err(format!("{rows:?}")),
            }
        })
        .await;
        // Refused calls of one address within one second are one row.
        tokio::time::sleep(Duration::from_millis(1100)).await;
    }
}

#[tokio::test]
async fn keys_stay_out_of_browsers_and_front_ends_are_let_in_by_name() {
    let node = Node::with(&[("ROOST_HTTP__CORS_ORIGINS", "[\"https://app.example\"]")]);
    let customer = node.customer();
    let with_origin = customer.request(reqwest::Method::GET, "/v1/clouds");
    let answer = customer.send(with_origin.header("origin", "https://app.example")).await;
    answer.refused(403, "IP_NOT_ALLOWED");
    let (email, password) = login_of(&node);
    let tokens = log_in(&customer, &email, &password).await.data(200);
    let person = node.caller(text(&tokens["access_token"]));
    let ask = |origin: &'static str| {
        let request = person.request(reqwest::Method::GET, "/v1/clouds").header("origin", origin);
        person.send(request)
    };
    let allowed = ask("https://app.example").await;
    assert_eq!(allowed.header("access-control-allow-origin"), Some("https://app.example"));
    assert_eq!(ask("https://evil.example").await.header("access-control-allow-origin"), None);
    // A browser asks that for every address; it is no call of a stranger.
    for _ in 0..40 {
        let preflight = person
            .client
            .request(reqwest::Method::OPTIONS, format!("{}/v1/clouds", person.base_url))
            .header("origin", "https://app.example")
            .header("access-control-request-method", "GET");
        let answer = person.send(preflight).await;
        assert_eq!(answer.status, 200);
        assert_eq!(answer.header("access-control-allow-methods"), Some("GET"));
    }
}

/// Reckons the hashes of the audit log again, by the rule of the document: every row is as it was written, and
/// hangs on another one.
async fn check_chain(owner: &Customer) {
    let rows = owner.get("/v1/audit-log?limit=100").await.data(200);
    let rows = rows["items"].as_array().expect("rows");
    assert!(rows.len() > 2, "{rows:?}");
    let is_known = |hash: &Value| rows.iter().any(|row| row["hash"] == *hash);
    for row in rows {
        let (live, count) = (row["livemode"].to_string(), row["count"].to_string());
        let actor = &row["actor"];
        let lines = [
            text(&row["previous_hash"]),
            text(&row["id"]),
            text(&row["created_at"]),
            &live,
            text(&actor["type"]),
            text(&actor["id"]),
            text(&actor["ip"]),
            text(&row["action"]),
            text(&row["target"]),
            text(&row["outcome"]),
            text(&row["request_id"]),
            &count,
        ];
        let hash = Sha256::digest(lines.join("\n"));
        let hash: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(row["hash"], hash, "{row}");
        let before = &row["previous_hash"];
        assert!(is_known(before) || text(before) == "0".repeat(64), "{row}");
    }
    let befores: BTreeSet<&str> = rows.iter().map(|row| text(&row["previous_hash"])).collect();
    assert_eq!(befores.len(), rows.len(), "one chain, without a fork");
}

/// The address of the owner who came with the organization.
async fn first_owner(admin: &Customer) -> String {
    let users = admin.get("/v1/users").await.data(200);
    let mut users = users["items"].as_array().expect("users").iter();
    let owner = users.find(|user| user["role"] == "owner").expect("an owner");
    format!("/v1/users/{}", text(&owner["id"]))
}

#[tokio::test]
async fn nobody_becomes_an_owner_by_an_owners_key_or_through_an_application() {
    let node = Node::start();
    let owner = node.customer();
    let owner_to_be = json!({ "email": "x@example.com", "role": "owner" });
    let owners = new_key(&owner, json!({ "name": "the owner's" })).await;
    let owners = format!("/v1/api-keys/{}", text(&owners["id"]));
    let admin = node.customer().member("admin").await;
    let rotate = format!("{owners}/rotate");
    admin.post(&rotate, &json!({})).await.refused(403, "INSUFFICIENT_SCOPE");
    admin.patch(&owners, &json!({ "name": "x" })).await.refused(403, "INSUFFICIENT_SCOPE");
    let own = new_key(&admin, json!({ "name": "an admin's" })).await;
    let own = format!("/v1/api-keys/{}/rotate", text(&own["id"]));
    let rotated = admin.post(&own, &json!({})).await.data(200);
    let rotated = node.caller(text(&rotated["key"]));
    rotated.post("/v1/invitations", &owner_to_be).await.refused(403, "INSUFFICIENT_SCOPE");
    let first = first_owner(&owner).await;
    admin.patch(&first, &json!({ "name": "x" })).await.refused(403, "INSUFFICIENT_SCOPE");

    let app = App::new(owner.clone(), &node.email, &node.password, false).await;
    let all = json!({ "scopes": ["admin:*"], "name": "a", "redirect_uris": [oauth::BACK] });
    let wide = owner.post("/v1/oauth/applications", &all).await.data(201);
    let (id, secret) = (oauth::text(&wide["client_id"]), oauth::text(&wide["client_secret"]));
    let mut app = app;
    (app.id, app.secret) = (id.clone(), secret);
    let asked = oauth::with(app.asked(), "scope", Some("admin:*"));
    let sent = app.decided(&asked, "allow").await;
    let tokens = app.token(&app.redeeming(&sent.told()["code"])).await;
    assert_eq!(tokens.status, 200, "{:#}", tokens.body);
    let through = node.caller(text(&tokens.body["access_token"]));
    through.post("/v1/invitations", &owner_to_be).await.refused(403, "INSUFFICIENT_SCOPE");
    through.post(&rotate, &json!({})).await.refused(403, "INSUFFICIENT_SCOPE");
    let made = new_key(&through, json!({ "name": "through an application" })).await;
    assert_eq!(made["created_by"], json!(format!("application:{id}")));
    let detour = node.caller(text(&made["key"]));
    detour.post("/v1/invitations", &owner_to_be).await.refused(403, "INSUFFICIENT_SCOPE");
}

#[tokio::test]
async fn a_key_with_limits_makes_and_changes_keys_within_them_alone() {
    let node = Node::start();
    let owner = node.customer();
    let free = new_key(&owner, json!({ "name": "free" })).await;
    let free = format!("/v1/api-keys/{}", text(&free["id"]));
    let limits = json!({
        "name": "limited", "allowed_ips": ["127.0.0.0/8"], "expires_at": "2190-01-01T00:00:00Z",
    });
    let limited = new_key(&owner, limits).await;
    let (path, me) =
        (format!("/v1/api-keys/{}", text(&limited["id"])), node.caller(text(&limited["key"])));
    let heir = new_key(&me, json!({ "name": "heir" })).await;
    assert_eq!(heir["allowed_ips"], json!(["127.0.0.0/8"]));
    assert_eq!(heir["expires_at"], limited["expires_at"]);
    let narrow =
        json!({ "name": "n", "allowed_ips": ["127.0.0.1"], "expires_at": "2180-01-01T00:00:00Z" });
    assert_eq!(new_key(&me, narrow).await["allowed_ips"], json!(["127.0.0.1"]));
    for wide in [
        json!({ "allowed_ips": ["0.0.0.0/0"] }),
        json!({ "allowed_ips": ["127.0.0.1", "10.0.0.1"] }),
        json!({ "expires_at": "2191-01-01T00:00:00Z" }),
    ] {
        let mut new = wide.clone();
        new["name"] = json!("wide");
        me.post("/v1/api-keys", &new).await.refused(403, "INSUFFICIENT_SCOPE");
        me.patch(&path, &wide).await.refused(403, "INSUFFICIENT_SCOPE");
    }
    // Nor by a detour: people and applications have no limits of this kind.
    owner.member("viewer").await;
    let people = owner.get("/v1/users").await.data(200);
    let mut people = people["items"].as_array().expect("people").iter();
    let viewer = people.find(|person| person["role"] == "viewer").expect("the viewer");
    let member = format!("/v1/users/{}", text(&viewer["id"]));
    let app =
        json!({ "name": "app", "redirect_uris": ["https://x.example"], "scopes": ["agents:read"] });
    let invited = json!({ "email": "detour@example.com", "role": "viewer" });
    me.post("/v1/oauth/applications", &app).await.refused(403, "INSUFFICIENT_SCOPE");
    me.post("/v1/invitations", &invited).await.refused(403, "INSUFFICIENT_SCOPE");
    for change in [json!({ "role": "admin" }), json!({ "email": "detour@example.com" })] {
        me.patch(&member, &change).await.refused(403, "INSUFFICIENT_SCOPE");
    }
    me.patch(&member, &json!({ "name": "Ada" })).await.data(200);
    let patched = me.patch(&path, &json!({ "allowed_ips": null, "expires_at": null })).await;
    let patched = patched.data(200);
    assert_eq!(patched["allowed_ips"], json!(["127.0.0.0/8"]), "it does not free itself");
    assert_eq!(patched["expires_at"], limited["expires_at"]);
    me.post(&format!("{free}/rotate"), &json!({})).await.refused(403, "INSUFFICIENT_SCOPE");
    me.patch(&free, &json!({ "name": "x" })).await.refused(403, "INSUFFICIENT_SCOPE");
}

#[tokio::test]
async fn what_people_do_before_they_have_credentials_is_in_the_audit_log() {
    let node = Node::start();
    let (owner, (email, password)) = (node.customer(), login_of(&node));
    node.customer().member("viewer").await;
    log_in(&owner, &email, "a wrong one").await.refused(401, "INVALID_CREDENTIALS");
    let tokens = log_in(&owner, &email, &password).await.data(200);
    let refresh = json!({ "refresh_token": tokens["refresh_token"] });
    let next = owner.anonymous("/v1/auth/refresh", &refresh).await.data(200);
    let next = json!({ "refresh_token": next["refresh_token"] });
    owner.anonymous("/v1/auth/refresh", &next).await.data(200);
    // What is refused within one second is one row.
    tokio::time::sleep(Duration::from_millis(1100)).await;
    owner.anonymous("/v1/auth/refresh", &refresh).await.refused(401, "REFRESH_TOKEN_REUSED");
    for (action, outcome, kind) in [
        ("acceptInvitation", "succeeded", "user"),
        ("login", "succeeded", "user"),
        ("login", "INVALID_CREDENTIALS", "anonymous"),
        ("refreshToken", "succeeded", "user"),
        ("refreshToken", "REFRESH_TOKEN_REUSED", "user"),
    ] {
        let path = format!("/v1/audit-log?action={action}&outcome={outcome}");
        eventually(action, async || {
            let rows = owner.get(&path).await.data(200);
            let actor = &rows["items"][0]["actor"];
            match actor["type"] == kind && actor["ip"] == "127.0.0.1" {
                true => Ok(()),
                false => Err(format!("{rows:#}")),
            }
        })
        .await;
    }
}

#[tokio::test]
async fn what_is_refused_in_test_mode_is_summed_up_apart() {
    let node = Node::start();
    let (owner, tester) = (node.customer(), node.tester());
    for _ in 0..3 {
        tester.post("/v1/clouds", &json!({ "name": 1 })).await.refused(400, "VALIDATION_ERROR");
        owner.post("/v1/clouds", &json!({ "name": 1 })).await.refused(400, "VALIDATION_ERROR");
    }
    for who in [&owner, &tester] {
        eventually("three of its own", async || {
            let rows = who.get("/v1/audit-log?outcome=VALIDATION_ERROR").await.data(200);
            let rows = rows["items"].as_array().cloned().unwrap_or_default();
            let sum: u64 = rows.iter().filter_map(|row| row["count"].as_u64()).sum();
            if sum == 3 { Ok(()) } else { Err(format!("{rows:?}")) }
        })
        .await;
    }
}

#[tokio::test]
async fn guessing_the_password_of_a_session_is_paused_like_guessing_at_the_door() {
    let node = Node::start();
    let (owner, (email, password)) = (node.customer(), login_of(&node));
    let tokens = log_in(&owner, &email, &password).await.data(200);
    let person = node.caller(text(&tokens["access_token"]));
    let change =
        |current: &str| json!({ "current_password": current, "new_password": "battery staple" });
    for _ in 0..5 {
        let answer = person.post("/v1/auth/password", &change("a wrong one")).await;
        answer.refused(401, "INVALID_CREDENTIALS");
    }
    person.post("/v1/auth/password", &change(&password)).await.refused(429, "LOGIN_THROTTLED");
    log_in(&owner, &email, &password).await.refused(429, "LOGIN_THROTTLED");
    let body = json!({ "email": email, "password": password, "mode": "test" });
    owner.anonymous("/v1/auth/login", &body).await.refused(429, "LOGIN_THROTTLED");
}

#[tokio::test]
async fn small_promises_of_identity_hold() {
    let node = Node::start();
    let owner = node.customer();
    let answer = node.caller("ic_live_nonsense").get("/v1/agents").await;
    assert_eq!(answer.status, 401);
    assert!(answer.header("www-authenticate").is_some_and(|how| how.starts_with("Bearer")));
    let person = owner.organization("one", "pro").await;
    let org = person.get("/v1/auth/me").await.data(200)["org_id"].clone();
    let taken = json!({ "name": "DEFAULT" });
    let path = format!("/v1/organizations/{}", text(&org));
    owner.patch(&path, &taken).await.refused(409, "ORGANIZATION_NAME_TAKEN");
    owner.patch(&path, &json!({ "name": "One" })).await.data(200);
    let body = json!({ "email": "one@example.com", "password": "a long password", "mode": "test" });
    let tokens = owner.anonymous("/v1/auth/login", &body).await.data(200);
    let tester = node.caller(text(&tokens["access_token"]));
    let change = json!({ "current_password": "a long password", "new_password": "battery staple" });
    tester.post("/v1/auth/password", &change).await.refused(403, "INSUFFICIENT_SCOPE");
}

#[tokio::test]
async fn a_change_that_is_repeated_under_its_key_is_answered_as_before() {
    let node = Node::start();
    let owner = node.customer();
    let made = new_key(&owner, json!({ "name": "k" })).await;
    let path = format!("/v1/api-keys/{}", text(&made["id"]));
    let send = |method: reqwest::Method, key: &'static str, etag: Option<&Value>| {
        let request = owner.request(method, &path).header("idempotency-key", key);
        let request = match etag {
            Some(etag) => request
                .header("if-match", text(etag).to_owned())
                .json(&json!({ "name": "another" })),
            None => request,
        };
        owner.send(request)
    };
    let etag = owner.get(&path).await.header("etag").map(str::to_owned).expect("an etag");
    let etag = json!(etag);
    let first = send(reqwest::Method::PATCH, "patch", Some(&etag)).await.data(200);
    let again = send(reqwest::Method::PATCH, "patch", Some(&etag)).await;
    assert_eq!(again.header("idempotency-replayed"), Some("true"));
    assert_eq!(again.data(200), first);
    send(reqwest::Method::PATCH, "another", Some(&etag)).await.refused(409, "STALE_OBJECT");
    for _ in 0..2 {
        send(reqwest::Method::DELETE, "delete", None).await.data(200);
    }
    send(reqwest::Method::DELETE, "other", None).await.refused(404, "API_KEY_NOT_FOUND");
}

#[tokio::test]
async fn a_patch_removes_what_can_be_removed_and_refuses_the_rest() {
    let node = Node::start();
    let owner = node.customer();
    let wanted = json!({ "name": "k", "expires_at": "9999-12-31T23:59:59Z", "rate_limit": 100 });
    let made = new_key(&owner, wanted).await;
    assert_eq!(made["expires_at"], "9999-12-31T23:59:59.999Z");
    let path = format!("/v1/api-keys/{}", text(&made["id"]));
    let freed = owner.patch(&path, &json!({ "expires_at": null, "rate_limit": null })).await;
    let freed = freed.data(200);
    assert_eq!((&freed["expires_at"], &freed["rate_limit"]), (&json!(null), &json!(null)));
    for field in ["name", "scopes"] {
        owner.patch(&path, &json!({ field: null })).await.refused(400, "VALIDATION_ERROR");
    }
    let users = owner.get("/v1/users").await.data(200);
    let path = format!("/v1/users/{}", text(&users["items"][0]["id"]));
    assert_eq!(owner.patch(&path, &json!({ "name": "Ada" })).await.data(200)["name"], "Ada");
    assert_eq!(owner.patch(&path, &json!({ "name": null })).await.data(200)["name"], json!(null));
    owner.patch(&path, &json!({ "role": null })).await.refused(400, "VALIDATION_ERROR");
    let hook = json!({ "url": "https://hooks.example/x", "events": ["*"], "rate_limit_per_s": 5 });
    let hook = owner.post("/v1/webhooks", &hook).await.data(201);
    assert_eq!(hook["rate_limit_per_s"], 5);
    let path = format!("/v1/webhooks/{}", text(&hook["id"]));
    let hook = owner.patch(&path, &json!({ "rate_limit_per_s": null })).await.data(200);
    assert_eq!(hook["rate_limit_per_s"], json!(null));
}

#[tokio::test]
async fn passwords_are_not_tried_on_the_account_of_a_key() {
    let node = Node::start();
    let owner = node.customer();
    let mut refused = 0;
    for attempt in 0..40 {
        let guess = json!({ "email": format!("{attempt}@example.com"), "password": "a guess" });
        // With a good key at hand.
        let answer = owner.post("/v1/auth/login", &guess).await;
        assert!([401, 429].contains(&answer.status), "{answer:?}");
        refused += usize::from(answer.code() == "RATE_LIMITED");
    }
    assert_eq!(refused, 10);
    owner.get("/v1/clouds").await.data(200);
}
