//! A few slots of shared memory, for KV that other processes cannot map where it is.
//!
//! Such KV is on a GPU, or in memory that the system cannot share. A slot costs one additional copy. The
//! slots belong to one link. A slot is free again when the receiver reports that it has copied it.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use device::{HostMemory, PageMut};

use crate::connectors::gpu::slot_set::SlotSet;
use crate::connectors::link::frame::{FrameError, PAYLOAD_BYTES_MAX};
use crate::error::TransferError;
use crate::settings::HostSlots;

/// The largest stage that a peer's GPUs page-lock: all of it takes memory then.
pub(super) const STAGE_BYTES_MAX: usize = HostSlots::MAX as usize * PAYLOAD_BYTES_MAX;

#[derive(Debug)]
pub(super) struct Stage {
    memory: Arc<HostMemory>,
    lent: Box<[AtomicBool]>,
    free: async_channel::Receiver<u16>,
    freed: async_channel::Sender<u16>,
}

impl Stage {
    /// Creates the slots. A slot takes memory when it is first used.
    pub(super) fn new(set: SlotSet) -> Result<Self, TransferError> {
        let (n_slots, memory) = (set.n_slots(), memory_of(set)?);
        let (freed, free) = async_channel::bounded(n_slots.into());
        for slot in 0..n_slots {
            freed.try_send(slot).expect("there is room for all slots");
        }
        let lent = (0..n_slots).map(|_| AtomicBool::new(false)).collect();
        Ok(Self { memory: Arc::new(memory), lent, free, freed })
    }

    pub(super) fn memory(&self) -> &Arc<HostMemory> {
        &self.memory
    }

    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.memory.file().expect("the stage is shared memory")
    }

    /// Waits for a free slot.
    pub(super) async fn slot(&self) -> u16 {
        let slot = self.free.recv().await.expect("the queue lives as long as the stage");
        self.lent[usize::from(slot)].store(true, Ordering::Relaxed);
        slot
    }

    pub(super) fn write(&self, slot: u16) -> PageMut<'_> {
        let slot = u32::from(slot);
        self.memory.write(0, slot..slot + 1).expect("a slot is lent once")
    }

    pub(super) fn offset(&self, slot: u16) -> u64 {
        self.memory.file_offset(0, slot.into()) as u64
    }

    /// Frees a slot that the receiver has copied.
    pub(super) fn taken(&self, slot: u16) -> Result<(), FrameError> {
        let lent = self.lent.get(usize::from(slot));
        if !lent.is_some_and(|lent| lent.swap(false, Ordering::Relaxed)) {
            return Err(FrameError::Unexpected("a slot that is not in use"));
        }
        self.freed.try_send(slot).expect("a slot is free once");
        Ok(())
    }
}

/// Allocates the memory of a stage.
pub(super) fn memory_of(set: SlotSet) -> Result<HostMemory, TransferError> {
    HostMemory::shared(&[set.shape()]).map_err(TransferError::share)
}

#[cfg(test)]
mod tests {
    use futures::poll;

    use super::*;
    use crate::conformance::node::{Node, layout};

    #[tokio::test]
    async fn a_slot_is_lent_until_it_is_taken() {
        let mut parts = Node::parts("near", layout());
        parts.settings.host_slots = HostSlots::try_from(5).expect("it is allowed");
        let set = SlotSet::of("shm", &parts).expect("pages fit");
        let stage = Stage::new(set).expect("a page can be shared");
        let mut slots = Vec::new();
        for _ in 0..5 {
            slots.push(stage.slot().await);
        }
        let mut next = Box::pin(stage.slot());
        assert!(poll!(&mut next).is_pending(), "all are lent");
        stage.taken(slots[3]).expect("it was lent");
        assert_eq!(next.await, slots[3]);
        stage.taken(slots[4]).expect("it was lent");
        stage.taken(slots[4]).expect_err("it was given back");
        stage.taken(5).expect_err("there is no such slot");
    }
}
