//! A word of host memory that a GPU sets when it reaches a point in a stream. A waiting thread polls the word
//! instead of the driver: polling the driver delays all other threads that submit work to the GPU.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use cudarc::driver::sys::{self, CUresult};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream};

use super::CudaError;
use super::host_words::HostWords;

/// The number of reads of the word between two queries of the driver. Only the driver reports that a GPU has
/// failed, but a query takes some hundred microseconds.
const READS_PER_QUERY: u32 = 4096;

/// Counts work of a stream that ends in order, by a word that the GPU sets.
pub(super) struct CompletionCounter {
    word: HostWords,
}

/// Waits for one count.
#[derive(Debug, Default)]
pub(super) struct CounterReader {
    n_reads: u32,
}

impl CompletionCounter {
    pub(super) fn new(context: &Arc<CudaContext>) -> Result<Self, CudaError> {
        Ok(Self { word: HostWords::new(context, 1)? })
    }

    /// Queues a write: the GPU sets the word to `count` when all earlier work of the stream is done.
    pub(super) fn count_behind(&self, stream: &CudaStream, count: u32) -> Result<(), CudaError> {
        // JUSTIFICATION: cudarc has no safe call for this.
        // SAFETY: the GPU may write the word while this value lives, and the drop waits for the GPU.
        let told = unsafe { sys::cuStreamWriteValue32_v2(stream.cu_stream(), self.word.address(), count, 0) };
        match told {
            // Without this feature the word is never set, and only the driver is queried, less often.
            CUresult::CUDA_ERROR_NOT_SUPPORTED => Ok(()),
            told => told.result().map_err(CudaError::during("count what a GPU has done")),
        }
    }

    /// Returns whether the count is reached. The word never decreases.
    fn is_at(&self, count: u32) -> bool {
        self.word.words()[0].load(Ordering::Acquire).wrapping_sub(count) < u32::MAX / 2
    }
}

impl CounterReader {
    /// Returns whether the counter has reached `count`, which comes before `event`. An error means that the
    /// GPU has failed.
    pub(super) fn sees(
        &mut self,
        counter: &CompletionCounter,
        count: u32,
        event: &CudaEvent,
    ) -> Result<bool, CudaError> {
        if counter.is_at(count) {
            return Ok(true);
        }
        self.n_reads += 1;
        if !self.n_reads.is_multiple_of(READS_PER_QUERY) {
            return Ok(false);
        }
        event.try_is_complete().map_err(CudaError::during("ask the GPU"))
    }
}
