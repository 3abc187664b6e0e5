//! The operator's side of the peer port: a command on the machine of a node asks that node, with the
//! certificate of its own folder.

use std::{path::Path, process::ExitCode, sync::Arc, time::Duration};

use anyhow::{Context as _, bail};
use bytes::Bytes;
use cluster::peer::client::{CallError, Once};
use domain::node::NodeStatus;
use serde_json::Value;
use tokio::time::Instant;

use crate::{
    adapters::authority::Authority,
    cli::{print, say},
    config::Span,
    host::{OPERATE_PATH, Operation},
    identity::NodeIdentity,
    join::Token,
    serve::Folder,
};

/// How long a node may take.
pub const ANSWER_WITHIN: Duration = Duration::from_secs(30);

/// Asks the node of a folder.
pub async fn ask(data: &Path, operation: &Operation) -> anyhow::Result<Value> {
    let identity = NodeIdentity::read(data)?.with_context(|| {
        format!("{} belongs to no node; name its folder with --data", data.display())
    })?;
    let keys = data.join("keys");
    let authority = Authority::open(&keys)?;
    let tls = authority.peer_identity(&keys, identity.raft_id)?.client()?;
    let number = Some(identity.raft_id);
    let once = Once { tls, from: number, to: number };
    let request = Bytes::from(serde_json::to_vec(operation)?);
    match once.call(&identity.peer_address, OPERATE_PATH, request, ANSWER_WITHIN).await {
        Ok(bytes) => Ok(serde_json::from_slice(&bytes)?),
        Err(CallError::Said(reason)) => bail!("{reason}"),
        Err(error @ CallError::Unreached(_)) => {
            Err(error).with_context(|| format!("the node of {} does not run", data.display()))
        }
        Err(error) => Err(error.into()),
    }
}

/// What the node at an address answered; `otherwise` is what it did where it did not say why.
pub fn heard(
    answer: Result<Bytes, CallError>,
    address: &str,
    otherwise: &str,
) -> anyhow::Result<Bytes> {
    match answer {
        Err(CallError::Said(reason)) => bail!("the node at {address} refused: {reason}"),
        answer => answer.with_context(|| format!("the node at {address} {otherwise}")),
    }
}

/// A node that asks where it knows an address and no number.
pub struct Stranger {
    /// A client with a certificate of the cluster.
    pub tls: Arc<rustls::ClientConfig>,
    /// The number in that certificate.
    pub raft_id: u64,
}

impl Stranger {
    /// Asks whoever listens at the address.
    pub async fn ask(&self, address: &str, operation: &Operation) -> anyhow::Result<Value> {
        let question = Bytes::from(serde_json::to_vec(operation)?);
        let once = Once { tls: Arc::clone(&self.tls), from: Some(self.raft_id), to: None };
        let answer = once.call(address, OPERATE_PATH, question, ANSWER_WITHIN).await;
        Ok(serde_json::from_slice(&heard(answer, address, "does not answer")?)?)
    }

    /// A token for one join.
    pub async fn token(&self, address: &str) -> anyhow::Result<Token> {
        let answer = self.ask(address, &Operation::Token).await?;
        answer["token"].as_str().context("no token in the answer")?.parse()
    }
}

/// What operators do with a running cluster, on the machine of one of its nodes.
#[derive(clap::Subcommand)]
pub enum Cluster {
    /// The cluster at a glance.
    Status(Folder),
    /// Whether the node of a folder serves, for health checks: the answer is the exit code.
    Ready(Folder),
    /// Every node: whether it answers, what is wanted of it, what runs on it.
    Nodes(Folder),
    /// Every replicated group: who leads it, who has replicas.
    Shards(Folder),
    /// Move leaderships and instances away from a node.
    Drain(Drain),
    /// End a node's draining.
    Activate(Target),
    /// Take a drained or dead node out for good.
    Remove(Target),
    /// Seal gossip with another key, on all nodes, without a gap.
    RotateGossipKey(Folder),
    /// Seal everything secret under another master key, on all nodes, without a gap.
    RotateMasterKey(Folder),
    /// Back the whole cluster up into a file.
    Backup(crate::backup::Backup),
    /// Begin a new cluster with what a backup has.
    Restore(crate::backup::Restore),
    /// Make a certificate that opens the figures of every node (GET /metrics on the peer port) and nothing
    /// else, for Prometheus.
    Certificate(Certificate),
    /// Begin anew as a cluster of one, where the majority of the nodes is gone for good.
    Recover(crate::recover::Recover),
    /// Sign access tokens with another key. Tokens of the two before it stay good until they expire.
    RotateSigningKey(Folder),
}

/// A node, seen from the folder of any.
#[derive(clap::Args)]
pub struct Target {
    /// The node; without it, the one of the folder.
    node: Option<domain::NodeId>,
    #[command(flatten)]
    folder: Folder,
}

/// What `drain` takes.
#[derive(clap::Args)]
pub struct Drain {
    #[command(flatten)]
    target: Target,
    /// How long instances have to find room elsewhere; what has not found it by then goes all the same.
    #[arg(long, default_value = "1h", value_name = "TIME")]
    deadline: Span,
    /// Let instances go at once, without waiting for others in their place. Calls in flight finish all the same.
    #[arg(long, conflicts_with = "deadline")]
    force: bool,
}

/// What `leave` takes.
#[derive(clap::Args)]
pub struct Leave {
    #[command(flatten)]
    folder: Folder,
    /// How long instances have to find room elsewhere; what has not found it by then goes all the same.
    #[arg(long, default_value = "1h", value_name = "TIME")]
    within: Span,
}

/// How long instances may finish what they do once they must go.
const GONE_WITHIN: Duration = Duration::from_secs(60);
/// Between looks whether a node is drained.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Does what an operator asks for.
pub async fn run(command: Cluster) -> anyhow::Result<ExitCode> {
    match command {
        Cluster::Status(folder) => status(&folder.data).await?,
        Cluster::Ready(folder) => return ready(&folder.data).await,
        Cluster::Nodes(folder) => nodes(&folder.data).await?,
        Cluster::Shards(folder) => shards(&folder.data).await?,
        Cluster::RotateSigningKey(folder) => {
            ask(&folder.data, &Operation::RotateSigningKey).await?;
            say(
                "access tokens are signed with a new key; those that are out stay good until they expire",
            );
        }
        Cluster::RotateGossipKey(folder) => {
            ask(&folder.data, &Operation::RotateGossipKey).await?;
            say("gossip is sealed with a new key; nodes that are away learn it when they are back");
        }
        Cluster::RotateMasterKey(folder) => {
            let answer = ask(&folder.data, &Operation::RotateMasterKey).await?;
            say(&format!(
                "{} data keys are sealed with the master key {}; every node has forgotten the one before.",
                answer["data_keys"],
                text(&answer["master_key"])
            ));
            say(
                "Backups from before open with the keys of their time: keep those as long as these.",
            );
        }
        Cluster::Backup(arguments) => return crate::backup::take(arguments).await,
        Cluster::Restore(arguments) => return crate::backup::restore(arguments).await,
        Cluster::Certificate(arguments) => certificate(&arguments)?,
        Cluster::Recover(arguments) => return crate::recover::run(arguments).await,
        Cluster::Drain(arguments) => drain(arguments).await?,
        Cluster::Activate(target) => set(target, NodeStatus::Active).await?,
        Cluster::Remove(target) => set(target, NodeStatus::Removed).await?,
    }
    Ok(ExitCode::SUCCESS)
}

/// What `certificate` takes.
#[derive(clap::Args)]
pub struct Certificate {
    /// The folder to write ca.pem, client.pem and client-key.pem to.
    into: std::path::PathBuf,
    #[command(flatten)]
    folder: Folder,
}

fn certificate(arguments: &Certificate) -> anyhow::Result<()> {
    let (into, data) = (&arguments.into, &arguments.folder.data);
    NodeIdentity::read(data)?.with_context(|| {
        format!("{} belongs to no node; name its folder with --data", data.display())
    })?;
    let authority = Authority::open(&data.join("keys"))?;
    let names = ["metrics.roost".to_owned()];
    let uses = [rcgen::ExtendedKeyUsagePurpose::ClientAuth];
    let issued = authority.issue("Roost metrics", &names, &uses)?;
    std::fs::create_dir_all(into).with_context(|| format!("the folder {}", into.display()))?;
    let files = [
        ("ca.pem", &authority.pem),
        ("client.pem", &issued.pem),
        ("client-key.pem", &issued.key_pem),
    ];
    for (name, text) in files {
        crate::keys::write_secret(&into.join(name), text.as_bytes())?;
        print(&format!("{}\n", into.join(name).display()));
    }
    say(&format!(
        "Prometheus: scheme https, path /metrics, tls_config.server_name {}, on every peer address.",
        cluster::peer::ANY_NODE
    ));
    Ok(())
}

async fn status(data: &Path) -> anyhow::Result<()> {
    let status = ask(data, &Operation::Status).await?;
    let settled = if status["settled"] == true { "yes" } else { "not yet" };
    print(&format!(
        "leader             {}\nmembers            {} ({} answer)\nfailure_tolerance  {}\nreplicas in place  {settled}\n",
        text(&status["leader"]),
        status["members"],
        status["alive"],
        status["failure_tolerance"],
    ));
    Ok(())
}

async fn ready(data: &Path) -> anyhow::Result<ExitCode> {
    let status = ask(data, &Operation::Status).await?;
    let serves = status["leader"].is_string();
    say(if serves { "ready" } else { "the cluster has no leader" });
    Ok(if serves { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn nodes(data: &Path) -> anyhow::Result<()> {
    let all = ask(data, &Operation::Nodes).await?;
    let columns = [
        "id",
        "status",
        "alive",
        "instances",
        "leads",
        "version",
        "zone",
        "base_url",
        "peer_address",
    ];
    print(&table(&columns, &all));
    Ok(())
}

async fn shards(data: &Path) -> anyhow::Result<()> {
    let all = ask(data, &Operation::Shards).await?;
    print(&table(&["name", "leader", "term", "applied_index", "voters", "learners"], &all));
    Ok(())
}

async fn set(target: Target, to: NodeStatus) -> anyhow::Result<()> {
    let set = Operation::Set { node: target.node, to };
    let answer = ask(&target.folder.data, &set).await?;
    say(&format!("{} is {}", text(&answer["node_id"]), text(&answer["status"])));
    Ok(())
}

async fn drain(arguments: Drain) -> anyhow::Result<()> {
    let Drain { target, deadline, force } = arguments;
    let within = if force { Duration::ZERO } else { deadline.0 };
    let answer = ask(&target.folder.data, &Operation::Drain { node: target.node, within }).await?;
    say(&format!("{} drains, until {}", text(&answer["node_id"]), text(&answer["by"])));
    say("`roost cluster nodes` shows when it runs and leads nothing any more.");
    Ok(())
}

/// Drains the node of a folder, waits until nothing is on it, and takes it out.
pub async fn leave(arguments: Leave) -> anyhow::Result<ExitCode> {
    let data = &arguments.folder.data;
    let drain = Operation::Drain { node: None, within: arguments.within.0 };
    let answer = ask(data, &drain).await?;
    let own = text(&answer["node_id"]);
    // What goes at the last moment needs some more to be gone.
    let until = Instant::now() + arguments.within.0 + GONE_WITHIN;
    let mut shown = String::new();
    loop {
        let all = ask(data, &Operation::Nodes).await?;
        let row = all.as_array().and_then(|rows| rows.iter().find(|row| row["id"] == own.as_str()));
        let row = row.context("this node is not in the list of nodes")?;
        if row["instances"] == 0 && row["leads"] == 0 {
            break;
        }
        let now =
            format!("  still here: {} instances, {} leaderships", row["instances"], row["leads"]);
        if now != shown {
            say(&now);
            shown = now;
        }
        if Instant::now() >= until {
            bail!("{own} is not drained yet; it goes on draining, run `roost leave` again");
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
    ask(data, &Operation::Set { node: None, to: NodeStatus::Removed }).await?;
    say(&format!(
        "{own} has left the cluster. Its process ends by itself once its replicas are elsewhere; then its folder is of \
         no more use."
    ));
    Ok(ExitCode::SUCCESS)
}

fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null => "-".to_owned(),
        Value::Array(items) => items.iter().map(text).collect::<Vec<_>>().join(","),
        Value::Bool(_) | Value::Number(_) | Value::Object(_) => value.to_string(),
    }
}

/// Rows of JSON as aligned columns.
fn table(columns: &[&str], rows: &Value) -> String {
    let heads: Vec<String> = columns.iter().map(|name| (*name).to_owned()).collect();
    let rows = rows.as_array().map(Vec::as_slice).unwrap_or_default();
    let cells = |row: &Value| columns.iter().map(|name| text(&row[*name])).collect::<Vec<_>>();
    let lines: Vec<Vec<String>> = std::iter::once(heads).chain(rows.iter().map(cells)).collect();
    let width = |place: usize| lines.iter().map(|line| line[place].len()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns.len()).map(width).collect();
    let padded = |line: &Vec<String>| {
        let cells = line.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
    };
    lines.iter().map(padded).collect()
}
