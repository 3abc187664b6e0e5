//! `/v1/auth`: people log in, refresh their tokens, log out.

use std::{sync::Arc, time::Duration};

use actors::call::auditing::{self, Whose};
use domain::{
    OrgId, Rejection, SessionId, UserId,
    account::{Mode, Scopes, Session, Tenant, User, UserPatch},
    directory::Command,
};
use http::StatusCode;
use poem::Request;
use poem_openapi::{ApiResponse, Object, OpenApi, payload::Json};

use crate::{
    Handle, Shared,
    body::account::{LoginRequest, ModeBody, PasswordRequest, RefreshRequest, TokenBody, WhoBody},
    caller::{Caller, ClientAddress, Principal, hash_key},
    check::Checked,
    envelope::{Meta, Success},
    error::{ApiError, Problem},
    password,
    tokens::{IDLE_SECONDS, Refresh, SESSION_SECONDS, TOKEN_SECONDS},
};

pub(crate) struct AuthApi(pub(crate) Handle);

/// Who somebody says they are.
pub(crate) struct Claimed<'c> {
    /// The address.
    pub(crate) email: &'c str,
    /// The organization, if they named one.
    pub(crate) org: Option<OrgId>,
    /// The password.
    pub(crate) password: String,
    /// Whose objects they want to reach.
    pub(crate) mode: Mode,
    /// Where they are.
    pub(crate) address: ClientAddress,
}

type Result<T> = std::result::Result<T, ApiError>;

/// Tokens, in the envelope and beside it: the specification shows both.
#[derive(Clone, Object)]
pub(crate) struct Granted {
    success: bool,
    data: TokenBody,
    meta: Meta,
    access_token: String,
    #[oai(skip_serializing_if_is_none)]
    refresh_token: Option<String>,
    token_type: String,
    expires_in: u64,
    scope: String,
}

/// Tokens; never kept by caches.
#[derive(ApiResponse)]
pub(crate) enum TokenAnswer {
    /// The tokens.
    #[oai(status = 200)]
    Ok(Json<Box<Granted>>, #[oai(header = "Cache-Control")] String),
}

impl From<TokenBody> for TokenAnswer {
    fn from(data: TokenBody) -> Self {
        let TokenBody { access_token, refresh_token, token_type, expires_in, scope } = data.clone();
        let granted = Granted {
            success: true,
            meta: Meta::now(),
            access_token,
            refresh_token,
            token_type,
            expires_in,
            scope,
            data,
        };
        Self::Ok(Json(Box::new(granted)), "no-store".to_owned())
    }
}

/// A session that has ended.
#[derive(Clone, Debug, Object)]
pub(crate) struct LoggedOut {
    /// The session.
    session_id: String,
    /// Always true.
    logged_out: bool,
}

/// A password that was changed.
#[derive(Clone, Debug, Object)]
pub(crate) struct PasswordChanged {
    /// Whose.
    user_id: String,
    /// Always true. Every session has ended; log in again.
    changed: bool,
}

fn wrong_login() -> Problem {
    let message = "the email address or the password is wrong";
    Problem::new(StatusCode::UNAUTHORIZED, "INVALID_CREDENTIALS", message)
}

/// The organization that somebody names to log in.
pub(crate) fn named_org(text: &str) -> std::result::Result<OrgId, Problem> {
    let why = "must be the id of an organization, such as the org_id of GET /v1/auth/me";
    text.trim().parse().map_err(|_| Problem::field("org_id", why))
}

fn reused() -> Problem {
    let message = "this refresh token was used before, so its session has ended; log in again";
    Problem::new(StatusCode::UNAUTHORIZED, "REFRESH_TOKEN_REUSED", message)
}

pub(crate) fn wrong_refresh() -> Problem {
    let message = "this refresh token is not valid any more; log in again";
    Problem::new(StatusCode::UNAUTHORIZED, "INVALID_CREDENTIALS", message)
}

impl Shared {
    /// A session to be. Whoever opens it says for whom.
    pub(crate) fn new_session(&self, tenant: Tenant, scopes: Scopes, client: String) -> Session {
        let world = &self.service.world;
        let now = world.now();
        Session {
            id: world.mint(SessionId::new),
            tenant,
            user: None,
            application: None,
            scopes,
            token_seconds: TOKEN_SECONDS,
            generation: 1,
            created_at: now,
            refreshed_at: now,
            client,
            expires_at: now.plus(Duration::from_secs(IDLE_SECONDS)),
            ends_at: now.plus(Duration::from_secs(SESSION_SECONDS)),
            idle_seconds: IDLE_SECONDS,
        }
    }

    /// The tokens of a session.
    pub(crate) fn tokens_of(&self, session: &Session) -> std::result::Result<TokenBody, Problem> {
        let user = session.user.map(|id| self.person(session.tenant, id)).transpose()?;
        auditing::belongs_to(whose(session));
        // Tokens never say more than the person may do now.
        let scopes = match &user {
            Some(user) => session.scopes.both(&user.role.scopes()),
            None => session.scopes,
        };
        let session = Session { scopes, ..session.clone() };
        let access_token = self.access_token(&session, user.map(|user| user.email.clone()))?;
        Ok(TokenBody {
            access_token,
            refresh_token: session.user.map(|_| self.refresh_token(&session)),
            token_type: "Bearer".to_owned(),
            expires_in: session.token_seconds,
            scope: session.scopes.to_vec().join(" "),
        })
    }

    /// Whether the person of a session is there and has not ended all sessions since.
    pub(crate) fn is_good(&self, session: &Session) -> bool {
        let person = session.user.map(|id| self.person(session.tenant, id));
        person.is_none_or(|user| user.is_ok_and(|user| session.created_at >= user.sessions_since))
    }

    fn person(&self, tenant: Tenant, id: UserId) -> std::result::Result<Arc<User>, Problem> {
        let directory = self.service.world.directory().read();
        directory.user(tenant.org, id).map_err(|_| wrong_refresh())
    }

    /// Who it is, if the password is right. Wrong ones are counted by e-mail address and client. One password is
    /// looked at whether there is such a person or not, and in however many organizations.
    pub(crate) async fn proven(
        &self,
        claimed: Claimed<'_>,
    ) -> std::result::Result<Arc<User>, Problem> {
        let Claimed { email, org, password, mode, address } = claimed;
        let email = email.trim().to_lowercase();
        let user = self.service.directory().await?.read().user_by_email(&email, org);
        let guess =
            hash_key(&self.settings.pepper, &format!("login|{email}|{}", address.network()));
        let hash = user.as_ref().map(|user| user.password_hash.clone());
        if let Some(user) = &user {
            auditing::belongs_to(Whose::anonymous(Tenant { org: user.org, mode }));
        }
        let is_right = self.passwords.is_right(password, hash).await?;
        self.service.note_login(guess, org, is_right).await?;
        user.filter(|_| is_right).ok_or_else(wrong_login)
    }

    /// The next tokens for a refresh token. `application` is whoever shows it; a person has none. The access
    /// token may be asked to say less than the session (RFC 6749, section 6), never more.
    pub(crate) async fn refresh(
        &self,
        token: &str,
        application: Option<domain::ApplicationId>,
        scope: Option<&str>,
        client: String,
    ) -> std::result::Result<TokenBody, Problem> {
        let refresh = Refresh::read(&self.settings.pepper, token).ok_or_else(wrong_refresh)?;
        let Refresh { org, session, generation } = refresh;
        let Some(known) = self.service.session(org, session).await? else {
            // Whoever ended it may have died before its access tokens had ended, too.
            self.service.end_tokens(session).await?;
            return Err(wrong_refresh());
        };
        if known.application != application || !self.is_good(&known) {
            return Err(wrong_refresh());
        }
        auditing::belongs_to(whose(&known));
        let scopes = crate::oauth::asked_of(&known.scopes, scope)?;
        match self.service.refresh_session(org, session, generation, client).await {
            Ok(Some(session)) => self.tokens_of(&Session { scopes, ..session }),
            Ok(None) => Err(reused()),
            Err(actors::call::ServiceError::Rejected(Rejection::GrantInvalid)) => {
                Err(wrong_refresh())
            }
            Err(error) => Err(error.into()),
        }
    }
}

fn whose(session: &Session) -> Whose {
    match (session.user, session.application) {
        (Some(id), _) => Whose::user(session.tenant, id),
        (None, Some(id)) => Whose::application(session.tenant, id),
        (None, None) => Whose::anonymous(session.tenant),
    }
}

#[OpenApi(prefix_path = "/v1", tag = "crate::document::Tag::Authentication")]
impl AuthApi {
    /// Log in
    ///
    /// Five wrong passwords for one account from one address pause further attempts for a quarter of
    /// an hour. An unknown address is answered like a wrong password. Who belongs to several organizations
    /// under one address has a password in each, and names the one that is meant in `org_id`; without it, it is
    /// the one that they belong to for longest.
    #[oai(path = "/auth/login", method = "post", operation_id = "login")]
    async fn login(&self, request: &Request, body: Checked<LoginRequest>) -> Result<TokenAnswer> {
        let LoginRequest { email, password, mode, org_id } = body.body;
        let mode = match mode {
            Some(ModeBody::Test) => Mode::Test,
            Some(ModeBody::Live) | None => Mode::Live,
        };
        let org = org_id.as_deref().map(named_org).transpose()?;
        let address = ClientAddress::of(request);
        let claimed = Claimed { email: &email, org, password, mode, address };
        let user = self.0.proven(claimed).await?;
        let tenant = Tenant { org: user.org, mode };
        let session = self.0.new_session(tenant, user.role.scopes(), address.text());
        let session = Session { user: Some(user.id), ..session };
        auditing::belongs_to(whose(&session));
        self.0.service.open_session(session.clone()).await?;
        Ok(self.0.tokens_of(&session)?.into())
    }

    /// Refresh an access token
    ///
    /// Each refresh token is good once and answered with the next one. One that comes a second time
    /// ends its session, except within ten seconds from the same client, in case an answer was lost.
    #[oai(path = "/auth/refresh", method = "post", operation_id = "refreshToken")]
    async fn refresh(
        &self,
        request: &Request,
        body: Checked<RefreshRequest>,
    ) -> Result<TokenAnswer> {
        let client = ClientAddress::of(request).text();
        Ok(self.0.refresh(&body.body.refresh_token, None, None, client).await?.into())
    }

    /// Log out
    ///
    /// Ends the session of the access token: neither that token nor its refresh token is good any more.
    #[oai(path = "/auth/logout", method = "post", operation_id = "logout")]
    async fn logout(&self, caller: Caller) -> Result<Json<Success<LoggedOut>>> {
        let claims = match &caller.identity().principal {
            Principal::User { claims, .. } | Principal::Application(claims) => claims,
            Principal::Key(_) => {
                let message = "an API key has no session; revoke it with DELETE /v1/api-keys/{id}";
                let status = StatusCode::BAD_REQUEST;
                return Err(Problem::new(status, "INVALID_REQUEST", message).into());
            }
        };
        let id: SessionId = claims.sid.parse().map_err(|_| Problem::internal())?;
        self.0.service.close_session(caller.org(), id).await?;
        Ok(Json(Success::of(LoggedOut { session_id: id.to_string(), logged_out: true })))
    }

    /// Who am I
    ///
    /// What the credentials of this call are, and what they may do.
    #[oai(path = "/auth/me", method = "get", operation_id = "whoAmI")]
    async fn me(&self, caller: Caller) -> Result<Json<Success<WhoBody>>> {
        let identity = caller.identity();
        let directory = self.0.service.directory().await?.read();
        let organization = directory.organization(caller.org())?;
        let (kind, id) = identity.name();
        let (email, name) = match &identity.principal {
            Principal::Key(key) => (None, Some(key.name.to_string())),
            Principal::User { id, .. } => {
                let user = directory.user(caller.org(), *id)?;
                (Some(user.email.clone()), user.name.clone())
            }
            Principal::Application(_) => (None, None),
        };
        Ok(Json(Success::of(WhoBody {
            kind: kind.to_owned(),
            id,
            email,
            name,
            org_id: organization.id.to_string(),
            org_name: organization.name.clone(),
            tier: organization.tier.as_str().to_owned(),
            role: identity.role().map(|role| role.as_str().to_owned()),
            scopes: identity.scopes.to_vec(),
            livemode: identity.tenant.mode.is_live(),
        })))
    }

    /// Change your password
    ///
    /// For people who are logged in, in live mode. Every session of theirs ends. Wrong passwords count as they do
    /// where people log in.
    #[oai(path = "/auth/password", method = "post", operation_id = "changePassword")]
    async fn password(
        &self,
        caller: Caller,
        request: &Request,
        body: Checked<PasswordRequest>,
    ) -> Result<Json<Success<PasswordChanged>>> {
        let PasswordRequest { current_password, new_password } = body.body;
        let Principal::User { id, role, claims } = &caller.identity().principal else {
            let message = "only people have passwords; log in as one";
            return Err(Problem::new(StatusCode::FORBIDDEN, "INSUFFICIENT_SCOPE", message).into());
        };
        if claims.client_id.is_some() {
            let message = "an application does not change the password of the person it acts for";
            return Err(Problem::new(StatusCode::FORBIDDEN, "INSUFFICIENT_SCOPE", message).into());
        }
        if !claims.livemode {
            let message =
                "what is done in test mode changes nothing that is live; log in in live mode";
            return Err(Problem::new(StatusCode::FORBIDDEN, "INSUFFICIENT_SCOPE", message).into());
        }
        password::check_new("new_password", &new_password)?;
        let user = self.0.service.directory().await?.read().user(caller.org(), *id)?;
        let claimed = Claimed {
            email: &user.email,
            org: Some(user.org),
            password: current_password,
            mode: caller.tenant().mode,
            address: ClientAddress::of(request),
        };
        self.0.proven(claimed).await?;
        let password_hash = Some(self.0.passwords.hash(new_password).await?);
        let patch = UserPatch { password_hash, ..UserPatch::default() };
        let command = Command::UpdateUser {
            org: caller.org(),
            id: *id,
            patch,
            by: Some(*role),
            scopes: caller.identity().scopes,
            if_match: Some(user.revision),
        };
        self.0.service.change(command, None).await?;
        Ok(Json(Success::of(PasswordChanged { user_id: id.to_string(), changed: true })))
    }
}
