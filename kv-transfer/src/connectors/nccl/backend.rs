//! The operations of a GPU and of NCCL that the connector needs. Host memory can replace both in tests.

use std::fmt::Debug;
use std::sync::Arc;

use async_trait::async_trait;
use device::cuda::{CopyDone, PageDigests};

use crate::connectors::gpu::copy_thread::UnderWay;
use crate::connectors::link::span_out::SpanOut;
use crate::digest::Digest;
use crate::error::TransferError;
use crate::landing::OpenLanding;
use crate::lanes::LaneSpan;

/// Limit of queues of a pair.
pub(super) const QUEUES_MAX: usize = 2;

/// The size of the id by which the two ends of a queue find each other.
pub(super) const ID_BYTES: usize = 128;
pub(super) type QueueId = [u8; ID_BYTES];

/// The ids of a pair's queues, at least one. The receiver gets them in the handshake.
pub(super) type PairId = Vec<QueueId>;

/// The role of this node in a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Sender,
    Receiver,
}

/// Creates the communicators of one node.
pub(super) trait NcclBackend: Debug + Send + Sync {
    /// Returns the limit of queues for this node's next pair, at least one.
    fn n_queues(&self) -> usize;

    /// Returns a new id, for one queue of a pair whose sender is this node.
    fn id(&self) -> Result<QueueId, TransferError>;

    /// Allocates the slots of one pair, in the memory that holds this rank's KV.
    fn stage(&self, rank: u16) -> Result<Arc<dyn Stage>, TransferError>;
}

/// The slots of one end of a pair. Messages go from slot to slot.
#[async_trait]
pub(super) trait Stage: Debug + Send + Sync {
    fn n_slots(&self) -> usize;
    fn slot_bytes(&self) -> usize;

    /// Starts to gather a span's pages into a slot, one after the other.
    async fn gather(
        &self,
        slot: usize,
        span: &SpanOut,
        digests: PageDigests,
    ) -> Result<Gathering, TransferError>;

    /// Scatters a slot into a landing's pages, and returns the digests that it made. Returns `None`, without
    /// touching a page, if the landing is closed.
    async fn scatter(
        &self,
        slot: usize,
        landing: &OpenLanding,
        span: &LaneSpan,
        digests: PageDigests,
    ) -> Result<Option<Vec<Digest>>, TransferError>;

    /// Flips one bit of a slot, for a fault that a test injects.
    fn flip(&self, slot: usize, bit: usize) -> Result<(), TransferError>;

    /// Starts to join one queue of a pair, with messages between these slots. Called on the pair's own thread.
    fn join(self: Arc<Self>, id: QueueId, end: End) -> Result<Box<dyn Communicator>, TransferError>;
}

/// Pages that are being gathered into a slot.
#[derive(Debug)]
pub(super) enum Gathering {
    /// The GPU's copy jobs, and the events that mark their ends.
    UnderWay(Vec<(UnderWay, CopyDone)>),
    Done(Vec<Digest>),
}

impl Gathering {
    /// Returns the copy jobs that a message must wait for.
    pub(super) fn before(&self) -> Vec<CopyDone> {
        match self {
            Self::Done(_) => Vec::new(),
            Self::UnderWay(parts) => parts.iter().map(|(_, done)| done.clone()).collect(),
        }
    }

    /// Waits until all pages are gathered. Returns their digests, or none if they were not requested.
    pub(super) async fn digests(self) -> Result<Vec<Digest>, TransferError> {
        let parts = match self {
            Self::Done(digests) => return Ok(digests),
            Self::UnderWay(parts) => parts,
        };
        let mut digests = Vec::new();
        for (part, _) in parts {
            digests.extend(part.digests().await?.into_iter().map(Digest));
        }
        Ok(digests)
    }
}

/// One end of one queue of a pair. It belongs to one thread, and no method waits.
///
/// ```text
/// right:  send, is_settled until true, send, is_settled until true, …; n_done at any time
/// wrong:  send, send
/// ```
///
/// The drop aborts it: after that no slot is read or written.
pub(super) trait Communicator: Debug + Send {
    /// Returns whether the last call, or the joining, has finished, so that the next call may be made. A
    /// message may still be in progress.
    fn is_settled(&mut self) -> Result<bool, TransferError>;

    /// Queues the first bytes of a slot. The GPU waits for the copy jobs `before` first.
    fn send(&mut self, slot: usize, bytes: usize, before: &[CopyDone]) -> Result<(), TransferError>;

    /// Queues the receipt of the next message, which has the same length.
    fn receive(&mut self, slot: usize, bytes: usize) -> Result<(), TransferError>;

    /// Returns the number of messages that are done since the last call. They are done in order.
    fn n_done(&mut self) -> Result<usize, TransferError>;

    /// Starts an orderly end. Nothing may be in progress.
    fn finalize(&mut self) -> Result<(), TransferError>;

    /// Destroys it, after [`finalize`](Self::finalize) has settled.
    fn destroy(self: Box<Self>);
}
