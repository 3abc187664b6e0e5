//! Closed loops of clients, and what they measured.

use std::{
    fs,
    io::Write as _,
    os::unix::fs::FileExt as _,
    path::Path,
    time::{Duration, Instant},
};

/// How long each load lasts.
const FOR: Duration = Duration::from_secs(4);

/// What came of a load.
pub struct Measured {
    /// Calls a second.
    pub rate: f64,
    /// In microseconds, sorted.
    pub times: Vec<u128>,
}

impl Measured {
    /// Of single times.
    pub fn of(mut times: Vec<u128>, took: Duration) -> Self {
        times.sort_unstable();
        #[expect(clippy::cast_precision_loss, reason = "a rate")]
        let rate = times.len() as f64 / took.as_secs_f64();
        Self { rate, times }
    }

    /// Several, as if they were one.
    pub fn together(all: Vec<Self>) -> Self {
        #[expect(clippy::cast_precision_loss, reason = "a duration")]
        let took = all.iter().map(|one| one.times.len() as f64 / one.rate).sum();
        let times = all.into_iter().flat_map(|one| one.times).collect();
        Self::of(times, Duration::from_secs_f64(took))
    }

    /// The time that this share of the calls, in percent, did not exceed.
    pub fn quantile(&self, percent: usize) -> u128 {
        self.times.get(self.times.len() * percent / 100).copied().unwrap_or_default()
    }

    /// For people.
    pub fn shown(&self) -> String {
        format!("{:.0}/s, p50 {} us, p99 {} us", self.rate, self.quantile(50), self.quantile(99))
    }
}

/// Clients who each do one call after the other; `call` is told which client calls.
pub async fn load<F: Future<Output = ()>>(clients: usize, call: impl Fn(usize) -> F) -> Measured {
    let began = Instant::now();
    let one = async |client| {
        let mut times = vec![];
        while began.elapsed() < FOR {
            let start = Instant::now();
            call(client).await;
            times.push(start.elapsed().as_micros());
        }
        times
    };
    let all = futures::future::join_all((0..clients).map(one)).await;
    Measured::of(all.into_iter().flatten().collect(), began.elapsed())
}

/// Memory of a process, in MiB.
pub fn resident_mib(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok()).unwrap_or(0)
        / 1024
}

/// What a process has used of processors, in milliseconds.
pub fn cpu_millis(pid: u32) -> u32 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The program's name may have spaces; fields are counted behind it (proc(5)).
    let fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace();
    let ticks: u32 = fields.skip(11).take(2).filter_map(|field| field.parse::<u32>().ok()).sum();
    ticks * 10
}

/// One write and one fdatasync after the other, on the disk that the node uses.
pub fn syncs_per_second(folder: &Path) -> f64 {
    let mut file = fs::File::create(folder.join("sync-yardstick")).expect("a file");
    file.write_all(&[0; 4096]).expect("written");
    let began = Instant::now();
    let mut count = 0_u32;
    while began.elapsed() < Duration::from_secs(2) {
        file.write_all_at(&[1; 256], 0).expect("written");
        file.sync_data().expect("synced");
        count += 1;
    }
    f64::from(count) / began.elapsed().as_secs_f64()
}
