//! What may be deployed: archives of each kind, Python and Node, servers and handlers, git.

use std::{path::Path, process::Command};

use serde_json::{Value, json};
use tests::{Customer, Node, eventually, skipped, source};

async fn deployed(me: &Customer, name: &str, archive: Vec<u8>) -> String {
    let archive_url = me.upload(archive).await;
    let source = json!({ "type": "upload", "archive_url": archive_url });
    me.deploy_as(&json!({ "name": name, "cloud_id": me.cloud().await, "source": source })).await
}

async fn output(me: &Customer, id: &str, input: Value) -> Value {
    me.invoke(id, &input).await.data(200)["output"].clone()
}

#[tokio::test]
async fn every_archive_format_is_unpacked() {
    let node = Node::start();
    let me = node.customer();
    let files: &source::Files<'_> = &[("agent.py", source::ECHO)];
    for (name, archive) in [
        ("zip", source::zip(files)),
        ("zst", source::tar_zst(files)),
        ("gz", source::tar_gz(files)),
    ] {
        let id = deployed(&me, name, archive).await;
        assert_eq!(output(&me, &id, json!(name)).await["echo"], name);
    }
    let nested = source::tar_gz(&[("top/agent.py", source::ECHO), ("top/data/x.txt", "x")]);
    let id = deployed(&me, "nested", nested).await;
    assert_eq!(output(&me, &id, json!(1)).await["echo"], 1);
}

#[tokio::test]
async fn one_step_uploads_are_taken_too() {
    let node = Node::start();
    let me = node.customer();
    let part = reqwest::multipart::Part::bytes(source::tar_gz(&[("agent.py", source::ECHO)]))
        .file_name("a.tgz");
    let form = reqwest::multipart::Form::new().part("file", part);
    let upload =
        me.send(me.request(reqwest::Method::POST, "/v1/uploads").multipart(form)).await.data(201);
    assert_eq!((&upload["status"], &upload["filename"]), (&json!("ready"), &json!("a.tgz")));
    let source = json!({ "type": "upload", "archive_url": upload["archive_url"] });
    let id = me
        .deploy_as(&json!({ "name": "step", "cloud_id": me.cloud().await, "source": source }))
        .await;
    assert_eq!(output(&me, &id, json!(1)).await["echo"], 1);
    let path = format!("/v1/uploads/{}", upload["id"].as_str().expect("an id"));
    assert_eq!(me.get(&path).await.data(200)["sha256"].as_str().map(str::len), Some(64));
    me.delete(&path).await.data(200);
    me.get(&path).await.refused(404, "UPLOAD_NOT_FOUND");
    assert_eq!(output(&me, &id, json!(2)).await["echo"], 2, "the agent stays");
}

#[tokio::test]
async fn a_one_step_upload_that_breaks_off_leaves_no_upload_and_is_audited_as_refused() {
    let node = Node::start();
    let me = node.customer();
    let head = "--b\r\ncontent-disposition: form-data; name=\"file\"; filename=\"a.tgz\"\r\n\r\n";
    let request = me
        .request(reqwest::Method::POST, "/v1/uploads")
        .header("content-type", "multipart/form-data; boundary=b")
        .body(format!("{head}half of it"));
    let refused = me.send(request).await;
    assert_eq!(refused.status, 400, "{:#}", refused.body);
    let code = refused.body["error"]["code"].as_str().expect("a code").to_owned();
    let path = "/v1/audit-log?action=createUpload";
    eventually("it is in the audit log", async || {
        let rows = me.get(path).await.data(200)["items"].as_array().cloned().unwrap_or_default();
        if rows.is_empty() { Err("not yet".to_owned()) } else { Ok(()) }
    })
    .await;
    let rows = me.get(path).await.data(200)["items"].clone();
    assert_eq!((rows.as_array().map(Vec::len), &rows[0]["outcome"]), (Some(1), &json!(code)));
}

#[tokio::test]
async fn an_upload_must_be_what_was_announced() {
    let node = Node::start();
    let me = node.customer();
    let announce = async |body: Value| me.post("/v1/uploads", &body).await.data(201);
    let put = async |upload: &Value, bytes: &'static str| {
        me.send(me.client.put(upload["upload_url"].as_str().expect("an address")).body(bytes)).await
    };
    let short = announce(json!({ "filename": "a", "size_bytes": 5 })).await;
    put(&short, "abc").await.refused(400, "UPLOAD_CORRUPT");
    put(&short, "abcdef").await.refused(400, "UPLOAD_CORRUPT");
    put(&short, "abcde").await.data(200);
    put(&short, "abcde").await.data(200);
    put(&short, "fghij").await.refused(400, "UPLOAD_CORRUPT");
    let hashed = announce(json!({ "filename": "a", "sha256": "0".repeat(64) })).await;
    put(&hashed, "abc").await.refused(400, "UPLOAD_CORRUPT");
    let url =
        hashed["upload_url"].as_str().expect("an address").replace("signature=", "signature=0");
    me.send(me.client.put(url).body("abc")).await.refused(403, "INVALID_REQUEST");
    let cloud = me.cloud().await;
    let pending = json!({ "name": "p", "cloud_id": cloud, "source": { "type": "upload", "archive_url": hashed["archive_url"] } });
    me.post("/v1/agents", &pending).await.refused(409, "UPLOAD_NOT_READY");
}

#[tokio::test]
async fn python_handlers_of_every_kind() {
    let node = Node::start();
    let me = node.customer();
    for (name, code, text) in [
        ("plain", "def invoke(i, c):\n    return 'a b '\n", "a b "),
        (
            "async",
            "import asyncio\nasync def invoke(i, c):\n    await asyncio.sleep(0)\n    return 'a b '\n",
            "a b ",
        ),
        ("generator", "def invoke(i, c):\n    yield 'a '\n    yield 'b '\n", "a b "),
        (
            "agen",
            "import asyncio\nasync def invoke(i, c):\n    for w in 'ab':\n        await asyncio.sleep(0)\n        yield w + ' '\n",
            "a b ",
        ),
    ] {
        let id = me.deploy(name, &[("agent.py", code)]).await;
        assert_eq!(output(&me, &id, json!(null)).await, text, "{name}");
        let events = me.stream(&id, &json!(null)).await;
        let streamed: String =
            events.iter().filter_map(|event| event["content"].as_str()).collect();
        assert_eq!(streamed, text, "{name}");
    }
}

#[tokio::test]
async fn node_handlers_and_servers() {
    if Command::new("node").arg("--version").output().is_err() {
        return skipped("node");
    }
    let node = Node::start();
    let me = node.customer();
    let handler = "export async function* invoke(input, context) {\n  yield `hello `;\n  yield input.name;\n  yield { usage: { tokens: 2 } };\n}\n";
    let id = me.deploy("handler", &[("agent.mjs", handler)]).await;
    let answer = me.invoke(&id, &json!({ "name": "you" })).await.data(200);
    assert_eq!(
        (&answer["output"], &answer["usage"]["tokens_used"]),
        (&json!("hello you"), &json!(2))
    );
    let server = "require('http').createServer((q, s) => { let b = ''; q.on('data', d => b += d); q.on('end', () => s.end(b ? JSON.stringify({ output: JSON.parse(b).input + 1 }) : 'ok')); }).listen(process.env.PORT, '127.0.0.1');\n";
    let package = "{\"scripts\": {\"start\": \"node serve.js\"}}";
    let id = me.deploy("server", &[("serve.js", server), ("package.json", package)]).await;
    assert_eq!(output(&me, &id, json!(41)).await, 42);
    let agent = me.get(&format!("/v1/agents/{id}")).await.data(200);
    assert_eq!(agent["runtime"]["language"], "node");
}

#[tokio::test]
async fn entries_are_found_where_they_are_named() {
    let node = Node::start();
    let me = node.customer();
    let server = "import http.server, json, os, sys\nclass H(http.server.BaseHTTPRequestHandler):\n    def do_GET(self):\n        self.send_response(404); self.end_headers()\n    def do_POST(self):\n        self.send_response(200); self.send_header('Content-Type', 'application/json'); self.end_headers(); self.wfile.write(json.dumps({'output': sys.argv[1:] + [self.path]}).encode())\n    def log_message(self, *a): pass\nhttp.server.HTTPServer(('127.0.0.1', int(os.environ['PORT'])), H).serve_forever()\n";
    let toml = "entry = [\"python3\", \"src/run.py\", \"from toml\"]\n[http]\ninvoke = \"/run\"\n";
    let id = me.deploy("toml", &[("src/run.py", server), ("agent.toml", toml)]).await;
    assert_eq!(output(&me, &id, json!(1)).await, json!(["from toml", "/run"]));
    let id = me
        .deploy(
            "proc",
            &[("src/run.py", server), ("Procfile", "web: python3 src/run.py from-proc\n")],
        )
        .await;
    assert_eq!(output(&me, &id, json!(1)).await, json!(["from-proc", "/invoke"]));
    for (name, files, told) in [
        ("none", &[("notes.txt", "x")] as &source::Files<'_>, "nothing to start"),
        ("docker", &[("Dockerfile", "FROM x")], "docker cloud"),
        ("cargo", &[("Cargo.toml", "")], "Dockerfile"),
        ("port", &[("agent.py", source::ECHO), ("agent.toml", "[http]\nport = 80\n")], "$PORT"),
        ("typo", &[("agent.py", source::ECHO), ("agent.toml", "entrie = 'x'\n")], "agent.toml"),
    ] {
        let wanted = me.wanted(name, files).await;
        let id = me.post("/v1/agents", &wanted).await.data(201)["id"]
            .as_str()
            .expect("an id")
            .to_owned();
        let agent = me.settled(&id, "failed,running").await;
        assert_eq!(agent["status_reason"]["code"], "BUILD_FAILED", "{name}: {agent:#}");
        let message = agent["status_reason"]["message"].to_string();
        assert!(message.contains(told), "{name}: {message}");
    }
}

#[tokio::test]
async fn dependencies_are_installed() {
    let node = Node::start();
    let me = node.customer();
    // A package of our own beside the agent, so that no registry is needed.
    let setup = "from setuptools import setup\nsetup(name='tinydep', version='1.0', py_modules=['tinydep'])\n";
    let wheelless = [
        ("requirements.txt", "./tinydep\n"),
        ("tinydep/setup.py", setup),
        ("tinydep/tinydep.py", "WORD = 'installed'\n"),
        ("agent.py", "import tinydep\ndef invoke(input, context):\n    return tinydep.WORD\n"),
    ];
    let wanted = me.wanted("deps", &wheelless).await;
    let id =
        me.post("/v1/agents", &wanted).await.data(201)["id"].as_str().expect("an id").to_owned();
    let agent = me.settled(&id, "running,failed").await;
    if agent["status"] == "failed" {
        let why = agent["deployment"]["error"].to_string();
        let is_missing = why.contains("No module named pip")
            || why.contains("No matching distribution")
            || why.contains("not on this node");
        assert!(is_missing, "{why}");
        return skipped("pip");
    }
    assert_eq!(output(&me, &id, json!(1)).await, "installed");
    let broken = me
        .wanted("nodeps", &[("requirements.txt", "./missing\n"), ("agent.py", source::ECHO)])
        .await;
    let id =
        me.post("/v1/agents", &broken).await.data(201)["id"].as_str().expect("an id").to_owned();
    let agent = me.settled(&id, "failed,running").await;
    assert_eq!(agent["status_reason"]["code"], "BUILD_FAILED");
    assert!(
        agent["deployment"]["error"]["message"]
            .as_str()
            .is_some_and(|text| text.contains("dependency"))
    );
}

fn git(folder: &Path, arguments: &[&str]) {
    let identity = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "init.defaultBranch=main"];
    let status = Command::new("git")
        .arg("-C")
        .arg(folder)
        .args(identity)
        .args(arguments)
        .output()
        .expect("git runs");
    assert!(status.status.success(), "{}", String::from_utf8_lossy(&status.stderr));
}

#[tokio::test]
async fn a_branch_of_a_repository_is_deployed_and_its_commit_recorded() {
    if Command::new("git").arg("--version").output().is_err() {
        return skipped("git");
    }
    let host = tempfile::tempdir().expect("a folder");
    let repo = host.path().join("acme/bots.git");
    std::fs::create_dir_all(repo.join("chat")).expect("made");
    git(&repo, &["init", "--quiet"]);
    std::fs::write(repo.join("chat/agent.py"), "def invoke(i, c):\n    return 'main'\n")
        .expect("written");
    git(&repo, &["add", "."]);
    git(&repo, &["commit", "--quiet", "-m", "one"]);
    git(&repo, &["checkout", "--quiet", "-b", "next"]);
    std::fs::write(repo.join("chat/agent.py"), "def invoke(i, c):\n    return 'next'\n")
        .expect("written");
    git(&repo, &["commit", "--quiet", "-am", "two"]);
    git(&repo, &["checkout", "--quiet", "main"]);
    let node =
        Node::with(&[("ROOST_GITHUB__BASE_URL", &format!("file://{}", host.path().display()))]);
    let me = node.customer();
    let cloud = me.cloud().await;
    let wanted =
        |name: &str, source: Value| json!({ "name": name, "cloud_id": cloud, "source": source });
    let source = json!({ "type": "github", "repo": "acme/bots", "path": "chat" });
    let id = me.deploy_as(&wanted("main", source)).await;
    assert_eq!(output(&me, &id, json!(1)).await, "main");
    let agent = me.get(&format!("/v1/agents/{id}")).await.data(200);
    assert_eq!(agent["source"]["commit"].as_str().map(str::len), Some(40));
    assert_eq!(agent["source"]["repo"], "acme/bots");
    let source = json!({ "type": "github", "repo": "acme/bots", "branch": "next", "path": "chat" });
    let id = me.deploy_as(&wanted("next", source)).await;
    assert_eq!(output(&me, &id, json!(1)).await, "next");
    let wrong = [
        json!({ "type": "github", "repo": "acme/nothing" }),
        json!({ "type": "github", "repo": "acme/bots", "branch": "never" }),
        json!({ "type": "github", "repo": "acme/bots", "path": "nowhere" }),
    ];
    for (n, source) in wrong.into_iter().enumerate() {
        let name = format!("wrong-{n}");
        let id = me.post("/v1/agents", &wanted(&name, source)).await.data(201)["id"]
            .as_str()
            .expect("an id")
            .to_owned();
        let agent = me.settled(&id, "failed,running").await;
        assert_eq!(agent["status_reason"]["code"], "SOURCE_FETCH_FAILED", "{agent:#}");
    }
}
