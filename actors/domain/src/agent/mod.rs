//! The agent's record: what was asked for, what serves, and what is on its way.

pub mod environment;
pub mod lifecycle;
pub mod plan;
pub mod rollout;
pub mod source;

use std::{collections::BTreeMap, sync::Arc};

use serde::{Deserialize, Serialize};

pub use environment::{Variable, is_secret_like};
pub use source::{Credentials, Source};

use crate::{
    AgentId, CloudId, DeploymentId, Timestamp,
    account::Tenant,
    deployment::{Failure, Spec},
    event::DirectoryEvent,
};

/// The specification's six words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Awaiting deployment.
    Created,
    /// The image is being built.
    Building,
    /// The first instance is starting.
    Deploying,
    /// Live and accepting requests.
    Running,
    /// Stopped.
    Stopped,
    /// Deployment or runtime error.
    Failed,
}

impl Status {
    /// All of them, in the specification's order.
    pub const ALL: [Self; 6] = [
        Self::Created,
        Self::Building,
        Self::Deploying,
        Self::Running,
        Self::Stopped,
        Self::Failed,
    ];

    /// The word used in bodies.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Created => "created",
            Self::Building => "building",
            Self::Deploying => "deploying",
            Self::Running => "running",
            Self::Stopped => "stopped",
            Self::Failed => "failed",
        }
    }
}

/// What the client wants, whatever is now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Desired {
    /// Serve.
    Run,
    /// Be stopped.
    Stop,
    /// Be gone.
    Delete,
}

/// Language, version and framework; what the client leaves out is detected.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuntimeSpec {
    /// `python`, `node`, `binary`.
    pub language: Option<String>,
    /// The language's version.
    pub version: Option<String>,
    /// `langgraph`, `fastapi`, …
    pub framework: Option<String>,
}

/// Graphics processors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// The kind, or any.
    pub kind: Option<String>,
    /// How many.
    pub count: u32,
}

/// What one instance may use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resources {
    /// Cores; a ceiling, not a reservation.
    pub cpu: u32,
    /// Memory in MiB.
    pub memory_mb: u32,
    /// Graphics processors, if any.
    pub gpu: Option<Gpu>,
}

impl Default for Resources {
    fn default() -> Self {
        Self { cpu: 1, memory_mb: 512, gpu: None }
    }
}

/// How many instances.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scaling {
    /// At least.
    pub min_instances: u32,
    /// At most; at least 1 and at least `min_instances`.
    pub max_instances: u32,
    /// The load that scaling aims at.
    pub target_cpu_percent: u32,
}

impl Default for Scaling {
    fn default() -> Self {
        Self { min_instances: 1, max_instances: 3, target_cpu_percent: 70 }
    }
}

impl Scaling {
    /// Instances to keep while nothing scales by load: one even where none is the least.
    pub fn wanted(&self) -> usize {
        self.min_instances.max(1).min(self.max_instances.max(1)) as usize
    }
}

/// Why the agent is not running.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatusReason {
    /// A code such as `CRASH_LOOP`.
    pub code: String,
    /// One sentence.
    pub message: String,
    /// Since when.
    pub since: Timestamp,
}

/// An agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Agent {
    /// Its id.
    pub id: AgentId,
    /// Whose it is.
    pub tenant: Tenant,
    /// The cloud it runs in.
    pub cloud_id: CloudId,
    /// Unique in its cloud whatever the case, never changed.
    pub name: String,
    /// Shown to people.
    pub display_name: String,
    /// What the next version will freeze.
    pub spec: Spec,
    /// How many instances.
    pub scaling: Scaling,
    /// The client's own notes.
    pub metadata: BTreeMap<String, String>,
    /// What the client wants.
    pub desired: Desired,
    /// What is, in the specification's words.
    pub status: Status,
    /// Why, when it is not running.
    pub reason: Option<StatusReason>,
    /// The version that serves, or served last.
    pub version: Option<u64>,
    /// The deployment that brought it.
    pub live_deployment: Option<DeploymentId>,
    /// The greatest version that ever served.
    pub latest_version: u64,
    /// The newest deployment that is not waiting.
    pub deployment: DeploymentId,
    /// A deployment that waits for the one before it.
    pub waiting: Option<DeploymentId>,
    /// When it was made.
    pub created_at: Timestamp,
    /// When the record last changed.
    pub updated_at: Timestamp,
    /// When it was last deployed with success.
    pub deployed_at: Option<Timestamp>,
    /// Counts changes; the `ETag`.
    pub revision: u64,
}

impl Agent {
    /// Whether calls are accepted: a version serves, and nobody asked for an end.
    pub fn is_serving(&self) -> bool {
        self.status == Status::Running && self.desired == Desired::Run
    }

    /// The record says from now on what a version froze; nothing happens where it does already.
    pub(crate) fn take_spec(&mut self, spec: &Spec, at: Timestamp) -> Option<DirectoryEvent> {
        if self.spec == *spec {
            return None;
        }
        self.spec = spec.clone();
        self.updated_at = at;
        self.revision += 1;
        Some(DirectoryEvent::AgentUpdated(Arc::new(self.clone())))
    }

    /// The key under which its name is unique.
    pub fn name_key(cloud: CloudId, name: &str) -> String {
        format!("{cloud}/{}", name.to_ascii_lowercase())
    }
}

/// A change of the record; `None` leaves a field as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentPatch {
    /// New display name.
    pub display_name: Option<String>,
    /// New source.
    pub source: Option<Source>,
    /// New runtime.
    pub runtime: Option<RuntimeSpec>,
    /// New resources.
    pub resources: Option<Resources>,
    /// New scaling.
    pub scaling: Option<Scaling>,
    /// Variables to set (`Some`) and to remove (`None`).
    pub environment: BTreeMap<String, Option<Variable>>,
    /// Metadata to set (`Some`) and to remove (`None`).
    pub metadata: BTreeMap<String, Option<String>>,
}

/// Something that a moved agent's record must say.
pub(crate) fn reason(failure: &Failure, at: Timestamp) -> StatusReason {
    StatusReason { code: failure.code.clone(), message: failure.message.clone(), since: at }
}
