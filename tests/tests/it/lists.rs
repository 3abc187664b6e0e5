//! Lists: every parameter that the document names does what it says, for every noun alike.

use serde_json::{Value, json};
use tests::{Customer, Node, oauth::text};

/// The lists of the document that can be sorted, with the names of their parameters.
async fn sortable(me: &Customer) -> Vec<(String, Vec<String>)> {
    let document = me.bare("/v1/openapi.json").await;
    let mut lists = vec![];
    for (path, methods) in document["paths"].as_object().expect("paths") {
        let parameters = methods["get"]["parameters"].as_array().cloned().unwrap_or_default();
        let names: Vec<String> = parameters.iter().map(|one| text(&one["name"])).collect();
        if names.iter().any(|name| name == "created_before") {
            lists.push((path.clone(), names));
        }
    }
    lists
}

/// Two of each noun, the first of them older.
async fn fill(me: &Customer) {
    for name in ["Bert", "anna"] {
        let app = json!({
            "name": name, "redirect_uris": ["https://app.example/back"], "scopes": ["agents:read"],
        });
        me.post("/v1/oauth/applications", &app).await.data(201);
        me.post("/v1/api-keys", &json!({ "name": name })).await.data(201);
        me.post("/v1/clouds", &json!({ "name": name, "metadata": { "of": name } })).await.data(201);
        let org = json!({
            "name": name, "owner_email": format!("{name}@example.org"), "owner_password": "a long password",
        });
        me.post("/v1/organizations", &org).await.data(201);
        let asked = json!({ "email": format!("{name}@example.com"), "role": "viewer" });
        me.post("/v1/invitations", &asked).await.data(201);
        let hook = json!({
            "url": "https://127.0.0.1:9/hook", "events": ["*"], "description": name, "active": false,
        });
        me.post("/v1/webhooks", &hook).await.data(201);
        me.put(&format!("/v1/secrets/{}", name.to_uppercase()), &json!({ "value": "v" }))
            .await
            .data(200);
    }
    me.member("viewer").await;
}

async fn items(me: &Customer, path: &str) -> Vec<Value> {
    me.get(path).await.data(200)["items"].as_array().expect("items").clone()
}

#[tokio::test]
async fn every_list_heeds_every_parameter_of_lists() {
    let node = Node::start();
    let me = node.customer();
    fill(&me).await;
    let cloud = me.cloud().await;
    let lists = sortable(&me).await;
    assert!(lists.len() >= 11, "{lists:?}");
    for (path, names) in &lists {
        let path = path.replace("{id}", &cloud);
        for wrong in ["limit=0", "limit=101", "limit=x", "sort=size", "created_after=x", "cursor=x"]
        {
            let answer = me.get(&format!("{path}?{wrong}")).await;
            assert_eq!(answer.status, 400, "{path}?{wrong}: {}", answer.body);
        }
        let all = items(&me, &format!("{path}?limit=100&sort=created_at")).await;
        let is_empty = async |query: &str| items(&me, &format!("{path}?{query}")).await.is_empty();
        assert!(is_empty("created_before=2001-01-01T00:00:00Z").await, "{path}");
        assert!(is_empty("created_after=2901-01-01T00:00:00Z").await, "{path}");
        let is_named = names.iter().any(|name| name == "name");
        if is_named {
            assert!(is_empty("name=nobody").await, "{path}");
        }
        if names.iter().any(|name| name == "q") {
            assert!(is_empty("q=nothing-has-this").await, "{path}");
        }
        if !is_named && !path.ends_with("/jobs") {
            me.get(&format!("{path}?name=x")).await.refused(400, "VALIDATION_ERROR");
            me.get(&format!("{path}?sort=-name")).await.refused(400, "VALIDATION_ERROR");
        }
        // The other way round, a page at a time.
        let (mut seen, mut next) = (vec![], format!("{path}?limit=1&sort=-created_at"));
        loop {
            let page = me.get(&next).await.data(200);
            seen.extend(page["items"].as_array().expect("items").iter().cloned());
            let Some(cursor) = page["next_cursor"].as_str() else { break };
            // A cursor is good for the order that it came with.
            let other = format!("{path}?limit=1&sort=created_at&cursor={cursor}");
            me.get(&other).await.refused(400, "INVALID_CURSOR");
            next = format!("{path}?limit=1&sort=-created_at&cursor={cursor}");
        }
        seen.reverse();
        let times =
            |rows: &[Value]| rows.iter().map(|row| text(&row["created_at"])).collect::<Vec<_>>();
        assert_eq!((seen.len(), times(&seen)), (all.len(), times(&all)), "{path}");
    }
}

#[tokio::test]
async fn things_are_found_and_sorted_by_name() {
    let node = Node::start();
    let me = node.customer();
    fill(&me).await;
    for path in ["/v1/oauth/applications", "/v1/api-keys", "/v1/clouds", "/v1/organizations"] {
        let named = items(&me, &format!("{path}?name=Bert")).await;
        assert_eq!((named.len(), &named[0]["name"]), (1, &json!("Bert")), "{path}");
        assert!(items(&me, &format!("{path}?name=bert")).await.is_empty(), "{path}: exactly");
        assert_eq!(items(&me, &format!("{path}?q=BER")).await.len(), 1, "{path}: part of it");
        let sorted = items(&me, &format!("{path}?sort=name&limit=100")).await;
        let names: Vec<String> = sorted.iter().map(|row| text(&row["name"])).collect();
        let place = |name: &str| names.iter().position(|one| one == name);
        assert!(place("anna") < place("Bert"), "{path}: {names:?}");
    }
    assert_eq!(items(&me, "/v1/secrets?sort=-name").await[0]["name"], "BERT");
    assert_eq!(items(&me, "/v1/secrets?name=ANNA").await.len(), 1);
    assert_eq!(items(&me, "/v1/users?q=viewer@").await.len(), 1);
    assert_eq!(items(&me, "/v1/invitations?q=anna").await.len(), 1);
    assert_eq!(items(&me, "/v1/webhooks?q=anna").await.len(), 1);
    assert_eq!(items(&me, "/v1/clouds?metadata[of]=anna").await.len(), 1);
    assert!(items(&me, "/v1/api-keys?metadata[of]=anna").await.is_empty(), "keys have no notes");
}
