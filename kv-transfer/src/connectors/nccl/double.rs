//! A test double of NCCL and of a GPU. Its slots and messages are in this process's host memory.
//!
//! The double keeps the properties that the connector relies on: messages are delivered in the order in which
//! both ends ask for them, an unrequested message waits, and a message whose other end is gone never comes.
//! Tests can make it stall.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use device::cuda::CopyDone;
use device::{HostMemory, PageMut, RegionShape};
use kv_cache::KvMemory;

use super::backend::{Communicator, End, ID_BYTES, NcclBackend, QueueId, Stage};
use crate::connectors::gpu::double::DoubleMover;
use crate::connectors::gpu::staging::{PageMover, SlotMemory};
use crate::connectors::link::span_in::busy;
use crate::error::TransferError;
use crate::faults::flip;

const N_SLOTS: u32 = 3;

/// The queues between the nodes of one process. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Double {
    inner: Arc<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    n_ids: AtomicU64,
    /// The queues by id. Held for a look-up.
    queues: Mutex<HashMap<QueueId, Arc<Mutex<Queue>>>>,
    is_stalled: AtomicBool,
    n_given_up: AtomicUsize,
    n_ended: AtomicUsize,
}

/// The state between the two ends of one queue.
#[derive(Debug, Default)]
struct Queue {
    n_joined: usize,
    messages: VecDeque<Vec<u8>>,
    /// The number of sent messages that are not yet reported to the sender.
    n_sent: usize,
    n_received: usize,
}

impl Double {
    pub(super) fn backend(&self, memory: &KvMemory, slot_bytes: usize, n_queues: usize) -> HostBackend {
        HostBackend { double: self.clone(), memory: memory.clone(), slot_bytes, n_queues }
    }

    /// Stalls all messages.
    pub fn stall(&self) {
        self.inner.is_stalled.store(true, Ordering::Release);
    }

    /// Lets all messages finish that wait since [`stall`](Self::stall).
    pub fn resume(&self) {
        self.inner.is_stalled.store(false, Ordering::Release);
    }

    /// Returns the number of ends of queues that were aborted.
    pub fn n_given_up(&self) -> usize {
        self.inner.n_given_up.load(Ordering::Acquire)
    }

    /// Returns the number of ends of queues that ended in good order.
    pub fn n_ended(&self) -> usize {
        self.inner.n_ended.load(Ordering::Acquire)
    }

    /// Returns the number of queues that were ever created.
    pub fn n_queues(&self) -> usize {
        locked(&self.inner.queues).len()
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The backend of one node.
#[derive(Debug)]
pub(super) struct HostBackend {
    double: Double,
    memory: KvMemory,
    slot_bytes: usize,
    n_queues: usize,
}

impl NcclBackend for HostBackend {
    fn n_queues(&self) -> usize {
        self.n_queues
    }

    fn id(&self) -> Result<QueueId, TransferError> {
        let nth = self.double.inner.n_ids.fetch_add(1, Ordering::Relaxed);
        let mut id = [0; ID_BYTES];
        id[..8].copy_from_slice(&nth.to_le_bytes());
        Ok(id)
    }

    fn stage(&self, _rank: u16) -> Result<Arc<dyn Stage>, TransferError> {
        let shape = RegionShape { page_bytes: self.slot_bytes, n_pages: N_SLOTS };
        let slots = Arc::new(HostMemory::new(&[shape]).map_err(TransferError::share)?);
        let mover = DoubleMover::new(self.memory.clone(), SlotMemory::Own(Arc::clone(&slots)));
        Ok(Arc::new(HostStage { double: self.double.clone(), mover, slots }))
    }
}

#[derive(Debug)]
struct HostStage {
    double: Double,
    mover: DoubleMover,
    /// Each slot has one owner at a time.
    slots: Arc<HostMemory>,
}

impl HostStage {
    fn slot(&self, slot: usize) -> Result<PageMut<'_>, TransferError> {
        self.slots.write(0, slot as u32..slot as u32 + 1).map_err(busy)
    }
}

impl Stage for HostStage {
    fn n_slots(&self) -> usize {
        self.slots.shape(0).n_pages as usize
    }

    fn slot_bytes(&self) -> usize {
        self.slots.shape(0).page_bytes
    }

    fn mover(&self) -> &dyn PageMover {
        &self.mover
    }

    fn flip(&self, slot: usize, bit: usize) -> Result<(), TransferError> {
        flip(&mut self.slot(slot)?, bit as u64);
        Ok(())
    }

    fn join(self: Arc<Self>, id: QueueId, end: End) -> Result<Box<dyn Communicator>, TransferError> {
        let queue = Arc::clone(locked(&self.double.inner.queues).entry(id).or_default());
        locked(&queue).n_joined += 1;
        Ok(Box::new(HostCommunicator {
            stage: self,
            queue,
            end,
            wanted: VecDeque::new(),
            is_called: false,
            is_over: false,
        }))
    }
}

#[derive(Debug)]
struct HostCommunicator {
    stage: Arc<HostStage>,
    queue: Arc<Mutex<Queue>>,
    end: End,
    /// The slots and lengths of the messages that this end waits for.
    wanted: VecDeque<(usize, usize)>,
    /// Whether a call is in progress. It settles at the second check.
    is_called: bool,
    is_over: bool,
}

impl HostCommunicator {
    /// Copies available messages into the slots that wait for them.
    fn take(&mut self, queue: &mut Queue) -> Result<(), TransferError> {
        while let Some((slot, bytes)) = self.wanted.front().copied() {
            let Some(message) = queue.messages.pop_front() else { break };
            if message.len() != bytes {
                return Err(TransferError::lost_because("a message has an unexpected length"));
            }
            self.stage.slot(slot)?[..bytes].copy_from_slice(&message);
            self.wanted.pop_front();
            (queue.n_sent, queue.n_received) = (queue.n_sent + 1, queue.n_received + 1);
        }
        Ok(())
    }
}

impl Communicator for HostCommunicator {
    fn is_settled(&mut self) -> Result<bool, TransferError> {
        Ok(!std::mem::take(&mut self.is_called) && locked(&self.queue).n_joined == 2)
    }

    fn send(&mut self, slot: usize, bytes: usize, _before: &[CopyDone]) -> Result<(), TransferError> {
        let message = self.stage.slot(slot)?[..bytes].to_vec();
        locked(&self.queue).messages.push_back(message);
        self.is_called = true;
        Ok(())
    }

    fn receive(&mut self, slot: usize, bytes: usize) -> Result<(), TransferError> {
        self.wanted.push_back((slot, bytes));
        self.is_called = true;
        Ok(())
    }

    fn n_done(&mut self) -> Result<usize, TransferError> {
        if self.stage.double.inner.is_stalled.load(Ordering::Acquire) {
            return Ok(0);
        }
        let queue = Arc::clone(&self.queue);
        let mut queue = locked(&queue);
        match self.end {
            End::Sender => Ok(std::mem::take(&mut queue.n_sent)),
            End::Receiver => {
                self.take(&mut queue)?;
                Ok(std::mem::take(&mut queue.n_received))
            }
        }
    }

    fn finalize(&mut self) -> Result<(), TransferError> {
        Ok(())
    }

    fn destroy(mut self: Box<Self>) {
        self.is_over = true;
        self.stage.double.inner.n_ended.fetch_add(1, Ordering::AcqRel);
    }
}

impl Drop for HostCommunicator {
    fn drop(&mut self) {
        if !self.is_over {
            self.stage.double.inner.n_given_up.fetch_add(1, Ordering::AcqRel);
        }
    }
}
