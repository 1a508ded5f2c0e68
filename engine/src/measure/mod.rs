//! Measures a backend alone: decode steps, first tokens, and many concurrent requests.
//!
//! It uses the [`Backend`] like a scheduler: it launches the next step before it collects the last one, and
//! each token is the input of the next step before the host has read it.

mod decode;
mod sequences;
pub mod sleep_cycles;
mod offline;
mod prompts;

use std::fmt;
use std::time::Duration;

use serde::Serialize;
use types::Sampling;

use crate::backend::Backend;
use crate::error::{BackendError, RowError};

/// The measurements to make.
#[derive(Clone, Debug)]
pub struct Workload {
    /// The numbers of rows of the decode steps.
    pub batches: Vec<usize>,
    /// The sampling modes of the decode steps.
    pub draws: Vec<SamplingMode>,
    /// The number of tokens of each sequence before the first decode step.
    pub context_tokens: usize,
    /// Prompt lengths, measured with one request at a time.
    pub prompts: Vec<usize>,
    pub offline: Option<Offline>,
    /// The maximum number of tokens of a step, as in the backend's settings.
    pub step_tokens: usize,
}

/// Sampling modes with different costs on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum SamplingMode {
    /// The likeliest token.
    Greedy,
    /// A draw with a temperature and top-p 0.9.
    TopP,
    /// A draw like `TopP`, with penalties for earlier tokens, including the prompt's.
    Penalties,
    /// The likeliest token of those that continue a JSON object.
    Grammar,
}

impl SamplingMode {
    fn sampling(self) -> Sampling {
        let top_p = Sampling { temperature: 0.8, top_p: 0.9, seed: 1, ..Sampling::default() };
        match self {
            Self::Greedy | Self::Grammar => Sampling::default(),
            Self::TopP => top_p,
            Self::Penalties => Sampling { repetition_penalty: 1.1, presence_penalty: 0.2, ..top_p },
        }
    }
}

impl fmt::Display for SamplingMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Greedy => "greedy",
            Self::TopP => "temperature and top-p",
            Self::Penalties => "temperature, top-p and penalties",
            Self::Grammar => "greedy, with a grammar",
        })
    }
}

/// Requests that all arrive at the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Offline {
    pub n_requests: usize,
    pub prompt_tokens: usize,
    pub output_tokens: usize,
    /// The maximum number of concurrent sequences.
    pub rows_max: usize,
    /// The maximum number of tokens of a step.
    pub step_tokens: usize,
}

impl Offline {
    /// Returns the largest number of concurrent sequences.
    fn rows(&self) -> usize {
        self.rows_max.min(self.n_requests)
    }

    fn tokens_of_sequence(&self) -> usize {
        self.prompt_tokens + self.output_tokens
    }
}

impl Workload {
    /// Rejects measurements that need more KV memory, before they start.
    pub fn ensure_room(&self, backend: &dyn Backend) -> Result<(), MeasureError> {
        let prompts = self.prompts.iter().map(|prompt_tokens| (1, *prompt_tokens));
        let steps = self.batches.iter().map(|rows| (*rows, decode::tokens_of_sequence(self.context_tokens)));
        let offline = self.offline.iter().map(|offline| (offline.rows(), offline.tokens_of_sequence()));
        let mut all = prompts.chain(steps).chain(offline);
        all.try_for_each(|(n_sequences, n_tokens)| sequences::ensure_room(backend, n_sequences, n_tokens))
    }
}

/// The results of all measurements.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Measurements {
    pub decode: Vec<DecodeTimes>,
    pub prompts: Vec<PromptTimes>,
    pub offline: Option<OfflineTimes>,
}

/// The times of steps with one number of rows.
#[derive(Clone, Debug, Serialize)]
pub struct DecodeTimes {
    pub rows: usize,
    pub context_tokens: usize,
    pub drawn_by: SamplingMode,
    pub step_ms: Times,
}

/// The times of prompts of one length, from launch to the collected first token.
#[derive(Clone, Debug, Serialize)]
pub struct PromptTimes {
    pub prompt_tokens: usize,
    pub ttft_ms: Times,
}

#[derive(Clone, Debug, Serialize)]
pub struct OfflineTimes {
    pub of: Offline,
    pub seconds: f64,
    pub requests_per_s: f64,
    pub steps: usize,
}

/// The times of one measurement, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Times {
    pub median: f64,
    pub least: f64,
    pub p99: f64,
    pub n: usize,
}

/// The reason why a measurement failed.
#[derive(Debug, thiserror::Error)]
pub enum MeasureError {
    #[error(transparent)]
    Backend(#[from] BackendError),
    #[error("a row of the measurement failed")]
    Row(#[from] RowError),
    #[error("compile the measurement's grammar: {0}")]
    Grammar(String),
    #[error("{needed} blocks of KV are needed, but there are {found}: set --kv-memory higher")]
    Blocks { needed: usize, found: usize },
}

impl Times {
    /// Summarizes these times.
    ///
    /// # Panics
    /// If there are no times.
    fn of(mut times: Vec<Duration>) -> Self {
        times.sort_unstable();
        let ms = |nth: usize| times[nth].as_secs_f64() * 1e3;
        let last = times.len() - 1;
        Self { median: ms(times.len() / 2), least: ms(0), p99: ms(last * 99 / 100), n: times.len() }
    }
}

/// Makes all measurements. Calls `told` with one line for each.
pub fn measure(
    backend: &mut dyn Backend,
    workload: &Workload,
    told: &mut dyn FnMut(&str),
) -> Result<Measurements, MeasureError> {
    workload.ensure_room(backend)?;
    let mut measured = Measurements::default();
    for prompt_tokens in &workload.prompts {
        let times = prompts::measure(backend, *prompt_tokens, workload.step_tokens)?;
        told(&format!("prompt of {prompt_tokens}: {:.2} ms to the first token", times.ttft_ms.median));
        measured.prompts.push(times);
    }
    measured.decode = decode::measure(backend, workload, told)?;
    if let Some(offline) = workload.offline {
        let times = offline::measure(backend, offline)?;
        told(&format!("{} requests at once: {:.2} requests/s", offline.n_requests, times.requests_per_s));
        measured.offline = Some(times);
    }
    Ok(measured)
}

#[cfg(test)]
mod tests;
