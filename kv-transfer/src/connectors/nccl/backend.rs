//! What the connector needs of a card and of NCCL: little enough that host memory can stand in for both.

use std::fmt::Debug;
use std::sync::Arc;

use async_trait::async_trait;
use device::cuda::CopyDone;

use crate::connectors::gpu::copy_thread::UnderWay;
use crate::connectors::link::span_out::SpanOut;
use crate::digest::Digest;
use crate::error::TransferError;
use crate::landing::OpenLanding;
use crate::lanes::LaneSpan;

/// Queues of a pair, at most.
pub(super) const QUEUES_MAX: usize = 2;

/// What the two ends of a queue find each other by.
pub(super) const ID_BYTES: usize = 128;
pub(super) type QueueId = [u8; ID_BYTES];

/// Those of a pair's queues, at least one. The receiver learns them from the sender's greeting.
pub(super) type PairId = Vec<QueueId>;

/// Which end of a pair this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Sender,
    Receiver,
}

/// One node's way to have communicators.
pub(super) trait NcclBackend: Debug + Send + Sync {
    /// How many queues the next pair of this node's has at most, and no less than one.
    fn n_queues(&self) -> usize;

    /// For one queue of a pair that this node is the sender of.
    fn id(&self) -> Result<QueueId, TransferError>;

    /// Slots for one pair, beside the KV of this rank.
    fn stage(&self, rank: u16) -> Result<Arc<dyn Stage>, TransferError>;
}

/// The slots of one end of a pair, between which messages go.
#[async_trait]
pub(super) trait Stage: Debug + Send + Sync {
    fn n_slots(&self) -> usize;
    fn slot_bytes(&self) -> usize;

    /// Begins to lay a span's pages into a slot, one after the other.
    async fn gather(&self, slot: usize, span: &SpanOut, digests: bool) -> Result<Gathering, TransferError>;

    /// Lays what is in a slot into a landing's pages. Answers their digests as they are there; `None` once the landing is
    /// closed, and then no page was touched.
    async fn scatter(
        &self,
        slot: usize,
        landing: &OpenLanding,
        span: &LaneSpan,
        digests: bool,
    ) -> Result<Option<Vec<Digest>>, TransferError>;

    /// Spoils one bit of a slot: a fault that a test plays.
    fn flip(&self, slot: usize, bit: usize) -> Result<(), TransferError>;

    /// Begins to join one queue of a pair, with messages between these slots. Called on the pair's own thread.
    fn join(self: Arc<Self>, id: QueueId, end: End) -> Result<Box<dyn Communicator>, TransferError>;
}

/// Pages on their way into a slot.
#[derive(Debug)]
pub(super) enum Gathering {
    /// What a card is at, and when it has done it.
    UnderWay(Vec<(UnderWay, CopyDone)>),
    Done(Vec<Digest>),
}

impl Gathering {
    /// What a message waits for that is queued now.
    pub(super) fn before(&self) -> Vec<CopyDone> {
        match self {
            Self::Done(_) => Vec::new(),
            Self::UnderWay(parts) => parts.iter().map(|(_, done)| done.clone()).collect(),
        }
    }

    /// Waits until all pages are there: their digests, or none where they were not wanted.
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

/// One end of one of a pair's queues of messages. It belongs to one thread, and none of its methods waits.
///
/// ```text
/// right:  send, is_settled until true, send, is_settled until true, …; n_done at any time
/// wrong:  send, send
/// ```
///
/// Dropped, it is given up: whatever was under way, from then on no slot is read or written.
pub(super) trait Communicator: Debug + Send {
    /// Whether the last call, or the joining, has come to its end: the next call may be made. A message may be under way
    /// still.
    fn is_settled(&mut self) -> Result<bool, TransferError>;

    /// Queues a slot's first bytes, which are there once the copy jobs `before` it are done: the card waits for them.
    fn send(&mut self, slot: usize, bytes: usize, before: &[CopyDone]) -> Result<(), TransferError>;

    /// Queues the arrival of the next message, which is as long.
    fn receive(&mut self, slot: usize, bytes: usize) -> Result<(), TransferError>;

    /// How many messages are done that were not counted before. They are done in their order.
    fn n_done(&mut self) -> Result<usize, TransferError>;

    /// Begins to end it in good order: nothing is under way.
    fn finalize(&mut self) -> Result<(), TransferError>;

    /// Ends it, once that has settled.
    fn destroy(self: Box<Self>);
}
