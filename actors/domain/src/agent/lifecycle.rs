//! Who may move where at a client's word: deploy, start, stop, redeploy, roll back, update, delete.
//!
//! Each function reads the directory and answers with events, in the order of `decisions` §5.

use std::{collections::BTreeMap, sync::Arc};

use serde::{Deserialize, Serialize};

use super::{Agent, AgentPatch, Desired, RuntimeSpec, Source, Status, Variable};
use crate::{
    AgentId, DeploymentId, Rejection, Timestamp,
    account::Tenant,
    cloud::merge,
    deployment::{Deployment, DeploymentStatus, Image, Spec, Strategy, Trigger},
    directory::Directory,
    event::DirectoryEvent as Event,
    limits::{ENVIRONMENT_MAX, METADATA_KEYS_MAX},
};

type Events = Result<Vec<Event>, Rejection>;

/// What a redeployment may say; all of it is optional.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Redeploy {
    /// Another source from now on.
    pub source: Option<Source>,
    /// How the new version takes over.
    pub strategy: Strategy,
    /// Build without caches.
    pub no_cache: bool,
}

pub(crate) fn create(state: &Directory, agent: &Agent) -> Events {
    let cloud = state.cloud(agent.tenant, agent.cloud_id)?;
    if state.names.contains(&Agent::name_key(agent.cloud_id, &agent.name)) {
        return Err(Rejection::AgentNameTaken(agent.name.clone()));
    }
    if let Some(max) = cloud.limits.max_agents {
        let agents = state.agents_of(agent.tenant).filter(|a| a.cloud_id == cloud.id).count();
        if agents >= max as usize {
            return Err(Rejection::CloudFull { max });
        }
    }
    if let Some(max) = state.tier(agent.tenant.org).agents_max()
        && state.agents_of(agent.tenant).count() >= max
    {
        return Err(Rejection::QuotaExceeded { what: "agents".to_owned(), max: max as u64 });
    }
    let deployment = Wish::new(Trigger::Create).of(agent, agent.deployment, agent.created_at);
    Ok(vec![
        Event::AgentCreated(Arc::new(agent.clone())),
        Event::DeploymentQueued(Box::new(deployment)),
    ])
}

pub(crate) fn update(
    state: &Directory,
    (tenant, id): (Tenant, AgentId),
    patch: &AgentPatch,
    if_match: Option<u64>,
    deployment: DeploymentId,
    at: Timestamp,
) -> Events {
    let before = state.agent(tenant, id)?;
    if if_match.is_some_and(|wanted| wanted != before.revision) {
        return Err(Rejection::StaleObject);
    }
    let mut agent = Agent::clone(&before);
    patched(&mut agent, patch);
    if agent == *before {
        return Ok(vec![]);
    }
    has_room("metadata", before.metadata.len(), agent.metadata.len(), METADATA_KEYS_MAX)?;
    let variables = (before.spec.environment.len(), agent.spec.environment.len());
    has_room("environment", variables.0, variables.1, ENVIRONMENT_MAX)?;
    agent.updated_at = at;
    agent.revision += 1;
    let respec = agent.spec != before.spec;
    let agent = Arc::new(agent);
    let mut events = vec![Event::AgentUpdated(Arc::clone(&agent))];
    let is_up = agent.desired == Desired::Run && agent.status != Status::Failed;
    if respec && is_up {
        let image = reusable_image(state, &agent);
        let wish = Wish { image, ..Wish::new(Trigger::Update) };
        events.extend(deploy(state, &agent, wish.of(&agent, deployment, at), at));
    }
    Ok(events)
}

/// Whoever changes it does not have to know what is there.
fn has_room(field: &str, before: usize, after: usize, max: usize) -> Result<(), Rejection> {
    if after <= before || after <= max {
        return Ok(());
    }
    Err(Rejection::TooManyMembers { field: field.to_owned(), max })
}

fn patched(agent: &mut Agent, patch: &AgentPatch) {
    let AgentPatch { display_name, source, runtime, resources, scaling, environment, metadata } =
        patch;
    set(&mut agent.display_name, display_name);
    set(&mut agent.spec.source, source);
    set(&mut agent.spec.runtime, runtime);
    set(&mut agent.spec.resources, resources);
    set(&mut agent.scaling, scaling);
    let known: BTreeMap<_, _> = environment
        .iter()
        .filter(|(_, value)| **value != Some(Variable::Unchanged))
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect();
    merge(&mut agent.spec.environment, &known);
    merge(&mut agent.metadata, metadata);
}

fn set<T: Clone>(field: &mut T, value: &Option<T>) {
    if let Some(value) = value {
        field.clone_from(value);
    }
}

pub(crate) fn start(
    state: &Directory,
    (tenant, id): (Tenant, AgentId),
    deployment: DeploymentId,
    at: Timestamp,
) -> Events {
    let agent = state.agent(tenant, id)?;
    match agent.status {
        // Starting twice is starting once: a client may retry without harm.
        Status::Running if agent.desired == Desired::Run => Ok(vec![]),
        Status::Running => Ok(vec![Event::AgentDesired { id, desired: Desired::Run, at }]),
        Status::Stopped => bring_up(state, &agent, deployment, at),
        Status::Failed if reusable_image(state, &agent).is_some() => {
            bring_up(state, &agent, deployment, at)
        }
        Status::Failed | Status::Created | Status::Building | Status::Deploying => {
            Err(invalid(&agent, &[Status::Stopped]))
        }
    }
}

/// Up again: the version that served if nothing changed since, else a new one.
fn bring_up(state: &Directory, agent: &Agent, id: DeploymentId, at: Timestamp) -> Events {
    let served = agent.version.and_then(|number| state.version(agent.id, number));
    let wish = match served {
        Some(version) if version.spec == agent.spec => Wish {
            image: Some(version.image.clone()),
            version: Some(version.number),
            ..Wish::new(Trigger::Start)
        },
        _ => Wish { image: reusable_image(state, agent), ..Wish::new(Trigger::Start) },
    };
    Ok(deploy(state, agent, wish.of(agent, id, at), at))
}

/// The image that the agent's present source and runtime were last built to.
fn reusable_image(state: &Directory, agent: &Agent) -> Option<Image> {
    let served = agent.version.and_then(|number| state.version(agent.id, number));
    match served {
        Some(version) if version.spec.same_image(&agent.spec) => Some(version.image.clone()),
        _ => last_image(state, agent),
    }
}

fn last_image(state: &Directory, agent: &Agent) -> Option<Image> {
    let last = state.deployment(agent.id, agent.deployment)?;
    last.image.clone().filter(|_| last.spec.same_image(&agent.spec))
}

pub(crate) fn stop(state: &Directory, (tenant, id): (Tenant, AgentId), at: Timestamp) -> Events {
    let agent = state.agent(tenant, id)?;
    let ended = match agent.status {
        Status::Stopped => return Ok(vec![]),
        Status::Failed => {
            let allowed = [Status::Created, Status::Building, Status::Deploying, Status::Running];
            return Err(invalid(&agent, &allowed));
        }
        // Stopped is said when the last instance is gone.
        Status::Running if agent.desired == Desired::Stop => return Ok(vec![]),
        Status::Running => None,
        Status::Created | Status::Building | Status::Deploying => {
            Some(Event::AgentMoved { id, to: Status::Stopped, reason: Some(stopped(at)), at })
        }
    };
    let mut events = vec![Event::AgentDesired { id, desired: Desired::Stop, at }];
    events.extend(call_off(state, &agent, DeploymentStatus::Canceled, at));
    events.extend(ended);
    Ok(events)
}

pub(crate) fn stopped(at: Timestamp) -> super::StatusReason {
    super::StatusReason {
        code: "STOPPED".to_owned(),
        message: "the agent was stopped; start it to serve again".to_owned(),
        since: at,
    }
}

pub(crate) fn redeploy(
    state: &Directory,
    (tenant, id): (Tenant, AgentId),
    asked: &Redeploy,
    deployment: DeploymentId,
    at: Timestamp,
) -> Events {
    let mut agent = Agent::clone(&*state.agent(tenant, id)?);
    let mut events = vec![];
    if let Some(source) = asked.source.as_ref().filter(|source| **source != agent.spec.source) {
        agent.spec.source = source.clone();
        agent.updated_at = at;
        agent.revision += 1;
        events.push(Event::AgentUpdated(Arc::new(agent.clone())));
    }
    let wish =
        Wish { strategy: asked.strategy, no_cache: asked.no_cache, ..Wish::new(Trigger::Redeploy) };
    events.extend(deploy(state, &agent, wish.of(&agent, deployment, at), at));
    Ok(events)
}

pub(crate) fn rollback(
    state: &Directory,
    (tenant, id): (Tenant, AgentId),
    number: u64,
    deployment: DeploymentId,
    at: Timestamp,
) -> Events {
    let agent = state.agent(tenant, id)?;
    let under_way = |id| state.deployment(agent.id, id).is_some_and(|d| d.status.is_active());
    if under_way(agent.deployment) {
        return Err(Rejection::DeploymentInProgress);
    }
    let version = state.version(id, number).ok_or(Rejection::VersionNotFound(number))?;
    if agent.is_serving() && agent.version == Some(number) {
        return Ok(vec![]);
    }
    let wish = Wish {
        image: Some(version.image.clone()),
        version: Some(number),
        ..Wish::new(Trigger::Rollback)
    };
    let mut agent = Agent::clone(&agent);
    let mut events = Vec::from_iter(agent.take_spec(&version.spec, at));
    events.extend(deploy(state, &agent, wish.of(&agent, deployment, at), at));
    Ok(events)
}

pub(crate) fn delete(state: &Directory, (tenant, id): (Tenant, AgentId), at: Timestamp) -> Events {
    let agent = state.agent(tenant, id)?;
    let mut events = call_off(state, &agent, DeploymentStatus::Canceled, at);
    events.push(Event::AgentDeleted { id, at });
    Ok(events)
}

/// What is wanted of a new deployment besides the agent's own record.
struct Wish {
    trigger: Trigger,
    strategy: Strategy,
    no_cache: bool,
    image: Option<Image>,
    version: Option<u64>,
}

impl Wish {
    fn new(trigger: Trigger) -> Self {
        Self { trigger, strategy: Strategy::Rolling, no_cache: false, image: None, version: None }
    }

    fn of(self, agent: &Agent, id: DeploymentId, at: Timestamp) -> Deployment {
        Deployment {
            id,
            agent_id: agent.id,
            tenant: agent.tenant,
            version: self.version.unwrap_or(agent.latest_version + 1),
            status: DeploymentStatus::Queued,
            trigger: self.trigger,
            strategy: self.strategy,
            no_cache: self.no_cache,
            spec: agent.spec.clone(),
            image: self.image,
            error: None,
            created_at: at,
            build_started_at: None,
            rollout_started_at: None,
            finished_at: None,
        }
    }
}

/// Puts a deployment on its way: at once, or behind one whose instances are starting already. One
/// that only waits or builds gives way.
fn deploy(state: &Directory, agent: &Agent, new: Deployment, at: Timestamp) -> Vec<Event> {
    let id = agent.id;
    let current = state.deployment(id, agent.deployment).map(|current| current.status);
    let busy = matches!(current, Some(DeploymentStatus::Deploying | DeploymentStatus::Verifying));
    let mut events = vec![];
    if agent.desired != Desired::Run {
        events.push(Event::AgentDesired { id, desired: Desired::Run, at });
    }
    if busy {
        if let Some(older) = agent.waiting {
            events.push(moved(id, older, DeploymentStatus::Superseded, at));
        }
        events.push(Event::DeploymentWaits(Box::new(new)));
        return events;
    }
    events.extend(call_off(state, agent, DeploymentStatus::Superseded, at));
    let to = match (agent.status, &new.image) {
        (Status::Running | Status::Created, _) => None,
        (_, Some(_)) => Some(Status::Deploying),
        (_, None) => Some(Status::Building),
    };
    events.push(Event::DeploymentQueued(Box::new(new)));
    events.extend(to.filter(|to| *to != agent.status).map(|to| {
        let reason = Some(on_its_way(at));
        Event::AgentMoved { id, to, reason, at }
    }));
    events
}

pub(crate) fn on_its_way(at: Timestamp) -> super::StatusReason {
    super::StatusReason {
        code: "DEPLOYING".to_owned(),
        message: "a deployment is on its way".to_owned(),
        since: at,
    }
}

/// Ends whatever deployment is still on its way.
fn call_off(state: &Directory, agent: &Agent, to: DeploymentStatus, at: Timestamp) -> Vec<Event> {
    [agent.waiting, Some(agent.deployment)]
        .into_iter()
        .flatten()
        .filter(|id| state.deployment(agent.id, *id).is_some_and(|d| d.status.is_active()))
        .map(|id| moved(agent.id, id, to, at))
        .collect()
}

pub(crate) fn moved(
    agent_id: AgentId,
    id: DeploymentId,
    to: DeploymentStatus,
    at: Timestamp,
) -> Event {
    Event::DeploymentMoved { agent_id, id, to, error: None, at }
}

fn invalid(agent: &Agent, allowed: &[Status]) -> Rejection {
    Rejection::InvalidState {
        current: agent.status.as_str().to_owned(),
        allowed: allowed.iter().map(|status| status.as_str().to_owned()).collect(),
    }
}

/// What the next version would freeze if the agent had this source.
pub fn spec(
    source: Source,
    runtime: RuntimeSpec,
    resources: super::Resources,
    environment: BTreeMap<String, Variable>,
) -> Spec {
    Spec { source, runtime, resources, environment }
}
