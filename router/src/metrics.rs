//! The metrics of a router.

use std::time::Duration;

use chassis::metrics::Metrics;
use prometheus::{HistogramVec, IntCounter, IntCounterVec};

use tokio::time::Instant;

use crate::error::ServeError;
use crate::serve::Complete;

/// The stages of a request, each with its own latency histogram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// The time from the call to a decode node until its landing.
    Reserve,
    /// The time on the prefill node from the prompt's arrival to its first step.
    PrefillQueue,
    /// The time on the prefill node from the first step to the first token.
    Prefill,
    /// The time from the call to a pool node until it has all KV.
    Store,
    /// The time from the landing to the handoff.
    Transfer,
    /// The time from acceptance to the first token.
    FirstToken,
    /// The time from the first token to the second. A slow transfer of KV shows here.
    HandoverGap,
    /// The time from one token to the next, from the second token on.
    Step,
    /// The time from acceptance to the last token.
    Whole,
}

impl Stage {
    fn as_str(self) -> &'static str {
        match self {
            Self::Reserve => "reserve",
            Self::PrefillQueue => "prefill_queue",
            Self::Prefill => "prefill",
            Self::Store => "store",
            Self::Transfer => "transfer",
            Self::FirstToken => "first_token",
            Self::HandoverGap => "handover_gap",
            Self::Step => "step",
            Self::Whole => "whole",
        }
    }
}

#[derive(Clone, Debug)]
pub struct RouterMetrics {
    stages: HistogramVec,
    pub attempts: IntCounter,
    pub retries: IntCounterVec,
    pub continuations: IntCounter,
    /// Prompts whose KV a prefill node held because the pool did not accept it.
    pub pool_fallbacks: IntCounterVec,
    kv_bytes: IntCounterVec,
    requests: IntCounterVec,
    /// Requests without a known API key.
    pub unauthorized: IntCounterVec,
    /// Requests refused by a limit of their tenant.
    pub tenant_refusals: IntCounterVec,
    pub tenants_reloads: IntCounterVec,
}

impl RouterMetrics {
    pub fn new(metrics: &Metrics) -> Self {
        Self {
            stages: metrics.latency_vec("stage_seconds", "Time per stage of a request.", &["stage"]),
            attempts: metrics.counter("attempts_total", "Routes that were tried."),
            retries: metrics.counter_vec("retries_total", "Failed attempts, by reason.", &["reason"]),
            continuations: metrics.counter("continuations_total", "Streams that continued on another route."),
            pool_fallbacks: metrics.counter_vec(
                "pool_fallbacks_total",
                "Prompts whose KV the pool did not take, by reason.",
                &["reason"],
            ),
            kv_bytes: metrics.counter_vec(
                "kv_arrived_bytes_total",
                "KV that decode nodes reported.",
                &["connector"],
            ),
            requests: metrics.counter_vec("requests_total", "Requests, by outcome.", &["outcome"]),
            unauthorized: metrics.counter_vec(
                "unauthorized_total",
                "Requests without a known API key.",
                &["reason"],
            ),
            tenant_refusals: metrics.counter_vec(
                "tenant_refusals_total",
                "Requests over a limit of their tenant.",
                &["tenant", "limit"],
            ),
            tenants_reloads: metrics.counter_vec(
                "tenants_file_reloads_total",
                "Changes of the tenants file.",
                &["outcome"],
            ),
        }
    }

    pub fn stage(&self, stage: Stage, took: Duration) {
        self.stages.with_label_values(&[stage.as_str()]).observe(took.as_secs_f64());
    }

    pub fn arrived(&self, scheme: &str, bytes: u64, waited: Duration) {
        self.stage(Stage::Transfer, waited);
        self.kv_bytes.with_label_values(&[scheme]).inc_by(bytes);
    }
}

// === outcomes ===

/// The outcome of one request, recorded in the metrics on drop. Without another outcome the client has
/// cancelled the request, unless `complete` is set.
#[derive(Debug)]
pub struct Outcome {
    metrics: RouterMetrics,
    accepted: Instant,
    complete: Complete,
    word: &'static str,
}

const CANCELLED: &str = "cancelled";

impl Outcome {
    pub fn new(metrics: &RouterMetrics, accepted: Instant) -> Self {
        Self { metrics: metrics.clone(), accepted, complete: Complete::default(), word: CANCELLED }
    }

    pub fn complete(&self) -> Complete {
        self.complete.clone()
    }

    pub fn finished(&mut self) {
        self.word = "finished";
        self.metrics.stage(Stage::Whole, self.accepted.elapsed());
    }

    /// Stores the outcome of `result` if it is an error, and returns `result`.
    pub fn note<T>(&mut self, result: Result<T, ServeError>) -> Result<T, ServeError> {
        if let Err(error) = &result {
            self.word = error.outcome();
        }
        result
    }
}

impl Drop for Outcome {
    fn drop(&mut self) {
        if self.word == CANCELLED && self.complete.is_said() {
            self.finished();
        }
        self.metrics.requests.with_label_values(&[self.word]).inc();
    }
}
