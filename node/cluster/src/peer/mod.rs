//! How nodes talk: HTTP/2 over mutual TLS on the peer port. A node without a certificate of the
//! cluster's authority can do one thing here: redeem a join token.
//!
//! Calls of different weight have connections of their own, so that a snapshot never stands in front
//! of a heartbeat. What is small and frequent shares one request that stays open.

pub mod book;
pub mod client;
pub mod exchange;
pub mod server;
pub mod tls;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, combinators::BoxBody};

/// The body of a peer's request or response.
pub type PeerBody = BoxBody<Bytes, std::io::Error>;

/// What kind of traffic a connection carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    /// Log entries.
    Log,
    /// Heartbeats, votes and reads: small and urgent.
    Beats,
    /// Snapshots, blobs and images.
    Bulk,
    /// Everything else.
    Calls,
}

/// A whole body.
pub fn whole(bytes: impl Into<Bytes>) -> PeerBody {
    Full::new(bytes.into()).map_err(|never| match never {}).boxed()
}

/// Where a Raft node number stands in the name of a node's certificate.
pub fn name_of(raft_id: u64) -> String {
    format!("n{raft_id:016x}.node.roost")
}

/// The name that every node's certificate has, for those who know no number yet.
pub const ANY_NODE: &str = "any.node.roost";
