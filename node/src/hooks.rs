//! `roost webhooks`: an organization's events on a developer's own machine, and signatures to check.

use std::{path::PathBuf, process::ExitCode, time::Duration};

use anyhow::{Context as _, bail, ensure};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use domain::webhook::signature;
use serde_json::{Value, json};

use crate::{
    adapters::system::{SystemClock, random_bytes},
    cli::{print, say, until_stopped},
};
use actors::ports::Clock as _;

/// How far a timestamp may be off, in seconds (`interface`, Signature).
const TOLERANCE_SECONDS: u64 = 300;
/// Between questions for new events.
const ASKED_EVERY: Duration = Duration::from_millis(500);
/// How far back a question for new events reaches.
const OVERLAP: Duration = Duration::from_secs(5);
/// How long the own receiver may take.
const FORWARDED_WITHIN: Duration = Duration::from_secs(15);

/// Webhooks on your own machine.
#[derive(clap::Subcommand)]
pub enum Webhooks {
    /// Receive an organization's events as they happen and forward them, signed, to a local address.
    Listen(Listen),
    /// Check the signature of a delivery: its body comes from standard input.
    Verify(Verify),
}

/// What `listen` takes.
#[derive(clap::Args)]
pub struct Listen {
    /// Where the service is.
    #[arg(long, env = "ROOST_URL", value_name = "URL")]
    url: String,
    /// An API key with webhooks:read; best a test key.
    #[arg(long, env = "ROOST_KEY", hide_env_values = true)]
    key: String,
    /// The authority of the service's certificate, if the system does not know it.
    #[arg(long, value_name = "FILE")]
    cacert: Option<PathBuf>,
    /// Where events go, such as http://localhost:3000/hook.
    #[arg(long, value_name = "URL")]
    forward: String,
    /// Only these types, separated by commas; `agent.*` is all of a kind.
    #[arg(long, value_name = "TYPES")]
    events: Option<String>,
    /// The signing secret; made and shown if left out.
    #[arg(long, env = "ROOST_WEBHOOK_SECRET", hide_env_values = true)]
    secret: Option<String>,
}

/// What `verify` takes.
#[derive(clap::Args)]
pub struct Verify {
    /// The webhook's secret.
    #[arg(long, env = "ROOST_WEBHOOK_SECRET", hide_env_values = true)]
    secret: String,
    /// The header X-Service-Signature.
    #[arg(long)]
    signature: String,
    /// The header X-Service-Timestamp.
    #[arg(long)]
    timestamp: u64,
    /// Do not mind how old the timestamp is.
    #[arg(long)]
    any_age: bool,
}

/// Runs a command.
pub async fn run(command: Webhooks) -> anyhow::Result<ExitCode> {
    match command {
        Webhooks::Listen(arguments) => listen(arguments).await,
        Webhooks::Verify(arguments) => verify(&arguments),
    }
}

fn verify(arguments: &Verify) -> anyhow::Result<ExitCode> {
    let mut body = vec![];
    std::io::Read::read_to_end(&mut std::io::stdin().lock(), &mut body)?;
    let told = check(&arguments.secret, &arguments.signature, arguments.timestamp, &body);
    let age = SystemClock.now().seconds().abs_diff(arguments.timestamp);
    match told {
        Err(why) => {
            say(&format!("refused: {why}"));
            Ok(ExitCode::FAILURE)
        }
        Ok(()) if age > TOLERANCE_SECONDS && !arguments.any_age => {
            say(&format!(
                "refused: the timestamp is {age} s off; at most {TOLERANCE_SECONDS} are allowed"
            ));
            Ok(ExitCode::FAILURE)
        }
        Ok(()) => {
            print("the signature is right\n");
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Whether a delivery is signed with this secret.
pub fn check(secret: &str, given: &str, timestamp: u64, body: &[u8]) -> Result<(), String> {
    let right = signature::service(secret, timestamp, body);
    // Nobody times this command; a server must compare in constant time.
    match given == right {
        true => Ok(()),
        false if !given.starts_with("sha256=") => {
            Err("the signature does not begin with sha256=".to_owned())
        }
        false => {
            Err("the signature does not fit; is the body exactly what came, byte for byte?"
                .to_owned())
        }
    }
}

async fn listen(arguments: Listen) -> anyhow::Result<ExitCode> {
    let mut builder = reqwest::Client::builder();
    if let Some(path) = &arguments.cacert {
        let pem = std::fs::read(path).with_context(|| path.display().to_string())?;
        builder = builder.tls_certs_merge([reqwest::Certificate::from_pem(&pem)?]);
    }
    let listener = Listener {
        client: builder.build()?,
        secret: arguments.secret.clone().unwrap_or_else(|| {
            format!("{}{}", signature::SECRET_PREFIX, STANDARD.encode(random_bytes::<24>()))
        }),
        arguments,
        sequence: std::cell::Cell::new(0),
    };
    let mut last = listener.newest().await?;
    say(&format!("forwarding to {}", listener.arguments.forward));
    say(&format!("signing secret {}", listener.secret));
    say("Ctrl-C ends it.");
    let follow = async {
        loop {
            match listener.forward_new(&mut last).await {
                Ok(()) => {}
                Err(error) => say(&format!("  {error:#}; trying again")),
            }
            tokio::time::sleep(ASKED_EVERY).await;
        }
    };
    tokio::select! {
        () = follow => {}
        stopped = until_stopped() => stopped?,
    }
    Ok(ExitCode::SUCCESS)
}

struct Listener {
    client: reqwest::Client,
    secret: String,
    arguments: Listen,
    sequence: std::cell::Cell<u64>,
}

/// The last event that was seen: when, and which of that moment.
#[derive(Default)]
struct Last {
    since: Option<String>,
    seen: std::collections::BTreeSet<String>,
}

impl Listener {
    async fn page(&self, query: &[(&str, &str)]) -> anyhow::Result<Vec<Value>> {
        let url = format!("{}/v1/events", self.arguments.url.trim_end_matches('/'));
        let mut query = query.to_vec();
        if let Some(events) = &self.arguments.events {
            query.push(("type", events));
        }
        let request = self.client.get(url).query(&query).bearer_auth(&self.arguments.key);
        let response = request.send().await.context("the service does not answer")?;
        let status = response.status();
        let body: Value = response.json().await?;
        ensure!(status.is_success(), "the service answered {status}: {}", body["error"]["message"]);
        Ok(body["data"]["items"].as_array().cloned().unwrap_or_default())
    }

    /// Only what happens from now on is forwarded.
    async fn newest(&self) -> anyhow::Result<Last> {
        let items = self.page(&[("limit", "100")]).await?;
        let text = |event: &Value, name: &str| event[name].as_str().unwrap_or_default().to_owned();
        let since = items.first().map(|event| text(event, "created_at"));
        Ok(Last { since, seen: items.iter().map(|event| text(event, "id")).collect() })
    }

    async fn forward_new(&self, last: &mut Last) -> anyhow::Result<()> {
        // Events of different origins may arrive a little out of order: the window overlaps.
        let since = match last.since.as_deref().map(str::parse::<domain::Timestamp>) {
            Some(Ok(at)) => at.minus(OVERLAP).to_string(),
            Some(Err(_)) | None => "1970-01-01T00:00:00Z".to_owned(),
        };
        let query = [("sort", "created_at"), ("limit", "100"), ("since", since.as_str())];
        for event in self.page(&query).await? {
            let id = event["id"].as_str().unwrap_or_default().to_owned();
            if last.seen.contains(&id) {
                continue;
            }
            self.forward(&event).await?;
            let at = event["created_at"].as_str().map(str::to_owned);
            if last.since != at {
                last.since = at;
            }
            last.seen.insert(id);
        }
        Ok(())
    }

    async fn forward(&self, event: &Value) -> anyhow::Result<()> {
        self.sequence.set(self.sequence.get() + 1);
        let mut event = event.clone();
        event["meta"]["webhook_id"] = json!("wh_listen");
        event["meta"]["sequence"] = json!(self.sequence.get());
        let (body, seconds) = (event.to_string(), SystemClock.now().seconds());
        let id = event["id"].as_str().unwrap_or_default();
        let sent = self
            .client
            .post(&self.arguments.forward)
            .timeout(FORWARDED_WITHIN)
            .header("content-type", "application/json")
            .header(
                "x-service-signature",
                signature::service(&self.secret, seconds, body.as_bytes()),
            )
            .header("x-service-timestamp", seconds.to_string())
            .header("webhook-id", id)
            .header("webhook-timestamp", seconds.to_string())
            .header(
                "webhook-signature",
                signature::standard(&self.secret, id, seconds, body.as_bytes()),
            )
            .body(body.clone())
            .send()
            .await;
        match sent {
            Ok(response) => {
                say(&format!(
                    "  {} {id} -> {}",
                    event["type"].as_str().unwrap_or(""),
                    response.status()
                ));
                Ok(())
            }
            Err(error) if error.is_connect() => {
                bail!("nobody answers at {}", self.arguments.forward)
            }
            Err(error) => Err(error.into()),
        }
    }
}
