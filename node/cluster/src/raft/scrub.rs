//! Reads all that a node has on disk, once in a while and slowly: what nobody asks for would otherwise be
//! found damaged on the day that it is needed. A node that finds damage ends, as it does for any other fault
//! of its disk: its peers have the same rows, whole.

use std::{
    io,
    sync::{Arc, Weak},
    thread,
    time::{Duration, Instant},
};

use super::fatal;

/// How long after the start the first round begins at the earliest: a node that starts has enough to do.
const FIRST_AFTER: Duration = Duration::from_secs(600);
/// Within this time after that it begins, by chance: nodes that start together do not all read at once.
const SPREAD: Duration = Duration::from_secs(3600);
/// Between rounds.
const EVERY: Duration = Duration::from_secs(24 * 3600);
/// Between looks whether the node still runs.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Bytes that a round reads in a second.
pub(super) const BYTES_PER_SECOND: u64 = 25_000_000;

/// A file that can be read through.
pub trait Scrubbed: Send + Sync + 'static {
    /// What it is, for the log.
    fn name(&self) -> &'static str;
    /// Reads all of it; gives the bytes that were read.
    fn scrub(&self) -> io::Result<u64>;
}

/// Reads the files through for as long as they are used.
pub fn start(files: Vec<Arc<dyn Scrubbed>>) -> io::Result<()> {
    let files: Vec<Weak<dyn Scrubbed>> = files.iter().map(Arc::downgrade).collect();
    thread::Builder::new().name("scrub".to_owned()).spawn(move || {
        let mut due = Instant::now() + FIRST_AFTER + SPREAD.mul_f64(rand::random());
        while files.iter().all(|file| file.strong_count() > 0) {
            thread::sleep(LOOK_EVERY);
            if Instant::now() < due {
                continue;
            }
            for file in files.iter().filter_map(Weak::upgrade) {
                match file.scrub() {
                    Ok(bytes) => tracing::info!(bytes, "{} was read through", file.name()),
                    Err(error) => fatal(file.name(), &error),
                }
            }
            due = Instant::now() + EVERY;
        }
    })?;
    Ok(())
}
