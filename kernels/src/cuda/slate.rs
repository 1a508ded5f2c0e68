//! What an errand is told, and what it answers.

use std::sync::Arc;

use cudarc::driver::CudaContext;

use super::CudaError;
use super::staging::Pinned;
use super::tally::Tally;

/// Host memory that the GPU reads and writes directly.
pub(super) struct Slate {
    context: Arc<CudaContext>,
    pub(super) told: Pinned,
    pub(super) answers: Pinned,
    /// Counts the errands that it was used for.
    pub(super) tally: Tally,
    pub(super) n_errands: u32,
}

impl Slate {
    pub(super) fn new(
        context: &Arc<CudaContext>,
        n_told: usize,
        n_answers: usize,
    ) -> Result<Self, CudaError> {
        Ok(Self {
            told: Pinned::new(context, n_told * size_of::<u64>())?,
            answers: Pinned::new(context, n_answers * size_of::<u64>())?,
            tally: Tally::new(context)?,
            n_errands: 0,
            context: Arc::clone(context),
        })
    }

    pub(super) fn fits(&self, n_told: usize, n_answers: usize) -> bool {
        self.told.n_words() >= n_told && self.answers.n_words() >= n_answers
    }
}

impl Drop for Slate {
    fn drop(&mut self) {
        // The GPU may still use the memory. If waiting fails, the context is lost and uses nothing.
        let _ = self.context.synchronize();
    }
}
