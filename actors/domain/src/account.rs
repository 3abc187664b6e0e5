//! Organizations, their people and their API keys. Only hashes are kept; nothing here can be shown.

use serde::{Deserialize, Serialize};

use crate::{ApiKeyId, OrgId, Timestamp, UserId};

/// Live objects are production; test objects are a sandbox. A caller sees one of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Production.
    Live,
    /// Sandbox.
    Test,
}

impl Mode {
    /// The word used in `livemode` fields.
    pub fn is_live(self) -> bool {
        self == Self::Live
    }
}

/// Who owns an object, and in which mode: what a caller must match to see it at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Tenant {
    /// The organization.
    pub org: OrgId,
    /// Live or test.
    pub mode: Mode,
}

/// An account.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Organization {
    /// Its id, which events call `account_id`.
    pub id: OrgId,
    /// Shown to people.
    pub name: String,
    /// When it was made.
    pub created_at: Timestamp,
}

/// A person of an organization.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct User {
    /// The person's id.
    pub id: UserId,
    /// The organization.
    pub org: OrgId,
    /// Unique, lower case.
    pub email: String,
    /// Argon2id, in the PHC string format.
    pub password_hash: String,
    /// `owner` for the first one.
    pub role: String,
    /// When the account was made.
    pub created_at: Timestamp,
}

/// A key for programs. The secret is known only as an HMAC-SHA-256 under the server's pepper.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ApiKey {
    /// Names the key without revealing it.
    pub id: ApiKeyId,
    /// Whose objects it reaches.
    pub tenant: Tenant,
    /// Shown to people.
    pub name: String,
    /// HMAC-SHA-256(pepper, key).
    pub hash: [u8; 32],
    /// The last four characters, for recognition.
    pub last4: String,
    /// What it may do.
    pub scopes: Vec<String>,
    /// When it was made.
    pub created_at: Timestamp,
}
