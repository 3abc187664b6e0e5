//! A second copy of what agents write: lines go to one other node as they come, twice a second, and are
//! read there while the node that they come from is silent, or gone for good.
//!
//! Copies are kept by node, `log-copies/<node>/<agent>/…`, each line in the place that it has at home. Lines
//! of one agent arrive in their order, so one that is sent twice is known by its place. A copy is made
//! once: when the node that keeps it goes, too, older lines have none.

use std::{
    collections::{BTreeMap, VecDeque},
    fs, io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use actors::ports::{LogLine, LogQuery, Logs};
use bytes::Bytes;
use domain::{AgentId, NodeId, Timestamp, codec};
use futures::{FutureExt as _, future::BoxFuture};
use serde::{Deserialize, Serialize};
use tokio::sync::broadcast;

use super::{
    copies::takers,
    logs::{Retention, SegmentLogs, lock},
    peers::NodePeers,
};

/// Where copies are taken in on a node's peer port.
pub const LOG_COPIES_PATH: &str = "/log-copies";
/// The folder of a node with the copies that it keeps.
pub const FOLDER: &str = "log-copies";
/// Most bytes of a batch, as it arrives.
pub const BATCH_BYTES_MAX: usize = 8 * 1024 * 1024;
/// Between batches: what a node wrote since the last one goes with it.
const COPIED_EVERY: Duration = Duration::from_millis(500);
/// Bytes of lines in one batch, by [`weight`].
const BATCH_BYTES: usize = 1024 * 1024;
/// Bytes of lines that wait for a node that does not take them; older ones are then without a copy.
const WAITING_BYTES_MAX: usize = 8 * 1024 * 1024;
/// Bytes that a line has beside its texts, about.
const LINE_BYTES: usize = 256;

/// Lines of one node, for another one to keep.
#[derive(Serialize, Deserialize)]
pub struct Batch {
    /// Where they were written.
    pub node: NodeId,
    /// Lines of agents, in their order.
    pub lines: Vec<(AgentId, LogLine)>,
}

/// Lines that have no copy yet.
#[derive(Default)]
struct Waiting {
    lines: VecDeque<(AgentId, LogLine)>,
    bytes: usize,
}

impl Waiting {
    /// A line more; the oldest go if there is no room.
    fn push(&mut self, agent: AgentId, line: LogLine) {
        self.bytes += weight(&line);
        self.lines.push_back((agent, line));
        self.make_room();
    }

    /// Puts lines in front again.
    fn put_back(&mut self, lines: Vec<(AgentId, LogLine)>) {
        for (agent, line) in lines.into_iter().rev() {
            self.bytes += weight(&line);
            self.lines.push_front((agent, line));
        }
        self.make_room();
    }

    fn make_room(&mut self) {
        while self.bytes > WAITING_BYTES_MAX
            && let Some((_, line)) = self.lines.pop_front()
        {
            self.bytes -= weight(&line);
        }
    }
}

/// About how much memory a line takes, and how many bytes on its way.
fn weight(line: &LogLine) -> usize {
    LINE_BYTES + line.message.len() + line.fields.len()
}

/// Logs of this node, with a copy on another one, and copies of others' logs.
pub struct CopiedLogs {
    local: SegmentLogs,
    node: NodeId,
    folder: PathBuf,
    retention: Retention,
    of_others: Mutex<BTreeMap<NodeId, Arc<SegmentLogs>>>,
    waiting: Mutex<Waiting>,
    /// Whether there is anybody to keep a copy.
    is_wanted: AtomicBool,
    peers: OnceLock<Arc<NodePeers>>,
}

impl CopiedLogs {
    /// Over the logs of this node; copies are kept below `data`, as long as the logs themselves.
    pub fn new(local: SegmentLogs, node: NodeId, data: &Path, retention: Retention) -> Arc<Self> {
        Arc::new(Self {
            local,
            node,
            folder: data.join(FOLDER),
            retention,
            of_others: Mutex::default(),
            waiting: Mutex::default(),
            is_wanted: AtomicBool::new(false),
            peers: OnceLock::new(),
        })
    }

    /// From now on there are others.
    pub fn connect(&self, peers: Arc<NodePeers>) {
        let _ = self.peers.set(peers);
    }

    /// Copies what is written until dropped.
    pub async fn run(self: Arc<Self>) {
        loop {
            if let Some(peers) = self.peers.get() {
                self.is_wanted.store(peers.has_others(), Relaxed);
                self.copy(peers).await;
            }
            tokio::time::sleep(COPIED_EVERY).await;
        }
    }

    async fn copy(&self, peers: &NodePeers) {
        let waiting = std::mem::take(&mut *lock(&self.waiting));
        let mut by_keeper: BTreeMap<NodeId, Vec<(AgentId, LogLine)>> = BTreeMap::new();
        let mut keepers = BTreeMap::new();
        let mut left = vec![];
        for (agent, line) in waiting.lines {
            match keepers.entry(agent).or_insert_with(|| keeper(peers, agent)) {
                Some(node) => by_keeper.entry(*node).or_default().push((agent, line)),
                None => left.push((agent, line)),
            }
        }
        for (node, lines) in by_keeper {
            left.extend(self.copy_to(peers, node, lines).await);
        }
        lock(&self.waiting).put_back(left);
    }

    /// Gives lines to a node, in their order; those that it did not take come back.
    async fn copy_to(
        &self,
        peers: &NodePeers,
        node: NodeId,
        lines: Vec<(AgentId, LogLine)>,
    ) -> Vec<(AgentId, LogLine)> {
        let mut left = lines;
        while !left.is_empty() {
            let rest = left.split_off(first_batch(&left));
            let batch = Batch { node: self.node, lines: left };
            let taken = peers.keep_lines(node, Bytes::from(codec::encode(&batch))).await;
            left = rest;
            if let Err(error) = taken {
                tracing::debug!(%node, %error, "lines were not copied");
                return batch.lines.into_iter().chain(left).collect();
            }
        }
        left
    }

    /// Takes lines of another node in.
    pub fn keep(&self, batch: Batch) -> io::Result<()> {
        let logs = self.of_node(batch.node)?;
        batch.lines.into_iter().try_for_each(|(agent, line)| logs.keep(agent, line))
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

/// How many of these lines one batch takes.
fn first_batch(lines: &[(AgentId, LogLine)]) -> usize {
    let mut bytes = 0;
    let fits = |(_, line): &&(AgentId, LogLine)| {
        bytes += weight(line);
        bytes <= BATCH_BYTES
    };
    lines.iter().take_while(fits).count().max(1)
}

/// The node that keeps the copy of an agent's lines.
fn keeper(peers: &NodePeers, agent: AgentId) -> Option<NodeId> {
    takers(peers, &agent.to_string()).first().copied()
}

impl Logs for CopiedLogs {
    fn append(&self, agent: AgentId, line: LogLine) {
        let placed = self.local.place(agent, line);
        if let Some(placed) = placed.filter(|_| self.is_wanted.load(Relaxed)) {
            lock(&self.waiting).push(agent, placed);
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

    fn batch(node: u128, places: std::ops::Range<u64>) -> Batch {
        let lines = places.map(|place| {
            (
                AGENT,
                LogLine { sequence: place * 4096 + 7, ..line(place, &format!("{node} {place}")) },
            )
        });
        Batch { node: NodeId(node), lines: lines.collect() }
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

    #[test]
    fn a_batch_ends_before_it_is_too_long_and_has_a_line_at_least() {
        let long = "x".repeat(BATCH_BYTES / 2 - LINE_BYTES);
        let lines: Vec<_> = (0..5).map(|at| (AGENT, line(at, &long))).collect();
        assert_eq!(first_batch(&lines), 2);
        let longer = "x".repeat(BATCH_BYTES * 2);
        assert_eq!(first_batch(&[(AGENT, line(1, &longer)), (AGENT, line(2, "x"))]), 1);
    }

    #[test]
    fn lines_that_were_not_taken_wait_in_front_and_the_oldest_go() {
        let mut waiting = Waiting::default();
        let texts = |waiting: &Waiting| -> Vec<String> {
            waiting.lines.iter().map(|(_, line)| line.message[..3].to_owned()).collect()
        };
        waiting.push(AGENT, line(3, "new"));
        waiting.put_back(vec![(AGENT, line(1, "one")), (AGENT, line(2, "two"))]);
        assert_eq!(texts(&waiting), ["one", "two", "new"]);
        let rest = "x".repeat(WAITING_BYTES_MAX - 2 * LINE_BYTES - 3);
        waiting.push(AGENT, line(4, &rest));
        assert_eq!(texts(&waiting), ["new", "xxx"], "the oldest went");
        assert_eq!(waiting.bytes, WAITING_BYTES_MAX);
        waiting.put_back(vec![(AGENT, line(2, "two"))]);
        assert_eq!(texts(&waiting), ["new", "xxx"], "there is no room for older ones");
    }
}
