//! A second copy of what nodes count: closed buckets go to one other node, where they are counted in while their
//! own node is silent, or gone for good. Each is kept by the node that counted it, so whoever asks says whose are
//! wanted, and none is counted twice.
//!
//! A copy is made once: when the node that keeps it goes, too, older figures have none.

use std::sync::Arc;

use actors::{
    meter::{CopiedMeters, Meter},
    ports::Series,
};
use bytes::Bytes;
use domain::{AgentId, NodeId, Timestamp};
use serde::{Deserialize, Serialize};

use super::{
    courier::{Batch, Carried, Courier},
    series::SledSeries,
};

/// Bytes that a bucket has beside what was counted, about.
const BUCKET_BYTES: usize = 64;

/// A bucket that is over.
#[derive(Serialize, Deserialize)]
pub struct ClosedBucket {
    /// When it began.
    pub at: Timestamp,
    /// What was counted in it.
    pub counted: Bytes,
}

impl Carried for ClosedBucket {
    const PATH: &'static str = "/series-copies";
    /// Both would be added up.
    const MAY_BE_TWICE: bool = false;

    fn weight(&self) -> usize {
        BUCKET_BYTES + self.counted.len()
    }
}

/// Buckets of this node, with a copy on another one, and copies of others' buckets.
pub struct CopiedSeries {
    local: SledSeries,
    /// Buckets on their way.
    pub courier: Courier<ClosedBucket>,
}

impl CopiedSeries {
    /// Over the buckets of this node.
    pub fn new(local: SledSeries, node: NodeId) -> Arc<Self> {
        Arc::new(Self { local, courier: Courier::new(node) })
    }

    /// Takes buckets of another node in.
    pub fn keep(&self, batch: Batch<ClosedBucket>, meters: &CopiedMeters) -> sled::Result<()> {
        for (agent, ClosedBucket { at, counted }) in batch.parcels {
            if self.local.keep(batch.node, agent, at, &counted)? {
                let meter = meters.of(batch.node);
                meter.restore(agent, at, &counted);
                meter.restore_uptime(agent, &counted);
            }
        }
        Ok(())
    }

    /// Counts what was kept before this start.
    pub fn restore(&self, own: &Meter, copied: &CopiedMeters) {
        self.restore_into(own, None);
        for node in self.local.copied() {
            self.restore_into(&copied.of(node), Some(node));
        }
    }

    fn restore_into(&self, meter: &Meter, node: Option<NodeId>) {
        let fine = self.local.all_fine(node);
        fine.for_each(|(agent, at, bucket)| meter.restore(agent, at, &bucket));
        let coarse = self.local.all_coarse(node);
        coarse.for_each(|(agent, _, bucket)| meter.restore_uptime(agent, &bucket));
    }

    /// Removes what is old enough.
    pub fn prune(&self, now: Timestamp) {
        self.local.prune(now);
    }
}

impl Series for CopiedSeries {
    fn put(&self, agent: AgentId, at: Timestamp, bucket: Vec<u8>) {
        if let Err(error) = self.local.put(agent, at, &bucket) {
            tracing::warn!(%error, "a metric bucket is lost");
        }
        self.courier.push(agent, ClosedBucket { at, counted: Bytes::from(bucket) });
    }

    fn range(
        &self,
        node: Option<NodeId>,
        agent: AgentId,
        from: Timestamp,
        to: Timestamp,
    ) -> Vec<(Timestamp, Vec<u8>)> {
        self.local.range(node, agent, from, to)
    }

    fn forget(&self, agent: AgentId) {
        self.local.forget(agent);
    }
}

#[cfg(test)]
mod tests {
    use actors::{meter::Sample, ports::Clock as _};

    use super::*;
    use crate::adapters::system::SystemClock;

    const AGENT: AgentId = AgentId(1);

    /// The bucket of so many calls.
    fn bucket(at: Timestamp, calls: usize) -> ClosedBucket {
        let meter = Meter::default();
        let sample = Sample::ended(std::time::Duration::from_millis(5), true, 0);
        (0..calls).for_each(|_| meter.record(AGENT, sample, at));
        let (_, at, counted) = meter.close(at.plus(actors::meter::BUCKET * 2)).remove(0);
        ClosedBucket { at, counted: Bytes::from(counted) }
    }

    #[test]
    fn copies_are_counted_once_by_the_node_that_counted_them() {
        let folder = tempfile::tempdir().expect("a folder");
        let now = SystemClock.now();
        let (at, later) = (now.minus(actors::meter::BUCKET * 9), now.plus(actors::meter::BUCKET));
        let batch = |node: u128, calls| Batch {
            node: NodeId(node),
            parcels: vec![(AGENT, bucket(at, calls))],
        };
        let check = |series: &CopiedSeries, meters: &CopiedMeters| {
            for (nodes, wanted) in [(vec![], 0), (vec![2], 3), (vec![2, 3], 7), (vec![9], 0)] {
                let nodes: Vec<NodeId> = nodes.into_iter().map(NodeId).collect();
                let copies = nodes.iter().flat_map(|node| {
                    series.range(Some(*node), AGENT, at.minus(actors::meter::BUCKET), later)
                });
                let read = copies.filter_map(|(_, bytes)| actors::meter::Bucket::read(&bytes));
                assert_eq!(read.map(|bucket| bucket.requests).sum::<u64>(), wanted, "{nodes:?}");
                let totals = meters.among(&nodes).into_iter().map(|meter| meter.totals(AGENT, now));
                assert_eq!(totals.map(|totals| totals.requests).sum::<u64>(), wanted, "{nodes:?}");
            }
            assert!(
                series.range(None, AGENT, at.minus(actors::meter::BUCKET), later).is_empty(),
                "they are not its own"
            );
        };
        {
            let series =
                CopiedSeries::new(SledSeries::open(folder.path()).expect("opens"), NodeId(1));
            let meters = CopiedMeters::default();
            for batch in [batch(2, 3), batch(3, 4), batch(2, 3)] {
                series.keep(batch, &meters).expect("it is kept");
            }
            check(&series, &meters);
        }
        let series = CopiedSeries::new(SledSeries::open(folder.path()).expect("opens"), NodeId(1));
        let (own, meters) = (Meter::default(), CopiedMeters::default());
        series.restore(&own, &meters);
        check(&series, &meters);
        assert_eq!(own.totals(AGENT, now).requests, 0);
        series.forget(AGENT);
        assert!(series.range(Some(NodeId(2)), AGENT, at, later).is_empty());
    }
}
