//! What a folder of source says of itself: `agent.toml`, and the start command that its files imply
//! (`decisions` §21). The same for every runtime.

use std::{fs, io, path::Path};

use domain::{
    agent::RuntimeSpec,
    deployment::{Failure, Image},
};
use http::uri::PathAndQuery;
use serde::Deserialize;

/// The handler adapters, as files of the image.
const PYTHON_ADAPTER: &str = include_str!("../handlers/adapter.py");
const NODE_ADAPTER: &str = include_str!("../handlers/adapter.mjs");
/// Calls at once per instance, unless `agent.toml` says otherwise.
pub const CONCURRENCY: u32 = 10;
/// The most that it may say.
const CONCURRENCY_MAX: u32 = 10_000;

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

/// A build that did not work, and why.
pub fn build_failed(message: impl Into<String>) -> Failure {
    Failure::new("BUILD_FAILED", message)
}

/// What `agent.toml` settles, with the defaults of what it leaves open.
#[derive(Debug)]
pub struct Recipe {
    entry: Option<Entry>,
    language: Option<String>,
    asked: RuntimeSpec,
    /// A fixed port; only containers may have one.
    pub port: Option<u16>,
    /// Path of the health check.
    pub health_path: String,
    /// Path of invocations.
    pub invoke_path: String,
    /// Calls at once per instance.
    pub concurrency: u32,
    /// Isolation layers that must hold.
    pub isolation_minimum: Vec<String>,
}

impl Recipe {
    /// Of a folder; the client's word for the language counts where `agent.toml` has none.
    pub fn read(folder: &Path, asked: &RuntimeSpec) -> Result<Self, Failure> {
        Self::of(manifest(folder)?, asked)
    }

    /// Of an image that brings no `agent.toml`.
    pub fn of_image(asked: &RuntimeSpec) -> Result<Self, Failure> {
        Self::of(Manifest::default(), asked)
    }

    fn of(manifest: Manifest, asked: &RuntimeSpec) -> Result<Self, Failure> {
        let concurrency = manifest.scaling.concurrency.unwrap_or(CONCURRENCY);
        if !(1..=CONCURRENCY_MAX).contains(&concurrency) {
            return Err(build_failed(format!(
                "agent.toml: [scaling] concurrency must be 1 to {CONCURRENCY_MAX}"
            )));
        }
        if manifest.http.port == Some(0) {
            return Err(build_failed("agent.toml: [http] port must be 1 to 65535"));
        }
        Ok(Self {
            entry: manifest.entry,
            language: manifest.language.or(asked.language.clone()),
            asked: asked.clone(),
            port: manifest.http.port,
            health_path: path_or(manifest.http.health, "/health")?,
            invoke_path: path_or(manifest.http.invoke, "/invoke")?,
            concurrency,
            isolation_minimum: manifest.isolation.minimum,
        })
    }

    /// What starts the agent in this folder.
    pub fn start(&self, folder: &Path) -> Result<Start, Failure> {
        let language = self.language.as_deref().map(known_language).transpose()?;
        Start::find(folder, self.entry.as_ref(), language)
    }

    /// The version of the language that the client asked for.
    pub fn version(&self) -> Option<&str> {
        self.asked.version.as_deref()
    }

    /// Language, version and framework as they were found.
    pub fn runtime(&self, language: Option<&str>, folder: Option<&Path>) -> RuntimeSpec {
        RuntimeSpec {
            language: language.map(str::to_owned).or(self.asked.language.clone()),
            version: self.asked.version.clone(),
            framework: self.asked.framework.clone().or_else(|| framework(folder?)),
        }
    }

    /// The image of this recipe.
    pub fn image(self, reference: String, runtime: RuntimeSpec, command: Vec<String>) -> Image {
        Image {
            reference,
            runtime,
            command,
            port: self.port,
            health_path: self.health_path,
            invoke_path: self.invoke_path,
            concurrency: self.concurrency,
            isolation_minimum: self.isolation_minimum,
            read_only_root: false,
            commit: None,
            digest: None,
        }
    }
}

fn path_or(given: Option<String>, default: &str) -> Result<String, Failure> {
    let path = given.unwrap_or_else(|| default.to_owned());
    let plain = path.starts_with('/') && path.parse::<PathAndQuery>().is_ok();
    if plain {
        return Ok(path);
    }
    Err(build_failed(format!(
        "agent.toml: [http] path `{path}` must begin with / and have no spaces"
    )))
}

/// Most of a text file that is looked into.
const TEXT_BYTES_MAX: u64 = 1024 * 1024;

/// The beginning of a text file; empty if there is none.
pub fn text_of(path: &Path) -> String {
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
pub struct Start {
    /// `python`, `node` or `binary`.
    pub language: &'static str,
    /// The command line; the first word is a program or a file of the folder.
    pub words: Vec<String>,
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
        entry: Option<&Entry>,
        language: Option<&'static str>,
    ) -> Result<Self, Failure> {
        if let Some(entry) = entry {
            return Self::entry(entry, language);
        }
        if let Some(line) = procfile(folder) {
            return Self::entry(&Entry::Line(line), language);
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

    fn entry(entry: &Entry, language: Option<&'static str>) -> Result<Self, Failure> {
        let words: Vec<String> = match entry {
            Entry::Line(line) => line.split_whitespace().map(str::to_owned).collect(),
            Entry::Words(words) => words.clone(),
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

    /// Writes the handler adapter, if one is needed, to where the command line expects it.
    pub fn write_adapter(&self, folder: &Path) -> io::Result<()> {
        let Some((name, text)) = self.adapter else { return Ok(()) };
        let own = folder.join(".roost");
        fs::create_dir_all(&own)?;
        fs::write(own.join(name), text)
    }
}

fn known_language(language: &str) -> Result<&'static str, Failure> {
    match language {
        "python" => Ok("python"),
        "node" | "javascript" | "typescript" => Ok("node"),
        "binary" => Ok("binary"),
        other => Err(build_failed(format!(
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
