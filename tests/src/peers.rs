//! The same work done by others on the same machine in the same run: nginx for the way to an agent,
//! etcd for durable writes. Debian's packages; where one is missing its comparison is left out loudly.

use std::{
    fs,
    net::TcpListener,
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use reqwest::{Certificate, Client};
use tempfile::TempDir;

use crate::certificate::Certified;

/// A peer; it ends with its value.
pub struct Peer {
    child: Child,
    /// Where it listens.
    pub port: u16,
    _folder: TempDir,
}

impl Drop for Peer {
    fn drop(&mut self) {
        // Asked, not killed: a master that is killed leaves its workers behind.
        let asked = Command::new("kill").arg(self.child.id().to_string()).status();
        if !asked.is_ok_and(|status| status.success()) {
            let _ = self.child.kill();
        }
        let _ = self.child.wait();
    }
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address").port()
}

fn start(mut command: Command, port: u16, folder: TempDir) -> Option<Peer> {
    let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().ok()?;
    let peer = Peer { child, port, _folder: folder };
    for _ in 0..200 {
        if std::net::TcpStream::connect(("127.0.0.1", port)).is_ok() {
            return Some(peer);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    None
}

/// nginx with TLS in front of an agent: upstream keep-alive, no access log, one worker per core.
pub fn nginx(tls: &Path, agent: u64) -> Option<Peer> {
    let folder = tempfile::tempdir().expect("a folder");
    let port = free_port();
    let (here, tls) = (folder.path().display(), tls.display());
    let config = format!(
        "daemon off; worker_processes auto; pid {here}/pid; error_log {here}/error.log crit;\n\
         events {{ worker_connections 4096; }}\n\
         http {{ access_log off; keepalive_requests 10000000; client_body_temp_path {here}/b; proxy_temp_path {here}/p;\n\
         fastcgi_temp_path {here}/f; uwsgi_temp_path {here}/u; scgi_temp_path {here}/s;\n\
         upstream agent {{ server 127.0.0.1:{agent}; keepalive 512; keepalive_requests 10000000; }}\n\
         server {{ listen 127.0.0.1:{port} ssl; ssl_certificate {tls}/cert.pem; ssl_certificate_key {tls}/key.pem;\n\
         location / {{ proxy_pass http://agent; proxy_http_version 1.1; proxy_set_header Connection \"\"; proxy_buffering off; }} }} }}\n"
    );
    fs::write(folder.path().join("nginx.conf"), config).expect("written");
    let mut command = Command::new("nginx");
    command.arg("-c").arg(folder.path().join("nginx.conf")).arg("-p").arg(folder.path());
    start(command, port, folder)
}

/// How etcd speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wire {
    /// As nodes of ours do: TLS for clients, and among members with certificates of both sides.
    Tls,
    /// In clear text, as it comes.
    Clear,
}

impl Wire {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Tls, Self::Clear];

    /// For people.
    pub fn shown(self) -> &'static str {
        match self {
            Self::Tls => "etcd over TLS",
            Self::Clear => "etcd in clear text",
        }
    }
}

/// Members of etcd that belong together.
pub struct Etcd {
    members: Vec<Peer>,
    /// What its clients trust, and where the members' certificates are.
    authority: Option<(Certificate, TempDir)>,
}

/// One certificate for all members, of an authority of its own.
fn certified() -> (Certificate, TempDir) {
    let folder = tempfile::tempdir().expect("a folder");
    let Certified { authority, own, key } = Certified::new(&["127.0.0.1"]);
    for (name, text) in
        [("ca.pem", &authority), ("cert.pem", &own.pem()), ("key.pem", &key.serialize_pem())]
    {
        fs::write(folder.path().join(name), text).expect("it is written");
    }
    (Certificate::from_pem(authority.as_bytes()).expect("a certificate"), folder)
}

impl Etcd {
    /// So many members with their defaults, fsync included; `None` where there is no etcd.
    pub fn start(members: usize, wire: Wire) -> Option<Self> {
        let authority = (wire == Wire::Tls).then(certified);
        let tls = authority.as_ref().map(|(_, folder)| folder.path());
        let scheme = if tls.is_some() { "https" } else { "http" };
        let url = |port: u16| format!("{scheme}://127.0.0.1:{port}");
        let ports: Vec<(u16, u16)> = (0..members).map(|_| (free_port(), free_port())).collect();
        let all: Vec<String> =
            ports.iter().enumerate().map(|(n, (_, peer))| format!("m{n}={}", url(*peer))).collect();
        let member = |n: usize| {
            let (own, peer) = (url(ports[n].0), url(ports[n].1));
            member(n, ports[n].0, [&own, &peer, &all.join(",")], tls)
        };
        let members: Option<Vec<Peer>> = (0..members).map(member).collect();
        // They listen before they have elected one of them.
        std::thread::sleep(Duration::from_secs(2));
        Some(Self { members: members?, authority })
    }

    /// The members' processes.
    pub fn pids(&self) -> Vec<u32> {
        self.members.iter().map(|member| member.child.id()).collect()
    }

    /// A client with a connection of its own to one of the members: gRPC (HTTP/2).
    pub fn client(&self, member: usize) -> EtcdClient {
        let port = self.members[member % self.members.len()].port;
        let builder = Client::builder().http2_prior_knowledge();
        let (scheme, builder) = match &self.authority {
            Some((authority, _)) => ("https", builder.tls_certs_only([authority.clone()])),
            None => ("http", builder),
        };
        let client = builder.build().expect("a client");
        EtcdClient { client, base_url: format!("{scheme}://127.0.0.1:{port}") }
    }
}

fn member(
    number: usize,
    port: u16,
    [own, peer, all]: [&String; 3],
    tls: Option<&Path>,
) -> Option<Peer> {
    let folder = tempfile::tempdir().expect("a folder");
    let mut command = Command::new("etcd");
    command.arg("--data-dir").arg(folder.path()).args([
        "--name",
        &format!("m{number}"),
        "--listen-client-urls",
        own,
        "--advertise-client-urls",
        own,
        "--listen-peer-urls",
        peer,
        "--initial-advertise-peer-urls",
        peer,
        "--initial-cluster",
        all,
    ]);
    if let Some(tls) = tls {
        for (option, name) in [
            ("--cert-file", "cert.pem"),
            ("--key-file", "key.pem"),
            ("--peer-cert-file", "cert.pem"),
            ("--peer-key-file", "key.pem"),
            ("--peer-trusted-ca-file", "ca.pem"),
        ] {
            command.arg(option).arg(tls.join(name));
        }
        command.arg("--peer-client-cert-auth");
    }
    let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().ok()?;
    Some(Peer { child, port, _folder: folder })
}

/// A client of etcd.
pub struct EtcdClient {
    client: Client,
    base_url: String,
}

impl EtcdClient {
    /// Puts 256 bytes under a key: `etcdserverpb.KV/Put`, whose request has the key as field 1 and the
    /// value as field 2.
    pub async fn put(&self, key: &str) {
        let value = [b'x'; 256];
        let mut message = vec![0x0a, u8::try_from(key.len()).expect("a short key")];
        message.extend_from_slice(key.as_bytes());
        message.extend_from_slice(&[0x12, 0x80, 0x02]);
        message.extend_from_slice(&value);
        self.ask("Put", &message).await;
    }

    /// Reads a key, linearizably: `etcdserverpb.KV/Range`, whose request has the key as field 1.
    pub async fn get(&self, key: &str) {
        let mut message = vec![0x0a, u8::try_from(key.len()).expect("a short key")];
        message.extend_from_slice(key.as_bytes());
        self.ask("Range", &message).await;
    }

    async fn ask(&self, method: &str, message: &[u8]) {
        let mut frame = vec![0];
        frame.extend_from_slice(&u32::try_from(message.len()).expect("short").to_be_bytes());
        frame.extend_from_slice(message);
        let url = format!("{}/etcdserverpb.KV/{method}", self.base_url);
        let request = self.client.post(url).header("content-type", "application/grpc");
        let answer = request.header("te", "trailers").body(frame).send().await;
        let bytes = answer.expect("etcd answers").bytes().await.expect("a whole answer");
        assert!(bytes.len() > 5, "etcd did not do it");
    }
}
