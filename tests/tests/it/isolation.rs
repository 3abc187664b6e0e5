//! What an agent's process can't do, on this machine.

use std::process::Command;

use serde_json::{Value, json};
use tests::{Node, eventually, source::ECHO};

const PROBES: &str = r#"
import ctypes, os, resource, signal, socket

def attempt(action):
    try:
        action()
        return "allowed"
    except BaseException as error:
        return type(error).__name__

def bind(port):
    listener = socket.socket()
    listener.bind(("127.0.0.1", port))

def unshare():
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x10000000) != 0:
        raise OSError(ctypes.get_errno(), "unshare")

def status(name):
    for line in open("/proc/self/status"):
        if line.startswith(name + ":"):
            return line.split()[1]

def invoke(input, context):
    return {
        "uid": os.getuid(),
        "session": os.getsid(0) == os.getpid(),
        "no_new_privs": status("NoNewPrivs"),
        "seccomp": status("Seccomp"),
        "passwd": attempt(lambda: open("/etc/passwd").read()),
        "tmp": attempt(lambda: open("/tmp/roost-escape", "w")),
        "own": attempt(lambda: open(os.path.join(os.environ["TMPDIR"], "mine"), "w")),
        "image": attempt(lambda: open("planted", "w")),
        "bind": attempt(lambda: bind(int(os.environ["PORT"]) + 1)),
        "signal": attempt(lambda: os.kill(1, 0)),
        "unshare": attempt(unshare),
        "core": resource.getrlimit(resource.RLIMIT_CORE)[1],
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        "environ": sorted(name for name in os.environ if name.startswith("ROOST_") and not name.startswith("ROOST_AGENT") and name not in ("ROOST_INSTANCE_ID", "ROOST_VERSION")),
    }
"#;

fn is_root() -> bool {
    Command::new("id").arg("-u").output().is_ok_and(|output| output.stdout == b"0\n")
}

#[tokio::test]
async fn the_layers_that_are_reported_hold() {
    let node = Node::start();
    let me = node.customer();
    let id = me.deploy("caged", &[("agent.py", PROBES)]).await;
    let instances = me.get(&format!("/v1/agents/{id}/instances")).await.data(200);
    let layers = instances["items"][0]["isolation"].as_array().cloned().unwrap_or_default();
    let has = |layer: &str| layers.contains(&json!(layer));
    for always in ["process_group", "death_signal", "rlimits", "no_new_privs"] {
        assert!(has(always), "{always} must hold everywhere: {layers:?}");
    }
    let required = std::env::var("ROOST_REQUIRE").unwrap_or_default();
    for layer in ["uid", "landlock", "seccomp", "memory", "cpu", "pids"] {
        if !has(layer) {
            tests::skipped(layer);
        }
        assert!(has(layer) || !required.contains(layer));
    }
    let seen = me.invoke(&id, &json!({})).await.data(200)["output"].clone();
    assert_eq!(
        (&seen["session"], &seen["core"], &seen["no_new_privs"]),
        (&json!(true), &json!(0), &json!("1")),
        "{seen:#}"
    );
    assert!(seen["files"].as_u64().is_some_and(|files| files <= 4096));
    assert_eq!(seen["own"], "allowed");
    assert_eq!(seen["environ"], json!([]), "settings of the node are not the agent's");
    if has("uid") {
        assert!(is_root());
        assert!(seen["uid"].as_u64().is_some_and(|uid| uid >= 700_000), "{seen:#}");
        assert_ne!(seen["image"], "allowed");
    }
    if has("landlock") {
        for forbidden in ["passwd", "tmp", "bind", "image"] {
            assert_ne!(seen[forbidden], "allowed", "{forbidden}: {seen:#}");
        }
        assert_ne!(seen["signal"], "allowed");
    }
    if has("seccomp") {
        assert_eq!((&seen["seccomp"], &seen["unshare"]), (&json!("2"), &json!("PermissionError")));
    }
}

fn processes_of(node: &Node) -> Vec<String> {
    let folder = node.data.path().display().to_string();
    let mut found = vec![];
    for entry in std::fs::read_dir("/proc").expect("a /proc").flatten() {
        let command = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let cwd = std::fs::read_link(entry.path().join("cwd")).unwrap_or_default();
        let pid = entry.file_name().to_string_lossy().into_owned();
        if cwd.starts_with(&folder) && !command.is_empty() {
            found.push(pid);
        }
    }
    found
}

#[tokio::test]
async fn nothing_of_an_agent_outlives_it_or_the_node() {
    let mut node = Node::start();
    let me = node.customer();
    let forks = "import subprocess\nchild = subprocess.Popen(['sleep', '600'])\ndef invoke(input, context):\n    return child.pid\n";
    let id = me.deploy("forker", &[("agent.py", forks)]).await;
    let other = me.deploy("other", &[("agent.py", ECHO)]).await;
    assert!(processes_of(&node).len() >= 3);
    me.call(&format!("/v1/agents/{id}/stop")).await.data(200);
    me.settled(&id, "stopped").await;
    gone(&node, 1).await;
    me.call(&format!("/v1/agents/{id}/start")).await.data(200);
    me.settled(&id, "running").await;
    node.kill();
    // The death signal takes the agents; what they had forked goes when the node comes back.
    node.restart();
    let me = node.caller(&me.key);
    let first = me.invoke(&other, &json!(1)).await;
    assert_eq!(first.data(200)["output"]["echo"], 1, "agents come back by themselves");
    eventually("the forker is back", async || {
        let answer: Value = me.invoke(&id, &json!(1)).await.body;
        if answer["success"] == true { Ok(()) } else { Err(answer.to_string()) }
    })
    .await;
    gone(&node, 3).await;
    node.terminate();
    gone(&node, 0).await;
}

async fn gone(node: &Node, left: usize) {
    eventually(&format!("{left} processes are left"), async || {
        let now = processes_of(node);
        if now.len() == left { Ok(()) } else { Err(format!("{now:?}")) }
    })
    .await;
}

#[tokio::test]
async fn a_tenants_loader_variables_reach_the_agent_alone() {
    let node = Node::start();
    let me = node.customer();
    let mut wanted = me.wanted("loader", &[("agent.py", ECHO)]).await;
    // The loader says which program it starts.
    wanted["environment"] = json!({ "LD_DEBUG": "files" });
    let id = me.deploy_as(&wanted).await;
    let lines = me.get(&format!("/v1/agents/{id}/logs?stream=stderr&tail=5000")).await.data(200);
    let lines = lines["items"].to_string();
    assert!(lines.contains("initialize program"), "the agent's own loader heard it");
    assert!(!lines.contains("/roost"), "the step before the cage heard it: {lines:.2000}");
}

/// What a file of an agent's control group says (version 1, which has one folder per controller).
fn group_file(pid: &str, controller: &str, file: &str) -> Option<String> {
    let groups = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    let line = groups.lines().find(|line| line.split(':').nth(1) == Some(controller))?;
    let path = line.splitn(3, ':').nth(2)?;
    let text = std::fs::read_to_string(format!("/sys/fs/cgroup/{controller}{path}/{file}")).ok()?;
    Some(text.trim().to_owned())
}

async fn holds(me: &tests::Customer, id: &str, layer: &str) -> bool {
    let instances = me.get(&format!("/v1/agents/{id}/instances")).await.data(200);
    let holds = instances["items"][0]["isolation"].to_string().contains(&format!("\"{layer}\""));
    if !holds {
        tests::skipped(layer);
    }
    holds
}

#[tokio::test]
async fn control_groups_hold_what_was_asked_for() {
    let node = Node::start();
    let me = node.customer();
    let mut wanted = me.wanted("live", &[("agent.py", ECHO)]).await;
    wanted["resources"] = json!({ "cpu": 2, "memory_mb": 128 });
    let id = me.deploy_as(&wanted).await;
    let pid = processes_of(&node).remove(0);
    let files = [
        ("memory", "memory.limit_in_bytes", "134217728"),
        ("cpu", "cpu.cfs_quota_us", "200000"),
        ("pids", "pids.max", "512"),
    ];
    for (layer, file, value) in files {
        if holds(&me, &id, layer).await {
            assert_eq!(group_file(&pid, layer, file).as_deref(), Some(value), "{file}");
        }
    }
    me.delete(&format!("/v1/agents/{id}")).await.data(200);
    gone(&node, 0).await;
    let tester = node.tester();
    let id = tester.deploy_as(&tester.wanted("test", &[("agent.py", ECHO)]).await).await;
    let pid = processes_of(&node).remove(0);
    let capped =
        [("memory", "memory.limit_in_bytes", "268435456"), ("cpu", "cpu.cfs_quota_us", "50000")];
    for (layer, file, value) in capped {
        if holds(&tester, &id, layer).await {
            assert_eq!(group_file(&pid, layer, file).as_deref(), Some(value), "sandbox {file}");
        }
    }
}

#[tokio::test]
async fn an_agent_that_eats_all_its_memory_is_ended_and_told_so() {
    let node = Node::start();
    let me = node.customer();
    let code = "def invoke(input, context):\n    return len(bytearray(input << 20))\n";
    let mut wanted = me.wanted("eater", &[("agent.py", code)]).await;
    wanted["resources"] = json!({ "memory_mb": 128 });
    let id = me.deploy_as(&wanted).await;
    if !holds(&me, &id, "memory").await {
        return;
    }
    me.invoke(&id, &json!(50)).await.data(200);
    let failed = me.invoke(&id, &json!(500)).await;
    failed.refused(502, "AGENT_ERROR");
    eventually("its log says why", async || {
        let lines = me.get(&format!("/v1/agents/{id}/logs")).await.data(200).to_string();
        if lines.contains("out of memory") { Ok(()) } else { Err(lines) }
    })
    .await;
    let greedy = [("agent.py", "held = bytearray(500 << 20)\ndef invoke(i, c):\n    return 1\n")];
    let mut wanted = me.wanted("greedy", &greedy).await;
    wanted["resources"] = json!({ "memory_mb": 128 });
    let id =
        me.post("/v1/agents", &wanted).await.data(201)["id"].as_str().expect("an id").to_owned();
    let agent = me.settled(&id, "failed,running").await;
    assert_eq!(agent["status_reason"]["code"], "OUT_OF_MEMORY", "{agent:#}");
}

#[tokio::test]
async fn a_child_that_hides_goes_with_its_instance() {
    let node = Node::start();
    let me = node.customer();
    let hides = "import subprocess\nsubprocess.Popen(['env', '-i', 'setsid', 'sleep', '601'])\ndef invoke(input, context):\n    return 1\n";
    let id = me.deploy("hider", &[("agent.py", hides)]).await;
    if !holds(&me, &id, "pids").await {
        return;
    }
    eventually("it hides", async || {
        let now = processes_of(&node);
        if now.len() == 2 { Ok(()) } else { Err(format!("{now:?}")) }
    })
    .await;
    me.call(&format!("/v1/agents/{id}/stop")).await.data(200);
    me.settled(&id, "stopped").await;
    gone(&node, 0).await;
}
