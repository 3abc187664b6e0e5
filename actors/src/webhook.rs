//! One actor per webhook with something to deliver, where the webhook's home shard is led.
//!
//! It keeps the order in which attempts are due, has each made by a task of its own, and writes down
//! how it ended before anything else is decided. What is due is in the log, so an owner that takes
//! over goes on where the last one was; at most what was in flight is sent once more.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use domain::{
    AgentId, DeliveryId, NodeId, Timestamp, WebhookId,
    directory::Command as DirectoryCommand,
    machine::Claim,
    shard::Command,
    webhook::{
        Ordering, Webhook,
        delivery::{self, Attempt, Cause, Delivery, PENDING_FOR, Tried},
        signature,
    },
};
use ractor::{Actor, ActorProcessingErr, ActorRef};
use tokio::task::AbortHandle;

use crate::{
    ports::{OutboundAnswer, OutboundRequest},
    root::{Told as Telling, detach},
    sending::{Begun, UNDER_WAY_FOR},
    world::World,
};

/// Attempts of one webhook at once: so many while its receiver answers, so few while it does not, and so
/// many before that is known.
const AT_ONCE: usize = 32;
const AT_ONCE_WHILE_SLOW: usize = 2;
const AT_ONCE_AT_FIRST: usize = 8;
/// A receiver that takes so long is slow.
const SLOW: Duration = Duration::from_secs(5);
/// Attempts that were due this long ago are spread, so that no outage ends in a burst.
const OVERDUE: Duration = Duration::from_secs(60);
/// Over how long.
const SPREAD_OVER: Duration = Duration::from_secs(30);
/// Before looking again where the log did not answer.
const AGAIN_AFTER: Duration = Duration::from_secs(1);
/// Between attempts to write down how one ended.
const NOTE_AGAIN: Duration = Duration::from_millis(500);
/// How long that goes on: what is written down later, another owner has sent once more by then.
const NOTED_WITHIN: Duration = Duration::from_secs(600);
/// Between looks at what others have under way.
const LOOK_AT_HELD: Duration = Duration::from_secs(1);
/// Retries after which a delivery holds up no others.
const HOLDS_UP_UNTIL: usize = 2;

/// How many attempts a receiver gets at once: half as many after each that was slow, one more after each
/// that was not. Receivers share hosts, and a host its turns: one that hangs shall not take them all.
struct Pace(AtomicUsize);

impl Pace {
    fn at_once(&self) -> usize {
        self.0.load(Relaxed)
    }

    fn note(&self, took: Duration) {
        let change = |now: usize| match took >= SLOW {
            true => (now / 2).max(AT_ONCE_WHILE_SLOW),
            false => (now + 1).min(AT_ONCE),
        };
        let _ = self.0.fetch_update(Relaxed, Relaxed, |now| Some(change(now)));
    }
}

/// What wakes a webhook.
pub enum WebhookMessage {
    /// These deliveries are new or changed.
    Look(Vec<DeliveryId>),
    /// An attempt's task has ended.
    Ended(DeliveryId),
    /// Other nodes have these under way, from when they led the shard.
    Elsewhere(Vec<(Begun, NodeId)>),
    /// Something is due.
    Due,
}

/// The actor of one webhook.
pub struct WebhookActor;

/// Which one, in whose name.
pub struct WebhookArguments {
    /// Everything there is.
    pub world: Arc<World>,
    /// Which webhook.
    pub id: WebhookId,
    /// The leadership of its shard.
    pub claim: Claim,
}

/// What it remembers.
pub struct Sender {
    world: Arc<World>,
    id: WebhookId,
    claim: Claim,
    due: BTreeSet<(Timestamp, DeliveryId)>,
    at: HashMap<DeliveryId, Waiting>,
    /// What is due or to come, by agent and in order.
    lines: BTreeMap<Option<AgentId>, BTreeSet<(u64, DeliveryId)>>,
    under_way: HashMap<DeliveryId, Option<AgentId>>,
    alarm: Option<AbortHandle>,
    pace: Arc<Pace>,
    /// What an earlier owner has under way, and where; until that is written down, it is not sent.
    held: HashMap<DeliveryId, NodeId>,
    held_until: Timestamp,
    /// Whether it is known what others have.
    is_told: bool,
    /// When the next attempt may begin, where there is a rate.
    next_slot: Timestamp,
    /// Whether the webhook was off at the last look.
    was_off: bool,
}

/// Where a delivery stands in the lines.
#[derive(Clone, Copy)]
struct Waiting {
    at: Timestamp,
    agent: Option<AgentId>,
    sequence: u64,
}

/// What is under way goes on: what was sent can't be taken back, and how it ends is to be written down.
impl Drop for Sender {
    fn drop(&mut self) {
        if let Some(alarm) = self.alarm.take() {
            alarm.abort();
        }
    }
}

impl Actor for WebhookActor {
    type Msg = WebhookMessage;
    type State = Sender;
    type Arguments = WebhookArguments;

    async fn pre_start(
        &self,
        myself: ActorRef<WebhookMessage>,
        WebhookArguments { world, id, claim }: WebhookArguments,
    ) -> Result<Sender, ActorProcessingErr> {
        let mut sender = Sender {
            world,
            id,
            claim,
            due: BTreeSet::new(),
            at: HashMap::new(),
            lines: BTreeMap::new(),
            under_way: HashMap::new(),
            alarm: None,
            pace: Arc::new(Pace(AtomicUsize::new(AT_ONCE_AT_FIRST))),
            held: HashMap::new(),
            held_until: Timestamp::default(),
            is_told: false,
            next_slot: Timestamp::default(),
            was_off: false,
        };
        sender.load();
        sender.ask_others(&myself);
        Ok(sender)
    }

    async fn handle(
        &self,
        myself: ActorRef<WebhookMessage>,
        message: WebhookMessage,
        sender: &mut Sender,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            WebhookMessage::Look(ids) => ids.into_iter().for_each(|id| {
                sender.held.remove(&id);
                sender.learn(id);
            }),
            WebhookMessage::Elsewhere(held) => sender.hold(held),
            WebhookMessage::Ended(id) => {
                sender.under_way.remove(&id);
                sender.learn(id);
            }
            WebhookMessage::Due => {}
        }
        sender.send_what_is_due(&myself).await;
        Ok(())
    }
}

impl Sender {
    /// All that is on its way. What is long overdue is spread.
    fn load(&mut self) {
        let now = self.world.now();
        let rows: Vec<(DeliveryId, Waiting)> = {
            let state = self.world.ports.ledger.shard(self.claim.shard).read();
            let rows = state.pending_of(self.id);
            let rows = rows.filter(|row| !self.is_being_sent(row.id));
            rows.filter_map(|row| Some((row.id, waiting(row)?))).collect()
        };
        let spread = u64::try_from(SPREAD_OVER.as_millis()).unwrap_or(u64::MAX);
        let late = rows.iter().filter(|(_, row)| row.at.plus(OVERDUE) < now).count() as u64;
        let mut place = 0;
        for (id, row) in rows {
            let at = match row.at.plus(OVERDUE) < now {
                true => {
                    place += 1;
                    now.plus(Duration::from_millis((place * 20).min(spread * place / late)))
                }
                false => row.at,
            };
            self.schedule(id, Waiting { at, ..row });
        }
    }

    /// Nothing is sent before it is known what is under way.
    fn ask_others(&self, myself: &ActorRef<WebhookMessage>) {
        let (world, claim, me) = (Arc::clone(&self.world), self.claim, myself.clone());
        detach(async move {
            let held = world.under_way_elsewhere(claim).await;
            let _ = me.cast(WebhookMessage::Elsewhere(held));
        });
    }

    fn hold(&mut self, elsewhere: Vec<(Begun, NodeId)>) {
        let node = self.world.node_id;
        let own = self.world.sending.of(self.claim.shard).into_iter().map(|one| (one, node));
        for ((id, attempts), node) in elsewhere.into_iter().chain(own) {
            let is_over = self.row(id).is_none_or(|row| row.attempts.len() > attempts);
            if !is_over && !self.under_way.contains_key(&id) {
                self.forget(id);
                self.held.insert(id, node);
            }
        }
        self.held_until = self.world.now().plus(UNDER_WAY_FOR);
        self.is_told = true;
    }

    /// What is held by a node that is gone, or for too long, is sent once more.
    fn let_go_of_held(&mut self) {
        let is_over = self.world.now() >= self.held_until;
        let is_lost = |id: DeliveryId, node: NodeId| match node == self.world.node_id {
            true => !self.world.sending.has(id),
            false => !self.world.ports.peers.is_alive(node),
        };
        let held = self.held.iter().map(|(id, node)| (*id, *node));
        let free: Vec<_> = held.filter(|(id, node)| is_over || is_lost(*id, *node)).collect();
        for (id, _) in free {
            self.held.remove(&id);
            self.learn(id);
        }
    }

    fn schedule(&mut self, id: DeliveryId, waiting: Waiting) {
        self.forget(id);
        self.due.insert((waiting.at, id));
        self.lines.entry(waiting.agent).or_default().insert((waiting.sequence, id));
        self.at.insert(id, waiting);
    }

    fn forget(&mut self, id: DeliveryId) {
        let Some(Waiting { at, agent, sequence }) = self.at.remove(&id) else { return };
        self.due.remove(&(at, id));
        if let Some(line) = self.lines.get_mut(&agent) {
            line.remove(&(sequence, id));
            if line.is_empty() {
                self.lines.remove(&agent);
            }
        }
    }

    /// Whether an attempt is under way, here or elsewhere.
    fn is_being_sent(&self, id: DeliveryId) -> bool {
        self.under_way.contains_key(&id) || self.held.contains_key(&id)
    }

    /// Looks up one delivery.
    fn learn(&mut self, id: DeliveryId) {
        if self.is_being_sent(id) {
            return;
        }
        let row = self.row(id);
        match row.and_then(|row| waiting(&row)) {
            Some(waiting) => self.schedule(id, waiting),
            None => self.forget(id),
        }
    }

    fn row(&self, id: DeliveryId) -> Option<Arc<Delivery>> {
        let state = self.world.ports.ledger.shard(self.claim.shard).read();
        state.deliveries.get(&(self.id.0, id))
    }

    async fn send_what_is_due(&mut self, myself: &ActorRef<WebhookMessage>) {
        if !self.is_told {
            return;
        }
        let Some(hook) = self.record() else { return self.end_if_gone(myself).await };
        self.let_go_of_held();
        if !hook.active {
            self.let_go_of_old(hook.disabled_at.unwrap_or_default());
            self.was_off = true;
            return self.rest(myself);
        }
        if std::mem::take(&mut self.was_off) {
            self.load();
        }
        // A node that is cut off from the others may not be from receivers, and another one may send by now.
        if !self.world.ports.ledger.holds(self.claim) {
            return self.rest(myself);
        }
        let now = self.world.now();
        let ready = match hook.ordering {
            Ordering::None => self
                .due
                .iter()
                .take_while(|(at, _)| *at <= now)
                .map(|(_, id)| *id)
                .take(AT_ONCE)
                .collect(),
            Ordering::Agent => self.heads(now),
        };
        for id in ready {
            if self.is_full() || self.next_slot > now {
                break;
            }
            let row = self.row(id);
            self.forget(id);
            if let Some(row) = row {
                self.begin(&hook, row, myself);
            }
        }
        self.rest(myself);
    }

    /// With `ordering: agent` an event waits for the older ones about the same agent, until those have
    /// been retried twice: of each agent the first that need not wait, if it is due.
    fn heads(&self, now: Timestamp) -> Vec<DeliveryId> {
        let state = self.world.ports.ledger.shard(self.claim.shard).read();
        let held = self.held.keys().filter_map(|id| state.deliveries.get(&(self.id.0, *id)));
        let busy = self.under_way.values().copied().chain(held.map(|row| row.event.agent));
        let busy: BTreeSet<Option<AgentId>> = busy.filter(Option::is_some).collect();
        let mut ready = vec![];
        for (agent, line) in self.lines.iter().filter(|(agent, _)| !busy.contains(agent)) {
            for (_, id) in line {
                let Some(row) = state.deliveries.get(&(self.id.0, *id)) else { continue };
                if row.next_at.is_some_and(|at| at <= now) {
                    ready.push(*id);
                    // Events about no agent wait for nobody.
                    if agent.is_some() || ready.len() >= AT_ONCE {
                        break;
                    }
                } else if agent.is_some() && row.attempts.len() <= HOLDS_UP_UNTIL {
                    break;
                }
            }
        }
        ready
    }

    fn begin(
        &mut self,
        hook: &Arc<Webhook>,
        row: Arc<Delivery>,
        myself: &ActorRef<WebhookMessage>,
    ) {
        let (id, agent) = (row.id, row.event.agent);
        let Some(under_way) = self.world.sending.begin(self.claim, (id, row.attempts.len())) else {
            return;
        };
        if let Some(rate) = hook.rate_limit_per_s {
            let gap = Duration::from_millis(1000 / u64::from(rate.max(1)));
            self.next_slot = self.next_slot.max(self.world.now()).plus(gap);
        }
        let (world, claim, hook) = (Arc::clone(&self.world), self.claim, Arc::clone(hook));
        let ended = Telling::when_dropped(myself.clone(), || WebhookMessage::Ended(id));
        let pace = Arc::clone(&self.pace);
        detach(async move {
            let _ended = ended;
            let _under_way = under_way;
            let (attempt, answer) = world.attempt(&hook, &row).await;
            pace.note(Duration::from_millis(attempt.duration_ms));
            world.conclude(claim, &hook, &row, attempt, answer).await;
        });
        self.under_way.insert(id, agent);
    }

    /// Sleeps until something is due; without anything to do the actor ends.
    fn rest(&mut self, myself: &ActorRef<WebhookMessage>) {
        if let Some(alarm) = self.alarm.take() {
            alarm.abort();
        }
        let now = self.world.now();
        let next = self.due.first().map(|(at, _)| *at);
        let held = (!self.held.is_empty()).then(|| now.plus(LOOK_AT_HELD));
        let Some(at) = next.into_iter().chain(held).min() else {
            if self.under_way.is_empty() {
                myself.stop(None);
            }
            return;
        };
        let is_full = self.is_full();
        // An ended attempt wakes us; so does the end of what holds others up.
        let at_least = Duration::from_millis(if at <= now && !is_full { 100 } else { 0 });
        let wait = match self.next_slot > now {
            true => at.max(self.next_slot).since(now),
            false => at.since(now).max(at_least),
        };
        let wait = if is_full { wait.max(Duration::from_secs(1)) } else { wait };
        let me = myself.clone();
        self.alarm = Some(detach(async move {
            tokio::time::sleep(wait.min(Duration::from_secs(3600))).await;
            let _ = me.cast(WebhookMessage::Due);
        }));
    }

    fn is_full(&self) -> bool {
        self.under_way.len() >= self.pace.at_once()
    }

    fn record(&self) -> Option<Arc<Webhook>> {
        self.world.directory().read().webhooks.get(&self.id)
    }

    /// This node may not have heard of the webhook yet. Only when it is gone for certain, so is what
    /// waits for it.
    async fn end_if_gone(&mut self, myself: &ActorRef<WebhookMessage>) {
        let world = Arc::clone(&self.world);
        let is_fresh = world.ports.ledger.refresh_directory().await.is_ok();
        if is_fresh && self.record().is_none() {
            let command = Command::DropHook { webhook: self.id };
            let claim = self.claim;
            if world.ask_shard(claim.shard, command, None, Some(claim)).await.is_ok() {
                return myself.stop(None);
            }
        }
        let me = myself.clone();
        let wait = if is_fresh && self.record().is_some() { Duration::ZERO } else { AGAIN_AFTER };
        self.alarm = Some(detach(async move {
            tokio::time::sleep(wait).await;
            let _ = me.cast(WebhookMessage::Due);
        }));
    }

    /// A webhook that is off keeps what waits for a week.
    fn let_go_of_old(&mut self, off_since: Timestamp) {
        let now = self.world.now();
        let old: Vec<Arc<Delivery>> = {
            let state = self.world.ports.ledger.shard(self.claim.shard).read();
            let rows = state.pending_of(self.id);
            let is_old =
                |row: &&Arc<Delivery>| row.created_at.max(off_since).plus(PENDING_FOR) <= now;
            rows.filter(is_old).take(256).cloned().collect()
        };
        let later = now.plus(Duration::from_secs(3600));
        let all: Vec<(DeliveryId, Waiting)> = self.at.iter().map(|(id, row)| (*id, *row)).collect();
        all.into_iter().for_each(|(id, row)| self.schedule(id, Waiting { at: later, ..row }));
        if old.is_empty() {
            return;
        }
        let (world, claim) = (Arc::clone(&self.world), self.claim);
        let node_id = world.node_id;
        detach(async move {
            let tried = old.iter().map(|row| {
                let attempt = Attempt {
                    at: now,
                    status_code: None,
                    duration_ms: 0,
                    error: Some("the webhook was off for seven days".to_owned()),
                    answer: String::new(),
                    node_id,
                    cause: Cause::Manual,
                };
                Tried::of(row, attempt, None, false)
            });
            let command = Command::NoteAttempts(tried.collect());
            let _ = world.ask_shard(claim.shard, command, None, Some(claim)).await;
        });
    }
}

impl World {
    /// Writes down how an attempt ended and decides what is next.
    async fn conclude(
        self: &Arc<Self>,
        claim: Claim,
        hook: &Webhook,
        row: &Delivery,
        attempt: Attempt,
        answer: Option<OutboundAnswer>,
    ) {
        let is_gone = answer.as_ref().is_some_and(|answer| answer.status == 410);
        let count = row.tried + u32::from(attempt.cause == Cause::Schedule);
        let retry_after = answer.and_then(|answer| answer.retry_after);
        let chance = (self.ports.entropy.dice() % 1000) as u64;
        // By hand once more: whatever was to come of the schedule still comes.
        let step = count.max(1);
        let waits = &self.settings.retry_waits;
        let next_at = delivery::next_attempt(step, waits, chance, retry_after, self.now());
        let is_over = !attempt.is_success() && (next_at.is_none() || is_gone);
        let tried = Tried::of(row, attempt, next_at, is_gone);
        self.note_attempt(claim.shard, tried).await;
        if is_over {
            self.judge_receiver(claim, hook.id, is_gone).await;
        }
    }

    /// In nobody's name: it happened, whoever owns the webhook by now.
    async fn note_attempt(self: &Arc<Self>, shard: u16, tried: Tried) {
        let until = self.now().plus(NOTED_WITHIN);
        while self.now() < until {
            let command = Command::NoteAttempts(vec![tried.clone()]);
            let Err(error) = self.ask_shard(shard, command, None, None).await else { return };
            tracing::debug!(webhook_id = %tried.webhook, %error, "an attempt is not written down yet");
            tokio::time::sleep(NOTE_AGAIN).await;
        }
    }

    /// A receiver that wants nothing any more, or has failed for days, gets nothing any more.
    async fn judge_receiver(self: &Arc<Self>, claim: Claim, id: WebhookId, is_gone: bool) {
        let is_lost = {
            let record = self.directory().read().webhooks.get(&id);
            let enabled_at = record.map_or(Timestamp::default(), |record| record.enabled_at);
            let state = self.ports.ledger.shard(claim.shard).read();
            state.hooks.get(&id).is_some_and(|hook| hook.is_lost(enabled_at, self.now()))
        };
        let reason = match (is_gone, is_lost) {
            (true, _) => "the receiver answered 410 Gone",
            (false, true) => "every delivery has failed for five days",
            (false, false) => return,
        };
        let command = DirectoryCommand::DisableWebhook { id, reason: reason.to_owned() };
        if let Err(error) = self.report(claim, command).await {
            tracing::warn!(webhook_id = %id, %error, "a webhook could not be disabled");
        }
    }

    /// Sends a delivery once.
    pub async fn attempt(
        &self,
        hook: &Webhook,
        row: &Delivery,
    ) -> (Attempt, Option<OutboundAnswer>) {
        let at = self.now();
        let began = tokio::time::Instant::now();
        let result = match self.signed(hook, row, at) {
            Ok(request) => {
                self.ports.outbound.post(request).await.map_err(|error| error.to_string())
            }
            Err(error) => Err(error),
        };
        let duration_ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
        let (answer, error) = match result {
            Ok(answer) => (Some(answer), None),
            Err(error) => (None, Some(error)),
        };
        let attempt = Attempt {
            at,
            status_code: answer.as_ref().map(|answer| answer.status),
            duration_ms,
            error: error.or_else(|| {
                let is_redirect = (300..400).contains(&answer.as_ref()?.status);
                is_redirect.then(|| "redirects are not followed".to_owned())
            }),
            answer: answer.as_ref().map(|answer| answer.body.clone()).unwrap_or_default(),
            node_id: self.node_id,
            cause: row.cause,
        };
        (attempt, answer)
    }

    /// A request with signatures of this moment: a receiver refuses old ones.
    fn signed(
        &self,
        hook: &Webhook,
        row: &Delivery,
        at: Timestamp,
    ) -> Result<OutboundRequest, String> {
        let place = sealed_place(hook.id);
        let sealer = self.opener(hook.tenant.org).map_err(|error| error.to_string())?;
        let open = |sealed: &[u8]| sealer.open(sealed, &place).map_err(|error| error.to_string());
        let secret = open(&hook.sealed)?;
        let (seconds, body) = (at.seconds(), row.body());
        let id = row.event.id.to_string();
        let bytes = body.as_bytes();
        let mut standard = signature::standard(&secret, &id, seconds, bytes);
        let mut headers = BTreeMap::from([
            ("x-service-signature", signature::service(&secret, seconds, bytes)),
            ("x-service-timestamp", seconds.to_string()),
        ]);
        if let Some((sealed, _)) = hook.previous.as_ref().filter(|(_, until)| at < *until) {
            let previous = open(sealed)?;
            headers.insert(
                "x-service-signature-previous",
                signature::service(&previous, seconds, bytes),
            );
            standard.push(' ');
            standard.push_str(&signature::standard(&previous, &id, seconds, bytes));
        }
        headers.insert("webhook-signature", standard);
        headers.insert("webhook-timestamp", seconds.to_string());
        headers.insert("webhook-id", id);
        Ok(OutboundRequest { url: hook.url.clone(), headers, body })
    }
}

/// What the lines need of a delivery that is to be tried again.
fn waiting(row: &Delivery) -> Option<Waiting> {
    Some(Waiting { at: row.next_at?, agent: row.event.agent, sequence: row.sequence })
}

/// Where a webhook's secret is sealed for.
pub fn sealed_place(id: WebhookId) -> String {
    format!("{id}/secret")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_receiver_gets_few_at_once_and_more_when_it_answers_again() {
        let pace = Pace(AtomicUsize::new(AT_ONCE));
        (0..4).for_each(|_| pace.note(SLOW));
        assert_eq!(pace.at_once(), AT_ONCE_WHILE_SLOW);
        pace.note(SLOW);
        assert_eq!(pace.at_once(), AT_ONCE_WHILE_SLOW, "never nothing");
        (0..100).for_each(|_| pace.note(Duration::from_millis(20)));
        assert_eq!(pace.at_once(), AT_ONCE);
    }
}
