//! Memory of two GPUs and what moves pages between them: checked against the processor, then measured.
//!
//! `gpu_wire [--nvrtc FOLDER] [--cache FOLDER] [--out FILE] [--commit NAME] [--small yes] [--only PART]`: JSON to the file, a summary to
//! stderr; fails where a byte or a digest is wrong. `--only` is check, measure or disturb (what products beside it lose). It
//! needs two GPUs that reach each other. `--small` checks some shapes and measures nothing, for tools that look at every
//! access (`bench/gpu-sanitize.sh`).

mod check;
mod measure;
mod disturb;

use std::path::PathBuf;
use std::process::ExitCode;

use baton_kernels::RegionShape;
use baton_kernels::cuda::{Cache, Card, DeviceMemory, RemoteMemory};
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
    pub(crate) fn new(cards: &[Card; 2], shapes: &[RegionShape]) -> Outcome<Self> {
        Self::between(cards, shapes, shapes)
    }

    pub(crate) fn between(cards: &[Card; 2], near: &[RegionShape], far: &[RegionShape]) -> Outcome<Self> {
        let [near, far] = [DeviceMemory::new(near, &cards[0])?, DeviceMemory::new(far, &cards[1])?];
        let (fd, bytes) = near.export()?;
        let near_from_far = far.import(&fd, bytes)?;
        let (fd, bytes) = far.export()?;
        let far_from_near = near.import(&fd, bytes)?;
        Ok(Self { near, far, near_from_far, far_from_near })
    }
}

struct Args {
    nvrtc: Option<PathBuf>,
    out: Option<PathBuf>,
    commit: Option<String>,
    cache: Cache,
    is_small: bool,
    only: Option<String>,
}

fn args() -> Args {
    let mut args =
        Args { nvrtc: None, out: None, commit: None, cache: Cache::none(), is_small: false, only: None };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let value = words.next().unwrap_or_default();
        match word.as_str() {
            "--nvrtc" => args.nvrtc = Some(value.into()),
            "--out" => args.out = Some(value.into()),
            "--commit" => args.commit = Some(value),
            "--cache" => args.cache = Cache::at(&PathBuf::from(value)),
            "--only" => args.only = Some(value),
            "--small" => args.is_small = value == "yes",
            _ => eprintln!("unknown word: {word}"),
        }
    }
    args
}

fn main() -> ExitCode {
    match run(&args()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Outcome<()> {
    let open = |ordinal| Card::open(ordinal, args.nvrtc.as_deref(), &args.cache);
    let cards = [open(0)?, open(1)?];
    let is_wanted = |part: &str| args.only.as_deref().is_none_or(|only| only == part);
    let mut n_checks = 0;
    if is_wanted("check") {
        n_checks = check::all(&cards, args.is_small)?;
        eprintln!("{n_checks} checks are right");
    }
    if args.is_small {
        return Ok(());
    }
    let measured = if is_wanted("measure") { measure::all(&cards)? } else { json!(null) };
    let disturbed = if is_wanted("disturb") { disturb::all(&cards)? } else { json!(null) };
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
