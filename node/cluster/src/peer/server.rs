//! Answers other nodes. Whoever has no certificate gets the path of joining and nothing else.

use std::{
    io,
    sync::{Arc, OnceLock},
    time::Duration,
};

use bytes::Bytes;
use futures::future::BoxFuture;
use http::{Request, Response, StatusCode};
use hyper::{body::Incoming, server::conn::http2, service::service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls::{ServerConfig, pki_types::CertificateDer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    sync::watch,
};
use tokio_rustls::TlsAcceptor;

use super::{
    PeerBody,
    client::{FROM, Line},
    tls::belongs_to,
    whole,
};
use crate::entrance::{Admitted, Entrance};

/// Connections of peers at once.
const CONNECTIONS_MAX: usize = 4096;
/// How long a handshake may take.
const HANDSHAKE_WITHIN: Duration = Duration::from_secs(5);
/// Requests at once on one connection.
const STREAMS_MAX: u32 = 32_768;
/// Requests that were given up before they were looked at, as after a pause of this node.
const GIVEN_UP_MAX: usize = 32_768;
/// Where figures are scraped.
pub const METRICS_PATH: &str = "/metrics";
/// Where a token is redeemed.
pub const JOIN_PATH: &str = "/join";

/// What a node is to the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It belongs.
    Member,
    /// It was taken out, and a group still counts on it: it goes on answering, and nobody answers it.
    Leaving,
    /// It was taken out, and nothing counts on it any more. It is told (410) and may end.
    Gone,
}

/// What answers.
pub trait Answerer: Send + Sync + 'static {
    /// What the node with this number is to the cluster, as far as is known here.
    fn standing(&self, raft_id: u64) -> Standing;
    /// A request of another node.
    fn answer(
        self: Arc<Self>,
        from: u64,
        request: Request<Incoming>,
    ) -> BoxFuture<'static, Response<PeerBody>>;
    /// What is measured on this node, for whoever has a certificate of the cluster.
    fn metrics(&self) -> Response<PeerBody>;
    /// A request of a stranger that would join.
    fn join(self: Arc<Self>, request: Request<Incoming>) -> BoxFuture<'static, Response<PeerBody>>;
}

/// An answer without a body.
pub fn status(status: StatusCode) -> Response<PeerBody> {
    let mut response = Response::new(whole(Bytes::new()));
    *response.status_mut() = status;
    response
}

/// Takes connections until told to stop.
pub async fn serve(
    listener: TcpListener,
    tls: Arc<ServerConfig>,
    answerer: Arc<dyn Answerer>,
    mut stop: watch::Receiver<bool>,
) {
    let acceptor = TlsAcceptor::from(tls);
    let entrance = Entrance::new(listener, CONNECTIONS_MAX);
    loop {
        let Admitted { stream, permit, .. } = tokio::select! {
            admitted = entrance.next() => admitted,
            _ = stop.wait_for(|stop| *stop) => return,
        };
        let (acceptor, answerer, mut stop) =
            (acceptor.clone(), Arc::clone(&answerer), stop.clone());
        tokio::spawn(async move {
            let _permit = permit;
            tokio::select! {
                ended = connection(stream, acceptor, answerer) => if let Err(error) = ended {
                    tracing::debug!(%error, "a peer's connection ended");
                },
                _ = stop.wait_for(|stop| *stop) => {}
            }
        });
    }
}

async fn connection(
    stream: TcpStream,
    acceptor: TlsAcceptor,
    answerer: Arc<dyn Answerer>,
) -> io::Result<()> {
    let stream = tokio::time::timeout(HANDSHAKE_WITHIN, acceptor.accept(stream)).await??;
    let certificates = stream.get_ref().1.peer_certificates();
    let certificate = certificates.and_then(|chain| chain.first()).cloned();
    let papers = match certificate {
        Some(one) => Papers::Certificate(one.into_owned(), OnceLock::new()),
        None => Papers::None,
    };
    talk(stream, Visitor { papers, answerer }).await
}

/// Answers a node that is known to be at the other end of a connection which somebody else has made,
/// such as one of a simulated network.
pub async fn attend(
    stream: Box<dyn Line>,
    from: u64,
    answerer: Arc<dyn Answerer>,
) -> io::Result<()> {
    talk(stream, Visitor { papers: Papers::Known(from), answerer }).await
}

async fn talk(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    visitor: Visitor,
) -> io::Result<()> {
    let visitor = Arc::new(visitor);
    let service = service_fn(move |request| {
        let visitor = Arc::clone(&visitor);
        async move { Ok::<_, std::convert::Infallible>(visitor.answer(request).await) }
    });
    http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .auto_date_header(false)
        .max_concurrent_streams(STREAMS_MAX)
        .max_pending_accept_reset_streams(GIVEN_UP_MAX)
        .keep_alive_interval(Duration::from_secs(5))
        .keep_alive_timeout(Duration::from_secs(10))
        .initial_connection_window_size(8 * 1024 * 1024)
        .initial_stream_window_size(2 * 1024 * 1024)
        .max_frame_size(64 * 1024)
        .serve_connection(TokioIo::new(stream), service)
        .await
        .map_err(io::Error::other)
}

/// Whoever is at the other end.
struct Visitor {
    papers: Papers,
    answerer: Arc<dyn Answerer>,
}

/// What it can show.
enum Papers {
    /// A certificate of the cluster, and the number that it was found to be for.
    Certificate(CertificateDer<'static>, OnceLock<u64>),
    /// It was made known in another way.
    Known(u64),
    /// Nothing.
    None,
}

impl Visitor {
    async fn answer(&self, request: Request<Incoming>) -> Response<PeerBody> {
        let answerer = Arc::clone(&self.answerer);
        if request.uri().path() == JOIN_PATH {
            return answerer.join(request).await;
        }
        if request.uri().path() == METRICS_PATH && !matches!(self.papers, Papers::None) {
            return answerer.metrics();
        }
        match self.node(&request) {
            Some(from) => match answerer.standing(from) {
                Standing::Member => answerer.answer(from, request).await,
                Standing::Leaving => status(StatusCode::UNAUTHORIZED),
                Standing::Gone => status(StatusCode::GONE),
            },
            None => status(StatusCode::UNAUTHORIZED),
        }
    }

    /// The node that its papers say it is.
    fn node(&self, request: &Request<Incoming>) -> Option<u64> {
        let from: u64 = request.headers().get(FROM)?.to_str().ok()?.parse().ok()?;
        let is_it = match &self.papers {
            Papers::Certificate(certificate, known) => {
                let is_it = known.get() == Some(&from) || belongs_to(certificate, from);
                is_it.then(|| known.set(from)).is_some()
            }
            Papers::Known(node) => *node == from,
            Papers::None => false,
        };
        is_it.then_some(from)
    }
}
