//! How entries and rows are written: one version byte, then MessagePack with field names.
//!
//! Names make an added field (`#[serde(default)]`) readable by both sides of an upgrade; positional
//! formats would turn it into a broken log. The golden files under `tests/golden` hold every
//! released version to that.

use serde::{Serialize, de::DeserializeOwned};

/// The version byte written today.
pub const VERSION: u8 = 1;

/// Bytes that are not an entry or row of ours.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// Written by a newer release, or not by us at all.
    #[error("the record has format version {0:?}, this release reads {VERSION}")]
    Version(Option<u8>),
    /// Damaged, or a shape this release does not know.
    #[error("the record is not readable")]
    Shape(#[from] rmp_serde::decode::Error),
}

/// Writes `value`.
pub fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    let mut bytes = vec![];
    encode_onto(&mut bytes, value);
    bytes
}

/// Writes `value` behind what is there.
pub fn encode_onto<T: Serialize>(bytes: &mut Vec<u8>, value: &T) {
    bytes.push(VERSION);
    rmp_serde::encode::write_named(bytes, value).expect("a record has only encodable fields");
}

/// Reads what [`encode`] wrote.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, DecodeError> {
    match bytes.split_first() {
        Some((&VERSION, rest)) => Ok(rmp_serde::from_slice(rest)?),
        other => Err(DecodeError::Version(other.map(|(version, _)| *version))),
    }
}
