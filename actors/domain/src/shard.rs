//! A shard: large and written often. Jobs and the keys of keyed calls now; executions, deliveries
//! and usage have their place here. One line per command; bodies live with the noun.

use std::{collections::BTreeSet, ops::ControlFlow, sync::Arc};

use serde::{Deserialize, Serialize};

use crate::{
    JobId, Rejection, Timestamp,
    account::Tenant,
    event::ShardEvent as Event,
    idempotency::{KeyHash, Keyed, Keys, SWEPT_AT_ONCE, Seen},
    job::{self, Attempt, Job, JobError, Outcome, Payload, Usage},
    machine::{Entry, Machine},
    table::{AnyTable, Order, Table},
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
        }
    }
}

impl Shard {
    /// A job that this tenant may see.
    pub fn job(&self, tenant: Tenant, id: JobId) -> Result<Arc<Job>, Rejection> {
        let found = self.any_job(id).filter(|job| job.tenant == tenant);
        found.ok_or_else(|| match self.forgotten.get(&id).as_deref() {
            Some((owner, expired_at)) if *owner == tenant => {
                Rejection::JobExpired { id, expired_at: *expired_at }
            }
            Some(_) | None => Rejection::JobNotFound(id),
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

    /// Whether a finished job is old enough to be forgotten.
    pub fn has_expired_jobs(&self, at: Timestamp) -> bool {
        !self.jobs_due(at).is_empty()
    }

    fn jobs_due(&self, at: Timestamp) -> BTreeSet<(u128, JobId)> {
        self.expiry.due(at, SWEPT_AT_ONCE)
    }

    fn sweep(&mut self, at: Timestamp) {
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
        self.finished.remove(&id);
        self.blobs.remove(&id);
    }

    fn look_again(&mut self, id: JobId, at: Timestamp) {
        self.expiry.put((u128::from(at.millis()), id), ());
    }

    fn keep(&mut self, job: &Job) {
        self.need(job);
        self.finished.put(job.id, job.clone());
    }

    fn finish(&mut self, job: &Job) {
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
            C::Sweep => Ok(vec![Event::Swept(at)]),
        }
    }

    fn evolve(&mut self, event: &Event) {
        match event {
            Event::JobAccepted(job) => {
                self.need(job);
                self.jobs.put(job.id, Job::clone(job));
            }
            Event::JobMoved(job) => self.jobs.put(job.id, Job::clone(job)),
            Event::JobFinished(job) => self.finish(job),
            Event::JobGone(id) => {
                self.finished.remove(id);
                self.blobs.remove(id);
            }
            Event::CallBegun { key, deadline, boot } => self.keys.begun(key, *deadline, boot),
            Event::CallEnded { key, outcome, at } => {
                if let Some(blob) = outcome.blob() {
                    self.call_blobs.put(key.hash, blob.to_owned());
                }
                self.keys.answered::<CallOutcome>(key, *at, &Ok(outcome.clone()));
            }
            Event::CallWithdrawn(hash) => self.keys.running.remove(hash),
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
            C::DeleteJob { .. } | C::EndCall { .. } | C::WithdrawCall { .. } | C::Sweep => {
                Reply::Done
            }
        }
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
        ]
    }

    fn reindex(&mut self) {}
}
