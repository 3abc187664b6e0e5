//! Clouds on the wire.

use std::collections::BTreeMap;

use actors::settings::Machine;
use domain::{
    cloud::{Cloud, CloudLimits},
    deployment::Failure,
};
use poem_openapi::{Enum, Object};

/// What runs a cloud's agents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Enum)]
#[oai(rename_all = "snake_case")]
pub enum ProviderBody {
    /// Supervised child processes.
    Process,
    /// A Docker engine.
    Docker,
    /// Child processes for test objects.
    Sandbox,
}

/// Most agents and instances.
#[derive(Clone, Debug, Default, Object)]
pub struct CloudLimitsBody {
    /// Agents, 0 to 100000; no limit if left out.
    #[oai(validator(minimum(value = "0"), maximum(value = "100000")))]
    pub max_agents: Option<u32>,
    /// Instances of all agents, 0 to 1000000; no limit if left out.
    #[oai(validator(minimum(value = "0"), maximum(value = "1000000")))]
    pub max_instances: Option<u32>,
}

impl From<CloudLimitsBody> for CloudLimits {
    fn from(body: CloudLimitsBody) -> Self {
        Self { max_agents: body.max_agents, max_instances: body.max_instances }
    }
}

/// Make a cloud.
#[derive(Clone, Debug, Object)]
pub struct CreateCloud {
    /// Unique within the organization; never changed.
    #[oai(validator(
        max_length = 63,
        pattern = "^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$"
    ))]
    pub name: String,
    /// Shown to people.
    #[oai(validator(
        min_length = 1,
        max_length = 255,
        pattern = r"^[^\x00-\x1F\x7F]*[^\x00-\x20\x7F][^\x00-\x1F\x7F]*$"
    ))]
    pub display_name: Option<String>,
    /// `local` if left out.
    #[oai(validator(min_length = 1, max_length = 63))]
    pub region: Option<String>,
    /// That of the default cloud if left out.
    pub provider: Option<ProviderBody>,
    /// Most agents and instances.
    pub limits: Option<CloudLimitsBody>,
    /// Your own notes.
    pub metadata: Option<BTreeMap<String, String>>,
}

/// Change a cloud: a JSON merge patch (RFC 7396).
#[derive(Clone, Debug, Object)]
pub struct UpdateCloud {
    /// Shown to people.
    #[oai(validator(
        min_length = 1,
        max_length = 255,
        pattern = r"^[^\x00-\x1F\x7F]*[^\x00-\x20\x7F][^\x00-\x1F\x7F]*$"
    ))]
    pub display_name: Option<String>,
    /// Most agents and instances.
    pub limits: Option<CloudLimitsBody>,
    /// Notes to set; `null` removes one.
    pub metadata: Option<BTreeMap<String, Option<String>>>,
}

/// Resources.
#[derive(Clone, Debug, Object)]
pub struct CapacityBody {
    /// Cores.
    pub cpu: u64,
    /// MiB.
    pub memory_mb: u64,
    /// Graphics processors.
    pub gpu: u64,
}

/// Why a cloud is not running.
#[derive(Clone, Debug, Object)]
pub struct CloudReasonBody {
    /// A word for programs.
    pub code: String,
    /// A sentence.
    pub message: String,
}

/// A cloud.
#[derive(Clone, Debug, Object)]
pub struct CloudBody {
    /// Its id.
    pub id: String,
    /// Unique within the organization.
    pub name: String,
    /// Shown to people.
    pub display_name: String,
    /// Free text.
    pub region: String,
    /// `provisioning`, `running`, `degraded`, `stopped`, `failed` or `deleting`.
    pub status: String,
    /// Why, when it is not running.
    pub status_reason: Option<CloudReasonBody>,
    /// `process`, `docker` or `sandbox`.
    pub provider: String,
    /// Whether it was made at first start.
    pub is_default: bool,
    /// What its nodes have.
    pub capacity: CapacityBody,
    /// What its instances may use together.
    pub allocated: CapacityBody,
    /// Most agents and instances.
    pub limits: CloudLimitsBody,
    /// Labels that a node must have.
    pub node_selector: BTreeMap<String, String>,
    /// Agents in it.
    pub agent_count: u64,
    /// Your own notes.
    pub metadata: BTreeMap<String, String>,
    /// When it was made.
    pub created_at: String,
    /// When it was last changed.
    pub updated_at: String,
    /// Live or test.
    pub livemode: bool,
    /// Give it as `If-Match` to change exactly this state.
    pub etag: String,
}

/// What is counted for a cloud.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counted {
    /// Agents in it.
    pub agents: u64,
    /// Cores that its instances may use.
    pub cpu: u64,
    /// MiB that its instances may use.
    pub memory_mb: u64,
}

impl CloudBody {
    /// A cloud with what is counted for it, and what keeps it from running agents.
    pub fn of(cloud: &Cloud, counted: Counted, machine: Machine, lack: Option<Failure>) -> Self {
        Self {
            id: cloud.id.to_string(),
            name: cloud.name.clone(),
            display_name: cloud.display_name.clone(),
            region: cloud.region.clone(),
            status: if lack.is_some() { "provisioning" } else { "running" }.to_owned(),
            status_reason: lack
                .map(|Failure { code, message, .. }| CloudReasonBody { code, message }),
            provider: cloud.provider.as_str().to_owned(),
            is_default: cloud.is_default,
            capacity: CapacityBody { cpu: machine.cores, memory_mb: machine.memory_mb, gpu: 0 },
            allocated: CapacityBody { cpu: counted.cpu, memory_mb: counted.memory_mb, gpu: 0 },
            limits: CloudLimitsBody {
                max_agents: cloud.limits.max_agents,
                max_instances: cloud.limits.max_instances,
            },
            node_selector: cloud.node_selector.clone(),
            agent_count: counted.agents,
            metadata: cloud.metadata.clone(),
            created_at: cloud.created_at.to_string(),
            updated_at: cloud.updated_at.to_string(),
            livemode: cloud.tenant.mode.is_live(),
            etag: format!("\"{}\"", cloud.revision),
        }
    }
}
