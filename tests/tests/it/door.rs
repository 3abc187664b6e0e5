//! The door: TLS only, HTTP/2, limits, and an envelope for whatever goes wrong.

use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
    time::Duration,
};

use reqwest::Method;
use serde_json::Value;
use tests::Node;

fn host(node: &Node) -> String {
    node.base_url.trim_start_matches("https://").to_owned()
}

#[tokio::test]
async fn clear_text_is_told_why_and_closed() {
    let node = Node::start();
    let host = host(&node);
    let text = tokio::task::spawn_blocking(move || {
        let mut stream = TcpStream::connect(host).expect("connects");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("set");
        stream
            .write_all(b"GET /v1/agents HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer leak\r\n\r\n")
            .expect("writes");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("reads to the end");
        text
    })
    .await
    .expect("ran");
    let (head, body) = text.split_once("\r\n\r\n").expect("an HTTP answer");
    assert!(head.starts_with("HTTP/1.1 403"), "{head}");
    assert!(!head.to_ascii_lowercase().contains("location"), "never a redirect");
    for name in ["limit", "remaining", "reset"] {
        let line =
            head.lines().find_map(|line| line.strip_prefix(&format!("x-ratelimit-{name}: ")));
        assert!(line.is_some_and(|number| number.parse::<u64>().is_ok()), "{name}: {head}");
    }
    let body: Value = serde_json::from_str(body).expect("JSON");
    assert_eq!(
        (&body["error"]["code"], &body["success"]),
        (&"HTTPS_REQUIRED".into(), &false.into())
    );
}

#[tokio::test]
async fn a_silent_connection_blocks_nobody() {
    let node = Node::start();
    let silent: Vec<_> =
        (0..50).map(|_| TcpStream::connect(host(&node)).expect("connects")).collect();
    node.customer().get("/v1/clouds").await.data(200);
    drop(silent);
}

#[tokio::test]
async fn http2_and_request_ids() {
    let node = Node::start();
    let me = node.customer();
    let request = me.request(Method::GET, "/v1/clouds").header("x-request-id", "mine");
    let response = request.send().await.expect("answers");
    assert_eq!(response.version(), reqwest::Version::HTTP_2);
    let header = response.headers()["x-request-id"].to_str().expect("text").to_owned();
    let body: Value = response.json().await.expect("JSON");
    assert_eq!(body["meta"]["request_id"], header);
    assert!(header.starts_with("req_"), "ours, not the client's");
}

#[tokio::test]
async fn whoever_is_not_known_gets_nothing() {
    let node = Node::start();
    let me = node.customer();
    let bare = |path: &str| me.client.get(format!("{}{path}", node.base_url));
    for path in ["/v1/agents", "/v1/clouds", "/v1/jobs", "/v1/agents/agent_x/http/"] {
        me.send(bare(path)).await.refused(401, "UNAUTHENTICATED");
        me.send(bare(path).bearer_auth("ic_live_nonsense")).await.refused(401, "INVALID_API_KEY");
        me.send(bare(path).header("x-api-key", "nonsense")).await.refused(401, "INVALID_API_KEY");
        me.send(bare(path).basic_auth("a", Some("b"))).await.refused(401, "UNAUTHENTICATED");
    }
    me.send(bare("/v1/clouds").header("x-api-key", &me.key)).await.data(200);
    me.send(bare("/v1/clouds").header("x-api-key", &me.key).bearer_auth(&me.key)).await.data(200);
    me.send(bare("/v1/clouds").header("x-api-key", &me.key).bearer_auth("other"))
        .await
        .refused(400, "INVALID_REQUEST");
}

#[tokio::test]
async fn unknown_paths_and_methods_wear_the_envelope() {
    let node = Node::start();
    let me = node.customer();
    for path in
        ["/", "/v1", "/v1/nothing", "/v2/agents", "/v1/agents/a/b/c/d", "/v1/chains", "/v1/chains"]
    {
        me.get(path).await.refused(404, "ROUTE_NOT_FOUND");
    }
    me.send(me.request(Method::PUT, "/v1/agents")).await.refused(405, "METHOD_NOT_ALLOWED");
    me.delete("/v1/agents").await.refused(405, "METHOD_NOT_ALLOWED");
}

#[tokio::test]
async fn the_document_and_its_page_are_open_to_everybody() {
    let node = Node::start();
    let me = node.customer();
    let open = |path: &str| me.client.get(format!("{}{path}", node.base_url)).send();
    let document: Value =
        open("/v1/openapi.json").await.expect("answers").json().await.expect("JSON");
    assert!(document["paths"]["/v1/agents/{id}/invoke"]["post"].is_object());
    for path in ["/docs", "/docs/"] {
        let page = open(path).await.expect("answers");
        assert_eq!(page.status(), 200);
        let page = page.text().await.expect("text");
        let (_, spec) = page.split_once("let spec = ").expect("Swagger UI with a document");
        let shown = serde_json::Deserializer::from_str(spec).into_iter::<Value>().next();
        assert!(shown.expect("a value").expect("JSON") == document, "the page shows all of it");
    }
    let receiver = open("/docs/oauth-receiver.html").await.expect("answers");
    assert!(receiver.text().await.expect("text").contains("OAuth2 Redirect"));
    assert_eq!(open("/docs/other").await.expect("answers").status(), 404);
}

#[tokio::test]
async fn sizes_are_limited_before_anything_is_read() {
    let node = Node::start();
    let me = node.customer();
    let long = format!("/v1/agents?q={}", "x".repeat(9000));
    me.get(&long).await.refused(414, "INVALID_REQUEST");
    let request = me.request(Method::GET, "/v1/agents").header("x-filler", "x".repeat(33 * 1024));
    // Very large headers end on the connection itself; either way nobody reads them.
    if let Ok(response) = request.send().await {
        assert_eq!(response.status(), 431);
    }
    let big = "x".repeat(2 * 1024 * 1024);
    let request = me.request(Method::POST, "/v1/clouds").header("content-type", "application/json");
    me.send(request.body(big.clone())).await.refused(413, "PAYLOAD_TOO_LARGE");
    let parts = futures::stream::iter(std::iter::repeat_n(big, 2).map(Ok::<_, std::io::Error>));
    let request = me.request(Method::POST, "/v1/clouds").header("content-type", "application/json");
    me.send(request.body(reqwest::Body::wrap_stream(parts)))
        .await
        .refused(413, "PAYLOAD_TOO_LARGE");
}
