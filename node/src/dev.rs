//! `roost dev`: a node with embedded defaults.

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::PathBuf,
    process::ExitCode,
};

use anyhow::bail;
use serde_json::json;

use crate::{
    assembly::{self, Node},
    bootstrap::OWNER_EMAIL,
    cli::{print, say, until_stopped},
    config::Config,
};

/// What `dev` takes.
#[derive(clap::Args)]
pub struct Arguments {
    /// How many nodes.
    #[arg(long, default_value_t = 1)]
    nodes: u32,
    /// Where everything is kept; started again on the same folder, it goes on.
    #[arg(long, default_value = "roost-data", value_name = "DIR")]
    data: PathBuf,
    /// The port; 0 is any free one.
    #[arg(long, default_value_t = 8443)]
    port: u16,
    /// Print one line of JSON once everything is ready, for programs.
    #[arg(long)]
    json: bool,
}

/// Runs until told to stop.
pub async fn run(arguments: Arguments, config: Config) -> anyhow::Result<ExitCode> {
    if arguments.nodes != 1 {
        bail!(
            "--nodes {}: this release runs clusters of one node; leave --nodes out",
            arguments.nodes
        );
    }
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, arguments.port));
    let node = assembly::start(&arguments.data, address, &config).await?;
    if arguments.json {
        print(&format!("{}\n", line(&node)));
    } else {
        greet(&node);
    }
    until_stopped().await?;
    say("stopping");
    node.stop().await;
    Ok(ExitCode::SUCCESS)
}

/// The one line for programs.
fn line(node: &Node) -> serde_json::Value {
    let secrets = node.secrets.as_ref();
    json!({
        "nodes": [{ "node_id": node.node_id, "base_url": node.base_url, "pid": std::process::id() }],
        "ca_cert": node.ca_cert,
        "org_id": node.org_id,
        "email": OWNER_EMAIL,
        "password": secrets.map(|secrets| &secrets.password),
        "live_key": secrets.map(|secrets| &secrets.live_key),
        "test_key": secrets.map(|secrets| &secrets.test_key),
        "data_dir": node.data,
    })
}

fn greet(node: &Node) {
    say(&format!("roost is ready at {}", node.base_url));
    say(&format!("  interface   {}/docs", node.base_url));
    say(&format!("  certificate {}", node.ca_cert.display()));
    say(&format!("  data        {}", node.data.display()));
    say(&format!("  isolation   {}", node.isolation.join(", ")));
    say(&format!("  containers  {}", node.containers()));
    match &node.secrets {
        Some(secrets) => {
            say("These are shown once:");
            say(&format!("  live key    {}", secrets.live_key));
            say(&format!("  test key    {}", secrets.test_key));
            say(&format!("  login       {OWNER_EMAIL} / {}", secrets.password));
            say("Try it:");
            say(&format!(
                "  curl --cacert {} -H 'Authorization: Bearer {}' {}/v1/clouds",
                node.ca_cert.display(),
                secrets.live_key,
                node.base_url
            ));
        }
        None => say("The folder has been used before; its keys are the ones you know."),
    }
    say("Ctrl-C stops it.");
}
