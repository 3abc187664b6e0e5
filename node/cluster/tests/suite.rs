//! openraft's own suite for stores, on ours.

use std::sync::Arc;

use cluster::raft::{
    disk,
    log::{GroupLog, LogFile},
    machine::GroupMachine,
    state::StateFile,
    types::TypeConfig,
};
use domain::shard::Shard;
use openraft::{
    StorageError,
    testing::log::{StoreBuilder, Suite},
};
use tempfile::TempDir;

struct Fresh;

impl StoreBuilder<TypeConfig, GroupLog, GroupMachine<Shard>, TempDir> for Fresh {
    async fn build(
        &self,
    ) -> Result<(TempDir, GroupLog, GroupMachine<Shard>), StorageError<TypeConfig>> {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let open = |name: &str| disk::open(&folder.path().join(name)).expect("opens");
        let log = disk::open_log(&folder.path().join("raft.wal")).expect("opens");
        let log = LogFile::start(log).expect("starts").group(3).expect("reads");
        let state = StateFile::start(open("state.redb")).expect("starts");
        let machine = GroupMachine::open(3, &state, Arc::new(|_| {})).expect("opens");
        Ok((folder, log, machine))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_stores_pass_openrafts_suite() {
    Suite::test_all(Fresh).await.expect("every test of the suite passes");
}
