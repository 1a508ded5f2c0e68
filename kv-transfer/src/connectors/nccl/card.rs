//! Hot path. The nccl backend on real GPUs.

use std::collections::VecDeque;
use std::sync::Arc;

use device::DeviceMemory;
use device::cuda::nccl::{self, Message, Nccl, Rank, UniqueId};
use device::cuda::{CopyDone, PageCopierSize, Slots};
use kv_cache::KvMemory;
use tracing::trace;

use super::backend::{Communicator, End, NcclBackend, QueueId, Stage};
use super::n_queues;
use crate::connector_parts::ConnectorParts;
use crate::connectors::gpu::copy_thread::CopyThreads;
use crate::connectors::gpu::pages::card_of;
use crate::connectors::gpu::staging::{CardMover, PageMover};
use crate::error::TransferError;

/// The number of slots of a pair: one message is in transfer, the next two are being gathered, one is ready,
/// and the last one is being scattered.
const N_SLOTS: usize = 5;

/// Multiprocessors that gather and scatter a message. With 16, a message takes longer to gather than to
/// transfer.
const MULTIPROCESSORS: u32 = 32;

/// Limit of a GPU's pairs with more than one queue. An NCCL message that waits for its peer occupies some 16
/// multiprocessors. If the waiting messages of all pairs did not fit on a GPU, GPUs could wait for each other
/// in a circle until a pair is aborted.
const PAIRS_OF_SEVERAL: usize = 4;

/// The nccl backend of one node's GPUs.
#[derive(Debug)]
pub(super) struct GpuBackend {
    memory: KvMemory,
    copy_threads: CopyThreads,
    slot_bytes: usize,
    /// The number of queues of a pair, while there are few pairs.
    n_queues: usize,
    /// Counts the pairs: each pair holds a clone, so the reference count is their number.
    pairs: Arc<()>,
}

impl GpuBackend {
    pub(super) fn new(parts: &ConnectorParts, slot_bytes: usize) -> Result<Self, TransferError> {
        let nccl = Nccl::load().map_err(TransferError::device)?;
        for rank in 0..parts.memory.n_ranks() {
            let users = users_of(&parts.memory, rank)?;
            users.iter().try_for_each(|user| user.reach(users[0])).map_err(TransferError::device)?;
        }
        let n_queues = if nccl.takes_several() { n_queues(parts) } else { 1 };
        let lane_multiprocessors = parts.settings.multiprocessors(MULTIPROCESSORS);
        let size = PageCopierSize { n_lanes: 2, lane_multiprocessors, ..PageCopierSize::default() };
        let copy_threads = CopyThreads::start(&parts.memory, size, &parts.gate)?;
        Ok(Self { memory: parts.memory.clone(), copy_threads, slot_bytes, n_queues, pairs: Arc::default() })
    }
}

/// Returns the memory of the GPUs of a rank, stage by stage.
fn users_of(memory: &KvMemory, rank: u16) -> Result<Vec<&DeviceMemory>, TransferError> {
    (0..memory.n_stages()).map(|stage| Ok(card_of(memory, rank, stage)?.memory())).collect()
}

impl NcclBackend for GpuBackend {
    fn n_queues(&self) -> usize {
        let n_pairs = Arc::strong_count(&self.pairs) - 1;
        if n_pairs < PAIRS_OF_SEVERAL * usize::from(self.memory.n_ranks()) { self.n_queues } else { 1 }
    }

    fn id(&self) -> Result<QueueId, TransferError> {
        let nccl = Nccl::load().map_err(TransferError::device)?;
        Ok(nccl.unique_id().map_err(TransferError::device)?.0)
    }

    fn stage(&self, rank: u16) -> Result<Arc<dyn Stage>, TransferError> {
        // The slots are on the GPU of the rank's first pipeline stage. The GPUs of its other stages access them there.
        let users = users_of(&self.memory, rank)?;
        let slots = Slots::on_gpu(&users, N_SLOTS, self.slot_bytes).map_err(TransferError::device)?;
        let mover = CardMover::new(self.memory.clone(), self.copy_threads.clone(), slots);
        Ok(Arc::new(CardStage { mover, pair: Arc::clone(&self.pairs) }))
    }
}

/// Slots on a GPU, and the kernels that fill and empty them.
#[derive(Debug)]
struct CardStage {
    mover: CardMover,
    /// The counter of pairs, held so that this pair is counted.
    #[expect(dead_code, reason = "held to be counted")]
    pair: Arc<()>,
}

impl Stage for CardStage {
    fn n_slots(&self) -> usize {
        self.mover.slots().len()
    }

    fn slot_bytes(&self) -> usize {
        self.mover.slots().slot_bytes()
    }

    fn mover(&self) -> &dyn PageMover {
        &self.mover
    }

    fn flip(&self, slot: usize, bit: usize) -> Result<(), TransferError> {
        self.mover.slots().flip(slot, bit).map_err(TransferError::device)
    }

    fn join(self: Arc<Self>, id: QueueId, end: End) -> Result<Box<dyn Communicator>, TransferError> {
        let rank = match end {
            End::Sender => Rank::Sender,
            End::Receiver => Rank::Receiver,
        };
        let inner = nccl::Communicator::join(Arc::clone(self.mover.slots()), UniqueId(id), rank);
        let inner = inner.map_err(TransferError::device)?;
        Ok(Box::new(OverNccl { inner, end, is_unmarked: false, messages: VecDeque::new() }))
    }
}

/// A communicator, and its messages in progress.
#[derive(Debug)]
struct OverNccl {
    inner: nccl::Communicator,
    end: End,
    /// Whether the call of the last message had not settled at the last check.
    is_unmarked: bool,
    messages: VecDeque<Message>,
}

impl Communicator for OverNccl {
    fn is_settled(&mut self) -> Result<bool, TransferError> {
        let is_settled = self.inner.is_settled().map_err(TransferError::device)?;
        if is_settled && std::mem::take(&mut self.is_unmarked) {
            self.messages.push_back(self.inner.message().map_err(TransferError::device)?);
            trace!(target: "walk", end = ?self.end, "NCCL message queued");
        }
        Ok(is_settled)
    }

    fn send(&mut self, slot: usize, bytes: usize, before: &[CopyDone]) -> Result<(), TransferError> {
        before
            .iter()
            .try_for_each(|copy_job| self.inner.wait_for(copy_job))
            .map_err(TransferError::device)?;
        self.is_unmarked = true;
        self.inner.send(slot, bytes).map_err(TransferError::device)
    }

    fn receive(&mut self, slot: usize, bytes: usize) -> Result<(), TransferError> {
        self.is_unmarked = true;
        self.inner.receive(slot, bytes).map_err(TransferError::device)
    }

    fn n_done(&mut self) -> Result<usize, TransferError> {
        // The check comes first: it fails if the peer has failed, before any of the peer's messages is
        // reported.
        self.is_settled()?;
        let mut n_done = 0;
        while let Some(first) = self.messages.front_mut() {
            if !first.is_done().map_err(TransferError::device)? {
                break;
            }
            self.messages.pop_front();
            n_done += 1;
        }
        Ok(n_done)
    }

    fn finalize(&mut self) -> Result<(), TransferError> {
        self.inner.finalize().map_err(TransferError::device)
    }

    fn destroy(self: Box<Self>) {
        // A failure is ignored, because the drop then releases the resources.
        let _ = self.inner.destroy();
    }
}
