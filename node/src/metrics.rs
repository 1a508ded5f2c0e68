//! What every node counts: where its blocks are, and what waits.

use std::time::Duration;

use chassis::metrics::Metrics;
use kv_cache::BlockPool;
use prometheus::{IntGauge, IntGaugeVec};

use crate::counted::Counter;

/// How old the gauges may be.
const PACE: Duration = Duration::from_millis(250);

/// Gauges that follow the pool and the reservations.
#[derive(Clone, Debug)]
pub struct NodeMetrics {
    blocks: IntGaugeVec,
    arriving: IntGauge,
}

impl NodeMetrics {
    pub fn new(metrics: &Metrics) -> Self {
        Self {
            blocks: metrics.gauge_vec("kv_blocks", "Blocks of KV, by state.", &["state"]),
            arriving: metrics.gauge("landings_open", "Landings that wait for their KV."),
        }
    }

    /// Keeps the gauges true until it is dropped.
    pub async fn follow(self, pool: BlockPool, arriving: Counter) {
        loop {
            self.look(&pool, &arriving);
            tokio::time::sleep(PACE).await;
        }
    }

    fn look(&self, pool: &BlockPool, arriving: &Counter) {
        let counts = pool.counts();
        for (state, count) in [
            ("free", counts.free),
            ("leased", counts.leased),
            ("cached", counts.cached),
            ("quarantined", counts.quarantined),
        ] {
            self.blocks.with_label_values(&[state]).set(i64::from(count));
        }
        self.arriving.set(i64::from(arriving.count()));
    }
}
