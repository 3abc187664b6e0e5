//! Variables of an agent's process. A value whose name sounds like a secret is sealed before it is
//! proposed, so that neither a log nor a table ever holds it in plain, and is shown only as a mask.

use serde::{Deserialize, Serialize};

/// What is shown instead of a secret: always eight, so that its length does not leak.
pub const MASK: &str = "********";

/// One variable's value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Variable {
    /// Shown as it is.
    Plain(String),
    /// Sealed by the node's key; shown as [`MASK`].
    Sealed(#[serde(with = "serde_bytes")] Vec<u8>),
    /// A text with references to secrets, sealed; they are resolved when an instance starts.
    Template(#[serde(with = "serde_bytes")] Vec<u8>),
    /// Only in a patch: the client sent the mask back, so the stored value stays.
    Unchanged,
}

/// Words that make a variable's name sound like a secret (`decisions` §4).
const SECRET_WORDS: [&str; 12] = [
    "secret",
    "token",
    "password",
    "passwd",
    "pwd",
    "apikey",
    "api_key",
    "api-key",
    "private",
    "credential",
    "auth",
    "dsn",
];

/// Whether a variable of this name is masked.
pub fn is_secret_like(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    SECRET_WORDS.iter().any(|word| name.contains(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_sound_like_secrets() {
        for name in ["API_KEY", "OPENAI_APIKEY", "db_password", "AUTH_HEADER", "SENTRY_DSN"] {
            assert!(is_secret_like(name), "{name}");
        }
        for name in ["MODEL", "PORT", "REGION", "KEYBOARD"] {
            assert!(!is_secret_like(name), "{name}");
        }
    }
}
