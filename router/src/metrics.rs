//! The metrics of the router.

mod line;
mod models;
mod outcome;
pub mod predictions;
mod text;
mod vllm;

use std::time::Duration;

use chassis::connections::ConnectionCounts;
use chassis::metrics::{LatencyHistogram, LatencyHistogramVec, Metrics};
use prometheus::{HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec};

use crate::breaker::Breakers;
use crate::cluster::Cluster;
use crate::http::Code;
use crate::requests::{Place, PlaceCounts, Requests};
use crate::upstream::{Health, LEG_OUTCOMES, LegRole, MemberStatus};
pub use line::LineMetrics;
use models::ModelLabels;
pub use outcome::Outcome;
use predictions::PredictionMetrics;
pub use text::TextMetrics;
pub use vllm::VllmGauges;

/// The stages of a request, as the router measures them.
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
    /// The time from the first token to the second. A slow transfer of KV shows here.
    HandoverGap,
}

impl Stage {
    const ALL: [Self; 6] =
        [Self::Reserve, Self::PrefillQueue, Self::Prefill, Self::Store, Self::Transfer, Self::HandoverGap];

    fn as_str(self) -> &'static str {
        match self {
            Self::Reserve => "reserve",
            Self::PrefillQueue => "prefill_queue",
            Self::Prefill => "prefill",
            Self::Store => "store",
            Self::Transfer => "transfer",
            Self::HandoverGap => "handover_gap",
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
    /// Prompt tokens that routes expected in the caches of the nodes that compute them.
    pub expected_cached_tokens: IntCounter,
    /// Prompt tokens that nodes found in their caches.
    pub cached_tokens: IntCounter,
    caches: IntGaugeVec,
    kv_bytes: IntCounterVec,
    requests: IntCounterVec,
    running: IntGaugeVec,
    waiting: IntGaugeVec,
    prompt_tokens: IntCounterVec,
    output_tokens: IntCounterVec,
    first_token: LatencyHistogramVec,
    token_gap: LatencyHistogramVec,
    request: LatencyHistogramVec,
    refusals: IntCounterVec,
    connections_refused: IntCounterVec,
    /// The lines in which requests wait for room.
    pub line: LineMetrics,
    /// Tokenizing.
    pub text: TextMetrics,
    models: ModelLabels,
    /// Requests without a known API key.
    pub unauthorized: IntCounterVec,
    /// Requests refused by a limit of their tenant.
    pub tenant_refusals: IntCounterVec,
    pub tenants_reloads: IntCounterVec,
    /// Fetches of the OpenID provider's keys.
    pub keys_fetches: IntCounterVec,
    breaker_changes: IntCounterVec,
    breakers_open: IntGauge,
    /// Moves of nodes between roles that this router has asked for.
    pub role_moves: IntCounterVec,
    pub predictions: PredictionMetrics,
    /// Calls to servers of other engines that ended.
    pub upstream_legs: IntCounterVec,
    /// Answers of prefill servers that named no KV, so that the decode server computed the prompt.
    pub upstream_prefills_without_kv: IntCounter,
    pub upstream_source_failures: IntCounterVec,
    upstream_members: IntGaugeVec,
}

/// The metrics of one model's requests.
#[derive(Clone, Debug)]
pub struct ModelMetrics {
    label: String,
    requests: IntCounterVec,
    pub prompt_tokens: IntCounter,
    pub output_tokens: IntCounter,
    pub first_token: LatencyHistogram,
    pub token_gap: LatencyHistogram,
    request: LatencyHistogram,
}

impl RouterMetrics {
    pub fn new(metrics: &Metrics) -> Self {
        let own = Self::register(metrics);
        // Known labels are on the page from the start, because Prometheus' `rate` misses the first count of a
        // new series.
        Code::ALL.iter().for_each(|code| drop(own.refusals.with_label_values(&[code.as_str()])));
        Stage::ALL.iter().for_each(|stage| drop(own.stages.with_label_values(&[stage.as_str()])));
        for role in LegRole::ALL {
            let leg = |outcome| drop(own.upstream_legs.with_label_values(&[role.as_str(), outcome]));
            LEG_OUTCOMES.into_iter().for_each(leg);
            drop(own.upstream_source_failures.with_label_values(&[role.as_str()]));
        }
        own
    }

    fn register(metrics: &Metrics) -> Self {
        let counter = |name, help, labels: &[&str]| metrics.counter_vec(name, help, labels);
        let by_model = |name, help| metrics.token_latency_vec(name, help, "model");
        let by_place = |name, help| metrics.gauge_vec(name, help, &["model", "place"]);
        Self {
            stages: metrics.latency_vec("stage_seconds", "Time per stage of a request.", &["stage"]),
            attempts: metrics.counter("attempts_total", "Routes that were tried."),
            retries: counter("retries_total", "Failed attempts, by reason.", &["reason"]),
            continuations: metrics.counter("continuations_total", "Streams that continued on another route."),
            pool_fallbacks: counter(
                "pool_fallbacks_total",
                "Prompts whose KV the pool did not take, by reason.",
                &["reason"],
            ),
            expected_cached_tokens: metrics.counter(
                "expected_cached_tokens_total",
                "Prompt tokens that routes expected in nodes' caches.",
            ),
            cached_tokens: metrics
                .counter("cached_tokens_total", "Prompt tokens that nodes found in their caches."),
            caches: metrics.gauge_vec(
                "node_caches",
                "Nodes, by what the router knows of their prefix caches.",
                &["known"],
            ),
            kv_bytes: counter("kv_arrived_bytes_total", "KV that decode nodes reported.", &["connector"]),
            requests: counter("requests_total", "Requests, by outcome.", &["model", "outcome"]),
            running: by_place("requests_running", "Requests that nodes work on, by place."),
            waiting: by_place("requests_waiting", "Requests that wait for a node, room or KV, by place."),
            prompt_tokens: counter("prompt_tokens_total", "Tokens of answered prompts.", &["model"]),
            output_tokens: counter("output_tokens_total", "Tokens given to clients.", &["model"]),
            first_token: by_model("first_token_seconds", "From a request's arrival to its first token."),
            token_gap: by_model("token_gap_seconds", "From one token of an answer to the next."),
            request: by_model("request_seconds", "From a request's arrival to its last token."),
            refusals: counter("refusals_total", "Requests that got an error, by code.", &["code"]),
            connections_refused: counter(
                "connections_refused_total",
                "Connections refused, or closed for a newer one.",
                &["port", "reason"],
            ),
            line: LineMetrics::new(metrics),
            text: TextMetrics::new(metrics),
            models: ModelLabels::default(),
            unauthorized: counter("unauthorized_total", "Requests without a known API key.", &["reason"]),
            tenant_refusals: counter(
                "tenant_refusals_total",
                "Requests over a limit of their tenant.",
                &["tenant", "limit"],
            ),
            tenants_reloads: counter(
                "tenants_file_reloads_total",
                "Changes of the tenants file.",
                &["outcome"],
            ),
            keys_fetches: counter(
                "oidc_keys_fetches_total",
                "Fetches of the OpenID provider's keys by URL.",
                &["outcome"],
            ),
            breaker_changes: counter(
                "breaker_changes_total",
                "Changes of nodes' breakers, by new state.",
                &["state"],
            ),
            role_moves: counter("role_moves_total", "Moves of nodes between roles.", &["outcome"]),
            breakers_open: metrics.gauge("breakers_open", "Nodes without work because their work fails."),
            predictions: PredictionMetrics::register(metrics),
            upstream_legs: counter("upstream_legs_total", "Ended upstream calls.", &["role", "outcome"]),
            upstream_prefills_without_kv: metrics
                .counter("upstream_prefills_without_kv_total", "Upstream prefills whose answer named no KV."),
            upstream_source_failures: counter(
                "upstream_source_failures_total",
                "Failed reads of lists of upstream servers.",
                &["role"],
            ),
            upstream_members: metrics.gauge_vec("upstream_members", "Upstream servers.", &["role", "health"]),
        }
    }

    /// Makes the breakers of all nodes.
    pub fn breakers(&self) -> Breakers {
        Breakers::new(self.breaker_changes.clone(), self.breakers_open.clone())
    }

    pub fn stage(&self, stage: Stage, took: Duration) {
        self.stages.with_label_values(&[stage.as_str()]).observe(took.as_secs_f64());
    }

    pub fn arrived(&self, scheme: &str, bytes: u64, waited: Duration) {
        self.stage(Stage::Transfer, waited);
        self.kv_bytes.with_label_values(&[scheme]).inc_by(bytes);
    }

    /// Counts a request that gets an error.
    pub fn refused(&self, code: &str) {
        self.refusals.with_label_values(&[code]).inc();
    }

    /// Returns the counts of one port's refused connections.
    pub fn connections(&self, port: &'static str) -> ConnectionCounts {
        ConnectionCounts::new(self.connections_refused.clone(), port)
    }

    pub fn of_model(&self, name: &str) -> ModelMetrics {
        let label = self.models.label(name);
        let labels = [label.as_str()];
        ModelMetrics {
            requests: self.requests.clone(),
            prompt_tokens: self.prompt_tokens.with_label_values(&labels),
            output_tokens: self.output_tokens.with_label_values(&labels),
            first_token: self.first_token.with_label_values(&labels),
            token_gap: self.token_gap.with_label_values(&labels),
            request: self.request.with_label_values(&labels),
            label,
        }
    }

    /// Sets the gauges of nodes by the completeness of the router's list of their cached blocks.
    pub fn show_caches(&self, cluster: &Cluster) {
        for (known, n_nodes) in cluster.n_known() {
            self.caches.with_label_values(&[known.as_str()]).set(n_nodes as i64);
        }
    }

    /// Sets the gauges of upstream servers.
    pub fn show_upstream(&self, members: &[MemberStatus]) {
        for (role, health) in LegRole::ALL.iter().flat_map(|role| Health::ALL.map(|health| (role, health))) {
            let n = members.iter().filter(|one| (one.role, one.health) == (*role, health)).count();
            self.upstream_members.with_label_values(&[role.as_str(), health.as_str()]).set(n as i64);
        }
    }

    /// Sets the gauges of requests under way, by model and place, and vLLM's if the page has them.
    pub fn show(&self, requests: &Requests, vllm: Option<&VllmGauges>) {
        for (model, counts) in self.counts(requests) {
            if let Some(vllm) = vllm {
                vllm.set(&model, counts);
            }
            for (place, count) in Place::ALL.into_iter().zip(counts) {
                let gauge = if place.is_waiting() { &self.waiting } else { &self.running };
                gauge.with_label_values(&[model.as_str(), place.as_str()]).set(count);
            }
        }
    }

    /// Counts the requests under way of each model that was ever counted, by place.
    fn counts(&self, requests: &Requests) -> Vec<(String, PlaceCounts)> {
        let under_way = requests.count(|model| self.models.label(model));
        let counted = |label: String| {
            let counts = under_way.get(&label).copied().unwrap_or_default();
            (label, counts)
        };
        self.models.all().into_iter().map(counted).collect()
    }
}

impl ModelMetrics {
    fn ended(&self, outcome: &str) {
        self.requests.with_label_values(&[self.label.as_str(), outcome]).inc();
    }
}
