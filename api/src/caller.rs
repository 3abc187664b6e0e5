//! Who is asking: an API key as `Authorization: Bearer …` or `X-API-Key: …`.
//!
//! Identification happens once, in the outermost layer; an endpoint then only asks for a [`Scope`].

use std::sync::Arc;

use domain::account::{ApiKey, Mode, Tenant};
use hmac::{Hmac, KeyInit as _, Mac as _};
use http::{HeaderMap, StatusCode, header};
use poem::Request;
use poem_openapi::{
    SecurityScheme,
    auth::{ApiKey as HeaderValue, Bearer},
};
use serde_json::json;
use sha2::Sha256;

use crate::{Shared, error::Problem};

/// What a key may do (`interface`, Permission scopes).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// List and view clouds.
    CloudsRead,
    /// Create, update, delete clouds.
    CloudsWrite,
    /// List and view agents.
    AgentsRead,
    /// Deploy, update, delete agents.
    AgentsWrite,
    /// Call agent endpoints.
    AgentsInvoke,
    /// Full account access; what concerns the whole cluster needs it.
    Admin,
}

impl Scope {
    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::CloudsRead => "clouds:read",
            Self::CloudsWrite => "clouds:write",
            Self::AgentsRead => "agents:read",
            Self::AgentsWrite => "agents:write",
            Self::AgentsInvoke => "agents:invoke",
            Self::Admin => "admin:*",
        }
    }
}

/// A caller whose key is known.
#[derive(Clone, Debug)]
pub struct Identity {
    /// Whose objects it may reach.
    pub tenant: Tenant,
    scopes: Vec<String>,
}

impl Identity {
    fn of(key: &ApiKey) -> Self {
        Self { tenant: key.tenant, scopes: key.scopes.clone() }
    }

    /// Whether it may do what needs any of these scopes.
    pub fn permit_any(&self, wanted: &[Scope]) -> Result<(), Problem> {
        let covers = |scope: &Scope| {
            let (noun, _) = scope.as_str().split_once(':').unwrap_or_default();
            self.scopes.iter().any(|has| {
                has == "admin:*" || has == scope.as_str() || has.strip_suffix(":*") == Some(noun)
            })
        };
        if wanted.iter().any(covers) {
            return Ok(());
        }
        let required: Vec<_> = wanted.iter().map(|scope| scope.as_str()).collect();
        let message =
            format!("this needs the scope {}; use a key that has it", required.join(" or "));
        let details = json!({ "required": required, "granted": self.scopes });
        Err(Problem::new(StatusCode::FORBIDDEN, "INSUFFICIENT_SCOPE", message).with(details))
    }
}

/// The result of identification, as it travels with the request.
#[derive(Clone)]
pub(crate) struct Identified(pub(crate) Result<Arc<Identity>, Problem>);

#[derive(SecurityScheme)]
#[oai(ty = "bearer", checker = "by_bearer", bearer_format = "API key")]
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
    pub(crate) fn identity(&self) -> &Identity {
        match self {
            Self::Bearer(BearerKey(identity)) | Self::Header(HeaderKey(identity)) => identity,
        }
    }

    /// Whose objects it may reach.
    pub(crate) fn tenant(&self) -> Tenant {
        self.identity().tenant
    }

    /// Whether it may do this.
    pub(crate) fn permit(&self, scope: Scope) -> Result<(), Problem> {
        self.identity().permit_any(&[scope])
    }
}

impl Caller {
    /// Whether it may look after the cluster: with full access, and for production.
    pub(crate) fn permit_operating(&self) -> Result<(), Problem> {
        self.permit(Scope::Admin)?;
        if self.tenant().mode == Mode::Live {
            return Ok(());
        }
        let message = "the cluster is looked after with a live key; this is a test key";
        Err(Problem::new(StatusCode::FORBIDDEN, "TEST_MODE_ONLY", message))
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
    let message = "send an API key as `Authorization: Bearer <key>` or `X-API-Key: <key>`";
    Problem::new(StatusCode::UNAUTHORIZED, "UNAUTHENTICATED", message)
}

fn wrong_key() -> Problem {
    let message = "this API key is not valid; check it, or create another one";
    Problem::new(StatusCode::UNAUTHORIZED, "INVALID_API_KEY", message)
}

/// Finds out who asks.
pub(crate) fn identify(shared: &Shared, headers: &HeaderMap) -> Result<Arc<Identity>, Problem> {
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
    let key = match (bearer, direct) {
        (Some(one), Some(other)) if one != other => {
            let message = "Authorization and X-API-Key carry different keys; send one of them";
            return Err(Problem::new(StatusCode::BAD_REQUEST, "INVALID_REQUEST", message));
        }
        (Some(key), _) | (None, Some(key)) => key,
        (None, None) => return Err(unauthenticated()),
    };
    let hash = hash_key(&shared.settings.pepper, &key);
    let known = shared.service.world.directory().read().api_key(&hash);
    known.map(|key| Arc::new(Identity::of(&key))).ok_or_else(wrong_key)
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
    const DIGITS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
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
    let mut rest = crc32(key.as_bytes());
    let mut check = [b'0'; 6];
    for digit in check.iter_mut().rev() {
        *digit = DIGITS[(rest % 62) as usize];
        rest /= 62;
    }
    key.push_str(std::str::from_utf8(&check).unwrap_or_default());
    key
}

/// CRC-32 (ISO-HDLC), bit by bit: it runs once per key.
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
    }
}
