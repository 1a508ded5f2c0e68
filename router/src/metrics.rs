//! What the router counts.

use std::time::Duration;

use chassis::metrics::Metrics;
use prometheus::{HistogramVec, IntCounter, IntCounterVec};

use tokio::time::Instant;

use crate::error::ServeError;
use crate::serve::Complete;

/// The stages of a request's walk, as the router sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// From asking a decode node to its landing.
    Reserve,
    /// In the prefill node, from the prompt's arrival to its first step.
    PrefillQueue,
    /// In the prefill node, from its first step to the first token.
    Prefill,
    /// From asking a pool node to its word that it has the KV.
    Store,
    /// From the landing to the handoff.
    Transfer,
    /// From acceptance to the first token.
    FirstToken,
    /// From the first token to the second: what a slow hand-over of KV shows up in.
    HandoverGap,
    /// From one token to the next, from the second on.
    Step,
    /// From acceptance to the last token.
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
    /// Prompts whose KV a prefill node held because the pool did not take it.
    pub pool_fallbacks: IntCounterVec,
    kv_bytes: IntCounterVec,
    requests: IntCounterVec,
    /// Requests without a key that is known.
    pub unauthorized: IntCounterVec,
    /// Requests that a limit of their tenant refused.
    pub tenant_refusals: IntCounterVec,
    pub tenants_reloads: IntCounterVec,
}

impl RouterMetrics {
    pub fn new(metrics: &Metrics) -> Self {
        Self {
            stages: metrics.latency_vec("stage_seconds", "Time per stage of the walk.", &["stage"]),
            attempts: metrics.counter("attempts_total", "Routes that were tried."),
            retries: metrics.counter_vec("retries_total", "Tries that failed, by reason.", &["reason"]),
            continuations: metrics.counter("continuations_total", "Streams that went on elsewhere."),
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
            requests: metrics.counter_vec("requests_total", "Requests, by how they ended.", &["outcome"]),
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

/// How one request ends. Dropped before it has, the client has gone, unless the answer was complete for it.
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

    /// Remembers an error on its way to the client.
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
