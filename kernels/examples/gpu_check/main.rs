//! Runs every kernel on a GPU against plain Rust, then measures each against what the card can do.
//!
//! JSON to a file, a summary to stderr; fails where a kernel is wrong. Without a GPU it says so and fails.
#![allow(clippy::print_stdout)]

mod draw;
mod extent;
mod verdict;
mod rotation;
mod check_rows;
mod check_products;
mod check_endings;
mod fp8;
mod check_attention;
mod check_sample;
mod check_ranks;
mod check_joined;
mod many_rows;
mod measure;
mod measure_endings;

use std::path::PathBuf;
use std::process::ExitCode;

use baton_kernels::cuda::ComputeCard;
use clap::{Parser, ValueEnum};
use device::cuda::{Cache, CudaError};
use extent::Extent;
use serde_json::json;
use verdict::Verdicts;

/// Run every kernel on a GPU against plain Rust, then measure each against what the card can do.
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
    /// Whether kernels are measured, once they are checked.
    #[arg(long, value_enum, default_value_t = YesNo::Yes)]
    measure: YesNo,
    /// Kernels for this kind of card: `sm_90` on Hopper is what other cards run.
    #[arg(long)]
    arch: Option<String>,
    /// This part and nothing else. `ranks` needs two GPUs.
    #[arg(long, value_enum)]
    only: Option<Part>,
    /// Leave out what is large, for tools that look at every access (`bench/gpu-sanitize.sh`).
    #[arg(long, value_enum, default_value_t = YesNo::No)]
    small: YesNo,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum YesNo {
    Yes,
    No,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
enum Part {
    Rows,
    Products,
    ManyRows,
    Endings,
    Fp8,
    Attention,
    Sample,
    Ranks,
}

fn main() -> ExitCode {
    let args = Args::parse();
    match run(&args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}: {:?}", std::error::Error::source(&error));
            ExitCode::from(3)
        }
    }
}

fn run(args: &Args) -> Result<bool, CudaError> {
    let cache = args.cache.as_deref().map_or_else(Cache::none, Cache::at);
    let extent = if args.small == YesNo::Yes { Extent::Small } else { Extent::Whole };
    let measures = args.measure == YesNo::Yes;
    let open = || ComputeCard::open_as(0, args.nvrtc.as_deref(), &cache, args.arch.as_deref());
    let card = open()?;
    let n_compiled_again = if card.n_compiled() == 0 { 0 } else { open()?.n_compiled() };
    eprintln!(
        "{} ({}), {} sources compiled, {n_compiled_again} when opened again",
        card.name(),
        card.arch(),
        card.n_compiled()
    );
    let mut verdicts = Verdicts::default();
    let is_wanted = |part: Part| args.only.is_none_or(|only| only == part);
    if is_wanted(Part::Rows) {
        check_rows::all(&card, &mut verdicts, extent)?;
    }
    if is_wanted(Part::Products) {
        check_products::all(&card, &mut verdicts, extent)?;
    }
    if is_wanted(Part::ManyRows) {
        many_rows::check(&card, &mut verdicts, extent)?;
    }
    if is_wanted(Part::Endings) {
        check_endings::all(&card, &mut verdicts, extent)?;
    }
    if is_wanted(Part::Fp8) {
        fp8::check(&card, &mut verdicts, extent)?;
    }
    if is_wanted(Part::Attention) {
        check_attention::all(&card, &mut verdicts, extent)?;
    }
    if is_wanted(Part::Sample) {
        check_sample::all(&card, &mut verdicts, extent)?;
    }
    let mut ranks = json!(null);
    if is_wanted(Part::Ranks) {
        ranks = check_ranks::all(args.nvrtc.as_deref(), &cache, (measures, extent), &mut verdicts)?;
    }
    let measured = if measures { measure::all(&card, is_wanted)? } else { json!(null) };
    let report = json!({
        "command": "gpu_check",
        "commit": args.commit,
        "card": card.name(),
        "arch": card.arch(),
        "multiprocessors": card.n_multiprocessors(),
        "checks": verdicts.to_json(),
        "measured": measured,
        "ranks": ranks,
    });
    if let Some(out) = &args.out {
        let text = serde_json::to_string_pretty(&report).expect("a report is JSON");
        std::fs::write(out, text + "\n").unwrap_or_else(|error| eprintln!("{}: {error}", out.display()));
    }
    eprintln!("{verdicts}");
    Ok(verdicts.are_all_right())
}
