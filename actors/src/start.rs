//! Starting, draining and ending the instances that the directory has placed on this node, for
//! whoever owns their agent. What an instance is started with is read from this node's own copy of
//! the directory, so no secret travels.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use domain::{
    AgentId, CloudId, InstanceId,
    account::Tenant,
    agent::Variable,
    cloud::Provider,
    deployment::Failure,
    instance::Instance,
    secret::{self, Secret},
};
use tokio::time::Instant;

use crate::{
    agent::sealed_place,
    ask::Told,
    instance::{self, InstanceMessage},
    ports::StartRequest,
    root::Thing,
    world::World,
};

/// How long the row of an instance may take to arrive here.
const ROW_ARRIVES_WITHIN: Duration = Duration::from_secs(4);

impl World {
    /// Starts an instance whose row says that it belongs here. One that is here already stays.
    pub async fn start(self: &Arc<Self>, agent: AgentId, id: InstanceId, adopt: bool) -> Told {
        if self.watch.instances.get(id).is_some() {
            return Told::Done;
        }
        let Some(row) = self.row(agent, id).await else { return Told::Unknown };
        let Some(root) = self.watch.root() else { return Told::Busy };
        let request = match self.start_request(&row) {
            Ok(request) => StartRequest { adopt, ..request },
            Err(failure) => {
                tracing::warn!(%agent, instance = %id, message = failure.message, "no start");
                return Told::Unknown;
            }
        };
        match instance::start(self, request, root).await {
            Ok(()) => Told::Done,
            Err(error) => {
                tracing::warn!(%agent, instance = %id, %error, "an instance's actor did not start");
                Told::Busy
            }
        }
    }

    /// The row of an instance of this node, once it has arrived.
    async fn row(&self, agent: AgentId, id: InstanceId) -> Option<Instance> {
        let until = Instant::now() + ROW_ARRIVES_WITHIN;
        loop {
            let change = self.watch.subscribe(Thing::Agent(agent));
            let changed = change.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if let Some(row) = self.directory().read().instance(agent, id) {
                return Some(Instance::clone(&row)).filter(|row| row.node_id == self.node_id);
            }
            tokio::time::timeout_at(until, changed).await.ok()?;
        }
    }

    /// What an instance is started with.
    pub fn start_request(&self, row: &Instance) -> Result<StartRequest, Failure> {
        let lost = |what: &str| Failure::new("INTERNAL_ERROR", format!("{what} is gone"));
        let (provider, spec, image, tenant, cloud) = {
            let directory = self.directory().read();
            let agent = directory.agents.get(&row.agent_id).ok_or_else(|| lost("the agent"))?;
            let cloud = directory.clouds.get(&agent.cloud_id);
            let (tenant, cloud_id) = (agent.tenant, agent.cloud_id);
            let provider: Provider = cloud.ok_or_else(|| lost("the agent's cloud"))?.provider;
            let deployment = directory.deployment(row.agent_id, row.deployment_id);
            let version = directory.version(row.agent_id, row.version);
            let from_deployment = deployment.map(|d| (d.spec.clone(), d.image.clone()));
            let from_version = version.map(|v| (v.spec.clone(), Some(v.image.clone())));
            let (spec, image) =
                from_deployment.or(from_version).ok_or_else(|| lost("the deployment"))?;
            (provider, spec, image, tenant, cloud_id)
        };
        let image = image.ok_or_else(|| lost("the image"))?;
        let mut environment = self.opened(row.agent_id, (tenant, cloud), &spec.environment)?;
        environment.insert("ROOST_AGENT_ID".to_owned(), row.agent_id.to_string());
        environment.insert("ROOST_INSTANCE_ID".to_owned(), row.id.to_string());
        environment.insert("ROOST_VERSION".to_owned(), row.version.to_string());
        Ok(StartRequest {
            agent_id: row.agent_id,
            instance_id: row.id,
            version: row.version,
            provider,
            image,
            resources: spec.resources,
            environment,
            adopt: false,
        })
    }

    fn opened(
        &self,
        agent: AgentId,
        owner: (Tenant, CloudId),
        variables: &BTreeMap<String, Variable>,
    ) -> Result<BTreeMap<String, String>, Failure> {
        let unseal = |sealed: &[u8], name: &str| {
            let sealer = self.opener(owner.0.org);
            let plain = sealer.and_then(|one| one.open(sealed, &sealed_place(agent, name)));
            plain.map_err(|error| {
                Failure::new("INTERNAL_ERROR", format!("{error}; set {name} again"))
            })
        };
        let open = |name: &str, value: &Variable| match value {
            Variable::Plain(text) => Ok(text.clone()),
            Variable::Unchanged => Ok(String::new()),
            Variable::Sealed(sealed) => unseal(sealed, name).map(|plain| plain.to_string()),
            Variable::Template(sealed) => self.resolved(owner, &unseal(sealed, name)?),
        };
        variables.iter().map(|(name, value)| Ok((name.clone(), open(name, value)?))).collect()
    }

    /// A text with its references to secrets replaced by their newest values.
    pub fn resolved(
        &self,
        (tenant, cloud): (Tenant, CloudId),
        text: &str,
    ) -> Result<String, Failure> {
        let value = |name: &str| {
            let row = self.directory().read().secret(tenant, cloud, name)?;
            let place = Secret::place(row.tenant, row.cloud_id, &row.name);
            let plain = self.opener(tenant.org).and_then(|sealer| sealer.open(&row.sealed, &place));
            plain.ok().map(|plain| plain.to_string())
        };
        secret::resolve(text, value).map_err(|name| {
            let message = format!("the secret {name} is gone; set it with PUT /v1/secrets/{name}");
            Failure::new("SECRET_NOT_FOUND", message)
        })
    }

    /// Lets an instance of this node finish its calls, then ends it.
    pub fn drain(&self, id: InstanceId, timeout: Duration) -> Told {
        let Some(handle) = self.watch.instances.get(id) else { return Told::Unknown };
        let _ = handle.actor.cast(InstanceMessage::Drain(timeout));
        handle.mark_draining();
        Told::Done
    }
}
