//! Wrong requests: each is refused with its status and code, and changes nothing.

use reqwest::Method;
use serde_json::{Value, json};
use tests::{
    Node,
    source::{self, ECHO},
};

use crate::bodies::everything;

/// A valid body with one member replaced; the path is dotted.
fn with(body: &Value, path: &str, value: Value) -> Value {
    let mut body = body.clone();
    let pointer = format!("/{}", path.replace('.', "/"));
    if let Some((parent, name)) = pointer.rsplit_once('/') {
        if body.pointer(parent).is_none_or(|parent| !parent.is_object()) {
            let (grand, missing) = parent.rsplit_once('/').expect("a dotted path");
            body.pointer_mut(grand).expect("an object")[missing] = json!({});
        }
        body.pointer_mut(parent).expect("an object")[name] = value;
    }
    body
}

fn without(body: &Value, name: &str) -> Value {
    let mut body = body.clone();
    body.as_object_mut().expect("an object").remove(name);
    body
}

fn nested(depth: usize) -> String {
    format!("{}1{}", "[".repeat(depth), "]".repeat(depth))
}

/// Values that are wrong for a text of at most 63 characters of a name's alphabet.
fn no_names() -> Vec<Value> {
    ["", "-a", "a-", "a b", "ä", "a/b", "a\u{0}b", ".", "a\n"]
        .into_iter()
        .map(Value::from)
        .chain([json!(null), json!(1), json!(true), json!([]), json!({}), json!("x".repeat(64))])
        .collect()
}

/// Values that are wrong for a whole number in `least..=most`.
fn no_numbers(least: i64, most: i64) -> Vec<Value> {
    vec![
        json!(least - 1),
        json!(most + 1),
        json!(1.5),
        json!("1"),
        json!(true),
        json!([]),
        json!({}),
        json!(-1e300),
        json!(1e300),
    ]
}

fn agent_cases(good: &Value) -> Vec<(Value, &'static str)> {
    let mut cases = vec![];
    let mut wrong = |body| cases.push((body, "VALIDATION_ERROR"));
    no_names().into_iter().for_each(|name| wrong(with(good, "name", name)));
    for name in ["name", "cloud_id", "source"] {
        wrong(without(good, name));
    }
    for field in ["cloud_id", "display_name"] {
        for value in [json!(1), json!([]), json!({}), json!("x".repeat(300))] {
            wrong(with(good, field, value));
        }
    }
    no_numbers(1, 64).into_iter().for_each(|value| wrong(with(good, "resources.cpu", value)));
    no_numbers(64, 262_144)
        .into_iter()
        .for_each(|value| wrong(with(good, "resources.memory_mb", value)));
    no_numbers(0, 100)
        .into_iter()
        .for_each(|value| wrong(with(good, "scaling.min_instances", value)));
    no_numbers(1, 100)
        .into_iter()
        .for_each(|value| wrong(with(good, "scaling.max_instances", value)));
    no_numbers(10, 95)
        .into_iter()
        .for_each(|value| wrong(with(good, "scaling.target_cpu_percent", value)));
    wrong(with(good, "scaling", json!({ "min_instances": 5, "max_instances": 4 })));
    for gpu in
        [json!(0), json!(-1), json!([]), json!(""), json!({ "kind": 1 }), json!({ "type": 1 })]
    {
        wrong(with(good, "resources.gpu", gpu));
    }
    for section in ["resources", "scaling", "runtime", "environment", "metadata", "source"] {
        for value in [json!(1), json!("x"), json!([]), json!(true)] {
            wrong(with(good, section, value));
        }
    }
    for unknown in ["frobnicate", "resources.cpus", "scaling.min", "runtime.lang", "source.url"] {
        wrong(with(good, unknown, json!(1)));
    }
    for name in ["1A", "A-B", "", "A B", "Ä", "PORT", "ROOST_X", "A=B"] {
        wrong(with(good, "environment", json!({ name: "x" })));
    }
    wrong(with(good, "environment", json!({ "A": 1 })));
    wrong(with(good, "environment", json!({ "A": "x".repeat(65 * 1024) })));
    wrong(with(good, "environment", json!({ "A": "a\u{0}b" })));
    let many: serde_json::Map<_, _> = (0..101).map(|n| (format!("V{n}"), json!("x"))).collect();
    wrong(with(good, "environment", Value::Object(many)));
    wrong(with(good, "metadata", json!({ "": "x" })));
    wrong(with(good, "metadata", json!({ "x".repeat(41): "x" })));
    wrong(with(good, "metadata", json!({ "a": "x".repeat(501) })));
    let many: serde_json::Map<_, _> = (0..51).map(|n| (format!("k{n}"), json!("x"))).collect();
    wrong(with(good, "metadata", Value::Object(many)));
    for source in [
        json!({}),
        json!({ "type": "ftp" }),
        json!({ "type": "github" }),
        json!({ "type": "github", "repo": "no-slash" }),
        json!({ "type": "github", "repo": "a/b/c" }),
        json!({ "type": "github", "repo": "../etc/passwd" }),
        json!({ "type": "github", "repo": "a/b", "branch": "-x" }),
        json!({ "type": "github", "repo": "a/b", "branch": "a b" }),
        json!({ "type": "github", "repo": "a/b", "path": "../up" }),
        json!({ "type": "github", "repo": "a/b", "path": "/abs" }),
        json!({ "type": "github", "repo": "a/b", "image": "x" }),
        json!({ "type": "docker" }),
        json!({ "type": "docker", "image": "x:1" }),
        json!({ "type": "docker", "image": "x:1", "credentials": { "username": "u" } }),
        json!({ "type": "upload" }),
        json!({ "type": "upload", "archive_url": 1 }),
    ] {
        wrong(with(good, "source", source));
    }
    for url in ["", "x"] {
        let code = if url.is_empty() { "VALIDATION_ERROR" } else { "INVALID_ARCHIVE_URL" };
        cases.push((with(good, "source.archive_url", json!(url)), code));
    }
    let signed = good["source"]["archive_url"].as_str().expect("an address");
    for url in
        ["https://example.com/a.tgz", "file:///etc/passwd", "http://169.254.169.254/", "upl_x"]
    {
        cases.push((with(good, "source.archive_url", json!(url)), "INVALID_ARCHIVE_URL"));
    }
    for (from, to) in
        [("signature=", "signature=0"), ("expires=", "expires=9"), ("/archive?", "/content?")]
    {
        cases.push((
            with(good, "source.archive_url", json!(signed.replace(from, to))),
            "INVALID_ARCHIVE_URL",
        ));
    }
    cases.push((with(good, "environment", json!({ "A": "${secrets.NAME}" })), "SECRET_NOT_FOUND"));
    cases
}

#[tokio::test]
async fn wrong_requests_are_refused_and_change_nothing() {
    let node = Node::start();
    let me = node.customer();
    let id = me.deploy("steady", &[("agent.py", ECHO)]).await;
    let good = me.wanted("never", &[("agent.py", ECHO)]).await;
    let before = everything(&me).await;
    let mut tried = 0;
    for (body, code) in agent_cases(&good) {
        let answer = me.post("/v1/agents", &body).await;
        assert_eq!(
            (answer.status, answer.body["error"]["code"].as_str()),
            (400, Some(code)),
            "{body}\n{:#}",
            answer.body
        );
        if code == "VALIDATION_ERROR" {
            let fields =
                answer.body["error"]["details"]["fields"].as_array().cloned().unwrap_or_default();
            assert!(
                fields
                    .iter()
                    .all(|field| field["field"].is_string() && field["message"].is_string()),
                "{:#}",
                answer.body
            );
            assert!(!fields.is_empty(), "{:#}", answer.body);
        }
        tried += 1;
    }
    let invoke = format!("/v1/agents/{id}/invoke");
    let rollback = format!("/v1/agents/{id}/rollback");
    let redeploy = format!("/v1/agents/{id}/redeploy");
    let agent = format!("/v1/agents/{id}");
    let bodies = [
        (invoke.as_str(), json!({ "inputs": 1 })),
        (&invoke, json!({ "async": "yes" })),
        (&invoke, json!({ "async": 1 })),
        (&invoke, json!({ "options": 1 })),
        (&invoke, json!({ "options": { "timeout": 0 } })),
        (&invoke, json!({ "options": { "timeout": -1 } })),
        (&invoke, json!({ "options": { "timeout": "5" } })),
        (&invoke, json!({ "options": { "timeout_ms": 0 } })),
        (&invoke, json!({ "options": { "timeout": 1, "timeout_ms": 1 } })),
        (&invoke, json!({ "options": { "headers": { "Host": "x" } } })),
        (&invoke, json!({ "options": { "headers": { "Authorization": "x" } } })),
        (&invoke, json!({ "options": { "headers": { "a b": "x" } } })),
        (&invoke, json!({ "options": { "headers": { "X-A": "a\nb" } } })),
        (&invoke, json!({ "options": { "headers": { "X-A": 1 } } })),
        (&invoke, json!({ "options": { "retry": { "max_attempts": 2 } } })),
        (&invoke, json!({ "async": true, "options": { "retry": { "max_attempts": 0 } } })),
        (&invoke, json!({ "async": true, "options": { "retry": { "max_attempts": 11 } } })),
        (&invoke, json!({ "async": true, "options": { "retry": { "on": ["rain"] } } })),
        (&invoke, json!({ "async": true, "options": { "retry": { "backoff": "linear" } } })),
        (&invoke, json!({ "async": true, "options": { "priority": 1 } })),
        (&invoke, json!({ "async": true, "options": { "callback_url": "https://x" } })),
        (&invoke, json!({ "async": true, "options": { "delay": 5 } })),
        (&invoke, json!({ "options": { "session_id": "sess_1" } })),
        (&invoke, json!([])),
        (&invoke, json!("text")),
        (&rollback, json!({})),
        (&rollback, json!({ "version": 1 })),
        (&rollback, json!({ "version": "one" })),
        (&rollback, json!({ "version": "" })),
        (&redeploy, json!({ "strategy": "canary" })),
        (&redeploy, json!({ "strategy": "bluegreen" })),
        (&redeploy, json!({ "canary": {} })),
        (&redeploy, json!({ "no_cache": "no" })),
        (&redeploy, json!({ "source": { "type": "upload" } })),
        ("/v1/clouds", json!({})),
        ("/v1/clouds", json!({ "name": "a b" })),
        ("/v1/clouds", json!({ "name": "a", "provider": "moon" })),
        ("/v1/clouds", json!({ "name": "a", "provider": "sandbox" })),
        ("/v1/clouds", json!({ "name": "a", "provider": "podman" })),
        ("/v1/clouds", json!({ "name": "a", "limits": { "max_agents": -1 } })),
        ("/v1/clouds", json!({ "name": "a", "node_selector": { "zone": "a" } })),
        ("/v1/uploads", json!({})),
        ("/v1/uploads", json!({ "filename": "" })),
        ("/v1/uploads", json!({ "filename": "a", "size_bytes": 0 })),
        ("/v1/uploads", json!({ "filename": "a", "size_bytes": 262_144_001 })),
        ("/v1/uploads", json!({ "filename": "a", "sha256": "ABC" })),
    ];
    for (path, body) in bodies {
        let answer = me.post(path, &body).await;
        assert_eq!(
            (answer.status, answer.body["error"]["code"].as_str()),
            (400, Some("VALIDATION_ERROR")),
            "{path} {body}\n{:#}",
            answer.body
        );
        tried += 1;
    }
    for body in [
        json!({ "name": "new" }),
        json!({ "cloud_id": "x" }),
        json!({ "display_name": "" }),
        json!({ "scaling": { "min_instances": 4 } }),
        json!({ "resources": { "cpu": 0 } }),
        json!({ "metadata": [] }),
        json!({ "status": "running" }),
    ] {
        me.patch(&agent, &body).await.refused(400, "VALIDATION_ERROR");
        tried += 1;
    }
    for query in [
        "limit=0",
        "limit=101",
        "limit=x",
        "limit=-1",
        "sort=size",
        "status=sleeping",
        "created_after=monday",
        "include_total=perhaps",
    ] {
        me.get(&format!("/v1/agents?{query}")).await.refused(400, "VALIDATION_ERROR");
        tried += 1;
    }
    for query in [
        "tail=-1",
        "tail=5001",
        "level=loud",
        "min_level=loud",
        "since=x",
        "until=x",
        "follow=2",
        "stream=x",
        "instance_id=x",
    ] {
        me.get(&format!("{agent}/logs?{query}")).await.refused(400, "VALIDATION_ERROR");
        tried += 1;
    }
    for query in ["status=x", "agent_id=x", "sort=name", "limit=0"] {
        me.get(&format!("/v1/jobs?{query}")).await.refused(400, "VALIDATION_ERROR");
        tried += 1;
    }
    for query in
        ["step=1", "step=x", "from=x", "to=x", "from=2026-01-02T00:00:00Z&to=2026-01-01T00:00:00Z"]
    {
        me.get(&format!("{agent}/metrics?{query}")).await.refused(400, "VALIDATION_ERROR");
        tried += 1;
    }
    for cursor in ["x", "", "AAAA", "%00"] {
        me.get(&format!("/v1/agents?cursor={cursor}")).await.refused(400, "INVALID_CURSOR");
        tried += 1;
    }
    for text in [
        "",
        "{",
        "nonsense",
        "{\"name\": }",
        "{\"a\":1}{",
        "\u{feff}{}",
        "NaN",
        &nested(200),
        &nested(100_000),
    ] {
        let request =
            me.request(Method::POST, "/v1/agents").header("content-type", "application/json");
        me.send(request.body(text.to_owned())).await.refused(400, "INVALID_JSON");
        tried += 1;
    }
    let invalid_utf8: [&[u8]; 2] = [b"{\"name\":\"\xff\"}", b"\xc3\x28"];
    for bytes in invalid_utf8 {
        let request =
            me.request(Method::POST, "/v1/agents").header("content-type", "application/json");
        me.send(request.body(bytes)).await.refused(400, "INVALID_JSON");
        tried += 1;
    }
    for kind in ["text/plain", "application/xml", "application/x-www-form-urlencoded", ""] {
        let request = me.request(Method::POST, "/v1/agents").header("content-type", kind);
        me.send(request.body(good.to_string())).await.refused(415, "UNSUPPORTED_MEDIA_TYPE");
        tried += 1;
    }
    for key in ["", &"k".repeat(256)] {
        let request = me.request(Method::POST, "/v1/clouds").header("idempotency-key", key);
        me.send(request.json(&json!({ "name": "keyed" }))).await.refused(400, "VALIDATION_ERROR");
        tried += 1;
    }
    assert!(tried >= 150, "{tried} wrong requests");
    assert_eq!(everything(&me).await, before, "nothing has changed");
    assert_eq!(me.invoke(&id, &json!(1)).await.data(200)["output"]["echo"], 1);
}

/// A tar of one entry with this name and type.
fn evil_tar(name: &str, kind: tar::EntryType, link: &str) -> Vec<u8> {
    let mut header = tar::Header::new_gnu();
    let bytes = name.as_bytes();
    header.as_gnu_mut().expect("gnu").name[..bytes.len()].copy_from_slice(bytes);
    header.set_entry_type(kind);
    if !link.is_empty() {
        header.set_link_name(link).expect("short");
    }
    header.set_size(0);
    header.set_mode(0o644);
    header.set_cksum();
    let mut builder =
        tar::Builder::new(flate2::write::GzEncoder::new(vec![], flate2::Compression::fast()));
    builder.append(&header, std::io::empty()).expect("packs");
    builder.into_inner().expect("packs").finish().expect("packs")
}

fn bomb() -> Vec<u8> {
    let mut header = tar::Header::new_gnu();
    let size = 800 * 1024 * 1024;
    header.set_size(size);
    header.set_mode(0o644);
    header.set_path("zeros").expect("short");
    header.set_cksum();
    let mut builder =
        tar::Builder::new(flate2::write::GzEncoder::new(vec![], flate2::Compression::fast()));
    builder.append(&header, std::io::Read::take(std::io::repeat(0), size)).expect("packs");
    builder.into_inner().expect("packs").finish().expect("packs")
}

#[tokio::test]
async fn evil_archives_are_refused_and_leave_nothing() {
    let node = Node::start();
    let me = node.customer();
    use tar::EntryType as E;
    let slip = source::zip(&[("../../escaped.py", "x")]);
    let truncated = source::tar_gz(&[("agent.py", ECHO)]);
    let cases: Vec<(&str, Vec<u8>, &str)> = vec![
        ("up", evil_tar("../../up", E::Regular, ""), "leads out"),
        ("absolute", evil_tar("/etc/roost", E::Regular, ""), "leads out"),
        ("symlink", evil_tar("link", E::Symlink, "/etc/passwd"), "neither a file"),
        ("hardlink", evil_tar("link", E::Link, "/etc/passwd"), "neither a file"),
        ("device", evil_tar("null", E::Char, ""), "neither a file"),
        ("fifo", evil_tar("pipe", E::Fifo, ""), "neither a file"),
        ("zip-slip", slip, "leads out"),
        ("garbage", b"not an archive at all".to_vec(), "neither tar.gz"),
        ("truncated", truncated[..truncated.len() / 2].to_vec(), "damaged"),
        ("bomb", bomb(), "more than 750"),
    ];
    for (name, archive, told) in cases {
        let archive_url = me.upload(archive).await;
        let source = json!({ "type": "upload", "archive_url": archive_url });
        let wanted = json!({ "name": name, "cloud_id": me.cloud().await, "source": source });
        let id = me.post("/v1/agents", &wanted).await.data(201)["id"]
            .as_str()
            .expect("an id")
            .to_owned();
        let agent = me.settled(&id, "failed,running").await;
        assert_eq!(agent["status_reason"]["code"], "BUILD_FAILED", "{name}: {agent:#}");
        let message = agent["status_reason"]["message"].to_string();
        assert!(message.contains(told), "{name}: {message}");
    }
    assert!(!node.data.path().parent().expect("a parent").join("escaped.py").exists());
    let left = std::fs::read_dir(node.data.path().join("images")).expect("readable");
    let left: usize = left
        .flatten()
        .filter_map(|agent| std::fs::read_dir(agent.path()).ok())
        .map(Iterator::count)
        .sum();
    assert_eq!(left, 0, "half-built images are left");
}

#[tokio::test]
async fn names_are_lines_of_text() {
    let node = Node::start();
    let me = node.customer();
    for name in ["", " ", "\t\t", "a\u{0}b", "two\nlines"] {
        let app = json!({ "name": name, "redirect_uris": ["https://a.example/"], "scopes": ["agents:read"] });
        let org = json!({
            "name": name, "owner_email": "o@example.com", "owner_password": "a long password",
        });
        let cloud = json!({ "name": "c", "display_name": name });
        for (path, body, field) in [
            ("/v1/api-keys", &json!({ "name": name }), "name"),
            ("/v1/oauth/applications", &app, "name"),
            ("/v1/organizations", &org, "name"),
            ("/v1/clouds", &cloud, "display_name"),
        ] {
            let error = me.post(path, body).await.refused(400, "VALIDATION_ERROR");
            assert_eq!(error["details"]["fields"][0]["field"], field, "{path} {name:?}: {error}");
        }
    }
    me.post("/v1/api-keys", &json!({ "name": " Ünïcode – ok " })).await.data(201);
}

/// RFC 7396: `null` removes; what cannot be removed is refused, never passed over.
#[tokio::test]
async fn null_removes_or_is_refused() {
    let node = Node::start();
    let me = node.customer();
    let wanted = json!({
        "name": "c", "display_name": "C", "limits": { "max_agents": 1 }, "metadata": { "a": "1" },
    });
    let cloud = me.post("/v1/clouds", &wanted).await.data(201);
    let path = format!("/v1/clouds/{}", cloud["id"].as_str().expect("an id"));
    let nothing = json!({ "display_name": null, "limits": null, "metadata": null });
    let bare = me.patch(&path, &nothing).await.data(200);
    assert_eq!((&bare["display_name"], &bare["metadata"]), (&json!("c"), &json!({})), "{bare}");
    assert_eq!(bare["limits"]["max_agents"], Value::Null);
    let hook = json!({
        "url": "https://127.0.0.1:9/hook", "events": ["*"], "active": false, "metadata": { "a": "1" },
    });
    let hook = me.post("/v1/webhooks", &hook).await.data(201);
    let path = format!("/v1/webhooks/{}", hook["id"].as_str().expect("an id"));
    for field in ["url", "events", "active", "ordering"] {
        let answer = me.patch(&path, &json!({ field: null })).await;
        let error = answer.refused(400, "VALIDATION_ERROR");
        assert_eq!(error["details"]["fields"][0]["field"], field);
    }
    let bare = me.patch(&path, &json!({ "metadata": null })).await.data(200);
    assert_eq!(bare["metadata"], json!({}));
}
