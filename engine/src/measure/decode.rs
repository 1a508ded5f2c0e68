//! Measures decode steps. Each has the same number of sequences.

use std::time::Duration;

use tokio::time::Instant;

use super::sequences::{SequenceInput, Sequences, collect};
use super::{DecodeTimes, MeasureError, Times, Workload, prompts};
use crate::backend::Backend;

/// The number of steps that are not timed, because the first steps of a size may record graphs.
const N_WARM: usize = 6;
const N_TIMED: usize = 40;

/// Returns the length of a sequence after all steps, if it starts with `context_tokens`.
pub(super) fn tokens_of_sequence(context_tokens: usize) -> usize {
    context_tokens + N_WARM + N_TIMED + 1
}

/// Measures all batches, over contexts that are computed once.
pub(super) fn measure(
    backend: &mut dyn Backend,
    workload: &Workload,
    told: &mut dyn FnMut(&str),
) -> Result<Vec<DecodeTimes>, MeasureError> {
    let Some(n_sequences) = workload.batches.iter().max().copied() else { return Ok(Vec::new()) };
    let context = workload.context_tokens;
    let mut sequences = Sequences::new(backend, n_sequences, context, tokens_of_sequence(context))?;
    for nth in 0..n_sequences {
        prompts::compute(backend, &sequences, nth, context, workload.step_tokens)?;
    }
    let mut all = Vec::with_capacity(workload.batches.len());
    for drawn_by in workload.draws.iter().copied() {
        for rows in workload.batches.iter().copied() {
            sequences.begin(drawn_by, backend.model().vocab)?;
            let times = steps(backend, &mut sequences, rows, context)?;
            told(&format!("decode of {rows} rows at {context} tokens, {drawn_by}: {:.3} ms", times.median));
            all.push(DecodeTimes { rows, context_tokens: context, drawn_by, step_ms: times });
        }
    }
    Ok(all)
}

/// Measures the times between tokens. Each step is launched before the previous one is collected.
fn steps(
    backend: &mut dyn Backend,
    sequences: &mut Sequences,
    rows: usize,
    context: usize,
) -> Result<Times, MeasureError> {
    let parts = |nth: usize| -> Vec<(usize, SequenceInput)> {
        let part = SequenceInput::Next { position: context + nth, is_in_flight: nth > 0 };
        (0..rows).map(|sequence| (sequence, part)).collect()
    };
    let mut in_flight = sequences.launch(backend, &parts(0))?;
    let mut times: Vec<Duration> = Vec::with_capacity(N_TIMED);
    let mut last = Instant::now();
    for nth in 1..=N_WARM + N_TIMED {
        let next = sequences.launch(backend, &parts(nth))?;
        sequences.accept(&collect(backend, std::mem::replace(&mut in_flight, next))?);
        let now = Instant::now();
        if nth > N_WARM {
            times.push(now - last);
        }
        last = now;
    }
    collect(backend, in_flight)?;
    Ok(Times::of(times))
}
