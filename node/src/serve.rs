//! `roost init`, `serve`, `token`, `join`: a node of a real cluster, from an empty folder to service.

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    pin::pin,
    process::ExitCode,
};

use anyhow::Context as _;
use serde_json::json;
use tokio::sync::watch;

use crate::{
    assembly::{self, Node, Place},
    bootstrap::{FirstSecrets, OWNER_EMAIL},
    cli::{begin_again, print, say, until_stopped},
    config::Config,
    folder,
    host::Operation,
    identity::NodeIdentity,
    join::{self, Token},
    muster, operate,
};

/// Where a node keeps everything.
#[derive(clap::Args)]
pub struct Folder {
    /// The node's folder.
    #[arg(long, default_value = "roost-data", value_name = "DIR")]
    pub data: PathBuf,
}

/// What `init` takes.
#[derive(clap::Args)]
pub struct Init {
    #[command(flatten)]
    folder: Folder,
    /// Print one line of JSON, for programs.
    #[arg(long)]
    json: bool,
}

/// What `serve` takes.
#[derive(clap::Args)]
pub struct Serve {
    #[command(flatten)]
    folder: Folder,
    /// Where clients are served, instead of the setting http.listen.
    #[arg(long, value_name = "ADDRESS")]
    clients: Option<SocketAddr>,
    /// Where other nodes are served, instead of the setting cluster.peer_listen.
    #[arg(long, value_name = "ADDRESS")]
    peer: Option<SocketAddr>,
    /// A file with a secret that all nodes of the cluster are given: an empty folder founds the cluster, or
    /// joins it with --join, without a token. For orchestrators.
    #[arg(long, value_name = "FILE", env = "ROOST_SECRET_FILE")]
    secret_file: Option<PathBuf>,
    /// Peer addresses of nodes, as host:port; the first one founds the cluster if nobody listens there.
    #[arg(
        long,
        value_name = "ADDRESS",
        value_delimiter = ',',
        env = "ROOST_JOIN",
        requires = "secret_file"
    )]
    join: Vec<String>,
    /// Print one line of JSON once everything is ready, for programs.
    #[arg(long)]
    json: bool,
    /// End when the process that started this one ends.
    #[arg(long, hide = true)]
    with_parent: bool,
}

/// What `join` takes.
#[derive(clap::Args)]
pub struct Join {
    #[command(flatten)]
    folder: Folder,
    /// What `roost token` printed on a node of the cluster.
    #[arg(long, env = "ROOST_JOIN_TOKEN", hide_env_values = true)]
    token: String,
    /// The peer address of that node, as host:port.
    address: String,
}

/// Founds a cluster: makes the folder of its first node, and prints the first keys once.
pub async fn init(arguments: Init, config: Config) -> anyhow::Result<ExitCode> {
    let data = &arguments.folder.data;
    let secrets = found(data, &config).await?;
    if arguments.json {
        print(&format!("{}\n", secrets_line(&secrets)));
        return Ok(ExitCode::SUCCESS);
    }
    say(&format!("{} is the first node of a new cluster.", data.display()));
    say("These are shown once:");
    say(&format!("  live key    {}", secrets.live_key));
    say(&format!("  test key    {}", secrets.test_key));
    say(&format!("  login       {OWNER_EMAIL} / {}", secrets.password));
    say(&format!("Next: `roost serve --data {}`.", data.display()));
    Ok(ExitCode::SUCCESS)
}

/// Makes the first node's folder with all that a cluster begins with.
pub async fn found(data: &Path, config: &Config) -> anyhow::Result<FirstSecrets> {
    anyhow::ensure!(
        NodeIdentity::read(data)?.is_none(),
        "{} belongs to a node already; `roost serve` starts it",
        data.display()
    );
    let nowhere = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let node = assembly::start(data, nowhere, config).await?;
    let secrets = node.secrets.clone();
    node.stop().await;
    // The port it had for a moment is nobody's.
    let mut identity = NodeIdentity::read(data)?.context("the folder was just made")?;
    identity.peer_address.clear();
    identity.write(data)?;
    secrets.context("the folder was just made")
}

/// What is shown once, for programs.
pub fn secrets_line(secrets: &FirstSecrets) -> serde_json::Value {
    json!({
        "email": OWNER_EMAIL,
        "password": secrets.password,
        "live_key": secrets.live_key,
        "test_key": secrets.test_key,
    })
}

/// Runs the node of a folder until told to stop.
pub async fn serve(arguments: Serve, config: Config) -> anyhow::Result<ExitCode> {
    if arguments.with_parent {
        rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::TERM))?;
    }
    // One for all of it: between two, nobody would listen.
    let mut stopped = pin!(until_stopped());
    if let Some(secret) = &arguments.secret_file
        && NodeIdentity::read(&arguments.folder.data)?.is_none()
    {
        let begun = tokio::select! {
            begun = muster::begin(&arguments.folder.data, secret, &arguments.join, &config) => begun?,
            stopped = &mut stopped => return stopped.map(|()| ExitCode::SUCCESS),
        };
        if begun == muster::Begun::Founded {
            return Err(begin_again([]).into());
        }
    }
    let listening = |given: Option<SocketAddr>, setting: &str, name: &str| match given {
        Some(address) => Ok(address),
        None => {
            setting.parse().with_context(|| format!("{name}: `{setting}` is not like 0.0.0.0:8443"))
        }
    };
    let (taken_out, mut told) = watch::channel(false);
    let place = Place {
        data: &arguments.folder.data,
        clients: listening(arguments.clients, &config.http.listen, "http.listen")?,
        peers: listening(arguments.peer, &config.cluster.peer_listen, "cluster.peer_listen")?,
        advertise: &config.cluster.advertise,
        taken_out,
    };
    let node = tokio::select! {
        node = assembly::serve_at(place, &config) => node?,
        Ok(_) = told.wait_for(|is_out| *is_out) => return Ok(taken_out_of(&arguments.folder.data)),
        stopped = &mut stopped => return stopped.map(|()| ExitCode::SUCCESS),
    };
    if arguments.json {
        print(&format!("{}\n", line(&node)));
    } else {
        say(&format!("{} is ready at {}", node.node_id, node.base_url));
        say(&format!("  certificate {}", node.ca_cert.display()));
        say(&format!("  isolation   {}", node.isolation.join(", ")));
        say("`roost token` lets another node join. Ctrl-C stops this one.");
    }
    let code = tokio::select! {
        stopped = &mut stopped => stopped.map(|()| ExitCode::SUCCESS)?,
        Ok(_) = told.wait_for(|is_out| *is_out) => taken_out_of(&arguments.folder.data),
    };
    say("stopping");
    node.stop().await;
    Ok(code)
}

/// The exit code of a node that was taken out of its cluster: no start brings it back (`EX_NOPERM` of
/// sysexits.h).
const TAKEN_OUT: u8 = 77;

fn taken_out_of(data: &Path) -> ExitCode {
    say("this node was taken out of the cluster and ends");
    say(&format!("{} can go; `roost join` makes an empty folder a new node's", data.display()));
    ExitCode::from(TAKEN_OUT)
}

/// A node, for programs.
pub fn line(node: &Node) -> serde_json::Value {
    json!({
        "node_id": node.node_id,
        "base_url": node.base_url,
        "pid": std::process::id(),
        "ca_cert": node.ca_cert,
        "org_id": node.org_id,
    })
}

/// Prints a token for one join.
pub async fn token(folder: Folder) -> anyhow::Result<ExitCode> {
    let answer = operate::ask(&folder.data, &Operation::Token).await?;
    let text = |name: &str| answer[name].as_str().unwrap_or_default();
    print(&format!("{}\n", text("token")));
    say(&format!("It is good for one node, until {}. On that node:", text("expires_at")));
    say(&format!("  roost join --token {} {}", text("token"), text("address")));
    say("  roost serve");
    Ok(ExitCode::SUCCESS)
}

/// Makes a folder the folder of a new node of an existing cluster.
pub async fn join(arguments: Join, config: Config) -> anyhow::Result<ExitCode> {
    let token: Token = arguments.token.parse()?;
    let data = &arguments.folder.data;
    let advertise = &config.cluster.advertise;
    let identity = become_member(data, &token, &arguments.address, advertise, &config).await?;
    say(&format!("{} belongs to the cluster.", identity.node_id));
    say(&format!("Next: `roost serve --data {}`.", data.display()));
    Ok(ExitCode::SUCCESS)
}

/// What `rejoin` takes.
#[derive(clap::Args)]
pub struct Rejoin {
    #[command(flatten)]
    folder: Folder,
    /// The peer address of another node of the cluster, as host:port.
    address: String,
}

/// Makes the node of a folder anew from its peers.
pub async fn rejoin(arguments: Rejoin, config: Config) -> anyhow::Result<ExitCode> {
    let data = &arguments.folder.data;
    let lock = folder::lock(data)?;
    let aside = join::rejoin(data, &arguments.address, untold(&config)).await?;
    drop(lock);
    say(&format!(
        "{} is the folder of a new node; the old one is {}.",
        data.display(),
        aside.display()
    ));
    say(&format!("Next: `roost serve --data {}`.", data.display()));
    Ok(ExitCode::SUCCESS)
}

/// Redeems a token for a folder.
pub async fn become_member(
    data: &Path,
    token: &Token,
    address: &str,
    advertise: &str,
    config: &Config,
) -> anyhow::Result<NodeIdentity> {
    let facts = domain::node::NodeFacts { peer_address: advertise.to_owned(), ..untold(config) };
    join::join(data, token, address, facts).await
}

/// Until a node runs, nobody knows more of it; `serve` tells the rest.
fn untold(config: &Config) -> domain::node::NodeFacts {
    domain::node::NodeFacts {
        id: domain::NodeId(0),
        raft_id: 0,
        peer_address: config.cluster.advertise.clone(),
        base_url: String::new(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        labels: config.labels(),
        cores: 0,
        memory_mb: 0,
        providers: vec![],
    }
}
