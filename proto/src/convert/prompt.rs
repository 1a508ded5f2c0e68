//! Conversions for prompts. A deadline travels as the time left.

use std::time::{Duration, Instant};

use types::grammar::GRAMMAR_BYTES_MAX;
use types::prompt::{CACHE_SALT_BYTES_MAX, PROMPT_LOGPROBS_MAX, Priority, RequestedModel};
use types::{
    CacheSalt, Deadline, FingerprintDigest, Grammar, GrammarKind, Prompt, RequestId, Sampling, StopRules,
    TenantId, TokenId,
};

use super::{narrow, present};
use crate::error::ConvertError;
use crate::v1;
use crate::v1::grammar::Kind;

/// The longest timeout of a request, one day, in milliseconds. A longer one could overflow the clock.
const TIMEOUT_MS_MAX: u64 = 24 * 60 * 60 * 1000;
/// The longest identifier that is accepted from a peer, in bytes.
const ID_BYTES_MAX: usize = 256;

/// Encodes a prompt that is sent at `now`.
pub fn prompt_to_wire(prompt: &Prompt, now: Instant) -> v1::Prompt {
    v1::Prompt {
        request_id: prompt.id.to_string(),
        tenant: prompt.tenant.to_string(),
        cache_salt: prompt.cache_salt.as_str().to_owned(),
        tokens: prompt.tokens.iter().map(|token| token.0).collect(),
        n_generated: prompt.n_generated as u32,
        sampling: Some((&prompt.sampling).into()),
        stop: Some((&prompt.stop).into()),
        priority: i32::from(prompt.priority.0),
        timeout_ms: prompt.deadline.left(now).as_millis() as u64,
        model: prompt.model.name.to_string(),
        fingerprint: prompt.model.fingerprint.map(|digest| digest.0),
    }
}

/// Decodes a prompt that is received at `now`.
pub fn prompt_from_wire(wire: v1::Prompt, now: Instant) -> Result<Prompt, ConvertError> {
    let n_generated = wire.n_generated as usize;
    if wire.tokens.is_empty() {
        return Err(ConvertError::Missing { field: "prompt.tokens" });
    }
    if n_generated >= wire.tokens.len() {
        return Err(ConvertError::range("prompt.n_generated", n_generated));
    }
    if wire.timeout_ms > TIMEOUT_MS_MAX {
        return Err(ConvertError::range("prompt.timeout_ms", wire.timeout_ms));
    }
    if wire.model.len() > ID_BYTES_MAX {
        return Err(ConvertError::range("prompt.model", format!("{} bytes", wire.model.len())));
    }
    if wire.cache_salt.len() > CACHE_SALT_BYTES_MAX {
        return Err(ConvertError::range("prompt.cache_salt", format!("{} bytes", wire.cache_salt.len())));
    }
    let fingerprint = wire.fingerprint.map(FingerprintDigest);
    let prompt = Prompt {
        model: RequestedModel { name: wire.model.into(), fingerprint },
        id: RequestId::new(short(wire.request_id, "prompt.request_id")?),
        tenant: TenantId::new(short(wire.tenant, "prompt.tenant")?),
        cache_salt: CacheSalt::new(wire.cache_salt),
        tokens: wire.tokens.into_iter().map(TokenId).collect(),
        n_generated,
        sampling: present(wire.sampling, "prompt.sampling")?.try_into()?,
        stop: present(wire.stop, "prompt.stop")?.into(),
        priority: Priority(
            i8::try_from(wire.priority).map_err(|_| ConvertError::range("prompt.priority", wire.priority))?,
        ),
        deadline: Deadline::at(now + Duration::from_millis(wire.timeout_ms)),
    };
    match prompt.n_prompt_logprobs() {
        n if n <= PROMPT_LOGPROBS_MAX => Ok(prompt),
        n => {
            Err(ConvertError::range("sampling.prompt_logprobs", format!("{n} for all tokens of the prompt")))
        }
    }
}

fn short(text: String, field: &'static str) -> Result<String, ConvertError> {
    if text.is_empty() {
        return Err(ConvertError::Missing { field });
    }
    if text.len() > ID_BYTES_MAX {
        return Err(ConvertError::range(field, format!("{} bytes", text.len())));
    }
    Ok(text)
}

impl From<&Sampling> for v1::Sampling {
    fn from(sampling: &Sampling) -> Self {
        Self {
            temperature: sampling.temperature,
            top_p: sampling.top_p,
            top_k: sampling.top_k,
            min_p: sampling.min_p,
            repetition_penalty: sampling.repetition_penalty,
            presence_penalty: sampling.presence_penalty,
            frequency_penalty: sampling.frequency_penalty,
            logit_bias: sampling.logit_bias.iter().map(|(token, bias)| (token.0, *bias)).collect(),
            seed: sampling.seed,
            logprobs: sampling.logprobs.map(u32::from),
            prompt_logprobs: sampling.prompt_logprobs.map(u32::from),
            grammar: sampling.grammar.as_ref().map(Into::into),
        }
    }
}

impl From<&Grammar> for v1::Grammar {
    fn from(grammar: &Grammar) -> Self {
        let kind = match grammar.kind() {
            GrammarKind::JsonSchema => Kind::JsonSchema,
            GrammarKind::Regex => Kind::Regex,
            GrammarKind::Lark => Kind::Lark,
        };
        Self { text: grammar.text().to_owned(), kind: kind.into() }
    }
}

impl TryFrom<v1::Grammar> for Grammar {
    type Error = ConvertError;

    fn try_from(wire: v1::Grammar) -> Result<Self, ConvertError> {
        let kind = match wire.kind() {
            Kind::Unspecified => return Err(ConvertError::range("sampling.grammar.kind", wire.kind)),
            Kind::JsonSchema => GrammarKind::JsonSchema,
            Kind::Regex => GrammarKind::Regex,
            Kind::Lark => GrammarKind::Lark,
        };
        if wire.text.len() > GRAMMAR_BYTES_MAX {
            return Err(ConvertError::range("sampling.grammar.text", format!("{} bytes", wire.text.len())));
        }
        Ok(Self::new(kind, wire.text))
    }
}

impl TryFrom<v1::Sampling> for Sampling {
    type Error = ConvertError;

    fn try_from(wire: v1::Sampling) -> Result<Self, ConvertError> {
        let mut logit_bias: Vec<_> =
            wire.logit_bias.into_iter().map(|(id, bias)| (TokenId(id), bias)).collect();
        logit_bias.sort_by_key(|(token, _)| *token);
        let sampling = Self {
            temperature: wire.temperature,
            top_p: wire.top_p,
            top_k: wire.top_k,
            min_p: wire.min_p,
            repetition_penalty: wire.repetition_penalty,
            presence_penalty: wire.presence_penalty,
            frequency_penalty: wire.frequency_penalty,
            logit_bias,
            seed: wire.seed,
            logprobs: wire.logprobs.map(|n| narrow(n, "sampling.logprobs")).transpose()?,
            prompt_logprobs: wire
                .prompt_logprobs
                .map(|n| narrow(n, "sampling.prompt_logprobs"))
                .transpose()?,
            grammar: wire.grammar.map(Grammar::try_from).transpose()?,
        };
        in_range(&sampling)?;
        Ok(sampling)
    }
}

/// Refuses sampling parameters that no sampler can use. NaN is in no range, so it is refused too.
fn in_range(sampling: &Sampling) -> Result<(), ConvertError> {
    let checks = [
        ("sampling.temperature", sampling.temperature, 0.0..=100.0),
        ("sampling.top_p", sampling.top_p, 0.0..=1.0),
        ("sampling.min_p", sampling.min_p, 0.0..=1.0),
        ("sampling.repetition_penalty", sampling.repetition_penalty, 0.01..=100.0),
        ("sampling.presence_penalty", sampling.presence_penalty, -100.0..=100.0),
        ("sampling.frequency_penalty", sampling.frequency_penalty, -100.0..=100.0),
    ];
    for (field, value, range) in checks {
        if !range.contains(&value) {
            return Err(ConvertError::range(field, value));
        }
    }
    match sampling.logit_bias.iter().find(|(_, bias)| bias.is_nan()) {
        Some((token, _)) => Err(ConvertError::range("sampling.logit_bias", format!("{token:?}: NaN"))),
        None => Ok(()),
    }
}

impl From<&StopRules> for v1::StopRules {
    fn from(stop: &StopRules) -> Self {
        Self {
            max_tokens: stop.max_tokens,
            min_tokens: stop.min_tokens,
            stop_tokens: stop.stop_tokens.iter().map(|token| token.0).collect(),
            ignore_eos: stop.ignore_eos,
        }
    }
}

impl From<v1::StopRules> for StopRules {
    fn from(wire: v1::StopRules) -> Self {
        Self {
            max_tokens: wire.max_tokens,
            min_tokens: wire.min_tokens,
            stop_tokens: wire.stop_tokens.into_iter().map(TokenId).collect(),
            ignore_eos: wire.ignore_eos,
        }
    }
}
