//! Copies that a device makes in its own time, of one landing or of one transfer on its way out.
//!
//! The processor copies under a landing's lock, so a closed landing is quiet. A device is only told what to copy: it is at
//! it for some microseconds more. So every such copy is a value, counted for as long as it lives.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use tokio::sync::Notify;

use crate::quiet::Quiet;

/// How many copies are under way.
#[derive(Debug, Default)]
pub(crate) struct Flights {
    n: AtomicUsize,
    landed: Notify,
}

/// One of them. Dropped when the device has said that it is done.
#[derive(Debug)]
#[must_use = "a flight that is not held counts as landed"]
pub(crate) struct Flight {
    flights: Arc<Flights>,
}

impl Flights {
    pub(crate) fn begin(self: &Arc<Self>) -> Flight {
        self.n.fetch_add(1, Ordering::AcqRel);
        Flight { flights: Arc::clone(self) }
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        if self.flights.n.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.flights.landed.notify_waiters();
        }
    }
}

#[async_trait]
impl Quiet for Flights {
    fn awaited(&self) -> &'static str {
        "a copy under way on this node's GPU"
    }

    /// No flight can begin once the landing is closed.
    fn revoke(&self) -> bool {
        // Written to, so that it is in one order with every take-off: whoever takes off after this look sees what
        // was done before it.
        self.n.fetch_add(0, Ordering::AcqRel) == 0
    }

    async fn proven(&self) {
        loop {
            let landed = self.landed.notified();
            tokio::pin!(landed);
            // Before the look, so that no change falls between the two.
            landed.as_mut().enable();
            if self.revoke() {
                return;
            }
            landed.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn proof_comes_with_the_last_flight_and_with_no_timer() {
        let flights = Arc::new(Flights::default());
        assert!(flights.revoke(), "nothing is under way");
        let (first, second) = (flights.begin(), flights.begin());
        drop(first);
        assert!(!flights.revoke());
        timeout(Duration::from_secs(3600), flights.proven()).await.expect_err("one is under way");
        let (_, ()) = tokio::join!(flights.proven(), async { drop(second) });
        assert!(flights.revoke());
    }
}
