//! The front door: one TCP port that speaks TLS and tells clear-text callers why it does not serve
//! them (`decisions` §1). It never redirects, since a redirect hides a leaked key.
//!
//! The first byte decides, inside `poll_read`, so a silent client blocks nobody. Connections are
//! capped, accept errors pause instead of spinning, and every connection has `TCP_NODELAY`.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use actors::{limiter::Standing, world::World};
use domain::RequestId;
use poem::{
    http::uri::Scheme,
    listener::{Acceptor, Listener},
    web::{LocalAddr, RemoteAddr},
};
use rustls::ServerConfig;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::Sleep,
};
use tokio_rustls::{Accept, TlsAcceptor, server::TlsStream};

/// Connections at once.
pub const CONNECTIONS_MAX: usize = 16_384;
/// How long a handshake may take.
const HANDSHAKE_WITHIN: Duration = Duration::from_secs(10);
/// Pause after an accept error, such as too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// First byte of a TLS record that begins a handshake.
const TLS_HANDSHAKE: u8 = 0x16;

/// Listens for TLS.
pub struct Door {
    listener: TcpListener,
    acceptor: TlsAcceptor,
    connections: Arc<Semaphore>,
    world: Arc<World>,
}

impl Door {
    /// On an open listener. The world knows where the address of a clear-text caller stands.
    pub fn new(listener: TcpListener, config: Arc<ServerConfig>, world: Arc<World>) -> Self {
        let connections = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        Self { listener, acceptor: TlsAcceptor::from(config), connections, world }
    }
}

impl Listener for Door {
    type Acceptor = Self;

    async fn into_acceptor(self) -> io::Result<Self> {
        Ok(self)
    }
}

impl Acceptor for Door {
    type Io = Visitor;

    fn local_addr(&self) -> Vec<LocalAddr> {
        self.listener.local_addr().map(|addr| LocalAddr(addr.into())).into_iter().collect()
    }

    async fn accept(&mut self) -> io::Result<(Visitor, LocalAddr, RemoteAddr, Scheme)> {
        let permit =
            Arc::clone(&self.connections).acquire_owned().await.map_err(io::Error::other)?;
        let (stream, remote): (TcpStream, SocketAddr) = loop {
            match self.listener.accept().await {
                Ok(accepted) => break accepted,
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        };
        stream.set_nodelay(true)?;
        let local = stream.local_addr()?;
        let visitor = Visitor {
            state: State::Unknown(stream, self.acceptor.clone()),
            deadline: Box::pin(tokio::time::sleep(HANDSHAKE_WITHIN)),
            remote: remote.ip(),
            world: Arc::clone(&self.world),
            _permit: permit,
        };
        Ok((visitor, LocalAddr(local.into()), RemoteAddr(remote.into()), Scheme::HTTPS))
    }
}

/// A connection, whatever it turns out to speak.
pub struct Visitor {
    state: State,
    deadline: Pin<Box<Sleep>>,
    remote: IpAddr,
    world: Arc<World>,
    _permit: OwnedSemaphorePermit,
}

enum State {
    /// Has not said anything yet.
    Unknown(TcpStream, TlsAcceptor),
    /// Shakes hands.
    Greeting(Box<Accept<TcpStream>>),
    /// Speaks TLS.
    Inside(Box<TlsStream<TcpStream>>),
    /// Speaks clear text and is being told.
    Refused { stream: TcpStream, answer: Vec<u8>, written: usize, read: usize },
    /// Over.
    Gone,
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

/// How much of a clear-text request is read before the connection closes.
const CLEAR_TEXT_READ_MAX: usize = 64 * 1024;

impl Visitor {
    /// Moves on until TLS is established; `None` means that the connection is over.
    fn poll_inside(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<Option<&mut TlsStream<TcpStream>>>> {
        if !matches!(self.state, State::Inside(_)) && self.deadline.as_mut().poll(cx).is_ready() {
            self.state = State::Gone;
        }
        loop {
            match &mut self.state {
                State::Unknown(stream, _) => {
                    let mut first = [0; 1];
                    let seen = ready!(stream.poll_peek(cx, &mut ReadBuf::new(&mut first)))?;
                    let State::Unknown(stream, acceptor) =
                        std::mem::replace(&mut self.state, State::Gone)
                    else {
                        continue;
                    };
                    self.state = match (seen, first[0]) {
                        (0, _) => State::Gone,
                        (_, TLS_HANDSHAKE) => State::Greeting(Box::new(acceptor.accept(stream))),
                        _ => {
                            let answer = refusal(&self.world, self.remote);
                            State::Refused { stream, answer, written: 0, read: 0 }
                        }
                    };
                }
                State::Greeting(greeting) => {
                    let stream = ready!(Pin::new(greeting.as_mut()).poll(cx))?;
                    self.state = State::Inside(Box::new(stream));
                }
                State::Refused { stream, answer, written, read } => {
                    ready!(refuse(stream, answer, written, read, cx))?;
                    self.state = State::Gone;
                }
                State::Gone => return Poll::Ready(Ok(None)),
                State::Inside(_) => break,
            }
        }
        Poll::Ready(Ok(self.state.inside()))
    }
}

impl State {
    fn inside(&mut self) -> Option<&mut TlsStream<TcpStream>> {
        match self {
            Self::Inside(stream) => Some(stream),
            Self::Unknown(..) | Self::Greeting(_) | Self::Refused { .. } | Self::Gone => None,
        }
    }
}

/// Reads the request, as closing before that would throw the answer away, answers and closes.
fn refuse(
    stream: &mut TcpStream,
    answer: &[u8],
    written: &mut usize,
    read: &mut usize,
    cx: &mut Context<'_>,
) -> Poll<io::Result<()>> {
    while *written < answer.len() {
        *written += ready!(Pin::new(&mut *stream).poll_write(cx, &answer[*written..]))?;
        if *written == answer.len() {
            ready!(Pin::new(&mut *stream).poll_shutdown(cx))?;
        }
    }
    let mut rest = [0; 4096];
    while *read < CLEAR_TEXT_READ_MAX {
        let mut buffer = ReadBuf::new(&mut rest);
        ready!(Pin::new(&mut *stream).poll_read(cx, &mut buffer))?;
        if buffer.filled().is_empty() {
            break;
        }
        *read += buffer.filled().len();
    }
    Poll::Ready(Ok(()))
}

impl AsyncRead for Visitor {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match ready!(self.poll_inside(cx))? {
            Some(stream) => Pin::new(stream).poll_read(cx, buffer),
            None => Poll::Ready(Ok(())),
        }
    }
}

impl AsyncWrite for Visitor {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match ready!(self.poll_inside(cx))? {
            Some(stream) => Pin::new(stream).poll_write(cx, bytes),
            None => Poll::Ready(Err(io::ErrorKind::BrokenPipe.into())),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.state.inside() {
            Some(stream) => Pin::new(stream).poll_flush(cx),
            None => Poll::Ready(Ok(())),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.state.inside() {
            Some(stream) => Pin::new(stream).poll_shutdown(cx),
            None => Poll::Ready(Ok(())),
        }
    }
}
