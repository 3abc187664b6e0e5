//! Instances: running copies of an agent. The row is the route; only transitions are replicated.

use serde::{Deserialize, Serialize};

use crate::{AgentId, DeploymentId, InstanceId, NodeId, Timestamp};

/// Where an instance is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InstanceStatus {
    /// The process is on its way up.
    Starting,
    /// It answers.
    Running,
    /// It finishes its calls and takes no new ones.
    Draining,
    /// It ended as asked.
    Stopped,
    /// It ended by itself.
    Failed,
}

impl InstanceStatus {
    /// The word used in bodies.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Draining => "draining",
            Self::Stopped => "stopped",
            Self::Failed => "failed",
        }
    }
}

/// One copy of one version on one node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Instance {
    /// Its id.
    pub id: InstanceId,
    /// The agent.
    pub agent_id: AgentId,
    /// The version it runs.
    pub version: u64,
    /// The deployment that brought that version.
    pub deployment_id: DeploymentId,
    /// The node.
    pub node_id: NodeId,
    /// Where it is in its life.
    pub status: InstanceStatus,
    /// When it was placed.
    pub started_at: Timestamp,
    /// When it first answered.
    #[serde(default)]
    pub ready_at: Option<Timestamp>,
    /// The layers of isolation that hold for it.
    #[serde(default)]
    pub isolation: Vec<String>,
}
