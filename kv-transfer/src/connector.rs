//! The two traits that every connector implements.
//! See `docs/decisions/0019-first-contact-with-the-first-prompt.md`.

use std::fmt::Debug;
use std::sync::Arc;

use async_trait::async_trait;
use futures::future::BoxFuture;
use kv_cache::{BlockLease, LayerFence};
use types::{Destination, Handoff, KvSpan, Landing, Scheme, WireAddress};

use crate::arrival::Arrival;
use crate::chunk_queue::{Chunk, ChunkQueue};
use crate::connector_parts::ConnectorParts;
use crate::error::TransferError;
use crate::landings::LandRequest;

/// KV transfer over one kind of transport.
///
/// A node has one value of each connector and uses it in both directions: [`land`](Self::land) receives KV and
/// [`open`](Self::open) sends it. Code above this trait does not depend on the kind of transport.
///
/// All methods may be called from many tasks at once. Dropping a connector fails its landings and its senders.
#[async_trait]
pub trait KvConnector: Debug + Send + Sync + 'static {
    fn scheme(&self) -> Scheme;

    /// Returns the address that a node announces and peers connect to.
    fn address(&self) -> WireAddress;

    /// Returns whether this side could reach a peer at `wire`. It checks the address only, does not contact
    /// the peer and never waits.
    ///
    /// False for an address of another connector. A connector within one host also returns false for an address of
    /// another host that looks the same.
    fn reaches(&self, wire: &WireAddress) -> bool;

    /// Decode side: makes leased blocks a landing, which one sender may fill with the KV of one sequence.
    ///
    /// Takes the lease, so the blocks cannot be reused while bytes may still be in flight.
    /// [`ArrivedKv`](crate::ArrivedKv) returns the lease. If the arrival fails or is dropped, the blocks go back to
    /// the pool: at once if the wire can prove that it is quiet, otherwise through quarantine.
    ///
    /// Must be called within a runtime, because the landing's deadline is a timer.
    fn land(&self, request: LandRequest) -> Result<(Landing, Arrival), TransferError>;

    /// Prefill side: opens a landing, to fill it.
    ///
    /// Refuses a mismatch of layout or fingerprint, an unknown, used or expired landing, a wrong grant, and a landing
    /// of another life of the node, all before any KV moves. A landing is opened once. The first call for a peer
    /// makes the connection.
    async fn open(&self, to: &Destination) -> Result<Box<dyn KvSender>, TransferError>;
}

/// Sends the KV of one sequence.
///
/// ```text
/// right:  send, send, …, finish             every wanted page once, then the handoff
/// right:  feed                              the same, out of the caller's queue
/// right:  send, …, drop                     the peer's arrival fails at once
/// wrong:  send, …, finish                   with pages missing: `Incomplete`, and the peer's arrival fails
/// ```
///
/// Dropping it before `finish` aborts the transfer: the peer is notified and releases its blocks.
#[async_trait]
pub trait KvSender: Debug + Send {
    /// Sends these layers of these blocks once `ready` reports that they are computed.
    ///
    /// Waits for room on the wire, but neither for the fence nor for arrival. `from` covers the sequence from its
    /// first block, including held blocks, and is kept until the wire no longer needs it. Blocks that the receiver
    /// already holds are skipped. The last block may be partly filled; digests cover its valid tokens only.
    ///
    /// An error is final: the transfer has failed. Cancel-safe: a cancelled call has sent nothing.
    async fn send(
        &mut self,
        span: KvSpan,
        from: Arc<BlockLease>,
        ready: LayerFence,
    ) -> Result<(), TransferError>;

    /// Waits until every byte is in place and verified. The handoff is the last message to arrive.
    ///
    /// Returns when the receiver confirms, when the landing's deadline passes there, or when the wire is found dead.
    /// Dropping the future aborts the transfer.
    async fn finish(self: Box<Self>, handoff: Handoff) -> Result<(), TransferError>;

    /// Sends every chunk of the queue, then finishes with its handoff.
    ///
    /// A wire takes chunks from the queue itself, so that no task stands between the producer and the wire. A queue
    /// that ends without a handoff is [`TransferError::Unfinished`] and aborts. Dropping the future aborts.
    async fn feed(mut self: Box<Self>, mut queue: ChunkQueue) -> Result<(), TransferError> {
        while let Some(chunk) = queue.next().await {
            match chunk {
                Chunk::Kv { span, from, ready } => self.send(span, from, ready).await?,
                Chunk::Handoff(handoff) => return self.finish(handoff).await,
            }
        }
        Err(TransferError::Unfinished)
    }
}

/// Builds one connector. Binding a socket or opening a device may take time and may fail.
pub type Build = fn(ConnectorParts) -> BoxFuture<'static, Result<Arc<dyn KvConnector>, TransferError>>;

/// The name and the constructor of a connector. Each connector's file defines one.
#[derive(Clone, Copy, Debug)]
pub struct WireKind {
    /// The scheme of its addresses, and its name in settings.
    pub name: &'static str,
    pub build: Build,
    pub auto: Auto,
}

/// Whether the setting `auto` includes a connector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Auto {
    /// `auto` never includes it: it is used only if a setting names it.
    No,
    /// `auto` includes it if it works on this machine.
    IfItWorks,
    /// `auto` includes it if the node's KV is on GPUs and the connector works.
    IfOnGpus,
    /// `auto` always includes it: a node does not start without it.
    Needed,
}
