//! How long before the end of the running step the next step is launched.
//!
//! If a step is always queued behind the running one, a new prompt waits for the end of two steps. A step
//! that is launched shortly before the running one ends costs the device nothing, and includes the prompts
//! that arrived meanwhile. A step with prompts is launched earlier by the time that its launch takes, because it has
//! no recorded graph. The lead is adapted to the time that the running step had left when the next one
//! was queued. See `docs/decisions/0014-launch-late.md`.

use std::time::Duration;

use tokio::time::Instant;

/// The smallest safe margin. With less, a slightly slower thread would let the device idle.
const TIGHT: Duration = Duration::from_micros(100);
const FIRST: Duration = Duration::from_millis(2);
const LEAST: Duration = Duration::from_micros(200);
const MOST: Duration = Duration::from_millis(50);
/// The increase of the lead after a tight launch. Every other launch decreases it by `NARROWER`.
const WIDER: Duration = Duration::from_micros(256);
const NARROWER: Duration = Duration::from_micros(4);
/// The longest launch of a step with prompts that counts. The first one may compile kernels.
const PROMPT_LAUNCH_MOST: Duration = Duration::from_millis(5);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LaunchLead(Duration);

/// The mean time that the launch of a step with prompts takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PromptLaunch(Duration);

/// The best times to launch a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LaunchTimes {
    pub(crate) with_prompts: Instant,
    pub(crate) without_prompts: Instant,
}

impl Default for LaunchLead {
    fn default() -> Self {
        Self(FIRST)
    }
}

impl LaunchLead {
    /// Returns the time to launch the next step if the running one ends at `end`.
    pub(crate) fn before(self, end: Instant) -> Option<Instant> {
        end.checked_sub(self.0)
    }

    /// Adapts the lead to the time `spare` that the running step had left. Returns whether that time was too
    /// short.
    pub(crate) fn learn(&mut self, spare: Duration) -> bool {
        let is_tight = spare < TIGHT;
        let next = if is_tight { self.0 + WIDER } else { self.0.saturating_sub(NARROWER) };
        self.0 = next.clamp(LEAST, MOST);
        is_tight
    }
}

impl PromptLaunch {
    /// Returns the time to launch a step with prompts if one without is launched best at `other`.
    pub(crate) fn before(self, other: Instant) -> Option<Instant> {
        other.checked_sub(self.0)
    }

    pub(crate) fn learn(&mut self, took: Duration) {
        self.0 = (self.0 * 7 + took.min(PROMPT_LAUNCH_MOST)) / 8;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates steps of 6 ms or up to `jitter` less. Returns the lead, and the number of tight launches
    /// among the last thousand.
    fn after(jitter: Duration, launch_takes: Duration) -> (Duration, usize) {
        let mut lead = LaunchLead::default();
        let mut n_tight = 0;
        for nth in 0..4000_u32 {
            let early = jitter * (nth * 7919 % 1000) / 1000;
            let is_tight = lead.learn(lead.0.saturating_sub(launch_takes).saturating_sub(early));
            n_tight += usize::from(is_tight && nth >= 3000);
        }
        (lead.0, n_tight)
    }

    #[test]
    fn it_is_as_short_as_the_device_allows() {
        for (jitter_us, launch_us, least_us, most_us) in
            [(0, 50, 200, 420), (0, 400, 480, 780), (500, 100, 650, 980), (3000, 200, 3000, 3600)]
        {
            let (lead, n_tight) = after(Duration::from_micros(jitter_us), Duration::from_micros(launch_us));
            let (least, most) = (Duration::from_micros(least_us), Duration::from_micros(most_us));
            assert!((least..=most).contains(&lead), "{lead:?} for {jitter_us} and {launch_us} us");
            assert!(n_tight <= 20, "{n_tight} of 1000 were tight");
        }
    }

    #[test]
    fn launches_of_prompts_are_averaged_and_long_ones_cut() {
        let (mut launch, now) = (PromptLaunch::default(), Instant::now() + Duration::from_secs(1));
        launch.learn(Duration::from_secs(3));
        assert_eq!(launch.before(now), Some(now - PROMPT_LAUNCH_MOST / 8));
        (0..100).for_each(|_| launch.learn(Duration::from_micros(800)));
        let ahead = now - launch.before(now).expect("not so early");
        assert!((790..=810).contains(&ahead.as_micros()), "{ahead:?}");
    }

    #[test]
    fn it_has_bounds() {
        let mut lead = LaunchLead::default();
        (0..10_000).for_each(|_| assert!(lead.learn(Duration::ZERO)));
        assert_eq!(lead.0, MOST);
        (0..100_000).for_each(|_| assert!(!lead.learn(Duration::from_secs(1))));
        assert_eq!(lead.0, LEAST);
    }
}
