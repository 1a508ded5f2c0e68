//! How the KV of a link's frames goes out: the trait that each wire implements for the sender's end.

use std::fmt::Debug;
use std::io;

use async_trait::async_trait;
use chassis::Stream;

use super::frame::FrameError;
use super::span_out::SpanOut;
use super::stream::FrameWriter;
use crate::connector::ConnectorParts;
use crate::error::TransferError;

/// The sender's side of one link.
#[async_trait]
pub(in crate::connectors) trait KvSendPath: Debug + Send + Sync + 'static {
    /// Makes one stream. The caller gives it a deadline.
    async fn connect(&self, endpoint: &str, stream: u16) -> io::Result<Stream>;

    /// Writes one frame of KV, unless its transfer is over by now; or begins with it, and writes it with one of the next.
    /// Not cancel-safe.
    async fn write_span(
        &self,
        writer: &mut FrameWriter,
        parts: &ConnectorParts,
        span: SpanOut,
    ) -> Result<(), TransferError>;

    /// No frame waits for its turn: what was begun with is written. Not cancel-safe.
    async fn write_rest(&self, _writer: &mut FrameWriter) -> Result<(), TransferError> {
        Ok(())
    }

    /// The receiver does not need this slot any more.
    fn taken(&self, _slot: u16) -> Result<(), FrameError> {
        Err(FrameError::Unexpected("a slot of a stage that this wire does not have"))
    }

    /// Whether this side's device writes into the receiver's pages. Then the receiver does not reuse them before it is
    /// told that the device is done, and a handoff waits for it.
    fn writes(&self) -> bool {
        false
    }

    /// Ends when what the link goes over is broken; never, where the streams are all that there is.
    async fn broken(&self) -> TransferError {
        std::future::pending().await
    }

    /// The link is lost: whatever is under way is given up, and holds no lease any more.
    fn close(&self) {}
}
