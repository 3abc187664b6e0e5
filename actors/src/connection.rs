//! Connections to the instances of this node.
//!
//! A connection is driven on the thread that made it. So each thread that calls has connections of its own: what an
//! instance answers wakes nobody elsewhere. Instances that take one call at a time are an exception. Such a server
//! may talk to one client only, and a connection that rests on one thread would keep the next call waiting.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{PoisonError, RwLock},
    thread::{self, ThreadId},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::{TokioExecutor, TokioTimer},
};

use crate::{
    invocation::{CallError, uri},
    socket::Connector,
};

/// How long an unused connection is kept. Servers close theirs too, many after two or five seconds, and a call
/// that is sent at that very moment is lost.
const IDLE_CONNECTION: Duration = Duration::from_secs(1);
/// How long an instance may take to accept a connection.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);

type Pool = Client<Connector, Full<Bytes>>;

/// Calls instances over pooled connections.
pub struct AgentClient {
    of_threads: RwLock<HashMap<ThreadId, Pool>>,
    of_all: Pool,
}

impl Default for AgentClient {
    fn default() -> Self {
        Self { of_threads: RwLock::default(), of_all: pool() }
    }
}

fn pool() -> Pool {
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    connector.set_connect_timeout(Some(CONNECT_WITHIN));
    Client::builder(TokioExecutor::new())
        .pool_timer(TokioTimer::new())
        .pool_idle_timeout(IDLE_CONNECTION)
        .build(Connector(connector))
}

impl AgentClient {
    fn of_this_thread(&self) -> Pool {
        let thread = thread::current().id();
        let known = self.of_threads.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(pool) = known.get(&thread) {
            return pool.clone();
        }
        drop(known);
        let mut all = self.of_threads.write().unwrap_or_else(PoisonError::into_inner);
        all.entry(thread).or_insert_with(pool).clone()
    }

    /// Sends a request, whose address is a path, and gives the beginning of the answer. Dropping that closes the
    /// connection, unless all of it has come. `is_alone` says that the instance takes one call at a time.
    pub async fn send(
        &self,
        address: SocketAddr,
        is_alone: bool,
        mut request: Request<Full<Bytes>>,
    ) -> Result<Response<Incoming>, CallError> {
        let path = request.uri().path_and_query().map_or("/", |path| path.as_str());
        *request.uri_mut() = uri(format!("http://{address}{path}"));
        let sent = match is_alone {
            true => self.of_all.request(request),
            false => self.of_this_thread().request(request),
        };
        sent.await.map_err(|error| match error.is_connect() {
            true => CallError::Unreached,
            false => CallError::Broken(error.to_string()),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    };

    use http_body_util::BodyExt as _;
    use tokio::{
        io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
        net::{TcpListener, TcpStream},
    };

    use super::*;

    #[derive(Default)]
    struct Seen {
        made: AtomicUsize,
        closed: AtomicUsize,
    }

    /// Answers so many requests on a connection, then closes it; counts connections.
    async fn server(answers: usize) -> (SocketAddr, Arc<Seen>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound");
        let connections = Arc::new(Seen::default());
        let seen = Arc::clone(&connections);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                seen.made.fetch_add(1, Relaxed);
                let seen = Arc::clone(&seen);
                tokio::spawn(async move {
                    serve(stream, answers).await;
                    seen.closed.fetch_add(1, Relaxed);
                });
            }
        });
        (address, connections)
    }

    async fn serve(stream: TcpStream, answers: usize) {
        let mut stream = BufReader::new(stream);
        for _ in 0..answers {
            let mut path = String::new();
            loop {
                let mut line = String::new();
                if stream.read_line(&mut line).await.unwrap_or(0) == 0 {
                    return;
                }
                match line.split(' ').nth(1) {
                    Some(word) if line.starts_with("POST") => path = word.to_owned(),
                    _ => {}
                }
                if line == "\r\n" {
                    break;
                }
            }
            let length = path.len() + if path == "/broken" { 9 } else { 0 };
            let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n{path}");
            let _ = stream.write_all(answer.as_bytes()).await;
        }
    }

    fn post(path: &str) -> Request<Full<Bytes>> {
        Request::post(path).body(Full::default()).expect("a request")
    }

    async fn call(client: &AgentClient, address: SocketAddr, path: &str) -> Result<String, String> {
        let answer = client.send(address, false, post(path)).await;
        let answer = answer.map_err(|error| format!("{error:?}"))?;
        let whole = answer.into_body().collect().await.map_err(|error| error.to_string())?;
        Ok(String::from_utf8_lossy(&whole.to_bytes()).into_owned())
    }

    async fn until_closed(connections: &Seen, count: usize) {
        let closed = async {
            while connections.closed.load(Relaxed) < count {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(IDLE_CONNECTION * 10, closed).await.expect("it is closed");
    }

    #[tokio::test]
    async fn a_connection_is_used_again() {
        let ((address, connections), client) = (server(9).await, AgentClient::default());
        for n in 0..9 {
            assert_eq!(call(&client, address, &format!("/{n}")).await, Ok(format!("/{n}")));
        }
        assert_eq!(connections.made.load(Relaxed), 1);
    }

    #[tokio::test]
    async fn one_that_was_closed_meanwhile_fails_no_call() {
        let ((address, connections), client) = (server(1).await, AgentClient::default());
        for n in 1..=5 {
            assert_eq!(call(&client, address, "/x").await, Ok("/x".to_owned()));
            assert_eq!(connections.made.load(Relaxed), n);
            // Its end arrives while nobody looks.
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    #[tokio::test]
    async fn what_is_not_used_is_closed() {
        let ((address, connections), client) = (server(9).await, AgentClient::default());
        call(&client, address, "/1").await.expect("answers");
        until_closed(&connections, 1).await;
        call(&client, address, "/2").await.expect("answers");
        assert_eq!(connections.made.load(Relaxed), 2);
    }

    #[tokio::test]
    async fn an_answer_that_nobody_waits_for_ends_its_connection() {
        let ((address, connections), client) = (server(9).await, AgentClient::default());
        let answer = client.send(address, false, post("/broken")).await.expect("its beginning");
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!(connections.closed.load(Relaxed), 0, "more of it may come");
        drop(answer);
        until_closed(&connections, 1).await;
    }

    #[tokio::test]
    async fn an_answer_cut_short_is_an_error() {
        let ((address, _), client) = (server(1).await, AgentClient::default());
        call(&client, address, "/broken").await.expect_err("nine bytes are missing");
    }

    #[tokio::test]
    async fn nobody_listens() {
        let free = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = free.local_addr().expect("bound");
        drop(free);
        let failed = call(&AgentClient::default(), address, "/x").await;
        assert_eq!(failed, Err(format!("{:?}", CallError::Unreached)));
    }

    #[test]
    fn a_thread_uses_its_own_unless_only_one_call_is_taken() {
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let (address, connections) = runtime.block_on(server(9));
        let client = AgentClient::default();
        let call = async |is_alone| {
            let answer = client.send(address, is_alone, post("/x")).await.expect("answers");
            answer.into_body().collect().await.expect("whole");
        };
        for (is_alone, expected) in [(false, 2), (true, 3)] {
            for _ in 0..2 {
                let other = || runtime.handle().block_on(call(is_alone));
                thread::scope(|scope| scope.spawn(other).join().expect("ran"));
                // Its connection comes back to the others while nobody looks.
                thread::sleep(Duration::from_millis(100));
            }
            assert_eq!(connections.made.load(Relaxed), expected, "{is_alone}");
        }
    }
}
