//! Copies of GPU pages in host memory, for CPU code that reads and writes KV.

use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::{CU_MEMHOSTALLOC_DEVICEMAP, CU_MEMHOSTALLOC_PORTABLE};
use cudarc::driver::{CudaContext, CudaStream, result};

use super::CudaError;

/// The number of copies kept for reuse, because pinning memory takes longer than copying into it.
const KEPT_MAX: usize = 16;
/// The largest copy that is kept, in bytes. Larger copies are rare.
const KEPT_BYTES_MAX: usize = 64 << 20;

/// Copies bytes between the GPU and pinned host memory, on its own stream.
pub(crate) struct Staging {
    stream: Arc<CudaStream>,
    /// Memory of earlier copies, for reuse. The lock is held briefly, never during a copy.
    kept: Mutex<Vec<PinnedBytes>>,
    /// Set after a copy failed: the GPU is lost, with all its data.
    lost: std::sync::atomic::AtomicBool,
}

/// A copy of some GPU bytes. Dropping it returns the memory for reuse.
pub(crate) struct StagedCopy<'a> {
    staging: &'a Staging,
    bytes: Option<PinnedBytes>,
    len: usize,
}

/// A copy that is written to the GPU when it is dropped.
pub(crate) struct WriteBack<'a> {
    staged: StagedCopy<'a>,
    address: u64,
}

/// Pinned host memory, which the GPU copies from and to.
pub(super) struct PinnedBytes {
    context: Arc<CudaContext>,
    start: NonNull<u8>,
    capacity: usize,
}

// JUSTIFICATION: the pointer makes the type neither Send nor Sync.
// SAFETY: it owns its memory, as a Box does, and gives out only its address. The borrow states control reads
// and writes.
unsafe impl Send for PinnedBytes {}
// SAFETY: it owns its memory, as a Box does, and gives out only its address.
unsafe impl Sync for PinnedBytes {}

// === impl Staging ===

impl Staging {
    pub(super) fn new(context: &Arc<CudaContext>) -> Result<Self, CudaError> {
        let stream = context.new_stream().map_err(CudaError::during("make a stream"))?;
        Ok(Self { stream, kept: Mutex::default(), lost: false.into() })
    }

    /// Returns a host copy of the bytes at `address`.
    ///
    /// # Safety
    /// `len` bytes at `address` are memory of this GPU while this value lives, and no other code writes them
    /// during the call.
    pub(super) unsafe fn read(&self, address: u64, len: usize) -> Result<StagedCopy<'_>, CudaError> {
        let pinned = self.take(len)?;
        self.bind()?;
        // JUSTIFICATION: the driver allocated the copy's memory, and GPU memory is accessed by address.
        // SAFETY: the pinned memory is long enough, initialised and has no other user. The caller guarantees
        // the rest. This function waits for the copy.
        unsafe {
            let to = std::slice::from_raw_parts_mut(pinned.start.as_ptr(), len);
            result::memcpy_dtoh_async(to, address, self.stream.cu_stream())
        }
        .and_then(|()| self.stream.synchronize())
        .map_err(|error| self.lose(error))?;
        Ok(StagedCopy { staging: self, bytes: Some(pinned), len })
    }

    /// Like [`read`](Self::read). The copy is written back when it is dropped.
    ///
    /// # Safety
    /// The requirements of `read`, and no other code uses these bytes while the copy lives.
    pub(super) unsafe fn write(&self, address: u64, len: usize) -> Result<WriteBack<'_>, CudaError> {
        // SAFETY: the caller guarantees the requirements of `read`.
        Ok(WriteBack { staged: unsafe { self.read(address, len)? }, address })
    }

    /// Sets every byte to zero and waits.
    ///
    /// # Safety
    /// `len` bytes at `address` are memory of this GPU and are not used during the call.
    pub(super) unsafe fn clear(&self, address: u64, len: usize) -> Result<(), CudaError> {
        self.bind()?;
        // JUSTIFICATION: GPU memory is accessed by address.
        // SAFETY: guaranteed by the caller.
        unsafe { result::memset_d8_async(address, 0, len, self.stream.cu_stream()) }
            .and_then(|()| self.stream.synchronize())
            .map_err(CudaError::during("clear memory of the GPU"))
    }

    /// Returns whether a copy has failed. The GPU stays lost then.
    pub(super) fn is_lost(&self) -> bool {
        self.lost.load(std::sync::atomic::Ordering::Acquire)
    }

    fn lose(&self, error: cudarc::driver::DriverError) -> CudaError {
        self.lost.store(true, std::sync::atomic::Ordering::Release);
        CudaError::during("copy pages of the GPU")(error)
    }

    fn put_back(&self, pinned: &PinnedBytes, len: usize, address: u64) -> Result<(), CudaError> {
        self.bind()?;
        // JUSTIFICATION: GPU memory is accessed by address.
        // SAFETY: the caller of `write` guaranteed a valid address while the copy lives. The copy has `len`
        // bytes.
        unsafe {
            let from = std::slice::from_raw_parts(pinned.start.as_ptr().cast_const(), len);
            result::memcpy_htod_async(address, from, self.stream.cu_stream())
        }
        .and_then(|()| self.stream.synchronize())
        .map_err(|error| self.lose(error))
    }

    /// Returns the smallest kept memory that is long enough, or new memory.
    fn take(&self, len: usize) -> Result<PinnedBytes, CudaError> {
        let mut kept = self.kept();
        let fitting = kept.iter().enumerate().filter(|(_, pinned)| pinned.capacity >= len);
        match fitting.min_by_key(|(_, pinned)| pinned.capacity).map(|(nth, _)| nth) {
            Some(nth) => Ok(kept.swap_remove(nth)),
            None => {
                drop(kept);
                PinnedBytes::new(self.stream.context(), len.next_power_of_two())
            }
        }
    }

    fn keep(&self, pinned: PinnedBytes) {
        let mut kept = self.kept();
        if kept.len() < KEPT_MAX && pinned.capacity <= KEPT_BYTES_MAX {
            kept.push(pinned);
        }
    }

    fn kept(&self) -> MutexGuard<'_, Vec<PinnedBytes>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn bind(&self) -> Result<(), CudaError> {
        self.stream.context().bind_to_thread().map_err(CudaError::during("use the GPU from this thread"))
    }
}

impl fmt::Debug for Staging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Staging").field("kept", &self.kept().len()).finish_non_exhaustive()
    }
}

// === impl Staged, WriteBack ===

impl StagedCopy<'_> {
    pub(super) fn start(&self) -> NonNull<u8> {
        self.bytes.as_ref().map_or(NonNull::dangling(), |pinned| pinned.start)
    }
}

impl Drop for StagedCopy<'_> {
    fn drop(&mut self) {
        if let Some(pinned) = self.bytes.take() {
            self.staging.keep(pinned);
        }
    }
}

impl WriteBack<'_> {
    pub(super) fn start(&self) -> NonNull<u8> {
        self.staged.start()
    }
}

impl Drop for WriteBack<'_> {
    fn drop(&mut self) {
        let Some(pinned) = &self.staged.bytes else { return };
        // The failure is stored and this GPU is not read again, so old bytes are never taken for new ones.
        let _ = self.staged.staging.put_back(pinned, self.staged.len, self.address);
    }
}

// === impl PinnedBytes ===

impl PinnedBytes {
    pub(super) fn new(context: &Arc<CudaContext>, capacity: usize) -> Result<Self, CudaError> {
        let capacity = capacity.max(1);
        context.bind_to_thread().map_err(CudaError::during("use the GPU from this thread"))?;
        // JUSTIFICATION: only the driver can pin memory.
        // SAFETY: only this value has the pointer, and it frees it once. Every byte is set before a slice
        // exists.
        unsafe {
            let start = result::malloc_host(capacity, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP)
                .map_err(CudaError::during("allocate pinned memory"))?;
            let start = NonNull::new(start.cast::<u8>()).expect("the driver gives memory or an error");
            start.write_bytes(0, capacity);
            Ok(Self { context: Arc::clone(context), start, capacity })
        }
    }
}

impl PinnedBytes {
    /// Returns the address for the GPU, which is that of the host: both share one address space.
    pub(super) fn address(&self) -> u64 {
        self.start.as_ptr() as u64
    }

    pub(super) fn n_words(&self) -> usize {
        self.capacity / size_of::<u64>()
    }

    /// Returns the first words. The caller ensures that no copy runs.
    pub(super) fn words(&self, n_words: usize) -> &[u64] {
        assert!(n_words * size_of::<u64>() <= self.capacity, "{n_words} words of {} bytes", self.capacity);
        // JUSTIFICATION: the driver allocated the memory.
        // SAFETY: it is initialised, aligned to a memory page, and long enough, as just checked.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().cast(), n_words) }
    }

    pub(super) fn words_mut(&mut self, n_words: usize) -> &mut [u64] {
        assert!(n_words * size_of::<u64>() <= self.capacity, "{n_words} words of {} bytes", self.capacity);
        // JUSTIFICATION: the driver allocated the memory.
        // SAFETY: it is initialised, aligned and long enough, and `&mut self` makes this the only slice.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().cast(), n_words) }
    }
}

impl Drop for PinnedBytes {
    fn drop(&mut self) {
        let _ = self.context.bind_to_thread();
        // JUSTIFICATION: the counterpart of `new`.
        // SAFETY: the pointer came from `malloc_host`. All copies have been waited for, and no slice outlives
        // this value.
        let _ = unsafe { result::free_host(self.start.as_ptr().cast::<c_void>()) };
    }
}
