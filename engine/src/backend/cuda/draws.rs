//! Requests and results of GPU sampling, for rows that do not take just the likeliest token.

use kernels::cuda::{DrawRow, EDIT_WORDS, LATE, LogitEdit, NOWHERE, Outcome, TOP_MAX};
use types::step::Logprobs;
use types::{Sampling, TokenId};

use crate::error::RowError;
use crate::sampler::{looks_back, no_token};
use crate::step::{Row, RowInput, SampleSpec};

/// Limit of edits of a row on the GPU. The host samples a row with more edits, so the choice does not depend
/// on the other rows.
pub(super) const EDITS_OF_ROW: usize = 4096;

/// The draws of one step, as words for the GPU.
#[derive(Debug, Default)]
pub(super) struct Draws {
    pub(super) rows: Vec<u32>,
    pub(super) edits: Vec<u32>,
    /// The number of rows that follow a grammar. Their masks are in this order.
    n_masks: u32,
}

/// The sampler of a row's token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SampledBy {
    /// The GPU, which always computes the likeliest token.
    Likeliest,
    /// The GPU, as draw number `nth`. `is_told` says whether log-probabilities are requested.
    Card { nth: usize, is_told: bool },
    /// The host, because the GPU does not support the request.
    Host,
    /// No sampler: no token is needed, or the row cannot be computed.
    None,
}

/// The position of a row's token in a step.
#[derive(Clone, Copy)]
struct DrawPlace {
    /// Among the sampled tokens.
    sampled: u32,
    /// Among the tokens of rows with one token.
    decode: u32,
}

impl Draws {
    /// Chooses a sampler for each row of a step. `places` holds the index of each row's token among the
    /// sampled tokens.
    pub(super) fn of(
        rows: &[Row<'_>],
        places: &[Result<Option<u32>, RowError>],
        eos_tokens: &[TokenId],
    ) -> (Self, Vec<SampledBy>) {
        let mut draws = Self::default();
        let mut n_decodes = 0;
        let mut sampled_by = Vec::with_capacity(rows.len());
        for (row, place) in rows.iter().zip(places) {
            // Rows with one token are counted, because they come first among a step's tokens, in order.
            let nth = n_decodes;
            n_decodes += u32::from(place.is_ok() && row.input.n_tokens() == 1);
            sampled_by.push(match (&row.sample, place) {
                (Some(spec), Ok(Some(_))) if is_likeliest(spec) => SampledBy::Likeliest,
                (Some(spec), Ok(Some(place))) => {
                    let edits = edits(spec, eos_tokens);
                    if edits.len() > EDITS_OF_ROW || wants_much_told(spec) {
                        SampledBy::Host
                    } else {
                        draws.add(row, spec, DrawPlace { sampled: *place, decode: nth }, &edits)
                    }
                }
                _ => SampledBy::None,
            });
        }
        (draws, sampled_by)
    }

    pub(super) fn n_rows(&self) -> usize {
        self.rows.len() / DrawRow::WORDS
    }

    /// Adds a draw for a row.
    fn add(
        &mut self,
        row: &Row<'_>,
        spec: &SampleSpec<'_>,
        place: DrawPlace,
        edits: &[LogitEdit],
    ) -> SampledBy {
        let Sampling { temperature, top_k, top_p, min_p, seed, logprobs, .. } = *spec.sampling;
        let Sampling { repetition_penalty, presence_penalty, frequency_penalty, .. } = *spec.sampling;
        let first_edit = self.edits.len() / EDIT_WORDS;
        self.edits.extend(edits.iter().flat_map(|edit| edit.to_words()));
        let follows_previous = row.input == RowInput::Previous && looks_back(spec.sampling);
        let mask = spec.constraint.map(|_| self.n_masks);
        self.n_masks += u32::from(mask.is_some());
        let draw = DrawRow {
            row: place.sampled,
            in_flight: follows_previous.then_some(place.decode),
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
            mask,
        };
        self.rows.extend(draw.to_words());
        SampledBy::Card { nth: self.n_rows() - 1, is_told: logprobs.is_some() }
    }
}

/// Returns whether more log-probabilities are requested than the GPU returns.
fn wants_much_told(spec: &SampleSpec<'_>) -> bool {
    spec.sampling.logprobs.is_some_and(|n_top| usize::from(n_top) > TOP_MAX)
}

/// Returns whether the request needs only the likeliest token.
fn is_likeliest(spec: &SampleSpec<'_>) -> bool {
    let Sampling { temperature, logprobs, logit_bias, .. } = spec.sampling;
    let is_plain = *temperature == 0.0 && logprobs.is_none() && logit_bias.is_empty();
    is_plain && spec.constraint.is_none() && !looks_back(spec.sampling) && spec.index >= spec.stop.min_tokens
}

/// Returns the changes of logits before the draw, one edit for each token, like `sampler/rules.rs` on the
/// CPU.
fn edits(spec: &SampleSpec<'_>, eos_tokens: &[TokenId]) -> Vec<LogitEdit> {
    let of = |token: &TokenId| LogitEdit { token: token.0, ..LogitEdit::default() };
    let biased = |(token, bias): &(TokenId, f32)| LogitEdit { bias: *bias, ..of(token) };
    let mut edits: Vec<LogitEdit> = spec.sampling.logit_bias.iter().map(biased).collect();
    if spec.index < spec.stop.min_tokens {
        let forbidden = eos_tokens.iter().chain(&spec.stop.stop_tokens);
        edits.extend(forbidden.map(|token| LogitEdit { is_forbidden: true, ..of(token) }));
    }
    if looks_back(spec.sampling) {
        let said = |nth: usize| u32::from(nth >= spec.n_prompt);
        let history = spec.history.iter().enumerate();
        edits.extend(history.map(|(nth, token)| LogitEdit { is_seen: true, n_said: said(nth), ..of(token) }));
    }
    // The sort is stable, so that biases of a token are summed in the order of the request.
    edits.sort_by_key(|edit| edit.token);
    edits.dedup_by(|next, kept| {
        let is_same = next.token == kept.token;
        if is_same {
            kept.bias += next.bias;
            kept.n_said += next.n_said;
            kept.is_forbidden |= next.is_forbidden;
            kept.is_seen |= next.is_seen;
        }
        is_same
    });
    edits
}

/// Returns the sampled token, or an error.
pub(super) fn token(drawn: u32) -> Result<TokenId, RowError> {
    match drawn {
        NOWHERE => Err(no_token()),
        LATE => Err(RowError::LateMask),
        token => Ok(TokenId(token)),
    }
}

/// Returns the model's log-probabilities, best first.
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
        Row { slot: SlotId(1), input, start, tables: TABLES, prompt_logprobs: None, sample: Some(spec) }
    }

    fn spec<'a>(
        sampling: &'a Sampling,
        stop: &'a StopRules,
        history: &'a [TokenId],
        index: u32,
    ) -> SampleSpec<'a> {
        SampleSpec { sampling, stop, history, n_prompt: 2, index, constraint: None }
    }

    #[test]
    fn the_card_draws_what_it_can() {
        let plain = Sampling::default();
        let at_random = Sampling { temperature: 0.5, ..plain.clone() };
        for (sampling, min_tokens, expected) in [
            (plain.clone(), 0, SampledBy::Likeliest),
            (Sampling { top_p: 0.5, seed: 7, ..plain.clone() }, 0, SampledBy::Likeliest),
            (plain.clone(), 5, SampledBy::Card { nth: 0, is_told: false }),
            (at_random.clone(), 0, SampledBy::Card { nth: 0, is_told: false }),
            (Sampling { logprobs: Some(0), ..plain.clone() }, 0, SampledBy::Card { nth: 0, is_told: true }),
            (
                Sampling { logprobs: Some(20), ..at_random.clone() },
                0,
                SampledBy::Card { nth: 0, is_told: true },
            ),
            (Sampling { logprobs: Some(21), ..at_random }, 0, SampledBy::Host),
            (Sampling { presence_penalty: 0.5, ..plain }, 0, SampledBy::Card { nth: 0, is_told: false }),
        ] {
            let stop = StopRules { min_tokens, ..StopRules::default() };
            let rows = [row(RowInput::Previous, 9, spec(&sampling, &stop, &[], 4))];
            let (draws, sampled_by) = Draws::of(&rows, &[Ok(Some(0))], &[]);
            assert_eq!(sampled_by, [expected], "{sampling:?}, {min_tokens}");
            assert_eq!(draws.n_rows(), usize::from(matches!(expected, SampledBy::Card { .. })));
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
        let (draws, sampled_by) = Draws::of(&rows, &places, &[]);
        assert_eq!(
            sampled_by,
            [
                SampledBy::Card { nth: 0, is_told: false },
                SampledBy::None,
                SampledBy::Card { nth: 1, is_told: false }
            ]
        );
        let words: Vec<&[u32]> = draws.rows.chunks(DrawRow::WORDS).collect();
        assert_eq!((words[0][0], words[0][1], words[0][8]), (1, NOWHERE, 6), "place, in flight, position");
        assert_eq!((words[1][0], words[1][1], words[1][8]), (0, 0, 9));
        assert_eq!((words[1][11], words[1][12]), (3, 3), "three edits after the first row's three");
        let edits: Vec<&[u32]> = draws.edits.chunks(EDIT_WORDS).take(3).collect();
        // Tokens 1 and 2 are in the prompt. Token 2 was generated once more, and token 3 once.
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
        let of_4 = LogitEdit { token: 4, bias: 1.5, n_said: 0, is_forbidden: true, is_seen: true };
        let of_8 = LogitEdit { token: 8, is_forbidden: true, ..LogitEdit::default() };
        assert_eq!(edits, [of_4, of_8]);
    }

    #[test]
    fn too_many_edits_are_the_hosts_whoever_else_is_there() {
        let sampling = Sampling { repetition_penalty: 1.5, ..Sampling::default() };
        let (stop, long) = (StopRules::default(), (0..5_000).map(TokenId).collect::<Vec<_>>());
        let of = |n: usize| row(RowInput::Previous, 9, spec(&sampling, &stop, &long[..n], 0));
        let rows = [4_096, 4_097, 4_096].map(of);
        let places = [Ok(Some(0)), Ok(Some(1)), Ok(Some(2))];
        let (draws, sampled_by) = Draws::of(&rows, &places, &[]);
        let by_card = |nth| SampledBy::Card { nth, is_told: false };
        assert_eq!(sampled_by, [by_card(0), SampledBy::Host, by_card(1)]);
        assert_eq!(draws.edits.len(), 2 * EDITS_OF_ROW * EDIT_WORDS);
    }
}
