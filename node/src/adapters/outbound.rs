//! Calls to others: webhooks, and whatever else calls out later.
//!
//! Whoever registers an address must not reach through us what only we can reach. So the host is
//! resolved here, every address that it has is checked, and the connection goes to a checked one: a
//! name that answers differently the second time gains nothing. Redirects are not followed, proxies of
//! the environment not used, and time and size are bounded.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use actors::ports::{Outbound, OutboundAnswer, OutboundError, OutboundRequest};
use anyhow::Context as _;
use cluster::RaftLedger;
use domain::{account::IpRange, node::NodeStatus, webhook::delivery::ANSWER_BYTES_MAX};
use futures::{FutureExt as _, StreamExt as _, future::BoxFuture};
use reqwest::{
    Client, Url,
    dns::{Addrs, Name, Resolve, Resolving},
    header::{CONTENT_TYPE, RETRY_AFTER, USER_AGENT},
    redirect::Policy,
};
use tokio::sync::Semaphore;

/// How long a receiver may take (`decisions` §12).
const ANSWERED_WITHIN: Duration = Duration::from_secs(15);
/// How long connecting may take.
const CONNECTED_WITHIN: Duration = Duration::from_secs(5);
/// How long an unused connection is kept.
const IDLE_FOR: Duration = Duration::from_secs(60);
/// Requests at once to one host.
const PER_HOST: usize = 64;
/// How long a request waits for its turn at a host.
const TURN_WITHIN: Duration = Duration::from_secs(60);
/// Hosts remembered; more begin anew.
const HOSTS_MAX: usize = 10_000;
/// How long what the names of the cluster's own nodes mean is believed.
const OWN_FOR: Duration = Duration::from_secs(30);
/// How long looking up one of them may take.
const OWN_WITHIN: Duration = Duration::from_secs(2);

/// Whether an address is public: one that everybody reaches alike (RFC 6890 and what came after).
pub fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => is_public_v4(v4),
        IpAddr::V6(v6) => is_public_v6(v6),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    let reserved = matches!(
        (a, b, c),
        (0 | 10 | 127 | 240..=255, ..)
            | (100, 64..=127, _)
            | (169, 254, _)
            | (172, 16..=31, _)
            | (192, 0, 0 | 2)
            | (192, 88, 99)
            | (192, 168, _)
            | (198, 18 | 19, _)
            | (198, 51, 100)
            | (203, 0, 113)
            | (224..=239, ..)
    );
    !reserved
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    let parts = address.segments();
    let low = |high: u16, low: u16| Ipv4Addr::from((u32::from(high) << 16) | u32::from(low));
    // Addresses that carry an IPv4 address are as public as that one.
    match parts {
        // ::, ::1, ::ffff:a.b.c.d and ::a.b.c.d
        [0, 0, 0, 0, 0, 0 | 0xffff, ..] => false,
        [0, 0, 0, 0, 0xffff, 0, ..] => false,
        // 64:ff9b::/96, and 64:ff9b:1::/48 for private use
        [0x64, 0xff9b, 0, 0, 0, 0, high, rest] => is_public_v4(low(high, rest)),
        [0x64, 0xff9b, ..] => false,
        // 100::/64 goes nowhere
        [0x100, 0, 0, 0, ..] => false,
        // 2001::/23 is for protocols, Teredo among them; 2001:db8::/32 for books
        [0x2001, 0..=0x1ff | 0xdb8, ..] => false,
        // 2002::/16 is 6to4
        [0x2002, high, rest, ..] => is_public_v4(low(high, rest)),
        [0x3fff, 0..=0xfff, ..] => false,
        [0x5f00, ..] => false,
        // fc00::/7 private, fe80::/10 link, fec0::/10 site, ff00::/8 many
        [0xfc00..=0xffff, ..] => false,
        // Only 2000::/3 was ever given out.
        [first, ..] => (0x2000..=0x3fff).contains(&first),
    }
}

/// The addresses of the cluster's own nodes, by the hosts that they are known under.
struct Own {
    ledger: Arc<RaftLedger>,
    known: tokio::sync::Mutex<Known>,
}

#[derive(Default)]
struct Known {
    at: Option<Instant>,
    by_host: BTreeMap<String, Vec<IpAddr>>,
}

impl Own {
    /// Whether a node of the cluster has this address.
    async fn has(&self, address: IpAddr) -> bool {
        let hosts = self.hosts();
        let mut known = self.known.lock().await;
        let is_fresh = known.at.is_some_and(|at| at.elapsed() < OWN_FOR);
        if !is_fresh || !known.by_host.keys().eq(hosts.iter()) {
            let found = futures::future::join_all(hosts.iter().map(|host| addresses_of(host)));
            let mut old = std::mem::take(&mut known.by_host);
            for (host, found) in hosts.iter().zip(found.await) {
                // A name that has no answer now still means what it meant.
                let found = found.or_else(|| old.remove(host)).unwrap_or_default();
                known.by_host.insert(host.clone(), found);
            }
            known.at = Some(Instant::now());
        }
        let address = address.to_canonical();
        known.by_host.values().flatten().any(|own| *own == address)
    }

    /// What the members of the cluster are reached under.
    fn hosts(&self) -> BTreeSet<String> {
        let directory = actors::ports::Ledger::directory(&*self.ledger).read();
        let nodes = directory.nodes.rows();
        let members = nodes.filter(|(_, node)| node.status != NodeStatus::Removed);
        let hosts = members.flat_map(|(_, node)| {
            let front = node.facts.base_url.strip_prefix("https://").unwrap_or_default();
            [host_of(&node.facts.peer_address), host_of(front)]
        });
        hosts.filter(|host| !host.is_empty()).map(str::to_owned).collect()
    }
}

/// The host of `host:port`.
fn host_of(address: &str) -> &str {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    host.trim_matches(['[', ']'])
}

async fn addresses_of(host: &str) -> Option<Vec<IpAddr>> {
    if let Ok(literal) = host.parse::<IpAddr>() {
        return Some(vec![literal.to_canonical()]);
    }
    let found = tokio::time::timeout(OWN_WITHIN, tokio::net::lookup_host((host, 0))).await;
    let found = found.ok()?.ok()?;
    Some(found.map(|one| one.ip().to_canonical()).collect())
}

/// What nothing is sent to.
#[derive(Clone)]
struct Guard {
    allowed: Vec<IpRange>,
    own: Option<Arc<Own>>,
}

impl Guard {
    async fn check(&self, address: IpAddr) -> Result<(), OutboundError> {
        let is_allowed = self.allowed.iter().any(|range| range.contains(address));
        if is_allowed || is_public(address) && !self.is_own(address).await {
            return Ok(());
        }
        Err(OutboundError::Forbidden(address.to_string()))
    }

    async fn is_own(&self, address: IpAddr) -> bool {
        match &self.own {
            Some(own) => own.has(address).await,
            None => false,
        }
    }
}

/// Resolves names and gives only what may be connected to.
impl Resolve for Guard {
    fn resolve(&self, name: Name) -> Resolving {
        let guard = self.clone();
        async move {
            let found = tokio::net::lookup_host((name.as_str(), 0)).await;
            let found: Vec<SocketAddr> = found.map_err(|_| OutboundError::Unresolved)?.collect();
            if found.is_empty() {
                return Err(OutboundError::Unresolved.into());
            }
            // One forbidden address spoils all: a name that has both is no accident.
            for one in &found {
                let forbidden = |_| OutboundError::Forbidden(format!("of {}", name.as_str()));
                guard.check(one.ip()).await.map_err(forbidden)?;
            }
            Ok(Box::new(found.into_iter()) as Addrs)
        }
        .boxed()
    }
}

/// The world outside, by HTTPS.
pub struct HttpsOutbound {
    client: Client,
    guard: Guard,
    hosts: Mutex<HashMap<String, Arc<Semaphore>>>,
}

impl HttpsOutbound {
    /// With addresses that may be reached although they are private, and further authorities.
    pub fn new(
        allowed: Vec<IpRange>,
        ca_bundle: Option<&Path>,
        ledger: Option<Arc<RaftLedger>>,
    ) -> anyhow::Result<Self> {
        let own = ledger.map(|ledger| Arc::new(Own { ledger, known: Default::default() }));
        let guard = Guard { allowed, own };
        let builder = || {
            Client::builder()
                .redirect(Policy::none())
                .no_proxy()
                .https_only(true)
                .timeout(ANSWERED_WITHIN)
                .connect_timeout(CONNECTED_WITHIN)
                .pool_idle_timeout(IDLE_FOR)
                .dns_resolver(Arc::new(guard.clone()))
        };
        let bundle = match ca_bundle {
            Some(path) => {
                let pem = std::fs::read(path)
                    .with_context(|| format!("outbound.ca_bundle: {}", path.display()))?;
                reqwest::Certificate::from_pem_bundle(&pem)?
            }
            None => vec![],
        };
        // A bare machine, such as a small container, may trust nobody; that is no reason not to run.
        let client = builder().tls_certs_merge(bundle.clone()).build().or_else(|error| {
            tracing::warn!(%error, "outbound.ca_bundle alone tells which receivers are trusted");
            builder().tls_certs_only(bundle).build()
        });
        let client = client.context("no client for calls to others")?;
        Ok(Self { client, guard, hosts: Mutex::default() })
    }

    fn turns(&self, host: &str) -> Arc<Semaphore> {
        let mut hosts = self.hosts.lock().unwrap_or_else(PoisonError::into_inner);
        if hosts.len() >= HOSTS_MAX {
            hosts.clear();
        }
        let turns =
            hosts.entry(host.to_owned()).or_insert_with(|| Arc::new(Semaphore::new(PER_HOST)));
        Arc::clone(turns)
    }

    async fn send(&self, request: OutboundRequest) -> Result<OutboundAnswer, OutboundError> {
        let refused = |why: &str| OutboundError::Connection(why.to_owned());
        let url: Url = request.url.parse().map_err(|_| refused("the address can't be read"))?;
        let host = url.host_str().unwrap_or_default().to_owned();
        // A literal address is never resolved, however oddly it was written: it is checked here.
        if let Ok(literal) = host.trim_matches(['[', ']']).parse::<IpAddr>() {
            self.guard.check(literal).await?;
        }
        let turns = self.turns(&host);
        // Signatures are of a moment: a request that waits for long is not sent any more.
        let turn = tokio::time::timeout(TURN_WITHIN, turns.acquire()).await;
        let _turn = turn
            .map_err(|_| refused("too many deliveries to this host at once"))?
            .map_err(|_| refused("the node stops"))?;
        let mut sent = self
            .client
            .post(url)
            .header(CONTENT_TYPE, "application/json")
            .header(USER_AGENT, concat!("Roost-Webhooks/", env!("CARGO_PKG_VERSION")));
        for (name, value) in request.headers {
            sent = sent.header(name, value);
        }
        let response = sent.body(request.body).send().await.map_err(|error| cause(&error))?;
        let status = response.status().as_u16();
        let retry_after = response.headers().get(RETRY_AFTER).and_then(|value| {
            let seconds: u64 = value.to_str().ok()?.trim().parse().ok()?;
            Some(Duration::from_secs(seconds))
        });
        Ok(OutboundAnswer { status, body: beginning(response).await, retry_after })
    }
}

/// The beginning of a body. The rest is not read; what breaks off is as long as it is.
async fn beginning(response: reqwest::Response) -> String {
    let (mut bytes, mut stream) = (vec![], response.bytes_stream());
    while let Some(Ok(part)) = stream.next().await {
        bytes.extend_from_slice(&part);
        if bytes.len() >= ANSWER_BYTES_MAX {
            bytes.truncate(ANSWER_BYTES_MAX);
            break;
        }
    }
    let mut text = String::from_utf8_lossy(&bytes).into_owned();
    // What was no text became longer.
    let end = (0..=ANSWER_BYTES_MAX).rev().find(|end| text.is_char_boundary(*end));
    text.truncate(end.unwrap_or(0));
    text
}

/// The cause that whoever runs the receiver can do something about.
fn cause(error: &reqwest::Error) -> OutboundError {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    let mut last = error.to_string();
    while let Some(one) = source {
        if let Some(known) = one.downcast_ref::<OutboundError>() {
            return known.clone();
        }
        last = one.to_string();
        source = one.source();
    }
    match error.is_timeout() {
        true => OutboundError::Timeout(ANSWERED_WITHIN),
        false => OutboundError::Connection(last),
    }
}

impl Outbound for HttpsOutbound {
    fn post(
        &self,
        request: OutboundRequest,
    ) -> BoxFuture<'_, Result<OutboundAnswer, OutboundError>> {
        self.send(request).boxed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_local_and_reserved_addresses_are_not_public() {
        for text in [
            "0.0.0.0",
            "0.1.2.3",
            "10.0.0.1",
            "10.255.255.255",
            "100.64.0.1",
            "100.127.255.255",
            "127.0.0.1",
            "127.1.2.3",
            "169.254.169.254",
            "172.16.0.1",
            "172.31.255.255",
            "192.0.0.1",
            "192.0.2.1",
            "192.88.99.1",
            "192.168.1.1",
            "198.18.0.1",
            "198.19.255.255",
            "198.51.100.1",
            "203.0.113.1",
            "224.0.0.1",
            "239.255.255.255",
            "240.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::ffff:127.0.0.1",
            "::ffff:8.8.8.8",
            "::127.0.0.1",
            "::ffff:0:127.0.0.1",
            "64:ff9b::7f00:1",
            "64:ff9b::a00:1",
            "64:ff9b:1::1",
            "100::1",
            "2001::1",
            "2001:0:1::",
            "2001:db8::1",
            "2002:7f00:1::",
            "2002:a00:1::1",
            "2002:c0a8:1::",
            "3fff::1",
            "5f00::1",
            "fc00::1",
            "fd12:3456::1",
            "fe80::1",
            "fec0::1",
            "ff02::1",
            "4000::1",
            "8000::1",
        ] {
            assert!(!is_public(text.parse().expect(text)), "{text}");
        }
        for text in [
            "8.8.8.8",
            "1.1.1.1",
            "100.63.255.255",
            "100.128.0.1",
            "172.15.255.255",
            "172.32.0.1",
            "192.0.1.1",
            "198.17.255.255",
            "198.20.0.1",
            "223.255.255.255",
            "2606:4700::1111",
            "2a00:1450::1",
            "64:ff9b::808:808",
            "2002:808:808::1",
            "2001:4860:4860::8888",
        ] {
            assert!(is_public(text.parse().expect(text)), "{text}");
        }
    }

    /// Spellings that a browser would read as a loopback, private or metadata address.
    #[tokio::test]
    async fn odd_spellings_are_read_before_they_are_checked() {
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let outbound = HttpsOutbound::new(vec![], None, None).expect("a client");
        let hosts = [
            "127.0.0.1",
            "127.1",
            "127.0.1",
            "2130706433",
            "0x7f000001",
            "0x7f.1",
            "0177.0.0.1",
            "0177.1",
            "017700000001",
            "127.0.0.1.",
            "%31%32%37.0.0.1",
            "①②⑦.0.0.1",
            "127。0。0。1",
            "0",
            "0.0.0.0",
            "[::1]",
            "[::]",
            "[::ffff:127.0.0.1]",
            "[::ffff:7f00:1]",
            "[0:0:0:0:0:0:0:1]",
            "169.254.169.254",
            "0xa9fea9fe",
            "2852039166",
            "[::ffff:169.254.169.254]",
            "[fd00:ec2::254]",
            "10.0.0.1",
            "0xa.1",
            "012.1",
            "192.168.0.1",
            "3232235521",
            "[fe80::1]",
            "[64:ff9b::7f00:1]",
            "[2002:7f00:1::]",
            "localhost",
            "LOCALHOST",
            "localhost.",
        ];
        for host in hosts {
            let request = OutboundRequest {
                url: format!("https://{host}:9/hook"),
                headers: Default::default(),
                body: String::new(),
            };
            let told = outbound.post(request).await;
            let is_refused =
                matches!(told, Err(OutboundError::Forbidden(_) | OutboundError::Unresolved));
            assert!(is_refused, "{host}: {told:?}");
        }
        let plain = OutboundRequest {
            url: "http://example.com/".to_owned(),
            headers: Default::default(),
            body: String::new(),
        };
        assert!(outbound.post(plain).await.is_err(), "only https");
    }
}
