//! The worker's settings.

use std::time::Duration;

use engine::backend::STEPS_IN_FLIGHT_MAX;

use crate::error::SchedulerError;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SchedulerSettings {
    /// Tokens that one step computes at most. Larger: prompts are done sooner; smaller: running sequences are
    /// disturbed less.
    pub step_tokens_max: usize,
    /// Sequences that hold blocks for running, and rows of a step.
    pub sequences_max: usize,
    /// Fresh prompts that wait for room. More are refused.
    pub waiting_max: usize,
    /// Predicted work that may be queued before a fresh prompt. Beyond it, the prompt is refused: it waits better in
    /// the router, which may find another node.
    pub queue_ms_max: f64,
    /// The age from which a sequence goes before all younger ones, whatever their priority.
    pub age_bound: Duration,
    /// Blocks per group that admission leaves free for each running sequence, to grow into.
    pub growth_blocks: usize,
    /// 2 launches a step before the previous one is collected; 1 does not.
    pub steps_in_flight_max: usize,
    /// On a device that runs by itself, a step is launched shortly before the one before it ends, so that it takes the
    /// prompts that arrive meanwhile. Otherwise as soon as there is room for it.
    pub launch_late: bool,
}

impl Default for SchedulerSettings {
    fn default() -> Self {
        Self {
            step_tokens_max: 512,
            sequences_max: 256,
            waiting_max: 1024,
            queue_ms_max: 2000.0,
            age_bound: Duration::from_secs(10),
            growth_blocks: 2,
            steps_in_flight_max: STEPS_IN_FLIGHT_MAX,
            launch_late: true,
        }
    }
}

impl SchedulerSettings {
    /// Refuses settings under which something could wait for ever.
    pub fn check(&self, block_tokens: usize) -> Result<(), SchedulerError> {
        let refuse = |reason: String| Err(SchedulerError::Settings(reason));
        if self.sequences_max == 0 {
            return refuse("sequences_max is zero: nothing could run".to_owned());
        }
        if self.step_tokens_max < self.sequences_max + block_tokens {
            return refuse(format!(
                "step_tokens_max {} is less than sequences_max {} and a block of {block_tokens}: prompts could starve",
                self.step_tokens_max, self.sequences_max
            ));
        }
        if !(1..=STEPS_IN_FLIGHT_MAX).contains(&self.steps_in_flight_max) {
            return refuse(format!("steps_in_flight_max {} is not 1 or 2", self.steps_in_flight_max));
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
            (SchedulerSettings { step_tokens_max: 271, ..defaults }, "step_tokens_max 271 is less than"),
            (SchedulerSettings { steps_in_flight_max: 3, ..defaults }, "steps_in_flight_max 3"),
        ] {
            let error = settings.check(16).expect_err(expected).to_string();
            assert!(error.starts_with(&format!("scheduler settings: {expected}")), "{error}");
        }
    }
}
