//! A write timeout for clients that stop reading. Without it, an unfinished answer holds memory on the nodes,
//! because neither TCP nor HTTP gives up on a peer whose kernel keeps its receive window closed.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use async_trait::async_trait;
use chassis::{Listener, Stream};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

/// A listener whose connections fail when the client accepts no byte for `patience` while there are bytes to
/// send.
#[derive(Debug)]
pub struct WriteTimeoutListener {
    inner: Box<dyn Listener>,
    patience: Duration,
}

impl WriteTimeoutListener {
    pub fn new(inner: Box<dyn Listener>, patience: Duration) -> Self {
        Self { inner, patience }
    }
}

#[async_trait]
impl Listener for WriteTimeoutListener {
    async fn accept(&mut self) -> io::Result<(Stream, SocketAddr)> {
        let (stream, peer) = self.inner.accept().await?;
        Ok((Stream::other(WriteTimeoutStream::new(stream, self.patience)), peer))
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.inner.local_addr()
    }
}

#[derive(Debug)]
struct WriteTimeoutStream {
    stream: Stream,
    patience: Duration,
    /// The timer of the current write.
    until: Pin<Box<Sleep>>,
    is_waiting: bool,
}

impl WriteTimeoutStream {
    fn new(stream: Stream, patience: Duration) -> Self {
        Self { stream, patience, until: Box::pin(tokio::time::sleep(patience)), is_waiting: false }
    }

    /// Polls one attempt to write. Polls the timer too while the write is pending.
    fn bounded<T>(
        &mut self,
        cx: &mut Context<'_>,
        attempt: impl FnOnce(Pin<&mut Stream>, &mut Context<'_>) -> Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if let Poll::Ready(done) = attempt(Pin::new(&mut self.stream), cx) {
            self.is_waiting = false;
            return Poll::Ready(done);
        }
        if !std::mem::replace(&mut self.is_waiting, true) {
            self.until.as_mut().reset(Instant::now() + self.patience);
        }
        ready!(self.until.as_mut().poll(cx));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client does not read its answer")))
    }
}

impl AsyncRead for WriteTimeoutStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for WriteTimeoutStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.bounded(cx, |stream, cx| stream.poll_write(cx, buf))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.bounded(cx, |stream, cx| stream.poll_write_vectored(cx, bufs))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.bounded(cx, |stream, cx| stream.poll_flush(cx))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.bounded(cx, |stream, cx| stream.poll_shutdown(cx))
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    const POSTPONE_MAX: Duration = Duration::from_secs(60);

    fn pair() -> (WriteTimeoutStream, tokio::io::DuplexStream) {
        let (near, far) = tokio::io::duplex(4);
        (WriteTimeoutStream::new(Stream::other(near), POSTPONE_MAX), far)
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_stops_reading_is_given_up() {
        let (mut near, _far) = pair();
        near.write_all(b"full").await.expect("room");
        tokio::time::sleep(POSTPONE_MAX * 2).await;
        let began = Instant::now();
        let error = near.write_all(b"more").await.expect_err("no reader");
        assert_eq!(
            (error.kind(), began.elapsed()),
            (io::ErrorKind::TimedOut, POSTPONE_MAX),
            "the quiet before does not count"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_client_is_not() {
        let (mut near, mut far) = pair();
        let read = async {
            for _ in 0..20 {
                tokio::time::sleep(POSTPONE_MAX - Duration::from_secs(1)).await;
                far.read_u8().await.expect("written");
            }
        };
        let (written, ()) = tokio::join!(near.write_all(&[7; 20]), read);
        written.expect("a byte now and then is enough");
    }
}
