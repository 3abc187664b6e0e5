//! Webhooks, deliveries and events on the wire.

use std::collections::BTreeMap;

use domain::{
    outbox::{Kind, Occurrence},
    webhook::{
        Ordering, Webhook,
        delivery::{Attempt, Delivery, HookState},
    },
};
use poem_openapi::{Enum, Object, types::Any};
use serde_json::Value;

/// Whether deliveries wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Enum)]
#[oai(rename_all = "snake_case")]
pub enum OrderingBody {
    /// They do not.
    None,
    /// Those about one agent do, until the second retry of the first.
    Agent,
}

impl From<OrderingBody> for Ordering {
    fn from(body: OrderingBody) -> Self {
        match body {
            OrderingBody::None => Self::None,
            OrderingBody::Agent => Self::Agent,
        }
    }
}

/// Subscribe to events.
#[derive(Clone, Debug, Object)]
pub struct CreateWebhook {
    /// An `https` address of at most 2048 characters, without a user in it.
    #[oai(validator(min_length = 1, max_length = 2048))]
    pub url: String,
    /// Types of events: exact ones, `agent.*` and its like, or `*` for all.
    #[oai(validator(min_items = 1, max_items = 50))]
    pub events: Vec<String>,
    /// Signs deliveries: 8 to 256 visible characters. Made for you if left out.
    #[oai(validator(min_length = 8, max_length = 256))]
    pub secret: Option<String>,
    /// Whether deliveries are sent: true if left out.
    pub active: Option<bool>,
    /// Your own words.
    #[oai(validator(max_length = 500))]
    pub description: Option<String>,
    /// Whether deliveries wait for each other: `none` if left out.
    pub ordering: Option<OrderingBody>,
    /// Most deliveries a second, 1 to 1000; no limit if left out.
    #[oai(validator(minimum(value = "1"), maximum(value = "1000")))]
    pub rate_limit_per_s: Option<u32>,
    /// Your own notes.
    pub metadata: Option<BTreeMap<String, String>>,
}

/// Change a subscription: a JSON merge patch (RFC 7396).
#[derive(Clone, Debug, Object)]
pub struct UpdateWebhook {
    /// Where events go.
    #[oai(validator(min_length = 1, max_length = 2048))]
    pub url: Option<String>,
    /// Types of events.
    #[oai(validator(min_items = 1, max_items = 50))]
    pub events: Option<Vec<String>>,
    /// On or off.
    pub active: Option<bool>,
    /// Your own words.
    #[oai(validator(max_length = 500))]
    pub description: Option<String>,
    /// Whether deliveries wait for each other.
    pub ordering: Option<OrderingBody>,
    /// Most deliveries a second; `null` for no limit.
    #[oai(validator(minimum(value = "1"), maximum(value = "1000")))]
    pub rate_limit_per_s: Option<u32>,
    /// Notes to set; `null` removes one.
    pub metadata: Option<BTreeMap<String, Option<String>>>,
}

/// Give a webhook another secret.
#[derive(Clone, Debug, Default, Object)]
pub struct RotateSecret {
    /// The new secret: 8 to 256 visible characters. Made for you if left out.
    #[oai(validator(min_length = 8, max_length = 256))]
    pub secret: Option<String>,
    /// How long the present secret signs too, in seconds: a day if left out, at most a week.
    #[oai(validator(minimum(value = "0"), maximum(value = "604800")))]
    pub grace_period_seconds: Option<u64>,
}

/// Try a webhook.
#[derive(Clone, Debug, Default, Object)]
pub struct TestWebhook {
    /// The type of the event that is sent: `agent.deployed` if left out.
    #[oai(validator(max_length = 100))]
    pub event_type: Option<String>,
}

/// Send again what a webhook lacks.
#[derive(Clone, Debug, Object)]
pub struct RecoverRequest {
    /// Of events since this time (RFC 3339).
    pub since: String,
    /// Of events before this time; now if left out.
    pub until: Option<String>,
    /// Only what failed: true if left out. Without it also what happened while the webhook was off.
    pub only_failed: Option<bool>,
}

/// How deliveries go.
#[derive(Clone, Debug, Object)]
pub struct HookStats {
    /// Attempts of the last 24 hours that went well.
    pub success_24h: u64,
    /// Attempts of the last 24 hours that did not.
    pub failed_24h: u64,
    /// The last that went well.
    pub last_success_at: Option<String>,
    /// The last that did not.
    pub last_failure_at: Option<String>,
    /// Failures since the last success.
    pub consecutive_failures: u64,
}

/// A subscription.
#[derive(Clone, Debug, Object)]
pub struct WebhookBody {
    /// Its id.
    pub id: String,
    /// Where events go.
    pub url: String,
    /// Types of events.
    pub events: Vec<String>,
    /// Whether deliveries are sent.
    pub active: bool,
    /// Your own words.
    pub description: String,
    /// When it was made.
    pub created_at: String,
    /// When it was last changed.
    pub updated_at: String,
    /// When it was turned off.
    pub disabled_at: Option<String>,
    /// Why.
    pub disabled_reason: Option<String>,
    /// The last four characters of the secret.
    pub secret_hint: String,
    /// The secret: only in the answer that makes or rotates it.
    #[oai(skip_serializing_if_is_none)]
    pub secret: Option<String>,
    /// Until when the secret before the last rotation signs too.
    pub previous_secret_expires_at: Option<String>,
    /// Always `v1`.
    pub api_version: String,
    /// `none` or `agent`.
    pub ordering: String,
    /// Most deliveries a second.
    pub rate_limit_per_s: Option<u32>,
    /// Your own notes.
    pub metadata: BTreeMap<String, String>,
    /// How deliveries go.
    pub stats: HookStats,
    /// Live or test.
    pub livemode: bool,
    /// Give it as `If-Match` to change exactly this state.
    pub etag: String,
}

impl WebhookBody {
    /// A subscription, without its secret.
    pub fn of(row: &Webhook, hook: &HookState, now: domain::Timestamp) -> Self {
        let (success_24h, failed_24h) = hook.last_day(now);
        Self {
            id: row.id.to_string(),
            url: row.url.clone(),
            events: row.events.clone(),
            active: row.active,
            description: row.description.clone(),
            created_at: row.created_at.to_string(),
            updated_at: row.updated_at.to_string(),
            disabled_at: row.disabled_at.map(|at| at.to_string()),
            disabled_reason: row.disabled_reason.clone(),
            secret_hint: row.secret_hint.clone(),
            secret: None,
            previous_secret_expires_at: row
                .previous
                .as_ref()
                .filter(|(_, until)| *until > now)
                .map(|(_, until)| until.to_string()),
            api_version: "v1".to_owned(),
            ordering: match row.ordering {
                Ordering::None => "none".to_owned(),
                Ordering::Agent => "agent".to_owned(),
            },
            rate_limit_per_s: row.rate_limit_per_s,
            metadata: row.metadata.clone(),
            stats: HookStats {
                success_24h,
                failed_24h,
                last_success_at: hook.last_success_at.map(|at| at.to_string()),
                last_failure_at: hook.last_failure_at.map(|at| at.to_string()),
                consecutive_failures: hook.consecutive_failures,
            },
            livemode: row.tenant.mode.is_live(),
            etag: format!("\"{}\"", row.revision),
        }
    }
}

/// One attempt to deliver.
#[derive(Clone, Debug, Object)]
pub struct AttemptBody {
    /// Its number, from 1.
    pub n: u64,
    /// When it began.
    pub at: String,
    /// The receiver's status, if it answered.
    pub status_code: Option<u16>,
    /// How long it took.
    pub duration_ms: u64,
    /// What went wrong, if it was no answer.
    pub error: Option<String>,
    /// The beginning of the answer.
    pub response_body: String,
    /// Which node made it.
    pub node_id: String,
    /// `schedule`, `manual` or `recover`.
    pub trigger: String,
    /// Whether the receiver has it.
    pub succeeded: bool,
}

impl AttemptBody {
    /// An attempt with its number.
    pub fn of(number: usize, attempt: &Attempt) -> Self {
        Self {
            n: number as u64,
            at: attempt.at.to_string(),
            status_code: attempt.status_code,
            duration_ms: attempt.duration_ms,
            error: attempt.error.clone(),
            response_body: attempt.answer.clone(),
            node_id: attempt.node_id.to_string(),
            trigger: attempt.cause.as_str().to_owned(),
            succeeded: attempt.is_success(),
        }
    }
}

/// An event on its way to a webhook.
#[derive(Clone, Debug, Object)]
pub struct DeliveryBody {
    /// Its id.
    pub id: String,
    /// To whom.
    pub webhook_id: String,
    /// What.
    pub event_id: String,
    /// Of which type.
    pub event_type: String,
    /// Its number among the webhook's deliveries, without gaps.
    pub sequence: u64,
    /// `pending`, `succeeded`, `failed` or `exhausted`.
    pub status: String,
    /// When the next attempt is due.
    pub next_attempt_at: Option<String>,
    /// What was tried, oldest first.
    pub attempts: Vec<AttemptBody>,
    /// What is sent: only of a single delivery.
    #[oai(skip_serializing_if_is_none)]
    pub payload: Option<Any<Value>>,
    /// When it was put in line.
    pub created_at: String,
    /// Live or test.
    pub livemode: bool,
}

impl DeliveryBody {
    /// A delivery; with what is sent, or without.
    pub fn of(row: &Delivery, with_payload: bool) -> Self {
        let attempts = row.attempts.iter().enumerate();
        let payload = with_payload.then(|| serde_json::from_str(&row.body()).unwrap_or_default());
        Self {
            id: row.id.to_string(),
            webhook_id: row.webhook.to_string(),
            event_id: row.event.id.to_string(),
            event_type: row.event.kind.as_str().to_owned(),
            sequence: row.sequence,
            status: row.status.as_str().to_owned(),
            next_attempt_at: row.next_at.map(|at| at.to_string()),
            attempts: attempts.map(|(place, one)| AttemptBody::of(place + 1, one)).collect(),
            payload: payload.map(Any),
            created_at: row.created_at.to_string(),
            livemode: row.event.tenant.mode.is_live(),
        }
    }
}

/// Something that happened.
#[derive(Clone, Debug, Object)]
pub struct EventBody {
    /// Its id.
    pub id: String,
    /// Its type.
    #[oai(rename = "type")]
    pub kind: String,
    /// When.
    pub created_at: String,
    /// What, depending on the type.
    pub data: Any<Value>,
    /// About it.
    pub meta: EventMeta,
}

/// About an event.
#[derive(Clone, Debug, Object)]
pub struct EventMeta {
    /// The organization.
    pub account_id: String,
    /// Live or test.
    pub livemode: bool,
}

impl EventBody {
    /// An event.
    pub fn of(row: &Occurrence) -> Self {
        Self {
            id: row.id.to_string(),
            kind: row.kind.as_str().to_owned(),
            created_at: row.at.to_string(),
            data: Any(serde_json::from_str(&row.data).unwrap_or_default()),
            meta: EventMeta {
                account_id: row.tenant.org.to_string(),
                livemode: row.tenant.mode.is_live(),
            },
        }
    }
}

/// A type of events.
#[derive(Clone, Debug, Object)]
pub struct EventTypeBody {
    /// Its name.
    pub name: String,
    /// What it means.
    pub description: String,
}

impl EventTypeBody {
    /// A type.
    pub fn of(kind: Kind) -> Self {
        Self { name: kind.as_str().to_owned(), description: kind.about().to_owned() }
    }
}
