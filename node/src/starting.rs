//! Says what a start waits for when it takes long: a node that never becomes ready is otherwise a riddle.

use std::time::Duration;

use tokio::{
    sync::watch,
    time::{Instant, timeout},
};

/// How often a start that takes long says so.
const SAID_EVERY: Duration = Duration::from_secs(5);

/// A start under way, by its step; nothing more is said once it is dropped.
pub struct Starting(watch::Sender<&'static str>);

impl Starting {
    /// It begins with this step.
    pub fn with(step: &'static str) -> Self {
        let (sender, mut now) = watch::channel(step);
        let began = Instant::now();
        tokio::spawn(async move {
            // Only the end of the start ends the wait.
            while timeout(SAID_EVERY, now.wait_for(|_| false)).await.is_err() {
                let (step, seconds) = (*now.borrow(), began.elapsed().as_secs());
                tracing::warn!(seconds, "the node is not ready yet; now: {step}");
            }
        });
        Self(sender)
    }

    /// The next step, in the words of whoever waits for it.
    pub fn next(&self, step: &'static str) {
        self.0.send_replace(step);
    }
}
