//! A TCP proxy that counts the bytes to and from a server, can break connections, and can be slow.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex, broadcast};
use tokio::task::JoinHandle;

/// Forwards connections to one address until it is dropped.
#[derive(Debug)]
pub struct Wire {
    pub addr: SocketAddr,
    counted: Arc<Counted>,
    cut: broadcast::Sender<()>,
    forwarding: JoinHandle<()>,
}

/// The counts of a wire so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Traffic {
    /// The number of attempted connections, whether the server answers or not.
    pub connections: u64,
    /// The number of bytes in both directions.
    pub bytes: u64,
}

#[derive(Debug, Default)]
struct Counted {
    connections: AtomicU64,
    bytes: AtomicU64,
    /// The speed of all connections together; `None` is as fast as it goes.
    bytes_per_s: Option<u64>,
    /// Held while a chunk of a slow wire is under way.
    turn: Mutex<()>,
}

impl Wire {
    pub async fn to(server: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        Self::forward(listener, server, Counted::default())
    }

    /// Listens on `addr`. All connections together forward at most `bytes_per_s`, if it is given.
    pub async fn between(addr: SocketAddr, server: SocketAddr, bytes_per_s: Option<u64>) -> Self {
        let listener = TcpListener::bind(addr).await.expect("a free port");
        Self::forward(listener, server.to_string(), Counted { bytes_per_s, ..Counted::default() })
    }

    fn forward(listener: TcpListener, server: String, counted: Counted) -> Self {
        let addr = listener.local_addr().expect("bound");
        let (counted, (cut, _)) = (Arc::new(counted), broadcast::channel(1));
        let forwarding = tokio::spawn(accept(listener, server, Arc::clone(&counted), cut.clone()));
        Self { addr, counted, cut, forwarding }
    }

    pub fn traffic(&self) -> Traffic {
        let Counted { connections, bytes, .. } = &*self.counted;
        Traffic { connections: connections.load(Ordering::Relaxed), bytes: bytes.load(Ordering::Relaxed) }
    }

    /// Breaks every connection that is open now.
    pub fn cut(&self) {
        // The send fails when no connection is open, so the error is ignored.
        let _ = self.cut.send(());
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.forwarding.abort();
        self.cut();
    }
}

async fn accept(listener: TcpListener, server: String, counted: Arc<Counted>, cut: broadcast::Sender<()>) {
    while let Ok((near, _)) = listener.accept().await {
        counted.connections.fetch_add(1, Ordering::Relaxed);
        let (server, counted, mut cut) = (server.clone(), Arc::clone(&counted), cut.subscribe());
        tokio::spawn(async move {
            let Ok(far) = TcpStream::connect(&server).await else { return };
            let (near_in, near_out) = near.into_split();
            let (far_in, far_out) = far.into_split();
            tokio::select! {
                () = copy(near_in, far_out, &counted) => {}
                () = copy(far_in, near_out, &counted) => {}
                _ = cut.recv() => {}
            }
        });
    }
}

async fn copy(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    counted: &Counted,
) {
    let mut buffer = vec![0; 16 << 10];
    while let Ok(n) = from.read(&mut buffer).await {
        counted.bytes.fetch_add(n as u64, Ordering::Relaxed);
        if let Some(bytes_per_s) = counted.bytes_per_s {
            let _turn = counted.turn.lock().await;
            tokio::time::sleep(Duration::from_secs_f64(n as f64 / bytes_per_s as f64)).await;
        }
        if n == 0 || to.write_all(&buffer[..n]).await.is_err() {
            return;
        }
    }
}
