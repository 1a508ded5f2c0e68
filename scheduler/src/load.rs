//! Learns the duration of a worker's steps from earlier steps, and predicts queueing times.

use std::time::Duration;

use tokio::time::Instant;
use types::{LearnedCosts, NodeLoad, PromptWork};

use crate::launched_step::StepRow;
use crate::sink::StepWork;

/// The weight of a new value in a decaying mean.
const NEWS: f64 = 0.05;
/// The variances below which a fit learns little: rows of a step, thousands of tokens of context, prompt tokens of a step,
/// and the thousands of tokens before them, summed. They keep a slope near its prior while steps are alike.
const ROWS_VARIANCE: f64 = 0.25;
const CONTEXT_VARIANCE: f64 = 0.25;
const TOKENS_VARIANCE: f64 = 256.0;
const BEFORE_VARIANCE: f64 = 256.0;

/// The largest share of the time of prompt tokens that the tokens before them may take in a fit.
const BEFORE_SHARE_MAX: f64 = 0.6;

/// The smallest number of prompt tokens in a step whose time predicts how long the next tokens take.
const STRETCH_TOKENS_MIN: usize = 64;
/// The shortest and the longest time of a prompt token that count, as multiples of the usual time.
const STRETCH_MIN: f64 = 0.9;
const STRETCH_MAX: f64 = 4.0;
/// The weight of a stretch that is lower than the known one.
const STRETCH_FALL: f64 = 0.2;
/// The smallest share of a step's prompt time that its tokens take, where their time is to be bounded. Steps with
/// nearly the same number of tokens hardly show the time of one token.
const TOKENS_SHARE_MIN: f64 = 0.5;
/// The number of prompt tokens of a first step whose time is to be bounded.
const PROMPT_TOKENS_FIRST: usize = 128;
/// The share of the time of prompt tokens after which the end of their step is expected.
const EARLY: f64 = 0.9;

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
    /// The number of tokens before each of them in its sequence, summed.
    pub n_before: u64,
    /// The number of tokens before the rows with one token, in all their sequences.
    pub n_context_tokens: usize,
}

/// The work of a worker up to the end of a step.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WorkDone {
    pub(crate) steps: u64,
    pub(crate) prefill_tokens: u64,
    /// The prompt tokens of the last step.
    pub(crate) last_prefill_tokens: u64,
    /// The duration of the last step.
    pub(crate) took: Duration,
    /// The number of rows with one token in the last step.
    pub(crate) rows: usize,
}

/// Predicts the time of a step from its size.
///
/// The time of steps without prompts is fitted by a plane over the number of rows and their context, with
/// decaying weights. The additional time of a step with prompts is fitted by a plane over its prompt tokens and the tokens
/// before them.
#[derive(Clone, Copy, Debug, Default)]
pub struct StepCosts {
    running: Plane,
    prompts: PromptPlane,
    stretch: Stretch,
    /// The largest number of prompt tokens in a step so far.
    prompt_tokens_most: usize,
}

/// The time of prompt tokens in steps with many, as a multiple of the predicted time.
#[derive(Clone, Copy, Debug)]
struct Stretch {
    last: f64,
    /// It follows a rise at once and a fall within some steps, so that few steps are longer than predicted.
    cautious: f64,
}

/// A mean in which older values count less and less.
#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    value: Option<f64>,
}

/// A plane through points (prompt tokens, thousands of tokens before them, milliseconds).
#[derive(Clone, Copy, Debug, Default)]
struct PromptPlane(Plane);

/// The time that prompts add to a step, in milliseconds.
#[derive(Clone, Copy, Debug, Default)]
struct PromptCosts {
    /// The same for any number of tokens.
    fixed_ms: f64,
    token_ms: f64,
    /// The additional time of a token for each 1,000 tokens before it.
    before_ms: f64,
}

/// A plane through points (rows, thousands of tokens of context, milliseconds).
#[derive(Clone, Copy, Debug, Default)]
struct Plane {
    x: Mean,
    z: Mean,
    y: Mean,
    xx: Mean,
    zz: Mean,
    xz: Mean,
    xy: Mean,
    zy: Mean,
}

// === impl StepShape, StepCosts ===

impl StepShape {
    pub(crate) fn of(rows: &[StepRow]) -> Self {
        let running = || rows.iter().filter(|row| !row.is_chunk());
        let chunks = rows.iter().filter(|row| row.is_chunk());
        let work = |row: &StepRow| PromptWork::of(row.n_before as u64..(row.n_before + row.n_tokens) as u64);
        let PromptWork { n_tokens, n_before } = chunks.map(work).sum();
        Self {
            n_running: running().count(),
            n_prefill_tokens: n_tokens as usize,
            n_before,
            n_context_tokens: running().map(|row| row.n_before).sum(),
        }
    }

    /// Returns a step that takes as long: the device multiplies `rows_together` rows together, and the last group of a step
    /// with prompts takes the time of a whole one. The rest counts as prompt tokens.
    pub(crate) fn filled_up(self, rows_together: usize) -> Self {
        if self.n_prefill_tokens == 0 {
            return self;
        }
        Self { n_prefill_tokens: self.n_rows().next_multiple_of(rows_together) - self.n_running, ..self }
    }

    pub(crate) fn n_rows(&self) -> usize {
        self.n_running + self.n_prefill_tokens
    }

    /// Returns the prompt tokens of the step.
    pub(crate) fn prompts(&self) -> PromptWork {
        PromptWork { n_tokens: self.n_prefill_tokens as u64, n_before: self.n_before }
    }
}

impl WorkDone {
    pub(crate) fn add(&mut self, shape: StepShape, took: Duration) {
        self.steps += 1;
        self.last_prefill_tokens = shape.n_prefill_tokens as u64;
        self.prefill_tokens += self.last_prefill_tokens;
        (self.took, self.rows) = (took, shape.n_running);
    }

    /// Returns the work since `before`; without it, the last step.
    pub(crate) fn since(&self, before: Option<Self>, preemptions: u32) -> StepWork {
        let (steps, prefill_tokens) = match before {
            Some(before) => (self.steps - before.steps, self.prefill_tokens - before.prefill_tokens),
            None => (self.steps.min(1), self.last_prefill_tokens),
        };
        StepWork {
            steps: steps as u32,
            prefill_tokens: prefill_tokens as u32,
            rows: self.rows as u32,
            took: self.took,
            preemptions,
        }
    }
}

impl StepCosts {
    pub fn observe(&mut self, step: StepShape, took: Duration) {
        let took_ms = took.as_secs_f64() * 1e3;
        let (rows, context) = (step.n_running as f64, step.n_context_tokens as f64 / 1e3);
        if step.n_prefill_tokens == 0 {
            let is_first = self.running.fixed().is_none();
            self.running.learn(rows, context, took_ms);
            if is_first {
                // The steps with prompts before it were learned with the fixed time of a step.
                self.prompts.shorten(self.running.at(0.0, 0.0));
            }
            return;
        }
        // On a node that decodes, this is the fixed time of a step if nothing runs. It is not counted as the prompt's:
        // remainders of a few tokens would make the node look slow.
        let without_prompt_ms = self.running.at(rows, context);
        let prompt_ms = (took_ms - without_prompt_ms).max(0.0);
        self.prompt_tokens_most = self.prompt_tokens_most.max(step.n_prefill_tokens);
        self.prompts.learn(step.prompts(), prompt_ms);
        let costs = self.prompts.costs(TOKENS_SHARE_MIN);
        let tokens_ms = costs.tokens_ms(step.prompts());
        if step.n_prefill_tokens >= STRETCH_TOKENS_MIN && tokens_ms > 0.0 {
            self.stretch.learn((prompt_ms - costs.fixed_ms) / tokens_ms);
        }
    }

    /// Returns the number of prompt tokens with which a step of this number of running sequences takes at most `step_ms`, if
    /// `n_before` tokens are before the first of them. It is at most twice the largest number so far, because the times
    /// of few tokens do not predict those of many.
    pub fn prompt_tokens_within(&self, step_ms: f64, n_running: usize, n_before: usize) -> usize {
        let known = (2 * self.prompt_tokens_most).max(PROMPT_TOKENS_FIRST);
        let costs = self.prompts.costs(TOKENS_SHARE_MIN);
        if costs.token_ms <= 0.0 {
            return known;
        }
        let tokens_ms = (step_ms - self.running_ms(n_running) - costs.fixed_ms) / self.stretch.cautious;
        costs.tokens_within(tokens_ms, n_before).min(known)
    }

    /// Returns the time that the prompt tokens of a step are expected to add to it, a little too short: a step that ends
    /// earlier than expected leaves the device idle.
    pub fn prompt_takes(&self, step: StepShape) -> Duration {
        let costs = self.prompts.costs(TOKENS_SHARE_MIN);
        let ms = costs.fixed_ms + costs.tokens_ms(step.prompts()) * self.stretch.last;
        Duration::from_secs_f64(EARLY * ms / 1e3)
    }

    /// Returns the predicted time of a step, in milliseconds.
    pub(crate) fn step_ms(&self, step: StepShape) -> f64 {
        let costs = self.prompts.costs(0.0);
        self.running_ms(step.n_running) + costs.fixed_ms + costs.tokens_ms(step.prompts())
    }

    /// Returns the predicted time of a step that has running sequences only, of the usual length, in
    /// milliseconds. Without any, it is the fixed time of a step.
    pub fn running_ms(&self, n_running: usize) -> f64 {
        let rows = n_running as f64;
        self.running.at(rows, rows * self.running.context_per_row())
    }

    /// Returns the predicted time until prompt tokens are computed beside `n_running` sequences, in milliseconds. `learned` is
    /// what the node reports.
    pub fn queue_ms(&self, work: PromptWork, n_running: usize, learned: &LearnedCosts) -> f64 {
        let costs = self.prompts.costs(0.0);
        let n_steps = learned.prompt_steps(work, u32::try_from(n_running).unwrap_or(u32::MAX));
        costs.tokens_ms(work) + n_steps * (costs.fixed_ms + self.running_ms(n_running))
    }

    /// Returns the node's report to routers. A step has at most `step_tokens_max` tokens, and ends within `gap_ms_max`
    /// if that is not zero.
    pub fn learned(&self, step_tokens_max: usize, gap_ms_max: f64) -> LearnedCosts {
        let costs = self.prompts.costs(0.0);
        let (row_ms, context_ms) = self.running.slopes();
        // Steps of a node that decodes have a fixed time of their own.
        let (step_ms, prompt_step_ms) = match self.running.fixed() {
            Some(step_ms) => (step_ms, costs.fixed_ms),
            None => (costs.fixed_ms, 0.0),
        };
        LearnedCosts {
            prompt_token_ms: costs.token_ms as f32,
            prompt_context_ms: costs.before_ms as f32,
            prompt_step_ms: prompt_step_ms as f32,
            step_ms: step_ms as f32,
            row_ms: row_ms as f32,
            context_ms: context_ms as f32,
            step_tokens: u32::try_from(step_tokens_max).unwrap_or(u32::MAX),
            gap_ms_max: gap_ms_max as f32,
        }
    }
}

// === impl Stretch, Mean, PromptPlane, PromptCosts, Plane ===

impl Default for Stretch {
    fn default() -> Self {
        Self { last: 1.0, cautious: 1.0 }
    }
}

impl Stretch {
    fn learn(&mut self, seen: f64) {
        self.last = seen.clamp(STRETCH_MIN, STRETCH_MAX);
        let fallen = self.cautious + STRETCH_FALL * (self.last - self.cautious);
        self.cautious = fallen.max(self.last);
    }
}

impl Mean {
    fn learn(&mut self, value: f64) {
        let known = self.value.unwrap_or(value);
        self.value = Some(known + NEWS * (value - known));
    }

    fn get(self) -> f64 {
        self.value.unwrap_or(0.0)
    }

    /// Moves all values that were learned.
    fn shift(&mut self, by: f64) {
        self.value = self.value.map(|value| value + by);
    }
}

impl PromptPlane {
    fn learn(&mut self, work: PromptWork, ms: f64) {
        self.0.learn(work.n_tokens as f64, work.n_before as f64 / 1e3, ms);
    }

    /// Makes all times that were learned shorter, though not negative on the mean.
    fn shorten(&mut self, ms: f64) {
        let Plane { x, z, y, xy, zy, .. } = &mut self.0;
        let ms = ms.min(y.get());
        xy.shift(-ms * x.get());
        zy.shift(-ms * z.get());
        y.shift(-ms);
    }

    /// Returns the fitted costs, none negative. The time of tokens is at least `share_min` of the mean time without the
    /// part of the tokens before them. While all steps are alike, all of this time counts as that of tokens.
    fn costs(&self, share_min: f64) -> PromptCosts {
        let (x, z, y) = (self.0.x.get(), self.0.z.get(), self.0.y.get());
        if x <= 0.0 {
            return PromptCosts::default();
        }
        let before_ms = self.before_ms();
        let rest = y - before_ms * z;
        let (of_x, of_xz) = (self.0.xx.get() - x * x, self.0.xz.get() - x * z);
        let covariance = self.0.xy.get() - x * y - before_ms * of_xz;
        let prior = rest / x;
        let slope = (covariance + TOKENS_VARIANCE * prior) / (of_x.max(0.0) + TOKENS_VARIANCE);
        let token_ms = slope.clamp(share_min * prior, prior);
        PromptCosts { fixed_ms: (rest - token_ms * x).max(0.0), token_ms, before_ms }
    }

    /// Returns the slope by the tokens before: that of the best plane, or of the best plane through the origin if the best one
    /// is negative there.
    fn before_ms(&self) -> f64 {
        let Plane { x, z, y, xx, zz, xz, xy, zy } = self.0;
        let (x, z, y) = (x.get(), z.get(), y.get());
        if z <= 0.0 {
            return 0.0;
        }
        let prior = y / x;
        let slopes = |center: f64| {
            let moment = |of: Mean, one: f64, other: f64| of.get() - center * one * other;
            let of_x = moment(xx, x, x).max(0.0) + TOKENS_VARIANCE;
            let of_z = moment(zz, z, z).max(0.0) + BEFORE_VARIANCE;
            let both = moment(xz, x, z);
            let by_x = moment(xy, x, y) - prior * (of_x - TOKENS_VARIANCE);
            let by_z = moment(zy, z, y) - prior * both;
            let determinant = of_x * of_z - both * both;
            (prior + (by_x * of_z - by_z * both) / determinant, (by_z * of_x - by_x * both) / determinant)
        };
        let (token_ms, before_ms) = slopes(1.0);
        let is_negative = y - token_ms * x - before_ms * z < 0.0;
        let before_ms = if is_negative { slopes(0.0).1 } else { before_ms };
        before_ms.clamp(0.0, BEFORE_SHARE_MAX * y / z)
    }
}

impl PromptCosts {
    fn tokens_ms(&self, work: PromptWork) -> f64 {
        work.takes_ms(self.token_ms, self.before_ms)
    }

    /// Returns the number of tokens that take this time, if `n_before` tokens are before the first of them. A negative time
    /// has no tokens.
    fn tokens_within(&self, ms: f64, n_before: usize) -> usize {
        let first_ms = self.token_ms + n_before as f64 / 1e3 * self.before_ms;
        let root = (first_ms * first_ms + 2.0 * self.before_ms / 1e3 * ms.max(0.0)).sqrt();
        (2.0 * ms / (first_ms + root)) as usize
    }
}

impl Plane {
    fn learn(&mut self, x: f64, z: f64, y: f64) {
        let pairs = [
            (&mut self.x, x),
            (&mut self.z, z),
            (&mut self.y, y),
            (&mut self.xx, x * x),
            (&mut self.zz, z * z),
            (&mut self.xz, x * z),
            (&mut self.xy, x * y),
            (&mut self.zy, z * y),
        ];
        pairs.into_iter().for_each(|(mean, value)| mean.learn(value));
    }

    fn at(&self, x: f64, z: f64) -> f64 {
        let (by_row, by_context) = self.slopes();
        (self.y.get() + by_row * (x - self.x.get()) + by_context * (z - self.z.get())).max(0.0)
    }

    /// Returns the value for no rows and no context; `None` while no step was seen.
    fn fixed(&self) -> Option<f64> {
        self.y.value.map(|_| self.at(0.0, 0.0))
    }

    fn context_per_row(&self) -> f64 {
        if self.x.get() > 0.0 { self.z.get() / self.x.get() } else { 0.0 }
    }

    /// Returns the slopes by rows and by context. A slope is never negative, because more work does not make
    /// a step shorter, and never steeper than a line through the origin, because a step has a fixed cost.
    fn slopes(&self) -> (f64, f64) {
        let (x, z, y) = (self.x.get(), self.z.get(), self.y.get());
        let of_rows = (self.xx.get() - x * x).max(0.0) + ROWS_VARIANCE;
        let of_context = (self.zz.get() - z * z).max(0.0) + CONTEXT_VARIANCE;
        let both = self.xz.get() - x * z;
        let (by_row, by_context) = (self.xy.get() - x * y, self.zy.get() - z * y);
        let determinant = of_rows * of_context - both * both;
        let bounded = |slope: f64, mean: f64| if mean > 0.0 { slope.clamp(0.0, y / mean) } else { 0.0 };
        (
            bounded((by_row * of_context - by_context * both) / determinant, x),
            bounded((by_context * of_rows - by_row * both) / determinant, z),
        )
    }
}

#[cfg(test)]
mod tests;
