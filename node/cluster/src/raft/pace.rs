//! Reads and writes much without taking disk and processors from everybody else: whoever has to get
//! through a lot does it in short stretches, no faster than a rate, and rests after each.

use std::{
    thread,
    time::{Duration, Instant},
};

/// Bytes between two rests.
const STRETCH_BYTES: u64 = 1024 * 1024;
/// A rest is at least this part of the time that a stretch may take, however slow the disk is.
const REST_PART: u32 = 4;

/// How fast somebody goes.
pub(super) struct Pace {
    /// What was done so far.
    pub(super) bytes: u64,
    /// What was done of the present stretch, and since when.
    stretch: u64,
    began: Instant,
    /// Bytes a second.
    rate: u64,
}

impl Pace {
    /// So many bytes a second at most.
    pub(super) fn of(bytes_per_second: u64) -> Self {
        Self { bytes: 0, stretch: 0, began: Instant::now(), rate: bytes_per_second.max(1) }
    }

    /// So many bytes more were done; rests at the end of a stretch.
    pub(super) fn after(&mut self, bytes: usize) {
        self.bytes += bytes as u64;
        self.stretch += bytes as u64;
        if self.stretch >= STRETCH_BYTES {
            thread::sleep(self.rest(self.began.elapsed()));
            (self.stretch, self.began) = (0, Instant::now());
        }
    }

    /// How long to rest after a stretch that took so long.
    fn rest(&self, took: Duration) -> Duration {
        let due = Duration::from_micros(self.stretch.saturating_mul(1_000_000) / self.rate);
        due.saturating_sub(took).max(due / REST_PART)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_ahead_waits_and_who_is_behind_still_rests() {
        let millis = Duration::from_millis;
        let pace = Pace { stretch: 2_000_000, ..Pace::of(20_000_000) };
        for (took, rest) in [(0, 100), (60, 40), (90, 25), (1000, 25)] {
            assert_eq!(pace.rest(millis(took)), millis(rest), "after {took} ms");
        }
        let (mut pace, began) = (Pace::of(100_000_000), Instant::now());
        (0..40).for_each(|_| pace.after(100_000));
        assert_eq!(pace.bytes, 4_000_000);
        assert!(began.elapsed() >= millis(30), "three stretches of 11 ms each");
    }
}
