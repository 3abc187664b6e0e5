//! A receiver of webhooks, as the demo has it: HTTPS on this machine, with a certificate of its own.

use std::{net::SocketAddr, path::Path, sync::Arc, time::Duration};

use anyhow::Context as _;
use rcgen::{CertificateParams, KeyPair};
use rustls::{
    ServerConfig,
    pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer},
};
use serde_json::Value;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::{Mutex, mpsc},
};
use tokio_rustls::TlsAcceptor;

use crate::config::Config;

/// How long a webhook may take to come.
const ARRIVES_WITHIN: Duration = Duration::from_secs(15);
/// Most bytes of one request.
const REQUEST_BYTES_MAX: usize = 256 * 1024;

/// What came.
pub struct Delivery {
    /// `X-Service-Signature`.
    pub signature: String,
    /// `X-Service-Timestamp`.
    pub timestamp: u64,
    /// The body, byte for byte.
    pub body: Vec<u8>,
}

/// Receives until it is dropped.
pub struct Receiver {
    address: SocketAddr,
    authority: String,
    came: Mutex<mpsc::Receiver<Delivery>>,
}

impl Receiver {
    /// Listens on any port; its certificate is kept in `folder`.
    pub async fn start(folder: &Path) -> anyhow::Result<Self> {
        let key = KeyPair::generate()?;
        let certificate =
            CertificateParams::new(vec!["localhost".to_owned()])?.self_signed(&key)?;
        let authority = folder.join("receiver.pem");
        std::fs::write(&authority, certificate.pem())?;
        let private = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let config = ServerConfig::builder()
            .with_no_client_auth()
            .with_single_cert(vec![certificate.der().clone()], private)?;
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let address = listener.local_addr()?;
        let (tell, came) = mpsc::channel(64);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(acceptor.clone(), stream, tell.clone()));
            }
        });
        let authority = authority.to_str().context("a path that is a text")?.to_owned();
        Ok(Self { address, authority, came: Mutex::new(came) })
    }

    /// Where it is.
    pub fn url(&self) -> String {
        format!("https://localhost:{}/hook", self.address.port())
    }

    /// Settings of a node that may call it.
    pub fn allowed(&self, mut config: Config) -> Config {
        config.outbound.allow_private.extend(["127.0.0.0/8".to_owned(), "::1".to_owned()]);
        config.outbound.ca_bundle.clone_from(&self.authority);
        config
    }

    /// The first `agent.deployed` that comes.
    pub async fn deployed(&self) -> Option<Delivery> {
        let mut came = self.came.lock().await;
        let found = async {
            while let Some(delivery) = came.recv().await {
                let event: Value = serde_json::from_slice(&delivery.body).unwrap_or_default();
                if event["type"] == "agent.deployed" {
                    return Some(delivery);
                }
            }
            None
        };
        tokio::time::timeout(ARRIVES_WITHIN, found).await.ok().flatten()
    }
}

async fn serve(acceptor: TlsAcceptor, stream: TcpStream, tell: mpsc::Sender<Delivery>) {
    let Ok(mut stream) = acceptor.accept(stream).await else { return };
    let mut bytes = vec![];
    loop {
        while let Some((delivery, used)) = parse(&bytes) {
            bytes.drain(..used);
            // Nobody waits for it any more: the answer stands all the same.
            let _ = tell.try_send(delivery);
            let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n";
            if stream.write_all(answer).await.is_err() {
                return;
            }
        }
        let mut part = [0; 8192];
        match stream.read(&mut part).await {
            Ok(count) if count > 0 && bytes.len() < REQUEST_BYTES_MAX => {
                bytes.extend_from_slice(&part[..count]);
            }
            _ => return,
        }
    }
}

/// A whole request, and how many bytes it has.
fn parse(bytes: &[u8]) -> Option<(Delivery, usize)> {
    let head = bytes.windows(4).position(|four| four == b"\r\n\r\n")?;
    let text = std::str::from_utf8(&bytes[..head]).ok()?;
    let header = |name: &str| {
        let mut lines = text.lines().filter_map(|line| line.split_once(": "));
        lines.find(|(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, value)| value.to_owned())
    };
    let length: usize = header("content-length")?.parse().ok()?;
    let body = bytes.get(head + 4..head + 4 + length)?.to_vec();
    let signature = header("x-service-signature").unwrap_or_default();
    let timestamp = header("x-service-timestamp")?.parse().ok()?;
    Some((Delivery { signature, timestamp, body }, head + 4 + length))
}
