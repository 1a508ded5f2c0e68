//! A timer that fires within microseconds, and the date for reports.

use std::time::Duration;

use rustix::io::Errno;
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};
use tokio::io::unix::AsyncFd;
use tokio::time::Instant;

/// A kernel timer, exact to the kernel's slack of 50 µs. The runtime's own timers round up to whole
/// milliseconds, which would make every request half a millisecond late.
#[derive(Debug)]
pub struct PreciseTimer {
    fd: AsyncFd<std::os::fd::OwnedFd>,
}

impl PreciseTimer {
    /// Makes a timer. Must be called inside a runtime.
    pub fn new() -> std::io::Result<Self> {
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let fd = rustix::time::timerfd_create(TimerfdClockId::Monotonic, flags)?;
        #[allow(
            deprecated,
            reason = "the safe form; what it cannot promise in general, an `OwnedFd` that is never replaced does"
        )]
        let fd = AsyncFd::new(fd)?;
        Ok(Self { fd })
    }

    /// Waits until `at`, or returns at once if it has passed. Cancel-safe: the next call sets the timer
    /// again.
    pub async fn until(&mut self, at: Instant) {
        loop {
            let left = at.saturating_duration_since(Instant::now());
            if left.is_zero() || self.fire_after(left).await.is_err() {
                return;
            }
        }
    }

    async fn fire_after(&mut self, left: Duration) -> std::io::Result<()> {
        let once = Itimerspec { it_interval: timespec(Duration::ZERO), it_value: timespec(left) };
        rustix::time::timerfd_settime(self.fd.get_ref(), TimerfdTimerFlags::empty(), &once)?;
        loop {
            let mut ready = self.fd.readable_mut().await?;
            match rustix::io::read(ready.get_inner(), &mut [0; 8]) {
                Err(Errno::AGAIN) => ready.clear_ready(),
                other => return other.map(|_| ()).map_err(Into::into),
            }
        }
    }
}

fn timespec(span: Duration) -> Timespec {
    Timespec { tv_sec: span.as_secs() as i64, tv_nsec: i64::from(span.subsec_nanos()) }
}

/// Returns the current date in UTC, as reports show it: `2026-03-01T12:00:00Z`.
#[allow(
    clippy::disallowed_methods,
    reason = "a report's date is the one thing here that is not a measurement"
)]
pub fn today() -> String {
    let since_epoch = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    show_date(since_epoch.map_or(0, |span| span.as_secs()))
}

/// Converts seconds since 1970 to a date and time, with Howard Hinnant's `civil_from_days`.
fn show_date(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (rest / 3_600, rest / 60 % 60, rest % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_civil() {
        assert_eq!(show_date(0), "1970-01-01T00:00:00Z");
        assert_eq!(show_date(951_827_696), "2000-02-29T12:34:56Z");
        assert_eq!(show_date(1_772_323_200), "2026-03-01T00:00:00Z");
    }

    #[tokio::test]
    async fn the_timer_never_fires_early_and_knows_the_past() {
        let mut timer = PreciseTimer::new().expect("a timer");
        for ms in [0, 1, 3] {
            let at = Instant::now() + Duration::from_millis(ms);
            tokio::time::timeout(Duration::from_secs(10), timer.until(at)).await.expect("it fires");
            assert!(Instant::now() >= at);
        }
    }

    #[tokio::test]
    async fn a_wait_given_up_does_not_shorten_the_next() {
        let mut timer = PreciseTimer::new().expect("a timer");
        let soon = Instant::now() + Duration::from_millis(1);
        let later = Instant::now() + Duration::from_millis(20);
        let given_up = tokio::time::timeout(Duration::from_millis(5), timer.until(later)).await;
        timer.until(soon).await;
        timer.until(later).await;
        assert!(given_up.is_err() || Instant::now() >= later);
        assert!(Instant::now() >= later);
    }
}
