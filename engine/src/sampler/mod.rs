//! Samples a token from logits.
//!
//! The order is: bias; tokens that may not be sampled yet; penalties; tokens that the grammar does not allow; then the
//! best token (temperature zero), or temperature, min-p, top-k, top-p and a draw. Log-probabilities are those of the unedited logits, before
//! any of these steps.
//!
//! The draw depends on the seed and the position only (see [`draw`]), and all sums have a fixed order. So a
//! sequence that continues on another node gets the same tokens.

pub mod draw;
mod logprobs;
mod rules;
#[cfg(test)]
mod tests;

use std::cmp::Ordering;

use grammar::constraint::Mask;
use grammar::{Constraint, ConstraintError};
use kernels::cpu::Processor;
use types::{Sampling, StopRules, TokenId};

use crate::error::RowError;
use crate::step::{SampleSpec, SampledToken};

pub(crate) use logprobs::prompt_logprob;
pub(crate) use rules::looks_back;

/// A [`SampleSpec`] without a lifetime, kept until the step has run.
#[derive(Clone, Debug)]
pub struct OwnedSampleSpec {
    sampling: Sampling,
    stop: StopRules,
    /// The known tokens, for penalties; empty if there are none.
    history: Vec<TokenId>,
    n_prompt: usize,
    index: u32,
    constrained: Option<Constrained>,
}

/// A sequence's state in its grammar, and the tokens that it must have read.
#[derive(Clone, Debug)]
pub(crate) struct Constrained {
    constraint: Constraint,
    generated: Vec<TokenId>,
}

/// A token that may be sampled, and its weight.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Candidate {
    token: u32,
    weight: f32,
}

impl OwnedSampleSpec {
    pub fn of(spec: &SampleSpec<'_>) -> Self {
        let history = if rules::looks_back(spec.sampling) { spec.history.to_vec() } else { Vec::new() };
        Self {
            sampling: spec.sampling.clone(),
            stop: spec.stop.clone(),
            history,
            n_prompt: spec.n_prompt,
            index: spec.index,
            constrained: Constrained::of(spec),
        }
    }

    /// Adds the token that was in flight when the step was launched.
    pub fn remember(&mut self, token: TokenId) {
        if rules::looks_back(&self.sampling) {
            self.history.push(token);
        }
        if let Some(constrained) = &mut self.constrained {
            constrained.remember(token);
        }
    }

    /// Samples the token at `position`, from the logits after the previous token. Overwrites `logits`.
    pub fn draw(
        &self,
        processor: &Processor,
        logits: &mut [f32],
        position: usize,
        eos_tokens: &[TokenId],
    ) -> Result<SampledToken, RowError> {
        // The unedited logits are checked, because they must be valid whatever the rules change. The GPU also
        // checks them first.
        best(logits)?;
        let raw_logits =
            self.sampling.logprobs.map(|n_top| logprobs::RawLogits::of(processor, logits, n_top));
        rules::apply(self, logits, eos_tokens);
        if let Some(constrained) = &self.constrained {
            constrained.mask()?.apply(logits);
        }
        let best = best(logits)?;
        let token = match self.sampling.temperature {
            0.0 => best.token,
            _ => self.random(processor, logits, best, position),
        };
        let logprobs = raw_logits.map(|raw_logits| raw_logits.logprobs(token));
        Ok(SampledToken { token: TokenId(token), logprobs })
    }

    fn random(&self, processor: &Processor, logits: &mut [f32], best: Candidate, position: usize) -> u32 {
        processor.exponentials(logits, best.weight, self.sampling.temperature.recip());
        let uniform = draw::uniform(self.sampling.seed, position as u64);
        if self.keeps_all() {
            let weights = logits.iter().zip(0..).map(|(weight, token)| Candidate { token, weight: *weight });
            return pick(weights, uniform);
        }
        pick(self.kept(logits).into_iter(), uniform)
    }

    fn keeps_all(&self) -> bool {
        let Sampling { top_k, top_p, min_p, .. } = self.sampling;
        (top_k == 0) && top_p >= 1.0 && min_p <= 0.0
    }

    /// Returns the candidates that min-p, top-k and top-p keep, best first. The best one has weight one.
    fn kept(&self, weights: &[f32]) -> Vec<Candidate> {
        let Sampling { top_k, top_p, min_p, .. } = self.sampling;
        let candidates = weights.iter().zip(0..).map(|(weight, token)| Candidate { token, weight: *weight });
        let mut kept: Vec<Candidate> =
            candidates.filter(|one| one.weight >= min_p && one.weight > 0.0).collect();
        if top_k > 0 && (top_k as usize) < kept.len() {
            kept.select_nth_unstable_by(top_k as usize - 1, better_first);
            kept.truncate(top_k as usize);
        }
        if top_p < 1.0 {
            keep_top_p(&mut kept, top_p);
        } else {
            kept.sort_unstable_by(better_first);
        }
        kept
    }
}

impl Constrained {
    /// Returns the state of a row; `None` if it has no grammar.
    pub(crate) fn of(spec: &SampleSpec<'_>) -> Option<Self> {
        let generated = || spec.history[spec.n_prompt..].to_vec();
        spec.constraint.map(|constraint| Self { constraint: constraint.clone(), generated: generated() })
    }

    /// Adds the token that was in flight when the step was launched.
    pub(crate) fn remember(&mut self, token: TokenId) {
        self.generated.push(token);
    }

    /// Returns the tokens that may come next.
    pub(crate) fn mask(&self) -> Result<Mask, RowError> {
        self.constraint.mask(&self.generated).map_err(|error| match error {
            ConstraintError::DeadEnd => RowError::GrammarDeadEnd,
            ConstraintError::Failed(reason) => RowError::Grammar(reason),
        })
    }
}

/// Keeps the fewest best candidates that together have a share of `top_p`; at least one.
fn keep_top_p(kept: &mut Vec<Candidate>, top_p: f32) {
    let total: f64 = kept.iter().map(|one| f64::from(one.weight)).sum();
    let wanted = total * f64::from(top_p);
    // All candidates lighter than this together weigh less than the remaining share, so they are dropped
    // before the sort.
    let least = (total - wanted) / kept.len() as f64;
    kept.retain(|one| f64::from(one.weight) >= least);
    kept.sort_unstable_by(better_first);
    let mut sum = 0.0;
    let enough = kept.iter().position(|one| {
        sum += f64::from(one.weight);
        sum >= wanted
    });
    kept.truncate(enough.map_or(kept.len(), |nth| nth + 1));
}

/// Orders candidates by weight, the largest first; of two equal weights, the lower token comes first.
fn better_first(a: &Candidate, b: &Candidate) -> Ordering {
    b.weight.total_cmp(&a.weight).then(a.token.cmp(&b.token))
}

/// Returns the token with the highest logit; the lowest token if several are equal. A NaN logit is an error,
/// because the model has failed.
fn best(logits: &[f32]) -> Result<Candidate, RowError> {
    let mut best = Candidate { token: 0, weight: f32::NEG_INFINITY };
    let mut is_sound = true;
    for (weight, token) in logits.iter().zip(0..) {
        is_sound &= !weight.is_nan();
        if *weight > best.weight {
            best = Candidate { token, weight: *weight };
        }
    }
    if is_sound && best.weight.is_finite() { Ok(best) } else { Err(no_token()) }
}

/// Returns the error of a row without a token to sample.
pub(crate) fn no_token() -> RowError {
    RowError::Sample("the best logit is not a finite number".to_owned())
}

/// Returns the candidate whose range of the total weight contains `uniform`.
fn pick(candidates: impl Iterator<Item = Candidate> + Clone, uniform: f64) -> u32 {
    let total: f64 = candidates.clone().map(|one| f64::from(one.weight)).sum();
    let wanted = uniform * total;
    let mut sum = 0.0;
    let mut last = 0;
    for one in candidates {
        if one.weight > 0.0 {
            sum += f64::from(one.weight);
            last = one.token;
            if sum > wanted {
                break;
            }
        }
    }
    last
}
