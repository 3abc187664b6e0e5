//! Somebody who receives webhooks over HTTPS, behaves as the path says, and keeps what came.
//!
//! `/ok` answers 200, `/once` does and closes the connection, `/slow` does after a while, `/fail/N` fails the first N attempts of each event, `/gone`
//! answers 410, `/hang` never answers, `/redirect` sends elsewhere, `/half` ends in the middle of an answer,
//! `/reset` resets the connection. What follows a `?` says nothing.

use std::{
    collections::{BTreeMap, HashMap},
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError, atomic::AtomicUsize, atomic::Ordering::Relaxed},
    time::Duration,
};

use hmac::{Hmac, KeyInit as _, Mac as _};
use rustls::{
    ServerConfig,
    pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer},
};
use serde_json::Value;
use sha2::Sha256;
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};
use tokio_rustls::TlsAcceptor;

use crate::{certificate::Certified, eventually};

/// How long `/slow` takes.
const SLOW: Duration = Duration::from_millis(200);

/// One request that came.
#[derive(Clone, Debug)]
pub struct Got {
    /// Where to.
    pub path: String,
    /// The headers, by their names in lower case.
    pub headers: HashMap<String, String>,
    /// The body as it came.
    pub raw: String,
    /// The body.
    pub body: Value,
}

impl Got {
    /// The type of the event.
    pub fn kind(&self) -> &str {
        self.body["type"].as_str().unwrap_or_default()
    }

    /// The id of the event.
    pub fn id(&self) -> &str {
        self.body["id"].as_str().unwrap_or_default()
    }

    /// A header.
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", String::as_str)
    }

    /// The specification's signature, as a receiver would make it.
    pub fn signature(&self, secret: &str) -> String {
        let mut mac = Hmac::<Sha256>::new_from_slice(secret.as_bytes()).expect("a key");
        mac.update(self.header("x-service-timestamp").as_bytes());
        mac.update(b".");
        mac.update(self.raw.as_bytes());
        let digest = mac.finalize().into_bytes();
        format!("sha256={}", digest.iter().map(|b| format!("{b:02x}")).collect::<String>())
    }
}

#[derive(Default)]
struct Seen {
    got: Mutex<Vec<Got>>,
    counts: Mutex<HashMap<String, usize>>,
    /// By path and event.
    attempts: Mutex<HashMap<String, BTreeMap<String, usize>>>,
    connections: AtomicUsize,
    called_at: Mutex<Vec<IpAddr>>,
}

/// The receiver; it ends with its value.
pub struct Receiver {
    address: SocketAddr,
    seen: Arc<Seen>,
    folder: TempDir,
    acceptor: TlsAcceptor,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.tasks.iter().for_each(tokio::task::JoinHandle::abort);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Receiver {
    /// Listens on this machine, with a certificate of an authority of its own.
    pub async fn start() -> Self {
        let mut this = Self::prepared(&["localhost", "127.0.0.1"]);
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        this.listen(listener);
        this
    }

    /// One with a certificate for these names, that does not listen yet.
    pub fn prepared(names: &[&str]) -> Self {
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let folder = tempfile::tempdir().expect("a folder");
        let acceptor = certified(&folder, names);
        let address = SocketAddr::from(([0, 0, 0, 0], 0));
        Self { address, seen: Arc::default(), folder, acceptor, tasks: vec![] }
    }

    /// From now on it listens there, too.
    pub fn listen(&mut self, listener: std::net::TcpListener) {
        self.address = listener.local_addr().expect("an address");
        listener.set_nonblocking(true).expect("it is a socket");
        let listener = TcpListener::from_std(listener).expect("a runtime");
        let (acceptor, own) = (self.acceptor.clone(), Arc::clone(&self.seen));
        self.tasks.push(tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                own.connections.fetch_add(1, Relaxed);
                let here = stream.local_addr().expect("it is connected").ip().to_canonical();
                lock(&own.called_at).push(here);
                tokio::spawn(serve(acceptor.clone(), stream, Arc::clone(&own)));
            }
        }));
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// The addresses at which it was called, connection by connection.
    pub fn called_at(&self) -> Vec<IpAddr> {
        lock(&self.seen.called_at).clone()
    }

    /// An address of it.
    pub fn url(&self, path: &str) -> String {
        format!("https://localhost:{}{path}", self.port())
    }

    /// The file of its authority.
    pub fn authority(&self) -> PathBuf {
        self.folder.path().join("ca.pem")
    }

    /// The settings of a node that may call it, with these pauses before retries.
    pub fn settings(&self, delays: &str) -> Vec<(String, String)> {
        let pairs = [
            ("ROOST_OUTBOUND__ALLOW_PRIVATE", "[\"127.0.0.0/8\", \"::1\"]".to_owned()),
            ("ROOST_OUTBOUND__CA_BUNDLE", self.authority().display().to_string()),
            ("ROOST_WEBHOOKS__RETRY_DELAYS", delays.to_owned()),
        ];
        pairs.map(|(name, value)| (name.to_owned(), value)).to_vec()
    }

    /// What came so far.
    pub fn got(&self) -> Vec<Got> {
        lock(&self.seen.got).clone()
    }

    /// How many requests came to a path.
    pub fn count(&self, path: &str) -> usize {
        lock(&self.seen.counts).get(path).copied().unwrap_or(0)
    }

    /// How often each event came to a path.
    pub fn attempts(&self, path: &str) -> BTreeMap<String, usize> {
        lock(&self.seen.attempts).get(path).cloned().unwrap_or_default()
    }

    /// How many connections were made.
    pub fn connections(&self) -> usize {
        self.seen.connections.load(Relaxed)
    }

    /// What came to a path, once there are so many.
    pub async fn wait_for(&self, path: &str, count: usize) -> Vec<Got> {
        let what = format!("{count} deliveries to {path}");
        eventually(&what, async || {
            let got: Vec<_> = self.got().into_iter().filter(|got| got.path == path).collect();
            match got.len() >= count {
                true => Ok(got),
                false => {
                    let kinds: Vec<_> = got.iter().map(|got| got.kind().to_owned()).collect();
                    Err(format!("{kinds:?}"))
                }
            }
        })
        .await
    }
}

fn certified(folder: &TempDir, names: &[&str]) -> TlsAcceptor {
    let Certified { authority, own, key } = Certified::new(names);
    std::fs::write(folder.path().join("ca.pem"), authority).expect("it is written");
    let private = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialize_der()));
    let config = ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(vec![own.der().clone()], private)
        .expect("a server's settings");
    TlsAcceptor::from(Arc::new(config))
}

type Stream = tokio_rustls::server::TlsStream<TcpStream>;

async fn serve(acceptor: TlsAcceptor, stream: TcpStream, seen: Arc<Seen>) {
    let Ok(mut stream) = acceptor.accept(stream).await else { return };
    while let Some(got) = read(&mut stream).await {
        let attempt = {
            let mut attempts = lock(&seen.attempts);
            let events = attempts.entry(got.path.clone()).or_default();
            let count = events.entry(got.id().to_owned()).or_default();
            *count += 1;
            *count
        };
        let path = got.path.clone();
        lock(&seen.got).push(got);
        *lock(&seen.counts).entry(path.clone()).or_default() += 1;
        let is_last = path.starts_with("/once");
        let status = match path.split('?').next().unwrap_or_default() {
            "/once" => "200 OK\r\nconnection: close",
            "/gone" => "410 Gone",
            "/redirect" => "302 Found\r\nlocation: /ok",
            "/hang" => return tokio::time::sleep(Duration::from_secs(60)).await,
            "/half" => {
                let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-le").await;
                return;
            }
            "/reset" => return reset(&stream),
            "/slow" => {
                tokio::time::sleep(SLOW).await;
                "200 OK"
            }
            path => match path.strip_prefix("/fail/").and_then(|n| n.parse::<usize>().ok()) {
                Some(failures) if attempt <= failures => "500 Internal Server Error",
                _ => "200 OK",
            },
        };
        let answer = format!("HTTP/1.1 {status}\r\ncontent-length: 4\r\n\r\nsure");
        if stream.write_all(answer.as_bytes()).await.is_err() || is_last {
            let _ = stream.shutdown().await;
            return;
        }
    }
}

/// Ends a connection with a reset instead of a word.
fn reset(stream: &Stream) {
    let _ = rustix::net::sockopt::set_socket_linger(stream.get_ref().0, Some(Duration::ZERO));
}

/// A request with a `Content-Length`, which ours have.
async fn read(stream: &mut Stream) -> Option<Got> {
    let mut bytes = vec![];
    let head = loop {
        if let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
            break end;
        }
        let mut part = [0; 4096];
        match stream.read(&mut part).await {
            Ok(0) | Err(_) => return None,
            Ok(count) => bytes.extend_from_slice(&part[..count]),
        }
    };
    let text = String::from_utf8_lossy(&bytes[..head]).into_owned();
    let mut lines = text.lines();
    let path = lines.next()?.split(' ').nth(1)?.to_owned();
    let headers: HashMap<String, String> = lines
        .filter_map(|line| line.split_once(": "))
        .map(|(name, value)| (name.to_lowercase(), value.to_owned()))
        .collect();
    let length: usize = headers.get("content-length")?.parse().ok()?;
    let mut body = bytes.split_off(head + 4);
    while body.len() < length {
        let mut part = [0; 4096];
        match stream.read(&mut part).await {
            Ok(0) | Err(_) => return None,
            Ok(count) => body.extend_from_slice(&part[..count]),
        }
    }
    let raw = String::from_utf8(body).ok()?;
    let body = serde_json::from_str(&raw).unwrap_or_default();
    Some(Got { path, headers, raw, body })
}
