//! Settings: defaults < file < environment (`ROOST_SECTION__KEY`) < flags. An unknown key is an error,
//! and `roost config` prints every setting with its value and where the value came from.

use std::{collections::BTreeMap, fmt, path::Path, time::Duration};

use anyhow::{Context as _, bail};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
use toml::{Table, Value};

use actors::{
    limiter::Rates,
    settings::{Capacity, Machine},
};
use domain::{
    account::{IpRange, Tier},
    rate::Allowance,
};

use crate::adapters::system;

/// A length of time, written as `250ms`, `10s`, `5m` or `24h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span(pub Duration);

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let millis = self.0.as_millis();
        match () {
            () if !millis.is_multiple_of(1000) => write!(f, "{millis}ms"),
            () if millis.is_multiple_of(3_600_000) && millis > 0 => {
                write!(f, "{}h", millis / 3_600_000)
            }
            () if millis.is_multiple_of(60_000) && millis > 0 => write!(f, "{}m", millis / 60_000),
            () => write!(f, "{}s", millis / 1000),
        }
    }
}

impl std::str::FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is not a time such as 250ms, 10s, 5m or 24h");
        let digits = text.bytes().take_while(u8::is_ascii_digit).count();
        let number: u64 = text[..digits].parse().map_err(|_| wrong())?;
        let factor = match &text[digits..] {
            "ms" => 1,
            "s" => 1000,
            "m" => 60_000,
            "h" => 3_600_000,
            _ => return Err(wrong()),
        };
        Ok(Self(Duration::from_millis(number.checked_mul(factor).ok_or_else(wrong)?)))
    }
}

impl Serialize for Span {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

/// Share of the machine's memory that is promised to instances.
const MEMORY_PERCENT: u64 = 90;

const fn secs(seconds: u64) -> Span {
    Span(Duration::from_secs(seconds))
}

macro_rules! sections {
    ($($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $kind:ty = $default:expr,)* })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $kind,)*
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $default,)* }
            }
        }
    )*};
}

sections! {
    /// The front door.
    Http {
        /// Where clients reach this service; the node's own address if empty.
        public_url: String = String::new(),
        /// Where `serve` listens for clients.
        listen: String = "0.0.0.0:8443".to_owned(),
        /// Further names and addresses that the front door's certificate is for.
        names: Vec<String> = vec![],
        /// Origins of front ends that browsers may call from, such as https://app.example.
        cors_origins: Vec<String> = vec![],
        /// Addresses and CIDR ranges of proxies whose X-Forwarded-For is believed.
        trusted_proxies: Vec<String> = vec![],
    }
    /// Rates of calls; a tier sets an organization's other limits too.
    RateLimit {
        /// Whether they hold at all.
        enabled: bool = true,
        /// The tier of a new organization: starter, pro or enterprise.
        default_tier: String = "enterprise".to_owned(),
        /// Calls a minute and a day of each tier.
        tiers: Tiers = Tiers::default(),
        /// Calls a minute without credentials, per address.
        unauthenticated_per_minute: u64 = 30,
    }
    /// Calls of an organization, as `a minute/a day`; a number or `unlimited` for the day.
    Tiers {
        /// The smallest.
        starter: String = "60/10000".to_owned(),
        /// The middle.
        pro: String = "300/100000".to_owned(),
        /// The greatest.
        enterprise: String = "1000000/unlimited".to_owned(),
    }
    /// The replicated log.
    Cluster {
        /// How many shards; fixed when a data folder is made.
        shards: u16 = 8,
        /// How long a change may take before its outcome is called unknown.
        write_deadline: Span = secs(10),
        /// Where `serve` listens for other nodes, by TCP and UDP.
        peer_listen: String = "0.0.0.0:8444".to_owned(),
        /// Where other nodes reach this one, as host:port; found out if empty.
        advertise: String = String::new(),
        /// Words about this node, such as zone=a: replicas go to different zones first.
        labels: Vec<String> = vec![],
        /// Between a leader's heartbeats.
        heartbeat: Span = Span(Duration::from_millis(100)),
        /// Least silence of a leader before an election.
        election_min: Span = Span(Duration::from_millis(250)),
        /// Greatest silence of a leader before an election; also its lease.
        election_max: Span = Span(Duration::from_millis(400)),
        /// How long a node may be silent before its replicas are replaced.
        dead_after: Span = secs(600),
        /// How long a node may be silent before its instances are replaced.
        replacement_grace: Span = secs(10),
    }
    /// What runs agents.
    Runtime {
        /// First port that instances listen on.
        port_first: u16 = 20_000,
        /// Last port that instances listen on.
        port_last: u16 = 29_999,
        /// Isolation layers that every node must have; it does not start without them.
        minimum_isolation: Vec<String> = vec![],
        /// Between SIGTERM and SIGKILL.
        kill_after: Span = secs(5),
        /// Cores promised to instances for each core there is: `cpu` is a ceiling, not a reservation.
        cpu_overcommit: u64 = 16,
        /// What the default cloud runs agents with, `process` or `docker`; settled at the first start.
        default_provider: String = "process".to_owned(),
    }
    /// The Docker engine of this machine.
    Docker {
        /// Where it listens.
        socket: String = "/var/run/docker.sock".to_owned(),
        /// Mirrors, as `docker.io=mirror.internal:5000`: asked before the registry itself.
        registries: Vec<String> = vec![],
        /// Whether images that only this machine's engine has may be deployed.
        local_images: bool = false,
    }
    /// Rollouts.
    Deploy {
        /// How long a new instance must stay healthy beside a live version before it takes over.
        min_healthy: Span = secs(10),
        /// How long a first instance may take to answer.
        healthy_deadline: Span = secs(300),
        /// How long an agent may be without an instance before it has failed.
        lost_after: Span = secs(60),
        /// How long calls in flight may go on after a stop; at most 15 minutes.
        drain_timeout: Span = secs(60),
    }
    /// Health checks.
    Health {
        /// Between checks of a ready instance.
        interval: Span = secs(10),
        /// How long a check may take.
        timeout: Span = secs(5),
        /// Failed checks in a row that make an idle instance sick.
        failures: u32 = 3,
    }
    /// Builds.
    Build {
        /// How long a build may take.
        timeout: Span = secs(1800),
        /// Builds at once; 0 is the node's cores, at most 4.
        concurrent: usize = 0,
        /// A file of certificate authorities that installers trust; none if empty.
        ca_bundle: String = String::new(),
        /// What containers of sources without a Dockerfile are built on.
        base_images: BaseImages = BaseImages::default(),
    }
    /// Base images by language; `{version}` stands for the version that the agent asks for.
    BaseImages {
        /// Needs python3 and pip.
        python: String = "python:{version}-slim".to_owned(),
        /// Needs node and npm.
        node: String = "node:{version}-slim".to_owned(),
        /// For programs that the source brings.
        binary: String = "debian:stable-slim".to_owned(),
    }
    /// Invocations.
    Invoke {
        /// Time of a synchronous call that names none.
        sync_timeout: Span = secs(300),
        /// The most that a synchronous call may name.
        sync_timeout_max: Span = secs(900),
        /// Time of a stream.
        stream_timeout: Span = secs(900),
        /// Time of a job's attempt that names none.
        job_timeout: Span = secs(3600),
        /// The most that a job may name.
        job_timeout_max: Span = secs(86_400),
        /// How long a call waits while no instance is ready.
        ready_wait: Span = secs(60),
        /// Calls that wait per agent.
        queue: usize = 1000,
        /// Calls in flight on a node.
        in_flight: usize = 20_000,
        /// How long a canceled job waits for its agent to let go.
        cancel_wait: Span = secs(10),
    }
    /// Logs.
    Logs {
        /// MiB kept per agent.
        megabytes: u64 = 256,
        /// How long lines are kept.
        keep: Span = secs(7 * 86_400),
    }
    /// Uploads, and inputs and outputs of jobs that are too long for the log.
    Storage {
        /// How long an upload is kept that no agent is made from.
        unused_uploads_after: Span = secs(86_400),
        /// How long bytes may be here before something must name them.
        unnamed_after: Span = secs(3600),
        /// Between looks for what may go.
        sweep_every: Span = secs(600),
    }
    /// Webhooks.
    Webhooks {
        /// Pauses before the retries of a delivery, 1 to 5 of them.
        retry_delays: Vec<Span> =
            vec![secs(60), secs(300), secs(1800), secs(7200), secs(86_400)],
    }
    /// Calls to others.
    OutboundCalls {
        /// Addresses and CIDR ranges that may be called although they are private.
        allow_private: Vec<String> = vec![],
        /// A file of further certificate authorities that receivers may have theirs from; none if
        /// empty.
        ca_bundle: String = String::new(),
    }
    /// Git.
    Github {
        /// Where repositories are: `{base_url}/{owner}/{repository}`.
        base_url: String = "https://github.com".to_owned(),
    }
    /// Everything.
    Config {
        /// Where people log in; the node's own address if empty.
        auth_url: String = String::new(),
        /// The front door.
        http: Http = Http::default(),
        /// The replicated log.
        cluster: Cluster = Cluster::default(),
        /// Rates of calls.
        rate_limit: RateLimit = RateLimit::default(),
        /// What runs agents.
        runtime: Runtime = Runtime::default(),
        /// The Docker engine.
        docker: Docker = Docker::default(),
        /// Rollouts.
        deploy: Deploy = Deploy::default(),
        /// Health checks.
        health: Health = Health::default(),
        /// Builds.
        build: Build = Build::default(),
        /// Invocations.
        invoke: Invoke = Invoke::default(),
        /// Logs.
        logs: Logs = Logs::default(),
        /// Uploads and long payloads.
        storage: Storage = Storage::default(),
        /// Git.
        github: Github = Github::default(),
        /// Webhooks.
        webhooks: Webhooks = Webhooks::default(),
        /// Calls to others.
        outbound: OutboundCalls = OutboundCalls::default(),
    }
}

/// Settings and where each value came from.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The values.
    pub config: Config,
    /// `section.key` → `default`, a file's name or a variable's name.
    pub origins: BTreeMap<String, String>,
}

impl Settings {
    /// From a file, if given, and these environment variables.
    pub fn load(
        file: Option<&Path>,
        variables: impl IntoIterator<Item = (String, String)>,
    ) -> anyhow::Result<Self> {
        let mut table = Table::try_from(Config::default()).context("the defaults")?;
        let mut origins: BTreeMap<String, String> =
            leaves(&table).into_iter().map(|(key, _)| (key, "default".to_owned())).collect();
        if let Some(file) = file {
            let shown = file.display().to_string();
            let text = std::fs::read_to_string(file)
                .with_context(|| format!("the settings file {shown}"))?;
            let given: Table =
                text.parse().with_context(|| format!("the settings file {shown}"))?;
            overlay(&mut table, &mut origins, leaves(&given), &shown)?;
        }
        for (name, value) in variables {
            let Some(key) = variable_key(&name) else { continue };
            overlay(&mut table, &mut origins, vec![(key, environment_value(&value))], &name)?;
        }
        let config: Config = table.try_into().context("a setting has a wrong value")?;
        check(&config)?;
        Ok(Self { config, origins })
    }

    /// Every setting with its value and origin, one a line.
    pub fn listing(&self) -> String {
        let table = Table::try_from(&self.config).unwrap_or_default();
        let origin = |key: &str| self.origins.get(key).map_or("default", String::as_str);
        let lines = leaves(&table).into_iter();
        lines.map(|(key, value)| format!("{key} = {value}  # {}\n", origin(&key))).collect()
    }
}

/// `ROOST_DEPLOY__MIN_HEALTHY` → `deploy.min_healthy`.
fn variable_key(name: &str) -> Option<String> {
    if name == "ROOST_AUTH_URL" {
        return Some("auth_url".to_owned());
    }
    let rest = name.strip_prefix("ROOST_")?;
    rest.contains("__").then(|| rest.replace("__", ".").to_ascii_lowercase())
}

/// A number, a truth, a list or else a text.
fn environment_value(text: &str) -> Value {
    let parsed = format!("value = {text}").parse::<Table>().ok();
    let parsed = parsed.and_then(|mut table| table.remove("value"));
    match parsed {
        Some(
            value @ (Value::Integer(_) | Value::Float(_) | Value::Boolean(_) | Value::Array(_)),
        ) => value,
        _ => Value::String(text.to_owned()),
    }
}

fn leaves(table: &Table) -> Vec<(String, Value)> {
    let mut found = vec![];
    for (name, value) in table {
        match value.as_table() {
            Some(inner) => {
                let inner = leaves(inner).into_iter();
                found.extend(inner.map(|(key, value)| (format!("{name}.{key}"), value)));
            }
            None => found.push((name.clone(), value.clone())),
        }
    }
    found
}

fn overlay(
    table: &mut Table,
    origins: &mut BTreeMap<String, String>,
    given: Vec<(String, Value)>,
    origin: &str,
) -> anyhow::Result<()> {
    for (key, value) in given {
        if !origins.contains_key(&key) {
            bail!("{origin}: there is no setting `{key}`; `roost config` lists all of them");
        }
        let mut names = key.split('.');
        let last = names.next_back().unwrap_or_default();
        let inner = names.try_fold(&mut *table, |table, name| table.get_mut(name)?.as_table_mut());
        if let Some(section) = inner {
            section.insert(last.to_owned(), value);
        }
        origins.insert(key, origin.to_owned());
    }
    Ok(())
}

fn check(config: &Config) -> anyhow::Result<()> {
    if !(1..=256).contains(&config.cluster.shards) {
        bail!("cluster.shards must be 1 to 256");
    }
    let cluster = &config.cluster;
    if let Some(wrong) = cluster.labels.iter().find(|label| !label.contains('=')) {
        bail!("cluster.labels: `{wrong}` is not like zone=a");
    }
    // A beat comes with the first look at the clock after its time, and looks are a fifth of a beat apart.
    if cluster.heartbeat.0 * 5 > cluster.election_min.0 * 2
        || cluster.election_min.0 >= cluster.election_max.0
    {
        bail!("cluster: heartbeat x 2.5 <= election_min < election_max must hold");
    }
    if config.runtime.port_first < 1024 || config.runtime.port_first > config.runtime.port_last {
        bail!("runtime.port_first must be at least 1024 and not above runtime.port_last");
    }
    if config.deploy.drain_timeout.0 > Duration::from_secs(900) {
        bail!("deploy.drain_timeout must be at most 15m");
    }
    if !["process", "docker"].contains(&config.runtime.default_provider.as_str()) {
        bail!("runtime.default_provider must be process or docker");
    }
    if let Some(wrong) = config.docker.registries.iter().find(|one| !one.contains('=')) {
        bail!("docker.registries: `{wrong}` is not like docker.io=mirror.internal:5000");
    }
    if let Some(unknown) = config
        .runtime
        .minimum_isolation
        .iter()
        .find(|layer| !crate::adapters::isolation::LAYERS.contains(&layer.as_str()))
    {
        bail!("runtime.minimum_isolation: there is no layer `{unknown}`");
    }
    config.rates()?;
    config.default_tier()?;
    ranges("http.trusted_proxies", &config.http.trusted_proxies)?;
    config.outbound_allowed()?;
    if !(1..=5).contains(&config.webhooks.retry_delays.len()) {
        bail!("webhooks.retry_delays must have 1 to 5 times");
    }
    if !config.auth_url.is_empty() && !config.auth_url.starts_with("https://") {
        bail!("auth_url: `{}` is not like https://login.example", config.auth_url);
    }
    Ok(())
}

fn ranges(name: &str, texts: &[String]) -> anyhow::Result<Vec<IpRange>> {
    let range = |text: &String| text.parse().with_context(|| format!("{name}: `{text}`"));
    texts.iter().map(range).collect()
}

/// `60/10000` or `1000/unlimited`.
fn allowance(tier: &str, text: &str) -> anyhow::Result<Allowance> {
    let wrong =
        || format!("rate_limit.tiers.{tier}: `{text}` is not like 60/10000 or 1000/unlimited");
    let (minute, day) = text.split_once('/').with_context(wrong)?;
    let per_day = match day {
        "unlimited" => None,
        day => Some(day.parse().with_context(wrong)?),
    };
    Ok(Allowance { per_minute: minute.parse().with_context(wrong)?, per_day })
}

impl Config {
    /// Rates of calls.
    fn rates(&self) -> anyhow::Result<Rates> {
        let limits = &self.rate_limit;
        let tiers = [
            (Tier::Starter, &limits.tiers.starter),
            (Tier::Pro, &limits.tiers.pro),
            (Tier::Enterprise, &limits.tiers.enterprise),
        ];
        let tiers = tiers.map(|(tier, text)| Ok((tier, allowance(tier.as_str(), text)?)));
        Ok(Rates {
            enabled: limits.enabled,
            tiers: tiers.into_iter().collect::<anyhow::Result<_>>()?,
            unauthenticated_per_minute: limits.unauthenticated_per_minute,
        })
    }

    /// The tier of a new organization.
    pub fn default_tier(&self) -> anyhow::Result<Tier> {
        let wanted = &self.rate_limit.default_tier;
        let known = [Tier::Starter, Tier::Pro, Tier::Enterprise];
        let tier = known.into_iter().find(|tier| tier.as_str() == wanted);
        tier.with_context(|| {
            format!("rate_limit.default_tier: `{wanted}` is not starter, pro or enterprise")
        })
    }

    /// Private addresses that may be called.
    pub fn outbound_allowed(&self) -> anyhow::Result<Vec<IpRange>> {
        ranges("outbound.allow_private", &self.outbound.allow_private)
    }

    /// Further authorities of receivers.
    pub fn outbound_bundle(&self) -> Option<std::path::PathBuf> {
        Some(self.outbound.ca_bundle.as_str()).filter(|path| !path.is_empty()).map(Into::into)
    }

    /// Proxies whose words are believed.
    pub fn trusted_proxies(&self) -> Vec<IpRange> {
        ranges("http.trusted_proxies", &self.http.trusted_proxies).unwrap_or_default()
    }

    /// What containers are made and run with.
    pub fn docker(&self) -> crate::adapters::docker::Settings {
        let pair = |text: &String| text.split_once('=').map(|(a, b)| (a.to_owned(), b.to_owned()));
        let base = &self.build.base_images;
        crate::adapters::docker::Settings {
            socket: self.docker.socket.trim_start_matches("unix://").into(),
            registries: self.docker.registries.iter().filter_map(pair).collect(),
            local_images: self.docker.local_images,
            base_images: vec![
                ("python", base.python.clone()),
                ("node", base.node.clone()),
                ("binary", base.binary.clone()),
            ],
            ca_bundle: self.ca_bundle(),
        }
    }

    /// Beats and elections.
    pub fn timeouts(&self) -> cluster::raft::group::Timeouts {
        let millis = |span: Span| u64::try_from(span.0.as_millis()).unwrap_or(u64::MAX);
        cluster::raft::group::Timeouts {
            heartbeat: millis(self.cluster.heartbeat),
            election_min: millis(self.cluster.election_min),
            election_max: millis(self.cluster.election_max),
        }
    }

    /// The node's labels.
    pub fn labels(&self) -> BTreeMap<String, String> {
        let pair =
            |label: &String| label.split_once('=').map(|(k, v)| (k.to_owned(), v.to_owned()));
        self.cluster.labels.iter().filter_map(pair).collect()
    }

    /// Authorities that installers trust.
    pub fn ca_bundle(&self) -> Option<std::path::PathBuf> {
        Some(self.build.ca_bundle.as_str()).filter(|path| !path.is_empty()).map(Into::into)
    }

    /// What instances are promised of a machine; one that does not tell its memory sets no limit.
    fn capacity(&self, machine: Machine) -> Capacity {
        Capacity {
            cores: machine.cores * self.runtime.cpu_overcommit,
            memory_mb: match machine.memory_mb {
                0 => u64::MAX,
                there => there * MEMORY_PERCENT / 100,
            },
        }
    }

    /// The times and limits that actors go by.
    pub fn actors(&self) -> actors::settings::Settings {
        let defaults = actors::settings::Settings::default();
        let machine = system::machine();
        let (deploy, health, invoke) = (&self.deploy, &self.health, &self.invoke);
        actors::settings::Settings {
            timing: domain::agent::plan::Timing {
                min_healthy: deploy.min_healthy.0,
                healthy_deadline: deploy.healthy_deadline.0,
                lost_after: deploy.lost_after.0,
                drain_timeout: deploy.drain_timeout.0,
                replace_timeout: invoke.sync_timeout_max.0.max(invoke.stream_timeout.0),
            },
            health_interval: health.interval.0,
            health_timeout: health.timeout.0,
            starts: defaults.starts,
            health_failures: health.failures,
            kill_after: self.runtime.kill_after.0,
            machine,
            capacity: self.capacity(machine),
            build_timeout: self.build.timeout.0,
            builds: match self.build.concurrent {
                0 => defaults.builds,
                builds => builds,
            },
            sync_timeout: (invoke.sync_timeout.0, invoke.sync_timeout_max.0),
            stream_timeout: (invoke.stream_timeout.0, invoke.stream_timeout.0),
            job_timeout: (invoke.job_timeout.0, invoke.job_timeout_max.0),
            ready_wait: invoke.ready_wait.0,
            queue: invoke.queue,
            in_flight: invoke.in_flight,
            cancel_wait: invoke.cancel_wait.0,
            unused_uploads_after: self.storage.unused_uploads_after.0,
            unnamed_blobs_after: self.storage.unnamed_after.0,
            storage_sweep_every: self.storage.sweep_every.0,
            sweep_every: defaults.sweep_every,
            replacement_grace: self.cluster.replacement_grace.0,
            dead_after: self.cluster.dead_after.0,
            rates: self.rates().unwrap_or_default(),
            retry_waits: self.webhooks.retry_delays.iter().map(|span| span.0).collect(),
            public_url: String::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(variables: &[(&str, &str)]) -> anyhow::Result<Settings> {
        let variables = variables.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
        Settings::load(None, variables)
    }

    #[test]
    fn the_environment_wins_over_defaults_and_says_so() {
        let settings = load(&[
            ("ROOST_DEPLOY__MIN_HEALTHY", "250ms"),
            ("ROOST_CLUSTER__SHARDS", "2"),
            ("ROOST_BUILD__BASE_IMAGES__PYTHON", "py:1"),
            ("HOME", "/"),
        ]);
        let settings = settings.expect("loads");
        assert_eq!(settings.config.deploy.min_healthy.0, Duration::from_millis(250));
        assert_eq!(settings.config.cluster.shards, 2);
        assert_eq!(settings.config.build.base_images.python, "py:1");
        assert_eq!(settings.origins["deploy.min_healthy"], "ROOST_DEPLOY__MIN_HEALTHY");
        assert!(settings.listing().contains("health.interval = \"10s\"  # default"));
    }

    #[test]
    fn wrong_settings_are_refused_with_their_name() {
        for (name, value, told) in [
            ("ROOST_DEPLOY__MIN_HELTHY", "1s", "deploy.min_helthy"),
            ("ROOST_DEPLOY__MIN_HEALTHY", "soon", "soon"),
            ("ROOST_CLUSTER__SHARDS", "0", "cluster.shards"),
            ("ROOST_BUILD__BASE_IMAGES__RUBY", "ruby", "build.base_images.ruby"),
            ("ROOST_RUNTIME__DEFAULT_PROVIDER", "wasm", "runtime.default_provider"),
            ("ROOST_DOCKER__REGISTRIES", "[\"docker.io\"]", "docker.registries"),
            ("ROOST_RUNTIME__MINIMUM_ISOLATION", "[\"moat\"]", "moat"),
            ("ROOST_RATE_LIMIT__TIERS__PRO", "many/10", "rate_limit.tiers.pro"),
            ("ROOST_RATE_LIMIT__DEFAULT_TIER", "gold", "gold"),
            ("ROOST_HTTP__TRUSTED_PROXIES", "[\"proxy\"]", "http.trusted_proxies"),
            ("ROOST_AUTH_URL", "http://login.example", "auth_url"),
        ] {
            let error = load(&[(name, value)]).err().map(|error| format!("{error:#}"));
            assert!(error.as_ref().is_some_and(|error| error.contains(told)), "{name}: {error:?}");
        }
    }

    #[test]
    fn times_are_read_as_they_are_written() {
        for text in ["250ms", "10s", "5m", "24h", "0s"] {
            assert_eq!(text.parse::<Span>().map(|span| span.to_string()), Ok(text.to_owned()));
        }
    }
}
