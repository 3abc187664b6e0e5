//! Every operation of the document under every kind of credentials: the answer is what the document's own
//! words say, and nothing of another organization or mode is ever reached.

use std::collections::BTreeMap;

use reqwest::Method;
use serde_json::{Value, json};
use tests::{Customer, Node, eventually, oauth::text, schema::Document, source::ECHO};

use crate::bodies::known;

const ROLES: [&str; 6] = ["owner", "admin", "developer", "invoker", "billing", "viewer"];

/// An operation, as the document tells of it.
pub(crate) struct Operation {
    pub(crate) method: Method,
    pub(crate) path: String,
    needs: Vec<String>,
    is_open: bool,
}

pub(crate) fn operations(document: &Value) -> Vec<Operation> {
    let mut all = vec![];
    for (path, methods) in document["paths"].as_object().expect("paths") {
        for (method, operation) in methods.as_object().expect("methods") {
            all.push(Operation {
                method: method.to_uppercase().parse().expect("a method"),
                path: path.clone(),
                needs: operation["x-scopes"].as_array().into_iter().flatten().map(text).collect(),
                is_open: operation["security"] == json!([]),
            });
        }
    }
    all
}

impl Operation {
    fn is_for(&self, scopes: &[String]) -> bool {
        let covers = |need: &String| {
            let fits = |has: &String| {
                let is_of_noun = has.strip_suffix('*').is_some_and(|noun| need.starts_with(noun));
                has == need || has == "admin:*" || is_of_noun
            };
            scopes.iter().any(fits)
        };
        self.is_open || self.needs.is_empty() || self.needs.iter().any(covers)
    }

    /// The path with these in the place of its parameters.
    pub(crate) fn address(&self, things: &BTreeMap<String, String>) -> String {
        let parts: Vec<&str> = self.path.split('/').collect();
        let filled = parts.iter().enumerate().map(|(place, part)| {
            if !part.starts_with('{') {
                return (*part).to_owned();
            }
            // What it is stands before it.
            let noun = parts[place - 1];
            things.get(noun).cloned().unwrap_or_else(|| "X".to_owned())
        });
        filled.collect::<Vec<_>>().join("/")
    }
}

pub(crate) fn open_node() -> Node {
    Node::with(&[
        ("ROOST_RATE_LIMIT__UNAUTHENTICATED_PER_MINUTE", "100000"),
        ("ROOST_RATE_LIMIT__TIERS__ENTERPRISE", "1000000/100000000"),
    ])
}

/// Everybody, with the scopes that they have.
async fn everybody(node: &Node) -> Vec<(String, Vec<String>, Customer)> {
    let owner = node.customer();
    let mut all = vec![];
    let schemas = owner.bare("/v1/openapi.json").await;
    let scopes = &schemas["components"]["schemas"]["CreateApiKey"]["properties"]["scopes"];
    let scopes = scopes["items"]["enum"].as_array().expect("the scopes that may be granted");
    for scope in scopes.iter().map(text) {
        let wanted = json!({ "name": scope, "scopes": [scope] });
        let made = owner.post("/v1/api-keys", &wanted).await.data(201);
        let caller = node.caller(&text(&made["key"]));
        all.push((scope.clone(), vec![scope], caller));
    }
    for role in ROLES {
        let caller = owner.member(role).await;
        let me = caller.get("/v1/auth/me").await.data(200);
        let scopes: Vec<String> =
            me["scopes"].as_array().expect("scopes").iter().map(text).collect();
        assert!(!scopes.is_empty(), "{me}");
        all.push((role.to_owned(), scopes, caller));
    }
    all
}

#[tokio::test]
async fn every_operation_heeds_its_scope() {
    let node = open_node();
    let owner = node.customer();
    let operations = operations(&owner.bare("/v1/openapi.json").await);
    let callers = everybody(&node).await;
    let nothing = BTreeMap::new();
    let mut cells = 0;
    for operation in &operations {
        let (method, address) = (&operation.method, operation.address(&nothing));
        let url = format!("{}{address}", owner.base_url);
        let nobody = owner.send(owner.client.request(method.clone(), url)).await;
        let is_refused = nobody.status == 401;
        assert_eq!(is_refused, !operation.is_open, "{method} {address} without credentials");
        // A person who logs out is out: that is another story.
        let others = callers.iter().filter(|_| !address.ends_with("/logout"));
        for (who, scopes, caller) in others {
            let answer = caller.send(caller.request(method.clone(), &address)).await;
            let is_refused = answer.code() == "INSUFFICIENT_SCOPE";
            let is_for = operation.is_for(scopes);
            assert_eq!(is_refused, !is_for, "{method} {address} by {who}: {:#}", answer.body);
            cells += 1;
        }
    }
    assert!(cells > 1700, "only {cells} cells");
}

/// One thing of every kind that an organization has, by the word in the path before its id.
pub(crate) async fn things(node: &Node) -> BTreeMap<String, String> {
    let owner = node.customer();
    let first = async |path: &str| {
        eventually(&format!("{path} has something"), async || {
            let data = owner.get(path).await.data(200);
            let id = data["items"][0]["id"].as_str().map(str::to_owned);
            id.ok_or_else(|| data.to_string())
        })
        .await
    };
    let hook = json!({ "url": "https://127.0.0.1:9/hook", "events": ["*"] });
    let hook = text(&owner.post("/v1/webhooks", &hook).await.data(201)["id"]);
    let agent = owner.deploy("mine", &[("agent.py", ECHO)]).await;
    let job = owner.job(&agent, json!({ "input": 1 })).await;
    owner.ended(&job).await;
    let secret = json!({ "value": "v" });
    for _ in 0..2 {
        owner.put("/v1/secrets/TOKEN", &secret).await.data(200);
    }
    let asked = json!({ "email": "i@example.com", "role": "viewer" });
    let invitation = owner.post("/v1/invitations", &asked).await.data(201);
    let back = "https://app.example/back";
    let app = json!({ "name": "a", "redirect_uris": [back], "scopes": ["agents:read"] });
    let app = owner.post("/v1/oauth/applications", &app).await.data(201);
    let upload = json!({ "filename": "agent.tar.gz", "size_bytes": 100 });
    let upload = owner.post("/v1/uploads", &upload).await.data(201);
    // The list has keys of both modes; this one is live.
    let key = owner.post("/v1/api-keys", &json!({ "name": "live" })).await.data(201);
    let me = owner.get("/v1/auth/me").await.data(200);
    let pairs = [
        ("clouds", owner.cloud().await),
        ("deployments", first(&format!("/v1/agents/{agent}/deployments")).await),
        ("deliveries", first(&format!("/v1/webhooks/{hook}/deliveries")).await),
        ("events", first("/v1/events").await),
        ("api-keys", text(&key["id"])),
        ("users", first("/v1/users").await),
        ("organizations", text(&me["org_id"])),
        ("invitations", text(&invitation["id"])),
        ("applications", text(&app["client_id"])),
        ("uploads", text(&upload["id"])),
        ("secrets", "TOKEN".to_owned()),
        ("agents", agent),
        ("webhooks", hook),
        ("jobs", job),
    ];
    pairs.into_iter().map(|(noun, id)| (noun.to_owned(), id)).collect()
}

#[tokio::test]
async fn no_operation_reaches_what_is_anothers() {
    let node = open_node();
    let owner = node.customer();
    let things = things(&node).await;
    assert!(things.values().all(|id| !id.is_empty()), "{things:?}");
    let other = owner.organization("second", "enterprise").await;
    // People and organizations are the same in both modes.
    let of_both = ["/v1/users/", "/v1/organizations/", "/v1/invitations/", "/v1/cluster/"];
    let served = owner.bare("/v1/openapi.json").await;
    let (operations, document) = (operations(&served), Document::new(served));
    let known = known(&owner).await;
    let mut cells = 0;
    for operation in operations.iter().filter(|one| one.path.contains('{')) {
        let (method, mut address) = (&operation.method, operation.address(&things));
        if operation.is_open {
            // What may be put there is in the address.
            address += "?expires=4000000000&signature=0000";
        }
        let body = document.body_of(&operation.path, method.as_str());
        let body = body.map(|schema| document.smallest(schema, &known));
        for (who, caller) in [("another organization", &other), ("test mode", &node.tester())] {
            if who == "test mode" && of_both.iter().any(|path| address.starts_with(path)) {
                continue;
            }
            let request = caller.request(method.clone(), &address);
            let answer = match &body {
                Some(body) => caller.send(request.json(body)).await,
                None => caller.send(request).await,
            };
            let fits = match answer.status {
                404 => true,
                // Whoever gives a secret a name has given it to one of their own.
                200 => {
                    operation.path == "/v1/secrets/{name}" && answer.body["data"]["version"] == 1
                }
                // Who has no right to ask hears that first.
                403 if operation.is_open => answer.code() == "INVALID_REQUEST",
                403 => ["INSUFFICIENT_SCOPE", "TEST_MODE_ONLY"].contains(&answer.code()),
                _ => false,
            };
            assert!(fits, "{method} {address} by {who}: {} {:#}", answer.status, answer.body);
            cells += 1;
        }
    }
    assert!(cells > 80, "only {cells} cells");
    for noun in ["agents", "clouds", "webhooks", "jobs", "secrets", "api-keys"] {
        owner.get(&format!("/v1/{noun}/{}", things[noun])).await.data(200);
    }
    assert_eq!(owner.get("/v1/secrets/TOKEN").await.data(200)["version"], 2);
}

/// What a whole cluster or all of an organization's people share, said here once more: the table of rights has it, too.
#[tokio::test]
async fn nobody_else_touches_what_is_shared() {
    let node = open_node();
    let owner = node.customer();
    let other = owner.organization("second", "enterprise").await;
    let tester = node.tester();
    let operations = operations(&owner.bare("/v1/openapi.json").await);
    let (mut of_operator, mut of_people) = (0, 0);
    for operation in operations.iter().filter(|one| !one.is_open) {
        let (method, address) = (&operation.method, operation.address(&BTreeMap::new()));
        let is_of = |nouns: &[&str]| {
            nouns.iter().any(|noun| {
                let rest = address.strip_prefix(noun);
                rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
            })
        };
        let is_operators = is_of(&["/v1/cluster", "/v1/organizations"]);
        let changes_people = is_of(&["/v1/users", "/v1/invitations"]) && *method != Method::GET;
        if is_operators {
            let answer = other.send(other.request(method.clone(), &address)).await;
            answer.refused(403, "INSUFFICIENT_SCOPE");
            of_operator += 1;
        }
        if is_operators || changes_people {
            let answer = tester.send(tester.request(method.clone(), &address)).await;
            answer.refused(403, "TEST_MODE_ONLY");
            of_people += usize::from(changes_people);
        }
    }
    assert_eq!((of_operator, of_people), (21, 4));
}
