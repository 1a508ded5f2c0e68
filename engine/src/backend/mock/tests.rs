//! Tests of the mock: it detects wrong KV, and its costs pass.

use types::{BlockIdx, GroupIdx, Sampling, StopRules, TokenId};

use super::*;
use crate::conformance::{self, BLOCKS_MIN};
use crate::error::RowError;
use crate::step::{Row, RowInput, SampleSpec};

const PROMPT: usize = 21;
const TABLE: [BlockIdx; 3] = [BlockIdx(4), BlockIdx(2), BlockIdx(9)];

fn mock(settings: MockSettings) -> Mock {
    Mock::new("mock", settings, BLOCKS_MIN, Pace::Modelled).expect("memory for a few blocks")
}

fn strict() -> Mock {
    mock(MockSettings { eos_one_in: 0, ..MockSettings::default() })
}

fn lenient() -> Mock {
    mock(MockSettings { verify: Verify::LastBlock, eos_one_in: 0, ..MockSettings::default() })
}

/// Computes `tokens` from `start` on and returns the row's outcome.
fn step(mock: &mut Mock, tokens: &[u32], start: usize) -> Result<TokenId, RowError> {
    step_with(mock, tokens, start, &TABLE)
}

fn step_with(mock: &mut Mock, tokens: &[u32], start: usize, table: &[BlockIdx]) -> Result<TokenId, RowError> {
    let tokens: Vec<TokenId> = tokens.iter().copied().map(TokenId).collect();
    let (sampling, stop) = (Sampling::default(), StopRules::default());
    let spec = SampleSpec {
        sampling: &sampling,
        stop: &stop,
        history: &tokens,
        n_prompt: PROMPT,
        index: 0,
        constraint: None,
    };
    let row = Row {
        slot: SlotId(1),
        input: RowInput::Tokens(&tokens[start..]),
        start,
        tables: &[table],
        prompt_logprobs: None,
        sample: Some(spec),
    };
    let launched = mock.launch(StepBatch { rows: &[row] }).expect("launch");
    let mut output = mock.collect(launched).expect("collect");
    output.rows.remove(0).map(|sampled| sampled.expect("a token was asked for").token)
}

fn prompt() -> Vec<u32> {
    (0..PROMPT as u32).map(|nth| 65 + nth).collect()
}

/// Computes a prompt. Returns the prompt and the next token, whose KV is not computed yet.
fn prefilled(mock: &mut Mock) -> Vec<u32> {
    let mut tokens = prompt();
    tokens.push(step(mock, &tokens, 0).expect("prefill").0);
    tokens
}

#[test]
fn conformance() {
    let settings = [
        MockSettings::default(),
        MockSettings { verify: Verify::LastBlock, ..MockSettings::default() },
        MockSettings {
            layout: LayoutSettings {
                block_tokens: 8,
                dtype: DtypeName::Bf16,
                head_dim: 9,
                ..Default::default()
            },
            ..MockSettings::default()
        },
    ];
    for settings in settings {
        conformance::suite(&|| Box::new(mock(settings.clone())));
    }
}

#[test]
fn ranks_keep_the_contract() {
    for ranks in [2, 4] {
        let ranks = NonZero::new(ranks).expect("some");
        let open = || Mock::over_ranks("mock", MockSettings::default(), ranks, BLOCKS_MIN, Pace::Modelled);
        conformance::suite(&|| Box::new(open().expect("memory for a few blocks")));
    }
}

#[test]
fn right_kv_is_read_without_complaint() {
    let mut mock = strict();
    let tokens = prefilled(&mut mock);
    step(&mut mock, &tokens, PROMPT).expect("decode");
}

#[test]
fn a_flipped_bit_is_noticed_in_every_layer_and_cell() {
    let mut mock = strict();
    let tokens = prefilled(&mut mock);
    let page_bytes = mock.memory.layout().page_bytes(mock.memory.layout().groups[0].layers[0]);
    for layer in 0..4u16 {
        for byte in (0..page_bytes).step_by(7) {
            flip(&mock, layer, 4, byte);
            assert!(
                matches!(step(&mut mock, &tokens, PROMPT), Err(RowError::KvMismatch { .. })),
                "{layer}:{byte}"
            );
            flip(&mock, layer, 4, byte);
        }
    }
    step(&mut mock, &tokens, PROMPT).expect("all is as it was");
}

fn flip(mock: &Mock, layer: u16, block: u32, byte: usize) {
    mock.memory.write(GroupIdx(0), layer, block..block + 1).expect("the page has no reader")[byte] ^= 4;
}

#[test]
fn what_is_not_of_the_sequence_is_not_verified() {
    let mut mock = strict();
    let tokens = prefilled(&mut mock);
    let cell_bytes = 32;
    flip(&mock, 0, 2, 5 * cell_bytes);
    step(&mut mock, &tokens, PROMPT).expect("position 21 lies in block 2 and is to be written, not read");
    flip(&mock, 0, 2, 4 * cell_bytes);
    let error = step(&mut mock, &tokens, PROMPT).expect_err("position 20 is the prompt's last");
    assert!(error.to_string().starts_with("kv checksum mismatch at layer 0, position 20"), "{error}");
}

#[test]
fn blocks_in_the_wrong_order_are_noticed() {
    let mut mock = strict();
    let tokens = prefilled(&mut mock);
    let swapped = [TABLE[1], TABLE[0], TABLE[2]];
    assert!(step_with(&mut mock, &tokens, PROMPT, &swapped).is_err());
}

#[test]
fn another_sequences_kv_is_noticed() {
    for mut mock in [strict(), lenient()] {
        let other: Vec<u32> = prompt().into_iter().map(|token| token + 1).collect();
        step(&mut mock, &other, 0).expect("the other one's prefill");
        let mut tokens = prompt();
        tokens.push(65);
        let error = step(&mut mock, &tokens, PROMPT).expect_err("whole KV, of other tokens");
        assert!(matches!(error, RowError::KvMismatch { what: "not this sequence's token", .. }), "{error}");
    }
}

#[test]
fn kv_that_never_came_is_noticed() {
    for mut mock in [strict(), lenient()] {
        let mut tokens = prompt();
        tokens.push(65);
        assert!(step(&mut mock, &tokens, PROMPT).is_err());
    }
}

#[test]
fn one_rows_failure_is_its_own() {
    let mut mock = strict();
    let (sampling, stop) = (Sampling::default(), StopRules::default());
    let tokens = [TokenId(70)];
    let spec = SampleSpec {
        sampling: &sampling,
        stop: &stop,
        history: &tokens,
        n_prompt: 1,
        index: 0,
        constraint: None,
    };
    let good = Row {
        slot: SlotId(1),
        input: RowInput::Tokens(&tokens),
        start: 0,
        tables: &[&TABLE[..1]],
        prompt_logprobs: None,
        sample: Some(spec),
    };
    let orphan = Row {
        slot: SlotId(2),
        input: RowInput::Previous,
        start: 1,
        tables: &[&TABLE[1..]],
        prompt_logprobs: None,
        sample: None,
    };
    let launched = mock.launch(StepBatch { rows: &[orphan, good] }).expect("launch");
    let output = mock.collect(launched).expect("collect");
    assert_eq!(output.rows[0], Err(RowError::NoTokenInFlight));
    assert!(matches!(output.rows[1], Ok(Some(_))));
}

#[test]
fn a_page_that_someone_reads_is_not_written() {
    let mut mock = strict();
    let memory = mock.memory.clone();
    let reading = memory.read(GroupIdx(0), 2, 2..3).expect("the page has no writer");
    let error = step(&mut mock, &prompt(), 0).expect_err("block 2 is read");
    assert!(matches!(error, RowError::Page { layer: 2, position: 16, .. }), "{error}");
    drop(reading);
    step(&mut mock, &prompt(), 0).expect("the reader has gone");
}

#[test]
fn steps_are_collected_in_order() {
    let mut mock = strict();
    let first = mock.launch(StepBatch { rows: &[] }).expect("launch");
    let second = mock.launch(StepBatch { rows: &[] }).expect("launch");
    assert!(matches!(mock.collect(second), Err(BackendError::Order(_))));
    mock.collect(first).expect("the first one is in flight still");
}

#[test]
fn costs_are_modelled_or_slept() {
    let cost = Costs { step_ms: 2.0, prefill_token_ms: 0.1, ..Costs::default() };
    let settings = MockSettings { cost, ..MockSettings::default() };
    let tokens: Vec<TokenId> = prompt().into_iter().map(TokenId).collect();
    let row = Row {
        slot: SlotId(1),
        input: RowInput::Tokens(&tokens),
        start: 0,
        tables: &[&TABLE],
        prompt_logprobs: None,
        sample: None,
    };
    for pace in [Pace::Modelled, Pace::Sleeping] {
        let mut mock = Mock::new("mock", settings.clone(), BLOCKS_MIN, pace).expect("memory");
        let started = Instant::now();
        let launched = mock.launch(StepBatch { rows: &[row] }).expect("launch");
        let expected = Duration::from_micros(4100);
        assert_eq!(launched.modelled_cost(), (pace == Pace::Modelled).then_some(expected));
        mock.collect(launched).expect("collect");
        assert!(pace == Pace::Modelled || started.elapsed() >= expected);
    }
}
