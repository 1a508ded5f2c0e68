//! The common parts of `serve`, `ab` and `faults`: a target, a run, a report.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use serde_json::{Map, Value};
use tokio::time::Instant;

use crate::client::TargetServer;
use crate::client::request::{Endpoint, Prompt};
use crate::client::survey::{Survey, SurveyRequest, survey};
use crate::command::tell;
use crate::error::{BenchError, Result};
use crate::load::compose::Composer;
use crate::load::drive::{Drive, LoadResult, drive};
use crate::load::{Live, LoadArgs};
use crate::machine::{Machine, commit};
use crate::metrics::{LagSamples, Objectives, Window};
use crate::progress::Progress;
use crate::random::{fresh_seed, mix};
use crate::record::RequestRecord;
use crate::report::{MeasuredServer, Provenance, ReportParts, RunReport};
use crate::workload::{WorkloadArgs, sessions};

/// The form of the requests.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Requests")]
pub struct RequestArgs {
    /// The model's name; by default the first model of the server
    #[arg(long)]
    pub model: Option<String>,
    /// completions takes token ids; chat takes text, one common word for each drawn token
    #[arg(long, value_enum, default_value_t)]
    pub endpoint: Endpoint,
    /// A header for every request, `name: value`; may be repeated
    #[arg(long, value_parser = parse_header, value_name = "HEADER")]
    pub header: Vec<(String, String)>,
    /// Fields for every request's body, as a JSON object
    #[arg(long, value_parser = parse_fields, value_name = "JSON")]
    pub fields: Option<Map<String, Value>>,
    /// Ask a Baton router where each request's time went, for `baton bench explain`
    #[arg(long)]
    pub explain: bool,
    /// Let answers end where the model ends them
    #[arg(long)]
    pub heed_eos: bool,
}

/// Where and how results are written.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Results")]
pub struct OutputArgs {
    /// File for the report; for several reports, the beginning of their names
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// The name of the run in tables
    #[arg(long, value_name = "NAME")]
    pub label: Option<String>,
    /// The objectives of a good request: ttft=2s,tbt=25ms (tbt is the p99 of the request's own gaps; others
    /// are tbt.mean, tbt.p95, tbt.max)
    #[arg(long, default_value = "", value_name = "OBJECTIVES", hide_default_value = true)]
    pub slo: Objectives,
    /// Show no progress bar
    #[arg(long)]
    pub quiet: bool,
}

pub fn parse_header(text: &str) -> std::result::Result<(String, String), String> {
    let (name, value) = text.split_once(':').ok_or_else(|| format!("`{text}` is not `name: value`"))?;
    let is_line = |text: &str| !text.contains(['\r', '\n']);
    if is_line(name) && is_line(value) {
        Ok((name.trim().to_owned(), value.trim().to_owned()))
    } else {
        Err("a header is one line".to_owned())
    }
}

pub fn parse_fields(text: &str) -> std::result::Result<Map<String, Value>, String> {
    serde_json::from_str(text).map_err(|error| format!("`{text}` is not a JSON object: {error}"))
}

/// A server that was surveyed, and a workload for it.
#[derive(Debug)]
pub struct Bench {
    target: Arc<TargetServer>,
    pub survey: Survey,
    workload: WorkloadArgs,
    endpoint: Endpoint,
    pub seed: u64,
    pub salt: u64,
}

/// The settings that differ between the runs of one bench.
#[derive(Clone, Debug)]
pub struct RunSpec {
    pub load: LoadArgs,
    pub label: String,
    pub is_quiet: bool,
    /// Changes arrivals and lengths from run to run; 0 for the seed as given.
    pub seed_step: u64,
    /// Changes the contents of prompts from run to run. Every run needs its own contents, otherwise the
    /// second one finds warm caches.
    pub salt_step: u64,
    pub slice: u32,
    pub epoch: Option<Instant>,
}

impl RunSpec {
    pub fn new(load: LoadArgs, label: &str) -> Self {
        Self {
            load,
            label: label.to_owned(),
            is_quiet: false,
            seed_step: 0,
            salt_step: 0,
            slice: 0,
            epoch: None,
        }
    }
}

impl Bench {
    pub async fn prepare(url: &str, requests: &RequestArgs, workload: &WorkloadArgs) -> Result<Self> {
        let target = Arc::new(TargetServer::resolve(url).await?);
        let fields = requests.fields.clone().unwrap_or_default();
        let mut headers = requests.header.clone();
        if requests.explain {
            headers.push(("x-baton-explain".to_owned(), "1".to_owned()));
        }
        let request = SurveyRequest {
            endpoint: requests.endpoint,
            model: requests.model.as_deref(),
            headers: &headers,
            fields: &fields,
            ignore_eos: !requests.heed_eos,
            probe: probe(requests.endpoint, workload),
        };
        let survey = survey(&target, &request).await?;
        let seed = workload.seed.unwrap_or_else(fresh_seed);
        let salt = workload.salt.unwrap_or_else(fresh_seed);
        Ok(Self { target, survey, workload: workload.clone(), endpoint: requests.endpoint, seed, salt })
    }

    /// Runs the load once. Returns the records, without judging them.
    pub async fn run(&self, spec: &RunSpec) -> Result<LoadResult> {
        let seed = if spec.seed_step == 0 { self.seed } else { mix(self.seed, spec.seed_step) };
        let supply = sessions(&self.workload, seed)?;
        let supply = supply.take(spec.load.requests.unwrap_or(usize::MAX));
        let n_total = self.n_planned(supply.size_hint().1);
        let composer = Composer {
            shape: self.survey.shape.clone(),
            salt: if spec.salt_step == 0 { self.salt } else { mix(self.salt, spec.salt_step) },
            vocabulary: self.workload.token_ids.clone(),
        };
        let job = Drive {
            target: Arc::clone(&self.target),
            composer: Arc::new(composer),
            sessions: Box::new(supply),
            pacing: spec.load.pacing(seed)?,
            duration: spec.load.duration,
            client: spec.load.client(),
            epoch: spec.epoch,
            slice: spec.slice,
        };
        let live = Arc::new(Live::default());
        let _bar = (!spec.is_quiet).then(|| Progress::start(&spec.label, n_total, Arc::clone(&live)));
        drive(job, live).await.map_err(BenchError::Prepare)
    }

    /// Returns the number of requests in `n_sessions` sessions, for the progress bar; `None` if their number
    /// is not known.
    fn n_planned(&self, n_sessions: Option<usize>) -> Option<u64> {
        let n_sessions = n_sessions.filter(|n| *n < usize::MAX)?;
        Some(n_sessions as u64 * u64::from(self.workload.n_turns()))
    }

    pub fn report(
        &self,
        spec: &RunSpec,
        objectives: &Objectives,
        records: &[RequestRecord],
        lag: LagSamples,
    ) -> RunReport {
        let us = |span: Duration| span.as_micros() as u64;
        let parts = ReportParts {
            label: spec.label.clone(),
            provenance: self.provenance(spec),
            subject: self.subject(),
            lag: lag.judge(spec.load.lag_limit),
            window: Window::steady(records, us(spec.load.skip()), us(spec.load.cooldown)),
            objectives: objectives.clone(),
        };
        RunReport::new(parts, records)
    }

    fn provenance(&self, spec: &RunSpec) -> Provenance {
        Provenance {
            tool: concat!("baton bench ", env!("CARGO_PKG_VERSION")).to_owned(),
            commit: commit(),
            command: std::env::args().collect(),
            machine: Machine::here(),
            workload: self.workload.describe(),
            load: spec.load.describe(),
            seed: self.seed,
            salt: self.salt,
            is_cache_cold: self.workload.salt.is_none(),
        }
    }

    fn subject(&self) -> MeasuredServer {
        let survey = &self.survey;
        MeasuredServer {
            url: self.target.url.clone(),
            endpoint: self.endpoint.name().to_owned(),
            model: survey.model.clone(),
            return_token_ids: survey.extras.return_token_ids,
            continuous_usage: survey.extras.continuous_usage,
            ignore_eos: survey.extras.ignore_eos,
            counted_by: survey.counted_by,
            cold_ttft_ms: survey.cold_ttft_ms,
            cold_second_token_ms: survey.cold_second_token_ms,
            config: survey.config.clone(),
        }
    }
}

/// Returns a short prompt for the survey, in the form that the run sends.
fn probe(endpoint: Endpoint, workload: &WorkloadArgs) -> Prompt {
    match endpoint {
        Endpoint::Chat => Prompt::Messages(vec![("user", "Count to ten.".to_owned())]),
        Endpoint::Completions if workload.is_text() => Prompt::Text("Count to ten.".to_owned()),
        Endpoint::Completions => Prompt::TokenIds(workload.token_ids.0.clone().take(8).collect()),
    }
}

impl OutputArgs {
    /// Returns the path of a report's file: as given, or made from the run and its date.
    pub fn path(&self, report: &RunReport, suffix: &str) -> PathBuf {
        let stem = match &self.out {
            Some(out) if suffix.is_empty() => return out.clone(),
            Some(out) => out.with_extension("").to_string_lossy().into_owned(),
            None => format!("bench-{}", report.date.replace([':', '-'], "")),
        };
        let suffix = suffix.replace(|c: char| !c.is_ascii_alphanumeric() && c != '.', "-");
        let joint = if suffix.is_empty() { "" } else { "-" };
        PathBuf::from(format!("{stem}{joint}{suffix}.json"))
    }

    pub fn write(&self, report: &RunReport, suffix: &str) -> Result<PathBuf> {
        let path = self.path(report, suffix);
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            make_folder(folder)?;
        }
        report.write(&path)?;
        tell(&format!("report: {}", path.display()));
        Ok(path)
    }
}

fn make_folder(folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder).map_err(|source| BenchError::Write { path: folder.to_owned(), source })
}
