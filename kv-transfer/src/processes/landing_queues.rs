//! A head's queues of what one follower reports.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::mpsc;
use types::TransferId;

use super::land_order::{LandingEvent, LandingReport};

/// Limit of reports of one landing that nothing has read yet. Most of them are pages that arrived wrong.
const REPORTS_QUEUED_MAX: usize = 1024;

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
    /// Begins the queue of a landing, before the follower is told of it. The queue ends at once if the follower is lost.
    pub fn begin(&self, transfer: TransferId) -> mpsc::Receiver<LandingEvent> {
        let (queue, reports) = mpsc::channel(REPORTS_QUEUED_MAX);
        let mut queues = self.queues();
        if !queues.is_closed {
            queues.open.insert(transfer, queue);
        }
        reports
    }

    /// Queues a report. The last one ends its queue, and so does one too many, which fails the landing.
    pub fn take(&self, report: LandingReport) {
        let LandingReport { transfer, event } = report;
        let mut queues = self.queues();
        let is_last = matches!(event, LandingEvent::Quiet);
        let is_queued = queues.open.get(&transfer).is_some_and(|queue| queue.try_send(event).is_ok());
        if is_last || !is_queued {
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
