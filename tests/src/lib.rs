//! The kit: a real node in a process of its own, a customer who talks to it over HTTPS, and sources
//! of small agents.

mod certificate;
mod cluster;
mod customer;
pub mod engine;
pub mod load;
mod names;
mod network;
mod node;
pub mod oauth;
pub mod peers;
mod receiver;
pub mod schema;
pub mod source;

pub use cluster::{Cluster, Member};
pub use customer::{Answer, Customer, eventually, eventually_within};
pub use names::{Answers, NameServer};
pub use network::{NAME_SERVER, Network, Setup};
pub use node::Node;
pub use receiver::{Got, Receiver};

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};

/// Bytes as URLs and tokens have them.
pub fn base64url(bytes: &[u8]) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

/// SHA-256.
pub fn sha256(bytes: &[u8]) -> [u8; 32] {
    use sha2::{Digest as _, Sha256};
    Sha256::digest(bytes).into()
}

/// The same as text.
pub fn sha256_hex(bytes: &[u8]) -> String {
    sha256(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The program under test.
pub fn binary() -> std::path::PathBuf {
    node::binary()
}

/// Runs the program to its end.
pub fn roost(arguments: &[String]) -> std::process::Output {
    let mut command = std::process::Command::new(node::binary());
    command.args(arguments).stdin(std::process::Stdio::null()).output().expect("it runs")
}

/// A part of an address in plain.
pub fn percent_decoded(text: &str) -> String {
    let mut bytes = vec![];
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        let hex = |digit: Option<u8>| digit.and_then(|digit| char::from(digit).to_digit(16));
        bytes.push(match byte {
            b'+' => b' ',
            b'%' => {
                let (high, low) = (hex(rest.next()), hex(rest.next()));
                u8::try_from(high.unwrap_or(0) * 16 + low.unwrap_or(0)).expect("two digits")
            }
            byte => byte,
        });
    }
    String::from_utf8(bytes).expect("utf-8")
}

/// The bytes of such a text.
pub fn from_base64url(text: &str) -> Vec<u8> {
    URL_SAFE_NO_PAD.decode(text).expect("base64url")
}

/// A number that a longer or a shorter run sets in its environment.
pub fn number_of(name: &str, usually: u64) -> u64 {
    let set = std::env::var(name).ok();
    set.map_or(usually, |text| text.parse().unwrap_or_else(|_| panic!("{name}={text}: no number")))
}

/// Says loudly that a test needs a part which is not here; fails where the part is required.
///
/// `ROOST_REQUIRE` is a comma list of parts; CI names all of them.
#[expect(clippy::print_stderr, reason = "whoever runs the tests should see it")]
pub fn skipped(part: &str) {
    let required = std::env::var("ROOST_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|name| name == part), "{part} is required and not here");
    eprintln!("SKIPPED: {part}");
}
