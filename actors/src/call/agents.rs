//! Agents: waiting for one to get somewhere.

use std::{sync::Arc, time::Duration};

use domain::{
    AgentId,
    account::Tenant,
    agent::{Agent, Status},
    directory::AgentView,
};
use tokio::time::Instant;

use super::{Service, ServiceError};
use crate::root::Thing;

impl Service {
    /// An agent as it is now.
    pub async fn agent(&self, tenant: Tenant, id: AgentId) -> Result<AgentView, ServiceError> {
        let directory = self.directory().await?.read();
        let agent = directory.agent(tenant, id)?;
        Ok(directory.view(&agent))
    }

    /// An agent as this node has it; it may have changed since.
    pub fn known_agent(&self, tenant: Tenant, id: AgentId) -> Option<Arc<Agent>> {
        self.world.directory().read().agent(tenant, id).ok()
    }

    /// An agent once it has one of these states, or as it is when the time is up.
    pub async fn agent_in(
        &self,
        tenant: Tenant,
        id: AgentId,
        wanted: &[Status],
        timeout: Duration,
    ) -> Result<AgentView, ServiceError> {
        let until = Instant::now() + timeout;
        loop {
            let change = self.world.watch.subscribe(Thing::Agent(id));
            let changed = change.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let view = self.agent(tenant, id).await?;
            if wanted.contains(&view.agent.status) {
                return Ok(view);
            }
            if tokio::time::timeout_at(until, changed).await.is_err() {
                return Ok(view);
            }
        }
    }
}
