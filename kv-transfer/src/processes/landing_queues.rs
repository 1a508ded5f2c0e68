//! A head's queues of one follower's reports.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::mpsc;
use types::TransferId;

use super::land_order::{LandingEvent, LandingReport};
use crate::error::TransferError;

/// Limit of unread reports of one landing. Most of them are pages that arrived wrong.
const REPORTS_QUEUED_MAX: usize = 1024;
/// The room of a queue that is kept for the failure of its landing and for the last report.
const LAST_REPORTS: usize = 2;

/// A queue for each landing of one follower that may still write.
#[derive(Debug, Default)]
pub struct LandingQueues {
    /// Held for a look-up, never across an await.
    queues: Mutex<Queues>,
}

#[derive(Debug, Default)]
struct Queues {
    open: HashMap<TransferId, mpsc::Sender<LandingEvent>>,
    is_closed: bool,
}

impl LandingQueues {
    /// Begins the queue of a landing, before the follower gets the order. The queue ends at once if the follower is
    /// lost.
    pub fn begin(&self, transfer: TransferId) -> mpsc::Receiver<LandingEvent> {
        let (queue, reports) = mpsc::channel(REPORTS_QUEUED_MAX);
        let mut queues = self.queues();
        if !queues.is_closed {
            queues.open.insert(transfer, queue);
        }
        reports
    }

    /// Queues a report. The last one ends its queue. A report above the limit fails the landing. Its queue still gets
    /// the last report, because the follower may write until then.
    pub fn take(&self, report: LandingReport) {
        let LandingReport { transfer, event } = report;
        let mut queues = self.queues();
        let is_last = matches!(event, LandingEvent::Quiet);
        let Some(queue) = queues.open.get(&transfer) else { return };
        let event = match queue.capacity() {
            room if is_last || room > LAST_REPORTS => event,
            LAST_REPORTS => LandingEvent::Failed(TransferError::Corrupted { pages: REPORTS_QUEUED_MAX }),
            _ => return,
        };
        if queue.try_send(event).is_err() || is_last {
            queues.open.remove(&transfer);
        }
    }

    /// Ends all queues, because the follower is lost.
    pub fn close(&self) {
        let mut queues = self.queues();
        queues.is_closed = true;
        queues.open.clear();
    }

    fn queues(&self) -> MutexGuard<'_, Queues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reshard::Lane;

    #[test]
    fn reports_that_are_too_many_fail_the_landing_and_the_last_one_still_comes() {
        let (queues, transfer) = (LandingQueues::default(), TransferId(7));
        let mut reports = queues.begin(transfer);
        let wrong_pages = || LandingEvent::Refetch { lane: Lane { from: 0, to: 0 }, spans: Vec::new() };
        (0..2 * REPORTS_QUEUED_MAX)
            .for_each(|_| queues.take(LandingReport { transfer, event: wrong_pages() }));
        queues.take(LandingReport { transfer, event: LandingEvent::Quiet });
        for _ in 0..REPORTS_QUEUED_MAX - LAST_REPORTS {
            let report = reports.try_recv();
            assert!(matches!(report, Ok(LandingEvent::Refetch { .. })), "{report:?}");
        }
        let failed = reports.try_recv();
        let is_failure = matches!(failed, Ok(LandingEvent::Failed(TransferError::Corrupted { .. })));
        assert!(is_failure, "{failed:?}");
        let last = reports.try_recv();
        assert!(matches!(last, Ok(LandingEvent::Quiet)), "{last:?}");
        reports.try_recv().expect_err("the queue has ended");
    }
}
