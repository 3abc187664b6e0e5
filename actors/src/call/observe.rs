//! What an agent did: its metrics over time.

use std::{collections::BTreeMap, time::Duration};

use domain::{AgentId, Timestamp};

use super::Service;
use crate::meter::{self, Bucket};

/// A stretch of time in equal steps.
#[derive(Clone, Copy, Debug)]
pub struct MetricsRange {
    /// Its beginning.
    pub from: Timestamp,
    /// Its end.
    pub to: Timestamp,
    /// The length of a step.
    pub step: Duration,
}

impl Service {
    /// What was counted in each step that had calls, and altogether.
    pub async fn metrics(
        &self,
        agent: AgentId,
        range: MetricsRange,
    ) -> (Bucket, BTreeMap<Timestamp, Bucket>) {
        let MetricsRange { from, to, step } = range;
        let world = std::sync::Arc::clone(&self.world);
        let read = tokio::task::spawn_blocking(move || world.ports.series.range(agent, from, to));
        let kept = read.await.unwrap_or_default();
        let open = self.world.meter.open(agent).filter(|(at, _)| *at >= from && *at < to);
        let steps = meter::steps(&kept, open, step);
        let mut whole = Bucket::default();
        steps.values().for_each(|bucket| whole.add(bucket));
        (whole, steps)
    }
}
