//! How given tokens compare with the other tokens of their rows of logits.

use super::{ComputeCard, CudaError, GRID_SIDE_MAX, View, ViewMut, ensure, launch, number, rows_of};
use device::cuda::card::grid;

/// The number of threads for a row, as in `better.cu`.
const THREADS: u32 = 1024;

/// A token among all tokens of its row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Standing {
    /// The number of tokens with greater logits.
    pub n_better: u32,
    /// The token's own logit; NaN for an invalid token.
    pub logit: f32,
}

/// The arguments of [`ComputeCard::count_better`].
#[derive(Debug)]
pub struct CountBetter<'a> {
    /// The results: [`Standing::WORDS`] words for each row.
    pub standings: ViewMut<'a, u32>,
    pub logits: View<'a, f32>,
    /// The token of each row.
    pub tokens: View<'a, u32>,
}

impl Standing {
    /// The number of 32-bit words of `Standing` in `better.cu`.
    pub const WORDS: usize = 2;

    /// Reads a result from the words that the kernel wrote.
    pub fn of_words(words: [u32; Self::WORDS]) -> Self {
        Self { n_better: words[0], logit: f32::from_bits(words[1]) }
    }
}

impl ComputeCard {
    /// Counts, for each row's token, the tokens with greater logits.
    pub fn count_better(&self, count: CountBetter<'_>) -> Result<(), CudaError> {
        let kernel = "count_better";
        let CountBetter { standings, logits, tokens } = &count;
        self.check_places(kernel, &[], &[standings, logits, tokens])?;
        let n_rows = tokens.len();
        if n_rows == 0 {
            return ensure(kernel, logits.is_empty(), "logits without a token");
        }
        ensure(kernel, n_rows <= GRID_SIDE_MAX, "too many rows")?;
        ensure(kernel, standings.len() == n_rows * Standing::WORDS, "not one result for each token")?;
        let width = number(kernel, rows_of(kernel, logits.len(), n_rows)?)?;
        ensure(kernel, width > 0, "empty rows")?;
        let config = grid(n_rows, 1, THREADS);
        let (standings, logits, tokens) = (standings.address(), logits.address(), tokens.address());
        launch!(self, kernel, config, &standings, &logits, &tokens, &width)
    }
}
