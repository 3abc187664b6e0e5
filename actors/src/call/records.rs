//! What shards keep for reading: pages of history, each from the one shard that has it, wherever that
//! is. A page holds what was acknowledged before it was asked for, unless the caller takes a stale one.

use std::{cmp::Reverse, collections::BTreeMap, sync::Arc};

use domain::{
    AuditId, DeliveryId, EventId, OrgId, SessionId, Timestamp, WebhookId,
    account::{Mode, Session, Tenant},
    audit::Audited,
    outbox::{Kind, Occurrence, is_selected},
    shard::Shard,
    table::{Order, Table},
    webhook::delivery::{Delivery, HookState, Status},
};
use serde::{Deserialize, Serialize};

use super::{
    Service, ServiceError,
    walk::{Fit, TooLong, page},
};
use crate::{
    ask::{self, Ask, Told},
    ports::{Ledger, ProposeError},
};

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

    fn read(&self, ledger: &dyn Ledger, shard: u16) -> Result<Vec<Occurrence>, TooLong> {
        let org = self.tenant.org.0;
        let end = if self.ascending { 0 } else { u128::MAX };
        // Ids are made of the time: a walk may begin where the window does.
        let edge = match (self.ascending, self.since, self.until) {
            (true, Some(since), _) => EventId::new(since, 0).0,
            (false, _, Some(until)) => EventId::new(until, 0).0,
            _ => end,
        };
        let from = (org, self.from.unwrap_or(EventId(edge)));
        let way = (Some(from), Order::ascending(self.ascending));
        let found = page(
            ledger,
            shard,
            |state| &state.events,
            way,
            self.limit,
            |key, row| {
                let is_past = match self.ascending {
                    true => self.until.is_some_and(|until| row.at >= until),
                    false => self.since.is_some_and(|since| row.at < since),
                };
                if key.0 != org || is_past { Fit::Past } else { Fit::if_taken(self.takes(row)) }
            },
        )?;
        Ok(own(&found))
    }
}

impl DeliveriesWanted {
    fn takes(&self, row: &Delivery) -> bool {
        self.status.is_none_or(|status| row.status == status)
            && self.kind.is_none_or(|kind| row.event.kind == kind)
            && self.since.is_none_or(|since| row.event.at >= since)
            && self.until.is_none_or(|until| row.event.at < until)
    }

    fn read(&self, ledger: &dyn Ledger, shard: u16) -> Result<Vec<Delivery>, TooLong> {
        // Ids are made of the event's time: the walk begins where the window ends.
        let end = self.until.map_or(DeliveryId(u128::MAX), |until| DeliveryId::new(until, 0));
        let from = (self.webhook.0, self.before.map_or(end, |before| before.min(end)));
        let way = (Some(from), Order::Descending);
        let fit = |key: &(u128, DeliveryId), row: &Delivery| {
            let is_past = self.since.is_some_and(|since| row.event.at < since);
            let is_over = key.0 != self.webhook.0 || is_past;
            if is_over { Fit::Past } else { Fit::if_taken(self.takes(row)) }
        };
        let mut found = BTreeMap::new();
        // One that is sent again meanwhile goes back: the first table is looked at twice.
        let on_their_way: Pick = |state| &state.deliveries;
        for table in [on_their_way, |state| &state.delivered, on_their_way] {
            let rows = page(ledger, shard, table, way, self.limit, fit)?;
            found.extend(rows.into_iter().map(|row| (Reverse(row.id), row)));
        }
        let found: Vec<_> = found.into_values().take(self.limit).collect();
        Ok(own(&found))
    }
}

type Pick = fn(&Shard) -> &Table<(u128, DeliveryId), Delivery>;

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

    fn read(&self, ledger: &dyn Ledger, shard: u16) -> Result<Vec<Audited>, TooLong> {
        let from = (self.org.0, self.before.unwrap_or(AuditId(u128::MAX)));
        let way = (Some(from), Order::Descending);
        let found = page(
            ledger,
            shard,
            |state| &state.audit,
            way,
            self.limit,
            |key, row| {
                let is_past = self.since.is_some_and(|since| row.at < since);
                let is_over = key.0 != self.org.0 || is_past;
                if is_over { Fit::Past } else { Fit::if_taken(self.takes(row)) }
            },
        )?;
        Ok(own(&found))
    }
}

/// Rows to give away.
fn own<V: Clone>(rows: &[Arc<V>]) -> Vec<V> {
    rows.iter().map(|row| V::clone(row)).collect()
}

impl RecordsWanted {
    fn read(&self, ledger: &dyn Ledger, shard: u16, at: Timestamp) -> Result<Records, TooLong> {
        let state = || ledger.shard(shard).read();
        Ok(match self {
            Self::Audit(wanted) => Records::Audit(wanted.read(ledger, shard)?),
            Self::Events(wanted) => Records::Events(wanted.read(ledger, shard)?),
            Self::Event { tenant, id } => {
                let row = state().events.get(&(tenant.org.0, *id));
                let row = row.filter(|row| row.tenant == *tenant);
                Records::Events(row.iter().map(|row| Occurrence::clone(row)).collect())
            }
            Self::Deliveries(wanted) => Records::Deliveries(wanted.read(ledger, shard)?),
            Self::Delivery { webhook, id } => {
                let row = state().delivery(*webhook, *id);
                Records::Deliveries(row.iter().map(|row| Delivery::clone(row)).collect())
            }
            Self::Hook(id) => Records::Hook(Box::new(state().hook(*id))),
            Self::Session(id) => {
                Records::Session(state().session(*id, at).map(|row| Box::new(Session::clone(&row))))
            }
        })
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
        if let Told::TooLong = told {
            return Err(ServiceError::TooLong);
        }
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
        let read = move || wanted.read(&*ledger, shard, now);
        let found = tokio::task::spawn_blocking(read).await;
        let found = found.map_err(|_| ServiceError::Ledger(ProposeError::Unavailable))?;
        found.map_err(|TooLong| ServiceError::TooLong)
    }
}
