//! Hot path.
//! Page-locked memory for rows that several GPUs compute together. Each GPU copies its own rows to their places.

use std::ffi::c_void;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::DriverError;
use cudarc::driver::sys::{self, CUDA_MEMCPY2D, CUmemorytype};

use super::buffer::{Element, View};
use super::{Card, CudaError, Event, PinnedNumbers};

/// Page-locked memory that several GPUs fill. A clone is for the thread of another GPU. The drop of the last clone waits for
/// all copies.
#[derive(Clone)]
pub struct PinnedRows<T: Element> {
    shared: Arc<Shared<T>>,
}

/// The rows that one GPU copies: `first`, and every row that is a multiple of `every` after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowShare {
    /// The numbers of a row.
    pub width: usize,
    pub first: usize,
    pub every: usize,
}

/// The memory, and the ends of the copies into it.
struct Shared<T: Element> {
    /// `None` only after it was taken out.
    numbers: Option<PinnedNumbers<T>>,
    copies: Mutex<Vec<Event>>,
}

/// A copy of rows at equal distances, in bytes. They have the same distances on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SpacedRows {
    offset: usize,
    row_bytes: usize,
    n_rows: usize,
    distance: usize,
}

// === impl PinnedRows ===

impl<T: Element> PinnedRows<T> {
    /// Makes memory for rows out of numbers.
    pub fn over(numbers: PinnedNumbers<T>) -> Self {
        let (numbers, copies) = (Some(numbers), Mutex::default());
        Self { shared: Arc::new(Shared { numbers, copies }) }
    }

    /// Waits for the copies of all GPUs, and returns the memory.
    ///
    /// # Panics
    /// If there is another clone, whose GPU may still start a copy.
    pub fn into_numbers(self) -> Result<PinnedNumbers<T>, CudaError> {
        let mut shared = Arc::into_inner(self.shared).expect("all GPUs have started their copies");
        shared.wait()?;
        Ok(shared.numbers.take().expect("it is taken here only"))
    }
}

impl<T: Element> Shared<T> {
    /// Waits for all copies, also after an error of one GPU, and returns the first error.
    fn wait(&mut self) -> Result<(), CudaError> {
        let copies = self.copies.get_mut().unwrap_or_else(PoisonError::into_inner);
        let mut waited = Ok(());
        for copy in copies.drain(..) {
            waited = waited.and(copy.wait());
        }
        waited
    }
}

impl<T: Element> Drop for Shared<T> {
    fn drop(&mut self) {
        // If waiting fails, that GPU is lost and copies nothing more.
        let _ = self.wait();
    }
}

impl Card {
    /// Starts copies of this GPU's rows, in stream order, and does not wait. Each part has all rows of the step. The parts lie
    /// one after the other in `to`, and all GPUs together copy each row once.
    ///
    /// # Panics
    /// If `to` is shorter than the parts, or their memory is on another GPU.
    pub fn receive_rows<T: Element>(
        &self,
        parts: &[View<'_, T>],
        share: RowShare,
        to: &PinnedRows<T>,
    ) -> Result<(), CudaError> {
        self.bind()?;
        let copied = self.copy_parts(parts, share, to);
        // After an error, the copies of earlier parts may run.
        let end = self.event()?;
        to.shared.copies.lock().unwrap_or_else(PoisonError::into_inner).push(end);
        copied.map_err(CudaError::during("copy rows from the GPU"))
    }

    fn copy_parts<T: Element>(
        &self,
        parts: &[View<'_, T>],
        share: RowShare,
        to: &PinnedRows<T>,
    ) -> Result<(), DriverError> {
        let numbers = to.shared.numbers.as_ref().expect("only the last clone gives the memory back");
        let mut n_done = 0;
        for part in parts {
            assert!(
                n_done + part.len() <= numbers.len() && part.ordinal() == self.ordinal(),
                "enough numbers, and memory on this GPU"
            );
            let start = numbers.address() + (n_done * size_of::<T>()) as u64;
            if let Some(rows) = SpacedRows::of(share, part.len(), size_of::<T>()) {
                // JUSTIFICATION: several GPUs write the memory, so no slice of it may exist.
                // SAFETY: both sides have the part's length, as just checked. The memory lives until the event of
                // `receive_rows` is reached: its drop and its next reader wait for that.
                unsafe { self.copy_rows(rows, part.address(), start)? };
            }
            n_done += part.len();
        }
        Ok(())
    }

    /// Starts a copy from an address of this GPU to one of page-locked memory.
    ///
    /// # Safety
    /// Both sides have the rows until the copy has ended. No other code reads or writes these bytes.
    unsafe fn copy_rows(&self, rows: SpacedRows, from: u64, to: u64) -> Result<(), DriverError> {
        let SpacedRows { offset, row_bytes, n_rows, distance } = rows;
        let (from, to) = (from + offset as u64, to + offset as u64);
        let stream = self.stream().cu_stream();
        if row_bytes == distance || n_rows == 1 {
            // JUSTIFICATION: GPU memory is accessed by address.
            // SAFETY: guaranteed by the caller.
            return unsafe { sys::cuMemcpyDtoHAsync_v2(to as *mut c_void, from, n_rows * row_bytes, stream) }
                .result();
        }
        let copy = CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
            srcHost: std::ptr::null(),
            srcDevice: from,
            srcArray: std::ptr::null_mut(),
            srcPitch: distance,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: CUmemorytype::CU_MEMORYTYPE_HOST,
            dstHost: to as *mut c_void,
            dstDevice: 0,
            dstArray: std::ptr::null_mut(),
            dstPitch: distance,
            WidthInBytes: row_bytes,
            Height: n_rows,
        };
        // JUSTIFICATION: cudarc has no safe call for copies of rows at distances.
        // SAFETY: the driver copies the description before it returns. The caller guarantees the rest.
        unsafe { sys::cuMemcpy2DAsync_v2(&raw const copy, stream) }.result()
    }
}

// === impl RowShare ===

impl RowShare {
    /// Returns the share of a GPU that copies all rows.
    pub fn all(width: usize) -> Self {
        Self { width, first: 0, every: 1 }
    }
}

impl SpacedRows {
    /// Returns the rows of a share in `n_numbers` numbers of `number_bytes` each; `None` if there are none.
    fn of(share: RowShare, n_numbers: usize, number_bytes: usize) -> Option<Self> {
        let RowShare { width, first, every } = share;
        let (n_all, row_bytes) = (n_numbers / width, width * number_bytes);
        let n_rows = n_all.saturating_sub(first).div_ceil(every);
        let rows = Self { offset: first * row_bytes, row_bytes, n_rows, distance: every * row_bytes };
        (n_rows > 0).then_some(rows)
    }
}

impl<T: Element> fmt::Debug for PinnedRows<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PinnedRows({:?})", self.shared.numbers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ranks_of_a_stage_copy_each_row_once() {
        let (width, number_bytes) = (6, 2);
        for (n_ranks, n_rows) in [(1, 5), (2, 1), (2, 7), (2, 8), (4, 3), (4, 9), (8, 8)] {
            let mut n_copies = vec![0; n_rows * width * number_bytes];
            for first in 0..n_ranks {
                let share = RowShare { width, first, every: n_ranks };
                let rows = SpacedRows::of(share, n_rows * width, number_bytes);
                assert_eq!(rows.is_some(), first < n_rows, "rank {first} of {n_ranks}, {n_rows} rows");
                let Some(SpacedRows { offset, row_bytes, n_rows, distance }) = rows else { continue };
                for nth in 0..n_rows {
                    let start = offset + nth * distance;
                    n_copies[start..start + row_bytes].iter_mut().for_each(|copies| *copies += 1);
                }
            }
            assert!(n_copies.iter().all(|copies| *copies == 1), "{n_ranks} ranks, {n_rows} rows");
        }
    }

    #[test]
    fn a_rank_copies_the_rows_that_it_sums() {
        let share = RowShare { width: 4096, first: 1, every: 2 };
        let rows = SpacedRows { offset: 8192, row_bytes: 8192, n_rows: 3, distance: 16_384 };
        assert_eq!(SpacedRows::of(share, 6 * 4096, 2), Some(rows));
        assert_eq!(SpacedRows::of(share, 7 * 4096, 2), Some(rows), "the last row is another rank's");
        let all = SpacedRows { offset: 0, row_bytes: 8192, n_rows: 7, distance: 8192 };
        assert_eq!(SpacedRows::of(RowShare::all(4096), 7 * 4096, 2), Some(all));
    }
}
