//! How long a backend takes to sleep and to wake, what memory that gives, and whether it says the same afterwards.

use serde::Serialize;
use tokio::time::Instant;
use types::TokenId;

use super::lanes::{Lanes, Part};
use super::{MeasureError, prompts};
use crate::backend::Backend;
use crate::error::{BackendError, OpenError};
use crate::step::Launched;

/// Sequences that are asked before and after.
const N_LANES: usize = 4;
const PROMPT_TOKENS: usize = 100;
const N_STEPS: usize = 32;

/// One sleep, and the waking after it.
#[derive(Clone, Debug, Serialize)]
pub struct Nap {
    pub sleep_s: f64,
    pub wake_s: f64,
    /// In use of the memory that it computes in, by anyone: before, asleep, and awake again.
    pub used_bytes: [Option<u64>; 3],
    /// Tokens that were compared with those before the first nap, and are the same.
    pub n_tokens: usize,
    pub are_equal: bool,
}

/// Why there was no nap.
#[derive(Debug, thiserror::Error)]
pub enum NapError {
    #[error(transparent)]
    Measure(#[from] MeasureError),
    #[error("it cannot sleep")]
    Sleep(#[source] BackendError),
    #[error("it cannot be woken")]
    Wake(#[source] OpenError),
}

/// So many naps, one after the other. `told` hears a line of each.
pub fn measure(
    mut backend: Box<dyn Backend>,
    n_naps: usize,
    told: &mut dyn FnMut(&str),
) -> Result<Vec<Nap>, NapError> {
    let expected = tokens(backend.as_mut())?;
    let mut naps = Vec::with_capacity(n_naps);
    for _ in 0..n_naps {
        let before = backend.used_bytes();
        let began = Instant::now();
        let asleep = backend.sleep().map_err(|sleepless| NapError::Sleep(sleepless.why))?;
        let (sleep_s, while_asleep) = (began.elapsed().as_secs_f64(), asleep.used_bytes());
        let began = Instant::now();
        backend = asleep.wake().map_err(|wakeless| NapError::Wake(wakeless.why))?;
        let wake_s = began.elapsed().as_secs_f64();
        let used_bytes = [before, while_asleep, backend.used_bytes()];
        let found = tokens(backend.as_mut())?;
        let nap = Nap { sleep_s, wake_s, used_bytes, n_tokens: found.len(), are_equal: found == expected };
        told(&nap.line());
        naps.push(nap);
    }
    Ok(naps)
}

/// What it says to some prompts: computed one by one, and continued together.
fn tokens(backend: &mut dyn Backend) -> Result<Vec<TokenId>, MeasureError> {
    let lanes = Lanes::new(backend, N_LANES, PROMPT_TOKENS, PROMPT_TOKENS + N_STEPS)?;
    for nth in 0..N_LANES {
        prompts::compute(backend, &lanes, nth, PROMPT_TOKENS, PROMPT_TOKENS)?;
    }
    let mut tokens = Vec::with_capacity(N_LANES * N_STEPS);
    for nth in 0..N_STEPS {
        // The first step has nothing before it that drew for all of them.
        let part = Part::Next { position: PROMPT_TOKENS + nth, is_in_flight: nth > 0 };
        let parts: Vec<(usize, Part)> = (0..N_LANES).map(|lane| (lane, part)).collect();
        let launched = lanes.launch(backend, &parts)?;
        tokens.extend(drawn(backend, launched)?);
    }
    Ok(tokens)
}

fn drawn(backend: &mut dyn Backend, step: Launched) -> Result<Vec<TokenId>, MeasureError> {
    let rows = backend.collect(step)?.rows;
    let rows: Vec<_> = rows.into_iter().collect::<Result<_, _>>()?;
    Ok(rows.into_iter().flatten().map(|sampled| sampled.token).collect())
}

impl Nap {
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
