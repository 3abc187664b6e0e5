//! Images: pulled from a registry, built from the source's Dockerfile, or built by one of ours from a
//! base image of the language. The source itself is never written to.
//!
//! An image is kept under a name of its own, `roost/{agent}:{deployment}`, so that nothing else on
//! this machine can take it away, and it goes when no version needs it any more.

use std::{collections::HashMap, fs, io, path::Path, sync::Arc};

use actors::ports::{BuildRequest, Channel, LineSink};
use bollard::{
    Docker,
    auth::DockerCredentials,
    body_try_stream,
    errors::Error,
    query_parameters::{
        BuildImageOptionsBuilder, CreateImageOptionsBuilder, ListImagesOptionsBuilder,
        RemoveImageOptionsBuilder, TagImageOptionsBuilder,
    },
};
use bytes::{Bytes, BytesMut};
use domain::{
    AgentId, DeploymentId,
    agent::{RuntimeSpec, Source, plan::IMAGE_PULL_FAILED},
    deployment::{Failure, Image},
};
use futures::{Stream, StreamExt as _, TryStreamExt as _};
use tokio::io::AsyncReadExt as _;

use super::DockerRuntime;
use crate::adapters::recipe::{Recipe, Start, build_failed, text_of};

/// The port of an image that names none.
const PORT: u16 = 8080;
/// Memory of a build step, in bytes: the most that the engine's interface can be told.
const BUILD_MEMORY_BYTES: i32 = i32::MAX;
/// Bytes of a build's context that travel at once.
const CONTEXT_CHUNK_BYTES: usize = 64 * 1024;
/// Characters of the engine's complaint that a failure shows.
const COMPLAINT_CHARS: usize = 2000;
/// Where the platform's own files are in a context.
const OWN: &str = ".roost";
/// Versions of base images where neither client nor source names one.
const USUAL_VERSIONS: [(&str, &str); 2] = [("python", "3.12"), ("node", "22")];

fn disk(error: &dyn std::fmt::Display) -> Failure {
    build_failed(format!("the build could not be prepared: {error}"))
}

/// What the names of kept images begin with.
const OWN_IMAGES: &str = "roost/agent_";

/// The name an image is kept under.
fn name_of(agent: AgentId, deployment: DeploymentId) -> String {
    format!("roost/{agent}:{deployment}")
}

impl DockerRuntime {
    /// Makes an image. Dropping the future calls the build off.
    pub async fn build(&self, request: BuildRequest, log: LineSink) -> Result<Image, Failure> {
        if let Some(lack) = self.lack(request.spec.resources.gpu.is_some()) {
            return Err(lack);
        }
        let docker = self.engine.here()?.docker;
        let name = name_of(request.agent_id, request.deployment_id);
        let mut image = match &request.spec.source {
            Source::Docker { image, credentials } => {
                let login = credentials.as_ref().map(|given| Login {
                    username: given.username.clone(),
                    password: request.registry_password.clone().unwrap_or_default(),
                });
                self.pull(&docker, image, login, &name, &request.spec.runtime, &log).await?
            }
            Source::Github { .. } | Source::Upload { .. } => {
                self.build_source(&docker, &request, &name, &log).await?
            }
        };
        let built = docker.inspect_image(&name).await;
        let config = built.map_err(|error| engine_failed(&error))?.config.unwrap_or_default();
        let port = image.port.or_else(|| only_port(config.exposed_ports.unwrap_or_default()));
        image.port = Some(port.unwrap_or(PORT));
        if image.command.is_empty() {
            image.command =
                [config.entrypoint, config.cmd].into_iter().flatten().flatten().collect();
        }
        if image.command.is_empty() {
            let _ = remove(&docker, &name).await;
            return Err(build_failed("the image has no command; give it a CMD or an ENTRYPOINT"));
        }
        Ok(image)
    }

    /// Removes images of an agent that none of `kept` names, by either of its names.
    pub async fn forget(&self, agent: AgentId, kept: &[String]) {
        let Ok(here) = self.engine.here() else { return };
        let filters = HashMap::from([("reference", vec![format!("roost/{agent}")])]);
        let options = ListImagesOptionsBuilder::default().filters(&filters).build();
        let Ok(images) = here.docker.list_images(Some(options)).await else { return };
        for name in images.into_iter().flat_map(|image| image.repo_tags) {
            let deployment = name.rsplit_once(':').map_or("", |(_, tag)| tag);
            let is_kept = kept.contains(&name) || kept.contains(&format!("{agent}/{deployment}"));
            if name.starts_with(&format!("roost/{agent}:")) && !is_kept {
                let _ = remove(&here.docker, &name).await;
            }
        }
    }

    async fn pull(
        &self,
        docker: &Docker,
        image: &str,
        login: Option<Login>,
        name: &str,
        asked: &RuntimeSpec,
        log: &LineSink,
    ) -> Result<Image, Failure> {
        let wanted = Reference::parse(image);
        let mut last = None;
        for source in self.places(&wanted) {
            log(Channel::Stdout, format!("pulling {source}"));
            let known = docker.inspect_image(&source.to_string()).await.is_ok();
            // A password is for the registry it was given for, not for its mirrors.
            let login = login.clone().filter(|_| source == wanted);
            match pull_one(docker, &source, login, log).await {
                Ok(()) => {
                    let digest = take_over(docker, &source, name, known).await?;
                    log(Channel::Stdout, format!("pulled {}", digest.as_deref().unwrap_or("it")));
                    return ready_made(name, digest, asked);
                }
                Err(failure) => last = Some(failure),
            }
        }
        let failure = last.unwrap_or_else(|| Failure::new(IMAGE_PULL_FAILED, "no registry"));
        // What other agents were made of is nobody's to name.
        let local =
            !wanted.repository.starts_with(OWN_IMAGES) && docker.inspect_image(image).await.is_ok();
        if !(local && self.settings.local_images) {
            return Err(match local {
                true => Failure {
                    message: format!(
                        "{}; this machine's engine has such an image, and docker.local_images = true would use it",
                        failure.message
                    ),
                    ..failure
                },
                false => failure,
            });
        }
        log(Channel::Stdout, "no registry serves it; using this machine's own".to_owned());
        let digest = take_over(docker, &wanted, name, true).await?;
        ready_made(name, digest, asked)
    }

    /// Mirrors first, then where the reference points.
    fn places(&self, wanted: &Reference) -> Vec<Reference> {
        let mirrors = self.settings.registries.iter().filter(|(from, _)| *from == wanted.host());
        let mirrored = mirrors.map(|(_, to)| Reference {
            registry: Some(to.clone()),
            repository: wanted.full_repository(),
            ..wanted.clone()
        });
        mirrored.chain([wanted.clone()]).collect()
    }

    async fn build_source(
        &self,
        docker: &Docker,
        request: &BuildRequest,
        name: &str,
        log: &LineSink,
    ) -> Result<Image, Failure> {
        let folder = tempfile::tempdir_in(&self.builds).map(Arc::new);
        let folder = folder.map_err(|error| disk(&error))?;
        let context = folder.path().join("context");
        fs::create_dir(&context).map_err(|error| disk(&error))?;
        let commit = self.fetcher.fetch(&request.spec.source, &context, &folder, log).await?;
        let recipe = Recipe::read(&context, &request.spec.runtime)?;
        let (dockerfile, is_ours, runtime) = if context.join("Dockerfile").is_file() {
            ("Dockerfile".to_owned(), false, recipe.runtime(None, Some(&context)))
        } else {
            let start = recipe.start(&context)?;
            let text = self.dockerfile(&start, recipe.version(), &context)?;
            let own = context.join(OWN);
            fs::create_dir_all(&own).map_err(|error| disk(&error))?;
            fs::write(own.join("Dockerfile"), text).map_err(|error| disk(&error))?;
            let runtime = recipe.runtime(Some(start.language), Some(&context));
            (format!("{OWN}/Dockerfile"), true, runtime)
        };
        let tar = folder.path().join("context.tar");
        let packed = {
            let (context, tar) = (context.clone(), tar.clone());
            tokio::task::spawn_blocking(move || pack(&context, &tar)).await
        };
        packed.map_err(|error| disk(&error))?.map_err(|error| disk(&error))?;
        let labels = HashMap::from([("roost.agent", request.agent_id.to_string())]);
        let options = BuildImageOptionsBuilder::default()
            .dockerfile(&dockerfile)
            .t(name)
            .rm(true)
            .forcerm(true)
            .nocache(request.no_cache)
            .memory(BUILD_MEMORY_BYTES)
            .labels(&labels)
            .build();
        let file = tokio::fs::File::open(&tar).await.map_err(|error| disk(&error))?;
        let body = body_try_stream(chunks(file));
        let built = follow_build(docker.build_image(options, None, Some(body)), log).await;
        built.map_err(|failure| if is_ours { about_the_base(failure) } else { failure })?;
        let image = recipe.image(name.to_owned(), runtime, vec![]);
        Ok(Image { commit, read_only_root: is_ours, ..image })
    }

    /// A Dockerfile for a source that brings none: dependencies before the source, so that a change
    /// of the source alone is quick to build.
    fn dockerfile(
        &self,
        start: &Start,
        version: Option<&str>,
        context: &Path,
    ) -> Result<String, Failure> {
        start.write_adapter(context).map_err(|error| disk(&error))?;
        let base =
            self.settings.base_images.iter().find(|(language, _)| *language == start.language);
        let usual = USUAL_VERSIONS.iter().find(|(language, _)| *language == start.language);
        let version = version.or(usual.map(|(_, version)| *version)).unwrap_or_default();
        let base = base.map(|(_, image)| image.replace("{version}", version)).unwrap_or_default();
        let mut lines = vec![format!("FROM {base}"), "WORKDIR /agent".to_owned()];
        if let Some(bundle) = &self.settings.ca_bundle {
            let own = context.join(OWN);
            let copied =
                fs::create_dir_all(&own).and_then(|()| fs::copy(bundle, own.join("ca.pem")));
            copied.map_err(|error| build_failed(format!("build.ca_bundle: {error}")))?;
            lines.push(format!("COPY {OWN}/ca.pem /agent/{OWN}/ca.pem"));
            for name in ["PIP_CERT", "SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS"] {
                lines.push(format!("ARG {name}=/agent/{OWN}/ca.pem"));
            }
        }
        lines.extend(installation(start.language, context));
        lines.push("COPY . /agent".to_owned());
        lines.push(format!(
            "ENV HOME=/tmp LANG=C.UTF-8 NODE_ENV=production PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=/agent/{OWN}/deps"
        ));
        lines.push("USER 1000:1000".to_owned());
        lines.push(format!("ENTRYPOINT {}", exec_form(&command_line(start, context)?)));
        Ok(lines.join("\n") + "\n")
    }
}

/// The words of a start command as a container finds them.
fn command_line(start: &Start, context: &Path) -> Result<Vec<String>, Failure> {
    let mut words = start.words.clone();
    let own = context.join(&words[0]);
    if own.is_file() && !words[0].starts_with('/') {
        use std::os::unix::fs::PermissionsExt as _;
        fs::set_permissions(&own, fs::Permissions::from_mode(0o755))
            .map_err(|error| disk(&error))?;
        words[0] = format!("/agent/{}", words[0].trim_start_matches("./"));
    } else if words[0].starts_with("python") {
        words.insert(1, "-u".to_owned());
    }
    Ok(words)
}

/// The exec form needs no shell, which small base images lack.
fn exec_form(words: &[String]) -> String {
    serde_json::to_string(words).expect("words are texts")
}

/// The lines that install dependencies, if the source has any.
fn installation(language: &str, context: &Path) -> Vec<String> {
    let has = |name: &str| context.join(name).is_file();
    let run = |words: &[&str]| {
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        format!("RUN {}", exec_form(&words))
    };
    let deps = format!("{OWN}/deps");
    let pip = [
        "python3",
        "-m",
        "pip",
        "install",
        "--no-input",
        "--no-compile",
        "--disable-pip-version-check",
        "--target",
        &deps,
    ];
    match language {
        "python" if has("requirements.txt") => {
            let copied = if is_plain(&text_of(&context.join("requirements.txt"))) {
                "COPY requirements.txt /agent/"
            } else {
                "COPY . /agent"
            };
            vec![
                copied.to_owned(),
                "ARG PIP_BREAK_SYSTEM_PACKAGES=1".to_owned(),
                run(&[&pip[..], &["-r", "requirements.txt"]].concat()),
            ]
        }
        "python" if has("pyproject.toml") => vec![
            "COPY . /agent".to_owned(),
            "ARG PIP_BREAK_SYSTEM_PACKAGES=1".to_owned(),
            run(&[&pip[..], &["."]].concat()),
        ],
        "node"
            if has("package.json") && !crate::adapters::builder::has_no_dependencies(context) =>
        {
            let verb = if has("package-lock.json") { "ci" } else { "install" };
            vec![
                "COPY . /agent".to_owned(),
                run(&["npm", verb, "--omit=dev", "--no-audit", "--no-fund"]),
            ]
        }
        _ => vec![],
    }
}

/// Whether a list of requirements speaks of nothing else in the source.
fn is_plain(requirements: &str) -> bool {
    requirements
        .lines()
        .map(str::trim)
        .filter(|line| !line.starts_with('#'))
        .all(|line| !line.starts_with('-') && !line.starts_with('.') && !line.contains('/'))
}

fn pack(context: &Path, to: &Path) -> io::Result<()> {
    // The engine would leave out what this file names, the adapter perhaps among it.
    let own = context.join(OWN).join("Dockerfile").exists();
    if own {
        let _ = fs::remove_file(context.join(".dockerignore"));
    }
    let mut tar = tar::Builder::new(fs::File::create(to)?);
    tar.follow_symlinks(false);
    tar.append_dir_all(".", context)?;
    tar.into_inner()?.sync_data()
}

fn chunks(file: tokio::fs::File) -> impl Stream<Item = io::Result<Bytes>> + Send + 'static {
    futures::stream::try_unfold(file, |mut file| async move {
        let mut chunk = BytesMut::with_capacity(CONTEXT_CHUNK_BYTES);
        let read = file.read_buf(&mut chunk).await?;
        Ok((read > 0).then(|| (chunk.freeze(), file)))
    })
}

async fn follow_build(
    mut steps: impl Stream<Item = Result<bollard::models::BuildInfo, Error>> + Unpin,
    log: &LineSink,
) -> Result<(), Failure> {
    let mut last: Vec<String> = vec![];
    while let Some(step) = steps.next().await {
        let text = match step {
            Ok(info) => match info.error_detail {
                Some(detail) => {
                    return Err(failed_build(detail.message.unwrap_or_default(), &last));
                }
                None => info.stream.or(info.status).unwrap_or_default(),
            },
            Err(Error::DockerStreamError { error }) => return Err(failed_build(error, &last)),
            Err(error) => return Err(failed_build(error.to_string(), &last)),
        };
        for line in text.lines().map(str::trim_end).filter(|line| !line.is_empty()) {
            log(Channel::Stdout, line.to_owned());
            last.push(line.to_owned());
            if last.len() > crate::adapters::install::LAST_LINES {
                last.remove(0);
            }
        }
    }
    Ok(())
}

fn failed_build(error: String, last: &[String]) -> Failure {
    let message = if error.contains("non-zero code") {
        format!("a build step failed: {error}; read the build log")
    } else {
        format!("the build failed: {error}")
    };
    Failure { details: last.join("\n"), ..build_failed(short(&message)) }
}

/// A build of ours that got no further than its first step lacks its base image.
fn about_the_base(failure: Failure) -> Failure {
    let steps: Vec<&str> = failure.details.lines().collect();
    let [first] = steps.as_slice() else { return failure };
    let base = first.rsplit(' ').next().unwrap_or_default();
    let message = format!(
        "the base image {base} could not be fetched ({}); set build.base_images to one that this node reaches, or bring a Dockerfile",
        failure.message.trim_start_matches("the build failed: ")
    );
    Failure { message: short(&message), ..failure }
}

fn short(text: &str) -> String {
    text.chars().take(COMPLAINT_CHARS).collect()
}

fn engine_failed(error: &Error) -> Failure {
    build_failed(short(&format!("the Docker engine said no: {error}")))
}

/// The one port that an image offers, if there is exactly one.
fn only_port(exposed: Vec<String>) -> Option<u16> {
    match exposed.as_slice() {
        [one] => one.strip_suffix("/tcp").unwrap_or(one).parse().ok(),
        _ => None,
    }
}

/// An image that nobody here built; its own command and port are read off later.
fn ready_made(name: &str, digest: Option<String>, asked: &RuntimeSpec) -> Result<Image, Failure> {
    let recipe = Recipe::of_image(asked)?;
    let runtime = recipe.runtime(None, None);
    Ok(Image { digest, ..recipe.image(name.to_owned(), runtime, vec![]) })
}

/// A registry's user.
#[derive(Clone)]
struct Login {
    username: String,
    password: actors::ports::Opened,
}

async fn pull_one(
    docker: &Docker,
    image: &Reference,
    login: Option<Login>,
    log: &LineSink,
) -> Result<(), Failure> {
    let credentials = login.map(|login| DockerCredentials {
        username: Some(login.username),
        password: Some(login.password.0.to_string()),
        serveraddress: Some(image.host()),
        ..DockerCredentials::default()
    });
    let options =
        CreateImageOptionsBuilder::default().from_image(&image.name()).tag(&image.version).build();
    let steps = docker.create_image(Some(options), None, credentials);
    let logged = steps.try_for_each(|step| {
        // Bars that move by bytes are left out.
        if let Some(status) = step.status.filter(|_| step.progress_detail.is_none()) {
            log(Channel::Stdout, status);
        }
        futures::future::ready(Ok(()))
    });
    logged.await.map_err(|error| pull_failed(&error.to_string()))
}

/// The engine tells the reasons apart by words only.
fn pull_failed(words: &str) -> Failure {
    let lower = words.to_lowercase();
    let says = |parts: &[&str]| parts.iter().any(|part| lower.contains(part));
    let message = if says(&["no basic auth", "unauthorized", "authentication required", "denied"]) {
        "the registry wants other credentials; check source.image and source.credentials"
    } else if says(&["manifest unknown", "not found", "does not exist"]) {
        "the registry has no such image or tag; check source.image"
    } else if says(&["invalid reference", "invalid tag"]) {
        "source.image is not an image reference such as ghcr.io/owner/name:tag"
    } else {
        "the registry could not be reached; check source.image and the network"
    };
    Failure { details: short(words), ..Failure::new(IMAGE_PULL_FAILED, message) }
}

/// Gives a pulled image our name, and takes away the one it came by unless it was there before.
async fn take_over(
    docker: &Docker,
    source: &Reference,
    name: &str,
    was_known: bool,
) -> Result<Option<String>, Failure> {
    let found = docker.inspect_image(&source.to_string()).await;
    let found = found.map_err(|error| engine_failed(&error))?;
    let (repository, tag) = name.split_once(':').unwrap_or((name, "latest"));
    let options = TagImageOptionsBuilder::default().repo(repository).tag(tag).build();
    let tagged = docker.tag_image(&source.to_string(), Some(options)).await;
    tagged.map_err(|error| engine_failed(&error))?;
    if !was_known {
        let _ = remove(docker, &source.to_string()).await;
    }
    let digests = found.repo_digests.unwrap_or_default();
    let own = digests.iter().find(|digest| digest.starts_with(&format!("{}@", source.name())));
    let digest = own.or(digests.first()).and_then(|digest| digest.split_once('@'));
    Ok(digest.map(|(_, digest)| digest.to_owned()))
}

async fn remove(docker: &Docker, name: &str) -> Result<(), Error> {
    let options = RemoveImageOptionsBuilder::default().force(true).build();
    docker.remove_image(name, Some(options), None).await.map(drop)
}

/// An image reference (`distribution/reference`): `[registry/]repository[:tag | @digest]`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Reference {
    registry: Option<String>,
    repository: String,
    /// A tag or a digest.
    version: String,
}

impl Reference {
    fn parse(text: &str) -> Self {
        let (name, version) = match text.split_once('@') {
            Some((name, digest)) => (without_tag(name).0, digest.to_owned()),
            None => {
                let (name, tag) = without_tag(text);
                (name, tag.unwrap_or("latest").to_owned())
            }
        };
        let first = name
            .split_once('/')
            .filter(|(first, _)| first.contains(['.', ':']) || *first == "localhost");
        match first {
            Some((registry, repository)) => Self {
                registry: Some(registry.to_owned()),
                repository: repository.to_owned(),
                version,
            },
            None => Self { registry: None, repository: name.to_owned(), version },
        }
    }

    fn host(&self) -> String {
        self.registry.clone().unwrap_or_else(|| "docker.io".to_owned())
    }

    /// The repository as the public registry files it.
    fn full_repository(&self) -> String {
        match (&self.registry, self.repository.contains('/')) {
            (None, false) => format!("library/{}", self.repository),
            _ => self.repository.clone(),
        }
    }

    fn name(&self) -> String {
        match &self.registry {
            Some(registry) => format!("{registry}/{}", self.repository),
            None => self.repository.clone(),
        }
    }
}

impl std::fmt::Display for Reference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mark = if self.version.contains(':') { '@' } else { ':' };
        write!(f, "{}{mark}{}", self.name(), self.version)
    }
}

/// The colon of a tag comes after the last slash; one before it belongs to a port.
fn without_tag(name: &str) -> (&str, Option<&str>) {
    let start = name.rfind('/').map_or(0, |slash| slash + 1);
    match name[start..].find(':') {
        Some(colon) => (&name[..start + colon], Some(&name[start + colon + 1..])),
        None => (name, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_read_as_the_engine_reads_them() {
        for (text, host, name, version) in [
            ("redis", "docker.io", "redis", "latest"),
            ("redis:7", "docker.io", "redis", "7"),
            ("acme/bot:1.2", "docker.io", "acme/bot", "1.2"),
            ("ghcr.io/acme/bot", "ghcr.io", "ghcr.io/acme/bot", "latest"),
            ("127.0.0.1:5055/bot:1", "127.0.0.1:5055", "127.0.0.1:5055/bot", "1"),
            ("localhost/bot", "localhost", "localhost/bot", "latest"),
            ("a.io/b@sha256:ff", "a.io", "a.io/b", "sha256:ff"),
            ("a.io/b:1@sha256:ff", "a.io", "a.io/b", "sha256:ff"),
        ] {
            let read = Reference::parse(text);
            let found = (read.host(), read.name(), read.version.clone());
            assert_eq!(found, (host.to_owned(), name.to_owned(), version.to_owned()), "{text}");
        }
        assert_eq!(Reference::parse("redis").full_repository(), "library/redis");
        assert_eq!(Reference::parse("a.io/b@sha256:ff").to_string(), "a.io/b@sha256:ff");
    }

    #[test]
    fn requirements_that_name_files_of_the_source_are_told_apart() {
        assert!(is_plain("requests==2\n# a comment\nflask>=3 ; python_version > '3.8'\n"));
        for text in ["./thing.whl", "-e .", "-r more.txt", "thing @ file:///x", "vendor/thing.whl"]
        {
            assert!(!is_plain(text), "{text}");
        }
    }
}
