//! The output of the model: one [`Step`] per generated token.

use std::time::Duration;

use crate::prompt::TokenId;

/// One generated token, with its position in the answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    pub token: TokenId,
    /// The index of this output token, counted from zero over the whole request, continuations included. The
    /// reader of the stream uses it to detect gaps and repetitions.
    pub index: u32,
    pub logprobs: Option<Logprobs>,
    /// Why the sequence ended. Set on the last step only.
    pub finish: Option<FinishReason>,
}

/// The chosen token's log-probability and those of the best alternatives, best first.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    pub chosen: f32,
    pub top: Vec<(TokenId, f32)>,
}

/// The log-probabilities of one prompt token after the tokens before it. The prompt's first token has none.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptLogprob {
    /// The token of the prompt counts as the chosen one.
    pub logprobs: Logprobs,
    /// The place of the prompt's token among all tokens by probability, from 1.
    pub rank: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The model generated an end-of-sequence token or a stop token.
    Stop,
    /// `max_tokens` are generated, or the model's context is full.
    Length,
}

/// Token counts of a prompt, for the client's usage report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt_tokens: u32,
    /// Prompt tokens whose KV was found in a cache instead of computed.
    pub cached_tokens: u32,
}

/// A prefill node's answer, sent as soon as the first token is sampled. KV may still be in transfer then; the
/// `Handoff` that completes it travels over the connector only.
#[derive(Clone, Debug, PartialEq)]
pub struct ComputedPrompt {
    pub first: Step,
    /// The log-probabilities of the prompt's tokens from the second on; empty unless the prompt asks for them.
    pub prompt_logprobs: Vec<PromptLogprob>,
    pub usage: Usage,
    /// The time from the prompt's arrival at the node until it had KV room.
    pub room: Duration,
    /// The time from the prompt's arrival at the node to its first engine step.
    pub queued: Duration,
    /// The time from the prompt's first engine step to the first token.
    pub computed: Duration,
}
