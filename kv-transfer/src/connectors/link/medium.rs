//! What one wire of streams does in its own way: how a stream is made, and where the KV of a frame goes.

use std::fmt::Debug;
use std::io;

use async_trait::async_trait;
use chassis::Stream;

use super::frame::{FrameError, Piece};
use super::span_out::SpanOut;
use super::stream::FrameWriter;
use crate::connector::ConnectorParts;
use crate::error::TransferError;

/// The sender's side of one link.
#[async_trait]
pub(in crate::connectors) trait Medium: Debug + Send + Sync + 'static {
    /// Makes one stream. The caller gives it a deadline.
    async fn connect(&self, endpoint: &str, stream: u16) -> io::Result<Stream>;

    /// Writes one frame of KV, unless its transfer is over by now. Not cancel-safe.
    async fn write_span(
        &self,
        writer: &mut FrameWriter,
        parts: &ConnectorParts,
        span: SpanOut,
    ) -> Result<(), TransferError>;

    /// The receiver does not need this slot any more.
    fn taken(&self, slot: u16) -> Result<(), FrameError>;
}

/// The receiver's view of KV that is not in the frames of a link.
pub(in crate::connectors) trait Elsewhere: Debug + Send + Sync + 'static {
    /// Copies one piece, or a part of it. Never waits.
    fn copy(&self, slot: Option<u16>, offset: u64, into: &mut [u8]) -> Result<(), TransferError>;
}

/// A part of a frame's KV that lies in one piece: a place to copy from, and how far one has come.
#[derive(Debug)]
pub(super) struct Pieces<'a> {
    rest: &'a [Piece],
    done: usize,
}

impl<'a> Pieces<'a> {
    pub(super) fn new(pieces: &'a [Piece]) -> Self {
        Self { rest: pieces, done: 0 }
    }

    /// The next bytes, at most `bytes` of them: where they are, and how many.
    pub(super) fn next(&mut self, bytes: usize) -> Option<(u64, usize)> {
        let piece = self.rest.first()?;
        let (offset, n) = (piece.offset + self.done as u64, bytes.min(piece.bytes as usize - self.done));
        self.done += n;
        if self.done == piece.bytes as usize {
            (self.rest, self.done) = (&self.rest[1..], 0);
        }
        Some((offset, n))
    }
}
