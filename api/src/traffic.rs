//! What is counted of requests, for whoever scrapes this node.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use http::StatusCode;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, histogram::Histogram},
};
use tokio::time::Instant;

/// Bounds of the histogram of answers: half a millisecond to two minutes.
const ANSWER_SECONDS: [f64; 10] = [0.0005, 0.001, 0.002, 0.005, 0.02, 0.1, 0.5, 2.0, 15.0, 120.0];

/// Statuses of one class.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Class {
    class: &'static str,
}

/// See the fields.
pub struct Traffic {
    /// Requests that are being served.
    pub open: AtomicUsize,
    /// Requests that were answered.
    pub answered: Family<Class, Counter>,
    /// How long the head of the answer took.
    pub seconds: Histogram,
}

impl Default for Traffic {
    fn default() -> Self {
        Self {
            open: AtomicUsize::new(0),
            answered: Family::default(),
            seconds: Histogram::new(ANSWER_SECONDS),
        }
    }
}

impl Traffic {
    /// One request more is being served, until this is dropped.
    pub(crate) fn one_more(&self) -> Counted<'_> {
        self.open.fetch_add(1, Relaxed);
        Counted(self)
    }

    /// A request was answered.
    pub(crate) fn answered(&self, status: StatusCode, began: Instant) {
        let class = match status.as_u16() {
            100..=199 => "1xx",
            200..=299 => "2xx",
            300..=399 => "3xx",
            400..=499 => "4xx",
            _ => "5xx",
        };
        self.answered.get_or_create(&Class { class }).inc();
        self.seconds.observe(began.elapsed().as_secs_f64());
    }
}

/// One request, for as long as it is served.
pub(crate) struct Counted<'t>(&'t Traffic);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Relaxed);
    }
}
