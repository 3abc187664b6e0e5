//! Walks through tables of shards that may be long: a stretch under each lock, so that the log is applied
//! in between, and for a bounded time. What can't be looked through in that time is no shorter list but an
//! error: a page that lacks something must not look like the last one.

use std::{
    ops::ControlFlow,
    sync::Arc,
    time::{Duration, Instant},
};

use domain::{
    shard::Shard,
    table::{Key, Order, Row, Table},
};

use crate::ports::Ledger;

/// Rows read under one lock.
const ROWS_PER_LOCK: usize = 256;
/// How long the rows of one page may be looked for in one table.
const LOOKS_FOR: Duration = Duration::from_secs(3);

/// The time is over, and there are more rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TooLong;

/// What becomes of a row.
pub(super) enum Fit {
    /// It is in the page.
    Taken,
    /// It is not.
    PassedOver,
    /// Nor is any that comes after it.
    Past,
}

impl Fit {
    /// Taken or not.
    pub(super) fn if_taken(is_taken: bool) -> Self {
        if is_taken { Self::Taken } else { Self::PassedOver }
    }
}

/// The rows beyond `from` that fit, at most `limit`. A row that moves between tables meanwhile may be met
/// in both.
pub(super) fn page<K: Key, V: Row>(
    ledger: &dyn Ledger,
    shard: u16,
    table: impl Fn(&Shard) -> &Table<K, V>,
    (from, order): (Option<K>, Order),
    limit: usize,
    fit: impl Fn(&K, &V) -> Fit,
) -> Result<Vec<Arc<V>>, TooLong> {
    let (began, mut cursor, mut found) = (Instant::now(), from, vec![]);
    loop {
        let (before, mut seen, mut is_over) = (cursor.clone(), 0, false);
        {
            let state = ledger.shard(shard).read();
            table(&state).walk(before.as_ref(), order, |key, row| {
                cursor = Some(key.clone());
                seen += 1;
                match fit(key, &row) {
                    Fit::Taken => found.push(row),
                    Fit::PassedOver => {}
                    Fit::Past => is_over = true,
                }
                is_over |= found.len() >= limit;
                if is_over || seen >= ROWS_PER_LOCK {
                    ControlFlow::Break(())
                } else {
                    ControlFlow::Continue(())
                }
            });
        }
        if is_over || seen < ROWS_PER_LOCK {
            return Ok(found);
        }
        if began.elapsed() >= LOOKS_FOR {
            return Err(TooLong);
        }
    }
}
