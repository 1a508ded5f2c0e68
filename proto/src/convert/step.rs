//! Conversions for steps, usage and a prefill node's answer.

use std::time::Duration;

use types::step::{Logprobs, PromptLogprob};
use types::{ComputedPrompt, FinishReason, Refusal, RefusalKind, Step, TokenId, Usage};

use super::present;
use crate::error::ConvertError;
use crate::v1;

impl From<&Step> for v1::Step {
    fn from(step: &Step) -> Self {
        let mut wire = Self {
            token: step.token.0,
            index: step.index,
            logprobs: step.logprobs.as_ref().map(Into::into),
            finish: v1::FinishReason::Unspecified.into(),
        };
        if let Some(reason) = step.finish {
            wire.set_finish(reason.into());
        }
        wire
    }
}

impl TryFrom<v1::Step> for Step {
    type Error = ConvertError;

    fn try_from(wire: v1::Step) -> Result<Self, ConvertError> {
        Ok(Self {
            token: TokenId(wire.token),
            index: wire.index,
            finish: finish_from_wire(wire.finish)?,
            logprobs: wire.logprobs.map(Into::into),
        })
    }
}

fn finish_from_wire(finish: i32) -> Result<Option<FinishReason>, ConvertError> {
    match v1::FinishReason::try_from(finish) {
        Ok(v1::FinishReason::Unspecified) => Ok(None),
        Ok(v1::FinishReason::Stop) => Ok(Some(FinishReason::Stop)),
        Ok(v1::FinishReason::Length) => Ok(Some(FinishReason::Length)),
        Err(_) => Err(ConvertError::unknown("step.finish", finish)),
    }
}

impl From<FinishReason> for v1::FinishReason {
    fn from(reason: FinishReason) -> Self {
        match reason {
            FinishReason::Stop => Self::Stop,
            FinishReason::Length => Self::Length,
        }
    }
}

impl From<&Logprobs> for v1::Logprobs {
    fn from(logprobs: &Logprobs) -> Self {
        let one = |(token, logprob): &(TokenId, f32)| v1::Logprob { token: token.0, logprob: *logprob };
        Self { chosen: logprobs.chosen, top: logprobs.top.iter().map(one).collect() }
    }
}

impl From<v1::Logprobs> for Logprobs {
    fn from(wire: v1::Logprobs) -> Self {
        let top = wire.top.into_iter().map(|one| (TokenId(one.token), one.logprob)).collect();
        Self { chosen: wire.chosen, top }
    }
}

/// Encodes the log-probabilities of a prompt; `None` if there are none.
pub fn prompt_logprobs_to_wire(logprobs: &[PromptLogprob]) -> Option<v1::PromptLogprobs> {
    let top = || logprobs.iter().flat_map(|one| &one.logprobs.top);
    (!logprobs.is_empty()).then(|| v1::PromptLogprobs {
        chosen: logprobs.iter().map(|one| one.logprobs.chosen).collect(),
        ranks: logprobs.iter().map(|one| one.rank).collect(),
        top_tokens: top().map(|(token, _)| token.0).collect(),
        top_logprobs: top().map(|(_, logprob)| *logprob).collect(),
    })
}

/// Decodes the log-probabilities of a prompt. Each token has the same number of alternatives.
pub fn prompt_logprobs_from_wire(
    wire: Option<v1::PromptLogprobs>,
) -> Result<Vec<PromptLogprob>, ConvertError> {
    let v1::PromptLogprobs { chosen, ranks, top_tokens, top_logprobs } = wire.unwrap_or_default();
    let (n, n_top) = (chosen.len(), top_tokens.len());
    let each = n_top.checked_div(n).unwrap_or(0);
    if ranks.len() != n || top_logprobs.len() != n_top || each * n != n_top {
        let lengths = format!("lists of {n}, {}, {n_top} and {}", ranks.len(), top_logprobs.len());
        return Err(ConvertError::range("prompt_logprobs", lengths));
    }
    let mut top = top_tokens.into_iter().map(TokenId).zip(top_logprobs);
    let one = |(chosen, rank)| PromptLogprob {
        logprobs: Logprobs { chosen, top: top.by_ref().take(each).collect() },
        rank,
    };
    Ok(chosen.into_iter().zip(ranks).map(one).collect())
}

impl From<Usage> for v1::Usage {
    fn from(usage: Usage) -> Self {
        Self { prompt_tokens: usage.prompt_tokens, cached_tokens: usage.cached_tokens }
    }
}

impl From<v1::Usage> for Usage {
    fn from(wire: v1::Usage) -> Self {
        Self { prompt_tokens: wire.prompt_tokens, cached_tokens: wire.cached_tokens }
    }
}

impl From<&ComputedPrompt> for v1::Prefilled {
    fn from(prefilled: &ComputedPrompt) -> Self {
        Self {
            first: Some((&prefilled.first).into()),
            prompt_logprobs: prompt_logprobs_to_wire(&prefilled.prompt_logprobs),
            usage: Some(prefilled.usage.into()),
            room_us: prefilled.room.as_micros() as u64,
            queued_us: prefilled.queued.as_micros() as u64,
            computed_us: prefilled.computed.as_micros() as u64,
        }
    }
}

impl TryFrom<v1::Prefilled> for ComputedPrompt {
    type Error = ConvertError;

    fn try_from(wire: v1::Prefilled) -> Result<Self, ConvertError> {
        Ok(Self {
            first: present(wire.first, "prefilled.first")?.try_into()?,
            prompt_logprobs: prompt_logprobs_from_wire(wire.prompt_logprobs)?,
            usage: present(wire.usage, "prefilled.usage")?.into(),
            room: Duration::from_micros(wire.room_us),
            queued: Duration::from_micros(wire.queued_us),
            computed: Duration::from_micros(wire.computed_us),
        })
    }
}

impl From<&Refusal> for v1::Refusal {
    fn from(refusal: &Refusal) -> Self {
        Self { code: refusal.kind.code().to_owned(), reason: refusal.reason.clone() }
    }
}

impl From<v1::Refusal> for Refusal {
    /// Converts a refusal from the wire. An unknown code comes from a newer peer and becomes `Failed`.
    fn from(wire: v1::Refusal) -> Self {
        match RefusalKind::from_code(&wire.code) {
            Some(kind) => Self::new(kind, wire.reason),
            None => Self::new(RefusalKind::Failed, format!("{}: {}", wire.code, wire.reason)),
        }
    }
}
