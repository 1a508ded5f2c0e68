//! A card's copy engines: they move rectangles of bytes, and take no multiprocessor for it.

use std::sync::Arc;

use cudarc::driver::sys::{self, CUDA_MEMCPY2D, CUmemorytype};
use cudarc::driver::{CudaStream, result};

use super::CudaError;
use super::rectangles::Rectangle;

/// Streams of one card on which nothing but copies wait: each keeps one engine busy.
pub(super) struct Engines {
    streams: Vec<Arc<CudaStream>>,
}

impl Engines {
    pub(super) fn over(streams: Vec<Arc<CudaStream>>) -> Self {
        assert!(!streams.is_empty(), "copies need a stream");
        Self { streams }
    }

    /// Starts to move all of them. What waits on `behind` from here on comes after the last one.
    ///
    /// One large copy fills the wire by itself, and the next one waits for it; several of one call are shared out.
    ///
    /// # Safety
    /// Both sides of every rectangle are mapped for this card until `behind` has come this far, and no other code
    /// reads or writes a byte that is written here.
    pub(super) unsafe fn start(
        &self,
        rectangles: &[Rectangle],
        behind: &CudaStream,
    ) -> Result<(), CudaError> {
        let n_busy = self.streams.len().min(rectangles.len());
        for (nth, rectangle) in rectangles.iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { copy(rectangle, &self.streams[nth % n_busy]) }
                .map_err(CudaError::during("copy between GPUs"))?;
        }
        for stream in &self.streams[..n_busy] {
            behind.join(stream).map_err(CudaError::during("wait for a copy between GPUs"))?;
        }
        Ok(())
    }

    /// Waits until nothing moves. A card that does not answer is lost, and moves nothing either.
    pub(super) fn settle(&self) {
        for stream in &self.streams {
            let _ = stream.synchronize();
        }
    }
}

/// # Safety
/// The same as for [`Engines::start`].
unsafe fn copy(rectangle: &Rectangle, stream: &CudaStream) -> Result<(), result::DriverError> {
    let Rectangle { first, row_bytes, n_rows, pitch } = *rectangle;
    if n_rows == 1 {
        // JUSTIFICATION: memory of cards is reached by address.
        // SAFETY: the caller's promise.
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
    // SAFETY: the driver copies the description before it returns; the rest is the caller's promise.
    unsafe { sys::cuMemcpy2DAsync_v2(&raw const rows, stream.cu_stream()) }.result()
}
