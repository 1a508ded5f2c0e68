//! Log-probabilities of tokens.

use kernels::cpu::Processor;
use types::TokenId;
use types::step::{Logprobs, PromptLogprob};

use super::{Candidate, best, better_first};
use crate::error::RowError;

/// Returns the log-probabilities of a prompt's `token`, by the logits after the tokens before it.
pub(crate) fn prompt_logprob(
    processor: &Processor,
    logits: &[f32],
    token: TokenId,
    n_top: u8,
) -> Result<PromptLogprob, RowError> {
    best(logits)?;
    let own = logits[token.0 as usize];
    let n_better = logits.iter().filter(|logit| **logit > own).count();
    let logprobs = RawLogits::of(processor, logits, n_top).logprobs(token.0);
    Ok(PromptLogprob { logprobs, rank: 1 + n_better as u32 })
}

/// The logits before any rule is applied, for log-probabilities.
#[derive(Debug)]
pub(super) struct RawLogits {
    logits: Vec<f32>,
    /// The logarithm of the sum of all logits' exponentials.
    log_sum: f64,
    n_top: usize,
}

impl RawLogits {
    pub(super) fn of(processor: &Processor, logits: &[f32], n_top: u8) -> Self {
        let greatest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut weights = logits.to_vec();
        processor.exponentials(&mut weights, greatest, 1.0);
        let sum: f64 = weights.iter().map(|weight| f64::from(*weight)).sum();
        Self { logits: logits.to_vec(), log_sum: f64::from(greatest) + sum.ln(), n_top: usize::from(n_top) }
    }

    pub(super) fn logprobs(&self, chosen: u32) -> Logprobs {
        let chosen = self.logprob(self.logits[chosen as usize]);
        let top = self.top().into_iter().map(|one| (TokenId(one.token), self.logprob(one.weight)));
        Logprobs { chosen, top: top.collect() }
    }

    fn logprob(&self, logit: f32) -> f32 {
        (f64::from(logit) - self.log_sum) as f32
    }

    /// Returns the best tokens and their logits, best first.
    fn top(&self) -> Vec<Candidate> {
        let n_top = self.n_top.min(self.logits.len());
        let candidates =
            self.logits.iter().zip(0..).map(|(logit, token)| Candidate { token, weight: *logit });
        let mut top: Vec<Candidate> = candidates.collect();
        if n_top < top.len() {
            top.select_nth_unstable_by(n_top, better_first);
            top.truncate(n_top);
        }
        top.sort_unstable_by(better_first);
        top
    }
}
