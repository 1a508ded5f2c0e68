//! The suite that every connector passes, over the memory of two GPUs, and how fast `cuda-ipc` moves KV between them.
//!
//! `gpu_conformance [--nvrtc FOLDER] [--out FILE] [--commit NAME]`: JSON to the file, a summary to stderr; fails where the
//! suite does. Prefill nodes are on the first GPU, all others on the second.

mod measure;

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

/// Wires that are run over memory of GPUs: the one that is made for it, and one that goes by copies of the host.
const WIRES: &[&str] = &["cuda-ipc", "tcp"];

static CARDS: OnceLock<[Card; 2]> = OnceLock::new();

pub(crate) type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Memory of the card that a node of this name is on.
pub(crate) fn memory(name: &str, layout: KvLayout, n_blocks: u32) -> KvMemory {
    let cards = CARDS.get().expect("the cards are opened first");
    KvMemory::device(layout, n_blocks, &cards[usize::from(name != "prefill")]).expect("the card has room")
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
    tracing_subscriber::fmt().with_max_level(tracing::Level::INFO).with_writer(std::io::stderr).init();
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
    let suites: Vec<_> = WIRES.iter().map(|wire| (*wire, passes(&runtime, wire))).collect();
    let report = json!({
        "command": "gpu_conformance",
        "commit": args.commit,
        "cards": [cards[0].name(), cards[1].name()],
        "measured": measured,
        "conformance": suites.iter().map(|(wire, passed)| json!({"wire": wire, "passed": passed})).collect::<Vec<_>>(),
    });
    if let Some(out) = &args.out {
        std::fs::write(out, serde_json::to_string_pretty(&report)? + "\n")?;
    }
    for (wire, passed) in &suites {
        eprintln!("conformance of {wire}: {}", if *passed { "passed" } else { "FAILED" });
    }
    Ok(suites.iter().all(|(_, passed)| *passed))
}

/// Runs all cases; a case that fails has said so.
fn passes(runtime: &tokio::runtime::Runtime, wire: &'static str) -> bool {
    let suite = conformance(move |parts| small_frames(wire, parts));
    #[allow(clippy::disallowed_methods, reason = "a panic of the suite ends this task and not the report")]
    let task = runtime.spawn(suite);
    runtime.block_on(task).is_ok()
}

/// The suite wants transfers of many frames; a card's are many times larger than the setting.
async fn small_frames(
    wire: &'static str,
    mut parts: ConnectorParts,
) -> std::sync::Arc<dyn baton_kv_transfer::KvConnector> {
    if wire == "cuda-ipc" {
        parts.settings.frame_bytes = 8;
    }
    build(wire, parts).await.expect("the connector works here")
}
