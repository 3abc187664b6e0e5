//! Deployments and versions. A deployment is one attempt to bring a version into service; a version
//! freezes everything that made it: source, image, runtime, resources and environment.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{
    AgentId, DeploymentId, Timestamp,
    account::Tenant,
    agent::{Resources, RuntimeSpec, Source, Variable},
};

/// Where a deployment is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeploymentStatus {
    /// Waits for a builder or for the one before it.
    Queued,
    /// Its image is being built.
    Building,
    /// Its first instance is starting.
    Deploying,
    /// Its first instance answers and is being watched before it takes over.
    Verifying,
    /// It serves.
    Live,
    /// A newer one took its place.
    Superseded,
    /// It did not come up.
    Failed,
    /// Somebody called it off.
    Canceled,
}

impl DeploymentStatus {
    /// The word used in bodies.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Building => "building",
            Self::Deploying => "deploying",
            Self::Verifying => "verifying",
            Self::Live => "live",
            Self::Superseded => "superseded",
            Self::Failed => "failed",
            Self::Canceled => "canceled",
        }
    }

    /// Whether it is still on its way.
    pub fn is_active(self) -> bool {
        match self {
            Self::Queued | Self::Building | Self::Deploying | Self::Verifying => true,
            Self::Live | Self::Superseded | Self::Failed | Self::Canceled => false,
        }
    }
}

/// What asked for a deployment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Trigger {
    /// `POST /v1/agents`.
    Create,
    /// `…/redeploy`.
    Redeploy,
    /// `PATCH` of something a version freezes.
    Update,
    /// `…/start`.
    Start,
    /// `…/rollback`.
    Rollback,
}

impl Trigger {
    /// The word used in bodies.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Redeploy => "redeploy",
            Self::Update => "update",
            Self::Start => "start",
            Self::Rollback => "rollback",
        }
    }
}

/// How a new version replaces a live one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Strategy {
    /// A new instance is up and watched before an old one goes.
    Rolling,
    /// The new version takes over as soon as it answers.
    Immediate,
}

impl Strategy {
    /// The word used in bodies.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Rolling => "rolling",
            Self::Immediate => "immediate",
        }
    }
}

/// What a version freezes besides its image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    /// Where the code comes from.
    pub source: Source,
    /// What the client said of the language.
    pub runtime: RuntimeSpec,
    /// What an instance may use.
    pub resources: Resources,
    /// Variables of the process.
    pub environment: BTreeMap<String, Variable>,
}

impl Spec {
    /// Whether both come out of the same build.
    pub fn same_image(&self, other: &Self) -> bool {
        self.source == other.source && self.runtime == other.runtime
    }
}

/// How an image is run, found out by its build.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Image {
    /// The built directory (`process`) or image id (`docker`), a name on every node.
    pub reference: String,
    /// Language, version and framework as detected.
    pub runtime: RuntimeSpec,
    /// The command line; empty runs the image's own.
    pub command: Vec<String>,
    /// The port an image insists on.
    #[serde(default)]
    pub port: Option<u16>,
    /// Path of the health check.
    pub health_path: String,
    /// Path of invocations.
    pub invoke_path: String,
    /// Calls at once per instance.
    pub concurrency: u32,
    /// Isolation layers that must hold.
    #[serde(default)]
    pub isolation_minimum: Vec<String>,
    /// Whether it runs without writing to any file but those of `/tmp`.
    #[serde(default)]
    pub read_only_root: bool,
    /// The git commit it was built from.
    #[serde(default)]
    pub commit: Option<String>,
    /// The digest it was pulled by.
    #[serde(default)]
    pub digest: Option<String>,
}

/// Why something did not work, for clients and for `agent.failed`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// `BUILD_FAILED`, `CRASH_LOOP`, …
    pub code: String,
    /// One sentence with the next step.
    pub message: String,
    /// The end of a log, a path, or nothing.
    #[serde(default)]
    pub details: String,
}

impl Failure {
    /// A failure with this code and sentence.
    pub fn new(code: &str, message: impl Into<String>) -> Self {
        Self { code: code.to_owned(), message: message.into(), details: String::new() }
    }
}

/// One attempt to bring a version into service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Deployment {
    /// Its id.
    pub id: DeploymentId,
    /// The agent.
    pub agent_id: AgentId,
    /// Whose it is.
    pub tenant: Tenant,
    /// The version it will be once live.
    pub version: u64,
    /// Where it is.
    pub status: DeploymentStatus,
    /// What asked for it.
    pub trigger: Trigger,
    /// How it takes over.
    pub strategy: Strategy,
    /// Whether caches are left aside in its build.
    pub no_cache: bool,
    /// What it freezes.
    pub spec: Spec,
    /// Its image, once built; known from the start where an earlier build serves.
    pub image: Option<Image>,
    /// Why it failed.
    pub error: Option<Failure>,
    /// When it was asked for.
    pub created_at: Timestamp,
    /// When its build began.
    #[serde(default)]
    pub build_started_at: Option<Timestamp>,
    /// When its first instance was asked for.
    #[serde(default)]
    pub rollout_started_at: Option<Timestamp>,
    /// When it ended, well or not.
    #[serde(default)]
    pub finished_at: Option<Timestamp>,
}

/// A version that served at least once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Version {
    /// 1, 2, …
    pub number: u64,
    /// The deployment that brought it.
    pub deployment_id: DeploymentId,
    /// What it froze.
    pub spec: Spec,
    /// What it runs.
    pub image: Image,
    /// When it first served.
    pub created_at: Timestamp,
}
