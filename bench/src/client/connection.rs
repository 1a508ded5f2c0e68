//! Hot path. Connections to the target: a store of idle connections, and reads into one shared buffer.

use std::cell::RefCell;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWriteExt, ReadBuf};

use crate::client::stream::Stream;
use crate::client::target::TargetServer;

const READ_BYTES: usize = 64 << 10;
/// The largest number of idle connections. Further ones are closed.
const N_IDLE_MAX: usize = 16 << 10;

thread_local! {
    /// The read buffer that all streams of the load thread share. It keeps nothing between two reads, so
    /// 10,000 streams need 64 KiB instead of 10,000 buffers.
    static READ_BUFFER: RefCell<Vec<u8>> = RefCell::new(vec![0; READ_BYTES]);
}

/// One connection to the target.
#[derive(Debug)]
pub struct Connection {
    stream: Stream,
    /// Whether an earlier request used the connection. The peer may have closed such a connection unnoticed.
    pub is_used: bool,
}

/// The idle connections to a target. The last used one is taken first.
#[derive(Debug)]
pub struct Connections {
    idle: Mutex<Vec<Stream>>,
    n_idle_max: usize,
}

impl Connections {
    /// Makes an empty store that keeps connections after their requests.
    pub fn kept() -> Self {
        Self { idle: Mutex::default(), n_idle_max: N_IDLE_MAX }
    }

    /// Makes a store that keeps nothing: every request gets a new connection.
    pub fn fresh() -> Self {
        Self { idle: Mutex::default(), n_idle_max: 0 }
    }

    pub async fn take(&self, target: &TargetServer) -> io::Result<Connection> {
        while let Some(stream) = self.pop() {
            if stream.is_quiet() {
                return Ok(Connection { stream, is_used: true });
            }
        }
        Self::open(target).await
    }

    pub async fn open(target: &TargetServer) -> io::Result<Connection> {
        let stream = target.connect().await?;
        Ok(Connection { stream, is_used: false })
    }

    pub fn give_back(&self, connection: Connection) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < self.n_idle_max {
            idle.push(connection.stream);
        }
    }

    fn pop(&self) -> Option<Stream> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }
}

impl Connection {
    pub async fn send(&mut self, wire: &[u8]) -> io::Result<()> {
        self.stream.write_all(wire).await?;
        self.stream.flush().await
    }

    /// Waits for bytes and passes them to `on_bytes`, still in the shared buffer. They are empty when the
    /// peer has closed. Cancel-safe: no bytes are lost.
    pub async fn read<T>(&mut self, mut on_bytes: impl FnMut(&[u8]) -> T) -> io::Result<T> {
        poll_fn(|cx| self.poll_read(cx, &mut on_bytes)).await
    }

    fn poll_read<T>(
        &mut self,
        cx: &mut Context<'_>,
        on_bytes: &mut dyn FnMut(&[u8]) -> T,
    ) -> Poll<io::Result<T>> {
        READ_BUFFER.with_borrow_mut(|buffer| {
            let mut read = ReadBuf::new(buffer);
            ready!(Pin::new(&mut self.stream).poll_read(cx, &mut read))?;
            Poll::Ready(Ok(on_bytes(read.filled())))
        })
    }
}
