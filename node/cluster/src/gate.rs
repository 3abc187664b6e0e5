//! One question for all who want to know the same. An answer counts for those who came before its question was
//! asked; whoever comes while a question is out waits for the next one, which the first of them asks.

use std::{
    collections::VecDeque,
    sync::{Mutex, MutexGuard, PoisonError},
};

use tokio::sync::oneshot;

/// Where those who ask the same come together.
pub struct Gate<A> {
    line: Mutex<Line<A>>,
}

struct Line<A> {
    /// Whether a question is out.
    is_asked: bool,
    waiting: VecDeque<oneshot::Sender<Turn<A>>>,
}

/// What somebody in line hears.
enum Turn<A> {
    /// The answer to a question that was asked after it came.
    Answer(A),
    /// It is to ask.
    Ask,
}

impl<A> Default for Gate<A> {
    fn default() -> Self {
        Self { line: Mutex::new(Line { is_asked: false, waiting: VecDeque::new() }) }
    }
}

impl<A: Clone> Gate<A> {
    /// The answer to a question that is asked after this call began, by whomever.
    ///
    /// Of all calls at once only some run their question; one that is given up lets the next one ask.
    pub async fn ask(&self, question: impl Future<Output = A>) -> A {
        let (sender, receiver) = oneshot::channel();
        let mut place = Place { gate: self, receiver };
        if self.is_first(sender) {
            return self.ask_for_all(question).await;
        }
        match (&mut place.receiver).await {
            Ok(Turn::Answer(answer)) => answer,
            // Nobody leaves the line without a word; if one did, asking is never wrong.
            Ok(Turn::Ask) | Err(_) => self.ask_for_all(question).await,
        }
    }

    fn is_first(&self, sender: oneshot::Sender<Turn<A>>) -> bool {
        let mut line = self.line();
        let is_first = !std::mem::replace(&mut line.is_asked, true);
        if !is_first {
            line.waiting.push_back(sender);
        }
        is_first
    }

    async fn ask_for_all(&self, question: impl Future<Output = A>) -> A {
        let _passes = PassesOn(self);
        let asking = std::mem::take(&mut self.line().waiting);
        let answer = question.await;
        for one in asking {
            let _ = one.send(Turn::Answer(answer.clone()));
        }
        answer
    }
}

impl<A> Gate<A> {
    fn line(&self) -> MutexGuard<'_, Line<A>> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next one in line asks; without one the next to come does.
    fn pass_on(&self) {
        let mut line = self.line();
        while let Some(next) = line.waiting.pop_front() {
            if next.send(Turn::Ask).is_ok() {
                return;
            }
        }
        line.is_asked = false;
    }
}

/// A place in line; whoever leaves it when it was just called lets the next one ask.
struct Place<'g, A> {
    gate: &'g Gate<A>,
    receiver: oneshot::Receiver<Turn<A>>,
}

impl<A> Drop for Place<'_, A> {
    fn drop(&mut self) {
        self.receiver.close();
        if matches!(self.receiver.try_recv(), Ok(Turn::Ask)) {
            self.gate.pass_on();
        }
    }
}

/// Whoever asked is done, however that came.
struct PassesOn<'g, A>(&'g Gate<A>);

impl<A> Drop for PassesOn<'_, A> {
    fn drop(&mut self) {
        self.0.pass_on();
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{
            Arc,
            atomic::{AtomicUsize, Ordering::SeqCst},
        },
        time::Duration,
    };

    use tokio::sync::Semaphore;

    use super::*;

    /// Questions that wait until they are let through, and say how many were asked before.
    #[derive(Default)]
    struct Asked {
        gate: Gate<usize>,
        count: AtomicUsize,
        let_through: Option<Semaphore>,
    }

    impl Asked {
        fn held() -> Arc<Self> {
            Arc::new(Self { let_through: Some(Semaphore::new(0)), ..Self::default() })
        }

        async fn ask(self: Arc<Self>) -> usize {
            let question = async {
                let number = self.count.fetch_add(1, SeqCst) + 1;
                if let Some(held) = &self.let_through {
                    held.acquire().await.expect("open").forget();
                }
                number
            };
            self.gate.ask(question).await
        }

        fn release(&self, questions: usize) {
            self.let_through.as_ref().expect("held").add_permits(questions);
        }
    }

    async fn settle() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn who_comes_while_a_question_is_out_shares_the_next_one() {
        let asked = Asked::held();
        let first = tokio::spawn(Arc::clone(&asked).ask());
        settle().await;
        let rest: Vec<_> = (0..10).map(|_| tokio::spawn(Arc::clone(&asked).ask())).collect();
        settle().await;
        assert_eq!(asked.count.load(SeqCst), 1);
        asked.release(1);
        assert_eq!(first.await.expect("no panic"), 1);
        asked.release(1);
        for one in rest {
            assert_eq!(one.await.expect("no panic"), 2, "not the answer from before it came");
        }
        assert_eq!(asked.count.load(SeqCst), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_gives_up_holds_nobody_up() {
        let asked = Asked::held();
        let first = tokio::spawn(Arc::clone(&asked).ask());
        settle().await;
        let second = tokio::spawn(Arc::clone(&asked).ask());
        settle().await;
        let third = tokio::spawn(Arc::clone(&asked).ask());
        settle().await;
        first.abort();
        settle().await;
        second.abort();
        settle().await;
        asked.release(3);
        assert_eq!(third.await.expect("no panic"), 3);
        assert_eq!(Arc::clone(&asked).ask().await, 4, "the gate is open again");
    }
}
