//! What goes to the same place goes together. The first two batches leave at once; whatever comes while they are on
//! their way waits until one is back, and leaves as one. So whoever asks alone waits for nobody, and the more there are
//! who ask, the less each of them costs.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use futures::{FutureExt as _, future::BoxFuture};
use tokio::sync::oneshot;

/// Batches on their way to one place.
const UNDERWAY_MAX: usize = 2;
/// What one batch takes: so many questions, and so many bytes unless a single question has more.
const QUESTIONS_MAX: usize = 256;
const BYTES_MAX: usize = 128 * 1024;

/// What a batch is made of.
pub trait Question: Send + 'static {
    /// How long it is.
    fn bytes(&self) -> usize;
}

/// Questions that wait to be asked, by the place that they are for.
pub struct Batches<Q, A>(Mutex<HashMap<u64, Line<Q, A>>>);

struct Line<Q, A> {
    underway: usize,
    waiting: VecDeque<(Q, oneshot::Sender<A>)>,
}

/// Questions, and who waits for the answers.
type Batch<Q, A> = (Vec<Q>, Vec<oneshot::Sender<A>>);

impl<Q, A> Default for Batches<Q, A> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<Q, A> Batches<Q, A> {
    fn lines(&self) -> MutexGuard<'_, HashMap<u64, Line<Q, A>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a place in line; whether somebody is to begin with carrying.
    fn join(&self, to: u64, question: Q, waits: oneshot::Sender<A>) -> bool {
        let mut lines = self.lines();
        let empty = || Line { underway: 0, waiting: VecDeque::new() };
        let line = lines.entry(to).or_insert_with(empty);
        line.waiting.push_back((question, waits));
        let begins = line.underway < UNDERWAY_MAX;
        line.underway += usize::from(begins);
        begins
    }
}

impl<Q: Question, A: Send + 'static> Batches<Q, A> {
    /// What `carry` brings back for this question, be it with this call or another one's; `None` if it failed.
    /// `carry` gives an answer to each question, in their order; `spawn` runs a task.
    ///
    /// Of those who have given up when a batch leaves, nothing is asked any more.
    pub async fn ask<F>(
        self: &Arc<Self>,
        to: u64,
        question: Q,
        spawn: impl FnOnce(BoxFuture<'static, ()>),
        carry: impl Fn(Vec<Q>) -> F + Send + 'static,
    ) -> Option<A>
    where
        F: Future<Output = Vec<A>> + Send + 'static,
    {
        let (waits, answer) = oneshot::channel();
        if self.join(to, question, waits) {
            let turn = Turn { batches: Arc::clone(self), to, is_over: false };
            spawn(turn.carry_all(carry).boxed());
        }
        answer.await.ok()
    }
}

/// The right to have one batch on its way.
struct Turn<Q, A> {
    batches: Arc<Batches<Q, A>>,
    to: u64,
    is_over: bool,
}

impl<Q: Question, A> Turn<Q, A> {
    async fn carry_all<F>(mut self, carry: impl Fn(Vec<Q>) -> F)
    where
        F: Future<Output = Vec<A>>,
    {
        while let Some((questions, waiting)) = self.next() {
            for (waits, answer) in waiting.into_iter().zip(carry(questions).await) {
                let _ = waits.send(answer);
            }
        }
    }

    /// The next batch. Where nothing waits the turn is over.
    fn next(&mut self) -> Option<Batch<Q, A>> {
        let mut lines = self.batches.lines();
        let line = lines.get_mut(&self.to)?;
        let (mut questions, mut waiting, mut bytes) = (vec![], vec![], 0);
        while let Some((question, waits)) = line.waiting.pop_front() {
            if waits.is_closed() {
                continue;
            }
            let is_full = questions.len() == QUESTIONS_MAX || bytes + question.bytes() > BYTES_MAX;
            if is_full && !questions.is_empty() {
                line.waiting.push_front((question, waits));
                break;
            }
            bytes += question.bytes();
            questions.push(question);
            waiting.push(waits);
        }
        if questions.is_empty() {
            self.is_over = true;
            line.underway -= 1;
            if line.underway == 0 {
                lines.remove(&self.to);
            }
            return None;
        }
        Some((questions, waiting))
    }
}

impl<Q, A> Drop for Turn<Q, A> {
    /// A turn that ends before its time leaves nobody waiting for it.
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        let mut lines = self.batches.lines();
        if let Some(line) = lines.get_mut(&self.to) {
            line.underway -= 1;
            line.waiting.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::{
        sync::{Semaphore, mpsc},
        task::JoinHandle,
        time::sleep,
    };

    use super::*;

    impl Question for usize {
        fn bytes(&self) -> usize {
            *self
        }
    }

    /// Carries that say what they took, and wait until they are let through.
    struct Held {
        batches: Arc<Batches<usize, usize>>,
        let_through: Arc<Semaphore>,
        sent: mpsc::UnboundedSender<Vec<usize>>,
        took: mpsc::UnboundedReceiver<Vec<usize>>,
    }

    impl Held {
        fn new() -> Self {
            let (sent, took) = mpsc::unbounded_channel();
            Self { batches: Arc::default(), let_through: Arc::new(Semaphore::new(0)), sent, took }
        }

        /// Is answered with twice the question.
        async fn asks(&self, to: u64, question: usize) -> JoinHandle<Option<usize>> {
            let (batches, sent) = (Arc::clone(&self.batches), self.sent.clone());
            let let_through = Arc::clone(&self.let_through);
            let carry = move |questions: Vec<usize>| {
                let _ = sent.send(questions.clone());
                let let_through = Arc::clone(&let_through);
                async move {
                    let_through.acquire().await.expect("open").forget();
                    assert!(!questions.contains(&13), "thirteen is not carried");
                    questions.into_iter().map(|question| 2 * question).collect()
                }
            };
            let spawn = |task| drop(tokio::spawn(task));
            let asks = tokio::spawn(async move { batches.ask(to, question, spawn, carry).await });
            sleep(Duration::from_millis(1)).await;
            asks
        }

        fn taken(&mut self) -> Vec<Vec<usize>> {
            std::iter::from_fn(|| self.took.try_recv().ok()).collect()
        }

        async fn let_through(&self, batches: usize) {
            self.let_through.add_permits(batches);
            sleep(Duration::from_millis(1)).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_comes_while_two_batches_are_underway_leaves_as_one() {
        let mut held = Held::new();
        let mut asked = vec![];
        for question in 1..=6 {
            asked.push(held.asks(0, question).await);
        }
        let elsewhere = held.asks(1, 7).await;
        assert_eq!(held.taken(), [vec![1], vec![2], vec![7]]);
        let gives_up = asked.remove(3);
        gives_up.abort();
        held.let_through(3).await;
        assert_eq!(held.taken(), [vec![3, 5, 6]]);
        held.let_through(1).await;
        let mut answers = vec![];
        for one in asked {
            answers.push(one.await.expect("no panic"));
        }
        assert_eq!(answers, [2, 4, 6, 10, 12].map(Some));
        assert_eq!(elsewhere.await.expect("no panic"), Some(14));
        assert!(held.batches.lines().is_empty(), "nothing is left");
    }

    #[tokio::test(start_paused = true)]
    async fn a_batch_has_its_limits() {
        let mut held = Held::new();
        let long = BYTES_MAX / 2;
        for question in [1, 2, 2 * BYTES_MAX, long, long, 3] {
            held.asks(0, question).await;
        }
        for _ in 0..QUESTIONS_MAX {
            held.asks(0, 0).await;
        }
        held.let_through(100).await;
        let sizes: Vec<usize> = held.taken().iter().map(Vec::len).collect();
        assert_eq!(sizes, [1, 1, 1, 2, QUESTIONS_MAX, 1]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_carry_that_fails_leaves_nobody_waiting() {
        let held = Held::new();
        let mut asked = vec![];
        for question in [13, 13, 1] {
            asked.push(held.asks(0, question).await);
        }
        held.let_through(2).await;
        for one in asked {
            assert_eq!(one.await.expect("the asker does not fail"), None);
        }
        let next = held.asks(0, 2).await;
        held.let_through(1).await;
        assert_eq!(next.await.expect("no panic"), Some(4));
    }
}
