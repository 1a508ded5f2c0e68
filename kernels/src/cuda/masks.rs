//! The masks of rows that follow a grammar: one bit for each token that may be sampled.
//!
//! A mask depends on the row's previous token, which the GPU samples in the step before. So the host launches a step
//! first and writes its masks while the GPUs compute the step. The sampling kernel waits for them, up to a time limit.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use device::cuda::error::ensure;
use device::cuda::{CudaError, HostWords};

use super::ComputeCard;
use super::ops::{nanoseconds, number};

/// The number of steps in flight that have masks of their own.
const STEPS: usize = 2;
/// The words before the masks. The first one is the number of the last step whose masks are written.
const HEAD_WORDS: usize = 32;

/// Host memory for the masks of steps, which all GPUs of a model read.
///
/// It must outlive all steps that any GPU runs with its masks.
#[derive(Debug)]
pub struct TokenMasks {
    words: HostWords,
    row_words: usize,
    n_rows: usize,
    patience: Duration,
}

/// The masks of one step.
#[derive(Clone, Debug)]
pub struct StepMasks {
    masks: Arc<TokenMasks>,
    /// The step's number. It increases from step to step, and wraps.
    step: u32,
    n_rows: usize,
}

/// The fields of `Masks` in `sample.cu`, in the same order.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct MaskArguments {
    ready: u64,
    rows: u64,
    patience_ns: u64,
    step: u32,
    n_rows: u32,
    n_words: u32,
}

impl TokenMasks {
    /// Allocates masks of `vocab` tokens for steps of up to `n_rows` rows. A GPU waits for `patience` until a step's
    /// masks are written.
    pub fn new(
        card: &ComputeCard,
        n_rows: usize,
        vocab: usize,
        patience: Duration,
    ) -> Result<Self, CudaError> {
        let row_words = vocab.div_ceil(u32::BITS as usize);
        let words = HostWords::new(card.context(), HEAD_WORDS + STEPS * n_rows * row_words)?;
        Ok(Self { words, row_words, n_rows, patience })
    }

    /// Returns the masks of a step. Its number is the previous step's plus one. The masks of the step before the
    /// previous one are overwritten.
    ///
    /// # Panics
    /// If `n_rows` is more than there is memory for.
    pub fn of_step(self: &Arc<Self>, step: u64, n_rows: usize) -> StepMasks {
        assert!(n_rows <= self.n_rows, "{n_rows} masks of at most {}", self.n_rows);
        // No step has the number zero at the start, because the memory begins with zero.
        StepMasks { masks: Arc::clone(self), step: (step + 1) as u32, n_rows }
    }
}

impl StepMasks {
    pub fn patience(&self) -> Duration {
        self.masks.patience
    }

    /// Writes one mask: words of 32 tokens, the first token in the lowest bit. Words that are missing allow no token.
    ///
    /// # Panics
    /// If the step has no mask `nth`.
    pub fn write(&self, nth: usize, mask: &[u32]) {
        assert!(nth < self.n_rows, "mask {nth} of {}", self.n_rows);
        let first = self.first() + nth * self.masks.row_words;
        let words = &self.masks.words.words()[first..first + self.masks.row_words];
        let mask = mask.iter().copied().chain(std::iter::repeat(0));
        words.iter().zip(mask).for_each(|(word, bits)| word.store(bits, Ordering::Relaxed));
    }

    /// Signals the GPUs that all masks of this step and of earlier steps are written.
    pub fn release(&self) {
        self.masks.words.words()[0].store(self.step, Ordering::Release);
    }

    /// Returns the index of the first word of the step's masks.
    fn first(&self) -> usize {
        HEAD_WORDS + (self.step as usize % STEPS) * self.masks.n_rows * self.masks.row_words
    }

    pub(super) fn arguments(&self, kernel: &'static str, width: u32) -> Result<MaskArguments, CudaError> {
        let TokenMasks { words, row_words, patience, .. } = &*self.masks;
        ensure(
            kernel,
            row_words * u32::BITS as usize >= width as usize,
            "masks of fewer tokens than rows have",
        )?;
        Ok(MaskArguments {
            ready: words.address(),
            rows: words.address() + (self.first() * size_of::<u32>()) as u64,
            patience_ns: nanoseconds(*patience),
            step: self.step,
            n_rows: number(kernel, self.n_rows)?,
            n_words: number(kernel, *row_words)?,
        })
    }
}

impl MaskArguments {
    pub(super) const NONE: Self = Self { ready: 0, rows: 0, patience_ns: 0, step: 0, n_rows: 0, n_words: 0 };
}
