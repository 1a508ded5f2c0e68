//! Learns the duration of a worker's steps from earlier steps, and predicts queueing times.

use std::time::Duration;

use tokio::time::Instant;
use types::NodeLoad;

use crate::launched_step::StepRow;
use crate::sink::StepWork;

/// The weight of a new value in a decaying mean.
const NEWS: f64 = 0.05;
/// The smallest variance of the number of rows from which the cost of one more row is derived.
const ROWS_VARIANCE_MIN: f64 = 0.25;

/// A worker's load, with further values for the watchdog and for reservations.
#[derive(Clone, Copy, Debug)]
pub struct WorkerLoad {
    pub node: NodeLoad,
    /// Blocks, in all groups, to leave free for growing sequences. Reservations for landings in the same pool
    /// leave them free.
    pub growth_reserve_blocks: u32,
    /// The time at which a step last ended, or the worker last had no work.
    pub last_progress: Instant,
    /// The time of this report. A worker reports on every turn, and once a second while idle. A worker that
    /// does not report is inside an engine step.
    pub last_turn: Instant,
}

/// The size of one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepShape {
    /// The number of rows with one token.
    pub n_running: usize,
    /// The number of tokens in longer rows.
    pub n_prefill_tokens: usize,
}

/// The work of a worker up to the end of a step.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WorkDone {
    pub(crate) steps: u64,
    pub(crate) prefill_tokens: u64,
    /// The duration of the last step.
    pub(crate) took: Duration,
    /// The number of rows with one token in the last step.
    pub(crate) rows: usize,
}

/// Predicts the time of a step from its size.
///
/// The time of steps without prompts is fitted by a line over the number of rows, with decaying weights. The
/// additional time of a step with prompts is the cost of the prompts.
#[derive(Clone, Copy, Debug, Default)]
pub struct StepCosts {
    running: Line,
    prefill_token_ms: Mean,
}

/// A mean in which older values count less and less.
#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    value: Option<f64>,
}

/// A line through points, in which older points count less and less.
#[derive(Clone, Copy, Debug, Default)]
struct Line {
    x: Mean,
    y: Mean,
    xx: Mean,
    xy: Mean,
}

// === impl StepShape, StepCosts ===

impl StepShape {
    pub(crate) fn of(rows: &[StepRow]) -> Self {
        let running = rows.iter().filter(|row| row.n_tokens == 1);
        let chunks = rows.iter().filter(|row| row.n_tokens != 1);
        Self { n_running: running.count(), n_prefill_tokens: chunks.map(|row| row.n_tokens).sum() }
    }
}

impl WorkDone {
    pub(crate) fn add(&mut self, shape: StepShape, took: Duration) {
        self.steps += 1;
        self.prefill_tokens += shape.n_prefill_tokens as u64;
        (self.took, self.rows) = (took, shape.n_running);
    }

    /// Returns the work since `before`; without it, the last step.
    pub(crate) fn since(&self, before: Option<Self>, preemptions: u32) -> StepWork {
        let (steps, prefill_tokens) =
            before.map_or((self.steps.saturating_sub(1), 0), |before| (before.steps, before.prefill_tokens));
        StepWork {
            steps: (self.steps - steps) as u32,
            prefill_tokens: (self.prefill_tokens - prefill_tokens) as u32,
            rows: self.rows as u32,
            took: self.took,
            preemptions,
        }
    }
}

impl StepCosts {
    pub fn observe(&mut self, step: StepShape, took: Duration) {
        let took_ms = took.as_secs_f64() * 1e3;
        if step.n_prefill_tokens == 0 {
            self.running.learn(step.n_running as f64, took_ms);
            return;
        }
        let of_prompts = (took_ms - self.running_ms(step.n_running)).max(0.0);
        self.prefill_token_ms.learn(of_prompts / step.n_prefill_tokens as f64);
    }

    /// Returns the predicted time of a step that has running sequences only, in milliseconds.
    pub fn running_ms(&self, n_running: usize) -> f64 {
        if n_running == 0 { 0.0 } else { self.running.at(n_running as f64) }
    }

    /// Returns the predicted time until `n_tokens` prompt tokens are computed beside `n_running` sequences,
    /// with at most `step_tokens_max` tokens per step, in milliseconds.
    pub fn queue_ms(&self, n_tokens: u64, n_running: usize, step_tokens_max: usize) -> f64 {
        let of_prompts = n_tokens as f64 * self.prefill_token_ms.get();
        let tokens_a_step = step_tokens_max.saturating_sub(n_running).max(1);
        let n_steps = n_tokens.div_ceil(tokens_a_step as u64);
        of_prompts + n_steps as f64 * self.running_ms(n_running)
    }
}

// === impl Mean, Line ===

impl Mean {
    fn learn(&mut self, value: f64) {
        let known = self.value.unwrap_or(value);
        self.value = Some(known + NEWS * (value - known));
    }

    fn get(self) -> f64 {
        self.value.unwrap_or(0.0)
    }
}

impl Line {
    fn learn(&mut self, x: f64, y: f64) {
        self.x.learn(x);
        self.y.learn(y);
        self.xx.learn(x * x);
        self.xy.learn(x * y);
    }

    fn at(&self, x: f64) -> f64 {
        (self.y.get() + self.slope() * (x - self.x.get())).max(0.0)
    }

    /// Returns the slope of the line. It is never negative, because one more row does not make a step
    /// shorter, and never steeper than a line through the origin, because a step has a fixed cost.
    fn slope(&self) -> f64 {
        let (x, y) = (self.x.get(), self.y.get());
        let variance = self.xx.get() - x * x;
        if variance < ROWS_VARIANCE_MIN {
            return 0.0;
        }
        ((self.xy.get() - x * y) / variance).clamp(0.0, y / x)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the time of a step: 5 ms, plus 0.1 ms per row and 0.05 ms per prompt token.
    fn took(n_running: usize, n_prefill_tokens: usize) -> Duration {
        Duration::from_secs_f64((5.0 + 0.1 * n_running as f64 + 0.05 * n_prefill_tokens as f64) / 1e3)
    }

    fn taught(steps: impl Iterator<Item = (usize, usize)>) -> StepCosts {
        let mut costs = StepCosts::default();
        for (n_running, n_prefill_tokens) in steps {
            costs.observe(StepShape { n_running, n_prefill_tokens }, took(n_running, n_prefill_tokens));
        }
        costs
    }

    fn about(value: f64, expected: f64) {
        assert!((value - expected).abs() <= 0.02 * expected.max(0.01), "{value} is not about {expected}");
    }

    #[test]
    fn nothing_is_known_at_first() {
        let costs = StepCosts::default();
        assert_eq!((costs.running_ms(8), costs.queue_ms(1000, 8, 512)), (0.0, 0.0));
    }

    #[test]
    fn rows_are_told_from_steps() {
        let costs = taught((0..400).map(|nth| (1 + nth % 20, 0)));
        about(costs.running_ms(1), 5.1);
        about(costs.running_ms(20), 7.0);
        about(costs.running_ms(40), 9.0);
    }

    #[test]
    fn steps_that_are_all_alike_say_nothing_of_one_row_more() {
        let costs = taught((0..100).map(|_| (10, 0)));
        about(costs.running_ms(11), 6.0);
    }

    #[test]
    fn prompts_cost_what_running_sequences_do_not() {
        let costs = taught((0..800).map(|nth| (1 + nth % 20, if nth % 2 == 0 { 0 } else { 200 })));
        about(costs.queue_ms(1000, 0, 512), 1000.0 * 0.05);
        about(costs.queue_ms(1000, 12, 512), 1000.0 * 0.05 + 2.0 * 6.2);
    }

    #[test]
    fn without_running_sequences_prompts_cost_everything() {
        let costs = taught((0..100).map(|_| (0, 500)));
        about(costs.queue_ms(1000, 0, 512), 2.0 * 30.0);
    }
}
