//! A reader of the prefix cache's events, beginning with a snapshot. Mirrors of the cache use it.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use tokio::sync::Notify;
use types::load::EVENT_HASHES_MAX;
use types::{BlockChange, BlockEvent, BlockHash};

use crate::event_log::Reading;
use crate::shared::SharedPool;

/// One reader of the events. The first event is a snapshot, and so is the first one after the reader has lagged too
/// far. Changes that a reader has not read yet are merged.
///
/// A reader that applies the events in order has, after each complete event, exactly a set of hashes that the
/// index had.
#[derive(Debug)]
pub struct BlockEvents {
    pool: SharedPool,
    news: Arc<Notify>,
    /// The number of the pool's last change that was read; `None` before the first read.
    read: Option<u64>,
    /// The number of events that this reader has returned.
    n_returned: u64,
    /// The events that were read and not returned.
    rest: VecDeque<BlockEvent>,
}

/// An event and its number. The numbers of one reader's events have no gaps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NumberedEvent {
    pub number: u64,
    pub event: BlockEvent,
}

impl BlockEvents {
    pub(crate) fn new(pool: SharedPool) -> Self {
        Self { news: pool.news(), pool, read: None, n_returned: 0, rest: VecDeque::new() }
    }

    /// Waits for the next event, without a time limit. Cancel-safe.
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
        while self.rest.is_empty() {
            let (number, rest) = match self.pool.read_events(self.read) {
                Reading::UpToDate => return None,
                Reading::Events { number, changes } => (number, merged(changes)),
                Reading::Snapshot { number, hashes } => (number, snapshot(hashes)),
            };
            (self.read, self.rest) = (Some(number), rest);
        }
        let event = self.rest.pop_front()?;
        self.n_returned += 1;
        Some(NumberedEvent { number: self.n_returned, event })
    }
}

/// Makes the events of a snapshot. Its hashes are sorted, so that a run with the same seed sends the same
/// bytes. The caller does not hold the pool's lock, because sorting takes a while.
fn snapshot(mut hashes: Vec<BlockHash>) -> VecDeque<BlockEvent> {
    hashes.sort_unstable();
    let (first, rest) = hashes.split_at(hashes.len().min(EVENT_HASHES_MAX));
    let rest = rest.chunks(EVENT_HASHES_MAX).map(|part| BlockChange::Stored(part.to_vec()));
    events(std::iter::once(BlockChange::Snapshot(first.to_vec())).chain(rest).collect())
}

/// Makes the events of several changes. A hash that was stored and evicted again is in none of them.
fn merged(changes: Vec<BlockChange>) -> VecDeque<BlockEvent> {
    // For each hash: whether it was cached before the changes, and after them.
    let mut cached: BTreeMap<BlockHash, (bool, bool)> = BTreeMap::new();
    for change in changes {
        let (hashes, is_stored) = match change {
            BlockChange::Stored(hashes) => (hashes, true),
            BlockChange::Evicted(hashes) => (hashes, false),
            BlockChange::Snapshot(_) => unreachable!("the log keeps changes only"),
        };
        for hash in hashes {
            cached.entry(hash).or_insert((!is_stored, is_stored)).1 = is_stored;
        }
    }
    let changed = |to: bool| -> Vec<BlockHash> {
        cached.iter().filter(|(_, state)| **state == (!to, to)).map(|(hash, _)| *hash).collect()
    };
    let (evicted, stored) = (changed(false), changed(true));
    let evicted = evicted.chunks(EVENT_HASHES_MAX).map(|part| BlockChange::Evicted(part.to_vec()));
    let stored = stored.chunks(EVENT_HASHES_MAX).map(|part| BlockChange::Stored(part.to_vec()));
    events(evicted.chain(stored).collect())
}

/// Makes one event per part. The last one completes the change.
fn events(parts: Vec<BlockChange>) -> VecDeque<BlockEvent> {
    let n_parts = parts.len();
    let event = |(nth, change)| BlockEvent { change, is_complete: nth + 1 == n_parts };
    parts.into_iter().enumerate().map(event).collect()
}

#[cfg(test)]
pub(crate) mod tests;
