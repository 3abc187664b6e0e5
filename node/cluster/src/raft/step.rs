//! Groups tick in step. Each group looks at its clock fifty times a second, at moments of its own; a node has many
//! groups, and would wake up for each of them. Here all of them wait for the same moments, so that a node wakes up
//! once for all and what they send leaves together.

use std::{future::Future, sync::OnceLock, time::Duration};

use openraft::rt::{AsyncRuntime, Instant as _, OptionalSend};
use openraft_rt_tokio::{TokioInstant, TokioRuntime};

/// Since when moments are counted, and how far they are apart.
static MOMENTS: OnceLock<(TokioInstant, Duration)> = OnceLock::new();

/// From now on groups of this process wait for moments that are this far apart. A wait is longer by as much at
/// most; whoever never calls this has exact waits.
pub fn keep(step: Duration) {
    if !step.is_zero() {
        MOMENTS.get_or_init(|| (TokioInstant::now(), step));
    }
}

/// The first moment that is not before this one.
fn moment(at: TokioInstant, (origin, step): (TokioInstant, Duration)) -> TokioInstant {
    if at <= origin {
        return at;
    }
    let (since, step) = ((at - origin).as_nanos(), step.as_nanos());
    let late = since % step;
    let wait = if late == 0 { 0 } else { step - late };
    at + Duration::from_nanos(u64::try_from(wait).unwrap_or(0))
}

/// Tokio, but for waits until a point in time, which end at the moments of [`keep`].
#[derive(Debug)]
pub struct InStep(TokioRuntime);

impl AsyncRuntime for InStep {
    type Instant = TokioInstant;
    type JoinError = <TokioRuntime as AsyncRuntime>::JoinError;
    type JoinHandle<T: OptionalSend + 'static> = <TokioRuntime as AsyncRuntime>::JoinHandle<T>;
    type Mpsc = <TokioRuntime as AsyncRuntime>::Mpsc;
    type Mutex<T: OptionalSend + 'static> = <TokioRuntime as AsyncRuntime>::Mutex<T>;
    type Oneshot = <TokioRuntime as AsyncRuntime>::Oneshot;
    type Sleep = <TokioRuntime as AsyncRuntime>::Sleep;
    type ThreadLocalRng = <TokioRuntime as AsyncRuntime>::ThreadLocalRng;
    type Timeout<R, T: Future<Output = R> + OptionalSend> =
        <TokioRuntime as AsyncRuntime>::Timeout<R, T>;
    type TimeoutError = <TokioRuntime as AsyncRuntime>::TimeoutError;
    type Watch = <TokioRuntime as AsyncRuntime>::Watch;

    fn spawn<T>(future: T) -> Self::JoinHandle<T::Output>
    where
        T: Future + OptionalSend + 'static,
        T::Output: OptionalSend + 'static,
    {
        TokioRuntime::spawn(future)
    }

    fn sleep(duration: Duration) -> Self::Sleep {
        TokioRuntime::sleep(duration)
    }

    fn sleep_until(deadline: Self::Instant) -> Self::Sleep {
        let moments = MOMENTS.get();
        TokioRuntime::sleep_until(moments.map_or(deadline, |known| moment(deadline, *known)))
    }

    fn timeout<R, F: Future<Output = R> + OptionalSend>(
        duration: Duration,
        future: F,
    ) -> Self::Timeout<R, F> {
        TokioRuntime::timeout(duration, future)
    }

    fn timeout_at<R, F: Future<Output = R> + OptionalSend>(
        deadline: Self::Instant,
        future: F,
    ) -> Self::Timeout<R, F> {
        TokioRuntime::timeout_at(deadline, future)
    }

    fn is_panic(join_error: &Self::JoinError) -> bool {
        TokioRuntime::is_panic(join_error)
    }

    fn thread_rng() -> Self::ThreadLocalRng {
        TokioRuntime::thread_rng()
    }

    fn new(threads: usize) -> Self {
        Self(TokioRuntime::new(threads))
    }

    fn block_on<F, T>(&mut self, future: F) -> T
    where
        F: Future<Output = T>,
    {
        self.0.block_on(future)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_end_at_the_next_moment() {
        let origin = TokioInstant::now();
        let at = |millis| origin + Duration::from_millis(millis);
        let moments = (origin, Duration::from_millis(20));
        assert_eq!(moment(at(20), moments), at(20));
        assert_eq!(moment(at(21), moments), at(40));
        assert_eq!(moment(at(39), moments), at(40));
        assert_eq!(moment(origin, moments), origin);
    }
}
