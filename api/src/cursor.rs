//! Cursors: where a list goes on. They hold values, not positions, so they survive changes of the list
//! and of the node; they are signed, and bound to the filters they were made with.

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use hmac::{Hmac, KeyInit as _, Mac as _};
use http::StatusCode;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;

use crate::error::Problem;

const TAG_BYTES: usize = 16;

/// The last item of a page.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Cursor {
    /// Its sort key.
    pub(crate) key: String,
    /// Its id.
    pub(crate) id: String,
}

#[derive(Serialize, Deserialize)]
struct Signed {
    #[serde(flatten)]
    cursor: Cursor,
    filter: String,
}

/// The filters of a list, as a short word.
pub(crate) fn filter(parts: &[&(dyn std::fmt::Debug + Sync)]) -> String {
    let digest = Sha256::digest(format!("{parts:?}"));
    URL_SAFE_NO_PAD.encode(&digest[..9])
}

fn tag(key: &[u8; 32], bytes: &[u8]) -> Vec<u8> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("any length of key fits");
    mac.update(b"cursor");
    mac.update(bytes);
    mac.finalize().into_bytes()[..TAG_BYTES].to_vec()
}

/// Writes a cursor down.
pub(crate) fn write(key: &[u8; 32], cursor: Cursor, filter: &str) -> String {
    let signed = Signed { cursor, filter: filter.to_owned() };
    let mut bytes = serde_json::to_vec(&signed).expect("a cursor has only plain fields");
    bytes.splice(..0, tag(key, &bytes));
    URL_SAFE_NO_PAD.encode(bytes)
}

/// Reads a cursor that was made with these filters.
pub(crate) fn read(
    key: &[u8; 32],
    text: Option<&str>,
    filter: &str,
) -> Result<Option<Cursor>, Problem> {
    let Some(text) = text else { return Ok(None) };
    let read = || {
        let bytes = URL_SAFE_NO_PAD.decode(text).ok()?;
        let (given, rest) = bytes.split_at_checked(TAG_BYTES)?;
        let same = bool::from(given.ct_eq(&tag(key, rest)));
        let signed: Signed = serde_json::from_slice(rest).ok().filter(|_| same)?;
        Some(signed.cursor).filter(|_| signed.filter == filter)
    };
    match read() {
        Some(cursor) => Ok(Some(cursor)),
        None => {
            let message = "this cursor is not valid here; use it with the filters it came with, or begin without one";
            Err(Problem::new(StatusCode::BAD_REQUEST, "INVALID_CURSOR", message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_is_bound_to_its_filters_and_its_key() {
        let cursor = Cursor { key: "2026".to_owned(), id: "agent_1".to_owned() };
        let text = write(&[1; 32], cursor.clone(), "f");
        let read = |key: u8, text: &str, filter: &str| read(&[key; 32], Some(text), filter).ok();
        assert_eq!(read(1, &text, "f"), Some(Some(cursor)));
        assert_eq!(read(1, &text, "g"), None);
        assert_eq!(read(2, &text, "f"), None);
        assert_eq!(read(1, &text[1..], "f"), None);
        assert_eq!(read(1, "", "f"), None);
    }
}
