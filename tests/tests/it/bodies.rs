//! Every body of the document, wrong in every way that its schema tells of: refused by name, and nothing
//! changes.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};
use tests::{Customer, oauth::text, schema::Document};

use crate::matrix::{open_node, operations, things};

/// What must be more than of the right shape.
pub(crate) async fn known(me: &Customer) -> Map<String, Value> {
    let source = me.wanted("never", &[("agent.py", tests::source::ECHO)]).await["source"].clone();
    let known = json!({
        "cloud_id": me.cloud().await,
        "source": source,
        "email": "new@example.com",
        "owner_email": "owner@example.com",
        "password": "a long password",
        "owner_password": "a long password",
        "url": "https://127.0.0.1:9/hook",
        "events": ["*"],
        "redirect_uris": ["https://app.example/back"],
        "since": "2026-01-01T00:00:00Z",
        "version": "1",
    });
    let Value::Object(known) = known else { unreachable!("it is an object") };
    known
}

/// All that wrong bodies could have changed.
pub(crate) async fn everything(me: &Customer) -> BTreeMap<String, Value> {
    let mut all = BTreeMap::new();
    let lists = [
        "clouds",
        "agents",
        "jobs",
        "webhooks",
        "secrets",
        "api-keys",
        "users",
        "invitations",
        "organizations",
        "oauth/applications",
    ];
    for path in lists {
        let mut data = me.get(&format!("/v1/{path}?limit=100")).await.data(200);
        for item in data["items"].as_array_mut().into_iter().flatten() {
            // These change by themselves.
            for name in ["health", "metrics", "last_used_at", "last_used_ip"] {
                item.as_object_mut().expect("an object").remove(name);
            }
        }
        all.insert(path.to_owned(), data);
    }
    let config = "cluster/config";
    all.insert(config.to_owned(), me.get(&format!("/v1/{config}")).await.data(200));
    all
}

#[tokio::test]
async fn every_field_of_every_body_is_checked() {
    let node = open_node();
    let me = node.customer();
    let things = things(&node).await;
    let served = me.bare("/v1/openapi.json").await;
    let known = known(&me).await;
    let document = Document::new(served.clone());
    let person = me.member("owner").await;
    let before = everything(&me).await;
    let (mut bodies, mut tried) = (0, 0);
    for operation in operations(&served) {
        let (method, address) = (&operation.method, operation.address(&things));
        let Some(schema) = document.body_of(&operation.path, method.as_str()) else { continue };
        bodies += 1;
        // Only people have passwords.
        let caller = if address == "/v1/auth/password" { &person } else { &me };
        for wrong in document.wrongs(schema, &known) {
            let request = caller.request(method.clone(), &address).json(&wrong.body);
            let answer = caller.send(request).await;
            let told =
                format!("{method} {address}: {wrong:?}: {} {:#}", answer.status, answer.body);
            assert_eq!(answer.status, 400, "{told}");
            assert!(["VALIDATION_ERROR", "INVALID_REQUEST"].contains(&answer.code()), "{told}");
            let fields = answer.body["error"]["details"]["fields"].as_array();
            let names: Vec<String> =
                fields.into_iter().flatten().map(|field| text(&field["field"])).collect();
            let is_named = names.iter().any(|name| name.starts_with(&wrong.field));
            assert!(wrong.field.is_empty() || is_named, "{told}");
            tried += 1;
        }
    }
    assert_eq!(before, everything(&me).await);
    assert!(bodies > 30 && tried > 1200, "{tried} wrong ones of {bodies} bodies");
}
