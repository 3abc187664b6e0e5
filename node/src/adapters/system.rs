//! The clock and the dice of this machine: the only place that asks for them.

use std::{
    cell::RefCell,
    sync::LazyLock,
    time::{SystemTime, UNIX_EPOCH},
};

use actors::{
    ports::{Clock, Entropy},
    settings::Machine,
};
use domain::Timestamp;

/// The wall clock.
pub struct SystemClock;

impl Clock for SystemClock {
    #[expect(clippy::disallowed_methods, reason = "this is the clock")]
    fn now(&self) -> Timestamp {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Timestamp::from_millis(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
    }
}

/// The kernel's random numbers.
pub struct SystemDice;

impl Entropy for SystemDice {
    fn dice(&self) -> u128 {
        u128::from_be_bytes(random_bytes())
    }

    fn id(&self) -> u128 {
        NAMES.with_borrow_mut(|names| {
            if names.is_empty() {
                let bytes = random_bytes::<{ NAMES_AT_ONCE * 16 }>();
                let (chunks, _) = bytes.as_chunks::<16>();
                names.extend(chunks.iter().map(|bytes| u128::from_be_bytes(*bytes)));
            }
            names.pop().unwrap_or_else(|| self.dice())
        })
    }
}

/// Names that are thrown at once: each call to the system's generator costs as much as many of them.
const NAMES_AT_ONCE: usize = 64;

thread_local! {
    static NAMES: RefCell<Vec<u128>> = const { RefCell::new(vec![]) };
}

/// Random bytes from the operating system.
pub fn random_bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    aws_lc_random(&mut bytes);
    bytes
}

fn aws_lc_random(bytes: &mut [u8]) {
    // Asking for the provider makes all its lists.
    static SOURCE: LazyLock<&dyn rustls::crypto::SecureRandom> =
        LazyLock::new(|| rustls::crypto::aws_lc_rs::default_provider().secure_random);
    SOURCE.fill(bytes).expect("the operating system gives random bytes");
}

/// What this process uses.
#[derive(Clone, Copy, Debug, Default)]
pub struct Process {
    /// Memory in bytes.
    pub resident_bytes: u64,
    /// CPU time so far, in milliseconds.
    pub cpu_ms: u64,
    /// Open files.
    pub open_files: u64,
}

/// What this process uses now.
pub fn process() -> Process {
    let words = |path: &str, place: usize| -> u64 {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        // The name of a program may have spaces in it; nothing behind its end has.
        let rest = text.rsplit(')').next().unwrap_or_default();
        rest.split_whitespace().nth(place).and_then(|word| word.parse().ok()).unwrap_or_default()
    };
    let ticks = words("/proc/self/stat", 11) + words("/proc/self/stat", 12);
    Process {
        resident_bytes: words("/proc/self/statm", 1) * rustix::param::page_size() as u64,
        cpu_ms: ticks * 1000 / rustix::param::clock_ticks_per_second().max(1),
        open_files: std::fs::read_dir("/proc/self/fd").map_or(0, |all| all.count() as u64),
    }
}

/// What this machine has.
pub fn machine() -> Machine {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    Machine {
        cores: std::thread::available_parallelism().map_or(1, |cores| cores.get() as u64),
        memory_mb: kib.unwrap_or_default() / 1024,
    }
}
