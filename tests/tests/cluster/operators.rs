//! What an operator sees and says: the cluster when it is well and when it is not, what changes about it,
//! and how it looks after itself.

use std::time::{Duration, Instant};

use futures::StreamExt as _;
use serde_json::{Value, json};
use tests::{Answer, Cluster, Customer, eventually};

/// What a stream of changes has told so far.
struct Watching {
    bytes: futures::stream::BoxStream<'static, reqwest::Result<bytes::Bytes>>,
    text: String,
}

impl Watching {
    async fn begin(me: &Customer) -> Self {
        let request = me.request(reqwest::Method::GET, "/v1/cluster/events");
        let answer = request.send().await.expect("an answer");
        assert_eq!(answer.status(), 200);
        Self { bytes: answer.bytes_stream().boxed(), text: String::new() }
    }

    fn told(&self) -> Vec<Value> {
        let whole = self.text.rfind('\n').map_or("", |end| &self.text[..end]);
        let lines = whole.lines().filter_map(|line| line.strip_prefix("data: "));
        lines.map(|line| serde_json::from_str(line).expect("JSON")).collect()
    }

    /// Reads on until something was told.
    async fn until(&mut self, what: &str, fits: impl Fn(&Value) -> bool) -> Value {
        let until = Instant::now() + Duration::from_secs(120);
        loop {
            if let Some(found) = self.told().into_iter().find(&fits) {
                return found;
            }
            let left = until.saturating_duration_since(Instant::now());
            let part = tokio::time::timeout(left, self.bytes.next()).await;
            let part = part.unwrap_or_else(|_| panic!("{what} was not told: {}", self.text));
            let part = part.expect("the stream goes on").expect("a part");
            self.text.push_str(&String::from_utf8_lossy(&part));
        }
    }
}

#[tokio::test]
async fn what_changes_about_the_cluster_is_told_as_it_happens() {
    let mut cluster = Cluster::of(2);
    let me = cluster.customer(0);
    let mut watching = Watching::begin(&me).await;
    let seen = watching.until("how it is", |event| event["type"] == "cluster.seen").await;
    assert_eq!(seen["data"]["nodes"].as_array().map(Vec::len), Some(2));
    let new = cluster.grow_at(0);
    let id = cluster.nodes[new].id.clone();
    let about = |kind: &'static str| {
        let id = json!(id);
        move |event: &Value| event["type"] == kind && event["node_id"] == id
    };
    watching.until("that it joined", about("node.joined")).await;
    watching
        .until("that it votes", |event| {
            event["type"] == "replicas.changed"
                && event["group"] == "directory"
                && event["data"]["voters"].as_array().map(Vec::len) == Some(3)
        })
        .await;
    me.call(&format!("/v1/cluster/nodes/{id}/drain")).await.data(200);
    watching
        .until("that it drains", |event| {
            about("node.changed")(event) && event["data"]["status"] == "draining"
        })
        .await;
    me.call(&format!("/v1/cluster/nodes/{id}/activate")).await.data(200);
    cluster.kill(new);
    watching
        .until("that it is silent", |event| {
            about("node.changed")(event) && event["data"]["alive"] == false
        })
        .await;
}

fn stale(answer: &Answer) -> (Option<&str>, u64) {
    let age = answer.header("x-last-contact-ms").and_then(|text| text.parse().ok());
    (answer.header("x-known-leader"), age.expect("how old it may be"))
}

#[tokio::test]
async fn a_stale_read_needs_no_majority_and_says_how_old_it_may_be() {
    let cluster = Cluster::of(3);
    let me = cluster.customer(0);
    let made = me.post("/v1/clouds", &json!({ "name": "seen" })).await.data(201);
    let path = format!("/v1/clouds/{}", made["id"].as_str().expect("an id"));
    for node in 0..3 {
        let me = cluster.customer(node);
        eventually("a stale read has it soon", async || {
            let answer = me.get(&format!("{path}?consistency=stale")).await;
            let (known, age) = stale(&answer);
            assert_eq!(known, Some("true"));
            assert!(age < 1000, "{age} ms");
            if answer.status == 200 { Ok(()) } else { Err(answer.status.to_string()) }
        })
        .await;
        let answer = me.get(&format!("{path}?consistency=linearizable")).await;
        assert_eq!((answer.status, answer.header("x-known-leader")), (200, None));
    }
    let wrong = me.get(&format!("{path}?consistency=eventual")).await;
    assert_eq!((wrong.status, wrong.code()), (400, "VALIDATION_ERROR"));
    let write = me.post("/v1/clouds?consistency=stale", &json!({ "name": "not-so" })).await;
    assert_eq!((write.status, write.code()), (400, "VALIDATION_ERROR"));
    cluster.kill(1);
    cluster.kill(2);
    eventually("it says that it hears of no leader", async || {
        let answer = me.get("/v1/cluster?consistency=stale").await;
        let (known, age) = stale(&answer);
        assert_eq!(answer.status, 200, "{answer:?}");
        if known == Some("false") { Ok(()) } else { Err(format!("{known:?}, {age} ms")) }
    })
    .await;
    let nodes = me.get("/v1/cluster/nodes?consistency=stale").await.data(200);
    assert_eq!(nodes["items"].as_array().map(Vec::len), Some(3));
}

#[tokio::test]
async fn the_operator_says_how_replicas_are_looked_after() {
    let cluster = Cluster::of(3);
    let me = cluster.customer(0);
    let unsaid = me.get("/v1/cluster/config").await.data(200);
    assert_eq!(unsaid["dead_after_s"], 600);
    let wrong = me.put("/v1/cluster/config", &json!({ "dead_after_s": 0 })).await;
    assert_eq!((wrong.status, wrong.code()), (400, "VALIDATION_ERROR"));
    let wrong = me.put("/v1/cluster/config", &json!({ "dead_after": 5 })).await;
    assert_eq!((wrong.status, wrong.code()), (400, "VALIDATION_ERROR"));
    let said = json!({ "dead_after_s": 1, "stabilization_s": 1, "cleanup_dead_servers": false });
    let answer = me.put("/v1/cluster/config", &said).await.data(200);
    assert_eq!((&answer["dead_after_s"], &answer["min_quorum"]), (&json!(1), &json!(3)));
    assert_eq!(cluster.customer(2).get("/v1/cluster/config").await.data(200), answer);
    let victim = cluster.nodes[2].id.clone();
    cluster.kill(2);
    let status = async || {
        let node = me.get(&format!("/v1/cluster/nodes/{victim}")).await.data(200);
        (node["alive"].clone(), node["status"].clone())
    };
    eventually("it is missed", async || {
        let now = status().await;
        if now.0 == false { Ok(()) } else { Err(format!("{now:?}")) }
    })
    .await;
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert_eq!(status().await.1, "active", "nobody is given up when that is not wanted");
    me.put("/v1/cluster/config", &json!({ "dead_after_s": 1 })).await.data(200);
    eventually("it is given up", async || {
        let now = status().await;
        if now.1 == "dead" { Ok(()) } else { Err(format!("{now:?}")) }
    })
    .await;
    let leader = me.get("/v1/cluster").await.data(200)["leader"].clone();
    let leading = cluster.customer(cluster.place(leader.as_str().expect("one leads")));
    let health = leading.get("/v1/cluster/health").await.data(200);
    assert_eq!(health["healthy"], false, "{health:#}");
    for server in health["servers"].as_array().expect("servers") {
        let is_victim = server["id"] == json!(victim);
        assert_eq!(server["healthy"], json!(!is_victim), "{server:#}");
        let has = server["last_index"].is_u64() && server["last_contact_ms"].is_u64();
        assert!(is_victim || has, "the leader knows how far it is: {server:#}");
    }
}

/// Somebody with a certificate, or without one, at a node's peer port.
fn at_the_peer_port(folder: &std::path::Path, address: &str, known: bool) -> reqwest::Client {
    let read = |name: &str| std::fs::read(folder.join(name)).expect("it was written");
    let authority = reqwest::Certificate::from_pem(&read("ca.pem")).expect("a certificate");
    let client = reqwest::Client::builder()
        .tls_certs_only([authority])
        .resolve("any.node.roost", address.parse().expect("an address"));
    let client = match known {
        true => {
            let both = [read("client.pem"), read("client-key.pem")].concat();
            client.identity(reqwest::Identity::from_pem(&both).expect("an identity"))
        }
        false => client,
    };
    client.build().expect("a client")
}

#[tokio::test]
async fn figures_are_scraped_with_a_certificate_that_opens_nothing_else() {
    let cluster = Cluster::of(2);
    let me = cluster.customer(0);
    let place = tempfile::tempdir().expect("a folder");
    let folder = place.path().join("certificate");
    let made = cluster.operate(0, &["cluster", "certificate", &folder.display().to_string()]);
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    assert_eq!(me.get("/metrics").await.status, 404, "clients get no figures");
    let nodes = me.get("/v1/cluster/nodes").await.data(200);
    for node in nodes["items"].as_array().expect("a list") {
        let address = node["peer_address"].as_str().expect("an address");
        let url = |path: &str| {
            format!("https://any.node.roost:{}{path}", address.rsplit(':').next().expect("a port"))
        };
        let scraper = at_the_peer_port(&folder, address, true);
        let text = async || {
            let answer = scraper.get(url("/metrics")).send().await.expect("an answer");
            assert_eq!(answer.status(), 200);
            let kind = answer.headers()["content-type"].to_str().expect("text").to_owned();
            assert!(kind.starts_with("application/openmetrics-text"), "{kind}");
            answer.text().await.expect("text")
        };
        let text = text().await;
        let value = |line: &str| -> f64 {
            let found = text.lines().find_map(|one| one.strip_prefix(&format!("{line} ")));
            found.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("{line} in {text}"))
        };
        assert!((value("roost_nodes_alive") - 2.0).abs() < 0.1, "{text}");
        assert!((value("roost_group_has_leader{group=\"directory\"}") - 1.0).abs() < 0.1);
        assert!(value("roost_log_commit_seconds_count") > 0.0);
        assert!(value("roost_resident_memory_bytes") > 1e6);
        assert!(text.ends_with("# EOF\n"));
        for path in ["/operate", "/raft/0/append", "/export/0", "/snapshots/"] {
            let answer = scraper.post(url(path)).send().await.expect("an answer");
            assert_eq!(answer.status(), 401, "{path}");
        }
        let stranger = at_the_peer_port(&folder, address, false);
        let answer = stranger.get(url("/metrics")).send().await.expect("an answer");
        assert_eq!(answer.status(), 401, "no certificate, no figures");
    }
}
