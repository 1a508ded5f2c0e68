//! Hot path.
//! The exit of the last stage: samples tokens, and reports finished steps.

use std::sync::mpsc::SyncSender;

use types::TokenId;

use super::intake::SampledTokens;
use super::job::JobRow;
use super::rank::{AfterLayers, Forwarded, Rank, Step};
use crate::error::RowError;
use crate::model::Tensor;
use crate::step::{SampledToken, StepOutput};

/// Sends results to `collect`, and sampled tokens to the first stage. Both channels have room for all steps that may be in
/// flight.
#[derive(Debug)]
pub(super) struct Outlet {
    pub(super) results: SyncSender<StepOutput>,
    pub(super) sampled: SyncSender<SampledTokens>,
    pub(super) eos_tokens: Vec<TokenId>,
}

impl Outlet {
    /// Samples a step's tokens and sends them. Returns `None` if nothing reads them any more.
    pub(super) fn put(&mut self, rank: &Rank, step: Step, forwarded: Forwarded) -> Option<()> {
        let output = self.output(rank, &step, forwarded);
        let sampled = step.rows.iter().zip(&output.rows).filter_map(|(row, outcome)| {
            outcome.as_ref().ok()?.as_ref().map(|sampled| (row.slot, sampled.token))
        });
        let sampled = sampled.collect();
        // The fence is dropped before the result is sent, because `collect` promises that it is open or broken.
        drop(step);
        // The first stage may have ended already, if no more steps come.
        let _ = self.sampled.send(sampled);
        self.results.send(output).ok()
    }

    fn output(&self, rank: &Rank, step: &Step, forwarded: Forwarded) -> StepOutput {
        let Forwarded { outcomes, routing_leads, last, .. } = forwarded;
        let AfterLayers { logits, prompt_logprobs } = last.expect("the last stage computes logits");
        let (mut outcomes, mut of_prompts) = (outcomes.into_iter(), prompt_logprobs.into_iter());
        let mut draws = Draws { rank, eos_tokens: &self.eos_tokens, logits, n_drawn: 0 };
        let draw = |(row, resolved): (&JobRow, &Result<(), RowError>)| {
            resolved.clone()?;
            draws.draw(row, outcomes.next().expect("every resolved row has an outcome"))
        };
        let rows = step.rows.iter().zip(&step.resolved).map(draw).collect();
        let prompt_logprobs = match step.rows.iter().any(|row| row.prompt_logprobs.is_some()) {
            true => step
                .resolved
                .iter()
                .map(|row| row.as_ref().ok().and_then(|()| of_prompts.next()).unwrap_or_default())
                .collect(),
            false => Vec::new(),
        };
        StepOutput { rows, prompt_logprobs, routing_leads }
    }
}

/// The logits of a step. Tokens are sampled from them in the order of the rows that need one.
struct Draws<'a> {
    rank: &'a Rank,
    eos_tokens: &'a [TokenId],
    logits: Tensor,
    n_drawn: usize,
}

impl Draws<'_> {
    fn draw(
        &mut self,
        row: &JobRow,
        outcome: Result<(), RowError>,
    ) -> Result<Option<SampledToken>, RowError> {
        let Some(spec) = &row.spec else { return outcome.map(|()| None) };
        let nth = self.n_drawn;
        self.n_drawn += 1;
        outcome?;
        let logits = self.logits.row_mut(nth);
        spec.draw(self.rank.processor(), logits, row.next_position(), self.eos_tokens).map(Some)
    }
}
