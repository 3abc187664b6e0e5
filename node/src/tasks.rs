//! What a node does in the background for as long as it runs. A node dies as a whole: one that goes on without its
//! gossip, its relay or its actors looks well and is not, and nobody takes over from it. So a panic there ends the
//! process, and whoever started it starts it again.

use std::panic::AssertUnwindSafe;

use cluster::raft::fatal;
use futures::FutureExt as _;
use tokio::task::JoinSet;

/// Carries out what the node can't be without: a panic in it ends the process.
pub async fn vital(what: &'static str, task: impl Future<Output = ()>) {
    if AssertUnwindSafe(task).catch_unwind().await.is_err() {
        fatal(what, &"a task that the node can't be without has panicked");
    }
}

/// Tasks that a node can't be without.
#[derive(Default)]
pub struct Tasks(JoinSet<()>);

impl Tasks {
    /// Begins one. It may end by itself, and it ends with the node.
    pub fn spawn(&mut self, what: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        self.0.spawn(vital(what, task));
    }

    /// Ends all.
    pub async fn shutdown(&mut self) {
        self.0.shutdown().await;
    }
}
