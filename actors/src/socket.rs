//! The connection under a call of an instance: a head that comes alone is acknowledged at once.
//!
//! A server that writes the head and the body of its answer one after the other, without `TCP_NODELAY`, holds the
//! body back until the head is acknowledged (RFC 896). A kernel that has just sent a request waits up to 40 ms with
//! that, for the next request to carry it along (RFC 1122, 4.2.3.2). Python's `http.server` is such a server.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    task::{Context, Poll},
};

use futures::future::BoxFuture;
use http::Uri;
use hyper_util::{
    client::legacy::connect::{Connected, Connection, HttpConnector},
    rt::TokioIo,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};
use tower_service::Service;

/// A connection to an instance.
pub(crate) struct Socket(TcpStream);

/// Whether these are the last bytes of a head, and not those of a chunked body (RFC 9112, 2.1 and 7.1).
fn ends_a_head(bytes: &[u8]) -> bool {
    bytes.ends_with(b"\r\n\r\n") && !bytes.ends_with(b"\r\n0\r\n\r\n")
}

impl Connection for Socket {
    fn connected(&self) -> Connected {
        self.0.connected()
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let polled = Pin::new(&mut self.0).poll_read(cx, buffer);
        if polled.is_ready() && ends_a_head(&buffer.filled()[before..]) {
            // A kernel that can't loses time and nothing else.
            let _ = rustix::net::sockopt::set_tcp_quickack(&self.0, true);
        }
        polled
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write_vectored(cx, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

/// Makes connections to instances.
#[derive(Clone)]
pub(crate) struct Connector(pub(crate) HttpConnector);

impl Service<Uri> for Connector {
    type Response = TokioIo<Socket>;
    type Error = <HttpConnector as Service<Uri>>::Error;
    type Future = BoxFuture<'static, Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, to: Uri) -> Self::Future {
        let made = self.0.call(to);
        Box::pin(async move { Ok(TokioIo::new(Socket(made.await?.into_inner()))) })
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpListener,
    };

    use super::*;

    #[test]
    fn a_head_alone_is_told_from_all_else() {
        let head = "HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n";
        let others = [
            "",
            "\r\n",
            "HTTP/1.1 200 OK\r\n",
            &format!("{head}some body"),
            &format!("{head}5\r\nchunk\r\n"),
            "data: an event\n\n\r\n",
            "5\r\nchunk\r\n0\r\n\r\n",
        ];
        assert!(ends_a_head(head.as_bytes()));
        for other in others {
            assert!(!ends_a_head(other.as_bytes()), "{other:?}");
        }
    }

    #[tokio::test]
    async fn a_head_that_comes_alone_is_acknowledged_at_once() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound");
        let (made, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
        let (mut client, (mut server, _)) = (Socket(made.expect("made")), accepted.expect("came"));
        // A connection begins with acknowledging all at once; some requests and answers later it waits.
        for answer in ["HTTP/1.1 200 OK\r\n\r\nbody", "HTTP/1.1 200 OK\r\n\r\n"].repeat(5) {
            client.write_all(b"request").await.expect("sent");
            server.read_exact(&mut [0; 7]).await.expect("came");
            server.write_all(answer.as_bytes()).await.expect("sent");
            client.read_exact(&mut vec![0; answer.len()]).await.expect("came");
            let is_prompt = rustix::net::sockopt::tcp_quickack(&client.0).expect("known");
            assert!(is_prompt || answer.ends_with("body"), "its server waits for that");
        }
    }
}
