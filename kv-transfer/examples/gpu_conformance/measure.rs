//! Measures the transfer of the KV of 8,192 tokens of Llama-3.1-8B, 1 GiB, from one GPU to the other: through the
//! connector, and as a plain copy.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_kv_transfer::conformance::node::{Node, handoff};
use baton_kv_transfer::{
    ArrivedKv, ConnectorParts, FrameSizes, KvConnector, LandRequest, TransferSettings, build,
};
use device::cuda::{PageCopier, PageCopierSize};
use kv_cache::{BlockLease, BlockPool, Holder, Holding, KvMemory, LayerFence};
use serde_json::{Value, json};
use types::{Destination, GroupIdx, KvDtype, KvLayout, KvSpan, RequestId};

use crate::{Outcome, marks, now, one_stage};

const N_TOKENS: u32 = 8192;
const N_SENT: u32 = N_TOKENS / 16;
/// Blocks of each node's memory: twice the number that is sent, so that blocks can be scattered.
pub(crate) const N_BLOCKS: u32 = 2 * N_SENT;
pub(crate) const ROUNDS: usize = 15;
/// The number of rounds before the timed ones.
pub(crate) const WARM_UP: usize = 3;
/// The number of transfers, after the timed ones, whose steps are all reported.
const MARKED: usize = 3;
const ENDS_WITHIN: Duration = Duration::from_secs(20);

#[derive(Clone, Copy)]
pub(crate) struct How {
    pub(crate) wire: &'static str,
    /// The factor by which the wire's frames are larger than the setting.
    pub(crate) frames_larger: usize,
    pub(crate) digests: bool,
    pub(crate) is_scattered: bool,
    pub(crate) frame_bytes: usize,
    pub(crate) multiprocessors: u32,
    pub(crate) ranks: (u16, u16),
    pub(crate) spin_us: u64,
    pub(crate) taper: Option<FrameSizes>,
    /// Limit of the NCCL queues of a pair of nodes.
    pub(crate) nccl_queues: usize,
}

/// The times of one transfer, from the first `send` to the arrival and to the end of the sender's `finish`.
struct ElapsedTime {
    arrival: Duration,
    finish: Duration,
    /// A summary of the events of the last additional transfer.
    marks: Value,
    walk: Value,
}

pub(crate) struct Side {
    parts: ConnectorParts,
    pool: BlockPool,
    wire: Arc<dyn KvConnector>,
}

impl How {
    pub(crate) fn told(self) -> Value {
        json!({
            "what": self.wire, "ranks": self.ranks, "digests": self.digests,
            "blocks": if self.is_scattered { "scattered" } else { "neighbours" },
            "frame_mib": self.frame_bytes >> 20, "multiprocessors": self.multiprocessors, "spin_us": self.spin_us,
            "taper": self.taper.map_or(json!("default"), |taper| json!([taper.first_part, taper.least_part, taper.share])),
            "nccl_queues": self.nccl_queues,
        })
    }
}

pub(crate) fn layout() -> KvLayout {
    KvLayout::uniform(16, KvDtype::Bf16, 32, 8, 128)
}

pub(crate) async fn side(name: &str, memory: &KvMemory, how: How) -> Outcome<Side> {
    let frame_bytes = how.frame_bytes / how.frames_larger;
    let settings = TransferSettings {
        digests: how.digests,
        frame_bytes,
        gpu_multiprocessors: how.multiprocessors,
        spin_us: how.spin_us,
        taper: how.taper,
        nccl_queues: how.nccl_queues,
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

    /// Leases blocks for one sequence. If they are scattered, also returns the blocks between them.
    pub(crate) fn blocks(&self, how: How) -> (BlockLease, Vec<BlockLease>) {
        if how.is_scattered { self.scattered() } else { (self.lease(N_SENT as usize), vec![]) }
    }

    /// Leases blocks without neighbours, and the blocks between them.
    fn scattered(&self) -> (BlockLease, Vec<BlockLease>) {
        let singles: Vec<_> = (0..N_BLOCKS).map(|_| self.lease(1)).collect();
        let (free, kept): (Vec<_>, Vec<_>) =
            singles.into_iter().enumerate().partition(|(nth, _)| nth % 2 == 0);
        drop(free);
        (self.lease(N_SENT as usize), kept.into_iter().map(|(_, lease)| lease).collect())
    }

    /// Waits until no block is leased, because a task returns the last transfer's blocks later.
    pub(crate) async fn is_free(&self) -> Outcome<()> {
        let mut freed = self.pool.freed();
        let back = async {
            while self.pool.counts().leased > 0 {
                freed.changed().await.expect("the pool lives");
            }
        };
        Ok(tokio::time::timeout(ENDS_WITHIN, back).await?)
    }

    /// Drops the connector and waits for its tasks, so that they do not disturb the next measurement.
    pub(crate) async fn ends(self) -> Outcome<()> {
        let Self { parts, wire, .. } = self;
        drop(wire);
        Ok(parts.gate.close(ENDS_WITHIN).await?)
    }
}

/// Fills the memory with numbers that do not repeat within a layer.
pub(crate) fn fill(memory: &KvMemory) {
    for (layer, rank) in (0..32).flat_map(|layer| (0..memory.n_ranks()).map(move |rank| (layer, rank))) {
        let mut pages = memory.rank(rank).write(GroupIdx(0), layer, 0..N_BLOCKS).expect("no other borrow");
        let words = pages.as_chunks_mut::<8>().0;
        let seed = (u64::from(layer) << 8 | u64::from(rank)) << 32;
        for (nth, word) in words.iter_mut().enumerate() {
            *word = ((nth as u64 ^ seed).wrapping_mul(0x9E37_79B9_7F4A_7C15)).to_le_bytes();
        }
    }
}

const IPC: How = How {
    wire: "cuda-ipc",
    frames_larger: 96,
    frame_bytes: 48 << 20,
    multiprocessors: 16,
    digests: true,
    is_scattered: false,
    ranks: (1, 1),
    spin_us: 500,
    taper: None,
    nccl_queues: 2,
};
pub(crate) const NCCL: How =
    How { wire: "nccl", frames_larger: 128, frame_bytes: 64 << 20, multiprocessors: 32, ..IPC };

/// Returns the measured variants: the wires with their defaults, and with one setting changed.
fn ways() -> Vec<How> {
    let with_digests = [
        IPC,
        NCCL,
        How { spin_us: 0, ..IPC },
        How { spin_us: 0, ..NCCL },
        How { frame_bytes: 32 << 20, ..IPC },
        How { multiprocessors: 48, ..NCCL },
        How { taper: Some(FrameSizes { first_part: 4, least_part: 4, share: 1 }), ..IPC },
        IPC,
        NCCL,
    ];
    let both = |how: How| [how, How { is_scattered: true, ..how }];
    let bare = [IPC, NCCL].map(|how| How { digests: false, ..how });
    let of_ranks = [(IPC, (2, 2)), (IPC, (1, 2)), (IPC, (2, 1)), (NCCL, (2, 2))];
    let of_ranks = of_ranks.map(|(how, ranks)| How { ranks, ..how });
    with_digests.into_iter().chain(bare).flat_map(both).chain(of_ranks).collect()
}

/// Returns the bytes of one sequence.
fn sent_bytes() -> usize {
    N_SENT as usize * layout().block_bytes(GroupIdx(0))
}

/// Returns gigabytes per second, if one sequence takes the time `took`.
pub(crate) fn rate(took: Duration) -> f64 {
    sent_bytes() as f64 / took.as_secs_f64() / 1e9
}

/// Measures nodes with several ranks, in memory of their own.
async fn through_ranks(
    (near, far): (Outcome<KvMemory>, Outcome<KvMemory>),
    how: How,
) -> Outcome<ElapsedTime> {
    let (near, far) = (near?, far?);
    fill(&near);
    through_connector(&near, &far, how).await
}

/// Runs all measurements. Returns the results, and all steps of one transfer for each variant.
pub(crate) async fn all() -> Outcome<(Value, Vec<Value>)> {
    let (near, far) = (one_stage("prefill", layout(), N_BLOCKS), one_stage("decode", layout(), N_BLOCKS));
    fill(&near);
    let mut lines = vec![json!({"what": "plain copy", "gigabytes_per_second": plainly(&near, &far)?})];
    eprintln!("{}", lines[0]);
    let mut walks = Vec::new();
    for how in ways() {
        let took = match how.ranks {
            (1, 1) => through_connector(&near, &far, how).await,
            (from, to) => {
                let of = |name, tp| Ok(one_stage(name, layout().over_ranks(tp)?, N_BLOCKS));
                through_ranks((of("prefill", from), of("decode", to)), how).await
            }
        };
        let mut line = how.told();
        match took {
            Err(error) => line["error"] = json!(error.to_string()),
            Ok(took) => {
                line["median_ms"] = json!(took.finish.as_secs_f64() * 1e3);
                line["gigabytes_per_second"] = json!(rate(took.finish));
                line["arrived_gigabytes_per_second"] = json!(rate(took.arrival));
                line["marks"] = took.marks;
                walks.push(json!({"how": how.told(), "walk": took.walk}));
            }
        }
        let rate = &line["gigabytes_per_second"];
        eprintln!("{} {rate}", how.told());
        lines.push(line);
    }
    lines.push(json!({"what": "plain copy, again", "gigabytes_per_second": plainly(&near, &far)?}));
    eprintln!("{}", lines[lines.len() - 1]);
    Ok((json!(lines), walks))
}

fn plainly(near: &KvMemory, far: &KvMemory) -> Outcome<f64> {
    let (near, far) = (near.on_card().expect("on a card"), far.on_card().expect("on a card"));
    let (fd, exported) = near.memory().export()?;
    let remote = far.memory().import(&fd, exported)?;
    let copier = PageCopier::new(far.memory(), PageCopierSize::default())?;
    let mut took = Vec::new();
    for _ in 0..ROUNDS + WARM_UP {
        let start = now();
        copier.copy_plainly(&remote, far.memory(), sent_bytes())?;
        took.push(start.elapsed());
    }
    Ok(rate(median(took.split_off(WARM_UP))))
}

/// Measures a transfer whose layers are all computed already.
async fn through_connector(near: &KvMemory, far: &KvMemory, how: How) -> Outcome<ElapsedTime> {
    let (prefill, decode) = (side("prefill", near, how).await?, side("decode", far, how).await?);
    let (from, _between) = prefill.blocks(how);
    let from = Arc::new(from);
    let (mut arrivals, mut finishes) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS + WARM_UP {
        let one = one(&prefill, &decode, &from, how).await?;
        arrivals.push(one.arrival);
        finishes.push(one.finish);
        if round == 0 && how.ranks == (1, 1) && !how.digests {
            check(near, far, &from, &one.arrived.lease);
        }
    }
    let (mut marks, mut walk) = (Value::Null, Value::Null);
    for _ in 0..MARKED {
        (marks, walk) = marked(&prefill, &decode, &from, how).await?;
    }
    prefill.ends().await?;
    decode.ends().await?;
    let (arrival, finish) = (median(arrivals.split_off(WARM_UP)), median(finishes.split_off(WARM_UP)));
    Ok(ElapsedTime { arrival, finish, marks, walk })
}

/// One transfer in progress.
pub(crate) struct One {
    start: Instant,
    pub(crate) arrival: Duration,
    pub(crate) finish: Duration,
    arrived: ArrivedKv,
}

pub(crate) async fn one(prefill: &Side, decode: &Side, from: &Arc<BlockLease>, how: How) -> Outcome<One> {
    let (lease, _between) = decode.blocks(how);
    let (landing, arrival) = decode.wire.land(LandRequest {
        transfer: decode.parts.world.transfer_id(),
        lease,
        n_tokens: N_TOKENS,
        held_tokens: 0,
        deadline: decode.parts.world.deadline_in(Duration::from_secs(30)),
    })?;
    let mut sender = prefill.wire.open(&Destination::Landing(landing.clone())).await?;
    let start = now();
    let span = KvSpan { group: GroupIdx(0), blocks: 0..N_SENT, layers: 0..32 };
    sender.send(span, Arc::clone(from), LayerFence::open()).await?;
    let arrived = async {
        let arrived = arrival.settle().await;
        (arrived, start.elapsed())
    };
    let (sent, (arrived, arrival)) = tokio::join!(sender.finish(handoff(&landing)), arrived);
    let finish = start.elapsed();
    sent?;
    Ok(One { start, arrival, finish, arrived: arrived? })
}

/// Runs one transfer with recording. Returns a summary of its events, and every event.
pub(crate) async fn marked(
    prefill: &Side,
    decode: &Side,
    from: &Arc<BlockLease>,
    how: How,
) -> Outcome<(Value, Value)> {
    marks::begin();
    let one = one(prefill, decode, from, how).await?;
    let seen = marks::end();
    Ok((marks::told(one.start, &seen), marks::whole(one.start, &seen)))
}

/// Compares every byte of every layer on the two nodes.
fn check(near: &KvMemory, far: &KvMemory, from: &BlockLease, to: &BlockLease) {
    let group = GroupIdx(0);
    for layer in 0..32 {
        let (here, there) = (
            near.read(group, layer, 0..N_BLOCKS).expect("no write is under way"),
            far.read(group, layer, 0..N_BLOCKS).expect("no write is under way"),
        );
        let page = here.len() / N_BLOCKS as usize;
        for (from, to) in from.table(group).iter().zip(to.table(group)) {
            let (from, to) = (from.0 as usize * page, to.0 as usize * page);
            assert!(here[from..from + page] == there[to..to + page], "layer {layer} arrives as it is");
        }
    }
}

pub(crate) fn median(mut took: Vec<Duration>) -> Duration {
    took.sort();
    took[took.len() / 2]
}
