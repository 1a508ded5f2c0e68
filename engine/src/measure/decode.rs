//! Measures decode steps. Each has the same number of sequences.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

use tokio::time::Instant;

use super::sequences::{SequenceInput, Sequences, collect, n_parts};
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

/// Measures the times between tokens. If the backend has several pipeline stages, the sequences are divided into as many
/// parts, and a step has one part. A part's next step is launched before its last one is collected.
fn steps(
    backend: &mut dyn Backend,
    sequences: &mut Sequences,
    rows: usize,
    context: usize,
) -> Result<Times, MeasureError> {
    let parts = parts(rows, n_parts(backend));
    let mut in_flight = VecDeque::with_capacity(parts.len() + 1);
    let mut times: Vec<Duration> = Vec::with_capacity(N_TIMED);
    let mut last = Instant::now();
    for nth in 0..=N_WARM + N_TIMED {
        for part in &parts {
            let input = SequenceInput::Next { position: context + nth, is_in_flight: nth > 0 };
            let rows: Vec<_> = part.clone().map(|sequence| (sequence, input)).collect();
            in_flight.push_back((part.clone(), sequences.launch(backend, &rows)?));
            if in_flight.len() > parts.len()
                && let Some((part, step)) = in_flight.pop_front()
            {
                sequences.accept(part.start, &collect(backend, step)?);
            }
        }
        // The tokens of the round before are there.
        let now = Instant::now();
        if nth > N_WARM {
            times.push(now - last);
        }
        last = now;
    }
    in_flight.into_iter().try_for_each(|(_, step)| collect(backend, step).map(drop))?;
    Ok(Times::of(times))
}

/// Divides sequences into at most `n_parts` parts.
fn parts(rows: usize, n_parts: usize) -> Vec<Range<usize>> {
    let part_rows = rows.div_ceil(n_parts).max(1);
    (0..rows).step_by(part_rows).map(|start| start..(start + part_rows).min(rows)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_have_all_sequences_once() {
        for (rows, n_parts, expected) in [
            (5, 1, &[(0, 5)][..]),
            (1, 2, &[(0, 1)]),
            (5, 2, &[(0, 3), (3, 5)]),
            (4, 4, &[(0, 1), (1, 2), (2, 3), (3, 4)]),
            (5, 4, &[(0, 2), (2, 4), (4, 5)]),
        ] {
            let found: Vec<_> = parts(rows, n_parts).iter().map(|part| (part.start, part.end)).collect();
            assert_eq!(found, expected);
        }
    }
}
