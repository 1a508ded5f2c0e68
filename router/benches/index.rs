//! Times and sizes of the prefix index, and of decisions over it: `cargo bench -p baton-router`.
//!
//! The index has a million blocks of 64 nodes. A decision is a look-up of 128 blocks, a view of the nodes and the
//! policy's choice.
#![allow(clippy::disallowed_methods, clippy::unwrap_used, clippy::print_stdout)]

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use baton_router as router;
use criterion::{BatchSize, Criterion, Throughput};
use router::cluster::IndexedNode;
use router::cluster::index::PrefixIndex;
use router::policy::{Ask, ClusterView, NodeView, by_name};
use types::load::EVENT_HASHES_MAX;
use types::prompt::Priority;
use types::{
    BlockCounts, BlockHash, CacheSalt, Deadline, Epoch, Fingerprint, KvDtype, KvLayout, LearnedCosts,
    ModelInfo, NodeId, NodeInfo, NodeLoad, Prompt, PromptWork, RequestId, RequestedModel, Role, Sampling,
    StopRules, TenantId, TokenId,
};

const N_NODES: usize = 64;
const N_BLOCKS: u64 = 1 << 20;
const PROMPT_BLOCKS: u64 = 128;

fn main() {
    let (index, nodes) = sizes();
    let mut criterion = Criterion::default().configure_from_args().sample_size(20);
    lookups(&mut criterion, &index);
    events(&mut criterion);
    decisions(&mut criterion, &index, &nodes);
    resync(&index, &nodes);
}

/// Returns different hashes, as random as real ones.
fn hashes(numbers: std::ops::Range<u64>) -> Vec<BlockHash> {
    let mixed = |number: u64| {
        let mut bits = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        u128::from(bits ^ (bits >> 31))
    };
    numbers.map(|number| BlockHash((mixed(number) << 64) | mixed(!number))).collect()
}

/// Returns the resident memory of this process in bytes.
fn resident() -> f64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split_whitespace().nth(1).unwrap().parse::<f64>().unwrap() * 4096.0
}

/// Fills an index, and prints the memory per block with 1 to 8 nodes for each block.
fn sizes() -> (PrefixIndex, Vec<IndexedNode>) {
    let all = hashes(0..N_BLOCKS);
    let index = PrefixIndex::default();
    let nodes: Vec<IndexedNode> = (0..N_NODES).map(|_| index.node()).collect();
    nodes.iter().for_each(IndexedNode::begin);
    let before = resident();
    for nth in 0..8 {
        for (part, blocks) in all.chunks(all.len() / N_NODES).enumerate() {
            assert!(nodes[(part + nth) % N_NODES].store(blocks));
        }
        let bytes = (resident() - before) / N_BLOCKS as f64;
        println!("{} nodes per block: {bytes:.0} bytes per block", nth + 1);
    }
    (index, nodes)
}

fn lookups(criterion: &mut Criterion, index: &PrefixIndex) {
    let mut first = 0;
    let mut prompt = move || {
        first = (first + 7_919 * PROMPT_BLOCKS) % (N_BLOCKS - PROMPT_BLOCKS);
        hashes(first..first + PROMPT_BLOCKS)
    };
    let now = tokio::time::Instant::now();
    criterion.bench_function("look up 128 blocks", |b| {
        b.iter_batched(&mut prompt, |prompt| black_box(index.matches(&prompt, now)), BatchSize::SmallInput)
    });
}

fn events(criterion: &mut Criterion) {
    let all = hashes(0..N_BLOCKS);
    let mut group = criterion.benchmark_group("block events");
    group.throughput(Throughput::Elements(2 * N_BLOCKS)).sample_size(10);
    group.bench_function("store and evict a million blocks", |b| {
        b.iter_batched(
            PrefixIndex::default,
            |index| {
                let node = index.node();
                node.begin();
                all.chunks(EVENT_HASHES_MAX).for_each(|part| assert!(node.store(part)));
                all.chunks(EVENT_HASHES_MAX).for_each(|part| node.evict(part));
            },
            BatchSize::PerIteration,
        )
    });
    group.finish();
}

fn decisions(criterion: &mut Criterion, index: &PrefixIndex, nodes: &[IndexedNode]) {
    let (prompt, now) = (prompt(), tokio::time::Instant::now());
    let hashes = hashes(0..PROMPT_BLOCKS);
    let ask = Ask::new(&prompt, &hashes);
    for (policy, n_nodes) in [("prefix-aware", 64), ("prefix-aware", 1000), ("cost", 64), ("cost", 1000)] {
        let (name, view) = (format!("a decision of {policy} over {n_nodes} nodes"), view(n_nodes));
        let policy = by_name(policy).unwrap();
        criterion.bench_function(&name, |b| {
            b.iter(|| {
                let matches = index.matches(&hashes, now);
                let mut view = view.clone();
                for (node, indexed) in view.nodes.iter_mut().zip(nodes.iter().cycle()) {
                    node.cached_tokens = indexed.n_matched(&matches) * 16;
                }
                black_box(policy.route(&ask, &view, 7)).unwrap()
            })
        });
    }
}

/// Prints the times of look-ups while a node's list of a million blocks is replaced.
fn resync(index: &PrefixIndex, nodes: &[IndexedNode]) {
    let (all, prompt) = (hashes(N_BLOCKS..2 * N_BLOCKS), hashes(0..PROMPT_BLOCKS));
    let (now, is_done) = (tokio::time::Instant::now(), AtomicBool::new(false));
    assert!(nodes[0].store(&all));
    let mut took = Vec::new();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            nodes[0].begin();
            all.chunks(EVENT_HASHES_MAX).for_each(|part| assert!(nodes[0].store(part)));
            is_done.store(true, Ordering::Relaxed);
        });
        while !is_done.load(Ordering::Relaxed) {
            let began = Instant::now();
            black_box(index.matches(&prompt, now));
            took.push(began.elapsed());
        }
    });
    took.sort_unstable();
    let at = |share: f64| took[((took.len() - 1) as f64 * share) as usize];
    let (median, late, worst) = (at(0.5), at(0.999), at(1.0));
    println!(
        "look-ups during a resync: {} of them, median {median:?}, p99.9 {late:?}, worst {worst:?}",
        took.len()
    );
}

fn view(n_nodes: usize) -> ClusterView {
    let node = |nth: usize| {
        let role = if nth.is_multiple_of(2) { Role::Prefill } else { Role::Decode };
        let costs = LearnedCosts {
            prompt_token_ms: 0.05,
            step_ms: 5.0,
            row_ms: 0.1,
            step_tokens: 512,
            ..LearnedCosts::default()
        };
        let blocks = BlockCounts { total: 1 << 20, free: 1 << 20, ..BlockCounts::default() };
        NodeView {
            info: Arc::new(info(&format!("n{nth}"), role)),
            load: NodeLoad { blocks, costs, step_ms: 5.0, ..NodeLoad::default() },
            assigned: 0,
            assigned_work: PromptWork::default(),
            last_turn: nth as u64,
            cached_tokens: 0,
        }
    };
    ClusterView { nodes: (0..n_nodes).map(node).collect(), ..ClusterView::default() }
}

fn info(id: &str, role: Role) -> NodeInfo {
    NodeInfo {
        id: NodeId::new(id),
        epoch: Epoch(1),
        role,
        pid: 1,
        host: "h".to_owned(),
        address: "a".to_owned(),
        admin: "b".to_owned(),
        wires: vec![],
        without: vec![],
        keeps_role: false,
        model: ModelInfo {
            name: "m".to_owned(),
            context_tokens: 1 << 20,
            vocab: 300,
            eos_tokens: vec![],
            layout: KvLayout::uniform(16, KvDtype::F32, 2, 2, 4),
            fingerprint: Fingerprint::default(),
        },
        protocol: types::node::PROTOCOL,
    }
}

fn prompt() -> Prompt {
    Prompt {
        id: RequestId::new("r"),
        tenant: TenantId::default(),
        cache_salt: CacheSalt::default(),
        model: RequestedModel::named("m"),
        tokens: vec![TokenId(1); PROMPT_BLOCKS as usize * 16 + 1].into(),
        n_generated: 0,
        sampling: Sampling::default(),
        stop: StopRules::default(),
        priority: Priority(0),
        deadline: Deadline::at(Instant::now() + Duration::from_secs(60)),
    }
}
