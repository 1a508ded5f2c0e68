//! A reader of the prefix cache's events, beginning with a snapshot. Mirrors of the cache use it.

use std::sync::Arc;

use tokio::sync::Notify;
use types::{BlockEvent, BlockHash};

use crate::event_log::{NumberedEvent, Reading};
use crate::shared::SharedPool;

/// One reader of the events. The first event is a snapshot, and so is the first one after the reader has lagged too
/// far.
///
/// A reader that applies the events in order has, after each event, exactly the set of hashes that the index
/// had at that number.
#[derive(Debug)]
pub struct BlockEvents {
    pool: SharedPool,
    news: Arc<Notify>,
    /// The number of the last event that was read; `None` before the first read.
    read: Option<u64>,
}

impl BlockEvents {
    pub(crate) fn new(pool: SharedPool) -> Self {
        Self { news: pool.news(), pool, read: None }
    }

    /// Waits for the next event, for any time. Cancel-safe.
    pub async fn next(&mut self) -> NumberedEvent {
        let bell = Arc::clone(&self.news);
        loop {
            let news = bell.notified();
            tokio::pin!(news);
            // Registers before the check, so that no event between the check and the wait is missed.
            news.as_mut().enable();
            if let Some(event) = self.try_next() {
                return event;
            }
            news.await;
        }
    }

    /// Returns the next event, if there is one already.
    pub fn try_next(&mut self) -> Option<NumberedEvent> {
        let next = match self.pool.read_events(self.read) {
            Reading::UpToDate => return None,
            Reading::Event(event) => event,
            Reading::Snapshot { number, hashes } => snapshot(number, hashes),
        };
        self.read = Some(next.number);
        Some(next)
    }
}

/// Makes a snapshot of sorted hashes, so that a run with the same seed sends the same bytes. The caller does
/// not hold the pool's lock, because sorting takes a while.
fn snapshot(number: u64, mut hashes: Vec<BlockHash>) -> NumberedEvent {
    hashes.sort_unstable();
    NumberedEvent { number, event: BlockEvent::Snapshot(hashes) }
}

#[cfg(test)]
pub(crate) mod tests;
