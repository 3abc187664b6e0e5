//! `roost demo`: the main job on a node of its own, step by step, over the same interface that
//! everybody uses.

use std::{
    net::{Ipv4Addr, SocketAddr},
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context as _, bail, ensure};
use futures::StreamExt as _;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::{
    assembly::{self, Node},
    cli::{say, until_stopped},
    config::Config,
    receiver::Receiver,
};

/// What `demo` takes.
#[derive(clap::Args)]
pub struct Arguments {
    /// End after the last step instead of staying up.
    #[arg(long)]
    once: bool,
    /// The port; 0 is any free one.
    #[arg(long, default_value_t = 0)]
    port: u16,
}

/// The agent that is shown: ten lines.
const AGENT: &str = r#"import json, time

def invoke(input, context):
    question = input.get("question", "")
    words = f"You asked: {question} I am version {context['version']}.".split()
    print(json.dumps({"level": "info", "msg": "answering", "words": len(words)}), flush=True)
    for word in words:
        yield word + " "
        time.sleep(0.05)
    yield {"usage": {"tokens": len(words)}}
"#;

/// Runs the steps; stays up afterwards unless told otherwise.
pub async fn run(arguments: Arguments, config: Config) -> anyhow::Result<ExitCode> {
    say("Roost: a node of its own in a temporary folder, then the main job on it.");
    let folder = tempfile::Builder::new().prefix("roost-demo-").tempdir()?;
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, arguments.port));
    let began = Instant::now();
    let receiver = Receiver::start(folder.path()).await?;
    let node = assembly::start(folder.path(), address, &receiver.allowed(config)).await?;
    done(began, &format!("a node is up at {}", node.base_url));
    let shown = match Tour::begin(&node) {
        Ok(tour) => tour.walk(&receiver).await,
        Err(error) => Err(error),
    };
    if shown.is_ok() && !arguments.once {
        farewell(&node);
        until_stopped().await?;
    }
    say("stopping");
    node.stop().await;
    match shown {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error) => {
            say(&format!("the demo did not get to its end: {error:#}"));
            Ok(ExitCode::FAILURE)
        }
    }
}

fn done(began: Instant, what: &str) {
    say(&format!("  ok  {what}  ({} ms)", began.elapsed().as_millis()));
}

fn farewell(node: &Node) {
    let Some(secrets) = &node.secrets else { return };
    say("\nThe node stays up. Go on from another terminal:");
    say(&format!("  export ROOST={} KEY={}", node.base_url, secrets.live_key));
    say(&format!(
        "  curl --cacert {} -H \"Authorization: Bearer $KEY\" $ROOST/v1/agents",
        node.ca_cert.display()
    ));
    say(&format!("  the interface, to read and try: {}/docs", node.base_url));
    say("Ctrl-C ends it, and nothing stays behind.");
}

/// A client on the way through the main job.
struct Tour {
    client: reqwest::Client,
    base_url: String,
    key: String,
}

impl Tour {
    fn begin(node: &Node) -> anyhow::Result<Self> {
        let authority = std::fs::read(&node.ca_cert)?;
        let authority = reqwest::Certificate::from_pem(&authority)?;
        let client = reqwest::Client::builder().tls_certs_only([authority]).build()?;
        let key = node.secrets.as_ref().context("a fresh node has keys")?.live_key.clone();
        Ok(Self { client, base_url: node.base_url.clone(), key })
    }

    async fn walk(&self, receiver: &Receiver) -> anyhow::Result<()> {
        say("\nThe agent, agent.py:\n");
        AGENT.lines().for_each(|line| say(&format!("    {line}")));
        say("");
        let cloud = self.cloud().await?;
        let secret = self.subscribe(receiver).await?;
        let archive_url = self.upload().await?;
        let agent = self.deploy(&cloud, &archive_url).await?;
        self.call(&agent).await?;
        self.call_later(&agent).await?;
        self.call_streaming(&agent).await?;
        self.look_back(&agent).await?;
        self.hear(receiver, &secret, &agent).await
    }

    async fn subscribe(&self, receiver: &Receiver) -> anyhow::Result<String> {
        let began = Instant::now();
        let wanted = json!({ "url": receiver.url(), "events": ["agent.*"] });
        let body = self.ask(self.client.post(self.at("/v1/webhooks")).json(&wanted)).await?;
        done(began, "subscribed a receiver of our own to the agent's events");
        Ok(body["data"]["secret"].as_str().unwrap_or_default().to_owned())
    }

    /// What the receiver got, checked as any receiver should.
    async fn hear(&self, receiver: &Receiver, secret: &str, agent: &str) -> anyhow::Result<()> {
        let began = Instant::now();
        let delivery = receiver.deployed().await.context("no webhook has arrived")?;
        crate::hooks::check(secret, &delivery.signature, delivery.timestamp, &delivery.body)
            .map_err(anyhow::Error::msg)?;
        let event: Value = serde_json::from_slice(&delivery.body)?;
        ensure!(event["data"]["agent_id"] == agent, "the webhook tells of another agent");
        let kind = event["type"].as_str().unwrap_or_default();
        done(began, &format!("a webhook received and its signature checked: {kind}"));
        Ok(())
    }

    async fn ask(&self, request: reqwest::RequestBuilder) -> anyhow::Result<Value> {
        let response = request.bearer_auth(&self.key).send().await?;
        let status = response.status();
        let body: Value = response.json().await?;
        ensure!(status.is_success(), "the service answered {status}: {}", body["error"]);
        Ok(body)
    }

    fn at(&self, path: &str) -> String {
        format!("{}{path}", self.base_url)
    }

    async fn cloud(&self) -> anyhow::Result<String> {
        let body = self.ask(self.client.get(self.at("/v1/clouds"))).await?;
        let id = body["data"]["items"][0]["id"].as_str();
        id.map(str::to_owned).context("there is a default cloud")
    }

    async fn upload(&self) -> anyhow::Result<String> {
        let began = Instant::now();
        let archive = archive()?;
        let announced = json!({ "filename": "agent.tar.gz", "size_bytes": archive.len() });
        let body = self.ask(self.client.post(self.at("/v1/uploads")).json(&announced)).await?;
        let url = body["data"]["upload_url"].as_str().context("an upload has an address")?;
        self.ask(self.client.put(url).body(archive)).await?;
        done(began, "uploaded agent.tar.gz");
        Ok(body["data"]["archive_url"].as_str().unwrap_or_default().to_owned())
    }

    async fn deploy(&self, cloud: &str, archive_url: &str) -> anyhow::Result<String> {
        let began = Instant::now();
        let wanted = json!({
            "name": "parrot",
            "cloud_id": cloud,
            "source": { "type": "upload", "archive_url": archive_url },
        });
        let body = self.ask(self.client.post(self.at("/v1/agents")).json(&wanted)).await?;
        let id = body["data"]["id"].as_str().context("an agent has an id")?.to_owned();
        let path = format!("/v1/agents/{id}?wait_for=running,failed&timeout=60");
        let body = self.ask(self.client.get(self.at(&path))).await?;
        let agent = &body["data"];
        if agent["status"] != "running" {
            bail!("the agent is {}: {}", agent["status"], agent["status_reason"]["message"]);
        }
        done(began, &format!("deployed {id}: built, started, healthy"));
        let instances =
            self.ask(self.client.get(self.at(&format!("/v1/agents/{id}/instances")))).await?;
        let layers: Vec<&str> = instances["data"]["items"][0]["isolation"]
            .as_array()
            .map(|layers| layers.iter().filter_map(Value::as_str).collect())
            .unwrap_or_default();
        say(&format!("      isolated by {}", layers.join(", ")));
        Ok(id)
    }

    fn invoke(&self, agent: &str, body: &Value) -> reqwest::RequestBuilder {
        self.client.post(self.at(&format!("/v1/agents/{agent}/invoke"))).json(body)
    }

    async fn call(&self, agent: &str) -> anyhow::Result<()> {
        let began = Instant::now();
        let input = json!({ "input": { "question": "Are you there?" } });
        let body = self.ask(self.invoke(agent, &input)).await?;
        done(began, &format!("a synchronous call: {}", body["data"]["output"]));
        Ok(())
    }

    async fn call_later(&self, agent: &str) -> anyhow::Result<()> {
        let began = Instant::now();
        let input = json!({ "input": { "question": "And later?" }, "async": true });
        let body = self.ask(self.invoke(agent, &input)).await?;
        let poll_url = body["data"]["poll_url"].as_str().context("a job has an address")?;
        let body = self.ask(self.client.get(self.at(&format!("{poll_url}?wait=30")))).await?;
        ensure!(body["data"]["status"] == "completed", "the job is {}", body["data"]["status"]);
        done(
            began,
            &format!("a job, durable from the first answer on: {}", body["data"]["output"]),
        );
        Ok(())
    }

    async fn call_streaming(&self, agent: &str) -> anyhow::Result<()> {
        let began = Instant::now();
        let input = json!({ "input": { "question": "Word by word?" } });
        let request = self.invoke(agent, &input).header("accept", "text/event-stream");
        let mut bytes = request.bearer_auth(&self.key).send().await?.bytes_stream();
        let mut reader = actors::wire::EventReader::default();
        let (mut pieces, mut first) = (0, None);
        while let Some(part) = bytes.next().await {
            for event in reader.push(&part?)? {
                let event: Value = serde_json::from_str(&event)?;
                if event["type"] == "chunk" {
                    first.get_or_insert(began.elapsed());
                    pieces += 1;
                }
                ensure!(event["type"] != "error", "the stream failed: {event}");
            }
        }
        let first = first.unwrap_or(Duration::ZERO).as_millis();
        done(began, &format!("a stream of {pieces} pieces, the first after {first} ms"));
        Ok(())
    }

    async fn look_back(&self, agent: &str) -> anyhow::Result<()> {
        let began = Instant::now();
        let logs = self
            .ask(self.client.get(self.at(&format!("/v1/agents/{agent}/logs?stream=stdout"))))
            .await?;
        let lines = logs["data"]["items"].as_array().map_or(0, Vec::len);
        let body =
            self.ask(self.client.get(self.at(&format!("/v1/agents/{agent}/metrics")))).await?;
        let summary = &body["data"]["summary"];
        done(
            began,
            &format!(
                "{lines} lines in its log; {} calls, {} errors, p95 {} ms",
                summary["requests"], summary["errors"], summary["latency_ms"]["p95"]
            ),
        );
        Ok(())
    }
}

fn archive() -> anyhow::Result<Vec<u8>> {
    let mut builder =
        tar::Builder::new(flate2::write::GzEncoder::new(vec![], flate2::Compression::default()));
    let mut header = tar::Header::new_gnu();
    header.set_size(AGENT.len() as u64);
    header.set_mode(0o644);
    header.set_cksum();
    builder.append_data(&mut header, "agent.py", AGENT.as_bytes())?;
    Ok(builder.into_inner()?.finish()?)
}
