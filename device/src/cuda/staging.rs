//! Copies of a card's pages in host memory: for those who read and write KV with the processor.

use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::{CU_MEMHOSTALLOC_DEVICEMAP, CU_MEMHOSTALLOC_PORTABLE};
use cudarc::driver::{CudaContext, CudaStream, result};

use super::CudaError;

/// Copies that are kept for the next ones, because pinning memory takes longer than copying into it.
const KEPT_MAX: usize = 16;
/// Longer copies are rare and not kept.
const KEPT_BYTES_MAX: usize = 64 << 20;

/// Moves bytes between a card and copies in pinned host memory, on a stream of its own.
pub(crate) struct Staging {
    stream: Arc<CudaStream>,
    /// Held for a look, never while anything is copied.
    kept: Mutex<Vec<Pinned>>,
    /// Set when a copy failed: the card is lost, and what lies on it with it.
    lost: std::sync::atomic::AtomicBool,
}

/// A copy of some of a card's bytes. Dropped, it is kept for the next one.
pub(crate) struct Staged<'a> {
    staging: &'a Staging,
    bytes: Option<Pinned>,
    len: usize,
}

/// A copy that goes to the card when it is dropped.
pub(crate) struct WriteBack<'a> {
    staged: Staged<'a>,
    address: u64,
}

/// Memory of this machine that the card copies from and to by itself.
pub(super) struct Pinned {
    context: Arc<CudaContext>,
    start: NonNull<u8>,
    capacity: usize,
}

// JUSTIFICATION: the pointer makes the type neither Send nor Sync by itself.
// SAFETY: it owns its memory, as a Box does, and gives out its address only; who reads and writes there is the borrow
// states' matter.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

// === impl Staging ===

impl Staging {
    pub(super) fn new(context: &Arc<CudaContext>) -> Result<Self, CudaError> {
        let stream = context.new_stream().map_err(CudaError::during("make a stream"))?;
        Ok(Self { stream, kept: Mutex::default(), lost: false.into() })
    }

    /// A copy of what lies at `address`.
    ///
    /// # Safety
    /// `len` bytes from `address` are memory of this card, for as long as this value lives, and they are not written
    /// during the call.
    pub(super) unsafe fn read(&self, address: u64, len: usize) -> Result<Staged<'_>, CudaError> {
        let pinned = self.take(len)?;
        self.bind()?;
        // JUSTIFICATION: the copy's memory is the driver's, and the card's is reached by address.
        // SAFETY: the pinned memory is that long, initialised, and ours alone; the rest is the caller's promise. The copy
        // is waited for.
        unsafe {
            let to = std::slice::from_raw_parts_mut(pinned.start.as_ptr(), len);
            result::memcpy_dtoh_async(to, address, self.stream.cu_stream())
        }
        .and_then(|()| self.stream.synchronize())
        .map_err(|error| self.lose(error))?;
        Ok(Staged { staging: self, bytes: Some(pinned), len })
    }

    /// Like [`read`](Self::read); the copy goes back when it is dropped.
    ///
    /// # Safety
    /// The same as for `read`; and no other code reaches these bytes while the copy lives.
    pub(super) unsafe fn write(&self, address: u64, len: usize) -> Result<WriteBack<'_>, CudaError> {
        // SAFETY: the caller's promise includes that of `read`.
        Ok(WriteBack { staged: unsafe { self.read(address, len)? }, address })
    }

    /// Sets every byte to zero, and waits for it.
    ///
    /// # Safety
    /// `len` bytes from `address` are memory of this card, and they are not used during the call.
    pub(super) unsafe fn clear(&self, address: u64, len: usize) -> Result<(), CudaError> {
        self.bind()?;
        // JUSTIFICATION: memory of the card is reached by address.
        // SAFETY: the caller's promise.
        unsafe { result::memset_d8_async(address, 0, len, self.stream.cu_stream()) }
            .and_then(|()| self.stream.synchronize())
            .map_err(CudaError::during("clear memory of the GPU"))
    }

    /// Whether a copy has failed. There is no way back from that.
    pub(super) fn is_lost(&self) -> bool {
        self.lost.load(std::sync::atomic::Ordering::Acquire)
    }

    fn lose(&self, error: cudarc::driver::DriverError) -> CudaError {
        self.lost.store(true, std::sync::atomic::Ordering::Release);
        CudaError::during("copy pages of the GPU")(error)
    }

    fn put_back(&self, pinned: &Pinned, len: usize, address: u64) -> Result<(), CudaError> {
        self.bind()?;
        // JUSTIFICATION: as in `read`.
        // SAFETY: the caller that made the copy promised that the address is good for as long as it lives; the copy is that long.
        unsafe {
            let from = std::slice::from_raw_parts(pinned.start.as_ptr().cast_const(), len);
            result::memcpy_htod_async(address, from, self.stream.cu_stream())
        }
        .and_then(|()| self.stream.synchronize())
        .map_err(|error| self.lose(error))
    }

    /// The smallest kept copy that is long enough, or a new one.
    fn take(&self, len: usize) -> Result<Pinned, CudaError> {
        let mut kept = self.kept();
        let fitting = kept.iter().enumerate().filter(|(_, pinned)| pinned.capacity >= len);
        match fitting.min_by_key(|(_, pinned)| pinned.capacity).map(|(nth, _)| nth) {
            Some(nth) => Ok(kept.swap_remove(nth)),
            None => {
                drop(kept);
                Pinned::new(self.stream.context(), len.next_power_of_two())
            }
        }
    }

    fn keep(&self, pinned: Pinned) {
        let mut kept = self.kept();
        if kept.len() < KEPT_MAX && pinned.capacity <= KEPT_BYTES_MAX {
            kept.push(pinned);
        }
    }

    fn kept(&self) -> MutexGuard<'_, Vec<Pinned>> {
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

impl Staged<'_> {
    pub(super) fn start(&self) -> NonNull<u8> {
        self.bytes.as_ref().map_or(NonNull::dangling(), |pinned| pinned.start)
    }
}

impl Drop for Staged<'_> {
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
        // A failure is remembered: this card is not read again, so old bytes are never taken for new ones.
        let _ = self.staged.staging.put_back(pinned, self.staged.len, self.address);
    }
}

// === impl Pinned ===

impl Pinned {
    pub(super) fn new(context: &Arc<CudaContext>, capacity: usize) -> Result<Self, CudaError> {
        let capacity = capacity.max(1);
        context.bind_to_thread().map_err(CudaError::during("use the GPU from this thread"))?;
        // JUSTIFICATION: only the driver can pin memory.
        // SAFETY: the pointer is kept by this value alone and freed once; every byte is set before a slice of it exists.
        unsafe {
            let start = result::malloc_host(capacity, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP)
                .map_err(CudaError::during("take memory that the GPU can copy from"))?;
            let start = NonNull::new(start.cast::<u8>()).expect("the driver gives memory or an error");
            start.write_bytes(0, capacity);
            Ok(Self { context: Arc::clone(context), start, capacity })
        }
    }
}

impl Pinned {
    /// Where the card finds it: there is one space of addresses for the host and all cards.
    pub(super) fn address(&self) -> u64 {
        self.start.as_ptr() as u64
    }

    pub(super) fn n_words(&self) -> usize {
        self.capacity / size_of::<u64>()
    }

    /// The first words. The caller has made sure that no copy is under way.
    pub(super) fn words(&self, n_words: usize) -> &[u64] {
        assert!(n_words * size_of::<u64>() <= self.capacity, "{n_words} words of {} bytes", self.capacity);
        // JUSTIFICATION: the memory is the driver's, not an allocator's.
        // SAFETY: it is initialised, aligned to a memory page, and as long as was just checked.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().cast(), n_words) }
    }

    pub(super) fn words_mut(&mut self, n_words: usize) -> &mut [u64] {
        assert!(n_words * size_of::<u64>() <= self.capacity, "{n_words} words of {} bytes", self.capacity);
        // JUSTIFICATION: as above.
        // SAFETY: as above, and `&mut self` makes this the only slice.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().cast(), n_words) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = self.context.bind_to_thread();
        // JUSTIFICATION: the counterpart of `new`.
        // SAFETY: the pointer came from `malloc_host`; copies are waited for, and no slice outlives this value.
        let _ = unsafe { result::free_host(self.start.as_ptr().cast::<c_void>()) };
    }
}
