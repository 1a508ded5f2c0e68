//! A submission: a prompt, the source of its KV, and the sink of its results.

use grammar::Constraint;
use kv_cache::BlockLease;
use tokio::time::Instant;
use tracing::Span;
use types::{FinishReason, ModelInfo, Prompt, Refusal, RefusalKind, Step};

use crate::precedence::SequenceId;
use crate::sink::{Sink, SinkGuard};

/// A sequence to run. Its source and its sink depend on its purpose: an outbox, or a stream.
#[derive(Debug)]
pub struct NewSequence {
    pub prompt: Prompt,
    pub source: Source,
    pub sink: Box<dyn Sink>,
    /// The largest number of steps: 1 for a sequence that continues on another node, `u32::MAX` for no limit.
    pub steps_wanted: u32,
    /// The beginning of the prompt's grammar; `None` if it has none.
    pub constraint: Option<Constraint>,
}

/// Where the KV of a sequence's prompt comes from.
#[derive(Debug)]
pub enum Source {
    /// The worker reserves the blocks, uses a cached prefix, and computes the rest.
    Fresh,
    /// The KV of the whole prompt is in `lease`, verified. `first` is the token after the prompt, which the
    /// client already has.
    Arrived { lease: BlockLease, first: Step },
}

/// The limits of a sequence, by its prompt and by the node's model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SequenceLimits {
    /// The index of the first step that this worker sends.
    pub(crate) first_index: u32,
    /// The largest number of steps to send. Zero for an arrived sequence whose first token was its last.
    pub(crate) steps_max: usize,
    /// The largest number of tokens whose KV is stored here. The last token needs none.
    pub(crate) tokens_max: usize,
    /// The number of tokens whose KV the sink receives.
    pub(crate) kv_tokens: usize,
    /// The finish reason of the arrived first token, if that token ended the sequence.
    pub(crate) finish: Option<FinishReason>,
}

/// A sequence that the inbox has accepted.
#[derive(Debug)]
pub(crate) struct Submission {
    pub(crate) id: SequenceId,
    pub(crate) prompt: Prompt,
    pub(crate) constraint: Option<Constraint>,
    pub(crate) source: Source,
    pub(crate) sink_guard: SinkGuard,
    pub(crate) sequence_limits: SequenceLimits,
    pub(crate) span: Span,
    pub(crate) submitted: Instant,
}

// === impl Source ===

impl Source {
    /// Returns whether the worker must reserve the blocks.
    pub(crate) fn is_fresh(&self) -> bool {
        matches!(self, Self::Fresh)
    }
}

// === impl SequenceLimits ===

impl SequenceLimits {
    /// Computes the limits of a sequence. Refuses a sequence that could never run on this node.
    pub(crate) fn of(new: &NewSequence, model: &ModelInfo, n_blocks: u32) -> Result<Self, Refusal> {
        let NewSequence { prompt, source, steps_wanted, .. } = new;
        if prompt.tokens.is_empty() {
            return Err(Refusal::new(RefusalKind::Invalid, "the prompt has no tokens"));
        }
        if prompt.sampling.grammar.is_some() && new.constraint.is_none() {
            return Err(Refusal::new(RefusalKind::Failed, "the prompt's grammar is not compiled"));
        }
        let sequence_limits = match source {
            Source::Fresh => Self::of_fresh(prompt, *steps_wanted, model)?,
            Source::Arrived { first, .. } => Self::of_arrived(prompt, first, *steps_wanted, model)?,
        };
        sequence_limits.check_room(prompt, source, model, n_blocks)?;
        Ok(sequence_limits)
    }

    fn of_fresh(prompt: &Prompt, steps_wanted: u32, model: &ModelInfo) -> Result<Self, Refusal> {
        let n_known = prompt.tokens.len();
        let first_index = prompt.n_generated as u32;
        let steps_max = steps_max(prompt, first_index, n_known, steps_wanted, model);
        if n_known >= model.context_tokens as usize {
            let reason = format!("{n_known} tokens leave no room in a context of {}", model.context_tokens);
            return Err(Refusal::new(RefusalKind::TooLong, reason));
        }
        if steps_max == 0 {
            return Err(Refusal::new(RefusalKind::Invalid, "no tokens are left to generate"));
        }
        Ok(Self {
            first_index,
            steps_max,
            tokens_max: n_known + steps_max - 1,
            kv_tokens: n_known,
            finish: None,
        })
    }

    fn of_arrived(
        prompt: &Prompt,
        first: &Step,
        steps_wanted: u32,
        model: &ModelInfo,
    ) -> Result<Self, Refusal> {
        let n_known = prompt.tokens.len() + 1;
        let first_index = first.index + 1;
        let steps_max = match first.finish {
            Some(_) => 0,
            None => steps_max(prompt, first_index, n_known, steps_wanted, model),
        };
        let tokens_max = n_known + steps_max - 1;
        Ok(Self { first_index, steps_max, tokens_max, kv_tokens: 0, finish: first.finish })
    }

    fn check_room(
        &self,
        prompt: &Prompt,
        source: &Source,
        model: &ModelInfo,
        n_blocks: u32,
    ) -> Result<(), Refusal> {
        let needed = model.layout.blocks_of_all_groups(self.tokens_max);
        if needed > n_blocks as usize {
            let reason = format!("{} tokens need {needed} blocks, this node has {n_blocks}", self.tokens_max);
            return Err(Refusal::new(RefusalKind::TooLong, reason));
        }
        let for_prompt = model.layout.blocks_for(prompt.tokens.len());
        match source {
            Source::Arrived { lease, .. } if lease.n_blocks() < for_prompt => {
                let reason =
                    format!("the lease has {} blocks, the prompt needs {for_prompt}", lease.n_blocks());
                Err(Refusal::new(RefusalKind::Failed, reason))
            }
            _ => Ok(()),
        }
    }
}

/// Returns the smallest of the limits set by the client, the context and the caller.
fn steps_max(
    prompt: &Prompt,
    next_index: u32,
    n_known: usize,
    steps_wanted: u32,
    model: &ModelInfo,
) -> usize {
    let by_client = prompt.stop.max_tokens.saturating_sub(next_index) as usize;
    let by_context = (model.context_tokens as usize).saturating_sub(n_known);
    by_client.min(by_context).min(steps_wanted as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Recorder, blocks, model, prompt};

    /// Computes the limits of a sequence for a model with a context of 64 tokens, and 16 tokens per block.
    fn sequence_limits(
        n_tokens: usize,
        n_generated: usize,
        max_tokens: u32,
        steps_wanted: u32,
    ) -> Result<SequenceLimits, Refusal> {
        let mut prompt = prompt("r", n_tokens, max_tokens);
        prompt.n_generated = n_generated;
        let source = Source::Fresh;
        let (sink, _) = Recorder::new();
        let new = NewSequence { prompt, source, sink: Box::new(sink), steps_wanted, constraint: None };
        SequenceLimits::of(&new, &model(64), 3)
    }

    #[test]
    fn fresh_table() {
        for (n_tokens, n_generated, max_tokens, wanted, first_index, steps_max, tokens_max) in [
            (10, 0, 5, u32::MAX, 0, 5, 14),
            (10, 0, 5, 1, 0, 1, 10),
            (10, 3, 5, u32::MAX, 3, 2, 11),
            (44, 0, 5, u32::MAX, 0, 5, 48),
        ] {
            let sequence_limits =
                sequence_limits(n_tokens, n_generated, max_tokens, wanted).expect("it fits");
            let known = (sequence_limits.first_index, sequence_limits.steps_max, sequence_limits.tokens_max);
            assert_eq!(
                known,
                (first_index, steps_max, tokens_max),
                "{n_tokens} {n_generated} {max_tokens} {wanted}"
            );
        }
    }

    #[test]
    fn what_never_fits_is_refused() {
        for (n_tokens, n_generated, max_tokens, kind, reason) in [
            (0, 0, 5, RefusalKind::Invalid, "the prompt has no tokens"),
            (10, 5, 5, RefusalKind::Invalid, "no tokens are left to generate"),
            (64, 0, 5, RefusalKind::TooLong, "64 tokens leave no room in a context of 64"),
            (45, 0, 5, RefusalKind::TooLong, "49 tokens need 4 blocks, this node has 3"),
        ] {
            let refusal = sequence_limits(n_tokens, n_generated, max_tokens, u32::MAX).expect_err(reason);
            assert_eq!(refusal, Refusal::new(kind, reason));
        }
    }

    #[test]
    fn an_arrived_sequence_goes_on_after_its_first_token() {
        for (index, finish, max_tokens, first_index, steps_max) in [
            (0, None, 5, 1, 4),
            (7, None, 9, 8, 1),
            (0, None, 1, 1, 0),
            (0, Some(FinishReason::Stop), 5, 1, 0),
        ] {
            let first = Step { token: types::TokenId(65), index, logprobs: None, finish };
            let source = Source::Arrived { lease: blocks(1), first };
            let (sink, _) = Recorder::new();
            let new = NewSequence {
                prompt: prompt("r", 10, max_tokens),
                source,
                sink: Box::new(sink),
                steps_wanted: u32::MAX,
                constraint: None,
            };
            let sequence_limits = SequenceLimits::of(&new, &model(64), 3).expect("it fits");
            assert_eq!((sequence_limits.first_index, sequence_limits.steps_max), (first_index, steps_max));
        }
    }

    #[test]
    fn a_grammar_that_is_not_compiled_is_refused() {
        let mut prompt = prompt("r", 10, 5);
        prompt.sampling.grammar = Some(grammar::sources::json_object());
        let (sink, _) = Recorder::new();
        let (source, sink) = (Source::Fresh, Box::new(sink));
        let new = NewSequence { prompt, source, sink, steps_wanted: 1, constraint: None };
        let refusal = SequenceLimits::of(&new, &model(64), 3).expect_err("it would be ignored");
        assert_eq!(refusal.reason, "the prompt's grammar is not compiled");
    }

    #[test]
    fn a_lease_that_is_too_short_is_refused() {
        let first = Step { token: types::TokenId(65), index: 0, logprobs: None, finish: None };
        let source = Source::Arrived { lease: blocks(1), first };
        let (sink, _) = Recorder::new();
        let (prompt, sink) = (prompt("r", 17, 1), Box::new(sink));
        let new = NewSequence { prompt, source, sink, steps_wanted: 1, constraint: None };
        let refusal = SequenceLimits::of(&new, &model(64), 3).expect_err("17 tokens, one block");
        assert_eq!(refusal.reason, "the lease has 1 blocks, the prompt needs 2");
    }
}
