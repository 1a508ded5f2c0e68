//! The pause before a failed call is tried again.

use std::time::Duration;

const FIRST: Duration = Duration::from_millis(50);
/// The longest pause. It is short, so that members return soon after their registry, and long enough that a
/// thousand nodes do not overload a registry that is starting.
const LONGEST: Duration = Duration::from_secs(1);

/// Pauses that double up to a limit. Each pause is shortened by up to half at random, so that the nodes of a
/// cluster do not all reconnect at the same moment.
#[derive(Debug, Default)]
pub struct Backoff {
    n_failed: u32,
}

impl Backoff {
    /// Returns the pause after one more failure; `draw` is a random number.
    pub fn next(&mut self, draw: u64) -> Duration {
        let pause = FIRST.saturating_mul(1 << self.n_failed.min(16)).min(LONGEST);
        self.n_failed = self.n_failed.saturating_add(1);
        jittered(pause, draw)
    }

    /// Begins again with the shortest pause, after a success.
    pub fn reset(&mut self) {
        self.n_failed = 0;
    }

    /// Returns whether no failure has happened since the last success. Only the first failure of a row is
    /// logged as a warning.
    pub fn is_fresh(&self) -> bool {
        self.n_failed == 0
    }
}

/// Returns a random duration between half of `whole` and `whole`.
pub(crate) fn jittered(whole: Duration, draw: u64) -> Duration {
    whole.mul_f64(0.5 + 0.5 * (draw as f64 / u64::MAX as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_bound() {
        let mut backoff = Backoff::default();
        let pauses: Vec<u128> = (0..7).map(|_| backoff.next(u64::MAX).as_millis()).collect();
        assert_eq!(pauses, [50, 100, 200, 400, 800, 1000, 1000]);
        backoff.reset();
        assert_eq!(backoff.next(u64::MAX), FIRST);
    }

    #[test]
    fn a_draw_shortens_by_a_half_at_most() {
        for (draw, expected) in [(0, 25), (u64::MAX / 2, 37), (u64::MAX, 50)] {
            assert_eq!(Backoff::default().next(draw).as_millis(), expected, "draw {draw}");
        }
    }

    #[test]
    fn no_number_of_failures_overflows() {
        let mut backoff = Backoff { n_failed: u32::MAX };
        assert_eq!(backoff.next(u64::MAX), LONGEST);
    }
}
