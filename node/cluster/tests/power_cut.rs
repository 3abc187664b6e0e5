//! The log after a power cut, at every moment of a long trace.
//!
//! Every write, change of length and sync of the store is recorded. Then, for each boundary, the disk
//! is put together as a cut there could leave it: all that was synced, and of what was not a random
//! part, in any order, the last write torn. Whatever was acknowledged before must be there.

use std::{
    collections::BTreeMap,
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use cluster::raft::{
    log::{GroupLog, LogFile},
    types::{Entry, LogId, Proposal, TypeConfig, Vote},
    wal,
};
use openraft::{
    RaftLogReader as _,
    entry::RaftEntry as _,
    storage::{IOFlushed, RaftLogStorage as _},
    type_config::TypeConfigExt as _,
    vote::RaftLeaderId as _,
};
use redb::StorageBackend;

#[derive(Clone, Debug)]
enum Event {
    Write(u64, Vec<u8>),
    Length(u64),
    Sync,
}

/// A disk in memory that remembers what was done to it.
#[derive(Clone, Debug, Default)]
struct Disk {
    bytes: Arc<Mutex<Vec<u8>>>,
    events: Arc<Mutex<Vec<Event>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn carry_out(bytes: &mut Vec<u8>, event: &Event) {
    match event {
        Event::Write(offset, data) => {
            let from = usize::try_from(*offset).expect("small");
            if bytes.len() < from + data.len() {
                bytes.resize(from + data.len(), 0);
            }
            bytes[from..from + data.len()].copy_from_slice(data);
        }
        Event::Length(length) => bytes.resize(usize::try_from(*length).expect("small"), 0),
        Event::Sync => {}
    }
}

impl Disk {
    fn record(&self, event: Event) {
        carry_out(&mut lock(&self.bytes), &event);
        lock(&self.events).push(event);
    }

    fn holding(bytes: Vec<u8>) -> Self {
        Self { bytes: Arc::new(Mutex::new(bytes)), events: Arc::default() }
    }
}

impl StorageBackend for Disk {
    fn len(&self) -> io::Result<u64> {
        Ok(lock(&self.bytes).len() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let bytes = lock(&self.bytes);
        let from = usize::try_from(offset).map_err(io::Error::other)?;
        let part = bytes.get(from..from + out.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
        out.copy_from_slice(part);
        Ok(())
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        self.record(Event::Length(length));
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        self.record(Event::Sync);
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.record(Event::Write(offset, data.to_vec()));
        Ok(())
    }
}

/// Numbers that are the same in every run.
struct Dice(u64);

impl Dice {
    fn below(&mut self, most: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % most
    }
}

/// What one group must hold.
#[derive(Clone, Debug, Default, PartialEq)]
struct Model {
    vote: u64,
    entries: BTreeMap<u64, Vec<u8>>,
    purged: u64,
}

const GROUPS: u16 = 3;
const OPERATIONS: usize = 300;
/// So small that frames lie over the ends of segments, and segments are used again.
const SEGMENT: u64 = 2048;

fn leader(term: u64) -> openraft::impls::leader_id_std::LeaderId<u64, u64> {
    openraft::impls::leader_id_std::LeaderId::new(term, 1)
}

fn log_id(index: u64) -> LogId {
    LogId::new(leader(1).to_committed(), index)
}

fn entry(index: u64, dice: &mut Dice) -> (Entry, Vec<u8>) {
    let length = usize::try_from(dice.below(600)).expect("small");
    let bytes: Vec<u8> =
        (0..length).map(|_| u8::try_from(dice.below(256)).expect("a byte")).collect();
    (Entry::new_normal(log_id(index), Proposal(bytes.clone().into())), bytes)
}

async fn append(log: &mut GroupLog, entries: Vec<Entry>) {
    let (sender, receiver) = TypeConfig::oneshot();
    log.append(entries, IOFlushed::<TypeConfig>::signal(sender)).await.expect("appends");
    receiver.await.expect("answers").expect("is durable");
}

async fn step(log: &mut GroupLog, model: &mut Model, dice: &mut Dice) {
    let last = model.entries.keys().next_back().copied().unwrap_or(model.purged);
    match dice.below(10) {
        0 => {
            model.vote += 1;
            log.save_vote(&Vote::new(model.vote, 1)).await.expect("votes");
        }
        1 if last > model.purged => {
            let keep = model.purged + dice.below(last - model.purged);
            model.entries.split_off(&(keep + 1));
            let after = (keep > 0).then(|| log_id(keep));
            log.truncate_after(after).await.expect("truncates");
        }
        2 if last > model.purged + 5 => {
            let upto = model.purged + 1 + dice.below(3);
            model.entries = model.entries.split_off(&(upto + 1));
            model.purged = upto;
            log.purge(log_id(upto)).await.expect("purges");
        }
        _ => {
            let many = 1 + dice.below(6);
            let (entries, bytes): (Vec<_>, Vec<_>) =
                (last + 1..=last + many).map(|index| entry(index, dice)).unzip();
            model.entries.extend((last + 1..).zip(bytes));
            append(log, entries).await;
        }
    }
}

/// What a cut after these events leaves of a disk; `kind` says how the unsynced part fares.
fn after_cut(
    mut bytes: Vec<u8>,
    events: &[Event],
    synced: usize,
    kind: u64,
    dice: &mut Dice,
) -> Vec<u8> {
    let upto = events.len();
    events[..synced].iter().for_each(|event| carry_out(&mut bytes, event));
    let mut loose: Vec<Event> = events[synced..upto].to_vec();
    match kind {
        0 => loose.clear(),
        1 => loose.retain(|_| dice.below(2) == 0),
        _ => {}
    }
    if let Some(Event::Write(_, data)) = loose.last_mut().filter(|_| kind == 2) {
        let torn = data.len() / 512 * 512 / 2;
        data.truncate(torn);
    }
    loose.iter().for_each(|event| carry_out(&mut bytes, event));
    bytes
}

async fn found(disk: Disk) -> io::Result<Vec<Model>> {
    let file = LogFile::start(wal::open(disk, SEGMENT)?)?;
    let mut all = vec![];
    for group in 0..GROUPS {
        let mut log = file.group(group)?;
        let state = log.get_log_state().await?;
        let entries = log.try_get_log_entries(0..u64::MAX).await?;
        let bytes = |entry: Entry| match &entry.payload {
            openraft::EntryPayload::Normal(proposal) => (entry.log_id.index, proposal.0.to_vec()),
            openraft::EntryPayload::Blank | openraft::EntryPayload::Membership(_) => {
                panic!("not what was written: {entry}")
            }
        };
        all.push(Model {
            vote: log.read_vote().await?.map_or(0, |vote| vote.leader_id.term),
            entries: entries.into_iter().map(bytes).collect(),
            purged: state.last_purged_log_id.map_or(0, |id| id.index),
        });
    }
    Ok(all)
}

/// Whether what was found is what was acknowledged, or one step further.
fn holds(found: &Model, acknowledged: &Model, next: &Model) -> bool {
    let votes = [acknowledged.vote, next.vote];
    // A purge is not waited for: entries may still be there, and its mark may be missing.
    let kept = |model: &Model| {
        let from = found.purged.max(model.purged) + 1;
        found.entries.range(from..).eq(model.entries.range(from..))
    };
    votes.contains(&found.vote) && found.purged <= next.purged && (kept(acknowledged) || kept(next))
}

/// What was done to the disk, and after how many events each state was acknowledged.
struct Trace {
    events: Vec<Event>,
    history: Vec<(usize, Vec<Model>)>,
}

async fn trace() -> Trace {
    let (disk, mut dice) = (Disk::default(), Dice(11));
    let file = LogFile::start(wal::open(disk.clone(), SEGMENT).expect("opens")).expect("starts");
    let mut logs: Vec<_> = (0..GROUPS).map(|group| file.group(group).expect("reads")).collect();
    let mut models = vec![Model::default(); usize::from(GROUPS)];
    let mut history = vec![(lock(&disk.events).len(), models.clone())];
    for _ in 0..OPERATIONS {
        let group = usize::try_from(dice.below(u64::from(GROUPS))).expect("small");
        step(&mut logs[group], &mut models[group], &mut dice).await;
        history.push((lock(&disk.events).len(), models.clone()));
    }
    let events = lock(&disk.events).clone();
    Trace { events, history }
}

impl Trace {
    /// Cuts at every event; gives how many there were and the losses they showed.
    async fn cut_everywhere(
        &self,
        is_sync: fn(&Event) -> bool,
        every: usize,
    ) -> (usize, Vec<String>) {
        let (mut cuts, mut losses, mut dice) = (0, vec![], Dice(5));
        for upto in (self.history[0].0..=self.events.len()).step_by(every) {
            let events = &self.events[..upto];
            let synced = events.iter().rposition(is_sync).unwrap_or(self.history[0].0);
            let bytes = after_cut(vec![], events, synced, upto as u64 % 3, &mut dice);
            cuts += 1;
            match found(Disk::holding(bytes)).await {
                Ok(found) => losses.extend(self.loss(upto, &found)),
                Err(error) => losses.push(format!("after event {upto}: {error}")),
            }
        }
        (cuts, losses)
    }

    fn loss(&self, upto: usize, found: &[Model]) -> Option<String> {
        let place = self.history.iter().rposition(|(at, _)| *at <= upto)?;
        let state = |ahead: usize| &self.history[(place + ahead).min(self.history.len() - 1)].1;
        (0..usize::from(GROUPS)).find_map(|group| {
            let known = &state(0)[group];
            let fits = (1..=2).any(|ahead| holds(&found[group], known, &state(ahead)[group]));
            (!fits).then(|| {
                format!("after event {upto}, group {group}: {:?} is not {known:?}", found[group])
            })
        })
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_acknowledged_is_lost_at_any_cut() {
    let (cuts, losses) =
        trace().await.cut_everywhere(|event| matches!(event, Event::Sync), 1).await;
    assert!(losses.is_empty(), "{} of {cuts} cuts lost something: {}", losses.len(), losses[0]);
    assert!(cuts > 500, "{cuts} cuts");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_lies_about_syncs_is_noticed() {
    let (cuts, losses) = trace().await.cut_everywhere(|_| false, 7).await;
    assert!(losses.len() > cuts / 4, "{} of {cuts} cuts: this test can't fail", losses.len());
}

/// Cuts in each life of a disk before the next one begins.
const LIVES: usize = 10;

/// One life: some steps, and a cut during the last of them. Gives what the disk has then, and what was known
/// before and would have been known after that step.
async fn life(before: Vec<u8>, models: &[Model], dice: &mut Dice) -> (Vec<u8>, Vec<Vec<Model>>) {
    let disk = Disk::holding(before.clone());
    let file = LogFile::start(wal::open(disk.clone(), SEGMENT).expect("opens")).expect("starts");
    let mut logs: Vec<_> = (0..GROUPS).map(|group| file.group(group).expect("reads")).collect();
    let mut known = vec![models.to_vec()];
    let mut acknowledged = lock(&disk.events).len();
    for _ in 0..5 + dice.below(40) {
        let mut models = known.last().expect("it begins with one").clone();
        let group = usize::try_from(dice.below(u64::from(GROUPS))).expect("small");
        acknowledged = lock(&disk.events).len();
        step(&mut logs[group], &mut models[group], dice).await;
        known = vec![known.pop().expect("it begins with one"), models];
    }
    let events = lock(&disk.events).clone();
    let last = (events.len() - acknowledged) as u64;
    let upto = acknowledged + usize::try_from(dice.below(last + 1)).expect("small");
    let synced = events[..upto].iter().rposition(|event| matches!(event, Event::Sync)).unwrap_or(0);
    let kind = dice.below(3);
    (after_cut(before, &events[..upto], synced, kind, dice), known)
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_acknowledged_is_lost_over_many_lives() {
    let mut longest = 0;
    for seed in 0..40 {
        let (mut bytes, mut dice) = (vec![], Dice(seed));
        let mut models = vec![Model::default(); usize::from(GROUPS)];
        for number in 0..LIVES {
            let (after, known) = life(bytes, &models, &mut dice).await;
            let found = found(Disk::holding(after.clone())).await;
            let found = found.unwrap_or_else(|error| panic!("seed {seed}, life {number}: {error}"));
            for group in 0..usize::from(GROUPS) {
                let (known, next) = (&known[0][group], &known[1][group]);
                let fits = holds(&found[group], known, next);
                assert!(fits, "seed {seed}, life {number}, group {group}: {:?}", found[group]);
            }
            longest = longest.max(after.len());
            (bytes, models) = (after, found);
        }
    }
    assert!(longest < 512 * 1024, "{longest} bytes: segments are not used again");
}
