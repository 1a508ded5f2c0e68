//! Words of host memory that the GPUs of a process access while the CPU does.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use cudarc::driver::{CudaContext, sys};

use super::buffer::View;
use super::staging::PinnedBytes;
use super::{Card, CudaError};

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

impl Card {
    /// Copies numbers to host words from `first` on, in stream order, and then sets the word `flag` to `value`. The host
    /// reads the numbers when it sees the value.
    ///
    /// # Panics
    /// If there are no such words, or the numbers are on another GPU.
    pub fn publish(
        &self,
        from: View<'_, u32>,
        to: &HostWords,
        first: usize,
        flag: usize,
        value: u32,
    ) -> Result<(), CudaError> {
        assert!(
            first + from.len() <= to.len && flag < to.len,
            "{} words at {first} of {}",
            from.len(),
            to.len
        );
        assert_eq!(from.ordinal(), self.ordinal(), "the numbers are on this GPU");
        self.bind()?;
        let (stream, at) =
            (self.stream().cu_stream(), |word: usize| to.address() + (word * size_of::<u32>()) as u64);
        // JUSTIFICATION: the host reads the words while the GPU may write others, so no slice of them may exist.
        // SAFETY: both ranges exist and have this length. The words outlive the work, as the type demands.
        unsafe {
            if !from.is_empty() {
                let bytes = from.len() * size_of::<u32>();
                sys::cuMemcpyDtoHAsync_v2(at(first) as *mut _, from.address(), bytes, stream)
                    .result()
                    .map_err(CudaError::during("copy from the GPU"))?;
            }
            sys::cuStreamWriteValue32_v2(stream, at(flag), value, 0)
        }
        .result()
        .map_err(CudaError::during("tell the host"))
    }
}

impl fmt::Debug for HostWords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostWords({} words)", self.len)
    }
}
