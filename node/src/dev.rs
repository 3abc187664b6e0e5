//! `roost dev`: embedded defaults. One node runs in this process; more are real processes that come
//! together as the nodes of any cluster do, over `init`, `token`, `join` and `serve`.

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::{Child, Command},
};

use crate::{
    assembly::{self, Node},
    bootstrap::{FirstSecrets, OWNER_EMAIL},
    cli::{print, say, until_stopped},
    config::Config,
    host::Operation,
    identity::NodeIdentity,
    join::Token,
    operate, serve,
};

/// How many nodes make sense on one machine.
const NODES_MAX: u32 = 9;
/// How long the cluster may take to settle.
const SETTLED_WITHIN: Duration = Duration::from_secs(120);
/// Between looks whether it has.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How long a node may take to end.
const ENDS_WITHIN: Duration = Duration::from_secs(40);

/// What `dev` takes.
#[derive(clap::Args)]
pub struct Arguments {
    /// How many nodes.
    #[arg(long, default_value_t = 1)]
    nodes: u32,
    /// Where everything is kept; started again on the same folder, it goes on.
    #[arg(long, default_value = "roost-data", value_name = "DIR")]
    data: PathBuf,
    /// The port of the first node, the next ones follow; 0 is any free one.
    #[arg(long, default_value_t = 8443)]
    port: u16,
    /// Print one line of JSON once everything is ready, for programs.
    #[arg(long)]
    json: bool,
    /// The file with settings, for the processes of the nodes.
    #[arg(skip)]
    pub settings: Option<PathBuf>,
}

/// Runs until told to stop.
pub async fn run(arguments: Arguments, config: Config) -> anyhow::Result<ExitCode> {
    ensure!(
        (1..=NODES_MAX).contains(&arguments.nodes),
        "--nodes {}: choose 1 to {NODES_MAX}",
        arguments.nodes
    );
    let has_nodes = arguments.data.join("node-1").exists();
    if arguments.nodes == 1 && !has_nodes {
        one(arguments, config).await
    } else {
        many(arguments, config).await
    }
}

async fn one(arguments: Arguments, config: Config) -> anyhow::Result<ExitCode> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, arguments.port));
    let node = assembly::start(&arguments.data, address, &config).await?;
    let secrets = node.secrets.as_ref();
    if arguments.json {
        print(&format!("{}\n", line(&[serve::line(&node)], secrets, &node.data)));
    } else {
        greet(&node);
    }
    until_stopped().await?;
    say("stopping");
    node.stop().await;
    Ok(ExitCode::SUCCESS)
}

/// The one line for programs.
fn line(nodes: &[Value], secrets: Option<&FirstSecrets>, data: &Path) -> Value {
    let shown = nodes.iter().map(|node| {
        json!({ "node_id": node["node_id"], "base_url": node["base_url"], "pid": node["pid"] })
    });
    json!({
        "nodes": shown.collect::<Vec<_>>(),
        "ca_cert": nodes[0]["ca_cert"],
        "org_id": nodes[0]["org_id"],
        "email": OWNER_EMAIL,
        "password": secrets.map(|secrets| &secrets.password),
        "live_key": secrets.map(|secrets| &secrets.live_key),
        "test_key": secrets.map(|secrets| &secrets.test_key),
        "data_dir": data,
    })
}

fn greet(node: &Node) {
    say(&format!("roost is ready at {}", node.base_url));
    say(&format!("  interface   {}/docs", node.base_url));
    say(&format!("  certificate {}", node.ca_cert.display()));
    say(&format!("  data        {}", node.data.display()));
    say(&format!("  isolation   {}", node.isolation.join(", ")));
    say(&format!("  containers  {}", node.containers()));
    let authority = node.ca_cert.display().to_string();
    greet_keys(node.secrets.as_ref(), &authority, &node.base_url);
}

fn greet_keys(secrets: Option<&FirstSecrets>, authority: &str, base_url: &str) {
    match secrets {
        Some(secrets) => {
            say("These are shown once:");
            say(&format!("  live key    {}", secrets.live_key));
            say(&format!("  test key    {}", secrets.test_key));
            say(&format!("  login       {OWNER_EMAIL} / {}", secrets.password));
            say("Try it:");
            say(&format!(
                "  curl --cacert {authority} -H 'Authorization: Bearer {}' {base_url}/v1/clouds",
                secrets.live_key,
            ));
        }
        None => say("The folder has been used before; its keys are the ones you know."),
    }
    say("Ctrl-C stops it.");
}

async fn many(arguments: Arguments, config: Config) -> anyhow::Result<ExitCode> {
    std::fs::create_dir_all(&arguments.data)?;
    let data = arguments.data.canonicalize()?;
    ensure!(
        !data.join("node.json").exists(),
        "{} holds a single node; choose another --data for a cluster",
        data.display()
    );
    let count = count(&data, arguments.nodes)?;
    let mut nodes = vec![];
    let ready = bring_up(&arguments, &data, count, &config, &mut nodes).await;
    let (lines, secrets) = match ready {
        Ok(ready) => ready,
        Err(error) => {
            end(&mut nodes).await;
            return Err(error);
        }
    };
    if arguments.json {
        print(&format!("{}\n", line(&lines, secrets.as_ref(), &data)));
    } else {
        greet_many(&lines, secrets.as_ref());
    }
    until_stopped().await?;
    say("stopping");
    end(&mut nodes).await;
    Ok(ExitCode::SUCCESS)
}

/// A folder that was used before keeps at least the nodes that it has.
fn count(data: &Path, wanted: u32) -> anyhow::Result<u32> {
    let there = (1..=NODES_MAX).take_while(|n| folder(data, *n).join("node.json").exists()).count();
    let there = u32::try_from(there)?;
    if there > wanted {
        say(&format!("the folder has {there} nodes: all of them start"));
    }
    Ok(wanted.max(there))
}

fn folder(data: &Path, number: u32) -> PathBuf {
    data.join(format!("node-{number}"))
}

type Ready = (Vec<Value>, Option<FirstSecrets>);

async fn bring_up(
    arguments: &Arguments,
    data: &Path,
    count: u32,
    config: &Config,
    nodes: &mut Vec<Child>,
) -> anyhow::Result<Ready> {
    let first = folder(data, 1);
    let secrets = match NodeIdentity::read(&first)? {
        Some(_) => None,
        None => Some(found(arguments, &first).await?),
    };
    let known = (1..=count).take_while(|n| folder(data, *n).join("node.json").exists()).count();
    // Nodes that know each other already may need each other to come up.
    let mut starting = vec![];
    for number in 1..=u32::try_from(known)? {
        starting.push(start(arguments, data, number, nodes)?);
    }
    let mut lines = vec![];
    for output in starting {
        lines.push(ready_line(output).await?);
    }
    for number in u32::try_from(known)? + 1..=count {
        let answer = operate::ask(&first, &Operation::Token).await?;
        let text = |name: &str| answer[name].as_str().unwrap_or_default();
        let token: Token = text("token").parse()?;
        let own = folder(data, number);
        serve::become_member(&own, &token, text("address"), "", config).await?;
        lines.push(ready_line(start(arguments, data, number, nodes)?).await?);
        if !arguments.json {
            say(&format!("  node {number} of {count} has joined"));
        }
    }
    settle(data, count).await?;
    Ok((lines, secrets))
}

/// A process of its own founds the cluster, as an operator would.
async fn found(arguments: &Arguments, data: &Path) -> anyhow::Result<FirstSecrets> {
    let mut command = roost(arguments)?;
    command.args(["init", "--json", "--data"]).arg(data);
    let output = command.stderr(std::process::Stdio::inherit()).output().await?;
    ensure!(output.status.success(), "the first node's folder could not be made");
    let line: Value = serde_json::from_slice(&output.stdout)?;
    let text = |name: &str| line[name].as_str().unwrap_or_default().to_owned();
    let (password, live_key) = (text("password"), text("live_key"));
    Ok(FirstSecrets { password, live_key, test_key: text("test_key") })
}

fn roost(arguments: &Arguments) -> anyhow::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    if let Some(settings) = &arguments.settings {
        command.arg("--config").arg(settings);
    }
    Ok(command)
}

type Output = BufReader<tokio::process::ChildStdout>;

fn start(
    arguments: &Arguments,
    data: &Path,
    number: u32,
    nodes: &mut Vec<Child>,
) -> anyhow::Result<Output> {
    let port = match arguments.port {
        0 => 0,
        first => first + u16::try_from(number - 1)?,
    };
    let mut command = roost(arguments)?;
    command.args(["serve", "--json", "--with-parent", "--peer", "127.0.0.1:0"]);
    command.args(["--clients", &format!("127.0.0.1:{port}"), "--data"]).arg(folder(data, number));
    command.stdout(std::process::Stdio::piped()).stdin(std::process::Stdio::null());
    // A terminal's Ctrl-C is for the parent: it ends the nodes one by one.
    command.process_group(0);
    let mut child = command.spawn().context("a node's process could not be started")?;
    let output = child.stdout.take().context("a node's process has no output")?;
    nodes.push(child);
    Ok(BufReader::new(output))
}

async fn ready_line(mut output: Output) -> anyhow::Result<Value> {
    let mut line = String::new();
    output.read_line(&mut line).await?;
    if line.is_empty() {
        bail!("a node ended before it was ready; its words stand above");
    }
    Ok(serde_json::from_str(&line)?)
}

/// Waits until every node sees all nodes and every group has all its replicas.
async fn settle(data: &Path, count: u32) -> anyhow::Result<()> {
    let began = Instant::now();
    for number in 1..=count {
        while let Err(why) = is_settled(&folder(data, number), count).await {
            if began.elapsed() >= SETTLED_WITHIN {
                return Err(why.context("the nodes did not come together in time"));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }
    Ok(())
}

async fn is_settled(data: &Path, count: u32) -> anyhow::Result<()> {
    let status = operate::ask(data, &Operation::Status).await?;
    let alive = status["alive"].as_u64().unwrap_or(0);
    ensure!(
        status["settled"] == true && alive == u64::from(count),
        "{alive} of {count} nodes are alive, and not all groups have their replicas"
    );
    Ok(())
}

fn greet_many(lines: &[Value], secrets: Option<&FirstSecrets>) {
    let text = |line: &Value, name: &str| line[name].as_str().unwrap_or_default().to_owned();
    say(&format!("a cluster of {} is ready; any node answers any call:", lines.len()));
    for line in lines {
        say(&format!(
            "  {}  {}  pid {}",
            text(line, "node_id"),
            text(line, "base_url"),
            line["pid"]
        ));
    }
    let authority = text(&lines[0], "ca_cert");
    greet_keys(secrets, &authority, &text(&lines[0], "base_url"));
}

/// Ends all nodes, together: each waits for its own calls.
async fn end(nodes: &mut Vec<Child>) {
    for node in nodes.iter() {
        if let Some(pid) =
            node.id().and_then(|pid| rustix::process::Pid::from_raw(pid.cast_signed()))
        {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
    }
    for mut node in nodes.drain(..) {
        if tokio::time::timeout(ENDS_WITHIN, node.wait()).await.is_err() {
            let _ = node.start_kill();
        }
    }
}
