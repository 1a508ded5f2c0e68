//! The metrics of the lines in which prompts wait for room.

use std::time::Duration;

use chassis::metrics::Metrics;
use prometheus::{Histogram, IntCounterVec, IntGaugeVec};

use crate::admission::{Admission, RefusalReason};

#[derive(Clone, Debug)]
pub struct LineMetrics {
    refusals: IntCounterVec,
    waited: Histogram,
    predicted: Histogram,
    waiting: IntGaugeVec,
}

impl LineMetrics {
    pub(super) fn new(metrics: &Metrics) -> Self {
        let refusals = metrics.counter_vec(
            "line_refusals_total",
            "Requests that a line refused, by reason.",
            &["reason"],
        );
        let reasons = RefusalReason::ALL.iter().map(|reason| reason.as_str());
        reasons.for_each(|reason| drop(refusals.with_label_values(&[reason])));
        let histogram = |name, help| metrics.latency(name, help);
        Self {
            refusals,
            waited: histogram("line_wait_seconds", "Waits of requests that got room."),
            predicted: histogram("line_predicted_wait_seconds", "Their waits, as predicted when they came."),
            waiting: metrics.gauge_vec(
                "line_waiting",
                "Requests that wait for room.",
                &["model", "tenant", "priority"],
            ),
        }
    }

    pub(crate) fn refused(&self, reason: RefusalReason) {
        self.refusals.with_label_values(&[reason.as_str()]).inc();
    }

    pub(crate) fn admitted(&self, predicted: Duration, waited: Duration) {
        self.predicted.observe(predicted.as_secs_f64());
        self.waited.observe(waited.as_secs_f64());
    }

    /// Sets the gauges of waiting requests. A tenant without waiting requests has none, so the page stays small.
    pub fn show(&self, admission: &Admission) {
        self.waiting.reset();
        for line in admission.shown() {
            for ((priority, tenant), n_waiting) in &line.waiting {
                let labels = [line.model.as_str(), tenant.as_str(), &priority.to_string()];
                self.waiting.with_label_values(&labels).set(*n_waiting as i64);
            }
        }
    }
}
