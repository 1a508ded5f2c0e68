//! A backend that fails at chosen steps, for tests.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use kv_cache::KvMemory;
use types::ModelInfo;

use crate::backend::{Asleep, Backend, SleepFailed};
use crate::error::{BackendError, RowError};
use crate::step::{PendingStep, StepBatch, StepOutput};

/// Wraps a backend and fails chosen steps, counted from zero by the calls of `launch`.
#[derive(Debug)]
pub struct Flaky<B> {
    inner: B,
    n_launched: u64,
    n_collected: u64,
    failures: Failures,
    _end: SlowEnd,
}

/// Makes the end of the backend take this long.
#[derive(Debug)]
struct SlowEnd(Duration);

impl Drop for SlowEnd {
    fn drop(&mut self) {
        std::thread::sleep(self.0);
    }
}

/// The steps that fail, and their kind of failure.
#[derive(Clone, Debug, Default)]
pub struct Failures {
    /// The launches that fail: their steps do not start.
    pub launch: BTreeSet<u64>,
    /// The steps whose results are lost after they have run, counted by calls of `collect`.
    pub collect: BTreeSet<u64>,
    /// The steps whose rows fail, counted by calls of `collect`.
    pub rows: BTreeMap<u64, RowError>,
    /// The call of `collect` from which on the device is lost.
    pub lost_from: Option<u64>,
    /// The call of `collect` that panics.
    pub panic_at: Option<u64>,
    /// The calls of `collect` that return late, and by how much.
    pub hang: BTreeMap<u64, Duration>,
    /// How long the end of the backend takes.
    pub end_takes: Duration,
}

impl<B: Backend> Flaky<B> {
    pub fn new(inner: B, failures: Failures) -> Self {
        let end = SlowEnd(failures.end_takes);
        Self { inner, n_launched: 0, n_collected: 0, failures, _end: end }
    }
}

impl<B: Backend> Backend for Flaky<B> {
    fn model(&self) -> &ModelInfo {
        self.inner.model()
    }

    fn memory(&self) -> &KvMemory {
        self.inner.memory()
    }

    fn launch(&mut self, batch: StepBatch<'_>) -> Result<PendingStep, BackendError> {
        let nth = self.n_launched;
        self.n_launched += 1;
        if self.failures.launch.contains(&nth) {
            return Err(BackendError::Launch(format!("step {nth} was told to fail")));
        }
        self.inner.launch(batch)
    }

    fn collect(&mut self, step: PendingStep) -> Result<StepOutput, BackendError> {
        let nth = self.n_collected;
        self.n_collected += 1;
        let mut output = self.inner.collect(step)?;
        if let Some(late) = self.failures.hang.get(&nth) {
            std::thread::sleep(*late);
        }
        assert!(self.failures.panic_at != Some(nth), "step {nth} was told to panic");
        if self.failures.lost_from.is_some_and(|from| nth >= from) {
            return Err(BackendError::DeviceLost(format!("at step {nth}, as told")));
        }
        if self.failures.collect.contains(&nth) {
            return Err(BackendError::Collect(format!("step {nth} was told to fail")));
        }
        if let Some(error) = self.failures.rows.get(&nth) {
            output.rows.fill(Err(error.clone()));
        }
        Ok(output)
    }

    fn tokenizer_file(&self) -> Option<PathBuf> {
        self.inner.tokenizer_file()
    }

    fn prompt_top_max(&self) -> Option<u8> {
        self.inner.prompt_top_max()
    }

    fn steps_in_flight_max(&self) -> usize {
        self.inner.steps_in_flight_max()
    }

    fn rows_together(&self) -> usize {
        self.inner.rows_together()
    }

    fn runs_by_itself(&self) -> bool {
        self.inner.runs_by_itself()
    }

    /// Puts the wrapped backend to sleep. Faults do not apply after waking, because they are counted in
    /// steps.
    fn sleep(self: Box<Self>) -> Result<Box<dyn Asleep>, SleepFailed> {
        Box::new(self.inner).sleep()
    }

    fn used_bytes(&self) -> Option<u64> {
        self.inner.used_bytes()
    }
}
