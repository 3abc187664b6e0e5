//! What shards keep for reading: pages of history, each from the one shard that has it, wherever that
//! is. Every page is linearizable: it holds what was acknowledged before it was asked for.

use std::{ops::ControlFlow, sync::Arc};

use domain::{
    AuditId, OrgId, SessionId, Timestamp,
    account::{Mode, Session},
    audit::Audited,
    shard::Shard,
    table::Order,
};
use serde::{Deserialize, Serialize};

use super::{Service, ServiceError};
use crate::ask::{self, Ask, Told};

/// Rows looked at for one page at most; a filter that fits none of them gives a short page.
const LOOKED_AT_MAX: usize = 20_000;

/// A page of the audit log, newest first.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct AuditWanted {
    /// Whose.
    pub org: OrgId,
    /// In which mode.
    pub mode: Mode,
    /// Only this operation.
    pub action: Option<String>,
    /// Only of this actor.
    pub actor: Option<String>,
    /// Only with this outcome.
    pub outcome: Option<String>,
    /// Only after this time.
    pub since: Option<Timestamp>,
    /// Only before this time.
    pub until: Option<Timestamp>,
    /// Only rows older than this one.
    pub before: Option<AuditId>,
    /// How many.
    pub limit: usize,
}

/// Which records.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum RecordsWanted {
    /// A page of the audit log.
    Audit(AuditWanted),
    /// A session that goes on.
    Session(SessionId),
}

/// Records.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Records {
    /// Rows of the audit log.
    Audit(Vec<Audited>),
    /// The session, if it goes on.
    Session(Option<Box<Session>>),
}

impl AuditWanted {
    fn takes(&self, row: &Audited) -> bool {
        row.mode == self.mode
            && self.action.as_ref().is_none_or(|action| *action == row.action)
            && self.actor.as_ref().is_none_or(|actor| *actor == row.actor.id)
            && self.outcome.as_ref().is_none_or(|outcome| *outcome == row.outcome)
            && self.since.is_none_or(|since| row.at >= since)
            && self.until.is_none_or(|until| row.at < until)
    }

    fn read(&self, state: &Shard) -> Vec<Audited> {
        let (mut found, mut looked_at) = (vec![], 0);
        let from = (self.org.0, self.before.unwrap_or(AuditId(u128::MAX)));
        state.audit.walk(Some(&from), Order::Descending, |(org, _), row| {
            looked_at += 1;
            let is_over = *org != self.org.0 || self.since.is_some_and(|since| row.at < since);
            if is_over || looked_at > LOOKED_AT_MAX {
                return ControlFlow::Break(());
            }
            if self.takes(&row) {
                found.push(Audited::clone(&row));
            }
            if found.len() == self.limit {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        });
        found
    }
}

impl RecordsWanted {
    fn read(&self, state: &Shard, at: Timestamp) -> Records {
        match self {
            Self::Audit(wanted) => Records::Audit(wanted.read(state)),
            Self::Session(id) => {
                Records::Session(state.session(*id, at).map(|row| Box::new(Session::clone(&row))))
            }
        }
    }
}

impl Service {
    /// Records of a shard, wherever that is.
    pub async fn records(
        &self,
        shard: u16,
        wanted: RecordsWanted,
    ) -> Result<Records, ServiceError> {
        if self.world.ports.ledger.has_shard(shard) {
            return self.records_here(shard, wanted).await;
        }
        let ask = Ask::Records { shard, wanted };
        match self.ask_owner(shard, ask, ask::ANSWER_WITHIN).await? {
            Told::Records(records) => Ok(records),
            _ => Err(ServiceError::Elsewhere),
        }
    }

    /// Records of a shard that this node has.
    pub(crate) async fn records_here(
        &self,
        shard: u16,
        wanted: RecordsWanted,
    ) -> Result<Records, ServiceError> {
        let ledger = Arc::clone(&self.world.ports.ledger);
        ledger.refresh_shard(shard).await?;
        let now = self.world.now();
        // History is read from disk, so this leaves the runtime's threads alone.
        let read = move || wanted.read(&ledger.shard(shard).read(), now);
        let found = tokio::task::spawn_blocking(read).await;
        found.map_err(|_| ServiceError::Ledger(crate::ports::ProposeError::Unavailable))
    }
}
