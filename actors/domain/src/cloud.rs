//! Clouds: named pools that agents run in.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{
    CloudId, Rejection, Timestamp, account::Tenant, directory::Directory, event::DirectoryEvent,
};

/// What runs a cloud's agents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Provider {
    /// Supervised child processes.
    Process,
    /// A Docker engine.
    Docker,
    /// Child processes for test objects, with capped resources.
    Sandbox,
}

impl Provider {
    /// The word used in bodies.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Process => "process",
            Self::Docker => "docker",
            Self::Sandbox => "sandbox",
        }
    }
}

/// Most agents and instances a cloud takes; `None` is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CloudLimits {
    /// Agents.
    pub max_agents: Option<u32>,
    /// Instances of all agents together.
    pub max_instances: Option<u32>,
}

/// A named pool of nodes with one runtime.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cloud {
    /// Its id.
    pub id: CloudId,
    /// Whose it is.
    pub tenant: Tenant,
    /// Unique within the organization and mode, never changed.
    pub name: String,
    /// Shown to people.
    pub display_name: String,
    /// Free text, `local` by default.
    pub region: String,
    /// What runs its agents.
    pub provider: Provider,
    /// Whether it was made at first start.
    pub is_default: bool,
    /// Most agents and instances.
    pub limits: CloudLimits,
    /// Labels that a node must have.
    pub node_selector: BTreeMap<String, String>,
    /// The client's own notes.
    pub metadata: BTreeMap<String, String>,
    /// When it was made.
    pub created_at: Timestamp,
    /// When it was last changed.
    pub updated_at: Timestamp,
    /// Counts changes.
    pub revision: u64,
}

impl Cloud {
    /// What no other cloud may be called, however it is written.
    pub(crate) fn taken_name(&self) -> (Tenant, String) {
        (self.tenant, self.name.to_ascii_lowercase())
    }
}

/// A change of a cloud; `None` leaves a field as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CloudPatch {
    /// New display name.
    pub display_name: Option<String>,
    /// New limits.
    pub limits: Option<CloudLimits>,
    /// New selector.
    pub node_selector: Option<BTreeMap<String, String>>,
    /// Metadata to set (`Some`) and to remove (`None`).
    pub metadata: BTreeMap<String, Option<String>>,
}

pub(crate) fn create(state: &Directory, cloud: &Cloud) -> Result<Vec<DirectoryEvent>, Rejection> {
    if state.cloud_names.contains(&cloud.taken_name()) {
        return Err(Rejection::CloudNameTaken(cloud.name.clone()));
    }
    Ok(vec![DirectoryEvent::CloudPut(Box::new(cloud.clone()))])
}

pub(crate) fn update(
    state: &Directory,
    tenant: Tenant,
    id: CloudId,
    patch: &CloudPatch,
    if_match: Option<u64>,
    at: Timestamp,
) -> Result<Vec<DirectoryEvent>, Rejection> {
    let cloud = state.cloud(tenant, id)?;
    if if_match.is_some_and(|wanted| wanted != cloud.revision) {
        return Err(Rejection::StaleObject);
    }
    let mut cloud = Cloud::clone(&cloud);
    if let Some(name) = &patch.display_name {
        cloud.display_name.clone_from(name);
    }
    if let Some(limits) = patch.limits {
        cloud.limits = limits;
    }
    if let Some(selector) = &patch.node_selector {
        cloud.node_selector.clone_from(selector);
    }
    merge(&mut cloud.metadata, &patch.metadata);
    cloud.updated_at = at;
    cloud.revision += 1;
    Ok(vec![DirectoryEvent::CloudPut(Box::new(cloud))])
}

pub(crate) fn delete(
    state: &Directory,
    tenant: Tenant,
    id: CloudId,
) -> Result<Vec<DirectoryEvent>, Rejection> {
    state.cloud(tenant, id)?;
    let agents = state.agents_of(tenant).filter(|agent| agent.cloud_id == id).count();
    if agents > 0 {
        return Err(Rejection::CloudNotEmpty { cloud_id: id, agents });
    }
    Ok(vec![DirectoryEvent::CloudGone(id)])
}

/// Applies a merge patch (RFC 7396) to a map of texts.
pub fn merge<V: Clone>(map: &mut BTreeMap<String, V>, patch: &BTreeMap<String, Option<V>>) {
    for (key, value) in patch {
        match value {
            Some(value) => map.insert(key.clone(), value.clone()),
            None => map.remove(key),
        };
    }
}
