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

/// Visits the rows beyond `from` until `visit` breaks. A row that moves between tables meanwhile may be
/// met in both.
pub(super) fn walk<K: Key, V: Row>(
    ledger: &dyn Ledger,
    shard: u16,
    table: impl Fn(&Shard) -> &Table<K, V>,
    from: Option<K>,
    order: Order,
    mut visit: impl FnMut(&K, Arc<V>) -> ControlFlow<()>,
) -> Result<(), TooLong> {
    let (began, mut cursor) = (Instant::now(), from);
    loop {
        let (before, mut seen, mut is_over) = (cursor.clone(), 0, false);
        {
            let state = ledger.shard(shard).read();
            table(&state).walk(before.as_ref(), order, |key, row| {
                cursor = Some(key.clone());
                seen += 1;
                is_over = visit(key, row).is_break();
                if is_over || seen >= ROWS_PER_LOCK {
                    ControlFlow::Break(())
                } else {
                    ControlFlow::Continue(())
                }
            });
        }
        if is_over || seen < ROWS_PER_LOCK {
            return Ok(());
        }
        if began.elapsed() >= LOOKS_FOR {
            return Err(TooLong);
        }
    }
}
