//! The front door: one TCP port, one task that accepts, and a thread per core that serves.
//!
//! Each of these threads has a runtime of its own, and a connection stays on the thread that it was given to. A
//! call is many short steps; on a runtime that shares tasks out among its threads every other step wakes a
//! sleeping thread, which costs a call half as much again. What a node does besides (the log, its peers, actors)
//! runs elsewhere, so that callers do not keep it from answering its peers either.
//!
//! Connections are capped.

use std::{io, net::SocketAddr, sync::Arc, thread};

use actors::world::World;
use cluster::entrance::{Admitted, Entrance};
use poem::{Endpoint, EndpointExt as _, Response};
use rustls::ServerConfig;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, mpsc, watch},
};
use tokio_rustls::TlsAcceptor;

use super::visitor::{self, House};
use crate::tasks::vital;

/// Connections at once.
pub const CONNECTIONS_MAX: usize = 16_384;

/// A connection on its way to the thread that serves it; it belongs to no runtime yet.
struct Arrival {
    stream: std::net::TcpStream,
    remote: SocketAddr,
    permit: OwnedSemaphorePermit,
}

/// The threads behind the door. What is under way on them goes on until this is dropped.
pub struct Door {
    _threads: Vec<mpsc::UnboundedSender<Arrival>>,
}

impl Door {
    /// Makes ready to serve, and the future that takes connections; both until told to stop. The world knows where
    /// the address of a clear-text caller stands.
    pub fn open<E: Endpoint<Output = Response> + 'static>(
        listener: TcpListener,
        tls: Arc<ServerConfig>,
        world: Arc<World>,
        routes: E,
        stopped: watch::Receiver<bool>,
    ) -> io::Result<(Self, impl Future<Output = ()> + use<E>)> {
        let house = Arc::new(House {
            acceptor: TlsAcceptor::from(tls),
            world,
            routes: routes.boxed(),
            local: listener.local_addr()?,
            stopped: stopped.clone(),
        });
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let threads = (0..cores).map(|number| thread_of(number, Arc::clone(&house)));
        let threads = threads.collect::<io::Result<Vec<_>>>()?;
        Ok((Self { _threads: threads.clone() }, accept(listener, threads, stopped)))
    }
}

async fn accept(
    listener: TcpListener,
    threads: Vec<mpsc::UnboundedSender<Arrival>>,
    mut stopped: watch::Receiver<bool>,
) {
    let entrance = Entrance::new(listener, CONNECTIONS_MAX);
    // What waits for a thread is counted as a connection, so the queues are bounded.
    for thread in threads.iter().cycle() {
        let Admitted { stream, remote, permit } = tokio::select! {
            admitted = entrance.next() => admitted,
            _ = stopped.wait_for(|stopped| *stopped) => return,
        };
        let Ok(stream) = stream.into_std() else { continue };
        if thread.send(Arrival { stream, remote, permit }).is_err() {
            return;
        }
    }
}

/// Starts one thread. It ends, with all that is under way on it, once nobody can send it any more.
fn thread_of(number: usize, house: Arc<House>) -> io::Result<mpsc::UnboundedSender<Arrival>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (sender, arrivals) = mpsc::unbounded_channel();
    let serving = move || {
        runtime.block_on(vital("a thread of the front door", serve(arrivals, house)));
        runtime.shutdown_background();
    };
    thread::Builder::new().name(format!("roost-door-{number}")).spawn(serving)?;
    Ok(sender)
}

async fn serve(mut arrivals: mpsc::UnboundedReceiver<Arrival>, house: Arc<House>) {
    while let Some(Arrival { stream, remote, permit }) = arrivals.recv().await {
        let house = Arc::clone(&house);
        tokio::spawn(async move {
            let _permit = permit;
            // One that broke is its client's to notice.
            if let Ok(stream) = TcpStream::from_std(stream) {
                visitor::receive(stream, remote, &house).await;
            }
        });
    }
}
