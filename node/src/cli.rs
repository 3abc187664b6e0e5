//! The commands.

use std::{
    env,
    io::{self, Write as _},
    os::unix::process::CommandExt as _,
    path::PathBuf,
    process::{self, ExitCode},
};

use clap::{Parser, Subcommand};
use rustix::process::{Resource, Rlimit, setrlimit};
use tracing_subscriber::EnvFilter;

use crate::{adapters::tls, config::Settings, demo, dev, hooks, operate, serve};

/// Hosts AI agents: from a repository, an image or an archive to a running, invocable, observed agent.
#[derive(Parser)]
#[command(
    name = "roost",
    version,
    about,
    after_help = "Begin with `roost demo`. `roost dev` gives you a node of your own, `roost dev --nodes 3` a \
                  cluster. For a real one: `init` and `serve` on the first machine, `token` there, then `join` \
                  and `serve` on each other."
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
    /// A file with settings; `roost config` lists them.
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
}

#[derive(Subcommand)]
enum Command {
    /// Show the main job: upload, deploy and invoke an agent of ten lines, step by step.
    Demo(demo::Arguments),
    /// Run a node with embedded defaults, for development.
    Dev(dev::Arguments),
    /// Found a cluster: make the folder of its first node and print the first keys.
    Init(serve::Init),
    /// Run the node of a folder that `init` or `join` made.
    Serve(serve::Serve),
    /// Print a token that lets one node join.
    Token(serve::Folder),
    /// Join a cluster with a token: make the folder of a new node.
    Join(serve::Join),
    /// Make a node anew from its peers, whose disk has given back other bytes than were written.
    Rejoin(serve::Rejoin),
    /// Let the node of a folder leave its cluster, once nothing is on it any more.
    Leave(operate::Leave),
    /// Look at a running cluster and say what is wanted of its nodes.
    #[command(subcommand)]
    Cluster(operate::Cluster),
    /// Receive events on your own machine, and check signatures.
    #[command(subcommand)]
    Webhooks(hooks::Webhooks),
    /// Print the OpenAPI document.
    Openapi,
    /// Print every setting, its value and where the value came from.
    Config,
}

/// What is logged unless `ROOST_LOG` says otherwise. A group that ends while it still has peers to greet
/// is no error, though openraft calls it one.
const QUIET: &str = "warn,openraft=error,openraft::core::heartbeat=off,openraft::raft::raft_inner=off,poem=error,rustls_platform_verifier=off";

/// How many milliseconds the allocator keeps pages that nobody uses. After its own default, a second, a node that is
/// busy with jobs holds some 25 MiB more; with half of this, changes of a cluster take several percent more of the
/// processors.
const PURGE_DELAY: (&str, &str) = ("MIMALLOC_PURGE_DELAY", "20");

/// Runs the command that the arguments name.
pub fn main() -> ExitCode {
    let Arguments { command, config } = Arguments::parse();
    let runs_a_node = matches!(command, Command::Demo(_) | Command::Dev(_) | Command::Serve(_));
    if runs_a_node && env::var_os(PURGE_DELAY.0).is_none() {
        // The allocator reads it before `main`. Where it can't be told, its own default holds.
        begin_again([PURGE_DELAY]);
    }
    tls::install_provider();
    let filter = EnvFilter::try_from_env("ROOST_LOG").unwrap_or_else(|_| EnvFilter::new(QUIET));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).init();
    leave_no_core();
    let done = run(command, config.as_deref());
    match done {
        Ok(code) => code,
        Err(error) => {
            say(&format!("roost: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// Becomes the same command anew, as the same process, with this in its environment besides; returns only if that
/// fails.
pub fn begin_again<'a>(besides: impl IntoIterator<Item = (&'a str, &'a str)>) -> io::Error {
    match env::current_exe() {
        Ok(program) => {
            process::Command::new(program).args(env::args_os().skip(1)).envs(besides).exec()
        }
        Err(error) => error,
    }
}

/// A core file has everything that the process knows, keys and secrets with it.
fn leave_no_core() {
    let none = Rlimit { current: Some(0), maximum: Some(0) };
    if let Err(error) = setrlimit(Resource::Core, none) {
        tracing::warn!(%error, "core files of this process may hold secrets");
    }
}

fn run(command: Command, file: Option<&std::path::Path>) -> anyhow::Result<ExitCode> {
    let settings = Settings::load(file, env::vars())?;
    match command {
        Command::Demo(arguments) => in_runtime(demo::run(arguments, settings.config)),
        Command::Dev(mut arguments) => {
            arguments.settings = file.map(std::path::Path::to_path_buf);
            in_runtime(dev::run(arguments, settings.config))
        }
        Command::Init(arguments) => in_runtime(serve::init(arguments, settings.config)),
        Command::Serve(arguments) => in_runtime(serve::serve(arguments, settings.config)),
        Command::Token(folder) => in_runtime(serve::token(folder)),
        Command::Join(arguments) => in_runtime(serve::join(arguments, settings.config)),
        Command::Rejoin(arguments) => in_runtime(serve::rejoin(arguments, settings.config)),
        Command::Leave(arguments) => in_runtime(operate::leave(arguments)),
        Command::Cluster(command) => in_runtime(operate::run(command)),
        Command::Webhooks(command) => in_runtime(hooks::run(command)),
        Command::Openapi => {
            print(&api::document());
            Ok(ExitCode::SUCCESS)
        }
        Command::Config => {
            print(&settings.listing());
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn in_runtime(task: impl Future<Output = anyhow::Result<ExitCode>>) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let result = runtime.block_on(task);
    runtime.shutdown_timeout(std::time::Duration::from_secs(2));
    result
}

/// To standard output, exactly so.
pub fn print(text: &str) {
    let mut out = io::stdout().lock();
    // Nobody reads on: that is the reader's choice.
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// To people, on standard error.
pub fn say(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// Waits for SIGINT or SIGTERM.
pub async fn until_stopped() -> anyhow::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut term = signal(SignalKind::terminate())?;
    let mut int = signal(SignalKind::interrupt())?;
    tokio::select! {
        _ = term.recv() => {}
        _ = int.recv() => {}
    }
    Ok(())
}
