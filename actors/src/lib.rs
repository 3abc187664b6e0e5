//! Who does the work.
//!
//! ```text
//! root ─┬─ agent  (one per agent with something to do, where its home shard is led)
//!       │    └─ build (a task)
//!       ├─ instance (one per running copy, on the node that runs it)
//!       └─ job    (one per unfinished job, where its home shard is led)
//! ```
//!
//! Actors look, then step: a message that wakes one carries no news. They keep no state that the
//! log does not keep, so a crash, a restart and a repair are the same path. What must not wait —
//! invocations, builds, streams — runs in tasks that report back. Synchronous calls do not pass
//! through a mailbox at all: they take a slot from [`route`] and go to the instance.

pub mod address;
pub mod agent;
pub mod ask;
pub mod attempt;
pub mod call;
pub mod connection;
#[cfg(feature = "fakes")]
pub mod fakes;
pub mod figures;
pub mod flight;
pub mod image;
pub mod instance;
pub mod invocation;
pub mod job;
pub mod key_rate;
pub mod limiter;
pub mod log_line;
pub mod members;
pub mod meter;
pub mod minute;
pub mod payload;
pub mod ports;
pub mod relay;
pub mod replica;
pub mod root;
pub mod route;
pub mod seal;
pub mod sending;
pub mod settings;
pub(crate) mod socket;
pub mod start;
pub mod vouching;
pub mod webhook;
pub mod wire;
pub mod world;
