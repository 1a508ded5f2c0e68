//! The live numbers of a run. The load thread writes them, and the thread of the progress bar reads them.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use crate::metrics::distribution::percentile;
use crate::metrics::metric::Metric;
use crate::record::{Outcome, RequestRecord};

/// The number of latest requests that the live percentiles cover.
const N_RECENT: usize = 1024;
/// The metrics of ended requests in the progress bar. The report has all metrics.
pub const SHOWN: [Metric; 3] = [Metric::Ttft, Metric::Handover, Metric::WorstGap];

/// The counters of a run, and its latest latencies.
#[derive(Debug, Default)]
pub struct Live {
    pub sent: AtomicU64,
    pub finished: AtomicU64,
    pub failed: AtomicU64,
    pub cancelled: AtomicU64,
    pub tokens: AtomicU64,
    recent: Mutex<[VecDeque<f64>; SHOWN.len()]>,
}

/// The counters at one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct LiveSnapshot {
    pub sent: u64,
    pub ended: u64,
    pub failed: u64,
    pub tokens: u64,
    /// The median and 99th percentile of each metric in [`SHOWN`], over the latest requests.
    pub percentiles: [(f64, f64); SHOWN.len()],
}

impl Live {
    pub fn begin(&self) {
        self.sent.fetch_add(1, Relaxed);
    }

    pub fn end(&self, record: &RequestRecord) {
        let counter = match record.outcome {
            Outcome::Finished => &self.finished,
            Outcome::Failed(_) => &self.failed,
            Outcome::Cancelled => &self.cancelled,
        };
        counter.fetch_add(1, Relaxed);
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        for (metric, values) in SHOWN.into_iter().zip(recent.iter_mut()) {
            values.extend(metric.samples(std::iter::once(record)));
            while values.len() > N_RECENT {
                values.pop_front();
            }
        }
    }

    pub fn glance(&self) -> LiveSnapshot {
        let recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let (finished, failed) = (self.finished.load(Relaxed), self.failed.load(Relaxed));
        LiveSnapshot {
            sent: self.sent.load(Relaxed),
            ended: finished + failed + self.cancelled.load(Relaxed),
            failed,
            tokens: self.tokens.load(Relaxed),
            percentiles: recent.map(middle_and_tail),
        }
    }
}

fn middle_and_tail(values: VecDeque<f64>) -> (f64, f64) {
    let mut sorted = Vec::from(values);
    sorted.sort_unstable_by(f64::total_cmp);
    (percentile(&sorted, 50.0), percentile(&sorted, 99.0))
}
