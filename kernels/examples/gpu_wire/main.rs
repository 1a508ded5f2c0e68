//! Memory of two GPUs and moves of pages between them: checked against the CPU, then measured.
//!
//! Writes JSON to a file and a summary to stderr. Fails if a byte or a digest is wrong. Needs two GPUs with
//! peer access.

mod check;
mod measure;
mod disturb;

use std::path::PathBuf;
use std::process::ExitCode;

use baton_kernels::cuda::ComputeCard;
use clap::{Parser, ValueEnum};
use device::RegionShape;
use device::cuda::{Cache, DeviceMemory, RemoteMemory};
use serde_json::json;

pub(crate) type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// KV memory on two GPUs, each mapped for the other.
pub(crate) struct Two {
    pub(crate) near: DeviceMemory,
    pub(crate) far: DeviceMemory,
    pub(crate) near_from_far: RemoteMemory,
    pub(crate) far_from_near: RemoteMemory,
}

impl Two {
    pub(crate) fn new(cards: &[ComputeCard; 2], shapes: &[RegionShape]) -> Outcome<Self> {
        Self::between(cards, shapes, shapes)
    }

    pub(crate) fn between(
        cards: &[ComputeCard; 2],
        near: &[RegionShape],
        far: &[RegionShape],
    ) -> Outcome<Self> {
        let [near, far] = [DeviceMemory::new(near, &cards[0])?, DeviceMemory::new(far, &cards[1])?];
        let (fd, bytes) = near.export()?;
        let near_from_far = far.import(&fd, bytes)?;
        let (fd, bytes) = far.export()?;
        let far_from_near = near.import(&fd, bytes)?;
        Ok(Self { near, far, near_from_far, far_from_near })
    }
}

/// Check moves of pages between two GPUs against the CPU, then measure them.
#[derive(Debug, Parser)]
struct Args {
    /// The folder of NVRTC, if the loader does not find it.
    #[arg(long, value_name = "FOLDER")]
    nvrtc: Option<PathBuf>,
    /// The JSON file for all results.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// The commit's name in the JSON file.
    #[arg(long, value_name = "NAME")]
    commit: Option<String>,
    /// The folder of the kernel cache. By default kernels are not cached.
    #[arg(long, value_name = "FOLDER")]
    cache: Option<PathBuf>,
    /// Check some shapes and measure nothing, for tools that instrument every access
    /// (`bench/gpu-sanitize.sh`).
    #[arg(long, value_enum, default_value_t = YesNo::No)]
    small: YesNo,
    /// Run this part only.
    #[arg(long, value_enum)]
    only: Option<Part>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum YesNo {
    Yes,
    No,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    Check,
    Measure,
    /// Measures how much KV reads and digests slow down concurrent matrix products.
    Disturb,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Outcome<()> {
    let cache = args.cache.as_deref().map_or_else(Cache::none, Cache::at);
    let is_small = args.small == YesNo::Yes;
    let open = |ordinal| ComputeCard::open(ordinal, args.nvrtc.as_deref(), &cache);
    let cards = [open(0)?, open(1)?];
    let is_wanted = |part: Part| args.only.is_none_or(|only| only == part);
    let mut n_checks = 0;
    if is_wanted(Part::Check) {
        n_checks = check::all(&cards, is_small)?;
        eprintln!("{n_checks} checks are right");
    }
    if is_small {
        return Ok(());
    }
    let measured = if is_wanted(Part::Measure) { measure::all(&cards)? } else { json!(null) };
    let disturbed = if is_wanted(Part::Disturb) { disturb::all(&cards)? } else { json!(null) };
    let report = json!({
        "command": "gpu_wire",
        "commit": args.commit,
        "cards": [cards[0].name(), cards[1].name()],
        "checks": n_checks,
        "measured": measured,
        "disturbed": disturbed,
    });
    if let Some(out) = &args.out {
        std::fs::write(out, serde_json::to_string_pretty(&report)? + "\n")?;
    }
    Ok(())
}
