//! The harness's own lag. If the harness was the bottleneck, the numbers of a run do not describe the server.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::metrics::distribution::Distribution;

/// The harness's measurements of itself, in the report.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct LagReport {
    /// Milliseconds from the time at which a request was due to the time at which the harness began to send
    /// it.
    pub send_ms: Distribution,
    /// Milliseconds by which the ticks of a timer came late: an event that has arrived waits for the same
    /// time.
    pub event_loop_ms: Distribution,
    /// The load thread's CPU time, divided by the length of the run.
    pub cpu_share: f64,
    /// The time in which the load thread waited for a processor, divided by the length of the run.
    pub starved_share: f64,
    /// Requests that failed because the harness's machine ran out of descriptors or ports.
    pub harness_failures: usize,
    /// Whether the user interrupted the run.
    pub interrupted: bool,
    /// The reasons why the run must not be quoted; empty if it may be.
    pub invalid_because: Vec<String>,
}

/// The samples of the harness's lag, before they are judged, so that the slices of a run can be joined.
#[derive(Clone, Debug, Default)]
pub struct LagSamples {
    pub send_ms: Vec<f64>,
    pub event_loop_ms: Vec<f64>,
    /// The time for which the load thread ran on a processor.
    pub running: Duration,
    pub waiting: Duration,
    pub elapsed: Duration,
    pub harness_failures: usize,
    pub interrupted: bool,
}

impl LagReport {
    pub fn is_valid(&self) -> bool {
        self.invalid_because.is_empty()
    }

    /// Returns the reasons why the run must not be quoted. `limit_ms` bounds the 99th percentile of both
    /// lags.
    fn reasons(&self, limit_ms: f64) -> Vec<String> {
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
        reasons
    }
}

impl LagSamples {
    pub fn merge(&mut self, other: LagSamples) {
        self.send_ms.extend(other.send_ms);
        self.event_loop_ms.extend(other.event_loop_ms);
        self.running += other.running;
        self.waiting += other.waiting;
        self.elapsed += other.elapsed;
        self.harness_failures += other.harness_failures;
        self.interrupted |= other.interrupted;
    }

    pub fn judge(self, limit: Duration) -> LagReport {
        let share = |part: Duration| part.as_secs_f64() / self.elapsed.as_secs_f64().max(1e-9);
        let mut report = LagReport {
            cpu_share: share(self.running),
            starved_share: share(self.waiting),
            send_ms: Distribution::of(self.send_ms),
            event_loop_ms: Distribution::of(self.event_loop_ms),
            harness_failures: self.harness_failures,
            interrupted: self.interrupted,
            invalid_because: Vec::new(),
        };
        report.invalid_because = report.reasons(limit.as_secs_f64() * 1e3);
        report
    }
}
