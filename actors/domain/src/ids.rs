//! Identifiers: a prefix and a lower-case ULID, such as `agent_01j9…`.
//!
//! Inside they are the ULID's 128 bits: small, `Copy`, sorted by time of birth. A text that is not
//! exactly what we print is not an id, so two spellings of one id cannot exist.

use std::{fmt, marker::PhantomData, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Visitor, ser::Error as _};
use sha2::{Digest as _, Sha256};
use ulid::{ULID_LEN, Ulid};

/// A text that is no identifier of the wanted kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not an identifier that begins with `{0}`")]
pub struct NotAnId(pub &'static str);

/// Dice for an id that the same content gives again: every replica mints the same one.
pub(crate) fn dice_of(content: Sha256) -> u128 {
    let bytes: [u8; 32] = content.finalize().into();
    bytes[..10].iter().fold(0, |sum, byte| sum << 8 | u128::from(*byte))
}

/// The text of an id behind its prefix.
fn in_lower_case(id: u128, text: &mut [u8; ULID_LEN]) -> &str {
    let text = Ulid(id).array_to_str(text);
    text.make_ascii_lowercase();
    text
}

/// The id that this is the one spelling of.
fn id_in(text: &str) -> Option<u128> {
    let id = Ulid::from_string(text).ok()?.0;
    (in_lower_case(id, &mut [0; ULID_LEN]) == text).then_some(id)
}

/// Reads an id where it stands: entries and rows are full of them.
struct IdVisitor<T>(PhantomData<T>);

impl<T: FromStr<Err = NotAnId>> Visitor<'_> for IdVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<T, E> {
        text.parse().map_err(E::custom)
    }
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
                f.write_str($prefix)?;
                f.write_str(in_lower_case(self.0, &mut [0; ULID_LEN]))
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
                let rest = text.strip_prefix($prefix);
                rest.and_then(id_in).map(Self).ok_or(NotAnId($prefix))
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                let mut text = [0; $prefix.len() + ULID_LEN];
                let (prefix, rest) = text.split_at_mut($prefix.len());
                prefix.copy_from_slice($prefix.as_bytes());
                rest.copy_from_slice(in_lower_case(self.0, &mut [0; ULID_LEN]).as_bytes());
                serializer.serialize_str(str::from_utf8(&text).map_err(S::Error::custom)?)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                deserializer.deserialize_str(IdVisitor(PhantomData))
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
        let json = serde_json::to_string(&id).expect("writes");
        assert_eq!(json, format!("\"{text}\""));
        assert_eq!(serde_json::from_str::<AgentId>(&json).ok(), Some(id));
        let packed = rmp_serde::to_vec(&id).expect("writes");
        assert_eq!(packed, rmp_serde::to_vec(&text).expect("writes"));
        assert_eq!(rmp_serde::from_slice::<AgentId>(&packed).ok(), Some(id));
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
