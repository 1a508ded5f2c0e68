//! The stop of a router: first readiness, then the listener, then the remaining requests.

use std::time::Duration;

use chassis::Shutdown;
use tokio::time::{Instant, sleep_until};
use tracing::info;
use types::Deadline;

use crate::error::ServeError;

/// The shutdown signals of a router's stop, one per phase. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Drain {
    /// The router was asked to stop: `/ready` fails. Requests are still accepted, until load balancers have
    /// noticed.
    pub requested: Shutdown,
    /// The listener closes: no new request is accepted.
    pub closing: Shutdown,
    /// The drain is over: the remaining requests end with `draining`.
    pub over: Shutdown,
}

/// The times at which the phases of a stop begin, counted from the stop request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DrainTimes {
    /// The time until the listener closes; at most `whole`.
    pub notice: Duration,
    /// The time until the remaining requests are ended.
    pub whole: Duration,
}

impl Drain {
    /// Runs a request's `work` until its deadline passes or the drain is over.
    pub(crate) async fn by_deadline<T>(
        &self,
        deadline: Deadline,
        work: impl Future<Output = Result<T, ServeError>>,
    ) -> Result<T, ServeError> {
        tokio::select! {
            biased;
            result = work => result,
            () = sleep_until(deadline.instant().into()) => {
                Err(ServeError::DeadlinePassed { reason: "the request's time is up".to_owned() })
            }
            () = self.over.wait() => Err(ServeError::Draining),
        }
    }

    /// Waits for `requested`, then triggers the later phases in time.
    pub(crate) async fn run(self, times: DrainTimes) {
        self.requested.wait().await;
        let began = Instant::now();
        let (notice, whole) = (times.notice.min(times.whole), times.whole);
        info!(
            notice_ms = notice.as_millis() as u64,
            drain_ms = whole.as_millis() as u64,
            "router is draining"
        );
        tokio::time::sleep_until(began + notice).await;
        self.closing.trigger();
        tokio::time::sleep_until(began + whole).await;
        info!("drain time is over, ending the remaining requests");
        self.over.trigger();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns whether each of the three phases has begun after `after_ms`.
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
