//! The report of a run as a file: all that is needed to repeat the run, and to compute any other number from
//! it.

pub mod bars;
pub mod html;
pub mod markdown;
pub mod picture;
pub mod plot;
pub mod samples;
pub mod table;

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::client::request::OptionalFields;
use crate::error::{BenchError, Result, read_text, write_text};
use crate::explanation::RequestExplanation;
use crate::machine::Machine;
use crate::metrics::distribution::open_number;
use crate::metrics::{Distribution, LagReport, Metric, Objectives, Summary, Window, vllm};
use crate::record::{CountedBy, RequestRecord};
use crate::report::samples::Samples;

/// The version of the report's format. It changes when a field changes its meaning.
pub const SCHEMA: &str = "baton-bench/1";

/// The report of one run. Fields with the same name and meaning in `vllm bench serve` are in `shared`, at the
/// top of the file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RunReport {
    pub schema: String,
    pub label: String,
    pub date: String,
    pub provenance: Provenance,
    pub subject: MeasuredServer,
    /// Whether the run may be quoted.
    pub valid: bool,
    pub lag: LagReport,
    pub window: Window,
    /// The objectives, as the text of `--slo`.
    pub slo: String,
    pub requests: RequestCounts,
    pub attainment: AttainmentReport,
    pub rates: RateReport,
    pub tokens: TokenReport,
    /// The latencies by metric. Failed requests count as infinite.
    pub latency_ms: BTreeMap<String, Distribution>,
    pub notes: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub faults: Vec<FaultMark>,
    #[serde(flatten)]
    pub shared: Map<String, Value>,
    /// The server's explanations of the requests' times, with `--explain`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub explanations: Vec<RequestExplanation>,
    pub samples: Samples,
}

/// The origin of a run: all that a reader needs to repeat it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Provenance {
    pub tool: String,
    pub commit: Option<String>,
    pub command: Vec<String>,
    pub machine: Machine,
    pub workload: Value,
    pub load: Value,
    pub seed: u64,
    /// The seed of the prompts' contents. A second run with the same salt has the same prompts, and so warm
    /// caches.
    pub salt: u64,
    pub is_cache_cold: bool,
}

/// The measured server.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MeasuredServer {
    pub url: String,
    pub endpoint: String,
    pub model: String,
    pub return_token_ids: bool,
    pub continuous_usage: bool,
    pub ignore_eos: bool,
    pub counted_by: CountedBy,
    /// The time to the first token of the very first request, before the run. No distribution includes it.
    #[serde(with = "open_number")]
    pub cold_ttft_ms: f64,
    #[serde(with = "open_number")]
    pub cold_second_token_ms: f64,
    /// The server's configuration, as its pages show it, page by page.
    pub config: Map<String, Value>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct RequestCounts {
    pub sent: usize,
    pub finished: usize,
    pub failed: usize,
    pub cancelled: usize,
    pub failures: BTreeMap<String, usize>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct AttainmentReport {
    /// Good ÷ sent requests.
    pub share: f64,
    pub good: usize,
    pub sent: usize,
    /// The number of sent requests that held each objective.
    pub held: Vec<(String, usize)>,
}

#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct RateReport {
    pub requests_per_s: f64,
    pub goodput_per_s: f64,
    pub output_tokens_per_s: f64,
    pub total_tokens_per_s: f64,
}

#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct TokenReport {
    pub prompt: u64,
    pub cached: u64,
    pub output: u64,
    pub per_delivery: f64,
    pub most_in_a_delivery: u32,
    pub miscounted_requests: usize,
    pub short_requests: usize,
}

/// A fault that was injected during the run, and its cost.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FaultMark {
    pub at_us: u64,
    pub what: String,
    /// Requests that were running when the fault was injected and later failed.
    pub lost: usize,
    /// The seconds until attainment was back; infinite if it never was.
    #[serde(with = "open_number")]
    pub recovery_s: f64,
}

/// The parts of a report that are not computed from records.
#[derive(Clone, Debug)]
pub struct ReportParts {
    pub label: String,
    pub provenance: Provenance,
    pub subject: MeasuredServer,
    pub lag: LagReport,
    pub window: Window,
    pub objectives: Objectives,
}

// === impl RunReport ===

impl RunReport {
    pub fn new(parts: ReportParts, records: &[RequestRecord]) -> Self {
        let summary = Summary::of(records, parts.window, &parts.objectives);
        let mut shared = vllm::fields(records, parts.window, &parts.objectives);
        shared.extend(shared_settings(&parts, records.len()));
        Self {
            schema: SCHEMA.to_owned(),
            label: parts.label,
            date: crate::clock::today(),
            valid: parts.lag.is_valid(),
            window: parts.window,
            slo: parts.objectives.as_typed().to_owned(),
            requests: counts(&summary),
            attainment: attainment(&summary),
            rates: rates(&summary),
            tokens: tokens(&summary),
            latency_ms: latencies(&summary),
            notes: summary.notes(),
            faults: Vec::new(),
            shared,
            explanations: records.iter().filter_map(explained).collect(),
            samples: Samples::pack(records),
            provenance: parts.provenance,
            subject: parts.subject,
            lag: parts.lag,
        }
    }

    pub fn read(path: &Path) -> Result<Self> {
        let report: Self =
            serde_json::from_str(&read_text(path)?).map_err(|error| BenchError::parse(path, error))?;
        if report.schema == SCHEMA {
            Ok(report)
        } else {
            Err(BenchError::parse(path, format!("schema {} is not {SCHEMA}", report.schema)))
        }
    }

    pub fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self).map_err(|error| BenchError::parse(path, error))?;
        write_text(path, &(text + "\n"))
    }

    pub fn records(&self) -> Result<Vec<RequestRecord>> {
        self.samples.unpack()
    }

    pub fn objectives(&self) -> Objectives {
        self.slo.parse().unwrap_or_default()
    }

    pub fn latency(&self, metric: Metric) -> Distribution {
        self.latency_ms.get(metric.name()).cloned().unwrap_or_default()
    }
}

impl MeasuredServer {
    pub fn accepts(&mut self, extras: OptionalFields) {
        self.return_token_ids = extras.return_token_ids;
        self.continuous_usage = extras.continuous_usage;
        self.ignore_eos = extras.ignore_eos;
    }
}

fn explained(record: &RequestRecord) -> Option<RequestExplanation> {
    let explained = record.explanation.as_deref()?.clone();
    Some(RequestExplanation { index: record.index, explained })
}

/// Returns the settings under the names that vLLM uses.
fn shared_settings(parts: &ReportParts, n_sent: usize) -> Map<String, Value> {
    let load = &parts.provenance.load;
    let rate = if load["rate"].is_number() { load["rate"].clone() } else { "inf".into() };
    let entries = [
        ("backend", Value::from("openai")),
        ("endpoint_type", Value::from(parts.subject.endpoint.as_str())),
        ("model_id", Value::from(parts.subject.model.as_str())),
        ("num_prompts", Value::from(n_sent)),
        ("request_rate", rate),
        ("burstiness", load["burstiness"].clone()),
        ("max_concurrency", load["concurrency"].clone()),
    ];
    entries.map(|(name, value)| (name.to_owned(), value)).into_iter().collect()
}

fn counts(summary: &Summary) -> RequestCounts {
    RequestCounts {
        sent: summary.sent,
        finished: summary.finished,
        failed: summary.failed,
        cancelled: summary.cancelled,
        failures: summary.failures.iter().map(|(kind, n)| ((*kind).to_owned(), *n)).collect(),
    }
}

fn attainment(summary: &Summary) -> AttainmentReport {
    let attainment = &summary.attainment;
    AttainmentReport {
        share: attainment.share(),
        good: attainment.good,
        sent: attainment.sent,
        held: attainment.held.clone(),
    }
}

fn rates(summary: &Summary) -> RateReport {
    RateReport {
        requests_per_s: summary.rates.requests,
        goodput_per_s: summary.rates.good_requests,
        output_tokens_per_s: summary.rates.output_tokens,
        total_tokens_per_s: summary.rates.total_tokens,
    }
}

fn tokens(summary: &Summary) -> TokenReport {
    TokenReport {
        prompt: summary.tokens.prompt,
        cached: summary.tokens.cached,
        output: summary.tokens.output,
        per_delivery: summary.tokens.per_delivery,
        most_in_a_delivery: summary.tokens.most_in_a_delivery,
        miscounted_requests: summary.tokens.miscounted,
        short_requests: summary.tokens.short,
    }
}

fn latencies(summary: &Summary) -> BTreeMap<String, Distribution> {
    let named = |(metric, of): &(Metric, Distribution)| (metric.name().to_owned(), of.clone());
    summary.latencies.iter().map(named).collect()
}
