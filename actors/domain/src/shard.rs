//! A shard: large and written often. Jobs and the keys of keyed calls now; executions, deliveries
//! and usage have their place here. One line per command; bodies live with the noun.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map},
    ops::ControlFlow,
    sync::Arc,
};

use serde::{Deserialize, Serialize};

use crate::{
    AuditId, DeliveryId, EventId, JobId, NodeId, OrgId, Rejection, SessionId, Timestamp, WebhookId,
    account::{self, Code, Holder, Redemption, Session, Tenant, Throttle},
    audit::Audited,
    event::ShardEvent as Event,
    idempotency::{KeyHash, Keyed, Keys, SWEPT_AT_ONCE, Seen},
    job::{self, Attempt, Job, JobError, JobStatus, Outcome, Payload, Usage},
    machine::{Entry, Machine},
    outbox::{self, Happening, Occurrence, Outbox},
    rate::{self, Allowance, Grant, Spent},
    table::{AnyTable, Order, Table},
    webhook::delivery::{self, Cause, Delivery, HookState, Tried},
};

/// What may be asked of a shard.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[expect(missing_docs, reason = "fields are named after what they hold")]
pub enum Command {
    /// `POST …/invoke` with `async`; with its first attempt where an instance is free at once.
    AcceptJob { job: Box<Job>, first: Option<Attempt> },
    /// An attempt begins.
    StartJob { id: JobId, attempt: Attempt },
    /// An attempt ended.
    FinishJob { id: JobId, epoch: u64, outcome: Outcome },
    /// `POST /v1/jobs/:id/cancel`.
    CancelJob { tenant: Tenant, id: JobId, by_force: bool },
    /// `DELETE /v1/jobs/:id`.
    DeleteJob { tenant: Tenant, id: JobId },
    /// A keyed synchronous call begins.
    BeginCall { key: Keyed, deadline: Timestamp, boot: String },
    /// A keyed synchronous call ended.
    EndCall { key: Keyed, outcome: CallOutcome },
    /// A keyed synchronous call did not begin after all.
    WithdrawCall { key: Keyed },
    /// Forget what is old enough.
    Sweep,
    /// An attempt that its agent saw nothing of goes to another instance.
    RedirectJob { id: JobId, epoch: u64, attempt: Attempt },
    /// A login.
    OpenSession(Box<Session>),
    /// A password that was wrong, or right.
    NoteLogin { guess: [u8; 32], org: Option<OrgId>, is_right: bool },
    /// `POST /v1/auth/refresh`, or a grant of that type.
    RefreshSession { id: SessionId, generation: u64, client: String },
    /// `POST /v1/auth/logout`.
    CloseSession { id: SessionId },
    /// Somebody agreed to let an application in.
    IssueCode(Box<Code>),
    /// The application trades the code for tokens.
    RedeemCode(Box<Redemption>),
    /// A node asks for calls of a tenant, and tells what it spent of the last ones.
    LendCalls {
        tenant: Tenant,
        node: NodeId,
        wanted: u64,
        allowance: Allowance,
        spent: Option<Spent>,
    },
    /// What was done.
    Audit(Vec<Arc<Audited>>),
    /// What clients are told of, for the organization's log.
    KeepEvents(Vec<Arc<Occurrence>>),
    /// Events for webhooks.
    Enqueue { wanted: Vec<(WebhookId, Occurrence)>, cause: Cause },
    /// Attempts that ended.
    NoteAttempts(Vec<Tried>),
    /// Attempts beside the schedule.
    Redeliver { webhook: WebhookId, ids: Vec<DeliveryId>, cause: Cause },
    /// A webhook is gone.
    DropHook { webhook: WebhookId },
    /// Everybody has what waited in the outbox, up to this number.
    Told { up_to: u64 },
    /// Everybody has these of what waited in the outbox; older ones still wait.
    ToldOf { numbers: Vec<u64> },
}

/// How a keyed synchronous call ended, for its replay.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CallOutcome {
    /// With an output.
    Completed {
        /// The result.
        output: Payload,
        /// What it used.
        usage: Usage,
        /// The instance that answered.
        instance_id: Option<crate::InstanceId>,
    },
    /// With an error, after the call had been dispatched.
    Failed(JobError),
}

impl CallOutcome {
    /// The blob that it needs, if any.
    fn blob(&self) -> Option<&str> {
        match self {
            Self::Completed { output, .. } => output.blob(),
            Self::Failed(_) => None,
        }
    }
}

/// What a granted command is answered with.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Reply {
    /// Nothing to say.
    Done,
    /// The job as it is now.
    Job(Box<Job>),
    /// The keyed call ended before: its outcome.
    Call(Box<CallOutcome>),
    /// The session as it is now.
    Session(Box<Session>),
    /// A session that has ended, because what it came of was shown again.
    SessionEnded(SessionId),
    /// What a node was lent.
    Grant(Box<Grant>),
}

/// A shard's tables.
pub struct Shard {
    /// Jobs that are not finished.
    pub jobs: Table<JobId, Job>,
    /// Finished jobs: history.
    pub finished: Table<JobId, Job>,
    /// `(forgotten at, job)`.
    pub expiry: Table<(u128, JobId), ()>,
    /// Answers of keyed calls.
    pub keys: Keys,
    /// The blobs that jobs need.
    pub blobs: Table<JobId, BTreeSet<String>>,
    /// The blobs that answers of keyed calls need.
    pub call_blobs: Table<KeyHash, String>,
    /// Whose job was forgotten, and when.
    pub forgotten: Table<JobId, (Tenant, Timestamp)>,
    /// Chains of refresh tokens.
    pub sessions: Table<SessionId, Session>,
    /// Authorization codes, by hash; used ones for a while.
    pub codes: Table<[u8; 32], Code>,
    /// Wrong passwords, by e-mail address and client.
    pub throttles: Table<[u8; 32], Throttle>,
    /// What tenants have used of their rates, under [`rate::key`].
    pub usage: Table<String, rate::Usage>,
    /// The audit log: history.
    pub audit: Table<(u128, AuditId), Audited>,
    /// The hash of each organization's newest row.
    pub audit_heads: Table<OrgId, [u8; 32]>,
    /// Events of organizations: history.
    pub events: Table<(u128, EventId), Occurrence>,
    /// `(forgotten at, event)` → whose.
    pub events_until: Table<(u128, EventId), OrgId>,
    /// Deliveries on their way, by webhook.
    pub deliveries: Table<(u128, DeliveryId), Delivery>,
    /// Deliveries that ended: history.
    pub delivered: Table<(u128, DeliveryId), Delivery>,
    /// `(forgotten at, delivery)` → to whom.
    pub delivered_until: Table<(u128, DeliveryId), WebhookId>,
    /// What is known of webhooks beside their records.
    pub hooks: Table<WebhookId, HookState>,
    /// What waits to be told.
    pub outbox: Outbox,
    /// The greatest id of rows of the audit log, of organizations that wrote lately; derived.
    newest_audits: BTreeMap<OrgId, AuditId>,
    /// Jobs that wait, by tenant; derived.
    queued: BTreeMap<Tenant, u64>,
    /// A finished job, if there is one; derived.
    sample: Option<JobId>,
    /// Sessions, by who holds them; derived.
    pub(crate) held: BTreeMap<Holder, BTreeSet<SessionId>>,
}

impl Default for Shard {
    fn default() -> Self {
        Self {
            jobs: Table::live(1),
            finished: Table::history(2),
            expiry: Table::history(3),
            keys: Keys::new(4),
            blobs: Table::history(7),
            forgotten: Table::history(8),
            call_blobs: Table::history(9),
            sessions: Table::live(10),
            codes: Table::live(11),
            throttles: Table::live(12),
            usage: Table::live(13),
            audit: Table::history(14),
            audit_heads: Table::live(15),
            events: Table::history(16),
            events_until: Table::history(17),
            deliveries: Table::live(18),
            delivered: Table::history(19),
            delivered_until: Table::history(20),
            hooks: Table::live(21),
            outbox: Outbox::new(22, 24),
            newest_audits: BTreeMap::new(),
            queued: BTreeMap::new(),
            sample: None,
            held: BTreeMap::new(),
        }
    }
}

impl Shard {
    /// A job that this tenant may see. Somebody else's takes as long as one that is not there.
    pub fn job(&self, tenant: Tenant, id: JobId) -> Result<Arc<Job>, Rejection> {
        let is_own = |job: &Arc<Job>| job.tenant == tenant;
        if let Some(job) = self.jobs.get(&id).filter(is_own) {
            return Ok(job);
        }
        let finished = self.finished.get(&id);
        let is_there = finished.is_some();
        finished.filter(is_own).ok_or_else(|| {
            // Whether it is there or not, one finished job is read and one is looked for in vain.
            let instead = if is_there { None } else { self.sample };
            std::hint::black_box(self.finished.get(&instead.unwrap_or(JobId(0))));
            match self.forgotten.get(&id).as_deref() {
                Some((owner, expired_at)) if *owner == tenant => {
                    Rejection::JobExpired { id, expired_at: *expired_at }
                }
                Some(_) | None => Rejection::JobNotFound(id),
            }
        })
    }

    /// A job, whoever asks.
    pub fn any_job(&self, id: JobId) -> Option<Arc<Job>> {
        self.jobs.get(&id).or_else(|| self.finished.get(&id))
    }

    /// The blobs that jobs of this shard need. Reads history.
    pub fn needed_blobs(&self) -> BTreeSet<String> {
        let mut needed = BTreeSet::new();
        self.blobs.walk(None, Order::Ascending, |_, row| {
            needed.extend(row.iter().cloned());
            ControlFlow::Continue(())
        });
        self.call_blobs.walk(None, Order::Ascending, |_, row| {
            needed.insert(String::clone(&row));
            ControlFlow::Continue(())
        });
        needed
    }

    fn call_outcome(&self, key: &Keyed, at: Timestamp) -> Result<Option<CallOutcome>, Rejection> {
        match self.keys.seen::<CallOutcome>(key, at) {
            Seen::Never => Ok(None),
            Seen::Answered(outcome) => outcome.map(Some),
            Seen::Refused(reason) => Err(reason),
        }
    }

    fn is_running(&self, key: &Keyed) -> bool {
        self.keys.running.get(&key.hash).is_some_and(|row| row.fingerprint == key.fingerprint)
    }

    fn begin_call(
        &self,
        key: &Keyed,
        deadline: Timestamp,
        boot: &str,
        at: Timestamp,
    ) -> Result<Vec<Event>, Rejection> {
        match self.call_outcome(key, at)? {
            Some(_) => Ok(vec![]),
            None => {
                Ok(vec![Event::CallBegun { key: key.clone(), deadline, boot: boot.to_owned() }])
            }
        }
    }

    /// Whether something is old enough to be forgotten.
    pub fn has_expired(&self, at: Timestamp) -> bool {
        !self.keys.expired(at).is_empty()
            || !self.jobs_due(at).is_empty()
            || !self.events_until.due(at, 1).is_empty()
            || !self.delivered_until.due(at, 1).is_empty()
            || self.codes.rows().any(|(_, code)| code.is_forgotten(at))
            || self.sessions.rows().any(|(_, session)| session.is_over(at))
            || self.throttles.rows().any(|(_, row)| row.is_forgotten(at))
    }

    /// Events that are not here yet. What comes again comes from its beginning on, so nobody looks behind the first
    /// that is new; one that is kept twice is what it was.
    fn new_events(&self, events: &[Arc<Occurrence>]) -> Vec<Event> {
        let new = events.iter().skip_while(|row| self.has_event(row.tenant.org, row.id));
        new.map(|row| Event::EventKept(Arc::clone(row))).collect()
    }

    fn session_reply(&self, id: SessionId) -> Reply {
        let row = self.sessions.get(&id);
        row.map_or(Reply::Done, |row| Reply::Session(Box::new(Session::clone(&row))))
    }

    /// The new session; or the one that has ended, because its code was shown again.
    fn redemption_reply(&self, redemption: &Redemption) -> Reply {
        let code = self.codes.get(&redemption.hash);
        match code.and_then(|code| code.session) {
            Some(session) if session != redemption.session.id => Reply::SessionEnded(session),
            _ => self.session_reply(redemption.session.id),
        }
    }

    /// One that comes twice is written once, whichever ways it comes: of a call whose answer was lost one row may be
    /// in the directory's outbox and another one at the node that asked. What is newer than all that was here before is
    /// not looked for on disk.
    fn write_audits(&mut self, rows: &[Arc<Audited>]) {
        let (mut newest, mut written) = (BTreeMap::new(), BTreeSet::new());
        for row in rows {
            let newest = *newest.entry(row.org).or_insert_with(|| self.newest_audit(row.org));
            let is_old = row.id <= newest && self.audit.contains(&(row.org.0, row.id));
            if !is_old && written.insert(row.id) {
                self.write_audit(row);
            }
        }
    }

    /// The greatest id of an organization's rows; found once, and remembered.
    fn newest_audit(&mut self, org: OrgId) -> AuditId {
        if let Some(newest) = self.newest_audits.get(&org) {
            return *newest;
        }
        let (mut newest, last) = (AuditId(0), (org.0, AuditId(u128::MAX)));
        self.audit.walk(Some(&last), Order::Descending, |(of, id), _| {
            if *of == org.0 {
                newest = *id;
            }
            ControlFlow::Break(())
        });
        self.newest_audits.insert(org, newest);
        newest
    }

    /// Each row hangs on the one before it.
    fn write_audit(&mut self, row: &Audited) {
        let row = row.after(self.audit_head(row.org));
        self.audit_heads.put(row.org, row.hash);
        self.newest_audits.entry(row.org).and_modify(|newest| *newest = row.id.max(*newest));
        self.audit.put((row.org.0, row.id), row);
    }

    fn forget_credentials(&mut self, at: Timestamp) {
        let over = |(id, row): (&SessionId, &Arc<Session>)| row.is_over(at).then_some(*id);
        let sessions: Vec<_> = self.sessions.rows().filter_map(over).collect();
        sessions.iter().for_each(|id| self.remove_session(*id));
        let codes = self.codes.rows().filter(|(_, row)| row.is_forgotten(at));
        let codes: Vec<_> = codes.map(|(hash, _)| *hash).collect();
        codes.iter().for_each(|hash| self.codes.remove(hash));
        let throttles = self.throttles.rows().filter(|(_, row)| row.is_forgotten(at));
        let throttles: Vec<_> = throttles.map(|(guess, _)| *guess).collect();
        throttles.iter().for_each(|guess| self.throttles.remove(guess));
    }

    fn jobs_due(&self, at: Timestamp) -> BTreeSet<(u128, JobId)> {
        self.expiry.due(at, SWEPT_AT_ONCE)
    }

    fn sweep(&mut self, at: Timestamp) {
        self.forget_credentials(at);
        self.forget_told(at);
        let keys = self.keys.expired(at);
        self.keys.forget(&keys);
        for (_, hash) in keys {
            if self.keys.done.get(&hash).is_none() {
                self.call_blobs.remove(&hash);
            }
        }
        for key in self.jobs_due(at) {
            self.expiry.remove(&key);
            self.age(key.1, at);
        }
    }

    /// A finished job loses its output first, then everything but the memory that it was, then that.
    fn age(&mut self, id: JobId, at: Timestamp) {
        let Some(job) = self.finished.get(&id) else { return self.forgotten.remove(&id) };
        let forgotten = ended(&job).plus(job::KEPT_FOR);
        if at < forgotten {
            self.look_again(id, forgotten);
            self.keep(&Job { output: None, ..Job::clone(&job) });
            return;
        }
        self.look_again(id, forgotten.plus(job::REMEMBERED_FOR));
        self.forgotten.put(id, (job.tenant, forgotten));
        self.forget_job(id);
    }

    fn forget_job(&mut self, id: JobId) {
        self.sample.take_if(|sample| *sample == id);
        self.finished.remove(&id);
        self.blobs.remove(&id);
    }

    fn look_again(&mut self, id: JobId, at: Timestamp) {
        self.expiry.put((u128::from(at.millis()), id), ());
    }

    fn put_job(&mut self, job: &Job) {
        self.note_queued(job.id, Some(job));
        self.jobs.put(job.id, job.clone());
    }

    /// Counts a job that is about to be something else.
    fn note_queued(&mut self, id: JobId, now: Option<&Job>) {
        let waits = |job: &Job| (job.status == JobStatus::Pending).then_some(job.tenant);
        let before = self.jobs.get(&id).and_then(|job| waits(&job));
        let now = now.and_then(waits);
        if before == now {
            return;
        }
        if let Some(tenant) = before
            && let btree_map::Entry::Occupied(mut count) = self.queued.entry(tenant)
        {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
        if let Some(tenant) = now {
            *self.queued.entry(tenant).or_default() += 1;
        }
    }

    /// Jobs of a tenant that wait here.
    pub fn queued(&self, tenant: Tenant) -> u64 {
        self.queued.get(&tenant).copied().unwrap_or(0)
    }

    fn keep(&mut self, job: &Job) {
        self.need(job);
        self.sample.get_or_insert(job.id);
        self.finished.put(job.id, job.clone());
    }

    fn finish(&mut self, job: &Job) {
        self.note_queued(job.id, None);
        self.jobs.remove(&job.id);
        self.look_again(job.id, ended(job).plus(job::OUTPUT_KEPT_FOR));
        self.keep(job);
    }

    /// Remembers which blobs a job needs.
    fn need(&mut self, job: &Job) {
        let blobs = job.blobs();
        match blobs.is_empty() {
            true => self.blobs.remove(&job.id),
            false => self.blobs.put(job.id, blobs),
        }
    }
}

fn ended(job: &Job) -> Timestamp {
    job.completed_at.unwrap_or(job.created_at)
}

impl Machine for Shard {
    type Command = Command;
    type Reply = Reply;
    type Event = Event;

    fn decide(&self, entry: &Entry<Command>) -> Result<Vec<Event>, Rejection> {
        use Command as C;
        let at = entry.at;
        match &entry.command {
            C::AcceptJob { job, first } => job::accept(self, job, first.as_ref()),
            C::StartJob { id, attempt } => Ok(job::start(self, *id, attempt, at)),
            C::RedirectJob { id, epoch, attempt } => Ok(job::redirect(self, *id, *epoch, attempt)),
            C::FinishJob { id, epoch, outcome } => Ok(job::finish(self, *id, *epoch, outcome, at)),
            C::CancelJob { tenant, id, by_force } => {
                job::cancel(self, (*tenant, *id), *by_force, at)
            }
            C::DeleteJob { tenant, id } => job::delete(self, (*tenant, *id)),
            C::BeginCall { key, deadline, boot } => self.begin_call(key, *deadline, boot, at),
            // Only the call that runs may end: an outcome that was given already stands.
            C::EndCall { key, .. } | C::WithdrawCall { key } if !self.is_running(key) => Ok(vec![]),
            C::EndCall { key, outcome } => {
                Ok(vec![Event::CallEnded { key: key.clone(), outcome: outcome.clone(), at }])
            }
            C::WithdrawCall { key } => Ok(vec![Event::CallWithdrawn(key.hash)]),
            C::OpenSession(session) => Ok(account::begin(self, session)),
            C::NoteLogin { guess, org, is_right } => {
                account::note_login(self, guess, *org, *is_right, at)
            }
            C::RefreshSession { id, generation, client } => {
                account::refresh(self, *id, *generation, client, at)
            }
            C::CloseSession { id } => Ok(vec![Event::SessionGone(*id)]),
            C::IssueCode(code) => Ok(vec![Event::CodePut(code.clone())]),
            C::RedeemCode(redemption) => account::redeem(self, redemption, at),
            C::LendCalls { tenant, node, wanted, allowance, spent } => {
                rate::lend(self, *tenant, *node, (*wanted, *allowance), spent.as_ref(), at)
            }
            C::Audit(rows) => Ok(vec![Event::Audited(rows.clone())]),
            C::KeepEvents(events) => Ok(self.new_events(events)),
            C::Enqueue { wanted, cause } => Ok(delivery::enqueue(self, wanted, *cause, at)),
            C::NoteAttempts(tried) => {
                Ok(tried.iter().flat_map(|tried| delivery::note(self, tried)).collect())
            }
            C::Redeliver { webhook, ids, cause } => {
                delivery::repeat(self, *webhook, ids, *cause, at)
            }
            C::DropHook { webhook } => Ok(vec![Event::HookGone(*webhook)]),
            C::Told { up_to } => Ok(vec![Event::Told(*up_to)]),
            C::ToldOf { numbers } => Ok(vec![Event::ToldOf(numbers.clone())]),
            C::Sweep => Ok(vec![Event::Swept(at)]),
        }
    }

    fn evolve(&mut self, event: &Event) {
        match event {
            Event::JobAccepted(job) => {
                self.need(job);
                self.put_job(job);
            }
            Event::JobMoved(job) => self.put_job(job),
            Event::JobFinished(job) => self.finish(job),
            Event::JobGone(id) => self.forget_job(*id),
            Event::CallBegun { key, deadline, boot } => self.keys.begun(key, *deadline, boot),
            Event::CallEnded { key, outcome, at } => {
                if let Some(blob) = outcome.blob() {
                    self.call_blobs.put(key.hash, blob.to_owned());
                }
                self.keys.answered::<CallOutcome>(key, *at, &Ok(outcome.clone()));
            }
            Event::CallWithdrawn(hash) => self.keys.running.remove(hash),
            Event::SessionPut(row) => self.put_session(row),
            Event::SessionGone(id) => self.remove_session(*id),
            Event::CodePut(row) => self.codes.put(row.hash, Code::clone(row)),
            Event::ThrottlePut { guess, row } => self.throttles.put(*guess, row.clone()),
            Event::ThrottleGone(guess) => self.throttles.remove(guess),
            Event::UsagePut { tenant, usage } => self.usage.put(rate::key(*tenant), usage.clone()),
            Event::EventKept(row) => self.keep_event(row),
            Event::DeliveryQueued(row) => self.queue_delivery(row),
            Event::DeliveryTried(row) => {
                self.note_attempt(row);
                self.deliveries.put(row.key(), Delivery::clone(row));
            }
            Event::DeliveryEnded(row) => {
                self.note_attempt(row);
                self.end_delivery(row);
            }
            Event::DeliveryAgain(row) => {
                self.delivered.remove(&row.key());
                self.queue_delivery(row);
            }
            Event::HookGone(webhook) => self.drop_hook(*webhook),
            Event::Told(up_to) => self.outbox.told(*up_to),
            Event::ToldOf(numbers) => self.outbox.told_of(numbers),
            Event::Audited(rows) => self.write_audits(rows),
            Event::Swept(at) => self.sweep(*at),
        }
    }

    fn reply(&self, command: &Command) -> Reply {
        use Command as C;
        let job =
            |id| self.any_job(id).map_or(Reply::Done, |job| Reply::Job(Box::new(Job::clone(&job))));
        match command {
            C::AcceptJob { job: accepted, .. } => job(accepted.id),
            C::StartJob { id, .. }
            | C::RedirectJob { id, .. }
            | C::FinishJob { id, .. }
            | C::CancelJob { id, .. } => job(*id),
            C::BeginCall { key, .. } => match self.call_outcome(key, Timestamp::default()) {
                Ok(Some(outcome)) => Reply::Call(Box::new(outcome)),
                _ => Reply::Done,
            },
            C::RefreshSession { id, .. } => self.session_reply(*id),
            C::RedeemCode(redemption) => self.redemption_reply(redemption),
            C::LendCalls { tenant, node, allowance, .. } => {
                let usage = self.usage.get(&rate::key(*tenant));
                let until = usage.as_ref().and_then(|usage| usage.lent.get(node)).map(|l| l.until);
                let at = until.unwrap_or_default().minus(rate::LENT_FOR);
                let grant = usage.and_then(|usage| usage.grant(*node, *allowance, at));
                grant.map_or(Reply::Done, |grant| Reply::Grant(Box::new(grant)))
            }
            C::DeleteJob { .. }
            | C::OpenSession(_)
            | C::EndCall { .. }
            | C::WithdrawCall { .. }
            | C::NoteLogin { .. }
            | C::CloseSession { .. }
            | C::IssueCode(_)
            | C::Audit(_)
            | C::KeepEvents(_)
            | C::Enqueue { .. }
            | C::NoteAttempts(_)
            | C::Redeliver { .. }
            | C::DropHook { .. }
            | C::Told { .. }
            | C::ToldOf { .. }
            | C::Sweep => Reply::Done,
        }
    }

    fn happenings(&self, event: &Event) -> Vec<Happening> {
        outbox::of_shard(event)
    }

    fn outbox(&mut self) -> &mut Outbox {
        &mut self.outbox
    }

    /// The organization's log is here: only its home is asked with a row.
    fn audited(&mut self, row: &Arc<Audited>) {
        self.write_audits(std::slice::from_ref(row));
    }

    fn keys(&mut self) -> &mut Keys {
        &mut self.keys
    }

    fn tables(&mut self) -> Vec<&mut dyn AnyTable> {
        vec![
            &mut self.jobs,
            &mut self.finished,
            &mut self.expiry,
            &mut self.keys.done,
            &mut self.keys.running,
            &mut self.keys.expiry,
            &mut self.blobs,
            &mut self.forgotten,
            &mut self.call_blobs,
            &mut self.sessions,
            &mut self.codes,
            &mut self.throttles,
            &mut self.usage,
            &mut self.audit,
            &mut self.audit_heads,
            &mut self.events,
            &mut self.events_until,
            &mut self.deliveries,
            &mut self.delivered,
            &mut self.delivered_until,
            &mut self.hooks,
            &mut self.outbox.rows,
            &mut self.outbox.next,
            &mut self.outbox.audited,
        ]
    }

    fn reindex(&mut self) {
        self.newest_audits.clear();
        self.queued.clear();
        let waiting = self.jobs.rows().filter(|(_, job)| job.status == JobStatus::Pending);
        for (_, job) in waiting {
            *self.queued.entry(job.tenant).or_default() += 1;
        }
        self.sample = None;
        self.finished.walk(None, Order::Ascending, |id, _| {
            self.sample = Some(*id);
            ControlFlow::Break(())
        });
        self.reindex_sessions();
    }
}
