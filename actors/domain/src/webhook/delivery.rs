//! One event on its way to one webhook: attempt by attempt, until the receiver has it or the schedule
//! is over.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::{
    DeliveryId, EventId, NodeId, OrgId, Rejection, Timestamp, WebhookId, event::ShardEvent,
    ids::dice_of, outbox::Occurrence, shard::Shard, table::Order,
};

/// Pauses before the retries (`interface`, Delivery and retry).
pub const RETRY_WAITS: [Duration; 5] = [
    Duration::from_secs(60),
    Duration::from_secs(5 * 60),
    Duration::from_secs(30 * 60),
    Duration::from_secs(2 * 3600),
    Duration::from_secs(24 * 3600),
];
/// A pause is up to this much longer, by chance: receivers are not hit by all at once.
pub const JITTER_PERCENT: u64 = 10;
/// The longest that a receiver may ask to wait.
pub const RETRY_AFTER_MAX: Duration = Duration::from_secs(24 * 3600);
/// How long events and ended deliveries are kept.
pub const KEPT_FOR: Duration = Duration::from_secs(30 * 24 * 3600);
/// Most bytes of a receiver's answer that are kept.
pub const ANSWER_BYTES_MAX: usize = 4096;
/// Most bytes of earlier answers that are kept.
const OLD_ANSWER_BYTES_MAX: usize = 256;
/// Most deliveries that wait for one webhook; further ones are given up at once, and can be recovered.
pub const PENDING_MAX: u64 = 100_000;
/// A receiver that failed for this long is disabled…
pub const DISABLED_AFTER: Duration = Duration::from_secs(5 * 24 * 3600);
/// …if deliveries to it were given up this far apart.
pub const GIVEN_UP_APART: Duration = Duration::from_secs(12 * 3600);
/// How long deliveries wait for a webhook that is off.
pub const PENDING_FOR: Duration = Duration::from_secs(7 * 24 * 3600);

/// Why an attempt was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// It was due.
    Schedule,
    /// Somebody asked for it.
    Manual,
    /// A time window was asked for.
    Recover,
}

impl Cause {
    /// The word used in bodies.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Schedule => "schedule",
            Self::Manual => "manual",
            Self::Recover => "recover",
        }
    }
}

/// One attempt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attempt {
    /// When it began.
    pub at: Timestamp,
    /// The receiver's status, if it answered.
    pub status_code: Option<u16>,
    /// How long it took.
    pub duration_ms: u64,
    /// What went wrong, if it was no answer.
    pub error: Option<String>,
    /// The beginning of the answer.
    pub answer: String,
    /// Which node made it.
    pub node_id: NodeId,
    /// Why.
    pub cause: Cause,
}

impl Attempt {
    /// Whether the receiver has it.
    pub fn is_success(&self) -> bool {
        self.status_code.is_some_and(|status| (200..300).contains(&status))
    }
}

/// Where a delivery is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Its next attempt is to come.
    Pending,
    /// The receiver has it.
    Succeeded,
    /// The receiver said that it will never take it, or the webhook is gone.
    Failed,
    /// Every attempt failed.
    Exhausted,
}

impl Status {
    /// The word used in bodies.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
            Self::Exhausted => "exhausted",
        }
    }
}

/// An event on its way to a webhook.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Delivery {
    /// Its id: the same however often it is put in line.
    pub id: DeliveryId,
    /// To whom.
    pub webhook: WebhookId,
    /// What.
    pub event: Occurrence,
    /// Its number among the webhook's deliveries, without gaps.
    pub sequence: u64,
    /// Where it is.
    pub status: Status,
    /// What was tried, oldest first.
    pub attempts: Vec<Attempt>,
    /// Scheduled attempts so far: those by hand do not count.
    pub tried: u32,
    /// When the next attempt is due.
    pub next_at: Option<Timestamp>,
    /// Why the next attempt is made.
    pub cause: Cause,
    /// How often somebody asked for an attempt beside the schedule.
    #[serde(default)]
    pub asked: u32,
    /// When it was put in line.
    pub created_at: Timestamp,
}

/// The id of an event's delivery to a webhook: one for ever, so that none is put in line twice.
pub fn id_of(event: &Occurrence, webhook: WebhookId) -> DeliveryId {
    let mut digest = Sha256::new();
    digest.update(event.id.0.to_be_bytes());
    digest.update(webhook.0.to_be_bytes());
    DeliveryId::new(event.at, dice_of(digest))
}

impl Delivery {
    /// When it ended, if it did.
    fn ended_at(&self) -> Timestamp {
        self.attempts.last().map_or(self.created_at, |attempt| attempt.at)
    }

    /// The key of its row.
    pub fn key(&self) -> (u128, DeliveryId) {
        (self.webhook.0, self.id)
    }

    /// The body that the receiver gets, byte for byte the same on every attempt.
    pub fn body(&self) -> String {
        let data: Value = serde_json::from_str(&self.event.data).unwrap_or_default();
        let body = json!({
            "id": self.event.id,
            "type": self.event.kind.as_str(),
            "created_at": self.event.at.to_string(),
            "data": data,
            "meta": {
                "account_id": self.event.tenant.org,
                "webhook_id": self.webhook,
                "delivery_id": self.id,
                "sequence": self.sequence,
                "livemode": self.event.tenant.mode.is_live(),
            },
        });
        body.to_string()
    }
}

/// When to try again after `tried` attempts failed; `None` if that was the last. `chance` is 0 to 999.
pub fn next_attempt(
    tried: u32,
    waits: &[Duration],
    chance: u64,
    retry_after: Option<Duration>,
    at: Timestamp,
) -> Option<Timestamp> {
    let wait = *waits.get(usize::try_from(tried).ok()?.checked_sub(1)?)?;
    let millis = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX);
    let jitter = millis / 1000 * chance * JITTER_PERCENT / 100
        + millis % 1000 * chance * JITTER_PERCENT / 100_000;
    let wait = Duration::from_millis(millis + jitter);
    let asked = retry_after.unwrap_or_default().min(RETRY_AFTER_MAX);
    Some(at.plus(wait.max(asked)))
}

/// What is known of a webhook beside its record.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HookState {
    /// The number of its last delivery.
    pub sequence: u64,
    /// Attempts that went well and those that did not, by hour since 1970.
    pub hours: BTreeMap<u64, (u64, u64)>,
    /// The last that went well.
    pub last_success_at: Option<Timestamp>,
    /// The last that did not.
    pub last_failure_at: Option<Timestamp>,
    /// Failures since the last success.
    pub consecutive_failures: u64,
    /// Since when every attempt has failed.
    pub failing_since: Option<Timestamp>,
    /// The first delivery that was given up since then.
    pub given_up_at: Option<Timestamp>,
    /// Deliveries on their way.
    #[serde(default)]
    pub pending: u64,
}

const HOURS_KEPT: u64 = 24;

impl HookState {
    fn note(&mut self, attempt: &Attempt) {
        let hour = attempt.at.millis() / 3_600_000;
        self.hours.retain(|known, _| *known + HOURS_KEPT > hour);
        let counts = self.hours.entry(hour).or_default();
        if attempt.is_success() {
            counts.0 += 1;
            self.last_success_at = Some(attempt.at);
            self.consecutive_failures = 0;
            (self.failing_since, self.given_up_at) = (None, None);
        } else {
            counts.1 += 1;
            self.last_failure_at = Some(attempt.at);
            self.consecutive_failures += 1;
            self.failing_since.get_or_insert(attempt.at);
        }
    }

    /// Attempts of the last 24 hours: successes and failures.
    pub fn last_day(&self, at: Timestamp) -> (u64, u64) {
        let hour = at.millis() / 3_600_000;
        let recent = self.hours.iter().filter(|(known, _)| **known + HOURS_KEPT > hour);
        recent.fold((0, 0), |sum, (_, counts)| (sum.0 + counts.0, sum.1 + counts.1))
    }

    /// Whether a delivery given up now is one too many for a webhook that is on since `enabled_at`.
    pub fn is_lost(&self, enabled_at: Timestamp, at: Timestamp) -> bool {
        let over = |since: Timestamp, time| since.max(enabled_at).plus(time) <= at;
        self.failing_since.is_some_and(|since| over(since, DISABLED_AFTER))
            && self.given_up_at.is_some_and(|first| over(first, GIVEN_UP_APART))
    }
}

impl Shard {
    /// A delivery, on its way or ended.
    pub fn delivery(&self, webhook: WebhookId, id: DeliveryId) -> Option<std::sync::Arc<Delivery>> {
        let key = (webhook.0, id);
        self.deliveries.get(&key).or_else(|| self.delivered.get(&key))
    }

    /// What is known of a webhook beside its record.
    pub fn hook(&self, webhook: WebhookId) -> HookState {
        self.hooks.get(&webhook).map(|hook| HookState::clone(&hook)).unwrap_or_default()
    }

    /// A webhook's deliveries that are on their way, oldest first.
    pub fn pending_of(
        &self,
        webhook: WebhookId,
    ) -> impl Iterator<Item = &std::sync::Arc<Delivery>> {
        self.deliveries
            .rows_from((webhook.0, DeliveryId(0)))
            .take_while(move |(key, _)| key.0 == webhook.0)
            .map(|(_, row)| row)
    }

    /// Whether an organization's event is in its log.
    pub fn has_event(&self, org: OrgId, id: EventId) -> bool {
        self.events.contains(&(org.0, id))
    }
}

/// Events that are put in line for webhooks; those that were already are left alone.
pub(crate) fn enqueue(
    state: &Shard,
    wanted: &[(WebhookId, Occurrence)],
    cause: Cause,
    at: Timestamp,
) -> Vec<ShardEvent> {
    let mut last: BTreeMap<WebhookId, u64> = BTreeMap::new();
    let mut pending: BTreeMap<WebhookId, u64> = BTreeMap::new();
    let mut seen = std::collections::BTreeSet::new();
    let mut events = vec![];
    for (webhook, event) in wanted {
        let id = id_of(event, *webhook);
        if state.delivery(*webhook, id).is_some() || !seen.insert((*webhook, id)) {
            continue;
        }
        let known = || state.hooks.get(webhook).map_or(0, |hook| hook.sequence);
        let sequence = last.entry(*webhook).or_insert_with(known);
        *sequence += 1;
        let waiting = pending
            .entry(*webhook)
            .or_insert_with(|| state.hooks.get(webhook).map_or(0, |hook| hook.pending));
        let has_room = *waiting < PENDING_MAX;
        *waiting += u64::from(has_room);
        let row = Delivery {
            id,
            webhook: *webhook,
            event: event.clone(),
            sequence: *sequence,
            status: if has_room { Status::Pending } else { Status::Exhausted },
            attempts: vec![],
            tried: 0,
            next_at: has_room.then_some(at),
            cause,
            asked: 0,
            created_at: at,
        };
        events.push(match has_room {
            true => ShardEvent::DeliveryQueued(Box::new(row)),
            false => ShardEvent::DeliveryEnded(Box::new(row)),
        });
    }
    events
}

/// How an attempt ended, and what is next as the schedule has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tried {
    /// Of which webhook.
    pub webhook: WebhookId,
    /// Which delivery.
    pub id: DeliveryId,
    /// What was tried.
    pub attempt: Attempt,
    /// What the delivery's `asked` was when the attempt began.
    #[serde(default)]
    pub asked: u32,
    /// What its `tried` was.
    #[serde(default)]
    pub tried: u32,
    /// When to try again, if it failed and there is a next time.
    pub next_at: Option<Timestamp>,
    /// Whether the receiver wants nothing any more.
    pub is_gone: bool,
}

impl Tried {
    /// An attempt that began when the delivery was like this.
    pub fn of(row: &Delivery, attempt: Attempt, next_at: Option<Timestamp>, is_gone: bool) -> Self {
        let Delivery { webhook, id, asked, tried, .. } = *row;
        Self { webhook, id, attempt, asked, tried, next_at, is_gone }
    }
}

/// Only the last attempt's answer is kept whole.
fn shorten(answer: &mut String) {
    let end = (0..=OLD_ANSWER_BYTES_MAX).rev().find(|end| answer.is_char_boundary(*end));
    answer.truncate(end.unwrap_or(0));
}

/// An attempt ended.
pub(crate) fn note(state: &Shard, tried: &Tried) -> Vec<ShardEvent> {
    let Some(row) = state.deliveries.get(&(tried.webhook.0, tried.id)) else { return vec![] };
    let is_known =
        |one: &Attempt| one.at == tried.attempt.at && one.node_id == tried.attempt.node_id;
    if row.attempts.iter().any(is_known) {
        // Written down before, by a proposal whose answer was lost.
        return vec![];
    }
    let mut row = Delivery::clone(&row);
    for attempt in &mut row.attempts {
        shorten(&mut attempt.answer);
    }
    let was_tried_meanwhile = row.tried != tried.tried;
    row.attempts.push(tried.attempt.clone());
    row.tried += u32::from(tried.attempt.cause == Cause::Schedule);
    if row.asked != tried.asked {
        // Somebody asked while it was made: that attempt is still to come.
        return vec![ShardEvent::DeliveryTried(Box::new(row))];
    }
    row.cause = Cause::Schedule;
    let planned = row.next_at.take();
    if tried.attempt.is_success() {
        row.status = Status::Succeeded;
    } else if tried.is_gone {
        row.status = Status::Failed;
    } else if was_tried_meanwhile {
        // The webhook had another owner by then, whose attempt stands in the schedule.
        row.next_at = planned;
        return vec![ShardEvent::DeliveryTried(Box::new(row))];
    } else if tried.next_at.is_some() {
        row.next_at = tried.next_at;
        return vec![ShardEvent::DeliveryTried(Box::new(row))];
    } else {
        row.status = Status::Exhausted;
    }
    vec![ShardEvent::DeliveryEnded(Box::new(row))]
}

/// Attempts beside the schedule, at once.
pub(crate) fn repeat(
    state: &Shard,
    webhook: WebhookId,
    ids: &[DeliveryId],
    cause: Cause,
    at: Timestamp,
) -> Result<Vec<ShardEvent>, Rejection> {
    let again = |id: &DeliveryId| {
        let row = state.delivery(webhook, *id).ok_or(Rejection::DeliveryNotFound(*id))?;
        let mut row = Delivery::clone(&row);
        (row.status, row.next_at, row.cause) = (Status::Pending, Some(at), cause);
        row.asked += 1;
        Ok(ShardEvent::DeliveryAgain(Box::new(row)))
    };
    ids.iter().map(again).collect()
}

/// Writes.
impl Shard {
    pub(crate) fn queue_delivery(&mut self, row: &Delivery) {
        let mut hook = self.hook(row.webhook);
        hook.sequence = hook.sequence.max(row.sequence);
        hook.pending += u64::from(!self.deliveries.contains(&row.key()));
        self.hooks.put(row.webhook, hook);
        self.deliveries.put(row.key(), row.clone());
    }

    pub(crate) fn note_attempt(&mut self, row: &Delivery) {
        let mut hook = self.hook(row.webhook);
        hook.sequence = hook.sequence.max(row.sequence);
        if let Some(attempt) = row.attempts.last() {
            hook.note(attempt);
            if row.status == Status::Exhausted {
                hook.given_up_at.get_or_insert(attempt.at);
            }
        }
        self.hooks.put(row.webhook, hook);
    }

    pub(crate) fn end_delivery(&mut self, row: &Delivery) {
        let at = row.ended_at();
        if self.deliveries.contains(&row.key()) {
            let mut hook = self.hook(row.webhook);
            hook.pending = hook.pending.saturating_sub(1);
            self.hooks.put(row.webhook, hook);
        }
        self.deliveries.remove(&row.key());
        self.delivered.put(row.key(), row.clone());
        let until = u128::from(at.plus(KEPT_FOR).millis());
        self.delivered_until.put((until, row.id), row.webhook);
    }

    pub(crate) fn keep_event(&mut self, event: &Arc<Occurrence>) {
        let until = u128::from(event.at.plus(KEPT_FOR).millis());
        self.events_until.put((until, event.id), event.tenant.org);
        self.events.put((event.tenant.org.0, event.id), Arc::clone(event));
    }

    /// Nothing is sent to a webhook that is gone.
    pub(crate) fn drop_hook(&mut self, webhook: WebhookId) {
        let keys: Vec<_> = self.pending_of(webhook).map(|row| row.key()).collect();
        keys.iter().for_each(|key| self.deliveries.remove(key));
        self.hooks.remove(&webhook);
        let mut ended = vec![];
        self.delivered.walk(Some(&(webhook.0, DeliveryId(0))), Order::Ascending, |key, _| {
            let is_own = key.0 == webhook.0 && ended.len() < crate::idempotency::SWEPT_AT_ONCE;
            if !is_own {
                return std::ops::ControlFlow::Break(());
            }
            ended.push(*key);
            std::ops::ControlFlow::Continue(())
        });
        ended.iter().for_each(|key| self.delivered.remove(key));
    }

    /// Events and deliveries that are old enough are forgotten.
    pub(crate) fn forget_told(&mut self, at: Timestamp) {
        for key in self.events_until.due(at, crate::idempotency::SWEPT_AT_ONCE) {
            if let Some(org) = self.events_until.get(&key) {
                self.events.remove(&(org.0, key.1));
            }
            self.events_until.remove(&key);
        }
        for key in self.delivered_until.due(at, crate::idempotency::SWEPT_AT_ONCE) {
            let webhook = self.delivered_until.get(&key);
            let row = webhook.and_then(|webhook| self.delivered.get(&(webhook.0, key.1)));
            // One that was sent again since then stays for its own time.
            if let Some(row) = row.filter(|row| row.ended_at().plus(KEPT_FOR) <= at) {
                self.delivered.remove(&row.key());
            }
            self.delivered_until.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_schedule_is_the_specifications() {
        let at = Timestamp::from_millis(0);
        let seconds = |tried, chance, asked: Option<u64>| {
            let asked = asked.map(Duration::from_secs);
            next_attempt(tried, &RETRY_WAITS, chance, asked, at).map(|at| at.millis() / 1000)
        };
        let exact: Vec<_> = (1..=6).map(|tried| seconds(tried, 0, None)).collect();
        assert_eq!(exact, [Some(60), Some(300), Some(1800), Some(7200), Some(86_400), None]);
        assert_eq!(seconds(1, 999, None), Some(65), "at most a tenth later");
        assert_eq!(seconds(1, 0, Some(600)), Some(600), "a receiver may ask for more");
        assert_eq!(seconds(2, 0, Some(1)), Some(300), "but not for less");
        assert_eq!(seconds(1, 0, Some(1_000_000)), Some(86_400), "and not for ever");
    }

    #[test]
    fn a_receiver_is_lost_after_days_of_failures() {
        let at = |hours: u64| Timestamp::from_millis(1_700_000_000_000 + hours * 3_600_000);
        let attempt = |hours, status| Attempt {
            at: at(hours),
            status_code: Some(status),
            duration_ms: 1,
            error: None,
            answer: String::new(),
            node_id: NodeId(1),
            cause: Cause::Schedule,
        };
        let mut hook = HookState::default();
        hook.note(&attempt(0, 500));
        hook.given_up_at = Some(at(108));
        assert!(!hook.is_lost(at(0), at(119)), "not five days yet");
        assert!(hook.is_lost(at(0), at(120)));
        assert!(!hook.is_lost(at(119), at(120)), "it was turned on again since then");
        hook.given_up_at = Some(at(110));
        assert!(!hook.is_lost(at(0), at(121)), "given up twice within half a day");
        hook.note(&attempt(122, 200));
        assert!(!hook.is_lost(at(0), at(500)), "one success begins anew");
        assert_eq!(hook.last_day(at(122)), (1, 0));
    }
}
