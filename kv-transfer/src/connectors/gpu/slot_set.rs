//! The slots of one peer: their number, their size, and the host memory that they take.

use std::fmt;
use std::sync::Arc;

use chassis::byte_size::ByteSize;
use device::memory::available::available_bytes;
use device::{HostMemory, MemoryError, RegionShape};
use tokio::task::spawn_blocking;
use tracing::info;

use super::staging::{HostStaging, SlotMemory, warn_of};
use crate::connector_parts::ConnectorParts;
use crate::connectors::link::check_pages;
use crate::error::TransferError;
use crate::settings::HostSlots;

/// The alignment of slots, which suits every kernel.
pub(in crate::connectors) const SLOT_ALIGN: usize = 256;

/// The slots of one peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::connectors) struct SlotSet {
    connector: &'static str,
    n_slots: HostSlots,
    slot_bytes: usize,
}

impl SlotSet {
    /// Makes a set whose slots hold a frame, and at least one page.
    pub(in crate::connectors) fn of(
        connector: &'static str,
        parts: &ConnectorParts,
    ) -> Result<Self, TransferError> {
        let slot_bytes = parts.settings.frame_bytes.max(check_pages(parts)?).next_multiple_of(SLOT_ALIGN);
        Ok(Self { connector, n_slots: parts.settings.host_slots, slot_bytes })
    }

    pub(in crate::connectors) fn n_slots(self) -> u16 {
        self.n_slots.get()
    }

    /// Returns the shape of a memory whose pages are the slots.
    pub(in crate::connectors) fn shape(self) -> RegionShape {
        RegionShape { page_bytes: self.slot_bytes, n_pages: self.n_slots().into() }
    }

    fn bytes(self) -> u64 {
        u64::from(self.n_slots()) * self.slot_bytes as u64
    }

    /// Page-locks `memory`, which is one set, and gives it back, so that a machine without room for the slots is
    /// refused at the start and not at the first transfer. If the driver cannot page-lock memory at all, this is a
    /// warning, because processors copy then.
    ///
    /// `RLIMIT_MEMLOCK` does not matter: NVIDIA's driver pins pages itself and does not count them against it.
    pub(in crate::connectors) async fn check(
        self,
        staging: &Arc<dyn HostStaging>,
        memory: HostMemory,
    ) -> Result<(), TransferError> {
        self.fits(available_bytes())?;
        let (staging, memory) = (Arc::clone(staging), SlotMemory::Own(Arc::new(memory)));
        let locked = spawn_blocking(move || staging.mover(&memory).map(drop)).await;
        match locked.map_err(|_| TransferError::Closed)? {
            Err(error) if error.is_not_supported() => warn_of(&error),
            Err(error) => return Err(self.refusal(error)),
            Ok(()) => info!(
                connector = self.connector,
                slots = self.n_slots(),
                slot_kib = self.slot_bytes >> 10,
                kib = self.bytes() >> 10,
                "slots for KV of GPUs take this page-locked host memory for each peer, from its first transfer on"
            ),
        }
        Ok(())
    }

    /// Refuses a set that is larger than the available memory. `None`: the system does not report it.
    fn fits(self, available: Option<u64>) -> Result<(), TransferError> {
        match available {
            Some(available) if self.bytes() > available => {
                Err(self.refusal(MemoryError::TooMuch { asked: self.bytes(), available }))
            }
            _ => Ok(()),
        }
    }

    fn refusal(self, source: impl std::error::Error + Send + Sync + 'static) -> TransferError {
        TransferError::Slots { slots: self.to_string(), source: Arc::new(source) }
    }
}

impl fmt::Display for SlotSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (slot, all) = (ByteSize(self.slot_bytes as u64), ByteSize(self.bytes()));
        write!(
            f,
            "{} slots of {slot} = {all} of page-locked host memory for each peer of {}",
            self.n_slots(),
            self.connector
        )
    }
}

#[cfg(test)]
mod tests {
    use types::in_full;

    use super::*;

    #[test]
    fn too_little_host_memory_is_refused_with_the_sum_and_the_limit() {
        let set = SlotSet { connector: "shm", n_slots: HostSlots::default(), slot_bytes: 4 << 20 };
        set.fits(None).expect("the system does not report it");
        set.fits(Some(64 << 20)).expect("it is enough");
        assert_eq!(
            in_full(&set.fits(Some(40 << 20)).expect_err("it is too little")),
            "no room for 16 slots of 4MiB = 64MiB of page-locked host memory for each peer of shm (set \
             expert.transfer.host_slots lower): 64 MiB of memory are requested, but only 40 MiB are available to this \
             process"
        );
    }
}
