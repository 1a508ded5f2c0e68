//! A network inside one process, for tests with paused time.

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use tokio::io::{DuplexStream, duplex};
use tokio::sync::mpsc;

use super::{Listener, Net, Stream};

/// A network inside one process. Addresses are names: a connection reaches the listener with the same name. A
/// name that ends in `:0` gets a free port on 127.0.0.1. Clones are handles to the same network.
#[derive(Clone, Debug, Default)]
pub struct MemoryNet {
    /// The listeners by name. The mutex is never held across an await.
    doors: Arc<Mutex<BTreeMap<String, mpsc::Sender<PendingConnection>>>>,
    last_port: Arc<AtomicU16>,
}

/// A connection that waits to be accepted, with its peer address.
type PendingConnection = (DuplexStream, SocketAddr);

impl MemoryNet {
    /// The bytes that a connection buffers in each direction before a write waits.
    const STREAM_BYTES: usize = 64 << 10;
    /// The number of connections that may wait to be accepted; further calls of `connect` wait.
    const BACKLOG: usize = 128;

    pub fn new() -> Self {
        Self::default()
    }

    fn doors(&self) -> MutexGuard<'_, BTreeMap<String, mpsc::Sender<PendingConnection>>> {
        self.doors.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn free_addr(&self) -> SocketAddr {
        SocketAddr::from((Ipv4Addr::LOCALHOST, self.last_port.fetch_add(1, Ordering::Relaxed) + 1))
    }
}

#[async_trait]
impl Net for MemoryNet {
    async fn connect(&self, addr: &str) -> io::Result<Stream> {
        let door = self.doors().get(addr).cloned().ok_or(io::ErrorKind::ConnectionRefused)?;
        let (near, far) = duplex(Self::STREAM_BYTES);
        door.send((far, self.free_addr())).await.map_err(|_| io::ErrorKind::ConnectionRefused)?;
        Ok(Stream::other(near))
    }

    async fn listen(&self, addr: &str) -> io::Result<Box<dyn Listener>> {
        let local = match addr.parse() {
            Ok(SocketAddr::V4(fixed)) if fixed.port() != 0 => SocketAddr::V4(fixed),
            _ => self.free_addr(),
        };
        let name = if addr.ends_with(":0") { local.to_string() } else { addr.to_owned() };
        let mut doors = self.doors();
        if doors.get(&name).is_some_and(|door| !door.is_closed()) {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        let (door, visits) = mpsc::channel(Self::BACKLOG);
        doors.insert(name, door);
        Ok(Box::new(MemoryListener { local, visits }))
    }
}

#[derive(Debug)]
struct MemoryListener {
    local: SocketAddr,
    visits: mpsc::Receiver<PendingConnection>,
}

#[async_trait]
impl Listener for MemoryListener {
    async fn accept(&mut self) -> io::Result<(Stream, SocketAddr)> {
        let (stream, peer) = self.visits.recv().await.ok_or(io::ErrorKind::AddrNotAvailable)?;
        Ok((Stream::other(stream), peer))
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.local)
    }
}
