//! `/v1/api-keys`: keys for programs.

use std::{num::NonZeroU32, time::Duration};

use domain::{
    AgentId, ApiKeyId, Timestamp,
    account::{ApiKey, ApiKeyPatch, IpRange, Mode, Role, Scopes, Tenant},
    directory::{Command, Reply},
};
use http::StatusCode;
use poem::Request;
use poem_openapi::{ApiResponse, OpenApi, param::Path, payload::Json};
use serde_json::json;

use crate::{
    Handle,
    agents::if_match,
    body::account::{ApiKeyBody, CreateApiKey, ModeBody, RotateRequest, UpdateApiKey},
    caller::{Caller, Identity, Principal, hash_key, make_key},
    check::{Checked, MaybeChecked, is_removed},
    envelope::{Page, Success},
    error::{ApiError, Problem, path_id},
    listing::{Listed, Listing},
    repeat::{Gone, keyed, replayed},
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

fn beyond_limits() -> Problem {
    let message = "nobody gives more than they have: this key has limits of address, time or rate, and so have \
                   the keys that it makes or changes; people and applications have none, so it makes none";
    Problem::new(StatusCode::FORBIDDEN, "INSUFFICIENT_SCOPE", message)
}

/// Refuses keys with limits of address, time or rate what would give somebody the same rights without them.
pub(crate) fn without_limits(identity: &Identity) -> std::result::Result<(), Problem> {
    let Principal::Key(key) = &identity.principal else { return Ok(()) };
    if Limits::of(key) == Limits::default() { Ok(()) } else { Err(beyond_limits()) }
}

/// From where, until when and how often a key may be used.
#[derive(Clone, Default, PartialEq)]
struct Limits {
    ranges: Vec<IpRange>,
    end: Option<Timestamp>,
    rate: Option<NonZeroU32>,
}

impl Limits {
    fn of(key: &ApiKey) -> Self {
        let ApiKey { allowed_ips, expires_at, rate_limit, .. } = key;
        Self { ranges: allowed_ips.to_vec(), end: *expires_at, rate: *rate_limit }
    }

    /// What a key gets that these credentials make: what is not said is as theirs, and nothing is wider.
    fn within(self, identity: &Identity) -> std::result::Result<Self, Problem> {
        let Principal::Key(key) = &identity.principal else { return Ok(self) };
        let own = Self::of(key);
        let ranges = if self.ranges.is_empty() { own.ranges.clone() } else { self.ranges };
        let (end, rate) = (self.end.or(own.end), self.rate.or(own.rate));
        let is_within = |range: &IpRange| {
            own.ranges.is_empty() || own.ranges.iter().any(|own| own.covers(*range))
        };
        match ranges.iter().all(is_within)
            && own.end.is_none_or(|own| end.is_some_and(|end| end <= own))
            && own.rate.is_none_or(|own| rate.is_some_and(|rate| rate <= own))
        {
            true => Ok(Self { ranges, end, rate }),
            false => Err(beyond_limits()),
        }
    }
}

fn end(text: &str, now: Timestamp) -> std::result::Result<Timestamp, Problem> {
    let end: Timestamp = text.parse().map_err(|error: domain::time::NotATimestamp| {
        Problem::field("expires_at", error.to_string())
    })?;
    if end > now { Ok(end) } else { Err(Problem::field("expires_at", "must be in the future")) }
}

impl Listed for ApiKey {
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

#[OpenApi(prefix_path = "/v1", tag = "crate::document::Tag::Keys")]
impl KeysApi {
    /// List API keys
    ///
    /// Of the caller's mode, newest first.
    #[oai(path = "/api-keys", method = "get", operation_id = "listApiKeys")]
    async fn list(
        &self,
        caller: Caller,
        listing: Listing,
    ) -> Result<Json<Success<Page<ApiKeyBody>>>> {
        let tenant = caller.tenant();
        let directory = self.0.service.directory().await?.read();
        let rows = directory.api_keys.rows().map(|(_, key)| key);
        let rows = rows.filter(|key| key.is_seen_by(tenant));
        let selected = listing.select(&self.0, tenant, &[&"keys"], rows)?;
        Ok(Json(Success::of(selected.page(|key| self.body(key)))))
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
        let idempotent = keyed(request, caller.tenant(), Some(&body.json))?;
        let key = self.new_key(&caller, body.body)?;
        let world = &self.0.service.world;
        let secret = make_key(key.tenant.mode, &mut || world.ports.entropy.dice());
        let key = ApiKey {
            hash: hash_key(&self.0.settings.pepper, &secret),
            last4: secret[secret.len() - 4..].into(),
            ..key
        };
        let kept = self.0.for_repeats(caller.org(), idempotent.as_ref(), &secret).await?;
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
        let key = keyed(request, tenant, Some(&body.json))?;
        body.removes_only(&["allowed_ips", "agent_ids", "expires_at", "rate_limit"])?;
        let before = self.seen(&caller, id).await?;
        // Whoever changes a key gives away what it has.
        self.given_away(&caller, &before)?;
        let if_match = if_match(request)?;
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
        let idempotent = keyed(request, tenant, Some(&body.0.json))?;
        let before = self.seen(&caller, id).await?;
        self.given_away(&caller, &before)?;
        let grace = Duration::from_secs(body.0.body.grace_period_seconds.unwrap_or_default());
        let world = &self.0.service.world;
        let secret = make_key(before.tenant.mode, &mut || world.ports.entropy.dice());
        let hash = hash_key(&self.0.settings.pepper, &secret);
        let last4 = secret[secret.len() - 4..].to_owned();
        let kept = self.0.for_repeats(caller.org(), idempotent.as_ref(), &secret).await?;
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
    ) -> Result<Gone> {
        let (tenant, id) = (caller.tenant(), key_id(&id)?);
        let key = keyed(request, tenant, None)?;
        let answer = self.0.service.change(Command::DeleteApiKey { tenant, id }, key).await?;
        Ok(Gone::of(id, answer.replayed))
    }
}

fn dressed(reply: Reply) -> Result<ApiKeyBody> {
    let Reply::ApiKey(key) = reply else { return Err(Problem::internal().into()) };
    Ok(ApiKeyBody::of(&key))
}

impl KeysApi {
    /// A key, with the newest use that this node knows of.
    fn body(&self, key: &ApiKey) -> ApiKeyBody {
        match self.0.keys_used.of(key.id) {
            Some(used) => {
                ApiKeyBody::of(&ApiKey { last_used: Some(Box::new(used)), ..key.clone() })
            }
            None => ApiKeyBody::of(key),
        }
    }

    fn with_secret(&self, reply: Reply, replayed: bool, made: String) -> Result<ApiKeyBody> {
        let Reply::NewKey(key, sealed) = reply else { return Err(Problem::internal().into()) };
        let secret = self.0.repeated(key.tenant.org, replayed, &sealed, made)?;
        Ok(ApiKeyBody { key: Some(secret), ..ApiKeyBody::of(&key) })
    }

    async fn seen(&self, caller: &Caller, id: ApiKeyId) -> Result<std::sync::Arc<ApiKey>> {
        Ok(self.0.service.directory().await?.read().key(caller.tenant(), id)?)
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
        let limits = Limits {
            ranges: ranges(&body.allowed_ips.unwrap_or_default())?,
            end: body.expires_at.as_deref().map(|text| end(text, now)).transpose()?,
            rate: body.rate_limit.and_then(NonZeroU32::new),
        };
        let limits = limits.within(identity)?;
        Ok(ApiKey {
            id: world.mint(ApiKeyId::new),
            tenant: Tenant { org: identity.tenant.org, mode },
            name: body.name.into(),
            hash: [0; 32],
            last4: Box::default(),
            scopes: handed_on(identity, &words)?,
            created_at: now,
            allowed_ips: limits.ranges.into(),
            expires_at: limits.end,
            rate_limit: limits.rate,
            agent_ids: agents(&body.agent_ids.unwrap_or_default())?.into(),
            created_by: Some(identity.maker().into()),
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
        let is_null = |field: &str| is_removed(json, field);
        let now = self.0.service.world.now();
        let none = |field: &str, given: Option<Vec<String>>| {
            given.or_else(|| is_null(field).then(Vec::new))
        };
        let identity = caller.identity();
        let scopes = body.scopes.map(|words| handed_on(identity, &words)).transpose()?;
        let expires_at = match body.expires_at {
            Some(text) => Some(Some(end(&text, now)?)),
            None => is_null("expires_at").then_some(None),
        };
        let allowed_ips =
            none("allowed_ips", body.allowed_ips).map(|all| ranges(&all)).transpose()?;
        let rate_limit = match body.rate_limit {
            Some(most) => Some(NonZeroU32::new(most)),
            None => is_null("rate_limit").then_some(None),
        };
        let limits = Limits {
            ranges: allowed_ips.clone().unwrap_or_default(),
            end: expires_at.flatten(),
            rate: rate_limit.flatten(),
        };
        let limits = limits.within(identity)?;
        Ok(ApiKeyPatch {
            name: body.name,
            scopes,
            allowed_ips: allowed_ips.map(|_| limits.ranges),
            agent_ids: none("agent_ids", body.agent_ids).map(|all| agents(&all)).transpose()?,
            expires_at: expires_at.map(|_| limits.end),
            rate_limit: rate_limit.map(|_| limits.rate),
        })
    }

    /// Who rotates or changes a key can do all that it can: no more than they can themselves.
    fn given_away(&self, caller: &Caller, key: &ApiKey) -> std::result::Result<(), Problem> {
        let identity = caller.identity();
        handed_on(identity, &key.scopes.to_vec())?;
        let its = Limits::of(key);
        if its.clone().within(identity)? != its {
            return Err(beyond_limits());
        }
        let directory = self.0.service.world.directory().read();
        let owner = Some(Role::Owner);
        if directory.role_of_key(key) == owner && identity.acts_as(&directory) != owner {
            return Err(domain::Rejection::RoleTooHigh(Role::Owner.as_str().to_owned()).into());
        }
        Ok(())
    }
}
