//! One connection of a client, from its first byte on. Clear text is told why it is not served (`decisions` §1),
//! and never redirected, since a redirect hides a leaked key.

use std::{
    convert::Infallible,
    io,
    net::{IpAddr, SocketAddr},
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    task::{Context, Poll},
    time::Duration,
};

use actors::{limiter::Standing, world::World};
use bytes::Bytes;
use domain::RequestId;
use futures::future::BoxFuture;
use http_body_util::combinators::BoxBody;
use hyper::{
    body::Incoming,
    server::conn::{http1, http2},
    service::Service,
};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::graceful::GracefulConnection,
};
use poem::{
    Endpoint as _, Response,
    endpoint::BoxEndpoint,
    http::uri::Scheme,
    web::{LocalAddr, RemoteAddr},
};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf},
    net::TcpStream,
    sync::watch,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};

/// How long a handshake may take, and a clear-text caller to listen.
const GREETED_WITHIN: Duration = Duration::from_secs(10);
/// First byte of a TLS record that begins a handshake.
const TLS_HANDSHAKE: u8 = 0x16;
/// How long a connection stays open on which nothing is asked, and how long a request's head may take.
const IDLE_CONNECTION: Duration = Duration::from_secs(120);
/// Looks at a connection of HTTP/2 within that time.
const IDLE_LOOKS: u32 = 4;
/// Requests at once on one connection of HTTP/2.
const HTTP2_STREAMS_MAX: u32 = 256;
/// Requests that a client may take back before they were looked at (CVE-2023-44487).
const HTTP2_TAKEN_BACK_MAX: usize = 20;
/// Largest head on a connection of HTTP/2.
const HTTP2_HEAD_BYTES_MAX: u32 = 16 * 1024;
/// How much of a clear-text request is read before the connection closes.
const CLEAR_TEXT_READ_MAX: usize = 64 * 1024;

/// What all connections share.
pub struct House {
    /// Shakes hands.
    pub acceptor: TlsAcceptor,
    /// Knows where an address stands.
    pub world: Arc<World>,
    /// Answers.
    pub routes: BoxEndpoint<'static, Response>,
    /// Where the door is.
    pub local: SocketAddr,
    /// Says when it closes.
    pub stopped: watch::Receiver<bool>,
}

/// Serves a connection to its end. Once the door closes, what is being answered is answered.
pub async fn receive(stream: TcpStream, remote: SocketAddr, house: &Arc<House>) {
    let greeted = tokio::time::timeout(GREETED_WITHIN, greet(stream, remote, house)).await;
    // Whoever does not finish a handshake, or breaks it, is not told anything.
    let Ok(Ok(Some(stream))) = greeted else { return };
    let (house, remote) = (Arc::clone(house), RemoteAddr(remote.into()));
    let stopped = house.stopped.clone();
    let answers = Answers { local: LocalAddr(house.local.into()), house, remote };
    match stream.get_ref().1.alpn_protocol() {
        Some(b"h2") => many_at_once(stream, answers, stopped).await,
        Some(_) | None => one_by_one(stream, answers, stopped).await,
    }
}

/// Establishes TLS; `None` means that there is nothing more to say.
async fn greet(
    mut stream: TcpStream,
    remote: SocketAddr,
    house: &House,
) -> io::Result<Option<Box<TlsStream<TcpStream>>>> {
    let mut first = [0; 1];
    match stream.peek(&mut first).await? {
        0 => Ok(None),
        _ if first[0] == TLS_HANDSHAKE => {
            house.acceptor.accept(stream).await.map(|stream| Some(Box::new(stream)))
        }
        _ => {
            let answer = refusal(&house.world, remote.ip());
            refuse(&mut stream, &answer).await.map(|()| None)
        }
    }
}

/// The answer to clear text. It counts nothing and says, as every answer, where the address stands.
fn refusal(world: &World, remote: IpAddr) -> Vec<u8> {
    let (now, request_id) = (world.now(), world.mint(RequestId::new));
    let Standing { limit, remaining, reset, .. } = world.standing_of_address(Some(remote));
    let body = format!(
        r#"{{"success":false,"error":{{"code":"HTTPS_REQUIRED","message":"this port speaks HTTPS only; use https:// in the address","details":{{}}}},"meta":{{"request_id":"{request_id}","timestamp":"{now}"}}}}"#
    );
    format!(
        "HTTP/1.1 403 Forbidden\r\ncontent-type: application/json; charset=utf-8\r\nx-request-id: {request_id}\r\n\
         x-ratelimit-limit: {limit}\r\nx-ratelimit-remaining: {remaining}\r\nx-ratelimit-reset: {reset}\r\n\
         content-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

/// Answers, then reads the request: closing before that would throw the answer away.
async fn refuse(stream: &mut TcpStream, answer: &[u8]) -> io::Result<()> {
    stream.write_all(answer).await?;
    stream.shutdown().await?;
    let (mut rest, mut read) = ([0; 4096], 0);
    while read < CLEAR_TEXT_READ_MAX {
        match stream.read(&mut rest).await? {
            0 => break,
            more => read += more,
        }
    }
    Ok(())
}

/// HTTP/1.1.
async fn one_by_one(
    stream: Box<TlsStream<TcpStream>>,
    answers: Answers,
    stopped: watch::Receiver<bool>,
) {
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(IDLE_CONNECTION)
        .serve_connection(TokioIo::new(stream), answers);
    // The timer ends it when nothing is asked.
    until(connection, stopped, std::future::pending()).await;
}

/// HTTP/2.
async fn many_at_once(
    stream: Box<TlsStream<TcpStream>>,
    answers: Answers,
    stopped: watch::Receiver<bool>,
) {
    let moved = Arc::new(AtomicBool::new(true));
    let stream = Watched { stream, moved: Arc::clone(&moved) };
    let connection = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .max_concurrent_streams(HTTP2_STREAMS_MAX)
        .max_pending_accept_reset_streams(HTTP2_TAKEN_BACK_MAX)
        .max_header_list_size(HTTP2_HEAD_BYTES_MAX)
        .serve_connection(TokioIo::new(stream), answers);
    until(connection, stopped, nothing_moves(&moved)).await;
}

/// Sees a connection to its end. Once the door closes, or it is idle, it takes no more requests.
async fn until(
    connection: impl GracefulConnection,
    mut stopped: watch::Receiver<bool>,
    idle: impl Future<Output = ()>,
) {
    let mut connection = pin!(connection);
    tokio::select! {
        biased;
        _ = connection.as_mut() => return,
        _ = stopped.wait_for(|stopped| *stopped) => {}
        () = idle => {}
    }
    connection.as_mut().graceful_shutdown();
    // Its end is the client's to notice.
    let _ = connection.await;
}

/// Waits until nothing was read or written for about [`IDLE_CONNECTION`].
async fn nothing_moves(moved: &AtomicBool) {
    let mut still = 0;
    while still < IDLE_LOOKS {
        tokio::time::sleep(IDLE_CONNECTION / IDLE_LOOKS).await;
        still = if moved.swap(false, Relaxed) { 0 } else { still + 1 };
    }
}

/// Remembers that something was read or written.
struct Watched {
    stream: Box<TlsStream<TcpStream>>,
    moved: Arc<AtomicBool>,
}

impl AsyncRead for Watched {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.stream).poll_read(cx, buffer);
        if read.is_ready() {
            self.moved.store(true, Relaxed);
        }
        read
    }
}

impl AsyncWrite for Watched {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.moved.store(true, Relaxed);
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Answers the requests of one connection.
struct Answers {
    house: Arc<House>,
    local: LocalAddr,
    remote: RemoteAddr,
}

impl Service<http::Request<Incoming>> for Answers {
    type Response = http::Response<BoxBody<Bytes, io::Error>>;
    type Error = Infallible;
    // In a box: what an answer may need is held while there is one, and not by connections that rest.
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn call(&self, request: http::Request<Incoming>) -> Self::Future {
        let (house, local, remote) =
            (Arc::clone(&self.house), self.local.clone(), self.remote.clone());
        Box::pin(async move {
            let request = (request, local, remote, Scheme::HTTPS).into();
            Ok(house.routes.get_response(request).await.into())
        })
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_connection_is_idle_only_after_nothing_moved_for_long() {
        let (moved, began) = (AtomicBool::new(true), Instant::now());
        let busy = Duration::from_secs(500);
        let moving = async {
            while began.elapsed() < busy {
                tokio::time::sleep(Duration::from_secs(50)).await;
                moved.store(true, Relaxed);
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = nothing_moves(&moved) => {}
            () = moving => {}
        }
        let idle = began.elapsed() - busy;
        assert!(idle >= IDLE_CONNECTION && idle <= IDLE_CONNECTION * 3 / 2, "{idle:?}");
    }
}
