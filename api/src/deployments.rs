//! `/v1/agents/{id}/deployments` and `/versions`: how an agent came to be what it is.

use actors::ports::{Channel, LogQuery};
use domain::{
    AgentId, DeploymentId, Rejection,
    directory::{Command, Reply},
};
use poem::Request;
use poem_openapi::{
    OpenApi,
    param::{Path, Query},
    payload::Json,
};

use crate::{
    Handle,
    agents::{AgentAnswer, AgentsApi, agent_id},
    body::{
        deployment::{DeploymentBody, VersionBody},
        log::{LogLineBody, LogPage},
    },
    caller::Caller,
    cursor::{self, Cursor},
    envelope::{Page, Success},
    error::{ApiError, Problem, path_id},
    query,
    repeat::keyed,
};

pub(crate) struct DeploymentsApi(pub(crate) Handle);

type Result<T> = std::result::Result<Json<Success<T>>, ApiError>;

fn deployment_id(text: &str) -> std::result::Result<DeploymentId, Problem> {
    path_id("deployment", text)
}

#[OpenApi(prefix_path = "/v1", tag = "crate::document::Tag::Agents")]
impl DeploymentsApi {
    /// List an agent's deployments
    ///
    /// Newest first.
    #[oai(path = "/agents/:id/deployments", method = "get", operation_id = "listDeployments")]
    async fn list(
        &self,
        caller: Caller,
        /// The agent.
        id: Path<String>,
        /// Items of a page.
        #[oai(validator(minimum(value = "1"), maximum(value = "100")))]
        limit: Query<Option<u32>>,
        /// `next_cursor` of the page before.
        cursor: Query<Option<String>>,
    ) -> Result<Page<DeploymentBody>> {
        let (tenant, id) = (caller.tenant(), agent_id(&id)?);
        let filter = cursor::filter(&[&tenant, &id]);
        let key = &self.0.settings.signing_key;
        let after = cursor::read(key, cursor.0.as_deref(), &filter)?;
        let after: Option<DeploymentId> = after.and_then(|after| after.id.parse().ok());
        let directory = self.0.service.directory().await?.read();
        directory.agent(tenant, id)?;
        let mut rows: Vec<_> = directory
            .deployments_of(id)
            .filter(|row| after.is_none_or(|after| row.id < after))
            .collect();
        rows.reverse();
        let limit = limit.0.unwrap_or(query::LIMIT) as usize;
        let has_more = rows.len() > limit;
        rows.truncate(limit);
        let last = rows.last().filter(|_| has_more).map(|row| row.id.to_string());
        let next = last.map(|id| cursor::write(key, Cursor { key: String::new(), id }, &filter));
        let items = rows.into_iter().map(|row| DeploymentBody::from(&**row)).collect();
        Ok(Json(Success::of(Page { items, has_more, next_cursor: next })))
    }

    /// Get a deployment
    #[oai(
        path = "/agents/:id/deployments/:deployment_id",
        method = "get",
        operation_id = "getDeployment"
    )]
    async fn get(
        &self,
        caller: Caller,
        /// The agent.
        id: Path<String>,
        /// The deployment.
        #[oai(name = "deployment_id")]
        dep: Path<String>,
    ) -> Result<DeploymentBody> {
        let (agent, dep) = (agent_id(&id)?, deployment_id(&dep)?);
        let directory = self.0.service.directory().await?.read();
        directory.agent(caller.tenant(), agent)?;
        let row = directory.deployment(agent, dep).ok_or(Rejection::DeploymentNotFound(dep))?;
        Ok(Json(Success::of(DeploymentBody::from(&*row))))
    }

    /// Cancel a deployment
    ///
    /// A version that serves goes on serving.
    #[oai(
        path = "/agents/:id/deployments/:deployment_id/cancel",
        method = "post",
        operation_id = "cancelDeployment"
    )]
    async fn cancel(
        &self,
        caller: Caller,
        request: &Request,
        /// The agent.
        id: Path<String>,
        /// The deployment.
        #[oai(name = "deployment_id")]
        dep: Path<String>,
    ) -> Result<DeploymentBody> {
        let (tenant, agent, id) = (caller.tenant(), agent_id(&id)?, deployment_id(&dep)?);
        let key = keyed(request, tenant, None)?;
        let command = Command::CancelDeployment { tenant, agent, id };
        let reply = self.0.service.change(command, key).await?.value;
        let Reply::Deployment(row) = reply else { return Err(Problem::internal().into()) };
        Ok(Json(Success::of(DeploymentBody::from(&*row))))
    }

    /// Roll back to a deployment
    ///
    /// As rolling back to the version that this deployment brought; one that
    /// never served brought none.
    #[oai(
        path = "/agents/:id/deployments/:deployment_id/rollback",
        method = "post",
        operation_id = "rollbackToDeployment"
    )]
    async fn rollback(
        &self,
        caller: Caller,
        request: &Request,
        /// The agent.
        id: Path<String>,
        /// The deployment.
        #[oai(name = "deployment_id")]
        dep: Path<String>,
    ) -> std::result::Result<AgentAnswer, ApiError> {
        let (tenant, id, dep) = (caller.tenant(), agent_id(&id)?, deployment_id(&dep)?);
        let key = keyed(request, tenant, None)?;
        let version = self.brought(&caller, id, dep).await?;
        let deployment = self.0.service.world.mint(DeploymentId::new);
        let command = Command::RollbackAgent { tenant, id, version, deployment };
        AgentsApi(self.0.clone()).change(command, key).await
    }

    /// Get a deployment's build log
    ///
    /// Oldest first.
    #[oai(
        path = "/agents/:id/deployments/:deployment_id/logs",
        method = "get",
        operation_id = "getDeploymentLogs"
    )]
    async fn logs(
        &self,
        caller: Caller,
        /// The agent.
        id: Path<String>,
        /// The deployment.
        #[oai(name = "deployment_id")]
        dep: Path<String>,
        /// Lines of a page; default 1000.
        #[oai(validator(minimum(value = "1"), maximum(value = "5000")))]
        limit: Query<Option<u32>>,
        /// `next_cursor` of the page before.
        cursor: Query<Option<String>>,
    ) -> Result<LogPage> {
        let (agent, dep) = (agent_id(&id)?, deployment_id(&dep)?);
        self.known(&caller, agent, dep).await?;
        let query = LogQuery {
            deployment_id: Some(dep),
            channels: vec![Channel::Build],
            after: crate::logs::after(cursor.0.as_deref())?,
            limit: limit.0.unwrap_or(1000) as usize,
            from_start: true,
            ..LogQuery::default()
        };
        let (lines, has_more) = self.0.service.logs(agent, query).await;
        let items: Vec<_> = lines.iter().map(|(node, line)| LogLineBody::of(line, *node)).collect();
        let next_cursor = items.last().map(|line| line.id.clone());
        Ok(Json(Success::of(LogPage { items, has_more, next_cursor })))
    }

    /// List an agent's versions
    ///
    /// Newest first; the last ten are kept.
    #[oai(path = "/agents/:id/versions", method = "get", operation_id = "listVersions")]
    async fn versions(
        &self,
        caller: Caller,
        /// The agent.
        id: Path<String>,
    ) -> Result<Page<VersionBody>> {
        let id = agent_id(&id)?;
        let directory = self.0.service.directory().await?.read();
        let agent = directory.agent(caller.tenant(), id)?;
        let mut items: Vec<_> =
            directory.versions_of(id).map(|row| VersionBody::of(row, agent.version)).collect();
        items.reverse();
        Ok(Json(Success::of(Page { items, has_more: false, next_cursor: None })))
    }
}

impl DeploymentsApi {
    /// The version that a deployment brought into service.
    async fn brought(
        &self,
        caller: &Caller,
        agent: AgentId,
        id: DeploymentId,
    ) -> std::result::Result<u64, ApiError> {
        let directory = self.0.service.directory().await?.read();
        directory.agent(caller.tenant(), agent)?;
        let row = directory.deployment(agent, id).ok_or(Rejection::DeploymentNotFound(id))?;
        let brought = directory.versions_of(agent).find(|version| version.deployment_id == id);
        let never = || Rejection::InvalidState {
            current: row.status.as_str().to_owned(),
            allowed: vec!["live".to_owned(), "superseded".to_owned()],
        };
        Ok(brought.ok_or_else(never)?.number)
    }

    async fn known(
        &self,
        caller: &Caller,
        agent: AgentId,
        id: DeploymentId,
    ) -> std::result::Result<(), ApiError> {
        let directory = self.0.service.directory().await?.read();
        directory.agent(caller.tenant(), agent)?;
        directory.deployment(agent, id).ok_or(Rejection::DeploymentNotFound(id))?;
        Ok(())
    }
}
