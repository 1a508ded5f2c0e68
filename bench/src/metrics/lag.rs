//! The harness's own lag: a run in which it was the bottleneck says nothing about the server.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::metrics::distribution::Distribution;

/// What the harness measured of itself.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct LagReport {
    /// Milliseconds from when a request should have been sent to when the harness began to.
    pub send_ms: Distribution,
    /// Milliseconds by which a timer's tick came late: how long an event that has arrived waits to be seen.
    pub event_loop_ms: Distribution,
    /// CPU time of the load thread ÷ length of the run.
    pub cpu_share: f64,
    /// Time in which the load thread could have run and another process did ÷ length of the run.
    pub starved_share: f64,
    /// Requests that failed for want of descriptors or ports on this side.
    pub harness_failures: usize,
    /// Whether the run was broken off by hand.
    pub interrupted: bool,
    /// Why the run must not be quoted; empty when it may be.
    pub invalid_because: Vec<String>,
}

impl LagReport {
    pub fn is_valid(&self) -> bool {
        self.invalid_because.is_empty()
    }

    /// Fills in the verdict: `limit` bounds the 99th percentile of both lags.
    pub fn judge(mut self, limit: Duration) -> Self {
        let limit_ms = limit.as_secs_f64() * 1e3;
        let mut reasons = Vec::new();
        for (name, lag) in [("sending", &self.send_ms), ("event loop", &self.event_loop_ms)] {
            if lag.p99 > limit_ms {
                reasons.push(format!("own lag in {name}: p99 {:.2} ms, limit {limit_ms:.2} ms", lag.p99));
            }
        }
        if self.harness_failures > 0 {
            reasons.push(format!(
                "{} requests failed for want of descriptors or ports here",
                self.harness_failures
            ));
        }
        if self.interrupted {
            reasons.push("interrupted".to_owned());
        }
        self.invalid_because = reasons;
        self
    }
}
