//! One wire that KV can travel on: the two traits that every connector implements.
//! See `docs/decisions/0019-first-contact-with-the-first-prompt.md`.

use std::fmt::Debug;
use std::sync::Arc;

use async_trait::async_trait;
use chassis::{Gate, World};
use futures::future::BoxFuture;
use kv_cache::{BlockLease, KvMemory, LayerFence};
use types::{
    Deadline, Destination, Epoch, Fingerprint, Handoff, KvSpan, Landing, NodeId, Scheme, TransferId,
    WireAddress,
};

use crate::arrival::Arrival;
use crate::chunk_queue::{Chunk, ChunkQueue};
use crate::error::TransferError;
use crate::faults::Faults;
use crate::metrics::TransferMetrics;
use crate::settings::TransferSettings;

/// One wire that KV can travel on.
///
/// A node has one value of each connector and uses it in both directions: it [`land`](Self::land)s what comes and
/// [`open`](Self::open)s what goes. Nothing above this trait knows which wire it is.
///
/// All methods may be called from many tasks at once. Dropping a connector fails its landings and its senders.
#[async_trait]
pub trait KvConnector: Debug + Send + Sync + 'static {
    fn scheme(&self) -> Scheme;

    /// Where peers reach this side; what a node announces.
    fn address(&self) -> WireAddress;

    /// Whether this side could reach a peer at that address: a look, not contact. Never waits.
    ///
    /// False for another wire's address. For a wire within one host it tells those apart that only seem to share it.
    fn reaches(&self, wire: &WireAddress) -> bool;

    /// Decode side: makes leased blocks a place where one sender may put one sequence's KV.
    ///
    /// Takes the lease: blocks cannot be reused while bytes may still be in flight. The lease comes back in
    /// [`ArrivedKv`](crate::ArrivedKv), or goes back to the pool when the arrival fails or is dropped: at once if the
    /// wire can prove that it is quiet, and through quarantine if it cannot.
    ///
    /// Must be called within a runtime: the landing's deadline is a timer.
    fn land(&self, request: LandRequest) -> Result<(Landing, Arrival), TransferError>;

    /// Prefill side: asks for a landing to be filled.
    ///
    /// Refuses a layout or fingerprint mismatch, an unknown, used or expired landing, a wrong grant and another life
    /// of the node, all before a byte of KV moves. A landing is opened once. The first one to a peer makes the connection.
    async fn open(&self, to: &Destination) -> Result<Box<dyn KvSender>, TransferError>;
}

/// One sequence's KV on its way out.
///
/// ```text
/// right:  send, send, …, finish             every wanted page once, then the handoff
/// right:  feed                              the same, out of the caller's queue
/// right:  send, …, drop                     the peer's arrival fails at once
/// wrong:  send, …, finish                   with pages missing: `Incomplete`, and the peer's arrival fails
/// ```
///
/// Dropped unfinished, it aborts: the peer is told, and its blocks are free again.
#[async_trait]
pub trait KvSender: Debug + Send {
    /// Sends these layers of these blocks once `ready` says that they are computed.
    ///
    /// Waits for room on the wire, not for the fence and not for arrival. `from` covers the sequence from its first
    /// block on, held blocks included, and is kept until the wire needs it no more. Blocks that the receiver holds
    /// already are passed over. The last block may be filled in part; digests cover its valid tokens only.
    ///
    /// An error is final: the transfer has failed. Cancel-safe: a cancelled call has sent nothing.
    async fn send(
        &mut self,
        span: KvSpan,
        from: Arc<BlockLease>,
        ready: LayerFence,
    ) -> Result<(), TransferError>;

    /// Waits until every byte is in place and verified. The handoff is the last thing to arrive.
    ///
    /// It ends when the receiver says so, when the landing's deadline passes there, or when the wire is found dead.
    /// Dropping the future aborts.
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

/// Room for one sequence's KV, and what is known about it.
#[derive(Debug)]
pub struct LandRequest {
    pub transfer: TransferId,
    /// Covers the whole sequence, the blocks that are held already first. May be longer: room to grow is not sent to.
    pub lease: BlockLease,
    pub n_tokens: u32,
    /// Tokens, from the front, whose KV is here already: a whole number of blocks.
    pub held_tokens: u32,
    /// When the landing fails by itself.
    pub deadline: Deadline,
}

/// What a connector is built from.
#[derive(Clone, Debug)]
pub struct ConnectorParts {
    pub node: NodeId,
    pub epoch: Epoch,
    pub memory: KvMemory,
    pub fingerprint: Fingerprint,
    pub world: World,
    pub gate: Gate,
    pub settings: TransferSettings,
    pub metrics: TransferMetrics,
    /// None in production.
    pub faults: Faults,
}

/// Builds one connector. Binding a socket or opening a device may take time and may fail.
pub type Build = fn(ConnectorParts) -> BoxFuture<'static, Result<Arc<dyn KvConnector>, TransferError>>;

/// What a node must know of a wire before it builds it. Each wire's file has one of these.
#[derive(Clone, Copy, Debug)]
pub struct WireKind {
    /// The scheme of its addresses, and its name in settings.
    pub name: &'static str,
    pub build: Build,
    pub auto: Auto,
}

/// Whether the setting `auto` stands for a wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Auto {
    /// It must be named.
    No,
    /// Where it works.
    IfItWorks,
    /// Where the node's KV is on GPUs, and it works.
    IfOnGpus,
    /// Always: a node does not start without it.
    Needed,
}
