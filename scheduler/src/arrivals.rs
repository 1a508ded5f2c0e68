//! Predicts when KV from other nodes is complete on this one.
//!
//! The receiver of KV reports how much is in place. The worker plans shorter steps with prompts when KV is about to
//! arrive, because the arrived sequence waits for the end of the running step, and its second token needs one more
//! step.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// The expected ends of all transfers whose first KV is in place. Clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct ExpectedArrivals(Arc<Mutex<Expected>>);

#[derive(Debug, Default)]
struct Expected {
    /// At most one per landing, which the node bounds.
    ends: BTreeMap<u64, Instant>,
    n_made: u64,
}

/// One transfer of KV to this node. Dropping it ends the expectation.
#[derive(Debug)]
pub struct ExpectedArrival {
    all: ExpectedArrivals,
    id: u64,
    /// The time at which the first KV was in place, and its share of the whole.
    first: Option<(Instant, f64)>,
}

impl ExpectedArrivals {
    pub(crate) fn begin(&self) -> ExpectedArrival {
        let mut expected = self.expected();
        expected.n_made += 1;
        ExpectedArrival { all: self.clone(), id: expected.n_made, first: None }
    }

    /// Returns the earliest expected end of a transfer; `None`: no KV is arriving. It may have passed.
    pub(crate) fn next(&self) -> Option<Instant> {
        self.expected().ends.values().min().copied()
    }

    fn expected(&self) -> MutexGuard<'_, Expected> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ExpectedArrival {
    /// Records that `received` of `total` pages are in place at `now`. The rest is expected at the rate so far. The
    /// time of the first pages gives no rate, so after them the rest is expected at once.
    pub fn progressed(&mut self, received: usize, total: usize, now: Instant) {
        if received == 0 {
            return;
        }
        let share = received as f64 / total.max(1) as f64;
        let (began, at_first) = *self.first.get_or_insert((now, share));
        let rest = match share > at_first {
            true => now.saturating_duration_since(began).mul_f64((1.0 - share).max(0.0) / (share - at_first)),
            false => Duration::ZERO,
        };
        self.all.expected().ends.insert(self.id, now + rest);
    }
}

impl Drop for ExpectedArrival {
    fn drop(&mut self) {
        self.all.expected().ends.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rest_is_expected_at_the_rate_so_far() {
        let (all, start) = (ExpectedArrivals::default(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        let mut slow = all.begin();
        for (what, received, ms, expected) in [
            ("nothing is in place", 0, 0, None),
            ("the first pages say nothing of the rest", 8, 10, Some(10)),
            ("half of the rest", 32, 40, Some(40 + 30)),
            ("all", 56, 90, Some(90)),
        ] {
            slow.progressed(received, 56, at(ms));
            assert_eq!(all.next(), expected.map(at), "{what}");
        }
        let mut other = all.begin();
        other.progressed(1, 4, at(95));
        assert_eq!(all.next(), Some(at(90)), "the earliest");
        drop(slow);
        assert_eq!(all.next(), Some(at(95)));
        drop(other);
        assert_eq!(all.next(), None);
    }
}
