//! One step over one sequence that has the backend for itself.

use types::{BlockIdx, Sampling, StopRules, TokenId};

use crate::backend::Backend;
use crate::step::{Row, RowInput, SampleSpec, SlotId, StepBatch};

/// The blocks of each group that the sequence has.
const N_BLOCKS: u32 = 60;

/// Computes `tokens` from position `start` on. Returns the next token, and the `n_top` best tokens with their
/// log-probabilities.
pub fn step(
    backend: &mut dyn Backend,
    tokens: &[TokenId],
    start: usize,
    n_top: u8,
) -> (TokenId, Vec<(TokenId, f32)>) {
    let n_groups = backend.model().layout.groups.len() as u32;
    let table = |group| (0..N_BLOCKS).map(|nth| BlockIdx(nth * n_groups + group)).collect();
    let tables: Vec<Vec<BlockIdx>> = (0..n_groups).map(table).collect();
    let tables: Vec<&[BlockIdx]> = tables.iter().map(Vec::as_slice).collect();
    let sampling = Sampling { logprobs: Some(n_top), ..Sampling::default() };
    let stop = StopRules::default();
    let sample = SampleSpec {
        sampling: &sampling,
        stop: &stop,
        history: &[],
        n_prompt: 0,
        index: 0,
        constraint: None,
    };
    let row = Row {
        slot: SlotId(1),
        input: RowInput::Tokens(tokens),
        start,
        tables: &tables,
        prompt_logprobs: None,
        sample: Some(sample),
    };
    let launched = backend.launch(StepBatch { rows: &[row] }).expect("launched");
    let output = backend.collect(launched).expect("collected");
    let sampled = output.rows[0].clone().expect("the row succeeds").expect("a token was asked for");
    (sampled.token, sampled.logprobs.expect("they were asked for").top)
}
