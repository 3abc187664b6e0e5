//! Agents on the wire.

use std::collections::BTreeMap;

use actors::{meter::Summary, route::Health};
use domain::{
    agent::{self, Agent, Gpu, Source, Variable, environment::MASK, is_secret_like},
    directory::AgentView,
    instance::Instance,
    limits::{
        ENVIRONMENT_BYTES_MAX, ENVIRONMENT_MAX, METADATA_KEY_CHARS_MAX, METADATA_KEYS_MAX,
        METADATA_VALUE_CHARS_MAX, VARIABLE_NAME_MAX,
    },
};
use poem_openapi::{Enum, Object, types::Any};
use serde_json::{Value, json};

use super::deployment::DeploymentBody;

/// The status of an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Enum)]
#[oai(rename_all = "snake_case")]
pub enum AgentStatus {
    /// Awaiting deployment.
    Created,
    /// The image is being built.
    Building,
    /// Being deployed.
    Deploying,
    /// Live and accepting requests.
    Running,
    /// Stopped.
    Stopped,
    /// Deployment or runtime error.
    Failed,
}

impl From<agent::Status> for AgentStatus {
    fn from(status: agent::Status) -> Self {
        match status {
            agent::Status::Created => Self::Created,
            agent::Status::Building => Self::Building,
            agent::Status::Deploying => Self::Deploying,
            agent::Status::Running => Self::Running,
            agent::Status::Stopped => Self::Stopped,
            agent::Status::Failed => Self::Failed,
        }
    }
}

/// Language, version and framework.
#[derive(Clone, Debug, Default, Object)]
pub struct RuntimeBody {
    /// `python`, `node` or `binary`; detected if left out.
    #[oai(validator(max_length = 32))]
    pub language: Option<String>,
    /// The language's version: `3` takes any 3, `3.11` any 3.11.
    #[oai(validator(max_length = 32, pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,31}$"))]
    pub version: Option<String>,
    /// `langgraph`, `fastapi`, …; detected if left out.
    #[oai(validator(max_length = 64))]
    pub framework: Option<String>,
}

/// What one instance may use.
#[derive(Clone, Debug, Default, Object)]
pub struct ResourcesRequest {
    /// Cores, 1 to 64; default 1.
    #[oai(validator(minimum(value = "1"), maximum(value = "64")))]
    pub cpu: Option<u32>,
    /// MiB, 64 to 262144; default 512.
    #[oai(validator(minimum(value = "64"), maximum(value = "262144")))]
    pub memory_mb: Option<u32>,
    /// `null`, a count, a kind, or `{ "type", "count" }`.
    pub gpu: Option<Any<Value>>,
}

/// What one instance may use.
#[derive(Clone, Debug, Object)]
pub struct ResourcesBody {
    /// Cores.
    pub cpu: u32,
    /// MiB.
    pub memory_mb: u32,
    /// Graphics processors, or null.
    pub gpu: Option<GpuBody>,
}

/// Graphics processors.
#[derive(Clone, Debug, Object)]
pub struct GpuBody {
    /// The kind, or null for any.
    #[oai(rename = "type")]
    pub kind: Option<String>,
    /// How many.
    pub count: u32,
}

/// How many instances.
#[derive(Clone, Debug, Default, Object)]
pub struct ScalingRequest {
    /// At least; 0 to 100, default 1.
    #[oai(validator(minimum(value = "0"), maximum(value = "100")))]
    pub min_instances: Option<u32>,
    /// At most; 1 to 100, default 3.
    #[oai(validator(minimum(value = "1"), maximum(value = "100")))]
    pub max_instances: Option<u32>,
    /// 10 to 95, default 70.
    #[oai(validator(minimum(value = "10"), maximum(value = "95")))]
    pub target_cpu_percent: Option<u32>,
}

/// How many instances.
#[derive(Clone, Debug, Object)]
pub struct ScalingBody {
    /// At least.
    pub min_instances: u32,
    /// At most.
    pub max_instances: u32,
    /// Ready now.
    pub current_instances: u32,
    /// The load that scaling aims at.
    pub target_cpu_percent: u32,
}

/// Where the agent's code comes from. Which fields belong to which `type` stands with each.
#[derive(Clone, Debug, Object)]
pub struct SourceRequest {
    /// `github`, `docker` or `upload`.
    #[oai(rename = "type")]
    pub kind: SourceKind,
    /// github, required: `owner/repository`.
    #[oai(validator(
        max_length = 201,
        pattern = "^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}/[A-Za-z0-9_.-]{1,100}$"
    ))]
    pub repo: Option<String>,
    /// github: the repository's default if left out.
    #[oai(validator(min_length = 1, max_length = 255))]
    pub branch: Option<String>,
    /// github: a subdirectory.
    #[oai(validator(max_length = 1024))]
    pub path: Option<String>,
    /// docker, required: an image reference with tag.
    #[oai(validator(min_length = 1, max_length = 512))]
    pub image: Option<String>,
    /// docker: for a private registry.
    pub credentials: Option<CredentialsRequest>,
    /// upload, required: the `archive_url` of an upload.
    #[oai(validator(min_length = 1, max_length = 2048))]
    pub archive_url: Option<String>,
}

/// The kind of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Enum)]
#[oai(rename_all = "snake_case")]
pub enum SourceKind {
    /// A branch of a repository.
    Github,
    /// A ready image.
    Docker,
    /// An uploaded archive.
    Upload,
}

/// A registry login.
#[derive(Clone, Debug, Object)]
pub struct CredentialsRequest {
    /// The user.
    #[oai(validator(min_length = 1, max_length = 255))]
    pub username: String,
    /// The password; never shown again.
    #[oai(validator(min_length = 1, max_length = 4096))]
    pub password: String,
}

/// Where the agent's code came from.
#[derive(Clone, Debug, Object)]
pub struct SourceBody {
    /// `github`, `docker` or `upload`.
    #[oai(rename = "type")]
    pub kind: String,
    /// github: `owner/repository`.
    #[oai(skip_serializing_if_is_none)]
    pub repo: Option<String>,
    /// github: the branch, or null for the default one.
    #[oai(skip_serializing_if_is_none)]
    pub branch: Option<String>,
    /// github: the subdirectory.
    #[oai(skip_serializing_if_is_none)]
    pub path: Option<String>,
    /// github: the commit that serves.
    #[oai(skip_serializing_if_is_none)]
    pub commit: Option<String>,
    /// docker: the reference.
    #[oai(skip_serializing_if_is_none)]
    pub image: Option<String>,
    /// docker: the digest that serves.
    #[oai(skip_serializing_if_is_none)]
    pub digest: Option<String>,
    /// upload: which one.
    #[oai(skip_serializing_if_is_none)]
    pub upload_id: Option<String>,
}

/// Deploy a new agent.
#[derive(Clone, Debug, Object)]
#[oai(example)]
pub struct CreateAgent {
    /// Unique within its cloud whatever the case; never changed.
    #[oai(validator(
        max_length = 63,
        pattern = "^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$"
    ))]
    pub name: String,
    /// Shown to people; the name if left out.
    #[oai(validator(
        min_length = 1,
        max_length = 255,
        pattern = r"^[^\x00-\x1F\x7F]*[^\x00-\x20\x7F][^\x00-\x1F\x7F]*$"
    ))]
    pub display_name: Option<String>,
    /// The cloud to deploy to.
    #[oai(validator(max_length = 64))]
    pub cloud_id: String,
    /// Where the code comes from.
    pub source: SourceRequest,
    /// Detected where left out.
    pub runtime: Option<RuntimeBody>,
    /// What one instance may use.
    pub resources: Option<ResourcesRequest>,
    /// Variables of the process.
    pub environment: Option<BTreeMap<String, String>>,
    /// How many instances.
    pub scaling: Option<ScalingRequest>,
    /// Your own notes.
    pub metadata: Option<BTreeMap<String, String>>,
}

impl poem_openapi::types::Example for CreateAgent {
    fn example() -> Self {
        Self {
            name: "support-bot".to_owned(),
            display_name: None,
            cloud_id: "cloud_01k3x9vq4n8zj5w2r7t6y0abcd".to_owned(),
            source: SourceRequest {
                kind: SourceKind::Github,
                repo: Some("acme/support-bot".to_owned()),
                branch: Some("main".to_owned()),
                path: None,
                image: None,
                credentials: None,
                archive_url: None,
            },
            runtime: None,
            resources: Some(ResourcesRequest { cpu: Some(1), memory_mb: Some(512), gpu: None }),
            environment: Some(BTreeMap::from([("MODEL".to_owned(), "small".to_owned())])),
            scaling: None,
            metadata: None,
        }
    }
}

/// Change an agent: a JSON merge patch (RFC 7396).
#[derive(Clone, Debug, Object)]
pub struct UpdateAgent {
    /// Shown to people.
    #[oai(validator(
        min_length = 1,
        max_length = 255,
        pattern = r"^[^\x00-\x1F\x7F]*[^\x00-\x20\x7F][^\x00-\x1F\x7F]*$"
    ))]
    pub display_name: Option<String>,
    /// A new source makes a new version.
    pub source: Option<SourceRequest>,
    /// A new runtime makes a new version.
    pub runtime: Option<RuntimeBody>,
    /// New resources make a new version.
    pub resources: Option<ResourcesRequest>,
    /// Variables to set; `null` removes one. A value that is exactly the mask stays as it is.
    pub environment: Option<BTreeMap<String, Option<String>>>,
    /// How many instances.
    pub scaling: Option<ScalingRequest>,
    /// Notes to set; `null` removes one.
    pub metadata: Option<BTreeMap<String, Option<String>>>,
}

/// How an agent is reached.
#[derive(Clone, Debug, Object)]
pub struct EndpointsBody {
    /// An authenticated way to the agent itself.
    pub base_url: String,
    /// Path of the health check below it.
    pub health: String,
    /// Path of invocations below it.
    pub invoke: String,
}

/// How an agent is.
#[derive(Clone, Debug, Object)]
pub struct HealthBody {
    /// `healthy`, `degraded`, `unhealthy` or `unknown`.
    pub status: String,
    /// When an instance last answered.
    pub last_check: Option<String>,
    /// Share of the last 30 days in which it was up while it was meant to be.
    pub uptime_percent: f64,
    /// Whether calls are in flight.
    pub busy: bool,
}

/// The last 24 hours.
#[derive(Clone, Debug, Object)]
pub struct AgentMetricsBody {
    /// Calls.
    pub requests_24h: u64,
    /// Mean latency.
    pub avg_latency_ms: f64,
    /// Share of calls without an output.
    pub error_rate_percent: f64,
}

/// Why an agent is not running.
#[derive(Clone, Debug, Object)]
pub struct StatusReasonBody {
    /// A word for programs.
    pub code: String,
    /// A sentence.
    pub message: String,
    /// Since when.
    pub since: String,
}

/// An agent.
#[derive(Clone, Debug, Object)]
pub struct AgentBody {
    /// Its id.
    pub id: String,
    /// Unique in its cloud.
    pub name: String,
    /// Shown to people.
    pub display_name: String,
    /// What it does now.
    pub status: AgentStatus,
    /// Why, when it is not running.
    pub status_reason: Option<StatusReasonBody>,
    /// Its cloud.
    pub cloud_id: String,
    /// The version that serves, or served last.
    pub version: Option<String>,
    /// The greatest version that ever served.
    pub latest_version: Option<String>,
    /// When it was made.
    pub created_at: String,
    /// When it was last changed.
    pub updated_at: String,
    /// When it was last deployed with success.
    pub deployed_at: Option<String>,
    /// As detected or asked for.
    pub runtime: RuntimeBody,
    /// What one instance may use.
    pub resources: ResourcesBody,
    /// How many instances.
    pub scaling: ScalingBody,
    /// How it is reached.
    pub endpoints: EndpointsBody,
    /// How it is.
    pub health: HealthBody,
    /// The last 24 hours.
    pub metrics: AgentMetricsBody,
    /// Where its code came from.
    pub source: SourceBody,
    /// Variables; those that sound like secrets are masked.
    pub environment: BTreeMap<String, String>,
    /// Your own notes.
    pub metadata: BTreeMap<String, String>,
    /// The newest deployment.
    pub deployment: Option<DeploymentBody>,
    /// Live or test.
    pub livemode: bool,
    /// Give it as `If-Match` to change exactly this state.
    pub etag: String,
}

/// What is shown beside the record and is not replicated.
pub struct Live {
    /// How it is.
    pub health: Health,
    /// Its last 24 hours.
    pub summary: Summary,
    /// Share of time up.
    pub uptime_percent: f64,
    /// Where clients reach the service.
    pub public_url: String,
}

impl AgentBody {
    /// An agent as clients see it.
    pub fn of(view: &AgentView, live: &Live) -> Self {
        let AgentView { agent, deployment, version } = view;
        let image = version.as_ref().map(|version| &version.image);
        let runtime = image.map_or(&agent.spec.runtime, |image| &image.runtime);
        Self {
            id: agent.id.to_string(),
            name: agent.name.clone(),
            display_name: agent.display_name.clone(),
            status: agent.status.into(),
            status_reason: agent.reason.as_ref().map(|reason| StatusReasonBody {
                code: reason.code.clone(),
                message: reason.message.clone(),
                since: reason.since.to_string(),
            }),
            cloud_id: agent.cloud_id.to_string(),
            version: agent.version.map(|number| number.to_string()),
            latest_version: Some(agent.latest_version).filter(|n| *n > 0).map(|n| n.to_string()),
            created_at: agent.created_at.to_string(),
            updated_at: agent.updated_at.to_string(),
            deployed_at: agent.deployed_at.map(|at| at.to_string()),
            runtime: runtime.into(),
            resources: (&agent.spec.resources).into(),
            scaling: ScalingBody {
                min_instances: agent.scaling.min_instances,
                max_instances: agent.scaling.max_instances,
                current_instances: u32::try_from(live.health.ready).unwrap_or(u32::MAX),
                target_cpu_percent: agent.scaling.target_cpu_percent,
            },
            endpoints: EndpointsBody {
                base_url: format!("{}/v1/agents/{}/http", live.public_url, agent.id),
                health: image.map_or("/health", |image| &image.health_path).to_owned(),
                invoke: image.map_or("/invoke", |image| &image.invoke_path).to_owned(),
            },
            health: HealthBody {
                status: live.health.status.to_owned(),
                last_check: live.health.last_check.map(|at| at.to_string()),
                uptime_percent: live.uptime_percent,
                busy: live.health.busy,
            },
            metrics: AgentMetricsBody {
                requests_24h: live.summary.requests,
                avg_latency_ms: live.summary.avg_latency_ms,
                error_rate_percent: live.summary.error_rate_percent,
            },
            source: SourceBody::of(&agent.spec.source, image),
            environment: shown(&agent.spec.environment),
            metadata: agent.metadata.clone(),
            deployment: deployment.as_deref().map(DeploymentBody::from),
            livemode: agent.tenant.mode.is_live(),
            etag: etag(agent),
        }
    }
}

/// The `ETag` of an agent's record.
pub fn etag(agent: &Agent) -> String {
    format!("\"{}\"", agent.revision)
}

fn shown(environment: &BTreeMap<String, Variable>) -> BTreeMap<String, String> {
    let value = |variable: &Variable| match variable {
        Variable::Plain(text) => text.clone(),
        Variable::Sealed(_) | Variable::Template(_) | Variable::Unchanged => MASK.to_owned(),
    };
    environment.iter().map(|(name, variable)| (name.clone(), value(variable))).collect()
}

impl From<&agent::RuntimeSpec> for RuntimeBody {
    fn from(spec: &agent::RuntimeSpec) -> Self {
        Self {
            language: spec.language.clone(),
            version: spec.version.clone(),
            framework: spec.framework.clone(),
        }
    }
}

impl From<RuntimeBody> for agent::RuntimeSpec {
    fn from(body: RuntimeBody) -> Self {
        Self { language: body.language, version: body.version, framework: body.framework }
    }
}

impl From<&agent::Resources> for ResourcesBody {
    fn from(resources: &agent::Resources) -> Self {
        Self {
            cpu: resources.cpu,
            memory_mb: resources.memory_mb,
            gpu: resources
                .gpu
                .as_ref()
                .map(|gpu| GpuBody { kind: gpu.kind.clone(), count: gpu.count }),
        }
    }
}

impl SourceBody {
    fn of(source: &Source, image: Option<&domain::deployment::Image>) -> Self {
        let empty = Self {
            kind: source.kind().to_owned(),
            repo: None,
            branch: None,
            path: None,
            commit: image.and_then(|image| image.commit.clone()),
            image: None,
            digest: image.and_then(|image| image.digest.clone()),
            upload_id: None,
        };
        match source {
            Source::Github { repo, branch, path } => Self {
                repo: Some(repo.clone()),
                branch: branch.clone(),
                path: path.clone(),
                ..empty
            },
            Source::Docker { image, .. } => Self { image: Some(image.clone()), ..empty },
            Source::Upload { upload_id, .. } => {
                Self { upload_id: Some(upload_id.to_string()), ..empty }
            }
        }
    }
}

/// What is wrong with a body, as `(field, sentence)`.
pub type Wrong = Vec<(String, String)>;

/// Resources over earlier ones or the defaults.
pub fn resources(
    body: Option<ResourcesRequest>,
    before: agent::Resources,
    wrong: &mut Wrong,
) -> agent::Resources {
    let Some(body) = body else { return before };
    let gpu = match body.gpu {
        None => before.gpu,
        Some(Any(value)) => gpu(&value, wrong),
    };
    agent::Resources {
        cpu: body.cpu.unwrap_or(before.cpu),
        memory_mb: body.memory_mb.unwrap_or(before.memory_mb),
        gpu,
    }
}

fn gpu(value: &Value, wrong: &mut Wrong) -> Option<Gpu> {
    const COUNT_MAX: u64 = 64;
    let known =
        |count: u64| (1..=COUNT_MAX).contains(&count).then(|| u32::try_from(count).ok()).flatten();
    let found = match value {
        Value::Null => return None,
        Value::String(kind) if !kind.is_empty() && kind.len() <= 64 => {
            Some(Gpu { kind: Some(kind.clone()), count: 1 })
        }
        Value::Number(count) => {
            count.as_u64().and_then(known).map(|count| Gpu { kind: None, count })
        }
        Value::Object(map) if map.keys().all(|key| key == "type" || key == "count") => {
            let kind = map.get("type").and_then(Value::as_str).map(str::to_owned);
            let kind_fits = map.get("type").is_none_or(|kind| kind.is_string() || kind.is_null());
            let count = map.get("count").unwrap_or(&json!(1)).as_u64().and_then(known);
            count.filter(|_| kind_fits).map(|count| Gpu { kind, count })
        }
        Value::Bool(_) | Value::String(_) | Value::Array(_) | Value::Object(_) => None,
    };
    if found.is_none() {
        let why = "must be null, a count from 1 to 64, a kind, or { \"type\", \"count\" }";
        wrong.push(("resources.gpu".to_owned(), why.to_owned()));
    }
    found
}

/// Scaling over earlier values or the defaults.
pub fn scaling(
    body: Option<&ScalingRequest>,
    before: agent::Scaling,
    wrong: &mut Wrong,
) -> agent::Scaling {
    let Some(body) = body else { return before };
    let min_instances = body.min_instances.unwrap_or(before.min_instances);
    let scaling = agent::Scaling {
        min_instances,
        max_instances: body.max_instances.unwrap_or(before.max_instances),
        target_cpu_percent: body.target_cpu_percent.unwrap_or(before.target_cpu_percent),
    };
    if scaling.min_instances > scaling.max_instances {
        let why =
            format!("must not be more than max_instances, which is {}", scaling.max_instances);
        wrong.push(("scaling.min_instances".to_owned(), why));
    }
    scaling
}

/// Checks names and sizes of variables.
pub fn check_environment<'v>(
    variables: impl Iterator<Item = (&'v String, &'v str)>,
    wrong: &mut Wrong,
) {
    let (mut count, mut bytes) = (0, 0);
    for (name, value) in variables {
        count += 1;
        bytes += name.len() + value.len();
        let first = name.bytes().next();
        let fits = first.is_some_and(|b| b.is_ascii_alphabetic() || b == b'_')
            && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
            && name.len() <= VARIABLE_NAME_MAX;
        let field = || format!("environment.{}", name.chars().take(64).collect::<String>());
        if !fits {
            let why = format!(
                "names begin with a letter or _, then letters, digits or _, at most {VARIABLE_NAME_MAX}"
            );
            wrong.push((field(), why));
        } else if name == "PORT" || name.starts_with("ROOST_") {
            wrong.push((field(), "is set by the platform; choose another name".to_owned()));
        } else if value.contains('\0') {
            wrong.push((field(), "must not have a zero byte".to_owned()));
        }
    }
    if count > ENVIRONMENT_MAX {
        wrong.push((
            "environment".to_owned(),
            format!("must have at most {ENVIRONMENT_MAX} variables"),
        ));
    }
    if bytes > ENVIRONMENT_BYTES_MAX {
        wrong.push((
            "environment".to_owned(),
            format!("must have at most {ENVIRONMENT_BYTES_MAX} bytes"),
        ));
    }
}

/// Checks names and sizes of notes.
pub fn check_metadata<'v>(notes: impl Iterator<Item = (&'v String, &'v str)>, wrong: &mut Wrong) {
    let mut count = 0;
    for (key, value) in notes {
        count += 1;
        let field = || format!("metadata.{}", key.chars().take(64).collect::<String>());
        if key.is_empty() || key.chars().count() > METADATA_KEY_CHARS_MAX {
            wrong.push((field(), format!("keys have 1 to {METADATA_KEY_CHARS_MAX} characters")));
        }
        if value.chars().count() > METADATA_VALUE_CHARS_MAX {
            wrong.push((
                field(),
                format!("values have at most {METADATA_VALUE_CHARS_MAX} characters"),
            ));
        }
    }
    if count > METADATA_KEYS_MAX {
        wrong.push(("metadata".to_owned(), format!("must have at most {METADATA_KEYS_MAX} keys")));
    }
}

/// Whether a variable's value must be sealed.
pub fn needs_seal(name: &str) -> bool {
    is_secret_like(name)
}

/// A running copy.
#[derive(Clone, Debug, Object)]
pub struct InstanceBody {
    /// Its id.
    pub id: String,
    /// The agent.
    pub agent_id: String,
    /// The version it runs.
    pub version: String,
    /// The node that runs it.
    pub node_id: String,
    /// `starting`, `running`, `draining`, `stopped` or `failed`.
    pub status: String,
    /// When it was placed.
    pub started_at: String,
    /// When it first answered.
    pub ready_at: Option<String>,
    /// Calls in it now.
    pub in_flight: u32,
    /// The layers of isolation that hold for it.
    pub isolation: Vec<String>,
}

impl InstanceBody {
    /// An instance with its load.
    pub fn of(row: &Instance, in_flight: u32) -> Self {
        Self {
            id: row.id.to_string(),
            agent_id: row.agent_id.to_string(),
            version: row.version.to_string(),
            node_id: row.node_id.to_string(),
            status: row.status.as_str().to_owned(),
            started_at: row.started_at.to_string(),
            ready_at: row.ready_at.map(|at| at.to_string()),
            in_flight,
            isolation: row.isolation.clone(),
        }
    }
}

/// All instances of an agent.
#[derive(Clone, Debug, Object)]
pub struct InstancesBody {
    /// Oldest first.
    pub items: Vec<InstanceBody>,
    /// Always false: there are at most 100.
    pub has_more: bool,
    /// Always null.
    pub next_cursor: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_read_in_all_their_forms() {
        let read = |value: Value| {
            let mut wrong = vec![];
            (gpu(&value, &mut wrong).map(|gpu| (gpu.kind, gpu.count)), wrong.len())
        };
        assert_eq!(read(json!(2)), (Some((None, 2)), 0));
        assert_eq!(read(json!("a100")), (Some((Some("a100".to_owned()), 1)), 0));
        assert_eq!(read(json!({"type": "t4", "count": 3})), (Some((Some("t4".to_owned()), 3)), 0));
        assert_eq!(read(Value::Null), (None, 0));
        for wrong in [json!(0), json!(-1), json!(1.5), json!([]), json!({"kind": 1}), json!("")] {
            assert_eq!(read(wrong.clone()).1, 1, "{wrong}");
        }
    }
}
