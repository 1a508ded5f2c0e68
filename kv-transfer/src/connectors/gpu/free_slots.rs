//! The numbers of slots that are free, and the right to use one.

use crate::error::TransferError;

/// Slots by number. Each is lent to one user at a time.
#[derive(Debug)]
pub(in crate::connectors) struct FreeSlots {
    free: async_channel::Receiver<usize>,
    give_back: async_channel::Sender<usize>,
}

/// The right to use one slot. The drop frees the slot for the next user.
#[derive(Debug)]
pub(in crate::connectors) struct LentSlot {
    pub(in crate::connectors) nth: usize,
    give_back: async_channel::Sender<usize>,
}

impl FreeSlots {
    pub(in crate::connectors) fn new(n_slots: usize) -> Self {
        let (give_back, free) = async_channel::bounded(n_slots);
        (0..n_slots).for_each(|nth| give_back.try_send(nth).expect("there is room for all slots"));
        Self { free, give_back }
    }

    /// Waits for a free slot.
    pub(in crate::connectors) async fn take(&self) -> Result<LentSlot, TransferError> {
        let nth = self.free.recv().await.map_err(|_| TransferError::Closed)?;
        Ok(LentSlot { nth, give_back: self.give_back.clone() })
    }
}

impl Drop for LentSlot {
    fn drop(&mut self) {
        // The channel has room for all slots. If it is closed, the slots are no longer needed, so the error
        // is ignored.
        let _ = self.give_back.try_send(self.nth);
    }
}
