//! The TCP network, used in production.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use async_trait::async_trait;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpListener, TcpSocket, TcpStream, lookup_host};

use super::{Inner, Listener, Net, Stream};

/// The kernel's TCP. Streams have Nagle's algorithm off and keepalive on.
#[derive(Clone, Copy, Debug)]
pub struct TcpNet;

impl TcpNet {
    /// Idle time before the first keepalive probe. A peer whose machine has failed is detected after idle +
    /// retries × interval: 25 s.
    const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
    const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
    const KEEPALIVE_RETRIES: u32 = 3;
    /// Limit of connections that wait to be accepted. If the queue is full, the kernel drops a client's
    /// packets, and the client sends them again after 200 ms. The limit is the default of
    /// `net.core.somaxconn`, which bounds it.
    const ACCEPT_QUEUE: u32 = 4096;

    fn tuned(stream: TcpStream) -> io::Result<Stream> {
        let keepalive = TcpKeepalive::new()
            .with_time(Self::KEEPALIVE_IDLE)
            .with_interval(Self::KEEPALIVE_INTERVAL)
            .with_retries(Self::KEEPALIVE_RETRIES);
        SockRef::from(&stream).set_tcp_keepalive(&keepalive)?;
        stream.set_nodelay(true)?;
        Ok(Stream(Inner::Tcp(stream)))
    }

    fn listen_at(addr: SocketAddr) -> io::Result<TcpListener> {
        let socket = if addr.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        // With this option a restarted process can bind its port while old connections end.
        socket.set_reuseaddr(true)?;
        socket.bind(addr)?;
        socket.listen(Self::ACCEPT_QUEUE)
    }
}

#[async_trait]
impl Net for TcpNet {
    async fn connect(&self, addr: &str) -> io::Result<Stream> {
        Self::tuned(TcpStream::connect(addr).await?)
    }

    async fn listen(&self, addr: &str) -> io::Result<Box<dyn Listener>> {
        let mut refused = io::Error::new(io::ErrorKind::InvalidInput, "the name has no address");
        for addr in lookup_host(addr).await? {
            match Self::listen_at(addr) {
                Ok(listener) => return Ok(Box::new(listener)),
                Err(error) => refused = error,
            }
        }
        Err(refused)
    }
}

#[async_trait]
impl Listener for TcpListener {
    async fn accept(&mut self) -> io::Result<(Stream, SocketAddr)> {
        let (stream, peer) = TcpListener::accept(self).await?;
        Ok((TcpNet::tuned(stream)?, peer))
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        TcpListener::local_addr(self)
    }
}
