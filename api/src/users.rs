//! `/v1/users` and `/v1/invitations`: the people of an organization.

use actors::call::auditing::{self, Whose};
use domain::{
    InvitationId, OrgId, Rejection, Timestamp, UserId,
    account::{INVITED_FOR, Invitation, Mode, Role, Scopes, Tenant, User, UserPatch},
    directory::{Command, Reply},
};
use poem::Request;
use poem_openapi::{ApiResponse, OpenApi, param::Path, payload::Json};

use crate::{
    Handle,
    agents::if_match,
    body::account::{AcceptInvitation, CreateInvitation, InvitationBody, UpdateUser, UserBody},
    caller::{Caller, hash_key},
    check::{Checked, is_removed},
    envelope::{Page, Success},
    error::{ApiError, Problem, path_id},
    keys::without_limits,
    listing::{Listed, Listing},
    password,
    repeat::{Gone, keyed, replayed},
};

pub(crate) struct UsersApi(pub(crate) Handle);

/// A person.
#[derive(ApiResponse)]
pub(crate) enum UserAnswer {
    /// The person as they are now.
    #[oai(status = 200)]
    Ok(
        Json<Success<UserBody>>,
        #[oai(header = "ETag")] String,
        #[oai(header = "Idempotency-Replayed")] Option<String>,
    ),
}

/// A new person.
#[derive(ApiResponse)]
pub(crate) enum UserCreated {
    /// The person.
    #[oai(status = 201)]
    Created(Json<Success<UserBody>>, #[oai(header = "Location")] String),
}

/// A new invitation.
#[derive(ApiResponse)]
pub(crate) enum InvitationCreated {
    /// The invitation, with its token.
    #[oai(status = 201)]
    Created(Json<Success<InvitationBody>>, #[oai(header = "Idempotency-Replayed")] Option<String>),
}

type Result<T> = std::result::Result<T, ApiError>;

/// An address, in lower case. Whether it is somebody's is found out by writing to it.
pub(crate) fn email(field: &str, text: &str) -> std::result::Result<String, Problem> {
    let text = text.trim().to_lowercase();
    let is_plain = text.chars().all(|c| !c.is_control() && !c.is_whitespace());
    let (local, host) = text.rsplit_once('@').unwrap_or_default();
    if is_plain && !local.is_empty() && !host.is_empty() && !local.contains('@') {
        return Ok(text);
    }
    Err(Problem::field(field, "must be an email address such as name@example.com"))
}

impl Listed for User {
    fn id(&self) -> String {
        self.id.to_string()
    }

    fn texts(&self) -> Vec<&str> {
        vec![self.name.as_deref().unwrap_or_default(), &self.email]
    }

    fn created_at(&self) -> Timestamp {
        self.created_at
    }

    fn updated_at(&self) -> Timestamp {
        self.updated_at
    }
}

impl Listed for Invitation {
    const IS_NAMED: bool = false;

    fn id(&self) -> String {
        self.id.to_string()
    }

    fn texts(&self) -> Vec<&str> {
        vec![&self.email]
    }

    fn created_at(&self) -> Timestamp {
        self.created_at
    }
}

#[OpenApi(prefix_path = "/v1", tag = "crate::document::Tag::People")]
impl UsersApi {
    /// List users
    ///
    /// The people of the organization, newest first.
    #[oai(path = "/users", method = "get", operation_id = "listUsers")]
    async fn list(
        &self,
        caller: Caller,
        listing: Listing,
    ) -> Result<Json<Success<Page<UserBody>>>> {
        let directory = self.0.service.directory().await?.read();
        let rows = directory.users.rows().map(|(_, user)| user);
        let rows = rows.filter(|user| user.org == caller.org());
        let selected = listing.select(&self.0, caller.tenant(), &[&"users"], rows)?;
        Ok(Json(Success::of(selected.page(UserBody::of))))
    }

    /// Get a user
    #[oai(path = "/users/:id", method = "get", operation_id = "getUser")]
    async fn get(
        &self,
        caller: Caller,
        /// The user.
        id: Path<String>,
    ) -> Result<UserAnswer> {
        let id: UserId = path_id("user", &id)?;
        let user = self.0.service.directory().await?.read().user(caller.org(), id)?;
        Ok(answer(&user, None))
    }

    /// Update a user
    ///
    /// A JSON merge patch. Only owners make and change owners; the last owner stays one.
    #[oai(path = "/users/:id", method = "patch", operation_id = "updateUser")]
    async fn update(
        &self,
        caller: Caller,
        request: &Request,
        /// The user.
        id: Path<String>,
        body: Checked<UpdateUser>,
    ) -> Result<UserAnswer> {
        let (org, id) = (caller.org(), path_id::<UserId>("user", &id)?);
        let key = keyed(request, caller.tenant(), Some(&body.json))?;
        body.removes_only(&["name"])?;
        let if_match = if_match(request)?;
        let is_nameless = is_removed(&body.json, "name");
        let UpdateUser { name, role, email: address } = body.body;
        if role.is_some() || address.is_some() {
            without_limits(caller.identity())?;
        }
        let address = address.map(|text| email("email", &text)).transpose()?;
        let name = name.or_else(|| is_nameless.then(String::new));
        let patch =
            UserPatch { name, role: role.map(Into::into), password_hash: None, email: address };
        let (by, scopes) = self.acting(&caller);
        let command = Command::UpdateUser { org, id, patch, by, scopes, if_match };
        let changed = self.0.service.change(command, key).await?;
        let Reply::User(user) = changed.value else { return Err(Problem::internal().into()) };
        Ok(answer(&user, replayed(changed.replayed)))
    }

    /// Remove a user
    ///
    /// Their sessions and tokens end at once. Keys they made stay.
    #[oai(path = "/users/:id", method = "delete", operation_id = "deleteUser")]
    async fn delete(
        &self,
        caller: Caller,
        request: &Request,
        /// The user.
        id: Path<String>,
    ) -> Result<Gone> {
        let (org, id) = (caller.org(), path_id::<UserId>("user", &id)?);
        let key = keyed(request, caller.tenant(), None)?;
        let (by, scopes) = self.acting(&caller);
        let answer =
            self.0.service.change(Command::RemoveUser { org, id, by, scopes }, key).await?;
        Ok(Gone::of(id, answer.replayed))
    }

    /// List invitations
    ///
    /// Those that wait, newest first.
    #[oai(path = "/invitations", method = "get", operation_id = "listInvitations")]
    async fn invitations(
        &self,
        caller: Caller,
        listing: Listing,
    ) -> Result<Json<Success<Page<InvitationBody>>>> {
        let now = self.0.service.world.now();
        let directory = self.0.service.directory().await?.read();
        let rows = directory.invitations.rows().map(|(_, row)| row);
        let rows = rows.filter(|row| row.org == caller.org() && row.expires_at > now);
        let selected = listing.select(&self.0, caller.tenant(), &[&"invitations"], rows)?;
        Ok(Json(Success::of(selected.page(InvitationBody::of))))
    }

    /// Invite somebody
    ///
    /// The answer holds a token, once: send it to them. It is good for a week.
    #[oai(path = "/invitations", method = "post", operation_id = "createInvitation")]
    async fn invite(
        &self,
        caller: Caller,
        request: &Request,
        body: Checked<CreateInvitation>,
    ) -> Result<InvitationCreated> {
        without_limits(caller.identity())?;
        let key = keyed(request, caller.tenant(), Some(&body.json))?;
        let world = &self.0.service.world;
        let (now, token) = (world.now(), format!("ii_{}", self.0.random_text()));
        let kept = self.0.for_repeats(caller.org(), key.as_ref(), &token).await?;
        let invitation = Invitation {
            id: world.mint(InvitationId::new),
            org: caller.org(),
            email: email("email", &body.body.email)?,
            role: body.body.role.into(),
            hash: hash_key(&self.0.settings.pepper, &token),
            invited_by: caller.identity().name().1,
            created_at: now,
            expires_at: now.plus(INVITED_FOR),
        };
        let (by, scopes) = self.acting(&caller);
        let command =
            Command::Invite { invitation: Box::new(invitation), by, scopes, answer: kept };
        let answer = self.0.service.change(command, key).await?;
        let Reply::Invitation(row, sealed) = answer.value else {
            return Err(Problem::internal().into());
        };
        let token = self.0.repeated(caller.org(), answer.replayed, &sealed, token)?;
        let body = InvitationBody { token: Some(token), ..InvitationBody::of(&row) };
        Ok(InvitationCreated::Created(Json(Success::of(body)), replayed(answer.replayed)))
    }

    /// Withdraw an invitation
    #[oai(path = "/invitations/:id", method = "delete", operation_id = "deleteInvitation")]
    async fn withdraw(
        &self,
        caller: Caller,
        request: &Request,
        /// The invitation.
        id: Path<String>,
    ) -> Result<Gone> {
        let (org, id) = (caller.org(), path_id::<InvitationId>("invitation", &id)?);
        let key = keyed(request, caller.tenant(), None)?;
        let answer = self.0.service.change(Command::WithdrawInvitation { org, id }, key).await?;
        Ok(Gone::of(id, answer.replayed))
    }

    /// Accept an invitation
    ///
    /// Makes an account with a password of the person's own; then log in.
    #[oai(path = "/invitations/accept", method = "post", operation_id = "acceptInvitation")]
    async fn accept(&self, body: Checked<AcceptInvitation>) -> Result<UserCreated> {
        let AcceptInvitation { token, password, name } = body.body;
        password::check_new("password", &password)?;
        let hash = hash_key(&self.0.settings.pepper, &token);
        let world = &self.0.service.world;
        let now = world.now();
        let waits = |row: &Invitation| row.hash == hash && row.expires_at > now;
        let is_known = {
            let directory = self.0.service.directory().await?.read();
            directory.invitations.rows().any(|(_, row)| waits(row))
        };
        // Nobody makes us hash passwords for tokens that we never gave out.
        if !is_known {
            return Err(Rejection::InvitationInvalid.into());
        }
        let user = User {
            id: world.mint(UserId::new),
            org: OrgId(0),
            email: String::new(),
            password_hash: self.0.passwords.hash(password).await?,
            role: Role::Viewer,
            created_at: now,
            name,
            updated_at: now,
            revision: 1,
            sessions_since: now,
        };
        let command = Command::AcceptInvitation { hash, user: Box::new(user) };
        let reply = self.0.service.change(command, None).await?.value;
        let Reply::User(user) = reply else { return Err(Problem::internal().into()) };
        let tenant = Tenant { org: user.org, mode: Mode::Live };
        auditing::belongs_to(Whose::user(tenant, user.id));
        let location = format!("/v1/users/{}", user.id);
        Ok(UserCreated::Created(Json(Success::of(UserBody::of(&user))), location))
    }
}

impl UsersApi {
    /// As whom and with what the caller changes people.
    fn acting(&self, caller: &Caller) -> (Option<Role>, Scopes) {
        let directory = self.0.service.world.directory().read();
        (caller.identity().acts_as(&directory), caller.identity().scopes)
    }
}

fn answer(user: &User, replayed: Option<String>) -> UserAnswer {
    let body = UserBody::of(user);
    let etag = body.etag.clone();
    UserAnswer::Ok(Json(Success::of(body)), etag, replayed)
}
