//! What the owner's actor reports: builds, rollouts, instances. A report that comes too late is no
//! error: the agent was asked for something else, and nothing happens.

use super::{Desired, Status, lifecycle};
use crate::{
    AgentId, DeploymentId, InstanceId, Rejection, Timestamp,
    account::Tenant,
    deployment::{Deployment, DeploymentStatus, Failure, Image, Trigger, Version},
    directory::Directory,
    event::DirectoryEvent as Event,
    instance::{Instance, InstanceStatus},
};

type Events = Vec<Event>;

fn active(
    state: &Directory,
    agent: AgentId,
    id: DeploymentId,
) -> Option<std::sync::Arc<Deployment>> {
    state.deployment(agent, id).filter(|deployment| deployment.status.is_active())
}

impl Directory {
    fn builds_max(&self, agent: AgentId) -> usize {
        let agent = self.agents.get(&agent);
        agent.map_or(usize::MAX, |agent| self.tier(agent.tenant.org).builds_max())
    }

    /// Whether the organization of an agent may have one more build under way.
    pub fn has_room_to_build(&self, agent: AgentId) -> bool {
        let Some(tenant) = self.agents.get(&agent).map(|agent| agent.tenant) else { return true };
        self.building.get(&tenant).is_none_or(|builds| builds.len() < self.builds_max(agent))
    }
}

/// A builder has taken the deployment, if its organization has not too many builds under way.
pub(crate) fn begin_build(
    state: &Directory,
    agent_id: AgentId,
    id: DeploymentId,
    at: Timestamp,
) -> Result<Events, Rejection> {
    let Some(deployment) = active(state, agent_id, id) else { return Ok(vec![]) };
    if deployment.status != DeploymentStatus::Queued {
        return Ok(vec![]);
    }
    if !state.has_room_to_build(agent_id) {
        let what = "builds under way".to_owned();
        return Err(Rejection::QuotaExceeded { what, max: state.builds_max(agent_id) as u64 });
    }
    let mut events = vec![lifecycle::moved(agent_id, id, DeploymentStatus::Building, at)];
    events.extend(follow(state, agent_id, Status::Building, at));
    Ok(events)
}

/// There is an image: instances may start.
pub(crate) fn begin_rollout(
    state: &Directory,
    agent_id: AgentId,
    id: DeploymentId,
    image: Option<&Image>,
    at: Timestamp,
) -> Events {
    let Some(deployment) = active(state, agent_id, id) else { return vec![] };
    match deployment.status {
        DeploymentStatus::Queued | DeploymentStatus::Building => {}
        DeploymentStatus::Deploying
        | DeploymentStatus::Verifying
        | DeploymentStatus::Live
        | DeploymentStatus::Superseded
        | DeploymentStatus::Failed
        | DeploymentStatus::Canceled => return vec![],
    }
    let mut events = vec![];
    if let Some(image) = image {
        events.push(Event::ImageBuilt { agent_id, id, image: Box::new(image.clone()) });
    }
    events.push(lifecycle::moved(agent_id, id, DeploymentStatus::Deploying, at));
    events.extend(follow(state, agent_id, Status::Deploying, at));
    events
}

/// An agent without a serving version shows how far its deployment is.
fn follow(state: &Directory, id: AgentId, to: Status, at: Timestamp) -> Option<Event> {
    let agent = state.agents.get(&id)?;
    match agent.status {
        Status::Running => None,
        now if now == to => None,
        Status::Created
        | Status::Building
        | Status::Deploying
        | Status::Stopped
        | Status::Failed => {
            Some(Event::AgentMoved { id, to, reason: Some(lifecycle::on_its_way(at)), at })
        }
    }
}

/// The first new instance answers beside a live version: it is watched before it takes over.
pub(crate) fn verify(state: &Directory, agent: AgentId, id: DeploymentId, at: Timestamp) -> Events {
    active(state, agent, id)
        .filter(|deployment| deployment.status == DeploymentStatus::Deploying)
        .map(|_| lifecycle::moved(agent, id, DeploymentStatus::Verifying, at))
        .into_iter()
        .collect()
}

/// The new version serves.
pub(crate) fn promote(
    state: &Directory,
    agent_id: AgentId,
    id: DeploymentId,
    at: Timestamp,
) -> Events {
    let (Some(agent), Some(deployment)) =
        (state.agents.get(&agent_id), active(state, agent_id, id))
    else {
        return vec![];
    };
    let Some(image) = deployment.image.clone() else { return vec![] };
    let before = state.version(agent_id, deployment.version);
    let again =
        matches!(deployment.trigger, Trigger::Start | Trigger::Rollback) && before.is_some();
    let version = match before.filter(|_| again) {
        Some(version) => Version::clone(&version),
        None => Version {
            number: deployment.version,
            deployment_id: id,
            spec: deployment.spec.clone(),
            image,
            created_at: at,
        },
    };
    let mut events = vec![];
    if let Some(old) = agent.live_deployment.filter(|old| *old != id) {
        events.push(lifecycle::moved(agent_id, old, DeploymentStatus::Superseded, at));
    }
    events.push(lifecycle::moved(agent_id, id, DeploymentStatus::Live, at));
    events.push(Event::VersionLive { agent_id, version: Box::new(version), again, at });
    if agent.status != Status::Running {
        events.push(Event::AgentMoved { id: agent_id, to: Status::Running, reason: None, at });
    }
    events.extend(unblock(state, agent_id));
    events
}

/// The deployment did not come up. A live version goes on serving.
pub(crate) fn fail(
    state: &Directory,
    agent_id: AgentId,
    id: DeploymentId,
    failure: &Failure,
    at: Timestamp,
) -> Events {
    end(state, agent_id, id, DeploymentStatus::Failed, failure, at)
}

fn end(
    state: &Directory,
    agent_id: AgentId,
    id: DeploymentId,
    to: DeploymentStatus,
    failure: &Failure,
    at: Timestamp,
) -> Events {
    let Some(agent) = state.agents.get(&agent_id) else { return vec![] };
    if active(state, agent_id, id).is_none() {
        return vec![];
    }
    let error = Some(failure.clone());
    let mut events = vec![Event::DeploymentMoved { agent_id, id, to, error, at }];
    let next = if agent.waiting == Some(id) { None } else { unblock(state, agent_id) };
    let falls = agent.deployment == id && agent.status != Status::Running && next.is_none();
    if falls && agent.desired == Desired::Run {
        let reason = Some(super::reason(failure, at));
        events.push(Event::AgentMoved { id: agent_id, to: Status::Failed, reason, at });
    }
    if next.is_none() && agent.status == Status::Running {
        events.extend(revert(state, &agent, at));
    }
    events.extend(next);
    events
}

/// What was tried and did not come up is dropped: the record says again what serves.
fn revert(state: &Directory, agent: &super::Agent, at: Timestamp) -> Option<Event> {
    let serving = state.version(agent.id, agent.version?)?;
    agent.clone().take_spec(&serving.spec, at)
}

/// Somebody calls the deployment off.
pub(crate) fn cancel(
    state: &Directory,
    (tenant, agent_id): (Tenant, AgentId),
    id: DeploymentId,
    at: Timestamp,
) -> Result<Events, Rejection> {
    state.agent(tenant, agent_id)?;
    let deployment = state.deployment(agent_id, id).ok_or(Rejection::DeploymentNotFound(id))?;
    if !deployment.status.is_active() {
        return Err(Rejection::InvalidState {
            current: deployment.status.as_str().to_owned(),
            allowed: ["queued", "building", "deploying", "verifying"].map(str::to_owned).to_vec(),
        });
    }
    let failure =
        Failure::new("DEPLOY_CANCELED", "the deployment was canceled; redeploy to try again");
    Ok(end(state, agent_id, id, DeploymentStatus::Canceled, &failure, at))
}

fn unblock(state: &Directory, agent_id: AgentId) -> Option<Event> {
    let agent = state.agents.get(&agent_id)?;
    agent.waiting.map(|_| Event::DeploymentUnblocked { agent_id })
}

/// All instances were lost, or they end as fast as they start.
pub(crate) fn fail_agent(
    state: &Directory,
    id: AgentId,
    failure: &Failure,
    at: Timestamp,
) -> Events {
    match state.agents.get(&id) {
        Some(agent) if agent.is_serving() => {
            let reason = Some(super::reason(failure, at));
            vec![Event::AgentMoved { id, to: Status::Failed, reason, at }]
        }
        _ => vec![],
    }
}

/// The last instance of a stopping agent is gone.
pub(crate) fn report_stopped(state: &Directory, id: AgentId, at: Timestamp) -> Events {
    match state.agents.get(&id) {
        Some(agent) if agent.desired == Desired::Stop && agent.status == Status::Running => {
            let reason = Some(lifecycle::stopped(at));
            vec![Event::AgentMoved { id, to: Status::Stopped, reason, at }]
        }
        _ => vec![],
    }
}

/// The health of a serving agent, if it is another one than was told last.
pub(crate) fn report_health(
    state: &Directory,
    agent_id: AgentId,
    now: &str,
    reason: &str,
    instance: Option<InstanceId>,
    at: Timestamp,
) -> Events {
    let is_serving = state.agents.get(&agent_id).is_some_and(|agent| agent.is_serving());
    let known = state.health.get(&agent_id).map(|known| String::clone(&known));
    let before = known.unwrap_or_else(|| "healthy".to_owned());
    if !is_serving || before == now {
        return vec![];
    }
    let (now, reason) = (now.to_owned(), reason.to_owned());
    vec![Event::HealthChanged { agent_id, before, now, reason, instance, at }]
}

/// A deleted agent has nothing left.
pub(crate) fn forget(state: &Directory, id: AgentId) -> Events {
    match state.agents.get(&id) {
        Some(agent) if agent.desired == Desired::Delete => vec![Event::AgentGone(id)],
        _ => vec![],
    }
}

/// Instances get their places. Only those of a version that serves or is coming up do.
pub(crate) fn place(state: &Directory, instances: &[Instance]) -> Events {
    let due = instances.iter().filter(|row| is_due(state, row));
    due.map(|row| Event::InstancePlaced(Box::new(row.clone()))).collect()
}

fn is_due(state: &Directory, row: &Instance) -> bool {
    state.agents.get(&row.agent_id).is_some_and(|agent| {
        let coming = active(state, agent.id, row.deployment_id).is_some();
        let serving = agent.is_serving() && agent.version == Some(row.version);
        agent.desired == Desired::Run && (coming || serving)
    })
}

/// An instance moved.
pub(crate) fn report_instance(
    state: &Directory,
    (agent_id, id): (AgentId, InstanceId),
    to: InstanceStatus,
    isolation: Option<&Vec<String>>,
    at: Timestamp,
) -> Events {
    match state.instance(agent_id, id) {
        Some(row) if row.status != to && row.status != InstanceStatus::Draining => {
            vec![Event::InstanceMoved { agent_id, id, to, isolation: isolation.cloned(), at }]
        }
        _ => vec![],
    }
}

/// An instance is gone.
pub(crate) fn remove_instance(state: &Directory, agent_id: AgentId, id: InstanceId) -> Events {
    state.instance(agent_id, id).map(|_| Event::InstanceGone { agent_id, id }).into_iter().collect()
}
