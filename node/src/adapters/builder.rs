//! From a source to an image of the `process` runtime: an unpacked folder with its dependencies and a
//! command line of programs on this machine.

use std::{
    fs, io,
    os::unix::fs::PermissionsExt as _,
    path::{Component, Path, PathBuf},
    process::Stdio,
    sync::Arc,
};

use actors::ports::{BuildRequest, Channel, LineSink};
use domain::{
    AgentId, DeploymentId,
    deployment::{Failure, Image},
};

use super::{
    install::{Install, Installer, build_uid},
    isolation::{self, Isolation},
    process::ProcessRuntime,
    recipe::{Recipe, Start, build_failed, text_of},
    source::Fetcher,
    unfinished::Unfinished,
};

/// Builds images of the `process` runtime.
pub struct Builder {
    images: PathBuf,
    fetcher: Arc<Fetcher>,
    process: Arc<ProcessRuntime>,
    ca_bundle: Option<PathBuf>,
}

fn disk(error: &dyn std::fmt::Display) -> Failure {
    build_failed(format!("the image could not be written: {error}"))
}

impl Builder {
    /// Below `data`; installers trust `ca_bundle`, if there is one.
    pub fn new(
        data: &Path,
        fetcher: Arc<Fetcher>,
        process: Arc<ProcessRuntime>,
        ca_bundle: Option<PathBuf>,
    ) -> Self {
        Self { images: data.join("images"), fetcher, process, ca_bundle }
    }

    fn reference(agent: AgentId, deployment: DeploymentId) -> String {
        format!("{agent}/{deployment}")
    }

    /// Builds; on failure nothing is left.
    pub async fn build(&self, request: BuildRequest, log: LineSink) -> Result<Image, Failure> {
        let reference = Self::reference(request.agent_id, request.deployment_id);
        let unfinished = Unfinished::new(&self.images).map_err(|error| disk(&error))?;
        let unfinished = Arc::new(unfinished);
        let folder = unfinished.folder();
        fs::create_dir(&folder).map_err(|error| disk(&error))?;
        let source = &request.spec.source;
        let commit = self.fetcher.fetch(source, &folder, &unfinished, &log).await?;
        let recipe = Recipe::read(&folder, &request.spec.runtime)?;
        if recipe.port.is_some() {
            return Err(build_failed(
                "agent.toml: [http] port can't be fixed in a process cloud; listen on $PORT",
            ));
        }
        let start = recipe.start(&folder)?;
        let isolation = self.process.isolation();
        let command = resolved(&start, recipe.version(), &folder, isolation)?;
        log(Channel::Stdout, format!("start command: {}", command.join(" ")));
        // The adapter first: once an installer has run, nothing in the folder is to be trusted.
        start.write_adapter(&folder).map_err(|error| disk(&error))?;
        let runtime = recipe.runtime(Some(start.language), Some(&folder));
        if let Some(installer) = installer(&folder, start.language, isolation)? {
            self.install(&installer, &folder, &log).await?;
        }
        let image = reference.clone();
        let finished = tokio::task::spawn_blocking(move || {
            open_up(&folder)?;
            unfinished.replace(&image)
        });
        finished.await.map_err(|error| disk(&error))?.map_err(|error| disk(&error))?;
        Ok(Image { commit, ..recipe.image(reference, runtime, command) })
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

    async fn install(
        &self,
        installer: &Installer,
        folder: &Path,
        log: &LineSink,
    ) -> Result<(), Failure> {
        log(Channel::Stdout, format!("installing: {}", installer.command.join(" ")));
        let install = Install {
            uid: build_uid(folder),
            process: &self.process,
            folder,
            log,
            ca_bundle: self.ca_bundle.as_deref(),
        };
        let mut run = install.start(installer).await?;
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

/// The command line with its program found on this machine, or below the image's folder, which is
/// elsewhere on other nodes.
fn resolved(
    start: &Start,
    version: Option<&str>,
    folder: &Path,
    isolation: &Isolation,
) -> Result<Vec<String>, Failure> {
    let mut words = start.words.clone();
    let program = words[0].clone();
    let leads_out = Path::new(&program).components().any(|part| part == Component::ParentDir);
    if leads_out {
        return Err(build_failed("the entry must not lead out of the archive"));
    }
    let own = folder.join(&program);
    let found = if own.is_file() && !program.starts_with('/') {
        make_runnable(&own).map_err(|error| disk(&error))?;
        Path::new(".").join(&program)
    } else if matches!(program.as_str(), "python" | "python3" | "node") {
        interpreter(start.language, version, isolation)?
    } else {
        find_program(&program, isolation).ok_or_else(|| {
            build_failed(format!(
                "the program `{program}` is not on this node; install it or ship it in the archive"
            ))
        })?
    };
    words[0] = found.to_string_lossy().into_owned();
    let is_python = found.file_name().is_some_and(|n| n.to_string_lossy().starts_with("python"));
    if start.language == "python" && is_python {
        words.insert(1, "-u".to_owned());
    }
    Ok(words)
}

/// The interpreter of a language in the version asked for: `3` takes any 3, `3.11` any 3.11.
fn interpreter(
    language: &str,
    version: Option<&str>,
    isolation: &Isolation,
) -> Result<PathBuf, Failure> {
    let program = if language == "node" { "node" } else { "python3" };
    let exact = version.filter(|_| language == "python");
    let exact = exact.and_then(|version| find_program(&format!("python{version}"), isolation));
    let found = exact.or_else(|| find_program(program, isolation)).ok_or_else(|| {
        build_failed(format!(
            "the program `{program}` is not on this node; install it or ship it in the archive"
        ))
    })?;
    let Some(version) = version else { return Ok(found) };
    let here = version_of(&found).unwrap_or_default();
    if here == version || here.starts_with(&format!("{version}.")) {
        return Ok(found);
    }
    Err(build_failed(format!(
        "runtime.version asks for {language} {version}, and this node has {here}; leave the version out, install it, or use a docker cloud"
    )))
}

/// `3.11.2` of `Python 3.11.2`, `20.19.2` of `v20.19.2`.
fn version_of(interpreter: &Path) -> Option<String> {
    let told = std::process::Command::new(interpreter)
        .arg("--version")
        .env_clear()
        .stdin(Stdio::null())
        .output()
        .ok()?;
    let text = String::from_utf8(told.stdout).ok()?;
    let word = text.split_whitespace().last()?;
    Some(word.trim_start_matches('v').to_owned())
}

fn make_runnable(path: &Path) -> io::Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))
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

/// Whether a `package.json` asks for nothing.
pub fn has_no_dependencies(folder: &Path) -> bool {
    let text = text_of(&folder.join("package.json"));
    let package: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
    package["dependencies"].as_object().is_none_or(serde_json::Map::is_empty)
}
