//! Changes of logits before sampling: bias, tokens that may not be sampled yet, penalties.

use std::collections::HashMap;

use types::{Sampling, TokenId};

use super::OwnedSampleSpec;

/// The counts of a token in the history.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    /// The number of times that the model generated the token.
    generated: u32,
}

/// Returns whether the rules need earlier tokens.
pub(crate) fn looks_back(sampling: &Sampling) -> bool {
    let Sampling { repetition_penalty, presence_penalty, frequency_penalty, .. } = sampling;
    *repetition_penalty != 1.0 || *presence_penalty != 0.0 || *frequency_penalty != 0.0
}

pub(super) fn apply(spec: &OwnedSampleSpec, logits: &mut [f32], eos_tokens: &[TokenId]) {
    for (token, bias) in &spec.sampling.logit_bias {
        if let Some(logit) = logits.get_mut(token.0 as usize) {
            *logit += bias;
        }
    }
    if spec.index < spec.stop.min_tokens {
        for token in eos_tokens.iter().chain(&spec.stop.stop_tokens) {
            if let Some(logit) = logits.get_mut(token.0 as usize) {
                *logit = f32::NEG_INFINITY;
            }
        }
    }
    if looks_back(&spec.sampling) {
        penalize(spec, logits);
    }
}

/// Applies the penalties. The repetition penalty counts the prompt's tokens; presence and frequency penalties
/// do not, as in other engines.
fn penalize(spec: &OwnedSampleSpec, logits: &mut [f32]) {
    let Sampling { repetition_penalty, presence_penalty, frequency_penalty, .. } = spec.sampling;
    for (token, counts) in counted(&spec.history, spec.n_prompt) {
        let Some(logit) = logits.get_mut(token.0 as usize) else { continue };
        *logit = if *logit > 0.0 { *logit / repetition_penalty } else { *logit * repetition_penalty };
        if counts.generated > 0 {
            *logit -= frequency_penalty * counts.generated as f32 + presence_penalty;
        }
    }
}

fn counted(history: &[TokenId], n_prompt: usize) -> HashMap<TokenId, Counts> {
    let mut seen: HashMap<TokenId, Counts> = HashMap::new();
    for (nth, token) in history.iter().enumerate() {
        seen.entry(*token).or_default().generated += u32::from(nth >= n_prompt);
    }
    seen
}
