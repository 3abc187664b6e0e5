//! The keys that sign access tokens. The private half is sealed; the public half is for everybody.

use serde::{Deserialize, Serialize};

use crate::Timestamp;

/// Keys kept, the signing one included: tokens of the ones before stay readable.
pub const SIGNING_KEYS_KEPT: usize = 3;

/// An Ed25519 pair.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SigningKey {
    /// `kid` of tokens.
    pub id: String,
    /// The 32 bytes of the public half.
    #[serde(with = "serde_bytes")]
    pub public: Vec<u8>,
    /// The private half as PKCS #8, sealed.
    #[serde(with = "serde_bytes")]
    pub sealed: Vec<u8>,
    /// When it was made.
    pub created_at: Timestamp,
}
