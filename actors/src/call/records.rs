//! What shards keep for reading: pages of history, each from the one shard that has it, wherever that
//! is. A page holds what was acknowledged before it was asked for, unless the caller takes a stale one.

use std::{ops::ControlFlow, sync::Arc};

use domain::{
    AuditId, DeliveryId, EventId, OrgId, SessionId, Timestamp, WebhookId,
    account::{Mode, Session, Tenant},
    audit::Audited,
    outbox::{Kind, Occurrence, is_selected},
    shard::Shard,
    table::Order,
    webhook::delivery::{Delivery, HookState, Status},
};
use serde::{Deserialize, Serialize};

use super::{Service, ServiceError};
use crate::ask::{self, Ask, Told};

/// Rows looked at for one page at most; a filter that fits none of them gives a short page.
const LOOKED_AT_MAX: usize = 200_000;

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
    /// A page of events.
    Events(EventsWanted),
    /// One event.
    Event {
        /// Whose.
        tenant: Tenant,
        /// Which.
        id: EventId,
    },
    /// A page of deliveries.
    Deliveries(DeliveriesWanted),
    /// One delivery.
    Delivery {
        /// To whom.
        webhook: WebhookId,
        /// Which.
        id: DeliveryId,
    },
    /// What is known of a webhook beside its record.
    Hook(WebhookId),
}

/// A page of an organization's events.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct EventsWanted {
    /// Whose.
    pub tenant: Tenant,
    /// Only these types, as a webhook selects them; all if empty.
    pub kinds: Vec<String>,
    /// Only since this time.
    pub since: Option<Timestamp>,
    /// Only before this time.
    pub until: Option<Timestamp>,
    /// Only beyond this one.
    pub from: Option<EventId>,
    /// Oldest first.
    pub ascending: bool,
    /// How many.
    pub limit: usize,
}

/// A page of a webhook's deliveries, newest first.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DeliveriesWanted {
    /// To whom.
    pub webhook: WebhookId,
    /// Only with this status.
    pub status: Option<Status>,
    /// Only of this type.
    pub kind: Option<Kind>,
    /// Only of events since this time.
    pub since: Option<Timestamp>,
    /// Only of events before this time.
    pub until: Option<Timestamp>,
    /// Only older ones than this.
    pub before: Option<DeliveryId>,
    /// How many.
    pub limit: usize,
}

impl EventsWanted {
    fn takes(&self, row: &Occurrence) -> bool {
        row.tenant == self.tenant
            && (self.kinds.is_empty() || is_selected(&self.kinds, row.kind))
            && self.since.is_none_or(|since| row.at >= since)
            && self.until.is_none_or(|until| row.at < until)
    }

    fn read(&self, state: &Shard) -> Vec<Occurrence> {
        let (mut found, mut looked_at) = (vec![], 0);
        let org = self.tenant.org.0;
        let end = if self.ascending { 0 } else { u128::MAX };
        // Ids are made of the time: a walk may begin where the window does.
        let edge = match (self.ascending, self.since, self.until) {
            (true, Some(since), _) => EventId::new(since, 0).0,
            (false, _, Some(until)) => EventId::new(until, 0).0,
            _ => end,
        };
        let from = (org, self.from.unwrap_or(EventId(edge)));
        state.events.walk(Some(&from), Order::ascending(self.ascending), |key, row| {
            looked_at += 1;
            let is_past = match self.ascending {
                true => self.until.is_some_and(|until| row.at >= until),
                false => self.since.is_some_and(|since| row.at < since),
            };
            if key.0 != org || is_past || looked_at > LOOKED_AT_MAX {
                return ControlFlow::Break(());
            }
            if self.takes(&row) {
                found.push(Occurrence::clone(&row));
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

impl DeliveriesWanted {
    fn takes(&self, row: &Delivery) -> bool {
        self.status.is_none_or(|status| row.status == status)
            && self.kind.is_none_or(|kind| row.event.kind == kind)
            && self.since.is_none_or(|since| row.event.at >= since)
            && self.until.is_none_or(|until| row.event.at < until)
    }

    fn read(&self, state: &Shard) -> Vec<Delivery> {
        // Ids are made of the event's time: the walk begins where the window ends.
        let end = self.until.map_or(DeliveryId(u128::MAX), |until| DeliveryId::new(until, 0));
        let from = (self.webhook.0, self.before.map_or(end, |before| before.min(end)));
        let mut found = vec![];
        for table in [&state.deliveries, &state.delivered] {
            let (mut taken, mut looked_at) = (0, 0);
            table.walk(Some(&from), Order::Descending, |key, row| {
                looked_at += 1;
                let is_past = self.since.is_some_and(|since| row.event.at < since);
                let is_over = key.0 != self.webhook.0 || is_past || taken == self.limit;
                if is_over || looked_at > LOOKED_AT_MAX {
                    return ControlFlow::Break(());
                }
                if self.takes(&row) {
                    taken += 1;
                    found.push(Delivery::clone(&row));
                }
                ControlFlow::Continue(())
            });
        }
        found.sort_by_key(|row| std::cmp::Reverse(row.id));
        found.truncate(self.limit);
        found
    }
}

/// Records.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Records {
    /// Rows of the audit log.
    Audit(Vec<Audited>),
    /// The session, if it goes on.
    Session(Option<Box<Session>>),
    /// Events.
    Events(Vec<Occurrence>),
    /// Deliveries.
    Deliveries(Vec<Delivery>),
    /// What is known of a webhook.
    Hook(Box<HookState>),
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
            Self::Events(wanted) => Records::Events(wanted.read(state)),
            Self::Event { tenant, id } => {
                let row = state.events.get(&(tenant.org.0, *id));
                let row = row.filter(|row| row.tenant == *tenant);
                Records::Events(row.iter().map(|row| Occurrence::clone(row)).collect())
            }
            Self::Deliveries(wanted) => Records::Deliveries(wanted.read(state)),
            Self::Delivery { webhook, id } => {
                let row = state.delivery(*webhook, *id);
                Records::Deliveries(row.iter().map(|row| Delivery::clone(row)).collect())
            }
            Self::Hook(id) => Records::Hook(Box::new(state.hook(*id))),
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
        let told = self.ask_owner(shard, ask, ask::ANSWER_WITHIN).await?;
        let Told::Records(records) = told else { return Err(ServiceError::Elsewhere) };
        Ok(records)
    }

    /// Records of a shard that this node has.
    pub(crate) async fn records_here(
        &self,
        shard: u16,
        wanted: RecordsWanted,
    ) -> Result<Records, ServiceError> {
        let ledger = Arc::clone(&self.world.ports.ledger);
        self.freshen_shard(shard).await?;
        let now = self.world.now();
        // History is read from disk, so this leaves the runtime's threads alone.
        let read = move || wanted.read(&ledger.shard(shard).read(), now);
        let found = tokio::task::spawn_blocking(read).await;
        found.map_err(|_| ServiceError::Ledger(crate::ports::ProposeError::Unavailable))
    }
}
