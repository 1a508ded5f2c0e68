//! The tokens of finished steps that later rows may continue.

use std::collections::HashMap;

use types::TokenId;

use crate::step::SlotId;

/// The last token of each slot, as long as its step may be in flight.
#[derive(Debug)]
pub(super) struct PreviousTokens {
    steps_in_flight_max: u64,
    /// The step that sampled the token, and the token.
    tokens: HashMap<SlotId, (u64, TokenId)>,
}

impl PreviousTokens {
    pub(super) fn new(steps_in_flight_max: usize) -> Self {
        Self { steps_in_flight_max: steps_in_flight_max as u64, tokens: HashMap::new() }
    }

    pub(super) fn get(&self, slot: &SlotId) -> Option<&TokenId> {
        self.tokens.get(slot).map(|(_, token)| token)
    }

    /// Takes the tokens of a step. A slot whose row failed has none. Forgets slots whose step cannot be in flight any more.
    pub(super) fn note(&mut self, step: u64, sampled: impl Iterator<Item = (SlotId, Option<TokenId>)>) {
        for (slot, token) in sampled {
            match token {
                Some(token) => self.tokens.insert(slot, (step, token)),
                None => self.tokens.remove(&slot),
            };
        }
        self.tokens.retain(|_, (of, _)| *of + self.steps_in_flight_max > step + 1);
    }

    pub(super) fn clear(&mut self) {
        self.tokens.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(previous: &PreviousTokens) -> Vec<Option<u32>> {
        (0..3).map(|slot| previous.get(&SlotId(slot)).map(|token| token.0)).collect()
    }

    #[test]
    fn one_stage_keeps_the_tokens_of_the_last_step() {
        let mut previous = PreviousTokens::new(2);
        previous.note(0, [(SlotId(0), Some(TokenId(5))), (SlotId(1), Some(TokenId(6)))].into_iter());
        assert_eq!(seen(&previous), [Some(5), Some(6), None]);
        previous.note(1, [(SlotId(0), Some(TokenId(7)))].into_iter());
        assert_eq!(seen(&previous), [Some(7), None, None]);
        previous.note(2, std::iter::empty());
        assert_eq!(seen(&previous), [None, None, None]);
    }

    #[test]
    fn several_stages_keep_the_tokens_of_all_parts() {
        let mut previous = PreviousTokens::new(4);
        for step in 0..3 {
            previous.note(step, [(SlotId(step), Some(TokenId(step as u32)))].into_iter());
        }
        assert_eq!(seen(&previous), [Some(0), Some(1), Some(2)]);
        previous.note(3, [(SlotId(1), None)].into_iter());
        assert_eq!(seen(&previous), [None, None, Some(2)], "the first is too old, the second failed");
    }
}
