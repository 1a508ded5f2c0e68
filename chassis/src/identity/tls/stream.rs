//! Hot path. A connection over TLS that behaves as one over TCP.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, BufReader, ReadBuf};
use tokio_rustls::TlsStream;

use super::refused::TlsRefused;
use crate::net::Stream;

/// A connection over TLS.
///
/// A write returns when the kernel has its bytes, so callers need not flush. A connection that ends without TLS's own
/// end is a normal end, because frames and HTTP/2 have lengths.
#[derive(Debug)]
pub(super) struct SecureStream {
    tls: TlsStream<BufReader<Stream>>,
    /// Bytes that are encrypted, and that a write has not reported yet. The caller repeats that write.
    unreported: Option<usize>,
    /// An error after bytes that were read; the next read reports it.
    failed: Option<io::Error>,
}

impl SecureStream {
    pub(super) fn new(tls: TlsStream<BufReader<Stream>>) -> Self {
        Self { tls, unreported: None, failed: None }
    }

    /// Reads at most one record.
    fn poll_record(&mut self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match ready!(Pin::new(&mut self.tls).poll_read(cx, buf)) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Poll::Ready(Ok(())),
            Err(error) => Poll::Ready(Err(explained(error))),
            Ok(()) => Poll::Ready(Ok(())),
        }
    }

    fn poll_flushed(&mut self, cx: &mut Context<'_>, n: usize) -> Poll<io::Result<usize>> {
        self.unreported = Some(n);
        ready!(Pin::new(&mut self.tls).poll_flush(cx))?;
        self.unreported = None;
        Poll::Ready(Ok(n))
    }
}

impl AsyncRead for SecureStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Some(error) = self.failed.take() {
            return Poll::Ready(Err(error));
        }
        ready!(self.poll_record(cx, buf))?;
        // A record has 16 KiB. Readers of KV have work of their own for each read, so further records follow.
        while buf.remaining() > 0 && !self.tls.get_ref().0.buffer().is_empty() {
            let filled = buf.filled().len();
            match self.poll_record(cx, buf) {
                Poll::Ready(Err(error)) => self.failed = Some(error),
                Poll::Ready(Ok(())) if buf.filled().len() > filled => continue,
                Poll::Ready(Ok(())) | Poll::Pending => {}
            }
            break;
        }
        Poll::Ready(Ok(()))
    }
}

/// With TLS 1.3 the peer's refusal arrives after the handshake.
fn explained(error: io::Error) -> io::Error {
    match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
        Some(rustls @ rustls::Error::AlertReceived(_)) => TlsRefused::of_rustls(rustls).into_io(),
        _ => error,
    }
}

impl AsyncWrite for SecureStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let n = match self.unreported {
            Some(n) => n,
            None => ready!(Pin::new(&mut self.tls).poll_write(cx, buf))?,
        };
        self.poll_flushed(cx, n)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let n = match self.unreported {
            Some(n) => n,
            None => ready!(Pin::new(&mut self.tls).poll_write_vectored(cx, bufs))?,
        };
        self.poll_flushed(cx, n)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tls).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tls).poll_shutdown(cx)
    }
}
