//! Memory of two GPUs and what moves pages between them: checked against the processor, then measured.
//!
//! JSON to a file, a summary to stderr; fails where a byte or a digest is wrong. It needs two GPUs that reach each other.

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

/// KV on two cards, the first one's mapped for the second.
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

/// Check what moves pages between two GPUs against the processor, then measure it.
#[derive(Debug, Parser)]
struct Args {
    /// The folder of the compiler's library, if it is not where the loader looks.
    #[arg(long, value_name = "FOLDER")]
    nvrtc: Option<PathBuf>,
    /// The file that everything found is written to, as JSON.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// What the file shall say of the commit.
    #[arg(long, value_name = "NAME")]
    commit: Option<String>,
    /// Where compiled kernels are kept: nowhere unless this is named.
    #[arg(long, value_name = "FOLDER")]
    cache: Option<PathBuf>,
    /// Check some shapes and measure nothing, for tools that look at every access (`bench/gpu-sanitize.sh`).
    #[arg(long, value_enum, default_value_t = YesNo::No)]
    small: YesNo,
    /// This part and nothing else.
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
    /// What products lose beside it.
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
