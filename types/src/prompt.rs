//! The prompt: an accepted request as tokens, rules and a deadline, without text.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::block::{BlockHashKey, BlockHasher};
use crate::grammar::Grammar;
use crate::ids::{RequestId, TenantId};
use crate::node::{FingerprintDigest, ModelInfo};
use crate::refusal::{Refusal, RefusalKind};

/// The index of a token in the model's vocabulary.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TokenId(pub u32);

impl fmt::Debug for TokenId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "t{}", self.0)
    }
}

/// The time by which a request must be answered; it ends then, finished or not.
///
/// A deadline is a moment on this process's clock. Messages carry the time left instead, so clocks need not
/// agree.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Deadline(Instant);

impl Deadline {
    pub fn at(instant: Instant) -> Self {
        Self(instant)
    }

    pub fn instant(self) -> Instant {
        self.0
    }

    /// Returns the time left at `now`; zero after the deadline.
    pub fn left(self, now: Instant) -> Duration {
        self.0.saturating_duration_since(now)
    }
}

/// The priority of a prompt. Higher values run first; prompts with equal values run in order of arrival.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Priority(pub i8);

/// The longest [`CacheSalt`].
pub const CACHE_SALT_BYTES_MAX: usize = 256;

/// The largest number of log-probabilities of prompts in one request: for each token its own and its alternatives. It
/// bounds the answers, of nodes to about 2 MiB.
pub const PROMPT_LOGPROBS_MAX: usize = 1 << 18;

/// A text that a client chooses. Cached KV is shared only between prompts with the same salt. Empty: no salt.
///
/// It may be a secret of the client's, so it has no `Display`, and `Debug` hides it.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub struct CacheSalt(Arc<str>);

impl CacheSalt {
    pub fn new(text: impl Into<Arc<str>>) -> Self {
        Self(text.into())
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for CacheSalt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_empty() { "CacheSalt(none)" } else { "CacheSalt(hidden)" })
    }
}

/// The model that a prompt is for, and its weights once a node has begun to compute it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestedModel {
    pub name: Arc<str>,
    /// The digest of the weights, set once a node is chosen: all further nodes of the request must have the
    /// same weights.
    pub fingerprint: Option<FingerprintDigest>,
}

impl RequestedModel {
    /// Makes a `RequestedModel` for this model name that accepts any weights.
    pub fn named(name: impl Into<Arc<str>>) -> Self {
        Self { name: name.into(), fingerprint: None }
    }

    /// Checks on a node that the prompt is for the node's model and weights. An empty name passes, because an
    /// older router does not send one.
    pub fn check(&self, own: &ModelInfo) -> Result<(), Refusal> {
        let Self { name, fingerprint } = self;
        if !name.is_empty() && **name != *own.name {
            let reason = format!("the prompt is for the model `{name}`, this node serves `{}`", own.name);
            return Err(Refusal::new(RefusalKind::Mismatch, reason));
        }
        let digest = own.fingerprint.digest();
        match fingerprint {
            Some(wanted) if *wanted != digest => {
                let reason =
                    format!("the prompt is for `{name}` {wanted}, this node serves `{name}` {digest}");
                Err(Refusal::new(RefusalKind::Mismatch, reason))
            }
            _ => Ok(()),
        }
    }
}

/// An accepted request. The router makes it from a client's request, a node from a router's message.
#[derive(Clone, Debug, PartialEq)]
pub struct Prompt {
    pub id: RequestId,
    pub tenant: TenantId,
    pub cache_salt: CacheSalt,
    pub model: RequestedModel,
    /// The prompt's tokens. If the sequence is continued, the tokens that were generated before follow them.
    pub tokens: Arc<[TokenId]>,
    /// The number of tokens at the end of `tokens` that the model generated; zero for a fresh prompt.
    pub n_generated: usize,
    pub sampling: Sampling,
    pub stop: StopRules,
    pub priority: Priority,
    pub deadline: Deadline,
}

/// The digest of a prompt: 128 bits of BLAKE3 over its tenant and tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptDigest(pub [u8; 16]);

impl Prompt {
    /// Returns the digest of the prompt. A landing that is bound to it accepts no other prompt's KV.
    pub fn digest(&self) -> PromptDigest {
        let mut hasher = blake3::Hasher::new_derive_key("baton prompt digest v1");
        let tenant = self.tenant.as_str().as_bytes();
        hasher.update(&(tenant.len() as u64).to_le_bytes()).update(tenant);
        let tokens: Vec<u8> = self.tokens.iter().flat_map(|token| token.0.to_le_bytes()).collect();
        let mut digest = [0; 16];
        digest.copy_from_slice(&hasher.update(&tokens).finalize().as_bytes()[..16]);
        PromptDigest(digest)
    }

    /// Returns the hasher of this prompt's blocks.
    pub fn hasher(&self, key: &BlockHashKey, block_tokens: usize) -> BlockHasher {
        key.hasher(&self.tenant, &self.cache_salt, block_tokens)
    }

    /// Returns this prompt, asking for no log-probabilities of it.
    #[must_use]
    pub fn without_prompt_logprobs(mut self) -> Self {
        self.sampling.prompt_logprobs = None;
        self
    }

    /// Returns the number of log-probabilities that the prompt asks for: for each token its own and its alternatives.
    pub fn n_prompt_logprobs(&self) -> usize {
        self.sampling.prompt_logprobs.map_or(0, |n_top| self.tokens.len() * (1 + usize::from(n_top)))
    }

    /// Returns the number of tokens that may still be generated.
    pub fn tokens_left(&self) -> usize {
        (self.stop.max_tokens as usize).saturating_sub(self.n_generated)
    }

    /// Returns this prompt, restricted to nodes with the weights of `model`.
    pub fn for_weights_of(&self, model: &ModelInfo) -> Self {
        let fingerprint = Some(model.fingerprint.digest());
        Self { model: RequestedModel { fingerprint, ..self.model.clone() }, ..self.clone() }
    }

    /// Returns the prompt that continues this one after the tokens `generated`. The log-probabilities of the prompt came
    /// with the first of them.
    pub fn continued(&self, generated: &[TokenId]) -> Self {
        let tokens = self.tokens.iter().chain(generated).copied().collect();
        let n_generated = self.n_generated + generated.len();
        Self { tokens, n_generated, ..self.clone() }.without_prompt_logprobs()
    }

    /// Returns how many tokens of this sequence have their KV stored at most: the last generated token needs
    /// no KV.
    pub fn tokens_at_most(&self) -> usize {
        self.tokens.len() + self.tokens_left().saturating_sub(1)
    }
}

/// The parameters of sampling the next token from the model's logits.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// How random the choice is. Zero selects the most likely token (greedy).
    pub temperature: f32,
    pub top_p: f32,
    /// The number of most likely tokens to sample from. Zero keeps all tokens.
    pub top_k: u32,
    pub min_p: f32,
    pub repetition_penalty: f32,
    pub presence_penalty: f32,
    pub frequency_penalty: f32,
    pub logit_bias: Vec<(TokenId, f32)>,
    /// The seed of the random draws, keyed by position: a sequence continued on another node draws the same
    /// numbers.
    pub seed: u64,
    /// The number of alternatives to report beside the chosen token; `None` reports no log-probabilities.
    pub logprobs: Option<u8>,
    /// The number of alternatives to report beside each token of the prompt; `None` reports no log-probabilities of the
    /// prompt. The whole prompt is computed for them, because cached KV has no logits.
    pub prompt_logprobs: Option<u8>,
    /// The grammar of the whole answer; `None`: any text.
    pub grammar: Option<Grammar>,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
            logprobs: None,
            prompt_logprobs: None,
            grammar: None,
        }
    }
}

/// The rules that end generation. Stop strings are not among them: they are text, which only the router
/// handles.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StopRules {
    pub max_tokens: u32,
    /// The number of tokens before which no stop token is sampled.
    pub min_tokens: u32,
    pub stop_tokens: Vec<TokenId>,
    /// If true, the model's own end-of-sequence tokens do not end the sequence.
    pub ignore_eos: bool,
}

impl Default for StopRules {
    fn default() -> Self {
        Self { max_tokens: 16, min_tokens: 0, stop_tokens: Vec::new(), ignore_eos: false }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{KvDtype, KvLayout};
    use crate::node::Fingerprint;

    #[test]
    fn a_prompt_for_another_model_is_refused() {
        let own = ModelInfo {
            name: "m".to_owned(),
            context_tokens: 8,
            vocab: 8,
            eos_tokens: vec![],
            layout: KvLayout::uniform(16, KvDtype::F32, 1, 1, 4),
            fingerprint: Fingerprint::new([("weights".to_owned(), "1".to_owned())]),
        };
        let digest = own.fingerprint.digest();
        let other = FingerprintDigest(!digest.0);
        for (name, fingerprint, expected) in [
            ("m", None, None),
            ("m", Some(digest), None),
            ("", None, None),
            ("o", None, Some("the prompt is for the model `o`, this node serves `m`".to_owned())),
            ("m", Some(other), Some(format!("the prompt is for `m` {other}, this node serves `m` {digest}"))),
        ] {
            let found = RequestedModel { name: name.into(), fingerprint }.check(&own).err();
            assert_eq!(
                found.as_ref().map(|refusal| refusal.kind),
                expected.as_ref().map(|_| RefusalKind::Mismatch)
            );
            assert_eq!(found.map(|refusal| refusal.reason), expected, "{name:?} {fingerprint:?}");
        }
    }
}
