//! `/v1/secrets`: values that agents are started with. They go in and never come out.

use domain::{
    CloudId, Timestamp,
    account::Tenant,
    directory::{Command, Reply},
    secret::{SECRET_BYTES_MAX, Secret, is_secret_name},
};
use poem::Request;
use poem_openapi::{
    ApiResponse, OpenApi,
    param::{Path, Query},
    payload::Json,
};

use crate::{
    Handle,
    body::account::{PutSecret, SecretBody},
    caller::Caller,
    check::Checked,
    envelope::{Page, Success},
    error::{ApiError, Problem, path_id},
    listing::{Listed, Listing},
    repeat::{Gone, keyed, replayed},
};

pub(crate) struct SecretsApi(pub(crate) Handle);

/// A secret that was set.
#[derive(ApiResponse)]
pub(crate) enum SecretPut {
    /// It is set.
    #[oai(status = 200)]
    Ok(Json<Success<SecretBody>>, #[oai(header = "Idempotency-Replayed")] Option<String>),
}

type Result<T> = std::result::Result<T, ApiError>;

fn cloud(id: Option<&str>) -> std::result::Result<Option<CloudId>, Problem> {
    id.map(|id| path_id("cloud", id)).transpose()
}

impl Listed for Secret {
    fn id(&self) -> String {
        Self::place(self.tenant, self.cloud_id, &self.name)
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

#[OpenApi(prefix_path = "/v1", tag = "crate::document::Tag::Secrets")]
impl SecretsApi {
    /// List secrets
    ///
    /// Without their values.
    #[oai(path = "/secrets", method = "get", operation_id = "listSecrets")]
    async fn list(
        &self,
        caller: Caller,
        listing: Listing,
        /// Only of this cloud.
        cloud_id: Query<Option<String>>,
    ) -> Result<Json<Success<Page<SecretBody>>>> {
        let (tenant, only) = (caller.tenant(), cloud(cloud_id.0.as_deref())?);
        let directory = self.0.service.directory().await?.read();
        let rows = directory.secrets_of(tenant);
        let rows = rows.filter(|row| only.is_none() || row.cloud_id == only);
        let selected = listing.select(&self.0, tenant, &[&"secrets", &only], rows)?;
        Ok(Json(Success::of(selected.page(SecretBody::of))))
    }

    /// Get a secret
    ///
    /// Without its value.
    #[oai(path = "/secrets/:name", method = "get", operation_id = "getSecret")]
    async fn get(
        &self,
        caller: Caller,
        /// Its name.
        name: Path<String>,
        /// Of this cloud; the one for all clouds if left out.
        cloud_id: Query<Option<String>>,
    ) -> Result<Json<Success<SecretBody>>> {
        let key = Secret::place(caller.tenant(), cloud(cloud_id.0.as_deref())?, &name);
        let row = self.0.service.directory().await?.read().secrets.get(&key);
        let row = row.ok_or_else(|| domain::Rejection::SecretNotFound(shown(&name)))?;
        Ok(Json(Success::of(SecretBody::of(&row))))
    }

    /// Set a secret
    ///
    /// Agents that refer to it as `${secrets.NAME}` get the new value at their next start.
    #[oai(path = "/secrets/:name", method = "put", operation_id = "putSecret")]
    async fn put(
        &self,
        caller: Caller,
        request: &Request,
        /// Its name: capital letters, digits and `_`, at most 64.
        name: Path<String>,
        body: Checked<PutSecret>,
    ) -> Result<SecretPut> {
        if !is_secret_name(&name) {
            let why = "must be capital letters, digits and _, beginning with a letter, at most 64";
            return Err(Problem::field("name", why).into());
        }
        if body.body.value.len() > SECRET_BYTES_MAX || body.body.value.contains('\0') {
            let why = format!("must have at most {SECRET_BYTES_MAX} bytes, none of them zero");
            return Err(Problem::field("value", why).into());
        }
        let key = keyed(request, caller.tenant(), Some(&body.json))?;
        let secret = self.sealed(caller.tenant(), &name, body.body).await?;
        let answer = self.0.service.change(Command::PutSecret(Box::new(secret)), key).await?;
        let Reply::Secret(row) = answer.value else { return Err(Problem::internal().into()) };
        Ok(SecretPut::Ok(Json(Success::of(SecretBody::of(&row))), replayed(answer.replayed)))
    }

    /// Delete a secret
    ///
    /// Agents that refer to it do not start any more.
    #[oai(path = "/secrets/:name", method = "delete", operation_id = "deleteSecret")]
    async fn delete(
        &self,
        caller: Caller,
        request: &Request,
        /// Its name.
        name: Path<String>,
        /// Of this cloud; the one for all clouds if left out.
        cloud_id: Query<Option<String>>,
    ) -> Result<Gone> {
        let (tenant, cloud_id) = (caller.tenant(), cloud(cloud_id.0.as_deref())?);
        if !is_secret_name(&name) {
            return Err(domain::Rejection::SecretNotFound(shown(&name)).into());
        }
        let key = keyed(request, tenant, Some(&format_args!("{cloud_id:?}")))?;
        let name = name.0;
        let command = Command::DeleteSecret { tenant, cloud_id, name: name.clone() };
        let answer = self.0.service.change(command, key).await?;
        Ok(Gone::of(name, answer.replayed))
    }
}

/// A name of a path, as far as it is shown.
fn shown(name: &str) -> String {
    name.chars().take(64).collect()
}

impl SecretsApi {
    async fn sealed(&self, tenant: Tenant, name: &str, body: PutSecret) -> Result<Secret> {
        let world = &self.0.service.world;
        let cloud_id = cloud(body.cloud_id.as_deref())?;
        let place = Secret::place(tenant, cloud_id, name);
        let (sealer, now) = (self.0.service.sealer(tenant.org).await?, world.now());
        Ok(Secret {
            tenant,
            cloud_id,
            name: name.to_owned(),
            sealed: sealer.seal(&body.value, &place, &*world.ports.entropy),
            version: 0,
            created_at: now,
            updated_at: now,
        })
    }
}
