//! What the card is told of the tokens that it shall draw, where the likeliest will not do; and what it answers.

use std::collections::BTreeMap;

use kernels::cuda::{DrawRow, EDIT_WORDS, Edit, NOWHERE, Outcome, TOP_MAX};
use types::step::Logprobs;
use types::{Sampling, TokenId};

use crate::error::RowError;
use crate::sampler::looks_back;
use crate::step::{Row, RowInput, SampleSpec};

/// Edits of one step that the card has room for. Rows beyond it are drawn by the host.
pub(super) const EDITS_MAX: usize = 1 << 16;

/// The draws of one step, as words.
#[derive(Debug, Default)]
pub(super) struct Draws {
    pub(super) rows: Vec<u32>,
    pub(super) edits: Vec<u32>,
}

/// Who draws a row's token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Drawer {
    /// The card, which takes the likeliest in any case.
    Likeliest,
    /// The card, as this one of its draws; whether log-probabilities are wanted.
    Card { nth: usize, is_told: bool },
    /// The host: what is wished for is more than the card does.
    Host,
    /// Nobody: no token is wanted, or the row cannot be computed.
    Nobody,
}

impl Draws {
    /// Shares out the rows of a step. `places` says where each row's token stands among the drawn.
    pub(super) fn of(
        rows: &[Row<'_>],
        places: &[Result<Option<u32>, RowError>],
        eos_tokens: &[TokenId],
    ) -> (Self, Vec<Drawer>) {
        let mut draws = Self::default();
        let mut n_decodes = 0;
        let mut drawers = Vec::with_capacity(rows.len());
        for (row, place) in rows.iter().zip(places) {
            // Rows of one token stand first among a step's tokens, in their order.
            let nth = n_decodes;
            n_decodes += u32::from(place.is_ok() && row.input.n_tokens() == 1);
            drawers.push(match (&row.sample, place) {
                (Some(spec), Ok(Some(_))) if is_likeliest(spec) => Drawer::Likeliest,
                (Some(spec), Ok(Some(place))) => draws.add(row, spec, *place, nth, eos_tokens),
                _ => Drawer::Nobody,
            });
        }
        (draws, drawers)
    }

    pub(super) fn n_rows(&self) -> usize {
        self.rows.len() / DrawRow::WORDS
    }

    fn add(
        &mut self,
        row: &Row<'_>,
        spec: &SampleSpec<'_>,
        place: u32,
        nth: u32,
        eos_tokens: &[TokenId],
    ) -> Drawer {
        let Sampling { temperature, top_k, top_p, min_p, seed, logprobs, .. } = *spec.sampling;
        let Sampling { repetition_penalty, presence_penalty, frequency_penalty, .. } = *spec.sampling;
        let edits = edits(spec, eos_tokens);
        let first_edit = self.edits.len() / EDIT_WORDS;
        let is_too_much = logprobs.is_some_and(|n_top| usize::from(n_top) > TOP_MAX);
        if is_too_much || first_edit + edits.len() > EDITS_MAX {
            return Drawer::Host;
        }
        self.edits.extend(edits.values().flat_map(|edit| edit.to_words()));
        let follows_previous = row.input == RowInput::Previous && looks_back(spec.sampling);
        let draw = DrawRow {
            row: place,
            in_flight: follows_previous.then_some(nth),
            temperature,
            top_k,
            top_p,
            min_p,
            seed,
            position: (row.start + row.input.n_tokens()) as u64,
            n_top: logprobs.map(u32::from),
            first_edit: first_edit as u32,
            n_edits: edits.len() as u32,
            repetition: repetition_penalty,
            presence: presence_penalty,
            frequency: frequency_penalty,
        };
        self.rows.extend(draw.to_words());
        Drawer::Card { nth: self.n_rows() - 1, is_told: logprobs.is_some() }
    }
}

/// Whether the likeliest token is the one to draw, and nothing else is asked for.
fn is_likeliest(spec: &SampleSpec<'_>) -> bool {
    let Sampling { temperature, logprobs, logit_bias, .. } = spec.sampling;
    let is_plain = *temperature == 0.0 && logprobs.is_none() && logit_bias.is_empty();
    is_plain && !looks_back(spec.sampling) && spec.index >= spec.stop.min_tokens
}

/// What changes logits before the draw, by token (as `sampler/rules.rs` does it on the processor).
fn edits(spec: &SampleSpec<'_>, eos_tokens: &[TokenId]) -> BTreeMap<TokenId, Edit> {
    let mut edits = BTreeMap::new();
    let mut edit = |token: TokenId, change: &dyn Fn(&mut Edit)| {
        change(edits.entry(token).or_insert(Edit { token: token.0, ..Edit::default() }));
    };
    for (token, bias) in &spec.sampling.logit_bias {
        edit(*token, &|edit| edit.bias += bias);
    }
    if spec.index < spec.stop.min_tokens {
        for token in eos_tokens.iter().chain(&spec.stop.stop_tokens) {
            edit(*token, &|edit| edit.is_forbidden = true);
        }
    }
    if looks_back(spec.sampling) {
        for (nth, token) in spec.history.iter().enumerate() {
            edit(*token, &|edit| {
                edit.is_seen = true;
                edit.n_said += u32::from(nth >= spec.n_prompt);
            });
        }
    }
    edits
}

/// A drawn token.
pub(super) fn token(drawn: u32) -> Result<TokenId, RowError> {
    match drawn {
        NOWHERE => Err(RowError::Sample("no logit is finite".to_owned())),
        token => Ok(TokenId(token)),
    }
}

/// What the model thought, best first.
pub(super) fn logprobs(outcome: &Outcome) -> Logprobs {
    let chosen = outcome.logprob(outcome.chosen);
    let top = outcome.top.iter().map(|(token, logit)| (TokenId(*token), outcome.logprob(*logit)));
    Logprobs { chosen, top: top.collect() }
}

#[cfg(test)]
mod tests {
    use types::{BlockIdx, StopRules};

    use super::*;
    use crate::step::SlotId;

    const TABLES: &[&[BlockIdx]] = &[&[BlockIdx(0)]];

    fn row<'a>(input: RowInput<'a>, start: usize, spec: SampleSpec<'a>) -> Row<'a> {
        Row { slot: SlotId(1), input, start, tables: TABLES, sample: Some(spec) }
    }

    fn spec<'a>(
        sampling: &'a Sampling,
        stop: &'a StopRules,
        history: &'a [TokenId],
        index: u32,
    ) -> SampleSpec<'a> {
        SampleSpec { sampling, stop, history, n_prompt: 2, index }
    }

    #[test]
    fn the_card_draws_what_it_can() {
        let plain = Sampling::default();
        let at_random = Sampling { temperature: 0.5, ..plain.clone() };
        for (sampling, min_tokens, expected) in [
            (plain.clone(), 0, Drawer::Likeliest),
            (Sampling { top_p: 0.5, seed: 7, ..plain.clone() }, 0, Drawer::Likeliest),
            (plain.clone(), 5, Drawer::Card { nth: 0, is_told: false }),
            (at_random.clone(), 0, Drawer::Card { nth: 0, is_told: false }),
            (Sampling { logprobs: Some(0), ..plain.clone() }, 0, Drawer::Card { nth: 0, is_told: true }),
            (Sampling { logprobs: Some(20), ..at_random.clone() }, 0, Drawer::Card { nth: 0, is_told: true }),
            (Sampling { logprobs: Some(21), ..at_random }, 0, Drawer::Host),
            (Sampling { presence_penalty: 0.5, ..plain }, 0, Drawer::Card { nth: 0, is_told: false }),
        ] {
            let stop = StopRules { min_tokens, ..StopRules::default() };
            let rows = [row(RowInput::Previous, 9, spec(&sampling, &stop, &[], 4))];
            let (draws, drawers) = Draws::of(&rows, &[Ok(Some(0))], &[]);
            assert_eq!(drawers, [expected], "{sampling:?}, {min_tokens}");
            assert_eq!(draws.n_rows(), usize::from(matches!(expected, Drawer::Card { .. })));
        }
    }

    #[test]
    fn rows_are_told_where_their_tokens_stand() {
        let (sampling, stop) = (
            Sampling { temperature: 1.0, presence_penalty: 1.0, seed: 3, ..Sampling::default() },
            StopRules::default(),
        );
        let history = [1, 2, 2, 3].map(TokenId);
        let prompt = [5, 6].map(TokenId);
        let rows = [
            row(RowInput::Tokens(&prompt), 4, spec(&sampling, &stop, &history, 0)),
            row(RowInput::Previous, 9, spec(&sampling, &stop, &history, 0)),
            row(RowInput::Previous, 8, spec(&sampling, &stop, &history, 0)),
        ];
        let places = [Ok(Some(1)), Err(RowError::NoTokenInFlight), Ok(Some(0))];
        let (draws, drawers) = Draws::of(&rows, &places, &[]);
        assert_eq!(
            drawers,
            [
                Drawer::Card { nth: 0, is_told: false },
                Drawer::Nobody,
                Drawer::Card { nth: 1, is_told: false }
            ]
        );
        let words: Vec<&[u32]> = draws.rows.chunks(DrawRow::WORDS).collect();
        assert_eq!((words[0][0], words[0][1], words[0][8]), (1, NOWHERE, 6), "place, in flight, position");
        assert_eq!((words[1][0], words[1][1], words[1][8]), (0, 0, 9));
        assert_eq!((words[1][11], words[1][12]), (3, 3), "three edits after the first row's three");
        let edits: Vec<&[u32]> = draws.edits.chunks(EDIT_WORDS).take(3).collect();
        // Tokens 1 and 2 stand in the prompt; 2 was said once more, 3 once.
        assert_eq!(
            edits.iter().map(|edit| (edit[0], edit[2], edit[3])).collect::<Vec<_>>(),
            [(1, 0, 2), (2, 1, 2), (3, 1, 2)]
        );
    }

    #[test]
    fn a_token_is_edited_once() {
        let sampling = Sampling {
            logit_bias: vec![(TokenId(4), 1.0), (TokenId(4), 0.5)],
            repetition_penalty: 1.5,
            ..Sampling::default()
        };
        let stop = StopRules { min_tokens: 9, stop_tokens: vec![TokenId(4)], ..StopRules::default() };
        let edits = edits(&spec(&sampling, &stop, &[TokenId(4)], 1), &[TokenId(8)]);
        let of_4 = Edit { token: 4, bias: 1.5, n_said: 0, is_forbidden: true, is_seen: true };
        let of_8 = Edit { token: 8, is_forbidden: true, ..Edit::default() };
        assert_eq!(edits.into_values().collect::<Vec<_>>(), [of_4, of_8]);
    }

    #[test]
    fn too_many_edits_are_the_hosts() {
        let sampling = Sampling { repetition_penalty: 1.5, ..Sampling::default() };
        let (stop, history) = (StopRules::default(), (0..40_000).map(TokenId).collect::<Vec<_>>());
        let rows = [0, 1, 2].map(|_| row(RowInput::Previous, 9, spec(&sampling, &stop, &history, 0)));
        let places = [Ok(Some(0)), Ok(Some(1)), Ok(Some(2))];
        let (_, drawers) = Draws::of(&rows, &places, &[]);
        assert_eq!(drawers, [Drawer::Card { nth: 0, is_told: false }, Drawer::Host, Drawer::Host]);
    }
}
