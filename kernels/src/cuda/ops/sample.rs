//! Samples tokens on the GPU, for rows that do not take just the likeliest token.

use super::{ComputeCard, CudaError, GRID_SIDE_MAX, NOWHERE, View, ViewMut, ensure, launch, number, rows_of};
use crate::cuda::masks::{MaskArguments, StepMasks};
use device::cuda::card::grid;

/// The number of threads for a row, as in `sample.cu`.
const THREADS: u32 = 1024;
/// The sampled token of a row whose mask did not arrive in time.
pub const LATE: u32 = NOWHERE - 1;
/// The maximum number of likeliest tokens in a row's outcome.
pub const TOP_MAX: usize = 20;
/// The number of 32-bit words of an edit.
pub const EDIT_WORDS: usize = 4;

/// The sampling parameters of one row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DrawRow {
    /// The index of the row in the logits and in the sampled tokens.
    pub row: u32,
    /// The index of the previous step's token, which belongs to the history but is not known to the host.
    pub in_flight: Option<u32>,
    /// The temperature; 0 takes the likeliest token.
    pub temperature: f32,
    /// The number of likeliest tokens that are kept; 0 keeps all tokens.
    pub top_k: u32,
    pub top_p: f32,
    pub min_p: f32,
    pub seed: u64,
    pub position: u64,
    /// The number of likeliest tokens to return with log-probabilities. `None` means no log-probabilities.
    pub n_top: Option<u32>,
    /// The index of this row's first [`LogitEdit`] in the list of all rows' edits.
    pub first_edit: u32,
    pub n_edits: u32,
    pub repetition: f32,
    pub presence: f32,
    pub frequency: f32,
    /// The index of the row's mask among the step's masks. `None` allows every token.
    pub mask: Option<u32>,
}

/// A change of one token's logit before a draw. A row edits each token once.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LogitEdit {
    pub token: u32,
    pub bias: f32,
    /// The number of times that the model has generated the token.
    pub n_said: u32,
    /// Whether the token must not be sampled yet.
    pub is_forbidden: bool,
    /// Whether the token was generated, or is in the prompt.
    pub is_seen: bool,
}

/// The result of a row with log-probabilities.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// The sampled token, [`NOWHERE`] if the best logit is not finite, or [`LATE`].
    pub token: u32,
    /// The unedited logits: the greatest one, and the sampled token's.
    pub best: f32,
    pub chosen: f32,
    /// The sum of all exponentials, divided by the greatest one.
    pub total: f64,
    /// The likeliest tokens and their logits, best first; of equal ones, the lower token first.
    pub top: Vec<(u32, f32)>,
}

/// The arguments of [`ComputeCard::sample_tokens`].
#[derive(Debug)]
pub struct SampleTokens<'a> {
    /// The sampled tokens, one for each row of logits. Only rows with a draw are overwritten.
    pub drawn: ViewMut<'a, u32>,
    /// The outcomes: [`Outcome::WORDS`] words for each draw, complete only for draws with log-probabilities.
    pub outcomes: ViewMut<'a, u32>,
    /// The logits. A row with edits is overwritten.
    pub logits: ViewMut<'a, f32>,
    /// The likeliest token of each row.
    pub best: View<'a, u32>,
    /// The step's input tokens.
    pub tokens: View<'a, u32>,
    /// The draws: [`DrawRow::WORDS`] words for each. Each draw has its own row.
    pub draws: View<'a, u32>,
    /// The edits: [`EDIT_WORDS`] words for each.
    pub edits: ViewMut<'a, u32>,
    /// The masks of the step; `None` if no row has one.
    pub masks: Option<&'a StepMasks>,
}

impl ComputeCard {
    /// Samples a token for each row with a draw: `drawn[row]` is the token, or [`NOWHERE`] if the best logit
    /// is not finite, or [`LATE`] if its mask was not written in time.
    ///
    /// All sums are of integers, so a draw depends on its own row only.
    pub fn sample_tokens(&self, sample: SampleTokens<'_>) -> Result<(), CudaError> {
        let kernel = "sample_tokens";
        let SampleTokens { drawn, outcomes, logits, best, tokens, draws, edits, masks } = &sample;
        self.check_places(kernel, &[], &[drawn, outcomes, logits, best, tokens, draws, edits])?;
        let n_draws = rows_of(kernel, draws.len(), DrawRow::WORDS)?;
        if n_draws == 0 {
            return Ok(());
        }
        ensure(kernel, n_draws <= GRID_SIDE_MAX, "too many draws")?;
        ensure(
            kernel,
            !drawn.is_empty() && best.len() == drawn.len(),
            "not one likeliest token for each row",
        )?;
        ensure(kernel, outcomes.len() >= n_draws * Outcome::WORDS, "too little room for outcomes")?;
        let width = number(kernel, rows_of(kernel, logits.len(), drawn.len())?)?;
        ensure(kernel, width > 0, "empty rows")?;
        let (n_rows, n_tokens) = (number(kernel, drawn.len())?, number(kernel, tokens.len())?);
        let n_edits = number(kernel, rows_of(kernel, edits.len(), EDIT_WORDS)?)?;
        let masks = masks.map_or(Ok(MaskArguments::NONE), |masks| masks.arguments(kernel, width))?;
        let config = grid(n_draws, 1, THREADS);
        launch!(
            self,
            kernel,
            config,
            &drawn.address(),
            &outcomes.address(),
            &logits.address(),
            &best.address(),
            &tokens.address(),
            &draws.address(),
            &edits.address(),
            &masks,
            &width,
            &n_rows,
            &n_tokens,
            &n_edits
        )
    }
}

impl DrawRow {
    /// The number of 32-bit words of `DrawRow` in `sample.cu`.
    pub const WORDS: usize = 17;

    pub fn to_words(self) -> [u32; Self::WORDS] {
        let [seed, position] = [self.seed, self.position].map(|wide| [wide as u32, (wide >> 32) as u32]);
        [
            self.row,
            self.in_flight.unwrap_or(NOWHERE),
            self.temperature.to_bits(),
            self.top_k,
            self.top_p.to_bits(),
            self.min_p.to_bits(),
            seed[0],
            seed[1],
            position[0],
            position[1],
            self.n_top.map_or(0, |n_top| n_top + 1),
            self.first_edit,
            self.n_edits,
            self.repetition.to_bits(),
            self.presence.to_bits(),
            self.frequency.to_bits(),
            self.mask.unwrap_or(NOWHERE),
        ]
    }
}

impl LogitEdit {
    pub fn to_words(self) -> [u32; EDIT_WORDS] {
        let flags = u32::from(self.is_forbidden) | u32::from(self.is_seen) << 1;
        [self.token, self.bias.to_bits(), self.n_said, flags]
    }
}

impl Outcome {
    /// The number of 32-bit words of `Outcome` in `sample.cu`.
    pub const WORDS: usize = 6 + 2 * TOP_MAX;
    /// The integer weight of the best token in `sample.cu`.
    const WEIGHT_OF_BEST: f64 = (1_u64 << 40) as f64;

    /// Reads an outcome from the words that the kernel wrote.
    ///
    /// # Panics
    /// If `words` has fewer than [`Self::WORDS`].
    pub fn of_words(words: &[u32]) -> Self {
        let n_top = (words[1] as usize).min(TOP_MAX);
        let total = u64::from(words[5]) << 32 | u64::from(words[4]);
        let (tokens, logits) = words[6..Self::WORDS].split_at(TOP_MAX);
        let top = tokens.iter().zip(logits).take(n_top);
        let mut top: Vec<_> = top.map(|(token, logit)| (*token, f32::from_bits(*logit))).collect();
        top.sort_unstable_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        Self {
            token: words[0],
            best: f32::from_bits(words[2]),
            chosen: f32::from_bits(words[3]),
            total: total as f64 / Self::WEIGHT_OF_BEST,
            top,
        }
    }

    /// Returns the log-probability of a token whose unedited logit is `logit`.
    pub fn logprob(&self, logit: f32) -> f32 {
        (f64::from(logit) - f64::from(self.best) - self.total.ln()) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_stand_where_the_kernel_reads_them() {
        let draw = DrawRow {
            row: 3,
            in_flight: None,
            temperature: 0.5,
            top_k: 40,
            top_p: 0.9,
            min_p: 0.1,
            seed: 0x1_0000_0002,
            position: 7,
            n_top: Some(0),
            first_edit: 11,
            n_edits: 2,
            repetition: 1.1,
            presence: 0.2,
            frequency: 0.3,
            mask: Some(4),
        };
        let words = draw.to_words();
        assert_eq!(words[..2], [3, NOWHERE]);
        assert_eq!(words[6..13], [2, 1, 7, 0, 1, 11, 2]);
        assert_eq!(words[16], 4);
        let edit = LogitEdit { token: 5, bias: -1.0, n_said: 2, is_forbidden: true, is_seen: true };
        assert_eq!(edit.to_words(), [5, (-1.0_f32).to_bits(), 2, 3]);
    }

    #[test]
    fn an_outcome_is_read_back() {
        let mut words = vec![0; Outcome::WORDS];
        words[..6].copy_from_slice(&[9, 2, 4.0_f32.to_bits(), 3.0_f32.to_bits(), 0, 1 << 9]);
        words[6..8].copy_from_slice(&[1, 9]);
        words[6 + TOP_MAX..8 + TOP_MAX].copy_from_slice(&[3.5_f32.to_bits(), 4.0_f32.to_bits()]);
        let outcome = Outcome::of_words(&words);
        assert_eq!((outcome.token, outcome.total), (9, 2.0));
        assert_eq!(outcome.top, [(9, 4.0), (1, 3.5)]);
        assert!((outcome.logprob(4.0) + 2.0_f32.ln()).abs() < 1e-6);
    }
}
