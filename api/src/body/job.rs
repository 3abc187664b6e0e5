//! Jobs on the wire.

use std::collections::BTreeMap;

use actors::call::JobTexts;
use domain::job::{self, Job, Payload};
use poem_openapi::{Enum, Object, types::Any};
use serde_json::{Value, json};

use super::invocation::UsageBody;

/// The status of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Enum)]
#[oai(rename_all = "snake_case")]
pub enum JobStatus {
    /// Waits for its first or next attempt.
    Pending,
    /// An attempt is under way.
    Running,
    /// It has an output.
    Completed,
    /// It has an error.
    Failed,
    /// It was called off.
    Canceled,
}

impl From<job::JobStatus> for JobStatus {
    fn from(status: job::JobStatus) -> Self {
        match status {
            job::JobStatus::Pending => Self::Pending,
            job::JobStatus::Running => Self::Running,
            job::JobStatus::Completed => Self::Completed,
            job::JobStatus::Failed => Self::Failed,
            job::JobStatus::Canceled => Self::Canceled,
        }
    }
}

/// Why a job failed.
#[derive(Clone, Debug, Object)]
pub struct JobErrorBody {
    /// `AGENT_ERROR`, `JOB_TIMEOUT`, `NODE_LOST`, …
    pub code: String,
    /// One sentence.
    pub message: String,
    /// Context.
    pub details: Any<Value>,
}

/// Where a job's time went.
#[derive(Clone, Debug, Object)]
pub struct JobLatency {
    /// From accepted to the last attempt's beginning.
    pub queue_ms: Option<u64>,
    /// From the last attempt's beginning to the end.
    pub run_ms: Option<u64>,
}

/// Where to go from here.
#[derive(Clone, Debug, Object)]
pub struct JobLinks {
    /// `POST` calls it off.
    pub cancel: String,
}

/// One asynchronous invocation.
#[derive(Clone, Debug, Object)]
pub struct JobBody {
    /// Its id.
    pub job_id: String,
    /// The same.
    pub id: String,
    /// Where it is.
    pub status: JobStatus,
    /// Where it is looked at.
    pub poll_url: String,
    /// The agent.
    pub agent_id: String,
    /// The version that took the last attempt.
    pub agent_version: Option<String>,
    /// Live or test.
    pub livemode: bool,
    /// When it was accepted.
    pub created_at: String,
    /// When the last attempt began.
    pub started_at: Option<String>,
    /// When it ended.
    pub completed_at: Option<String>,
    /// When its record is forgotten.
    pub expires_at: Option<String>,
    /// Attempts begun.
    pub attempt: u32,
    /// Attempts in all.
    pub max_attempts: u32,
    /// Not before then.
    pub next_attempt_at: Option<String>,
    /// When somebody asked for its end.
    pub cancel_requested_at: Option<String>,
    /// Seconds per attempt.
    pub timeout: f64,
    /// Only with `?include=input`.
    #[oai(skip_serializing_if_is_none)]
    pub input: Option<Any<Value>>,
    /// What came out; null until then, after seven days, in lists above 64 KiB, and above 6 MiB.
    pub output: Any<Value>,
    /// Where an output above 64 KiB is fetched whole, for seven days.
    pub output_url: Option<String>,
    /// What it used.
    pub usage: UsageBody,
    /// Why nothing came out.
    pub error: Option<JobErrorBody>,
    /// Your own notes.
    pub metadata: BTreeMap<String, String>,
    /// The request that made it.
    pub request_id: String,
    /// The instance that took the last attempt.
    pub instance_id: Option<String>,
    /// The node of that instance.
    pub node_id: Option<String>,
    /// The job it repeats.
    pub retried_from: Option<String>,
    /// Where its time went.
    pub latency: JobLatency,
    /// Where to go from here.
    pub links: JobLinks,
}

fn parsed(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| json!(text))
}

fn ms(duration: std::time::Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

impl JobBody {
    /// A job with the payloads that it is shown with.
    pub fn of(job: &Job, texts: &JobTexts) -> Self {
        let id = job.id.to_string();
        Self {
            poll_url: poll_url(job),
            links: JobLinks { cancel: format!("{}/cancel", poll_url(job)) },
            job_id: id.clone(),
            id,
            status: job.status.into(),
            agent_id: job.agent_id.to_string(),
            agent_version: job.agent_version.map(|number| number.to_string()),
            livemode: job.tenant.mode.is_live(),
            created_at: job.created_at.to_string(),
            started_at: job.started_at.map(|at| at.to_string()),
            completed_at: job.completed_at.map(|at| at.to_string()),
            expires_at: job.completed_at.map(|at| at.plus(job::KEPT_FOR).to_string()),
            attempt: job.attempt,
            max_attempts: job.retry.max_attempts,
            next_attempt_at: job.next_attempt_at.map(|at| at.to_string()),
            cancel_requested_at: job.cancel_requested_at.map(|at| at.to_string()),
            timeout: std::time::Duration::from_millis(job.timeout_ms).as_secs_f64(),
            input: texts.input.as_deref().map(|text| Any(parsed(text))),
            output: Any(texts.output.as_deref().map_or(Value::Null, parsed)),
            output_url: job
                .output
                .as_ref()
                .and_then(Payload::blob)
                .map(|_| format!("{}/output", poll_url(job))),
            usage: job.usage.into(),
            error: job.error.as_ref().map(|error| JobErrorBody {
                code: error.code.clone(),
                message: error.message.clone(),
                details: Any(parsed(&error.details)),
            }),
            metadata: job.metadata.clone(),
            request_id: job.request_id.to_string(),
            instance_id: job.instance_id.map(|id| id.to_string()),
            node_id: job.node_id.map(|id| id.to_string()),
            retried_from: job.retried_from.map(|id| id.to_string()),
            latency: JobLatency {
                queue_ms: job.started_at.map(|at| ms(at.since(job.created_at))),
                run_ms: job
                    .completed_at
                    .zip(job.started_at)
                    .map(|(end, start)| ms(end.since(start))),
            },
        }
    }
}

/// Where a job is looked at.
pub fn poll_url(job: &Job) -> String {
    format!("/v1/jobs/{}", job.id)
}

/// Call a job off.
#[derive(Clone, Debug, Default, Object)]
pub struct CancelRequest {
    /// `graceful` (default) or `force`.
    pub mode: Option<CancelMode>,
}

/// How a job is called off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Enum)]
#[oai(rename_all = "snake_case")]
pub enum CancelMode {
    /// Wait until the agent lets go.
    Graceful,
    /// End the instance.
    Force,
}
