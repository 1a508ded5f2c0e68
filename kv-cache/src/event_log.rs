//! The latest events of the prefix cache, with numbers.

use std::collections::VecDeque;

use types::{BlockChange, BlockHash};

/// The number of events that a reader may lag before it gets a snapshot. One call to the pool causes at most one
/// event.
pub(crate) const EVENTS_KEPT_MAX: usize = 1024;

/// The largest number of kept events that one read returns, so that the pool's lock is held briefly.
const EVENTS_READ_MAX: usize = 256;

/// The result of [`EventLog::read`].
#[derive(Debug)]
pub(crate) enum Reading {
    UpToDate,
    /// The next events, in order. `number` is the number of the last one.
    Events {
        number: u64,
        changes: Vec<BlockChange>,
    },
    /// All cached hashes, because the next event is no longer kept, or the reader has read nothing yet.
    Snapshot {
        number: u64,
        hashes: Vec<BlockHash>,
    },
}

/// The latest events of one pool.
#[derive(Debug)]
pub(crate) struct EventLog {
    /// The number of the last event; events are counted from 1.
    last: u64,
    kept: VecDeque<BlockChange>,
    kept_max: usize,
}

impl EventLog {
    pub(crate) fn new(kept_max: usize) -> Self {
        Self { last: 0, kept: VecDeque::new(), kept_max }
    }

    pub(crate) fn last(&self) -> u64 {
        self.last
    }

    /// Records hashes that are now cached. An empty list causes no event.
    pub(crate) fn stored(&mut self, hashes: Vec<BlockHash>) {
        if !hashes.is_empty() {
            self.push(BlockChange::Stored(hashes));
        }
    }

    /// Records hashes that are no longer cached. An empty list causes no event.
    pub(crate) fn evicted(&mut self, hashes: Vec<BlockHash>) {
        if !hashes.is_empty() {
            self.push(BlockChange::Evicted(hashes));
        }
    }

    /// Returns the events after the one with number `after`. If the next event is not kept, returns a snapshot
    /// of `all`.
    pub(crate) fn read(&self, after: Option<u64>, all: impl FnOnce() -> Vec<BlockHash>) -> Reading {
        let Some(after) = after else {
            return Reading::Snapshot { number: self.last, hashes: all() };
        };
        let behind = (self.last - after) as usize;
        if behind == 0 {
            return Reading::UpToDate;
        }
        let Some(nth) = self.kept.len().checked_sub(behind) else {
            return Reading::Snapshot { number: self.last, hashes: all() };
        };
        let changes: Vec<BlockChange> = self.kept.iter().skip(nth).take(EVENTS_READ_MAX).cloned().collect();
        Reading::Events { number: after + changes.len() as u64, changes }
    }

    fn push(&mut self, change: BlockChange) {
        if self.kept.len() == self.kept_max {
            self.kept.pop_front();
        }
        self.kept.push_back(change);
        self.last += 1;
    }
}
