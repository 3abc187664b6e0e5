//! Who is asking: an API key or an access token, as `Authorization: Bearer …` or `X-API-Key: …`.
//!
//! Identification happens once, in the outermost layer, and so does the question whether the caller
//! may do what was asked ([`crate::access`]); an endpoint only asks whose objects it may show.

use std::{net::IpAddr, sync::Arc};

use domain::{
    AgentId, ApiKeyId, OrgId, SessionId, UserId,
    account::{ApiKey, Mode, Role, Scope, Scopes, Tenant, Used},
    directory::Directory,
};
use hmac::{Hmac, KeyInit as _, Mac as _};
use http::{HeaderMap, StatusCode, header};
use poem::Request;
use poem_openapi::{
    SecurityScheme,
    auth::{ApiKey as HeaderValue, Bearer},
};
use serde_json::json;
use sha2::Sha256;

use crate::{
    Shared,
    error::Problem,
    tokens::{Claims, names_a_key},
};

/// What keys that are restricted to agents may ask for at all.
const RESTRICTED: [&str; 25] = [
    "listAgents",
    "getAgent",
    "updateAgent",
    "startAgent",
    "stopAgent",
    "redeployAgent",
    "rollbackAgent",
    "listInstances",
    "listVersions",
    "listDeployments",
    "getDeployment",
    "cancelDeployment",
    "rollbackToDeployment",
    "getDeploymentLogs",
    "getAgentLogs",
    "getAgentMetrics",
    "invokeAgent",
    "passThrough",
    "listJobs",
    "getJob",
    "getJobOutput",
    "cancelJob",
    "retryJob",
    "deleteJob",
    "whoAmI",
];

/// What proved who it is.
#[derive(Clone, Debug)]
pub enum Principal {
    /// A key.
    Key(Arc<ApiKey>),
    /// A person's token, or that of an application a person let in.
    User {
        /// Who.
        id: UserId,
        /// What they are now.
        role: Role,
        /// What the token says.
        claims: Arc<Claims>,
    },
    /// An application's own token.
    Application(Arc<Claims>),
}

/// A caller who is known.
#[derive(Clone, Debug)]
pub struct Identity {
    /// Whose objects it may reach.
    pub tenant: Tenant,
    /// What it may do.
    pub scopes: Scopes,
    /// What proved who it is.
    pub principal: Principal,
}

impl Identity {
    /// Whether it may do what needs any of these scopes.
    pub fn permit_any(&self, wanted: &[Scope]) -> Result<(), Problem> {
        if wanted.iter().any(|scope| self.scopes.allows(*scope)) {
            return Ok(());
        }
        let required: Vec<_> = wanted.iter().map(|scope| scope.as_str()).collect();
        let message =
            format!("this needs the scope {}; use credentials that have it", required.join(" or "));
        let details = json!({ "required": required, "granted": self.scopes.to_vec() });
        Err(Problem::new(StatusCode::FORBIDDEN, "INSUFFICIENT_SCOPE", message).with(details))
    }

    /// A key for certain agents does nothing but look after and call those.
    pub(crate) fn restricted_to(&self, operation: &str) -> Result<(), Problem> {
        if self.agent_ids().is_empty() || RESTRICTED.contains(&operation) {
            return Ok(());
        }
        let message = "this API key is restricted to certain agents; use one that is not";
        let details = json!({ "agent_ids": self.agent_ids() });
        Err(Problem::new(StatusCode::FORBIDDEN, "INSUFFICIENT_SCOPE", message).with(details))
    }

    /// The agents it may touch; any if empty.
    pub fn agent_ids(&self) -> &[AgentId] {
        match &self.principal {
            Principal::Key(key) => &key.agent_ids,
            Principal::User { .. } | Principal::Application(_) => &[],
        }
    }

    /// The calls a minute of a key that has a limit of its own.
    pub fn own_rate(&self) -> Option<(ApiKeyId, u64)> {
        let Principal::Key(key) = &self.principal else { return None };
        Some((key.id, u64::from(key.rate_limit?.get())))
    }

    /// Whether it may touch an agent.
    pub fn may_touch(&self, agent: AgentId) -> bool {
        self.agent_ids().is_empty() || self.agent_ids().contains(&agent)
    }

    /// The role of a person; keys and applications have none of their own.
    pub fn role(&self) -> Option<Role> {
        match &self.principal {
            Principal::User { role, .. } => Some(*role),
            Principal::Key(_) | Principal::Application(_) => None,
        }
    }

    /// As whom it changes people: a key acts as its maker, an application as nobody.
    pub fn acts_as(&self, directory: &Directory) -> Option<Role> {
        match &self.principal {
            Principal::User { role, claims, .. } if claims.client_id.is_none() => Some(*role),
            Principal::Key(key) => directory.role_of_key(key),
            Principal::User { .. } | Principal::Application(_) => None,
        }
    }

    /// Who makes what it makes. What an application makes is the application's, for whomever it acts.
    pub fn maker(&self) -> String {
        match &self.principal {
            Principal::Key(key) => key.id.to_string(),
            Principal::User { id, claims, .. } => match &claims.client_id {
                Some(application) => format!("application:{application}"),
                None => id.to_string(),
            },
            Principal::Application(claims) => format!("application:{}", claims.sub),
        }
    }

    /// The kind of its credentials and its id, for people to read.
    pub fn name(&self) -> (&'static str, String) {
        match &self.principal {
            Principal::Key(key) => ("api_key", key.id.to_string()),
            Principal::User { id, .. } => ("user", id.to_string()),
            Principal::Application(claims) => ("application", claims.sub.clone()),
        }
    }
}

/// The result of identification, as it travels with the request.
#[derive(Clone)]
pub(crate) struct Identified(pub(crate) Result<Arc<Identity>, Problem>);

/// The client's address, as it travels with the request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClientAddress(pub(crate) Option<IpAddr>);

impl ClientAddress {
    pub(crate) fn of(request: &Request) -> Self {
        request.extensions().get().copied().unwrap_or(Self(None))
    }

    /// Whose it is: a customer of IPv6 has a whole /64.
    pub(crate) fn network(self) -> String {
        Self(self.0.map(actors::address::prefix)).text()
    }

    pub(crate) fn text(self) -> String {
        self.0.map_or_else(|| "unknown".to_owned(), |ip| ip.to_canonical().to_string())
    }
}

#[derive(SecurityScheme)]
#[oai(ty = "bearer", checker = "by_bearer", bearer_format = "API key or JWT")]
pub(crate) struct BearerKey(Arc<Identity>);

#[derive(SecurityScheme)]
#[oai(ty = "api_key", key_in = "header", key_name = "X-API-Key", checker = "by_header")]
pub(crate) struct HeaderKey(Arc<Identity>);

/// Whoever calls an operation.
#[derive(SecurityScheme)]
pub(crate) enum Caller {
    /// By `Authorization`.
    Bearer(BearerKey),
    /// By `X-API-Key`.
    Header(HeaderKey),
}

impl Caller {
    pub(crate) fn identity(&self) -> &Arc<Identity> {
        match self {
            Self::Bearer(BearerKey(identity)) | Self::Header(HeaderKey(identity)) => identity,
        }
    }

    /// Whose objects it may reach.
    pub(crate) fn tenant(&self) -> Tenant {
        self.identity().tenant
    }

    /// Its organization.
    pub(crate) fn org(&self) -> OrgId {
        self.tenant().org
    }
}

async fn by_bearer(request: &Request, _: Bearer) -> poem::Result<Arc<Identity>> {
    Ok(identified(request)?)
}

async fn by_header(request: &Request, _: HeaderValue) -> poem::Result<Arc<Identity>> {
    Ok(identified(request)?)
}

/// The caller of a request that passed the layers.
pub(crate) fn identified(request: &Request) -> Result<Arc<Identity>, Problem> {
    match request.extensions().get::<Identified>() {
        Some(Identified(result)) => result.clone(),
        None => Err(unauthenticated()),
    }
}

fn unauthenticated() -> Problem {
    let message = "send an API key or an access token as `Authorization: Bearer <key>`, or an API key as `X-API-Key: <key>`";
    Problem::new(StatusCode::UNAUTHORIZED, "UNAUTHENTICATED", message)
}

/// One answer for every key and token that is not good: who guesses learns nothing.
pub(crate) fn wrong_key() -> Problem {
    let message = "this API key or token is not valid; check it, or create another one";
    Problem::new(StatusCode::UNAUTHORIZED, "INVALID_API_KEY", message)
}

fn wrong_address(key: &ApiKey, address: ClientAddress) -> Problem {
    let message = "this API key may not be used from this address";
    let details = json!({ "address": address.text(), "key_id": key.id });
    Problem::new(StatusCode::FORBIDDEN, "IP_NOT_ALLOWED", message).with(details)
}

fn in_browser() -> Problem {
    let message =
        "API keys do not belong into browsers; let people log in and use their access token";
    Problem::new(StatusCode::FORBIDDEN, "IP_NOT_ALLOWED", message)
        .with(json!({ "reason": "origin_header" }))
}

/// The credentials of a request, from either header.
fn credentials(headers: &HeaderMap) -> Result<String, Problem> {
    let text = |value: &http::HeaderValue| value.to_str().ok().map(str::to_owned);
    let bearer = match headers.get(header::AUTHORIZATION) {
        None => None,
        Some(value) => {
            let value = text(value).unwrap_or_default();
            let (scheme, key) = value.split_once(' ').unwrap_or((value.as_str(), ""));
            if !scheme.eq_ignore_ascii_case("bearer") {
                return Err(unauthenticated());
            }
            Some(key.trim().to_owned())
        }
    };
    let direct = headers.get("x-api-key").map(|value| text(value).unwrap_or_default());
    match (bearer, direct) {
        (Some(one), Some(other)) if one != other => {
            let message = "Authorization and X-API-Key carry different keys; send one of them";
            Err(Problem::new(StatusCode::BAD_REQUEST, "INVALID_REQUEST", message))
        }
        (Some(key), _) | (None, Some(key)) => Ok(key),
        (None, None) => Err(unauthenticated()),
    }
}

/// Whether a request shows anything that may be a key or a token.
pub(crate) fn shows_credentials(headers: &HeaderMap) -> bool {
    let is_like_one = |text: String| text.starts_with("ey") || has_key_shape(&text);
    credentials(headers).is_ok_and(is_like_one)
}

/// Who is not let in, and what is said.
pub(crate) enum NotLetIn {
    /// Nobody knows whose call it is.
    Stranger(Problem),
    /// The key is good, and not for where the call comes from.
    Known(Arc<Identity>, Problem),
}

impl From<Problem> for NotLetIn {
    fn from(problem: Problem) -> Self {
        Self::Stranger(problem)
    }
}

/// Finds out who asks.
pub(crate) async fn identify(
    shared: &Shared,
    headers: &HeaderMap,
    address: ClientAddress,
) -> Result<Arc<Identity>, NotLetIn> {
    let text = credentials(headers)?;
    if text.starts_with("ey") && text.matches('.').count() == 2 {
        return Ok(Arc::new(good_token(shared, &text).await?));
    }
    let key = good_key(shared, &text).await?;
    let wrong = match key.allows_from(address.0) {
        false => Some(wrong_address(&key, address)),
        true => is_from_page(shared, headers).then(in_browser),
    };
    let (id, tenant, scopes) = (key.id, key.tenant, key.scopes);
    let identity = Arc::new(Identity { tenant, scopes, principal: Principal::Key(key) });
    if let Some(problem) = wrong {
        return Err(NotLetIn::Known(identity, problem));
    }
    shared.keys_used.note(id, Used { at: shared.service.world.now(), ip: address.text() });
    Ok(identity)
}

/// Whether a page of somebody else's sends this. Our own one, `/docs`, is for trying keys.
fn is_from_page(shared: &Shared, headers: &HeaderMap) -> bool {
    let Some(origin) = headers.get(header::ORIGIN) else { return false };
    let origin = origin.to_str().unwrap_or_default();
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok());
    let is_own = origin == shared.settings.public_url
        || host.is_some_and(|host| origin.strip_prefix("https://") == Some(host));
    !is_own
}

async fn good_key(shared: &Shared, text: &str) -> Result<Arc<ApiKey>, Problem> {
    let hash = hash_key(&shared.settings.pepper, text);
    let world = &shared.service.world;
    let mut known = world.directory().read().api_key(&hash);
    // One that was made a moment ago may not have come here yet.
    if known.is_none() && has_key_shape(text) && world.looks_up().await {
        known = world.directory().read().api_key(&hash);
    }
    let now = world.now();
    known.filter(|key| key.is_good(&hash, now)).ok_or_else(wrong_key)
}

async fn good_token(shared: &Shared, text: &str) -> Result<Identity, Problem> {
    let known = by_token(shared, text);
    // Whoever it is for, or the key that signed it, may not have come here yet.
    let may_be_new = known.as_ref().is_err_and(|problem| problem.code() == wrong_key().code())
        && names_a_key(text);
    match may_be_new && shared.service.world.looks_up().await {
        true => by_token(shared, text),
        false => known,
    }
}

/// Whether a text is like a key of ours, its checksum included.
fn has_key_shape(text: &str) -> bool {
    let prefixed = text.starts_with("ic_live_") || text.starts_with("ic_test_");
    let parts = text.len().checked_sub(CHECK_DIGITS).and_then(|at| text.split_at_checked(at));
    prefixed && parts.is_some_and(|(key, check)| checksum(key).as_bytes() == check.as_bytes())
}

pub(crate) fn by_token(shared: &Shared, text: &str) -> Result<Identity, Problem> {
    let claims = shared.verify(text)?;
    let directory = shared.service.world.directory().read();
    let org: OrgId = claims.org.parse().map_err(|_| wrong_key())?;
    let tenant = Tenant { org, mode: if claims.livemode { Mode::Live } else { Mode::Test } };
    let granted =
        Scopes::parse(claims.scopes.iter().map(String::as_str)).map_err(|_| wrong_key())?;
    if let Some(application) = &claims.client_id {
        let id = application.parse().map_err(|_| wrong_key())?;
        // The application may belong to another organization than the person who let it in.
        directory.applications.get(&id).ok_or_else(wrong_key)?;
    }
    let Ok(id) = claims.sub.parse::<UserId>() else {
        return Ok(Identity { tenant, scopes: granted, principal: Principal::Application(claims) });
    };
    let user = directory.user(org, id).map_err(|_| wrong_key())?;
    // To the millisecond, as its session's number tells it.
    let session: SessionId = claims.sid.parse().map_err(|_| wrong_key())?;
    if session.made_at() < user.sessions_since {
        return Err(wrong_key());
    }
    // A person who may do less than when the token was made does less with it.
    let scopes = granted.both(&user.role.scopes());
    Ok(Identity { tenant, scopes, principal: Principal::User { id, role: user.role, claims } })
}

/// What is stored of a key: HMAC-SHA-256 under the pepper. Looking it up by hash tells a guesser
/// nothing by its timing.
pub fn hash_key(pepper: &[u8; 32], key: &str) -> [u8; 32] {
    let mut mac = Hmac::<Sha256>::new_from_slice(pepper).expect("any length of key fits");
    mac.update(key.as_bytes());
    mac.finalize().into_bytes().into()
}

/// Makes an API key: prefix, 32 random base-62 characters, 6 for a CRC-32 that tells a typo.
pub fn make_key(mode: Mode, dice: &mut dyn FnMut() -> u128) -> String {
    let prefix = if mode.is_live() { "ic_live_" } else { "ic_test_" };
    let mut key = prefix.to_owned();
    while key.len() < prefix.len() + 32 {
        // Rejection keeps every character equally likely.
        for byte in dice().to_be_bytes() {
            if byte < 248 && key.len() < prefix.len() + 32 {
                key.push(char::from(DIGITS[usize::from(byte) % 62]));
            }
        }
    }
    let check = checksum(&key);
    key + &check
}

const DIGITS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
/// Digits of a key's checksum.
const CHECK_DIGITS: usize = 6;

/// A CRC-32 in base 62.
fn checksum(key: &str) -> String {
    let mut rest = crc32(key.as_bytes());
    let mut check = [b'0'; CHECK_DIGITS];
    for digit in check.iter_mut().rev() {
        *digit = DIGITS[(rest % 62) as usize];
        rest /= 62;
    }
    check.into_iter().map(char::from).collect()
}

/// CRC-32 (ISO-HDLC), bit by bit: it runs where a key is made, and where one is not known.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            (crc >> 1) ^ (if crc & 1 == 1 { 0xedb8_8320 } else { 0 })
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_has_its_shape_and_its_checksum() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
        let mut dice = 0;
        let key = make_key(Mode::Test, &mut || {
            dice += 0x0123_4567_89ab_cdef_1357;
            dice
        });
        assert!(key.starts_with("ic_test_"), "{key}");
        assert_eq!(key.len(), 8 + 32 + 6);
        assert!(has_key_shape(&key));
        for wrong in ["", "ic_test_", &key[1..], &key[..45], &key.replace("ic_test_", "ic_live_")] {
            assert!(!has_key_shape(wrong), "{wrong}");
        }
    }
}
