//! The sender's end of KV in frames: the trait that each wire implements.

use std::fmt::Debug;
use std::io;

use async_trait::async_trait;
use chassis::Stream;

use super::frame::FrameError;
use super::span_out::SpanOut;
use super::stream::FrameWriter;
use crate::connector_parts::ConnectorParts;
use crate::error::TransferError;

/// The sender's end of one wire, one value for each link. The link calls it from the tasks of all its
/// streams.
#[async_trait]
pub(in crate::connectors) trait KvSendPath: Debug + Send + Sync + 'static {
    /// Connects stream number `stream` of a link. The caller gives the call a deadline.
    async fn connect(&self, endpoint: &str, stream: u16) -> io::Result<Stream>;

    /// Writes one KV frame, unless its transfer is already over. A wire may start the frame here and write it in a
    /// later call. Not cancel-safe.
    async fn write_span(
        &self,
        writer: &mut FrameWriter,
        parts: &ConnectorParts,
        span: SpanOut,
    ) -> Result<(), TransferError>;

    /// Writes all frames that were started. Called when no further frame is queued. Not cancel-safe.
    async fn write_rest(&self, _writer: &mut FrameWriter) -> Result<(), TransferError> {
        Ok(())
    }

    /// Called when the receiver no longer needs this slot.
    fn taken(&self, _slot: u16) -> Result<(), FrameError> {
        Err(FrameError::Unexpected("a slot of a stage that this wire does not have"))
    }

    /// Returns whether this side's device writes into the receiver's pages. If so, the receiver does not
    /// reuse them before this side reports that the device is done, and a handoff waits for that.
    fn writes(&self) -> bool {
        false
    }

    /// Returns when the transport below the streams is broken. Never returns if there is no such transport.
    async fn broken(&self) -> TransferError {
        std::future::pending().await
    }

    /// Called when the link is lost: cancels all work in progress and releases its leases.
    fn close(&self) {}
}
