//! Slots of one end of a link, in host memory of this process that its GPUs access.

use std::sync::Arc;

use device::{HostMemory, PageMut, PageRef, RegionShape};

use super::staging::{HostStaging, InSlot, LazyMover, PageMover, SlotMemory};
use crate::connectors::link::span_in::busy;
use crate::error::TransferError;

/// Slots of one end of a link: enough that each stream fills one while others are copied by the GPU.
const N_SLOTS: u32 = 16;

/// The alignment of slots, which suits every kernel.
pub(in crate::connectors) const SLOT_ALIGN: usize = 256;

#[derive(Debug)]
pub(in crate::connectors) struct SlotPool {
    memory: Arc<HostMemory>,
    mover: LazyMover,
    free: async_channel::Receiver<u32>,
    freed: async_channel::Sender<u32>,
}

/// A slot that is lent to one frame. The drop returns it.
#[derive(Debug)]
pub(in crate::connectors) struct Slot {
    nth: u32,
    memory: Arc<HostMemory>,
    freed: async_channel::Sender<u32>,
}

impl SlotPool {
    /// Makes the slots. They take memory when the first one is used.
    pub(in crate::connectors) fn new(
        staging: Arc<dyn HostStaging>,
        slot_bytes: usize,
    ) -> Result<Self, TransferError> {
        let shape = RegionShape { page_bytes: slot_bytes.next_multiple_of(SLOT_ALIGN), n_pages: N_SLOTS };
        let memory =
            HostMemory::new(&[shape]).map_err(|source| TransferError::Share { source: Arc::new(source) })?;
        let (freed, free) = async_channel::bounded(N_SLOTS as usize);
        for slot in 0..N_SLOTS {
            freed.try_send(slot).expect("there is room for all slots");
        }
        Ok(Self { memory: Arc::new(memory), mover: LazyMover::new(Some(staging)), free, freed })
    }

    /// Waits for a free slot for `bytes` of KV. Returns `None` if they do not fit, or if the GPU cannot access the
    /// slots: then the processor copies the KV.
    pub(in crate::connectors) async fn take(
        &self,
        bytes: usize,
    ) -> Result<Option<(Arc<dyn PageMover>, Arc<Slot>)>, TransferError> {
        if bytes > self.memory.shape(0).page_bytes {
            return Ok(None);
        }
        let mover = self.mover.get(|| SlotMemory::Own(Arc::clone(&self.memory))).await?;
        let Some(mover) = mover else { return Ok(None) };
        let nth = self.free.recv().await.map_err(|_| TransferError::Closed)?;
        let slot = Slot { nth, memory: Arc::clone(&self.memory), freed: self.freed.clone() };
        Ok(Some((Arc::clone(mover), Arc::new(slot))))
    }
}

impl Slot {
    /// Returns the slot's start, for a copy job that keeps the slot until it is done.
    pub(in crate::connectors) fn start(self: &Arc<Self>) -> InSlot {
        InSlot { slot: self.nth as usize, offset: 0, guard: Some(Arc::clone(self) as _) }
    }

    pub(in crate::connectors) fn read(&self) -> Result<PageRef<'_>, TransferError> {
        self.memory.read(0, self.nth..self.nth + 1).map_err(busy)
    }

    pub(in crate::connectors) fn write(&self) -> Result<PageMut<'_>, TransferError> {
        self.memory.write(0, self.nth..self.nth + 1).map_err(busy)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        // The channel has room for all slots. If it is closed, the slots are no longer needed, so the error is
        // ignored.
        let _ = self.freed.try_send(self.nth);
    }
}
