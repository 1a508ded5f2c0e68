//! The input and the results of a copy job.

use std::sync::Arc;

use cudarc::driver::CudaContext;

use super::CudaError;
use super::completion_counter::CompletionCounter;
use super::staging::PinnedBytes;

/// The input and the results of one copy job, in host memory that the GPU reads and writes directly.
pub(super) struct JobBuffers {
    context: Arc<CudaContext>,
    pub(super) told: PinnedBytes,
    pub(super) answers: PinnedBytes,
    /// Counts the copy jobs that have used these buffers.
    pub(super) counter: CompletionCounter,
    pub(super) n_jobs: u32,
}

impl JobBuffers {
    pub(super) fn new(
        context: &Arc<CudaContext>,
        n_told: usize,
        n_answers: usize,
    ) -> Result<Self, CudaError> {
        Ok(Self {
            told: PinnedBytes::new(context, n_told * size_of::<u64>())?,
            answers: PinnedBytes::new(context, n_answers * size_of::<u64>())?,
            counter: CompletionCounter::new(context)?,
            n_jobs: 0,
            context: Arc::clone(context),
        })
    }

    pub(super) fn fits(&self, n_told: usize, n_answers: usize) -> bool {
        self.told.n_words() >= n_told && self.answers.n_words() >= n_answers
    }
}

impl Drop for JobBuffers {
    fn drop(&mut self) {
        // Waits, because the GPU may still use the memory. If waiting fails, the context is lost and uses
        // nothing.
        let _ = self.context.synchronize();
    }
}
