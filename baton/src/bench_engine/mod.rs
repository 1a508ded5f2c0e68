//! `baton bench engine`: how fast the engine is by itself, beside what the device can do at most.

mod args;
mod check;
mod opened;
mod report;

use std::process::ExitCode;

use engine::backend::cuda::{CudaLimits, DecodeProfile};
use engine::measure::{Measured, measure};
use serde::Serialize;

pub(crate) use args::EngineArgs;
use opened::Opened;

use crate::exit::Failed;

/// Everything that one run found.
#[derive(Debug, Serialize)]
struct Report {
    command: String,
    commit: Option<String>,
    machine: bench::machine::Machine,
    model: String,
    device: String,
    /// Seconds until the first step could be launched.
    open_s: f64,
    /// Decode steps that were recorded at the start, and after it.
    recorded: Option<(usize, usize)>,
    limits: Option<CudaLimits>,
    measured: Option<Measured>,
    profiles: Vec<DecodeProfile>,
    checks: Vec<check::Checked>,
}

pub(crate) fn run(args: &EngineArgs) -> Result<ExitCode, Failed> {
    let report = if args.check { checked(args)? } else { measured(args)? };
    if let Some(file) = &args.out {
        let text = serde_json::to_string_pretty(&report).map_err(Failed::work)?;
        std::fs::write(file, text + "\n").map_err(Failed::work)?;
    }
    report::say(&report);
    let is_equal = report.checks.iter().all(check::Checked::is_equal);
    Ok(if is_equal { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn measured(args: &EngineArgs) -> Result<Report, Failed> {
    let started = tokio::time::Instant::now();
    let mut opened = Opened::open(args)?;
    let mut report = Report::new(args, opened.device());
    report.open_s = started.elapsed().as_secs_f64();
    report::tell(&format!("{} on {}: open after {:.1} s", report.model, report.device, report.open_s));
    report.limits = opened.limits()?;
    let measured = measure(opened.backend(), &args.workload(), &mut report::tell);
    report.measured = Some(measured.map_err(Failed::work)?);
    if args.profile {
        report.profiles = opened.profiles(&args.batches, args.context)?;
    }
    report.recorded = opened.recorded();
    Ok(report)
}

fn checked(args: &EngineArgs) -> Result<Report, Failed> {
    let mut report = Report::new(args, "cuda".to_owned());
    for folder in args.check_folders() {
        let checked = check::check(&folder, args)?;
        report::tell(&checked.line());
        report.checks.push(checked);
    }
    Ok(report)
}

impl Report {
    fn new(args: &EngineArgs, device: String) -> Self {
        Self {
            command: std::env::args().collect::<Vec<_>>().join(" "),
            commit: args.commit.clone().or_else(bench::machine::commit),
            machine: bench::machine::Machine::here(),
            model: args.model.display().to_string(),
            device,
            open_s: 0.0,
            recorded: None,
            limits: None,
            measured: None,
            profiles: Vec::new(),
            checks: Vec::new(),
        }
    }
}
