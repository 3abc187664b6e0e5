//! New versions: without a failed request, without harm when they are broken, and back again.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use serde_json::{Value, json};
use tests::{Customer, Node, eventually, source};

fn says(word: &str) -> String {
    format!("def invoke(input, context):\n    return '{word}'\n")
}

async fn redeploy(me: &Customer, id: &str, files: &source::Files<'_>) -> Value {
    let archive_url = me.upload(source::tar_gz(files)).await;
    let body = json!({ "source": { "type": "upload", "archive_url": archive_url } });
    me.post(&format!("/v1/agents/{id}/redeploy"), &body).await.data(200)
}

async fn deployment(me: &Customer, id: &str, wanted: &str) -> Value {
    eventually(&format!("the deployment is {wanted}"), async || {
        let agent = me.get(&format!("/v1/agents/{id}")).await.data(200);
        if agent["deployment"]["status"] == wanted {
            Ok(agent)
        } else {
            Err(format!("{:#}", agent["deployment"]))
        }
    })
    .await
}

async fn output(me: &Customer, id: &str) -> Value {
    me.invoke(id, &json!({})).await.data(200)["output"].clone()
}

#[tokio::test]
async fn a_redeployment_under_load_fails_no_request() {
    let node = Node::start();
    let me = node.customer();
    let mut wanted = me.wanted("roller", &[("agent.py", &says("one"))]).await;
    wanted["scaling"] = json!({ "min_instances": 2 });
    let id = me.deploy_as(&wanted).await;
    let (stop, calls) = (AtomicBool::new(false), AtomicUsize::new(0));
    let load = async {
        let one = async || {
            while !stop.load(Relaxed) {
                let answer = me.invoke(&id, &json!({})).await;
                assert_eq!(answer.status, 200, "{:#}", answer.body);
                calls.fetch_add(1, Relaxed);
            }
        };
        futures::join!(one(), one(), one(), one());
    };
    let roll = async {
        for (word, version) in [("two", "2"), ("three", "3")] {
            redeploy(&me, &id, &[("agent.py", &says(word))]).await;
            let agent = deployment(&me, &id, "live").await;
            assert_eq!((&agent["version"], &agent["status"]), (&json!(version), &json!("running")));
            eventually("only the new version serves", async || {
                let instances = me.get(&format!("/v1/agents/{id}/instances")).await.data(200);
                let items = instances["items"].as_array().cloned().unwrap_or_default();
                let all_new =
                    items.iter().all(|one| one["version"] == version && one["status"] == "running");
                if items.len() == 2 && all_new { Ok(()) } else { Err(format!("{items:?}")) }
            })
            .await;
            assert_eq!(output(&me, &id).await, json!(word));
        }
        stop.store(true, Relaxed);
    };
    futures::join!(load, roll);
    assert!(calls.load(Relaxed) > 50, "{} calls", calls.load(Relaxed));
}

#[tokio::test]
async fn a_broken_redeployment_leaves_the_old_version_serving() {
    let node = Node::with(&[("ROOST_DEPLOY__HEALTHY_DEADLINE", "4s")]);
    let me = node.customer();
    let id = me.deploy("robust", &[("agent.py", &says("good"))]).await;
    let broken: [(&str, &source::Files<'_>); 3] = [
        ("BUILD_FAILED", &[("README", "nothing to start")]),
        ("CRASH_LOOP", &[("main.py", "raise SystemExit('broken on purpose')")]),
        ("HEALTH_CHECK_FAILED", &[("main.py", "import time\ntime.sleep(600)")]),
    ];
    for (code, files) in broken {
        redeploy(&me, &id, files).await;
        let agent = deployment(&me, &id, "failed").await;
        assert_eq!(agent["deployment"]["error"]["code"], code);
        assert_eq!((&agent["status"], &agent["version"]), (&json!("running"), &json!("1")));
        assert_eq!(output(&me, &id).await, "good");
    }
    let agent = me.get(&format!("/v1/agents/{id}")).await.data(200);
    assert_eq!(agent["deployment"]["version"], "2", "a failed version's number is used again");
    let list = me.get(&format!("/v1/agents/{id}/deployments")).await.data(200);
    assert_eq!(list["items"].as_array().map(Vec::len), Some(4));
    let crashed = list["items"]
        .as_array()
        .and_then(|all| all.iter().find(|d| d["error"]["code"] == "CRASH_LOOP"));
    let words = crashed.map(|d| d["error"]["details"].to_string()).unwrap_or_default();
    assert!(words.contains("broken on purpose"), "{words}");
    eventually("broken instances are gone", async || {
        let instances = me.get(&format!("/v1/agents/{id}/instances")).await.data(200);
        if instances["items"].as_array().is_some_and(|all| all.len() == 1) {
            Ok(())
        } else {
            Err(instances.to_string())
        }
    })
    .await;
}

#[tokio::test]
async fn rollback_brings_back_code_and_environment_under_the_old_number() {
    let node = Node::start();
    let me = node.customer();
    let code =
        "import os\ndef invoke(input, context):\n    return os.environ.get('WORD', 'none')\n";
    let mut wanted = me.wanted("back", &[("agent.py", code)]).await;
    wanted["environment"] = json!({ "WORD": "one" });
    let id = me.deploy_as(&wanted).await;
    me.patch(&format!("/v1/agents/{id}"), &json!({ "environment": { "WORD": "two" } }))
        .await
        .data(200);
    let agent = deployment(&me, &id, "live").await;
    assert_eq!((&agent["version"], output(&me, &id).await), (&json!("2"), json!("two")));
    let rollback = format!("/v1/agents/{id}/rollback");
    me.post(&rollback, &json!({ "version": "7" })).await.refused(400, "VALIDATION_ERROR");
    me.post(&rollback, &json!({ "version": "1" })).await.data(200);
    let agent = deployment(&me, &id, "live").await;
    assert_eq!((&agent["version"], &agent["latest_version"]), (&json!("1"), &json!("2")));
    assert_eq!(
        (&agent["environment"]["WORD"], output(&me, &id).await),
        (&json!("one"), json!("one"))
    );
    let versions = me.get(&format!("/v1/agents/{id}/versions")).await.data(200);
    let numbers: Vec<_> =
        versions["items"].as_array().expect("items").iter().map(|v| v["version"].clone()).collect();
    assert_eq!(numbers, [json!("2"), json!("1")]);
    let deployments = me.get(&format!("/v1/agents/{id}/deployments")).await.data(200);
    let of = |version: &str| {
        let items = deployments["items"].as_array().expect("items");
        let own =
            items.iter().filter(|one| one["version"] == version && one["trigger"] != "rollback");
        own.map(|one| one["id"].as_str().expect("an id").to_owned()).next().expect("one brought it")
    };
    let path = |version: &str| format!("/v1/agents/{id}/deployments/{}/rollback", of(version));
    me.call(&path("2")).await.data(200);
    let agent = deployment(&me, &id, "live").await;
    assert_eq!((&agent["version"], output(&me, &id).await), (&json!("2"), json!("two")));
    let missing = format!("/v1/agents/{id}/deployments/dep_00000000000000000000000000/rollback");
    me.call(&missing).await.refused(404, "DEPLOYMENT_NOT_FOUND");
}

#[tokio::test]
async fn ten_versions_are_kept() {
    let node = Node::start();
    let me = node.customer();
    let id = me.deploy("keeper", &[("agent.py", &says("x"))]).await;
    for n in 2..=12 {
        let change = json!({ "environment": { "N": n.to_string() } });
        me.patch(&format!("/v1/agents/{id}"), &change).await.data(200);
        let agent = deployment(&me, &id, "live").await;
        assert_eq!(agent["version"], json!(n.to_string()));
    }
    let versions = me.get(&format!("/v1/agents/{id}/versions")).await.data(200);
    let numbers: Vec<_> =
        versions["items"].as_array().expect("items").iter().map(|v| v["version"].clone()).collect();
    assert_eq!(numbers, (3..=12).rev().map(|n| json!(n.to_string())).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_first_deployment_that_fails_says_why_and_can_be_redeployed() {
    let node = Node::start();
    let me = node.customer();
    let wanted = me.wanted("late", &[("main.py", "raise SystemExit('no luck')")]).await;
    let agent = me.post("/v1/agents", &wanted).await.data(201);
    let id = agent["id"].as_str().expect("an id");
    let agent = me.settled(id, "failed").await;
    assert_eq!(
        (&agent["status"], &agent["status_reason"]["code"]),
        (&json!("failed"), &json!("CRASH_LOOP"))
    );
    assert_eq!(agent["version"], json!(null));
    me.invoke(id, &json!(1)).await.refused(409, "AGENT_NOT_RUNNING");
    let logs = me.get(&format!("/v1/agents/{id}/logs?stream=stderr")).await.data(200);
    assert!(
        logs["items"]
            .as_array()
            .is_some_and(|lines| lines.iter().any(|line| line["message"] == "no luck"))
    );
    let agent = redeploy(&me, id, &[("agent.py", &says("now"))]).await;
    assert_eq!(agent["status"], "building");
    let agent = me.settled(id, "running,failed").await;
    assert_eq!((&agent["status"], &agent["version"]), (&json!("running"), &json!("1")));
    assert_eq!(output(&me, id).await, "now");
}

#[tokio::test]
async fn a_deployment_can_be_canceled() {
    let node = Node::start();
    let me = node.customer();
    let wanted = me.wanted("cancel", &[("main.py", "import time\ntime.sleep(600)")]).await;
    let agent = me.post("/v1/agents", &wanted).await.data(201);
    let id = agent["id"].as_str().expect("an id");
    let dep = agent["deployment"]["id"].as_str().expect("an id");
    me.settled(id, "deploying").await;
    let path = format!("/v1/agents/{id}/deployments/{dep}");
    me.post(&format!("/v1/agents/{id}/rollback"), &json!({ "version": "1" }))
        .await
        .refused(409, "DEPLOYMENT_IN_PROGRESS");
    let canceled = me.call(&format!("{path}/cancel")).await.data(200);
    assert_eq!(canceled["status"], "canceled");
    me.call(&format!("{path}/cancel")).await.refused(409, "INVALID_STATE");
    let agent = me.get(&format!("/v1/agents/{id}")).await.data(200);
    assert_eq!(
        (&agent["status"], &agent["status_reason"]["code"]),
        (&json!("failed"), &json!("DEPLOY_CANCELED"))
    );
    assert_eq!(me.get(&path).await.data(200)["status"], "canceled");
    me.get(&format!("/v1/agents/{id}/deployments/dep_nonsense"))
        .await
        .refused(404, "DEPLOYMENT_NOT_FOUND");
}
