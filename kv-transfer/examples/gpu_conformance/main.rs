//! Runs the conformance suite over the memory of GPUs. Measures the speed of `cuda-ipc` and `nccl`
//! between them, and for comparison a plain copy and NCCL alone.
//!
//! ```text
//! gpu_conformance [--nvrtc FOLDER] [--out FILE] [--walks FILE] [--only measure|ways|alone|suite|stages] [--wire NAME] [--commit NAME]
//! ```
//!
//! Writes JSON to `--out`, every step of one transfer of each kind to `--walks`, and a summary to stderr. Fails if
//! the suite fails. `ways` compares variants of `nccl` with each other and with NCCL alone, in turn. `alone` is NCCL
//! without the connector. `stages` is the part of the suite between nodes with several pipeline stages. `--wire` limits
//! the suite to one wire.
//!
//! Sending nodes are on the first GPU, receiving nodes on the second. Nodes with several ranks or stages use all GPUs in
//! turn, beginning with the first GPU for senders and with the second for receivers. With four GPUs, two sending ranks
//! are on the first two, and two receiving ranks on the last. With one GPU, all nodes are on it, and `nccl` is left out.

mod marks;
mod measure;
mod nccl;
mod ways;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use baton_kv_transfer::conformance::node::lie_in;
use baton_kv_transfer::conformance::{STAGES, Sides, conformance, conformance_between, of_one_stage};
use baton_kv_transfer::{ConnectorParts, KvConnector, build};
use device::cuda::{Cache, Card};
use kv_cache::KvMemory;
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::prelude::*;
use types::{KvLayout, StageLayers};

/// The wires that run over GPU memory, each with its frame setting: frames of one page, tall frames, and wires whose KV
/// goes through slots in host memory.
const RUNS: &[(&str, usize)] = &[("cuda-ipc", 11), ("cuda-ipc", 22), ("nccl", 8), ("shm", 128), ("tcp", 256)];

/// The suite's nodes that receive KV. They are on the second GPU, all other nodes on the first.
const RECEIVERS: &[&str] = &["decode", "mortal"];

/// The stall time for NCCL, which takes a second or two to join a pair: more than the stall time of the
/// suite's wires.
const NCCL_STALL_MS: u64 = 10_000;

/// The numbers of ranks of the sending node and of the receiving node.
const RANKS: &[(u16, u16)] = &[(2, 2), (1, 2), (2, 1), (4, 2), (2, 4), (8, 2)];

/// The numbers of ranks for `nccl`, which needs two different GPUs for each pair: with two GPUs, no GPU sends
/// to itself.
const RANKS_BY_NCCL: &[(u16, u16)] = &[(2, 2)];

/// Wires that run between nodes with several ranks.
const RUNS_OF_RANKS: &[Run] =
    &[(("cuda-ipc", 11), RANKS), (("nccl", 8), RANKS_BY_NCCL), (("shm", 128), RANKS), (("tcp", 256), RANKS)];

/// A wire, its frame setting, and the numbers of sending and receiving ranks.
type Run = ((&'static str, usize), &'static [(u16, u16)]);

/// Wires that run between nodes with several pipeline stages, each with its frame setting.
const RUNS_OF_STAGES: &[(&str, usize)] = &[("cuda-ipc", 11), ("nccl", 8), ("shm", 128), ("tcp", 256)];

/// The values of `--only`.
const PARTS: &[&str] = &["measure", "ways", "alone", "suite", "stages"];

const CARDS_MAX: usize = 4;
static CARDS: OnceLock<Vec<Card>> = OnceLock::new();

pub(crate) type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Allocates the KV memory of the node called `name`, on the GPUs of its role.
pub(crate) fn one_stage(name: &str, layout: KvLayout, n_blocks: u32) -> KvMemory {
    memory(name, layout, &StageLayers::one(), n_blocks)
}

fn memory(name: &str, layout: KvLayout, stages: &StageLayers, n_blocks: u32) -> KvMemory {
    let cards = CARDS.get().expect("the cards are opened first");
    let n_used = usize::from(layout.shard.tp_size) * stages.n_stages();
    let first = if RECEIVERS.contains(&name) { (cards.len() / 2).min(n_used) } else { 0 };
    let used: Vec<&Card> = (first..first + n_used).map(|nth| &cards[nth % cards.len()]).collect();
    KvMemory::device(layout, stages, n_blocks, &used).expect("the cards have room")
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
    /// The part to run; `None` runs all parts.
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
    let all = (0..n_cards.max(1)).map(open).collect::<Result<Vec<Card>, _>>()?;
    let cards = CARDS.get_or_init(|| all);
    lie_in(memory);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(8).enable_all().build()?;
    let is_wanted = |part: &str| args.only.as_ref().is_none_or(|only| only == part);
    let works_here = |wire: &str| cards.len() > 1 || wire != "nccl";
    let is_chosen = |wire: &str| works_here(wire) && args.wire.as_ref().is_none_or(|only| only == wire);
    let is_seen_to = |wire: &str| is_wanted("suite") && is_chosen(wire);
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
    let has_stages = is_wanted("suite") || is_wanted("stages");
    let runs = RUNS_OF_STAGES.iter().filter(|(wire, _)| has_stages && is_chosen(wire));
    let of_stages: Vec<_> = runs.map(|run| (*run, stages_pass(&runtime, *run))).collect();
    let report = json!({
        "command": "gpu_conformance",
        "commit": args.commit,
        "cards": cards.iter().map(Card::name).collect::<Vec<_>>(),
        "measured": measured,
        "nccl_alone": by_nccl,
        "ways": ways,
        "conformance": told(&suites),
        "conformance_of_ranks": {"cuda-ipc": RANKS, "nccl": RANKS_BY_NCCL, "of": told(&of_ranks)},
        "conformance_of_stages": told(&of_stages),
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
    for ((wire, _), passed) in &of_stages {
        eprintln!("conformance of stages, {wire}: {}", if *passed { "passed" } else { "FAILED" });
    }
    // A suite that did not run has not passed, unless it was not wanted.
    let has_run = (!is_wanted("suite") || !suites.is_empty()) && (!has_stages || !of_stages.is_empty());
    Ok(has_run && suites.iter().chain(&of_ranks).chain(&of_stages).all(|(_, passed)| *passed))
}

/// Runs all cases of the suite on one wire. A case that fails prints its error.
fn passes(runtime: &Runtime, (wire, frame_bytes): (&'static str, usize)) -> bool {
    ends_well(runtime, conformance(move |parts| made(wire, frame_bytes, parts)))
}

/// Runs the suite between nodes with several ranks that share heads.
fn ranks_pass(
    runtime: &Runtime,
    (wire, frame_bytes): (&'static str, usize),
    ranks: &'static [(u16, u16)],
) -> bool {
    let sides: Vec<Sides> = ranks.iter().map(|(from, to)| of_one_stage(*from, *to)).collect();
    ends_well(runtime, async move {
        conformance_between(&sides, move |parts| made(wire, frame_bytes, parts)).await;
    })
}

/// Runs the suite between nodes with several pipeline stages. `nccl` runs between nodes with one rank, because two ranks
/// with common heads cannot share a GPU.
fn stages_pass(runtime: &Runtime, (wire, frame_bytes): (&'static str, usize)) -> bool {
    let is_wanted = |(from, to): &Sides| wire != "nccl" || (from.tp_size, to.tp_size) == (1, 1);
    let sides: Vec<Sides> = STAGES.iter().copied().filter(is_wanted).collect();
    ends_well(runtime, async move {
        conformance_between(&sides, move |parts| made(wire, frame_bytes, parts)).await;
    })
}

fn told(suites: &[((&str, usize), bool)]) -> Value {
    let line = |((wire, frame), passed): &((&str, usize), bool)| json!({"wire": wire, "frame_bytes": frame, "passed": passed});
    json!(suites.iter().map(line).collect::<Vec<_>>())
}

async fn made(wire: &'static str, frame_bytes: usize, mut parts: ConnectorParts) -> Arc<dyn KvConnector> {
    // The suite needs transfers of many frames, so the setting is small: a GPU's frames are many times larger
    // than it.
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
