//! `GET /v1/agents/{id}/metrics`: what an agent did over time.

use std::{collections::BTreeMap, time::Duration};

use actors::{call::MetricsRange, meter::Bucket};
use domain::Timestamp;
use poem_openapi::{
    OpenApi,
    param::{Path, Query},
    payload::Json,
    types::Any,
};
use serde_json::{Value, json};

use crate::{
    Handle,
    agents::agent_id,
    body::metrics::{InstanceCounts, LatencyBody, MetricsBody, MetricsSummary, SeriesBody},
    caller::Caller,
    envelope::Success,
    error::{ApiError, Problem},
    query,
};

/// Points of a series.
const POINTS_MAX: u64 = 1500;
/// Shortest step: a bucket.
const STEP_MIN: u64 = 10;

pub(crate) struct MetricsApi(pub(crate) Handle);

#[OpenApi(prefix_path = "/v1", tag = "crate::document::Tag::Agents")]
impl MetricsApi {
    /// Get an agent's metrics
    ///
    /// The last hour in steps of a minute, unless said otherwise; ten-second
    /// figures are kept for 24 hours, five-minute ones for 30 days.
    #[oai(path = "/agents/:id/metrics", method = "get", operation_id = "getAgentMetrics")]
    async fn metrics(
        &self,
        caller: Caller,
        /// The agent.
        id: Path<String>,
        /// Beginning of the range; default one hour before `to`.
        from: Query<Option<String>>,
        /// End of the range; default now.
        to: Query<Option<String>>,
        /// Seconds per step, 10 to 86400; default 60, more for a long range.
        #[oai(validator(minimum(value = "10"), maximum(value = "86400")))]
        step: Query<Option<u64>>,
    ) -> Result<Json<Success<MetricsBody>>, ApiError> {
        let id = agent_id(&id)?;
        let world = &self.0.service.world;
        let hour = Duration::from_secs(3600);
        let to =
            query::time("to", to.0)?.unwrap_or_else(|| world.now().plus(Duration::from_secs(1)));
        let default_from = Timestamp::from_millis(to.millis().saturating_sub(3_600_000));
        let from = query::time("from", from.0)?.unwrap_or(default_from);
        if from >= to {
            return Err(Problem::field("from", "must be before `to`").into());
        }
        let length = to.since(from).as_secs();
        let least = length.div_ceil(POINTS_MAX).max(STEP_MIN);
        let automatic = if to.since(from) <= hour * 24 { 60 } else { 300 };
        let step = match step.0 {
            Some(step) if step < least => {
                let why = format!("gives more than {POINTS_MAX} points; use at least {least}");
                return Err(Problem::field("step", why).into());
            }
            Some(step) => step,
            None => least.max(automatic),
        };
        self.0.service.directory().await?.read().agent(caller.tenant(), id)?;
        let range = MetricsRange { from, to, step: Duration::from_secs(step) };
        let (whole, steps) = self.0.service.metrics(id, range).await;
        let waiting = self.0.service.figures_of(id).await.waiting as u64;
        Ok(Json(Success::of(MetricsBody {
            from: from.to_string(),
            to: to.to_string(),
            step_seconds: step,
            summary: summary(&whole, waiting),
            series: series(&steps),
        })))
    }
}

fn summary(whole: &Bucket, queue_depth: u64) -> MetricsSummary {
    MetricsSummary {
        requests: whole.requests,
        errors: whole.errors,
        error_rate_percent: whole.error_percent(),
        latency_ms: LatencyBody {
            avg: whole.mean_ms(),
            p50: whole.latency_ms(0.5),
            p90: whole.latency_ms(0.9),
            p95: whole.latency_ms(0.95),
            p99: whole.latency_ms(0.99),
            max: whole.max_ms(),
        },
        tokens_used: whole.tokens,
        compute_ms: whole.compute_ms,
        cold_starts: whole.gauges.cold_starts,
        cpu_percent: whole.gauges.cpu_percent(),
        memory_mb: whole.gauges.memory_mb(),
        instances: InstanceCounts {
            min: whole.gauges.instances_min,
            avg: whole.gauges.instances_avg(),
            max: whole.gauges.instances_max,
        },
        queue_depth,
    }
}

type Figure = (&'static str, &'static str, fn(&Bucket) -> Value);

/// Every series: its name, its unit, and how it is read off a step.
const FIGURES: [Figure; 10] = [
    ("requests", "count", |bucket| json!(bucket.requests)),
    ("errors", "count", |bucket| json!(bucket.errors)),
    ("latency_p50", "ms", |bucket| json!(bucket.latency_ms(0.5))),
    ("latency_p95", "ms", |bucket| json!(bucket.latency_ms(0.95))),
    ("latency_p99", "ms", |bucket| json!(bucket.latency_ms(0.99))),
    ("tokens_used", "count", |bucket| json!(bucket.tokens)),
    ("compute_ms", "ms", |bucket| json!(bucket.compute_ms)),
    ("cpu_percent", "percent", |bucket| json!(bucket.gauges.cpu_percent())),
    ("memory_mb", "MiB", |bucket| json!(bucket.gauges.memory_mb())),
    ("instances", "count", |bucket| json!(bucket.gauges.instances_avg())),
];

fn series(steps: &BTreeMap<Timestamp, Bucket>) -> Vec<SeriesBody> {
    let points = |read: fn(&Bucket) -> Value| {
        steps.iter().map(|(at, bucket)| Any(json!([at.to_string(), read(bucket)]))).collect()
    };
    FIGURES
        .iter()
        .map(|(name, unit, read)| SeriesBody {
            name: (*name).to_owned(),
            unit: (*unit).to_owned(),
            points: points(*read),
        })
        .collect()
}
