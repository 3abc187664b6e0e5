//! The ledger that actors see, over the Raft groups of this node.

use std::{collections::BTreeMap, io, path::Path, sync::Arc, time::Duration};

use actors::ports::{Ledger, Observer, ProposeError, Replica};
use domain::{
    directory::{self, Directory},
    machine::{Answer, Claim, Entry},
    shard::{self, Shard},
};
use futures::{FutureExt as _, future::BoxFuture};
use tokio::sync::watch;

use crate::placement;
use crate::raft::{
    disk,
    group::{Group, Stores, Timeouts},
    log::LogFile,
    state::StateFile,
};

/// How long a fresh start waits for its own election.
const ELECTED_WITHIN: Duration = Duration::from_secs(30);
/// How often groups are looked after.
const TEND_EVERY: Duration = Duration::from_secs(1);

/// How a node's ledger is set up.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// This node's Raft id; new with every new data folder.
    pub node: u64,
    /// How many shards; fixed when the cluster is made.
    pub shards: u16,
    /// How long a change may take before its outcome is called unknown.
    pub write_deadline: Duration,
    /// Beats and elections.
    pub timeouts: Timeouts,
}

/// The directory group and all shard groups of this node.
pub struct RaftLedger {
    directory: Group<Directory>,
    shards: Vec<Group<Shard>>,
    stores: Stores,
    leading: watch::Sender<BTreeMap<u16, u64>>,
}

impl RaftLedger {
    /// Opens all groups below `folder` and waits until each has a leader.
    pub async fn open(
        folder: &Path,
        settings: Settings,
        observer: Arc<dyn Observer>,
    ) -> io::Result<Arc<Self>> {
        let stores = Stores {
            log: LogFile::start(disk::open(&folder.join("raft.redb"))?)?,
            state: StateFile::start(disk::open(&folder.join("state.redb"))?)?,
        };
        let Settings { node, shards, write_deadline, timeouts } = settings;
        let hears = Arc::clone(&observer);
        let listener = Arc::new(move |events: &[_]| hears.directory(events));
        let directory = Group::open(0, node, &stores, timeouts, write_deadline, listener).await?;
        let mut groups = Vec::with_capacity(usize::from(shards));
        for shard in 0..shards {
            let hears = Arc::clone(&observer);
            let listener = Arc::new(move |events: &[_]| hears.shard(shard, events));
            groups.push(
                Group::open(shard + 1, node, &stores, timeouts, write_deadline, listener).await?,
            );
        }
        let ledger = Self { directory, shards: groups, stores, leading: watch::Sender::default() };
        ledger.take_over().await?;
        Ok(Arc::new(ledger))
    }

    /// Waits for the elections, then tells the directory who leads: older terms are refused from
    /// then on.
    async fn take_over(&self) -> io::Result<()> {
        self.directory.leader_elected(ELECTED_WITHIN).await?;
        self.directory.refresh().await.map_err(io::Error::other)?;
        for (shard, group) in (0_u16..).zip(&self.shards) {
            let term = group.leader_elected(ELECTED_WITHIN).await?;
            group.refresh().await.map_err(io::Error::other)?;
            self.leading.send_modify(|leading| {
                leading.insert(shard, term);
            });
        }
        let leading = self.leading.borrow().clone();
        let takes = leading.into_iter().map(|(shard, term)| {
            let claim = Some(Claim { shard, term });
            let command = directory::Command::Take;
            async move {
                let entry = Entry { at: domain::Timestamp::default(), claim, key: None, command };
                self.directory.propose(&entry, None).await.map(drop)
            }
        });
        futures::future::try_join_all(takes).await.map_err(io::Error::other)?;
        Ok(())
    }

    /// Looks after the groups until dropped: snapshots when logs have grown, and the end of the
    /// process if a group has failed.
    pub async fn tend(self: Arc<Self>) {
        loop {
            tokio::time::sleep(TEND_EVERY).await;
            self.directory.tend().await;
            for group in &self.shards {
                group.tend().await;
            }
        }
    }

    /// Ends all groups and writes what is not written yet.
    pub async fn close(&self) {
        self.directory.shutdown().await;
        for group in &self.shards {
            group.shutdown().await;
        }
        let state = Arc::clone(&self.stores.state);
        let _ = tokio::task::spawn_blocking(move || state.stop()).await;
    }

    fn group(&self, shard: u16) -> &Group<Shard> {
        &self.shards[usize::from(shard)]
    }
}

impl Ledger for RaftLedger {
    fn directory(&self) -> &Replica<Directory> {
        self.directory.replica()
    }

    fn shard(&self, shard: u16) -> &Replica<Shard> {
        self.group(shard).replica()
    }

    fn shards(&self) -> u16 {
        u16::try_from(self.shards.len()).unwrap_or(u16::MAX)
    }

    fn home(&self, name: &[u8]) -> u16 {
        placement::shard_of(name, self.shards())
    }

    fn change_directory(
        &self,
        entry: Entry<directory::Command>,
    ) -> BoxFuture<'_, Result<Answer<directory::Reply>, ProposeError>> {
        async move { self.directory.propose(&entry, None).await }.boxed()
    }

    fn change_shard(
        &self,
        shard: u16,
        entry: Entry<shard::Command>,
    ) -> BoxFuture<'_, Result<Answer<shard::Reply>, ProposeError>> {
        let term = entry.claim.map(|claim| claim.term);
        async move { self.group(shard).propose(&entry, term).await }.boxed()
    }

    fn refresh_directory(&self) -> BoxFuture<'_, Result<(), ProposeError>> {
        self.directory.refresh().boxed()
    }

    fn refresh_shard(&self, shard: u16) -> BoxFuture<'_, Result<(), ProposeError>> {
        self.group(shard).refresh().boxed()
    }

    fn leading(&self) -> watch::Receiver<BTreeMap<u16, u64>> {
        self.leading.subscribe()
    }
}
