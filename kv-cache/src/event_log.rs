//! The latest events of the prefix cache, numbered.

use std::collections::VecDeque;

use types::{BlockEvent, BlockHash};

/// How far back a reader may lag before it gets a snapshot instead. One event is at most one call to the pool.
pub(crate) const EVENTS_KEPT_MAX: usize = 1024;

/// An event and its place in the order of all events of this pool's life, which has no gaps.
///
/// A snapshot bears the number of the last event that is in it; the next event has the number after that.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NumberedEvent {
    pub number: u64,
    pub event: BlockEvent,
}

/// What a reader finds.
#[derive(Debug)]
pub(crate) enum Reading {
    UpToDate,
    Event(NumberedEvent),
    /// The event that should come next is not kept any more, or none was ever read.
    Snapshot {
        number: u64,
        hashes: Vec<BlockHash>,
    },
}

/// The latest events.
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

    /// These hashes are cached now. Nothing is said of none.
    pub(crate) fn stored(&mut self, hashes: Vec<BlockHash>) {
        if !hashes.is_empty() {
            self.push(BlockEvent::Stored(hashes));
        }
    }

    /// These hashes are no longer cached. Nothing is said of none.
    pub(crate) fn evicted(&mut self, hashes: Vec<BlockHash>) {
        if !hashes.is_empty() {
            self.push(BlockEvent::Evicted(hashes));
        }
    }

    /// What comes after the event with that number.
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
