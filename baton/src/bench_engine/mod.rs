//! `baton bench engine`: measures the speed of the engine alone, and the limits of the device.

mod args;
mod check;
mod opened;
mod report;

use std::path::Path;
use std::process::ExitCode;

use engine::backend::cuda::{CudaLimits, DecodeProfile, Loaded};
use engine::load::made::{self, Form};
use engine::measure::sleep_cycles::{self, SleepCycle};
use engine::measure::{Measured, measure};
use serde::Serialize;

pub(crate) use args::EngineArgs;
use args::{Quantized, WeightSource};
use opened::Opened;

use crate::exit::Failed;

/// All results of one run, as they are written to the JSON file.
#[derive(Debug, Serialize)]
struct Report {
    command: String,
    commit: Option<String>,
    machine: bench::machine::Machine,
    model: String,
    device: String,
    /// The seconds from the start of loading until the first step could be launched.
    open_s: f64,
    /// The size and loading time of the weights alone, on a GPU.
    loaded: Option<Loaded>,
    /// The number of decode steps that were recorded as CUDA graphs at the start, and later.
    recorded: Option<(usize, usize)>,
    limits: Option<CudaLimits>,
    measured: Option<Measured>,
    profiles: Vec<DecodeProfile>,
    checks: Vec<check::Checked>,
    naps: Vec<SleepCycle>,
}

pub(crate) fn run(args: &EngineArgs) -> Result<ExitCode, Failed> {
    if let Some(folder) = &args.write_weights {
        return write_weights(args, folder);
    }
    let report = match args {
        EngineArgs { check: true, .. } => checked(args)?,
        EngineArgs { naps: 1.., .. } => slept(args)?,
        _ => measured(args)?,
    };
    if let Some(file) = &args.out {
        let text = serde_json::to_string_pretty(&report).map_err(Failed::work)?;
        std::fs::write(file, text + "\n").map_err(Failed::work)?;
    }
    report::say(&report);
    let is_equal =
        report.checks.iter().all(check::Checked::is_equal) && report.naps.iter().all(|nap| nap.are_equal);
    Ok(if is_equal { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Writes a checkpoint of the model, on all cores.
fn write_weights(args: &EngineArgs, folder: &Path) -> Result<ExitCode, Failed> {
    let started = tokio::time::Instant::now();
    let form = match args.quantize {
        Quantized::No => Form::Bf16,
        Quantized::Fp8 => Form::CompressedTensors,
    };
    let bytes = match args.weights {
        WeightSource::Dummy => made::write(&args.model, folder, 1, form),
        WeightSource::Safetensors => made::rewrite(&args.model, folder, form),
    };
    let bytes = bytes.map_err(Failed::work)?;
    let seconds = started.elapsed().as_secs_f64();
    report::tell(&format!("{:.2} GB of weights in {}: {seconds:.1} s", bytes as f64 / 1e9, folder.display()));
    Ok(ExitCode::SUCCESS)
}

fn measured(args: &EngineArgs) -> Result<Report, Failed> {
    let started = tokio::time::Instant::now();
    let mut opened = Opened::open(args)?;
    let mut report = Report::new(args, opened.device());
    report.open_s = started.elapsed().as_secs_f64();
    report::tell(&format!("{} on {}: open after {:.1} s", report.model, report.device, report.open_s));
    report.loaded = opened.loaded();
    let workload = args.workload();
    workload.ensure_room(opened.backend()).map_err(Failed::usage)?;
    report.limits = opened.limits()?;
    let measured = measure(opened.backend(), &workload, &mut report::tell);
    report.measured = Some(measured.map_err(Failed::work)?);
    if args.profile {
        report.profiles = opened.profiles(&args.batches, args.context)?;
    }
    report.recorded = opened.recorded();
    Ok(report)
}

fn slept(args: &EngineArgs) -> Result<Report, Failed> {
    let opened = Opened::open(args)?;
    let mut report = Report::new(args, opened.device());
    report.loaded = opened.loaded();
    report.naps =
        sleep_cycles::measure(opened.into_backend(), args.naps, &mut report::tell).map_err(Failed::work)?;
    Ok(report)
}

fn checked(args: &EngineArgs) -> Result<Report, Failed> {
    let mut report = Report::new(args, "cuda".to_owned());
    if args.deterministic {
        report.add(check::check_alike(&args.model, args)?);
        return Ok(report);
    }
    for folder in args.check_folders() {
        report.add(check::check(&folder, args)?);
        check::check_sleep(&folder, args);
        // Several GPUs add numbers in another order than one, so only one GPU is compared bit by bit.
        if args.cuda().ranks.get() == 1 {
            report.add(check::check_alike(&folder, args)?);
        }
    }
    Ok(report)
}

impl Report {
    fn add(&mut self, checked: check::Checked) {
        report::tell(&checked.line());
        self.checks.push(checked);
    }

    fn new(args: &EngineArgs, device: String) -> Self {
        Self {
            command: std::env::args().collect::<Vec<_>>().join(" "),
            commit: args.commit.clone().or_else(bench::machine::commit),
            machine: bench::machine::Machine::here(),
            model: args.model.display().to_string(),
            device,
            open_s: 0.0,
            loaded: None,
            recorded: None,
            limits: None,
            measured: None,
            profiles: Vec::new(),
            checks: Vec::new(),
            naps: Vec::new(),
        }
    }
}
