//! OAuth 2.0 (RFC 6749, with RFC 7009, RFC 7636, RFC 7662 and RFC 9700): applications, and tokens for
//! the codes that people give them. The page that asks people is [`crate::authorize`].
//!
//! The specification shows JSON, the standard demands forms. Whoever sends JSON is answered in our
//! envelope; whoever sends a form is answered as the standard says.

use std::{collections::BTreeMap, sync::Arc};

use actors::call::auditing::{self, Whose};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use domain::{
    ApplicationId, OrgId, Timestamp,
    account::{Application, Redemption, Scopes, Session, Tenant},
    directory::{Command, Reply},
};
use http::{HeaderMap, Method, StatusCode, Uri, header};
use poem::{Request, Response};
use poem_openapi::{ApiResponse, OpenApi, param::Path, payload::Json, types::ToJSON as _};
use serde::Deserialize;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;

use crate::{
    Handle, Shared,
    auth::TokenAnswer,
    body::account::{
        ApplicationBody, CreateApplication, Introspection, TokenBody, TokenQuestion, TokenRequest,
    },
    caller::{Caller, ClientAddress, by_token, hash_key},
    check::Checked,
    envelope::{Page, Success},
    error::{ApiError, Problem, path_id},
    keys::{handed_on, without_limits},
    listing::{Listed, Listing},
    repeat::{Gone, keyed, replayed},
    tokens::{Claims, Refresh, TOKEN_SECONDS},
};

pub(crate) struct OauthApi(pub(crate) Handle);

/// A new application.
#[derive(ApiResponse)]
pub(crate) enum ApplicationCreated {
    /// The application, with its secret.
    #[oai(status = 201)]
    Created(Json<Success<ApplicationBody>>, #[oai(header = "Idempotency-Replayed")] Option<String>),
}

type Result<T> = std::result::Result<T, ApiError>;
type Told<T> = std::result::Result<T, Problem>;

/// What a code begins with.
const CODE_PREFIX: &str = "ic_code";
/// Longest redirect address.
const URI_BYTES_MAX: usize = 2048;

fn bad(code: &str, message: &str) -> Problem {
    Problem::new(StatusCode::BAD_REQUEST, code, message)
}

fn invalid_client() -> Problem {
    let message = "the application is not known, or its secret is wrong";
    Problem::new(StatusCode::UNAUTHORIZED, "INVALID_CLIENT", message)
}

fn invalid_grant() -> Problem {
    bad(
        "INVALID_GRANT",
        "the code or token is not valid: it was used, is too old or was given to somebody else",
    )
}

/// The text of a code: whose shard has it, and the secret part.
pub(crate) fn code_text(org: OrgId, secret: &str) -> String {
    format!("{CODE_PREFIX}.{org}.{secret}")
}

fn code_org(code: &str) -> Option<OrgId> {
    let mut parts = code.split('.');
    (parts.next()? == CODE_PREFIX).then_some(())?;
    parts.next()?.parse().ok()
}

/// Where people may be sent back to.
fn check_redirect(place: usize, text: &str) -> Told<()> {
    let field = format!("redirect_uris[{place}]");
    let wrong = |why: &str| Err(Problem::field(&field, why));
    if text.len() > URI_BYTES_MAX
        || text.contains('#')
        || !text.bytes().all(|b| b.is_ascii_graphic())
    {
        return wrong("must be an address of at most 2048 visible characters without a fragment");
    }
    let Ok(uri) = text.parse::<Uri>() else { return wrong("must be an absolute address") };
    let (scheme, authority) = (uri.scheme_str().unwrap_or_default(), uri.authority());
    let Some(authority) = authority.filter(|authority| !authority.as_str().contains('@')) else {
        return wrong("must be an absolute address without a user in it");
    };
    let host = authority.host();
    if host.contains('*') {
        return wrong("must be one address; wildcards are not taken");
    }
    // It stands in the policy of our own pages.
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._[]:".contains(&byte);
    let port = authority.as_str().strip_prefix(host).unwrap_or_default();
    let is_port = port.strip_prefix(':').is_some_and(|port| port.parse::<u16>().is_ok());
    if !host.bytes().all(is_plain) || !port.is_empty() && !is_port {
        return wrong(
            "must have a host of letters, digits, dots and hyphens, and a port below 65536",
        );
    }
    let is_loopback = matches!(host, "localhost" | "127.0.0.1" | "[::1]");
    match scheme {
        "https" => Ok(()),
        "http" if is_loopback => Ok(()),
        _ => wrong("must be https, or http on a loopback address"),
    }
}

impl Shared {
    /// The application that a request proves to be.
    fn client(&self, shown: Credentials) -> Told<Arc<Application>> {
        let id: ApplicationId =
            shown.id.and_then(|id| id.parse().ok()).ok_or_else(invalid_client)?;
        let row = self.service.world.directory().read().applications.get(&id);
        let row = row.ok_or_else(invalid_client)?;
        let is_right = match (&row.secret_hash, shown.secret) {
            (Some(known), Some(secret)) => {
                let given = hash_key(&self.settings.pepper, &secret);
                bool::from(known.ct_eq(&given))
            }
            (None, secret) => secret.is_none_or(|secret| secret.is_empty()),
            (Some(_), None) => false,
        };
        if is_right { Ok(row) } else { Err(invalid_client()) }
    }

    /// The application that proves by the secret in a header who it is.
    pub(crate) fn client_by_header(&self, headers: &HeaderMap) -> Option<Arc<Application>> {
        let (id, secret) = headers.get(header::AUTHORIZATION).and_then(basic)?;
        let shown = Credentials { id: Some(id), secret: Some(secret) };
        self.client(shown).ok().filter(|application| application.secret_hash.is_some())
    }

    /// The application that proves by the secret in a body, a form or JSON, who it is.
    pub(crate) fn client_by_body(&self, text: &[u8]) -> Option<Arc<Application>> {
        let shown = serde_json::from_slice::<Shown>(text).ok();
        let shown = shown.or_else(|| serde_urlencoded::from_bytes(text).ok())?;
        let shown = Credentials { id: Some(shown.client_id), secret: Some(shown.client_secret) };
        self.client(shown).ok().filter(|application| application.secret_hash.is_some())
    }

    /// Tokens for whatever grant a request shows.
    async fn exchange(
        &self,
        headers: &HeaderMap,
        request: TokenRequest,
        client: String,
    ) -> Told<TokenBody> {
        self.service.directory().await?;
        let shown =
            Credentials::of(headers, request.client_id.clone(), request.client_secret.clone())?;
        let application = self.client(shown)?;
        match request.grant_type.as_str() {
            "authorization_code" => self.by_code(&application, request, client).await,
            "refresh_token" => {
                let token = required("refresh_token", request.refresh_token)?;
                let scope = request.scope.as_deref();
                let granted = self.refresh(&token, Some(application.id), scope, client).await;
                granted.map_err(|problem| match problem.status() {
                    StatusCode::UNAUTHORIZED => invalid_grant(),
                    _ => problem,
                })
            }
            "client_credentials" => self.by_itself(&application, request.scope, client),
            _ => Err(bad(
                "UNSUPPORTED_GRANT_TYPE",
                "grant_type must be authorization_code, refresh_token or client_credentials",
            )),
        }
    }

    async fn by_code(
        &self,
        application: &Application,
        request: TokenRequest,
        client: String,
    ) -> Told<TokenBody> {
        auditing::belongs_to(Whose::application(application.tenant, application.id));
        let code = required("code", request.code)?;
        let redirect_uri = required("redirect_uri", request.redirect_uri)?;
        let org = code_org(&code).ok_or_else(invalid_grant)?;
        let session = self.new_session(application.tenant, Scopes::default(), client);
        let redemption = Redemption {
            hash: hash_key(&self.settings.pepper, &code),
            application: application.id,
            redirect_uri,
            challenge: request.code_verifier.map(challenge).transpose()?,
            session: Session {
                application: Some(application.id),
                token_seconds: application.token_seconds,
                ..session
            },
        };
        let session = self.service.redeem_code(org, redemption).await?;
        self.tokens_of(&session)
    }

    /// An application acts for itself. Nothing of that is stored: its tokens end with it.
    fn by_itself(
        &self,
        application: &Application,
        scope: Option<String>,
        client: String,
    ) -> Told<TokenBody> {
        if application.secret_hash.is_none() {
            return Err(invalid_client());
        }
        let scopes = asked_for(application, scope.as_deref())?;
        let session = self.new_session(application.tenant, scopes, client);
        self.tokens_of(&Session {
            application: Some(application.id),
            token_seconds: application.token_seconds,
            ..session
        })
    }

    async fn revoke(&self, headers: &HeaderMap, question: TokenQuestion) -> Told<()> {
        self.service.directory().await?;
        let shown = Credentials::of(headers, question.client_id, question.client_secret)?;
        let application = self.client(shown)?;
        auditing::belongs_to(Whose::application(application.tenant, application.id));
        let found = match Refresh::read(&self.settings.pepper, &question.token) {
            Some(refresh) => Some((refresh.org, refresh.session, false)),
            None => self.verify(&question.token).ok().and_then(|claims| {
                let is_own = claims.client_id == Some(application.id.to_string());
                Some((claims.org.parse().ok()?, claims.sid.parse().ok()?, is_own))
            }),
        };
        let Some((org, id, is_own)) = found else { return Ok(()) };
        // A token that an application got for itself has a number of a session, and no session.
        let session = self.service.session(org, id).await?;
        if session.map_or(is_own, |session| session.application == Some(application.id)) {
            self.service.close_session(org, id).await?;
        }
        Ok(())
    }

    /// Whether an access token would be taken, and its session goes on. An application that acts for
    /// itself has no session.
    async fn is_live(&self, token: &str, claims: &Claims) -> Told<bool> {
        if by_token(self, token).is_err() {
            return Ok(false);
        }
        if Some(&claims.sub) == claims.client_id.as_ref() {
            return Ok(true);
        }
        let (Ok(org), Ok(id)) = (claims.org.parse(), claims.sid.parse()) else { return Ok(false) };
        Ok(self.service.session(org, id).await?.is_some())
    }

    async fn introspect(
        &self,
        headers: &HeaderMap,
        question: TokenQuestion,
    ) -> Told<Introspection> {
        self.service.directory().await?;
        let shown = Credentials::of(headers, question.client_id, question.client_secret)?;
        let application = self.client(shown)?;
        if application.secret_hash.is_none() {
            return Err(invalid_client());
        }
        let own = Some(application.id.to_string());
        if let Some(refresh) = Refresh::read(&self.settings.pepper, &question.token) {
            let session = self.service.session(refresh.org, refresh.session).await?;
            let session = session.filter(|session| {
                session.generation == refresh.generation
                    && session.application == Some(application.id)
                    && self.is_good(session)
            });
            return Ok(session.map_or_else(Introspection::default, |session| Introspection {
                active: true,
                scope: Some(session.scopes.to_vec().join(" ")),
                client_id: own,
                exp: Some(session.expires_at.seconds()),
                iat: Some(session.created_at.seconds()),
                sub: session.user.map(|id| id.to_string()),
                ..Introspection::default()
            }));
        }
        let claims = self.verify(&question.token).ok().filter(|claims| claims.client_id == own);
        let claims = match claims {
            Some(claims) if self.is_live(&question.token, &claims).await? => Some(claims),
            Some(_) | None => None,
        };
        Ok(claims.map_or_else(Introspection::default, |claims| Introspection {
            active: true,
            scope: Some(claims.scopes.join(" ")),
            client_id: own,
            username: claims.email.clone(),
            token_type: Some("Bearer".to_owned()),
            exp: Some(claims.exp),
            iat: Some(claims.iat),
            sub: Some(claims.sub.clone()),
            iss: Some(claims.iss.clone()),
        }))
    }
}

/// What a PKCE verifier was promised as (RFC 7636, section 4): 43 to 128 unreserved characters.
fn challenge(verifier: String) -> Told<[u8; 32]> {
    let is_unreserved = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    match (43..=128).contains(&verifier.len()) && verifier.bytes().all(is_unreserved) {
        true => Ok(Sha256::digest(verifier).into()),
        false => Err(invalid_grant()),
    }
}

/// What an application asks for, if it may.
pub(crate) fn asked_for(application: &Application, scope: Option<&str>) -> Told<Scopes> {
    asked_of(&application.scopes, scope)
}

/// The scopes that are asked for, of these; all if none is named.
pub(crate) fn asked_of(granted: &Scopes, scope: Option<&str>) -> Told<Scopes> {
    let Some(words) = scope.filter(|scope| !scope.trim().is_empty()) else {
        return Ok(*granted);
    };
    let wanted = Scopes::parse(words.split_ascii_whitespace());
    let wanted = wanted.map_err(|error| bad("INVALID_SCOPE", &error.to_string()))?;
    match granted.lacks(&wanted) {
        None => Ok(wanted),
        Some(word) => {
            let message = format!("the scope {word} is more than was granted");
            Err(bad("INVALID_SCOPE", &message))
        }
    }
}

fn required(field: &str, value: Option<String>) -> Told<String> {
    let missing = || bad("INVALID_REQUEST", &format!("{field} is required for this grant_type"));
    value.filter(|value| !value.is_empty()).ok_or_else(missing)
}

/// How an application proves itself.
/// What a body says of who sends it.
#[derive(Deserialize)]
struct Shown {
    client_id: String,
    client_secret: String,
}

struct Credentials {
    id: Option<String>,
    secret: Option<String>,
}

impl Credentials {
    fn of(headers: &HeaderMap, id: Option<String>, secret: Option<String>) -> Told<Self> {
        let Some(value) = headers.get(header::AUTHORIZATION) else {
            return Ok(Self { id, secret });
        };
        if secret.is_some() {
            return Err(bad("INVALID_REQUEST", "send the client's secret once, not twice"));
        }
        let (user, password) = basic(value).ok_or_else(invalid_client)?;
        if id.is_some_and(|id| id != user) {
            return Err(bad(
                "INVALID_REQUEST",
                "client_id and Authorization name different clients",
            ));
        }
        Ok(Self { id: Some(user), secret: Some(password) })
    }
}

/// HTTP Basic, with both parts form-encoded first (RFC 6749, section 2.3.1).
fn basic(value: &http::HeaderValue) -> Option<(String, String)> {
    let (scheme, rest) = value.to_str().ok()?.split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let text = String::from_utf8(STANDARD.decode(rest.trim()).ok()?).ok()?;
    let (user, password) = text.split_once(':')?;
    let plain = |part: &str| {
        let pairs: Vec<(String, String)> = serde_urlencoded::from_str(&format!("v={part}")).ok()?;
        pairs.into_iter().next().map(|(_, value)| value)
    };
    Some((plain(user)?, plain(password)?))
}

impl Listed for Application {
    fn id(&self) -> String {
        self.id.to_string()
    }

    fn texts(&self) -> Vec<&str> {
        vec![&self.name]
    }

    fn created_at(&self) -> Timestamp {
        self.created_at
    }
}

#[OpenApi(prefix_path = "/v1", tag = "crate::document::Tag::Oauth")]
impl OauthApi {
    /// Exchange an authorization code
    ///
    /// Also `refresh_token` and `client_credentials`. JSON is answered in the envelope; a form
    /// (`application/x-www-form-urlencoded`) as RFC 6749 says.
    #[oai(path = "/oauth/token", method = "post", operation_id = "exchangeToken")]
    async fn token(&self, request: &Request, body: Checked<TokenRequest>) -> Result<TokenAnswer> {
        let client = ClientAddress::of(request).text();
        Ok(self.0.exchange(request.headers(), body.body, client).await?.into())
    }

    /// Revoke a token
    ///
    /// RFC 7009: ends the session of a token of the application. An unknown token is no error.
    #[oai(path = "/oauth/revoke", method = "post", operation_id = "revokeToken")]
    async fn revoke(
        &self,
        request: &Request,
        body: Checked<TokenQuestion>,
    ) -> Result<Json<Success<Introspection>>> {
        self.0.revoke(request.headers(), body.body).await?;
        Ok(Json(Success::of(Introspection::default())))
    }

    /// Introspect a token
    ///
    /// RFC 7662: what is known of a token of the application.
    #[oai(path = "/oauth/introspect", method = "post", operation_id = "introspectToken")]
    async fn introspect(
        &self,
        request: &Request,
        body: Checked<TokenQuestion>,
    ) -> Result<Json<Success<Introspection>>> {
        let known = self.0.introspect(request.headers(), body.body).await?;
        Ok(Json(Success::of(known)))
    }

    /// List OAuth applications
    ///
    /// Newest first.
    #[oai(path = "/oauth/applications", method = "get", operation_id = "listApplications")]
    async fn list(
        &self,
        caller: Caller,
        listing: Listing,
    ) -> Result<Json<Success<Page<ApplicationBody>>>> {
        let directory = self.0.service.directory().await?.read();
        let rows = directory.applications.rows().map(|(_, row)| row);
        let rows = rows.filter(|row| row.tenant == caller.tenant());
        let selected = listing.select(&self.0, caller.tenant(), &[&"applications"], rows)?;
        Ok(Json(Success::of(selected.page(ApplicationBody::of))))
    }

    /// Register an OAuth application
    ///
    /// The secret is shown in this answer alone.
    #[oai(path = "/oauth/applications", method = "post", operation_id = "createApplication")]
    async fn create(
        &self,
        caller: Caller,
        request: &Request,
        body: Checked<CreateApplication>,
    ) -> Result<ApplicationCreated> {
        without_limits(caller.identity())?;
        let key = keyed(request, caller.tenant(), Some(&body.json))?;
        let CreateApplication { name, redirect_uris, scopes, public, token_lifetime } = body.body;
        for (place, text) in redirect_uris.iter().enumerate() {
            check_redirect(place, text)?;
        }
        let secret = (public != Some(true)).then(|| format!("ics_{}", self.0.random_text()));
        let plain = secret.as_deref().unwrap_or_default();
        let kept = self.0.for_repeats(caller.org(), key.as_ref(), plain).await?;
        let world = &self.0.service.world;
        let application = Application {
            id: world.mint(ApplicationId::new),
            tenant: caller.tenant(),
            name,
            redirect_uris,
            scopes: handed_on(caller.identity(), &scopes)?,
            secret_hash: secret.as_ref().map(|text| hash_key(&self.0.settings.pepper, text)),
            token_seconds: token_lifetime.unwrap_or(TOKEN_SECONDS),
            created_at: world.now(),
        };
        let command =
            Command::CreateApplication { application: Box::new(application), answer: kept };
        let answer = self.0.service.change(command, key).await?;
        let Reply::Application(row, sealed) = answer.value else {
            return Err(Problem::internal().into());
        };
        let repeat = |made| self.0.repeated(caller.org(), answer.replayed, &sealed, made);
        let secret = secret.map(repeat).transpose()?;
        let body = ApplicationBody { client_secret: secret, ..ApplicationBody::of(&row) };
        Ok(ApplicationCreated::Created(Json(Success::of(body)), replayed(answer.replayed)))
    }

    /// Delete an OAuth application
    ///
    /// Its tokens are refused at once.
    #[oai(path = "/oauth/applications/:id", method = "delete", operation_id = "deleteApplication")]
    async fn delete(
        &self,
        caller: Caller,
        request: &Request,
        /// The `client_id`.
        id: Path<String>,
    ) -> Result<Gone> {
        let (tenant, id) = (caller.tenant(), path_id::<ApplicationId>("application", &id)?);
        let key = keyed(request, tenant, None)?;
        let answer = self.0.service.change(Command::DeleteApplication { tenant, id }, key).await?;
        Ok(Gone::of(id, answer.replayed))
    }
}

/// Whether a request speaks the standard's dialect.
pub(crate) fn is_form(request: &Request) -> bool {
    let path = request.uri().path();
    let is_ours = matches!(path, "/v1/oauth/token" | "/v1/oauth/revoke" | "/v1/oauth/introspect");
    let kind = request.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    let kind = kind.unwrap_or_default().split(';').next().unwrap_or_default().trim();
    is_ours
        && *request.method() == Method::POST
        && kind.eq_ignore_ascii_case("application/x-www-form-urlencoded")
}

/// The fields of a form; none may come twice (RFC 6749, section 3.2).
pub(crate) fn fields(text: &[u8]) -> Told<BTreeMap<String, String>> {
    let unreadable = |_| bad("INVALID_REQUEST", "the form can't be read");
    let pairs: Vec<(String, String)> = serde_urlencoded::from_bytes(text).map_err(unreadable)?;
    let mut fields = BTreeMap::new();
    for (name, value) in pairs {
        if fields.insert(name.clone(), value).is_some() {
            let name: String = name.chars().take(64).collect();
            return Err(bad("INVALID_REQUEST", &format!("the field {name} comes twice")));
        }
    }
    Ok(fields)
}

/// Answers a form as the standard says.
pub(crate) async fn serve_form(shared: &Shared, mut request: Request) -> Response {
    let with_basic = request.headers().contains_key(header::AUTHORIZATION);
    match answer_form(shared, &mut request).await {
        Ok(body) => plain(StatusCode::OK, &body),
        Err(problem) => {
            let status = problem.status();
            let mut response = plain(status, &standard_error(&problem));
            if status == StatusCode::UNAUTHORIZED && with_basic {
                let value = http::HeaderValue::from_static("Basic realm=\"oauth\"");
                response.headers_mut().insert(header::WWW_AUTHENTICATE, value);
            }
            response
        }
    }
}

async fn answer_form(shared: &Shared, request: &mut Request) -> Told<Value> {
    let text = request.take_body().into_bytes().await;
    let text = text.map_err(|error| crate::layers::unreadable_body(&error))?;
    let mut fields = fields(&text)?;
    let mut take = |name: &str| fields.remove(name).filter(|value| !value.is_empty());
    let (client_id, client_secret) = (take("client_id"), take("client_secret"));
    let client = ClientAddress::of(request).text();
    let path = request.uri().path().to_owned();
    if path == "/v1/oauth/token" {
        let asked = TokenRequest {
            grant_type: required("grant_type", take("grant_type"))?,
            client_id,
            client_secret,
            code: take("code"),
            redirect_uri: take("redirect_uri"),
            code_verifier: take("code_verifier"),
            refresh_token: take("refresh_token"),
            scope: take("scope"),
        };
        let granted = shared.exchange(request.headers(), asked, client).await?;
        return Ok(granted.to_json().unwrap_or_default());
    }
    let question = TokenQuestion {
        token: required("token", take("token"))?,
        token_type_hint: take("token_type_hint"),
        client_id,
        client_secret,
    };
    if path == "/v1/oauth/revoke" {
        shared.revoke(request.headers(), question).await?;
        return Ok(json!({}));
    }
    let known = shared.introspect(request.headers(), question).await?;
    Ok(known.to_json().unwrap_or_default())
}

/// An error in the standard's words (RFC 6749, section 5.2).
fn standard_error(problem: &Problem) -> Value {
    let code = match problem.code() {
        "INVALID_GRANT" => "invalid_grant",
        "INVALID_CLIENT" => "invalid_client",
        "INVALID_SCOPE" => "invalid_scope",
        "UNSUPPORTED_GRANT_TYPE" => "unsupported_grant_type",
        _ if problem.status().is_server_error() => "temporarily_unavailable",
        _ => "invalid_request",
    };
    json!({ "error": code, "error_description": problem.message() })
}

fn plain(status: StatusCode, body: &Value) -> Response {
    Response::builder()
        .status(status)
        .header(header::CACHE_CONTROL, "no-store")
        .header(header::PRAGMA, "no-cache")
        .content_type("application/json")
        .body(body.to_string())
}

/// What there is and where (RFC 8414).
pub(crate) fn metadata(auth_url: &str) -> Value {
    json!({
        "issuer": auth_url,
        "authorization_endpoint": format!("{auth_url}/oauth/authorize"),
        "token_endpoint": format!("{auth_url}/v1/oauth/token"),
        "revocation_endpoint": format!("{auth_url}/v1/oauth/revoke"),
        "introspection_endpoint": format!("{auth_url}/v1/oauth/introspect"),
        "jwks_uri": format!("{auth_url}/.well-known/jwks.json"),
        "service_documentation": format!("{auth_url}/docs"),
        "scopes_supported": domain::account::GRANTABLE,
        "response_types_supported": ["code"],
        "response_modes_supported": ["query"],
        "grant_types_supported": ["authorization_code", "refresh_token", "client_credentials"],
        "token_endpoint_auth_methods_supported":
            ["client_secret_basic", "client_secret_post", "none"],
        "code_challenge_methods_supported": ["S256"],
        "authorization_response_iss_parameter_supported": true,
    })
}

/// The tenant that a person's codes are for.
pub(crate) fn tenant_of(org: OrgId, application: &Application) -> Tenant {
    Tenant { org, mode: application.tenant.mode }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verifiers_are_long_enough_to_be_no_guess() {
        // RFC 7636, appendix B.
        let verifier = "dBjftJeZ4CVP-mB92K27uhbUJU1p1r_wW1gFWFOEjXk";
        let known = challenge(verifier.to_owned()).expect("it is good");
        assert_eq!(known[..4], [0x13, 0xd3, 0x1e, 0x96]);
        let wrong =
            ["", &verifier[1..], &"a".repeat(129), &format!("{verifier} ")].map(str::to_owned);
        wrong.into_iter().for_each(|text| assert!(challenge(text.clone()).is_err(), "{text}"));
    }

    #[test]
    fn addresses_that_people_may_be_sent_to() {
        for good in [
            "https://app.example/cb",
            "https://app.example:8443/cb?x=1",
            "http://127.0.0.1:8000/cb",
            "http://[::1]:8000/cb",
        ] {
            assert!(check_redirect(0, good).is_ok(), "{good}");
        }
        for bad in [
            "",
            "/cb",
            "app.example/cb",
            "http://app.example/cb",
            "https://app.example/cb#x",
            "https://user@app.example/cb",
            "javascript:alert(1)",
            "data:text/html,x",
            "https://app.example/a b",
            "custom:/cb",
            "https://app.example;script-src/cb",
            "https://app.example:99999/cb",
            "https://app.example:/cb",
        ] {
            assert!(check_redirect(0, bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_field_of_a_form_comes_once() {
        assert_eq!(fields(b"a=1&b=%20x").map(|f| f["b"].clone()).ok(), Some(" x".to_owned()));
        assert!(fields(b"a=1&a=1").is_err());
    }
}
