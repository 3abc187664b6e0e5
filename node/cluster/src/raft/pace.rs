//! Reads and writes much without taking disk and processors from everybody else: whoever has to get through a lot
//! goes at a rate, and sleeps where it is ahead of that.

use std::{
    thread,
    time::{Duration, Instant},
};

/// What is ahead by less than this goes on: sleeps cost something, too.
const WORTH_A_SLEEP: Duration = Duration::from_millis(10);

/// How fast somebody goes.
pub(super) struct Pace {
    /// What was done so far.
    pub(super) bytes: u64,
    began: Instant,
    /// Bytes a second; `None` where nobody else is to be spared.
    rate: Option<u64>,
}

impl Pace {
    /// So many bytes a second, counted from now on.
    pub(super) fn of(bytes_per_second: u64) -> Self {
        Self { bytes: 0, began: Instant::now(), rate: Some(bytes_per_second) }
    }

    /// As fast as it goes.
    pub(super) fn unbound() -> Self {
        Self { bytes: 0, began: Instant::now(), rate: None }
    }

    /// So many bytes more were done; sleeps if that was too fast.
    pub(super) fn after(&mut self, bytes: usize) {
        self.bytes += bytes as u64;
        let ahead = self.due().saturating_sub(self.began.elapsed());
        if ahead >= WORTH_A_SLEEP {
            thread::sleep(ahead);
        }
    }

    /// How long what was done so far takes at least.
    fn due(&self) -> Duration {
        let Some(rate) = self.rate else { return Duration::ZERO };
        Duration::from_millis(self.bytes.saturating_mul(1000) / rate.max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_ahead_waits() {
        let mut pace = Pace::of(1_000_000);
        (0..50).for_each(|_| pace.after(1000));
        assert!(pace.began.elapsed() >= Duration::from_millis(40), "50 kB at 1 MB a second");
        let mut pace = Pace::unbound();
        pace.after(usize::MAX / 2);
        assert_eq!(pace.due(), Duration::ZERO);
    }
}
