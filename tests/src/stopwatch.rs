//! Measures how long something takes, without the moments in which the machine stood still.
//!
//! A machine of CI may stop all processes for a second or two. A limit that compares with a promise of the product would fail
//! then, although the product did what it promised.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// The interval at which a thread looks at the clock.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// A start time.
#[derive(Clone, Copy, Debug)]
pub struct Stopwatch {
    began: Instant,
    stood_still_before: Duration,
}

impl Stopwatch {
    pub fn start() -> Self {
        let stood_still_before = stood_still();
        Self { began: Instant::now(), stood_still_before }
    }

    /// Returns the time since the start in which this process could run.
    pub fn elapsed(&self) -> Duration {
        let stood_still = stood_still().saturating_sub(self.stood_still_before);
        self.began.elapsed().saturating_sub(stood_still)
    }
}

/// What the thread has seen.
#[derive(Debug)]
struct Seen {
    at: Instant,
    /// The time by which the thread was late, if it was late by more than [`LOOK_EVERY`].
    late: Duration,
}

impl Seen {
    /// Returns the time by which the thread is late so far. A look that is not due yet is not late.
    fn late_at(&self, now: Instant) -> Duration {
        let late = now.saturating_duration_since(self.at).saturating_sub(LOOK_EVERY);
        self.late + if late > LOOK_EVERY { late } else { Duration::ZERO }
    }
}

/// `None` until the thread is started.
static SEEN: Mutex<Option<Seen>> = Mutex::new(None);

/// Returns the time for which this process has stood still so far. The first call starts the thread.
fn stood_still() -> Duration {
    let mut seen = SEEN.lock().unwrap_or_else(PoisonError::into_inner);
    let now = Instant::now();
    let seen = seen.get_or_insert_with(|| {
        std::thread::spawn(look);
        Seen { at: now, late: Duration::ZERO }
    });
    seen.late_at(now)
}

fn look() {
    loop {
        std::thread::sleep(LOOK_EVERY);
        let mut seen = SEEN.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let late = seen.as_ref().map_or(Duration::ZERO, |seen| seen.late_at(now));
        *seen = Some(Seen { at: now, late });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_time_by_which_the_thread_is_late_is_left_out() {
        let at = Instant::now();
        let seen = Seen { at, late: Duration::from_millis(5) };
        for (after, late) in [(0, 5), (10, 5), (20, 5), (21, 16), (1_510, 1_505)] {
            assert_eq!(
                seen.late_at(at + Duration::from_millis(after)),
                Duration::from_millis(late),
                "{after}"
            );
        }
    }

    #[test]
    fn a_process_that_runs_takes_its_time() {
        let (began, watch) = (Instant::now(), Stopwatch::start());
        std::thread::sleep(Duration::from_millis(200));
        assert!(watch.elapsed() <= began.elapsed());
    }
}
