//! Decode steps with a fixed number of rows, one after the other.

use std::time::Duration;

use tokio::time::Instant;

use super::lanes::{LaneInput, Lanes, collect};
use super::{DecodeTimes, MeasureError, Times, Workload, prompts};
use crate::backend::Backend;

/// The number of steps that are not timed, because the first steps of a size may record graphs.
const N_WARM: usize = 6;
const N_TIMED: usize = 40;

/// Returns the length of a sequence after all steps, if it starts with `context_tokens`.
pub(super) fn tokens_of_lane(context_tokens: usize) -> usize {
    context_tokens + N_WARM + N_TIMED + 1
}

/// Measures all batches, over contexts that are computed once.
pub(super) fn measure(
    backend: &mut dyn Backend,
    workload: &Workload,
    told: &mut dyn FnMut(&str),
) -> Result<Vec<DecodeTimes>, MeasureError> {
    let Some(n_lanes) = workload.batches.iter().max().copied() else { return Ok(Vec::new()) };
    let context = workload.context_tokens;
    let mut lanes = Lanes::new(backend, n_lanes, context, tokens_of_lane(context))?;
    for nth in 0..n_lanes {
        prompts::compute(backend, &lanes, nth, context, workload.step_tokens)?;
    }
    let mut all = Vec::with_capacity(workload.batches.len());
    for drawn_by in workload.draws.iter().copied() {
        lanes.draw_by(drawn_by);
        for rows in workload.batches.iter().copied() {
            let times = steps(backend, &lanes, rows, context)?;
            told(&format!("decode of {rows} rows at {context} tokens, {drawn_by}: {:.3} ms", times.median));
            all.push(DecodeTimes { rows, context_tokens: context, drawn_by, step_ms: times });
        }
    }
    Ok(all)
}

/// Measures the times between tokens. Each step is launched before the previous one is collected.
fn steps(
    backend: &mut dyn Backend,
    lanes: &Lanes,
    rows: usize,
    context: usize,
) -> Result<Times, MeasureError> {
    let parts = |nth: usize| -> Vec<(usize, LaneInput)> {
        let part = LaneInput::Next { position: context + nth, is_in_flight: nth > 0 };
        (0..rows).map(|lane| (lane, part)).collect()
    };
    let mut in_flight = lanes.launch(backend, &parts(0))?;
    let mut times: Vec<Duration> = Vec::with_capacity(N_TIMED);
    let mut last = Instant::now();
    for nth in 1..=N_WARM + N_TIMED {
        let next = lanes.launch(backend, &parts(nth))?;
        collect(backend, std::mem::replace(&mut in_flight, next))?;
        let now = Instant::now();
        if nth > N_WARM {
            times.push(now - last);
        }
        last = now;
    }
    collect(backend, in_flight)?;
    Ok(Times::of(times))
}
