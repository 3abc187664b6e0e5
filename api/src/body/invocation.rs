//! Invocations on the wire.

use std::collections::BTreeMap;

use domain::job::{Retry, RetryOn};
use poem_openapi::{Enum, Object, types::Any};
use serde_json::Value;

/// When a job is tried again.
#[derive(Clone, Debug, Object)]
pub struct RetryRequest {
    /// Attempts in all, 1 to 10.
    #[oai(validator(minimum(value = "1"), maximum(value = "10")))]
    pub max_attempts: Option<u32>,
    /// `exponential` (default) or `fixed` pauses.
    pub backoff: Option<BackoffBody>,
    /// First pause in milliseconds, 0 to 3600000; default 1000.
    #[oai(validator(minimum(value = "0"), maximum(value = "3600000")))]
    pub initial_ms: Option<u64>,
    /// Longest pause in milliseconds, 0 to 3600000; default 60000.
    #[oai(validator(minimum(value = "0"), maximum(value = "3600000")))]
    pub max_ms: Option<u64>,
    /// Which failures; all if left out.
    #[oai(validator(max_items = 3))]
    pub on: Option<Vec<RetryOnBody>>,
}

/// How pauses grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Enum)]
#[oai(rename_all = "snake_case")]
pub enum BackoffBody {
    /// They double.
    Exponential,
    /// They stay.
    Fixed,
}

/// A kind of failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Enum)]
#[oai(rename_all = "snake_case")]
pub enum RetryOnBody {
    /// The attempt took too long.
    Timeout,
    /// The agent failed.
    AgentError,
    /// No instance could take it, or its node was lost.
    Unavailable,
}

impl From<RetryRequest> for Retry {
    fn from(body: RetryRequest) -> Self {
        let default = Self::default();
        let on = body.on.map(|on| {
            on.into_iter()
                .map(|kind| match kind {
                    RetryOnBody::Timeout => RetryOn::Timeout,
                    RetryOnBody::AgentError => RetryOn::AgentError,
                    RetryOnBody::Unavailable => RetryOn::Unavailable,
                })
                .collect()
        });
        Self {
            max_attempts: body.max_attempts.unwrap_or(default.max_attempts),
            exponential: body.backoff != Some(BackoffBody::Fixed),
            initial_ms: body.initial_ms.unwrap_or(default.initial_ms),
            max_ms: body.max_ms.unwrap_or(default.max_ms),
            on: on.unwrap_or(default.on),
        }
    }
}

/// How a call is made.
#[derive(Clone, Debug, Default, Object)]
pub struct InvokeOptions {
    /// Seconds; more than the most allowed is taken as that.
    #[oai(validator(minimum(value = "0.001")))]
    pub timeout: Option<f64>,
    /// Milliseconds, instead of `timeout`.
    #[oai(validator(minimum(value = "1")))]
    pub timeout_ms: Option<u64>,
    /// Headers for the agent.
    pub headers: Option<BTreeMap<String, String>>,
    /// Your own notes; the agent sees them in its context.
    pub metadata: Option<BTreeMap<String, String>>,
    /// Only with `async`: when to try again.
    pub retry: Option<RetryRequest>,
}

/// Invoke an agent.
#[derive(Clone, Debug, Default, Object)]
#[oai(example)]
pub struct InvokeRequest {
    /// Anything; what the agent makes of it is its own affair.
    pub input: Option<Any<Value>>,
    /// How the call is made.
    pub options: Option<InvokeOptions>,
    /// Answer at once with a job.
    #[oai(rename = "async")]
    pub is_async: Option<bool>,
}

impl poem_openapi::types::Example for InvokeRequest {
    fn example() -> Self {
        Self {
            input: Some(Any(serde_json::json!({ "question": "What is the capital of France?" }))),
            options: Some(InvokeOptions { timeout: Some(30.0), ..InvokeOptions::default() }),
            is_async: Some(false),
        }
    }
}

/// What an invocation used.
#[derive(Clone, Debug, Object)]
pub struct UsageBody {
    /// As the agent reports.
    pub tokens_used: u64,
    /// Time in the agent.
    pub compute_ms: u64,
}

impl From<domain::job::Usage> for UsageBody {
    fn from(usage: domain::job::Usage) -> Self {
        Self { tokens_used: usage.tokens_used, compute_ms: usage.compute_ms }
    }
}

/// The answer to an invocation: `output` and `usage`, or with `async` the job.
#[derive(Clone, Debug, Object)]
pub struct InvokeBody {
    /// The agent's result.
    #[oai(skip_serializing_if_is_none)]
    pub output: Option<Any<Value>>,
    /// What it used.
    #[oai(skip_serializing_if_is_none)]
    pub usage: Option<UsageBody>,
    /// With `async`: the job.
    #[oai(skip_serializing_if_is_none)]
    pub job_id: Option<String>,
    /// With `async`: `pending`.
    #[oai(skip_serializing_if_is_none)]
    pub status: Option<String>,
    /// With `async`: where the job is looked at.
    #[oai(skip_serializing_if_is_none)]
    pub poll_url: Option<String>,
}

/// One event of a stream; which fields are there depends on `type`.
#[derive(Clone, Debug, Default, Object)]
pub struct StreamEventBody {
    /// `start`, `chunk`, `custom`, `done` or `error`.
    #[oai(rename = "type")]
    pub kind: String,
    /// start: our name for the request.
    #[oai(skip_serializing_if_is_none)]
    pub request_id: Option<String>,
    /// chunk: the next piece of text.
    #[oai(skip_serializing_if_is_none)]
    pub content: Option<String>,
    /// custom: what it is called.
    #[oai(skip_serializing_if_is_none)]
    pub name: Option<String>,
    /// custom: what it carries.
    #[oai(skip_serializing_if_is_none)]
    pub data: Option<Any<Value>>,
    /// done: what it used.
    #[oai(skip_serializing_if_is_none)]
    pub usage: Option<StreamUsage>,
    /// error: a word for programs.
    #[oai(skip_serializing_if_is_none)]
    pub code: Option<String>,
    /// error: a sentence.
    #[oai(skip_serializing_if_is_none)]
    pub message: Option<String>,
}

/// What a stream used.
#[derive(Clone, Debug, Object)]
pub struct StreamUsage {
    /// As the agent reports.
    pub tokens: u64,
}
