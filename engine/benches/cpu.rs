//! Compares the CPU backend with the hardware's limits: decode with the memory rate, prefill with the matrix
//! rate.
//!
//! ```text
//! cargo bench -p baton-engine --bench cpu                      # random weights, Qwen3-0.6B's shape, two threads
//! SHAPE=llama-3.2-1b THREADS=4 cargo bench -p baton-engine --bench cpu
//! ```
//!
//! Throughput is in bytes of weights for decode and for the plain read that it is compared with. For prefill
//! and single products it is in floating-point operations (as "elements"). `reference.py` measures other
//! engines.

use std::hint::black_box;
use std::num::NonZero;
use std::path::Path;
use std::time::Duration;

use baton_engine::load::Quantize;
use baton_engine::{
    Backend, CpuBackend, CpuSettings, LoadFormat, Row, RowInput, SampleSpec, SlotId, StepBatch,
};
use criterion::{Criterion, Throughput};
use kernels::cpu::{Arithmetic, Format, Matrix, Processor, Product, SharedBytes};
use tokio::time::Instant;
use types::{BlockIdx, Sampling, StopRules, TokenId};

const N_PROMPT: usize = 512;
const KV_BYTES: usize = 256 << 20;
/// The numbers of outputs and inputs of the products in a Qwen3-0.6B layer.
const SHAPES: [(usize, usize); 3] = [(3072, 1024), (1024, 3072), (2048, 1024)];

fn main() {
    let mut criterion = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_secs(1))
        .measurement_time(Duration::from_secs(4))
        .configure_from_args();
    products(&mut criterion);
    for (name, arithmetic, quantize) in [
        ("bf16 weights, f32", Arithmetic::F32, Quantize::No),
        ("bf16 weights, bf16", Arithmetic::Bf16, Quantize::No),
        ("q8 weights, bf16", Arithmetic::Bf16, Quantize::Q8),
    ] {
        steps(&mut criterion, name, arithmetic, quantize);
    }
    criterion.final_summary();
}

fn threads() -> NonZero<usize> {
    let named = std::env::var("THREADS").ok().and_then(|threads| threads.parse().ok());
    named.unwrap_or(NonZero::new(2).expect("two"))
}

// === single products ===

fn products(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("products of 512 rows");
    for arithmetic in [Arithmetic::F32, Arithmetic::Bf16] {
        let processor = Processor::new(arithmetic, threads()).expect("threads");
        for (rows, cols) in SHAPES {
            let (matrix, x) = (matrix(rows, cols), vec![0.5; N_PROMPT * cols]);
            let mut out = vec![0.0; N_PROMPT * rows];
            group.throughput(Throughput::Elements((2 * N_PROMPT * rows * cols) as u64));
            group.bench_function(format!("{cols} x {rows}, {:?}", processor.arithmetic()), |bencher| {
                bencher.iter(|| {
                    let product = Product::whole(&matrix, None, &mut out);
                    processor.multiply(&x, N_PROMPT, &mut [product]);
                });
            });
        }
    }
    group.finish();
}

fn matrix(rows: usize, cols: usize) -> Matrix {
    // The weights start eight bytes after a cache line, because they do so in most files.
    let bytes = SharedBytes::filled(rows * cols * 2 + 8, |bytes| bytes.fill(0x3C)).expect("memory");
    Matrix::new(bytes.slice(8..rows * cols * 2 + 8), rows, cols, Format::Bf16).expect("the right size")
}

// === whole steps ===

fn steps(criterion: &mut Criterion, name: &str, arithmetic: Arithmetic, quantize: Quantize) {
    let shape = std::env::var("SHAPE").unwrap_or_else(|_| "qwen3-0.6b".to_owned());
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../bench/shapes").join(shape);
    let settings = CpuSettings {
        threads: Some(threads()),
        arithmetic,
        quantize,
        load_format: LoadFormat::Dummy { seed: 1 },
        ..CpuSettings::default()
    };
    let mut backend = CpuBackend::open(&folder, KV_BYTES, &settings).expect("the shape opens");
    let weight_bytes = backend.weight_bytes();
    let prompt: Vec<TokenId> = (0..N_PROMPT as u32).map(|nth| TokenId(5 + nth * 37 % 1000)).collect();

    let mut group = criterion.benchmark_group(name);
    group.throughput(Throughput::Elements(prompt_operations(weight_bytes, quantize)));
    group.bench_function("prefill 512", |bencher| bencher.iter(|| step(&mut backend, &prompt, 0)));
    group.throughput(Throughput::Bytes(weight_bytes as u64));
    group.bench_function("decode 1", |bencher| bencher.iter(|| step(&mut backend, &prompt[..1], N_PROMPT)));
    let memory = PlainMemory::new(weight_bytes);
    group.bench_function("plain read", |bencher| bencher.iter(|| memory.read()));
    group.finish();
    share(name, &memory, || step(&mut backend, &prompt[..1], 0));
}

/// The maximum memory rate: reads as many bytes as the weights have, with the same number of threads.
struct PlainMemory {
    processor: Processor,
    bytes: SharedBytes,
}

impl PlainMemory {
    const PART: usize = 1 << 20;

    fn new(bytes: usize) -> Self {
        let processor = Processor::new(Arithmetic::F32, threads()).expect("threads");
        Self { processor, bytes: SharedBytes::filled(bytes, |bytes| bytes.fill(1)).expect("memory") }
    }

    fn read(&self) {
        self.processor.pool().run(self.bytes.len().div_ceil(Self::PART), &|nth| {
            let end = ((nth + 1) * Self::PART).min(self.bytes.len());
            let lines = self.bytes[nth * Self::PART..end].as_chunks::<64>().0;
            black_box(lines.iter().fold([0u8; 64], |mut sum, line| {
                sum.iter_mut().zip(line).for_each(|(sum, byte)| *sum ^= byte);
                sum
            }));
        });
    }
}

/// Alternates reads and decode steps, so that other load affects both equally, and prints the ratio of their
/// rates.
fn share(name: &str, memory: &PlainMemory, mut decode: impl FnMut()) {
    const ROUNDS: usize = 30;
    let seconds = |work: &mut dyn FnMut()| {
        let started = Instant::now();
        work();
        started.elapsed().as_secs_f64()
    };
    let mut shares: Vec<f64> =
        (0..ROUNDS).map(|_| seconds(&mut || memory.read()) / seconds(&mut decode)).collect();
    shares.sort_by(f64::total_cmp);
    let [low, median, high] = [ROUNDS / 10, ROUNDS / 2, ROUNDS * 9 / 10].map(|nth| 100.0 * shares[nth]);
    eprintln!("{name}: decode reads at {median:.0} % of a plain read's rate ({low:.0} % to {high:.0} %)");
}

/// Returns the number of operations per token of a prompt: a multiply and an add for each weight. The output
/// layer is left out, because only the last token passes it. Attention, about 7 %, is left out too.
fn prompt_operations(weight_bytes: usize, quantize: Quantize) -> u64 {
    let vocabulary = if std::env::var("SHAPE").is_ok() { 0 } else { 151_936 * 1024 };
    let weights = match quantize {
        Quantize::No => weight_bytes / 2,
        Quantize::Fp8 => weight_bytes,
        Quantize::Q8 => weight_bytes * 32 / 36,
    };
    (2 * N_PROMPT * (weights - vocabulary)) as u64
}

fn step(backend: &mut CpuBackend, tokens: &[TokenId], start: usize) {
    let table: Vec<BlockIdx> = (0..64).map(BlockIdx).collect();
    let (sampling, stop) = (Sampling::default(), StopRules::default());
    let sample = SampleSpec {
        sampling: &sampling,
        stop: &stop,
        history: &[],
        n_prompt: 0,
        index: 0,
        constraint: None,
    };
    let tables = [table.as_slice()];
    let row = Row {
        slot: SlotId(1),
        input: RowInput::Tokens(tokens),
        start,
        tables: &tables,
        prompt_logprobs: None,
        sample: Some(sample),
    };
    let launched = backend.launch(StepBatch { rows: &[row] }).expect("launched");
    let output = backend.collect(launched).expect("collected");
    assert!(output.rows[0].is_ok());
}
