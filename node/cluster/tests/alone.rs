//! A group of one reads what it has without asking anybody; after a restart it first has to have it again. One that
//! is no longer alone has to be elected again, too.

use std::{collections::BTreeMap, fs, io, path::Path, sync::Arc, time::Duration};

use cluster::{
    peer::{book::AddressBook, client::PeerClient},
    raft::{
        disk::{self, Scribe},
        group::{Group, Shared, Snapshots, Timeouts},
        log::{GroupLog, LogFile},
        state::StateFile,
        types::LogId,
        wal::Opened,
    },
};
use domain::{
    NodeId, Timestamp,
    directory::{Command, Directory},
    machine::{Claim, Entry},
};
use futures::{FutureExt as _, StreamExt as _, stream};
use openraft::{
    BasicNode, Membership, RaftLogReader as _,
    entry::RaftEntry as _,
    storage::{RaftLogStorage as _, RaftLogStorageExt as _},
};
use tempfile::TempDir;

/// Entries to apply again; they take longer than an election of one.
const ENTRIES: u64 = 4000;
const NODE: u64 = 1;

fn open_log(folder: &Path) -> Opened {
    disk::open_log(&folder.join(disk::LOG)).expect("opens")
}

/// A node that writes its tables when it has nothing else to do for an hour.
async fn open(folder: &Path, founds: Option<&str>) -> Group<Directory> {
    try_to_open(folder, founds).await.expect("opens")
}

async fn try_to_open(folder: &Path, founds: Option<&str>) -> io::Result<Group<Directory>> {
    let file = |name: &str| disk::open(&folder.join(name)).expect("opens");
    let late = Scribe::Task(Arc::new(|| Duration::from_secs(3600)));
    let nobody = Arc::new(|_| async { Err(io::ErrorKind::NotConnected.into()) }.boxed());
    let shared = Shared {
        node: NODE,
        log: LogFile::start(open_log(folder)).expect("starts"),
        state: StateFile::start_with(file("state.redb"), late).expect("starts"),
        peers: PeerClient::over(nobody, NODE, Arc::new(AddressBook::default())),
        incoming: folder.join("incoming"),
        timeouts: Timeouts::default(),
        deadline: Duration::from_secs(60),
        snapshots: Snapshots::default(),
        seed: 1,
    };
    Group::open(0, &shared, founds, Arc::new(|_| {}), Arc::new(|| None)).await
}

/// A new group, which leads itself.
async fn founded() -> (TempDir, Group<Directory>) {
    let folder = tempfile::tempdir().expect("a folder");
    let group = open(folder.path(), Some("127.0.0.1:1")).await;
    group.refresh().await.expect("it leads");
    (folder, group)
}

/// Ends a group; its log in a folder that has nothing else.
async fn log_alone(folder: &TempDir, group: &Group<Directory>) -> TempDir {
    group.shutdown().await;
    let alone = tempfile::tempdir().expect("a folder");
    fs::copy(folder.path().join(disk::LOG), alone.path().join(disk::LOG)).expect("copied");
    alone
}

/// The log of a group in this folder.
fn log_in(folder: &Path) -> GroupLog {
    LogFile::start(open_log(folder)).expect("starts").group(0).expect("reads")
}

/// That is written later than the entries themselves: a power cut may take it.
async fn forget_what_was_committed(folder: &Path) {
    let mut log = log_in(folder);
    let first = log.limited_get_log_entries(1, 2).await.expect("reads")[0].log_id();
    log.save_committed(Some(first)).await.expect("is told");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_read_after_a_restart_waits_until_all_that_was_acknowledged_is_there_again() {
    let (before, group) = founded().await;
    let lead = |term: u64| {
        let command = Command::Lead { node: NodeId(u128::from(term)) };
        let claim = Some(Claim { shard: 0, term });
        let entry = Entry { claim, ..Entry::new(Timestamp::default(), command) };
        let group = &group;
        async move { group.propose(entry, None).await.expect("it is agreed").result.map(drop) }
    };
    let written: Vec<_> = stream::iter(1..=ENTRIES).map(lead).buffered(64).collect().await;
    assert!(written.last().is_some_and(Result::is_ok), "{:?}", written.last());
    let after = log_alone(&before, &group).await;

    forget_what_was_committed(after.path()).await;
    let group = open(after.path(), None).await;
    while group.leading_term().is_none() {
        tokio::task::yield_now().await;
    }
    group.refresh().await.expect("it leads");
    let newest = group.replica().read().claims.get(&0).map(|claim| claim.term);
    assert_eq!(newest, Some(ENTRIES));
}

/// The last entry of a folder's log says that a second node votes, too; nobody will ever hear of that one.
async fn take_a_second_voter_in(folder: &Path) {
    let mut log = log_in(folder);
    let last = log.get_log_state().await.expect("reads").last_log_id.expect("it has entries");
    let nodes = BTreeMap::from([NODE, NODE + 1].map(|id| (id, BasicNode::new("127.0.0.1:1"))));
    let both = Membership::new(vec![nodes.keys().copied().collect()], nodes);
    let both = both.expect("they belong together");
    let next = LogId { index: last.index + 1, ..last };
    log.blocking_append([openraft::Entry::new_membership(next, both)]).await.expect("is written");
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_led_before_a_restart_does_not_lead_until_it_is_elected_again() {
    let (before, group) = founded().await;
    assert!(group.leading_term().is_some());
    let after = log_alone(&before, &group).await;
    take_a_second_voter_in(after.path()).await;
    let group = open(after.path(), None).await;
    let until = tokio::time::Instant::now() + Timeouts::default().silence();
    while tokio::time::Instant::now() < until {
        assert_eq!((group.leading_term(), group.present()), (None, None));
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tables_that_lack_what_the_log_has_no_more_are_refused() {
    let (before, group) = founded().await;
    let after = log_alone(&before, &group).await;
    {
        let mut log = log_in(after.path());
        let last = log.get_log_state().await.expect("reads").last_log_id.expect("it has entries");
        log.purge(last).await.expect("is cut");
    }
    let refused = try_to_open(after.path(), None).await.err().expect("it is refused");
    assert!(refused.to_string().contains("roost rejoin"), "it says what to do: {refused}");
}
