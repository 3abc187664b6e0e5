//! Whether a node may say whose a key is. Keys and tokens are looked up in the node's own copy of the
//! directory. So that a revocation acts within a second everywhere, the copy counts for a second from the
//! moment at which the leader was asked how far it has to be. What is merely heard from the leader is no
//! proof: it may have been under way since before the revocation, as when a node was stopped or cut off.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use tokio::time::Instant;

use crate::{root::lock, world::World};

/// How long a copy counts.
const GOOD_FOR: Duration = Duration::from_secs(1);
/// Between questions ahead, so that callers wait for none.
const ASKED_EVERY: Duration = Duration::from_millis(400);
/// How long the leader is asked for a caller who is served without an answer, too.
const ASKED_FOR: Duration = Duration::from_millis(500);
/// How long for one who is not: longer than an election takes.
const ASKED_PATIENTLY_FOR: Duration = Duration::from_secs(5);
/// How long it is remembered that there was no answer.
const UNANSWERED_FOR: Duration = Duration::from_secs(1);

/// What is remembered of questions.
#[derive(Default)]
pub struct Vouching {
    /// When the last question that was answered was asked.
    fresh_at: Mutex<Option<Instant>>,
    unanswered_at: Mutex<Option<Instant>>,
    /// Whether anybody wanted to know since the last question ahead.
    wanted: AtomicBool,
}

fn lately(at: &Mutex<Option<Instant>>, within: Duration) -> bool {
    lock(at).is_some_and(|at| at.elapsed() < within)
}

impl World {
    /// The same without asking anybody: what nearly every call gets by with.
    pub fn vouches_now(&self) -> bool {
        self.vouching.wanted.store(true, Relaxed);
        lately(&self.vouching.fresh_at, GOOD_FOR)
    }

    /// Whether this node's copy of the directory holds all that was revoked a second ago and before. Asks
    /// the leader if need be, for longer if nothing can be done without an answer.
    pub async fn vouches(&self, patiently: bool) -> bool {
        if self.vouches_now() {
            return true;
        }
        match patiently {
            true => self.freshen(ASKED_PATIENTLY_FOR).await,
            false => !lately(&self.vouching.unanswered_at, UNANSWERED_FOR) && self.looks_up().await,
        }
    }

    /// Brings this node's copy of the directory up to date; whether that was possible soon.
    pub async fn looks_up(&self) -> bool {
        self.freshen(ASKED_FOR).await
    }

    async fn freshen(&self, within: Duration) -> bool {
        let began = Instant::now();
        let asked = tokio::time::timeout(within, self.ports.ledger.refresh_directory()).await;
        let is_fresh = matches!(asked, Ok(Ok(())));
        let told = if is_fresh { &self.vouching.fresh_at } else { &self.vouching.unanswered_at };
        let mut told = lock(told);
        *told = (*told).max(Some(began));
        is_fresh
    }

    /// Asks ahead while there are callers, for as long as the node runs.
    pub async fn tend_vouching(self: Arc<Self>) {
        loop {
            tokio::time::sleep(ASKED_EVERY).await;
            if self.vouching.wanted.swap(false, Relaxed) {
                self.looks_up().await;
            }
        }
    }
}
