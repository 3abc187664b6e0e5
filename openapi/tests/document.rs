//! The committed document is the document that the code makes today, and it is whole.

use std::{collections::BTreeSet, fs, path::Path};

use serde_json::Value;

fn committed() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("openapi.json");
    fs::read_to_string(path).expect("openapi/openapi.json is in the repository")
}

fn operations(document: &Value) -> Vec<(String, &Value)> {
    let paths = document["paths"].as_object().expect("paths");
    let of_path = |(path, methods): (&String, &'_ Value)| {
        let methods = methods.as_object().expect("methods").clone();
        methods
            .into_iter()
            .map(|(method, _)| (format!("{method} {path}"), path.clone(), method))
            .collect::<Vec<_>>()
    };
    let names: Vec<_> = paths.iter().flat_map(of_path).collect();
    names.into_iter().map(|(name, path, method)| (name, &document["paths"][path][method])).collect()
}

#[test]
fn the_committed_document_is_current() {
    assert!(
        committed() == api::document(),
        "openapi.json is stale: run `cargo spec` and commit the result"
    );
}

#[test]
fn every_operation_is_described() {
    let document: Value = serde_json::from_str(&committed()).expect("JSON");
    let all = operations(&document);
    assert!(all.len() >= 30, "only {} operations", all.len());
    let mut ids = BTreeSet::new();
    for (name, operation) in all {
        let id = operation["operationId"].as_str().unwrap_or_default();
        assert!(!id.is_empty() && ids.insert(id), "{name} needs an operationId of its own");
        assert!(operation["summary"].is_string(), "{name} needs a summary");
        let description = operation["description"].as_str().unwrap_or_default();
        assert!(description.starts_with("Scope: "), "{name} must name its scope");
        let is_open = description.starts_with("Scope: none");
        let has_scope = operation["x-scopes"].as_array().is_some_and(|scopes| !scopes.is_empty());
        let needs_some = is_open || description.starts_with("Scope: any valid credentials");
        assert!(needs_some != has_scope, "{name}: x-scopes does not fit its description");
        assert_eq!(is_open, operation["security"].as_array().is_none_or(Vec::is_empty), "{name}");
        for status in ["400", "401", "404", "429", "500", "503"] {
            assert!(operation["responses"].get(status).is_some(), "{name} does not name {status}");
        }
    }
}

#[test]
fn requests_take_no_members_they_do_not_name() {
    let document: Value = serde_json::from_str(&committed()).expect("JSON");
    for name in ["CreateAgent", "UpdateAgent", "InvokeRequest", "CreateUpload", "CreateCloud"] {
        let schema = &document["components"]["schemas"][name];
        assert_eq!(schema["additionalProperties"], false, "{name}");
    }
}
