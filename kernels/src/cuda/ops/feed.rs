//! Passing tokens from one step to the next on the GPU.

use super::{ComputeCard, CudaError, View, ViewMut, ensure, launch, number, rows_of};
use device::cuda::card::grid;

/// Marks a missing token or a missing index.
pub const NOWHERE: u32 = u32::MAX;

/// The number of threads of both kernels, as in `feed.cu`.
const THREADS: usize = 256;

/// The arguments of [`ComputeCard::feed_tokens`].
#[derive(Debug)]
pub struct FeedTokens<'a> {
    pub tokens: ViewMut<'a, u32>,
    /// The tokens that the host knows, one for each of `tokens`.
    pub known: View<'a, u32>,
    /// The index in `drawn` of each of the first tokens, or [`NOWHERE`].
    pub from: View<'a, u32>,
    /// The tokens that the previous step sampled.
    pub drawn: View<'a, u32>,
}

impl ComputeCard {
    /// Writes the step's input tokens: from the host, or from the previous step's tokens.
    pub fn feed_tokens(&self, feed: FeedTokens<'_>) -> Result<(), CudaError> {
        let kernel = "feed_tokens";
        let FeedTokens { tokens, known, from, drawn } = &feed;
        self.check_places(kernel, &[], &[tokens, known, from, drawn])?;
        ensure(kernel, known.len() == tokens.len(), "not one known token for each token")?;
        ensure(kernel, from.len() <= tokens.len(), "more indices than tokens")?;
        if tokens.is_empty() {
            return Ok(());
        }
        let (n, n_from) = (number(kernel, tokens.len())?, number(kernel, from.len())?);
        let n_drawn = number(kernel, drawn.len())?;
        let config = grid(tokens.len().div_ceil(THREADS), 1, THREADS as u32);
        launch!(
            self,
            kernel,
            config,
            &tokens.address(),
            &known.address(),
            &from.address(),
            &drawn.address(),
            &n,
            &n_from,
            &n_drawn
        )
    }

    /// Computes `drawn[row] = best[row]`, or [`NOWHERE`] if that token's logit is infinite or NaN.
    pub fn keep_tokens(
        &self,
        drawn: ViewMut<'_, u32>,
        best: View<'_, u32>,
        logits: View<'_, f32>,
    ) -> Result<(), CudaError> {
        let kernel = "keep_tokens";
        self.check_places(kernel, &[], &[&drawn, &best, &logits])?;
        ensure(kernel, drawn.len() == best.len(), "not one token for each row")?;
        if drawn.is_empty() {
            return ensure(kernel, logits.is_empty(), "logits without an output");
        }
        let width = number(kernel, rows_of(kernel, logits.len(), drawn.len())?)?;
        let n = number(kernel, drawn.len())?;
        let config = grid(drawn.len().div_ceil(THREADS), 1, THREADS as u32);
        launch!(self, kernel, config, &drawn.address(), &best.address(), &logits.address(), &width, &n)
    }
}
