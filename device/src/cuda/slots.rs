//! Staging buffers of GPUs: equal slots that hold the bytes of a message on its way.
//!
//! They lie in a GPU's own memory, or in host memory that the driver has page-locked, so that GPUs read and write it
//! directly.

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use cudarc::driver::sys::{
    CU_MEMHOSTREGISTER_DEVICEMAP, CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_READ_ONLY,
    cuMemHostRegister_v2, cuMemHostUnregister,
};
use cudarc::driver::{CudaContext, result};
use memmap2::MmapRaw;

use super::CudaError;
use super::error::ensure;
use super::mapped::no_room;
use super::memory::DeviceMemory;
use crate::memory::HostMemory;
use crate::memory::peer::PeerMemory;

/// The vector size of the kernels' loads and stores.
pub(super) const VECTOR_BYTES: usize = 16;

/// Equal slots: `n_slots` slots of `slot_bytes` each.
pub struct Slots {
    /// The contexts of the GPUs that use the slots, at least one.
    contexts: Vec<Arc<CudaContext>>,
    start: u64,
    slot_bytes: usize,
    n_slots: usize,
    place: Place,
}

/// The memory that holds the slots.
enum Place {
    /// Memory of the first GPU, which this value owns. The other GPUs access it directly.
    Gpu,
    /// Page-locked memory of this process. The mapping lives as long as the slots.
    Host(Arc<MmapRaw>),
    /// Page-locked memory of another process, which the GPUs only read.
    Peer(Arc<PeerMemory>),
}

impl Slots {
    /// Allocates the slots in the memory of the first user's GPU, for the GPUs of all users.
    ///
    /// # Panics
    /// If `users` is empty.
    pub fn on_gpu(users: &[&DeviceMemory], n_slots: usize, slot_bytes: usize) -> Result<Self, CudaError> {
        let contexts = contexts_of(users);
        users.iter().try_for_each(|user| user.reach(users[0]))?;
        contexts[0].bind_to_thread().map_err(CudaError::during("use the GPU from this thread"))?;
        let bytes = n_slots * slot_bytes;
        // JUSTIFICATION: GPU memory is accessed by address.
        // SAFETY: the content is undefined. A slot is filled before it is read, by the code that states its
        // length.
        let start = unsafe { result::malloc_sync(bytes.max(1)) }.map_err(|source| no_room(bytes, source))?;
        Ok(Self { contexts, start, slot_bytes, n_slots, place: Place::Gpu })
    }

    /// Page-locks host memory whose only region has a page for each slot, for the GPUs of `users`.
    ///
    /// The caller must not borrow a slot's page while a GPU uses the slot.
    ///
    /// # Panics
    /// If `users` is empty.
    pub fn in_host_memory(memory: &HostMemory, users: &[&DeviceMemory]) -> Result<Self, CudaError> {
        let (shape, mapping) = (memory.shape(0), Arc::clone(memory.mapping()));
        let flags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
        let contexts = contexts_of(users);
        page_lock(&contexts[0], mapping.as_mut_ptr(), mapping.len(), flags)?;
        Ok(Self {
            contexts,
            start: mapping.as_mut_ptr() as u64 + memory.file_offset(0, 0) as u64,
            slot_bytes: shape.page_bytes,
            n_slots: shape.n_pages as usize,
            place: Place::Host(mapping),
        })
    }

    /// Page-locks another process's memory as one slot that the GPUs of `users` read.
    ///
    /// # Panics
    /// If `users` is empty.
    pub fn in_peer_memory(memory: Arc<PeerMemory>, users: &[&DeviceMemory]) -> Result<Self, CudaError> {
        let start = memory.start();
        let flags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP | CU_MEMHOSTREGISTER_READ_ONLY;
        let contexts = contexts_of(users);
        page_lock(&contexts[0], start.cast_mut(), memory.bytes(), flags)?;
        let slot_bytes = memory.bytes() / VECTOR_BYTES * VECTOR_BYTES;
        Ok(Self { contexts, start: start as u64, slot_bytes, n_slots: 1, place: Place::Peer(memory) })
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
        self.context().bind_to_thread().map_err(CudaError::during("use the GPU from this thread"))?;
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
        &self.contexts[0]
    }
}

fn contexts_of(users: &[&DeviceMemory]) -> Vec<Arc<CudaContext>> {
    assert!(!users.is_empty(), "slots are for at least one GPU");
    users.iter().map(|memory| Arc::clone(memory.context())).collect()
}

fn page_lock(context: &CudaContext, start: *mut u8, bytes: usize, flags: u32) -> Result<(), CudaError> {
    context.bind_to_thread().map_err(CudaError::during("use the GPU from this thread"))?;
    // JUSTIFICATION: only the driver can page-lock memory.
    // SAFETY: the range is a whole mapping, which lives until the drop of the slots unlocks it.
    unsafe { cuMemHostRegister_v2(start.cast::<c_void>(), bytes, flags) }
        .result()
        .map_err(CudaError::during("page-lock host memory for the GPU"))
}

impl Drop for Slots {
    fn drop(&mut self) {
        // Waits, because the GPUs may still use the memory. If waiting fails, the context and all its memory
        // are lost.
        for context in &self.contexts {
            let _ = context.synchronize();
        }
        let _ = self.context().bind_to_thread();
        match &self.place {
            // JUSTIFICATION: the counterpart of `on_gpu`.
            // SAFETY: the memory came from `malloc_sync`, belongs to this value alone, and nothing uses it any
            // more.
            Place::Gpu => drop(unsafe { result::free_sync(self.start) }),
            Place::Host(mapping) => unlock(mapping.as_mut_ptr()),
            Place::Peer(memory) => unlock(memory.start().cast_mut()),
        }
    }
}

fn unlock(start: *mut u8) {
    // JUSTIFICATION: the counterpart of `page_lock`.
    // SAFETY: the range was page-locked by this value, and no GPU uses it any more. A failure leaves it locked until
    // the process ends.
    let _ = unsafe { cuMemHostUnregister(start.cast::<c_void>()) };
}

impl fmt::Debug for Slots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Slots({} of {} bytes)", self.n_slots, self.slot_bytes)
    }
}
