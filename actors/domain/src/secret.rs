//! Secrets: named values that agents are started with and nobody ever reads again.
//!
//! A value refers to them as `${secrets.NAME}`; `$${` means the two characters themselves.

use std::{collections::BTreeSet, sync::Arc};

use serde::{Deserialize, Serialize};

use crate::{
    CloudId, Rejection, Timestamp, account::Tenant, directory::Directory, event::DirectoryEvent,
};

/// Longest name.
pub const SECRET_NAME_MAX: usize = 64;
/// Most bytes of a value.
pub const SECRET_BYTES_MAX: usize = 64 * 1024;
/// Secrets of an organization, per mode.
const SECRETS_MAX: usize = 1000;

/// A secret. One that belongs to a cloud stands before one of the same name that does not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Secret {
    /// Whose it is.
    pub tenant: Tenant,
    /// Only for agents of this cloud.
    pub cloud_id: Option<CloudId>,
    /// `^[A-Z][A-Z0-9_]{0,63}$`.
    pub name: String,
    /// Sealed for [`Secret::place`].
    #[serde(with = "serde_bytes")]
    pub sealed: Vec<u8>,
    /// Counts values.
    pub version: u64,
    /// When it was first set.
    pub created_at: Timestamp,
    /// When it was last set.
    pub updated_at: Timestamp,
}

impl Secret {
    /// The key of its row, and the place that its value is sealed for.
    pub fn place(tenant: Tenant, cloud_id: Option<CloudId>, name: &str) -> String {
        let cloud = cloud_id.map_or_else(|| "-".to_owned(), |id| id.to_string());
        format!("{}{cloud}/{name}", Self::places(tenant))
    }

    /// What the keys of all secrets of a tenant begin with.
    fn places(tenant: Tenant) -> String {
        let mode = if tenant.mode.is_live() { "live" } else { "test" };
        format!("{}/{mode}/", tenant.org)
    }
}

/// Whether a text can be the name of a secret.
pub fn is_secret_name(name: &str) -> bool {
    let mut bytes = name.bytes();
    bytes.next().is_some_and(|first| first.is_ascii_uppercase())
        && bytes.all(|b| b.is_ascii_uppercase() || b.is_ascii_digit() || b == b'_')
        && name.len() <= SECRET_NAME_MAX
}

const OPENS: &str = "${secrets.";

/// One piece of a value.
enum Piece<'v> {
    Text(&'v str),
    Secret(&'v str),
}

fn pieces(value: &str) -> Vec<Piece<'_>> {
    let (mut found, mut rest) = (vec![], value);
    while let Some(start) = rest.find("${") {
        let escaped = rest[..start].ends_with('$');
        let end = rest[start..].find('}').map(|end| start + end);
        match (escaped, rest[start..].starts_with(OPENS), end) {
            (true, ..) => {
                found.push(Piece::Text(&rest[..start - 1]));
                found.push(Piece::Text("${"));
                rest = &rest[start + 2..];
            }
            (false, true, Some(end)) => {
                found.push(Piece::Text(&rest[..start]));
                found.push(Piece::Secret(&rest[start + OPENS.len()..end]));
                rest = &rest[end + 1..];
            }
            (false, ..) => {
                found.push(Piece::Text(&rest[..start + 2]));
                rest = &rest[start + 2..];
            }
        }
    }
    found.push(Piece::Text(rest));
    found
}

/// Names of the secrets that a value refers to.
pub fn references(value: &str) -> BTreeSet<&str> {
    let names = pieces(value).into_iter().filter_map(|piece| match piece {
        Piece::Secret(name) => Some(name),
        Piece::Text(_) => None,
    });
    names.collect()
}

/// A value with its references replaced, or the name of the first that is not known.
pub fn resolve(
    value: &str,
    mut secret: impl FnMut(&str) -> Option<String>,
) -> Result<String, &str> {
    let mut whole = String::with_capacity(value.len());
    for piece in pieces(value) {
        match piece {
            Piece::Text(text) => whole.push_str(text),
            Piece::Secret(name) => whole.push_str(&secret(name).ok_or(name)?),
        }
    }
    Ok(whole)
}

impl Directory {
    /// The secret that an agent in `cloud` means by `name`.
    pub fn secret(&self, tenant: Tenant, cloud: CloudId, name: &str) -> Option<Arc<Secret>> {
        let own = self.secrets.get(&Secret::place(tenant, Some(cloud), name));
        own.or_else(|| self.secrets.get(&Secret::place(tenant, None, name)))
    }

    /// All secrets of a tenant, by name.
    pub fn secrets_of(&self, tenant: Tenant) -> impl Iterator<Item = &Arc<Secret>> {
        let places = Secret::places(tenant);
        let rows = self.secrets.rows_from(places.clone());
        rows.take_while(move |(key, _)| key.starts_with(&places)).map(|(_, row)| row)
    }
}

pub(crate) fn put(
    state: &Directory,
    secret: &Secret,
    at: Timestamp,
) -> Result<Vec<DirectoryEvent>, Rejection> {
    if let Some(cloud) = secret.cloud_id {
        state.cloud(secret.tenant, cloud)?;
    }
    let key = Secret::place(secret.tenant, secret.cloud_id, &secret.name);
    let before = state.secrets.get(&key);
    if before.is_none() && state.secrets_of(secret.tenant).count() >= SECRETS_MAX {
        return Err(Rejection::QuotaExceeded {
            what: "secrets".to_owned(),
            max: SECRETS_MAX as u64,
        });
    }
    let row = Secret {
        version: before.as_ref().map_or(0, |row| row.version) + 1,
        created_at: before.map_or(at, |row| row.created_at),
        updated_at: at,
        ..secret.clone()
    };
    Ok(vec![DirectoryEvent::SecretPut(Box::new(row))])
}

pub(crate) fn delete(
    state: &Directory,
    tenant: Tenant,
    cloud_id: Option<CloudId>,
    name: &str,
) -> Result<Vec<DirectoryEvent>, Rejection> {
    let key = Secret::place(tenant, cloud_id, name);
    match state.secrets.contains(&key) {
        true => Ok(vec![DirectoryEvent::SecretGone(key)]),
        false => Err(Rejection::SecretNotFound(name.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_found_and_replaced() {
        let value = |name: &str| (name == "ONE").then(|| "1".to_owned());
        for (text, names, resolved) in [
            ("plain", vec![], Ok("plain")),
            ("${secrets.ONE}", vec!["ONE"], Ok("1")),
            ("a${secrets.ONE}b${secrets.ONE}c", vec!["ONE"], Ok("a1b1c")),
            ("$${secrets.ONE}", vec![], Ok("${secrets.ONE}")),
            ("${other} $ ${", vec![], Ok("${other} $ ${")),
            ("${secrets.TWO}", vec!["TWO"], Err("TWO")),
            ("${secrets.ONE", vec![], Ok("${secrets.ONE")),
            ("ä${secrets.ONE}ö", vec!["ONE"], Ok("ä1ö")),
        ] {
            assert_eq!(references(text).into_iter().collect::<Vec<_>>(), names, "{text}");
            assert_eq!(resolve(text, value), resolved.map(str::to_owned), "{text}");
        }
    }

    #[test]
    fn names_of_secrets() {
        for (name, good) in [("A", true), ("A_1", true), ("a", false), ("1A", false), ("", false)] {
            assert_eq!(is_secret_name(name), good, "{name}");
        }
        assert!(!is_secret_name(&"A".repeat(65)));
    }
}
