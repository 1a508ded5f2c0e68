//! The rate at which a line is served, as far as it can be known.

use std::time::Duration;

use tokio::time::Instant;

/// The time in which the rate forgets: older service counts less.
const MEMORY: Duration = Duration::from_secs(10);

/// The time that prompts must have waited before there is a rate.
const KNOWN_AFTER: Duration = Duration::from_millis(250);

/// The work served per second while prompts wait. Time without waiting prompts does not count.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ServiceRate {
    work: f64,
    busy_s: f64,
    /// The time up to which `busy_s` counts, while prompts wait.
    waiting_since: Option<Instant>,
}

impl ServiceRate {
    /// Counts the time up to `now`. `n_waiting` prompts wait from `now` on.
    pub(super) fn advance(&mut self, now: Instant, n_waiting: usize) {
        if let Some(since) = self.waiting_since {
            let busy = now.saturating_duration_since(since).as_secs_f64();
            let kept = (-busy / MEMORY.as_secs_f64()).exp();
            self.work *= kept;
            self.busy_s = self.busy_s * kept + busy;
        }
        self.waiting_since = (n_waiting > 0).then_some(now);
    }

    /// Counts work that was served after a wait.
    pub(super) fn served(&mut self, work: u64) {
        self.work += work as f64;
    }

    /// Returns the work per second; `None` if it is not known yet.
    pub(super) fn per_second(&self) -> Option<f64> {
        (self.busy_s >= KNOWN_AFTER.as_secs_f64() && self.work > 0.0).then(|| self.work / self.busy_s)
    }

    /// Returns the time in which this much work is served; `None` if the rate is not known yet.
    pub(super) fn time_of(&self, work: u64) -> Option<Duration> {
        Duration::try_from_secs_f64(work as f64 / self.per_second()?).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_time_with_waiting_prompts_counts() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut rate = ServiceRate::default();
        rate.advance(at(0), 0);
        rate.advance(at(5_000), 1);
        rate.served(100);
        assert_eq!(rate.per_second(), None, "no time has passed yet");
        rate.advance(at(6_000), 0);
        rate.advance(at(60_000), 0);
        let per_second = rate.per_second().expect("a second has passed");
        assert!((85.0..=100.0).contains(&per_second), "{per_second}");
        let time = rate.time_of(200).expect("a rate");
        assert!((2.0..2.4).contains(&time.as_secs_f64()), "{time:?}");
    }

    #[test]
    fn the_rate_follows_a_change() {
        let start = Instant::now();
        let mut rate = ServiceRate::default();
        for second in 0..60 {
            rate.advance(start + Duration::from_secs(second), 1);
            rate.served(if second < 30 { 1_000 } else { 100 });
        }
        let per_second = rate.per_second().expect("a rate");
        assert!((100.0..200.0).contains(&per_second), "{per_second}");
    }
}
