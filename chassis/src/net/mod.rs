//! Sockets behind a trait, so that a cluster can run on a simulated network or in memory.

#[cfg(any(test, feature = "test-support"))]
mod memory;
mod tcp;
#[cfg(test)]
mod tests;

use std::fmt::Debug;
use std::io::{self, IoSlice, IoSliceMut};
use std::net::{Ipv6Addr, SocketAddr};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use async_trait::async_trait;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf, ReadHalf, WriteHalf};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

#[cfg(any(test, feature = "test-support"))]
pub use memory::MemoryNet;
pub use tcp::TcpNet;

/// Makes and accepts connections.
///
/// Addresses are `host:port`. `connect` and `listen` have no deadline; the caller sets one. They are
/// cancel-safe: a connection that is being made is closed.
#[async_trait]
pub trait Net: Debug + Send + Sync {
    async fn connect(&self, addr: &str) -> io::Result<Stream>;
    async fn listen(&self, addr: &str) -> io::Result<Box<dyn Listener>>;
}

/// Returns `host:port`. An IPv6 address gets brackets.
pub fn host_port(host: &str, port: u16) -> String {
    match host.parse::<Ipv6Addr>() {
        Ok(address) => format!("[{address}]:{port}"),
        Err(_) => format!("{host}:{port}"),
    }
}

/// A bound address. Dropping it stops listening; accepted streams stay open.
#[async_trait]
pub trait Listener: Debug + Send {
    /// Waits for the next connection. Cancel-safe: no connection is lost.
    async fn accept(&mut self) -> io::Result<(Stream, SocketAddr)>;
    fn local_addr(&self) -> io::Result<SocketAddr>;
}

/// A connection of a network other than TCP.
pub trait Duplex: AsyncRead + AsyncWrite + Debug + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Debug + Send + Unpin> Duplex for T {}

/// A connection on any network.
#[derive(Debug)]
pub struct Stream(Inner);

#[derive(Debug)]
enum Inner {
    Tcp(TcpStream),
    Other(Box<dyn Duplex>),
}

impl Stream {
    /// Wraps a connection of a network other than TCP.
    pub fn other(duplex: impl Duplex + 'static) -> Self {
        Self(Inner::Other(Box::new(duplex)))
    }

    /// Reads available bytes into `bufs` in order. On TCP this is one `readv`; elsewhere only the first non-empty buffer
    /// is read into.
    ///
    /// Zero means that the peer has ended its stream, or that `bufs` has no room. Cancel-safe: no bytes are lost.
    pub async fn read_vectored(&mut self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match &mut self.0 {
            Inner::Tcp(stream) => read_tcp(stream, bufs).await,
            Inner::Other(duplex) => read_first(duplex, bufs).await,
        }
    }

    /// Splits the stream for two tasks. Dropping the writer ends the stream for the peer.
    pub fn into_split(self) -> (StreamReader, StreamWriter) {
        match self.0 {
            Inner::Tcp(stream) => {
                let (reader, writer) = stream.into_split();
                (StreamReader(Reader::Tcp(reader)), StreamWriter(Writer::Tcp(writer)))
            }
            Inner::Other(duplex) => {
                let (reader, writer) = tokio::io::split(duplex);
                (StreamReader(Reader::Other(reader)), StreamWriter(Writer::Other(writer)))
            }
        }
    }
}

async fn read_tcp(stream: &TcpStream, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
    loop {
        stream.readable().await?;
        match stream.try_read_vectored(bufs) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            result => return result,
        }
    }
}

async fn read_first(reader: &mut (impl AsyncRead + Unpin), bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
    match bufs.iter_mut().find(|buf| !buf.is_empty()) {
        Some(buf) => reader.read(buf).await,
        None => Ok(0),
    }
}

/// The reading half of a [`Stream`].
#[derive(Debug)]
pub struct StreamReader(Reader);

#[derive(Debug)]
enum Reader {
    Tcp(OwnedReadHalf),
    Other(ReadHalf<Box<dyn Duplex>>),
}

impl StreamReader {
    /// Reads available bytes, as [`Stream::read_vectored`] does.
    pub async fn read_vectored(&mut self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match &mut self.0 {
            Reader::Tcp(half) => read_tcp(half.as_ref(), bufs).await,
            Reader::Other(half) => read_first(half, bufs).await,
        }
    }

    /// Polls [`read_vectored`](Self::read_vectored) once, for a caller that may hold its buffers during the attempt but not
    /// while it waits.
    pub fn poll_read_vectored(
        &mut self,
        cx: &mut Context<'_>,
        bufs: &mut [IoSliceMut<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut self.0 {
            Reader::Tcp(half) => poll_read_tcp(half.as_ref(), cx, bufs),
            Reader::Other(half) => poll_read_first(Pin::new(half), cx, bufs),
        }
    }
}

fn poll_read_tcp(
    stream: &TcpStream,
    cx: &mut Context<'_>,
    bufs: &mut [IoSliceMut<'_>],
) -> Poll<io::Result<usize>> {
    loop {
        ready!(stream.poll_read_ready(cx))?;
        match stream.try_read_vectored(bufs) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            result => return Poll::Ready(result),
        }
    }
}

fn poll_read_first(
    reader: Pin<&mut impl AsyncRead>,
    cx: &mut Context<'_>,
    bufs: &mut [IoSliceMut<'_>],
) -> Poll<io::Result<usize>> {
    let Some(buf) = bufs.iter_mut().find(|buf| !buf.is_empty()) else { return Poll::Ready(Ok(0)) };
    let mut buf = ReadBuf::new(buf);
    ready!(reader.poll_read(cx, &mut buf))?;
    Poll::Ready(Ok(buf.filled().len()))
}

/// The writing half of a [`Stream`].
#[derive(Debug)]
pub struct StreamWriter(Writer);

#[derive(Debug)]
enum Writer {
    Tcp(OwnedWriteHalf),
    Other(WriteHalf<Box<dyn Duplex>>),
}

// === delegation ===

macro_rules! delegate_read {
    ($outer:ty, $inner:ident::{$($variant:ident),*}) => {
        impl AsyncRead for $outer {
            fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
                match &mut self.0 { $($inner::$variant(io) => Pin::new(io).poll_read(cx, buf),)* }
            }
        }
    };
}

macro_rules! delegate_write {
    ($outer:ty, $inner:ident::{$($variant:ident),*}) => {
        impl AsyncWrite for $outer {
            fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
                match &mut self.0 { $($inner::$variant(io) => Pin::new(io).poll_write(cx, buf),)* }
            }

            fn poll_write_vectored(
                mut self: Pin<&mut Self>,
                cx: &mut Context<'_>,
                bufs: &[IoSlice<'_>],
            ) -> Poll<io::Result<usize>> {
                match &mut self.0 { $($inner::$variant(io) => Pin::new(io).poll_write_vectored(cx, bufs),)* }
            }

            fn is_write_vectored(&self) -> bool {
                match &self.0 { $($inner::$variant(io) => io.is_write_vectored(),)* }
            }

            fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
                match &mut self.0 { $($inner::$variant(io) => Pin::new(io).poll_flush(cx),)* }
            }

            fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
                match &mut self.0 { $($inner::$variant(io) => Pin::new(io).poll_shutdown(cx),)* }
            }
        }
    };
}

delegate_read!(Stream, Inner::{Tcp, Other});
delegate_write!(Stream, Inner::{Tcp, Other});
delegate_read!(StreamReader, Reader::{Tcp, Other});
delegate_write!(StreamWriter, Writer::{Tcp, Other});
