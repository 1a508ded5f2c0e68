//! Compares the tcp connector with the least work that moves the same bytes over the same sockets.
//!
//! `cargo bench -p baton-kv-transfer`. Both sides run in one process on the machine's cores and move 1 GiB of KV of a
//! Llama-3.1-8B layout (64 KiB per layer and block) from one memory to another. *plain* is vectored writes and reads
//! on the same number of TCP streams; *connector* adds landings, frames and verified digests.
#![allow(clippy::disallowed_methods, clippy::unwrap_used, clippy::print_stdout)]

use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_kv_transfer as kv_transfer;
use chassis::{Gate, World};
use criterion::{Criterion, SamplingMode, Throughput};
use kv_cache::{BlockLease, BlockPool, Holder, Holding, KvMemory, LayerFence};
use kv_transfer::{
    ConnectorParts, Faults, KvConnector, LandRequest, TransferMetrics, TransferSettings, build,
};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use types::prompt::TokenId;
use types::step::Step;
use types::{Destination, Fingerprint, GroupIdx, Handoff, KvDtype, KvLayout, KvSpan, NodeId, RequestId};

const BLOCK_TOKENS: u32 = 16;
const N_LAYERS: u16 = 32;
const N_BLOCKS: u32 = 512;
const N_TOKENS: u32 = N_BLOCKS * BLOCK_TOKENS;
const PAGE_BYTES: usize = 64 << 10;
const BYTES: u64 = 1 << 30;
/// Slices that *plain* passes in one system call.
const PLAIN_SLICES: usize = 16;

/// The number of pairs of runs, whose median ratio is the result.
const N_PAIRS: usize = 25;

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let bench = Bench::new(&runtime);
    let mut criterion = Criterion::default().configure_from_args();
    let mut group = criterion.benchmark_group("1 GiB of KV over tcp");
    group.throughput(Throughput::Bytes(BYTES)).sampling_mode(SamplingMode::Flat).sample_size(10);
    group.bench_function("plain", |b| b.iter(|| runtime.block_on(bench.plain())));
    group.bench_function("connector", |b| b.iter(|| runtime.block_on(bench.connector())));
    group.finish();
    compare(&runtime, &bench);
}

/// Runs *plain* and *connector* in turn. Other load on the machine changes from second to second and affects
/// both runs of a pair, so the result is the median of the pairs' ratios, not the ratio of two medians.
fn compare(runtime: &Runtime, bench: &Bench) {
    let mut pairs = Vec::new();
    for _ in 0..N_PAIRS {
        let plain = measured(|| runtime.block_on(bench.plain()));
        let connector = measured(|| runtime.block_on(bench.connector()));
        pairs.push((plain, connector));
    }
    let rate =
        |run: fn(&(Run, Run)) -> Run| median(pairs.iter().map(|pair| run(pair).gigabytes_per_second()));
    let cpu = |run: fn(&(Run, Run)) -> Run| median(pairs.iter().map(|pair| run(pair).cpu.as_secs_f64()));
    println!("plain      {:.2} GB/s, {:.3} s of processor time", rate(|pair| pair.0), cpu(|pair| pair.0));
    println!(
        "connector  {:.2} GB/s, {:.3} s of processor time, digests on",
        rate(|pair| pair.1),
        cpu(|pair| pair.1)
    );
    let ratios =
        || pairs.iter().map(|(plain, connector)| plain.took.as_secs_f64() / connector.took.as_secs_f64());
    let (worst, best) = (ratios().fold(f64::MAX, f64::min), ratios().fold(0.0, f64::max));
    println!("ratio      {:.2} (median of {N_PAIRS} pairs; {worst:.2} to {best:.2})", median(ratios()));
}

#[derive(Clone, Copy)]
struct Run {
    took: Duration,
    /// CPU time of all threads of this process, in user and in kernel mode.
    cpu: Duration,
}

impl Run {
    fn gigabytes_per_second(self) -> f64 {
        BYTES as f64 / self.took.as_secs_f64() / 1e9
    }
}

fn measured(run: impl FnOnce()) -> Run {
    let (start, cpu) = (Instant::now(), processor_time());
    run();
    Run { took: start.elapsed(), cpu: processor_time() - cpu }
}

/// Reads the process's CPU time: fields 14 and 15 of `/proc/self/stat`, in ticks of 10 ms.
fn processor_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let after_name = stat.rsplit_once(") ").unwrap().1;
    let ticks: u64 = after_name.split(' ').skip(11).take(2).map(|field| field.parse::<u64>().unwrap()).sum();
    Duration::from_millis(ticks * 10)
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Two nodes with 1 GiB of KV each, and the parameters of both runs.
struct Bench {
    near: Node,
    far: Node,
    from: Arc<BlockLease>,
    streams: u16,
}

struct Node {
    parts: ConnectorParts,
    pool: BlockPool,
    connector: Arc<dyn KvConnector>,
}

impl Node {
    async fn new(name: &str, fill: u8) -> Self {
        let layout = KvLayout::uniform(BLOCK_TOKENS as u16, KvDtype::Bf16, N_LAYERS, 8, 128);
        let memory = KvMemory::host(layout.clone(), N_BLOCKS).unwrap();
        for layer in 0..N_LAYERS {
            let mut pages = memory.write(GroupIdx(0), layer, 0..N_BLOCKS).unwrap();
            pages.iter_mut().enumerate().for_each(|(at, byte)| *byte = fill.wrapping_mul(at as u8));
        }
        let world = World::real();
        let parts = ConnectorParts {
            node: NodeId::new(name),
            epoch: world.epoch(),
            memory,
            fingerprint: Fingerprint::default(),
            world,
            gate: Gate::new("bench"),
            settings: settings(),
            metrics: TransferMetrics::default(),
            faults: Faults::none(),
            processes: None,
        };
        let connector = build("tcp", parts.clone()).await.unwrap();
        Self { pool: BlockPool::new(&layout, N_BLOCKS), parts, connector }
    }

    fn lease(&self) -> BlockLease {
        let holder = Holder { what: Holding::Landing, request: RequestId::new("bench") };
        self.pool.reserve(N_BLOCKS as usize, holder).unwrap()
    }
}

/// Returns the default settings, changed by environment variables for tuning.
fn settings() -> TransferSettings {
    let from_env = |name: &str| std::env::var(name).ok().map(|value| value.parse::<usize>().unwrap());
    let mut settings = TransferSettings::default();
    settings.frame_bytes = from_env("BENCH_FRAME_BYTES").unwrap_or(settings.frame_bytes);
    settings.streams = from_env("BENCH_STREAMS").map_or(settings.streams, |streams| streams as u16);
    settings
}

impl Bench {
    fn new(runtime: &Runtime) -> Self {
        runtime.block_on(async {
            let (near, far) = (Node::new("near", 3).await, Node::new("far", 0).await);
            let from = Arc::new(near.lease());
            Self { streams: near.parts.settings.streams, near, far, from }
        })
    }

    async fn connector(&self) {
        let world = &self.near.parts.world;
        let request = LandRequest {
            transfer: world.transfer_id(),
            lease: self.far.lease(),
            n_tokens: N_TOKENS,
            held_tokens: 0,
            deadline: world.deadline_in(Duration::from_secs(60)),
        };
        let (landing, arrival) = self.far.connector.land(request).unwrap();
        let transfer = landing.transfer;
        let mut sender = self.near.connector.open(&Destination::Landing(landing)).await.unwrap();
        for layer in 0..N_LAYERS {
            let span = KvSpan { group: GroupIdx(0), blocks: 0..N_BLOCKS, layers: layer..layer + 1 };
            sender.send(span, Arc::clone(&self.from), LayerFence::open()).await.unwrap();
        }
        let first = Step { token: TokenId(0), index: 0, logprobs: None, finish: None };
        sender.finish(Handoff { transfer, n_tokens: N_TOKENS, first }).await.unwrap();
        assert_eq!(arrival.settle().await.unwrap().bytes, BYTES);
    }

    async fn plain(&self) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let mut tasks = Vec::new();
        for stream in 0..self.streams {
            let (near, far) = tokio::join!(TcpStream::connect(addr), listener.accept());
            let (near, far) = (near.unwrap(), far.unwrap().0);
            near.set_nodelay(true).unwrap();
            tasks.push(tokio::spawn(plain_send(near, self.near.parts.memory.clone(), stream, self.streams)));
            tasks.push(tokio::spawn(plain_receive(far, self.far.parts.memory.clone(), stream, self.streams)));
        }
        for task in tasks {
            task.await.unwrap();
        }
    }
}

/// Returns the layers of one stream: every n-th layer.
fn layers(stream: u16, streams: u16) -> impl Iterator<Item = u16> {
    (stream..N_LAYERS).step_by(usize::from(streams))
}

async fn plain_send(mut socket: TcpStream, memory: KvMemory, stream: u16, streams: u16) {
    for layer in layers(stream, streams) {
        let pages = memory.read(GroupIdx(0), layer, 0..N_BLOCKS).unwrap();
        let mut rest = &pages[..];
        while !rest.is_empty() {
            let slices: Vec<_> = rest.chunks(PAGE_BYTES).take(PLAIN_SLICES).map(IoSlice::new).collect();
            let n = socket.write_vectored(&slices).await.unwrap();
            rest = &rest[n..];
        }
    }
    socket.shutdown().await.unwrap();
}

async fn plain_receive(socket: TcpStream, memory: KvMemory, stream: u16, streams: u16) {
    for layer in layers(stream, streams) {
        let mut pages = memory.write(GroupIdx(0), layer, 0..N_BLOCKS).unwrap();
        let mut rest = &mut pages[..];
        while !rest.is_empty() {
            socket.readable().await.unwrap();
            let mut slices: Vec<_> =
                rest.chunks_mut(PAGE_BYTES).take(PLAIN_SLICES).map(IoSliceMut::new).collect();
            match socket.try_read_vectored(&mut slices) {
                Ok(n) => rest = &mut rest[n..],
                Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock),
            }
        }
    }
}
