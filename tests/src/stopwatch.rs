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
        let stood_still_before = seen().late;
        Self { began: Instant::now(), stood_still_before }
    }

    /// Returns the time since the start in which this process could run.
    pub fn elapsed(&self) -> Duration {
        self.began.elapsed().saturating_sub(self.stood_still())
    }

    /// Returns the time since the start in which this process could not run.
    pub fn stood_still(&self) -> Duration {
        seen().late.saturating_sub(self.stood_still_before)
    }

    /// Returns the longest time for which this process could not run, since its first stopwatch was started.
    pub fn longest_stop(&self) -> Duration {
        seen().longest
    }
}

/// What the thread has seen.
#[derive(Debug)]
struct Seen {
    at: Instant,
    /// The time by which the thread was late, if it was late by more than [`LOOK_EVERY`].
    late: Duration,
    /// The longest time by which it was late.
    longest: Duration,
}

impl Seen {
    fn first(now: Instant) -> Self {
        Self { at: now, late: Duration::ZERO, longest: Duration::ZERO }
    }

    /// Returns what a look at this time sees. A look that is not due yet is not late.
    fn next(&self, now: Instant) -> Self {
        let late = now.saturating_duration_since(self.at).saturating_sub(LOOK_EVERY);
        let late = if late > LOOK_EVERY { late } else { Duration::ZERO };
        Self { at: now, late: self.late + late, longest: self.longest.max(late) }
    }
}

/// `None` until the thread is started.
static SEEN: Mutex<Option<Seen>> = Mutex::new(None);

/// Returns what the thread sees now. The first call starts the thread.
fn seen() -> Seen {
    let mut seen = SEEN.lock().unwrap_or_else(PoisonError::into_inner);
    let now = Instant::now();
    let seen = seen.get_or_insert_with(|| {
        std::thread::spawn(look);
        Seen::first(now)
    });
    seen.next(now)
}

fn look() {
    loop {
        std::thread::sleep(LOOK_EVERY);
        let mut seen = SEEN.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        *seen = Some(seen.as_ref().map_or_else(|| Seen::first(now), |seen| seen.next(now)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_time_by_which_the_thread_is_late_is_left_out() {
        let at = Instant::now();
        let ms = Duration::from_millis;
        let seen = Seen { at, late: ms(5), longest: ms(12) };
        for (after, late, longest) in
            [(0, 5, 12), (10, 5, 12), (20, 5, 12), (21, 16, 12), (1_510, 1_505, 1_500)]
        {
            let next = seen.next(at + ms(after));
            assert_eq!((next.late, next.longest), (ms(late), ms(longest)), "{after}");
        }
    }

    #[test]
    fn a_process_that_runs_takes_its_time() {
        let (began, watch) = (Instant::now(), Stopwatch::start());
        std::thread::sleep(Duration::from_millis(200));
        assert!(watch.elapsed() <= began.elapsed());
    }
}
