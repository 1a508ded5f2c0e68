//! The metrics of every node: blocks by state, open landings, and sleep.

use std::time::Duration;

use chassis::metrics::Metrics;
use kv_cache::BlockPool;
use kv_transfer::TransferMetrics;
use prometheus::{IntGauge, IntGaugeVec};
use scheduler::SchedulerMetrics;
use types::{BlockCounts, Role};

use chassis::counted::Counter;

use crate::gpus::GpuMetrics;

/// The interval at which the gauges are updated.
const PACE: Duration = Duration::from_millis(250);

/// The metrics of a process that computes, kept over all its lives.
#[derive(Clone, Debug)]
pub struct ProcessMetrics {
    page: Metrics,
    pub(crate) node: NodeMetrics,
    pub(crate) scheduler: SchedulerMetrics,
    pub(crate) transfer: TransferMetrics,
    asleep: IntGauge,
    pub(crate) gpus: GpuMetrics,
}

/// Gauges that follow the block pool and the open landings.
#[derive(Clone, Debug)]
pub struct NodeMetrics {
    blocks: IntGaugeVec,
    arriving: IntGauge,
}

impl ProcessMetrics {
    pub fn new(metrics: &Metrics) -> Self {
        Self {
            page: metrics.clone(),
            node: NodeMetrics::new(metrics),
            scheduler: SchedulerMetrics::new(metrics),
            transfer: TransferMetrics::new(metrics),
            asleep: metrics.gauge("asleep", "1 while the node sleeps: it has neither weights nor KV."),
            gpus: GpuMetrics::new(metrics),
        }
    }

    /// Sets the label `role` of all metrics.
    pub(crate) fn set_role(&self, role: Role) {
        self.page.set_role(role.as_str());
    }

    pub(crate) fn sleeps(&self) {
        self.asleep.set(1);
        self.node.nothing();
    }

    pub(crate) fn wakes(&self) {
        self.asleep.set(0);
        self.node.nothing();
    }
}

impl NodeMetrics {
    pub fn new(metrics: &Metrics) -> Self {
        Self {
            blocks: metrics.gauge_vec("kv_blocks", "Blocks of KV, by state.", &["state"]),
            arriving: metrics.gauge("landings_open", "Landings that wait for their KV."),
        }
    }

    /// Updates the gauges at intervals until the future is dropped.
    pub async fn follow(self, pool: BlockPool, arriving: Counter) {
        loop {
            self.look(&pool, &arriving);
            tokio::time::sleep(PACE).await;
        }
    }

    /// Sets the gauges to zero while the node has no block pool.
    fn nothing(&self) {
        self.set(BlockCounts::default());
        self.arriving.set(0);
    }

    fn look(&self, pool: &BlockPool, arriving: &Counter) {
        self.set(pool.counts());
        self.arriving.set(i64::from(arriving.count()));
    }

    fn set(&self, counts: BlockCounts) {
        for (state, count) in [
            ("free", counts.free),
            ("leased", counts.leased),
            ("cached", counts.cached),
            ("quarantined", counts.quarantined),
        ] {
            self.blocks.with_label_values(&[state]).set(i64::from(count));
        }
    }
}
