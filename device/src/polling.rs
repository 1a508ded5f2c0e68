//! Sleeps between two checks for an event that comes within milliseconds. Waking a sleeping thread through the system
//! takes longer.

use std::num::NonZeroU64;
use std::thread;
use std::time::Duration;

const SHORTEST: Duration = Duration::from_micros(10);
/// A check is late by at most this part of the whole wait.
const LATE_PART: u32 = 256;

/// Sleeps until the next check. `waited` is the time since the first one.
pub fn sleep(waited: Duration) {
    // Linux lengthens sleeps by up to 50 µs, unless the thread asks for exact ones. If it refuses, the check is later.
    let _ = rustix::thread::set_current_timer_slack(Some(NonZeroU64::MIN));
    thread::sleep((waited / LATE_PART).max(SHORTEST));
}
