//! Staging buffers in GPU memory: equal slots that hold the bytes of a message on its way.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::{CudaContext, result};

use super::CudaError;
use super::error::ensure;
use super::mapped::no_room;
use super::memory::DeviceMemory;

/// Equal slots on one GPU: `n_slots` slots of `slot_bytes` each.
pub struct Slots {
    context: Arc<CudaContext>,
    start: u64,
    slot_bytes: usize,
    n_slots: usize,
}

impl Slots {
    /// Allocates the slots on the GPU of `memory`.
    pub fn new(memory: &DeviceMemory, n_slots: usize, slot_bytes: usize) -> Result<Self, CudaError> {
        let context = Arc::clone(memory.context());
        context.bind_to_thread().map_err(CudaError::during("use the GPU from this thread"))?;
        let bytes = n_slots * slot_bytes;
        // JUSTIFICATION: GPU memory is accessed by address.
        // SAFETY: the content is undefined. A slot is filled before it is read, by the code that states its
        // length.
        let start = unsafe { result::malloc_sync(bytes.max(1)) }.map_err(|source| no_room(bytes, source))?;
        Ok(Self { context, start, slot_bytes, n_slots })
    }

    pub fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    pub fn len(&self) -> usize {
        self.n_slots
    }

    pub fn is_empty(&self) -> bool {
        self.n_slots == 0
    }

    /// Flips one bit of a slot and waits. Tests inject this fault.
    pub fn flip(&self, slot: usize, bit: usize) -> Result<(), CudaError> {
        let address = self.address(slot, bit / 8, 1)?;
        self.context.bind_to_thread().map_err(CudaError::during("use the GPU from this thread"))?;
        let mut byte = [0u8];
        // JUSTIFICATION: GPU memory is accessed by address.
        // SAFETY: `address` checks that the byte is in the slot. The caller ensures that the slot has no
        // other user.
        unsafe { result::memcpy_dtoh_sync(&mut byte, address) }
            .and_then(|()| {
                byte[0] ^= 1 << (bit % 8);
                // SAFETY: the same byte as above.
                unsafe { result::memcpy_htod_sync(address, &byte) }
            })
            .map_err(CudaError::during("copy a byte of the GPU"))
    }

    /// Returns the address of a range of `bytes` bytes in a slot. A range outside of the slot is an error.
    pub(super) fn address(&self, slot: usize, offset: usize, bytes: usize) -> Result<u64, CudaError> {
        let fits = slot < self.n_slots && offset.checked_add(bytes).is_some_and(|end| end <= self.slot_bytes);
        ensure("a slot", fits, "a range outside of the slot")?;
        Ok(self.start + (slot * self.slot_bytes + offset) as u64)
    }

    pub(super) fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        // Waits, because the GPU may still use the memory. If waiting fails, the context and all its memory
        // are lost.
        let _ = self.context.synchronize();
        // JUSTIFICATION: the counterpart of `new`.
        // SAFETY: the memory came from `malloc_sync`, belongs to this value alone, and nothing uses it any
        // more.
        let _ = unsafe { result::free_sync(self.start) };
    }
}

impl fmt::Debug for Slots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Slots({} of {} bytes)", self.n_slots, self.slot_bytes)
    }
}
