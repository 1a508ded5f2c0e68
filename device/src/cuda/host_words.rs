//! Words of host memory that the GPUs of a process access while the CPU does.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use cudarc::driver::CudaContext;

use super::CudaError;
use super::staging::PinnedBytes;

/// Words in page-locked memory, mapped for all GPUs of the process. All accesses are to whole words.
///
/// It must outlive all GPU work that has its address. Otherwise that work fails.
pub struct HostWords {
    bytes: PinnedBytes,
    len: usize,
}

impl HostWords {
    /// Allocates words, all zero.
    pub fn new(context: &Arc<CudaContext>, len: usize) -> Result<Self, CudaError> {
        let bytes = PinnedBytes::new(context, len.saturating_mul(size_of::<AtomicU32>()))?;
        Ok(Self { bytes, len })
    }

    pub fn words(&self) -> &[AtomicU32] {
        // JUSTIFICATION: GPUs access the words too.
        // SAFETY: the memory is initialised, aligned to a memory page, long enough, and lives as long as this value.
        // All accesses are to whole words.
        unsafe { std::slice::from_raw_parts(self.address() as *const AtomicU32, self.len) }
    }

    /// Returns the address for kernels of all GPUs.
    pub fn address(&self) -> u64 {
        self.bytes.address()
    }
}

impl fmt::Debug for HostWords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostWords({} words)", self.len)
    }
}
