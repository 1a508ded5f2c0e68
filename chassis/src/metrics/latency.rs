//! Histograms of latencies in two forms: with the fixed buckets of the text format, and as native histograms.
//!
//! A native histogram has no configured buckets: each bound is 2^(1/8), about 9 %, above the previous one. Prometheus
//! reads it if it asks for the protobuf format.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use prometheus::{Histogram, HistogramVec};

use super::locked;

/// The buckets of each power of two: 2^3.
pub(super) const SCHEMA: i32 = 3;
const PER_DOUBLING: f64 = 8.0;
/// Times up to 2^-17 s, 8 µs, are in the zero bucket.
const SMALLEST_LOG2: i32 = -17;
/// The upper bound of the last bucket is 2^12 s, above an hour. Longer times are in the last bucket.
const LARGEST_LOG2: i32 = 12;
const N_BUCKETS: usize = ((LARGEST_LOG2 - SMALLEST_LOG2) * PER_DOUBLING as i32) as usize;
pub(super) const ZERO_THRESHOLD: f64 = 1.0 / (1_u32 << -SMALLEST_LOG2) as f64;

/// Histograms by label. Clones share them.
#[derive(Clone, Debug)]
pub struct LatencyHistogramVec {
    fixed: HistogramVec,
    native: Arc<Mutex<Vec<LabelledBuckets>>>,
}

/// The native histogram of one combination of label values.
#[derive(Debug)]
struct LabelledBuckets {
    values: Vec<String>,
    buckets: Arc<NativeBuckets>,
}

/// The histogram of one combination of labels. Clones share it.
#[derive(Clone, Debug)]
pub struct LatencyHistogram {
    fixed: Histogram,
    native: Arc<NativeBuckets>,
}

/// Counts by native bucket. The first one is the zero bucket.
#[derive(Debug)]
struct NativeBuckets([AtomicU64; N_BUCKETS + 1]);

/// The counts of a native histogram that are not 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct NativeCounts {
    pub zero: u64,
    /// Pairs of a bucket's index in Prometheus's numbering and its count, by rising index.
    pub positive: Vec<(i32, u64)>,
}

impl LatencyHistogramVec {
    pub(super) fn new(fixed: HistogramVec) -> Self {
        Self { fixed, native: Arc::default() }
    }

    /// Returns the histogram of these label values.
    ///
    /// # Panics
    ///
    /// Panics if the number of values is not that of the labels.
    pub fn with_label_values(&self, values: &[&str]) -> LatencyHistogram {
        let fixed = self.fixed.with_label_values(values);
        let mut known = locked(&self.native);
        let found = known.iter().find(|labelled| labelled.values == values);
        let native = found.map(|labelled| Arc::clone(&labelled.buckets)).unwrap_or_else(|| {
            let buckets = Arc::new(NativeBuckets::new());
            let values = values.iter().map(|value| (*value).to_owned()).collect();
            known.push(LabelledBuckets { values, buckets: Arc::clone(&buckets) });
            buckets
        });
        LatencyHistogram { fixed, native }
    }

    /// Returns the native counts of these label values.
    pub(super) fn counts(&self, values: &[&str]) -> Option<NativeCounts> {
        let known = locked(&self.native);
        known.iter().find(|labelled| labelled.values == values).map(|labelled| labelled.buckets.counts())
    }
}

impl LatencyHistogram {
    pub fn observe(&self, seconds: f64) {
        self.fixed.observe(seconds);
        self.native.0[bucket(seconds)].fetch_add(1, Ordering::Relaxed);
    }
}

impl NativeBuckets {
    fn new() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(0)))
    }

    fn counts(&self) -> NativeCounts {
        let [zero, positive @ ..] = &self.0;
        let first = SMALLEST_LOG2 * PER_DOUBLING as i32 + 1;
        let counted = (first..).zip(positive).map(|(index, count)| (index, count.load(Ordering::Relaxed)));
        let positive = counted.filter(|(_, count)| *count > 0).collect();
        NativeCounts { zero: zero.load(Ordering::Relaxed), positive }
    }
}

/// Returns the place of a time in [`NativeBuckets`]. A time that is not a number counts as 0.
fn bucket(seconds: f64) -> usize {
    if seconds > ZERO_THRESHOLD {
        let above = (seconds.log2() - f64::from(SMALLEST_LOG2)) * PER_DOUBLING;
        (above.ceil() as usize).clamp(1, N_BUCKETS)
    } else {
        0
    }
}

#[cfg(test)]
mod tests {
    use prometheus::HistogramOpts;

    use super::*;

    #[test]
    fn a_time_is_in_the_bucket_that_ends_above_it() {
        let cases = [
            (f64::NAN, None),
            (-1.0, None),
            (0.0, None),
            (ZERO_THRESHOLD, None),
            (ZERO_THRESHOLD * 1.01, Some(-135)),
            (0.5, Some(-8)),
            (0.51, Some(-7)),
            (1.0, Some(0)),
            (1.01, Some(1)),
            (1.09, Some(1)),
            (1.1, Some(2)),
            (4096.0, Some(96)),
            (5000.0, Some(96)),
            (f64::INFINITY, Some(96)),
        ];
        for (seconds, index) in cases {
            let vector = HistogramVec::new(HistogramOpts::new("seconds", "Seconds."), &["model"]);
            let vector = LatencyHistogramVec::new(vector.expect("well-formed"));
            vector.with_label_values(&["m"]).observe(seconds);
            let counts = vector.counts(&["m"]).expect("it is used");
            let expected = match index {
                None => NativeCounts { zero: 1, positive: Vec::new() },
                Some(index) => NativeCounts { zero: 0, positive: vec![(index, 1)] },
            };
            assert_eq!(counts, expected, "{seconds}");
        }
    }

    #[test]
    fn every_bound_is_in_its_own_bucket() {
        for index in -135..=96 {
            let bound = f64::exp2(f64::from(index) / PER_DOUBLING);
            let at = bucket(bound * 0.9999) as i32 + SMALLEST_LOG2 * 8;
            let after = bucket(bound * 1.0001) as i32 + SMALLEST_LOG2 * 8;
            assert_eq!((at, after), (index, (index + 1).min(96)), "{bound}");
        }
    }
}
