//! A disk that fails or lies: a sync that fails ends the process before anything is acknowledged, and bytes
//! that are not what was written are never taken for entries.

use std::{
    io,
    os::unix::process::ExitStatusExt as _,
    panic::AssertUnwindSafe,
    path::Path,
    process::Command,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
};

use cluster::raft::{
    disk,
    log::{GroupLog, LogFile},
    types::{Entry, LogId, Proposal, TypeConfig},
    wal,
};
use openraft::{
    RaftLogReader as _,
    entry::RaftEntry as _,
    impls::leader_id_std::LeaderId,
    storage::{IOFlushed, RaftLogStorage as _},
    type_config::TypeConfigExt as _,
    vote::RaftLeaderId as _,
};
use redb::StorageBackend;

const GROUP: u16 = 3;
/// Bytes of a segment of the log.
const SEGMENT: u64 = 16 * 1024;

fn entry(index: u64) -> Entry {
    let leader: LeaderId<u64, u64> = LeaderId::new(1, 1);
    let text = format!("entry {index} ").repeat(30);
    Entry::new_normal(LogId::new(leader.to_committed(), index), Proposal(text.into()))
}

async fn append(log: &mut GroupLog, index: u64) {
    let (sender, receiver) = TypeConfig::oneshot();
    log.append([entry(index)], IOFlushed::<TypeConfig>::signal(sender)).await.expect("appends");
    receiver.await.expect("answers").expect("is durable");
}

/// A disk in memory whose syncs fail from a certain one on.
#[derive(Debug)]
struct Failing {
    bytes: Mutex<Vec<u8>>,
    left: Arc<AtomicUsize>,
}

impl StorageBackend for Failing {
    fn len(&self) -> io::Result<u64> {
        Ok(self.bytes.lock().expect("whole").len() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let from = usize::try_from(offset).expect("small");
        out.copy_from_slice(&self.bytes.lock().expect("whole")[from..from + out.len()]);
        Ok(())
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        self.bytes.lock().expect("whole").resize(usize::try_from(length).expect("small"), 0);
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        match self.left.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1)) {
            Ok(_) => Ok(()),
            // Only once: a second try would succeed, and must never be made.
            Err(_) => {
                self.left.store(usize::MAX, SeqCst);
                Err(io::Error::from_raw_os_error(5))
            }
        }
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let from = usize::try_from(offset).expect("small");
        self.bytes.lock().expect("whole")[from..from + data.len()].copy_from_slice(data);
        Ok(())
    }
}

/// Not a test of its own: what the next one starts.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "it ends its process; the next test runs it in one of its own"]
#[expect(clippy::print_stdout, reason = "its parent reads on")]
async fn a_log_on_a_disk_that_fails() {
    let left = Arc::new(AtomicUsize::new(usize::MAX));
    let disk = Failing { bytes: Mutex::default(), left: Arc::clone(&left) };
    let file = LogFile::start(wal::open(disk, SEGMENT).expect("opens")).expect("starts");
    let mut log = file.group(GROUP).expect("reads");
    for index in 1..100 {
        if index == 20 {
            left.store(0, SeqCst);
            println!("broken");
        }
        append(&mut log, index).await;
        println!("acknowledged {index}");
    }
}

#[test]
fn a_sync_that_fails_ends_the_process_before_anything_is_acknowledged() {
    let own = std::env::current_exe().expect("a test has a path");
    let child = Command::new(own)
        .args(["a_log_on_a_disk_that_fails", "--exact", "--ignored", "--nocapture"])
        .output()
        .expect("it runs");
    let said = String::from_utf8_lossy(&child.stdout).into_owned();
    assert_eq!(child.status.signal(), Some(6), "it aborts: {:?} {said}", child.status);
    assert!(said.contains("acknowledged 19"), "{said}");
    let after = said.split("broken").nth(1).expect("it broke");
    assert!(!after.contains("acknowledged"), "nothing is acknowledged afterwards: {after}");
}

async fn read(path: &Path) -> io::Result<Vec<Entry>> {
    let file = LogFile::start(disk::open_log(path)?)?;
    file.group(GROUP)?.try_get_log_entries(0..u64::MAX).await
}

#[tokio::test(flavor = "multi_thread")]
async fn flipped_bits_are_never_taken_for_entries() {
    const ENTRIES: u64 = 60;
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join(disk::LOG);
    {
        let file = LogFile::start(disk::open_log(&path).expect("opens")).expect("starts");
        let mut log = file.group(GROUP).expect("reads");
        for index in 1..=ENTRIES {
            append(&mut log, index).await;
        }
    }
    let written: Vec<Entry> = (1..=ENTRIES).map(entry).collect();
    // The writer lets go of the file when it has ended.
    let mut whole = read(&path).await;
    for _ in 0..200 {
        if whole.is_ok() {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        whole = read(&path).await;
    }
    assert_eq!(whole.expect("readable"), written);
    let bytes = std::fs::read(&path).expect("the file");
    let used: Vec<usize> = (0..bytes.len()).filter(|place| bytes[*place] != 0).collect();
    let (mut dice, mut noticed) = (7_u64, 0);
    for round in 0..400_usize {
        dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let place = used[usize::try_from(dice >> 33).expect("small") % used.len()];
        let other = folder.path().join(format!("{round}.wal"));
        let mut damaged = bytes.clone();
        damaged[place] ^= 1 << (dice % 8);
        std::fs::write(&other, &damaged).expect("written");
        // The library may panic over a page that makes no sense: that is no answer either.
        let answer = futures::FutureExt::catch_unwind(AssertUnwindSafe(read(&other))).await;
        match answer {
            Ok(Ok(found)) => assert!(found == written, "byte {place}: other entries were believed"),
            Ok(Err(_)) | Err(_) => noticed += 1,
        }
        let _ = std::fs::remove_file(&other);
    }
    assert!(noticed > 40, "{noticed} of 400 were noticed: the flips missed what matters");
}
