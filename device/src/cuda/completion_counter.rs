//! A word of this machine's memory that a card sets when it has come this far: a waiting thread reads the word, and asks the driver
//! nothing. A thread that asks it again and again holds up all others that tell the card what to do.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::sys::{self, CUresult};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream};

use super::CudaError;
use super::staging::Pinned;

/// Reads between two queries of the driver, which alone knows that a card has failed: some hundred microseconds.
const READS_PER_QUERY: u32 = 4096;

/// See the module. It counts what is behind one another.
pub(super) struct CompletionCounter {
    word: Pinned,
}

/// Waits for one count.
#[derive(Debug, Default)]
pub(super) struct CounterReader {
    n_reads: u32,
}

impl CompletionCounter {
    pub(super) fn new(context: &Arc<CudaContext>) -> Result<Self, CudaError> {
        Ok(Self { word: Pinned::new(context, size_of::<u32>())? })
    }

    /// The card sets it to `count` when all is done that waits on the stream now.
    pub(super) fn count_behind(&self, stream: &CudaStream, count: u32) -> Result<(), CudaError> {
        // JUSTIFICATION: cudarc has no safe call for this.
        // SAFETY: the word is the card's to write for as long as this value lives, and the drop waits for that.
        let told = unsafe { sys::cuStreamWriteValue32_v2(stream.cu_stream(), self.word.address(), count, 0) };
        match told {
            // Then the driver is asked, seldom.
            CUresult::CUDA_ERROR_NOT_SUPPORTED => Ok(()),
            told => told.result().map_err(CudaError::during("count what a GPU has done")),
        }
    }

    /// Whether it has come so far. It never counts back.
    fn is_at(&self, count: u32) -> bool {
        // JUSTIFICATION: the card writes the word while the processor reads it.
        // SAFETY: it is four bytes, aligned to a memory page, and lives as long as this value; there is no slice of it.
        let word = unsafe { AtomicU32::from_ptr(self.word.address() as *mut u32) };
        word.load(Ordering::Acquire).wrapping_sub(count) < u32::MAX / 2
    }
}

impl CounterReader {
    /// Whether the counter is at `count`, behind which is `event`. An error says that the card has failed.
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
