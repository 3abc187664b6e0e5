//! `/v1/organizations`: the accounts of a cluster, for whoever looks after it.

use domain::{
    OrgId, Timestamp, UserId,
    account::{Mode, Organization, OrganizationPatch, Role, Tenant, User},
    cloud::{Cloud, Provider},
    directory::{Command, Directory, Reply},
};
use poem::Request;
use poem_openapi::{ApiResponse, OpenApi, param::Path, payload::Json};

use crate::{
    Handle,
    agents::if_match,
    body::account::{CreateOrganization, OrganizationBody, UpdateOrganization},
    caller::Caller,
    check::Checked,
    envelope::{Page, Success},
    error::{ApiError, Problem, path_id},
    listing::{Listed, Listing},
    password,
    repeat::{keyed, replayed},
    users::email,
};

pub(crate) struct OrganizationsApi(pub(crate) Handle);

/// An organization.
#[derive(ApiResponse)]
pub(crate) enum OrganizationAnswer {
    /// The organization as it is now.
    #[oai(status = 200)]
    Ok(
        Json<Success<OrganizationBody>>,
        #[oai(header = "ETag")] String,
        #[oai(header = "Idempotency-Replayed")] Option<String>,
    ),
}

/// A new organization.
#[derive(ApiResponse)]
pub(crate) enum OrganizationCreated {
    /// The organization.
    #[oai(status = 201)]
    Created(
        Json<Success<OrganizationBody>>,
        #[oai(header = "Location")] String,
        #[oai(header = "Idempotency-Replayed")] Option<String>,
    ),
}

type Result<T> = std::result::Result<T, ApiError>;

impl Listed for Organization {
    fn id(&self) -> String {
        self.id.to_string()
    }

    fn texts(&self) -> Vec<&str> {
        vec![&self.name]
    }

    fn created_at(&self) -> Timestamp {
        self.created_at
    }

    fn updated_at(&self) -> Timestamp {
        self.updated_at
    }
}

#[OpenApi(prefix_path = "/v1", tag = "crate::document::Tag::Organizations")]
impl OrganizationsApi {
    /// List organizations
    ///
    /// Newest first.
    #[oai(path = "/organizations", method = "get", operation_id = "listOrganizations")]
    async fn list(
        &self,
        caller: Caller,
        listing: Listing,
    ) -> Result<Json<Success<Page<OrganizationBody>>>> {
        let directory = self.0.service.directory().await?.read();
        let operator = directory.operator();
        let rows = directory.organizations.rows().map(|(_, row)| row);
        let selected = listing.select(&self.0, caller.tenant(), &[&"organizations"], rows)?;
        let dress = |row: &Organization| OrganizationBody::of(row, operator == Some(row.id));
        Ok(Json(Success::of(selected.page(dress))))
    }

    /// Create an organization
    ///
    /// With its first owner and a default cloud per mode.
    #[oai(path = "/organizations", method = "post", operation_id = "createOrganization")]
    async fn create(
        &self,
        caller: Caller,
        request: &Request,
        body: Checked<CreateOrganization>,
    ) -> Result<OrganizationCreated> {
        let key = keyed(request, caller.tenant(), Some(&body.json))?;
        let command = self.new_organization(body.body).await?;
        let answer = self.0.service.change(command, key).await?;
        let body = self.dressed(answer.value)?;
        let location = format!("/v1/organizations/{}", body.id);
        let replayed = replayed(answer.replayed);
        Ok(OrganizationCreated::Created(Json(Success::of(body)), location, replayed))
    }

    /// Get an organization
    #[oai(path = "/organizations/:id", method = "get", operation_id = "getOrganization")]
    async fn get(
        &self,
        _caller: Caller,
        /// The organization.
        id: Path<String>,
    ) -> Result<OrganizationAnswer> {
        let id: OrgId = path_id("organization", &id)?;
        let directory = self.0.service.directory().await?.read();
        let row = directory.organization(id)?;
        let body = OrganizationBody::of(&row, directory.operator() == Some(id));
        let etag = body.etag.clone();
        Ok(OrganizationAnswer::Ok(Json(Success::of(body)), etag, None))
    }

    /// Update an organization
    ///
    /// A JSON merge patch. A new tier holds within a second.
    #[oai(path = "/organizations/:id", method = "patch", operation_id = "updateOrganization")]
    async fn update(
        &self,
        caller: Caller,
        request: &Request,
        /// The organization.
        id: Path<String>,
        body: Checked<UpdateOrganization>,
    ) -> Result<OrganizationAnswer> {
        let id: OrgId = path_id("organization", &id)?;
        let key = keyed(request, caller.tenant(), Some(&body.json))?;
        body.removes_only(&[])?;
        let if_match = if_match(request)?;
        let UpdateOrganization { name, tier } = body.body;
        let patch = OrganizationPatch { name, tier: tier.map(Into::into) };
        let command = Command::UpdateOrganization { id, patch, if_match };
        let answer = self.0.service.change(command, key).await?;
        let body = self.dressed(answer.value)?;
        let etag = body.etag.clone();
        Ok(OrganizationAnswer::Ok(Json(Success::of(body)), etag, replayed(answer.replayed)))
    }
}

/// The default cloud of an organization: like the operator's own.
fn default_cloud(
    directory: &Directory,
    tenant: Tenant,
    like: &Cloud,
    id: domain::CloudId,
) -> Cloud {
    let own = directory.operator().map(|org| Tenant { org, mode: Mode::Live });
    let mut clouds = directory.clouds.rows().map(|(_, cloud)| cloud);
    let default = clouds.find(|cloud| Some(cloud.tenant) == own && cloud.is_default);
    let provider = match tenant.mode {
        Mode::Live => default.map_or(Provider::Process, |cloud| cloud.provider),
        Mode::Test => Provider::Sandbox,
    };
    Cloud { id, tenant, provider, ..like.clone() }
}

impl OrganizationsApi {
    async fn new_organization(&self, body: CreateOrganization) -> Result<Command> {
        let CreateOrganization { name, tier, owner_email, owner_password } = body;
        let address = email("owner_email", &owner_email)?;
        password::check_new("owner_password", &owner_password)?;
        let password_hash = self.0.passwords.hash(owner_password).await?;
        let world = &self.0.service.world;
        let (now, org) = (world.now(), world.mint(OrgId::new));
        let like = Cloud {
            id: domain::CloudId(0),
            tenant: Tenant { org, mode: Mode::Live },
            name: "default".to_owned(),
            display_name: "Default".to_owned(),
            region: "local".to_owned(),
            provider: Provider::Process,
            is_default: true,
            limits: Default::default(),
            node_selector: Default::default(),
            metadata: Default::default(),
            created_at: now,
            updated_at: now,
            revision: 1,
        };
        let clouds = [Mode::Live, Mode::Test].map(|mode| {
            let directory = world.directory().read();
            default_cloud(&directory, Tenant { org, mode }, &like, world.mint(domain::CloudId::new))
        });
        let owner = User {
            id: world.mint(UserId::new),
            org,
            email: address,
            password_hash,
            role: Role::Owner,
            created_at: now,
            name: None,
            updated_at: now,
            revision: 1,
            sessions_since: now,
        };
        let tier = tier.map_or(self.0.settings.default_tier, Into::into);
        let organization =
            Organization { id: org, name, created_at: now, tier, updated_at: now, revision: 1 };
        Ok(Command::CreateOrganization {
            organization: Box::new(organization),
            owner: Box::new(owner),
            clouds: clouds.to_vec(),
        })
    }

    fn dressed(&self, reply: Reply) -> Result<OrganizationBody> {
        let Reply::Organization(row) = reply else { return Err(Problem::internal().into()) };
        let operator = self.0.service.world.directory().read().operator();
        Ok(OrganizationBody::of(&row, operator == Some(row.id)))
    }
}
