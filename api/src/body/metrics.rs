//! Metrics on the wire.

use poem_openapi::{Object, types::Any};
use serde_json::Value;

/// Latencies in milliseconds.
#[derive(Clone, Debug, Object)]
pub struct LatencyBody {
    /// Mean.
    pub avg: f64,
    /// Half of the calls were faster.
    pub p50: f64,
    /// Nine of ten.
    pub p90: f64,
    /// 95 of 100.
    pub p95: f64,
    /// 99 of 100.
    pub p99: f64,
    /// The slowest.
    pub max: f64,
}

/// The whole range.
#[derive(Clone, Debug, Object)]
pub struct MetricsSummary {
    /// Calls.
    pub requests: u64,
    /// Calls without an output.
    pub errors: u64,
    /// Their share.
    pub error_rate_percent: f64,
    /// Latencies.
    pub latency_ms: LatencyBody,
    /// As agents report.
    pub tokens_used: u64,
    /// Time in agents.
    pub compute_ms: u64,
    /// Calls that found no ready instance.
    pub cold_starts: u64,
    /// Used share of the cores that the instances may use.
    pub cpu_percent: f64,
    /// Memory of all instances together on average, in MiB.
    pub memory_mb: f64,
    /// Ready instances.
    pub instances: InstanceCounts,
    /// Calls that wait for a slot now.
    pub queue_depth: u64,
}

/// Ready instances.
#[derive(Clone, Debug, Object)]
pub struct InstanceCounts {
    /// The fewest.
    pub min: u64,
    /// On average.
    pub avg: f64,
    /// The most.
    pub max: u64,
}

/// One figure over time.
#[derive(Clone, Debug, Object)]
pub struct SeriesBody {
    /// What is counted.
    pub name: String,
    /// In which unit.
    pub unit: String,
    /// `[timestamp, value]`, oldest first; steps without calls are left out.
    pub points: Vec<Any<Value>>,
}

/// What an agent did.
#[derive(Clone, Debug, Object)]
pub struct MetricsBody {
    /// Beginning of the range.
    pub from: String,
    /// End of the range.
    pub to: String,
    /// Length of a step.
    pub step_seconds: u64,
    /// The whole range.
    pub summary: MetricsSummary,
    /// Figures over time.
    pub series: Vec<SeriesBody>,
}
