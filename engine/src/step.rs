//! One step of a model: its input rows, and the sampled tokens.

use std::time::Duration;

use grammar::Constraint;
use kv_cache::LayerFence;
use types::step::{Logprobs, PromptLogprob};
use types::{BlockIdx, Sampling, StopRules, TokenId};

use crate::error::RowError;

/// Identifies a sequence to the backend between steps. An id is never reused for another sequence.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct SlotId(pub u64);

/// The rows of one step. A row's results do not depend on the other rows.
#[derive(Clone, Copy, Debug)]
pub struct StepBatch<'a> {
    pub rows: &'a [Row<'a>],
}

/// Some neighbouring tokens of one sequence: a chunk of a prompt, or the last token of a running sequence.
#[derive(Clone, Copy, Debug)]
pub struct Row<'a> {
    pub slot: SlotId,
    pub input: RowInput<'a>,
    /// The position of the first input token. The KV of all earlier positions is in place, or the steps in
    /// flight compute it.
    pub start: usize,
    /// The sequence's blocks, one table for each layer group, up to the input's last position. Blocks before
    /// a sliding window may be [`BlockIdx::GONE`].
    pub tables: &'a [&'a [BlockIdx]],
    /// The prompt tokens whose log-probabilities are wanted; `None` if none are.
    pub prompt_logprobs: Option<PromptTargets<'a>>,
    /// How to sample the next token; `None` if the row samples none, because this chunk is not the prompt's
    /// last.
    pub sample: Option<SampleSpec<'a>>,
}

/// The prompt tokens whose log-probabilities a row computes.
#[derive(Clone, Copy, Debug)]
pub struct PromptTargets<'a> {
    /// The tokens after each of the row's tokens. The prompt's last token has none.
    pub tokens: &'a [TokenId],
    /// The number of alternatives to report beside each token.
    pub n_top: u8,
}

/// The tokens whose KV a row computes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RowInput<'a> {
    Tokens(&'a [TokenId]),
    /// The one token that this slot samples in the latest launched step in which it has a sampling row. The caller does not
    /// know it yet.
    Previous,
}

impl RowInput<'_> {
    pub fn n_tokens(&self) -> usize {
        match self {
            Self::Tokens(tokens) => tokens.len(),
            Self::Previous => 1,
        }
    }
}

/// The sampling parameters for the token after a row's last one.
#[derive(Clone, Copy, Debug)]
pub struct SampleSpec<'a> {
    pub sampling: &'a Sampling,
    pub stop: &'a StopRules,
    /// All known tokens, the prompt first, for penalties. After [`RowInput::Previous`], the token in flight
    /// belongs to the history too, but only the backend knows it.
    pub history: &'a [TokenId],
    /// The number of prompt tokens in `history`. The rest was generated.
    pub n_prompt: usize,
    /// The index of the sampled token in the sequence's output, as in `Step::index`.
    pub index: u32,
    /// The sequence's state in the grammar of `sampling`; `None` if it has no grammar.
    pub constraint: Option<&'a Constraint>,
}

impl SampleSpec<'_> {
    /// Returns whether `token` would end the sequence before `min_tokens`. Such a token is never sampled.
    ///
    /// A backend does nothing else about stopping: its caller decides whether a token ends the sequence.
    pub fn forbids(&self, token: TokenId, eos_tokens: &[TokenId]) -> bool {
        let too_early = self.index < self.stop.min_tokens;
        too_early && (eos_tokens.contains(&token) || self.stop.stop_tokens.contains(&token))
    }
}

/// A step in flight. Not `Clone`, because it is collected once.
#[derive(Debug)]
pub struct PendingStep {
    step: u64,
    fence: LayerFence,
    modelled_cost: Option<Duration>,
}

impl PendingStep {
    /// Makes the handle of a launched step. Only backends call it. `step` is the backend's own identifier of
    /// the step.
    pub fn new(step: u64, fence: LayerFence, modelled_cost: Option<Duration>) -> Self {
        Self { step, fence, modelled_cost }
    }

    pub fn step(&self) -> u64 {
        self.step
    }

    /// Returns the step's fence, which opens layer by layer as KV is written.
    pub fn fence(&self) -> &LayerFence {
        &self.fence
    }

    /// Returns the simulated time of the step. Only a mock has one, and the caller waits for it.
    pub fn modelled_cost(&self) -> Option<Duration> {
        self.modelled_cost
    }
}

/// A step's outcome for each row, in the batch's order. A failed row has no effect on the others.
#[derive(Clone, Debug, PartialEq)]
pub struct StepOutput {
    pub rows: Vec<Result<Option<SampledToken>, RowError>>,
    /// The log-probabilities of each row's [`PromptTargets`], in the batch's order; empty if no row has any.
    pub prompt_logprobs: Vec<Vec<PromptLogprob>>,
    /// The routing lead of each token of the step. In one layer, the lead is the router score of the last chosen expert
    /// minus that of the best expert that was not chosen. The smallest lead of all layers counts. Only the CPU backend
    /// fills this list, and only for models with experts; otherwise the list is empty.
    pub routing_leads: Vec<f32>,
}

/// A sampled token, and its log-probabilities if they were requested.
#[derive(Clone, Debug, PartialEq)]
pub struct SampledToken {
    pub token: TokenId,
    pub logprobs: Option<Logprobs>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_stop_token_is_drawn_early() {
        let sampling = Sampling::default();
        let stop = StopRules { min_tokens: 3, stop_tokens: vec![TokenId(7)], ..StopRules::default() };
        let eos = [TokenId(9)];
        for (index, token, forbidden) in
            [(0, 7, true), (2, 9, true), (2, 8, false), (3, 7, false), (3, 9, false), (9, 9, false)]
        {
            let spec = SampleSpec {
                sampling: &sampling,
                stop: &stop,
                history: &[],
                n_prompt: 0,
                index,
                constraint: None,
            };
            assert_eq!(spec.forbids(TokenId(token), &eos), forbidden, "token {token} at {index}");
        }
    }
}
