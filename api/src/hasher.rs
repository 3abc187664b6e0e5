//! Passwords are hashed by a process of its own. One hash takes 19 MiB and some 20 ms of a core, and nobody's
//! call should wait for it. Where the kernel shares processors out between sessions (sched(7), autogroup), a
//! thread of the node that gives way to the node's other threads still takes turns with the agents that they
//! wait for; a process with a session of its own gives way to all of them. It begins with the first password
//! and ends when there was none for a while, and with the node.

use std::{
    io::{self, BufRead as _, Write as _},
    process::{ExitCode, Stdio},
    sync::Arc,
    time::Duration,
};

use argon2::{Argon2, PasswordHasher as _, PasswordVerifier as _};
use http::StatusCode;
use serde::{Deserialize, Serialize};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout, Command},
    sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot},
};

use crate::error::Problem;

/// How much it gives way (setpriority(2)): beside calls that take all of a machine it has about a tenth of what
/// they have, which is a few passwords a second.
const GIVES_WAY: i32 = 10;
/// Passwords that wait for their turn.
const WAITING_MAX: usize = 200;
/// How long one may take.
const DONE_WITHIN: Duration = Duration::from_secs(30);
/// How long the process stays when there is nothing to do.
const KEPT_FOR: Duration = Duration::from_secs(30);
/// What the program is called with, to hash and nothing else.
pub const ARGUMENT: &str = "__hash";

/// One thing to do; a line of JSON.
#[derive(Serialize, Deserialize)]
pub(crate) enum Task {
    /// Make the hash of a password, in the PHC string format.
    Hash { password: String },
    /// Compare a password with a hash.
    Check { password: String, hash: String },
}

/// What came of it; a line of JSON.
#[derive(Serialize, Deserialize)]
pub(crate) enum Done {
    /// The hash.
    Hashed(String),
    /// Whether it is the password.
    Checked(bool),
    /// It can't be done.
    Failed(String),
}

impl Task {
    fn carry_out(&self) -> Done {
        match self {
            Self::Hash { password } => match hash(password) {
                Ok(hash) => Done::Hashed(hash),
                Err(error) => Done::Failed(error.to_string()),
            },
            Self::Check { password, hash } => {
                let checked = Argon2::default().verify_password(password.as_bytes(), hash.as_str());
                Done::Checked(checked.is_ok())
            }
        }
    }
}

/// The hash of a password, in the PHC string format, made here and now.
pub fn hash(password: &str) -> Result<String, argon2::password_hash::Error> {
    Ok(Argon2::default().hash_password(password.as_bytes())?.to_string())
}

/// The process: hashes until its input ends, which is when the node does.
pub fn main() -> ExitCode {
    give_way();
    let (tasks, mut out) = (io::stdin().lock().lines(), io::stdout().lock());
    for line in tasks {
        let task = line.ok().and_then(|line| serde_json::from_str::<Task>(&line).ok());
        let done = task.and_then(|task| serde_json::to_string(&task.carry_out()).ok());
        let told = done.map(|done| writeln!(out, "{done}").and_then(|()| out.flush()));
        if !matches!(told, Some(Ok(()))) {
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

/// A session of its own, as far as the machine lets it; without, it is only less polite.
fn give_way() {
    let _ = rustix::thread::set_name(c"roost-hash");
    let _ = rustix::process::setsid();
    let _ = rustix::process::setpriority_process(None, GIVES_WAY);
    let _ = std::fs::write("/proc/self/autogroup", GIVES_WAY.to_string());
}

/// A task, who waits for it, and its place among those that wait.
struct Asked {
    task: Task,
    tell: oneshot::Sender<Done>,
    _place: OwnedSemaphorePermit,
}

/// The node's side: hands tasks to the process, one at a time.
pub(crate) struct Hasher {
    tasks: mpsc::Sender<Asked>,
    places: Arc<Semaphore>,
}

impl Hasher {
    /// Ready for tasks, for as long as it is held.
    pub(crate) fn new() -> Self {
        let (tasks, asked) = mpsc::channel(WAITING_MAX);
        actors::root::detach(serve(asked));
        Self { tasks, places: Arc::new(Semaphore::new(WAITING_MAX)) }
    }

    /// Has something done.
    pub(crate) async fn run(&self, task: Task) -> Result<Done, Problem> {
        let place = Arc::clone(&self.places).try_acquire_owned().map_err(|_| busy())?;
        let (tell, told) = oneshot::channel();
        let asked = Asked { task, tell, _place: place };
        self.tasks.send(asked).await.map_err(|_| Problem::internal())?;
        told.await.map_err(|_| Problem::internal())
    }
}

async fn serve(mut tasks: mpsc::Receiver<Asked>) {
    let mut process: Option<Process> = None;
    loop {
        let next = match &process {
            Some(_) => tokio::time::timeout(KEPT_FOR, tasks.recv()).await,
            None => Ok(tasks.recv().await),
        };
        match next {
            Ok(Some(asked)) => answer(&mut process, asked).await,
            Ok(None) => return,
            Err(_) => process = None,
        }
    }
}

async fn answer(process: &mut Option<Process>, asked: Asked) {
    // Who hung up is not worth the time.
    if asked.tell.is_closed() {
        return;
    }
    let is_new = process.is_none();
    let mut done = carried_out(process, &asked.task).await;
    if done.is_err() && !is_new {
        // It may have been ended by somebody; another one may live.
        *process = None;
        done = carried_out(process, &asked.task).await;
    }
    match done {
        Ok(done) => drop(asked.tell.send(done)),
        Err(error) => {
            *process = None;
            tracing::error!(%error, "a password could not be hashed");
        }
    }
}

async fn carried_out(process: &mut Option<Process>, task: &Task) -> io::Result<Done> {
    let process = match process {
        Some(process) => process,
        None => process.insert(Process::start()?),
    };
    tokio::time::timeout(DONE_WITHIN, process.ask(task)).await?
}

/// The process, as the node holds it.
struct Process {
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
    /// Ends with this.
    _child: Child,
}

impl Process {
    fn start() -> io::Result<Self> {
        // The program that runs, even if another one has its name by now.
        let mut command = Command::new("/proc/self/exe");
        command.arg0("roost").arg(ARGUMENT).env_clear().current_dir("/").kill_on_drop(true);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn()?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let (Some(input), Some(output)) = (input, output) else {
            return Err(io::Error::other("the process has no input or output"));
        };
        Ok(Self { input, output: BufReader::new(output).lines(), _child: child })
    }

    async fn ask(&mut self, task: &Task) -> io::Result<Done> {
        let mut line = serde_json::to_vec(task)?;
        line.push(b'\n');
        self.input.write_all(&line).await?;
        let answer = self.output.next_line().await?;
        let answer = answer.ok_or_else(|| io::Error::other("the process has ended"))?;
        Ok(serde_json::from_str(&answer)?)
    }
}

fn busy() -> Problem {
    let message = "too many people log in right now; try again in a moment";
    Problem::new(StatusCode::TOO_MANY_REQUESTS, "LOGIN_THROTTLED", message).retry_after(2)
}
