//! A few slots of shared memory, for KV that other processes cannot map where it is.
//!
//! Such KV is on a GPU, or in memory that the system cannot share. A slot costs one additional copy. The
//! slots belong to one link. A slot is free again when the receiver reports that it has copied it.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use device::{HostMemory, MemoryError, PageMut, RegionShape};

use crate::connectors::link::frame::{FrameError, PAYLOAD_BYTES_MAX};

/// Slots of one link: enough that copies in and copies out overlap on every stream.
const N_SLOTS: u16 = 16;

/// The largest stage that a peer's GPUs page-lock: all of it takes memory then.
pub(super) const STAGE_BYTES_MAX: usize = N_SLOTS as usize * PAYLOAD_BYTES_MAX;

#[derive(Debug)]
pub(super) struct Stage {
    memory: Arc<HostMemory>,
    lent: [AtomicBool; N_SLOTS as usize],
    free: async_channel::Receiver<u16>,
    freed: async_channel::Sender<u16>,
}

impl Stage {
    /// Creates the slots. A slot takes memory when it is first used.
    pub(super) fn new(slot_bytes: usize) -> Result<Self, MemoryError> {
        let memory = HostMemory::shared(&[RegionShape { page_bytes: slot_bytes, n_pages: N_SLOTS.into() }])?;
        let (freed, free) = async_channel::bounded(N_SLOTS.into());
        for slot in 0..N_SLOTS {
            freed.try_send(slot).expect("there is room for all slots");
        }
        Ok(Self { memory: Arc::new(memory), lent: Default::default(), free, freed })
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

#[cfg(test)]
mod tests {
    use futures::poll;

    use super::*;

    #[tokio::test]
    async fn a_slot_is_lent_until_it_is_taken() {
        let stage = Stage::new(100).expect("a page can be shared");
        let mut slots = Vec::new();
        for _ in 0..N_SLOTS {
            slots.push(stage.slot().await);
        }
        let mut next = Box::pin(stage.slot());
        assert!(poll!(&mut next).is_pending(), "all are lent");
        stage.taken(slots[3]).expect("it was lent");
        assert_eq!(next.await, slots[3]);
        stage.taken(slots[4]).expect("it was lent");
        stage.taken(slots[4]).expect_err("it was given back");
        stage.taken(N_SLOTS).expect_err("there is no such slot");
    }
}
