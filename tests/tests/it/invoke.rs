//! Invocations: synchronous, streamed, failing, waiting, passed through.

use std::time::{Duration, Instant};

use reqwest::Method;
use serde_json::{Value, json};
use tests::{Node, source::ECHO};

const VARIOUS: &str = r#"
import time

def invoke(input, context):
    kind = input.get("kind")
    if kind == "raise":
        raise ValueError("no such thing")
    if kind == "sleep":
        time.sleep(input["seconds"])
        return "slept"
    if kind == "context":
        return context
    if kind == "usage":
        return {"output": "done", "usage": {"tokens": 42}}
    if kind == "big":
        return "x" * (7 * 1024 * 1024)
    if kind == "stream":
        return chunks(input["n"])
    return input

def chunks(n):
    for i in range(n):
        yield f"{i} "
        time.sleep(0.01)
    yield {"usage": {"tokens": n}}
"#;

#[tokio::test]
async fn a_synchronous_call_has_the_shape_of_the_specification() {
    let node = Node::start();
    let me = node.customer();
    let id = me.deploy("shape", &[("agent.py", VARIOUS)]).await;
    let answer = me.invoke(&id, &json!({ "kind": "usage" })).await;
    let meta = answer.body["meta"].clone();
    let data = answer.data(200);
    assert_eq!(data["output"], "done");
    assert_eq!(data["usage"]["tokens_used"], 42);
    assert!(data["usage"]["compute_ms"].is_u64());
    assert!(meta["latency_ms"].is_u64());
    assert!(meta["instance_id"].as_str().is_some_and(|id| id.starts_with("inst_")));
    let options = json!({ "input": { "kind": "context" }, "options": { "metadata": { "a": "b" }, "timeout": 5 } });
    let context =
        me.post(&format!("/v1/agents/{id}/invoke"), &options).await.data(200)["output"].clone();
    assert_eq!((&context["agent_id"], &context["version"]), (&json!(id), &json!(1)));
    assert_eq!((&context["metadata"]["a"], &context["livemode"]), (&json!("b"), &json!(true)));
    for input in [json!(null), json!([1, "ä", null]), json!({ "deep": { "er": [] } }), json!(1.5)]
    {
        let id = &id;
        let body = json!({ "input": { "kind": "echo", "value": input } });
        let output =
            me.post(&format!("/v1/agents/{id}/invoke"), &body).await.data(200)["output"].clone();
        assert_eq!(output["value"], input);
    }
}

#[tokio::test]
async fn faults_of_the_agent_are_never_faults_of_the_service() {
    let node = Node::start();
    let me = node.customer();
    let id = me.deploy("faulty", &[("agent.py", VARIOUS)]).await;
    let error = me.invoke(&id, &json!({ "kind": "raise" })).await.refused(502, "AGENT_ERROR");
    assert_eq!(error["details"]["status"], 500);
    assert!(error["details"]["body"].as_str().is_some_and(|body| body.contains("no such thing")));
    let slow = json!({ "input": { "kind": "sleep", "seconds": 5 }, "options": { "timeout": 0.2 } });
    let path = format!("/v1/agents/{id}/invoke");
    me.post(&path, &slow).await.refused(504, "INVOCATION_TIMEOUT");
    me.invoke(&id, &json!({ "kind": "big" })).await.refused(502, "AGENT_BAD_RESPONSE");
    let agent = me.get(&format!("/v1/agents/{id}")).await.data(200);
    assert_eq!(agent["metrics"]["requests_24h"], 3);
    assert_eq!(agent["metrics"]["error_rate_percent"], 100.0);
}

#[tokio::test]
async fn a_stream_comes_in_pieces_and_in_the_specifications_words() {
    let node = Node::start();
    let me = node.customer();
    let id = me.deploy("streamer", &[("agent.py", VARIOUS)]).await;
    let events = me.stream(&id, &json!({ "kind": "stream", "n": 5 })).await;
    let kinds: Vec<&str> = events.iter().filter_map(|event| event["type"].as_str()).collect();
    assert_eq!(kinds, ["start", "chunk", "chunk", "chunk", "chunk", "chunk", "done"]);
    assert!(events[0]["request_id"].as_str().is_some_and(|id| id.starts_with("req_")));
    let text: String = events.iter().filter_map(|event| event["content"].as_str()).collect();
    assert_eq!(text, "0 1 2 3 4 ");
    assert_eq!(events[6]["usage"]["tokens"], 5);
    let whole = me.invoke(&id, &json!({ "kind": "stream", "n": 3 })).await.data(200);
    assert_eq!((&whole["output"], &whole["usage"]["tokens_used"]), (&json!("0 1 2 "), &json!(3)));
    let one = me.stream(&id, &json!({ "kind": "usage" })).await;
    assert_eq!(
        (one.len(), &one[1]["content"], &one[2]["usage"]["tokens"]),
        (3, &json!("done"), &json!(42))
    );
    let failed = me.stream(&id, &json!({ "kind": "raise" })).await;
    assert_eq!(failed.last().map(|event| &event["type"]), Some(&json!("error")));
}

#[tokio::test]
async fn a_call_waits_while_its_instance_comes_back() {
    let node = Node::start();
    let me = node.customer();
    let suicidal = "import os\ndef invoke(input, context):\n    if input == 'die':\n        os._exit(3)\n    return os.getpid()\n";
    let id = me.deploy("phoenix", &[("agent.py", suicidal)]).await;
    let first = me.invoke(&id, &json!("pid")).await.data(200)["output"].clone();
    tokio::time::sleep(Duration::from_millis(400)).await;
    me.invoke(&id, &json!("die")).await.refused(502, "AGENT_ERROR");
    let second = me.invoke(&id, &json!("pid")).await.data(200)["output"].clone();
    assert_ne!(first, second);
    assert_eq!(me.get(&format!("/v1/agents/{id}")).await.data(200)["status"], "running");
}

#[tokio::test]
async fn a_crash_costs_the_call_that_caused_it_and_none_after_it() {
    let node = Node::start();
    let me = node.customer();
    let suicidal = "import os, time\ndef invoke(input, context):\n    if input == 'die':\n        os._exit(3)\n    time.sleep(0.05)\n    return os.getpid()\n";
    for round in 0..3 {
        let id = me.deploy(&format!("phoenix-{round}"), &[("agent.py", suicidal)]).await;
        let ask = json!("pid");
        let several = async || {
            let calls = (0..8).map(|_| me.invoke(&id, &ask));
            let pids = futures::future::join_all(calls).await;
            pids.into_iter().map(|answer| answer.data(200)["output"].clone()).collect::<Vec<_>>()
        };
        // So many connections stay open, and their ends come one after the other.
        let before = several().await;
        me.invoke(&id, &json!("die")).await.refused(502, "AGENT_ERROR");
        assert!(several().await.iter().all(|pid| *pid != before[0]));
    }
}

#[tokio::test]
async fn a_full_instance_makes_calls_wait_and_a_full_queue_refuses_them() {
    let node = Node::with(&[("ROOST_INVOKE__QUEUE", "2")]);
    let me = node.customer();
    let toml = "[scaling]\nconcurrency = 1\n";
    let id = me.deploy("narrow", &[("agent.py", VARIOUS), ("agent.toml", toml)]).await;
    let slow = json!({ "kind": "sleep", "seconds": 0.6 });
    let began = Instant::now();
    let calls = (0..5).map(|_| me.invoke(&id, &slow));
    let answers = futures::future::join_all(calls).await;
    let served = answers.iter().filter(|answer| answer.status == 200).count();
    let refused: Vec<_> = answers.into_iter().filter(|answer| answer.status != 200).collect();
    assert_eq!((served, refused.len()), (3, 2));
    assert!(began.elapsed() >= Duration::from_millis(1800), "one at a time");
    for answer in refused {
        assert_eq!(answer.header("retry-after"), Some("1"));
        answer.refused(429, "AGENT_OVERLOADED");
    }
}

#[tokio::test]
async fn a_client_that_hangs_up_frees_its_slot() {
    let node = Node::start();
    let me = node.customer();
    let toml = "[scaling]\nconcurrency = 1\n";
    let id = me.deploy("hangup", &[("agent.py", VARIOUS), ("agent.toml", toml)]).await;
    let slow = json!({ "input": { "kind": "sleep", "seconds": 60 } });
    let path = format!("/v1/agents/{id}/invoke");
    let left = tokio::time::timeout(Duration::from_millis(300), me.post(&path, &slow)).await;
    assert!(left.is_err(), "the client left before the answer");
    let quick = json!({ "input": { "kind": "echo" }, "options": { "timeout": 30 } });
    me.post(&path, &quick).await.data(200);
}

#[tokio::test]
async fn any_server_is_an_agent_and_is_reached_as_it_is() {
    let node = Node::start();
    let me = node.customer();
    let server = r#"
import http.server, json, os

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def answer(self, status, body, kind="application/json"):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Set-Cookie", "a=b")
        self.send_header("Access-Control-Allow-Origin", "*")
        self.send_header("X-Own", "yes")
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        if self.path == "/health":
            return self.answer(200, b"{}")
        seen = {"path": self.path, "auth": self.headers.get("Authorization"), "key": self.headers.get("X-API-Key"), "own": self.headers.get("X-Mine")}
        self.answer(418, json.dumps(seen).encode())
    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/invoke":
            call = json.loads(body)
            self.answer(200, json.dumps({"answer": call["input"], "header": self.headers.get("X-Mine")}).encode())
        else:
            self.answer(200, body, "text/plain")
    def log_message(self, *args): pass

http.server.ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"#;
    let id = me.deploy("server", &[("server.py", server)]).await;
    let body = json!({ "input": 7, "options": { "headers": { "X-Mine": "passed" } } });
    let output =
        me.post(&format!("/v1/agents/{id}/invoke"), &body).await.data(200)["output"].clone();
    assert_eq!(output, json!({ "answer": 7, "header": "passed" }), "any JSON is the output");
    let path = format!("/v1/agents/{id}/http/some/where?x=1");
    let request = me.request(Method::GET, &path).header("x-mine", "too").header("cookie", "c=d");
    let answer = me.send(request).await;
    assert_eq!(answer.status, 418, "the agent's status passes");
    let seen = json!({ "path": "/some/where?x=1", "auth": null, "key": null, "own": "too" });
    assert_eq!(answer.body, seen);
    assert_eq!(answer.header("x-own"), Some("yes"));
    assert_eq!(
        (answer.header("set-cookie"), answer.header("access-control-allow-origin")),
        (None, None)
    );
    let request = me.request(Method::POST, &format!("/v1/agents/{id}/http/echo")).body("as it is");
    let response = request.send().await.expect("answers");
    assert_eq!(response.text().await.expect("text"), "as it is");
    // HTTP/2 has no such header, so this client speaks HTTP/1.1.
    let old = me.http1();
    let request = old.request(Method::GET, &path).header("connection", "upgrade");
    old.send(request.header("upgrade", "websocket")).await.refused(400, "VALIDATION_ERROR");
}

#[tokio::test]
async fn an_agent_that_is_not_there_yet_says_so() {
    let node = Node::start();
    let me = node.customer();
    let never = "import time\ntime.sleep(60)\n";
    let wanted = me.wanted("never", &[("main.py", never)]).await;
    let id =
        me.post("/v1/agents", &wanted).await.data(201)["id"].as_str().expect("an id").to_owned();
    me.invoke(&id, &json!(1)).await.refused(409, "AGENT_NOT_READY");
    let both = me.request(Method::POST, &format!("/v1/agents/{id}/invoke"));
    let both = both.header("accept", "text/event-stream").json(&json!({ "async": true }));
    me.send(both).await.refused(400, "VALIDATION_ERROR");
    let agent = me.call(&format!("/v1/agents/{id}/stop")).await.data(200);
    assert_eq!(agent["status"], "stopped");
    assert_eq!(agent["deployment"]["status"], "canceled");
    let unknown = "agent_01j00000000000000000000000";
    me.invoke(unknown, &json!(1)).await.refused(404, "AGENT_NOT_FOUND");
    let body = json!({ "input": 1, "async": true });
    me.post(&format!("/v1/agents/{unknown}/invoke"), &body).await.refused(404, "AGENT_NOT_FOUND");
}

#[tokio::test]
async fn two_hundred_calls_at_once_get_their_own_answers() {
    let node = Node::start();
    let me = node.customer();
    let id = me.deploy("many", &[("agent.py", ECHO)]).await;
    let calls = (0..200).map(|n| {
        let (me, id) = (&me, &id);
        async move { (n, me.invoke(id, &json!(n)).await.data(200)["output"]["echo"].clone()) }
    });
    for (n, echoed) in futures::future::join_all(calls).await {
        assert_eq!(echoed, Value::from(n));
    }
}
