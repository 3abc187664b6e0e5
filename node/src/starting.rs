//! Says what a start waits for when it takes long: a node that never becomes ready is otherwise a riddle.

use std::{
    sync::mpsc::{RecvTimeoutError, Sender, channel},
    thread,
    time::{Duration, Instant},
};

/// How often a start that takes long says so.
const SAID_EVERY: Duration = Duration::from_secs(5);

/// A start under way, by its step; nothing more is said once it is dropped.
pub struct Starting(Sender<&'static str>);

impl Starting {
    /// It begins with this step.
    ///
    /// A thread of its own tells of it: what a start hangs on may hold every thread that tasks run on.
    pub fn with(step: &'static str) -> std::io::Result<Self> {
        let (sender, steps) = channel();
        let tell = move || {
            let (began, mut step, mut due) = (Instant::now(), step, Instant::now() + SAID_EVERY);
            loop {
                match steps.recv_timeout(due.saturating_duration_since(Instant::now())) {
                    Ok(next) => step = next,
                    Err(RecvTimeoutError::Timeout) => {
                        let seconds = began.elapsed().as_secs();
                        tracing::warn!(seconds, "the node is not ready yet; now: {step}");
                        due += SAID_EVERY;
                    }
                    Err(RecvTimeoutError::Disconnected) => return,
                }
            }
        };
        thread::Builder::new().name("starting".to_owned()).spawn(tell)?;
        Ok(Self(sender))
    }

    /// The next step, in the words of whoever waits for it.
    pub fn next(&self, step: &'static str) {
        // The thread listens for as long as this exists.
        let _ = self.0.send(step);
    }
}
