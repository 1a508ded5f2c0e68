//! The suite that every connector passes, over the memory of two GPUs, and how fast `cuda-ipc` and `nccl` move KV between
//! them, beside a plain copy and NCCL alone.
//!
//! ```text
//! gpu_conformance [--nvrtc FOLDER] [--out FILE] [--walks FILE] [--only measure|ways|alone|suite] [--wire NAME] [--commit NAME]
//! ```
//!
//! JSON to the file, every step of one transfer of each kind to the other, a summary to stderr; fails where the suite does.
//! `ways` are those of `nccl`, held against each other and against NCCL alone in turn; `alone` is NCCL without the connector;
//! of `suite`, `--wire` is the only one that it sees to.
//!
//! Nodes that send are on the first GPU, those that receive on the second. The ranks of nodes that have several are on all in
//! turn, those that receive from the second on: of four GPUs, two ranks that send are on the first two, and two that receive
//! on the last.

mod marks;
mod measure;
mod nccl;
mod ways;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use baton_kv_transfer::conformance::node::lie_in;
use baton_kv_transfer::conformance::{conformance, conformance_between};
use baton_kv_transfer::{ConnectorParts, KvConnector, build};
use device::cuda::{Cache, Card};
use kv_cache::KvMemory;
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::prelude::*;
use types::KvLayout;

/// Wires that are run over memory of GPUs, and the setting for frames: frames of one page, tall ones, and a wire that goes
/// by copies of the host.
const RUNS: &[(&str, usize)] = &[("cuda-ipc", 11), ("cuda-ipc", 22), ("nccl", 8), ("tcp", 1024)];

/// Nodes of the suite to whom KV is sent: they are on the second GPU, all others on the first.
const RECEIVERS: &[&str] = &["decode", "mortal"];

/// Joining a pair takes NCCL a second or two, more than the suite's wires may stand still.
const NCCL_STALL_MS: u64 = 10_000;

/// Ranks of the nodes that send, and of those that receive.
const RANKS: &[(u16, u16)] = &[(2, 2), (1, 2), (2, 1), (4, 2), (2, 4), (8, 2)];

/// For `nccl`, which needs two different GPUs for each pair: with two GPUs, none sends to itself.
const RANKS_BY_NCCL: &[(u16, u16)] = &[(2, 2)];

/// Wires that are run between nodes of several ranks.
const RUNS_OF_RANKS: &[Run] = &[(("cuda-ipc", 11), RANKS), (("nccl", 8), RANKS_BY_NCCL)];

/// A wire, the setting for its frames, and how many ranks send and receive.
type Run = ((&'static str, usize), &'static [(u16, u16)]);

/// What can be asked for alone.
const PARTS: &[&str] = &["measure", "ways", "alone", "suite"];

const CARDS_MAX: usize = 4;
static CARDS: OnceLock<Vec<Card>> = OnceLock::new();

pub(crate) type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Memory of the cards that a node of this name is on.
pub(crate) fn memory(name: &str, layout: KvLayout, n_blocks: u32) -> KvMemory {
    let cards = CARDS.get().expect("the cards are opened first");
    let n_ranks = usize::from(layout.shard.tp_size);
    let first = if RECEIVERS.contains(&name) { (cards.len() / 2).min(n_ranks) } else { 0 };
    let of_ranks: Vec<&Card> = (first..first + n_ranks).map(|nth| &cards[nth % cards.len()]).collect();
    KvMemory::device(layout, n_blocks, &of_ranks).expect("the cards have room")
}

pub(crate) fn now() -> Instant {
    #[allow(clippy::disallowed_methods, reason = "a measurement of real time")]
    Instant::now()
}

#[derive(Default)]
struct Args {
    nvrtc: Option<PathBuf>,
    out: Option<PathBuf>,
    walks: Option<PathBuf>,
    /// One of the parts; all otherwise.
    only: Option<String>,
    wire: Option<String>,
    commit: Option<String>,
}

fn args() -> Args {
    let mut args = Args::default();
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let value = words.next().unwrap_or_default();
        match word.as_str() {
            "--nvrtc" => args.nvrtc = Some(value.into()),
            "--out" => args.out = Some(value.into()),
            "--walks" => args.walks = Some(value.into()),
            "--only" => args.only = Some(value),
            "--wire" => args.wire = Some(value),
            "--commit" => args.commit = Some(value),
            _ => eprintln!("unknown word: {word}"),
        }
    }
    args
}

fn main() -> ExitCode {
    let told = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_filter(LevelFilter::WARN);
    let kept = marks::Keeper.with_filter(Targets::new().with_target("walk", LevelFilter::TRACE));
    tracing_subscriber::registry().with(told).with(kept).init();
    match run(&args()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(3)
        }
    }
}

fn run(args: &Args) -> Outcome<bool> {
    if let Some(only) = args.only.as_ref().filter(|only| !PARTS.contains(&only.as_str())) {
        return Err(format!("--only {only}: there are {PARTS:?}").into());
    }
    let open = |ordinal| Card::open(ordinal, args.nvrtc.as_deref(), &Cache::none());
    let n_cards = Card::count()?.min(CARDS_MAX);
    let all = (0..n_cards.max(2)).map(open).collect::<Result<Vec<Card>, _>>()?;
    let cards = CARDS.get_or_init(|| all);
    lie_in(memory);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(8).enable_all().build()?;
    let is_wanted = |part: &str| args.only.as_ref().is_none_or(|only| only == part);
    let is_seen_to = |wire: &str| is_wanted("suite") && args.wire.as_ref().is_none_or(|only| only == wire);
    let nothing = || (Value::Null, Vec::new());
    let (measured, mut walks) =
        if is_wanted("measure") { runtime.block_on(measure::all())? } else { nothing() };
    let (ways, more) = if is_wanted("ways") { runtime.block_on(ways::all())? } else { nothing() };
    walks.extend(more);
    let by_nccl = if is_wanted("measure") || is_wanted("alone") { nccl::alone() } else { Value::Null };
    eprintln!("{by_nccl}");
    if let Some(out) = &args.walks {
        std::fs::write(out, serde_json::to_string_pretty(&json!(walks))? + "\n")?;
    }
    let runs = RUNS.iter().filter(|(wire, _)| is_seen_to(wire));
    let suites: Vec<_> = runs.map(|run| (*run, passes(&runtime, *run))).collect();
    let of_ranks: Vec<_> = RUNS_OF_RANKS
        .iter()
        .filter(|((wire, _), _)| is_seen_to(wire))
        .map(|(run, ranks)| (*run, ranks_pass(&runtime, *run, ranks)))
        .collect();
    let report = json!({
        "command": "gpu_conformance",
        "commit": args.commit,
        "cards": cards.iter().map(Card::name).collect::<Vec<_>>(),
        "measured": measured,
        "nccl_alone": by_nccl,
        "ways": ways,
        "conformance": told(&suites),
        "conformance_of_ranks": {"cuda-ipc": RANKS, "nccl": RANKS_BY_NCCL, "of": told(&of_ranks)},
    });
    if let Some(out) = &args.out {
        std::fs::write(out, serde_json::to_string_pretty(&report)? + "\n")?;
    }
    for ((wire, frame), passed) in &suites {
        eprintln!("conformance of {wire}, frames of {frame}: {}", if *passed { "passed" } else { "FAILED" });
    }
    for ((wire, _), passed) in &of_ranks {
        eprintln!("conformance of ranks, {wire}: {}", if *passed { "passed" } else { "FAILED" });
    }
    // What was not run has not passed.
    let has_run = !is_wanted("suite") || !suites.is_empty();
    Ok(has_run && suites.iter().chain(&of_ranks).all(|(_, passed)| *passed))
}

/// Runs all cases; a case that fails has said so.
fn passes(runtime: &Runtime, (wire, frame_bytes): (&'static str, usize)) -> bool {
    ends_well(runtime, conformance(move |parts| made(wire, frame_bytes, parts)))
}

/// The same between nodes of several ranks, where they share heads.
fn ranks_pass(
    runtime: &Runtime,
    (wire, frame_bytes): (&'static str, usize),
    ranks: &'static [(u16, u16)],
) -> bool {
    ends_well(runtime, conformance_between(ranks, move |parts| made(wire, frame_bytes, parts)))
}

fn told(suites: &[((&str, usize), bool)]) -> Value {
    let line = |((wire, frame), passed): &((&str, usize), bool)| json!({"wire": wire, "frame_bytes": frame, "passed": passed});
    json!(suites.iter().map(line).collect::<Vec<_>>())
}

async fn made(wire: &'static str, frame_bytes: usize, mut parts: ConnectorParts) -> Arc<dyn KvConnector> {
    // The suite wants transfers of many frames; a card's are many times larger than the setting.
    parts.settings.frame_bytes = frame_bytes;
    if wire == "nccl" {
        parts.settings.stall_ms = parts.settings.stall_ms.max(NCCL_STALL_MS);
    }
    build(wire, parts).await.expect("the connector works here")
}

fn ends_well(runtime: &Runtime, suite: impl Future<Output = ()> + Send + 'static) -> bool {
    #[allow(clippy::disallowed_methods, reason = "a panic of the suite ends this task and not the report")]
    let task = runtime.spawn(suite);
    runtime.block_on(task).is_ok()
}
