//! Histograms for openraft's own statistics, which this service does not read.
//!
//! The published crate of this name computes look-up tables for sixteen precisions at its first use
//! and keeps all of them: 26 MiB of resident memory per process, measured, of which openraft uses one
//! precision. This one has the interface that openraft was built against and counts in powers of two:
//! a kilobyte per histogram, and percentiles that are right to the next power of two.

use std::{fmt, marker::PhantomData};

/// One bucket per power of two, and one for zero.
const BUCKETS: usize = 65;

/// Counts values by their magnitude.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Histogram<T = ()> {
    counts: [u64; BUCKETS],
    slots: PhantomData<T>,
}

impl<T> Default for Histogram<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> Histogram<T> {
    /// Without any values.
    pub fn new() -> Self {
        Self { counts: [0; BUCKETS], slots: PhantomData }
    }

    /// Counts a value.
    pub fn record(&mut self, value: u64) {
        self.record_n(value, 1);
    }

    /// Counts a value so many times.
    pub fn record_n(&mut self, value: u64, times: u64) {
        self.counts[(u64::BITS - value.leading_zeros()) as usize] += times;
    }

    /// How many values were counted.
    pub fn total(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The least power of two that this share of the values, in thousandths, is not above; zero
    /// without values.
    fn quantile(&self, thousandths: u64) -> u64 {
        let wanted = self.total() * thousandths / 1000;
        let mut seen = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen > wanted || (seen == wanted && seen > 0) {
                return if bucket == 0 { 0 } else { 1 << (bucket - 1) };
            }
        }
        0
    }

    /// The usual percentiles.
    pub fn percentile_stats(&self) -> PercentileStats {
        PercentileStats {
            samples: self.total(),
            p0_1: self.quantile(1),
            p1: self.quantile(10),
            p5: self.quantile(50),
            p10: self.quantile(100),
            p50: self.quantile(500),
            p90: self.quantile(900),
            p99: self.quantile(990),
            p99_9: self.quantile(999),
        }
    }
}

/// Percentiles of a histogram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "named after the percentiles")]
pub struct PercentileStats {
    /// How many values were counted.
    pub samples: u64,
    pub p0_1: u64,
    pub p1: u64,
    pub p5: u64,
    pub p10: u64,
    pub p50: u64,
    pub p90: u64,
    pub p99: u64,
    pub p99_9: u64,
}

impl fmt::Display for PercentileStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { samples, p0_1, p1, p5, p10, p50, p90, p99, p99_9 } = self;
        write!(f, "{samples} samples, p0.1 {p0_1}, p1 {p1}, p5 {p5}, p10 {p10}, ")?;
        write!(f, "p50 {p50}, p90 {p90}, p99 {p99}, p99.9 {p99_9}")
    }
}

/// Histograms as bars, one under the other.
#[derive(Clone, Debug, Default)]
pub struct AsciiChart(Vec<(String, Histogram)>);

impl AsciiChart {
    /// Without any histograms.
    pub fn new() -> Self {
        Self::default()
    }

    /// With one more.
    #[must_use]
    pub fn add(mut self, name: &str, histogram: Histogram) -> Self {
        self.0.push((name.to_owned(), histogram));
        self
    }
}

/// The width of the longest bar.
const BAR: u64 = 40;

impl fmt::Display for AsciiChart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, histogram) in &self.0 {
            writeln!(f, "{name}")?;
            let most = histogram.counts.iter().copied().max().unwrap_or_default().max(1);
            for (bucket, count) in histogram.counts.iter().enumerate().filter(|(_, n)| **n > 0) {
                let bar = usize::try_from(count * BAR / most).unwrap_or_default();
                let least = if bucket == 0 { 0 } else { 1_u64 << (bucket - 1) };
                writeln!(f, "{least:>20} {} {count}", "#".repeat(bar.max(1)))?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_right_to_a_power_of_two() {
        let mut histogram = Histogram::<()>::new();
        assert_eq!(histogram.percentile_stats().p50, 0);
        (0..100).for_each(|_| histogram.record(5));
        (0..10).for_each(|_| histogram.record(1000));
        histogram.record(0);
        let stats = histogram.percentile_stats();
        assert_eq!((stats.samples, stats.p0_1, stats.p50, stats.p99), (111, 0, 4, 512));
    }
}
