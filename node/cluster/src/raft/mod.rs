//! Everything that knows openraft. A new release of it touches this folder alone.

pub mod answer;
mod arrival;
pub mod awaited;
pub mod checked;
pub mod disk;
pub mod group;
pub mod log;
pub mod machine;
pub mod members;
pub mod network;
pub mod offline;
mod pace;
pub mod received;
pub mod scrub;
pub mod state;
pub mod step;
pub mod types;
pub mod wal;
pub mod write;

/// Ends the process: what this says has failed can't be trusted any more. A node dies as a whole,
/// because a group that lives on with a broken store keeps its followers quiet and applies nothing.
pub fn fatal(what: &str, error: &dyn std::fmt::Display) -> ! {
    tracing::error!(%error, "{what}: this node stops; start it again, it will recover from its log");
    std::process::abort()
}
