//! The KV of 8,192 tokens of Llama-3.1-8B, 1 GiB, from one GPU to the other: through the whole connector, and plainly.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_kv_transfer::conformance::node::{Node, handoff};
use baton_kv_transfer::{ConnectorParts, KvConnector, LandRequest, Source, TransferSettings, build};
use kernels::cuda::{Courier, CourierSize};
use kv_cache::{BlockLease, BlockPool, Holder, Holding, KvMemory, LayerFence};
use serde_json::{Value, json};
use types::{Destination, GroupIdx, KvDtype, KvLayout, KvSpan, RequestId};

use crate::{Outcome, memory};

const N_TOKENS: u32 = 8192;
const N_SENT: u32 = N_TOKENS / 16;
/// Twice what is sent, so that there is something to scatter over.
const N_BLOCKS: u32 = 2 * N_SENT;
const ROUNDS: usize = 15;

#[derive(Clone, Copy)]
struct How {
    wire: &'static str,
    /// Its frames are so many times larger than the setting.
    frames_larger: usize,
    digests: bool,
    is_scattered: bool,
    frame_bytes: usize,
    multiprocessors: u32,
    ranks: (u16, u16),
}

/// From the first `send` to the arrival, and to the sender's knowledge of it.
struct Took {
    arrival: Duration,
    finish: Duration,
}

struct Side {
    parts: ConnectorParts,
    pool: BlockPool,
    wire: Arc<dyn KvConnector>,
}

fn layout() -> KvLayout {
    KvLayout::uniform(16, KvDtype::Bf16, 32, 8, 128)
}

async fn side(name: &str, memory: &KvMemory, how: How) -> Outcome<Side> {
    let frame_bytes = how.frame_bytes / how.frames_larger;
    let settings = TransferSettings {
        digests: how.digests,
        frame_bytes,
        gpu_multiprocessors: how.multiprocessors,
        ..TransferSettings::default()
    };
    let parts =
        ConnectorParts { memory: memory.clone(), settings, ..Node::parts(name, memory.layout().clone()) };
    let pool = BlockPool::new(memory.layout(), memory.n_blocks());
    let wire = build(how.wire, parts.clone()).await?;
    Ok(Side { parts, pool, wire })
}

impl Side {
    fn lease(&self, n_blocks: usize) -> BlockLease {
        let holder = Holder { what: Holding::Sequence, request: RequestId::new("measure") };
        self.pool.reserve(n_blocks, holder).expect("there is room")
    }

    /// Blocks of which none has a neighbour, and what lies between them.
    fn scattered(&self) -> (BlockLease, Vec<BlockLease>) {
        let singles: Vec<_> = (0..N_BLOCKS).map(|_| self.lease(1)).collect();
        let (free, kept): (Vec<_>, Vec<_>) =
            singles.into_iter().enumerate().partition(|(nth, _)| nth % 2 == 0);
        drop(free);
        (self.lease(N_SENT as usize), kept.into_iter().map(|(_, lease)| lease).collect())
    }
}

/// Numbers that do not repeat within a layer.
fn fill(memory: &KvMemory) {
    for (layer, rank) in (0..32).flat_map(|layer| (0..memory.n_ranks()).map(move |rank| (layer, rank))) {
        let mut pages = memory.rank(rank).write(GroupIdx(0), layer, 0..N_BLOCKS).expect("nobody else");
        let words = pages.as_chunks_mut::<8>().0;
        let seed = (u64::from(layer) << 8 | u64::from(rank)) << 32;
        for (nth, word) in words.iter_mut().enumerate() {
            *word = ((nth as u64 ^ seed).wrapping_mul(0x9E37_79B9_7F4A_7C15)).to_le_bytes();
        }
    }
}

/// What is measured: wires, their frames and multiprocessors, and ranks.
fn ways() -> Vec<How> {
    let wires = [
        ("cuda-ipc", 64, 32 << 20, 16),
        ("cuda-ipc", 64, 24 << 20, 16),
        ("nccl", 128, 64 << 20, 32),
        ("nccl", 128, 64 << 20, 48),
    ];
    let one_each = wires.into_iter().flat_map(|(wire, frames_larger, frame_bytes, multiprocessors)| {
        [(true, false), (true, true), (false, false), (false, true)].map(|(digests, is_scattered)| {
            let ranks = (1, 1);
            How { wire, frames_larger, digests, is_scattered, frame_bytes, multiprocessors, ranks }
        })
    });
    let (wire, frames_larger, frame_bytes, multiprocessors) = wires[0];
    let of_ranks = [(2, 2), (1, 2), (2, 1)].map(|ranks| {
        let (digests, is_scattered) = (true, false);
        How { wire, frames_larger, digests, is_scattered, frame_bytes, multiprocessors, ranks }
    });
    one_each.chain(of_ranks).collect()
}

/// Between nodes of several ranks, in memory of their own.
async fn through_ranks((near, far): (Outcome<KvMemory>, Outcome<KvMemory>), how: How) -> Outcome<Took> {
    let (near, far) = (near?, far?);
    fill(&near);
    through_connector(&near, &far, how).await
}

pub(crate) async fn all() -> Outcome<Value> {
    let (near, far) = (memory("prefill", layout(), N_BLOCKS), memory("decode", layout(), N_BLOCKS));
    fill(&near);
    let bytes = N_SENT as usize * layout().block_bytes(GroupIdx(0));
    let mut lines = vec![json!({"what": "plain copy", "gigabytes_per_second": plainly(&near, &far, bytes)?})];
    eprintln!("{}", lines[0]);
    for how in ways() {
        let How { wire, digests, is_scattered, frame_bytes, multiprocessors, ranks, .. } = how;
        let took = match ranks {
            (1, 1) => through_connector(&near, &far, how).await,
            (from, to) => {
                let of = |name, tp| Ok(memory(name, layout().over_ranks(tp)?, N_BLOCKS));
                through_ranks((of("prefill", from), of("decode", to)), how).await
            }
        };
        let rate = |took: Duration| bytes as f64 / took.as_secs_f64() / 1e9;
        let line = match took {
            Err(error) => json!({"what": wire, "error": error.to_string()}),
            Ok(took) => json!({
                "what": wire, "blocks": if is_scattered { "scattered" } else { "neighbours" }, "digests": digests,
                "frame_mib": frame_bytes >> 20, "multiprocessors": multiprocessors, "ranks": ranks,
                "median_ms": took.finish.as_secs_f64() * 1e3,
                "gigabytes_per_second": rate(took.finish),
                "arrived_gigabytes_per_second": rate(took.arrival),
            }),
        };
        eprintln!("{line}");
        lines.push(line);
    }
    lines.push(json!({"what": "plain copy, again", "gigabytes_per_second": plainly(&near, &far, bytes)?}));
    eprintln!("{}", lines[lines.len() - 1]);
    Ok(json!(lines))
}

fn plainly(near: &KvMemory, far: &KvMemory, bytes: usize) -> Outcome<f64> {
    let (near, far) = (near.on_card().expect("on a card"), far.on_card().expect("on a card"));
    let (fd, exported) = near.memory().export()?;
    let remote = far.memory().import(&fd, exported)?;
    let courier = Courier::new(far.memory(), CourierSize::default())?;
    let mut took = Vec::new();
    for _ in 0..ROUNDS + 3 {
        let start = now();
        courier.copy_plainly(&remote, far.memory(), bytes)?;
        took.push(start.elapsed());
    }
    Ok(bytes as f64 / median(took.split_off(3)).as_secs_f64() / 1e9)
}

/// All layers are computed already.
async fn through_connector(near: &KvMemory, far: &KvMemory, how: How) -> Outcome<Took> {
    let (prefill, decode) = (side("prefill", near, how).await?, side("decode", far, how).await?);
    let scatter = how.is_scattered;
    let (from, _between) =
        if scatter { prefill.scattered() } else { (prefill.lease(N_SENT as usize), vec![]) };
    let from = Arc::new(from);
    let (mut arrivals, mut finishes) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS + 3 {
        let (lease, _between) =
            if scatter { decode.scattered() } else { (decode.lease(N_SENT as usize), vec![]) };
        let (landing, arrival) = decode.wire.land(LandRequest {
            transfer: decode.parts.world.transfer_id(),
            lease,
            n_tokens: N_TOKENS,
            held_tokens: 0,
            source: Source::Peer,
            deadline: decode.parts.world.deadline_in(Duration::from_secs(30)),
        })?;
        let mut sender = prefill.wire.open(&Destination::Landing(landing.clone())).await?;
        let start = now();
        let span = KvSpan { group: GroupIdx(0), blocks: 0..N_SENT, layers: 0..32 };
        sender.send(span, Arc::clone(&from), LayerFence::open()).await?;
        let arrived = async {
            let arrived = arrival.settle().await;
            (arrived, start.elapsed())
        };
        let (sent, (arrived, arrival)) = tokio::join!(sender.finish(handoff(&landing)), arrived);
        finishes.push(start.elapsed());
        arrivals.push(arrival);
        sent?;
        let arrived = arrived?;
        if round == 0 && how.ranks == (1, 1) {
            check(near, far, &from, &arrived.lease);
        }
    }
    Ok(Took { arrival: median(arrivals.split_off(3)), finish: median(finishes.split_off(3)) })
}

/// Every byte of every layer.
fn check(near: &KvMemory, far: &KvMemory, from: &BlockLease, to: &BlockLease) {
    let group = GroupIdx(0);
    for layer in 0..32 {
        let (here, there) = (
            near.read(group, layer, 0..N_BLOCKS).expect("nobody writes"),
            far.read(group, layer, 0..N_BLOCKS).expect("nobody writes"),
        );
        let page = here.len() / N_BLOCKS as usize;
        for (from, to) in from.table(group).iter().zip(to.table(group)) {
            let (from, to) = (from.0 as usize * page, to.0 as usize * page);
            assert!(here[from..from + page] == there[to..to + page], "layer {layer} arrives as it is");
        }
    }
}

fn now() -> Instant {
    #[allow(clippy::disallowed_methods, reason = "a measurement of real time")]
    Instant::now()
}

fn median(mut took: Vec<Duration>) -> Duration {
    took.sort();
    took[took.len() / 2]
}
