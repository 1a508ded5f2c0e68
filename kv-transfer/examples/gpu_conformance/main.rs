//! The suite that every connector passes, over the memory of two GPUs, and how fast `cuda-ipc` and `nccl` move KV between
//! them, beside a plain copy and NCCL alone.
//!
//! `gpu_conformance [--nvrtc FOLDER] [--out FILE] [--commit NAME]`: JSON to the file, a summary to stderr; fails where the
//! suite does. Nodes that send are on the first GPU, those that receive on the second.

mod measure;
mod nccl;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::OnceLock;

use baton_kv_transfer::conformance::conformance;
use baton_kv_transfer::conformance::node::lie_in;
use baton_kv_transfer::{ConnectorParts, build};
use kernels::cuda::{Cache, Card};
use kv_cache::KvMemory;
use serde_json::json;
use types::KvLayout;

/// Wires that are run over memory of GPUs, and the setting for frames: frames of one page, tall ones, and a wire that goes
/// by copies of the host.
const RUNS: &[(&str, usize)] = &[("cuda-ipc", 16), ("cuda-ipc", 32), ("nccl", 8), ("tcp", 1024)];

/// Nodes of the suite to whom KV is sent: they are on the second GPU, all others on the first.
const RECEIVERS: &[&str] = &["decode", "mortal"];

/// Joining a pair takes NCCL a second or two, more than the suite's wires may stand still.
const NCCL_STALL_MS: u64 = 10_000;

static CARDS: OnceLock<[Card; 2]> = OnceLock::new();

pub(crate) type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Memory of the card that a node of this name is on.
pub(crate) fn memory(name: &str, layout: KvLayout, n_blocks: u32) -> KvMemory {
    let cards = CARDS.get().expect("the cards are opened first");
    KvMemory::device(layout, n_blocks, &[&cards[usize::from(RECEIVERS.contains(&name))]])
        .expect("the card has room")
}

#[derive(Default)]
struct Args {
    nvrtc: Option<PathBuf>,
    out: Option<PathBuf>,
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
            "--commit" => args.commit = Some(value),
            _ => eprintln!("unknown word: {word}"),
        }
    }
    args
}

fn main() -> ExitCode {
    tracing_subscriber::fmt().with_max_level(tracing::Level::WARN).with_writer(std::io::stderr).init();
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
    let open = |ordinal| Card::open(ordinal, args.nvrtc.as_deref(), &Cache::none());
    let cards = CARDS.get_or_init(|| [open(0), open(1)].map(|card| card.expect("two GPUs")));
    lie_in(memory);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(8).enable_all().build()?;
    let measured = runtime.block_on(measure::all())?;
    let by_nccl = nccl::plainly();
    eprintln!("{by_nccl}");
    let suites: Vec<_> = RUNS.iter().map(|run| (*run, passes(&runtime, *run))).collect();
    let report = json!({
        "command": "gpu_conformance",
        "commit": args.commit,
        "cards": [cards[0].name(), cards[1].name()],
        "measured": measured,
        "nccl_alone": by_nccl,
        "conformance": suites.iter().map(|((wire, frame), passed)| json!({"wire": wire, "frame_bytes": frame, "passed": passed})).collect::<Vec<_>>(),
    });
    if let Some(out) = &args.out {
        std::fs::write(out, serde_json::to_string_pretty(&report)? + "\n")?;
    }
    for ((wire, frame), passed) in &suites {
        eprintln!("conformance of {wire}, frames of {frame}: {}", if *passed { "passed" } else { "FAILED" });
    }
    Ok(suites.iter().all(|(_, passed)| *passed))
}

/// Runs all cases; a case that fails has said so.
fn passes(runtime: &tokio::runtime::Runtime, (wire, frame_bytes): (&'static str, usize)) -> bool {
    let suite = conformance(move |mut parts: ConnectorParts| async move {
        // The suite wants transfers of many frames; a card's are many times larger than the setting.
        parts.settings.frame_bytes = frame_bytes;
        if wire == "nccl" {
            parts.settings.stall_ms = parts.settings.stall_ms.max(NCCL_STALL_MS);
        }
        build(wire, parts).await.expect("the connector works here")
    });
    #[allow(clippy::disallowed_methods, reason = "a panic of the suite ends this task and not the report")]
    let task = runtime.spawn(suite);
    runtime.block_on(task).is_ok()
}
