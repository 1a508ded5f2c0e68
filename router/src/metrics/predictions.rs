//! The metrics of decisions: arms, predictions and regret.

use chassis::metrics::Metrics;
use prometheus::{Histogram, HistogramVec, IntCounterVec};

use crate::policy::{Arm, Decision};

#[derive(Clone, Debug)]
pub struct PredictionMetrics {
    routes: IntCounterVec,
    first_token: HistogramVec,
    regret: Histogram,
}

impl PredictionMetrics {
    pub(super) fn register(metrics: &Metrics) -> Self {
        let help =
            "Time from the choice of a route to the first token: predicted, seen, and their difference.";
        Self {
            routes: metrics.counter_vec("routes_total", "Chosen routes.", &["arm", "choice"]),
            first_token: metrics.latency_vec("route_first_token_seconds", help, &["arm", "value"]),
            regret: metrics.latency(
                "route_regret_seconds",
                "The predicted cost of a chosen route less that of the best one.",
            ),
        }
    }

    /// Counts a decision.
    pub(crate) fn decided(&self, decision: &Decision) {
        self.routes.with_label_values(&[decision.arm.as_str(), decision.choice.as_str()]).inc();
        self.regret.observe(decision.regret_ms / 1e3);
    }

    /// Records a prediction and the observed value.
    pub(crate) fn compare(&self, arm: Arm, predicted_ms: f64, seen_ms: f64) {
        let values =
            [("predicted", predicted_ms), ("seen", seen_ms), ("difference", (predicted_ms - seen_ms).abs())];
        for (value, ms) in values {
            self.first_token.with_label_values(&[arm.as_str(), value]).observe(ms / 1e3);
        }
    }
}
