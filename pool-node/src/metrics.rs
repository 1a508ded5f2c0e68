//! What a pool node counts.

use chassis::metrics::Metrics;
use prometheus::{IntCounter, IntCounterVec};

/// All metrics of this crate. Cheap to clone: clones count together.
#[derive(Clone, Debug)]
pub struct PoolMetrics {
    /// By how they ended: `stored`, `given_up`, or the refusal's code.
    pub puts: IntCounterVec,
    /// By how they ended: `delivered`, `given_up`, or the refusal's code.
    pub deliveries: IntCounterVec,
    /// Tokens of sequences that were put.
    pub tokens: IntCounter,
    /// Those of them that were here already.
    pub held_tokens: IntCounter,
    pub integrity_failures: IntCounter,
}

impl PoolMetrics {
    pub fn new(metrics: &Metrics) -> Self {
        Self {
            puts: metrics.counter_vec(
                "puts_total",
                "Sequences that were put, by how that ended.",
                &["outcome"],
            ),
            deliveries: metrics.counter_vec(
                "deliveries_total",
                "Sequences that were asked for, by how that ended.",
                &["outcome"],
            ),
            tokens: metrics.counter("put_tokens_total", "Tokens of sequences that were put."),
            held_tokens: metrics.counter("held_tokens_total", "Those of them whose KV was here already."),
            integrity_failures: metrics
                .counter("integrity_failures_total", "Failed integrity checks of the block pool."),
        }
    }
}

/// How one put, or one delivery, ends. Dropped before its end, it counts as given up.
#[derive(Debug)]
pub(crate) struct Outcome<'a> {
    counts: &'a IntCounterVec,
    word: &'static str,
}

impl<'a> Outcome<'a> {
    pub(crate) fn new(counts: &'a IntCounterVec) -> Self {
        Self { counts, word: "given_up" }
    }

    pub(crate) fn is(&mut self, word: &'static str) {
        self.word = word;
    }
}

impl Drop for Outcome<'_> {
    fn drop(&mut self) {
        self.counts.with_label_values(&[self.word]).inc();
    }
}
