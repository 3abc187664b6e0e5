//! Every time and limit that actors go by. Each is a setting of the node, which tests shorten.

use std::{num::NonZero, time::Duration};

use domain::{agent::plan::Timing, autopilot::Autopilot};

use crate::limiter::Rates;

/// Instances that come up at once on a core: a crowd of them would leave the node no time to answer its peers.
const STARTS_PER_CORE: usize = 2;

/// What a node's machine has.
#[derive(Clone, Copy, Debug, Default)]
pub struct Machine {
    /// Cores.
    pub cores: u64,
    /// MiB of memory; 0 where the machine does not tell.
    pub memory_mb: u64,
}

/// What the instances of a node may be promised together.
#[derive(Clone, Copy, Debug)]
pub struct Capacity {
    /// Cores; more than there are, since they are ceilings and not reservations.
    pub cores: u64,
    /// MiB of memory.
    pub memory_mb: u64,
}

/// See the fields.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Rollouts, drains and losses.
    pub timing: Timing,
    /// Between health checks of a ready instance.
    pub health_interval: Duration,
    /// How long a health check may take.
    pub health_timeout: Duration,
    /// Instances of this node that are on their way up at once; more wait for their turn.
    pub starts: usize,
    /// Failed checks in a row that make an instance sick.
    pub health_failures: u32,
    /// Between SIGTERM and SIGKILL.
    pub kill_after: Duration,
    /// What this machine has.
    pub machine: Machine,
    /// What instances may be promised together.
    pub capacity: Capacity,
    /// How long a build may take.
    pub build_timeout: Duration,
    /// Builds at once on this node.
    pub builds: usize,
    /// A synchronous call's time if it names none, and the most it may name.
    pub sync_timeout: (Duration, Duration),
    /// A stream's time.
    pub stream_timeout: (Duration, Duration),
    /// A job attempt's time.
    pub job_timeout: (Duration, Duration),
    /// How long a call waits for an instance while none is ready.
    pub ready_wait: Duration,
    /// Calls that wait per agent.
    pub queue: usize,
    /// Calls in flight on this node.
    pub in_flight: usize,
    /// How long a canceled job waits for its agent to let go.
    pub cancel_wait: Duration,
    /// How long an upload is kept that nothing is made from.
    pub unused_uploads_after: Duration,
    /// How long a blob may be here before something must name it.
    pub unnamed_blobs_after: Duration,
    /// Between sweeps of uploads and blobs.
    pub storage_sweep_every: Duration,
    /// Between sweeps of each shard.
    pub sweep_every: Duration,
    /// How long a node may be silent before its instances are replaced.
    pub replacement_grace: Duration,
    /// How long a node may be silent before its replicas are replaced, unless the operator says
    /// otherwise.
    pub dead_after: Duration,
    /// How many calls are allowed to whom.
    pub rates: Rates,
    /// Pauses before the retries of a webhook's delivery.
    pub retry_waits: Vec<Duration>,
    /// Where clients reach the service, without a slash at the end.
    pub public_url: String,
}

impl Settings {
    /// How the cluster looks after its replicas until its operator says so.
    pub fn autopilot(&self) -> Autopilot {
        let dead_after_ms = u64::try_from(self.dead_after.as_millis()).unwrap_or(u64::MAX);
        Autopilot { dead_after_ms, ..Autopilot::default() }
    }
}

impl Default for Settings {
    fn default() -> Self {
        let secs = Duration::from_secs;
        Self {
            timing: Timing {
                min_healthy: secs(10),
                healthy_deadline: secs(300),
                lost_after: secs(60),
                drain_timeout: secs(60),
                replace_timeout: secs(900),
            },
            health_interval: secs(10),
            health_timeout: secs(5),
            starts: STARTS_PER_CORE * std::thread::available_parallelism().map_or(1, NonZero::get),
            health_failures: 3,
            kill_after: secs(5),
            machine: Machine::default(),
            capacity: Capacity { cores: u64::MAX, memory_mb: u64::MAX },
            build_timeout: secs(30 * 60),
            builds: std::thread::available_parallelism().map_or(1, |cores| cores.get().min(4)),
            sync_timeout: (secs(300), secs(900)),
            stream_timeout: (secs(900), secs(900)),
            job_timeout: (secs(3600), secs(86_400)),
            ready_wait: secs(60),
            queue: 1000,
            in_flight: 20_000,
            cancel_wait: secs(10),
            unused_uploads_after: secs(24 * 3600),
            unnamed_blobs_after: secs(3600),
            storage_sweep_every: secs(600),
            sweep_every: secs(5),
            replacement_grace: secs(10),
            dead_after: secs(600),
            rates: Rates::default(),
            retry_waits: domain::webhook::delivery::RETRY_WAITS.to_vec(),
            public_url: String::new(),
        }
    }
}
