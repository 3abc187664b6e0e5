//! Agents as containers of a real engine: built, pulled, caged, adopted and cleaned up.

use serde_json::{Value, json};
use tests::{
    Customer, Node, engine,
    engine::{LOGIN, Registry, containers_of, docker, told},
    eventually, skipped, source,
};

/// A node whose containers are built on images of this machine; `None` without an engine.
fn node() -> Option<Node> {
    if !engine::answers() {
        skipped("docker");
        return None;
    }
    engine::bases();
    Some(Node::with(&[
        ("ROOST_BUILD__BASE_IMAGES__PYTHON", engine::PYTHON),
        ("ROOST_BUILD__BASE_IMAGES__NODE", engine::NODE),
        ("ROOST_BUILD__BASE_IMAGES__BINARY", "scratch"),
    ]))
}

async fn cloud(me: &Customer) -> String {
    let clouds = me.get("/v1/clouds?name=docker").await.data(200);
    let cloud = &clouds["items"][0];
    assert_eq!((&cloud["provider"], &cloud["status"]), (&json!("docker"), &json!("running")));
    cloud["id"].as_str().expect("an id").to_owned()
}

async fn wanted(me: &Customer, name: &str, archive: Vec<u8>) -> Value {
    let archive_url = me.upload(archive).await;
    json!({
        "name": name,
        "cloud_id": cloud(me).await,
        "source": { "type": "upload", "archive_url": archive_url },
    })
}

async fn probe(me: &Customer, id: &str, what: &str) -> Value {
    me.invoke(id, &json!({ "probe": what })).await.data(200)["output"].clone()
}

async fn gone(agent: &str) {
    eventually("nothing of the agent is left", async || {
        let images = told(&["images", "--format", "{{.Repository}}", &format!("roost/{agent}")]);
        let left = (containers_of(agent), images);
        if left == (vec![], String::new()) { Ok(()) } else { Err(format!("{left:?}")) }
    })
    .await;
}

#[tokio::test]
async fn a_container_has_only_what_it_needs() {
    let Some(node) = node() else { return };
    let me = node.customer();
    let mut body = wanted(&me, "caged", source::compiled_echo(10, &[])).await;
    body["environment"] = json!({ "API_TOKEN": "a-very-secret-value", "PLAIN": "seen" });
    body["resources"] = json!({ "cpu": 1, "memory_mb": 64 });
    let id = me.deploy_as(&body).await;
    let instances = me.get(&format!("/v1/agents/{id}/instances")).await.data(200);
    let layers = instances["items"][0]["isolation"].to_string();
    for layer in [
        "container",
        "capabilities",
        "no_new_privs",
        "network",
        "memory",
        "cpu",
        "pids",
        "seccomp",
        "read_only_root",
    ] {
        assert!(layers.contains(layer), "{layer} is missing in {layers}");
    }
    assert_eq!(probe(&me, &id, "env API_TOKEN").await, "a-very-secret-value");
    assert_eq!(probe(&me, &id, "env PLAIN").await, "seen");
    assert_eq!(probe(&me, &id, "env PORT").await, "8080");
    let container = containers_of(&id).remove(0);
    let record = told(&["inspect", &container]);
    assert!(!record.contains("a-very-secret-value"), "the engine keeps no secret");
    for place in ["/agent/x", "/x", "/.roost-enter/variables"] {
        let answer = probe(&me, &id, &format!("write {place}")).await.to_string();
        assert!(answer.contains("Err"), "{place}: {answer}");
    }
    assert_eq!(probe(&me, &id, "write /tmp/x").await, "Ok(())");
    let status = probe(&me, &id, "read /proc/self/status").await.to_string();
    for told in ["CapEff:\\t0000000000000000", "NoNewPrivs:\\t1", "Uid:\\t1000", "Seccomp:\\t2"] {
        assert!(status.contains(told), "{told}: {status}");
    }
    let threads: usize =
        probe(&me, &id, "fork 2000").await.as_str().map_or(0, |n| n.parse().expect("a number"));
    assert!((1..600).contains(&threads), "{threads} threads");
    me.delete(&format!("/v1/agents/{id}")).await.data(200);
    gone(&id).await;
}

#[tokio::test]
async fn containers_do_not_reach_each_other() {
    let Some(node) = node() else { return };
    let me = node.customer();
    let mut body = wanted(&me, "one", source::compiled_echo(10, &[])).await;
    let one = me.deploy_as(&body).await;
    body["name"] = json!("two");
    let two = me.deploy_as(&body).await;
    let format = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}";
    let other = told(&["inspect", "--format", format, &containers_of(&two)[0]]);
    let own = told(&["inspect", "--format", format, &containers_of(&one)[0]]);
    assert_eq!(probe(&me, &one, &format!("connect {own}:8080")).await, "true");
    assert_eq!(probe(&me, &one, &format!("connect {other}:8080")).await, "false");
}

#[tokio::test]
async fn an_agent_that_takes_too_much_memory_is_told_so() {
    let Some(node) = node() else { return };
    let me = node.customer();
    let mut body = wanted(&me, "eater", source::compiled_echo(10, &[])).await;
    body["resources"] = json!({ "memory_mb": 64 });
    body["environment"] = json!({ "EAT_AT_START": "200" });
    let id = me.post("/v1/agents", &body).await.data(201)["id"].as_str().expect("an id").to_owned();
    let agent = me.settled(&id, "failed,running").await;
    assert_eq!(agent["status_reason"]["code"], "OUT_OF_MEMORY", "{agent:#}");
    assert!(agent["status_reason"]["message"].to_string().contains("memory_mb"), "{agent:#}");
}

#[tokio::test]
async fn python_and_node_sources_are_built_and_logged() {
    let Some(node) = node() else { return };
    let me = node.customer();
    let wheel = source::zip(&[
        ("thing.py", "WORD = 'installed'\n"),
        ("thing-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n"),
        (
            "thing-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        ),
        (
            "thing-1.0.dist-info/RECORD",
            "thing.py,,\nthing-1.0.dist-info/METADATA,,\nthing-1.0.dist-info/WHEEL,,\nthing-1.0.dist-info/RECORD,,\n",
        ),
    ]);
    let code = b"import thing\ndef invoke(input, context):\n    print('asked', input)\n    yield thing.WORD\n    yield '!'\n";
    let archive = source::tar_gz_of(&[
        ("agent.py", code),
        ("requirements.txt", b"./thing-1.0-py3-none-any.whl\n"),
        ("thing-1.0-py3-none-any.whl", &wheel),
    ]);
    let id = me.deploy_as(&wanted(&me, "py", archive).await).await;
    assert_eq!(me.invoke(&id, &json!(7)).await.data(200)["output"], "installed!");
    let events = me.stream(&id, &json!(8)).await;
    assert!(events.iter().any(|event| event["content"] == "installed"), "{events:?}");
    let agent = me.get(&format!("/v1/agents/{id}")).await.data(200);
    assert_eq!(agent["runtime"]["language"], "python");
    let deployments = me.get(&format!("/v1/agents/{id}/deployments")).await.data(200);
    let path = format!(
        "/v1/agents/{id}/deployments/{}/logs",
        deployments["items"][0]["id"].as_str().expect("an id")
    );
    let built = me.get(&path).await.data(200).to_string();
    assert!(built.contains("Step 1/") && built.contains("requirements.txt"), "{built}");
    eventually("its output is in the log", async || {
        let lines = me.get(&format!("/v1/agents/{id}/logs")).await.data(200).to_string();
        if lines.contains("asked 7") { Ok(()) } else { Err(lines) }
    })
    .await;
    let archive =
        source::tar_gz(&[("agent.mjs", "export const invoke = async (input) => input + 1;\n")]);
    let id = me.deploy_as(&wanted(&me, "js", archive).await).await;
    assert_eq!(me.invoke(&id, &json!(41)).await.data(200)["output"], 42);
}

#[tokio::test]
async fn a_dockerfile_wins_and_may_fail() {
    let Some(node) = node() else { return };
    let me = node.customer();
    let dockerfile =
        "FROM scratch\nCOPY echo /bin/echo\nENV FROM_FILE=yes\nEXPOSE 9000\nCMD [\"/bin/echo\"]\n";
    let archive = source::compiled_echo(10, &[("Dockerfile", dockerfile), ("main.py", "")]);
    let id = me.deploy_as(&wanted(&me, "file", archive).await).await;
    assert_eq!(probe(&me, &id, "env PORT").await, "9000");
    assert_eq!(probe(&me, &id, "env FROM_FILE").await, "yes");
    for (name, dockerfile, told) in [
        ("broken", "FROM scratch\nRUN [\"/nothing\"]\n", "/nothing"),
        ("empty", "FROM scratch\nCOPY echo /echo\n", "CMD"),
        ("odd", "BREW coffee\n", "BREW"),
    ] {
        let body =
            wanted(&me, name, source::compiled_echo(10, &[("Dockerfile", dockerfile)])).await;
        let id =
            me.post("/v1/agents", &body).await.data(201)["id"].as_str().expect("an id").to_owned();
        let agent = me.settled(&id, "failed,running").await;
        assert_eq!(agent["status_reason"]["code"], "BUILD_FAILED", "{name}: {agent:#}");
        assert!(agent["status_reason"].to_string().contains(told), "{name}: {agent:#}");
        gone(&id).await;
    }
}

#[tokio::test]
async fn a_base_image_that_is_not_there_is_named() {
    if !engine::answers() {
        return skipped("docker");
    }
    let node = Node::with(&[("ROOST_BUILD__BASE_IMAGES__PYTHON", "127.0.0.1:1/python:{version}")]);
    let me = node.customer();
    let mut body = wanted(&me, "baseless", source::tar_gz(&[("agent.py", source::ECHO)])).await;
    body["runtime"] = json!({ "version": "3.9" });
    let agent = me.post("/v1/agents", &body).await.data(201);
    let agent = me.settled(agent["id"].as_str().expect("an id"), "failed,running").await;
    let told = agent["status_reason"]["message"].to_string();
    assert!(
        told.contains("127.0.0.1:1/python:3.9") && told.contains("build.base_images"),
        "{told}"
    );
}

#[tokio::test]
async fn a_build_that_is_called_off_leaves_nothing() {
    let Some(node) = node() else { return };
    let me = node.customer();
    let dockerfile = format!(
        "FROM {}\nLABEL story={}\nRUN [\"python3\", \"-c\", \"import time; print('begun', flush=True); time.sleep(600)\"]\n",
        engine::PYTHON,
        node.pid()
    );
    let body = wanted(&me, "slow", source::tar_gz(&[("Dockerfile", &dockerfile)])).await;
    let id = me.post("/v1/agents", &body).await.data(201)["id"].as_str().expect("an id").to_owned();
    let agent = me.settled(&id, "building").await;
    let deployment = agent["deployment"]["id"].as_str().expect("an id").to_owned();
    let path = format!("/v1/agents/{id}/deployments/{deployment}");
    eventually("the step has begun", async || {
        let lines = me.get(&format!("{path}/logs")).await.data(200).to_string();
        if lines.contains("begun") { Ok(()) } else { Err(lines) }
    })
    .await;
    me.call(&format!("{path}/cancel")).await.data(200);
    let agent = me.settled(&id, "failed").await;
    assert_eq!(agent["status_reason"]["code"], "DEPLOY_CANCELED", "{agent:#}");
    let filter = format!("label=story={}", node.pid());
    eventually("no step is running", async || {
        let left = told(&["ps", "--quiet", "--filter", &filter]);
        if left.is_empty() { Ok(()) } else { Err(left) }
    })
    .await;
}

/// An image of the echo server in this machine's engine.
fn local_image(number: u32) -> String {
    let folder = tempfile::tempdir().expect("a folder");
    let program = folder.path().join("echo");
    std::fs::write(&program, source::echo_program()).expect("written");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&program, mode).expect("runnable");
    let dockerfile = "FROM scratch\nCOPY echo /echo\nCMD [\"/echo\"]\n";
    std::fs::write(folder.path().join("Dockerfile"), dockerfile).expect("written");
    let name = format!("roost-test-echo:{number}");
    told(&["build", "--quiet", "--tag", &name, &folder.path().to_string_lossy()]);
    name
}

#[tokio::test]
async fn mirrors_are_asked_first_and_local_images_only_where_allowed() {
    if !engine::answers() {
        return skipped("docker");
    }
    let Some(registry) = Registry::open() else { return skipped("registry") };
    let mirror =
        format!("[\"registry.invalid=127.0.0.1:1\", \"registry.invalid={}\"]", registry.address);
    let node = Node::with(&[
        ("ROOST_DOCKER__REGISTRIES", &mirror),
        ("ROOST_DOCKER__LOCAL_IMAGES", "true"),
    ]);
    let me = node.customer();
    let cloud = cloud(&me).await;
    let local = local_image(node.pid());
    let open = format!("{}/team/echo:1", registry.address);
    told(&["tag", &local, &open]);
    told(&["push", &open]);
    told(&["rmi", &open]);
    let deploy = async |name: &str, image: &str| {
        let source = json!({ "type": "docker", "image": image });
        let body = json!({ "name": name, "cloud_id": cloud, "source": source });
        let agent = me.post("/v1/agents", &body).await.data(201);
        me.settled(agent["id"].as_str().expect("an id"), "failed,running").await
    };
    let mirrored = deploy("mirrored", "registry.invalid/team/echo:1").await;
    assert_eq!(mirrored["status"], "running", "{mirrored:#}");
    let own = deploy("own", &local).await;
    assert_eq!(own["status"], "running", "{own:#}");
    let id = own["id"].as_str().expect("an id");
    let kept = told(&["images", "--format", "{{.Repository}}:{{.Tag}}", &format!("roost/{id}")]);
    let taken = deploy("thief", &kept).await;
    assert_eq!(taken["status_reason"]["code"], "IMAGE_PULL_FAILED", "{taken:#}");
    for agent in [&mirrored, &own, &taken] {
        let id = agent["id"].as_str().expect("an id");
        me.delete(&format!("/v1/agents/{id}")).await.data(200);
        gone(id).await;
    }
    told(&["rmi", &local]);
}

#[tokio::test]
async fn a_private_registry_serves_whoever_has_its_password() {
    let Some(node) = node() else { return };
    let Some(registry) = Registry::start() else { return skipped("registry") };
    let me = node.customer();
    let local = local_image(node.pid());
    let image = registry.push(&local, "team/echo:1");
    let body = |name: &str, image: &str, login: Option<(&str, &str)>, cloud: &str| {
        let mut source = json!({ "type": "docker", "image": image });
        if let Some((username, password)) = login {
            source["credentials"] = json!({ "username": username, "password": password });
        }
        json!({ "name": name, "cloud_id": cloud, "source": source })
    };
    let cloud = cloud(&me).await;
    for (name, image, login) in [
        ("none", image.clone(), None),
        ("wrong", image.clone(), Some((LOGIN.0, "guess"))),
        ("tag", format!("{image}9"), Some(LOGIN)),
    ] {
        let wanted = body(name, &image, login, &cloud);
        let id = me.post("/v1/agents", &wanted).await.data(201)["id"]
            .as_str()
            .expect("an id")
            .to_owned();
        let agent = me.settled(&id, "failed,running").await;
        let reason = &agent["status_reason"];
        assert_eq!(reason["code"], "IMAGE_PULL_FAILED", "{name}: {agent:#}");
        let told = if name == "tag" { "no such image" } else { "credentials" };
        assert!(reason["message"].to_string().contains(told), "{name}: {agent:#}");
    }
    let id = me.deploy_as(&body("right", &image, Some(LOGIN), &cloud)).await;
    assert_eq!(probe(&me, &id, "env PORT").await, "8080");
    let agent = me.get(&format!("/v1/agents/{id}")).await.data(200);
    let digest = agent["source"]["digest"].as_str().unwrap_or_default();
    assert!(digest.starts_with("sha256:") && digest.len() == 71, "{agent:#}");
    assert!(!agent.to_string().contains(LOGIN.1), "{agent:#}");
    assert!(!docker(&["image", "inspect", &image]).status.success(), "only our name keeps it");
    // The password may be a secret of the organization, by its name.
    let named = body("named", &image, Some((LOGIN.0, "${secrets.REGISTRY}")), &cloud);
    me.post("/v1/agents", &named).await.refused(400, "SECRET_NOT_FOUND");
    me.put("/v1/secrets/REGISTRY", &json!({ "value": "a guess" })).await.data(200);
    let named =
        me.post("/v1/agents", &named).await.data(201)["id"].as_str().expect("an id").to_owned();
    let agent = me.settled(&named, "failed,running").await;
    assert_eq!(agent["status_reason"]["code"], "IMAGE_PULL_FAILED", "{agent:#}");
    me.put("/v1/secrets/REGISTRY", &json!({ "value": LOGIN.1 })).await.data(200);
    me.call(&format!("/v1/agents/{named}/redeploy")).await.data(200);
    me.settled(&named, "running").await;
    assert_eq!(probe(&me, &named, "env PORT").await, "8080");
    me.delete(&format!("/v1/agents/{named}")).await.data(200);
    gone(&named).await;
    // The image that was pulled with somebody's password is not for others.
    let other = me.post("/v1/agents", &body("thief", &image, None, &cloud)).await.data(201);
    let other = me.settled(other["id"].as_str().expect("an id"), "failed,running").await;
    assert_eq!(other["status_reason"]["code"], "IMAGE_PULL_FAILED", "{other:#}");
    me.delete(&format!("/v1/agents/{id}")).await.data(200);
    gone(&id).await;
    told(&["rmi", &local]);
}

#[tokio::test]
async fn containers_outlive_a_crash_of_the_node_and_are_adopted() {
    let Some(mut node) = node() else { return };
    let me = node.customer();
    let id = me.deploy_as(&wanted(&me, "survivor", source::compiled_echo(10, &[])).await).await;
    let gone_soon =
        me.deploy_as(&wanted(&me, "orphan", source::compiled_echo(10, &[])).await).await;
    probe(&me, &id, "say before the crash").await;
    let before = containers_of(&id);
    let place = "{{(index (index .NetworkSettings.Ports \"8080/tcp\") 0).HostPort}}";
    let port = told(&["inspect", "--format", place, &before[0]]);
    node.kill();
    let call = json!({ "input": { "probe": "say while it was away" } }).to_string();
    let away = std::process::Command::new("curl")
        .args(["-s", "-m", "5", "-d", &call, &format!("http://127.0.0.1:{port}/invoke")])
        .output();
    assert!(away.is_ok_and(|away| away.status.success()), "the container goes on");
    told(&["rm", "-f", &containers_of(&gone_soon)[0]]);
    node.restart();
    let me = node.caller(&me.key);
    eventually("it is adopted", async || {
        let answer = me.invoke(&id, &json!({ "probe": "say after the crash" })).await;
        if answer.status == 200 { Ok(()) } else { Err(format!("{:#}", answer.body)) }
    })
    .await;
    assert_eq!(containers_of(&id), before, "it is the same container");
    eventually("no line is lost", async || {
        let lines = me.get(&format!("/v1/agents/{id}/logs")).await.data(200).to_string();
        let times = |text: &str| lines.matches(text).count();
        let found =
            (times("before the crash"), times("while it was away"), times("after the crash"));
        if found.0 >= 1 && found.1 == 1 && found.2 >= 1 {
            Ok(())
        } else {
            Err(format!("{found:?} in {lines}"))
        }
    })
    .await;
    // One that died meanwhile is made anew, and that is no crash of the agent's.
    eventually("the other is back", async || {
        let answer = me.invoke(&gone_soon, &json!({})).await;
        if answer.status == 200 { Ok(()) } else { Err(format!("{:#}", answer.body)) }
    })
    .await;
    let pid = node.pid();
    node.terminate();
    assert_eq!(
        (containers_of(&id), containers_of(&gone_soon)),
        (vec![], vec![]),
        "{pid}: an orderly end ends all"
    );
}

#[tokio::test]
async fn a_redeployment_of_containers_fails_no_request() {
    let Some(node) = node() else { return };
    let me = node.customer();
    let id = me.deploy_as(&wanted(&me, "roller", source::compiled_echo(64, &[])).await).await;
    let archive_url = me.upload(source::compiled_echo(64, &[("new.txt", "x")])).await;
    let body = json!({ "source": { "type": "upload", "archive_url": archive_url } });
    me.post(&format!("/v1/agents/{id}/redeploy"), &body).await.data(200);
    let mut calls = 0;
    loop {
        me.invoke(&id, &json!({})).await.data(200);
        calls += 1;
        let agent = me.get(&format!("/v1/agents/{id}")).await.data(200);
        if agent["version"] == "2" && containers_of(&id).len() == 1 {
            break;
        }
        assert!(calls < 5000, "{agent:#}");
    }
    let images = told(&["images", "--quiet", &format!("roost/{id}")]);
    assert_eq!(images.lines().count(), 2, "two versions are kept");
}

#[tokio::test]
async fn a_cloud_without_an_engine_says_so() {
    let node = Node::with(&[("ROOST_DOCKER__SOCKET", "/nonexistent/docker.sock")]);
    let me = node.customer();
    let clouds = me.get("/v1/clouds").await.data(200);
    assert_eq!(clouds["items"].as_array().map(Vec::len), Some(1), "no engine, no docker cloud");
    let cloud =
        me.post("/v1/clouds", &json!({ "name": "later", "provider": "docker" })).await.data(201);
    assert_eq!(cloud["status"], "provisioning");
    assert!(cloud["status_reason"]["message"].to_string().contains("docker.sock"), "{cloud:#}");
    for image in ["no spaces:1", "acme/Bot:1", "-x:1", "acme/:1", "acme/bot:", ""] {
        let source = json!({ "type": "docker", "image": image });
        let body = json!({ "name": "odd", "cloud_id": cloud["id"], "source": source });
        me.post("/v1/agents", &body).await.refused(400, "VALIDATION_ERROR");
    }
    let source = json!({ "type": "docker", "image": "ghcr.io/acme/bot:1" });
    let body = json!({ "name": "early", "cloud_id": cloud["id"], "source": source });
    let agent = me.post("/v1/agents", &body).await.data(201);
    let agent = me.settled(agent["id"].as_str().expect("an id"), "failed,running").await;
    assert_eq!(agent["status_reason"]["code"], "NO_CAPACITY", "{agent:#}");
}
