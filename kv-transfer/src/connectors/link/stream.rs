//! Hot path. Frames over one stream: headers and bodies through a buffer, KV directly from and to its pages.

use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use chassis::{StreamReader, StreamWriter};
use kv_cache::KvMemory;
use tokio::io::{AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::frame::{Frame, HEADER_BYTES, Header};
use crate::error::TransferError;
use crate::runs::Runs;

/// The size of the buffer for KV that is read and dropped.
const SCRATCH_BYTES: usize = 64 << 10;

/// Bounds one step of I/O. Without progress for `stall`, the wire is considered dead.
pub(in crate::connectors) async fn within<T>(
    stall: Duration,
    what: &'static str,
    step: impl Future<Output = Result<T, TransferError>>,
) -> Result<T, TransferError> {
    match tokio::time::timeout(stall, step).await {
        Ok(result) => result,
        Err(_) => Err(TransferError::Stalled { what, after: stall }),
    }
}

/// Both halves of one stream.
#[derive(Debug)]
pub(in crate::connectors) struct FrameHalves {
    pub(in crate::connectors) reader: FrameReader,
    pub(in crate::connectors) writer: FrameWriter,
}

/// The reading half of a stream.
#[derive(Debug)]
pub(in crate::connectors) struct FrameReader {
    half: StreamReader,
    stall: Duration,
    body: Vec<u8>,
    scratch: Vec<u8>,
}

impl FrameReader {
    pub(super) fn new(half: StreamReader, stall: Duration) -> Self {
        Self { half, stall, body: Vec::new(), scratch: Vec::new() }
    }

    pub(super) fn half(&mut self) -> &mut StreamReader {
        &mut self.half
    }

    pub(in crate::connectors) fn stall(&self) -> Duration {
        self.stall
    }

    /// Returns the next frame; `None` if the peer ended the stream between two frames. Not cancel-safe.
    pub(in crate::connectors) async fn next(&mut self) -> Result<Option<Frame>, TransferError> {
        let mut header = [0; HEADER_BYTES];
        let first = self.half.read(&mut header).await.map_err(TransferError::lost)?;
        if first == 0 {
            return Ok(None);
        }
        within(self.stall, "the rest of a frame", async {
            self.half.read_exact(&mut header[first..]).await.map_err(TransferError::lost)?;
            let header = Header::parse(&header)?;
            self.body.resize(header.body_bytes, 0);
            self.half.read_exact(&mut self.body).await.map_err(TransferError::lost)?;
            Ok(Some(header.frame(&self.body)?))
        })
        .await
    }

    /// Like [`next`](Self::next), for a peer that sends at least a heartbeat in every `stall`.
    pub(super) async fn next_in_time(&mut self) -> Result<Option<Frame>, TransferError> {
        within(self.stall, "the peer", self.next()).await
    }

    /// Fills `into` with KV from the wire. Not cancel-safe.
    pub(in crate::connectors) async fn fill(&mut self, mut into: &mut [u8]) -> Result<(), TransferError> {
        while !into.is_empty() {
            let step = async { self.half.read(into).await.and_then(not_zero).map_err(TransferError::lost) };
            let n = within(self.stall, "reading KV", step).await?;
            into = &mut into[n..];
        }
        Ok(())
    }

    /// Reads KV from the wire and drops it.
    pub(in crate::connectors) async fn skip(&mut self, mut bytes: usize) -> Result<(), TransferError> {
        self.scratch.resize(SCRATCH_BYTES, 0);
        while bytes > 0 {
            let some = &mut self.scratch[..bytes.min(SCRATCH_BYTES)];
            let step = async { self.half.read(some).await.and_then(not_zero).map_err(TransferError::lost) };
            bytes -= within(self.stall, "reading KV", step).await?;
        }
        Ok(())
    }
}

/// The writing half of a stream.
#[derive(Debug)]
pub(in crate::connectors) struct FrameWriter {
    half: StreamWriter,
    stall: Duration,
    head: Vec<u8>,
}

impl FrameWriter {
    pub(super) fn new(half: StreamWriter, stall: Duration) -> Self {
        Self { half, stall, head: Vec::new() }
    }

    /// Writes a frame without KV. Not cancel-safe.
    pub(in crate::connectors) async fn write(&mut self, frame: &Frame) -> Result<(), TransferError> {
        frame.encode(&mut self.head);
        let step = async { self.half.write_all(&self.head).await.map_err(TransferError::lost) };
        within(self.stall, "writing a frame", step).await
    }

    /// Writes a span's frame and its KV, directly from its pages. Not cancel-safe.
    ///
    /// Pages are borrowed for each attempt, and never while the wire is full.
    pub(super) async fn write_span(
        &mut self,
        frame: &Frame,
        memory: &KvMemory,
        runs: &Runs,
    ) -> Result<(), TransferError> {
        frame.encode(&mut self.head);
        let (whole, stall) = (self.head.len() + runs.bytes(), self.stall);
        let mut written = 0;
        while written < whole {
            let step = poll_fn(|cx| self.poll_write_some(cx, memory, runs, written));
            written += within(stall, "writing KV", step).await?;
        }
        Ok(())
    }

    fn poll_write_some(
        &mut self,
        cx: &mut Context<'_>,
        memory: &KvMemory,
        runs: &Runs,
        written: usize,
    ) -> Poll<Result<usize, TransferError>> {
        let head = &self.head[written.min(self.head.len())..];
        let offset = written.saturating_sub(self.head.len());
        let pages = runs.read(memory, offset).map_err(|busy| TransferError::Memory(busy.to_string()))?;
        let mut slices = Vec::with_capacity(pages.len() + 1);
        if !head.is_empty() {
            slices.push(IoSlice::new(head));
        }
        pages.append_to(&mut slices);
        let n = ready!(Pin::new(&mut self.half).poll_write_vectored(cx, &slices)).and_then(not_zero);
        Poll::Ready(n.map_err(TransferError::lost))
    }

    /// Writes a frame, and its KV from a copy. Not cancel-safe.
    pub(in crate::connectors) async fn write_copy(
        &mut self,
        frame: &Frame,
        mut payload: &[u8],
    ) -> Result<(), TransferError> {
        self.write(frame).await?;
        while !payload.is_empty() {
            let step =
                async { self.half.write(payload).await.and_then(not_zero).map_err(TransferError::lost) };
            payload = &payload[within(self.stall, "writing KV", step).await?..];
        }
        Ok(())
    }
}

pub(super) fn not_zero(n: usize) -> io::Result<usize> {
    if n == 0 { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(n) }
}
