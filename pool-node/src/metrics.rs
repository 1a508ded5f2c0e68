//! The metrics of a pool node.

use chassis::metrics::Metrics;
use prometheus::{IntCounter, IntCounterVec};

/// All metrics of this crate. Clones share the counters.
#[derive(Clone, Debug)]
pub struct PoolMetrics {
    /// Ended puts by outcome: `stored`, `given_up`, or the refusal's code.
    pub puts: IntCounterVec,
    /// Ended deliveries by outcome: `delivered`, `given_up`, or the refusal's code.
    pub deliveries: IntCounterVec,
    /// Tokens of the sequences that were put.
    pub tokens: IntCounter,
    /// Tokens of put sequences whose KV the node already had.
    pub held_tokens: IntCounter,
    pub integrity_failures: IntCounter,
}

impl PoolMetrics {
    pub fn new(metrics: &Metrics) -> Self {
        Self {
            puts: metrics.counter_vec("puts_total", "Sequences that were put, by outcome.", &["outcome"]),
            deliveries: metrics.counter_vec(
                "deliveries_total",
                "Deliveries of stored sequences, by outcome.",
                &["outcome"],
            ),
            tokens: metrics.counter("put_tokens_total", "Tokens of sequences that were put."),
            held_tokens: metrics
                .counter("held_tokens_total", "Tokens of put sequences whose KV was already stored."),
            integrity_failures: metrics
                .counter("integrity_failures_total", "Failed integrity checks of the block pool."),
        }
    }
}

/// The outcome of one put or delivery, recorded in the metrics on drop. The default outcome is `given_up`.
#[derive(Debug)]
pub(crate) struct CountedOutcome<'a> {
    counts: &'a IntCounterVec,
    word: &'static str,
}

impl<'a> CountedOutcome<'a> {
    pub(crate) fn new(counts: &'a IntCounterVec) -> Self {
        Self { counts, word: "given_up" }
    }

    pub(crate) fn is(&mut self, word: &'static str) {
        self.word = word;
    }
}

impl Drop for CountedOutcome<'_> {
    fn drop(&mut self) {
        self.counts.with_label_values(&[self.word]).inc();
    }
}
