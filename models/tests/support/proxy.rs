//! A proxy on this machine, for `http` and for tunnels.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};

/// A proxy that notes the head of the first request of each connection.
#[derive(Clone, Debug)]
pub struct FakeProxy {
    addr: SocketAddr,
    received: Arc<Mutex<Vec<String>>>,
}

impl FakeProxy {
    pub async fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let proxy = Self { addr: listener.local_addr().expect("it is bound"), received: Arc::default() };
        #[allow(clippy::disallowed_methods, reason = "a test's server ends with its runtime")]
        tokio::spawn(proxy.clone().serve(listener));
        proxy
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Returns the heads since the last call.
    pub fn received(&self) -> Vec<String> {
        std::mem::take(&mut self.received.lock().unwrap_or_else(PoisonError::into_inner))
    }

    async fn serve(self, listener: TcpListener) {
        loop {
            let (stream, _) = listener.accept().await.expect("a socket");
            #[allow(clippy::disallowed_methods, reason = "a test's server ends with its runtime")]
            tokio::spawn(self.clone().pass(stream));
        }
    }

    /// Passes on all bytes of a connection. The fake hub takes requests that name the whole address.
    async fn pass(self, mut near: TcpStream) -> std::io::Result<()> {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(near.read_u8().await?);
        }
        let text = String::from_utf8_lossy(&head).into_owned();
        let target = text.split(' ').nth(1).unwrap_or_default();
        let authority = target.trim_start_matches("http://").split('/').next().unwrap_or_default();
        let mut far = TcpStream::connect(authority).await?;
        match text.starts_with("CONNECT") {
            true => near.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await?,
            false => far.write_all(&head).await?,
        }
        self.received.lock().unwrap_or_else(PoisonError::into_inner).push(text);
        copy_bidirectional(&mut near, &mut far).await.map(|_| ())
    }
}
