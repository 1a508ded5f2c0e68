//! The metrics of tokenizing.

use chassis::metrics::Metrics;
use prometheus::{IntCounter, IntCounterVec, IntGauge, IntGaugeVec};

use crate::text::RouterModels;
use crate::text::tokenizer::PieceCounts;

#[derive(Clone, Debug)]
pub struct TextMetrics {
    pieces: IntCounterVec,
    tokenized_bytes: IntCounter,
    seen_bytes: IntGaugeVec,
    waiting_bytes: IntGauge,
}

impl TextMetrics {
    pub(super) fn new(metrics: &Metrics) -> Self {
        let pieces = metrics.counter_vec(
            "text_pieces_total",
            "Pieces of prompts, by whether their tokens were kept.",
            &["found"],
        );
        ["yes", "no"].into_iter().for_each(|found| drop(pieces.with_label_values(&[found])));
        Self {
            pieces,
            tokenized_bytes: metrics.counter("tokenized_bytes_total", "Bytes of prompts tokenized."),
            seen_bytes: metrics.gauge_vec(
                "text_pieces_bytes",
                "Pieces of prompts that are kept with their tokens.",
                &["model"],
            ),
            waiting_bytes: metrics.gauge("text_waiting_bytes", "Texts that wait for a thread."),
        }
    }

    pub(crate) fn tokenized(&self, counts: PieceCounts) {
        self.pieces.with_label_values(&["yes"]).inc_by(counts.hits as u64);
        self.pieces.with_label_values(&["no"]).inc_by(counts.misses as u64);
        self.tokenized_bytes.inc_by(counts.tokenized_bytes as u64);
    }

    /// Sets the gauges of waiting texts and of kept pieces.
    pub fn show(&self, waiting_bytes: usize, models: &RouterModels) {
        self.waiting_bytes.set(waiting_bytes as i64);
        for (model, bytes) in models.seen_bytes() {
            self.seen_bytes.with_label_values(&[model.as_str()]).set(bytes as i64);
        }
    }
}
