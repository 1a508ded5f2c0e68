//! The settings of a worker.

use std::time::Duration;

use crate::error::SchedulerError;

/// The milliseconds of a day.
const DAY_MS: f64 = 86_400_000.0;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SchedulerSettings {
    /// The largest number of tokens in one step. A larger limit finishes prompts sooner; a smaller one
    /// disturbs running sequences less.
    pub step_tokens_max: usize,
    /// The longest gap between two tokens that prompts may cause, in milliseconds; zero: no limit. The learned costs predict
    /// how many prompt tokens a step can compute within the gap; a step gets at least a block. Steps without running
    /// sequences have the same limit, because KV from another node may arrive during them.
    pub gap_ms_max: f64,
    /// The largest number of sequences that hold blocks, and so of rows in a step.
    pub sequences_max: usize,
    /// The largest number of fresh prompts that wait for room. Further prompts are refused.
    pub waiting_max: usize,
    /// The largest predicted queueing time of a fresh prompt. Beyond it the prompt is refused, because the
    /// router may find another node.
    pub queue_ms_max: f64,
    /// The age from which a sequence comes before all younger ones, whatever their priority.
    pub age_bound: Duration,
    /// The blocks per group that admission leaves free for the growth of each running sequence.
    pub growth_blocks: usize,
    /// The largest number of launched steps, if the backend allows as many: with 2, a step is launched before the
    /// previous one is collected; with 1, after it.
    pub steps_in_flight_max: usize,
    /// If true, a step is launched shortly before the previous one ends, on a device that runs by itself, so
    /// that the step includes prompts that arrive meanwhile. If false, a step is launched as soon as there is
    /// room for it.
    pub launch_late: bool,
}

impl Default for SchedulerSettings {
    fn default() -> Self {
        Self {
            step_tokens_max: 512,
            gap_ms_max: 0.0,
            sequences_max: 256,
            waiting_max: 1024,
            queue_ms_max: 2000.0,
            age_bound: Duration::from_secs(10),
            growth_blocks: 2,
            steps_in_flight_max: usize::MAX,
            launch_late: true,
        }
    }
}

impl SchedulerSettings {
    /// Refuses settings that could make a sequence wait forever.
    pub fn check(&self, block_tokens: usize) -> Result<(), SchedulerError> {
        let refuse = |reason: String| Err(SchedulerError::Settings(reason));
        if self.sequences_max == 0 {
            return refuse("sequences_max is zero: nothing could run".to_owned());
        }
        if self.waiting_max == 0 {
            return refuse("waiting_max is zero: every prompt would be refused".to_owned());
        }
        if self.step_tokens_max < self.sequences_max + block_tokens {
            return refuse(format!(
                "step_tokens_max {} is less than sequences_max {} and a block of {block_tokens}: prompts could starve",
                self.step_tokens_max, self.sequences_max
            ));
        }
        if !(0.0..=DAY_MS).contains(&self.gap_ms_max) {
            return refuse(format!("gap_ms_max {} is not a duration of up to a day", self.gap_ms_max));
        }
        if self.queue_ms_max.is_nan() || self.queue_ms_max < 0.0 {
            return refuse(format!("queue_ms_max {} is not a duration", self.queue_ms_max));
        }
        if self.steps_in_flight_max == 0 {
            return refuse("steps_in_flight_max is zero: nothing could run".to_owned());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_could_starve_is_refused() {
        let defaults = SchedulerSettings::default();
        assert!(defaults.check(16).is_ok());
        for (settings, expected) in [
            (SchedulerSettings { sequences_max: 0, ..defaults }, "sequences_max is zero"),
            (SchedulerSettings { waiting_max: 0, ..defaults }, "waiting_max is zero"),
            (SchedulerSettings { step_tokens_max: 271, ..defaults }, "step_tokens_max 271 is less than"),
            (SchedulerSettings { gap_ms_max: -1.0, ..defaults }, "gap_ms_max -1 is not a duration"),
            (SchedulerSettings { gap_ms_max: f64::NAN, ..defaults }, "gap_ms_max NaN is not a duration"),
            (SchedulerSettings { gap_ms_max: 1e9, ..defaults }, "gap_ms_max 1000000000 is not a duration"),
            (SchedulerSettings { queue_ms_max: -1.0, ..defaults }, "queue_ms_max -1 is not a duration"),
            (SchedulerSettings { queue_ms_max: f64::NAN, ..defaults }, "queue_ms_max NaN is not a duration"),
            (SchedulerSettings { steps_in_flight_max: 0, ..defaults }, "steps_in_flight_max is zero"),
        ] {
            let error = settings.check(16).expect_err(expected).to_string();
            assert!(error.starts_with(&format!("scheduler settings: {expected}")), "{error}");
        }
    }
}
