//! Calls other nodes. One connection per node and class, opened when it is first needed and again
//! when it broke.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Limited};
use hyper::{body::Incoming, client::conn::http2};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls::{ClientConfig, pki_types::ServerName};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::{Class, PeerBody, book::AddressBook, name_of, whole};

/// How long a connection may take to come up.
const CONNECT_WITHIN: Duration = Duration::from_secs(1);
/// Between pings of a connection that has open requests.
const PING_EVERY: Duration = Duration::from_secs(1);
/// How long a ping may go unanswered before the connection counts as broken.
const PONG_WITHIN: Duration = Duration::from_secs(2);
/// Bytes on their way to one node over one connection.
const CONNECTION_WINDOW: u32 = 8 * 1024 * 1024;
/// Bytes on their way of one request.
const STREAM_WINDOW: u32 = 2 * 1024 * 1024;
/// Longest answer of a call.
pub const ANSWER_BYTES_MAX: usize = 80 * 1024 * 1024;

/// Names the calling node on every request.
pub const FROM: &str = "x-roost-node";

/// Why another node has no answer.
#[derive(Clone, Debug, thiserror::Error)]
pub enum CallError {
    /// Nothing was sent.
    #[error("the node can't be reached: {0}")]
    Unreached(String),
    /// Something may have been sent; its effect is unknown.
    #[error("the connection to the node broke: {0}")]
    Broken(String),
    /// It answered why not.
    #[error("{0}")]
    Said(String),
    /// It answered that it does not do this.
    #[error("the node answered with status {0}")]
    Refused(u16),
}

type Sender = http2::SendRequest<PeerBody>;

#[derive(Default)]
struct Line(tokio::sync::Mutex<Option<(String, Sender)>>);

/// The connections of this node to all others.
pub struct PeerClient {
    tls: TlsConnector,
    from: u64,
    book: Arc<AddressBook>,
    lines: Mutex<HashMap<(u64, Class), Arc<Line>>>,
}

impl PeerClient {
    /// For the node with this number.
    pub fn new(tls: Arc<ClientConfig>, from: u64, book: Arc<AddressBook>) -> Arc<Self> {
        let lines = Mutex::default();
        Arc::new(Self { tls: TlsConnector::from(tls), from, book, lines })
    }

    /// Where nodes are.
    pub fn book(&self) -> &AddressBook {
        &self.book
    }

    fn line(&self, to: u64, class: Class) -> Arc<Line> {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(lines.entry((to, class)).or_default())
    }

    async fn sender(&self, to: u64, class: Class) -> Result<Sender, CallError> {
        let unknown = || CallError::Unreached("its address is not known".to_owned());
        let address = self.book.get(to).ok_or_else(unknown)?;
        let line = self.line(to, class);
        let mut line = line.0.lock().await;
        if let Some((at, sender)) = &*line
            && *at == address
            && !sender.is_closed()
        {
            return Ok(sender.clone());
        }
        let name = name_of(to);
        let sender = tokio::time::timeout(CONNECT_WITHIN, connect(&self.tls, &address, &name))
            .await
            .map_err(|_| CallError::Unreached("it did not answer".to_owned()))?
            .map_err(|error| CallError::Unreached(error.to_string()))?;
        *line = Some((address, sender.clone()));
        Ok(sender)
    }

    /// Sends a request and gives the beginning of the answer.
    pub async fn send(
        &self,
        to: u64,
        class: Class,
        mut request: Request<PeerBody>,
    ) -> Result<Response<Incoming>, CallError> {
        let mut sender = self.sender(to, class).await?;
        request.headers_mut().insert(FROM, self.from.into());
        // A connection that is being shut down takes nothing any more.
        sender.ready().await.map_err(|error| CallError::Unreached(error.to_string()))?;
        sender.send_request(request).await.map_err(|error| match error.is_canceled() {
            true => CallError::Unreached(error.to_string()),
            false => CallError::Broken(error.to_string()),
        })
    }

    /// A call with whole bodies, within this time.
    pub async fn call(
        &self,
        to: u64,
        class: Class,
        path: &str,
        body: Bytes,
        within: Duration,
    ) -> Result<Bytes, CallError> {
        let exchange = async {
            let response = self.send(to, class, post(path, body)).await?;
            collect(response).await
        };
        let late = |_| CallError::Broken(format!("no answer within {} ms", within.as_millis()));
        tokio::time::timeout(within, exchange).await.map_err(late)?
    }
}

fn post(path: &str, body: Bytes) -> Request<PeerBody> {
    // An absolute address, as HTTP/2 asks for; TLS has checked the name already.
    Request::post(format!("https://peer{path}")).body(whole(body)).expect("our own paths are paths")
}

async fn collect(response: Response<Incoming>) -> Result<Bytes, CallError> {
    let status = response.status();
    let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect().await;
    let body = body.map_err(|error| CallError::Broken(error.to_string()))?.to_bytes();
    match status {
        StatusCode::OK => Ok(body),
        StatusCode::CONFLICT => Err(CallError::Said(String::from_utf8_lossy(&body).into_owned())),
        other => Err(CallError::Refused(other.as_u16())),
    }
}

async fn connect(tls: &TlsConnector, address: &str, name: &str) -> std::io::Result<Sender> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let name = ServerName::try_from(name.to_owned()).map_err(std::io::Error::other)?;
    let stream = tls.connect(name, stream).await?;
    let (sender, connection) = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .keep_alive_interval(PING_EVERY)
        .keep_alive_timeout(PONG_WITHIN)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .initial_stream_window_size(STREAM_WINDOW)
        .max_frame_size(64 * 1024)
        .handshake(TokioIo::new(stream))
        .await
        .map_err(std::io::Error::other)?;
    tokio::spawn(async move {
        // Whoever waits on it hears of its end.
        let _ = connection.await;
    });
    Ok(sender)
}

/// One call to a node whose number is not known: to join. `from` is who asks, where there is a
/// certificate for that.
pub async fn call_once(
    tls: Arc<ClientConfig>,
    from: Option<u64>,
    address: &str,
    path: &str,
    body: Bytes,
) -> Result<(u16, Bytes), CallError> {
    let tls = TlsConnector::from(tls);
    let sender = tokio::time::timeout(CONNECT_WITHIN * 5, connect(&tls, address, super::ANY_NODE));
    let sender = sender.await.map_err(|_| CallError::Unreached("it did not answer".to_owned()))?;
    let mut sender = sender.map_err(|error| CallError::Unreached(error.to_string()))?;
    let broken = |error: hyper::Error| CallError::Broken(error.to_string());
    let mut request = post(path, body);
    if let Some(from) = from {
        request.headers_mut().insert(FROM, from.into());
    }
    let response = sender.send_request(request).await.map_err(broken)?;
    let status = response.status().as_u16();
    let body = response.into_body().collect().await.map_err(broken)?.to_bytes();
    Ok((status, body))
}
