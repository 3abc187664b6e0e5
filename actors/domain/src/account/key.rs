//! API keys for programs. The secret is known only as an HMAC-SHA-256 under the server's pepper.

use std::{fmt, net::IpAddr, num::NonZeroU32, str::FromStr, sync::Arc, time::Duration};

use serde::{Deserialize, Serialize};

use crate::{
    AgentId, ApiKeyId, Rejection, Timestamp,
    account::{Mode, Scopes, Tenant},
    directory::Directory,
    event::DirectoryEvent,
};

/// Keys of an organization, per mode.
const KEYS_MAX: usize = 10_000;

/// Addresses: one, or all that begin alike (CIDR). IPv4 addresses mapped into IPv6 are IPv4.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct IpRange {
    address: IpAddr,
    prefix: u8,
}

/// A text that is neither an address nor a range of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("must be an IP address or a CIDR range such as 203.0.113.0/24 or 2001:db8::/32")]
pub struct NotAnIpRange;

/// An address as 128 bits, IPv4 in its mapped form, so that one comparison serves both.
fn bits(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().to_bits(),
        IpAddr::V6(v6) => v6.to_bits(),
    }
}

impl IpRange {
    /// Whether an address is in it.
    pub fn contains(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        if address.is_ipv4() != self.address.is_ipv4() {
            return false;
        }
        let fixed = u32::from(self.prefix) + if self.address.is_ipv4() { 96 } else { 0 };
        let mask = u128::MAX.checked_shl(128 - fixed).unwrap_or(0);
        bits(address) & mask == bits(self.address) & mask
    }

    /// Whether every address of another range is in this one.
    pub fn covers(&self, other: Self) -> bool {
        self.prefix <= other.prefix && self.contains(other.address)
    }
}

impl FromStr for IpRange {
    type Err = NotAnIpRange;

    fn from_str(text: &str) -> Result<Self, NotAnIpRange> {
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => (address, Some(prefix)),
            None => (text, None),
        };
        let written: IpAddr = address.parse().map_err(|_| NotAnIpRange)?;
        let address = written.to_canonical();
        let most = if address.is_ipv4() { 32 } else { 128 };
        let unmapped = if written.is_ipv6() && address.is_ipv4() { 96 } else { 0 };
        let prefix = match prefix {
            None => most,
            Some(digits) if digits.bytes().all(|byte| byte.is_ascii_digit()) => {
                let prefix: u8 = digits.parse().map_err(|_| NotAnIpRange)?;
                prefix.checked_sub(unmapped).filter(|prefix| *prefix <= most).ok_or(NotAnIpRange)?
            }
            Some(_) => return Err(NotAnIpRange),
        };
        Ok(Self { address, prefix })
    }
}

impl fmt::Display for IpRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whole = if self.address.is_ipv4() { 32 } else { 128 };
        match self.prefix == whole {
            true => write!(f, "{}", self.address),
            false => write!(f, "{}/{}", self.address, self.prefix),
        }
    }
}

impl Serialize for IpRange {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for IpRange {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// Where and when a key was last used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Used {
    /// When.
    pub at: Timestamp,
    /// From which address.
    pub ip: String,
}

/// A key. There may be very many, and all of them are in memory on every node: what most keys do not
/// have takes one word.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ApiKey {
    /// Names the key without revealing it.
    pub id: ApiKeyId,
    /// Whose objects it reaches.
    pub tenant: Tenant,
    /// Shown to people.
    pub name: Box<str>,
    /// HMAC-SHA-256(pepper, key).
    pub hash: [u8; 32],
    /// The last four characters, for recognition.
    pub last4: Box<str>,
    /// What it may do.
    pub scopes: Scopes,
    /// When it was made.
    pub created_at: Timestamp,
    /// From where it may be used; anywhere if empty.
    #[serde(default)]
    pub allowed_ips: Box<[IpRange]>,
    /// Until when it is good; for ever if `None`.
    #[serde(default)]
    pub expires_at: Option<Timestamp>,
    /// The agents that it may touch; any if empty.
    #[serde(default)]
    pub agent_ids: Box<[AgentId]>,
    /// Who made it.
    #[serde(default)]
    pub created_by: Option<Box<str>>,
    /// The secret before the last rotation, and until when it is good too.
    #[serde(default)]
    pub previous: Option<Box<([u8; 32], Timestamp)>>,
    /// Its last use, as far as nodes have told.
    #[serde(default)]
    pub last_used: Option<Box<Used>>,
    /// When it was last changed.
    #[serde(default)]
    pub updated_at: Timestamp,
    /// Counts changes.
    #[serde(default)]
    pub revision: u64,
    /// Calls a minute, beside what its organization may make; no limit of its own if `None`.
    #[serde(default)]
    pub rate_limit: Option<NonZeroU32>,
}

/// A change of a key; `None` leaves a field as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ApiKeyPatch {
    /// New name.
    pub name: Option<String>,
    /// New scopes.
    pub scopes: Option<Scopes>,
    /// New addresses.
    pub allowed_ips: Option<Vec<IpRange>>,
    /// New agents.
    pub agent_ids: Option<Vec<AgentId>>,
    /// New end, `Some(None)` for none.
    #[serde(default, with = "crate::clearable")]
    pub expires_at: Option<Option<Timestamp>>,
    /// New limit, `Some(None)` for none.
    #[serde(default, with = "crate::clearable")]
    pub rate_limit: Option<Option<NonZeroU32>>,
}

impl ApiKey {
    /// Whether a secret with this hash is good at this time.
    pub fn is_good(&self, hash: &[u8; 32], at: Timestamp) -> bool {
        let is_current = self.hash == *hash;
        let in_grace = self.previous.as_ref().is_some_and(|kept| kept.0 == *hash && at < kept.1);
        (is_current || in_grace) && self.expires_at.is_none_or(|end| at < end)
    }

    /// Whether this is the hash of its secret, or of the one before.
    pub fn has_hash(&self, hash: &[u8; 32]) -> bool {
        self.hashes().any(|known| known == hash)
    }

    /// The hash of its secret, and of the one before.
    pub fn hashes(&self) -> impl Iterator<Item = &[u8; 32]> {
        std::iter::once(&self.hash).chain(self.previous.as_deref().map(|(hash, _)| hash))
    }

    /// Whether credentials of this mode see it: test credentials see the keys of test mode alone, live ones both.
    pub fn is_seen_by(&self, tenant: Tenant) -> bool {
        let is_seen = tenant.mode == Mode::Live || self.tenant.mode == Mode::Test;
        self.tenant.org == tenant.org && is_seen
    }

    /// Whether it may be used from an address.
    pub fn allows_from(&self, address: Option<IpAddr>) -> bool {
        self.allowed_ips.is_empty()
            || address.is_some_and(|ip| self.allowed_ips.iter().any(|range| range.contains(ip)))
    }
}

impl Directory {
    /// A key of this organization, of either mode.
    pub fn key(&self, tenant: Tenant, id: ApiKeyId) -> Result<Arc<ApiKey>, Rejection> {
        let row = self.api_keys.get(&id).filter(|key| key.is_seen_by(tenant));
        row.ok_or(Rejection::ApiKeyNotFound(id))
    }

    fn check_agents(&self, tenant: Tenant, agents: &[AgentId]) -> Result<(), Rejection> {
        agents.iter().try_for_each(|id| self.agent(tenant, *id).map(drop))
    }
}

pub(crate) fn create(state: &Directory, key: &ApiKey) -> Result<Vec<DirectoryEvent>, Rejection> {
    state.check_agents(key.tenant, &key.agent_ids)?;
    if state.count_keys(key.tenant) >= KEYS_MAX {
        return Err(Rejection::QuotaExceeded { what: "API keys".to_owned(), max: KEYS_MAX as u64 });
    }
    Ok(vec![DirectoryEvent::ApiKeyPut(Box::new(key.clone()))])
}

pub(crate) fn update(
    state: &Directory,
    (tenant, id): (Tenant, ApiKeyId),
    patch: &ApiKeyPatch,
    if_match: Option<u64>,
    at: Timestamp,
) -> Result<Vec<DirectoryEvent>, Rejection> {
    let mut key = ApiKey::clone(&*state.key(tenant, id)?);
    if if_match.is_some_and(|wanted| wanted != key.revision) {
        return Err(Rejection::StaleObject);
    }
    if let Some(agents) = &patch.agent_ids {
        state.check_agents(key.tenant, agents)?;
        key.agent_ids = agents.as_slice().into();
    }
    key.name = patch.name.as_deref().map_or(key.name, Into::into);
    key.scopes = patch.scopes.unwrap_or(key.scopes);
    key.allowed_ips = patch.allowed_ips.as_deref().map_or(key.allowed_ips, Into::into);
    key.expires_at = patch.expires_at.unwrap_or(key.expires_at);
    key.rate_limit = patch.rate_limit.unwrap_or(key.rate_limit);
    key.updated_at = at;
    key.revision += 1;
    Ok(vec![DirectoryEvent::ApiKeyPut(Box::new(key))])
}

/// Another secret; the one before is good for a while still.
pub(crate) fn rotate(
    state: &Directory,
    (tenant, id): (Tenant, ApiKeyId),
    (hash, last4): (&[u8; 32], &str),
    grace: Duration,
    at: Timestamp,
) -> Result<Vec<DirectoryEvent>, Rejection> {
    let mut key = ApiKey::clone(&*state.key(tenant, id)?);
    key.previous = (!grace.is_zero()).then(|| Box::new((key.hash, at.plus(grace))));
    key.hash = *hash;
    key.last4 = last4.into();
    key.updated_at = at;
    key.revision += 1;
    Ok(vec![DirectoryEvent::ApiKeyPut(Box::new(key))])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_hold_their_addresses_and_no_others() {
        for (range, address, inside) in [
            ("203.0.113.7", "203.0.113.7", true),
            ("203.0.113.7", "203.0.113.8", false),
            ("203.0.113.0/24", "203.0.113.255", true),
            ("203.0.113.0/24", "203.0.114.0", false),
            ("203.0.113.77/24", "203.0.113.1", true),
            ("0.0.0.0/0", "198.51.100.1", true),
            ("0.0.0.0/0", "::1", false),
            ("::/0", "198.51.100.1", false),
            ("::/0", "2001:db8::1", true),
            ("2001:db8::/32", "2001:db8:ffff::1", true),
            ("2001:db8::/32", "2001:db9::1", false),
            ("203.0.113.0/24", "::ffff:203.0.113.9", true),
            ("::ffff:203.0.113.0/120", "203.0.113.9", true),
            ("::1", "::1", true),
        ] {
            let range: IpRange = range.parse().expect(range);
            assert_eq!(
                range.contains(address.parse().expect(address)),
                inside,
                "{range} {address}"
            );
        }
    }

    #[test]
    fn other_texts_are_no_ranges() {
        for wrong in [
            "",
            "/",
            "203.0.113.0/33",
            "203.0.113.0/",
            "203.0.113.0/-1",
            "203.0.113.0/+8",
            "::/129",
            "203.0.113",
            "example.com",
            "203.0.113.0/24/1",
            "::ffff:1.2.3.4/90",
            " 10.0.0.1",
        ] {
            assert_eq!(wrong.parse::<IpRange>(), Err(NotAnIpRange), "{wrong}");
        }
    }
}
