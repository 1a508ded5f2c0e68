//! The operations of a GPU and of NCCL that the connector needs. Host memory can replace both in tests.

use std::fmt::Debug;
use std::sync::Arc;

use device::cuda::CopyDone;

use crate::connectors::gpu::staging::PageMover;
use crate::error::TransferError;

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

    /// Allocates the slots of one pair, for the GPUs that hold this rank's KV.
    fn stage(&self, rank: u16) -> Result<Arc<dyn Stage>, TransferError>;
}

/// The slots of one end of a pair. Messages go from slot to slot.
pub(super) trait Stage: Debug + Send + Sync {
    fn n_slots(&self) -> usize;
    fn slot_bytes(&self) -> usize;

    /// Returns the mover of KV between pages and these slots.
    fn mover(&self) -> &dyn PageMover;

    /// Flips one bit of a slot, for a fault that a test injects.
    fn flip(&self, slot: usize, bit: usize) -> Result<(), TransferError>;

    /// Starts to join one queue of a pair, with messages between these slots. Called on the pair's own thread.
    fn join(self: Arc<Self>, id: QueueId, end: End) -> Result<Box<dyn Communicator>, TransferError>;
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
