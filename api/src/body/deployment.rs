//! Deployments and versions on the wire.

use domain::deployment::{Deployment, DeploymentStatus, Version};
use poem_openapi::Object;

use super::agent::RuntimeBody;

/// Why a deployment failed.
#[derive(Clone, Debug, Object)]
pub struct FailureBody {
    /// `BUILD_FAILED`, `CRASH_LOOP`, …
    pub code: String,
    /// One sentence with the next step.
    pub message: String,
    /// The end of a log, or nothing.
    pub details: String,
}

/// One attempt to bring a version into service.
#[derive(Clone, Debug, Object)]
pub struct DeploymentBody {
    /// Its id.
    pub id: String,
    /// The agent.
    pub agent_id: String,
    /// `queued`, `building`, `deploying`, `verifying`, `live`, `superseded`, `failed` or `canceled`.
    pub status: String,
    /// The version it is, or will be once live.
    pub version: String,
    /// How far it is, in percent.
    pub progress: u32,
    /// `create`, `redeploy`, `update`, `start` or `rollback`.
    pub trigger: String,
    /// `rolling` or `immediate`.
    pub strategy: String,
    /// Why it failed.
    pub error: Option<FailureBody>,
    /// The commit it was built from.
    pub commit: Option<String>,
    /// When it was asked for.
    pub created_at: String,
    /// When it ended, well or not.
    pub finished_at: Option<String>,
    /// Live or test.
    pub livemode: bool,
}

impl From<&Deployment> for DeploymentBody {
    fn from(row: &Deployment) -> Self {
        let progress = match row.status {
            DeploymentStatus::Queued => 0,
            DeploymentStatus::Building => 25,
            DeploymentStatus::Deploying => 50,
            DeploymentStatus::Verifying => 75,
            DeploymentStatus::Live
            | DeploymentStatus::Superseded
            | DeploymentStatus::Failed
            | DeploymentStatus::Canceled => 100,
        };
        Self {
            id: row.id.to_string(),
            agent_id: row.agent_id.to_string(),
            status: row.status.as_str().to_owned(),
            version: row.version.to_string(),
            progress,
            trigger: row.trigger.as_str().to_owned(),
            strategy: row.strategy.as_str().to_owned(),
            error: row.error.as_ref().map(|error| FailureBody {
                code: error.code.clone(),
                message: error.message.clone(),
                details: error.details.clone(),
            }),
            commit: row.image.as_ref().and_then(|image| image.commit.clone()),
            created_at: row.created_at.to_string(),
            finished_at: row.finished_at.map(|at| at.to_string()),
            livemode: row.tenant.mode.is_live(),
        }
    }
}

/// A version that served at least once.
#[derive(Clone, Debug, Object)]
pub struct VersionBody {
    /// `1`, `2`, …
    pub version: String,
    /// The deployment that brought it.
    pub deployment_id: String,
    /// As detected or asked for.
    pub runtime: RuntimeBody,
    /// `github`, `docker` or `upload`.
    pub source_type: String,
    /// The commit it was built from.
    pub commit: Option<String>,
    /// When it first served.
    pub created_at: String,
    /// Whether it serves now, or served last.
    pub current: bool,
}

impl VersionBody {
    /// A version; `current` is the number that serves.
    pub fn of(row: &Version, current: Option<u64>) -> Self {
        Self {
            version: row.number.to_string(),
            deployment_id: row.deployment_id.to_string(),
            runtime: (&row.image.runtime).into(),
            source_type: row.spec.source.kind().to_owned(),
            commit: row.image.commit.clone(),
            created_at: row.created_at.to_string(),
            current: current == Some(row.number),
        }
    }
}

/// Bring the agent's code into service again.
#[derive(Clone, Debug, Default, Object)]
pub struct RedeployRequest {
    /// Another source from now on.
    pub source: Option<super::agent::SourceRequest>,
    /// `rolling` (default) or `immediate`.
    pub strategy: Option<StrategyBody>,
    /// Build without caches.
    pub no_cache: Option<bool>,
}

/// How a new version takes over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, poem_openapi::Enum)]
#[oai(rename_all = "snake_case")]
pub enum StrategyBody {
    /// A new instance is up and watched before an old one goes.
    Rolling,
    /// The new version takes over as soon as it answers.
    Immediate,
}

/// Go back to a version.
#[derive(Clone, Debug, Object)]
pub struct RollbackRequest {
    /// Its number.
    #[oai(validator(min_length = 1, max_length = 20))]
    pub version: String,
}
