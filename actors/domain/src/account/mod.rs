//! Organizations, their people, their keys and what those may do. Of anything secret only hashes and
//! sealed values are kept; nothing here can be shown.

mod key;
mod oauth;
mod organization;
mod scope;
mod session;
mod signing;
mod user;

pub use key::{ApiKey, ApiKeyPatch, IpRange, NotAnIpRange, Used};
pub(crate) use key::{create as create_key, rotate as rotate_key, update as update_key};
pub use oauth::{Application, Code, Redemption};
pub(crate) use oauth::{create as create_application, delete as delete_application};
pub use organization::{Organization, OrganizationPatch, Tier};
pub(crate) use organization::{create as create_organization, update as update_organization};
pub use scope::{GRANTABLE, NotAScope, Role, Scope, Scopes};
pub(crate) use session::{Holder, begin, end_session, note_login, redeem, refresh};
pub use session::{LOGIN_FAILURES_MAX, LOGIN_WINDOW, REUSE_GRACE, Session, TOKENS_LAST, Throttle};
pub use signing::{SIGNING_KEYS_KEPT, SigningKey};
pub use user::{INVITED_FOR, Invitation, User, UserPatch};
pub(crate) use user::{accept, change as change_user, invite, remove as remove_user};

use serde::{Deserialize, Serialize};

use crate::OrgId;

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
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Tenant {
    /// The organization.
    pub org: OrgId,
    /// Live or test.
    pub mode: Mode,
}
