//! Somebody who uses the service over HTTPS and checks what comes back.

use std::{path::Path, time::Duration};

use futures::StreamExt as _;
use reqwest::{Client, Method, RequestBuilder};
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::source;

/// The longest that any call of a story takes, streams to their end among them.
const ANSWERED_WITHIN: Duration = Duration::from_secs(300);

/// One answer.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The status.
    pub status: u16,
    /// The headers.
    pub headers: reqwest::header::HeaderMap,
    /// The body; null if it is not JSON.
    pub body: Value,
}

impl Answer {
    /// The error's code; empty if there is none.
    pub fn code(&self) -> &str {
        self.body["error"]["code"].as_str().unwrap_or_default()
    }

    /// The data of an answer with this status.
    pub fn data(self, status: u16) -> Value {
        assert_eq!(self.status, status, "{:#}", self.body);
        assert_eq!(self.body["success"], true, "{:#}", self.body);
        assert!(self.body["meta"]["request_id"].as_str().is_some_and(|id| id.starts_with("req_")));
        self.body["data"].clone()
    }

    /// Checks a failure with this status and code; gives its error.
    #[track_caller]
    pub fn refused(self, status: u16, code: &str) -> Value {
        let error = &self.body["error"];
        assert_eq!((self.status, error["code"].as_str()), (status, Some(code)), "{:#}", self.body);
        assert_eq!(self.body["success"], false);
        assert!(error["message"].as_str().is_some_and(|text| !text.is_empty()));
        assert!(error["details"].is_object());
        assert!(self.body["meta"]["request_id"].is_string());
        error.clone()
    }

    /// A header.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|value| value.to_str().ok())
    }
}

/// A client of one node with one key.
#[derive(Clone)]
pub struct Customer {
    /// The client.
    pub client: Client,
    old: Client,
    /// Where the node is.
    pub base_url: String,
    /// The key.
    pub key: String,
}

impl Customer {
    /// With this key, trusting this authority.
    pub fn new(base_url: &str, authority: &Path, key: &str) -> Self {
        // The second call in one process finds it installed.
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let pem = std::fs::read(authority).expect("the node has a certificate");
        let authority = reqwest::Certificate::from_pem(&pem).expect("a certificate");
        let build = |http1: bool| {
            let builder = Client::builder().tls_certs_only([authority.clone()]);
            let builder = builder.timeout(ANSWERED_WITHIN);
            // Where a page sends a browser is for the story to see.
            let builder = builder.redirect(reqwest::redirect::Policy::none());
            let builder = if http1 { builder.http1_only() } else { builder };
            builder.build().expect("a client")
        };
        let (client, old) = (build(false), build(true));
        Self { client, old, base_url: base_url.to_owned(), key: key.to_owned() }
    }

    /// Somebody else at the same node.
    pub fn with_key(&self, key: &str) -> Self {
        Self { key: key.to_owned(), ..self.clone() }
    }

    /// Makes an organization, as the cluster's operator, and logs its owner in, `NAME@example.com` with
    /// the password `a long password`.
    pub async fn organization(&self, name: &str, tier: &str) -> Self {
        let email = format!("{name}@example.com");
        let password = "a long password";
        let wanted = json!({
            "name": name, "tier": tier, "owner_email": email, "owner_password": password,
        });
        self.post("/v1/organizations", &wanted).await.data(201);
        self.logged_in(&email, password).await
    }

    /// Invites `ROLE@example.com` to its organization with this role, takes the invitation and logs in, with
    /// the password `a long password`.
    pub async fn member(&self, role: &str) -> Self {
        let (email, password) = (format!("{role}@example.com"), "a long password");
        let asked = json!({ "email": email, "role": role });
        let invitation = self.post("/v1/invitations", &asked).await.data(201);
        let accept = json!({ "token": invitation["token"], "password": password });
        self.anonymous("/v1/invitations/accept", &accept).await.data(201);
        self.logged_in(&email, password).await
    }

    /// Logs in.
    pub async fn logged_in(&self, email: &str, password: &str) -> Self {
        let login = json!({ "email": email, "password": password });
        let tokens = self.anonymous("/v1/auth/login", &login).await.data(200);
        self.with_key(tokens["access_token"].as_str().expect("a token"))
    }

    /// The same customer over HTTP/1.1.
    pub fn http1(&self) -> Self {
        Self { client: self.old.clone(), ..self.clone() }
    }

    /// A request with the key.
    pub fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.client.request(method, format!("{}{path}", self.base_url)).bearer_auth(&self.key)
    }

    /// Sends a request. A stream is not read: it may have no end.
    pub async fn send(&self, request: RequestBuilder) -> Answer {
        let response = request.send().await.expect("the service answers");
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        let kind = headers.get("content-type").and_then(|kind| kind.to_str().ok());
        if kind.is_some_and(|kind| kind.starts_with("text/event-stream")) {
            return Answer { status, headers, body: Value::Null };
        }
        let bytes = response.bytes().await.expect("a whole answer");
        Answer { status, headers, body: serde_json::from_slice(&bytes).unwrap_or_default() }
    }

    /// Sends a request that must be done, and reads the answer without a look into it: where servers are measured,
    /// what a client makes of their answers is not.
    pub async fn done(&self, request: RequestBuilder) {
        let response = request.send().await.expect("the service answers");
        assert!(response.status().is_success(), "{}", response.status());
        response.bytes().await.expect("a whole answer");
    }

    /// `GET`.
    pub async fn get(&self, path: &str) -> Answer {
        self.send(self.request(Method::GET, path)).await
    }

    /// `POST` with a body.
    pub async fn post(&self, path: &str, body: &Value) -> Answer {
        self.send(self.request(Method::POST, path).json(body)).await
    }

    /// `POST` without a body.
    pub async fn call(&self, path: &str) -> Answer {
        self.send(self.request(Method::POST, path)).await
    }

    /// `PATCH`.
    pub async fn patch(&self, path: &str, body: &Value) -> Answer {
        self.send(self.request(Method::PATCH, path).json(body)).await
    }

    /// `PUT` with a body.
    pub async fn put(&self, path: &str, body: &Value) -> Answer {
        self.send(self.request(Method::PUT, path).json(body)).await
    }

    /// `POST` without credentials.
    pub async fn anonymous(&self, path: &str, body: &Value) -> Answer {
        self.send(self.client.post(format!("{}{path}", self.base_url)).json(body)).await
    }

    /// The JSON that anybody may `GET`.
    pub async fn bare(&self, path: &str) -> Value {
        self.send(self.client.get(format!("{}{path}", self.base_url))).await.body
    }

    /// `DELETE`.
    pub async fn delete(&self, path: &str) -> Answer {
        self.send(self.request(Method::DELETE, path)).await
    }

    /// The id of the default cloud.
    pub async fn cloud(&self) -> String {
        let clouds = self.get("/v1/clouds").await.data(200);
        clouds["items"][0]["id"].as_str().expect("a default cloud").to_owned()
    }

    /// Uploads an archive; gives its `archive_url`.
    pub async fn upload(&self, archive: Vec<u8>) -> String {
        let announced = json!({ "filename": "agent.tar.gz", "size_bytes": archive.len() });
        let upload = self.post("/v1/uploads", &announced).await.data(201);
        let url = upload["upload_url"].as_str().expect("an address");
        let received = self.send(self.client.put(url).body(archive)).await.data(200);
        assert_eq!(received["status"], "ready");
        upload["archive_url"].as_str().expect("an address").to_owned()
    }

    /// The body that deploys these files under this name.
    pub async fn wanted(&self, name: &str, files: &source::Files<'_>) -> Value {
        let archive_url = self.upload(source::tar_gz(files)).await;
        json!({
            "name": name,
            "cloud_id": self.cloud().await,
            "source": { "type": "upload", "archive_url": archive_url },
        })
    }

    /// Deploys files and waits until they run; gives the agent's id.
    pub async fn deploy(&self, name: &str, files: &source::Files<'_>) -> String {
        let wanted = self.wanted(name, files).await;
        self.deploy_as(&wanted).await
    }

    /// Deploys what is wanted and waits until it runs; gives the agent's id.
    pub async fn deploy_as(&self, wanted: &Value) -> String {
        let agent = self.post("/v1/agents", wanted).await.data(201);
        assert_eq!(agent["status"], "created");
        let id = agent["id"].as_str().expect("an id").to_owned();
        let agent = self.settled(&id, "running,failed").await;
        assert_eq!(agent["status"], "running", "{agent:#}");
        id
    }

    /// The agent once it has one of these states.
    pub async fn settled(&self, id: &str, states: &str) -> Value {
        self.get(&format!("/v1/agents/{id}?wait_for={states}&timeout=60")).await.data(200)
    }

    /// Invokes with an input.
    pub async fn invoke(&self, id: &str, input: &Value) -> Answer {
        self.post(&format!("/v1/agents/{id}/invoke"), &json!({ "input": input })).await
    }

    /// Starts a job; gives its id.
    pub async fn job(&self, id: &str, body: Value) -> String {
        let mut body = body;
        body["async"] = json!(true);
        let job = self.post(&format!("/v1/agents/{id}/invoke"), &body).await.data(200);
        assert_eq!(job["status"], "pending");
        let job_id = job["job_id"].as_str().expect("an id").to_owned();
        assert_eq!(job["poll_url"], format!("/v1/jobs/{job_id}"));
        job_id
    }

    /// A job once it has ended.
    pub async fn ended(&self, job: &str) -> Value {
        self.get(&format!("/v1/jobs/{job}?wait=60")).await.data(200)
    }

    /// The events of a stream, until it ends.
    pub async fn events(&self, request: RequestBuilder) -> Vec<Value> {
        let response = request.send().await.expect("the service answers");
        assert_eq!(response.status(), 200);
        let kind = response.headers()["content-type"].to_str().unwrap_or_default().to_owned();
        assert!(kind.starts_with("text/event-stream"), "{kind}");
        let mut bytes = response.bytes_stream();
        let mut text = String::new();
        while let Some(part) = bytes.next().await {
            text.push_str(&String::from_utf8_lossy(&part.expect("a whole stream")));
        }
        let data = text.lines().filter_map(|line| line.strip_prefix("data:"));
        data.map(|data| serde_json::from_str(data.trim()).expect("JSON")).collect()
    }

    /// A streamed invocation.
    pub async fn stream(&self, id: &str, input: &Value) -> Vec<Value> {
        let path = format!("/v1/agents/{id}/invoke");
        let request = self.request(Method::POST, &path).header("accept", "text/event-stream");
        self.events(request.json(&json!({ "input": input }))).await
    }
}

/// How long a test waits for what is to come. Nothing is measured by it (the benches measure): it ends only
/// a test whose wait would never end, on the slowest machine that runs the tests.
const PATIENCE: Duration = Duration::from_secs(120);

/// Waits until something holds; fails with what it last saw.
pub async fn eventually<T: std::fmt::Debug>(
    what: &str,
    look: impl AsyncFnMut() -> Result<T, String>,
) -> T {
    eventually_within(what, PATIENCE, look).await
}

/// As [`eventually`], with a patience of its own.
pub async fn eventually_within<T: std::fmt::Debug>(
    what: &str,
    within: Duration,
    mut look: impl AsyncFnMut() -> Result<T, String>,
) -> T {
    let until = Instant::now() + within;
    loop {
        match look().await {
            Ok(found) => return found,
            Err(seen) if Instant::now() >= until => panic!("{what} did not come true: {seen}"),
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
}
