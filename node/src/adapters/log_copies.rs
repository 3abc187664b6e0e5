//! A second copy of what agents write: lines go to one other node as they come, twice a second, and are
//! read there while the node that they come from is silent, or gone for good.
//!
//! Copies are kept by node, `log-copies/<node>/<agent>/…`, each line in the place that it has at home. Lines
//! of one agent arrive in their order, so one that is sent twice is known by its place. A copy is made
//! once: when the node that keeps it goes, too, older lines have none.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use actors::ports::{LogLine, LogQuery, Logs};
use domain::{AgentId, NodeId, Timestamp};
use futures::{FutureExt as _, future::BoxFuture};
use tokio::sync::broadcast;

use super::{
    courier::{Batch, Carried, Courier},
    logs::{Retention, SegmentLogs, lock},
};

/// The folder of a node with the copies that it keeps.
const FOLDER: &str = "log-copies";
/// Bytes that a line has beside its texts, about.
const LINE_BYTES: usize = 256;

impl Carried for LogLine {
    const PATH: &'static str = "/log-copies";
    /// Whoever reads them knows them by their places.
    const MAY_BE_TWICE: bool = true;

    fn weight(&self) -> usize {
        LINE_BYTES + self.message.len() + self.fields.len()
    }
}

/// Logs of this node, with a copy on another one, and copies of others' logs.
pub struct CopiedLogs {
    local: SegmentLogs,
    folder: PathBuf,
    retention: Retention,
    of_others: Mutex<BTreeMap<NodeId, Arc<SegmentLogs>>>,
    /// Lines on their way.
    pub courier: Courier<LogLine>,
}

impl CopiedLogs {
    /// Over the logs of this node; copies are kept below `data`, as long as the logs themselves.
    pub fn new(local: SegmentLogs, node: NodeId, data: &Path, retention: Retention) -> Arc<Self> {
        Arc::new(Self {
            local,
            folder: data.join(FOLDER),
            retention,
            of_others: Mutex::default(),
            courier: Courier::new(node),
        })
    }

    /// Takes lines of another node in.
    pub fn keep(&self, batch: Batch<LogLine>) -> io::Result<()> {
        let logs = self.of_node(batch.node)?;
        batch.parcels.into_iter().try_for_each(|(agent, line)| logs.keep(agent, line))
    }

    fn of_node(&self, node: NodeId) -> io::Result<Arc<SegmentLogs>> {
        let mut of_others = lock(&self.of_others);
        if let Some(logs) = of_others.get(&node) {
            return Ok(Arc::clone(logs));
        }
        // Places are given where lines are written.
        let logs = SegmentLogs::open(&self.folder.join(node.to_string()), self.retention, 0)?;
        Ok(Arc::clone(of_others.entry(node).or_insert(Arc::new(logs))))
    }

    /// The nodes of whose logs something is kept here.
    fn kept(&self) -> Vec<(NodeId, Arc<SegmentLogs>)> {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let nodes = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        nodes.filter_map(|node| Some((node, self.of_node(node).ok()?))).collect()
    }

    /// Drops segments that are too old or too many.
    pub fn prune(&self, now: Timestamp) {
        self.local.prune(now);
        self.kept().iter().for_each(|(_, logs)| logs.prune(now));
    }
}

impl Logs for CopiedLogs {
    fn append(&self, agent: AgentId, line: LogLine) {
        if let Some(placed) = self.local.place(agent, line) {
            self.courier.push(agent, placed);
        }
    }

    fn read(&self, agent: AgentId, query: LogQuery) -> BoxFuture<'_, (Vec<LogLine>, bool)> {
        self.local.read(agent, query)
    }

    fn read_copies(
        &self,
        nodes: Vec<NodeId>,
        agent: AgentId,
        query: LogQuery,
    ) -> BoxFuture<'_, (Vec<(NodeId, LogLine)>, bool)> {
        async move {
            let (mut found, mut more) = (vec![], false);
            for (node, logs) in self.kept() {
                if nodes.contains(&node) {
                    let (lines, has_more) = logs.read(agent, query.clone()).await;
                    found.extend(lines.into_iter().map(|line| (node, line)));
                    more |= has_more;
                }
            }
            (found, more)
        }
        .boxed()
    }

    fn follow(&self, agent: AgentId) -> broadcast::Receiver<LogLine> {
        self.local.follow(agent)
    }

    fn forget(&self, agent: AgentId) {
        self.local.forget(agent);
        self.kept().iter().for_each(|(_, logs)| logs.forget(agent));
    }
}

#[cfg(test)]
mod tests {
    use actors::{log_line, ports::Channel};

    use super::*;

    const AGENT: AgentId = AgentId(1);

    fn open(data: &Path) -> Arc<CopiedLogs> {
        let local = SegmentLogs::open(&data.join("logs"), Retention::default(), 1).expect("opens");
        CopiedLogs::new(local, NodeId(1), data, Retention::default())
    }

    fn line(at: u64, text: &str) -> LogLine {
        let at = Timestamp::from_millis(at);
        log_line::plain(at, Channel::Stdout, "info", text.to_owned())
    }

    fn batch(node: u128, places: std::ops::Range<u64>) -> Batch<LogLine> {
        let lines = places.map(|place| {
            (
                AGENT,
                LogLine { sequence: place * 4096 + 7, ..line(place, &format!("{node} {place}")) },
            )
        });
        Batch { node: NodeId(node), parcels: lines.collect() }
    }

    async fn copies(logs: &CopiedLogs, nodes: &[u128]) -> Vec<(u128, String)> {
        let nodes = nodes.iter().map(|node| NodeId(*node)).collect();
        let query = LogQuery { limit: 1000, ..LogQuery::default() };
        let (lines, _) = logs.read_copies(nodes, AGENT, query).await;
        lines.into_iter().map(|(node, line)| (node.0, line.message)).collect()
    }

    #[tokio::test]
    async fn copies_are_kept_once_in_their_places_by_node() {
        let data = tempfile::tempdir().expect("a folder");
        let logs = open(data.path());
        for batch in [batch(2, 1..4), batch(2, 2..6), batch(3, 1..3), batch(2, 1..6)] {
            logs.keep(batch).expect("it is kept");
        }
        let wanted = |node: u128, places: std::ops::Range<u64>| -> Vec<(u128, String)> {
            places.map(|place| (node, format!("{node} {place}"))).collect()
        };
        for logs in [logs, open(data.path())] {
            assert_eq!(copies(&logs, &[2]).await, wanted(2, 1..6));
            assert_eq!(copies(&logs, &[3, 4]).await, wanted(3, 1..3));
            let query = LogQuery { limit: 1000, ..LogQuery::default() };
            assert!(logs.read(AGENT, query).await.0.is_empty(), "they are not this node's own");
        }
        let logs = open(data.path());
        logs.forget(AGENT);
        assert!(copies(&logs, &[2, 3]).await.is_empty());
    }
}
