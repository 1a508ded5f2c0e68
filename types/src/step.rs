//! What comes back: one [`Step`] per generated token.

use std::time::Duration;

use crate::prompt::TokenId;

/// One generated token.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    pub token: TokenId,
    /// Which output token this is, counted from zero over the request's whole life, continuations included.
    /// A gap or a repetition is therefore visible to the reader of the stream.
    pub index: u32,
    pub logprobs: Option<Logprobs>,
    /// Set on the last step only.
    pub finish: Option<FinishReason>,
}

/// The chosen token's log-probability and the best alternatives, best first.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    pub chosen: f32,
    pub top: Vec<(TokenId, f32)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// An end-of-sequence or stop token.
    Stop,
    /// `max_tokens`, or the model's context is full.
    Length,
}

/// What a prompt cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt_tokens: u32,
    /// Prompt tokens whose KV was found in a cache instead of computed.
    pub cached_tokens: u32,
}

/// A prefill node's answer, sent as soon as the first token is sampled.
/// The last bytes of KV may still be under way: the `Handoff` travels on the KV wire only.
#[derive(Clone, Debug, PartialEq)]
pub struct Prefilled {
    pub first: Step,
    pub usage: Usage,
    /// From the prompt's arrival at the node to its first step.
    pub queued: Duration,
    /// From its first step to the first token.
    pub computed: Duration,
}
