//! Two hundred secrets of every kind go in, by right ways and wrong ones; none is found anywhere afterwards.

use std::{io::Write as _, path::Path, process::Command};

use serde_json::{Value, json};
use tests::{
    Answer, Customer, Node,
    oauth::{App, text},
    source::ECHO,
};

/// Secrets that a story gave away or was given.
#[derive(Default)]
struct Canaries(Vec<String>);

impl Canaries {
    /// A new one to give away.
    fn hatch(&mut self, kind: &str) -> String {
        let canary = format!("canary-{kind}-{:04}-2c9f81d7", self.0.len());
        self.0.push(canary.clone());
        canary
    }

    /// One that was given.
    fn got(&mut self, value: &Value) {
        let text = text(value);
        assert!(text.len() >= 16, "a secret: {value}");
        self.0.push(text);
    }
}

/// Secrets, settings of agents, credentials of registries, keys of receivers.
async fn give(me: &Customer, agent: &str, canaries: &mut Canaries) {
    for number in 0..60 {
        let value = json!({ "value": canaries.hatch("secret") });
        me.put(&format!("/v1/secrets/NAME_{number}"), &value).await.data(200);
    }
    for number in 0..30 {
        let value = canaries.hatch("environment");
        let name = format!("API_TOKEN_{number}");
        let change = json!({ "environment": { name: value } });
        me.patch(&format!("/v1/agents/{agent}"), &change).await.data(200);
    }
    for number in 0..20 {
        let url = format!("https://example.com/{number}");
        let hook =
            json!({ "url": url, "events": ["agent.failed"], "secret": canaries.hatch("hook") });
        let made = me.post("/v1/webhooks", &hook).await.data(201);
        me.delete(&format!("/v1/webhooks/{}", text(&made["id"]))).await.data(200);
    }
    for number in 0..10 {
        let credentials = json!({ "username": "u", "password": canaries.hatch("registry") });
        let source =
            json!({ "type": "docker", "image": "127.0.0.1:9/none:1", "credentials": credentials });
        let wanted = json!({
            "name": format!("pulled-{number}"), "cloud_id": me.cloud().await, "source": source,
        });
        let answer = me.post("/v1/agents", &wanted).await;
        assert!(matches!(answer.status, 201 | 400), "{:#}", answer.body);
    }
}

/// Keys, people, tokens and applications.
async fn identify(node: &Node, canaries: &mut Canaries) {
    let me = node.customer();
    for number in 0..20 {
        let made = me.post("/v1/api-keys", &json!({ "name": format!("k{number}") })).await;
        canaries.got(&made.data(201)["key"]);
    }
    for number in 0..10 {
        let email = format!("p{number}@example.com");
        let asked = json!({ "email": email, "role": "viewer" });
        let invitation = me.post("/v1/invitations", &asked).await.data(201);
        canaries.got(&invitation["token"]);
        let password = canaries.hatch("password");
        let accept = json!({ "token": invitation["token"], "password": password });
        me.anonymous("/v1/invitations/accept", &accept).await.data(201);
        let wrong = json!({ "email": email, "password": canaries.hatch("guess") });
        me.anonymous("/v1/auth/login", &wrong).await.refused(401, "INVALID_CREDENTIALS");
        let login = json!({ "email": email, "password": password });
        let tokens = me.anonymous("/v1/auth/login", &login).await.data(200);
        canaries.got(&tokens["access_token"]);
        canaries.got(&tokens["refresh_token"]);
        let app = json!({
            "name": format!("a{number}"), "redirect_uris": ["https://app.example/back"],
            "scopes": ["agents:read"],
        });
        let app = me.post("/v1/oauth/applications", &app).await.data(201);
        canaries.got(&app["client_secret"]);
    }
}

/// Codes of people who let an application in: some are traded for tokens, some are wrong, some lie about.
async fn let_in(node: &Node, canaries: &mut Canaries) {
    let app = App::new(node.customer(), &node.email, &node.password, false).await;
    canaries.0.extend([app.secret.clone(), node.password.clone(), app.customer.key.clone()]);
    for number in 0..10 {
        let code = app.code().await;
        canaries.0.push(code.clone());
        if number % 2 == 0 {
            let tokens = app.token(&app.redeeming(&code)).await.data(200);
            canaries.got(&tokens["access_token"]);
            canaries.got(&tokens["refresh_token"]);
        }
        let wrong = app.redeeming(&canaries.hatch("code"));
        app.token(&wrong).await.refused(400, "INVALID_GRANT");
    }
}

/// The same in places where they do not belong.
async fn misplace(me: &Customer, agent: &str, canaries: &mut Canaries) {
    for (path, field) in [
        ("/v1/secrets/WRONG", "valeu"),
        ("/v1/webhooks", "secrets"),
        ("/v1/api-keys", "key"),
        ("/v1/agents", "password"),
    ] {
        let body = json!({ field: canaries.hatch("misplaced") });
        let method = if path.contains("/secrets/") { "PUT" } else { "POST" };
        let method = method.parse().expect("a method");
        refused(&me.send(me.request(method, path).json(&body)).await);
    }
    let value = json!({ "value": { "nested": canaries.hatch("nested") } });
    refused(&me.put("/v1/secrets/NESTED", &value).await);
    for (path, field) in [("/v1/auth/refresh", "refresh_token"), ("/v1/auth/login", "email")] {
        let mut body = json!({ "email": "o@example.com", "password": canaries.hatch("cut") });
        body[field] = json!({ "is": canaries.hatch("wrapped") });
        refused(&me.anonymous(path, &body).await);
    }
    let bearer = canaries.hatch("bearer");
    let mut stranger = me.clone();
    stranger.key = bearer;
    let answer = stranger.get("/v1/agents").await;
    shows_nothing(&answer);
    answer.refused(401, "INVALID_API_KEY");
    let input = json!({ "input": 1, "headers": { "authorization": canaries.hatch("header") } });
    let answer = me.post(&format!("/v1/agents/{agent}/invoke"), &input).await;
    assert!(answer.status < 500, "{:#}", answer.body);
}

/// What is wrong is named, never repeated.
fn refused(answer: &Answer) {
    assert_eq!(answer.status, 400, "{:#}", answer.body);
    shows_nothing(answer);
}

fn shows_nothing(answer: &Answer) {
    assert!(!answer.body.to_string().contains("canary"), "{:#}", answer.body);
}

#[tokio::test]
async fn two_hundred_secrets_are_found_nowhere() {
    let said = tempfile::NamedTempFile::new().expect("a file");
    let mut node = Node::saying_into(
        said.reopen().expect("the file"),
        &[("ROOST_RATE_LIMIT__UNAUTHENTICATED_PER_MINUTE", "100000"), ("ROOST_LOG", "debug")],
    );
    let me = node.customer();
    let agent = me.deploy("careful", &[("agent.py", ECHO)]).await;
    let mut canaries = Canaries::default();
    give(&me, &agent, &mut canaries).await;
    identify(&node, &mut canaries).await;
    let_in(&node, &mut canaries).await;
    misplace(&me, &agent, &mut canaries).await;
    assert!(canaries.0.len() >= 200, "{} secrets", canaries.0.len());

    for path in [
        "/v1/secrets",
        "/v1/agents",
        "/v1/webhooks",
        "/v1/api-keys",
        "/v1/users",
        "/v1/invitations",
        "/v1/oauth/applications",
        "/v1/events",
        "/v1/audit-log",
    ] {
        let shown = me.get(&format!("{path}?limit=100")).await.data(200).to_string();
        let found = canaries.0.iter().find(|canary| shown.contains(canary.as_str()));
        assert_eq!(found, None, "{path} shows it");
    }
    let shown = me.get(&format!("/v1/agents/{agent}/logs?limit=1000")).await.data(200).to_string();
    assert!(!canaries.0.iter().any(|canary| shown.contains(canary.as_str())), "{shown}");

    let limits = std::fs::read_to_string(format!("/proc/{}/limits", node.pid())).expect("limits");
    let core = limits.lines().find(|line| line.starts_with("Max core file size")).expect("a line");
    let words: Vec<&str> = core.split_whitespace().collect();
    assert_eq!(words[4..6], ["0", "0"], "it leaves no core file");
    let data = std::sync::Arc::clone(&node.data);
    let places = [data.path(), said.path()];
    assert_eq!(found_in(&canaries.0, &places), "", "on disk, or in what the node says");
    // The search does find what is no secret.
    assert!(found_in(&["careful".to_owned()], &places).contains("raft.wal"));
    // An end at which others leave a core file.
    let works_in = std::fs::read_link(format!("/proc/{}/cwd", node.pid())).expect("a folder");
    let abort = Command::new("kill").args(["-ABRT", &node.pid().to_string()]).status();
    assert!(abort.is_ok_and(|status| status.success()));
    while !node.has_ended() {
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    for folder in [works_in.as_path(), data.path()] {
        let files = std::fs::read_dir(folder).expect("a folder").flatten();
        let cores: Vec<_> =
            files.filter(|file| file.file_name().to_string_lossy().starts_with("core")).collect();
        assert!(cores.is_empty(), "{cores:?}");
    }
    assert_eq!(found_in(&canaries.0, &places), "", "after its end");
    let said = std::fs::read_to_string(said.path()).expect("what it said");
    assert!(!said.is_empty(), "it says something");
}

/// The files that have one of these words.
fn found_in(words: &[String], places: &[&Path]) -> String {
    let mut list = tempfile::NamedTempFile::new().expect("a file");
    list.write_all(words.join("\n").as_bytes()).expect("written");
    let mut grep = Command::new("grep");
    grep.args(["-rlaF", "-f"]).arg(list.path()).args(places);
    String::from_utf8_lossy(&grep.output().expect("grep runs").stdout).into_owned()
}
