//! Compares a backend with the reference, by the rule for rounded numbers in `docs/specification.md`.
//!
//! Both backends compute the reference's tokens, so that one difference does not cause others. At each
//! position the backend must sample the reference's token, unless the reference's best token led the next one
//! by less than ε. Log-probabilities must agree within bounds. A token may be out of these bounds at a near tie of
//! routing, where rounding may choose another expert; few tokens may. A row is computed alone, in a batch, in
//! chunks, over a cached prefix, again after preemption, and with the token in flight. Log-probabilities of prompts are
//! compared too, if both backends have them.
//!
//! A deterministic backend is compared with itself, and no bit may differ ([`compare_with_itself`]).

mod prompts;
mod script;

use serde::Serialize;
use types::TokenId;

use crate::backend::Backend;
use crate::error::{BackendError, RowError};
use script::Script;

/// The bounds of equality.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Tolerance {
    /// The lead of the best token over the second, in logits, below which another token may be sampled.
    pub epsilon: f32,
    /// The largest difference of log-probabilities for a token that is certain.
    pub logprob: f32,
    /// The addition to that bound for each unit of the log-probability: unlikely tokens have larger rounding
    /// errors.
    pub logprob_share: f32,
    /// The routing lead, in scores, below which rounding may choose another expert. At such a near tie of routing a
    /// token may be out of the other bounds.
    pub routing: f32,
}

impl Tolerance {
    /// Bounds that only equal bits meet.
    pub const NONE: Self = Self { epsilon: 0.0, logprob: 0.0, logprob_share: 0.0, routing: 0.0 };

    /// Returns the largest difference from this log-probability of the reference.
    fn bound(&self, logprob: f32) -> f32 {
        self.logprob + self.logprob_share * logprob.abs()
    }
}

/// The largest share of tokens that may be out of bounds at near ties of routing.
const ROUTING_TIES_SHARE_MAX: f64 = 0.05;

/// The results of a comparison.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Comparison {
    pub n_tokens: usize,
    /// The number of different tokens at positions where the reference was near a tie.
    pub n_near_ties: usize,
    /// The number of tokens that are out of bounds at near ties of routing.
    pub n_routing_ties: usize,
    pub worst_logprob: f32,
    /// The largest lead despite which another token was sampled.
    pub worst_lead: f32,
    pub wrong: Vec<String>,
}

/// The results of all comparisons of a backend.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Comparisons {
    /// Sampled tokens and their log-probabilities.
    pub sampled: Comparison,
    /// Log-probabilities of prompts; empty if one of the backends has none.
    pub prompts: Comparison,
}

/// The reason why a comparison failed to run.
#[derive(Debug, thiserror::Error)]
pub enum CompareError {
    #[error(transparent)]
    Backend(#[from] BackendError),
    #[error("{company}: a row failed")]
    Row {
        company: &'static str,
        #[source]
        source: RowError,
    },
}

/// One continuation by the reference.
#[derive(Clone, Debug)]
pub(crate) struct Truth {
    pub(crate) prompt: Vec<TokenId>,
    pub(crate) steps: Vec<TruthStep>,
}

/// One position: the best tokens and their log-probabilities, best first.
#[derive(Clone, Debug)]
pub(crate) struct TruthStep {
    pub(crate) best: Vec<(TokenId, f32)>,
    /// The smallest routing lead of the token that this position computes.
    pub(crate) routing_lead: f32,
}

impl TruthStep {
    fn token(&self) -> TokenId {
        self.best[0].0
    }

    fn lead(&self) -> f32 {
        self.best.get(1).map_or(f32::INFINITY, |second| self.best[0].1 - second.1)
    }

    fn logprob(&self, token: TokenId) -> Option<f32> {
        self.best.iter().find(|one| one.0 == token).map(|one| one.1)
    }
}

impl Comparison {
    /// Compares a sampled token, and its alternatives if they are known.
    fn see(
        &mut self,
        place: &str,
        truth: &TruthStep,
        token: Option<TokenId>,
        alternatives: &[(TokenId, f32)],
        tolerance: Tolerance,
    ) {
        let mut of_token = Self { n_tokens: 1, ..Self::default() };
        let Some(token) = token else {
            of_token.wrong.push(format!("{place}: no token"));
            return self.merge(of_token);
        };
        of_token.check_token(place, truth, token, tolerance);
        of_token.check_logprobs(place, truth, alternatives, tolerance);
        self.merge(of_token.or_routing_tie(truth, tolerance));
    }

    fn check_token(&mut self, place: &str, truth: &TruthStep, token: TokenId, tolerance: Tolerance) {
        if token == truth.token() {
            return;
        }
        let (lead, routing) = (truth.lead(), truth.routing_lead);
        self.worst_lead = self.worst_lead.max(lead);
        if lead < tolerance.epsilon {
            self.n_near_ties += 1;
        } else {
            let expected = truth.token();
            self.wrong.push(format!(
                "{place}: {token:?}, not {expected:?}, which leads by {lead} (routing lead {routing})"
            ));
        }
    }

    fn check_logprobs(
        &mut self,
        place: &str,
        truth: &TruthStep,
        alternatives: &[(TokenId, f32)],
        tolerance: Tolerance,
    ) {
        for (token, logprob) in alternatives {
            let Some(expected) = truth.logprob(*token) else { continue };
            let difference = (logprob - expected).abs();
            self.worst_logprob = self.worst_logprob.max(difference);
            if difference.is_nan() || difference > tolerance.bound(expected) {
                self.wrong.push(format!(
                    "{place}: {token:?} has {logprob}, and {expected} in the reference (routing lead {})",
                    truth.routing_lead
                ));
            }
        }
    }

    /// Returns the comparison of one token. A token that is out of bounds at a near tie of routing is only counted.
    fn or_routing_tie(self, truth: &TruthStep, tolerance: Tolerance) -> Self {
        match !self.wrong.is_empty() && truth.routing_lead < tolerance.routing {
            true => Self { n_tokens: 1, n_routing_ties: 1, ..Self::default() },
            false => self,
        }
    }

    /// Adds the results of another comparison.
    pub fn merge(&mut self, other: Self) {
        self.n_tokens += other.n_tokens;
        self.n_near_ties += other.n_near_ties;
        self.n_routing_ties += other.n_routing_ties;
        self.worst_logprob = self.worst_logprob.max(other.worst_logprob);
        self.worst_lead = self.worst_lead.max(other.worst_lead);
        self.wrong.extend(other.wrong);
    }

    pub fn is_equal(&self) -> bool {
        let routing_ties_max = ROUTING_TIES_SHARE_MAX * self.n_tokens as f64;
        self.wrong.is_empty() && self.n_tokens > 0 && self.n_routing_ties as f64 <= routing_ties_max
    }
}

/// Compares a backend with the reference for these prompts, with `n_steps` tokens after each.
pub fn compare(
    reference: &mut dyn Backend,
    subject: &mut dyn Backend,
    prompts: &[Vec<TokenId>],
    n_steps: usize,
    tolerance: Tolerance,
) -> Result<Comparisons, CompareError> {
    let truths = truths(reference, prompts, n_steps)?;
    let of_prompts = prompts::truths(reference, &truths)?;
    let Comparisons { mut sampled, mut prompts } = Comparisons::default();
    Script { backend: subject, tolerance, comparison: &mut sampled }.every_way(&truths)?;
    Script { backend: subject, tolerance, comparison: &mut prompts }.prompts(&of_prompts)?;
    Ok(Comparisons { sampled, prompts })
}

/// Compares the results of a row alone with those in a batch, in other chunks and recomputed, bit by bit.
pub fn compare_with_itself(
    backend: &mut dyn Backend,
    prompts: &[Vec<TokenId>],
    n_steps: usize,
) -> Result<Comparisons, CompareError> {
    let tolerance = Tolerance::NONE;
    let truths = truths(backend, prompts, n_steps)?;
    let of_prompts = prompts::truths(backend, &truths)?;
    let Comparisons { mut sampled, mut prompts } = Comparisons::default();
    let mut script = Script { backend, tolerance, comparison: &mut sampled };
    script.every_way(&truths)?;
    script.in_a_crowd(&truths)?;
    Script { backend, tolerance, comparison: &mut prompts }.prompts(&of_prompts)?;
    Ok(Comparisons { sampled, prompts })
}

fn truths(
    reference: &mut dyn Backend,
    prompts: &[Vec<TokenId>],
    n_steps: usize,
) -> Result<Vec<Truth>, CompareError> {
    prompts.iter().map(|prompt| script::truth(reference, prompt, n_steps)).collect()
}

#[cfg(test)]
mod tests;
