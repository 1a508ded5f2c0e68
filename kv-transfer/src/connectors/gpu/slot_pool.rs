//! Slots of one end of a link, in host memory of this process that its GPUs access.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use device::{HostMemory, PageMut, PageRef};

use super::free_slots::{FreeSlots, LentSlot};
use super::slot_set::SlotSet;
use super::staging::{HostStaging, InSlot, LazyMover, PageMover, SlotMemory};
use crate::connectors::link::span_in::busy;
use crate::connectors::link::stream::within;
use crate::error::TransferError;

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
        set: SlotSet,
    ) -> Result<Self, TransferError> {
        let memory = Arc::new(Self::memory(set)?);
        let mover = LazyMover::new(Some(staging), SlotMemory::Own(Arc::clone(&memory)));
        Ok(Self { memory, mover, free: FreeSlots::new(set.n_slots().into()) })
    }

    pub(in crate::connectors) fn memory(set: SlotSet) -> Result<HostMemory, TransferError> {
        HostMemory::new(&[set.shape()]).map_err(TransferError::share)
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
