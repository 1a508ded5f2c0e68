//! Page-locked host memory, which the GPU copies from and to while the CPU continues.

use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::sys::CU_MEMHOSTALLOC_PORTABLE;
use cudarc::driver::{CudaContext, CudaEvent, result};

use super::buffer::{Element, View, ViewMut};
use super::{Card, CudaError};

/// Numbers in page-locked memory. A reader waits for the running copy, so it never sees half a copy.
pub struct PinnedNumbers<T: Element> {
    context: Arc<CudaContext>,
    start: NonNull<T>,
    len: usize,
    /// The event of the last copy's end; `None` before the first copy.
    busy: Option<CudaEvent>,
}

// JUSTIFICATION: the pointer makes the type neither Send nor Sync.
// SAFETY: it owns its memory, as a Vec does. Only `&mut self` writes it, and `&self` reads it while no copy runs.
unsafe impl<T: Element> Send for PinnedNumbers<T> {}
// SAFETY: see above.
unsafe impl<T: Element> Sync for PinnedNumbers<T> {}

impl<T: Element + Default> PinnedNumbers<T> {
    fn new(context: &Arc<CudaContext>, len: usize) -> Result<Self, CudaError> {
        let bytes = len.saturating_mul(size_of::<T>()).max(1);
        context.bind_to_thread().map_err(CudaError::during("use the GPU from this thread"))?;
        // JUSTIFICATION: only the driver can pin memory.
        // SAFETY: only this value has the pointer, and it frees it once.
        let start = unsafe { result::malloc_host(bytes, CU_MEMHOSTALLOC_PORTABLE) }
            .map_err(CudaError::during("allocate pinned memory"))?;
        let start = NonNull::new(start.cast::<T>()).expect("the driver gives memory or an error");
        for nth in 0..len {
            // JUSTIFICATION: memory must hold values before a slice of it exists.
            // SAFETY: `nth` is within the allocation, which is aligned to a memory page.
            unsafe { start.add(nth).write(T::default()) };
        }
        Ok(Self { context: Arc::clone(context), start, len, busy: None })
    }
}

impl<T: Element> PinnedNumbers<T> {
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the address, which is the same for all GPUs.
    pub(super) fn address(&self) -> u64 {
        self.start.as_ptr() as u64
    }

    /// Waits until no copy runs and returns the numbers.
    pub fn numbers(&mut self) -> Result<&mut [T], CudaError> {
        self.wait()?;
        // JUSTIFICATION: the driver allocated the memory.
        // SAFETY: it is initialised and has this length. No copy runs, and `&mut self` excludes other users.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) })
    }

    /// Returns the bytes of the first `n` numbers. The caller has waited for the last copy.
    ///
    /// # Panics
    /// If a copy may run, or there are fewer numbers.
    pub fn bytes(&self, n: usize) -> &[u8] {
        assert!(self.busy.is_none() && n <= self.len, "{n} of {} numbers that no copy writes", self.len);
        // JUSTIFICATION: rows are sent to other processes as bytes.
        // SAFETY: the memory is initialised and has this length, and an element has no padding. No copy runs, and a new
        // one needs `&mut`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().cast::<u8>(), n * size_of::<T>()) }
    }

    fn wait(&mut self) -> Result<(), CudaError> {
        match self.busy.take() {
            Some(busy) => busy.synchronize().map_err(CudaError::during("wait for a copy")),
            None => Ok(()),
        }
    }
}

impl<T: Element> Drop for PinnedNumbers<T> {
    fn drop(&mut self) {
        // Waits for the running copy. If waiting fails, the context is lost and copies nothing more.
        let _ = self.wait();
        let _ = self.context.bind_to_thread();
        // JUSTIFICATION: the counterpart of `new`.
        // SAFETY: the pointer came from `malloc_host`, and no slice outlives this value.
        let _ = unsafe { result::free_host(self.start.as_ptr().cast::<c_void>()) };
    }
}

impl<T: Element> fmt::Debug for PinnedNumbers<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pinned({} numbers)", self.len)
    }
}

impl Card {
    /// Allocates page-locked host memory, all zero.
    pub fn pinned<T: Element + Default>(&self, len: usize) -> Result<PinnedNumbers<T>, CudaError> {
        PinnedNumbers::new(self.context(), len)
    }

    /// Starts a copy of the first `to.len()` numbers to the GPU, in stream order, and does not wait.
    ///
    /// # Panics
    /// If `from` is shorter than `to`, or the memory is on another GPU.
    pub fn send<T: Element>(&self, from: &mut PinnedNumbers<T>, to: ViewMut<'_, T>) -> Result<(), CudaError> {
        assert!(
            to.len() <= from.len && to.ordinal() == self.ordinal(),
            "enough numbers, and memory on this GPU"
        );
        self.bind()?;
        // JUSTIFICATION: the borrow checker cannot express a copy that outlives the call.
        // SAFETY: the memory lives until `busy` is reached: readers and the drop wait for it.
        let outcome = unsafe {
            let from = std::slice::from_raw_parts(from.start.as_ptr().cast_const(), to.len());
            result::memcpy_htod_async(to.address(), from, self.stream().cu_stream())
        };
        outcome.map_err(CudaError::during("copy to the GPU"))?;
        from.busy = Some(self.event()?.0);
        Ok(())
    }

    /// Starts a copy from the GPU into the first `from.len()` numbers, in stream order, and does not wait.
    ///
    /// # Panics
    /// If `to` is shorter than `from`, or the memory is on another GPU.
    pub fn receive<T: Element>(&self, from: View<'_, T>, to: &mut PinnedNumbers<T>) -> Result<(), CudaError> {
        assert!(
            from.len() <= to.len && from.ordinal() == self.ordinal(),
            "enough numbers, and memory on this GPU"
        );
        self.bind()?;
        // JUSTIFICATION: the borrow checker cannot express a copy that outlives the call.
        // SAFETY: the memory lives until `busy` is reached. No slice of it exists, because making one needs
        // the `&mut` that is held here.
        let outcome = unsafe {
            let to = std::slice::from_raw_parts_mut(to.start.as_ptr(), from.len());
            result::memcpy_dtoh_async(to, from.address(), self.stream().cu_stream())
        };
        outcome.map_err(CudaError::during("copy from the GPU"))?;
        to.busy = Some(self.event()?.0);
        Ok(())
    }
}
