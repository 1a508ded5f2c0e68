//! Runs every kernel on a GPU against plain Rust, then measures each against what the card can do.
//!
//! `gpu_check [--nvrtc FOLDER] [--cache FOLDER] [--out FILE] [--commit NAME] [--measure no] [--arch sm_90] [--only PART]
//! [--small yes]`:
//! JSON to the file, a summary to stderr; fails where a kernel is wrong. Without a GPU it says so and fails. `--arch sm_90`
//! runs on Hopper what other cards run; `--only` is rows, products, many_rows, endings, fp8, attention, sample, or ranks, which needs two GPUs;
//! `--small` leaves out what is large, for tools that look at every access (`bench/gpu-sanitize.sh`).
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

use baton_kernels::cuda::{Cache, Card, CudaError};
use extent::Extent;
use serde_json::json;
use verdict::Verdicts;

struct Args {
    nvrtc: Option<PathBuf>,
    out: Option<PathBuf>,
    commit: Option<String>,
    cache: Cache,
    measures: bool,
    arch: Option<String>,
    only: Option<String>,
    extent: Extent,
}

fn args() -> Args {
    let mut args = Args {
        nvrtc: None,
        out: None,
        commit: None,
        cache: Cache::none(),
        measures: true,
        arch: None,
        only: None,
        extent: Extent::Whole,
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let value = words.next().unwrap_or_default();
        match word.as_str() {
            "--nvrtc" => args.nvrtc = Some(value.into()),
            "--out" => args.out = Some(value.into()),
            "--commit" => args.commit = Some(value),
            "--cache" => args.cache = Cache::at(&PathBuf::from(value)),
            "--measure" => args.measures = value != "no",
            "--arch" => args.arch = Some(value),
            "--only" => args.only = Some(value),
            "--small" if value == "yes" => args.extent = Extent::Small,
            _ => eprintln!("unknown word: {word}"),
        }
    }
    args
}

fn main() -> ExitCode {
    let args = args();
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
    let open = || Card::open_as(0, args.nvrtc.as_deref(), &args.cache, args.arch.as_deref());
    let card = open()?;
    let n_compiled_again = match args.cache {
        _ if card.n_compiled() == 0 => 0,
        _ => open()?.n_compiled(),
    };
    eprintln!(
        "{} ({}), {} sources compiled, {n_compiled_again} when opened again",
        card.name(),
        card.arch(),
        card.n_compiled()
    );
    let mut verdicts = Verdicts::default();
    let is_wanted = |part: &str| args.only.as_deref().is_none_or(|only| only == part);
    if is_wanted("rows") {
        check_rows::all(&card, &mut verdicts, args.extent)?;
    }
    if is_wanted("products") {
        check_products::all(&card, &mut verdicts, args.extent)?;
    }
    if is_wanted("many_rows") {
        many_rows::check(&card, &mut verdicts, args.extent)?;
    }
    if is_wanted("endings") {
        check_endings::all(&card, &mut verdicts, args.extent)?;
    }
    if is_wanted("fp8") {
        fp8::check(&card, &mut verdicts, args.extent)?;
    }
    if is_wanted("attention") {
        check_attention::all(&card, &mut verdicts, args.extent)?;
    }
    if is_wanted("sample") {
        check_sample::all(&card, &mut verdicts, args.extent)?;
    }
    let mut ranks = json!(null);
    if is_wanted("ranks") {
        ranks = check_ranks::all(
            args.nvrtc.as_deref(),
            &args.cache,
            (args.measures, args.extent),
            &mut verdicts,
        )?;
    }
    let measured = if args.measures { measure::all(&card, is_wanted)? } else { json!(null) };
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
