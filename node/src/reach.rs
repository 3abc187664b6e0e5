//! The way to others and from them: the peer port, gossip, other nodes, the world outside.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use actors::{
    ports::{Clock as _, Ledger as _},
    root::Watch,
};
use anyhow::Context as _;
use cluster::{
    RaftLedger,
    gossip::{Alive, Gossip, Member, load::Load, seal::Keyring},
    peer::{book::AddressBook, client::PeerClient},
};
use rustls::ServerConfig;
use tokio::net::{TcpListener, UdpSocket};

use crate::{
    adapters::{
        authority::Authority, outbound::HttpsOutbound, peers::NodePeers, system::SystemClock,
        view::NodeView,
    },
    assembly::Place,
    config::Config,
    identity::NodeIdentity,
};

/// Ports tried for a node that may have any.
const PORT_TRIES: u32 = 20;
/// Datagrams that may wait to be heard.
const DATAGRAMS_BYTES: usize = 1 << 20;

/// The way to others: nodes, the cluster as a whole, the world outside.
pub(crate) struct Reach {
    pub(crate) peers: Arc<NodePeers>,
    pub(crate) view: Arc<NodeView>,
    pub(crate) outbound: Arc<HttpsOutbound>,
}

impl Reach {
    pub(crate) fn new(
        client: Arc<PeerClient>,
        ledger: &Arc<RaftLedger>,
        alive: &Arc<Alive>,
        authority: &Authority,
        config: &Config,
    ) -> anyhow::Result<Self> {
        let (bundle, own) = (config.outbound_bundle(), Some(Arc::clone(ledger)));
        let outbound = HttpsOutbound::new(config.outbound_allowed()?, bundle.as_deref(), own)?;
        Ok(Self {
            peers: Arc::new(NodePeers {
                client,
                ledger: Arc::clone(ledger),
                alive: Arc::clone(alive),
            }),
            view: Arc::new(NodeView {
                ledger: Arc::clone(ledger),
                alive: Arc::clone(alive),
                authority: authority.clone(),
            }),
            outbound: Arc::new(outbound),
        })
    }
}

/// Listens at `address`, which `option` of the command line gave.
pub(crate) async fn listen(address: SocketAddr, option: &str) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address).await.with_context(|| {
        format!("the address {address} is taken; choose another port with {option}, or 0 for any")
    })
}

/// The peer port, open, and the way to others.
pub(crate) struct OpenPeers {
    pub(crate) listener: TcpListener,
    pub(crate) socket: UdpSocket,
    pub(crate) tls: Arc<ServerConfig>,
    pub(crate) client: Arc<PeerClient>,
}

/// Opens the peer port where this node was reached before, if it may choose.
pub(crate) async fn open_peers(
    data: &Path,
    identity: &mut NodeIdentity,
    place: &Place<'_>,
    authority: &Authority,
) -> anyhow::Result<OpenPeers> {
    let before = identity.peer_address.rsplit(':').next().and_then(|port| port.parse().ok());
    let mut address = place.peers;
    if address.port() == 0 {
        address.set_port(before.unwrap_or(0));
    }
    let (listener, socket) = listen_to_peers(address).await?;
    let bound = listener.local_addr()?;
    let advertised = match place.advertise {
        "" if bound.ip().is_unspecified() => format!("{}:{}", outbound_address(), bound.port()),
        "" => bound.to_string(),
        told => told.to_owned(),
    };
    if identity.peer_address != advertised {
        identity.peer_address = advertised;
        identity.write(data)?;
    }
    let book = Arc::new(AddressBook::default());
    identity.seeds.iter().for_each(|(raft_id, address)| book.put(*raft_id, address));
    let own = authority.peer_identity(&data.join("keys"), identity.raft_id)?;
    let client = PeerClient::new(own.client()?, identity.raft_id, book);
    Ok(OpenPeers { listener, socket, tls: own.server()?, client })
}

/// The same port for calls and for gossip.
async fn listen_to_peers(address: SocketAddr) -> anyhow::Result<(TcpListener, UdpSocket)> {
    let mut tries = 0;
    loop {
        let listener = listen(address, "--peer").await?;
        let port = listener.local_addr()?.port();
        match UdpSocket::bind(SocketAddr::new(address.ip(), port)).await {
            Ok(socket) => {
                // The kernel gives as much of it as the machine allows.
                let _ = rustix::net::sockopt::set_socket_recv_buffer_size(&socket, DATAGRAMS_BYTES);
                return Ok((listener, socket));
            }
            // Somebody else has that port for datagrams: any other will do.
            Err(_) if address.port() == 0 && tries < PORT_TRIES => tries += 1,
            Err(error) => {
                return Err(error).with_context(|| format!("UDP port {port} is taken"));
            }
        }
    }
}

/// What tells the others that this node lives, how much it does, and what address it has.
pub(crate) async fn gossip(
    socket: UdpSocket,
    identity: &NodeIdentity,
    keyring: &Arc<Keyring>,
    ledger: &Arc<RaftLedger>,
    alive: &Arc<Alive>,
    watch: &Arc<Watch>,
    ready: &Arc<AtomicBool>,
) -> anyhow::Result<Gossip> {
    let address = tokio::net::lookup_host(&identity.peer_address).await.ok();
    let address = address.and_then(|mut found| found.next()).with_context(|| {
        format!("cluster.advertise: {} leads nowhere; use host:port", identity.peer_address)
    })?;
    let life = SystemClock.now().millis();
    let me = Member { raft_id: identity.raft_id, address, life };
    let (known, seeds) = (Arc::clone(ledger), identity.seeds.clone());
    let members = move || {
        let directory = known.directory().read();
        let members = directory.nodes.rows().filter(|(_, node)| node.is_member());
        let address =
            |node: &domain::node::Node| (node.facts.raft_id, node.facts.peer_address.clone());
        let members: Vec<_> = members.map(|(_, node)| address(node)).collect();
        if members.is_empty() { seeds.clone() } else { members }
    };
    let (watch, ready) = (Arc::clone(watch), Arc::clone(ready));
    let load = move || Load {
        at: SystemClock.now().millis(),
        instances: u32::try_from(watch.instances.handles().len()).unwrap_or(u32::MAX),
        ready: ready.load(Relaxed),
        ..Load::default()
    };
    Ok(Gossip {
        socket,
        me,
        keyring: Arc::clone(keyring),
        alive: Arc::clone(alive),
        members: Arc::new(members),
        load: Box::new(load),
    })
}

/// The address that this machine would send from; nothing is sent.
fn outbound_address() -> IpAddr {
    let asked = std::net::UdpSocket::bind("0.0.0.0:0").and_then(|socket| {
        socket.connect("192.0.2.1:9")?;
        socket.local_addr()
    });
    asked.map_or(Ipv4Addr::LOCALHOST.into(), |address| address.ip())
}
