//! Words of host memory that the GPUs of a model access while the CPU does.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use cudarc::driver::{CudaContext, result, sys};

use super::{Card, CudaError};

/// Words in page-locked memory, mapped for all GPUs of the process. All accesses are to whole words.
///
/// It must outlive all GPU work that has its address. Otherwise that work fails.
pub struct HostWords {
    context: Arc<CudaContext>,
    start: NonNull<AtomicU32>,
    len: usize,
}

// JUSTIFICATION: the pointer makes the type neither Send nor Sync.
// SAFETY: it owns its memory, which is accessed only as atomics.
unsafe impl Send for HostWords {}
// SAFETY: it owns its memory, which is accessed only as atomics.
unsafe impl Sync for HostWords {}

impl HostWords {
    /// Allocates words, all zero.
    pub fn new(card: &Card, len: usize) -> Result<Self, CudaError> {
        card.bind()?;
        let bytes = len.saturating_mul(size_of::<AtomicU32>()).max(1);
        // JUSTIFICATION: only the driver can allocate memory that GPUs access.
        // SAFETY: only this value has the pointer, and it frees it once.
        let start = unsafe { result::malloc_host(bytes, sys::CU_MEMHOSTALLOC_PORTABLE) }
            .map_err(CudaError::during("allocate host memory for all GPUs"))?;
        let start = NonNull::new(start.cast::<AtomicU32>()).expect("the driver gives memory or an error");
        for nth in 0..len {
            // JUSTIFICATION: memory must hold values before a slice of it exists.
            // SAFETY: `nth` is within the allocation, which is aligned to a memory page and unknown to other code.
            unsafe { start.add(nth).write(AtomicU32::new(0)) };
        }
        Ok(Self { context: Arc::clone(card.context()), start, len })
    }

    pub fn words(&self) -> &[AtomicU32] {
        // JUSTIFICATION: GPUs access the words too.
        // SAFETY: they are initialised and live as long as this value. All accesses are to whole words.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    /// Returns the address for kernels of all GPUs.
    pub fn address(&self) -> u64 {
        self.start.as_ptr() as u64
    }
}

impl fmt::Debug for HostWords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostWords({} words)", self.len)
    }
}

impl Drop for HostWords {
    fn drop(&mut self) {
        let _ = self.context.bind_to_thread();
        // JUSTIFICATION: the counterpart of `new`.
        // SAFETY: the pointer came from `malloc_host`, and no reference outlives this value.
        let _ = unsafe { result::free_host(self.start.as_ptr().cast()) };
    }
}
