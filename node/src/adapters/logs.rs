//! What agents write, in segment files: `logs/<agent>/<first sequence>.log`.
//!
//! A record is its length, its CRC-32C and the line. A torn or damaged tail is cut when the log is
//! opened. Segments are dropped oldest first, by size and by age. Lines are not synced: a power cut may
//! cost the last of them, never more.

use std::{
    collections::{HashMap, VecDeque},
    fs,
    io::{self, Read as _, Write as _},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use actors::ports::{LogLine, LogQuery};
use domain::{AgentId, Timestamp, codec};
use futures::{FutureExt as _, future::BoxFuture};
use tokio::sync::broadcast;

/// Bytes after which a new segment begins.
const SEGMENT_BYTES: u64 = 4 * 1024 * 1024;
/// Lines that a slow follower may lag behind before it loses the oldest.
const FOLLOW_LINES: usize = 1024;
/// Newest lines kept in memory per agent, so that most reads touch no file.
const RECENT_LINES: usize = 256;

/// Logs with an open file and lines in memory; those used longest ago are closed first.
const OPEN_MAX: usize = 512;

/// How much of a log is kept.
#[derive(Clone, Copy, Debug)]
pub struct Retention {
    /// Bytes per agent.
    pub bytes: u64,
    /// Age.
    pub age: Duration,
}

impl Default for Retention {
    fn default() -> Self {
        Self { bytes: 256 * 1024 * 1024, age: Duration::from_secs(7 * 24 * 3600) }
    }
}

/// All agents' logs of this node.
pub struct SegmentLogs {
    folder: PathBuf,
    retention: Retention,
    open: Mutex<OpenLogs>,
    /// Counts uses, so that they have an order.
    uses: AtomicU64,
    tag: u64,
}

/// Between two places of one node; below it is the node's number.
const STEP: u64 = 2048;

/// Open logs, each with its last use.
type OpenLogs = HashMap<AgentId, (u64, Arc<Mutex<AgentLog>>)>;

struct AgentLog {
    folder: PathBuf,
    /// The node's part of every place.
    tag: u64,
    /// First sequence and size of each segment, oldest first.
    segments: VecDeque<(u64, u64)>,
    file: Option<fs::File>,
    next: u64,
    recent: VecDeque<LogLine>,
    /// Only while somebody follows: a channel holds room for all the lines it may lag behind.
    followers: Option<broadcast::Sender<LogLine>>,
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SegmentLogs {
    /// Below this folder, for the node with this number.
    pub fn open(folder: &Path, retention: Retention, node: u64) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        let (open, uses) = (Mutex::default(), AtomicU64::new(0));
        Ok(Self { folder: folder.to_owned(), retention, open, uses, tag: node % STEP })
    }

    fn log(&self, agent: AgentId) -> Arc<Mutex<AgentLog>> {
        let now = self.uses.fetch_add(1, Relaxed);
        let mut open = lock(&self.open);
        if open.len() >= OPEN_MAX && !open.contains_key(&agent) {
            close_some(&mut open);
        }
        let (used, log) = open.entry(agent).or_insert_with(|| {
            let log = AgentLog::open(self.folder.join(agent.to_string()), self.tag);
            (now, Arc::new(Mutex::new(log)))
        });
        *used = now;
        Arc::clone(log)
    }

    /// Appends a line and gives it back with its place; `None` if the disk did not take it.
    pub fn place(&self, agent: AgentId, line: LogLine) -> Option<LogLine> {
        let placed = lock(&self.log(agent)).append(line);
        placed
            .inspect_err(|error| tracing::warn!(%error, agent_id = %agent, "a log line is lost"))
            .ok()
    }

    /// Keeps a line of another node in the place that it has there; one that is there already changes nothing. Lines
    /// of an agent come in their order.
    pub fn keep(&self, agent: AgentId, line: LogLine) -> io::Result<()> {
        lock(&self.log(agent)).keep(&line)
    }

    /// Drops segments that are too old or too many, of open logs and closed ones.
    pub fn prune(&self, now: Timestamp) {
        for entry in fs::read_dir(&self.folder).into_iter().flatten().flatten() {
            let agent = entry.file_name().to_str().and_then(|name| name.parse().ok());
            let Some(agent) = agent else { continue };
            let open = lock(&self.open).get(&agent).map(|(_, log)| Arc::clone(log));
            match open {
                Some(log) => lock(&log).prune(self.retention, now),
                None => {
                    let mut closed = AgentLog::closed(entry.path(), self.tag);
                    let _ = closed.list();
                    closed.prune(self.retention, now);
                }
            }
        }
    }
}

/// Closes a quarter of the logs, those used longest ago, but none that is in use or followed.
fn close_some(open: &mut OpenLogs) {
    let mut idle: Vec<(u64, AgentId)> = open
        .iter()
        .filter(|(_, (_, log))| Arc::strong_count(log) == 1 && !lock(log).is_followed())
        .map(|(agent, (used, _))| (*used, *agent))
        .collect();
    idle.sort_unstable();
    for (_, agent) in idle.into_iter().take(OPEN_MAX / 4) {
        open.remove(&agent);
    }
}

impl AgentLog {
    fn closed(folder: PathBuf, tag: u64) -> Self {
        Self {
            folder,
            tag,
            segments: VecDeque::new(),
            file: None,
            next: 1,
            recent: VecDeque::new(),
            followers: None,
        }
    }

    fn is_followed(&self) -> bool {
        self.followers.as_ref().is_some_and(|followers| followers.receiver_count() > 0)
    }

    fn open(folder: PathBuf, tag: u64) -> Self {
        let mut log = Self::closed(folder, tag);
        if let Err(error) = log.recover() {
            tracing::warn!(%error, folder = %log.folder.display(), "a log could not be read");
        }
        log
    }

    /// Finds the segments.
    fn list(&mut self) -> io::Result<()> {
        let mut first: Vec<u64> = match fs::read_dir(&self.folder) {
            Ok(entries) => entries
                .flatten()
                .filter_map(|entry| entry.file_name().to_str()?.strip_suffix(".log")?.parse().ok())
                .collect(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => vec![],
            Err(error) => return Err(error),
        };
        first.sort_unstable();
        for sequence in first {
            let size = fs::metadata(self.path(sequence))?.len();
            self.segments.push_back((sequence, size));
        }
        Ok(())
    }

    /// Finds the segments, cuts a torn tail and reads the newest lines.
    fn recover(&mut self) -> io::Result<()> {
        self.list()?;
        let Some((sequence, size)) = self.segments.back().copied() else { return Ok(()) };
        let path = self.path(sequence);
        let (lines, good) = read_segment(&path)?;
        if good < size {
            fs::OpenOptions::new().write(true).open(&path)?.set_len(good)?;
            self.segments.pop_back();
            self.segments.push_back((sequence, good));
        }
        self.next = lines.last().map_or(sequence, |line| line.sequence + STEP);
        let skip = lines.len().saturating_sub(RECENT_LINES);
        self.recent = lines.into_iter().skip(skip).collect();
        Ok(())
    }

    fn path(&self, first: u64) -> PathBuf {
        self.folder.join(format!("{first:020}.log"))
    }

    /// Writes a line of this node; gives it as it was written, with its place.
    fn append(&mut self, mut line: LogLine) -> io::Result<LogLine> {
        // Places follow time, so that the logs of several nodes make one; the low bits are the node's.
        let now = line.at.millis().saturating_mul(1000 * STEP) + self.tag;
        line.sequence = self.next.max(now);
        self.write(&line).map(|()| line)
    }

    /// Writes a line of another node in its place, unless it is there.
    fn keep(&mut self, line: &LogLine) -> io::Result<()> {
        if line.sequence < self.next { Ok(()) } else { self.write(line) }
    }

    fn write(&mut self, line: &LogLine) -> io::Result<()> {
        self.next = line.sequence + STEP;
        let bytes = codec::encode(line);
        self.recent.push_back(line.clone());
        if self.recent.len() > RECENT_LINES {
            self.recent.pop_front();
        }
        match &self.followers {
            Some(followers) if followers.send(line.clone()).is_err() => self.followers = None,
            Some(_) | None => {}
        }
        let full = self.segments.back().is_none_or(|(_, size)| *size >= SEGMENT_BYTES);
        if full {
            fs::create_dir_all(&self.folder)?;
            self.segments.push_back((line.sequence, 0));
            self.file = None;
        }
        let Some((first, size)) = self.segments.back().copied() else { return Ok(()) };
        let path = self.path(first);
        let file = match &mut self.file {
            Some(file) => file,
            None => {
                let file = fs::OpenOptions::new().create(true).append(true).open(path)?;
                self.file.insert(file)
            }
        };
        let mut record = Vec::with_capacity(8 + bytes.len());
        record.extend(u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_le_bytes());
        record.extend(crc32c::crc32c(&bytes).to_le_bytes());
        record.extend(bytes);
        if let Err(error) = file.write_all(&record) {
            // Half a record would hide whatever is written after it.
            let _ = file.set_len(size);
            return Err(error);
        }
        if let Some(last) = self.segments.back_mut() {
            last.1 = size + record.len() as u64;
        }
        Ok(())
    }

    fn prune(&mut self, retention: Retention, now: Timestamp) {
        let mut total: u64 = self.segments.iter().map(|(_, size)| size).sum();
        while self.segments.len() > 1 {
            let Some((first, size)) = self.segments.front().copied() else { return };
            let path = self.path(first);
            let age = fs::metadata(&path).and_then(|meta| meta.modified()).ok().and_then(|at| {
                let millis = at.duration_since(std::time::UNIX_EPOCH).ok()?.as_millis();
                Some(now.since(Timestamp::from_millis(u64::try_from(millis).ok()?)))
            });
            let too_old = age.is_some_and(|age| age > retention.age);
            if total <= retention.bytes && !too_old {
                return;
            }
            if let Err(error) = fs::remove_file(&path) {
                tracing::warn!(%error, "an old log segment could not be removed");
            }
            total = total.saturating_sub(size);
            self.segments.pop_front();
        }
    }

    /// What a reader needs, so that it reads files without holding anybody up.
    fn view(&self) -> View {
        let ends = self.segments.iter().skip(1).map(|(first, _)| *first).chain([self.next]);
        let segment = |((first, _), end): (&(u64, u64), u64)| (self.path(*first), *first, end);
        View {
            segments: self.segments.iter().zip(ends).map(segment).collect(),
            recent: self.recent.iter().cloned().collect(),
            next: self.next,
        }
    }
}

/// An agent's log at one moment: files that only grow, and the newest lines.
struct View {
    /// Path, first sequence and the sequence after the last.
    segments: Vec<(PathBuf, u64, u64)>,
    recent: Vec<LogLine>,
    next: u64,
}

impl View {
    /// Lines that fit, and whether there are more.
    fn read(&self, query: &LogQuery) -> (Vec<LogLine>, bool) {
        let mut lines = if query.from_start { self.forwards(query) } else { self.backwards(query) };
        let more = lines.len() > query.limit;
        match query.from_start {
            true => lines.truncate(query.limit),
            false => drop(lines.drain(..lines.len().saturating_sub(query.limit))),
        }
        (lines, more)
    }

    fn oldest_recent(&self) -> u64 {
        self.recent.first().map_or(self.next, |line| line.sequence)
    }

    /// Oldest first, until one more than wanted is found.
    fn forwards(&self, query: &LogQuery) -> Vec<LogLine> {
        let from = query.after.map_or(0, |after| after + 1);
        let mut found = vec![];
        for (path, first, end) in &self.segments {
            if *end > from && *first < self.oldest_recent() {
                found.extend(self.of_segment(path, query));
            }
            if found.len() > query.limit {
                return found;
            }
        }
        found.extend(self.recent.iter().filter(|line| query.takes(line)).cloned());
        found
    }

    /// Newest segment first, until one more than wanted is found.
    fn backwards(&self, query: &LogQuery) -> Vec<LogLine> {
        let mut found: Vec<_> =
            self.recent.iter().filter(|line| query.takes(line)).cloned().collect();
        let from = query.after.map_or(0, |after| after + 1);
        for (path, first, end) in self.segments.iter().rev() {
            if found.len() > query.limit || *end <= from {
                break;
            }
            if *first < self.oldest_recent() {
                let mut older = self.of_segment(path, query);
                older.append(&mut found);
                found = older;
            }
        }
        found
    }

    fn of_segment(&self, path: &Path, query: &LogQuery) -> Vec<LogLine> {
        let lines = read_segment(path).map(|(lines, _)| lines).unwrap_or_default();
        let oldest_recent = self.oldest_recent();
        let is_old = |line: &LogLine| line.sequence < oldest_recent;
        lines.into_iter().filter(|line| is_old(line) && query.takes(line)).collect()
    }
}

/// The whole records of a segment, and how many bytes they take.
fn read_segment(path: &Path) -> io::Result<(Vec<LogLine>, u64)> {
    let mut bytes = vec![];
    fs::File::open(path)?.read_to_end(&mut bytes)?;
    let (mut lines, mut at) = (vec![], 0);
    while let Some(head) = bytes.get(at..at + 8) {
        let word = |range: std::ops::Range<usize>| {
            u32::from_le_bytes(head[range].try_into().unwrap_or_default())
        };
        let Some(record) = bytes.get(at + 8..at + 8 + word(0..4) as usize) else { break };
        if crc32c::crc32c(record) != word(4..8) {
            break;
        }
        let Ok(line) = codec::decode(record) else { break };
        lines.push(line);
        at += 8 + record.len();
    }
    Ok((lines, at as u64))
}

impl SegmentLogs {
    /// The lines that fit, oldest first, and whether more would fit.
    pub fn read(&self, agent: AgentId, query: LogQuery) -> BoxFuture<'_, (Vec<LogLine>, bool)> {
        let log = self.log(agent);
        async move {
            let read = tokio::task::spawn_blocking(move || {
                let view = lock(&log).view();
                view.read(&query)
            });
            read.await.unwrap_or_default()
        }
        .boxed()
    }

    /// Hears lines as they come.
    pub fn follow(&self, agent: AgentId) -> broadcast::Receiver<LogLine> {
        let log = self.log(agent);
        let mut log = lock(&log);
        log.followers.get_or_insert_with(|| broadcast::Sender::new(FOLLOW_LINES)).subscribe()
    }

    /// Removes the log of a gone agent.
    pub fn forget(&self, agent: AgentId) {
        // Dropping the sender ends the followers' streams.
        lock(&self.open).remove(&agent);
        let folder = self.folder.join(agent.to_string());
        match fs::remove_dir_all(&folder) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(%error, agent_id = %agent, "a log could not be removed");
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use actors::{log_line, ports::Channel};

    use super::*;

    fn line(text: String) -> LogLine {
        log_line::plain(Timestamp::from_millis(1), Channel::Stdout, "info", text)
    }

    fn messages(lines: &[LogLine]) -> Vec<&str> {
        lines.iter().map(|line| line.message.as_str()).collect()
    }

    #[tokio::test]
    async fn only_so_many_logs_are_open_and_a_followed_one_stays() {
        let folder = tempfile::tempdir().expect("a folder");
        let logs = SegmentLogs::open(folder.path(), Retention::default(), 1).expect("opens");
        let mut followed = logs.follow(AgentId(1));
        for agent in 1..=u128::try_from(OPEN_MAX).expect("small") * 2 {
            logs.place(AgentId(agent), line(agent.to_string()));
        }
        assert!(lock(&logs.open).len() <= OPEN_MAX);
        logs.prune(Timestamp::from_millis(2));
        for agent in [1, 2, 700] {
            logs.place(AgentId(agent), line("again".to_owned()));
            let query = LogQuery { limit: 5, ..LogQuery::default() };
            let (lines, _) = logs.read(AgentId(agent), query).await;
            assert_eq!(messages(&lines), vec![agent.to_string().as_str(), "again"]);
        }
        let heard = [followed.try_recv(), followed.try_recv()].map(|line| line.map(|l| l.message));
        assert_eq!(heard, [Ok("1".to_owned()), Ok("again".to_owned())]);
    }

    #[tokio::test]
    async fn a_torn_tail_is_cut_and_older_lines_are_read_from_disk() {
        let folder = tempfile::tempdir().expect("a folder");
        let agent = AgentId(7);
        let open = || SegmentLogs::open(folder.path(), Retention::default(), 1).expect("opens");
        let logs = open();
        for n in 0..1000 {
            logs.place(agent, line(n.to_string()));
        }
        let from_start = LogQuery { limit: 9, from_start: true, ..LogQuery::default() };
        let places: Vec<u64> =
            logs.read(agent, from_start).await.0.iter().map(|line| line.sequence).collect();
        assert!(places.windows(2).all(|two| two[1] == two[0] + STEP), "one node, one step");
        let segment = folder.path().join(agent.to_string()).join(format!("{:020}.log", places[0]));
        let mut file = fs::OpenOptions::new().append(true).open(&segment).expect("is there");
        file.write_all(b"torn").expect("writes");
        let logs = {
            drop(logs);
            open()
        };
        logs.place(agent, line("after".to_owned()));
        let last = LogQuery { limit: 3, ..LogQuery::default() };
        let (lines, more) = logs.read(agent, last).await;
        assert_eq!((messages(&lines), more), (vec!["998", "999", "after"], true));
        let first = LogQuery {
            limit: 2,
            from_start: true,
            after: places.last().copied(),
            ..LogQuery::default()
        };
        let (lines, more) = logs.read(agent, first).await;
        assert_eq!((messages(&lines), more), (vec!["9", "10"], true));
        let all = LogQuery { limit: 5000, ..LogQuery::default() };
        assert_eq!(logs.read(agent, all).await.0.len(), 1001);
    }
}
