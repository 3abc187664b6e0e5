//! What agents do, put together from what each node saw: metrics, logs, health.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use domain::{AgentId, NodeId, Timestamp};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::Service;
use crate::{
    ask::{Ask, Figures, Told},
    figures::ANSWERED_WITHIN,
    meter::{self, Bucket, Summary, Totals},
    ports::{LogLine, LogQuery},
    route::Health,
};

/// How long other nodes may take for pages of logs and metrics.
const PAGE_WITHIN: Duration = Duration::from_secs(3);

/// A stretch of time in equal steps.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct MetricsRange {
    /// Its beginning.
    pub from: Timestamp,
    /// Its end.
    pub to: Timestamp,
    /// The length of a step.
    pub step: Duration,
}

/// What is known of an agent beside its record.
#[derive(Clone, Debug)]
pub struct AgentFigures {
    /// What its instances make of it.
    pub health: Health,
    /// Its last 24 hours.
    pub summary: Summary,
    /// Share of the time that it was meant to serve.
    pub uptime_percent: f64,
    /// Calls that wait for a slot.
    pub waiting: usize,
}

impl AgentFigures {
    fn of(parts: &[Figures]) -> Self {
        let (mut totals, mut uptime, mut pulses) = (Totals::default(), (0, 0), vec![]);
        for part in parts {
            totals.add(&part.totals);
            uptime = (uptime.0 + part.uptime.0, uptime.1 + part.uptime.1);
            pulses.extend_from_slice(&part.pulses);
        }
        Self {
            health: Health::of(&pulses),
            summary: totals.summary(),
            uptime_percent: meter::uptime_percent(uptime),
            waiting: parts.iter().map(|part| part.waiting).sum(),
        }
    }
}

impl Service {
    /// What is known of these agents: here now, on other nodes half a second ago or later. A node that does not
    /// answer at once is left out.
    pub async fn figures(&self, agents: &[AgentId]) -> HashMap<AgentId, AgentFigures> {
        let silent = self.world.silent();
        let elsewhere = self.figures_elsewhere(agents, &silent).await;
        let mut parts: HashMap<AgentId, Vec<Figures>> =
            agents.iter().map(|id| (*id, vec![self.world.figures_here(*id, &silent)])).collect();
        for one in elsewhere {
            parts.entry(one.agent).or_default().push(one);
        }
        parts.into_iter().map(|(id, parts)| (id, AgentFigures::of(&parts))).collect()
    }

    async fn figures_elsewhere(&self, agents: &[AgentId], silent: &[NodeId]) -> Vec<Figures> {
        let (mut known, unknown) = self.world.elsewhere.split(agents);
        let others = if unknown.is_empty() { vec![] } else { self.world.others() };
        if others.is_empty() {
            return known;
        }
        let ask = Ask::Figures { agents: unknown.clone(), silent: silent.to_vec() };
        let asked = Instant::now();
        let told = self.world.ask_all(others, &ask, ANSWERED_WITHIN).await;
        let mut said = vec![];
        for (_, told) in told {
            if let Told::Figures(figures) = told {
                said.extend(figures);
            }
        }
        self.world.elsewhere.keep(asked, &unknown, &said);
        known.extend(said);
        known
    }

    /// What is known of one agent.
    pub async fn figures_of(&self, agent: AgentId) -> AgentFigures {
        let mut figures = self.figures(&[agent]).await;
        figures.remove(&agent).unwrap_or_else(|| AgentFigures::of(&[]))
    }

    /// What was counted in each step that had calls, and altogether, on all nodes; of those that do not answer as far
    /// as others keep copies.
    pub async fn metrics(
        &self,
        agent: AgentId,
        range: MetricsRange,
    ) -> (Bucket, BTreeMap<Timestamp, Bucket>) {
        let silent = self.world.silent();
        let ask = Ask::Metrics { agent, range, silent: silent.clone() };
        let others = self.world.ask_all(self.world.others(), &ask, PAGE_WITHIN);
        let (mut parts, told) = futures::join!(self.metrics_here(agent, range, silent), others);
        for (_, told) in told {
            if let Told::Metrics(more) = told {
                parts.extend(more);
            }
        }
        let mut steps: BTreeMap<Timestamp, Bucket> = BTreeMap::new();
        for (at, bytes) in parts {
            if let Some(bucket) = Bucket::read(&bytes) {
                steps.entry(at).or_default().add(&bucket);
            }
        }
        let mut whole = Bucket::default();
        steps.values().for_each(|bucket| whole.add(bucket));
        (whole, steps)
    }

    /// What this node counted, and what it keeps of these others, in steps.
    pub(crate) async fn metrics_here(
        &self,
        agent: AgentId,
        range: MetricsRange,
        silent: Vec<NodeId>,
    ) -> Vec<(Timestamp, Bytes)> {
        let MetricsRange { from, to, step } = range;
        let world = Arc::clone(&self.world);
        let read = tokio::task::spawn_blocking(move || {
            let nodes = std::iter::once(None).chain(silent.into_iter().map(Some));
            nodes
                .flat_map(|node| world.ports.series.range(node, agent, from, to))
                .collect::<Vec<_>>()
        });
        let kept = read.await.unwrap_or_default();
        let open = self.world.meter.open(agent).filter(|(at, _)| *at >= from && *at < to);
        let steps = meter::steps(&kept, open, step);
        steps.into_iter().map(|(at, bucket)| (at, Bytes::from(bucket.bytes()))).collect()
    }

    /// Lines of an agent's log that fit, of all nodes, oldest first, and whether there are more. Those of a node that
    /// does not answer are read where their copies are.
    pub async fn logs(&self, agent: AgentId, query: LogQuery) -> (Vec<(NodeId, LogLine)>, bool) {
        let ask = Ask::Logs { agent, query: query.clone() };
        let others = self.world.ask_all(self.world.others(), &ask, PAGE_WITHIN);
        let here = self.world.ports.logs.read(agent, query.clone());
        let ((lines, mut more), told) = futures::join!(here, others);
        let answered = told.iter().filter(|(_, told)| matches!(told, Told::Logs(..)));
        let heard: Vec<NodeId> = answered.map(|(node, _)| *node).collect();
        let (copies, more_copies) = self.log_copies(agent, &query, heard).await;
        more |= more_copies;
        let here = self.world.node_id;
        let mut lines: Vec<_> = lines.into_iter().map(|line| (here, line)).collect();
        for (node, told) in told {
            let Told::Logs(theirs, has_more) = told else { continue };
            more |= has_more;
            lines.extend(theirs.into_iter().map(|line| (node, line)));
        }
        lines.extend(copies);
        lines.sort_by_key(|(node, line)| (line.sequence, *node));
        // Two may keep the same copies.
        lines.dedup_by_key(|(node, line)| (line.sequence, *node));
        more |= lines.len() > query.limit;
        match query.from_start {
            true => lines.truncate(query.limit),
            false => drop(lines.drain(..lines.len().saturating_sub(query.limit))),
        }
        (lines, more)
    }

    /// Lines of the nodes that were not heard, of whoever keeps copies of them.
    async fn log_copies(
        &self,
        agent: AgentId,
        query: &LogQuery,
        heard: Vec<NodeId>,
    ) -> (Vec<(NodeId, LogLine)>, bool) {
        let mut nodes = self.world.ever();
        nodes.retain(|node| !heard.contains(node));
        if nodes.is_empty() {
            return (vec![], false);
        }
        let ask = Ask::LogCopies { nodes: nodes.clone(), agent, query: query.clone() };
        let others = self.world.ask_all(heard, &ask, PAGE_WITHIN);
        let here = self.world.ports.logs.read_copies(nodes, agent, query.clone());
        let ((mut lines, mut more), told) = futures::join!(here, others);
        for (_, told) in told {
            if let Told::LogCopies(theirs, has_more) = told {
                lines.extend(theirs);
                more |= has_more;
            }
        }
        (lines, more)
    }

    /// New lines of other nodes' parts of a log, beyond the marks, which move on.
    pub async fn others_logs(
        &self,
        agent: AgentId,
        query: &LogQuery,
        from: u64,
        marks: &mut BTreeMap<NodeId, u64>,
    ) -> Vec<(NodeId, LogLine)> {
        let questions = self.world.others().into_iter().map(|node| {
            let after = Some(marks.get(&node).copied().unwrap_or(from));
            let query = LogQuery { after, from_start: true, ..query.clone() };
            let ask = Ask::Logs { agent, query };
            async move { self.world.ask_node(node, ask, PAGE_WITHIN).await.map(|told| (node, told)) }
        });
        let mut found = vec![];
        for (node, told) in futures::future::join_all(questions).await.into_iter().flatten() {
            let Told::Logs(lines, _) = told else { continue };
            if let Some(last) = lines.last() {
                marks.insert(node, last.sequence);
            }
            found.extend(lines.into_iter().map(|line| (node, line)));
        }
        found.sort_by_key(|(_, line)| line.sequence);
        found
    }
}
