//! The files that operators start from: each is read by the program it is for, and the one for containers
//! becomes a cluster that works.

use std::{
    fs,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use serde_json::{Value, json};
use tests::{Customer, engine, engine::told, eventually, skipped, source::ECHO};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy").canonicalize().expect("deploy")
}

/// Three nodes as `compose.yaml` makes them; they and their volumes go with the value.
struct Composed {
    settings: Vec<(&'static str, String)>,
    ports: [u16; 3],
    place: tempfile::TempDir,
}

const PROJECT: &str = "roost-test-compose";

impl Composed {
    fn up() -> Self {
        let image = engine::node_image(&tests::binary());
        let place = tempfile::tempdir().expect("a folder");
        let secret = place.path().join("secret");
        fs::write(&secret, "0123456789abcdef0123456789abcdef0123456789abcdef").expect("written");
        let free = || TcpListener::bind("127.0.0.1:0").and_then(|one| one.local_addr());
        let ports = [0; 3].map(|_| free().expect("a free port").port());
        let settings = vec![
            ("ROOST_IMAGE", image.to_owned()),
            ("ROOST_SECRET", secret.display().to_string()),
            ("ROOST_PORT_1", ports[0].to_string()),
            ("ROOST_PORT_2", ports[1].to_string()),
            ("ROOST_PORT_3", ports[2].to_string()),
        ];
        let this = Self { settings, ports, place };
        // What a run before left behind.
        this.compose(&["down", "--volumes", "--timeout", "5"]);
        let up = this.compose(&["up", "-d"]);
        assert!(up.status.success(), "{}", String::from_utf8_lossy(&up.stderr));
        this
    }

    fn compose(&self, words: &[&str]) -> Output {
        let mut command = Command::new("docker-compose");
        command.args(["-p", PROJECT, "-f"]).arg(folder().join("compose.yaml")).args(words);
        command.envs(self.settings.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null()).output().expect("docker-compose runs")
    }

    fn lose_disk_of_the_first(&self) {
        self.compose(&["rm", "-f", "-s", "-v", "node1"]);
        told(&["volume", "rm", &format!("{PROJECT}_node1")]);
        let up = self.compose(&["up", "-d", "node1"]);
        assert!(up.status.success(), "{}", String::from_utf8_lossy(&up.stderr));
    }

    fn container(&self, node: usize) -> String {
        let listed = self.compose(&["ps", "-q", &format!("node{}", node + 1)]);
        String::from_utf8_lossy(&listed.stdout).trim().to_owned()
    }

    async fn are_healthy(&self, nodes: &[usize]) {
        for node in nodes {
            let container = self.container(*node);
            eventually("the health check passes", async || {
                let health = told(&["inspect", "--format", "{{.State.Health.Status}}", &container]);
                if health == "healthy" {
                    return Ok(());
                }
                let logs = engine::docker(&["logs", "--tail", "5", &container]);
                Err(format!("{health}: {}", String::from_utf8_lossy(&logs.stderr)))
            })
            .await;
        }
    }

    fn customer(&self, node: usize, key: &str) -> Customer {
        let authority = self.place.path().join("ca.pem");
        let from = format!("{}:/var/lib/roost/tls/ca.pem", self.container(0));
        told(&["cp", &from, &authority.display().to_string()]);
        Customer::new(&format!("https://127.0.0.1:{}", self.ports[node]), &authority, key)
    }
}

impl Drop for Composed {
    fn drop(&mut self) {
        self.compose(&["down", "--volumes", "--timeout", "5"]);
    }
}

fn has(program: &str, version: &str) -> bool {
    let asked = Command::new(program).arg(version).output();
    asked.is_ok_and(|output| output.status.success())
}

#[tokio::test]
async fn the_compose_file_becomes_a_cluster_that_outlives_a_node() {
    if !engine::answers() {
        return skipped("docker");
    }
    if !has("docker-compose", "version") {
        return skipped("compose");
    }
    let cluster = Composed::up();
    cluster.are_healthy(&[0, 1, 2]).await;
    let keys = told(&["exec", &cluster.container(0), "cat", "/var/lib/roost/first-keys.json"]);
    let keys: Value = serde_json::from_str(&keys).expect("JSON");
    let key = keys["live_key"].as_str().expect("a key");
    let me = cluster.customer(1, key);
    eventually("three nodes, one of which may be lost", async || {
        let glance = me.get("/v1/cluster").await.data(200);
        let fits = glance["failure_tolerance"] == 1 && glance["nodes"] == json!({ "active": 3 });
        if fits { Ok(()) } else { Err(glance.to_string()) }
    })
    .await;
    let wanted = me.wanted("composed", &[("agent.py", ECHO)]).await;
    let id = me.deploy_as(&wanted).await;
    for node in 0..3 {
        let answer = cluster.customer(node, key).invoke(&id, &json!(node)).await.data(200);
        assert_eq!(answer["output"]["echo"], json!(node));
    }
    let victim = cluster.container(2);
    told(&["kill", &victim]);
    eventually("writing goes on", async || {
        let request = me.request(reqwest::Method::POST, "/v1/clouds");
        let request = request.header("idempotency-key", "after the loss");
        let made = me.send(request.json(&json!({ "name": "after-the-loss" }))).await;
        if made.status == 201 { Ok(()) } else { Err(format!("{made:?}")) }
    })
    .await;
    eventually("the agent answers", async || {
        let answer = me.invoke(&id, &json!("still")).await;
        if answer.status == 200 { Ok(()) } else { Err(format!("{answer:?}")) }
    })
    .await;
    told(&["start", &victim]);
    cluster.are_healthy(&[2]).await;
    let clouds = cluster.customer(2, key).get("/v1/clouds?name=after-the-loss").await.data(200);
    assert_eq!(clouds["items"].as_array().map(Vec::len), Some(1), "it has what it missed");
    // The very first node loses its disk: it must come back as a new member, not as a new cluster.
    cluster.lose_disk_of_the_first();
    cluster.are_healthy(&[0]).await;
    let new = cluster.customer(0, key);
    let clouds = new.get("/v1/clouds?name=after-the-loss").await.data(200);
    assert_eq!(clouds["items"].as_array().map(Vec::len), Some(1), "it belongs to the old cluster");
    let nodes = new.get("/v1/cluster/nodes").await.data(200);
    assert_eq!(nodes["items"].as_array().map(Vec::len), Some(4), "under a new number: {nodes:#}");
}

#[test]
fn prometheus_takes_the_rules() {
    if !has("promtool", "--version") {
        return skipped("promtool");
    }
    let rules = folder().join("prometheus/rules.yml");
    let checked = Command::new("promtool").args(["check", "rules"]).arg(rules).output();
    let checked = checked.expect("promtool runs");
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
}

/// Every figure that rules and dashboard speak of.
fn figures_named() -> Vec<String> {
    let read = |name: &str| fs::read_to_string(folder().join(name)).expect("readable");
    let text = read("prometheus/rules.yml") + &read("grafana/roost.json");
    let is_part = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
    let words = text.split(|letter| !is_part(letter)).map(str::to_owned);
    let mut names: Vec<String> = words.filter(|word| word.starts_with("roost_")).collect();
    names.sort();
    names.dedup();
    names
}

#[test]
fn rules_and_dashboard_speak_of_figures_that_there_are() {
    let metrics = Path::new(env!("CARGO_MANIFEST_DIR")).join("../node/src/adapters/metrics.rs");
    let source = fs::read_to_string(metrics).expect("readable");
    let names = figures_named();
    assert!(names.len() > 10, "{names:?}");
    for name in names {
        let bare = name.trim_start_matches("roost_");
        let bare = ["_total", "_bucket", "_count", "_sum"]
            .iter()
            .find_map(|end| bare.strip_suffix(end))
            .unwrap_or(bare);
        assert!(source.contains(&format!("\"{bare}\"")), "{name} is no figure of metrics.rs");
    }
}

#[test]
fn every_file_for_an_orchestrator_can_be_read() {
    let script = "import json, sys, yaml\n\
        docs = list(yaml.safe_load_all(open(sys.argv[1] + '/kubernetes/roost.yaml')))\n\
        kinds = sorted(doc['kind'] for doc in docs)\n\
        assert kinds == ['PodDisruptionBudget', 'Service', 'Service', 'StatefulSet'], kinds\n\
        json.load(open(sys.argv[1] + '/grafana/roost.json'))";
    if !has("/usr/bin/python3", "-cimport yaml") {
        return skipped("yaml");
    }
    let read = Command::new("/usr/bin/python3").args(["-c", script]).arg(folder()).output();
    let read = read.expect("python runs");
    assert!(read.status.success(), "{}", String::from_utf8_lossy(&read.stderr));
}
