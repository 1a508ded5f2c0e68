//! The time to the first token, one prompt at a time.

use std::collections::VecDeque;

use tokio::time::Instant;

use super::sequences::{SequenceInput, Sequences, collect};
use super::{MeasureError, PromptTimes, Times};
use crate::backend::Backend;

const N_WARM: usize = 2;
const N_TIMES: usize = 7;

pub(super) fn measure(
    backend: &mut dyn Backend,
    prompt_tokens: usize,
    step_tokens: usize,
) -> Result<PromptTimes, MeasureError> {
    let sequences = Sequences::new(backend, 1, prompt_tokens, prompt_tokens)?;
    let mut times = Vec::with_capacity(N_TIMES);
    for nth in 0..N_WARM + N_TIMES {
        let started = Instant::now();
        compute(backend, &sequences, 0, prompt_tokens, step_tokens)?;
        if nth >= N_WARM {
            times.push(started.elapsed());
        }
    }
    Ok(PromptTimes { prompt_tokens, ttft_ms: Times::of(times) })
}

/// Computes a whole prompt in several steps, with as many in flight as the backend allows.
pub(super) fn compute(
    backend: &mut dyn Backend,
    sequences: &Sequences,
    sequence: usize,
    prompt_tokens: usize,
    step_tokens: usize,
) -> Result<(), MeasureError> {
    let mut in_flight = VecDeque::new();
    for start in (0..prompt_tokens).step_by(step_tokens.max(1)) {
        let end = (start + step_tokens).min(prompt_tokens);
        let next = sequences.launch(backend, &[(sequence, SequenceInput::Prompt { start, end })])?;
        in_flight.push_back(next);
        if in_flight.len() == backend.steps_in_flight_max()
            && let Some(step) = in_flight.pop_front()
        {
            collect(backend, step)?;
        }
    }
    in_flight.into_iter().try_for_each(|step| collect(backend, step).map(drop))
}
