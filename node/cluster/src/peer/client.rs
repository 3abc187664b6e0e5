//! Calls other nodes. One connection per node and class, opened when it is first needed and again
//! when it broke.

use std::{
    collections::HashMap,
    io,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use futures::{
    FutureExt as _,
    future::{BoxFuture, Shared},
};
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Limited};
use hyper::{body::Incoming, client::conn::http2};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls::{ClientConfig, pki_types::ServerName};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    runtime::Handle,
    task::JoinHandle,
    time::Instant,
};
use tokio_rustls::TlsConnector;

use super::{
    Class, PeerBody,
    book::AddressBook,
    exchange::{Exchange, QUESTION_BYTES_MAX},
    name_of, whole,
};

/// How long a connection may take to come up.
const CONNECT_WITHIN: Duration = Duration::from_secs(1);
/// Between pings of a connection that has open requests.
const PING_EVERY: Duration = Duration::from_secs(1);
/// How long a ping may go unanswered before the connection counts as broken.
const PONG_WITHIN: Duration = Duration::from_secs(2);
/// The same for a call that has nobody else to turn to.
const PONG_WITHIN_ONCE: Duration = Duration::from_secs(15);
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
    /// It answered that this node was taken out of the cluster, and that nothing counts on it any more.
    #[error("this node was taken out of the cluster")]
    TakenOut,
    /// It answered that it does not do this.
    #[error("the node answered with status {0}")]
    Refused(u16),
}

type Sender = http2::SendRequest<PeerBody>;

/// What bytes run over between two nodes.
pub trait Line: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Line for T {}

/// Connects to an address.
pub type Dial = Arc<dyn Fn(String) -> BoxFuture<'static, io::Result<Box<dyn Line>>> + Send + Sync>;

/// How other nodes are reached.
#[derive(Clone)]
enum Road {
    /// Over TCP and TLS: each end proves who it is.
    Tls(TlsConnector),
    /// Over connections that somebody else makes.
    Dialed(Dial),
}

/// A connection that comes up, whoever waits for it and for how long.
type Attempt = Shared<BoxFuture<'static, Result<Sender, CallError>>>;

/// The connection of one class to one node.
#[derive(Default)]
struct Talk {
    sender: Mutex<Option<(String, Attempt)>>,
    exchange: Mutex<Option<(String, Arc<Exchange>)>>,
    /// One at a time opens an exchange.
    opens: tokio::sync::Mutex<()>,
}

impl Talk {
    /// The exchange with whoever is at this address, while there is one.
    fn exchange(&self, address: &str) -> Option<Arc<Exchange>> {
        let exchange = self.exchange.lock().unwrap_or_else(PoisonError::into_inner);
        let (at, exchange) = exchange.as_ref()?;
        (at == address && exchange.is_open()).then(|| Arc::clone(exchange))
    }
}

/// The connections of this node to all others.
pub struct PeerClient {
    road: Road,
    /// Where connections are driven, whoever is the first to need one: those of the log must not wait for a thread
    /// that serves clients.
    home: Option<Handle>,
    from: u64,
    book: Arc<AddressBook>,
    lines: Mutex<HashMap<(u64, Class), Arc<Talk>>>,
}

impl PeerClient {
    /// For the node with this number.
    pub fn new(tls: Arc<ClientConfig>, from: u64, book: Arc<AddressBook>) -> Arc<Self> {
        let road = Road::Tls(TlsConnector::from(tls));
        Arc::new(Self {
            road,
            home: Handle::try_current().ok(),
            from,
            book,
            lines: Mutex::default(),
        })
    }

    /// The same over connections that somebody else makes, such as a simulated network.
    pub fn over(dial: Dial, from: u64, book: Arc<AddressBook>) -> Arc<Self> {
        Arc::new(Self { road: Road::Dialed(dial), home: None, from, book, lines: Mutex::default() })
    }

    /// Where nodes are.
    pub fn book(&self) -> &AddressBook {
        &self.book
    }

    fn line(&self, to: u64, class: Class) -> Arc<Talk> {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(lines.entry((to, class)).or_default())
    }

    async fn sender(&self, to: u64, class: Class) -> Result<Sender, CallError> {
        let unknown = || CallError::Unreached("its address is not known".to_owned());
        let address = self.book.get(to).ok_or_else(unknown)?;
        let attempt = {
            let line = self.line(to, class);
            let mut line = line.sender.lock().unwrap_or_else(PoisonError::into_inner);
            let current = line.take().filter(|(at, attempt)| *at == address && is_good(attempt));
            let (_, attempt) = line.insert(match current {
                Some(current) => current,
                None => (address.clone(), self.attempt(to, address)),
            });
            attempt.clone()
        };
        attempt.await
    }

    /// Goes on when its callers have given up: where a connection takes longer than each of them waits, none would
    /// ever come up.
    fn attempt(&self, to: u64, address: String) -> Attempt {
        let road = self.road.clone();
        let connected = async move {
            let name = name_of(to);
            let connected = connect(&road, &address, &name, PONG_WITHIN);
            let late = |_| io::Error::other("it did not answer");
            tokio::time::timeout(CONNECT_WITHIN, connected).await.map_err(late)?
        };
        let connected = self.at_home(connected);
        let connected = async move { connected.await.map_err(io::Error::other)? };
        let unreached = |error: io::Error| CallError::Unreached(told(&error));
        connected.map(move |connected| connected.map_err(unreached)).boxed().shared()
    }

    /// Runs a task where connections are driven.
    pub(crate) fn at_home<T: Send + 'static>(
        &self,
        task: impl Future<Output = T> + Send + 'static,
    ) -> JoinHandle<T> {
        match &self.home {
            Some(home) => home.spawn(task),
            None => tokio::spawn(task),
        }
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
        sender.ready().await.map_err(|error| CallError::Unreached(told(&error)))?;
        sender.send_request(request).await.map_err(|error| match error.is_canceled() {
            true => CallError::Unreached(told(&error)),
            false => CallError::Broken(told(&error)),
        })
    }

    /// What groups say to each other all the time: the same as [`PeerClient::call`], over an exchange where it is
    /// short.
    pub async fn message(
        &self,
        to: u64,
        class: Class,
        path: &str,
        body: Bytes,
        within: Duration,
    ) -> Result<Bytes, CallError> {
        if body.len() > QUESTION_BYTES_MAX {
            return self.call(to, class, path, body, within).await;
        }
        let until = Instant::now() + within;
        let exchange = answered(within, self.exchange(to, class)).await?;
        let left = until.saturating_duration_since(Instant::now());
        let (status, body) = exchange.ask(path, &body, left).await?;
        said(status, body)
    }

    async fn exchange(&self, to: u64, class: Class) -> Result<Arc<Exchange>, CallError> {
        let unknown = || CallError::Unreached("its address is not known".to_owned());
        let address = self.book.get(to).ok_or_else(unknown)?;
        let line = self.line(to, class);
        if let Some(exchange) = line.exchange(&address) {
            return Ok(exchange);
        }
        let _opens = line.opens.lock().await;
        if let Some(exchange) = line.exchange(&address) {
            return Ok(exchange);
        }
        let (mut request, exchange) = Exchange::open();
        let exchange = Arc::new(exchange);
        let mut sender = self.sender(to, class).await?;
        request.headers_mut().insert(FROM, self.from.into());
        sender.ready().await.map_err(|error| CallError::Unreached(told(&error)))?;
        let opened = Arc::clone(&exchange);
        let talks = async move {
            match sender.send_request(request).await {
                Ok(response) if response.status() == StatusCode::OK => {
                    opened.listen(response.into_body()).await;
                }
                Ok(response) => opened.end(Some(response.status())),
                Err(_) => opened.end(None),
            }
        };
        self.at_home(talks);
        *line.exchange.lock().unwrap_or_else(PoisonError::into_inner) =
            Some((address, Arc::clone(&exchange)));
        Ok(exchange)
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
        answered(within, exchange).await
    }
}

/// Whether a connection comes up yet, or is there. That it failed is no news for whoever asks later, although nobody
/// waited for it any more when it did.
fn is_good(attempt: &Attempt) -> bool {
    let done = attempt.clone().now_or_never();
    done.is_none_or(|connected| connected.is_ok_and(|sender| !sender.is_closed()))
}

async fn answered<T>(
    within: Duration,
    exchange: impl Future<Output = Result<T, CallError>>,
) -> Result<T, CallError> {
    let late = |_| CallError::Broken(format!("no answer within {} ms", within.as_millis()));
    tokio::time::timeout(within, exchange).await.map_err(late)?
}

fn post(path: &str, body: Bytes) -> Request<PeerBody> {
    // An absolute address, as HTTP/2 asks for; TLS has checked the name already.
    Request::post(format!("https://peer{path}")).body(whole(body)).expect("our own paths are paths")
}

async fn collect(response: Response<Incoming>) -> Result<Bytes, CallError> {
    let status = response.status();
    let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect().await;
    said(status, body.map_err(|error| CallError::Broken(told(&*error)))?.to_bytes())
}

fn said(status: StatusCode, body: Bytes) -> Result<Bytes, CallError> {
    match status {
        StatusCode::OK => Ok(body),
        StatusCode::CONFLICT => Err(CallError::Said(String::from_utf8_lossy(&body).into_owned())),
        StatusCode::GONE => Err(CallError::TakenOut),
        other => Err(CallError::Refused(other.as_u16())),
    }
}

async fn connect(
    road: &Road,
    address: &str,
    name: &str,
    pong_within: Duration,
) -> io::Result<Sender> {
    let stream: Box<dyn Line> = match road {
        Road::Tls(tls) => {
            let stream = TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            let name = ServerName::try_from(name.to_owned()).map_err(io::Error::other)?;
            Box::new(tls.connect(name, stream).await?)
        }
        Road::Dialed(dial) => dial(address.to_owned()).await?,
    };
    let mut builder = http2::Builder::new(TokioExecutor::new());
    if let Road::Dialed(_) = road {
        // h2 asks the machine's clock for this one alone; a simulation has another.
        builder.reset_stream_duration(Duration::from_secs(24 * 3600));
    }
    let (sender, connection) = builder
        .timer(TokioTimer::new())
        .keep_alive_interval(PING_EVERY)
        .keep_alive_timeout(pong_within)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .initial_stream_window_size(STREAM_WINDOW)
        .max_frame_size(64 * 1024)
        .handshake(TokioIo::new(stream))
        .await
        .map_err(io::Error::other)?;
    tokio::spawn(async move {
        // Whoever waits on it hears of its end.
        let _ = connection.await;
    });
    Ok(sender)
}

/// What an error says with what it comes from: "http2 error" alone helps nobody.
fn told(error: &(dyn std::error::Error + 'static)) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// One call by somebody who has nobody else to turn to: a command, or a node that joins. A busy node
/// is waited for.
pub struct Once {
    /// With a certificate, where there is one.
    pub tls: Arc<ClientConfig>,
    /// Who asks, where there is a certificate for that.
    pub from: Option<u64>,
    /// Who is asked, where its number is known.
    pub to: Option<u64>,
}

impl Once {
    /// Asks whoever listens at the address, with an answer within this time.
    pub async fn call(
        &self,
        address: &str,
        path: &str,
        body: Bytes,
        within: Duration,
    ) -> Result<Bytes, CallError> {
        let exchange = async {
            let mut sender = self.connect(address).await?;
            let mut request = post(path, body);
            if let Some(from) = self.from {
                request.headers_mut().insert(FROM, from.into());
            }
            let answer = sender.send_request(request).await;
            collect(answer.map_err(|error| CallError::Broken(told(&error)))?).await
        };
        answered(within, exchange).await
    }

    async fn connect(&self, address: &str) -> Result<Sender, CallError> {
        let road = Road::Tls(TlsConnector::from(Arc::clone(&self.tls)));
        let name = self.to.map_or_else(|| super::ANY_NODE.to_owned(), name_of);
        let connected = connect(&road, address, &name, PONG_WITHIN_ONCE);
        tokio::time::timeout(CONNECT_WITHIN * 5, connected)
            .await
            .map_err(|_| CallError::Unreached("it did not answer".to_owned()))?
            .map_err(|error| CallError::Unreached(told(&error)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peer::server::{self, Answerer, Standing};

    /// Answers everything with nothing.
    struct Nods;

    impl Answerer for Nods {
        fn standing(&self, _: u64) -> Standing {
            Standing::Member
        }

        fn answer(
            self: Arc<Self>,
            _: u64,
            _: Request<Incoming>,
        ) -> BoxFuture<'static, Response<PeerBody>> {
            std::future::ready(server::status(StatusCode::OK)).boxed()
        }

        fn metrics(&self) -> Response<PeerBody> {
            server::status(StatusCode::OK)
        }

        fn join(self: Arc<Self>, _: Request<Incoming>) -> BoxFuture<'static, Response<PeerBody>> {
            std::future::ready(server::status(StatusCode::OK)).boxed()
        }
    }

    /// A client of node 2, whose connections take so long to come up.
    fn slow(connects_in: Duration) -> Arc<PeerClient> {
        let dial: Dial = Arc::new(move |_| {
            async move {
                tokio::time::sleep(connects_in).await;
                let (here, there) = tokio::io::duplex(64 * 1024);
                tokio::spawn(server::attend(Box::new(there), 1, Arc::new(Nods)));
                Ok(Box::new(here) as Box<dyn Line>)
            }
            .boxed()
        });
        let book = Arc::new(AddressBook::default());
        book.put(2, "node-2:1");
        PeerClient::over(dial, 1, book)
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_comes_up_although_nobody_waits_that_long_for_it() {
        let client = slow(CONNECT_WITHIN / 2);
        let ask = || client.call(2, Class::Beats, "/beat", Bytes::new(), Duration::from_millis(50));
        assert!(ask().await.is_err(), "it takes longer than that");
        tokio::time::sleep(CONNECT_WITHIN).await;
        ask().await.expect("it is there by now");
    }

    #[tokio::test(start_paused = true)]
    async fn a_failure_that_nobody_waited_for_is_not_told_later() {
        let client = slow(CONNECT_WITHIN * 2);
        let within = |within| client.call(2, Class::Beats, "/beat", Bytes::new(), within);
        let short = Duration::from_millis(50);
        assert!(within(short).await.is_err(), "it takes longer than that");
        tokio::time::sleep(CONNECT_WITHIN * 2).await;
        let again = Instant::now();
        within(CONNECT_WITHIN * 2).await.expect_err("it takes too long");
        assert!(again.elapsed() >= CONNECT_WITHIN, "it was tried anew");
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_failed_is_tried_again() {
        let client = slow(CONNECT_WITHIN * 2);
        let ask = || client.call(2, Class::Beats, "/beat", Bytes::new(), CONNECT_WITHIN * 2);
        for _ in 0..2 {
            let failed = ask().await.expect_err("it takes too long");
            assert!(matches!(failed, CallError::Unreached(_)), "{failed}");
        }
    }
}
