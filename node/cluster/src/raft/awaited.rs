//! Who on this node waits for the answers to its own proposals. Every replica computes the same answer, so
//! whoever proposes here needs none from the leader: the replica of this node gives it once it has applied the entry.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use domain::machine::{Answer, Origin};
use tokio::sync::oneshot;

/// Those who wait, by the names of their proposals.
pub struct Awaited<R> {
    /// Begins anywhere: what was proposed before a restart is applied again after it, and is not what anybody waits
    /// for then.
    next: AtomicU64,
    waiting: Mutex<HashMap<Origin, oneshot::Sender<Answer<R>>>>,
}

impl<R> Default for Awaited<R> {
    fn default() -> Self {
        Self { next: AtomicU64::new(rand::random()), waiting: Mutex::default() }
    }
}

impl<R> Awaited<R> {
    fn waiting(&self) -> MutexGuard<'_, HashMap<Origin, oneshot::Sender<Answer<R>>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A name for a proposal of this node, and the answer to it.
    pub fn ticket(self: &Arc<Self>, node: u64) -> Ticket<R> {
        let origin = Origin(node, self.next.fetch_add(1, Relaxed));
        let (sender, answer) = oneshot::channel();
        self.waiting().insert(origin, sender);
        Ticket { origin, answer, awaited: Arc::clone(self) }
    }

    /// Who waits for the answer to this proposal, if somebody here does.
    pub fn take(&self, origin: Origin) -> Option<oneshot::Sender<Answer<R>>> {
        self.waiting().remove(&origin)
    }
}

/// The right to an answer. Whoever drops it waits no more.
pub struct Ticket<R> {
    origin: Origin,
    answer: oneshot::Receiver<Answer<R>>,
    awaited: Arc<Awaited<R>>,
}

impl<R> Ticket<R> {
    /// What the proposal is called.
    pub fn origin(&self) -> Origin {
        self.origin
    }

    /// The answer, once the proposal is applied here; nothing may be asked of the ticket after it.
    pub async fn answer(&mut self) -> Answer<R> {
        match (&mut self.answer).await {
            Ok(answer) => answer,
            // The replica has ended, and the node with it.
            Err(_) => std::future::pending().await,
        }
    }

    /// The answer, if the proposal was applied here already.
    pub fn is_answered(&mut self) -> Option<Answer<R>> {
        self.answer.try_recv().ok()
    }
}

impl<R> Drop for Ticket<R> {
    fn drop(&mut self) {
        self.awaited.waiting().remove(&self.origin);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_answer_goes_to_whoever_waits_for_it_and_to_nobody_else() {
        let awaited = Arc::new(Awaited::default());
        let (mut one, mut other) = (awaited.ticket(1), awaited.ticket(1));
        assert_ne!(one.origin(), other.origin());
        let Origin(node, number) = one.origin();
        assert!(awaited.take(Origin(node + 1, number)).is_none(), "of another node");
        let waits = awaited.take(one.origin()).expect("it waits");
        assert!(waits.send(Answer { result: Ok(7), replayed: false }).is_ok());
        assert_eq!(one.answer().await.result, Ok(7));
        assert!(other.is_answered().is_none());
        assert!(awaited.take(one.origin()).is_none(), "once");
        let gone = other.origin();
        drop(other);
        assert!(awaited.take(gone).is_none());
    }
}
