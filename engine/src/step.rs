//! One step of a model: rows go in, sampled tokens come out.

use std::time::Duration;

use kv_cache::LayerFence;
use types::step::Logprobs;
use types::{BlockIdx, Sampling, StopRules, TokenId};

use crate::error::RowError;

/// Names a sequence to the backend from one step to the next. Never used for two sequences.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct SlotId(pub u64);

/// The rows of one step. A row's numbers do not depend on the other rows.
#[derive(Clone, Copy, Debug)]
pub struct StepBatch<'a> {
    pub rows: &'a [Row<'a>],
}

/// Some neighbouring tokens of one sequence: a chunk of a prompt, or the last token of a running sequence.
#[derive(Clone, Copy, Debug)]
pub struct Row<'a> {
    pub slot: SlotId,
    pub input: RowInput<'a>,
    /// The position of the first input token. The KV of all positions before it is in place, or is computed by the
    /// step in flight.
    pub start: usize,
    /// The sequence's blocks, one table per layer group, covering the input's last position. What a sliding window
    /// has left behind may be [`BlockIdx::GONE`].
    pub tables: &'a [&'a [BlockIdx]],
    /// `None`: this chunk is not the prompt's last, and no token is wanted from it.
    pub sample: Option<SampleSpec<'a>>,
}

/// The tokens whose KV a row computes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RowInput<'a> {
    Tokens(&'a [TokenId]),
    /// The one token that this slot samples in the step in flight, which the caller does not know yet.
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

/// How to draw the token that follows a row's last one.
#[derive(Clone, Copy, Debug)]
pub struct SampleSpec<'a> {
    pub sampling: &'a Sampling,
    pub stop: &'a StopRules,
    /// All tokens known so far, prompt first, for penalties. After [`RowInput::Previous`] the token in flight belongs
    /// to it too, and only the backend knows it.
    pub history: &'a [TokenId],
    /// How many of `history` the client wrote: the rest was generated.
    pub n_prompt: usize,
    /// Which output token is drawn: `Step::index`.
    pub index: u32,
}

impl SampleSpec<'_> {
    /// Whether `token` would end the sequence before it may end. Such a token is never drawn.
    ///
    /// A backend does nothing else about stopping: its caller decides whether a token ends the sequence.
    pub fn forbids(&self, token: TokenId, eos_tokens: &[TokenId]) -> bool {
        let too_early = self.index < self.stop.min_tokens;
        too_early && (eos_tokens.contains(&token) || self.stop.stop_tokens.contains(&token))
    }
}

/// A step under way. Not `Clone`: it is collected once.
#[derive(Debug)]
pub struct Launched {
    step: u64,
    fence: LayerFence,
    modelled_cost: Option<Duration>,
}

impl Launched {
    /// For backends. `step` is theirs to tell one step from another.
    pub fn new(step: u64, fence: LayerFence, modelled_cost: Option<Duration>) -> Self {
        Self { step, fence, modelled_cost }
    }

    pub fn step(&self) -> u64 {
        self.step
    }

    /// Opens layer by layer as the step's KV is written.
    pub fn fence(&self) -> &LayerFence {
        &self.fence
    }

    /// The simulated time of the step. Only a mock has one, and its caller waits for it.
    pub fn modelled_cost(&self) -> Option<Duration> {
        self.modelled_cost
    }
}

/// A step's outcome, row by row in the batch's order. A failed row has no effect on the others.
#[derive(Clone, Debug, PartialEq)]
pub struct StepOutput {
    pub rows: Vec<Result<Option<Sampled>, RowError>>,
}

/// A drawn token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
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
            let spec = SampleSpec { sampling: &sampling, stop: &stop, history: &[], n_prompt: 0, index };
            assert_eq!(spec.forbids(TokenId(token), &eos), forbidden, "token {token} at {index}");
        }
    }
}
