//! Measures the host's work on weights while a node starts: generating, quantizing and reordering them.
//!
//! ```text
//! cargo bench -p baton-engine --bench weights                    # an expert of Qwen3-30B-A3B, two threads
//! THREADS=16 cargo bench -p baton-engine --bench weights
//! ```
//!
//! Throughput is in numbers ("elements"). Qwen3-30B-A3B has 30e9 of them.

use std::num::NonZero;
use std::time::Duration;

use baton_engine::load::{Dummy, SourceRows, TensorSource};
use criterion::{Criterion, Throughput};
use device::cuda::Bf16;
use kernels::cpu::{Arithmetic, Matrix, Processor};
use kernels::cuda::Fp8Rows;

/// The sizes of an expert's gate and of its down in Qwen3-30B-A3B.
const SHAPES: [(usize, usize); 2] = [(768, 2048), (2048, 768)];
/// The number of rows of a thread's part in the loader of GPUs.
const ROWS_AT_ONCE: usize = 64;

fn main() {
    let mut criterion = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
        .configure_from_args();
    let processor = Processor::new(Arithmetic::F32, threads()).expect("threads");
    for (rows, cols) in SHAPES {
        whole_matrices(&mut criterion, &processor, rows, cols);
        packed_rows(&mut criterion, &processor, rows, cols);
    }
    criterion.final_summary();
}

fn threads() -> NonZero<usize> {
    let named = std::env::var("THREADS").ok().and_then(|threads| threads.parse().ok());
    named.unwrap_or(NonZero::new(2).expect("two"))
}

/// Measures the loading of a matrix by nodes on processors.
fn whole_matrices(criterion: &mut Criterion, processor: &Processor, rows: usize, cols: usize) {
    let dummy = Dummy { seed: 1, processor };
    let matrix = || dummy.matrix("a", rows, cols).expect("memory");
    let made: Matrix = matrix();
    let mut group = criterion.benchmark_group(format!("a matrix of {rows} x {cols}"));
    group.throughput(Throughput::Elements((rows * cols) as u64));
    group.bench_function("generate", |bencher| bencher.iter(matrix));
    group.bench_function("fp8", |bencher| bencher.iter(|| processor.quantize_fp8(&made)));
    group.bench_function("fp8, blocks", |bencher| bencher.iter(|| processor.quantize_fp8_blocks(&made)));
    group.bench_function("q8", |bencher| bencher.iter(|| processor.quantize(&made)));
    group.finish();
}

/// Measures the loading of a matrix by nodes on GPUs: each row is generated or read, quantized, and put into the
/// GPU's order.
fn packed_rows(criterion: &mut Criterion, processor: &Processor, rows: usize, cols: usize) {
    let dummy = Dummy { seed: 1, processor };
    let stored = SourceRows::Stored(dummy.matrix("a", rows, cols).expect("memory"));
    let random = dummy.rows("a", rows, cols).expect("random rows");
    let mut pairs = vec![Bf16::default(); rows * Fp8Rows::width(cols) / 2];
    let mut group = criterion.benchmark_group(format!("rows of {rows} x {cols} for a GPU"));
    group.throughput(Throughput::Elements((rows * cols) as u64));
    for (name, source) in [("random", &random), ("from bf16", &stored)] {
        group.bench_function(name, |bencher| bencher.iter(|| pack(processor, source, &mut pairs)));
    }
    group.finish();
}

fn pack(processor: &Processor, source: &SourceRows, pairs: &mut [Bf16]) {
    let (cols, width) = (source.cols(), Fp8Rows::width(source.cols()) / 2);
    processor.pool().run_on(pairs, ROWS_AT_ONCE * width, |nth, pairs| {
        let (mut wide, mut narrow) = (vec![0.0; cols], vec![0; cols]);
        for (row, pairs) in (nth * ROWS_AT_ONCE..).zip(pairs.chunks_mut(width)) {
            source.read_row(row, &mut wide, processor);
            processor.quantize_row_fp8(&wide, &mut narrow);
            Fp8Rows::pack(&narrow, pairs);
        }
    });
}
