//! The records of requests: those under way, the last that ended, and the slowest.
//!
//! Operators read it on `/debug/requests`. A record has no text, no token and no key.

mod explanation;
mod parts;
mod record;

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::serve::Arrival;

pub use explanation::{Explanation, KvTransfer};
pub use parts::{Part, PartTimes};
pub use record::{Gap, Place, RecordHead, RequestEvent, RequestRecord, RequestSummary};

/// The number of ended requests that are kept, the newest ones.
const LAST_MAX: usize = 1_000;
/// The number of the slowest ended requests that are kept besides.
const SLOWEST_MAX: usize = 100;

/// Numbers of requests, by place.
pub type PlaceCounts = [i64; Place::ALL.len()];

/// The records of requests. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Requests(Arc<Mutex<KeptRecords>>);

#[derive(Debug, Default)]
struct KeptRecords {
    next: u64,
    /// The requests that admission has let in. Admission limits their number.
    under_way: BTreeMap<u64, RequestRecord>,
    /// The newest last.
    last: VecDeque<RequestRecord>,
    /// By duration and number; the slowest last.
    slowest: BTreeMap<(Duration, u64), RequestRecord>,
}

/// The record of a request under way. Its drop ends the record.
#[derive(Debug)]
pub struct OpenRecord {
    requests: Requests,
    number: u64,
    record: RequestRecord,
    outcome: &'static str,
}

impl Requests {
    /// Opens the record of a request. `unix_time` is the time of its arrival.
    pub fn begin(&self, head: RecordHead, arrival: &Arrival, unix_time: Duration) -> OpenRecord {
        let record = RequestRecord::new(head, arrival, unix_time);
        let mut kept = self.kept();
        let number = kept.next;
        kept.next += 1;
        kept.under_way.insert(number, record.clone());
        OpenRecord { requests: self.clone(), number, record, outcome: "cancelled" }
    }

    /// Returns the requests under way, by arrival.
    pub fn under_way(&self) -> Vec<RequestRecord> {
        self.kept().under_way.values().cloned().collect()
    }

    /// Returns the last requests that ended, the newest first.
    pub fn last(&self) -> Vec<RequestRecord> {
        self.kept().last.iter().rev().cloned().collect()
    }

    /// Returns the slowest requests that ended, the slowest first.
    pub fn slowest(&self) -> Vec<RequestRecord> {
        self.kept().slowest.values().rev().cloned().collect()
    }

    /// Returns all records of a request, one for each of its answers, the newest first.
    pub fn find(&self, id: &str) -> Vec<RequestRecord> {
        let kept = self.kept();
        let mut found: Vec<RequestRecord> = Vec::new();
        let all =
            kept.under_way.values().rev().chain(kept.last.iter().rev()).chain(kept.slowest.values().rev());
        for record in all.filter(|record| record.belongs_to(id)) {
            if !found.iter().any(|one| one.is(record)) {
                found.push(record.clone());
            }
        }
        found
    }

    /// Counts the requests under way by place, for each label that `label` gives to a model.
    pub fn count(&self, label: impl Fn(&str) -> String) -> BTreeMap<String, PlaceCounts> {
        let mut counts = BTreeMap::new();
        for record in self.under_way() {
            let counts: &mut PlaceCounts = counts.entry(label(record.model())).or_default();
            counts[record.place() as usize] += 1;
        }
        counts
    }

    fn end(&self, number: u64, outcome: &'static str) {
        let mut kept = self.kept();
        let Some(record) = kept.under_way.remove(&number) else { return };
        let took = record.end(outcome);
        kept.last.push_back(record.clone());
        if kept.last.len() > LAST_MAX {
            kept.last.pop_front();
        }
        kept.slowest.insert((took, number), record);
        if kept.slowest.len() > SLOWEST_MAX {
            kept.slowest.pop_first();
        }
    }

    fn kept(&self) -> MutexGuard<'_, KeptRecords> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OpenRecord {
    pub fn record(&self) -> &RequestRecord {
        &self.record
    }

    /// Forgets the request: it was refused before any work on it.
    pub fn discard(self) {
        self.requests.kept().under_way.remove(&self.number);
    }

    pub fn set_outcome(&mut self, outcome: &'static str) {
        self.outcome = outcome;
    }
}

impl Drop for OpenRecord {
    fn drop(&mut self) {
        self.requests.end(self.number, self.outcome);
    }
}

#[cfg(test)]
mod tests;
