//! How nodes find each other, agree, and pass calls on: the peer port, Raft groups on redb, and the
//! ledger that actors see.
//!
//! One directory group and S shard groups live in every process. Their logs share one file and one
//! writer thread, so that one fsync serves whatever waits; their tables share a second file, written
//! later, because every row can be made again from the log. A cluster of one is the same code with
//! one voter.

pub mod answer;
pub mod batch;
pub mod entrance;
pub mod forward;
pub mod gate;
pub mod gossip;
pub mod ledger;
pub mod peer;
pub mod placement;
pub mod raft;

pub use ledger::{RaftLedger, Settings, Storage};
