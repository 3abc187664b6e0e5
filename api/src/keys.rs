//! `/v1/api-keys`: keys for programs.

use std::time::Duration;

use domain::{
    AgentId, ApiKeyId, Timestamp,
    account::{ApiKey, ApiKeyPatch, IpRange, Mode, Scopes, Tenant},
    directory::{Command, Reply},
};
use http::StatusCode;
use poem::Request;
use poem_openapi::{
    ApiResponse, OpenApi,
    param::{Path, Query},
    payload::Json,
};
use serde_json::json;

use crate::{
    Handle,
    agents::if_match,
    body::account::{ApiKeyBody, CreateApiKey, ModeBody, RotateRequest, UpdateApiKey},
    caller::{Caller, Identity, hash_key, make_key},
    check::{Checked, MaybeChecked},
    envelope::{Deleted, Page, Success},
    error::{ApiError, Problem, path_id},
    listing::{Wanted, is_older},
    repeat::{self, keyed, replayed},
};

pub(crate) struct KeysApi(pub(crate) Handle);

/// A key.
#[derive(ApiResponse)]
pub(crate) enum KeyAnswer {
    /// The key as it is now.
    #[oai(status = 200)]
    Ok(
        Json<Success<ApiKeyBody>>,
        #[oai(header = "ETag")] String,
        #[oai(header = "Idempotency-Replayed")] Option<String>,
    ),
}

/// A new key.
#[derive(ApiResponse)]
pub(crate) enum KeyCreated {
    /// The key, with its secret.
    #[oai(status = 201)]
    Created(
        Json<Success<ApiKeyBody>>,
        #[oai(header = "Location")] String,
        #[oai(header = "Idempotency-Replayed")] Option<String>,
    ),
}

type Result<T> = std::result::Result<T, ApiError>;

fn key_id(text: &str) -> std::result::Result<ApiKeyId, Problem> {
    path_id("api_key", text)
}

fn ranges(texts: &[String]) -> std::result::Result<Vec<IpRange>, Problem> {
    let range = |(place, text): (usize, &String)| {
        text.parse().map_err(|error: domain::account::NotAnIpRange| {
            Problem::field(&format!("allowed_ips[{place}]"), error.to_string())
        })
    };
    texts.iter().enumerate().map(range).collect()
}

fn agents(texts: &[String]) -> std::result::Result<Vec<AgentId>, Problem> {
    texts.iter().map(|text| path_id("agent", text)).collect()
}

/// Scopes of a body, none of them more than the caller has.
pub(crate) fn handed_on(
    identity: &Identity,
    words: &[String],
) -> std::result::Result<Scopes, Problem> {
    let scopes = Scopes::parse(words.iter().map(String::as_str));
    let scopes = scopes.map_err(|error| Problem::field("scopes", error.to_string()))?;
    if scopes.is_empty() {
        return Err(Problem::field("scopes", "must name at least one scope"));
    }
    match identity.scopes.lacks(&scopes) {
        None => Ok(scopes),
        Some(word) => {
            let message =
                format!("nobody gives more than they have; these credentials lack {word}");
            let details = json!({ "required": [word], "granted": identity.scopes.to_vec() });
            Err(Problem::new(StatusCode::FORBIDDEN, "INSUFFICIENT_SCOPE", message).with(details))
        }
    }
}

fn end(text: &str, now: Timestamp) -> std::result::Result<Timestamp, Problem> {
    let end: Timestamp = text.parse().map_err(|error: domain::time::NotATimestamp| {
        Problem::field("expires_at", error.to_string())
    })?;
    if end > now { Ok(end) } else { Err(Problem::field("expires_at", "must be in the future")) }
}

#[OpenApi(prefix_path = "/v1", tag = "crate::document::Tag::Keys")]
impl KeysApi {
    /// List API keys
    ///
    /// Of the caller's mode, newest first.
    #[oai(path = "/api-keys", method = "get", operation_id = "listApiKeys")]
    async fn list(
        &self,
        caller: Caller,
        /// Items of a page.
        #[oai(validator(minimum(value = "1"), maximum(value = "100")))]
        limit: Query<Option<u32>>,
        /// `next_cursor` of the page before.
        cursor: Query<Option<String>>,
    ) -> Result<Json<Success<Page<ApiKeyBody>>>> {
        let tenant = caller.tenant();
        let wanted = Wanted::new(tenant, &[&"keys"], limit.0, cursor.0);
        let after: Option<ApiKeyId> = wanted.after(&self.0)?;
        let directory = self.0.service.directory().await?.read();
        let rows = directory.api_keys.rows().rev().map(|(_, key)| key);
        let rows =
            rows.filter(|key| sees(&caller, key)).filter(|key| is_older(&key.id, after.as_ref()));
        let page = wanted.page(&self.0, rows, |key| key.id.to_string(), |key| self.body(key));
        Ok(Json(Success::of(page)))
    }

    /// Create an API key
    ///
    /// The key is shown in this answer alone.
    #[oai(path = "/api-keys", method = "post", operation_id = "createApiKey")]
    async fn create(
        &self,
        caller: Caller,
        request: &Request,
        body: Checked<CreateApiKey>,
    ) -> Result<KeyCreated> {
        let idempotent = keyed(request, caller.tenant(), body.fingerprint)?;
        let key = self.new_key(&caller, body.body)?;
        let world = &self.0.service.world;
        let secret = make_key(key.tenant.mode, &mut || world.ports.entropy.dice());
        let key = ApiKey {
            hash: hash_key(&self.0.settings.pepper, &secret),
            last4: secret[secret.len() - 4..].to_owned(),
            ..key
        };
        let kept = self.0.for_repeats(idempotent.as_ref(), &secret);
        let command = Command::CreateApiKey { key: Box::new(key), answer: kept };
        let answer = self.0.service.change(command, idempotent).await?;
        let body = self.with_secret(answer.value, answer.replayed, secret)?;
        let location = format!("/v1/api-keys/{}", body.id);
        let replayed = replayed(answer.replayed);
        Ok(KeyCreated::Created(Json(Success::of(body)), location, replayed))
    }

    /// Get an API key
    #[oai(path = "/api-keys/:id", method = "get", operation_id = "getApiKey")]
    async fn get(
        &self,
        caller: Caller,
        /// The key's id.
        id: Path<String>,
    ) -> Result<KeyAnswer> {
        let key = self.seen(&caller, key_id(&id)?).await?;
        let body = self.body(&key);
        let etag = body.etag.clone();
        Ok(KeyAnswer::Ok(Json(Success::of(body)), etag, None))
    }

    /// Update an API key
    ///
    /// A JSON merge patch. It holds on every node within a second.
    #[oai(path = "/api-keys/:id", method = "patch", operation_id = "updateApiKey")]
    async fn update(
        &self,
        caller: Caller,
        request: &Request,
        /// The key's id.
        id: Path<String>,
        body: Checked<UpdateApiKey>,
    ) -> Result<KeyAnswer> {
        let (tenant, id) = (caller.tenant(), key_id(&id)?);
        let key = keyed(request, tenant, body.fingerprint)?;
        let before = self.seen(&caller, id).await?;
        // Whoever changes a key gives away what it has.
        handed_on(caller.identity(), &before.scopes.to_vec())?;
        let if_match = if_match(request, before.revision)?;
        let patch = self.patch(&caller, &body.json, body.body)?;
        let command = Command::UpdateApiKey { tenant, id, patch, if_match };
        let answer = self.0.service.change(command, key).await?;
        let body = dressed(answer.value)?;
        let etag = body.etag.clone();
        Ok(KeyAnswer::Ok(Json(Success::of(body)), etag, replayed(answer.replayed)))
    }

    /// Rotate an API key
    ///
    /// Another secret for the same key, shown in this answer alone.
    #[oai(path = "/api-keys/:id/rotate", method = "post", operation_id = "rotateApiKey")]
    async fn rotate(
        &self,
        caller: Caller,
        request: &Request,
        /// The key's id.
        id: Path<String>,
        body: MaybeChecked<RotateRequest>,
    ) -> Result<KeyAnswer> {
        let (tenant, id) = (caller.tenant(), key_id(&id)?);
        let idempotent = keyed(request, tenant, body.0.fingerprint)?;
        let before = self.seen(&caller, id).await?;
        handed_on(caller.identity(), &before.scopes.to_vec())?;
        let grace = Duration::from_secs(body.0.body.grace_period_seconds.unwrap_or_default());
        let world = &self.0.service.world;
        let secret = make_key(before.tenant.mode, &mut || world.ports.entropy.dice());
        let hash = hash_key(&self.0.settings.pepper, &secret);
        let last4 = secret[secret.len() - 4..].to_owned();
        let kept = self.0.for_repeats(idempotent.as_ref(), &secret);
        let command = Command::RotateApiKey { tenant, id, hash, last4, grace, answer: kept };
        let answer = self.0.service.change(command, idempotent).await?;
        let body = self.with_secret(answer.value, answer.replayed, secret)?;
        let etag = body.etag.clone();
        Ok(KeyAnswer::Ok(Json(Success::of(body)), etag, replayed(answer.replayed)))
    }

    /// Revoke an API key
    ///
    /// It is refused by this node at once and by every node within a second.
    #[oai(path = "/api-keys/:id", method = "delete", operation_id = "deleteApiKey")]
    async fn delete(
        &self,
        caller: Caller,
        request: &Request,
        /// The key's id.
        id: Path<String>,
    ) -> Result<Json<Success<Deleted>>> {
        let (tenant, id) = (caller.tenant(), key_id(&id)?);
        let key = keyed(request, tenant, repeat::NO_BODY)?;
        self.seen(&caller, id).await?;
        self.0.service.change(Command::DeleteApiKey { tenant, id }, key).await?;
        Ok(Json(Success::of(Deleted::of(id))))
    }
}

/// Test credentials see the keys of test mode alone; live ones see both.
fn sees(caller: &Caller, key: &ApiKey) -> bool {
    let tenant = caller.tenant();
    key.tenant.org == tenant.org && (tenant.mode == Mode::Live || key.tenant.mode == Mode::Test)
}

fn dressed(reply: Reply) -> Result<ApiKeyBody> {
    let Reply::ApiKey(key) = reply else { return Err(Problem::internal().into()) };
    Ok(ApiKeyBody::of(&key))
}

impl KeysApi {
    /// A key, with the newest use that this node knows of.
    fn body(&self, key: &ApiKey) -> ApiKeyBody {
        match self.0.keys_used.of(key.id) {
            Some(used) => ApiKeyBody::of(&ApiKey { last_used: Some(used), ..key.clone() }),
            None => ApiKeyBody::of(key),
        }
    }

    fn with_secret(&self, reply: Reply, replayed: bool, made: String) -> Result<ApiKeyBody> {
        let Reply::NewKey(key, sealed) = reply else { return Err(Problem::internal().into()) };
        let secret = self.0.repeated(replayed, &sealed, made)?;
        Ok(ApiKeyBody { key: Some(secret), ..ApiKeyBody::of(&key) })
    }

    async fn seen(&self, caller: &Caller, id: ApiKeyId) -> Result<std::sync::Arc<ApiKey>> {
        let directory = self.0.service.directory().await?.read();
        let key = directory.key(caller.tenant(), id)?;
        match sees(caller, &key) {
            true => Ok(key),
            false => Err(domain::Rejection::ApiKeyNotFound(id).into()),
        }
    }

    fn new_key(&self, caller: &Caller, body: CreateApiKey) -> Result<ApiKey> {
        let identity = caller.identity();
        let mode = match (body.mode, identity.tenant.mode) {
            (Some(ModeBody::Live), Mode::Test) => {
                return Err(Problem::field("mode", "test credentials make only test keys").into());
            }
            (Some(ModeBody::Test), _) | (None, Mode::Test) => Mode::Test,
            (Some(ModeBody::Live) | None, Mode::Live) => Mode::Live,
        };
        let world = &self.0.service.world;
        let now = world.now();
        let words = body.scopes.unwrap_or_else(|| vec!["admin:*".to_owned()]);
        let (kind, by) = identity.name();
        Ok(ApiKey {
            id: world.mint(ApiKeyId::new),
            tenant: Tenant { org: identity.tenant.org, mode },
            name: body.name,
            hash: [0; 32],
            last4: String::new(),
            scopes: handed_on(identity, &words)?,
            created_at: now,
            allowed_ips: ranges(&body.allowed_ips.unwrap_or_default())?,
            expires_at: body.expires_at.as_deref().map(|text| end(text, now)).transpose()?,
            agent_ids: agents(&body.agent_ids.unwrap_or_default())?,
            created_by: Some(if kind == "application" { format!("{kind}:{by}") } else { by }),
            previous: None,
            last_used: None,
            updated_at: now,
            revision: 1,
        })
    }

    fn patch(
        &self,
        caller: &Caller,
        json: &serde_json::Value,
        body: UpdateApiKey,
    ) -> Result<ApiKeyPatch> {
        let is_null = |field: &str| json.get(field).is_some_and(serde_json::Value::is_null);
        let now = self.0.service.world.now();
        let none = |field: &str, given: Option<Vec<String>>| {
            given.or_else(|| is_null(field).then(Vec::new))
        };
        let scopes = body.scopes.map(|words| handed_on(caller.identity(), &words)).transpose()?;
        let expires_at = match body.expires_at {
            Some(text) => Some(Some(end(&text, now)?)),
            None => is_null("expires_at").then_some(None),
        };
        Ok(ApiKeyPatch {
            name: body.name,
            scopes,
            allowed_ips: none("allowed_ips", body.allowed_ips)
                .map(|all| ranges(&all))
                .transpose()?,
            agent_ids: none("agent_ids", body.agent_ids).map(|all| agents(&all)).transpose()?,
            expires_at,
        })
    }
}
