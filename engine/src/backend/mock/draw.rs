//! The mock's sampler: the next token is a hash of all tokens so far.
//!
//! There are no logits. Only three sampling settings have an effect: whether the temperature is zero, the
//! seed, and logprobs (which are made up and always the same). Penalties, bias and truncation change nothing.

use types::step::Logprobs;
use types::{Sampling, StopRules, TokenId};

use super::cost::MockSettings;
use super::kv::{Chain, mix};
use crate::error::RowError;
use crate::step::{SampleSpec, SampledToken};

/// The token that ends a sequence. Tokens 0 to 255 are bytes.
pub(super) const END: TokenId = TokenId(256);
/// The size of the vocabulary: bytes, the end token, and room for a router's special tokens.
pub(super) const VOCAB: u32 = 320;
/// Limit of forbidden draws. Afterwards the first allowed token is taken.
const DRAWS_MAX: u64 = 64;
/// The tokens of printable ASCII characters.
const PRINTABLE: std::ops::Range<u64> = 32..127;
const GREEDY: u64 = 0x6772_6565_6479;

/// A [`SampleSpec`] without a lifetime, kept until the step runs.
#[derive(Debug)]
pub(super) struct MockSampleSpec {
    sampling: Sampling,
    stop: StopRules,
    index: u32,
    /// The token that is taken instead of a drawn one.
    answer: Option<TokenId>,
}

impl MockSampleSpec {
    pub(super) fn of(spec: &SampleSpec<'_>, settings: &MockSettings) -> Self {
        let prompt = spec.history.get(..spec.n_prompt).unwrap_or(spec.history);
        let answer = settings.answer(prompt).map(|text| {
            let byte = text.as_bytes().get(spec.index as usize);
            byte.map_or(END, |byte| TokenId(u32::from(*byte)))
        });
        Self { sampling: spec.sampling.clone(), stop: spec.stop.clone(), index: spec.index, answer }
    }

    /// Draws the token at `position`, after the tokens of `chain`.
    pub(super) fn draw(
        &self,
        chain: Chain,
        position: usize,
        settings: &MockSettings,
    ) -> Result<SampledToken, RowError> {
        let MockSettings { eos_one_in, weights, .. } = *settings;
        let chain = Chain(chain.0 ^ weights);
        let base = match self.sampling.temperature {
            0.0 => mix(chain.0 ^ GREEDY),
            _ => mix(chain.0 ^ mix(self.sampling.seed ^ mix(position as u64))),
        };
        let set = self.answer.into_iter();
        let drawn = (0..DRAWS_MAX).map(|nth| candidate(mix(base.wrapping_add(nth)), eos_one_in));
        let any = (0..VOCAB).map(TokenId);
        let token = set.chain(drawn).chain(any).find(|token| self.allows(*token));
        let token = token.ok_or_else(|| RowError::Sample("every token is forbidden".to_owned()))?;
        let logprobs = self.sampling.logprobs.map(|n_top| logprobs(token, base, n_top));
        Ok(SampledToken { token, logprobs })
    }

    fn allows(&self, token: TokenId) -> bool {
        let Self { sampling, stop, index, .. } = self;
        let spec = SampleSpec { sampling, stop, history: &[], n_prompt: 0, index: *index, constraint: None };
        let unwanted_end = token == END && stop.ignore_eos;
        !unwanted_end && !spec.forbids(token, &[END])
    }
}

fn candidate(hash: u64, eos_one_in: u64) -> TokenId {
    if eos_one_in > 0 && hash.is_multiple_of(eos_one_in) {
        return END;
    }
    let n_printable = PRINTABLE.end - PRINTABLE.start;
    TokenId((PRINTABLE.start + (hash >> 32) % n_printable) as u32)
}

/// Makes log-probabilities: the chosen token first, then others with decreasing probability.
fn logprobs(token: TokenId, base: u64, n_top: u8) -> Logprobs {
    let chosen = -((base % 1000) as f32) / 1000.0;
    let others = (0..).map(TokenId).filter(|other| *other != token);
    let all = std::iter::once(token).chain(others);
    let top = all.zip(0u8..n_top).map(|(token, nth)| (token, chosen - f32::from(nth))).collect();
    Logprobs { chosen, top }
}

#[cfg(test)]
mod tests {
    use super::super::cost::MockAnswer;
    use super::*;

    fn spec(sampling: Sampling, stop: StopRules, index: u32) -> MockSampleSpec {
        MockSampleSpec { sampling, stop, index, answer: None }
    }

    fn draw(sampling: Sampling, position: usize) -> TokenId {
        let settings = MockSettings { eos_one_in: 0, ..MockSettings::default() };
        let spec = spec(sampling, StopRules::default(), 0);
        spec.draw(Chain(5), position, &settings).expect("a token").token
    }

    #[test]
    fn greedy_minds_no_seed() {
        let seeded = Sampling { seed: 1, ..Sampling::default() };
        assert_eq!(draw(seeded, 3), draw(Sampling::default(), 3));
    }

    #[test]
    fn sampling_is_keyed_by_seed_and_position() {
        let hot = |seed| Sampling { temperature: 1.0, seed, ..Sampling::default() };
        let tokens = |seed| (0..20).map(|position| draw(hot(seed), position)).collect::<Vec<_>>();
        assert_eq!(tokens(1), tokens(1));
        assert_ne!(tokens(1), tokens(2));
        assert!(tokens(1).windows(2).any(|pair| pair[0] != pair[1]), "positions differ");
    }

    #[test]
    fn other_weights_draw_other_tokens() {
        let tokens = |weights| {
            let settings = MockSettings { eos_one_in: 0, weights, ..MockSettings::default() };
            let spec = spec(Sampling::default(), StopRules::default(), 0);
            let draw = |nth| spec.draw(Chain(nth), 0, &settings).expect("a token").token;
            (0..20).map(draw).collect::<Vec<_>>()
        };
        assert_eq!(tokens(1), tokens(1));
        assert_ne!(tokens(0), tokens(1));
    }

    #[test]
    fn a_set_answer_is_given_byte_by_byte() {
        let answers = vec![MockAnswer { after: "?".to_owned(), text: "No".to_owned() }];
        let settings = MockSettings { answers, ..MockSettings::default() };
        let (sampling, stop, history) =
            (Sampling::default(), StopRules::default(), [TokenId(63), TokenId(78)]);
        let token = |index| {
            let (sampling, stop, history) = (&sampling, &stop, &history);
            let spec = SampleSpec { sampling, stop, history, n_prompt: 1, index, constraint: None };
            MockSampleSpec::of(&spec, &settings).draw(Chain(1), 2, &settings).expect("a token").token
        };
        assert_eq!([token(0), token(1), token(2)], [TokenId(78), TokenId(111), END]);
    }

    #[test]
    fn the_end_comes_when_it_may() {
        let ends = |stop: StopRules, index| {
            let settings = MockSettings { eos_one_in: 1, ..MockSettings::default() };
            let drawn = spec(Sampling::default(), stop, index).draw(Chain(1), 0, &settings);
            drawn.expect("a token").token == END
        };
        assert!(ends(StopRules::default(), 0), "one in one");
        assert!(!ends(StopRules { ignore_eos: true, ..StopRules::default() }, 0));
        assert!(!ends(StopRules { min_tokens: 2, ..StopRules::default() }, 1));
        assert!(ends(StopRules { min_tokens: 2, ..StopRules::default() }, 2));
    }

    #[test]
    fn logprobs_are_best_first() {
        let logprobs = logprobs(TokenId(1), 250, 3);
        assert_eq!(logprobs.chosen, -0.25);
        assert_eq!(logprobs.top, vec![(TokenId(1), -0.25), (TokenId(0), -1.25), (TokenId(2), -2.25)]);
    }
}
