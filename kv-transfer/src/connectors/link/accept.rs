//! Accepting streams: the trait that each wire implements, and the value that it passes to the receiver.

use std::fmt::Debug;
use std::io;
use std::sync::Arc;

use async_trait::async_trait;
use chassis::Stream;
use futures::future::BoxFuture;
use tokio::sync::OwnedSemaphorePermit;

use super::kv_path::KvPath;
use crate::error::TransferError;

/// An accepted stream, after the wire's own handshake.
#[derive(Debug)]
pub(in crate::connectors) struct Incoming {
    pub(in crate::connectors) stream: Stream,
    /// The receiver's end of the link's KV. Only the first stream of a link has one.
    pub(in crate::connectors) kv_path: Option<Arc<dyn KvPath>>,
    /// Bounds the peers that have not sent their hello yet. The receiver drops it after the hello.
    pub(in crate::connectors) handshake_permit: Option<OwnedSemaphorePermit>,
}

/// The wire's own handshake on a new stream. The receiver gives it a deadline.
pub(in crate::connectors) type Handshake = BoxFuture<'static, Result<Incoming, TransferError>>;

/// A listening address of one wire.
#[async_trait]
pub(in crate::connectors) trait StreamAcceptor: Debug + Send {
    /// Returns the peer's name for the log, and its handshake. Cancel-safe: a cancelled call has accepted
    /// nothing.
    async fn accept(&mut self) -> io::Result<(String, Handshake)>;
}
