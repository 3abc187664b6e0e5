//! Agents: deploy, look, list, change, stop, start, delete.

use reqwest::Method;
use serde_json::json;
use tests::{Node, eventually, source::ECHO};

#[tokio::test]
async fn an_agent_has_the_shape_of_the_specification() {
    let node = Node::start();
    let me = node.customer();
    let mut wanted = me.wanted("shape", &[("agent.py", ECHO)]).await;
    wanted["environment"] = json!({ "MODEL": "small", "API_KEY": "hunter2-hunter2" });
    wanted["metadata"] = json!({ "team": "search" });
    let id = me.deploy_as(&wanted).await;
    let answer = me.get(&format!("/v1/agents/{id}")).await;
    let etag = answer.header("etag").map(str::to_owned);
    let agent = answer.data(200);
    assert_eq!(etag.as_deref(), agent["etag"].as_str());
    assert_eq!(agent["name"], "shape");
    assert_eq!(agent["display_name"], "shape");
    assert_eq!((&agent["status"], &agent["status_reason"]), (&json!("running"), &json!(null)));
    assert_eq!((&agent["version"], &agent["latest_version"]), (&json!("1"), &json!("1")));
    assert_eq!(agent["runtime"]["language"], "python");
    assert_eq!(agent["resources"], json!({ "cpu": 1, "memory_mb": 512, "gpu": null }));
    let scaling = json!({ "min_instances": 1, "max_instances": 3, "current_instances": 1, "target_cpu_percent": 70 });
    assert_eq!(agent["scaling"], scaling);
    assert_eq!(agent["endpoints"]["base_url"], format!("{}/v1/agents/{id}/http", node.base_url));
    assert_eq!(agent["health"]["status"], "healthy");
    assert_eq!(agent["environment"], json!({ "MODEL": "small", "API_KEY": "********" }));
    assert_eq!(agent["source"]["type"], "upload");
    assert_eq!((&agent["livemode"], &agent["metadata"]["team"]), (&json!(true), &json!("search")));
    for time in ["created_at", "updated_at", "deployed_at"] {
        let text = agent[time].as_str().unwrap_or_default();
        assert!(text.len() == 24 && text.ends_with('Z'), "{time}: {text}");
    }
    assert_eq!(agent["deployment"]["status"], "live");
}

#[tokio::test]
async fn a_secret_is_nowhere_in_the_clear() {
    let node = Node::start();
    let me = node.customer();
    let secret = "canary-7f3a9b2c-canary";
    let code =
        "import os\ndef invoke(input, context):\n    return os.environ['DB_PASSWORD'] == input\n";
    let mut wanted = me.wanted("secret", &[("agent.py", code)]).await;
    wanted["environment"] = json!({ "DB_PASSWORD": secret });
    let id = me.deploy_as(&wanted).await;
    assert_eq!(me.invoke(&id, &json!(secret)).await.data(200)["output"], true, "the agent has it");
    let mask = json!({ "environment": { "DB_PASSWORD": "********", "MORE": "x" } });
    me.patch(&format!("/v1/agents/{id}"), &mask).await.data(200);
    me.settled(&id, "running").await;
    eventually("the mask keeps the value", async || {
        let agent = me.get(&format!("/v1/agents/{id}")).await.data(200);
        if agent["version"] == "2" { Ok(()) } else { Err(agent["version"].to_string()) }
    })
    .await;
    assert_eq!(me.invoke(&id, &json!(secret)).await.data(200)["output"], true, "the mask kept it");
    let found = std::process::Command::new("grep")
        .args(["-rlaF", secret])
        .arg(node.data.path())
        .output()
        .expect("grep runs");
    assert_eq!(String::from_utf8_lossy(&found.stdout), "", "plain on disk");
}

#[tokio::test]
async fn lists_are_paged_by_cursors_that_belong_to_their_filters() {
    let node = Node::start();
    let me = node.customer();
    let mut wanted = me.wanted("list", &[("nothing", "")]).await;
    for n in 0..7 {
        wanted["name"] = json!(format!("agent-{n}"));
        wanted["metadata"] = json!({ "half": if n < 4 { "low" } else { "high" } });
        me.post("/v1/agents", &wanted).await.data(201);
    }
    let mut seen = vec![];
    let mut path = "/v1/agents?limit=3&sort=name".to_owned();
    loop {
        let page = me.get(&path).await.data(200);
        seen.extend(page["items"].as_array().expect("items").iter().map(|one| one["name"].clone()));
        let Some(cursor) = page["next_cursor"].as_str() else { break };
        assert_eq!(page["has_more"], true);
        me.get(&format!("/v1/agents?limit=3&sort=-name&cursor={cursor}"))
            .await
            .refused(400, "INVALID_CURSOR");
        path = format!("/v1/agents?limit=3&sort=name&cursor={cursor}");
    }
    assert_eq!(seen, (0..7).map(|n| json!(format!("agent-{n}"))).collect::<Vec<_>>());
    let count = async |query: &str| {
        let page =
            me.get(&format!("/v1/agents?{query}&limit=100&include_total=true")).await.data(200);
        (page["items"].as_array().map_or(0, Vec::len), page["total"].as_u64())
    };
    assert_eq!(count("metadata[half]=high").await, (3, Some(3)));
    assert_eq!(count("q=AGENT-1").await, (1, Some(1)));
    assert_eq!(count("name=agent-1").await, (1, Some(1)));
    assert_eq!(count("created_before=2020-01-01T00:00:00Z").await, (0, Some(0)));
    assert_eq!(count("status=stopped").await, (0, Some(0)));
}

#[tokio::test]
async fn a_name_is_taken_once_and_free_after_delete() {
    let node = Node::start();
    let me = node.customer();
    let mut wanted = me.wanted("Name", &[("agent.py", ECHO)]).await;
    let id = me.deploy_as(&wanted).await;
    wanted["name"] = json!("nAME");
    me.post("/v1/agents", &wanted).await.refused(409, "AGENT_NAME_TAKEN");
    let gone = me.delete(&format!("/v1/agents/{id}")).await.data(200);
    assert_eq!(gone, json!({ "id": id, "deleted": true }));
    me.get(&format!("/v1/agents/{id}")).await.refused(404, "AGENT_NOT_FOUND");
    me.invoke(&id, &json!(1)).await.refused(404, "AGENT_NOT_FOUND");
    me.delete(&format!("/v1/agents/{id}")).await.refused(404, "AGENT_NOT_FOUND");
    me.deploy_as(&wanted).await;
}

#[tokio::test]
async fn stop_and_start_are_harmless_to_repeat() {
    let node = Node::start();
    let me = node.customer();
    let id = me.deploy("stopper", &[("agent.py", ECHO)]).await;
    let at = |verb: &str| format!("/v1/agents/{id}/{verb}");
    me.call(&at("start")).await.data(200);
    me.call(&at("stop")).await.data(200);
    me.invoke(&id, &json!(1)).await.refused(409, "AGENT_NOT_RUNNING");
    let agent = me.settled(&id, "stopped").await;
    assert_eq!(
        (&agent["status"], &agent["scaling"]["current_instances"]),
        (&json!("stopped"), &json!(0))
    );
    assert_eq!(agent["status_reason"]["code"], "STOPPED");
    me.call(&at("stop")).await.data(200);
    let agent = me.call(&at("start")).await.data(200);
    assert_eq!(agent["status"], "deploying");
    let agent = me.settled(&id, "running,failed").await;
    assert_eq!((&agent["status"], &agent["version"]), (&json!("running"), &json!("1")));
    assert_eq!(me.invoke(&id, &json!(2)).await.data(200)["output"]["echo"], 2);
}

#[tokio::test]
async fn a_change_needs_the_state_it_was_made_for() {
    let node = Node::start();
    let me = node.customer();
    let id = me.deploy("matcher", &[("agent.py", ECHO)]).await;
    let path = format!("/v1/agents/{id}");
    let etag = me.get(&path).await.data(200)["etag"].as_str().expect("an etag").to_owned();
    let rename = |name: &str, etag: &str| {
        let request = me.request(Method::PATCH, &path).header("if-match", etag);
        request.json(&json!({ "display_name": name }))
    };
    let agent = me.send(rename("First", &etag)).await.data(200);
    assert_eq!((&agent["display_name"], &agent["name"]), (&json!("First"), &json!("matcher")));
    assert_ne!(agent["etag"], json!(etag));
    me.send(rename("Second", &etag)).await.refused(409, "STALE_OBJECT");
    let notes = json!({ "metadata": { "a": "1", "b": "2" } });
    me.patch(&path, &notes).await.data(200);
    let agent = me.patch(&path, &json!({ "metadata": { "a": null } })).await.data(200);
    assert_eq!(agent["metadata"], json!({ "b": "2" }));
    assert_eq!(agent["version"], "1", "notes make no version");
}

#[tokio::test]
async fn live_and_test_do_not_see_each_other() {
    let node = Node::start();
    let (live, test) = (node.customer(), node.tester());
    let id = live.deploy("mine", &[("agent.py", ECHO)]).await;
    test.get(&format!("/v1/agents/{id}")).await.refused(404, "AGENT_NOT_FOUND");
    test.invoke(&id, &json!(1)).await.refused(404, "AGENT_NOT_FOUND");
    assert_eq!(test.get("/v1/agents").await.data(200)["items"], json!([]));
    let mut wanted = live.wanted("mine", &[("agent.py", ECHO)]).await;
    test.post("/v1/agents", &wanted).await.refused(404, "CLOUD_NOT_FOUND");
    wanted["cloud_id"] = json!(test.cloud().await);
    test.post("/v1/agents", &wanted).await.refused(400, "INVALID_ARCHIVE_URL");
    let other = test.deploy("mine", &[("agent.py", ECHO)]).await;
    let agent = test.get(&format!("/v1/agents/{other}")).await.data(200);
    assert_eq!(agent["livemode"], false);
    live.get(&format!("/v1/agents/{other}")).await.refused(404, "AGENT_NOT_FOUND");
    let job = live.job(&id, json!({ "input": 1 })).await;
    live.ended(&job).await;
    test.get(&format!("/v1/jobs/{job}")).await.refused(404, "JOB_NOT_FOUND");
}

#[tokio::test]
async fn clouds_are_made_changed_and_removed() {
    let node = Node::start();
    let me = node.customer();
    let cloud =
        me.post("/v1/clouds", &json!({ "name": "east", "limits": { "max_agents": 1 } })).await;
    assert!(cloud.header("location").is_some_and(|path| path.starts_with("/v1/clouds/cloud_")));
    let cloud = cloud.data(201);
    assert_eq!((&cloud["status"], &cloud["provider"]), (&json!("running"), &json!("process")));
    me.post("/v1/clouds", &json!({ "name": "EAST" })).await.refused(409, "CLOUD_NAME_TAKEN");
    let id = cloud["id"].as_str().expect("an id");
    let mut wanted = me.wanted("one", &[("agent.py", ECHO)]).await;
    wanted["cloud_id"] = json!(id);
    let agent = me.deploy_as(&wanted).await;
    wanted["name"] = json!("two");
    me.post("/v1/agents", &wanted).await.refused(403, "QUOTA_EXCEEDED");
    me.delete(&format!("/v1/clouds/{id}")).await.refused(409, "CLOUD_NOT_EMPTY");
    let inside = me.get(&format!("/v1/clouds/{id}/agents")).await.data(200);
    assert_eq!(inside["items"][0]["id"], json!(agent));
    let cloud =
        me.patch(&format!("/v1/clouds/{id}"), &json!({ "display_name": "East" })).await.data(200);
    assert_eq!((&cloud["display_name"], &cloud["agent_count"]), (&json!("East"), &json!(1)));
    me.delete(&format!("/v1/agents/{agent}")).await.data(200);
    me.delete(&format!("/v1/clouds/{id}")).await.data(200);
    me.get(&format!("/v1/clouds/{id}")).await.refused(404, "CLOUD_NOT_FOUND");
}
