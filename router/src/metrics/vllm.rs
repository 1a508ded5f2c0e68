//! The metrics that vLLM has too, under vLLM's names, for dashboards that exist.

use chassis::metrics::{Alias, Metrics};
use prometheus::IntGaugeVec;

use crate::requests::{Place, PlaceCounts};

/// Metrics with vLLM's name for them. The second name of token gaps is that of vLLM before version 0.11.
const NAMES: [(&str, &str); 6] = [
    ("prompt_tokens_total", "vllm:prompt_tokens_total"),
    ("output_tokens_total", "vllm:generation_tokens_total"),
    ("first_token_seconds", "vllm:time_to_first_token_seconds"),
    ("token_gap_seconds", "vllm:inter_token_latency_seconds"),
    ("token_gap_seconds", "vllm:time_per_output_token_seconds"),
    ("request_seconds", "vllm:e2e_request_latency_seconds"),
];

/// The gauges that have no place in vLLM: the sums over all places.
#[derive(Clone, Debug)]
pub struct VllmGauges {
    running: IntGaugeVec,
    waiting: IntGaugeVec,
}

impl VllmGauges {
    /// Adds all of vLLM's names to the page.
    pub fn add(page: &Metrics) -> Self {
        for (of, name) in NAMES {
            page.alias(Alias { of, name, label: ("model", "model_name") });
        }
        let gauge = |name, help| page.foreign_gauge_vec(name, help, &["model_name"]);
        Self {
            running: gauge("vllm:num_requests_running", "Requests that nodes work on."),
            waiting: gauge("vllm:num_requests_waiting", "Requests that wait for a node, room or KV."),
        }
    }

    pub(super) fn set(&self, model: &str, counts: PlaceCounts) {
        let sum = |is_waiting: bool| {
            let counts = Place::ALL.into_iter().zip(counts);
            counts.filter(|(place, _)| place.is_waiting() == is_waiting).map(|(_, count)| count).sum()
        };
        self.running.with_label_values(&[model]).set(sum(false));
        self.waiting.with_label_values(&[model]).set(sum(true));
    }
}
