//! OAuth 2.0: applications of third parties, and the codes that they trade for tokens.

use std::{sync::Arc, time::Duration};

use serde::{Deserialize, Serialize};

use crate::{
    ApplicationId, Rejection, SessionId, Timestamp, UserId,
    account::{Scopes, Session, Tenant},
    directory::Directory,
    event::DirectoryEvent,
};

/// Applications of an organization.
const APPLICATIONS_MAX: usize = 100;

/// A third party's program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Application {
    /// Its `client_id`.
    pub id: ApplicationId,
    /// Who registered it.
    pub tenant: Tenant,
    /// Shown to people who are asked to let it in.
    pub name: String,
    /// Where people are sent back to; compared exactly.
    pub redirect_uris: Vec<String>,
    /// What it may ask for, at most.
    pub scopes: Scopes,
    /// HMAC-SHA-256(pepper, client_secret); a public client has none.
    pub secret_hash: Option<[u8; 32]>,
    /// Lifetime of its access tokens, in seconds.
    pub token_seconds: u64,
    /// When it was made.
    pub created_at: Timestamp,
}

/// An authorization code, known by its hash.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Code {
    /// HMAC-SHA-256(pepper, code).
    pub hash: [u8; 32],
    /// The organization of the person who agreed.
    pub tenant: Tenant,
    /// For which application.
    pub application: ApplicationId,
    /// Who agreed.
    pub user: UserId,
    /// Where it was sent.
    pub redirect_uri: String,
    /// To what.
    pub scopes: Scopes,
    /// SHA-256 of the verifier that must come with it (RFC 7636, S256).
    pub challenge: Option<[u8; 32]>,
    /// Until when it is good.
    pub expires_at: Timestamp,
    /// What came of it.
    pub session: Option<SessionId>,
}

/// What an application shows to get tokens for a code.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Redemption {
    /// Of the code.
    pub hash: [u8; 32],
    /// Who asks.
    pub application: ApplicationId,
    /// Where the code was sent, as the application says.
    pub redirect_uri: String,
    /// SHA-256 of the verifier, if one was sent.
    pub challenge: Option<[u8; 32]>,
    /// What is to come of it; its person, organization and scopes are the code's.
    pub session: Session,
}

/// How long a used or expired code is remembered, so that its second use is noticed.
const REMEMBERED_FOR: Duration = Duration::from_secs(3600);

impl Code {
    /// Whether its second use needs not be noticed any more.
    pub fn is_forgotten(&self, at: Timestamp) -> bool {
        at >= self.expires_at.plus(REMEMBERED_FOR)
    }

    /// Whether it was made for this application, address and verifier. A verifier for a code without
    /// a challenge is refused too: it would hide a downgrade (RFC 9700, section 4.8.2).
    pub fn fits(&self, redemption: &Redemption) -> bool {
        self.application == redemption.application
            && self.redirect_uri == redemption.redirect_uri
            && self.challenge == redemption.challenge
    }
}

impl Directory {
    /// An application that this tenant may see.
    pub fn application(
        &self,
        tenant: Tenant,
        id: ApplicationId,
    ) -> Result<Arc<Application>, Rejection> {
        let row = self.applications.get(&id).filter(|row| row.tenant == tenant);
        row.ok_or(Rejection::ApplicationNotFound(id))
    }
}

pub(crate) fn create(
    state: &Directory,
    application: &Application,
) -> Result<Vec<DirectoryEvent>, Rejection> {
    let tenant = application.tenant;
    let count = state.applications.rows().filter(|(_, row)| row.tenant == tenant).count();
    if count >= APPLICATIONS_MAX {
        let what = "OAuth applications".to_owned();
        return Err(Rejection::QuotaExceeded { what, max: APPLICATIONS_MAX as u64 });
    }
    Ok(vec![DirectoryEvent::ApplicationPut(Box::new(application.clone()))])
}

pub(crate) fn delete(
    state: &Directory,
    tenant: Tenant,
    id: ApplicationId,
) -> Result<Vec<DirectoryEvent>, Rejection> {
    state.application(tenant, id)?;
    Ok(vec![DirectoryEvent::ApplicationGone(id)])
}
