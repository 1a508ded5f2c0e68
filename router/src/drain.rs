//! How a router stops: readiness goes first, then the listener, then the requests that still run.

use std::time::Duration;

use chassis::Shutdown;
use tokio::time::Instant;
use tracing::info;

/// The phases of a router's stop. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Drain {
    /// The router was asked to stop: `/ready` says no. Requests are still served, until balancers have noticed.
    pub requested: Shutdown,
    /// New requests are no longer taken.
    pub closing: Shutdown,
    /// Requests that still run end with `draining`.
    pub over: Shutdown,
}

/// How long the phases take, from the request to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DrainTimes {
    /// Until the listener closes. At most `whole`.
    pub notice: Duration,
    /// Until requests that still run are ended.
    pub whole: Duration,
}

impl Drain {
    /// Goes through the phases once `requested` is.
    pub(crate) async fn run(self, times: DrainTimes) {
        self.requested.wait().await;
        let began = Instant::now();
        let (notice, whole) = (times.notice.min(times.whole), times.whole);
        info!(notice_ms = notice.as_millis() as u64, drain_ms = whole.as_millis() as u64, "draining");
        tokio::time::sleep_until(began + notice).await;
        self.closing.trigger();
        tokio::time::sleep_until(began + whole).await;
        info!("drain is over, requests that still run are ended");
        self.over.trigger();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Which phases have begun after this number of milliseconds.
    async fn phases(notice_ms: u64, whole_ms: u64, after_ms: u64) -> (bool, bool, bool) {
        let (drain, ms) = (Drain::default(), Duration::from_millis);
        drain.requested.trigger();
        let times = DrainTimes { notice: ms(notice_ms), whole: ms(whole_ms) };
        let _ = tokio::time::timeout(ms(after_ms), drain.clone().run(times)).await;
        (drain.requested.requested(), drain.closing.requested(), drain.over.requested())
    }

    #[tokio::test(start_paused = true)]
    async fn one_phase_follows_the_other() {
        assert_eq!(phases(100, 1000, 50).await, (true, false, false));
        assert_eq!(phases(100, 1000, 150).await, (true, true, false));
        assert_eq!(phases(100, 1000, 1050).await, (true, true, true));
        assert_eq!(phases(5000, 1000, 1050).await, (true, true, true), "the notice is part of the drain");
    }
}
