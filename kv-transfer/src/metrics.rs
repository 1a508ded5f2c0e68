//! The metrics of KV transfer.

use std::time::Duration;

use chassis::metrics::Metrics;
use chassis::metrics::prometheus::{Histogram, HistogramVec, IntCounterVec, IntGauge};
use types::{Landing, Scheme};

use crate::error::TransferError;

/// The buckets of the transfer rate, from a slow network to a fast link between two GPUs.
const BYTES_PER_SECOND: &[f64] = &[5e7, 1e8, 2.5e8, 5e8, 1e9, 2.5e9, 5e9, 1e10, 2.5e10, 5e10, 1e11, 2.5e11];

/// All metrics of this crate. Cheap to clone: clones share their counters.
#[derive(Clone, Debug)]
pub struct TransferMetrics {
    transfers: IntCounterVec,
    bytes: IntCounterVec,
    rate: HistogramVec,
    refetched: IntCounterVec,
    quarantined: IntGauge,
}

impl TransferMetrics {
    pub fn new(metrics: &Metrics) -> Self {
        Self {
            transfers: metrics.counter_vec(
                "kv_transfers_total",
                "Transfers by connector, direction and how they ended.",
                &["connector", "direction", "outcome"],
            ),
            bytes: metrics.counter_vec(
                "kv_transfer_bytes_total",
                "Bytes of KV of transfers that succeeded.",
                &["connector", "direction"],
            ),
            rate: metrics.histogram_vec(
                "kv_transfer_bytes_per_second",
                "Rate of one transfer on the receiving side, from its first byte to its last.",
                BYTES_PER_SECOND,
                &["connector"],
            ),
            refetched: metrics.counter_vec(
                "kv_refetched_pages_total",
                "Pages that arrived wrong and were asked for again.",
                &["connector"],
            ),
            quarantined: metrics.gauge(
                "kv_quarantined_blocks",
                "Blocks per layer group that wait for proof that no wire writes them.",
            ),
        }
    }

    pub(crate) fn arrived(&self, scheme: &Scheme, bytes: u64, moved: Option<Duration>) {
        self.count(scheme, "in", "arrived");
        self.bytes.with_label_values(&[scheme.as_str(), "in"]).inc_by(bytes);
        if let Some(moved) = moved.filter(|moved| !moved.is_zero()) {
            self.rate_of(scheme).observe(bytes as f64 / moved.as_secs_f64());
        }
    }

    pub(crate) fn failed(&self, scheme: &Scheme, error: &TransferError) {
        self.count(scheme, "in", error.word());
    }

    /// Counts a sender's transfer when it ends: as a success if there is no error.
    pub(crate) fn sent(&self, landing: &Landing, error: Option<&TransferError>) {
        let scheme = &landing.wire.scheme;
        let Some(error) = error else {
            self.count(scheme, "out", "arrived");
            self.bytes.with_label_values(&[scheme.as_str(), "out"]).inc_by(wanted_bytes(landing));
            return;
        };
        self.count(scheme, "out", error.word());
    }

    pub(crate) fn refetched(&self, scheme: &Scheme, pages: usize) {
        if pages > 0 {
            self.refetched.with_label_values(&[scheme.as_str()]).inc_by(pages as u64);
        }
    }

    /// Counts the blocks as quarantined while the returned value lives.
    pub(crate) fn quarantined(&self, blocks: usize) -> QuarantinedBlocks {
        let blocks = blocks as i64;
        self.quarantined.add(blocks);
        QuarantinedBlocks { gauge: self.quarantined.clone(), blocks }
    }

    fn count(&self, scheme: &Scheme, direction: &str, outcome: &str) {
        self.transfers.with_label_values(&[scheme.as_str(), direction, outcome]).inc();
    }

    fn rate_of(&self, scheme: &Scheme) -> Histogram {
        self.rate.with_label_values(&[scheme.as_str()])
    }
}

impl Default for TransferMetrics {
    /// Makes metrics that are not exported.
    fn default() -> Self {
        Self::new(&Metrics::new("unseen"))
    }
}

/// A number of blocks in quarantine. The drop ends their count.
#[derive(Debug)]
pub(crate) struct QuarantinedBlocks {
    gauge: IntGauge,
    blocks: i64,
}

impl Drop for QuarantinedBlocks {
    fn drop(&mut self) {
        self.gauge.sub(self.blocks);
    }
}

/// Returns the bytes that one rank receives.
pub(crate) fn wanted_bytes(landing: &Landing) -> u64 {
    let layout = &landing.layout;
    let block_bytes: usize = layout.group_indices().map(|group| layout.block_bytes(group)).sum();
    (landing.wanted_blocks().len() * block_bytes) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_metric_is_registered_and_counted() {
        let all = Metrics::new("node");
        let metrics = TransferMetrics::new(&all);
        let tcp = Scheme::new("tcp");
        metrics.arrived(&tcp, 1_000_000_000, Some(Duration::from_secs(1)));
        metrics.failed(&tcp, &TransferError::Cancelled);
        assert_eq!(metrics.transfers.with_label_values(&["tcp", "in", "cancelled"]).get(), 1);
        metrics.refetched(&tcp, 3);
        let counted = metrics.quarantined(7);
        assert_eq!(metrics.quarantined.get(), 7);
        drop(counted);
        assert_eq!(metrics.quarantined.get(), 0);
        assert_eq!(metrics.rate_of(&tcp).get_sample_sum(), 1e9);
        let names = all.names();
        assert_eq!(names.len(), 5, "{names:?}");
    }
}
