//! The request fields that both endpoints have.

use std::collections::BTreeMap;

use serde::Deserialize;
use types::TokenId;

use super::constraints::ConstraintFields;
use crate::accept::{MaxTokens, SamplingParams, cache_salt};
use crate::error::AcceptError;

/// The fields that both endpoints accept, OpenAI's and vLLM's. [`super::request_fields`] checks all other
/// fields.
#[derive(Debug, Deserialize)]
pub(crate) struct CommonFields {
    pub(crate) model: Option<String>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    return_token_ids: Option<bool>,
    n: Option<u32>,
    pub(crate) max_tokens: Option<u32>,
    min_tokens: Option<u32>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<i64>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    /// The bias of each token by its id, which is a string in JSON.
    logit_bias: Option<BTreeMap<String, f32>>,
    seed: Option<i64>,
    stop: Option<Stop>,
    stop_token_ids: Option<Vec<u32>>,
    ignore_eos: Option<bool>,
    cache_salt: Option<String>,
    prompt_logprobs: Option<u32>,
    best_of: Option<u32>,
}

#[derive(Debug, Default, Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
    continuous_usage_stats: Option<bool>,
    #[serde(flatten)]
    others: BTreeMap<String, serde_json::Value>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string or a list of strings")]
enum Stop {
    One(String),
    Several(Vec<String>),
}

/// How the client wants its answer to be sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct AnswerOptions {
    pub(crate) stream: bool,
    pub(crate) usage: StreamUsage,
    pub(crate) token_ids: bool,
    /// The number of alternatives to show beside each token of the prompt; `None` shows no log-probabilities of it.
    pub(crate) prompt_logprobs: Option<u32>,
    /// Whether the client asks for no tokens after its prompt. One token is generated and not shown.
    pub(crate) prompt_only: bool,
}

/// The chunks of a stream that have the usage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum StreamUsage {
    #[default]
    None,
    /// A chunk of its own, at the end.
    Last,
    /// All chunks, with the tokens so far, and one at the end.
    All,
}

impl StreamOptions {
    fn usage(&self) -> StreamUsage {
        match (self.include_usage.unwrap_or(false), self.continuous_usage_stats.unwrap_or(false)) {
            (true, true) => StreamUsage::All,
            (true, false) => StreamUsage::Last,
            (false, _) => StreamUsage::None,
        }
    }
}

impl CommonFields {
    pub(crate) fn options(&self) -> AnswerOptions {
        AnswerOptions {
            stream: self.stream.unwrap_or(false),
            usage: self.stream_options.as_ref().map(StreamOptions::usage).unwrap_or_default(),
            token_ids: self.return_token_ids.unwrap_or(false),
            prompt_logprobs: self.prompt_logprobs,
            prompt_only: false,
        }
    }

    /// Returns the sampling parameters, except those that the endpoints write differently: `logprobs`, and a
    /// missing `max_tokens`.
    pub(crate) fn params(
        self,
        constraints: ConstraintFields,
        unless_asked: MaxTokens,
    ) -> Result<SamplingParams, AcceptError> {
        self.refuse_unsupported()?;
        let n = self.n.unwrap_or(1);
        if self.best_of.is_some_and(|best_of| best_of != n) {
            return Err(AcceptError::unsupported("best_of", "it must equal n"));
        }
        Ok(SamplingParams {
            n,
            max_tokens: asked("max_tokens", self.max_tokens).unwrap_or(unless_asked),
            min_tokens: self.min_tokens.unwrap_or(0),
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            logit_bias: self
                .logit_bias
                .into_iter()
                .flatten()
                .map(|(id, bias)| biased(&id, bias))
                .collect::<Result<_, _>>()?,
            // The cast keeps all 64 bits of the seed, including the sign bit.
            seed: self.seed.map(i64::cast_unsigned),
            logprobs: None,
            prompt_logprobs: self.prompt_logprobs,
            stop: self.stop.map(Stop::into_strings).unwrap_or_default(),
            stop_tokens: self.stop_token_ids.into_iter().flatten().map(TokenId).collect(),
            ignore_eos: self.ignore_eos.unwrap_or(false),
            cache_salt: cache_salt(self.cache_salt)?,
            grammar: constraints.grammar()?,
        })
    }

    /// Refuses options that Baton does not have and that would change the answer.
    fn refuse_unsupported(&self) -> Result<(), AcceptError> {
        if self.stream == Some(true) && self.prompt_logprobs.is_some() {
            return Err(AcceptError::unsupported("prompt_logprobs", "not with stream"));
        }
        let other =
            self.stream_options.as_ref().and_then(|options| options.others.iter().find(|one| asks(one.1)));
        match other {
            Some((name, _)) => {
                let param = format!("stream_options.{name}");
                Err(AcceptError::unsupported(param, "only `include_usage` and `continuous_usage_stats`"))
            }
            None => Ok(()),
        }
    }
}

/// Returns whether an option is on: set to something other than `null` or `false`.
fn asks(value: &serde_json::Value) -> bool {
    !matches!(value, serde_json::Value::Null | serde_json::Value::Bool(false))
}

fn biased(id: &str, bias: f32) -> Result<(TokenId, f32), AcceptError> {
    let id = id.parse().map_err(|_| AcceptError::invalid("logit_bias", format!("`{id}` is no token id")))?;
    Ok((TokenId(id), bias))
}

pub(crate) fn asked(param: &'static str, tokens: Option<u32>) -> Option<MaxTokens> {
    tokens.map(|tokens| MaxTokens::Asked { tokens, param })
}

impl Stop {
    fn into_strings(self) -> Vec<String> {
        match self {
            Self::One(string) => vec![string],
            Self::Several(strings) => strings,
        }
    }
}
