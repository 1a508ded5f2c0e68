//! `baton bench engine`: measures the speed of the engine alone, and the limits of the device.

mod args;
mod check;
mod opened;
mod report;

use std::path::Path;
use std::process::ExitCode;

use engine::backend::cuda::{CudaLimits, DecodeProfile, LoadReport};
use engine::load::made::{self, Form};
use engine::measure::sleep_cycles::{self, SleepCycle};
use engine::measure::{Measurements, measure};
use serde::Serialize;

pub(crate) use args::EngineArgs;
use args::{WeightFormat, WeightSource};
use opened::AnyBackend;

use crate::exit::CommandError;
use crate::model::{from_gguf, not_a_model};

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
    loaded: Option<LoadReport>,
    /// The number of decode steps that were recorded as CUDA graphs at the start, and later.
    recorded: Option<(usize, usize)>,
    limits: Option<CudaLimits>,
    measured: Option<Measurements>,
    profiles: Vec<DecodeProfile>,
    checks: Vec<check::ModelComparison>,
    naps: Vec<SleepCycle>,
}

pub(crate) fn run(args: &EngineArgs) -> Result<ExitCode, CommandError> {
    let mut args = args.clone();
    if let Some(folder) = from_gguf(args.model())? {
        args.model = Some(folder);
    }
    let args = &args;
    let folders = if args.check { args.check_folders() } else { vec![args.model().to_owned()] };
    if let Some(missing) = folders.iter().find_map(|folder| not_a_model(folder)) {
        return Err(CommandError::start(missing));
    }
    if let Some(folder) = &args.write_weights {
        return write_weights(args, folder);
    }
    if args.quantize == WeightFormat::Fp8Blocks {
        let wrong =
            "--quantize fp8-blocks needs --write-weights FOLDER: measure the checkpoint that it writes";
        return Err(CommandError::usage(wrong));
    }
    let report = match args {
        EngineArgs { check: true, .. } => checked(args)?,
        EngineArgs { naps: 1.., .. } => slept(args)?,
        _ => measured(args)?,
    };
    if let Some(file) = &args.out {
        let text = serde_json::to_string_pretty(&report).map_err(CommandError::work)?;
        std::fs::write(file, text + "\n").map_err(CommandError::work)?;
    }
    report::say(&report);
    let is_equal = report.checks.iter().all(check::ModelComparison::is_equal)
        && report.naps.iter().all(|nap| nap.are_equal);
    Ok(if is_equal { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Writes a checkpoint of the model, on all cores.
fn write_weights(args: &EngineArgs, folder: &Path) -> Result<ExitCode, CommandError> {
    let started = tokio::time::Instant::now();
    let form = match args.quantize {
        WeightFormat::No => Form::Bf16,
        WeightFormat::Fp8 => Form::CompressedTensors,
        WeightFormat::Fp8Blocks => Form::Blocks,
    };
    let bytes = match args.weights {
        WeightSource::Dummy => made::write(args.model(), folder, 1, form),
        WeightSource::Safetensors => made::rewrite(args.model(), folder, form),
    };
    let bytes = bytes.map_err(CommandError::work)?;
    let seconds = started.elapsed().as_secs_f64();
    report::tell(&format!("{:.2} GB of weights in {}: {seconds:.1} s", bytes as f64 / 1e9, folder.display()));
    Ok(ExitCode::SUCCESS)
}

fn measured(args: &EngineArgs) -> Result<Report, CommandError> {
    let started = tokio::time::Instant::now();
    let mut opened = AnyBackend::open(args)?;
    let mut report = Report::new(args, opened.device());
    report.open_s = started.elapsed().as_secs_f64();
    report::tell(&format!("{} on {}: open after {:.1} s", report.model, report.device, report.open_s));
    report.loaded = opened.loaded();
    let workload = args.workload();
    workload.ensure_room(opened.backend()).map_err(CommandError::usage)?;
    report.limits = opened.limits()?;
    let measured = measure(opened.backend(), &workload, &mut report::tell);
    report.measured = Some(measured.map_err(CommandError::work)?);
    if args.profile {
        report.profiles = opened.profiles(&args.batches, args.context)?;
    }
    report.recorded = opened.recorded();
    Ok(report)
}

fn slept(args: &EngineArgs) -> Result<Report, CommandError> {
    let opened = AnyBackend::open(args)?;
    let mut report = Report::new(args, opened.device());
    report.loaded = opened.loaded();
    report.naps = sleep_cycles::measure(opened.into_backend(), args.naps, &mut report::tell)
        .map_err(CommandError::work)?;
    Ok(report)
}

fn checked(args: &EngineArgs) -> Result<Report, CommandError> {
    let mut report = Report::new(args, "cuda".to_owned());
    if args.deterministic {
        report.add(check::check_alike(args.model(), args)?);
        return Ok(report);
    }
    for folder in args.check_folders() {
        if !check::has_layers(&folder, args)? {
            report::tell(&format!("{}: left out, it has fewer layers than stages", folder.display()));
            continue;
        }
        report.add(check::check(&folder, args)?);
        check::check_contract(&folder, args);
        // Several GPUs add numbers in another order than one, so only one GPU is compared bit by bit.
        if args.cuda().ranks.get() == 1 {
            report.add(check::check_alike(&folder, args)?);
        }
    }
    Ok(report)
}

impl Report {
    fn add(&mut self, checked: check::ModelComparison) {
        report::tell(&checked.line());
        self.checks.push(checked);
    }

    fn new(args: &EngineArgs, device: String) -> Self {
        Self {
            command: std::env::args().collect::<Vec<_>>().join(" "),
            commit: args.commit.clone().or_else(bench::machine::commit),
            machine: bench::machine::Machine::here(),
            model: args.model().display().to_string(),
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
