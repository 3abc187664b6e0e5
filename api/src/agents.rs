//! `/v1/agents`: deploy, look, change, start, stop, redeploy, roll back, delete.

use std::{collections::BTreeMap, time::Duration};

use domain::{
    AgentId, CloudId, DeploymentId, Rejection, Timestamp, UploadId,
    account::Tenant,
    agent::{
        Agent, AgentPatch, Credentials, Desired, Resources, Scaling, Source, Status, Variable,
        environment::MASK, lifecycle::Redeploy,
    },
    cloud::Provider,
    deployment::{Spec, Strategy},
    directory::{AgentView, Command, Directory, Reply},
    limits::METADATA_KEYS_MAX,
};
use poem::Request;
use poem_openapi::{
    ApiResponse, OpenApi,
    param::{Path, Query},
    payload::Json,
};

use actors::{agent::sealed_place, call::AgentFigures, seal::Sealer};

use crate::{
    Handle, Shared,
    body::{
        agent::{
            self as wire, AgentBody, CreateAgent, InstanceBody, InstancesBody, Live, SourceKind,
            SourceRequest, UpdateAgent, Wrong,
        },
        deployment::{RedeployRequest, RollbackRequest, StrategyBody},
    },
    caller::Caller,
    check::{Checked, MaybeChecked, is_removed, members},
    envelope::{Page, Success},
    error::{ApiError, Problem, path_id},
    listing::{Listed, Listing},
    query,
    repeat::{Gone, keyed, replayed},
};

/// Longest `?wait_for=`.
const WAIT_MAX: Duration = Duration::from_secs(60);

pub(crate) struct AgentsApi(pub(crate) Handle);

/// An agent, with its state for `If-Match`.
#[derive(ApiResponse)]
pub(crate) enum AgentAnswer {
    /// The agent as it is now.
    #[oai(status = 200)]
    Ok(
        Json<Success<AgentBody>>,
        #[oai(header = "ETag")] String,
        #[oai(header = "Idempotency-Replayed")] Option<String>,
    ),
}

/// A new agent.
#[derive(ApiResponse)]
pub(crate) enum AgentCreated {
    /// The agent, accepted; it comes up in its own time.
    #[oai(status = 201)]
    Created(
        Json<Success<AgentBody>>,
        #[oai(header = "ETag")] String,
        #[oai(header = "Location")] String,
        #[oai(header = "Idempotency-Replayed")] Option<String>,
    ),
}

type Result<T> = std::result::Result<T, ApiError>;

/// An id of a path: a malformed one is answered like an unknown one.
pub(crate) fn agent_id(text: &str) -> std::result::Result<AgentId, Problem> {
    path_id("agent", text)
}

#[OpenApi(prefix_path = "/v1", tag = "crate::document::Tag::Agents")]
impl AgentsApi {
    /// List agents
    ///
    /// Filters are equalities; a comma means any of.
    #[oai(path = "/agents", method = "get", operation_id = "listAgents")]
    async fn list(
        &self,
        caller: Caller,
        listing: Listing,
        /// Only these states.
        status: Query<Option<String>>,
        /// Only of these clouds.
        cloud_id: Query<Option<String>>,
        /// Whether to count all that fit.
        include_total: Query<Option<bool>>,
    ) -> Result<Json<Success<AgentPage>>> {
        let wanted = Wanted {
            statuses: query::words("status", status.0.as_deref(), &statuses())?,
            clouds: cloud_id.0.map(|ids| ids.split(',').map(str::to_owned).collect()),
            only: caller.identity().agent_ids().to_vec(),
        };
        let mut page = self.page(caller.tenant(), &wanted, &listing).await?;
        page.total = page.total.filter(|_| include_total.0 == Some(true));
        Ok(Json(Success::of(page)))
    }

    /// Deploy a new agent
    ///
    /// Answers at once with status `created`; the agent comes up in its own
    /// time. Follow it with `GET /v1/agents/{id}?wait_for=running,failed`.
    #[oai(path = "/agents", method = "post", operation_id = "createAgent")]
    async fn create(
        &self,
        caller: Caller,
        request: &Request,
        body: Checked<CreateAgent>,
    ) -> Result<AgentCreated> {
        let tenant = caller.tenant();
        let key = keyed(request, tenant, Some(&body.json))?;
        let agent = Box::new(self.new_agent(tenant, body.body).await?);
        let answer = self.0.service.change(Command::CreateAgent(agent), key).await?;
        let view = expect_agent(answer.value)?;
        let (etag, location) = (wire::etag(&view.agent), format!("/v1/agents/{}", view.agent.id));
        let body = Json(Success::of(self.0.agent_body(&view).await));
        Ok(AgentCreated::Created(body, etag, location, replayed(answer.replayed)))
    }

    /// Get an agent
    ///
    /// With `wait_for`, once it has one of these states, or when `timeout`
    /// seconds are over.
    #[oai(path = "/agents/:id", method = "get", operation_id = "getAgent")]
    async fn get(
        &self,
        caller: Caller,
        /// The agent.
        id: Path<String>,
        /// States to wait for.
        wait_for: Query<Option<String>>,
        /// Seconds to wait, 0 to 60; default 60.
        #[oai(validator(minimum(value = "0"), maximum(value = "60")))]
        timeout: Query<Option<f64>>,
    ) -> Result<AgentAnswer> {
        let (tenant, id) = (caller.tenant(), agent_id(&id)?);
        let wanted = query::words("wait_for", wait_for.0.as_deref(), &statuses())?;
        let view = if wanted.is_empty() {
            self.0.service.agent(tenant, id).await?
        } else {
            let timeout = timeout.0.map_or(WAIT_MAX, Duration::from_secs_f64);
            self.0.service.agent_in(tenant, id, &wanted, timeout).await?
        };
        Ok(self.answer(&view, false).await)
    }

    /// Update an agent
    ///
    /// A JSON merge patch. A change of source, runtime, resources or
    /// environment of an agent that is up makes a new version.
    #[oai(path = "/agents/:id", method = "patch", operation_id = "updateAgent")]
    async fn update(
        &self,
        caller: Caller,
        request: &Request,
        /// The agent.
        id: Path<String>,
        body: Checked<UpdateAgent>,
    ) -> Result<AgentAnswer> {
        let (tenant, id) = (caller.tenant(), agent_id(&id)?);
        let key = keyed(request, tenant, Some(&body.json))?;
        let known = self.0.service.known_agent(tenant, id);
        let before = match known.filter(|known| stands_alone(&body.json, known)) {
            Some(known) => known,
            None => self.0.service.agent(tenant, id).await?.agent,
        };
        let patch = Box::new(Box::pin(self.patch(&before, body.body, &body.json)).await?);
        let if_match = if_match(request)?;
        let deployment = self.0.service.world.mint(DeploymentId::new);
        let command = Command::UpdateAgent { tenant, id, patch, if_match, deployment };
        self.change(command, key).await
    }

    /// Delete an agent
    ///
    /// It is gone at once; its instances finish their calls.
    #[oai(path = "/agents/:id", method = "delete", operation_id = "deleteAgent")]
    async fn delete(
        &self,
        caller: Caller,
        request: &Request,
        /// The agent.
        id: Path<String>,
    ) -> Result<Gone> {
        let (tenant, id) = (caller.tenant(), agent_id(&id)?);
        let key = keyed(request, tenant, None)?;
        let answer = self.0.service.change(Command::DeleteAgent { tenant, id }, key).await?;
        Ok(Gone::of(id, answer.replayed))
    }

    /// Start a stopped agent
    ///
    /// Starting a running agent changes nothing.
    #[oai(path = "/agents/:id/start", method = "post", operation_id = "startAgent")]
    async fn start(
        &self,
        caller: Caller,
        request: &Request,
        /// The agent.
        id: Path<String>,
    ) -> Result<AgentAnswer> {
        let (tenant, id) = (caller.tenant(), agent_id(&id)?);
        let key = keyed(request, tenant, None)?;
        let deployment = self.0.service.world.mint(DeploymentId::new);
        self.change(Command::StartAgent { tenant, id, deployment }, key).await
    }

    /// Stop a running agent
    ///
    /// New calls are refused at once; calls in flight may finish.
    #[oai(path = "/agents/:id/stop", method = "post", operation_id = "stopAgent")]
    async fn stop(
        &self,
        caller: Caller,
        request: &Request,
        /// The agent.
        id: Path<String>,
    ) -> Result<AgentAnswer> {
        let (tenant, id) = (caller.tenant(), agent_id(&id)?);
        let key = keyed(request, tenant, None)?;
        self.change(Command::StopAgent { tenant, id }, key).await
    }

    /// Redeploy with the latest code
    ///
    /// A running agent goes on serving until the new version is healthy; if
    /// it does not get there, the old one stays.
    #[oai(path = "/agents/:id/redeploy", method = "post", operation_id = "redeployAgent")]
    async fn redeploy(
        &self,
        caller: Caller,
        request: &Request,
        /// The agent.
        id: Path<String>,
        body: MaybeChecked<RedeployRequest>,
    ) -> Result<AgentAnswer> {
        let (tenant, id) = (caller.tenant(), agent_id(&id)?);
        let key = keyed(request, tenant, Some(&body.0.json))?;
        let asked = self.redeployment(tenant, id, body.0.body).await?;
        let deployment = self.0.service.world.mint(DeploymentId::new);
        let command = Command::RedeployAgent { tenant, id, asked: Box::new(asked), deployment };
        self.change(command, key).await
    }

    /// Go back to a version
    ///
    /// The version's code, resources and environment serve again.
    #[oai(path = "/agents/:id/rollback", method = "post", operation_id = "rollbackAgent")]
    async fn rollback(
        &self,
        caller: Caller,
        request: &Request,
        /// The agent.
        id: Path<String>,
        body: Checked<RollbackRequest>,
    ) -> Result<AgentAnswer> {
        let (tenant, id) = (caller.tenant(), agent_id(&id)?);
        let key = keyed(request, tenant, Some(&body.json))?;
        let version = body.body.version.parse();
        let version =
            version.map_err(|_| Problem::field("version", "must be a version's number"))?;
        let deployment = self.0.service.world.mint(DeploymentId::new);
        self.change(Command::RollbackAgent { tenant, id, version, deployment }, key).await
    }

    /// List an agent's instances
    #[oai(path = "/agents/:id/instances", method = "get", operation_id = "listInstances")]
    async fn instances(
        &self,
        caller: Caller,
        /// The agent.
        id: Path<String>,
    ) -> Result<Json<Success<InstancesBody>>> {
        let (tenant, id) = (caller.tenant(), agent_id(&id)?);
        let health = self.0.service.figures_of(id).await.health;
        let directory = self.0.service.directory().await?.read();
        directory.agent(tenant, id)?;
        let load = |instance| health.in_flight.get(&instance).copied().unwrap_or_default();
        let items = directory.instances_of(id).map(|row| InstanceBody::of(row, load(row.id)));
        let items = items.collect();
        Ok(Json(Success::of(InstancesBody { items, has_more: false, next_cursor: None })))
    }
}

/// One page of agents.
#[derive(Clone, Debug, poem_openapi::Object)]
pub(crate) struct AgentPage {
    /// The agents, in the order asked for.
    items: Vec<AgentBody>,
    /// Whether there are more.
    has_more: bool,
    /// Give it as `cursor` for the next page.
    next_cursor: Option<String>,
    /// With `include_total`: how many fit.
    #[oai(skip_serializing_if_is_none)]
    total: Option<u64>,
}

#[derive(Debug, Default)]
struct Wanted {
    statuses: Vec<Status>,
    clouds: Option<Vec<String>>,
    /// Only these, for a key that may touch no others.
    only: Vec<AgentId>,
}

impl Wanted {
    fn takes(&self, agent: &Agent) -> bool {
        let cloud = agent.cloud_id.to_string();
        (self.only.is_empty() || self.only.contains(&agent.id))
            && (self.statuses.is_empty() || self.statuses.contains(&agent.status))
            && self.clouds.as_ref().is_none_or(|clouds| clouds.contains(&cloud))
    }
}

impl Listed for Agent {
    fn id(&self) -> String {
        self.id.to_string()
    }

    fn texts(&self) -> Vec<&str> {
        vec![&self.name, &self.display_name]
    }

    fn created_at(&self) -> Timestamp {
        self.created_at
    }

    fn updated_at(&self) -> Timestamp {
        self.updated_at
    }

    fn metadata(&self) -> Option<&BTreeMap<String, String>> {
        Some(&self.metadata)
    }
}

fn statuses() -> [(&'static str, Status); 6] {
    Status::ALL.map(|status| (status.as_str(), status))
}

/// The state that `If-Match` names. Whether it is that of now, the change itself decides: one that is repeated
/// under its `Idempotency-Key` has changed it already.
pub(crate) fn if_match(request: &Request) -> std::result::Result<Option<u64>, Problem> {
    let Some(value) = request.headers().get(http::header::IF_MATCH) else { return Ok(None) };
    let text = value.to_str().unwrap_or_default().trim();
    if text == "*" {
        return Ok(None);
    }
    let revision = text.trim_start_matches("W/").trim_matches('"').parse();
    revision.map(Some).map_err(|_| Rejection::StaleObject.into())
}

fn expect_agent(reply: Reply) -> Result<AgentView> {
    let Reply::Agent(view) = reply else { return Err(Problem::internal().into()) };
    Ok(*view)
}

impl Shared {
    /// An agent as clients see it.
    pub(crate) async fn agent_body(&self, view: &AgentView) -> AgentBody {
        self.dressed(view, self.service.figures_of(view.agent.id).await)
    }

    /// Agents as clients see them.
    pub(crate) async fn agent_bodies(&self, views: &[AgentView]) -> Vec<AgentBody> {
        let ids: Vec<AgentId> = views.iter().map(|view| view.agent.id).collect();
        let mut figures = self.service.figures(&ids).await;
        let known = views.iter().filter_map(|view| Some((view, figures.remove(&view.agent.id)?)));
        known.map(|(view, figures)| self.dressed(view, figures)).collect()
    }

    fn dressed(&self, view: &AgentView, figures: AgentFigures) -> AgentBody {
        let AgentFigures { health, summary, uptime_percent, .. } = figures;
        let public_url = self.settings.public_url.clone();
        AgentBody::of(view, &Live { health, summary, uptime_percent, public_url })
    }
}

impl AgentsApi {
    /// The agents of one cloud.
    pub(crate) async fn page_of_cloud(
        &self,
        caller: &Caller,
        cloud: CloudId,
        listing: &Listing,
    ) -> Result<AgentPage> {
        let wanted = Wanted {
            clouds: Some(vec![cloud.to_string()]),
            only: caller.identity().agent_ids().to_vec(),
            ..Wanted::default()
        };
        let page = self.page(caller.tenant(), &wanted, listing).await?;
        Ok(AgentPage { total: None, ..page })
    }

    async fn answer(&self, view: &AgentView, is_replay: bool) -> AgentAnswer {
        let body = Json(Success::of(self.0.agent_body(view).await));
        AgentAnswer::Ok(body, wire::etag(&view.agent), replayed(is_replay))
    }

    pub(crate) async fn change(
        &self,
        command: Command,
        key: Option<domain::idempotency::Keyed>,
    ) -> Result<AgentAnswer> {
        let answer = self.0.service.change(command, key).await?;
        let view = expect_agent(answer.value)?;
        Ok(self.answer(&view, answer.replayed).await)
    }

    /// A page, with the count of all that fit.
    async fn page(&self, tenant: Tenant, wanted: &Wanted, listing: &Listing) -> Result<AgentPage> {
        let (selected, views) = {
            let directory = self.0.service.directory().await?.read();
            let rows = directory.agents_of(tenant).filter(|agent| wanted.takes(agent));
            let selected = listing.select(&self.0, tenant, &[&"agents", wanted], rows)?;
            let views: Vec<_> = selected.rows.iter().map(|agent| directory.view(agent)).collect();
            (selected, views)
        };
        let total = Some(selected.total as u64);
        let bodies = self.0.agent_bodies(&views).await;
        let Page { items, has_more, next_cursor } = selected.page_of(bodies);
        Ok(AgentPage { items, has_more, next_cursor, total })
    }

    async fn new_agent(&self, tenant: Tenant, body: CreateAgent) -> Result<Agent> {
        let world = &self.0.service.world;
        let (id, deployment) = (world.mint(AgentId::new), world.mint(DeploymentId::new));
        let mut wrong: Wrong = vec![];
        let environment = body.environment.unwrap_or_default();
        let metadata = body.metadata.unwrap_or_default();
        wire::check_environment(environment.iter().map(|(k, v)| (k, v.as_str())), &mut wrong);
        wire::check_metadata(metadata.iter().map(|(k, v)| (k, v.as_str())), &mut wrong);
        let resources = wire::resources(body.resources, Resources::default(), &mut wrong);
        let scaling = wire::scaling(body.scaling.as_ref(), Scaling::default(), &mut wrong);
        check_source(&body.source, &mut wrong);
        if !wrong.is_empty() {
            return Err(Problem::invalid(wrong).into());
        }
        let directory = self.0.service.directory().await?;
        let cloud_id = path_id("cloud", &body.cloud_id)?;
        let provider = directory.read().cloud(tenant, cloud_id)?.provider;
        let cloud = (cloud_id, provider);
        let sealer = self.0.service.sealer(tenant.org).await?;
        let owner = (tenant, id);
        let source = self.source(owner, body.source, cloud, &directory.read(), &sealer)?;
        let environment = environment
            .into_iter()
            .map(|(name, value)| {
                Ok((name.clone(), self.variable((id, tenant, cloud_id), &name, value, &sealer)?))
            })
            .collect::<Result<_>>()?;
        let now = world.now();
        Ok(Agent {
            id,
            tenant,
            cloud_id,
            display_name: body.display_name.unwrap_or_else(|| body.name.clone()),
            name: body.name,
            spec: Spec {
                source,
                runtime: body.runtime.unwrap_or_default().into(),
                resources,
                environment,
            },
            scaling,
            metadata,
            desired: Desired::Run,
            status: Status::Created,
            reason: Some(domain::agent::StatusReason {
                code: "DEPLOYING".to_owned(),
                message: "the first deployment is on its way".to_owned(),
                since: now,
            }),
            version: None,
            live_deployment: None,
            latest_version: 0,
            deployment,
            waiting: None,
            created_at: now,
            updated_at: now,
            deployed_at: None,
            revision: 1,
        })
    }

    /// A variable's value; one that sounds like a secret is sealed here, before anything is proposed.
    fn variable(
        &self,
        (agent, tenant, cloud): (AgentId, Tenant, CloudId),
        name: &str,
        value: String,
        sealer: &Sealer,
    ) -> Result<Variable> {
        let world = &self.0.service.world;
        let place = sealed_place(agent, name);
        let seal = |text: &str| sealer.seal(text, &place, &*world.ports.entropy);
        let field = format!("environment.{name}");
        if check_secrets(&world.directory().read(), (tenant, cloud), &field, &value)? {
            return Ok(Variable::Template(seal(&value)));
        }
        let value = value.replace("$${", "${");
        if !wire::needs_seal(name) {
            return Ok(Variable::Plain(value));
        }
        Ok(Variable::Sealed(seal(&value)))
    }

    fn source(
        &self,
        (tenant, agent): (Tenant, AgentId),
        body: SourceRequest,
        (cloud, provider): (CloudId, Provider),
        directory: &Directory,
        sealer: &Sealer,
    ) -> Result<Source> {
        match body.kind {
            SourceKind::Github => Ok(Source::Github {
                repo: body.repo.unwrap_or_default(),
                branch: body.branch,
                path: body.path.filter(|path| !path.is_empty()),
            }),
            SourceKind::Docker if provider != Provider::Docker => {
                let why = "a docker image needs a docker cloud; choose another cloud or source";
                Err(Problem::field("source", why).into())
            }
            SourceKind::Docker => {
                let credentials = body.credentials.map(|given| {
                    let field = "source.credentials.password";
                    let owner = (tenant, cloud);
                    let is_template = check_secrets(directory, owner, field, &given.password)?;
                    let entropy = &*self.0.service.world.ports.entropy;
                    let place = sealed_place(agent, "source.credentials.password");
                    let password = sealer.seal(&given.password, &place, entropy);
                    Ok::<_, ApiError>(Credentials {
                        username: given.username,
                        password,
                        is_template,
                    })
                });
                Ok(Source::Docker {
                    image: body.image.unwrap_or_default(),
                    credentials: credentials.transpose()?,
                })
            }
            SourceKind::Upload => {
                let url = body.archive_url.unwrap_or_default();
                let upload_id: UploadId = self.0.upload_of(&url)?;
                let upload = directory
                    .upload(tenant, upload_id)
                    .map_err(|_| crate::uploads::invalid_archive_url())?;
                let received = upload.received.as_ref().ok_or(Rejection::UploadNotReady)?;
                Ok(Source::Upload { upload_id, sha256: received.sha256.clone() })
            }
        }
    }

    async fn patch(
        &self,
        before: &Agent,
        body: UpdateAgent,
        json: &serde_json::Value,
    ) -> Result<AgentPatch> {
        let mut wrong: Wrong = vec![];
        // A null member goes back to its default (RFC 7396); a map loses all its members.
        let is_null = |name: &str| is_removed(json, name);
        let environment = members(json, "environment", body.environment, &before.spec.environment);
        let metadata = members(json, "metadata", body.metadata, &before.metadata);
        if is_null("source") {
            wrong.push(("source".to_owned(), "can't be removed; give another one".to_owned()));
        }
        let after = patched(&before.spec.environment, &environment);
        wire::check_environment(after.iter().map(|(k, v)| (k, v.as_str())), &mut wrong);
        let mut notes = before.metadata.clone();
        domain::cloud::merge(&mut notes, &metadata);
        wire::check_metadata(notes.iter().map(|(k, v)| (k, v.as_str())), &mut wrong);
        let mut resources_before = before.spec.resources.clone();
        if json.pointer("/resources/gpu").is_some_and(serde_json::Value::is_null) {
            resources_before.gpu = None;
        }
        let resources =
            body.resources.map(|given| wire::resources(Some(given), resources_before, &mut wrong));
        let resources = resources.or_else(|| is_null("resources").then(Resources::default));
        let scaling =
            body.scaling.map(|given| wire::scaling(Some(&given), before.scaling, &mut wrong));
        let scaling = scaling.or_else(|| is_null("scaling").then(Scaling::default));
        if let Some(source) = &body.source {
            check_source(source, &mut wrong);
        }
        if !wrong.is_empty() {
            return Err(Problem::invalid(wrong).into());
        }
        let source = match body.source {
            None => None,
            Some(source) => Some(self.new_source(before, source).await?),
        };
        let owner = (before.id, before.tenant, before.cloud_id);
        let sealer = self.0.service.sealer(before.tenant.org).await?;
        let environment = environment
            .into_iter()
            .map(|(name, value)| {
                let value = match value {
                    None => None,
                    Some(mask) if mask == MASK => Some(Variable::Unchanged),
                    Some(value) => Some(self.variable(owner, &name, value, &sealer)?),
                };
                Ok((name, value))
            })
            .collect::<Result<_>>()?;
        Ok(AgentPatch {
            display_name: body
                .display_name
                .or_else(|| is_null("display_name").then(|| before.name.clone())),
            source,
            runtime: body
                .runtime
                .or_else(|| is_null("runtime").then(Default::default))
                .map(Into::into),
            resources,
            scaling,
            environment,
            metadata,
        })
    }

    async fn new_source(&self, agent: &Agent, source: SourceRequest) -> Result<Source> {
        let sealer = self.0.service.sealer(agent.tenant.org).await?;
        let directory = self.0.service.directory().await?.read();
        let provider = directory.cloud(agent.tenant, agent.cloud_id)?.provider;
        let cloud = (agent.cloud_id, provider);
        self.source((agent.tenant, agent.id), source, cloud, &directory, &sealer)
    }

    async fn redeployment(
        &self,
        tenant: Tenant,
        id: AgentId,
        body: RedeployRequest,
    ) -> Result<Redeploy> {
        let source = match body.source {
            None => None,
            Some(source) => {
                let mut wrong = vec![];
                check_source(&source, &mut wrong);
                if !wrong.is_empty() {
                    return Err(Problem::invalid(wrong).into());
                }
                let agent = self.0.service.agent(tenant, id).await?.agent;
                Some(self.new_source(&agent, source).await?)
            }
        };
        let strategy = match body.strategy {
            Some(StrategyBody::Immediate) => Strategy::Immediate,
            Some(StrategyBody::Rolling) | None => Strategy::Rolling,
        };
        Ok(Redeploy { source, strategy, no_cache: body.no_cache.unwrap_or_default() })
    }
}

/// Whether a patch means the same whatever it changes, so that nobody has to be asked for the newest of it: notes
/// that surely have room, and another name to show. Whether there is room after all is seen when it is applied.
fn stands_alone(patch: &serde_json::Value, known: &Agent) -> bool {
    let stands = |(name, value): (&String, &serde_json::Value)| match name.as_str() {
        "display_name" => value.is_string(),
        "metadata" => value
            .as_object()
            .is_some_and(|notes| notes.len() + known.metadata.len() <= METADATA_KEYS_MAX),
        _ => false,
    };
    patch.as_object().is_some_and(|patch| patch.iter().all(stands))
}

/// The environment as it would be, for its limits; sealed values count as their mask.
fn patched(
    before: &BTreeMap<String, Variable>,
    patch: &BTreeMap<String, Option<String>>,
) -> BTreeMap<String, String> {
    let text = |variable: &Variable| match variable {
        Variable::Plain(text) => text.clone(),
        Variable::Sealed(_) | Variable::Template(_) | Variable::Unchanged => MASK.to_owned(),
    };
    let mut after = before.iter().map(|(name, value)| (name.clone(), text(value))).collect();
    domain::cloud::merge(&mut after, patch);
    after
}

/// Whether a value refers to secrets; all of them must exist.
fn check_secrets(
    directory: &Directory,
    (tenant, cloud): (Tenant, CloudId),
    field: &str,
    value: &str,
) -> std::result::Result<bool, Problem> {
    let names = domain::secret::references(value);
    let missing = names.iter().find(|name| directory.secret(tenant, cloud, name).is_none());
    let Some(name) = missing else { return Ok(!names.is_empty()) };
    let name: String = name.chars().take(64).collect();
    let message = format!(
        "the secret {name} does not exist; set it with PUT /v1/secrets/{name}, or write $${{ to mean \
         the text itself"
    );
    Err(Problem::new(http::StatusCode::BAD_REQUEST, "SECRET_NOT_FOUND", message)
        .with(serde_json::json!({ "field": field, "name": name })))
}

/// Which fields belong to which kind of source.
fn check_source(source: &SourceRequest, wrong: &mut Wrong) {
    let SourceRequest { kind, repo, branch, path, image, credentials, archive_url } = source;
    let given = [
        ("repo", SourceKind::Github, repo.is_some(), true),
        ("branch", SourceKind::Github, branch.is_some(), false),
        ("path", SourceKind::Github, path.is_some(), false),
        ("image", SourceKind::Docker, image.is_some(), true),
        ("credentials", SourceKind::Docker, credentials.is_some(), false),
        ("archive_url", SourceKind::Upload, archive_url.is_some(), true),
    ];
    for (field, owner, is_given, is_required) in given {
        let field = || format!("source.{field}");
        match (owner == *kind, is_given) {
            (true, false) if is_required => {
                wrong.push((field(), "is required for this type".to_owned()))
            }
            (false, true) => {
                wrong.push((field(), "does not belong to this type of source".to_owned()))
            }
            _ => {}
        }
    }
    if image.as_deref().is_some_and(|image| !is_reference(image)) {
        let told = "must be an image reference with tag, such as ghcr.io/owner/name:tag";
        wrong.push(("source.image".to_owned(), told.to_owned()));
    }
    let odd = |text: &str| text.split('/').any(|part| part == "..") || text.contains(['\\', '\0']);
    if path.as_deref().is_some_and(|path| odd(path) || path.starts_with('/')) {
        wrong.push(("source.path".to_owned(), "must be a folder inside the repository".to_owned()));
    }
    if branch.as_deref().is_some_and(|branch| {
        branch.starts_with('-') || !branch.bytes().all(|b| b.is_ascii_graphic())
    }) {
        wrong.push(("source.branch".to_owned(), "must be the name of a branch".to_owned()));
    }
}

/// Whether a text can be an image reference: `[registry/]repository[:tag][@digest]`.
fn is_reference(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-/:@".contains(&byte);
    let repository = text.split('@').next().unwrap_or_default();
    let last = repository.rsplit('/').next().unwrap_or_default();
    let name = last.split(':').next().unwrap_or_default();
    text.bytes().all(allowed)
        && repository.split('/').all(|part| part.starts_with(|c: char| c.is_ascii_alphanumeric()))
        && !name.is_empty()
        && !name.bytes().any(|byte| byte.is_ascii_uppercase())
        && !text.ends_with([':', '@', '/'])
}
