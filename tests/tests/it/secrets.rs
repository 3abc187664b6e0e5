//! Secrets go in, reach agents at their next start, and never come out.

use serde_json::json;
use tests::Node;

const TELLS: [(&str, &str); 1] =
    [("agent.py", "import os\ndef invoke(input, context):\n    return os.environ.get(input)\n")];

#[tokio::test]
async fn an_agent_is_started_with_secrets_and_nobody_sees_them() {
    let node = Node::start();
    let customer = node.customer();
    let value = "s3cr3t-canary-7731";
    let made = customer.put("/v1/secrets/DB_PASSWORD", &json!({ "value": value })).await.data(200);
    assert_eq!(made["version"], 1);
    assert!(!made.to_string().contains(value));
    let mut wanted = customer.wanted("teller", &TELLS).await;
    wanted["environment"] = json!({
        "URL": "db://user:${secrets.DB_PASSWORD}@host", "PLAIN": "$${secrets.X}",
    });
    let id = customer.deploy_as(&wanted).await;
    let shown = customer.get(&format!("/v1/agents/{id}")).await.data(200);
    assert_eq!(shown["environment"]["URL"], "********");
    assert_eq!(shown["environment"]["PLAIN"], "${secrets.X}");
    let told = customer.invoke(&id, &json!("URL")).await.data(200);
    assert_eq!(told["output"], format!("db://user:{value}@host"));
    let plain = customer.invoke(&id, &json!("PLAIN")).await.data(200);
    assert_eq!(plain["output"], "${secrets.X}");

    // A new value reaches the agent at its next start.
    let next = customer.put("/v1/secrets/DB_PASSWORD", &json!({ "value": "second" })).await;
    assert_eq!(next.data(200)["version"], 2);
    customer.call(&format!("/v1/agents/{id}/stop")).await.data(200);
    customer.settled(&id, "stopped").await;
    customer.call(&format!("/v1/agents/{id}/start")).await.data(200);
    customer.settled(&id, "running").await;
    let told = customer.invoke(&id, &json!("URL")).await.data(200);
    assert_eq!(told["output"], "db://user:second@host");

    let listed = customer.get("/v1/secrets").await.data(200);
    assert_eq!(listed["items"][0]["name"], "DB_PASSWORD");
    customer.delete("/v1/secrets/DB_PASSWORD").await.data(200);
    customer.get("/v1/secrets/DB_PASSWORD").await.refused(404, "SECRET_NOT_FOUND");
    let patch = json!({ "environment": { "OTHER": "${secrets.DB_PASSWORD}" } });
    let path = format!("/v1/agents/{id}");
    customer.patch(&path, &patch).await.refused(400, "SECRET_NOT_FOUND");
    let folder = node.data.path().to_owned();
    let grep = std::process::Command::new("grep").args(["-rlaF", value]).arg(&folder).output();
    let found = String::from_utf8_lossy(&grep.expect("grep runs").stdout).into_owned();
    assert!(found.is_empty(), "the secret is plain in {found}");
}

#[tokio::test]
async fn a_cloud_has_secrets_of_its_own() {
    let node = Node::start();
    let customer = node.customer();
    let cloud = customer.cloud().await;
    customer.put("/v1/secrets/NAME", &json!({ "value": "everywhere" })).await.data(200);
    let here = json!({ "value": "here", "cloud_id": cloud });
    customer.put("/v1/secrets/NAME", &here).await.data(200);
    let mut wanted = customer.wanted("teller", &TELLS).await;
    wanted["environment"] = json!({ "V": "${secrets.NAME}" });
    let id = customer.deploy_as(&wanted).await;
    assert_eq!(customer.invoke(&id, &json!("V")).await.data(200)["output"], "here");
    // Test mode has none of it.
    node.tester().get("/v1/secrets/NAME").await.refused(404, "SECRET_NOT_FOUND");
    for (name, body) in [
        ("lower", json!({ "value": "x" })),
        ("1X", json!({ "value": "x" })),
        ("X", json!({ "value": "" })),
        ("X", json!({ "value": 7 })),
        ("X", json!({})),
        ("X", json!({ "value": "x", "cloud": "y" })),
        ("X", json!({ "value": "x".repeat(70_000) })),
    ] {
        let answer = customer.put(&format!("/v1/secrets/{name}"), &body).await;
        answer.refused(400, "VALIDATION_ERROR");
    }
    let nowhere = json!({ "value": "x", "cloud_id": "cloud_00000000000000000000000000" });
    customer.put("/v1/secrets/X", &nowhere).await.refused(404, "CLOUD_NOT_FOUND");
}
