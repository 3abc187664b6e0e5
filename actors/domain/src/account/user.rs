//! People: invited, with a role, one organization each.

use std::{sync::Arc, time::Duration};

use serde::{Deserialize, Serialize};

use crate::{
    ApiKeyId, InvitationId, OrgId, Rejection, Timestamp, UserId,
    account::{ApiKey, Role, Scopes},
    directory::Directory,
    event::DirectoryEvent,
};

/// How long an invitation is good.
pub const INVITED_FOR: Duration = Duration::from_secs(7 * 24 * 3600);
/// People of an organization, invited ones included.
const PEOPLE_MAX: usize = 1000;

/// A person of an organization.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct User {
    /// The person's id.
    pub id: UserId,
    /// The organization.
    pub org: OrgId,
    /// Lower case; unique in the organization. People may be in several, each with a password of its own.
    pub email: String,
    /// Argon2id, in the PHC string format.
    pub password_hash: String,
    /// What the person may do.
    pub role: Role,
    /// When the account was made.
    pub created_at: Timestamp,
    /// Shown to people.
    #[serde(default)]
    pub name: Option<String>,
    /// When it was last changed.
    #[serde(default)]
    pub updated_at: Timestamp,
    /// Counts changes.
    #[serde(default)]
    pub revision: u64,
    /// Sessions from before this time are over: the password changed.
    #[serde(default)]
    pub sessions_since: Timestamp,
}

/// A change of a person; `None` leaves a field as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserPatch {
    /// New name; empty for none.
    pub name: Option<String>,
    /// New role.
    pub role: Option<Role>,
    /// New password, hashed. Ends every session.
    pub password_hash: Option<String>,
    /// New address.
    #[serde(default)]
    pub email: Option<String>,
}

/// Somebody is asked to come.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Invitation {
    /// Its id.
    pub id: InvitationId,
    /// To which organization.
    pub org: OrgId,
    /// Whom, lower case.
    pub email: String,
    /// As what.
    pub role: Role,
    /// HMAC-SHA-256(pepper, token).
    pub hash: [u8; 32],
    /// Who asked.
    pub invited_by: String,
    /// When.
    pub created_at: Timestamp,
    /// Until when it is good.
    pub expires_at: Timestamp,
}

/// Keys that made keys are looked through this far.
const MAKERS_MAX: usize = 8;

impl Directory {
    /// As whom a key acts: as whoever made it, who may have made it with another key. The first keys of
    /// an organization are its owner's.
    pub fn role_of_key(&self, key: &ApiKey) -> Option<Role> {
        let mut maker = key.created_by.clone();
        for _ in 0..MAKERS_MAX {
            let Some(text) = maker else { return Some(Role::Owner) };
            if let Ok(user) = text.parse::<UserId>() {
                return self.user(key.tenant.org, user).ok().map(|user| user.role);
            }
            let id: ApiKeyId = text.parse().ok()?;
            maker = self.api_keys.get(&id)?.created_by.clone();
        }
        None
    }

    /// A person of this organization.
    pub fn user(&self, org: OrgId, id: UserId) -> Result<Arc<User>, Rejection> {
        self.users.get(&id).filter(|user| user.org == org).ok_or(Rejection::UserNotFound(id))
    }

    /// The person with this address, whatever its case: in this organization, or else the first one that was
    /// made under it.
    pub fn user_by_email(&self, email: &str, org: Option<OrgId>) -> Option<Arc<User>> {
        let email = email.to_lowercase();
        let all = (email.clone(), UserId(0))..=(email, UserId(u128::MAX));
        let mut users = self.user_by_email.range(all).filter_map(|(_, id)| self.users.get(id));
        users.find(|user| org.is_none_or(|org| user.org == org))
    }

    fn is_taken(&self, email: &str, org: OrgId) -> bool {
        self.user_by_email(email, Some(org)).is_some()
    }

    /// An invitation of this organization.
    pub fn invitation(&self, org: OrgId, id: InvitationId) -> Result<Arc<Invitation>, Rejection> {
        let row = self.invitations.get(&id).filter(|row| row.org == org);
        row.ok_or(Rejection::InvitationNotFound(id))
    }

    fn people(&self, org: OrgId) -> usize {
        let users = self.users.rows().filter(|(_, user)| user.org == org).count();
        users + self.invitations.rows().filter(|(_, row)| row.org == org).count()
    }

    fn is_last_owner(&self, user: &User) -> bool {
        let owners = self.users.rows().filter(|(_, other)| {
            other.org == user.org && other.role == Role::Owner && other.id != user.id
        });
        user.role == Role::Owner && owners.count() == 0
    }
}

/// Nobody but owners changes owners, and nobody hands on more than they have.
fn may_give(by: Option<Role>, scopes: &Scopes, role: Role) -> Result<(), Rejection> {
    let is_owner = by == Some(Role::Owner);
    if role == Role::Owner && !is_owner || scopes.lacks(&role.scopes()).is_some() {
        return Err(Rejection::RoleTooHigh(role.as_str().to_owned()));
    }
    Ok(())
}

pub(crate) fn invite(
    state: &Directory,
    invitation: &Invitation,
    by: Option<Role>,
    scopes: &Scopes,
    at: Timestamp,
) -> Result<Vec<DirectoryEvent>, Rejection> {
    may_give(by, scopes, invitation.role)?;
    let mut events: Vec<DirectoryEvent> = state
        .invitations
        .rows()
        .filter(|(_, row)| {
            row.expires_at <= at || row.org == invitation.org && row.email == invitation.email
        })
        .map(|(id, _)| DirectoryEvent::InvitationGone(*id))
        .collect();
    if state.is_taken(&invitation.email, invitation.org) {
        return Err(Rejection::EmailTaken);
    }
    if state.people(invitation.org) >= PEOPLE_MAX {
        return Err(Rejection::QuotaExceeded { what: "people".to_owned(), max: PEOPLE_MAX as u64 });
    }
    events.push(DirectoryEvent::InvitationPut(Box::new(invitation.clone())));
    Ok(events)
}

/// The invited person takes a password: an account is made, the invitation is used up.
pub(crate) fn accept(
    state: &Directory,
    hash: &[u8; 32],
    user: &User,
    at: Timestamp,
) -> Result<Vec<DirectoryEvent>, Rejection> {
    let mut rows = state.invitations.rows().map(|(_, row)| row);
    let row = rows.find(|row| row.hash == *hash && row.expires_at > at);
    let row = row.ok_or(Rejection::InvitationInvalid)?;
    if state.is_taken(&row.email, row.org) {
        return Err(Rejection::EmailTaken);
    }
    let user = User { org: row.org, email: row.email.clone(), role: row.role, ..user.clone() };
    Ok(vec![DirectoryEvent::InvitationGone(row.id), DirectoryEvent::UserPut(Box::new(user))])
}

pub(crate) fn change(
    state: &Directory,
    (org, id): (OrgId, UserId),
    patch: &UserPatch,
    by: (Option<Role>, &Scopes),
    if_match: Option<u64>,
    at: Timestamp,
) -> Result<Vec<DirectoryEvent>, Rejection> {
    let before = state.user(org, id)?;
    if if_match.is_some_and(|wanted| wanted != before.revision) {
        return Err(Rejection::StaleObject);
    }
    // Who changes an address may take the account over: that takes the same right.
    if patch.role.is_some() || patch.email.is_some() || before.role == Role::Owner {
        may_give(by.0, by.1, before.role)?;
    }
    let mut user = User::clone(&before);
    if let Some(role) = patch.role {
        may_give(by.0, by.1, role)?;
        if role != Role::Owner && state.is_last_owner(&before) {
            return Err(Rejection::LastOwner);
        }
        user.role = role;
    }
    if let Some(email) = &patch.email {
        if state.user_by_email(email, Some(org)).is_some_and(|other| other.id != id) {
            return Err(Rejection::EmailTaken);
        }
        user.email.clone_from(email);
    }
    if let Some(name) = &patch.name {
        user.name = Some(name.clone()).filter(|name| !name.is_empty());
    }
    if let Some(hash) = &patch.password_hash {
        user.password_hash.clone_from(hash);
        user.sessions_since = at;
    }
    user.updated_at = at;
    user.revision += 1;
    Ok(vec![DirectoryEvent::UserPut(Box::new(user))])
}

pub(crate) fn remove(
    state: &Directory,
    (org, id): (OrgId, UserId),
    by: (Option<Role>, &Scopes),
) -> Result<Vec<DirectoryEvent>, Rejection> {
    let user = state.user(org, id)?;
    may_give(by.0, by.1, user.role)?;
    if state.is_last_owner(&user) {
        return Err(Rejection::LastOwner);
    }
    Ok(vec![DirectoryEvent::UserGone(id)])
}
