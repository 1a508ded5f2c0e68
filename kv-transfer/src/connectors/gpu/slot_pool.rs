//! Slots of one end of a link, in host memory of this process that its GPUs access.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use device::{HostMemory, PageMut, PageRef, RegionShape};

use super::free_slots::{FreeSlots, LentSlot};
use super::staging::{HostStaging, InSlot, LazyMover, PageMover, SlotMemory};
use crate::connectors::link::span_in::busy;
use crate::connectors::link::stream::within;
use crate::error::TransferError;

/// Slots of one end of a link: enough that each stream fills one while others are copied by the GPU.
const N_SLOTS: u32 = 16;

/// The alignment of slots, which suits every kernel.
pub(in crate::connectors) const SLOT_ALIGN: usize = 256;

#[derive(Debug)]
pub(in crate::connectors) struct SlotPool {
    memory: Arc<HostMemory>,
    mover: LazyMover,
    free: FreeSlots,
}

/// A slot that is lent to one frame. The drop returns it.
#[derive(Debug)]
pub(in crate::connectors) struct Slot {
    lent: LentSlot,
    memory: Arc<HostMemory>,
}

impl SlotPool {
    /// Makes the slots. They take memory when the first one is used.
    pub(in crate::connectors) fn new(
        staging: Arc<dyn HostStaging>,
        slot_bytes: usize,
    ) -> Result<Self, TransferError> {
        let shape = RegionShape { page_bytes: slot_bytes.next_multiple_of(SLOT_ALIGN), n_pages: N_SLOTS };
        let memory = HostMemory::new(&[shape]);
        let memory = Arc::new(memory.map_err(|source| TransferError::Share { source: Arc::new(source) })?);
        let mover = LazyMover::new(Some(staging), SlotMemory::Own(Arc::clone(&memory)));
        Ok(Self { memory, mover, free: FreeSlots::new(N_SLOTS as usize) })
    }

    /// Waits for a free slot for `bytes` of KV, at most for `stall`. Returns `None` if they do not fit, or if the GPU
    /// cannot access the slots: then the processor copies the KV.
    pub(in crate::connectors) async fn take(
        &self,
        bytes: usize,
        stall: Duration,
    ) -> Result<Option<(Arc<dyn PageMover>, Arc<Slot>)>, TransferError> {
        if bytes > self.memory.shape(0).page_bytes {
            return Ok(None);
        }
        let take = async {
            let Some(mover) = self.mover.get().await? else { return Ok(None) };
            let slot = Slot { lent: self.free.take().await?, memory: Arc::clone(&self.memory) };
            Ok(Some((Arc::clone(mover), Arc::new(slot))))
        };
        within(stall, "waiting for a slot", take).await
    }
}

impl Slot {
    /// Returns the slot's start, for a copy job that keeps the slot until it is done.
    pub(in crate::connectors) fn start(self: &Arc<Self>) -> InSlot {
        InSlot { slot: self.lent.nth, offset: 0, guard: Some(Arc::clone(self) as _) }
    }

    pub(in crate::connectors) fn read(&self) -> Result<PageRef<'_>, TransferError> {
        self.memory.read(0, self.page()).map_err(busy)
    }

    pub(in crate::connectors) fn write(&self) -> Result<PageMut<'_>, TransferError> {
        self.memory.write(0, self.page()).map_err(busy)
    }

    fn page(&self) -> Range<u32> {
        let nth = self.lent.nth as u32;
        nth..nth + 1
    }
}
