//! `/oauth/authorize`: the page where people let an application in.
//!
//! Two plain forms, no script: first who you are, then what the application may do. Nothing of the
//! person stays in the browser: the second form carries a ticket that the first one earned, sealed to
//! this very request, to a cookie that lasts as long as the forms, and to ten minutes. The cookie is
//! also what forms of other sites lack. An answer goes only to an address that the application has
//! registered; anything wrong with client or address is told on the page and never sent anywhere.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use actors::call::auditing::{self, Whose};
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use domain::{
    ApplicationId, Timestamp, UserId,
    account::{Application, Code, Mode, Scopes, Tenant, User},
};
use hmac::{Hmac, KeyInit as _, Mac as _};
use http::{Method, StatusCode, Uri, header};
use poem::{Endpoint, Request, Response};
use sha2::Sha256;
use subtle::ConstantTimeEq as _;

use crate::{
    Shared,
    access::CONSENT,
    auth::{Claimed, named_org},
    caller::{ClientAddress, hash_key},
    error::Problem,
    oauth::{asked_for, code_text, fields, tenant_of},
    pages::{self, Consent, Login},
};

/// How long a code is good (`decisions` §13).
const CODE_FOR: Duration = Duration::from_secs(60);
/// How long the forms may take.
const FORM_FOR: Duration = Duration::from_secs(600);
/// The cookie that binds the forms to a browser. `__Host-` keeps other hosts from setting it.
const COOKIE: &str = "__Host-roost-form";
/// Longest `state` that is passed back.
const STATE_BYTES_MAX: usize = 2048;

/// The page.
pub(crate) struct Authorize(pub(crate) Arc<Shared>);

impl Endpoint for Authorize {
    type Output = Response;

    async fn call(&self, request: Request) -> poem::Result<Response> {
        Ok(self.serve(request).await)
    }
}

/// A request of an application, as far as it can be trusted: client and address are right.
struct Asked {
    application: Arc<Application>,
    redirect_uri: String,
    state: Option<String>,
    fields: BTreeMap<String, String>,
}

/// What it wants, once all of it is right.
struct Wish {
    scopes: Scopes,
    challenge: Option<[u8; 32]>,
}

/// An error that the application is told (RFC 6749, section 4.1.2.1).
type Error = (&'static str, String);

/// The parameters of a request that the forms carry on.
const CARRIED: [&str; 7] = [
    "client_id",
    "redirect_uri",
    "response_type",
    "scope",
    "state",
    "code_challenge",
    "code_challenge_method",
];

impl Authorize {
    async fn serve(&self, mut request: Request) -> Response {
        let (method, address) = (request.method().clone(), ClientAddress::of(&request));
        let text = match method {
            Method::GET | Method::HEAD => {
                request.uri().query().unwrap_or_default().as_bytes().to_vec()
            }
            Method::POST => request.take_body().into_vec().await.unwrap_or_default(),
            _ => {
                return pages::wrong(
                    StatusCode::METHOD_NOT_ALLOWED,
                    "This page is opened with GET.",
                );
            }
        };
        let cookie = cookie(&request);
        let asked = match self.asked(&text).await {
            Ok(asked) => asked,
            Err(problem) => return pages::wrong(problem.status(), problem.message()),
        };
        let wish = match self.wish(&asked) {
            Ok(wish) => wish,
            Err((error, why)) => return self.refuse(&asked, error, &why),
        };
        if method != Method::POST {
            return self.ask_login(&asked, None, StatusCode::OK);
        }
        let Some(cookie) = cookie.filter(|cookie| self.is_own_form(&asked, cookie)) else {
            // A form of another site, or one that lay open for too long.
            return self.ask_login(&asked, Some("Please try again."), StatusCode::BAD_REQUEST);
        };
        match asked.fields.contains_key("ticket") {
            true => self.decide(&asked, &wish, &cookie).await,
            false => self.log_in(&asked, &wish, &cookie, address).await,
        }
    }

    /// Client and address. What is wrong with them is nobody's business but the person's.
    async fn asked(&self, text: &[u8]) -> Result<Asked, Problem> {
        let fields = fields(text)?;
        let wrong = |why: &str| Problem::new(StatusCode::BAD_REQUEST, "INVALID_REQUEST", why);
        let id: ApplicationId = fields
            .get("client_id")
            .and_then(|id| id.parse().ok())
            .ok_or_else(|| wrong("The application that sent you here is not known."))?;
        let row = self.0.service.directory().await?.read().applications.get(&id);
        let application =
            row.ok_or_else(|| wrong("The application that sent you here is not known."))?;
        let redirect_uri = fields.get("redirect_uri").cloned().unwrap_or_default();
        if !application.redirect_uris.contains(&redirect_uri) {
            let why = "The application asked to send you to an address that it has not registered.";
            return Err(wrong(why));
        }
        let state = fields.get("state").cloned();
        if state.as_ref().is_some_and(|state| state.len() > STATE_BYTES_MAX) {
            return Err(wrong("The application sent a state that is too long."));
        }
        Ok(Asked { application, redirect_uri, state, fields })
    }

    fn wish(&self, asked: &Asked) -> Result<Wish, Error> {
        let field = |name: &str| asked.fields.get(name).map(String::as_str);
        if field("response_type") != Some("code") {
            return Err(("unsupported_response_type", "response_type must be code".to_owned()));
        }
        if field("request").is_some() || field("request_uri").is_some() {
            return Err(("request_not_supported", "send plain parameters".to_owned()));
        }
        let challenge = match (field("code_challenge"), field("code_challenge_method")) {
            (None, None) if asked.application.secret_hash.is_none() => {
                let why = "a public client must send a code_challenge (RFC 7636)";
                return Err(("invalid_request", why.to_owned()));
            }
            (None, None) => None,
            (Some(text), Some("S256")) => Some(challenge(text)?),
            _ => {
                let why = "code_challenge needs code_challenge_method=S256";
                return Err(("invalid_request", why.to_owned()));
            }
        };
        let scopes = asked_for(&asked.application, field("scope"));
        let scopes = scopes.map_err(|problem| ("invalid_scope", problem.message().to_owned()))?;
        Ok(Wish { scopes, challenge })
    }

    async fn log_in(
        &self,
        asked: &Asked,
        wish: &Wish,
        cookie: &str,
        address: ClientAddress,
    ) -> Response {
        let user = match self.who(asked, address).await {
            Ok(user) => user,
            Err(problem) => {
                let why = match problem.status() {
                    StatusCode::BAD_REQUEST => "This is not the id of an organization.",
                    StatusCode::UNAUTHORIZED => "The email address or the password is wrong.",
                    StatusCode::TOO_MANY_REQUESTS => {
                        "Too many wrong passwords. Please try again later."
                    }
                    _ => "This does not work right now. Please try again in a moment.",
                };
                return self.ask_login(asked, Some(why), problem.status());
            }
        };
        auditing::belongs_to(Whose::user(Tenant { org: user.org, mode: Mode::Live }, user.id));
        let scopes = wish.scopes.both(&user.role.scopes());
        if scopes.is_empty() {
            // The application does not learn who it was: nobody has agreed to that.
            let why = "whoever logged in may do nothing of what the application asks for";
            return self.refuse(asked, "access_denied", why);
        }
        self.ask_consent(asked, &user, &scopes, cookie)
    }

    /// Who filled in the form. Who names no organization means that of the application, if they belong to it.
    async fn who(&self, asked: &Asked, address: ClientAddress) -> Result<Arc<User>, Problem> {
        let field = |name: &str| asked.fields.get(name).map(|text| text.trim()).unwrap_or_default();
        let named = match field("org_id") {
            "" => None,
            text => Some(named_org(text)?),
        };
        let (email, own) = (field("email"), asked.application.tenant.org);
        let directory = self.0.service.directory().await?;
        let is_own = directory.read().user_by_email(email, Some(own)).is_some();
        let claimed = Claimed {
            email,
            org: named.or(is_own.then_some(own)),
            password: asked.fields.get("password").cloned().unwrap_or_default(),
            mode: Mode::Live,
            address,
        };
        self.0.proven(claimed).await
    }

    fn user(&self, id: UserId) -> Option<Arc<User>> {
        self.0.service.world.directory().read().users.get(&id)
    }

    async fn decide(&self, asked: &Asked, wish: &Wish, cookie: &str) -> Response {
        let field = |name: &str| asked.fields.get(name).map(String::as_str).unwrap_or_default();
        let user = self.ticket_of(asked, field("ticket"), cookie).and_then(|id| self.user(id));
        let Some(user) = user else {
            let why = "This took too long. Please log in again.";
            return self.ask_login(asked, Some(why), StatusCode::BAD_REQUEST);
        };
        match field("decision") {
            "allow" => {}
            "deny" => return self.refuse(asked, "access_denied", "the person said no"),
            _ => {
                let why = "Please choose one of the two.";
                return self.ask_login(asked, Some(why), StatusCode::BAD_REQUEST);
            }
        }
        let secret = self.0.random_text();
        let text = code_text(user.org, &secret);
        let world = &self.0.service.world;
        let code = Code {
            hash: hash_key(&self.0.settings.pepper, &text),
            tenant: tenant_of(user.org, &asked.application),
            application: asked.application.id,
            user: user.id,
            redirect_uri: asked.redirect_uri.clone(),
            scopes: wish.scopes.both(&user.role.scopes()),
            challenge: wish.challenge,
            expires_at: world.now().plus(CODE_FOR),
            session: None,
        };
        let target = format!("{CONSENT}?client_id={}", asked.application.id);
        let who = Whose::user(code.tenant, user.id);
        auditing::belongs_to(Whose { target: Some(target), ..who });
        match self.0.service.issue_code(code).await {
            Ok(()) => self.send_back(asked, &[("code", &text)]),
            Err(error) => {
                tracing::error!(%error, "a code could not be kept");
                self.refuse(asked, "temporarily_unavailable", "try again in a moment")
            }
        }
    }

    /// Tells the application why not.
    fn refuse(&self, asked: &Asked, error: &str, why: &str) -> Response {
        self.send_back(asked, &[("error", error), ("error_description", why)])
    }

    fn send_back(&self, asked: &Asked, told: &[(&str, &str)]) -> Response {
        let mut pairs = told.to_vec();
        if let Some(state) = &asked.state {
            pairs.push(("state", state));
        }
        pairs.push(("iss", &self.0.settings.auth_url));
        let query = serde_urlencoded::to_string(&pairs).unwrap_or_default();
        let joint = if asked.redirect_uri.contains('?') { '&' } else { '?' };
        pages::redirect(&format!("{}{joint}{query}", asked.redirect_uri))
    }

    fn ask_login(&self, asked: &Asked, why: Option<&str>, status: StatusCode) -> Response {
        let cookie = self.0.random_text();
        let page = Login {
            application: &asked.application.name,
            home: &host_of(&asked.redirect_uri),
            email: asked.fields.get("email").map(String::as_str).unwrap_or_default(),
            organization: asked.fields.get("org_id").map(String::as_str).unwrap_or_default(),
            why,
            hidden: self.hidden(asked, &cookie),
        };
        let mut response = pages::login(&page, status, &origin_of(&asked.redirect_uri));
        let value = format!(
            "{COOKIE}={cookie}; Path=/; Secure; HttpOnly; SameSite=Strict; Max-Age={}",
            FORM_FOR.as_secs()
        );
        if let Ok(value) = value.parse() {
            response.headers_mut().insert(header::SET_COOKIE, value);
        }
        response
    }

    fn ask_consent(&self, asked: &Asked, user: &User, scopes: &Scopes, cookie: &str) -> Response {
        let mut hidden = self.hidden(asked, cookie);
        hidden.push(("ticket".to_owned(), self.ticket(asked, user.id, cookie)));
        let organization = {
            let directory = self.0.service.world.directory().read();
            directory.organizations.get(&user.org).map(|row| row.name.clone()).unwrap_or_default()
        };
        let page = Consent {
            application: &asked.application.name,
            home: &host_of(&asked.redirect_uri),
            email: &user.email,
            organization: &organization,
            scopes: scopes.to_vec(),
            hidden,
        };
        pages::consent(&page, &origin_of(&asked.redirect_uri))
    }

    fn hidden(&self, asked: &Asked, cookie: &str) -> Vec<(String, String)> {
        let carried = CARRIED.iter().filter_map(|name| {
            asked.fields.get(*name).map(|value| ((*name).to_owned(), value.clone()))
        });
        let mut hidden: Vec<_> = carried.collect();
        hidden.push(("csrf".to_owned(), self.proof(asked, &format!("form|{cookie}"))));
        hidden
    }

    fn is_own_form(&self, asked: &Asked, cookie: &str) -> bool {
        let given = asked.fields.get("csrf").map(String::as_str).unwrap_or_default();
        let right = self.proof(asked, &format!("form|{cookie}"));
        bool::from(given.as_bytes().ct_eq(right.as_bytes()))
    }

    /// Binds something to this very request of this very application.
    fn proof(&self, asked: &Asked, what: &str) -> String {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0.settings.signing_key)
            .expect("any length of key fits");
        mac.update(b"authorize");
        for name in CARRIED {
            let value = asked.fields.get(name).map(String::as_str).unwrap_or_default();
            mac.update(&(value.len() as u64).to_be_bytes());
            mac.update(value.as_bytes());
        }
        mac.update(what.as_bytes());
        URL_SAFE_NO_PAD.encode(mac.finalize().into_bytes())
    }

    fn ticket(&self, asked: &Asked, user: UserId, cookie: &str) -> String {
        let until = self.0.service.world.now().plus(FORM_FOR).millis();
        let proof = self.proof(asked, &format!("ticket|{cookie}|{user}|{until}"));
        format!("{user}.{until}.{proof}")
    }

    /// Whose ticket it is, if it is one and still good.
    fn ticket_of(&self, asked: &Asked, ticket: &str, cookie: &str) -> Option<UserId> {
        let mut parts = ticket.splitn(3, '.');
        let (user, until, given) = (parts.next()?, parts.next()?, parts.next()?);
        let right = self.proof(asked, &format!("ticket|{cookie}|{user}|{until}"));
        let is_right = bool::from(given.as_bytes().ct_eq(right.as_bytes()));
        let until = Timestamp::from_millis(until.parse().ok()?);
        (is_right && self.0.service.world.now() < until).then(|| user.parse().ok()).flatten()
    }
}

fn challenge(text: &str) -> Result<[u8; 32], Error> {
    let bytes = URL_SAFE_NO_PAD.decode(text).ok().and_then(|bytes| bytes.try_into().ok());
    bytes.ok_or_else(|| {
        let why = "code_challenge must be a SHA-256 in base64url without padding (RFC 7636)";
        ("invalid_request", why.to_owned())
    })
}

fn cookie(request: &Request) -> Option<String> {
    let mut cookies = request.headers().get_all(header::COOKIE).iter();
    cookies.find_map(|line| {
        let mut pairs = line.to_str().ok()?.split(';').map(str::trim);
        pairs.find_map(|pair| pair.strip_prefix(COOKIE)?.strip_prefix('=')).map(str::to_owned)
    })
}

fn host_of(uri: &str) -> String {
    uri.parse::<Uri>().ok().and_then(|uri| uri.host().map(str::to_owned)).unwrap_or_default()
}

/// Browsers apply `form-action` to where a form's answer redirects to, so that must be allowed.
fn origin_of(uri: &str) -> String {
    let uri = uri.parse::<Uri>().unwrap_or_default();
    match (uri.scheme_str(), uri.authority()) {
        (Some(scheme), Some(authority)) => format!("{scheme}://{authority}"),
        _ => String::new(),
    }
}
