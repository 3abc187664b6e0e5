//! The same work done by others on the same machine in the same run: nginx for the way to an agent,
//! etcd for durable writes. Debian's packages; where one is missing its comparison is left out loudly.

use std::{
    fs,
    net::TcpListener,
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use reqwest::Client;
use tempfile::TempDir;

/// A peer; it ends with its value.
pub struct Peer {
    child: Child,
    /// Where it listens.
    pub port: u16,
    _folder: TempDir,
}

impl Peer {
    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
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

/// One member of etcd with its defaults, fsync included.
pub fn etcd() -> Option<Peer> {
    etcd_of(1)?.pop()
}

/// So many members of etcd with their defaults, fsync included.
pub fn etcd_of(members: usize) -> Option<Vec<Peer>> {
    let ports: Vec<(u16, u16)> = (0..members).map(|_| (free_port(), free_port())).collect();
    let url = |port: u16| format!("http://127.0.0.1:{port}");
    let all: Vec<String> =
        ports.iter().enumerate().map(|(n, (_, peer))| format!("m{n}={}", url(*peer))).collect();
    let started: Option<Vec<Peer>> =
        (0..members).map(|n| member(n, ports[n], &all.join(","))).collect();
    // They listen before they have elected one of them.
    std::thread::sleep(Duration::from_secs(2));
    started
}

fn member(number: usize, (port, peer): (u16, u16), all: &str) -> Option<Peer> {
    let folder = tempfile::tempdir().expect("a folder");
    let (client, peer) = (format!("http://127.0.0.1:{port}"), format!("http://127.0.0.1:{peer}"));
    let mut command = Command::new("etcd");
    command.arg("--data-dir").arg(folder.path()).args([
        "--name",
        &format!("m{number}"),
        "--listen-client-urls",
        &client,
        "--advertise-client-urls",
        &client,
        "--listen-peer-urls",
        &peer,
        "--initial-advertise-peer-urls",
        &peer,
        "--initial-cluster",
        all,
    ]);
    let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().ok()?;
    Some(Peer { child, port, _folder: folder })
}

/// A connection of its own to etcd, over gRPC (HTTP/2 without TLS).
pub fn etcd_client() -> Client {
    Client::builder().http2_prior_knowledge().build().expect("a client")
}

/// Puts 256 bytes under a key: `etcdserverpb.KV/Put`, whose request has the key as field 1 and the
/// value as field 2.
pub async fn etcd_put(client: &Client, port: u16, key: &str) {
    let value = [b'x'; 256];
    let mut message = vec![0x0a, u8::try_from(key.len()).expect("a short key")];
    message.extend_from_slice(key.as_bytes());
    message.extend_from_slice(&[0x12, 0x80, 0x02]);
    message.extend_from_slice(&value);
    ask_etcd(client, port, "Put", &message).await;
}

/// Reads a key, linearizably: `etcdserverpb.KV/Range`, whose request has the key as field 1.
pub async fn etcd_get(client: &Client, port: u16, key: &str) {
    let mut message = vec![0x0a, u8::try_from(key.len()).expect("a short key")];
    message.extend_from_slice(key.as_bytes());
    ask_etcd(client, port, "Range", &message).await;
}

async fn ask_etcd(client: &Client, port: u16, method: &str, message: &[u8]) {
    let mut frame = vec![0];
    frame.extend_from_slice(&u32::try_from(message.len()).expect("short").to_be_bytes());
    frame.extend_from_slice(message);
    let url = format!("http://127.0.0.1:{port}/etcdserverpb.KV/{method}");
    let request =
        client.post(url).header("content-type", "application/grpc").header("te", "trailers");
    let answer = request.body(frame).send().await.expect("etcd answers");
    let bytes = answer.bytes().await.expect("a whole answer");
    assert!(bytes.len() > 5, "etcd did not do it");
}
