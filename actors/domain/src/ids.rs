//! Identifiers: a prefix and a lower-case ULID, such as `agent_01j9…`.
//!
//! Inside they are the ULID's 128 bits: small, `Copy`, sorted by time of birth. A text that is not
//! exactly what we print is not an id, so two spellings of one id cannot exist.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
use sha2::{Digest as _, Sha256};
use ulid::Ulid;

/// A text that is no identifier of the wanted kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not an identifier that begins with `{0}`")]
pub struct NotAnId(pub &'static str);

/// Dice for an id that the same content gives again: every replica mints the same one.
pub(crate) fn dice_of(content: Sha256) -> u128 {
    let bytes: [u8; 32] = content.finalize().into();
    bytes[..10].iter().fold(0, |sum, byte| sum << 8 | u128::from(*byte))
}

macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident = $prefix:literal;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u128);

        impl $name {
            /// What the text form begins with.
            pub const PREFIX: &'static str = $prefix;

            /// Makes an id from milliseconds since 1970 and 80 random bits.
            pub fn new(at: crate::Timestamp, dice: u128) -> Self {
                Self(Ulid::from_parts(at.millis(), dice).0)
            }

            /// When it was made.
            pub fn made_at(self) -> crate::Timestamp {
                crate::Timestamp::from_millis(Ulid(self.0).timestamp_ms())
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let mut text = [0; ulid::ULID_LEN];
                let text = Ulid(self.0).array_to_str(&mut text);
                text.make_ascii_lowercase();
                write!(f, "{}{text}", $prefix)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }

        impl FromStr for $name {
            type Err = NotAnId;

            fn from_str(text: &str) -> Result<Self, NotAnId> {
                let id = text
                    .strip_prefix($prefix)
                    .and_then(|rest| Ulid::from_string(rest).ok())
                    .map(|ulid| Self(ulid.0))
                    .ok_or(NotAnId($prefix))?;
                if id.to_string() == text { Ok(id) } else { Err(NotAnId($prefix)) }
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = String::deserialize(deserializer)?;
                text.parse().map_err(D::Error::custom)
            }
        }

        impl crate::table::Key for $name {
            fn encode(&self) -> Vec<u8> {
                self.0.to_be_bytes().to_vec()
            }

            fn decode(bytes: &[u8]) -> Option<Self> {
                Some(Self(u128::from_be_bytes(bytes.try_into().ok()?)))
            }
        }
    )*};
}

ids! {
    /// An agent.
    AgentId = "agent_";
    /// A cloud: a named pool that agents run in.
    CloudId = "cloud_";
    /// One asynchronous invocation.
    JobId = "job_";
    /// One attempt to bring a version of an agent into service.
    DeploymentId = "dep_";
    /// An API key (not the secret itself).
    ApiKeyId = "key_";
    /// An uploaded archive.
    UploadId = "upl_";
    /// A person.
    UserId = "usr_";
    /// An organization, which is the account.
    OrgId = "org_";
    /// One request as we name it.
    RequestId = "req_";
    /// One running copy of an agent.
    InstanceId = "inst_";
    /// A person who was asked to come.
    InvitationId = "invite_";
    /// A chain of refresh tokens.
    SessionId = "sess_";
    /// An OAuth application: its `client_id`.
    ApplicationId = "app_";
    /// A row of the audit log.
    AuditId = "audit_";
    /// Something that happened.
    EventId = "evt_";
    /// A subscription to events.
    WebhookId = "wh_";
    /// One event on its way to one webhook.
    DeliveryId = "dlv_";
    /// A backup of the whole cluster.
    SnapshotId = "snap_";
    /// One node; new with every new data folder.
    NodeId = "node_";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_read_back_from_its_text() {
        let id = AgentId::new(crate::Timestamp::from_millis(1_700_000_000_000), 7);
        let text = id.to_string();
        assert!(text.starts_with("agent_01"), "{text}");
        assert_eq!(text.len(), "agent_".len() + 26);
        assert_eq!(text.parse(), Ok(id));
    }

    #[test]
    fn another_spelling_is_not_an_id() {
        let id = AgentId(7).to_string();
        for wrong in
            [id.to_uppercase(), id.replace("agent_", "job_"), format!("{id}0"), String::new()]
        {
            assert_eq!(wrong.parse::<AgentId>(), Err(NotAnId("agent_")), "{wrong}");
        }
    }
}
