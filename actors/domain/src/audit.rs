//! The audit log: who did what, from where, when, with which outcome. Each row of an organization
//! carries the hash of the one before it, so that none can be changed or taken out unseen. Anybody who reads the
//! log can reckon the hashes again: they cover what clients see, and nothing else.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::{AuditId, OrgId, RequestId, Timestamp, account::Mode, hex::hex, shard::Shard};

/// How long rows are kept.
pub const KEPT_FOR: Duration = Duration::from_secs(365 * 24 * 3600);

/// Who acted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Actor {
    /// `api_key`, `user`, `application` or `anonymous`.
    pub kind: String,
    /// Their id.
    pub id: String,
    /// Their address.
    pub ip: String,
}

/// One row.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Audited {
    /// Its id.
    pub id: AuditId,
    /// Whose log.
    pub org: OrgId,
    /// In which mode.
    pub mode: Mode,
    /// When.
    pub at: Timestamp,
    /// Who.
    pub actor: Actor,
    /// What: the operation's id.
    pub action: String,
    /// On what: the path.
    pub target: String,
    /// `succeeded`, or the code of the refusal.
    pub outcome: String,
    /// In which request.
    pub request_id: RequestId,
    /// How many alike; more than one only for refused calls.
    pub count: u64,
    /// SHA-256 over what clients see of it, the hash before it among that.
    pub hash: [u8; 32],
    /// The hash of the row that was written before it in its organization's log, of either mode; zeros for the
    /// first.
    #[serde(default)]
    pub previous: [u8; 32],
}

impl Audited {
    /// This row as the next one after a row with this hash.
    #[must_use]
    pub fn after(&self, previous: [u8; 32]) -> Self {
        let row = Self { previous, ..self.clone() };
        Self { hash: Sha256::digest(row.covered()).into(), ..row }
    }

    /// What the hash covers, a line each.
    fn covered(&self) -> String {
        let Self { id, at, actor, action, target, outcome, request_id, count, .. } = self;
        let (previous, live) = (hex(&self.previous), self.mode.is_live());
        let Actor { kind, id: who, ip } = actor;
        format!(
            "{previous}\n{id}\n{at}\n{live}\n{kind}\n{who}\n{ip}\n{action}\n{target}\n{outcome}\n{request_id}\n{count}"
        )
    }
}

/// Rows by the organization whose log they belong to, in their order.
pub fn by_org(rows: impl IntoIterator<Item = Arc<Audited>>) -> BTreeMap<OrgId, Vec<Arc<Audited>>> {
    let mut by_org: BTreeMap<OrgId, Vec<Arc<Audited>>> = BTreeMap::new();
    for row in rows {
        by_org.entry(row.org).or_default().push(row);
    }
    by_org
}

impl Shard {
    /// The hash of an organization's newest row; zeros before the first.
    pub fn audit_head(&self, org: OrgId) -> [u8; 32] {
        self.audit_heads.get(&org).map_or([0; 32], |head| *head)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn row(id: u128) -> Audited {
        Audited {
            id: AuditId(id),
            org: OrgId(1),
            mode: Mode::Live,
            at: Timestamp::from_millis(5),
            actor: Actor { kind: "user".into(), id: "usr_1".into(), ip: "::1".into() },
            action: "createAgent".to_owned(),
            target: "/v1/agents".to_owned(),
            outcome: "succeeded".to_owned(),
            request_id: RequestId(1),
            count: 1,
            hash: [0; 32],
            previous: [0; 32],
        }
    }

    #[test]
    fn every_row_hangs_on_the_one_before() {
        let (one, two) = (row(1).after([0; 32]), row(2));
        let chained = two.after(one.hash);
        assert_eq!(chained, chained.after(one.hash), "the hash does not count itself");
        assert_ne!(chained.hash, two.after([0; 32]).hash);
        let forged = Audited { outcome: "FORBIDDEN".to_owned(), ..row(1) };
        assert_ne!(forged.after([0; 32]).hash, one.hash);
    }
}
