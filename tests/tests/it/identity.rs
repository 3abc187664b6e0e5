//! Who may do what: keys, people, roles and organizations.

use std::time::Duration;

use serde_json::{Value, json};
use tests::{Customer, Node, eventually, source::ECHO};

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

#[tokio::test]
async fn tokens_of_others_are_not_taken() {
    let node = Node::with(&[("ROOST_RATE_LIMIT__UNAUTHENTICATED_PER_MINUTE", "1000")]);
    let customer = node.customer();
    let (email, password) = login_of(&node);
    let tokens = log_in(&customer, &email, &password).await.data(200);
    let good = text(&tokens["access_token"]).to_owned();
    let parts: Vec<&str> = good.split('.').collect();
    let encode = |value: &Value| tests::base64url(value.to_string().as_bytes());
    let decode = |part: &str| -> Value {
        serde_json::from_slice(&tests::from_base64url(part)).expect("JSON")
    };
    let (header, claims) = (decode(parts[0]), decode(parts[1]));
    for name in ["sub", "email", "org", "scopes", "iat", "exp", "iss", "jti", "aud", "sid"] {
        assert!(claims.get(name).is_some(), "{name} is missing: {claims}");
    }
    assert_eq!(header["alg"], "EdDSA");
    let mut forged = vec![];
    for alg in ["none", "None", "NONE", "HS256", "RS256", "ES256", "PS256", "EdDSA2"] {
        let mut other = header.clone();
        other["alg"] = json!(alg);
        forged.push(format!("{}.{}.{}", encode(&other), parts[1], parts[2]));
        forged.push(format!("{}.{}.", encode(&other), parts[1]));
    }
    for (name, value) in [
        ("org", json!("org_00000000000000000000000000")),
        ("scopes", json!(["admin:*"])),
        ("exp", json!(9_999_999_999_u64)),
        ("sub", json!("usr_00000000000000000000000001")),
        ("iss", json!("https://evil.example")),
    ] {
        let mut other = claims.clone();
        other[name] = value;
        forged.push(format!("{}.{}.{}", parts[0], encode(&other), parts[2]));
    }
    for (name, value) in [
        ("kid", json!("0000000000000000")),
        ("kid", json!("../../keys")),
        ("kid", Value::Null),
        ("jwk", json!({ "kty": "OKP", "crv": "Ed25519", "x": "AAAA" })),
        ("crit", json!(["exp"])),
    ] {
        let mut other = header.clone();
        other[name] = value;
        forged.push(format!("{}.{}.{}", encode(&other), parts[1], parts[2]));
    }
    forged.push(format!("{}.{}", parts[0], parts[1]));
    forged.push(format!("{good}.{}", parts[2]));
    forged.push(format!("{good}A"));
    forged.push(format!("{}.{}.{}", parts[0], "e".repeat(10_000), parts[2]));
    forged.push("ey..".to_owned());
    assert!(forged.len() >= 30);
    for token in &forged {
        let answer = node.caller(token).get("/v1/clouds").await;
        assert_eq!(answer.status, 401, "{token}");
    }
    node.caller(&good).get("/v1/clouds").await.data(200);
    let jwks = customer.bare("/.well-known/jwks.json").await;
    assert_eq!(jwks["keys"][0]["kid"], header["kid"]);
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
    let users = admin.get("/v1/users").await.data(200);
    let first = users["items"].as_array().expect("users").iter().find(|u| u["role"] == "owner");
    let first = format!("/v1/users/{}", text(&first.expect("an owner")["id"]));
    let theirs = json!({ "email": "y@example.com" });
    admin.patch(&first, &theirs).await.refused(403, "INSUFFICIENT_SCOPE");
    admin.delete(&first).await.refused(403, "INSUFFICIENT_SCOPE");
    owner.delete(&first).await.refused(409, "INVALID_STATE");
    let taken = json!({ "email": "ada@example.com" });
    owner.patch(&first, &taken).await.refused(409, "EMAIL_TAKEN");

    let change = json!({ "current_password": "correct horse", "new_password": "battery staple" });
    tokio::time::sleep(Duration::from_millis(1100)).await;
    admin.post("/v1/auth/password", &change).await.data(200);
    admin.get("/v1/users").await.refused(401, "INVALID_API_KEY");
    log_in(&owner, "ada@example.com", "correct horse").await.refused(401, "INVALID_CREDENTIALS");
    tokio::time::sleep(Duration::from_millis(1100)).await;
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

#[tokio::test]
async fn what_belongs_to_others_takes_as_long_as_what_is_not_there() {
    let node = Node::with(&[("ROOST_RATE_LIMIT__TIERS__ENTERPRISE", "1000000/100000000")]);
    let first = node.customer();
    let wanted = json!({
        "name": "Second", "tier": "enterprise", "owner_email": "bob@example.com",
        "owner_password": "a long password",
    });
    first.post("/v1/organizations", &wanted).await.data(201);
    let tokens = log_in(&first, "bob@example.com", "a long password").await.data(200);
    let second = node.caller(text(&tokens["access_token"]));
    let hook = json!({ "url": "https://example.com/hook", "events": ["*"] });
    let hook = first.post("/v1/webhooks", &hook).await.data(201);
    for foreign in [
        format!("/v1/clouds/{}", first.cloud().await),
        format!("/v1/webhooks/{}", text(&hook["id"])),
    ] {
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
    eventually("refused calls are summed up", Duration::from_secs(10), async || {
        let rows = owner.get(path).await.data(200);
        let rows = rows["items"].as_array().cloned().unwrap_or_default();
        let sum: u64 = rows.iter().filter_map(|row| row["count"].as_u64()).sum();
        if sum == 5 && rows.len() < 5 { Ok(()) } else { Err(format!("{rows:?}")) }
    })
    .await;
    assert!(made["id"].is_string());
    owner.get("/v1/audit-log?limit=1").await.data(200);
    owner.get("/v1/audit-log?since=yesterday").await.refused(400, "VALIDATION_ERROR");
    reader.get("/v1/audit-log").await.refused(403, "INSUFFICIENT_SCOPE");
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
    let preflight = person
        .client
        .request(reqwest::Method::OPTIONS, format!("{}/v1/clouds", person.base_url))
        .header("origin", "https://app.example")
        .header("access-control-request-method", "GET");
    let answer = person.send(preflight).await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("access-control-allow-methods"), Some("GET"));
}
