//! Synchronous calls and streams: what is added to calling the agent itself, beside nginx.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use futures::StreamExt as _;
use reqwest::{Client, Method, RequestBuilder};
use serde_json::json;
use tests::{
    Customer, Node,
    load::{Measured, load, resident_mib},
    peers,
};

async fn whole(request: RequestBuilder) {
    let answer = request.send().await.expect("answers");
    assert_eq!(answer.status(), 200);
    answer.bytes().await.expect("whole");
}

/// One and 64 connections: direct, through nginx, through the node.
pub(crate) async fn synchronous(node: &Node, me: &Customer, id: &str, port: u64) {
    let plain = Client::builder().build().expect("a client");
    let body = json!({ "input": 1 });
    let direct_url = format!("http://127.0.0.1:{port}/invoke");
    let me = me.http1();
    let path = format!("/v1/agents/{id}/invoke");
    let nginx = peers::nginx(&node.data.path().join("tls"), port);
    if nginx.is_none() {
        println!("SKIPPED: nginx");
    }
    for clients in [1, 64] {
        let direct = load(clients, |_| whole(plain.post(&direct_url).json(&body))).await;
        let through = load(clients, |_| whole(me.request(Method::POST, &path).json(&body))).await;
        println!("sync invoke, {clients:>2} clients: {}", through.shown());
        println!("  the agent itself: {}", direct.shown());
        println!("  added at p50: {} us", through.quantile(50).saturating_sub(direct.quantile(50)));
        if let Some(nginx) = &nginx {
            let url = format!("https://127.0.0.1:{}/invoke", nginx.port);
            let beside = load(clients, |_| whole(me.client.post(&url).json(&body))).await;
            #[expect(clippy::cast_precision_loss, reason = "a ratio")]
            let tail = through.quantile(99) as f64 / beside.quantile(99).max(1) as f64;
            println!("  nginx: {}", beside.shown());
            println!("  {:.2} x nginx, p99 {tail:.2} x its", through.rate / beside.rate);
        }
    }
}

/// Writes the head and the body of each answer one after the other, and leaves Nagle's algorithm on.
const IN_TWO_PARTS: &str = r#"
import http.server, os

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.answer(b"{}")
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(os.environ["PORT"].encode())
    def log_message(self, *args): pass

http.server.ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"#;

/// One client of an agent that Python's own server serves: directly and through the node.
pub(crate) async fn in_two_parts(me: &Customer) {
    let id = me.deploy("two-parts", &[("server.py", IN_TWO_PARTS)]).await;
    let (me, path, body) = (me.http1(), format!("/v1/agents/{id}/invoke"), json!({ "input": 1 }));
    let port = me.post(&path, &body).await.data(200)["output"].clone();
    let (plain, url) = (Client::new(), format!("http://127.0.0.1:{port}/invoke"));
    let direct = load(1, |_| whole(plain.post(&url).json(&body))).await;
    let through = load(1, |_| whole(me.request(Method::POST, &path).json(&body))).await;
    println!("head and body apart, 1 client: {}", through.shown());
    println!("  the agent itself: {}", direct.shown());
}

#[expect(clippy::disallowed_methods, reason = "two processes compare their wall clocks")]
fn micros() -> u128 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros()
}

/// How late each event came, in microseconds.
async fn listen(request: RequestBuilder) -> Vec<u128> {
    let answer = request.send().await.expect("answers");
    assert_eq!(answer.status(), 200);
    let (mut bytes, mut late, mut rest) = (answer.bytes_stream(), vec![], String::new());
    while let Some(Ok(part)) = bytes.next().await {
        let now = micros();
        rest.push_str(&String::from_utf8_lossy(&part));
        while let Some((line, more)) = rest.split_once('\n') {
            let sent =
                line.split_once("\"content\":\"").and_then(|(_, text)| text.split('"').next());
            if let Some(sent) = sent.and_then(|text| text.parse::<u128>().ok()) {
                late.push(now.saturating_sub(sent));
            }
            rest = more.to_owned();
        }
    }
    late
}

async fn listen_all(streams: usize, request: impl Fn() -> RequestBuilder) -> Measured {
    let began = Instant::now();
    let all = (0..streams).map(|_| listen(request()));
    let late = futures::future::join_all(all).await.into_iter().flatten().collect();
    Measured::of(late, began.elapsed())
}

/// 256 streams of one event each 20 ms, directly and through the node; then the memory of 2,000 open
/// streams.
pub(crate) async fn streamed(node: &Node, me: &Customer, id: &str, port: u64) {
    let body =
        |count: u32, pause: u32| json!({ "input": { "probe": format!("stream {count} {pause}") } });
    let plain = Client::builder().build().expect("a client");
    let direct_url = format!("http://127.0.0.1:{port}/invoke");
    let path = format!("/v1/agents/{id}/invoke");
    // A connection each: one connection of HTTP/2 carries no more than 256 streams.
    let me = me.http1();
    let ask = |body: serde_json::Value| {
        me.request(Method::POST, &path).header("accept", "text/event-stream").json(&body)
    };
    let direct = listen_all(256, || plain.post(&direct_url).json(&body(150, 20))).await;
    let through = listen_all(256, || ask(body(150, 20))).await;
    println!(
        "256 streams, an event each 20 ms: late by p50 {} us, p99 {} us; directly p50 {} us, p99 {} us; added at p50 {} us",
        through.quantile(50),
        through.quantile(99),
        direct.quantile(50),
        direct.quantile(99),
        through.quantile(50).saturating_sub(direct.quantile(50)),
    );
    let before = resident_mib(node.pid());
    let open = (0..2000).map(|_| listen(ask(body(1, 8000))));
    let watch = async {
        tokio::time::sleep(Duration::from_secs(5)).await;
        resident_mib(node.pid())
    };
    let (_, during) = futures::join!(futures::future::join_all(open), watch);
    println!("2000 open streams: {} MiB more than {before}", during.saturating_sub(before));
}
