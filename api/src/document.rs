//! The OpenAPI document, generated from the code and finished here: what poem-openapi does not say by
//! itself but the service promises for every operation.

use std::sync::OnceLock;

use domain::account::GRANTABLE;
use poem::{
    Endpoint, EndpointExt as _, Response, Route,
    endpoint::{make, make_sync},
};
use poem_openapi::{OpenApiService, Tags};
use serde_json::{Map, Value, json};

use crate::{
    access::{self, Need},
    listing,
    pages::in_words,
};

/// Groups of operations.
#[derive(Tags)]
pub(crate) enum Tag {
    /// Deploy, look after and observe agents.
    Agents,
    /// Call agents.
    Invocations,
    /// Asynchronous invocations.
    Jobs,
    /// Deployment targets.
    Clouds,
    /// Archives.
    Uploads,
    /// People log in.
    Authentication,
    /// Third parties' programs.
    Oauth,
    /// API keys for programs.
    Keys,
    /// Users and invitations.
    People,
    /// Accounts.
    Organizations,
    /// Values that agents are started with.
    Secrets,
    /// Signed requests that tell of events.
    Webhooks,
    /// Who changed what.
    Audit,
    /// The nodes that all of this runs on.
    Cluster,
}

/// What the document calls the tokens of applications.
const OAUTH: &str = "OAuth";

/// Headers of every answer.
const HEADERS: [(&str, &str, &str); 4] = [
    ("X-Request-Id", "Our name for this request.", "string"),
    ("X-RateLimit-Limit", "Calls of the window that is nearest to its end.", "integer"),
    ("X-RateLimit-Remaining", "Calls left in it.", "integer"),
    ("X-RateLimit-Reset", "When it moves on, in seconds since 1970.", "integer"),
];

/// Headers of answers to stale reads.
const STALE_HEADERS: [(&str, &str, &str); 2] = [
    ("X-Known-Leader", "Of a stale read: whether the node hears from its leaders.", "string"),
    ("X-Last-Contact-Ms", "Of a stale read: how old it may be, in milliseconds.", "integer"),
];

const DESCRIPTION: &str = "Roost hosts AI agents: from a GitHub repository, a Docker image or an \
    uploaded archive to a running, invocable, observed agent. Every answer wears an envelope: \
    `success`, `data` or `error`, and `meta` with a `request_id`. Clients must ignore fields they do \
    not know.";

/// The document, as it is committed and served.
pub fn document() -> String {
    let mut document: Value =
        serde_json::from_str(&crate::apis(None).spec()).expect("the generator writes JSON");
    document["info"]["description"] = json!(DESCRIPTION);
    document["servers"] = json!([{ "url": "/" }]);
    document["components"]["securitySchemes"][OAUTH] = oauth_scheme();
    let request_schemas = request_schemas(&document);
    if let Some(schemas) = document["components"]["schemas"].as_object_mut() {
        for (name, schema) in schemas {
            finish_schema(schema, request_schemas.contains(&name.as_str()));
        }
    }
    if let Some(paths) = document["paths"].as_object_mut() {
        for (method, operation) in
            paths.values_mut().filter_map(Value::as_object_mut).flat_map(Map::iter_mut)
        {
            finish_operation(operation);
            finish_list(operation);
            if method == "get" {
                finish_read(operation);
            }
        }
    }
    let mut text = serde_json::to_string_pretty(&document).expect("a JSON value writes JSON");
    text.push('\n');
    text
}

/// The document and a page take megabytes: they are made when somebody first asks, as few nodes ever are.
fn text() -> &'static str {
    static TEXT: OnceLock<String> = OnceLock::new();
    TEXT.get_or_init(document)
}

/// Swagger UI with the document in it.
fn page_text() -> &'static str {
    static PAGE: OnceLock<String> = OnceLock::new();
    PAGE.get_or_init(|| {
        let bare = bare();
        // A script ends at its end tag, wherever that stands; JSON may write the slash with an escape.
        bare.swagger_ui_html().replacen(&bare.spec(), &text().replace("</", "<\\/"), 1)
    })
}

/// Swagger UI for no operation at all.
fn bare() -> OpenApiService<(), ()> {
    OpenApiService::new((), "", "")
}

/// Serves the document.
pub(crate) fn endpoint() -> impl Endpoint<Output = Response> {
    make_sync(|_| Response::builder().content_type("application/json; charset=utf-8").body(text()))
}

/// Serves Swagger UI, and the page that takes the answers to its OAuth requests.
pub(crate) fn page() -> Route {
    let page = make_sync(|_| {
        Response::builder().content_type("text/html; charset=utf-8").body(page_text())
    });
    let receiver =
        make(|request| async move { bare().swagger_ui().map_to_response().call(request).await });
    Route::new().at("/", page).at("/oauth-receiver.html", receiver)
}

/// The methods that a path takes, as an `Allow` header says them.
pub(crate) fn methods_of(path: &str) -> String {
    static PATHS: OnceLock<Vec<(String, String)>> = OnceLock::new();
    let known = PATHS.get_or_init(|| {
        let document: Value = serde_json::from_str(text()).unwrap_or_default();
        let paths = document["paths"].as_object().cloned().unwrap_or_default();
        let methods = |methods: Value| {
            let names = methods.as_object().into_iter().flat_map(Map::keys);
            names.map(|name| name.to_uppercase()).collect::<Vec<_>>().join(", ")
        };
        paths.into_iter().map(|(path, of)| (path, methods(of))).collect()
    });
    let fits = |template: &str| {
        let (mut parts, mut wanted) = (path.split('/'), template.split('/'));
        parts
            .by_ref()
            .zip(wanted.by_ref())
            .all(|(part, want)| want.starts_with('{') || part == want)
            && path.split('/').count() == template.split('/').count()
    };
    known
        .iter()
        .find(|(template, _)| fits(template))
        .map_or("GET", |(_, methods)| methods)
        .to_owned()
}

/// Names of the schemas that request bodies are made of.
fn request_schemas(document: &Value) -> Vec<&'static str> {
    const REQUESTS: [&str; 35] = [
        "PutClusterConfig",
        "CreateWebhook",
        "UpdateWebhook",
        "RotateSecret",
        "TestWebhook",
        "RecoverRequest",
        "LoginRequest",
        "RefreshRequest",
        "PasswordRequest",
        "CreateApiKey",
        "UpdateApiKey",
        "RotateRequest",
        "UpdateUser",
        "CreateInvitation",
        "AcceptInvitation",
        "CreateOrganization",
        "UpdateOrganization",
        "PutSecret",
        "CreateApplication",
        "TokenRequest",
        "CreateAgent",
        "UpdateAgent",
        "SourceRequest",
        "CredentialsRequest",
        "ResourcesRequest",
        "ScalingRequest",
        "RedeployRequest",
        "RollbackRequest",
        "InvokeRequest",
        "InvokeOptions",
        "RetryRequest",
        "CancelRequest",
        "DrainRequest",
        "CreateCloud",
        "UpdateCloud",
    ];
    let known = &document["components"]["schemas"];
    let missing = REQUESTS.iter().find(|name| known.get(**name).is_none());
    debug_assert!(missing.is_none(), "{missing:?} is not in the document");
    REQUESTS.iter().copied().chain(["CreateUpload", "TokenQuestion"]).collect()
}

/// A member that is not required may be null; a request takes no members it does not name.
fn finish_schema(schema: &mut Value, is_request: bool) {
    let required: Vec<String> = schema["required"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|name| name.as_str().map(str::to_owned))
        .collect();
    let Some(properties) = schema.get_mut("properties").and_then(Value::as_object_mut) else {
        return;
    };
    for (name, property) in properties.iter_mut() {
        flatten(property);
        if !required.contains(name) {
            make_nullable(property);
        }
    }
    if is_request {
        if let Some(scopes) = properties.get_mut("scopes") {
            scopes["items"]["enum"] = json!(GRANTABLE);
        }
        schema["additionalProperties"] = json!(false);
    }
}

/// A reference with words of its own: the words go beside it, where generators look for them.
fn flatten(property: &mut Value) {
    let Some(parts) = property.get("allOf").and_then(Value::as_array).cloned() else { return };
    let (references, words): (Vec<_>, Vec<_>) =
        parts.into_iter().partition(|part| part.get("$ref").is_some());
    let mut flat = Map::new();
    words
        .into_iter()
        .filter_map(|part| part.as_object().cloned())
        .for_each(|part| flat.extend(part));
    flat.insert("allOf".to_owned(), Value::Array(references));
    *property = Value::Object(flat);
}

fn make_nullable(property: &mut Value) {
    match property.get("$ref").cloned() {
        Some(reference) => {
            *property = json!({ "allOf": [{ "$ref": reference }], "nullable": true })
        }
        None => property["nullable"] = json!(true),
    }
    if let Some(items) = property.get_mut("additionalProperties").filter(|items| items.is_object())
    {
        items["nullable"] = json!(true);
    }
}

/// A list takes the parameters of all lists.
fn finish_list(operation: &mut Value) {
    let id = operation["operationId"].as_str().unwrap_or_default();
    let Some((_, is_named)) = listing::LISTS.iter().find(|(list, _)| *list == id) else { return };
    add_parameters(operation, listing::parameters(*is_named));
}

fn add_parameters(operation: &mut Value, more: Vec<Value>) {
    match operation.get_mut("parameters").and_then(Value::as_array_mut) {
        Some(parameters) => parameters.extend(more),
        None => operation["parameters"] = json!(more),
    }
}

/// A read may be asked for as this node has it.
fn finish_read(operation: &mut Value) {
    let need = access::need_of(operation["operationId"].as_str().unwrap_or_default());
    if matches!(need, Some(Need::Nobody) | None) {
        return;
    }
    let parameter = json!({
        "name": "consistency",
        "in": "query",
        "required": false,
        "schema": { "type": "string", "enum": ["linearizable", "stale"], "default": "linearizable" },
        "description": "`stale` answers at once with what the node has, also without a majority.",
    });
    add_parameters(operation, vec![parameter]);
    for (name, about, kind) in STALE_HEADERS {
        operation["responses"]["200"]["headers"][name] =
            json!({ "description": about, "schema": { "type": kind } });
    }
}

/// How applications are let in (RFC 6749), with every scope that may be asked for.
fn oauth_scheme() -> Value {
    let scopes: Map<String, Value> =
        GRANTABLE.iter().map(|scope| ((*scope).to_owned(), json!(in_words(scope)))).collect();
    let flow = json!({
        "authorizationUrl": access::CONSENT, "tokenUrl": "/v1/oauth/token", "refreshUrl": "/v1/oauth/token",
        "scopes": scopes,
    });
    json!({ "type": "oauth2", "flows": { "authorizationCode": flow } })
}

/// What holds for every operation.
fn finish_operation(operation: &mut Value) {
    let need = access::need_of(operation["operationId"].as_str().unwrap_or_default());
    let scopes: Vec<&str> = match need {
        Some(Need::Any(scopes)) => scopes.iter().map(|scope| scope.as_str()).collect(),
        Some(Need::Operator(scope) | Need::Live(scope)) => vec![scope.as_str()],
        Some(Need::Nobody | Need::Somebody) | None => vec![],
    };
    let words = match need {
        Some(Need::Any(_)) => format!("`{}`", scopes.join("` or `")),
        Some(Need::Operator(_)) => {
            format!("`{}`, live credentials of the operator's organization", scopes.join("` or `"))
        }
        Some(Need::Live(_)) => format!("`{}`, live credentials", scopes.join("` or `")),
        Some(Need::Somebody) => "any valid credentials".to_owned(),
        Some(Need::Nobody) | None => "none".to_owned(),
    };
    let description = operation["description"].as_str().unwrap_or_default();
    let description = format!("Scope: {words}. {description}").trim_end().to_owned();
    operation["description"] = json!(description);
    operation["x-scopes"] = json!(scopes);
    if matches!(need, Some(Need::Nobody) | None) {
        operation["security"] = json!([]);
    } else if let Some(ways) = operation.get_mut("security").and_then(Value::as_array_mut) {
        ways.extend(scopes.iter().map(|scope| json!({ OAUTH: [scope] })));
    }
    let has_body = operation.get("requestBody").is_some();
    if let Some(responses) = operation["responses"].as_object_mut() {
        // No operation is answered with these unless it takes a body or calls an agent.
        if !has_body {
            responses.remove("413");
        }
        for response in responses.values_mut() {
            for (name, about, kind) in HEADERS {
                response["headers"][name] =
                    json!({ "description": about, "schema": { "type": kind } });
            }
        }
    }
}
