//! Learns the duration of a worker's steps from earlier steps, and predicts queueing times.

use std::time::Duration;

use tokio::time::Instant;
use types::{LearnedCosts, NodeLoad};

use crate::launched_step::StepRow;
use crate::sink::StepWork;

/// The weight of a new value in a decaying mean.
const NEWS: f64 = 0.05;
/// The variances below which a fit learns little: rows of a step, thousands of tokens of context, and prompt
/// tokens of a step. They keep a slope near its prior while steps are alike.
const ROWS_VARIANCE: f64 = 0.25;
const CONTEXT_VARIANCE: f64 = 0.25;
const TOKENS_VARIANCE: f64 = 256.0;

/// The number of prompt tokens in a step from which their time says how long the next tokens take.
const STRETCH_TOKENS_MIN: usize = 64;
/// The shortest and the longest time of a prompt token that count, as multiples of the usual time.
const STRETCH_MIN: f64 = 0.9;
const STRETCH_MAX: f64 = 4.0;
/// The weight of a stretch that is lower than the known one.
const STRETCH_FALL: f64 = 0.2;
/// The smallest share of a step's prompt time that its tokens take, where their time is to be bounded. Steps with nearly the
/// same number of tokens say little of what one token takes.
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
    /// The number of tokens before the rows with one token, in all their sequences.
    pub n_context_tokens: usize,
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
/// The time of steps without prompts is fitted by a plane over the number of rows and their context, with
/// decaying weights. The additional time of a step with prompts is fitted by a line over its prompt tokens.
#[derive(Clone, Copy, Debug, Default)]
pub struct StepCosts {
    running: Plane,
    prompts: Line,
    stretch: Stretch,
    /// The largest number of prompt tokens in a step so far.
    prompt_tokens_most: usize,
}

/// The time of a prompt token in steps with many, as a multiple of the usual time. Tokens late in a long prompt take
/// longer, and the next step mostly goes on with the same prompt.
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

/// A line through points, in which older points count less and less.
#[derive(Clone, Copy, Debug, Default)]
struct Line {
    x: Mean,
    y: Mean,
    xx: Mean,
    xy: Mean,
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
        let running = || rows.iter().filter(|row| row.n_tokens == 1);
        let chunks = rows.iter().filter(|row| row.n_tokens != 1);
        Self {
            n_running: running().count(),
            n_prefill_tokens: chunks.map(|row| row.n_tokens).sum(),
            n_context_tokens: running().map(|row| row.n_before).sum(),
        }
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
        let (rows, context) = (step.n_running as f64, step.n_context_tokens as f64 / 1e3);
        if step.n_prefill_tokens == 0 {
            self.running.learn(rows, context, took_ms);
            return;
        }
        // On a node that decodes, this is the fixed time of a step if nothing runs. It is not counted as the prompt's:
        // remainders of a few tokens would make the node look slow.
        let without_prompt_ms = self.running.at(rows, context);
        let prompt_ms = (took_ms - without_prompt_ms).max(0.0);
        self.prompt_tokens_most = self.prompt_tokens_most.max(step.n_prefill_tokens);
        self.prompts.learn(step.n_prefill_tokens as f64, prompt_ms);
        let (token_ms, fixed_ms) = self.prompts.with_share(TOKENS_SHARE_MIN);
        if step.n_prefill_tokens >= STRETCH_TOKENS_MIN && token_ms > 0.0 {
            self.stretch.learn((prompt_ms - fixed_ms) / (step.n_prefill_tokens as f64 * token_ms));
        }
    }

    /// Returns the number of prompt tokens with which a step of this number of running sequences takes at most
    /// `step_ms`. It is at most twice the largest number so far: the times of few tokens say little of many.
    pub fn prompt_tokens_within(&self, step_ms: f64, n_running: usize) -> usize {
        let known = (2 * self.prompt_tokens_most).max(PROMPT_TOKENS_FIRST);
        let (token_ms, fixed_ms) = self.prompts.with_share(TOKENS_SHARE_MIN);
        let token_ms = token_ms * self.stretch.cautious;
        if token_ms <= 0.0 {
            return known;
        }
        // A negative number of tokens becomes zero.
        let n_tokens = (step_ms - self.running_ms(n_running) - fixed_ms) / token_ms;
        (n_tokens as usize).min(known)
    }

    /// Returns the time that prompt tokens are expected to add to a step, a little too short: a step that ends earlier
    /// than expected leaves the device idle.
    pub fn prompt_takes(&self, n_tokens: usize) -> Duration {
        let (token_ms, fixed_ms) = self.prompts.with_share(TOKENS_SHARE_MIN);
        let ms = fixed_ms + n_tokens as f64 * token_ms * self.stretch.last;
        Duration::from_secs_f64(EARLY * ms / 1e3)
    }

    /// Returns the predicted time of a step that has running sequences only, of the usual length, in
    /// milliseconds. Without any, it is the fixed time of a step.
    pub fn running_ms(&self, n_running: usize) -> f64 {
        let rows = n_running as f64;
        self.running.at(rows, rows * self.running.context_per_row())
    }

    /// Returns the predicted time until `n_tokens` prompt tokens are computed beside `n_running` sequences,
    /// with at most `step_tokens_max` tokens per step, in milliseconds.
    pub fn queue_ms(&self, n_tokens: u64, n_running: usize, step_tokens_max: usize) -> f64 {
        let (token_ms, step_ms) = self.prompts.through_zero();
        let tokens_a_step = step_tokens_max.saturating_sub(n_running).max(1);
        let n_steps = n_tokens.div_ceil(tokens_a_step as u64);
        n_tokens as f64 * token_ms + n_steps as f64 * (step_ms + self.running_ms(n_running))
    }

    /// Returns what the node reports to routers.
    pub fn learned(&self, step_tokens_max: usize) -> LearnedCosts {
        let (token_ms, prompt_step_ms) = self.prompts.through_zero();
        let (row_ms, context_ms) = self.running.slopes();
        let step_ms = self.running.fixed().unwrap_or(prompt_step_ms);
        LearnedCosts {
            prompt_token_ms: token_ms as f32,
            step_ms: step_ms as f32,
            row_ms: row_ms as f32,
            context_ms: context_ms as f32,
            step_tokens: u32::try_from(step_tokens_max).unwrap_or(u32::MAX),
            gap_ms_max: 0.0,
        }
    }
}

// === impl Stretch, Mean, Line, Plane ===

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
}

impl Line {
    fn learn(&mut self, x: f64, y: f64) {
        self.x.learn(x);
        self.y.learn(y);
        self.xx.learn(x * x);
        self.xy.learn(x * y);
    }

    /// Returns the slope and the value at zero, neither negative. While all points are alike, the line goes
    /// through the origin.
    fn through_zero(&self) -> (f64, f64) {
        self.with_share(0.0)
    }

    /// The same, where the slope makes at least this share of the mean value.
    fn with_share(&self, share_min: f64) -> (f64, f64) {
        let (x, y) = (self.x.get(), self.y.get());
        if x <= 0.0 {
            return (0.0, 0.0);
        }
        let prior = y / x;
        let (variance, covariance) = (self.xx.get() - x * x, self.xy.get() - x * y);
        let slope = (covariance + TOKENS_VARIANCE * prior) / (variance.max(0.0) + TOKENS_VARIANCE);
        let slope = slope.clamp(share_min * prior, prior);
        (slope, (y - slope * x).max(0.0))
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
mod tests {
    use super::*;

    /// Returns the time of a step: 5 ms, plus 0.1 ms per row and 0.05 ms per prompt token.
    fn took(n_running: usize, n_prefill_tokens: usize) -> Duration {
        Duration::from_secs_f64((5.0 + 0.1 * n_running as f64 + 0.05 * n_prefill_tokens as f64) / 1e3)
    }

    fn taught(steps: impl Iterator<Item = (usize, usize)>) -> StepCosts {
        let mut costs = StepCosts::default();
        for (n_running, n_prefill_tokens) in steps {
            let shape = StepShape { n_running, n_prefill_tokens, n_context_tokens: 0 };
            costs.observe(shape, took(n_running, n_prefill_tokens));
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
        about(costs.queue_ms(1000, 0, 512), 1000.0 * 0.05 + 2.0 * 5.0);
        about(costs.queue_ms(1000, 12, 512), 1000.0 * 0.05 + 2.0 * 6.2);
    }

    /// A decode node computes what its cache lacks of a prompt, often while nothing else runs.
    #[test]
    fn short_remainders_do_not_make_a_decode_node_look_slow() {
        let steps = (0..800).map(|nth| match nth % 4 {
            0 => (0, 4 + nth % 9),
            _ => (1 + nth % 20, 0),
        });
        let costs = taught(steps);
        let token_ms = costs.learned(512).prompt_token_ms;
        assert!((0.04..0.06).contains(&token_ms), "{token_ms} ms for each token");
        about(costs.queue_ms(8, 0, 512), 5.0 + 8.0 * 0.05);
    }

    #[test]
    fn prompts_get_the_tokens_that_fit_into_a_gap() {
        let mut costs = taught((0..800).map(|nth| (1 + nth % 20, if nth % 2 == 0 { 0 } else { 200 })));
        for (gap_ms, n_running, expected) in
            [(20.0, 10, 280), (16.0, 40, 140), (50.0, 10, 400), (9.0, 40, 0), (2.0, 10, 0)]
        {
            let n_tokens = costs.prompt_tokens_within(gap_ms, n_running);
            assert!(n_tokens.abs_diff(expected) <= 12, "{gap_ms} ms beside {n_running}: {n_tokens} tokens");
        }
        // Tokens late in a long prompt take twice the time.
        costs.observe(StepShape { n_running: 10, n_prefill_tokens: 200, n_context_tokens: 0 }, took(10, 400));
        assert!((110..170).contains(&costs.prompt_tokens_within(20.0, 10)), "{costs:?}");
        for _ in 0..300 {
            costs.observe(
                StepShape { n_running: 10, n_prefill_tokens: 200, n_context_tokens: 0 },
                took(10, 200),
            );
        }
        assert!((260..300).contains(&costs.prompt_tokens_within(20.0, 10)), "it falls again: {costs:?}");
        let unknown = StepCosts::default().prompt_tokens_within(20.0, 10);
        assert_eq!(unknown, PROMPT_TOKENS_FIRST, "the first prompt tells its time");
    }

    /// Late tokens of a long prompt take longer, so fewer tokens may take as long as more.
    #[test]
    fn a_step_has_no_end_of_tokens_because_none_seemed_to_cost_time() {
        let mut costs = StepCosts::default();
        for nth in 0..800 {
            let (n_prefill_tokens, ms) = [(0, 5.0), (752, 20.0), (0, 5.0), (496, 21.0)][nth % 4];
            let shape = StepShape { n_running: 2, n_prefill_tokens, n_context_tokens: 0 };
            costs.observe(shape, Duration::from_secs_f64(ms / 1e3));
        }
        let n_tokens = costs.prompt_tokens_within(20.0, 2);
        assert!((300..800).contains(&n_tokens), "{n_tokens} tokens: {costs:?}");
    }

    #[test]
    fn without_running_sequences_prompts_cost_everything() {
        let costs = taught((0..100).map(|_| (0, 500)));
        about(costs.queue_ms(1000, 0, 512), 2.0 * 30.0);
    }

    /// The steps of a prefill node have no running sequences: their fixed time shows in prompts of several
    /// lengths.
    #[test]
    fn a_prefill_node_reports_tokens_and_steps_apart() {
        let costs = taught((0..400).map(|nth| (0, 32 + nth % 7 * 64))).learned(512);
        about(costs.prompt_token_ms.into(), 0.05);
        about(costs.step_ms.into(), 5.0);
        about(costs.prompt_ms(1024), 1024.0 * 0.05 + 2.0 * 5.0);
        assert_eq!(LearnedCosts::default().prompt_ms(1024), 0.0, "nothing is known");
    }

    /// A router refuses a report with a negative duration, even one from rounding.
    #[test]
    fn no_reported_duration_is_negative() {
        for n_tokens in 1..600 {
            let learned = taught((0..40).map(|_| (0, n_tokens))).learned(512);
            let all = [learned.prompt_token_ms, learned.step_ms, learned.row_ms, learned.context_ms];
            assert!(all.iter().all(|ms| *ms >= 0.0), "{n_tokens} tokens: {learned:?}");
        }
    }

    #[test]
    fn context_is_told_from_rows() {
        let mut costs = StepCosts::default();
        for nth in 0..2000 {
            let (n_running, n_context_tokens) = (1 + nth % 20, nth % 13 * 4_000);
            let took = took(n_running, 0) + Duration::from_micros(50 * n_context_tokens as u64 / 1_000);
            costs.observe(StepShape { n_running, n_prefill_tokens: 0, n_context_tokens }, took);
        }
        let learned = costs.learned(512);
        about(learned.row_ms.into(), 0.1);
        about(learned.context_ms.into(), 0.05);
        about(learned.step_ms.into(), 5.0);
    }
}
