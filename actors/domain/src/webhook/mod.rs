//! Webhooks: who wants to hear what, and where.

pub mod delivery;
pub mod signature;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use serde::{Deserialize, Serialize};

use crate::{
    Rejection, Timestamp, WebhookId,
    account::Tenant,
    directory::Directory,
    event::DirectoryEvent,
    outbox::{Occurrence, is_selected},
};

/// Whether deliveries wait for each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ordering {
    /// They do not.
    #[default]
    None,
    /// Those about one agent do, until the second retry of the first.
    Agent,
}

/// A subscription.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Webhook {
    /// Its id.
    pub id: WebhookId,
    /// Whose it is.
    pub tenant: Tenant,
    /// Where events go.
    pub url: String,
    /// Which types: exact ones, `noun.*` and `*`.
    pub events: Vec<String>,
    /// Whether deliveries are sent.
    pub active: bool,
    /// The client's own words.
    pub description: String,
    /// The signing secret, sealed.
    #[serde(with = "serde_bytes")]
    pub sealed: Vec<u8>,
    /// The last four characters of the secret.
    pub secret_hint: String,
    /// The secret before the last rotation, sealed, and until when it signs too.
    pub previous: Option<(Vec<u8>, Timestamp)>,
    /// Whether deliveries wait for each other.
    pub ordering: Ordering,
    /// Most deliveries a second.
    pub rate_limit_per_s: Option<u32>,
    /// The client's own notes.
    pub metadata: BTreeMap<String, String>,
    /// Since when it is on.
    #[serde(default)]
    pub enabled_at: Timestamp,
    /// When it was disabled.
    pub disabled_at: Option<Timestamp>,
    /// Why.
    pub disabled_reason: Option<String>,
    /// When it was made.
    pub created_at: Timestamp,
    /// When it was last changed.
    pub updated_at: Timestamp,
    /// Counts changes.
    pub revision: u64,
}

/// A change of a webhook; `None` leaves a field as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WebhookPatch {
    /// New address.
    pub url: Option<String>,
    /// New types.
    pub events: Option<Vec<String>>,
    /// On or off.
    pub active: Option<bool>,
    /// New words.
    pub description: Option<String>,
    /// New ordering.
    pub ordering: Option<Ordering>,
    /// New rate, `Some(None)` for no limit.
    #[serde(default, with = "crate::clearable")]
    pub rate_limit_per_s: Option<Option<u32>>,
    /// Metadata to set (`Some`) and to remove (`None`).
    pub metadata: BTreeMap<String, Option<String>>,
}

impl Webhook {
    /// Whether it is to hear of something.
    pub fn hears(&self, occurrence: &Occurrence) -> bool {
        self.active && self.selects(occurrence)
    }

    /// Whether it would hear of something if it were on.
    pub fn selects(&self, occurrence: &Occurrence) -> bool {
        self.tenant == occurrence.tenant && is_selected(&self.events, occurrence.kind)
    }
}

impl Directory {
    /// A webhook that this tenant may see.
    pub fn webhook(&self, tenant: Tenant, id: WebhookId) -> Result<Arc<Webhook>, Rejection> {
        let row = self.webhooks.get(&id).filter(|row| row.tenant == tenant);
        row.ok_or(Rejection::WebhookNotFound(id))
    }
}

pub(crate) fn create(state: &Directory, row: &Webhook) -> Result<Vec<DirectoryEvent>, Rejection> {
    let max = state.tier(row.tenant.org).webhooks_max();
    let count = state.webhooks.rows().filter(|(_, other)| other.tenant == row.tenant).count();
    if count >= max {
        return Err(Rejection::QuotaExceeded { what: "webhooks".to_owned(), max: max as u64 });
    }
    Ok(vec![DirectoryEvent::WebhookPut(Box::new(row.clone()))])
}

pub(crate) fn update(
    state: &Directory,
    (tenant, id): (Tenant, WebhookId),
    patch: &WebhookPatch,
    if_match: Option<u64>,
    at: Timestamp,
) -> Result<Vec<DirectoryEvent>, Rejection> {
    let mut row = Webhook::clone(&*state.webhook(tenant, id)?);
    if if_match.is_some_and(|wanted| wanted != row.revision) {
        return Err(Rejection::StaleObject);
    }
    row.url = patch.url.clone().unwrap_or(row.url);
    row.events = patch.events.clone().unwrap_or(row.events);
    row.description = patch.description.clone().unwrap_or(row.description);
    row.ordering = patch.ordering.unwrap_or(row.ordering);
    row.rate_limit_per_s = patch.rate_limit_per_s.unwrap_or(row.rate_limit_per_s);
    match patch.active {
        Some(true) if !row.active => {
            row.enabled_at = at;
            (row.active, row.disabled_at, row.disabled_reason) = (true, None, None);
        }
        Some(false) if row.active => {
            row.active = false;
            row.disabled_at = Some(at);
            row.disabled_reason = Some("user".to_owned());
        }
        Some(_) | None => {}
    }
    crate::cloud::merge(&mut row.metadata, &patch.metadata);
    row.updated_at = at;
    row.revision += 1;
    Ok(vec![DirectoryEvent::WebhookPut(Box::new(row))])
}

/// Another secret signs from now on; the one before signs too, for a while.
pub(crate) fn rotate(
    state: &Directory,
    (tenant, id): (Tenant, WebhookId),
    (sealed, hint): (&[u8], &str),
    grace: Duration,
    at: Timestamp,
) -> Result<Vec<DirectoryEvent>, Rejection> {
    let mut row = Webhook::clone(&*state.webhook(tenant, id)?);
    row.previous = (!grace.is_zero()).then(|| (row.sealed.clone(), at.plus(grace)));
    row.sealed = sealed.to_vec();
    hint.clone_into(&mut row.secret_hint);
    row.updated_at = at;
    row.revision += 1;
    Ok(vec![DirectoryEvent::WebhookPut(Box::new(row))])
}

/// The receiver is gone, or failed for too long.
pub(crate) fn disable(
    state: &Directory,
    id: WebhookId,
    reason: &str,
    at: Timestamp,
) -> Vec<DirectoryEvent> {
    match state.webhooks.get(&id) {
        Some(row) if row.active => {
            let row = Webhook {
                active: false,
                disabled_at: Some(at),
                disabled_reason: Some(reason.to_owned()),
                updated_at: at,
                revision: row.revision + 1,
                ..Webhook::clone(&row)
            };
            vec![
                DirectoryEvent::WebhookPut(Box::new(row)),
                DirectoryEvent::WebhookDisabled { id, reason: reason.to_owned(), at },
            ]
        }
        _ => vec![],
    }
}
