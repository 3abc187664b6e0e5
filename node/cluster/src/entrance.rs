//! Where connections come in: no more are open than there is room for, and whoever takes them never spins.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
};

/// Pause after an accept error, such as too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A listener, and room for so many connections.
pub struct Entrance {
    listener: TcpListener,
    room: Arc<Semaphore>,
}

/// A connection with `TCP_NODELAY`.
pub struct Admitted {
    /// The connection.
    pub stream: TcpStream,
    /// Who is at its other end.
    pub remote: SocketAddr,
    /// Its place, which is free again once this is dropped.
    pub permit: OwnedSemaphorePermit,
}

impl Entrance {
    /// Lets in so many at once.
    pub fn new(listener: TcpListener, most: usize) -> Self {
        Self { listener, room: Arc::new(Semaphore::new(most)) }
    }

    /// The next connection, as soon as there is room for one. Those that wait meanwhile are in the kernel's queue.
    /// Dropping this future loses none.
    pub async fn next(&self) -> Admitted {
        let room = Arc::clone(&self.room);
        let permit = room.acquire_owned().await.expect("it is never closed");
        loop {
            match self.listener.accept().await {
                Ok((stream, remote)) if stream.set_nodelay(true).is_ok() => {
                    return Admitted { stream, remote, permit };
                }
                // One that broke before it was served is its client's to notice.
                Ok(_) => {}
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }
}
