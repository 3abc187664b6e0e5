//! `Idempotency-Key`: which key, in which scope, with which body.

use std::{fmt::Display, sync::OnceLock};

use domain::{account::Tenant, idempotency::Keyed};
use hmac::{Hmac, KeyInit as _, Mac as _};
use poem::Request;
use poem_openapi::{ApiResponse, payload::Json};
use sha2::{Digest as _, Sha256};

use crate::{
    envelope::{Deleted, Success},
    error::Problem,
};

/// Longest key.
const KEY_CHARS_MAX: usize = 255;

/// The key of a call, if it has one. A call with the same key and another body, or whatever else tells it apart, is
/// another call.
pub(crate) fn keyed(
    request: &Request,
    tenant: Tenant,
    body: Option<&dyn Display>,
) -> Result<Option<Keyed>, Problem> {
    let Some(value) = request.headers().get("idempotency-key") else { return Ok(None) };
    let key = value.to_str().unwrap_or_default();
    if key.is_empty() || key.len() > KEY_CHARS_MAX {
        let why = format!("must have 1 to {KEY_CHARS_MAX} visible characters");
        return Err(Problem::field("Idempotency-Key", why));
    }
    let mut digest = Sha256::new();
    let mode = if tenant.mode.is_live() { "live" } else { "test" };
    let (method, path) = (request.method().as_str(), request.original_uri().path());
    for part in [&tenant.org.to_string(), mode, method, path, key] {
        digest.update((part.len() as u64).to_be_bytes());
        digest.update(part);
    }
    let body = body.map_or([0; 32], |body| Sha256::digest(body.to_string()).into());
    let fingerprint = under_pepper(&body);
    Ok(Some(Keyed { hash: digest.finalize().into(), fingerprint }))
}

/// Keyed fingerprints: that of a body with a password in it must not help anybody guess.
static PEPPER: OnceLock<[u8; 32]> = OnceLock::new();

/// Says what fingerprints are keyed with, once per process.
pub(crate) fn set_pepper(pepper: [u8; 32]) {
    PEPPER.get_or_init(|| pepper);
}

fn under_pepper(fingerprint: &[u8; 32]) -> [u8; 32] {
    let mut mac = Hmac::<Sha256>::new_from_slice(PEPPER.get().map_or(&[0; 32], |pepper| pepper))
        .expect("any length of key fits");
    mac.update(b"fingerprint");
    mac.update(fingerprint);
    mac.finalize().into_bytes().into()
}

/// What was there is gone.
#[derive(ApiResponse)]
pub(crate) enum Gone {
    /// It is gone.
    #[oai(status = 200)]
    Ok(Json<Success<Deleted>>, #[oai(header = "Idempotency-Replayed")] Option<String>),
}

impl Gone {
    /// What had this id.
    pub(crate) fn of(id: impl std::fmt::Display, is_replay: bool) -> Self {
        Self::Ok(Json(Success::of(Deleted::of(id))), replayed(is_replay))
    }
}

/// The header of a stored answer.
pub(crate) fn replayed(replayed: bool) -> Option<String> {
    replayed.then(|| "true".to_owned())
}
