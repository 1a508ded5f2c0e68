//! The latest events of the prefix cache, with numbers.

use std::collections::VecDeque;

use types::{BlockEvent, BlockHash};

/// The number of events that a reader may lag before it gets a snapshot. One call to the pool causes at most one
/// event.
pub(crate) const EVENTS_KEPT_MAX: usize = 1024;

/// An event and its number. The numbers of a pool's events have no gaps.
///
/// A snapshot has the number of the last event that it includes; the next event has the next number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NumberedEvent {
    pub number: u64,
    pub event: BlockEvent,
}

/// The result of [`EventLog::read`].
#[derive(Debug)]
pub(crate) enum Reading {
    UpToDate,
    Event(NumberedEvent),
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
    kept: VecDeque<BlockEvent>,
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
            self.push(BlockEvent::Stored(hashes));
        }
    }

    /// Records hashes that are no longer cached. An empty list causes no event.
    pub(crate) fn evicted(&mut self, hashes: Vec<BlockHash>) {
        if !hashes.is_empty() {
            self.push(BlockEvent::Evicted(hashes));
        }
    }

    /// Returns the event after the one with number `after`. If that event is not kept, returns a snapshot of
    /// `all`.
    pub(crate) fn read(&self, after: Option<u64>, all: impl FnOnce() -> Vec<BlockHash>) -> Reading {
        let Some(behind) = after.map(|number| (self.last - number) as usize) else {
            return Reading::Snapshot { number: self.last, hashes: all() };
        };
        if behind == 0 {
            return Reading::UpToDate;
        }
        match self.kept.len().checked_sub(behind).and_then(|nth| self.kept.get(nth)) {
            Some(event) => {
                Reading::Event(NumberedEvent { number: self.last + 1 - behind as u64, event: event.clone() })
            }
            None => Reading::Snapshot { number: self.last, hashes: all() },
        }
    }

    fn push(&mut self, event: BlockEvent) {
        if self.kept.len() == self.kept_max {
            self.kept.pop_front();
        }
        self.kept.push_back(event);
        self.last += 1;
    }
}
