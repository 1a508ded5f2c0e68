//! The copy engines of a GPU. They move rectangles of bytes without multiprocessors.

use std::sync::Arc;

use cudarc::driver::sys::{self, CUDA_MEMCPY2D, CUmemorytype};
use cudarc::driver::{CudaStream, result};

use super::CudaError;
use super::rectangles::Rectangle;

/// The streams of one GPU that carry only copies. Each stream keeps one copy engine busy.
pub(super) struct Engines {
    streams: Vec<Arc<CudaStream>>,
}

impl Engines {
    pub(super) fn over(streams: Vec<Arc<CudaStream>>) -> Self {
        assert!(!streams.is_empty(), "copies need a stream");
        Self { streams }
    }

    /// Starts all copies. Later work on `behind` waits for all copies.
    ///
    /// One large copy uses the whole link, and the next one waits for it. Several small copies are
    /// distributed over the streams.
    ///
    /// # Safety
    /// Both sides of every rectangle stay mapped for this GPU until `behind` has reached this point. No other
    /// code reads or writes a byte that is written here.
    pub(super) unsafe fn start(
        &self,
        rectangles: &[Rectangle],
        behind: &CudaStream,
    ) -> Result<(), CudaError> {
        let n_busy = self.streams.len().min(rectangles.len());
        for (nth, rectangle) in rectangles.iter().enumerate() {
            // SAFETY: guaranteed by the caller.
            unsafe { copy(rectangle, &self.streams[nth % n_busy]) }
                .map_err(CudaError::during("copy between GPUs"))?;
        }
        for stream in &self.streams[..n_busy] {
            behind.join(stream).map_err(CudaError::during("wait for a copy between GPUs"))?;
        }
        Ok(())
    }

    /// Waits until no copy runs. If the GPU does not answer, it is lost and copies nothing.
    pub(super) fn settle(&self) {
        for stream in &self.streams {
            let _ = stream.synchronize();
        }
    }
}

/// Starts one copy on `stream`.
///
/// # Safety
/// The requirements of [`Engines::start`].
pub(super) unsafe fn copy(rectangle: &Rectangle, stream: &CudaStream) -> Result<(), result::DriverError> {
    let Rectangle { first, row_bytes, n_rows, pitch } = *rectangle;
    if n_rows == 1 {
        // JUSTIFICATION: GPU memory is accessed by address.
        // SAFETY: guaranteed by the caller.
        return unsafe { result::memcpy_dtod_async(first.to, first.from, row_bytes, stream.cu_stream()) };
    }
    let device = CUmemorytype::CU_MEMORYTYPE_DEVICE;
    let rows = CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: device,
        srcHost: std::ptr::null(),
        srcDevice: first.from,
        srcArray: std::ptr::null_mut(),
        srcPitch: pitch.from as usize,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: device,
        dstHost: std::ptr::null_mut(),
        dstDevice: first.to,
        dstArray: std::ptr::null_mut(),
        dstPitch: pitch.to as usize,
        WidthInBytes: row_bytes,
        Height: n_rows,
    };
    // JUSTIFICATION: cudarc has no safe call for copies of rectangles.
    // SAFETY: the driver copies the description before it returns. The caller guarantees the rest.
    unsafe { sys::cuMemcpy2DAsync_v2(&raw const rows, stream.cu_stream()) }.result()
}
