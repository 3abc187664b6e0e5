//! Nobody reaches through us what only we can reach. The nodes have every address there is on their own
//! machines, names mean what the test says, and whoever is called tells at which address.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener, UdpSocket},
};

use serde_json::{Value, json};
use tests::{Answers, Customer, NAME_SERVER, NameServer, Network, Receiver, Setup, skipped};

/// Private, local and reserved addresses, one of each kind at least (RFC 6890).
const FORBIDDEN: [Ipv4Addr; 14] = [
    Ipv4Addr::LOCALHOST,
    Ipv4Addr::new(127, 255, 255, 254),
    Ipv4Addr::UNSPECIFIED,
    Ipv4Addr::new(10, 0, 0, 1),
    Ipv4Addr::new(10, 255, 0, 7),
    Ipv4Addr::new(100, 64, 0, 1),
    Ipv4Addr::new(169, 254, 169, 254),
    Ipv4Addr::new(172, 16, 0, 1),
    Ipv4Addr::new(172, 31, 255, 1),
    Ipv4Addr::new(192, 168, 1, 1),
    Ipv4Addr::new(192, 0, 2, 1),
    Ipv4Addr::new(198, 18, 0, 1),
    Ipv4Addr::new(203, 0, 113, 9),
    Ipv4Addr::new(240, 0, 0, 1),
];

const FORBIDDEN_V6: [&str; 14] = [
    "::",
    "::1",
    "0:0:0:0:0:0:0:1",
    "0000:0000:0000:0000:0000:0000:0000:0001",
    "100::1",
    "2001::1",
    "2001:db8::1",
    "3fff::1",
    "5f00::1",
    "fc00::1",
    "fd00:ec2::254",
    "fe80::1",
    "fec0::1",
    "ff02::1",
];

/// Public addresses of receivers.
fn good(n: u8) -> Ipv4Addr {
    Ipv4Addr::new(45, 77, 0, n)
}

const GOOD_V6: &str = "2a00:1450:4001::77";
const GOODS: u8 = 100;

/// How an IPv4 address can be written in an address of the web (the WHATWG URL standard's IPv4 parser), or
/// carried by one of IPv6.
fn spellings(address: Ipv4Addr) -> Vec<String> {
    let [a, b, c, d] = address.octets();
    let (all, two, three) =
        (u32::from(address), u32::from_be_bytes([0, b, c, d]), u32::from_be_bytes([0, 0, c, d]));
    let (high, low) = (all >> 16, all & 0xffff);
    let encoded = |text: &str| text.bytes().map(|byte| format!("%{byte:02X}")).collect::<String>();
    vec![
        address.to_string(),
        format!("{address}."),
        encoded(&address.to_string()),
        format!("{all}"),
        format!("{all:#x}"),
        format!("0X{all:08X}"),
        format!("0{all:o}"),
        format!("{a:#x}.{b:#x}.{c:#x}.{d:#x}"),
        format!("0{a:o}.0{b:o}.0{c:o}.0{d:o}"),
        format!("{a:#x}.{b}.0{c:o}.{d}"),
        format!("{a}.{two}"),
        format!("{a}.{b}.{three}"),
        format!("0x{a:04x}.{two:#x}"),
        format!("[::ffff:{address}]"),
        format!("[::ffff:{high:x}:{low:x}]"),
        format!("[0:0:0:0:0:FFFF:{high:X}:{low:X}]"),
        format!("[::{address}]"),
        format!("[::ffff:0:{address}]"),
        format!("[64:ff9b::{address}]"),
        format!("[64:ff9b:1::{address}]"),
        format!("[2002:{high:x}:{low:x}::1]"),
    ]
}

/// Names that mean what is forbidden, or that too.
fn lying_names() -> Vec<(String, Answers)> {
    let public = || IpAddr::V4(good(1));
    let one = |n: usize, address: Ipv4Addr| {
        let target = IpAddr::V4(address);
        [
            (format!("plain-{n}.test"), vec![vec![target]]),
            (format!("mapped-{n}.test"), vec![vec![IpAddr::V6(address.to_ipv6_mapped())]]),
            (format!("second-{n}.test"), vec![vec![public(), target]]),
            (format!("first-{n}.test"), vec![vec![target, public()]]),
        ]
    };
    let v4 = FORBIDDEN.iter().enumerate().flat_map(|(n, address)| one(n, *address));
    let v6 = FORBIDDEN_V6.iter().enumerate().map(|(n, text)| {
        let address: Ipv6Addr = text.parse().expect(text);
        (format!("six-{n}.test"), vec![vec![IpAddr::V6(address), public()]])
    });
    v4.chain(v6).collect()
}

struct Sender {
    customer: Customer,
    hook: String,
    port: u16,
}

impl Sender {
    async fn to(customer: Customer, port: u16) -> Self {
        let body = json!({ "url": "https://example.com/hook", "events": ["*"] });
        let made = customer.post("/v1/webhooks", &body).await.data(201);
        let hook = format!("/v1/webhooks/{}", made["id"].as_str().expect("an id"));
        Self { customer, hook, port }
    }

    /// One attempt to this host; `None` if the address was refused when it was set.
    async fn attempt(&self, host: &str) -> Option<Value> {
        let url = format!("https://{host}:{}/once", self.port);
        let set = self.customer.patch(&self.hook, &json!({ "url": url })).await;
        if set.status == 400 {
            return None;
        }
        set.data(200);
        Some(self.customer.call(&format!("{}/test", self.hook)).await.data(200))
    }

    async fn is_refused(&self, host: &str) {
        let Some(attempt) = self.attempt(host).await else { return };
        let error = attempt["error"].as_str().unwrap_or_default();
        let told = ["refused", "resolved", "can't be read"];
        let is_told = told.iter().any(|word| error.contains(word));
        assert!(attempt["status_code"].is_null() && is_told, "{host}: {attempt:#}");
    }
}

/// A network whose nodes know each other by names, with receivers and name servers on their machines.
fn surrounded(receiver: &mut Receiver) -> Option<(Network, Vec<NameServer>)> {
    let authority = receiver.authority().display().to_string();
    let settings = vec![("ROOST_OUTBOUND__CA_BUNDLE".to_owned(), authority)];
    let network = Network::with(2, Setup { settings, is_public: true })?;
    let servers = (0..network.len()).map(|node| {
        network.swallow_all(node);
        let port = receiver.port();
        let listener = network.on(node, || TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)));
        receiver.listen(listener.expect("the port is free"));
        NameServer::on(network.on(node, || UdpSocket::bind(NAME_SERVER)).expect("a name server"))
    });
    let servers = servers.collect();
    Some((network, servers))
}

#[tokio::test]
async fn forbidden_addresses_are_never_called_however_they_are_written_or_named() {
    let names = ["*.good.test", "45.77.0.1", GOOD_V6];
    let mut receiver = Receiver::prepared(&names);
    let Some((network, servers)) = surrounded(&mut receiver) else { return skipped("netns") };
    let sender = Sender::to(network.customer(0), receiver.port()).await;
    let set = |name: &str, answers: &Answers| {
        servers.iter().for_each(|server| server.set(name, answers.clone()));
    };
    let mut hosts: Vec<String> = FORBIDDEN.iter().flat_map(|one| spellings(*one)).collect();
    hosts.extend(FORBIDDEN_V6.iter().map(|text| format!("[{text}]")));
    hosts.extend(["localhost", "LOCALHOST", "localhost.", "[::1%25lo]"].map(str::to_owned));
    for node in 0..network.len() {
        let own: Ipv4Addr = network.address(node).parse().expect("an address");
        hosts.extend(spellings(own).into_iter().take(13).chain([network.host(node)]));
    }
    for (name, answers) in lying_names() {
        set(&name, &answers);
        hosts.push(name);
    }
    assert!(hosts.len() >= 300, "{} spellings", hosts.len());
    for host in &hosts {
        sender.is_refused(host).await;
    }
    assert_eq!(receiver.called_at(), Vec::<IpAddr>::new(), "nobody was called");

    for n in 1..=GOODS {
        let name = format!("n{n}.good.test");
        set(&name, &vec![vec![IpAddr::V4(good(n))]]);
        let attempt = sender.attempt(&name).await.expect("a good address");
        assert_eq!(attempt["status_code"], 200, "{name}: {attempt:#}");
    }
    for literal in ["45.77.0.1".to_owned(), format!("[{GOOD_V6}]")] {
        let attempt = sender.attempt(&literal).await.expect("a good address");
        assert_eq!(attempt["status_code"], 200, "{literal}: {attempt:#}");
    }
    let mut called: BTreeSet<IpAddr> = receiver.called_at().into_iter().collect();
    assert!(called.remove(&GOOD_V6.parse().expect("an address")));
    assert_eq!(called, (1..=GOODS).map(|n| IpAddr::V4(good(n))).collect());
}

#[tokio::test]
async fn a_name_that_means_something_else_the_second_time_gains_nothing() {
    let mut receiver = Receiver::prepared(&["*.turn.test"]);
    let Some((network, servers)) = surrounded(&mut receiver) else { return skipped("netns") };
    let sender = Sender::to(network.customer(0), receiver.port()).await;
    let public = vec![IpAddr::V4(good(1))];
    let (mut served, mut refused) = (0, 0);
    for (n, target) in FORBIDDEN.iter().enumerate() {
        for (kind, answers) in [
            ("then", vec![public.clone(), vec![IpAddr::V4(*target)]]),
            ("six", vec![public.clone(), vec![IpAddr::V6(target.to_ipv6_mapped())]]),
            ("before", vec![vec![IpAddr::V4(*target)], public.clone()]),
        ] {
            let name = format!("{kind}-{n}.turn.test");
            servers.iter().for_each(|server| server.set(&name, answers.clone()));
            for _ in 0..4 {
                let attempt = sender.attempt(&name).await.expect("a name");
                match attempt["status_code"].as_u64() {
                    Some(200) => served += 1,
                    _ => {
                        refused += 1;
                        assert!(
                            attempt["error"].as_str().is_some_and(|e| e.contains("refused")),
                            "{attempt:#}"
                        );
                    }
                }
            }
            let asked: usize = servers.iter().map(|server| server.asked(&name)).sum();
            // Once for each: what was checked is what is connected to.
            assert_eq!(asked, 4, "look-ups of {name}");
        }
    }
    assert_eq!((served, refused), (84, 84));
    let called: BTreeSet<IpAddr> = receiver.called_at().into_iter().collect();
    assert_eq!(called, BTreeSet::from([IpAddr::V4(good(1))]), "only the public address was called");
}
