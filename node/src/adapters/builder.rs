//! From a source to an image of the `process` runtime: an unpacked folder with its dependencies and a
//! command line.
//!
//! What the folder holds decides how it is started (`decisions` §21). An installer runs in the same
//! cage as an instance, with the image's folder to write to.

use std::{
    fs, io,
    os::unix::fs::PermissionsExt as _,
    path::{Component, Path, PathBuf},
    process::Stdio,
    sync::Arc,
};

use actors::ports::{BuildRequest, Channel, LineSink};
use http::uri::PathAndQuery;

use domain::{
    AgentId, DeploymentId,
    agent::{RuntimeSpec, Source},
    deployment::{Failure, Image},
};
use serde::Deserialize;
use tokio::{
    io::{AsyncRead, BufReader},
    sync::oneshot,
};

use super::{
    archive,
    blobs::FolderBlobs,
    git::GitHost,
    isolation::{self, FIRST_UID, Isolation},
    process::{ProcessRuntime, program_prefix, read_line},
};
use crate::exec::Cage;

/// The handler adapters, as files of the image.
const PYTHON_ADAPTER: &str = include_str!("../handlers/adapter.py");
const NODE_ADAPTER: &str = include_str!("../handlers/adapter.mjs");
/// Processes and threads of an installer.
const INSTALLER_PROCESSES_MAX: u64 = 512;
/// Users that builds run as, beyond those of instances; two builds seldom share one.
const BUILD_UIDS: u32 = 65_536;
/// Lines of an installer's output that a failure shows.
const LAST_LINES: usize = 20;

/// Builds images.
pub struct Builder {
    images: PathBuf,
    blobs: Arc<FolderBlobs>,
    git: GitHost,
    process: Arc<ProcessRuntime>,
}

/// `agent.toml`: what a source may say of itself.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Manifest {
    entry: Option<Entry>,
    language: Option<String>,
    http: Http,
    scaling: Scaling,
    isolation: Minimum,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Entry {
    Line(String),
    Words(Vec<String>),
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Http {
    health: Option<String>,
    invoke: Option<String>,
    port: Option<u16>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Scaling {
    concurrency: Option<u32>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Minimum {
    minimum: Vec<String>,
}

fn build_failed(message: impl Into<String>) -> Failure {
    Failure::new("BUILD_FAILED", message)
}

fn disk(error: &dyn std::fmt::Display) -> Failure {
    build_failed(format!("the image could not be written: {error}"))
}

impl Builder {
    /// Below `data`.
    pub fn new(
        data: &Path,
        blobs: Arc<FolderBlobs>,
        git: GitHost,
        process: Arc<ProcessRuntime>,
    ) -> Self {
        Self { images: data.join("images"), blobs, git, process }
    }

    fn reference(agent: AgentId, deployment: DeploymentId) -> String {
        format!("{agent}/{deployment}")
    }

    /// Builds; on failure nothing is left.
    pub async fn build(&self, request: BuildRequest, log: LineSink) -> Result<Image, Failure> {
        let reference = Self::reference(request.agent_id, request.deployment_id);
        let folder = self.images.join(&reference);
        let mut half = HalfBuilt(Some(folder.clone()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).map_err(|error| disk(&error))?;
        let commit = self.fetch(&request, &folder, &log).await?;
        let plan = Plan::of(&folder, &request.spec.runtime, self.process.isolation())?;
        log(Channel::Stdout, format!("start command: {}", plan.shown(&folder)));
        // The adapter first: once an installer has run, nothing in the folder is to be trusted.
        plan.write_adapter(&folder).map_err(|error| disk(&error))?;
        self.install(&plan, &folder, &log).await?;
        open_up(&folder).map_err(|error| disk(&error))?;
        half.0 = None;
        Ok(Image {
            reference,
            runtime: plan.runtime,
            command: plan.command,
            port: None,
            health_path: plan.health_path,
            invoke_path: plan.invoke_path,
            concurrency: plan.concurrency,
            isolation_minimum: plan.isolation_minimum,
            commit,
            digest: None,
        })
    }

    /// Removes images of an agent that none of `kept` names.
    pub fn forget(&self, agent: AgentId, kept: &[String]) {
        let folder = self.images.join(agent.to_string());
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            let reference = format!("{agent}/{}", entry.file_name().to_string_lossy());
            if !kept.contains(&reference) {
                let _ = fs::remove_dir_all(entry.path());
            }
        }
        // Only an empty folder goes.
        let _ = fs::remove_dir(&folder);
    }

    async fn fetch(
        &self,
        request: &BuildRequest,
        folder: &Path,
        log: &LineSink,
    ) -> Result<Option<String>, Failure> {
        match &request.spec.source {
            Source::Upload { upload_id, sha256 } => {
                log(Channel::Stdout, format!("unpacking {upload_id}"));
                let (archive, target) = (self.blobs.path(sha256), folder.to_owned());
                let unpacked =
                    tokio::task::spawn_blocking(move || archive::unpack(&archive, &target)).await;
                let unpacked = unpacked.map_err(|error| build_failed(error.to_string()))?;
                unpacked.map_err(|error| build_failed(error.to_string())).map(|()| None)
            }
            Source::Github { repo, branch, path } => {
                let shown = branch.as_deref().unwrap_or("the default branch");
                log(Channel::Stdout, format!("fetching {repo} at {shown}"));
                let clone = folder.join(".roost-clone");
                let fetched = self.git.fetch(repo, branch.as_deref(), &clone).await?;
                log(Channel::Stdout, format!("at commit {}", fetched.commit));
                take_path(&clone, path.as_deref(), folder)?;
                Ok(Some(fetched.commit))
            }
            Source::Docker { .. } => Err(build_failed(
                "a docker image can't run in a process cloud; choose a docker cloud",
            )),
        }
    }

    async fn install(&self, plan: &Plan, folder: &Path, log: &LineSink) -> Result<(), Failure> {
        let Some(installer) = &plan.installer else { return Ok(()) };
        log(Channel::Stdout, format!("installing: {}", installer.command.join(" ")));
        let mut run = Install { uid: build_uid(folder), process: &self.process, folder, log }
            .start(installer)
            .await?;
        let status = run.child.wait().await.map_err(|error| build_failed(error.to_string()))?;
        let words = run.last_words().await;
        if status.success() {
            return Ok(());
        }
        Err(Failure {
            details: words,
            ..build_failed("dependency installation failed; read the build log")
        })
    }
}

/// Moves the wanted part of a clone to where an image is expected.
fn take_path(clone: &Path, path: Option<&str>, folder: &Path) -> Result<(), Failure> {
    let wanted = path.map_or_else(|| clone.to_owned(), |path| clone.join(path.trim_matches('/')));
    let inside = wanted.canonicalize().ok().zip(clone.canonicalize().ok());
    if !inside.is_some_and(|(wanted, clone)| wanted.starts_with(clone) && wanted.is_dir()) {
        let message = "source.path is not a folder of the repository";
        return Err(Failure::new("SOURCE_FETCH_FAILED", message));
    }
    let moved = || -> io::Result<()> {
        for entry in fs::read_dir(&wanted)? {
            let entry = entry?;
            fs::rename(entry.path(), folder.join(entry.file_name()))?;
        }
        fs::remove_dir_all(clone)
    };
    moved().map_err(|error| disk(&error))
}

/// A folder that goes unless the build succeeds, even when the build is called off.
struct HalfBuilt(Option<PathBuf>);

impl Drop for HalfBuilt {
    fn drop(&mut self) {
        if let Some(folder) = self.0.take() {
            let _ = fs::remove_dir_all(folder);
        }
    }
}

/// Installs dependencies.
struct Installer {
    command: Vec<String>,
    language: &'static str,
}

/// How a folder becomes an image.
struct Plan {
    runtime: RuntimeSpec,
    command: Vec<String>,
    installer: Option<Installer>,
    adapter: Option<(&'static str, &'static str)>,
    health_path: String,
    invoke_path: String,
    concurrency: u32,
    isolation_minimum: Vec<String>,
}

/// Calls at once per instance, unless `agent.toml` says otherwise.
const CONCURRENCY: u32 = 10;
/// The most that it may say.
const CONCURRENCY_MAX: u32 = 10_000;

impl Plan {
    fn of(folder: &Path, asked: &RuntimeSpec, isolation: &Isolation) -> Result<Self, Failure> {
        let manifest = manifest(folder)?;
        if manifest.http.port.is_some() {
            return Err(build_failed(
                "agent.toml: [http] port can't be fixed in a process cloud; listen on $PORT",
            ));
        }
        let concurrency = manifest.scaling.concurrency.unwrap_or(CONCURRENCY);
        if !(1..=CONCURRENCY_MAX).contains(&concurrency) {
            return Err(build_failed(format!(
                "agent.toml: [scaling] concurrency must be 1 to {CONCURRENCY_MAX}"
            )));
        }
        let path = |given: Option<String>, default: &str| {
            let path = given.unwrap_or_else(|| default.to_owned());
            let plain = path.starts_with('/') && path.parse::<PathAndQuery>().is_ok();
            if plain {
                Ok(path)
            } else {
                Err(build_failed(format!(
                    "agent.toml: [http] path `{path}` must begin with / and have no spaces"
                )))
            }
        };
        let health_path = path(manifest.http.health, "/health")?;
        let invoke_path = path(manifest.http.invoke, "/invoke")?;
        let start =
            Start::find(folder, manifest.entry, manifest.language.or(asked.language.clone()))?;
        let runtime = RuntimeSpec {
            language: Some(start.language.to_owned()),
            version: asked.version.clone(),
            framework: asked.framework.clone().or_else(|| framework(folder)),
        };
        Ok(Self {
            command: start.resolved(folder, isolation)?,
            installer: installer(folder, start.language, isolation)?,
            adapter: start.adapter,
            runtime,
            health_path,
            invoke_path,
            concurrency,
            isolation_minimum: manifest.isolation.minimum,
        })
    }

    /// The command line without the places of this node.
    fn shown(&self, folder: &Path) -> String {
        self.command.join(" ").replace(&format!("{}/", folder.display()), "")
    }

    fn write_adapter(&self, folder: &Path) -> io::Result<()> {
        let Some((name, text)) = self.adapter else { return Ok(()) };
        let own = folder.join(".roost");
        fs::create_dir_all(&own)?;
        fs::write(own.join(name), text)
    }
}

/// Makes everything readable for the instance's user. Links are left alone: they are not followed.
fn open_up(path: &Path) -> io::Result<()> {
    let meta = fs::symlink_metadata(path)?;
    if meta.is_symlink() {
        return Ok(());
    }
    let mode = meta.permissions().mode();
    let bits = if meta.is_dir() || mode & 0o111 != 0 { 0o755 } else { 0o644 };
    std::os::unix::fs::lchown(path, Some(rustix::process::geteuid().as_raw()), None)?;
    fs::set_permissions(path, fs::Permissions::from_mode(bits))?;
    if meta.is_dir() {
        for entry in fs::read_dir(path)? {
            open_up(&entry?.path())?;
        }
    }
    Ok(())
}

/// Most of a text file that is looked into.
const TEXT_BYTES_MAX: u64 = 1024 * 1024;

/// The beginning of a text file; empty if there is none.
fn text_of(path: &Path) -> String {
    use std::io::Read as _;
    let mut bytes = vec![];
    if let Ok(file) = fs::File::open(path) {
        let _ = file.take(TEXT_BYTES_MAX).read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn manifest(folder: &Path) -> Result<Manifest, Failure> {
    match fs::read_to_string(folder.join("agent.toml")) {
        Ok(text) => toml::from_str(&text).map_err(|error| {
            build_failed(format!("agent.toml can't be read: {}", error.message()))
        }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Manifest::default()),
        Err(error) => Err(build_failed(format!("agent.toml can't be read: {error}"))),
    }
}

/// The start command before its program is looked up.
struct Start {
    language: &'static str,
    words: Vec<String>,
    adapter: Option<(&'static str, &'static str)>,
}

/// Files that are run as a server, in this order.
const SERVERS: [(&str, &str); 7] = [
    ("main.py", "python"),
    ("app.py", "python"),
    ("server.py", "python"),
    ("server.mjs", "node"),
    ("server.js", "node"),
    ("index.mjs", "node"),
    ("index.js", "node"),
];

const NOTHING_TO_START: &str = "nothing to start was found; add one of: agent.toml with `entry`, a Procfile with `web:`, \
    agent.py or agent.mjs with `invoke`, package.json with `scripts.start` or `main`, main.py, app.py, server.py, \
    server.mjs, server.js, index.mjs, index.js";

impl Start {
    fn find(
        folder: &Path,
        entry: Option<Entry>,
        language: Option<String>,
    ) -> Result<Self, Failure> {
        let language = known_language(language.as_deref())?;
        if let Some(entry) = entry {
            return Self::entry(entry, language);
        }
        if let Some(line) = procfile(folder) {
            return Self::entry(Entry::Line(line), language);
        }
        let has = |name: &str| folder.join(name).is_file();
        let text = |name: &str| text_of(&folder.join(name));
        if has("agent.py") {
            return Ok(Self::file("agent.py", "python", defines_python(&text("agent.py"))));
        }
        if has("agent.mjs") {
            return Ok(Self::file("agent.mjs", "node", exports_invoke(&text("agent.mjs"))));
        }
        if let Some(file) = package_start(&text("package.json")) {
            return Ok(Self::file(&file, "node", false));
        }
        if let Some((file, language)) = SERVERS.iter().find(|(file, _)| has(file)) {
            return Ok(Self::file(file, language, false));
        }
        Err(build_failed(if has("Dockerfile") {
            "a Dockerfile needs a docker cloud; this is a process cloud: deploy to a docker cloud, or add an entry in agent.toml"
        } else if has("Cargo.toml") || has("go.mod") {
            "Rust and Go sources need a Dockerfile and a docker cloud; or upload a built binary with language = \"binary\" in agent.toml"
        } else {
            NOTHING_TO_START
        }))
    }

    fn file(name: &str, language: &'static str, is_handler: bool) -> Self {
        let (script, adapter) = match (is_handler, language) {
            (true, "python") => (".roost/adapter.py", Some(("adapter.py", PYTHON_ADAPTER))),
            (true, _) => (".roost/adapter.mjs", Some(("adapter.mjs", NODE_ADAPTER))),
            (false, _) => (name, None),
        };
        let program = if language == "python" { "python3" } else { "node" };
        Self { language, words: vec![program.to_owned(), script.to_owned()], adapter }
    }

    fn entry(entry: Entry, language: Option<&'static str>) -> Result<Self, Failure> {
        let words: Vec<String> = match entry {
            Entry::Line(line) => line.split_whitespace().map(str::to_owned).collect(),
            Entry::Words(words) => words,
        };
        let Some(first) = words.first() else { return Err(build_failed("the entry is empty")) };
        let by_ending = match Path::new(first).extension().and_then(|ending| ending.to_str()) {
            Some("py") => Some("python"),
            Some("js" | "mjs" | "cjs") => Some("node"),
            _ => None,
        };
        if let Some(language) = by_ending.filter(|_| words.len() == 1 && language != Some("binary"))
        {
            return Ok(Self::file(first, language, false));
        }
        let by_program = match first.as_str() {
            "python" | "python3" => "python",
            "node" => "node",
            _ => "binary",
        };
        Ok(Self { language: language.unwrap_or(by_program), words, adapter: None })
    }

    /// The command line with its program found.
    fn resolved(&self, folder: &Path, isolation: &Isolation) -> Result<Vec<String>, Failure> {
        let mut words = self.words.clone();
        let program = words[0].clone();
        let leads_out = Path::new(&program).components().any(|part| part == Component::ParentDir);
        if leads_out {
            return Err(build_failed("the entry must not lead out of the archive"));
        }
        let own = folder.join(&program);
        let found = if own.is_file() && !program.starts_with('/') {
            make_runnable(&own).map_err(|error| disk(&error))?;
            Some(own)
        } else {
            find_program(if program == "python" { "python3" } else { &program }, isolation)
        };
        let found = found.ok_or_else(|| {
            build_failed(format!(
                "the program `{program}` is not on this node; install it or ship it in the archive"
            ))
        })?;
        words[0] = found.to_string_lossy().into_owned();
        if self.language == "python"
            && found.file_name().is_some_and(|n| n.to_string_lossy().starts_with("python"))
        {
            words.insert(1, "-u".to_owned());
        }
        Ok(words)
    }
}

fn make_runnable(path: &Path) -> io::Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))
}

fn known_language(language: Option<&str>) -> Result<Option<&'static str>, Failure> {
    match language {
        None => Ok(None),
        Some("python") => Ok(Some("python")),
        Some("node" | "javascript" | "typescript") => Ok(Some("node")),
        Some("binary") => Ok(Some("binary")),
        Some(other) => Err(build_failed(format!(
            "the language `{other}` is not built here; use python, node or binary, or a Dockerfile in a docker cloud"
        ))),
    }
}

fn procfile(folder: &Path) -> Option<String> {
    let text = text_of(&folder.join("Procfile"));
    text.lines().find_map(|line| line.strip_prefix("web:")).map(|line| line.trim().to_owned())
}

/// Whether a file has a top-level `def invoke` or `invoke =`.
fn defines_python(text: &str) -> bool {
    ["def invoke(", "async def invoke(", "invoke =", "invoke="]
        .iter()
        .any(|start| text.lines().any(|line| line.starts_with(start)))
}

fn exports_invoke(text: &str) -> bool {
    text.lines().any(|line| line.trim_start().starts_with("export") && line.contains("invoke"))
}

/// `scripts.start` if it is `node FILE`, else `main`.
fn package_start(text: &str) -> Option<String> {
    let package: serde_json::Value = serde_json::from_str(text).ok()?;
    let script =
        package["scripts"]["start"].as_str().and_then(|line| line.trim().strip_prefix("node "));
    let script = script.map(str::trim).filter(|file| !file.contains(' '));
    script.or_else(|| package["main"].as_str()).map(str::to_owned)
}

/// Frameworks that are recognized among the dependencies.
const FRAMEWORKS: [&str; 9] = [
    "langgraph",
    "crewai",
    "autogen",
    "llama-index",
    "langchain",
    "fastapi",
    "flask",
    "express",
    "fastify",
];

fn framework(folder: &Path) -> Option<String> {
    let files = ["requirements.txt", "pyproject.toml", "package.json"];
    let text: String = files
        .iter()
        .map(|file| text_of(&folder.join(file)))
        .collect::<Vec<_>>()
        .join("\n")
        .to_lowercase();
    FRAMEWORKS.iter().find(|name| text.contains(**name)).map(|name| (*name).to_owned())
}

/// A program that an instance's user can run.
fn find_program(name: &str, isolation: &Isolation) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let usual = ["/usr/local/bin", "/usr/bin", "/bin"].map(PathBuf::from);
    let candidates = match name.starts_with('/') {
        true => vec![PathBuf::from(name)],
        false => {
            std::env::split_paths(&path).chain(usual).map(|folder| folder.join(name)).collect()
        }
    };
    let found = candidates.into_iter().find(|program| {
        let usable =
            fs::metadata(program).is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0);
        // A shim would run something else than what was checked.
        let is_shim = program.components().any(|part| part.as_os_str() == "shims");
        usable && !is_shim && (!isolation.has("uid") || isolation::is_reachable(program))
    });
    // The interpreter itself, not the link of somebody's virtual environment to it.
    let is_interpreter = name.starts_with("python") || name == "node";
    found.map(|path| if is_interpreter { path.canonicalize().unwrap_or(path) } else { path })
}

fn installer(
    folder: &Path,
    language: &str,
    isolation: &Isolation,
) -> Result<Option<Installer>, Failure> {
    let has = |name: &str| folder.join(name).is_file();
    let program = |name: &str, package: &str| {
        find_program(name, isolation)
            .map(|path| path.to_string_lossy().into_owned())
            .ok_or_else(|| build_failed(format!("dependencies need `{name}`, which is not on this node; install the package {package}")))
    };
    let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    match language {
        "python" if has("requirements.txt") || has("pyproject.toml") => {
            let python = program("python3", "python3")?;
            let mut command =
                words(&[&python, "-m", "pip", "install", "--no-input", "--no-compile"]);
            command.extend(words(&[
                "--disable-pip-version-check",
                "--quiet",
                "--target",
                ".roost/deps",
            ]));
            command.extend(if has("requirements.txt") {
                words(&["-r", "requirements.txt"])
            } else {
                words(&["."])
            });
            Ok(Some(Installer { command, language: "python" }))
        }
        "node" if has("package.json") && !has_no_dependencies(folder) => {
            let npm = program("npm", "npm")?;
            let verb = if has("package-lock.json") { "ci" } else { "install" };
            let command = words(&[&npm, verb, "--omit=dev", "--no-audit", "--no-fund"]);
            Ok(Some(Installer { command, language: "node" }))
        }
        _ => Ok(None),
    }
}

fn has_no_dependencies(folder: &Path) -> bool {
    let text = text_of(&folder.join("package.json"));
    let package: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
    package["dependencies"].as_object().is_none_or(serde_json::Map::is_empty)
}

/// A run of an installer.
struct Install<'b> {
    uid: u32,
    process: &'b ProcessRuntime,
    folder: &'b Path,
    log: &'b LineSink,
}

struct Run {
    child: tokio::process::Child,
    group: Option<rustix::process::Pid>,
    words: Vec<oneshot::Receiver<Vec<String>>>,
}

impl Drop for Run {
    /// A build that is called off leaves nothing running.
    fn drop(&mut self) {
        if let Some(group) = self.group {
            let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        }
    }
}

impl Run {
    async fn last_words(&mut self) -> String {
        let mut words = vec![];
        for part in self.words.drain(..) {
            words.extend(part.await.unwrap_or_default());
        }
        words.join("\n")
    }
}

impl Install<'_> {
    async fn start(&self, installer: &Installer) -> Result<Run, Failure> {
        self.launch(installer)
            .await
            .map_err(|error| build_failed(format!("the installer could not be started: {error}")))
    }

    async fn launch(&self, installer: &Installer) -> io::Result<Run> {
        let isolation = self.process.isolation();
        let uid = isolation.has("uid").then_some(self.uid);
        let scratch = self.folder.join(".roost/tmp");
        fs::create_dir_all(&scratch)?;
        give_away(self.folder, uid)?;
        let prefix = program_prefix(Path::new(&installer.command[0]));
        let readable: Vec<&Path> = prefix.iter().map(PathBuf::as_path).collect();
        let cage = Cage {
            command: installer.command.clone(),
            folder: self.folder.to_owned(),
            layers: isolation.layers.clone(),
            uid,
            readable: isolation::readable(&readable),
            writable: isolation::writable(&[self.folder]),
            port: None,
            parent: std::process::id(),
            processes: Some(INSTALLER_PROCESSES_MAX),
            address_space: None,
        };
        let mut command = isolation.command(&cage);
        isolation::set_variable(&mut command, "PATH", "/usr/local/bin:/usr/bin:/bin");
        isolation::set_variable(&mut command, "LANG", "C.UTF-8");
        isolation::set_variable(&mut command, "HOME", &scratch);
        isolation::set_variable(&mut command, "TMPDIR", &scratch);
        for name in [
            "PIP_CERT",
            "PIP_INDEX_URL",
            "SSL_CERT_FILE",
            "NODE_EXTRA_CA_CERTS",
            "HTTPS_PROXY",
            "HTTP_PROXY",
            "NO_PROXY",
            "NPM_CONFIG_REGISTRY",
        ] {
            if let Some(value) = std::env::var_os(name) {
                isolation::set_variable(&mut command, name, value);
            }
        }
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        tracing::debug!(language = installer.language, "installing dependencies");
        let mut child = self.process.spawn(command).await?;
        let group =
            child.id().and_then(|pid| rustix::process::Pid::from_raw(i32::try_from(pid).ok()?));
        let words = vec![
            self.read(child.stdout.take(), Channel::Stdout),
            self.read(child.stderr.take(), Channel::Stderr),
        ];
        Ok(Run { child, group, words })
    }

    fn read(
        &self,
        from: Option<impl AsyncRead + Unpin + Send + 'static>,
        channel: Channel,
    ) -> oneshot::Receiver<Vec<String>> {
        let (sender, receiver) = oneshot::channel();
        let log = Arc::clone(self.log);
        if let Some(from) = from {
            tokio::spawn(async move {
                let (mut reader, mut bytes) = (BufReader::new(from), vec![]);
                let mut last = vec![];
                while let Ok(1..) = read_line(&mut reader, &mut bytes).await {
                    let line = String::from_utf8_lossy(&bytes).trim_end().to_owned();
                    bytes.clear();
                    log(channel, line.clone());
                    last.push(line);
                    if last.len() > LAST_LINES {
                        last.remove(0);
                    }
                }
                let _ = sender.send(last);
            });
        }
        receiver
    }
}

/// The user of the build in this folder.
fn build_uid(folder: &Path) -> u32 {
    let name = folder.file_name().unwrap_or_default().as_encoded_bytes();
    FIRST_UID + BUILD_UIDS + crc32c::crc32c(name) % BUILD_UIDS
}

fn give_away(path: &Path, uid: Option<u32>) -> io::Result<()> {
    std::os::unix::fs::lchown(path, uid, uid)?;
    if fs::symlink_metadata(path)?.is_dir() {
        for entry in fs::read_dir(path)? {
            give_away(&entry?.path(), uid)?;
        }
    }
    Ok(())
}
