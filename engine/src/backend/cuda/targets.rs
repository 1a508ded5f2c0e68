//! The prompt tokens of a step whose log-probabilities are wanted, and their results.
//!
//! Their logits are computed in groups of as many rows as a step may sample, before the step's own tokens are sampled,
//! so that both use the same memory. Every target is a draw at temperature 0 whose outcome is kept and whose token is
//! not.

use std::ops::Range;

use device::cuda::{CudaError, PinnedNumbers};
use kernels::cuda::{ComputeCard, DrawRow, Outcome, Standing};
use types::TokenId;
use types::step::PromptLogprob;

use super::draws;
use super::workspace::Workspace;
use crate::error::RowError;
use crate::step::Row;

/// The words of a plan for each target: its row, its token and its draw.
pub(super) const TARGET_WORDS: usize = 2 + DrawRow::WORDS;

/// The targets of a step, in the batch's order.
#[derive(Debug, Default)]
pub(super) struct Targets<'a> {
    rows: Vec<RowTargets<'a>>,
    /// The most targets whose logits are computed together.
    group_max: usize,
}

/// The targets of one row; none if the row does not ask for log-probabilities or cannot be computed.
#[derive(Debug, Default)]
struct RowTargets<'a> {
    /// The row of activations that predicts the first target. The next rows predict the others.
    first_row: usize,
    tokens: &'a [TokenId],
    n_top: u8,
}

impl<'a> Targets<'a> {
    /// Collects the targets. `first_rows` holds each row's first row of activations; `None` if it cannot be computed.
    pub(super) fn of(
        rows: &'a [Row<'a>],
        first_rows: impl Iterator<Item = Option<usize>>,
        group_max: usize,
    ) -> Self {
        let of_row = |(row, first_row): (&'a Row<'a>, Option<usize>)| {
            let (targets, first_row) = row.prompt_logprobs.zip(first_row)?;
            let n_tokens = targets.tokens.len().min(row.input.n_tokens());
            Some(RowTargets { first_row, tokens: &targets.tokens[..n_tokens], n_top: targets.n_top })
        };
        let rows = rows.iter().zip(first_rows).map(|row| of_row(row).unwrap_or_default());
        Self { rows: rows.collect(), group_max }
    }

    pub(super) fn len(&self) -> usize {
        self.rows.iter().map(|row| row.tokens.len()).sum()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the range of each row's targets among all targets.
    fn ranges(&self) -> Vec<Range<usize>> {
        let mut end = 0;
        let range = |row: &RowTargets<'_>| {
            let start = end;
            end += row.tokens.len();
            start..end
        };
        self.rows.iter().map(range).collect()
    }

    /// Writes the targets' words of a plan: all rows, then all tokens, then all draws.
    pub(super) fn write(&self, words: &mut [u32]) {
        let (rows, words) = words.split_at_mut(self.len());
        let (tokens, draws) = words.split_at_mut(self.len());
        let of_row = |row: &RowTargets<'a>| {
            let (first_row, n_top) = (row.first_row, row.n_top);
            (first_row..).zip(row.tokens).map(move |(row, token)| (row, token.0, n_top))
        };
        for (nth, (row, token, n_top)) in self.rows.iter().flat_map(of_row).enumerate() {
            (rows[nth], tokens[nth]) = (row as u32, token);
            let draw = draw(nth % self.group_max, n_top).to_words();
            draws[nth * DrawRow::WORDS..][..DrawRow::WORDS].copy_from_slice(&draw);
        }
    }
}

/// Makes the draw that reports the log-probabilities of a row of logits.
fn draw(row: usize, n_top: u8) -> DrawRow {
    DrawRow {
        row: row as u32,
        in_flight: None,
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        seed: 0,
        position: 0,
        n_top: Some(n_top.into()),
        first_edit: 0,
        n_edits: 0,
        repetition: 1.0,
        presence: 0.0,
        frequency: 0.0,
        mask: None,
    }
}

// === results ===

/// Pinned buffers for the results of a step's targets, with room for the most targets of a step.
#[derive(Debug)]
pub(super) struct TargetReadback {
    outcomes: PinnedNumbers<u32>,
    standings: PinnedNumbers<u32>,
    /// The range of each row's targets.
    ranges: Vec<Range<usize>>,
}

impl TargetReadback {
    pub(super) fn new(card: &ComputeCard, n_targets_max: usize) -> Result<Self, CudaError> {
        Ok(Self {
            outcomes: card.pinned(n_targets_max * Outcome::WORDS)?,
            standings: card.pinned(n_targets_max * Standing::WORDS)?,
            ranges: Vec::new(),
        })
    }

    /// Starts the copies of the results of a launched step to the host.
    pub(super) fn receive(
        &mut self,
        card: &ComputeCard,
        space: &Workspace,
        targets: &Targets<'_>,
    ) -> Result<(), CudaError> {
        let n = targets.len();
        self.ranges = targets.ranges();
        card.receive(space.target_outcomes.slice(0..n * Outcome::WORDS), &mut self.outcomes)?;
        card.receive(space.standings.slice(0..n * Standing::WORDS), &mut self.standings)
    }

    /// Waits for the copies. Returns the log-probabilities of each row.
    pub(super) fn of_rows(&mut self) -> Result<Vec<Result<Vec<PromptLogprob>, RowError>>, CudaError> {
        let (outcomes, standings) = (self.outcomes.numbers()?, self.standings.numbers()?);
        let one = |nth: usize| {
            let [n_better, logit] = [0, 1].map(|word| standings[nth * Standing::WORDS + word]);
            prompt_logprob(
                &Outcome::of_words(&outcomes[nth * Outcome::WORDS..]),
                Standing::of_words([n_better, logit]),
            )
        };
        Ok(self.ranges.iter().map(|range| range.clone().map(one).collect()).collect())
    }
}

/// Returns the log-probabilities of one target, or the error of its row.
fn prompt_logprob(outcome: &Outcome, standing: Standing) -> Result<PromptLogprob, RowError> {
    // The drawn token is missing if the best logit is not finite.
    draws::token(outcome.token)?;
    let logprobs = draws::logprobs(&Outcome { chosen: standing.logit, ..outcome.clone() });
    Ok(PromptLogprob { logprobs, rank: 1 + standing.n_better })
}

#[cfg(test)]
mod tests;
