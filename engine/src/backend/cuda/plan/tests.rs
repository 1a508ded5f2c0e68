use types::{Sampling, StopRules, TokenId};

use super::*;
use crate::step::{PromptTargets, SampleSpec};

const BOUNDS: Bounds = Bounds { vocab: 100, n_groups: 2, n_wanted_max: 4 };

/// A row under construction: its slot, its tokens (`None` is the token in flight), its start, and whether it
/// samples.
struct Made {
    slot: u64,
    tokens: Option<Vec<TokenId>>,
    start: usize,
    is_drawn: bool,
}

fn made(slot: u64, tokens: Option<&[u32]>, start: usize, is_drawn: bool) -> Made {
    let tokens = tokens.map(|tokens| tokens.iter().copied().map(TokenId).collect());
    Made { slot, tokens, start, is_drawn }
}

/// Calls `look` with the rows. The tables of a slot have blocks 10, 11, … in the first group and 20, 21, … in
/// the second, plus a hundred times the slot's number.
fn with_rows<T>(made: &[Made], look: impl FnOnce(&[Row<'_>]) -> T) -> T {
    let (sampling, stop) = (Sampling::default(), StopRules::default());
    let block = |slot: u64, group: u32, nth: u32| BlockIdx(slot as u32 * 100 + 10 * (group + 1) + nth);
    let tables: Vec<[Vec<BlockIdx>; 2]> = made
        .iter()
        .map(|row| [0, 1].map(|group| (0..8).map(|nth| block(row.slot, group, nth)).collect()))
        .collect();
    let tables: Vec<[&[BlockIdx]; 2]> =
        tables.iter().map(|tables| [tables[0].as_slice(), tables[1].as_slice()]).collect();
    let rows: Vec<Row<'_>> = made
        .iter()
        .zip(&tables)
        .map(|(row, tables)| Row {
            slot: SlotId(row.slot),
            input: row.tokens.as_deref().map_or(RowInput::Previous, RowInput::Tokens),
            start: row.start,
            tables,
            prompt_logprobs: None,
            sample: row.is_drawn.then_some(SampleSpec {
                sampling: &sampling,
                stop: &stop,
                history: &[],
                n_prompt: 0,
                index: 0,
                constraint: None,
            }),
        })
        .collect();
    look(&rows)
}

fn previous(slot: SlotId) -> Result<InputToken, RowError> {
    if slot.0 == 9 { Err(RowError::NoTokenInFlight) } else { Ok(InputToken::Drawn(slot.0 as u32 + 50)) }
}

#[test]
fn rows_of_one_token_come_first_and_chunks_after_them() {
    let made = [
        made(0, Some(&[1, 2, 3]), 15, true),
        made(1, None, 33, true),
        made(2, Some(&[4, 5]), 0, false),
        made(3, Some(&[6]), 16, true),
    ];
    with_rows(&made, |rows| {
        let plan = Plan::of(rows, BOUNDS, previous);
        assert_eq!(plan.places, [Ok(Some(2)), Ok(Some(0)), Ok(None), Ok(Some(1))]);
        let dims = plan.dims;
        assert_eq!((dims.n_decodes, dims.n_tokens, dims.n_wanted, dims.n_chunks), (2, 7, 3, 2));
        assert_eq!((dims.decode_blocks, dims.chunk_blocks), (3, 2));
        let sections = dims.sections();
        let mut words = vec![7777; dims.n_words()];
        plan.write(&mut words);
        assert_eq!(words[sections.known.clone()][1..], [6, 1, 2, 3, 4, 5]);
        assert_eq!(words[sections.from.clone()], [51, NOWHERE]);
        assert_eq!(words[sections.positions.clone()], [33, 16, 15, 16, 17, 0, 1]);
        let slot = |block: u32, token: u32| block * 16 + token;
        let expected =
            [slot(112, 1), slot(311, 0), slot(10, 15), slot(11, 0), slot(11, 1), slot(210, 0), slot(210, 1)];
        assert_eq!(words[sections.slots(0)], expected);
        assert_eq!(words[sections.slots(1)], expected.map(|slot| slot + 160));
        assert_eq!(words[sections.lengths.clone()], [34, 17, 16, 17, 18, 1, 2]);
        assert_eq!(words[sections.decode_tables(0)][..3], [110, 111, 112]);
        assert_eq!(words[sections.decode_tables(0)][3..5], [310, 311]);
        assert_eq!(words[sections.decode_tables(1)][..3], [120, 121, 122]);
        assert_eq!(words[sections.wanted.clone()], [0, 1, 4]);
        assert_eq!(words[sections.sequences.clone()], [2, 3, 18, 5, 2, 2]);
        assert_eq!(words[sections.chunk_tables(0)][..2], [10, 11]);
        assert_eq!(words[sections.chunk_tables(1)][2], 220);
    });
}

#[test]
fn a_recorded_step_has_rows_of_padding_that_write_nowhere() {
    let made = [
        made(1, None, 40, true),
        made(9, None, 3, true),
        made(2, Some(&[5]), 2, false),
        made(3, None, 0, true),
    ];
    with_rows(&made, |rows| {
        let mut plan = Plan::of(rows, BOUNDS, previous);
        assert!(plan.is_recordable());
        assert_eq!(plan.length_max(), 41);
        plan.padded(Dims::of_decodes(2, 5, 64), rows);
        let nothing = Err(RowError::NoTokenInFlight);
        assert_eq!(plan.places, [Ok(Some(0)), nothing, Ok(None), Ok(Some(2))]);
        let sections = plan.dims.sections();
        let mut words = vec![7777; plan.dims.n_words()];
        plan.write(&mut words);
        assert_eq!(words[sections.from.clone()], [51, NOWHERE, 53, NOWHERE, NOWHERE]);
        assert_eq!(words[sections.lengths.clone()], [41, 3, 1, 0, 0]);
        assert_eq!(words[sections.slots(1)][3..], [NOWHERE, NOWHERE]);
        assert_eq!(words[sections.known.clone()][1..], [5, 0, 0, 0]);
        assert_eq!(sections.decode_tables(0).len(), 5 * 4);
    });
}

#[test]
fn a_row_that_cannot_be_computed_takes_no_part() {
    let made = [made(1, Some(&[100]), 0, true), made(9, None, 5, true), made(2, Some(&[7, 99]), 0, true)];
    with_rows(&made, |rows| {
        let plan = Plan::of(rows, BOUNDS, previous);
        let unknown = RowError::UnknownToken { token: 100, vocab: 100 };
        assert_eq!(plan.places, [Err(unknown), Err(RowError::NoTokenInFlight), Ok(Some(0))]);
        assert_eq!((plan.dims.n_tokens, plan.dims.n_decodes, plan.dims.n_wanted), (2, 0, 1));
    });
}

#[test]
fn a_table_that_is_too_short_names_no_block() {
    let made = [made(1, Some(&[1]), 16 * 9, true)];
    with_rows(&made, |rows| {
        let plan = Plan::of(rows, BOUNDS, previous);
        let mut words = vec![0; plan.dims.n_words()];
        plan.write(&mut words);
        let sections = plan.dims.sections();
        assert_eq!(words[sections.slots(0)], [NOWHERE]);
        assert_eq!(words[sections.decode_tables(0)][8..], [NOWHERE, NOWHERE]);
    });
}

#[test]
fn targets_follow_the_order_of_the_batch_and_their_rows_that_of_activations() {
    let made = [
        made(0, Some(&[1, 2, 3]), 16, false),
        made(9, None, 5, true),
        made(2, Some(&[6]), 16, false),
        made(3, Some(&[7, 8]), 0, true),
    ];
    let after = [11, 12, 13].map(TokenId);
    with_rows(&made, |rows| {
        let mut rows = rows.to_vec();
        for (row, n) in [(0, 3), (2, 1), (3, 1)] {
            rows[row].prompt_logprobs = Some(PromptTargets { tokens: &after[..n], n_top: 2 });
        }
        let plan = Plan::of(&rows, BOUNDS, previous);
        assert_eq!(plan.dims.n_targets, 5);
        let mut words = vec![7777; plan.dims.n_words()];
        plan.write(&mut words);
        let sections = plan.dims.sections();
        assert_eq!(words[sections.known.clone()], [6, 1, 2, 3, 7, 8]);
        assert_eq!(words[sections.target_rows.clone()], [1, 2, 3, 0, 4]);
        assert_eq!(words[sections.targets.clone()], [11, 12, 13, 11, 11]);
        assert_eq!(sections.target_draws.end, words.len());
    });
}

#[test]
fn a_step_with_targets_is_not_recorded() {
    with_rows(&[made(1, Some(&[5]), 16, false)], |rows| {
        assert!(Plan::of(rows, BOUNDS, previous).is_recordable());
        let targets = PromptTargets { tokens: &[TokenId(5)], n_top: 0 };
        let rows = [Row { prompt_logprobs: Some(targets), ..rows[0] }];
        assert!(!Plan::of(&rows, BOUNDS, previous).is_recordable());
    });
}

#[test]
fn a_target_that_is_no_token_fails_its_row() {
    with_rows(&[made(1, Some(&[5]), 16, true)], |rows| {
        let targets = PromptTargets { tokens: &[TokenId(100)], n_top: 0 };
        let rows = [Row { prompt_logprobs: Some(targets), ..rows[0] }];
        let plan = Plan::of(&rows, BOUNDS, previous);
        assert_eq!(plan.places, [Err(RowError::UnknownToken { token: 100, vocab: 100 })]);
        assert_eq!((plan.dims.n_tokens, plan.dims.n_targets), (0, 0));
    });
}

#[test]
fn nothing_at_all_is_a_plan_too() {
    let plan = Plan::of(&[], BOUNDS, previous);
    assert!(!plan.is_recordable());
    assert_eq!(plan.dims.n_words(), 0);
    plan.write(&mut []);
}

#[test]
fn rows_that_take_part_keep_the_batchs_order() {
    let made = [
        made(0, Some(&[1, 2, 3]), 15, true),
        made(9, None, 33, true),
        made(1, None, 33, true),
        made(2, Some(&[4, 100]), 0, false),
        made(3, Some(&[6]), 16, true),
    ];
    with_rows(&made, |rows| {
        let plan = Plan::of(rows, BOUNDS, previous);
        let passing: Vec<_> = plan.passing(rows).map(|(row, input)| (row.slot.0, input)).collect();
        let one = |slot, input| (slot, Some(input));
        let expected = [(0, None), one(1, InputToken::Drawn(51)), one(3, InputToken::Token(6))];
        assert_eq!(passing, expected, "slot 9 has no token in flight, and slot 2 an unknown one");
        let mut written = vec![0; plan.dims.n_words()];
        plan.write(&mut written);
        assert_eq!(plan.words(), written);
    });
}
