//! `/v1/clouds`: the deployment targets of agents.

use std::collections::BTreeMap;

use actors::world::World;
use domain::{
    CloudId, Timestamp,
    account::{Mode, Tenant},
    cloud::{Cloud, CloudLimits, CloudPatch, Provider},
    directory::{Command, Directory, Reply},
};
use poem::Request;
use poem_openapi::{ApiResponse, OpenApi, param::Path, payload::Json};

use crate::{
    Handle,
    agents::{AgentPage, if_match},
    body::{
        agent::{Wrong, check_metadata},
        cloud::{CloudBody, Counted, CreateCloud, ProviderBody, UpdateCloud},
    },
    caller::Caller,
    check::{Checked, is_removed, members},
    envelope::{Page, Success},
    error::{ApiError, Problem, path_id},
    listing::{Listed, Listing},
    repeat::{Gone, keyed, replayed},
};

pub(crate) struct CloudsApi(pub(crate) Handle);

/// A cloud, with its state for `If-Match`.
#[derive(ApiResponse)]
pub(crate) enum CloudAnswer {
    /// The cloud as it is now.
    #[oai(status = 200)]
    Ok(
        Json<Success<CloudBody>>,
        #[oai(header = "ETag")] String,
        #[oai(header = "Idempotency-Replayed")] Option<String>,
    ),
}

/// A new cloud.
#[derive(ApiResponse)]
pub(crate) enum CloudCreated {
    /// The cloud.
    #[oai(status = 201)]
    Created(
        Json<Success<CloudBody>>,
        #[oai(header = "ETag")] String,
        #[oai(header = "Location")] String,
        #[oai(header = "Idempotency-Replayed")] Option<String>,
    ),
}

type Result<T> = std::result::Result<T, ApiError>;

fn cloud_id(text: &str) -> std::result::Result<CloudId, Problem> {
    path_id("cloud", text)
}

impl Listed for Cloud {
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

#[OpenApi(prefix_path = "/v1", tag = "crate::document::Tag::Clouds")]
impl CloudsApi {
    /// List clouds
    ///
    /// Newest first.
    #[oai(path = "/clouds", method = "get", operation_id = "listClouds")]
    async fn list(
        &self,
        caller: Caller,
        listing: Listing,
    ) -> Result<Json<Success<Page<CloudBody>>>> {
        let tenant = caller.tenant();
        let directory = self.0.service.directory().await?.read();
        let rows = directory.clouds.rows().map(|(_, cloud)| cloud);
        let rows = rows.filter(|cloud| cloud.tenant == tenant);
        let selected = listing.select(&self.0, tenant, &[&"clouds"], rows)?;
        let dress = |cloud: &Cloud| body(cloud, &directory, &self.0.service.world);
        Ok(Json(Success::of(selected.page(dress))))
    }

    /// Create a cloud
    #[oai(path = "/clouds", method = "post", operation_id = "createCloud")]
    async fn create(
        &self,
        caller: Caller,
        request: &Request,
        body: Checked<CreateCloud>,
    ) -> Result<CloudCreated> {
        let tenant = caller.tenant();
        let key = keyed(request, tenant, Some(&body.json))?;
        let cloud = self.new_cloud(tenant, body.body)?;
        let answer = self.0.service.change(Command::CreateCloud(Box::new(cloud)), key).await?;
        let body = self.expect(answer.value)?;
        let (etag, location) = (body.etag.clone(), format!("/v1/clouds/{}", body.id));
        let replayed = replayed(answer.replayed);
        Ok(CloudCreated::Created(Json(Success::of(body)), etag, location, replayed))
    }

    /// Get a cloud
    #[oai(path = "/clouds/:id", method = "get", operation_id = "getCloud")]
    async fn get(
        &self,
        caller: Caller,
        /// The cloud.
        id: Path<String>,
    ) -> Result<CloudAnswer> {
        let id = cloud_id(&id)?;
        let directory = self.0.service.directory().await?.read();
        let cloud = directory.cloud(caller.tenant(), id)?;
        let body = body(&cloud, &directory, &self.0.service.world);
        let etag = body.etag.clone();
        Ok(CloudAnswer::Ok(Json(Success::of(body)), etag, None))
    }

    /// Update a cloud
    ///
    /// A JSON merge patch.
    #[oai(path = "/clouds/:id", method = "patch", operation_id = "updateCloud")]
    async fn update(
        &self,
        caller: Caller,
        request: &Request,
        /// The cloud.
        id: Path<String>,
        body: Checked<UpdateCloud>,
    ) -> Result<CloudAnswer> {
        let (tenant, id) = (caller.tenant(), cloud_id(&id)?);
        let key = keyed(request, tenant, Some(&body.json))?;
        let before = self.0.service.directory().await?.read().cloud(tenant, id)?;
        let if_match = if_match(request)?;
        body.removes_only(&["display_name", "limits", "metadata"])?;
        let Checked { body, json, .. } = body;
        let metadata = members(&json, "metadata", body.metadata, &before.metadata);
        let mut notes = before.metadata.clone();
        domain::cloud::merge(&mut notes, &metadata);
        check_notes(&notes)?;
        let patch = CloudPatch {
            display_name: body
                .display_name
                .or_else(|| is_removed(&json, "display_name").then(|| before.name.clone())),
            limits: body
                .limits
                .map(Into::into)
                .or_else(|| is_removed(&json, "limits").then(CloudLimits::default)),
            node_selector: None,
            metadata,
        };
        let command = Command::UpdateCloud { tenant, id, patch, if_match };
        let answer = self.0.service.change(command, key).await?;
        let body = self.expect(answer.value)?;
        let etag = body.etag.clone();
        Ok(CloudAnswer::Ok(Json(Success::of(body)), etag, replayed(answer.replayed)))
    }

    /// Delete a cloud
    ///
    /// A cloud with agents stays.
    #[oai(path = "/clouds/:id", method = "delete", operation_id = "deleteCloud")]
    async fn delete(
        &self,
        caller: Caller,
        request: &Request,
        /// The cloud.
        id: Path<String>,
    ) -> Result<Gone> {
        let (tenant, id) = (caller.tenant(), cloud_id(&id)?);
        let key = keyed(request, tenant, None)?;
        let answer = self.0.service.change(Command::DeleteCloud { tenant, id }, key).await?;
        Ok(Gone::of(id, answer.replayed))
    }

    /// List a cloud's agents
    ///
    /// Newest first.
    #[oai(path = "/clouds/:id/agents", method = "get", operation_id = "listCloudAgents")]
    async fn agents(
        &self,
        caller: Caller,
        /// The cloud.
        id: Path<String>,
        listing: Listing,
    ) -> Result<Json<Success<AgentPage>>> {
        let (tenant, id) = (caller.tenant(), cloud_id(&id)?);
        self.0.service.directory().await?.read().cloud(tenant, id)?;
        let agents = crate::agents::AgentsApi(self.0.clone());
        let page = agents.page_of_cloud(&caller, id, &listing).await?;
        Ok(Json(Success::of(page)))
    }
}

fn check_notes(notes: &BTreeMap<String, String>) -> Result<()> {
    let mut wrong: Wrong = vec![];
    check_metadata(notes.iter().map(|(k, v)| (k, v.as_str())), &mut wrong);
    if wrong.is_empty() { Ok(()) } else { Err(Problem::invalid(wrong).into()) }
}

impl CloudsApi {
    fn new_cloud(&self, tenant: Tenant, body: CreateCloud) -> Result<Cloud> {
        let metadata = body.metadata.unwrap_or_default();
        check_notes(&metadata)?;
        let provider = match (body.provider, tenant.mode) {
            (None | Some(ProviderBody::Sandbox), Mode::Test) => Provider::Sandbox,
            (Some(ProviderBody::Process | ProviderBody::Docker), Mode::Test) => {
                return Err(
                    Problem::field("provider", "a test key may make only sandbox clouds").into()
                );
            }
            (Some(ProviderBody::Process), Mode::Live) => Provider::Process,
            (Some(ProviderBody::Sandbox), Mode::Live) => {
                return Err(Problem::field(
                    "provider",
                    "sandbox clouds belong to test mode; use a test key",
                )
                .into());
            }
            (Some(ProviderBody::Docker), Mode::Live) => Provider::Docker,
            (None, Mode::Live) => self.default_provider(tenant),
        };
        let world = &self.0.service.world;
        let now = world.now();
        Ok(Cloud {
            id: world.mint(CloudId::new),
            tenant,
            display_name: body.display_name.unwrap_or_else(|| body.name.clone()),
            name: body.name,
            region: body.region.unwrap_or_else(|| "local".to_owned()),
            provider,
            is_default: false,
            limits: body.limits.unwrap_or_default().into(),
            node_selector: Default::default(),
            metadata,
            created_at: now,
            updated_at: now,
            revision: 1,
        })
    }

    /// That of the default cloud.
    fn default_provider(&self, tenant: Tenant) -> Provider {
        let directory = self.0.service.world.directory().read();
        let mut clouds = directory.clouds.rows().map(|(_, cloud)| cloud);
        let default = clouds.find(|cloud| cloud.tenant == tenant && cloud.is_default);
        default.map_or(Provider::Process, |cloud| cloud.provider)
    }

    fn expect(&self, reply: Reply) -> Result<CloudBody> {
        let world = &self.0.service.world;
        let Reply::Cloud(cloud) = reply else { return Err(Problem::internal().into()) };
        Ok(body(&cloud, &world.directory().read(), world))
    }
}

fn body(cloud: &Cloud, directory: &Directory, world: &World) -> CloudBody {
    let mut counted = Counted::default();
    for agent in directory.agents_of(cloud.tenant).filter(|agent| agent.cloud_id == cloud.id) {
        let instances = directory.instances_of(agent.id).count() as u64;
        counted.agents += 1;
        counted.cpu += instances * u64::from(agent.spec.resources.cpu);
        counted.memory_mb += instances * u64::from(agent.spec.resources.memory_mb);
    }
    let lack = world.ports.runtime.lack(cloud.provider, false);
    CloudBody::of(cloud, counted, world.settings.machine, lack)
}
