//! Nodes and pairs of nodes for conformance cases, with KV whose bytes name their place.

use std::num::NonZero;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use chassis::{Gate, World};
use futures::future::BoxFuture;
use kv_cache::{BlockLease, BlockPool, Holder, Holding, KvMemory, LayerFence};
use types::layout::{Attention, LayerGroup, LayerShape, Shard};
use types::prompt::TokenId;
use types::step::Step;
use types::{
    BlockCounts, BlockIdx, Destination, Fingerprint, GroupIdx, Handoff, KvDtype, KvLayout, KvSpan, Landing,
    NodeId, RequestId, StageLayers, StageSplit, TransferId,
};

use crate::arrival::Arrival;
use crate::arrived::ArrivedKv;
use crate::connector::{KvConnector, KvSender};
use crate::connector_parts::ConnectorParts;
use crate::digest::PageShape;
use crate::error::TransferError;
use crate::faults::Faults;
use crate::landings::LandRequest;
use crate::metrics::TransferMetrics;
use crate::reshard::HeadDistribution;
use crate::settings::TransferSettings;

pub type Make = Arc<dyn Fn(ConnectorParts) -> BoxFuture<'static, Arc<dyn KvConnector>> + Send + Sync>;

pub const BLOCK_TOKENS: u32 = 4;
const N_BLOCKS: u32 = 1024;
/// The number of layers of [`layout`].
pub const N_LAYERS: u16 = 7;
/// The content of blocks that nothing was written into.
const STALE: u8 = 0xee;
/// The lifetime of the suite's landings, unless a case sets another one.
const LANDING_FOR: Duration = Duration::from_secs(30);
const BASELINE_WITHIN: Duration = Duration::from_secs(20);

/// Allocates the memory of the node with this name.
pub type Place = fn(&str, KvLayout, &StageLayers, u32) -> KvMemory;

/// The function that allocates the nodes' memory, if the suite runs over a device's memory; otherwise host
/// memory is used.
static PLACE: OnceLock<Place> = OnceLock::new();

/// Sets the memory of all nodes that this process creates later.
///
/// # Panics
/// If it was called before.
pub fn lie_in(place: Place) {
    assert!(PLACE.set(place).is_ok(), "the suite's nodes have one place");
}

/// The factor by which this machine is slower than others.
static SLOWER: AtomicU32 = AtomicU32::new(1);

/// Multiplies all later time limits of the suite, for an emulated machine.
pub fn expect_slowness(times: u32) {
    SLOWER.store(times.max(1), Ordering::Relaxed);
}

/// Multiplies a time limit by the slowness of this machine.
pub fn here(on_a_fast_machine: Duration) -> Duration {
    on_a_fast_machine * SLOWER.load(Ordering::Relaxed)
}

fn host(_name: &str, layout: KvLayout, stages: &StageLayers, n_blocks: u32) -> KvMemory {
    KvMemory::host_of_stages(layout, stages, n_blocks).expect("a few hundred KiB can be mapped")
}

/// Returns a layout of three groups, two with layers of two widths: enough variety to reveal errors of a wire.
pub fn layout() -> KvLayout {
    layout_of(2)
}

/// Like [`layout`], but with `SHARED_HEADS` KV heads on `tp_size` ranks.
///
/// # Panics
/// If the ranks cannot share the heads.
pub fn spread_layout(tp_size: u16) -> KvLayout {
    layout_of(SHARED_HEADS).over_ranks(tp_size).expect("the one number divides the other")
}

/// The number of pipeline stages of a node, and of the ranks of each stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagesAndRanks {
    pub n_stages: NonZero<u16>,
    pub tp_size: u16,
}

impl StagesAndRanks {
    /// # Panics
    /// If there is no stage.
    pub const fn new(n_stages: u16, tp_size: u16) -> Self {
        Self { n_stages: NonZero::new(n_stages).expect("a node has a stage"), tp_size }
    }

    fn parts(self, name: &str) -> ConnectorParts {
        let split = StageSplit { n_stages: self.n_stages, layers: Vec::new() };
        let stages = if self.n_stages.get() == 1 { Ok(StageLayers::one()) } else { split.over(N_LAYERS) };
        Node::parts_of(name, spread_layout(self.tp_size), &stages.expect("every stage has a layer"))
    }
}

/// KV heads of nodes with several ranks.
const SHARED_HEADS: u16 = 4;

fn layout_of(n_kv_heads: u16) -> KvLayout {
    let shape = |layer, head_dim| LayerShape { layer, n_kv_heads, head_dim };
    let full =
        LayerGroup { attention: Attention::Full, layers: vec![shape(0, 4), shape(2, 4), shape(4, 12)] };
    let window = Attention::SlidingWindow { tokens: 64 };
    let window = LayerGroup { attention: window, layers: vec![shape(1, 4), shape(3, 4)] };
    let latent = LayerGroup { attention: Attention::Latent, layers: vec![shape(5, 4), shape(6, 12)] };
    let block_tokens = BLOCK_TOKENS as u16;
    KvLayout { block_tokens, dtype: KvDtype::F32, groups: vec![full, window, latent], shard: Shard::WHOLE }
}

pub fn fingerprint() -> Fingerprint {
    Fingerprint::new([("weights".to_owned(), "conformance".to_owned())])
}

/// Returns settings with small frames, so that small transfers have many, and a stall time for a loaded
/// machine.
pub fn settings() -> TransferSettings {
    let stall_ms = here(Duration::from_secs(10)).as_millis() as u64;
    TransferSettings { frame_bytes: 1024, stall_ms, ..TransferSettings::default() }
}

/// One node: memory, pool and connector.
#[derive(Debug)]
pub struct Node {
    pub parts: ConnectorParts,
    pub connector: Arc<dyn KvConnector>,
    pub pool: BlockPool,
    /// The memory of the node's other processes. Each layer is in the memory of one process.
    others: Vec<KvMemory>,
    baseline: BlockCounts,
}

impl Node {
    pub async fn new(make: &Make, parts: ConnectorParts) -> Self {
        Self::of_processes(make, parts, Vec::new()).await
    }

    /// Makes a node of several processes. `parts` are the head's, and `others` is the memory of the other processes.
    pub async fn of_processes(make: &Make, parts: ConnectorParts, others: Vec<KvMemory>) -> Self {
        let pool = BlockPool::new(parts.memory.layout(), parts.memory.n_blocks());
        let (connector, baseline) = (make(parts.clone()).await, pool.counts());
        Self { parts, connector, pool, others, baseline }
    }

    pub fn parts(name: &str, layout: KvLayout) -> ConnectorParts {
        Self::parts_of(name, layout, &StageLayers::one())
    }

    /// Like [`parts`](Self::parts), for a node with these stages.
    pub fn parts_of(name: &str, layout: KvLayout, stages: &StageLayers) -> ConnectorParts {
        let world = World::real();
        ConnectorParts {
            node: NodeId::new(name),
            epoch: world.epoch(),
            memory: PLACE.get().map_or(host as Place, |place| *place)(name, layout, stages, N_BLOCKS),
            fingerprint: fingerprint(),
            world,
            gate: Gate::new("conformance"),
            settings: settings(),
            metrics: TransferMetrics::default(),
            faults: Faults::programmable(),
            processes: None,
        }
    }

    /// Leases fresh blocks for `n_tokens` tokens and fills them with stale content.
    pub fn room(&self, n_tokens: u32) -> BlockLease {
        let n_blocks = self.parts.memory.layout().blocks_for(n_tokens as usize);
        let holder = Holder { what: Holding::Landing, request: RequestId::new("conformance") };
        let lease = self.pool.reserve(n_blocks, holder).expect("the suite's nodes have room");
        self.fill(&lease, 0..n_blocks as u32, |_, _, _| STALE);
        lease
    }

    /// Leases blocks and writes the KV of one sequence, as a finished prefill leaves them.
    pub fn computed(&self, n_tokens: u32, sequence: u64) -> Arc<BlockLease> {
        let lease = self.room(n_tokens);
        self.compute(&lease, 0..lease.n_blocks() as u32, sequence);
        Arc::new(lease)
    }

    pub fn compute(&self, lease: &BlockLease, blocks: Range<u32>, sequence: u64) {
        self.fill(lease, blocks, |layer, block, byte| kv_byte(sequence, layer, block, byte));
    }

    /// Returns the memory of the process that has a rank's layer.
    fn memory_of(&self, share: LayerShare) -> &KvMemory {
        let mut all = std::iter::once(&self.parts.memory).chain(&self.others);
        let has = |memory: &&KvMemory| {
            memory.has_layer(share.group, share.layer_pos) && memory.ranks().contains(&share.rank)
        };
        all.find(has).expect("a process has the layer of the rank")
    }

    fn fill(&self, lease: &BlockLease, blocks: Range<u32>, byte: impl Fn(u16, u32, usize) -> u8) {
        for share in shares(self.parts.memory.layout()) {
            for block in blocks.clone() {
                let place = lease.table(share.group)[block as usize].0;
                let memory = self.memory_of(share).rank(share.rank);
                let page = memory.write(share.group, share.layer_pos, place..place + 1);
                let mut page = page.expect("the lease is ours alone");
                let cells = page.iter_mut().enumerate();
                cells.for_each(|(at, cell)| *cell = byte(share.layer, block, share.in_whole_page(at)));
            }
        }
    }

    /// Checks that the lease holds the right KV for every valid token of the sequence.
    pub fn assert_holds(&self, lease: &BlockLease, n_tokens: u32, sequence: u64) {
        for share in shares(self.parts.memory.layout()) {
            for block in 0..n_tokens.div_ceil(BLOCK_TOKENS) {
                let place = lease.table(share.group)[block as usize];
                let valid = (n_tokens - block * BLOCK_TOKENS).min(BLOCK_TOKENS) as usize;
                let expected = |at| kv_byte(sequence, share.layer, block, share.in_whole_page(at));
                self.assert_page(share, place, valid, expected);
            }
        }
    }

    fn assert_page(&self, share: LayerShare, place: BlockIdx, valid: usize, expected: impl Fn(usize) -> u8) {
        let LayerShare { shape, group, layer_pos, rank, .. } = share;
        let memory = self.memory_of(share).rank(rank);
        let page = memory.read(group, layer_pos, place.0..place.0 + 1).expect("no write is under way");
        for run in 0..shape.n_parts * shape.n_heads {
            let start = run * shape.head_bytes;
            for at in start..start + valid * shape.token_bytes {
                assert_eq!(page[at], expected(at), "byte {at} of {place:?}, {share:?}");
            }
        }
    }

    /// Leases all blocks except holes, each with `hole_blocks` free neighbours.
    pub fn perforate(&self, hole_blocks: u32) -> Vec<BlockLease> {
        const N_HOLES: usize = 24;
        let some = (0..2 * N_HOLES).map(|_| self.room(hole_blocks * BLOCK_TOKENS)).collect::<Vec<_>>();
        let rest = self.pool.counts().free / self.parts.memory.layout().groups.len() as u32;
        let rest = self.room(rest * BLOCK_TOKENS);
        let solid = some.into_iter().enumerate().filter(|(nth, _)| nth % 2 == 0).map(|(_, lease)| lease);
        solid.chain([rest]).collect()
    }

    /// Waits until all blocks are free, and checks the pool.
    pub async fn at_baseline(&self) {
        let mut freed = self.pool.freed();
        let back = async {
            while self.pool.counts() != self.baseline {
                freed.changed().await.expect("the pool lives");
            }
        };
        let name = &self.parts.node;
        tokio::time::timeout(here(BASELINE_WITHIN), back)
            .await
            .unwrap_or_else(|_| panic!("{name} is not at its baseline: {:?}", self.pool.counts()));
        self.pool.integrity().unwrap_or_else(|error| panic!("{name}: {error}"));
    }

    /// Drops the connector, and waits until the node's tasks have ended.
    async fn ends(self) {
        let Self { parts: ConnectorParts { node, gate, processes, .. }, connector, .. } = self;
        drop((connector, processes));
        let closed = gate.close(here(BASELINE_WITHIN)).await;
        closed.unwrap_or_else(|held| panic!("{node}: {held:?}"));
    }

    pub fn is_at_baseline(&self) -> bool {
        self.pool.counts() == self.baseline
    }
}

/// One rank's share of a layer.
#[derive(Clone, Copy, Debug)]
struct LayerShare {
    group: GroupIdx,
    layer_pos: u16,
    /// The layer's number in the model.
    layer: u16,
    rank: u16,
    /// The shape of the rank's pages of this layer.
    shape: PageShape,
    /// The first of the rank's heads, and the number of heads of the model.
    heads: (usize, usize),
}

impl LayerShare {
    /// Returns the offset that a byte of the rank's page has in a page of one rank with all heads.
    fn in_whole_page(&self, at: usize) -> usize {
        let (run, byte) = (at / self.shape.head_bytes, at % self.shape.head_bytes);
        let (part, head) = (run / self.shape.n_heads, self.heads.0 + run % self.shape.n_heads);
        (part * self.heads.1 + head) * self.shape.head_bytes + byte
    }
}

fn shares(layout: &KvLayout) -> Vec<LayerShare> {
    let mut shares = Vec::new();
    for group in layout.group_indices() {
        for (layer_pos, layer) in (0..).zip(&layout.group(group).layers) {
            let spread = HeadDistribution { n_heads: layer.n_kv_heads, tp_size: layout.shard.tp_size };
            shares.extend((0..layout.shard.tp_size).map(|rank| LayerShare {
                group,
                layer_pos,
                layer: layer.layer,
                rank,
                shape: PageShape::new(layout, group, layer_pos),
                heads: (spread.heads_of(rank).start.into(), layer.n_kv_heads.into()),
            }));
        }
    }
    shares
}

/// Returns a byte of KV that depends on its place, so that a wrong place is detected.
fn kv_byte(sequence: u64, layer: u16, block: u32, byte: usize) -> u8 {
    let place = sequence << 40 ^ u64::from(layer) << 32 ^ u64::from(block) << 16 ^ byte as u64;
    (place.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

/// A prefill node and a decode node.
#[derive(Debug)]
pub struct Pair {
    make: MakeShown,
    pub prefill: Node,
    pub decode: Node,
}

/// A wrapper for `Debug`, because a function has no debug output.
struct MakeShown(Make);

impl std::fmt::Debug for MakeShown {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("make")
    }
}

impl Pair {
    pub async fn new(make: &Make) -> Self {
        let parts = |name| Node::parts(name, layout());
        Self::of(make, parts("prefill"), parts("decode")).await
    }

    /// Makes two nodes with these stages and ranks.
    pub async fn between(make: &Make, prefill: StagesAndRanks, decode: StagesAndRanks) -> Self {
        Self::of(make, prefill.parts("prefill"), decode.parts("decode")).await
    }

    async fn of(make: &Make, prefill: ConnectorParts, decode: ConnectorParts) -> Self {
        let prefill = Node::new(make, prefill).await;
        let decode = Node::new(make, decode).await;
        Self { make: MakeShown(Arc::clone(make)), prefill, decode }
    }

    /// Makes a third node with the same kind of connector.
    pub async fn third(&self, parts: ConnectorParts) -> Node {
        Node::new(&self.make.0, parts).await
    }

    pub async fn at_baseline(&self) {
        self.prefill.at_baseline().await;
        self.decode.at_baseline().await;
    }

    pub async fn ends(self) {
        self.prefill.ends().await;
        self.decode.ends().await;
    }

    /// Leases room for a sequence on the decode node and grants a landing.
    pub fn land(&self, n_tokens: u32) -> (Landing, Arrival) {
        self.land_for(n_tokens, here(LANDING_FOR))
    }

    pub fn land_for(&self, n_tokens: u32, within: Duration) -> (Landing, Arrival) {
        let request = self.request(self.decode.room(n_tokens), n_tokens, 0);
        let deadline = self.decode.parts.world.deadline_in(within);
        self.decode.connector.land(LandRequest { deadline, ..request }).expect("a proper request")
    }

    pub fn request(&self, lease: BlockLease, n_tokens: u32, held_tokens: u32) -> LandRequest {
        LandRequest {
            transfer: self.decode.parts.world.transfer_id(),
            lease,
            n_tokens,
            held_tokens,
            deadline: self.decode.parts.world.deadline_in(here(LANDING_FOR)),
        }
    }

    pub async fn open(&self, landing: &Landing) -> Result<Box<dyn KvSender>, TransferError> {
        self.prefill.connector.open(&Destination::Landing(landing.clone())).await
    }

    /// Opens the landing, sends all KV at once and hands off.
    pub async fn deliver(&self, landing: &Landing, from: &Arc<BlockLease>) -> Result<(), TransferError> {
        let sender = self.open(landing).await?;
        self.fill(sender, landing, from).await
    }

    /// Sends all KV to an opened landing and hands off.
    pub async fn fill(
        &self,
        mut sender: Box<dyn KvSender>,
        landing: &Landing,
        from: &Arc<BlockLease>,
    ) -> Result<(), TransferError> {
        for span in whole(landing) {
            sender.send(span, Arc::clone(from), LayerFence::open()).await?;
        }
        sender.finish(handoff(landing)).await
    }

    /// Transfers sequence number `sequence` from the prefill node to the decode node, and checks the KV.
    pub async fn transfer(&self, n_tokens: u32, sequence: u64) {
        let from = self.prefill.computed(n_tokens, sequence);
        let (landing, arrival) = self.land(n_tokens);
        // A failed delivery ends the test at once, not when the landing expires.
        let delivered = async { self.deliver(&landing, &from).await.expect("delivered") };
        let ((), arrived) = tokio::join!(delivered, arrival.settle());
        self.check(&arrived.expect("arrived"), n_tokens, sequence);
    }

    pub fn check(&self, kv: &ArrivedKv, n_tokens: u32, sequence: u64) {
        self.decode.assert_holds(&kv.lease, n_tokens, sequence);
        assert_eq!(kv.scheme, self.decode.connector.scheme());
    }
}

/// Returns all pages of a sequence, one span for each group. Held blocks are included: the sender skips them.
pub fn whole(landing: &Landing) -> Vec<KvSpan> {
    let n_blocks = landing.n_tokens.div_ceil(BLOCK_TOKENS);
    let span = |group: GroupIdx| {
        let layers = 0..landing.layout.group(group).layers.len() as u16;
        KvSpan { group, blocks: 0..n_blocks, layers }
    };
    landing.layout.group_indices().map(span).collect()
}

/// Returns each page of a sequence as its own span.
pub fn pages(landing: &Landing) -> Vec<KvSpan> {
    whole(landing).iter().flat_map(crate::landing::PageAt::all).map(crate::landing::PageAt::span).collect()
}

pub fn handoff(landing: &Landing) -> Handoff {
    handoff_of(landing.transfer, landing.n_tokens)
}

pub fn handoff_of(transfer: TransferId, n_tokens: u32) -> Handoff {
    let first = Step { token: TokenId(7), index: 0, logprobs: None, finish: None };
    Handoff { transfer, n_tokens, first }
}
