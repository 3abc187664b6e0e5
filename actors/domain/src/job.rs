//! One asynchronous invocation, from accepted to finished.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use serde::{Deserialize, Serialize};

use crate::{
    AgentId, InstanceId, JobId, NodeId, Rejection, RequestId, Timestamp, account::Tenant,
    event::ShardEvent as Event, limits::PENDING_JOBS_PER_SHARD, shard::Shard,
};

/// How long a finished job is kept.
pub const KEPT_FOR: Duration = Duration::from_secs(30 * 24 * 3600);
/// How long its output is kept.
pub const OUTPUT_KEPT_FOR: Duration = Duration::from_secs(7 * 24 * 3600);
/// How long it is remembered that there was such a job, after it was forgotten.
pub const REMEMBERED_FOR: Duration = Duration::from_secs(30 * 24 * 3600);
/// Longest input or output that is kept in the log itself; a longer one is a blob.
pub const PAYLOAD_BYTES_MAX: usize = 64 * 1024;

/// JSON text of a job: in the log while it is short, else the name of the blob that holds it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Payload {
    /// The text.
    Here(String),
    /// The blob of this SHA-256.
    Blob {
        /// Lower-case hexadecimal.
        sha256: String,
        /// Its length in bytes.
        bytes: u64,
    },
}

impl Payload {
    /// The blob's name, if it is one.
    pub fn blob(&self) -> Option<&str> {
        match self {
            Self::Here(_) => None,
            Self::Blob { sha256, .. } => Some(sha256),
        }
    }
}

/// Where a job is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobStatus {
    /// Accepted; waits for its first or next attempt.
    Pending,
    /// An attempt is under way.
    Running,
    /// It has an output.
    Completed,
    /// It has an error.
    Failed,
    /// It was called off, and the agent has let go of it.
    Canceled,
}

impl JobStatus {
    /// The word used in bodies.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Running => "running",
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Canceled => "canceled",
        }
    }

    /// Whether nothing will change any more.
    pub fn is_final(self) -> bool {
        match self {
            Self::Pending | Self::Running => false,
            Self::Completed | Self::Failed | Self::Canceled => true,
        }
    }
}

/// What may be tried again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RetryOn {
    /// The attempt took too long.
    Timeout,
    /// The agent answered with an error, or its process ended.
    AgentError,
    /// No instance could take it, or its node was lost.
    Unavailable,
}

/// When to try again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Retry {
    /// Attempts in all, 1 to 10.
    pub max_attempts: u32,
    /// Whether pauses double.
    pub exponential: bool,
    /// First pause in milliseconds.
    pub initial_ms: u64,
    /// Longest pause in milliseconds.
    pub max_ms: u64,
    /// Which failures.
    pub on: Vec<RetryOn>,
}

impl Default for Retry {
    /// One attempt: agents have side effects.
    fn default() -> Self {
        Self {
            max_attempts: 1,
            exponential: true,
            initial_ms: 1000,
            max_ms: 60_000,
            on: vec![RetryOn::Timeout, RetryOn::AgentError, RetryOn::Unavailable],
        }
    }
}

impl Retry {
    /// The pause after this many attempts.
    pub fn pause(&self, attempts: u32) -> Duration {
        let factor = if self.exponential { 1_u64 << attempts.saturating_sub(1).min(20) } else { 1 };
        Duration::from_millis(self.initial_ms.saturating_mul(factor).min(self.max_ms))
    }
}

/// What an invocation used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// As the agent reports.
    pub tokens_used: u64,
    /// Time in the agent.
    pub compute_ms: u64,
}

/// Why a job or a call failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobError {
    /// `AGENT_ERROR`, `JOB_TIMEOUT`, …
    pub code: String,
    /// One sentence.
    pub message: String,
    /// JSON object, as text.
    pub details: String,
}

/// One asynchronous invocation. JSON values are kept as their text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Job {
    /// Its id.
    pub id: JobId,
    /// Whose it is.
    pub tenant: Tenant,
    /// The agent.
    pub agent_id: AgentId,
    /// The version that took the last attempt.
    pub agent_version: Option<u64>,
    /// Where it is.
    pub status: JobStatus,
    /// What goes in.
    pub input: Payload,
    /// Headers for the agent.
    pub headers: BTreeMap<String, String>,
    /// The client's own notes.
    pub metadata: BTreeMap<String, String>,
    /// How long one attempt may take.
    pub timeout_ms: u64,
    /// When to try again.
    pub retry: Retry,
    /// Attempts begun.
    pub attempt: u32,
    /// Counts owners and attempts: a result of an older epoch is refused.
    pub epoch: u64,
    /// The life of the node that runs the attempt.
    pub boot: Option<String>,
    /// The instance that took the attempt.
    pub instance_id: Option<InstanceId>,
    /// The node of that instance.
    pub node_id: Option<NodeId>,
    /// When it was accepted.
    pub created_at: Timestamp,
    /// When the last attempt began.
    pub started_at: Option<Timestamp>,
    /// When it ended.
    pub completed_at: Option<Timestamp>,
    /// Not before then.
    pub next_attempt_at: Option<Timestamp>,
    /// When somebody asked for its end.
    pub cancel_requested_at: Option<Timestamp>,
    /// Whether the end shall not wait for the agent.
    pub cancel_by_force: bool,
    /// What came out.
    pub output: Option<Payload>,
    /// Why nothing came out.
    pub error: Option<JobError>,
    /// What it used.
    pub usage: Usage,
    /// The request that made it.
    pub request_id: RequestId,
    /// The job it repeats.
    pub retried_from: Option<JobId>,
}

/// How an attempt ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// With an output.
    Completed {
        /// The result.
        output: Payload,
        /// What it used.
        usage: Usage,
    },
    /// With an error; `kind` says whether it may be tried again.
    Failed {
        /// Why.
        error: JobError,
        /// What kind of failure, if one that can be tried again.
        kind: Option<RetryOn>,
    },
    /// As somebody asked.
    Canceled,
}

/// What begins with an attempt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attempt {
    /// The instance.
    pub instance_id: Option<InstanceId>,
    /// Its node.
    pub node_id: NodeId,
    /// The life of that node.
    pub boot: String,
    /// The version.
    pub version: Option<u64>,
}

pub(crate) fn accept(
    state: &Shard,
    job: &Job,
    first: Option<&Attempt>,
) -> Result<Vec<Event>, Rejection> {
    if state.jobs.len() >= PENDING_JOBS_PER_SHARD {
        return Err(Rejection::TooManyJobs);
    }
    let mut job = job.clone();
    if let Some(attempt) = first {
        let at = job.created_at;
        begun(&mut job, attempt, at);
    }
    Ok(vec![Event::JobAccepted(Box::new(job))])
}

fn begun(job: &mut Job, attempt: &Attempt, at: Timestamp) {
    job.status = JobStatus::Running;
    job.attempt += 1;
    job.epoch += 1;
    job.started_at = Some(at);
    job.next_attempt_at = None;
    job.instance_id = attempt.instance_id;
    job.node_id = Some(attempt.node_id);
    job.boot = Some(attempt.boot.clone());
    job.agent_version = attempt.version;
}

/// An attempt begins: nothing leaves for the agent before this is committed.
pub(crate) fn start(state: &Shard, id: JobId, attempt: &Attempt, at: Timestamp) -> Vec<Event> {
    let Some(job) = state.jobs.get(&id).filter(|job| job.status == JobStatus::Pending) else {
        return vec![];
    };
    let mut job = Job::clone(&job);
    begun(&mut job, attempt, at);
    vec![Event::JobMoved(Box::new(job))]
}

/// An attempt that its agent saw nothing of goes to another instance: the attempt is the same, the
/// epoch a new one.
pub(crate) fn redirect(state: &Shard, id: JobId, epoch: u64, attempt: &Attempt) -> Vec<Event> {
    let is_this =
        |job: &std::sync::Arc<Job>| job.epoch == epoch && job.status == JobStatus::Running;
    let Some(job) = state.jobs.get(&id).filter(is_this) else { return vec![] };
    let mut job = Job::clone(&job);
    job.epoch += 1;
    job.instance_id = attempt.instance_id;
    job.node_id = Some(attempt.node_id);
    job.boot = Some(attempt.boot.clone());
    job.agent_version = attempt.version;
    vec![Event::JobMoved(Box::new(job))]
}

/// An attempt ended. A result of an older epoch changes nothing.
pub(crate) fn finish(
    state: &Shard,
    id: JobId,
    epoch: u64,
    outcome: &Outcome,
    at: Timestamp,
) -> Vec<Event> {
    let is_this =
        |job: &std::sync::Arc<Job>| job.epoch == epoch && job.status == JobStatus::Running;
    let Some(job) = state.jobs.get(&id).filter(is_this) else { return vec![] };
    let mut job = Job::clone(&job);
    match outcome {
        Outcome::Completed { output, usage } => {
            job.usage = *usage;
            job.output = Some(output.clone());
            vec![ended(job, JobStatus::Completed, at)]
        }
        Outcome::Canceled => vec![ended(job, JobStatus::Canceled, at)],
        Outcome::Failed { error, kind } => {
            job.error = Some(error.clone());
            let again = kind.is_some_and(|kind| job.retry.on.contains(&kind))
                && job.attempt < job.retry.max_attempts
                && job.cancel_requested_at.is_none();
            if !again {
                return vec![ended(job, JobStatus::Failed, at)];
            }
            job.status = JobStatus::Pending;
            job.next_attempt_at = Some(at.plus(job.retry.pause(job.attempt)));
            vec![Event::JobMoved(Box::new(job))]
        }
    }
}

fn ended(mut job: Job, status: JobStatus, at: Timestamp) -> Event {
    job.status = status;
    job.completed_at = Some(at);
    job.next_attempt_at = None;
    if status != JobStatus::Failed {
        job.error = None;
    }
    Event::JobFinished(Box::new(job))
}

/// Somebody asks for the job's end: at once while it waits, else when the agent lets go.
pub(crate) fn cancel(
    state: &Shard,
    (tenant, id): (Tenant, JobId),
    by_force: bool,
    at: Timestamp,
) -> Result<Vec<Event>, Rejection> {
    let mut job = Job::clone(&*state.job(tenant, id)?);
    match job.status {
        JobStatus::Completed | JobStatus::Failed | JobStatus::Canceled => {
            Err(Rejection::JobAlreadyFinished)
        }
        JobStatus::Pending => {
            job.cancel_requested_at = Some(at);
            Ok(vec![ended(job, JobStatus::Canceled, at)])
        }
        JobStatus::Running => {
            job.cancel_requested_at.get_or_insert(at);
            job.cancel_by_force |= by_force;
            Ok(vec![Event::JobMoved(Box::new(job))])
        }
    }
}

pub(crate) fn delete(
    state: &Shard,
    (tenant, id): (Tenant, JobId),
) -> Result<Vec<Event>, Rejection> {
    let job = state.job(tenant, id)?;
    if !job.status.is_final() {
        return Err(Rejection::JobNotFinished);
    }
    Ok(vec![Event::JobGone(id)])
}

impl Job {
    /// The blobs that it needs.
    pub fn blobs(&self) -> BTreeSet<String> {
        let payloads = [Some(&self.input), self.output.as_ref()].into_iter().flatten();
        payloads.filter_map(Payload::blob).map(str::to_owned).collect()
    }
}
