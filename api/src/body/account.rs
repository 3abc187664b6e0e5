//! Organizations, people, keys, secrets and applications on the wire.

use std::num::NonZeroU32;

use domain::{
    account::{ApiKey, Application, Invitation, Organization, Role, Tier, User},
    audit::Audited,
    hex::hex,
    secret::Secret,
};
use poem_openapi::{Enum, Object};

/// How much an organization may ask of the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Enum)]
#[oai(rename_all = "snake_case")]
pub enum TierBody {
    /// The smallest.
    Starter,
    /// The middle.
    Pro,
    /// The greatest.
    Enterprise,
}

impl From<TierBody> for Tier {
    fn from(body: TierBody) -> Self {
        match body {
            TierBody::Starter => Self::Starter,
            TierBody::Pro => Self::Pro,
            TierBody::Enterprise => Self::Enterprise,
        }
    }
}

/// What a person may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Enum)]
#[oai(rename_all = "snake_case")]
pub enum RoleBody {
    /// Everything, other owners included.
    Owner,
    /// Everything but other owners.
    Admin,
    /// Builds and runs agents.
    Developer,
    /// Calls agents.
    Invoker,
    /// Sees invoices and usage.
    Billing,
    /// Looks on.
    Viewer,
}

impl From<RoleBody> for Role {
    fn from(body: RoleBody) -> Self {
        match body {
            RoleBody::Owner => Self::Owner,
            RoleBody::Admin => Self::Admin,
            RoleBody::Developer => Self::Developer,
            RoleBody::Invoker => Self::Invoker,
            RoleBody::Billing => Self::Billing,
            RoleBody::Viewer => Self::Viewer,
        }
    }
}

/// Live or test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Enum)]
#[oai(rename_all = "snake_case")]
pub enum ModeBody {
    /// Production.
    Live,
    /// Sandbox.
    Test,
}

/// Log in.
#[derive(Clone, Object)]
pub struct LoginRequest {
    /// Your address.
    #[oai(validator(min_length = 1, max_length = 254))]
    pub email: String,
    /// Your password.
    #[oai(validator(min_length = 1, max_length = 256))]
    pub password: String,
    /// Whose objects the tokens reach: `live` if left out.
    pub mode: Option<ModeBody>,
    /// The organization, if your address belongs to several.
    #[oai(validator(min_length = 1, max_length = 64))]
    pub org_id: Option<String>,
}

/// Refresh an access token.
#[derive(Clone, Object)]
pub struct RefreshRequest {
    /// The newest refresh token of the session.
    #[oai(validator(min_length = 1, max_length = 4096))]
    pub refresh_token: String,
}

/// Change your password.
#[derive(Clone, Object)]
pub struct PasswordRequest {
    /// The present one.
    #[oai(validator(min_length = 1, max_length = 256))]
    pub current_password: String,
    /// The new one: 8 characters or more.
    #[oai(validator(min_length = 1, max_length = 256))]
    pub new_password: String,
}

/// Tokens.
#[derive(Clone, Object)]
pub struct TokenBody {
    /// Send it as `Authorization: Bearer …`.
    pub access_token: String,
    /// Good once, for the next access token. Not given to applications that act for themselves.
    #[oai(skip_serializing_if_is_none)]
    pub refresh_token: Option<String>,
    /// Always `Bearer`.
    pub token_type: String,
    /// Lifetime of the access token in seconds.
    pub expires_in: u64,
    /// What it may do, separated by spaces.
    pub scope: String,
}

/// Whoever calls.
#[derive(Clone, Debug, Object)]
pub struct WhoBody {
    /// `user`, `api_key` or `application`.
    #[oai(rename = "type")]
    pub kind: String,
    /// Their id.
    pub id: String,
    /// Of a person: the address.
    pub email: Option<String>,
    /// Of a person or key: the name.
    pub name: Option<String>,
    /// The organization.
    pub org_id: String,
    /// The organization's name.
    pub org_name: String,
    /// The organization's tier.
    pub tier: String,
    /// Of a person: the role.
    pub role: Option<String>,
    /// What the credentials may do.
    pub scopes: Vec<String>,
    /// Live or test.
    pub livemode: bool,
}

/// An API key. The key itself is shown once, when it is made.
#[derive(Clone, Debug, Object)]
pub struct ApiKeyBody {
    /// Its id.
    pub id: String,
    /// Shown to people.
    pub name: String,
    /// `live` or `test`.
    pub mode: String,
    /// What it may do.
    pub scopes: Vec<String>,
    /// What the key begins with.
    pub prefix: String,
    /// What the key ends with.
    pub last4: String,
    /// From where it may be used; anywhere if empty.
    pub allowed_ips: Vec<String>,
    /// The agents that it may touch; any if empty.
    pub agent_ids: Vec<String>,
    /// Until when it is good.
    pub expires_at: Option<String>,
    /// Calls that it may make a minute, beside what its organization may.
    pub rate_limit: Option<u32>,
    /// When it was last used, to the minute.
    pub last_used_at: Option<String>,
    /// From which address.
    pub last_used_ip: Option<String>,
    /// Who made it.
    pub created_by: Option<String>,
    /// When it was made.
    pub created_at: String,
    /// When it was last changed.
    pub updated_at: String,
    /// Until when the secret before the last rotation is good too.
    pub previous_expires_at: Option<String>,
    /// Live or test.
    pub livemode: bool,
    /// Give it as `If-Match` to change exactly this state.
    pub etag: String,
    /// The key: only in the answer that makes or rotates it.
    #[oai(skip_serializing_if_is_none)]
    pub key: Option<String>,
}

impl ApiKeyBody {
    /// A key, without its secret.
    pub fn of(key: &ApiKey) -> Self {
        let is_live = key.tenant.mode.is_live();
        Self {
            id: key.id.to_string(),
            name: key.name.to_string(),
            mode: if is_live { "live" } else { "test" }.to_owned(),
            scopes: key.scopes.to_vec(),
            prefix: if is_live { "ic_live_" } else { "ic_test_" }.to_owned(),
            last4: key.last4.to_string(),
            allowed_ips: key.allowed_ips.iter().map(ToString::to_string).collect(),
            agent_ids: key.agent_ids.iter().map(ToString::to_string).collect(),
            expires_at: key.expires_at.map(|at| at.to_string()),
            rate_limit: key.rate_limit.map(NonZeroU32::get),
            last_used_at: key.last_used.as_ref().map(|used| used.at.to_string()),
            last_used_ip: key.last_used.as_ref().map(|used| used.ip.clone()),
            created_by: key.created_by.as_deref().map(str::to_owned),
            created_at: key.created_at.to_string(),
            updated_at: key.updated_at.max(key.created_at).to_string(),
            previous_expires_at: key.previous.as_ref().map(|kept| kept.1.to_string()),
            livemode: is_live,
            etag: format!("\"{}\"", key.revision),
            key: None,
        }
    }
}

/// Make an API key.
#[derive(Clone, Debug, Object)]
pub struct CreateApiKey {
    /// Shown to people.
    #[oai(validator(
        min_length = 1,
        max_length = 100,
        pattern = r"^[^\x00-\x1F\x7F]*[^\x00-\x20\x7F][^\x00-\x1F\x7F]*$"
    ))]
    pub name: String,
    /// Live or test; that of the caller's credentials if left out.
    pub mode: Option<ModeBody>,
    /// What it may do: `["admin:*"]` if left out. Nobody gives more than they have.
    #[oai(validator(max_items = 20))]
    pub scopes: Option<Vec<String>>,
    /// Addresses and CIDR ranges from which it may be used; anywhere if left out.
    #[oai(validator(max_items = 100))]
    pub allowed_ips: Option<Vec<String>>,
    /// The agents that it may touch; any if left out.
    #[oai(validator(max_items = 100))]
    pub agent_ids: Option<Vec<String>>,
    /// Until when it is good (RFC 3339); until revoked if left out.
    pub expires_at: Option<String>,
    /// Calls that it may make a minute; as many as the organization if left out.
    #[oai(validator(minimum(value = "1"), maximum(value = "1000000")))]
    pub rate_limit: Option<u32>,
}

/// Change an API key: a JSON merge patch (RFC 7396).
#[derive(Clone, Debug, Object)]
pub struct UpdateApiKey {
    /// Shown to people.
    #[oai(validator(
        min_length = 1,
        max_length = 100,
        pattern = r"^[^\x00-\x1F\x7F]*[^\x00-\x20\x7F][^\x00-\x1F\x7F]*$"
    ))]
    pub name: Option<String>,
    /// What it may do.
    #[oai(validator(max_items = 20))]
    pub scopes: Option<Vec<String>>,
    /// Addresses and CIDR ranges; `null` or none for anywhere.
    #[oai(validator(max_items = 100))]
    pub allowed_ips: Option<Vec<String>>,
    /// Agents; `null` or none for any.
    #[oai(validator(max_items = 100))]
    pub agent_ids: Option<Vec<String>>,
    /// Until when it is good; `null` for until revoked.
    pub expires_at: Option<String>,
    /// Calls that it may make a minute; `null` for as many as the organization.
    #[oai(validator(minimum(value = "1"), maximum(value = "1000000")))]
    pub rate_limit: Option<u32>,
}

/// Give an API key another secret.
#[derive(Clone, Debug, Default, Object)]
pub struct RotateRequest {
    /// How long the present secret stays good, in seconds: 0 if left out, at most a week.
    #[oai(validator(minimum(value = "0"), maximum(value = "604800")))]
    pub grace_period_seconds: Option<u64>,
}

/// A person.
#[derive(Clone, Debug, Object)]
pub struct UserBody {
    /// Their id.
    pub id: String,
    /// Their address.
    pub email: String,
    /// Shown to people.
    pub name: Option<String>,
    /// What they may do.
    pub role: String,
    /// The scopes of that role.
    pub scopes: Vec<String>,
    /// The organization.
    pub org_id: String,
    /// When they came.
    pub created_at: String,
    /// When they were last changed.
    pub updated_at: String,
    /// Give it as `If-Match` to change exactly this state.
    pub etag: String,
}

impl UserBody {
    /// A person, without anything secret.
    pub fn of(user: &User) -> Self {
        Self {
            id: user.id.to_string(),
            email: user.email.clone(),
            name: user.name.clone(),
            role: user.role.as_str().to_owned(),
            scopes: user.role.scopes().to_vec(),
            org_id: user.org.to_string(),
            created_at: user.created_at.to_string(),
            updated_at: user.updated_at.max(user.created_at).to_string(),
            etag: format!("\"{}\"", user.revision),
        }
    }
}

/// Change a person: a JSON merge patch (RFC 7396).
#[derive(Clone, Debug, Object)]
pub struct UpdateUser {
    /// Shown to people.
    #[oai(validator(
        min_length = 1,
        max_length = 100,
        pattern = r"^[^\x00-\x1F\x7F]*[^\x00-\x20\x7F][^\x00-\x1F\x7F]*$"
    ))]
    pub name: Option<String>,
    /// What they may do. Only owners make and change owners.
    pub role: Option<RoleBody>,
    /// Their address.
    #[oai(validator(min_length = 3, max_length = 254))]
    pub email: Option<String>,
}

/// Ask somebody to come.
#[derive(Clone, Debug, Object)]
pub struct CreateInvitation {
    /// Their address.
    #[oai(validator(min_length = 3, max_length = 254))]
    pub email: String,
    /// What they may do.
    pub role: RoleBody,
}

/// Come.
#[derive(Clone, Object)]
pub struct AcceptInvitation {
    /// What the invitation was answered with.
    #[oai(validator(min_length = 1, max_length = 200))]
    pub token: String,
    /// A password of your own: 8 characters or more.
    #[oai(validator(min_length = 1, max_length = 256))]
    pub password: String,
    /// Shown to people.
    #[oai(validator(
        min_length = 1,
        max_length = 100,
        pattern = r"^[^\x00-\x1F\x7F]*[^\x00-\x20\x7F][^\x00-\x1F\x7F]*$"
    ))]
    pub name: Option<String>,
}

/// An invitation.
#[derive(Clone, Debug, Object)]
pub struct InvitationBody {
    /// Its id.
    pub id: String,
    /// Whom.
    pub email: String,
    /// As what.
    pub role: String,
    /// Who asked.
    pub invited_by: String,
    /// When.
    pub created_at: String,
    /// Until when it is good.
    pub expires_at: String,
    /// What to accept it with: only in the answer that makes it. Send it to the person.
    #[oai(skip_serializing_if_is_none)]
    pub token: Option<String>,
}

impl InvitationBody {
    /// An invitation, without its token.
    pub fn of(row: &Invitation) -> Self {
        Self {
            id: row.id.to_string(),
            email: row.email.clone(),
            role: row.role.as_str().to_owned(),
            invited_by: row.invited_by.clone(),
            created_at: row.created_at.to_string(),
            expires_at: row.expires_at.to_string(),
            token: None,
        }
    }
}

/// An organization.
#[derive(Clone, Debug, Object)]
pub struct OrganizationBody {
    /// Its id: the `org` claim of tokens and `account_id` of events.
    pub id: String,
    /// Shown to people.
    pub name: String,
    /// `starter`, `pro` or `enterprise`.
    pub tier: String,
    /// Whether it looks after the cluster.
    pub is_operator: bool,
    /// When it was made.
    pub created_at: String,
    /// When it was last changed.
    pub updated_at: String,
    /// Give it as `If-Match` to change exactly this state.
    pub etag: String,
}

impl OrganizationBody {
    /// An organization.
    pub fn of(row: &Organization, is_operator: bool) -> Self {
        Self {
            id: row.id.to_string(),
            name: row.name.clone(),
            tier: row.tier.as_str().to_owned(),
            is_operator,
            created_at: row.created_at.to_string(),
            updated_at: row.updated_at.max(row.created_at).to_string(),
            etag: format!("\"{}\"", row.revision),
        }
    }
}

/// Make an organization with its first owner.
#[derive(Clone, Object)]
pub struct CreateOrganization {
    /// Unique, shown to people.
    #[oai(validator(
        min_length = 1,
        max_length = 100,
        pattern = r"^[^\x00-\x1F\x7F]*[^\x00-\x20\x7F][^\x00-\x1F\x7F]*$"
    ))]
    pub name: String,
    /// How much it may ask for: the setting `rate_limit.default_tier` if left out.
    pub tier: Option<TierBody>,
    /// Address of its owner.
    #[oai(validator(min_length = 3, max_length = 254))]
    pub owner_email: String,
    /// The owner's first password: 8 characters or more.
    #[oai(validator(min_length = 1, max_length = 256))]
    pub owner_password: String,
}

/// Change an organization: a JSON merge patch (RFC 7396).
#[derive(Clone, Debug, Object)]
pub struct UpdateOrganization {
    /// Shown to people.
    #[oai(validator(
        min_length = 1,
        max_length = 100,
        pattern = r"^[^\x00-\x1F\x7F]*[^\x00-\x20\x7F][^\x00-\x1F\x7F]*$"
    ))]
    pub name: Option<String>,
    /// How much it may ask for.
    pub tier: Option<TierBody>,
}

/// A secret, without its value.
#[derive(Clone, Debug, Object)]
pub struct SecretBody {
    /// Refer to it as `${secrets.NAME}`.
    pub name: String,
    /// The cloud it is for; for all if null.
    pub cloud_id: Option<String>,
    /// Counts values.
    pub version: u64,
    /// When it was first set.
    pub created_at: String,
    /// When it was last set.
    pub updated_at: String,
    /// Live or test.
    pub livemode: bool,
}

impl SecretBody {
    /// A secret, without its value.
    pub fn of(row: &Secret) -> Self {
        Self {
            name: row.name.clone(),
            cloud_id: row.cloud_id.map(|id| id.to_string()),
            version: row.version,
            created_at: row.created_at.to_string(),
            updated_at: row.updated_at.to_string(),
            livemode: row.tenant.mode.is_live(),
        }
    }
}

/// Set a secret.
#[derive(Clone, Object)]
pub struct PutSecret {
    /// Its value: 1 to 65536 bytes. It is never shown again.
    #[oai(validator(min_length = 1, max_length = 65536))]
    pub value: String,
    /// Only for agents of this cloud; for all if left out.
    pub cloud_id: Option<String>,
}

/// An OAuth application.
#[derive(Clone, Debug, Object)]
pub struct ApplicationBody {
    /// Its id.
    pub client_id: String,
    /// Its secret: only in the answer that makes it, and only if it is not public.
    #[oai(skip_serializing_if_is_none)]
    pub client_secret: Option<String>,
    /// Shown to people who are asked to let it in.
    pub name: String,
    /// Where people are sent back to.
    pub redirect_uris: Vec<String>,
    /// What it may ask for.
    pub scopes: Vec<String>,
    /// Whether it can keep no secret, as a program on a phone or in a browser.
    pub public: bool,
    /// Lifetime of its access tokens in seconds.
    pub token_lifetime: u64,
    /// When it was made.
    pub created_at: String,
}

impl ApplicationBody {
    /// An application, without its secret.
    pub fn of(row: &Application) -> Self {
        Self {
            client_id: row.id.to_string(),
            client_secret: None,
            name: row.name.clone(),
            redirect_uris: row.redirect_uris.clone(),
            scopes: row.scopes.to_vec(),
            public: row.secret_hash.is_none(),
            token_lifetime: row.token_seconds,
            created_at: row.created_at.to_string(),
        }
    }
}

/// Register an OAuth application.
#[derive(Clone, Debug, Object)]
pub struct CreateApplication {
    /// Shown to people who are asked to let it in.
    #[oai(validator(
        min_length = 1,
        max_length = 100,
        pattern = r"^[^\x00-\x1F\x7F]*[^\x00-\x20\x7F][^\x00-\x1F\x7F]*$"
    ))]
    pub name: String,
    /// Where people are sent back to: `https` addresses without a fragment, or `http` on a loopback
    /// address. Compared exactly.
    #[oai(validator(min_items = 1, max_items = 10))]
    pub redirect_uris: Vec<String>,
    /// What it may ask for.
    #[oai(validator(min_items = 1, max_items = 20))]
    pub scopes: Vec<String>,
    /// Whether it can keep no secret; it must use PKCE then.
    pub public: Option<bool>,
    /// Lifetime of its access tokens in seconds: 300 to 86400, 3600 if left out.
    #[oai(validator(minimum(value = "300"), maximum(value = "86400")))]
    pub token_lifetime: Option<u64>,
}

/// A request for tokens (RFC 6749).
#[derive(Clone, Default, Object)]
pub struct TokenRequest {
    /// `authorization_code`, `refresh_token` or `client_credentials`.
    #[oai(validator(min_length = 1, max_length = 100))]
    pub grant_type: String,
    /// The application; or in `Authorization: Basic`.
    #[oai(validator(max_length = 100))]
    pub client_id: Option<String>,
    /// Its secret; or in `Authorization: Basic`.
    #[oai(validator(max_length = 200))]
    pub client_secret: Option<String>,
    /// Of `authorization_code`: the code.
    #[oai(validator(max_length = 400))]
    pub code: Option<String>,
    /// Of `authorization_code`: where it was sent.
    #[oai(validator(max_length = 2048))]
    pub redirect_uri: Option<String>,
    /// Of `authorization_code`: the PKCE verifier.
    #[oai(validator(max_length = 200))]
    pub code_verifier: Option<String>,
    /// Of `refresh_token`: the token.
    #[oai(validator(max_length = 4096))]
    pub refresh_token: Option<String>,
    /// Of `client_credentials`: what it may do, separated by spaces; all it may ask for if left out.
    #[oai(validator(max_length = 1000))]
    pub scope: Option<String>,
}

/// A token to be ended or looked at (RFC 7009, RFC 7662).
#[derive(Clone, Default, Object)]
pub struct TokenQuestion {
    /// The token.
    #[oai(validator(min_length = 1, max_length = 4096))]
    pub token: String,
    /// `access_token` or `refresh_token`; either is found without it.
    #[oai(validator(max_length = 100))]
    pub token_type_hint: Option<String>,
    /// The application; or in `Authorization: Basic`.
    #[oai(validator(max_length = 100))]
    pub client_id: Option<String>,
    /// Its secret; or in `Authorization: Basic`.
    #[oai(validator(max_length = 200))]
    pub client_secret: Option<String>,
}

/// What is known of a token.
#[derive(Clone, Debug, Default, Object)]
#[oai(skip_serializing_if_is_none)]
pub struct Introspection {
    /// Whether it is good now. If not, nothing else is told.
    pub active: bool,
    /// What it may do.
    pub scope: Option<String>,
    /// Which application has it.
    pub client_id: Option<String>,
    /// The person's address.
    pub username: Option<String>,
    /// `Bearer`.
    pub token_type: Option<String>,
    /// Until when, in seconds since 1970.
    pub exp: Option<u64>,
    /// Since when, in seconds since 1970.
    pub iat: Option<u64>,
    /// Whose.
    pub sub: Option<String>,
    /// Who made it.
    pub iss: Option<String>,
}

/// Who did what.
#[derive(Clone, Debug, Object)]
pub struct ActorBody {
    /// `api_key`, `user`, `application` or `anonymous`.
    #[oai(rename = "type")]
    pub kind: String,
    /// Their id.
    pub id: String,
    /// Their address.
    pub ip: String,
}

/// A row of the audit log.
#[derive(Clone, Debug, Object)]
pub struct AuditBody {
    /// Its id.
    pub id: String,
    /// When.
    pub created_at: String,
    /// Who.
    pub actor: ActorBody,
    /// What: the `operationId`.
    pub action: String,
    /// On what: the path.
    pub target: String,
    /// `succeeded`, or the code of the refusal.
    pub outcome: String,
    /// In which request.
    pub request_id: String,
    /// How many alike in that second; more than one only for refused calls.
    pub count: u64,
    /// SHA-256 in hexadecimal of these values, a line each and no line end behind the last: `previous_hash`,
    /// `id`, `created_at`, `livemode`, the actor's `type`, `id` and `ip`, `action`, `target`, `outcome`,
    /// `request_id`, `count`.
    pub hash: String,
    /// `hash` of the row that was written before this one in the organization's log, live or test; zeros for the
    /// first. Rows are listed by their time, which may be another order.
    pub previous_hash: String,
    /// Live or test.
    pub livemode: bool,
}

impl AuditBody {
    /// A row.
    pub fn of(row: &Audited) -> Self {
        Self {
            id: row.id.to_string(),
            created_at: row.at.to_string(),
            actor: ActorBody {
                kind: row.actor.kind.clone(),
                id: row.actor.id.clone(),
                ip: row.actor.ip.clone(),
            },
            action: row.action.clone(),
            target: row.target.clone(),
            outcome: row.outcome.clone(),
            request_id: row.request_id.to_string(),
            count: row.count,
            hash: hex(&row.hash),
            previous_hash: hex(&row.previous),
            livemode: row.mode.is_live(),
        }
    }
}
