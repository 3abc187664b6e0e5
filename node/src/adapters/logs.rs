//! What agents write, in segment files: `logs/<agent>/<first sequence>.log`.
//!
//! A record is its length, its CRC-32C and the line. A torn or damaged tail is cut when the log is
//! opened. Segments are dropped oldest first, by size and by age; a log is on the disk within
//! [`SYNC_EVERY`] writes of the page cache, and a power cut may cost its last lines, never more.

use std::{
    collections::{HashMap, VecDeque},
    fs,
    io::{self, Read as _, Write as _},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use actors::ports::{LogLine, LogQuery, Logs};
use domain::{AgentId, Timestamp, codec};
use futures::{FutureExt as _, future::BoxFuture};
use tokio::sync::broadcast;

/// Bytes after which a new segment begins.
const SEGMENT_BYTES: u64 = 4 * 1024 * 1024;
/// Lines that a slow follower may lag behind before it loses the oldest.
const FOLLOW_LINES: usize = 1024;
/// Newest lines kept in memory per agent, so that most reads touch no file.
const RECENT_LINES: usize = 256;

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
    open: Mutex<HashMap<AgentId, Arc<Mutex<AgentLog>>>>,
}

struct AgentLog {
    folder: PathBuf,
    /// First sequence and size of each segment, oldest first.
    segments: VecDeque<(u64, u64)>,
    file: Option<fs::File>,
    next: u64,
    recent: VecDeque<LogLine>,
    followers: broadcast::Sender<LogLine>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SegmentLogs {
    /// Below this folder.
    pub fn open(folder: &Path, retention: Retention) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        Ok(Self { folder: folder.to_owned(), retention, open: Mutex::default() })
    }

    fn log(&self, agent: AgentId) -> Arc<Mutex<AgentLog>> {
        let mut open = lock(&self.open);
        let log = open.entry(agent).or_insert_with(|| {
            let log = AgentLog::open(self.folder.join(agent.to_string()));
            Arc::new(Mutex::new(log))
        });
        Arc::clone(log)
    }

    /// Drops segments that are too old or too many.
    pub fn prune(&self, now: Timestamp) {
        let known: Vec<_> = lock(&self.open).values().cloned().collect();
        for log in known {
            lock(&log).prune(self.retention, now);
        }
    }
}

impl AgentLog {
    fn open(folder: PathBuf) -> Self {
        let mut log = Self {
            folder,
            segments: VecDeque::new(),
            file: None,
            next: 1,
            recent: VecDeque::new(),
            followers: broadcast::Sender::new(FOLLOW_LINES),
        };
        if let Err(error) = log.recover() {
            tracing::warn!(%error, folder = %log.folder.display(), "a log could not be read");
        }
        log
    }

    /// Finds the segments, cuts a torn tail and reads the newest lines.
    fn recover(&mut self) -> io::Result<()> {
        let mut first: Vec<u64> = match fs::read_dir(&self.folder) {
            Ok(entries) => entries
                .flatten()
                .filter_map(|entry| entry.file_name().to_str()?.strip_suffix(".log")?.parse().ok())
                .collect(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => vec![],
            Err(error) => return Err(error),
        };
        first.sort_unstable();
        for (place, sequence) in first.iter().enumerate() {
            let path = self.path(*sequence);
            let mut size = fs::metadata(&path)?.len();
            if place + 1 == first.len() {
                let (lines, good) = read_segment(&path)?;
                if good < size {
                    fs::OpenOptions::new().write(true).open(&path)?.set_len(good)?;
                    size = good;
                }
                self.next = lines.last().map_or(*sequence, |line| line.sequence + 1);
                let skip = lines.len().saturating_sub(RECENT_LINES);
                self.recent = lines.into_iter().skip(skip).collect();
            }
            self.segments.push_back((*sequence, size));
        }
        Ok(())
    }

    fn path(&self, first: u64) -> PathBuf {
        self.folder.join(format!("{first:020}.log"))
    }

    fn append(&mut self, mut line: LogLine) -> io::Result<()> {
        line.sequence = self.next;
        self.next += 1;
        let bytes = codec::encode(&line);
        self.recent.push_back(line.clone());
        if self.recent.len() > RECENT_LINES {
            self.recent.pop_front();
        }
        // Nobody may be listening.
        let _ = self.followers.send(line);
        let full = self.segments.back().is_none_or(|(_, size)| *size >= SEGMENT_BYTES);
        if full {
            fs::create_dir_all(&self.folder)?;
            self.segments.push_back((self.next - 1, 0));
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

impl Logs for SegmentLogs {
    fn append(&self, agent: AgentId, line: LogLine) {
        if let Err(error) = lock(&self.log(agent)).append(line) {
            tracing::warn!(%error, agent_id = %agent, "a log line is lost");
        }
    }

    fn read(&self, agent: AgentId, query: LogQuery) -> BoxFuture<'_, (Vec<LogLine>, bool)> {
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

    fn follow(&self, agent: AgentId) -> broadcast::Receiver<LogLine> {
        lock(&self.log(agent)).followers.subscribe()
    }

    fn forget(&self, agent: AgentId) {
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
    async fn a_torn_tail_is_cut_and_older_lines_are_read_from_disk() {
        let folder = tempfile::tempdir().expect("a folder");
        let agent = AgentId(7);
        let open = || SegmentLogs::open(folder.path(), Retention::default()).expect("opens");
        let logs = open();
        for n in 0..1000 {
            logs.append(agent, line(n.to_string()));
        }
        let segment = folder.path().join(agent.to_string()).join(format!("{:020}.log", 1));
        let mut file = fs::OpenOptions::new().append(true).open(&segment).expect("is there");
        file.write_all(b"torn").expect("writes");
        let logs = {
            drop(logs);
            open()
        };
        logs.append(agent, line("after".to_owned()));
        let last = LogQuery { limit: 3, ..LogQuery::default() };
        let (lines, more) = logs.read(agent, last).await;
        assert_eq!((messages(&lines), more), (vec!["998", "999", "after"], true));
        let first = LogQuery { limit: 2, from_start: true, after: Some(9), ..LogQuery::default() };
        let (lines, more) = logs.read(agent, first).await;
        assert_eq!((messages(&lines), more), (vec!["9", "10"], true));
        let all = LogQuery { limit: 5000, ..LogQuery::default() };
        assert_eq!(logs.read(agent, all).await.0.len(), 1001);
    }
}
