//! Says what a start waits for when it takes long: a node that never becomes ready is otherwise a riddle.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::{task::AbortHandle, time::Instant};

/// How often a start that takes long says so.
const SAID_EVERY: Duration = Duration::from_secs(5);

/// A start under way; nothing more is said once it is dropped.
pub struct Starting {
    step: Arc<Mutex<&'static str>>,
    teller: AbortHandle,
}

impl Starting {
    /// It begins with this step.
    pub fn with(step: &'static str) -> Self {
        let step = Arc::new(Mutex::new(step));
        let (now, began) = (Arc::clone(&step), Instant::now());
        let teller = tokio::spawn(async move {
            loop {
                tokio::time::sleep(SAID_EVERY).await;
                let step = *now.lock().unwrap_or_else(PoisonError::into_inner);
                let seconds = began.elapsed().as_secs();
                tracing::warn!(seconds, "the node is not ready yet; now: {step}");
            }
        });
        Self { step, teller: teller.abort_handle() }
    }

    /// The next step, in the words of whoever waits for it.
    pub fn next(&self, step: &'static str) {
        *self.step.lock().unwrap_or_else(PoisonError::into_inner) = step;
    }
}

impl Drop for Starting {
    fn drop(&mut self) {
        self.teller.abort();
    }
}
