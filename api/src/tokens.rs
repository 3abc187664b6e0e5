//! Access tokens (JWT, RFC 7519, signed with Ed25519, RFC 8037) and what is traded for them.
//!
//! A refresh token is no secret that is stored anywhere: it is the session's number and generation
//! with an HMAC under the cluster's pepper. So the token after a given one is always the same, which
//! is how a lost answer can be repeated, and a leaked data folder holds none.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use actors::call::ServiceError;
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use domain::{
    OrgId, SessionId,
    account::{Mode, Session, SigningKey},
    data_key::OF_CLUSTER,
    idempotency::Keyed,
};
use hmac::{Hmac, KeyInit as _, Mac as _};
use http::StatusCode;
use jsonwebtoken::{
    Algorithm, DecodingKey, EncodingKey, Header, Validation, decode, decode_header, encode,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;

use crate::{Shared, caller::wrong_key, error::Problem};

/// Lifetime of an access token in seconds (`interface`, JWT tokens).
pub(crate) const TOKEN_SECONDS: u64 = 3600;
/// How long an unused refresh token is good, in seconds.
pub(crate) const IDLE_SECONDS: u64 = 30 * 86_400;
/// How long a session lasts at most, in seconds.
pub(crate) const SESSION_SECONDS: u64 = 90 * 86_400;
/// Longest token that is looked at.
const TOKEN_BYTES_MAX: usize = 4096;
/// Tokens whose signature is known to be right.
const KNOWN_MAX: usize = 10_000;

/// What an access token says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claims {
    /// The person's id, or the application's where it acts for itself.
    pub sub: String,
    /// The person's address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub email: Option<String>,
    /// The organization.
    pub org: String,
    /// What it may do.
    pub scopes: Vec<String>,
    /// When it was made, in seconds since 1970.
    pub iat: u64,
    /// Until when it is good, in seconds since 1970.
    pub exp: u64,
    /// Who made it.
    pub iss: String,
    /// For whom: the same service.
    pub aud: String,
    /// Its own number.
    pub jti: String,
    /// Its session.
    pub sid: String,
    /// Live or test.
    pub livemode: bool,
    /// The application that has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client_id: Option<String>,
}

impl Claims {
    fn is_over(&self, now_seconds: u64) -> bool {
        self.exp <= now_seconds
    }
}

/// What a token says, whatever its time: signed by this key, made by one of us and for us.
fn claims_of(
    token: &str,
    public: &[u8],
    is_ours: impl FnOnce(&str) -> bool,
) -> Result<Claims, Problem> {
    let public = DecodingKey::from_ed_components(&URL_SAFE_NO_PAD.encode(public));
    let mut rules = Validation::new(Algorithm::EdDSA);
    rules.validate_exp = false;
    rules.validate_aud = false;
    rules.set_required_spec_claims(&["exp", "iss", "sub", "aud"]);
    let claims = decode::<Claims>(token, &public.map_err(|_| wrong_key())?, &rules);
    let claims = claims.map_err(|_| wrong_key())?.claims;
    if is_ours(&claims.iss) && claims.aud == claims.iss { Ok(claims) } else { Err(wrong_key()) }
}

/// The key that signed a token, and what the token says.
type Known = (String, Arc<Claims>);

/// What a node remembers of tokens.
#[derive(Default)]
pub(crate) struct TokenCache {
    /// With the key that signed it: a token is as good as that.
    known: Mutex<HashMap<[u8; 32], Known>>,
    signing: Mutex<Option<(String, EncodingKey)>>,
}

/// What secrets of answers are sealed for.
const ANSWER_PLACE: &str = "answers";

/// Where a signing key's private half is sealed for.
pub fn signing_place(id: &str) -> String {
    format!("signing/{id}")
}

fn expired() -> Problem {
    let message = "this access token has expired, or its session has ended; get another one from \
                   /v1/auth/refresh or log in";
    Problem::new(StatusCode::UNAUTHORIZED, "TOKEN_EXPIRED", message)
}

/// Whether a text is like a token of ours: its header says who signed it.
pub(crate) fn names_a_key(token: &str) -> bool {
    let is_short = token.len() <= TOKEN_BYTES_MAX;
    is_short && decode_header(token).is_ok_and(|header| header.kid.is_some())
}

impl Shared {
    fn now_seconds(&self) -> u64 {
        self.service.world.now().seconds()
    }

    /// 32 random bytes as text.
    pub(crate) fn random_text(&self) -> String {
        let dice = || self.service.world.ports.entropy.dice().to_be_bytes();
        URL_SAFE_NO_PAD.encode([dice(), dice()].concat())
    }

    /// A secret of an answer, sealed: kept for as long as the answer is repeated under its key, and
    /// not at all without one.
    pub(crate) async fn for_repeats(
        &self,
        org: OrgId,
        key: Option<&Keyed>,
        secret: &str,
    ) -> Result<Vec<u8>, ServiceError> {
        if key.is_none() {
            return Ok(vec![]);
        }
        let world = &self.service.world;
        Ok(self.service.sealer(org).await?.seal(secret, ANSWER_PLACE, &*world.ports.entropy))
    }

    /// The secret of an answer: the one made now, or that of the first, equal call.
    pub(crate) fn repeated(
        &self,
        org: OrgId,
        replayed: bool,
        sealed: &[u8],
        made: String,
    ) -> Result<String, Problem> {
        if !replayed {
            return Ok(made);
        }
        let sealer = self.service.world.opener(org);
        let opened = sealer.and_then(|sealer| sealer.open(sealed, ANSWER_PLACE));
        opened.map(|secret| secret.to_string()).map_err(|error| {
            tracing::error!(%error, "the secret of an answer can't be repeated");
            Problem::internal()
        })
    }

    /// An access token of a session.
    pub(crate) fn access_token(
        &self,
        session: &Session,
        email: Option<String>,
    ) -> Result<String, Problem> {
        let now = self.now_seconds();
        let application = session.application.map(|id| id.to_string());
        let sub = match (session.user, &application) {
            (Some(user), _) => user.to_string(),
            (None, Some(application)) => application.clone(),
            (None, None) => return Err(Problem::internal()),
        };
        self.sign(&Claims {
            sub,
            email,
            org: session.tenant.org.to_string(),
            scopes: session.scopes.to_vec(),
            iat: now,
            exp: now + session.token_seconds,
            iss: self.settings.auth_url.clone(),
            aud: self.settings.auth_url.clone(),
            jti: self.random_text(),
            sid: session.id.to_string(),
            livemode: session.tenant.mode == Mode::Live,
            client_id: application,
        })
    }

    fn sign(&self, claims: &Claims) -> Result<String, Problem> {
        let newest = {
            let directory = self.service.world.directory().read();
            directory.signing_keys.rows().next_back().map(|(_, key)| Arc::clone(key))
        };
        let newest = newest.ok_or_else(Problem::internal)?;
        let mut signing = self.tokens.signing.lock().unwrap_or_else(PoisonError::into_inner);
        if signing.as_ref().is_none_or(|(id, _)| *id != newest.id) {
            *signing = Some((newest.id.clone(), self.opened(&newest)?));
        }
        let (id, key) = signing.as_ref().ok_or_else(Problem::internal)?;
        let header = Header { kid: Some(id.clone()), ..Header::new(Algorithm::EdDSA) };
        encode(&header, claims, key).map_err(|error| {
            tracing::error!(%error, "a token could not be signed");
            Problem::internal()
        })
    }

    fn opened(&self, key: &SigningKey) -> Result<EncodingKey, Problem> {
        let told = |error: &dyn std::fmt::Display| {
            tracing::error!(%error, kid = key.id, "a signing key could not be opened");
            Problem::internal()
        };
        let sealer = self.service.world.opener(OF_CLUSTER);
        let text = sealer.and_then(|sealer| sealer.open(&key.sealed, &signing_place(&key.id)));
        let text = text.map_err(|error| told(&error))?;
        let der = URL_SAFE_NO_PAD.decode(text.as_bytes()).map_err(|error| told(&error))?;
        Ok(EncodingKey::from_ed_der(&der))
    }

    /// What a token says, if it is ours and good now.
    pub(crate) fn verify(&self, token: &str) -> Result<Arc<Claims>, Problem> {
        if token.len() > TOKEN_BYTES_MAX {
            return Err(wrong_key());
        }
        let digest: [u8; 32] = Sha256::digest(token).into();
        let known = {
            let known = self.tokens.known.lock().unwrap_or_else(PoisonError::into_inner);
            known.get(&digest).cloned()
        };
        let known = known.filter(|(kid, _)| self.signing_key(kid).is_some());
        let claims = match known {
            Some((_, claims)) => claims,
            None => {
                let (kid, claims) = self.read(token)?;
                let claims = Arc::new(claims);
                let mut known = self.tokens.known.lock().unwrap_or_else(PoisonError::into_inner);
                if known.len() >= KNOWN_MAX {
                    known.clear();
                }
                known.insert(digest, (kid, Arc::clone(&claims)));
                claims
            }
        };
        if claims.is_over(self.now_seconds()) || self.has_ended(&claims.sid) {
            return Err(expired());
        }
        Ok(claims)
    }

    fn has_ended(&self, session: &str) -> bool {
        let directory = self.service.world.directory().read();
        session.parse().map_or(true, |id| directory.ended_sessions.contains(&id))
    }

    fn signing_key(&self, kid: &str) -> Option<Arc<SigningKey>> {
        let directory = self.service.world.directory().read();
        let mut keys = directory.signing_keys.rows().map(|(_, key)| key);
        keys.find(|key| key.id == kid).cloned()
    }

    /// The claims of a token with a right signature, whatever its time, and the key that made it.
    fn read(&self, token: &str) -> Result<(String, Claims), Problem> {
        // The header only names the key; the algorithm is ours to say (RFC 8725, section 3.1).
        let header = decode_header(token).map_err(|_| wrong_key())?;
        let kid = header.kid.ok_or_else(wrong_key)?;
        let key = self.signing_key(&kid).ok_or_else(wrong_key)?;
        // Every node may have made it, under its own address.
        let directory = self.service.world.directory().read();
        let is_ours = |issuer: &str| {
            issuer == self.settings.auth_url
                || directory.nodes.rows().any(|(_, node)| node.facts.base_url == issuer)
        };
        Ok((kid, claims_of(token, &key.public, is_ours)?))
    }

    /// The public halves of the keys that sign tokens (RFC 7517).
    pub(crate) fn jwks(&self) -> Value {
        let directory = self.service.world.directory().read();
        let keys: Vec<Value> = directory
            .signing_keys
            .rows()
            .rev()
            .map(|(_, key)| {
                json!({
                    "kty": "OKP",
                    "crv": "Ed25519",
                    "use": "sig",
                    "alg": "EdDSA",
                    "kid": key.id,
                    "x": URL_SAFE_NO_PAD.encode(&key.public),
                })
            })
            .collect();
        json!({ "keys": keys })
    }

    /// The refresh token of a session's present generation.
    pub(crate) fn refresh_token(&self, session: &Session) -> String {
        let refresh = Refresh {
            org: session.tenant.org,
            session: session.id,
            generation: session.generation,
        };
        refresh.write(&self.settings.pepper)
    }
}

/// What a refresh token says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Refresh {
    pub(crate) org: OrgId,
    pub(crate) session: SessionId,
    pub(crate) generation: u64,
}

impl Refresh {
    fn write(self, pepper: &[u8; 32]) -> String {
        let Self { org, session, generation } = self;
        let said = format!("ir.{org}.{session}.{generation}");
        let proof = proof(pepper, &said);
        format!("{said}.{proof}")
    }

    /// Reads a token that we wrote.
    pub(crate) fn read(pepper: &[u8; 32], text: &str) -> Option<Self> {
        let (said, given) = text.rsplit_once('.').filter(|_| text.len() <= TOKEN_BYTES_MAX)?;
        let right = proof(pepper, said);
        if !bool::from(given.as_bytes().ct_eq(right.as_bytes())) {
            return None;
        }
        let mut parts = said.strip_prefix("ir.")?.split('.');
        let (org, session) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
        Some(Self { org, session, generation: parts.next()?.parse().ok()? })
    }
}

fn proof(pepper: &[u8; 32], said: &str) -> String {
    let mut mac = Hmac::<Sha256>::new_from_slice(pepper).expect("any length of key fits");
    mac.update(b"refresh token");
    mac.update(said.as_bytes());
    URL_SAFE_NO_PAD.encode(mac.finalize().into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The pair of RFC 8410, section 10: nobody's secret.
    const PRIVATE: &str = "MC4CAQAwBQYDK2VwBCIEINTuctv5E1hK1bbY8fdp-K06_nwoy_HU--CXqI9EdVhC";
    const PUBLIC: &str = "Gb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE";
    const ISSUER: &str = "https://roost.example";

    /// What a token with a right signature is read as that says this beside, or instead of, what it should.
    fn read(said: &Value) -> Result<Claims, Problem> {
        let mut claims = json!({
            "sub": "user_1", "org": "org_1", "scopes": ["agents:read"], "iat": 100, "exp": 200,
            "iss": ISSUER, "aud": ISSUER, "jti": "1", "sid": "session_1", "livemode": true,
        });
        for (name, value) in said.as_object().expect("claims") {
            let claims = claims.as_object_mut().expect("claims");
            if value.is_null() {
                claims.remove(name);
            } else {
                claims.insert(name.clone(), value.clone());
            }
        }
        let private = EncodingKey::from_ed_der(&URL_SAFE_NO_PAD.decode(PRIVATE).expect("a key"));
        let token = encode(&Header::new(Algorithm::EdDSA), &claims, &private).expect("a token");
        let public = URL_SAFE_NO_PAD.decode(PUBLIC).expect("a key");
        claims_of(&token, &public, |issuer| issuer == ISSUER)
    }

    #[test]
    fn a_right_signature_is_not_enough() {
        let good = read(&json!({})).expect("it is good");
        assert!(!good.is_over(199) && good.is_over(200) && good.is_over(201));
        for wrong in [
            json!({ "iss": "https://evil.example", "aud": "https://evil.example" }),
            json!({ "iss": "https://evil.example" }),
            json!({ "aud": "https://other.example" }),
            json!({ "aud": [ISSUER] }),
            json!({ "iss": format!("{ISSUER}/") }),
            json!({ "exp": null }),
            json!({ "exp": "200" }),
            json!({ "exp": -1 }),
            json!({ "iss": null }),
            json!({ "aud": null }),
            json!({ "sub": null }),
            json!({ "org": null }),
            json!({ "sid": null }),
            json!({ "scopes": "agents:read" }),
            json!({ "livemode": "yes" }),
        ] {
            assert!(read(&wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_refresh_token_is_read_back_and_cannot_be_forged() {
        let pepper = [3; 32];
        let refresh = Refresh { org: OrgId(1), session: SessionId(2), generation: 7 };
        let text = refresh.write(&pepper);
        assert_eq!(Refresh::read(&pepper, &text), Some(refresh));
        assert_eq!(Refresh::read(&[4; 32], &text), None);
        assert_eq!(Refresh::read(&pepper, &text.replace(".7.", ".8.")), None);
        assert_eq!(Refresh::read(&pepper, &text[..text.len() - 1]), None);
        assert_eq!(Refresh::read(&pepper, ""), None);
    }
}
