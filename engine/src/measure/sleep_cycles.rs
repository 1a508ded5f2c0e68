//! Measures the time that a backend takes to sleep and to wake, the memory that it returns, and whether its
//! tokens stay the same.

use serde::Serialize;
use tokio::time::Instant;
use types::TokenId;

use super::sequences::{SequenceInput, Sequences};
use super::{MeasureError, prompts};
use crate::backend::Backend;
use crate::error::{BackendError, OpenError};
use crate::step::PendingStep;

/// The number of sequences that are computed before and after each sleep.
const N_SEQUENCES: usize = 4;
const PROMPT_TOKENS: usize = 100;
const N_STEPS: usize = 32;

/// One sleep and the following wake.
#[derive(Clone, Debug, Serialize)]
pub struct SleepCycle {
    pub sleep_s: f64,
    pub wake_s: f64,
    /// The [`Backend::used_bytes`] before the sleep, during it, and after waking.
    pub used_bytes: [Option<u64>; 3],
    /// The number of tokens that were compared with those before the first sleep.
    pub n_tokens: usize,
    pub are_equal: bool,
}

/// The reason why a cycle failed.
#[derive(Debug, thiserror::Error)]
pub enum SleepCycleError {
    #[error(transparent)]
    Measure(#[from] MeasureError),
    #[error("put the backend to sleep")]
    Sleep(#[source] BackendError),
    #[error("wake the backend")]
    Wake(#[source] OpenError),
}

/// Measures `n_cycles` cycles of sleep and wake. Calls `report_line` with one line for each.
pub fn measure(
    mut backend: Box<dyn Backend>,
    n_cycles: usize,
    report_line: &mut dyn FnMut(&str),
) -> Result<Vec<SleepCycle>, SleepCycleError> {
    let expected = tokens(backend.as_mut())?;
    let mut cycles = Vec::with_capacity(n_cycles);
    for _ in 0..n_cycles {
        let before = backend.used_bytes();
        let began = Instant::now();
        let asleep = backend.sleep().map_err(|failed| SleepCycleError::Sleep(failed.why))?;
        let (sleep_s, while_asleep) = (began.elapsed().as_secs_f64(), asleep.used_bytes());
        let began = Instant::now();
        backend = asleep.wake().map_err(|failed| SleepCycleError::Wake(failed.why))?;
        let wake_s = began.elapsed().as_secs_f64();
        let used_bytes = [before, while_asleep, backend.used_bytes()];
        let found = tokens(backend.as_mut())?;
        let cycle =
            SleepCycle { sleep_s, wake_s, used_bytes, n_tokens: found.len(), are_equal: found == expected };
        report_line(&cycle.line());
        cycles.push(cycle);
    }
    Ok(cycles)
}

/// Computes some prompts one by one and continues them together. Returns the tokens.
fn tokens(backend: &mut dyn Backend) -> Result<Vec<TokenId>, MeasureError> {
    let sequences = Sequences::new(backend, N_SEQUENCES, PROMPT_TOKENS, PROMPT_TOKENS + N_STEPS)?;
    for nth in 0..N_SEQUENCES {
        prompts::compute(backend, &sequences, nth, PROMPT_TOKENS, PROMPT_TOKENS)?;
    }
    let mut tokens = Vec::with_capacity(N_SEQUENCES * N_STEPS);
    for nth in 0..N_STEPS {
        // The first step names no token in flight, because the prompts were computed in steps of their own.
        let part = SequenceInput::Next { position: PROMPT_TOKENS + nth, is_in_flight: nth > 0 };
        let parts: Vec<(usize, SequenceInput)> = (0..N_SEQUENCES).map(|sequence| (sequence, part)).collect();
        let launched = sequences.launch(backend, &parts)?;
        tokens.extend(drawn(backend, launched)?);
    }
    Ok(tokens)
}

fn drawn(backend: &mut dyn Backend, step: PendingStep) -> Result<Vec<TokenId>, MeasureError> {
    let rows = backend.collect(step)?.rows;
    let rows: Vec<_> = rows.into_iter().collect::<Result<_, _>>()?;
    Ok(rows.into_iter().flatten().map(|sampled| sampled.token).collect())
}

impl SleepCycle {
    fn line(&self) -> String {
        let gib = |bytes: Option<u64>| bytes.map_or(f64::NAN, |bytes| bytes as f64 / (1u64 << 30) as f64);
        let [before, asleep, awake] = self.used_bytes.map(gib);
        format!(
            "asleep after {:.3} s, awake after {:.3} s; in use {before:.2} GiB, {asleep:.2} asleep, {awake:.2} awake; {} tokens {}",
            self.sleep_s,
            self.wake_s,
            self.n_tokens,
            if self.are_equal { "equal" } else { "NOT EQUAL" },
        )
    }
}
