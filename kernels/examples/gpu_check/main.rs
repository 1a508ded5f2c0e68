//! Checks every kernel on a GPU against plain Rust, then measures each kernel against the GPU's limits.
//!
//! Writes JSON to a file and a summary to stderr. Fails if a kernel is wrong, or if there is no GPU.
#![allow(clippy::print_stdout)]

mod draw;
mod pages;
mod extent;
mod verdict;
mod rotation;
mod check_rows;
mod check_products;
mod choices;
mod check_experts;
mod check_endings;
mod fp8;
mod check_attention;
mod check_latent;
mod check_expanded;
mod check_sample;
mod check_ranks;
mod check_joined;
mod many_rows;
mod rounding;
mod made_up;
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

/// Check every kernel on a GPU against plain Rust, then measure each against the GPU's limits.
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
    /// Whether results are checked. If not, kernels are only measured.
    #[arg(long, value_enum, default_value_t = YesNo::Yes)]
    check: YesNo,
    /// Whether kernels are measured after the checks.
    #[arg(long, value_enum, default_value_t = YesNo::Yes)]
    measure: YesNo,
    /// The architecture of the kernels. On Hopper, `sm_90` runs the kernels of other GPUs.
    #[arg(long)]
    arch: Option<String>,
    /// Run this part only. `ranks` needs two GPUs.
    #[arg(long, value_enum)]
    only: Option<Part>,
    /// Leave out large cases, for tools that instrument every access (`bench/gpu-sanitize.sh`).
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
    Experts,
    Endings,
    Fp8,
    Attention,
    Latent,
    Sample,
    Ranks,
}

type Check = fn(&ComputeCard, &mut Verdicts, Extent) -> Result<(), CudaError>;

/// The checks of all parts that need one GPU.
const CHECKS: &[(Part, Check)] = &[
    (Part::Rows, check_rows::all),
    (Part::Products, check_products::all),
    (Part::ManyRows, many_rows::check),
    (Part::Experts, check_experts::check),
    (Part::Endings, check_endings::all),
    (Part::Fp8, fp8::check),
    (Part::Fp8, made_up::check),
    (Part::Fp8, rounding::check),
    (Part::Attention, check_attention::all),
    (Part::Latent, check_latent::all),
    (Part::Latent, check_expanded::all),
    (Part::Sample, check_sample::all),
];

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
    if args.check == YesNo::Yes {
        for (_, check) in CHECKS.iter().filter(|(part, _)| is_wanted(*part)) {
            check(&card, &mut verdicts, extent)?;
        }
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
