//! The kit: a real node in a process of its own, a customer who talks to it over HTTPS, and sources
//! of small agents.

mod cluster;
mod customer;
pub mod engine;
pub mod load;
mod node;
pub mod peers;
pub mod source;

pub use cluster::{Cluster, Member};
pub use customer::{Answer, Customer, eventually};
pub use node::Node;

/// Says loudly that a test needs a part which is not here; fails where the part is required.
///
/// `ROOST_REQUIRE` is a comma list of parts; CI names all of them.
#[expect(clippy::print_stderr, reason = "whoever runs the tests should see it")]
pub fn skipped(part: &str) {
    let required = std::env::var("ROOST_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|name| name == part), "{part} is required and not here");
    eprintln!("SKIPPED: {part}");
}
