use std::num::NonZero;

use proptest::prelude::*;

use super::*;
use crate::cpu::{Arithmetic, Isa};

fn cpu(isa: Isa) -> Processor {
    Processor::with_isa(isa, Arithmetic::F32, NonZero::new(2).unwrap()).unwrap()
}

fn numbers(n: usize, seed: usize) -> Vec<f32> {
    (0..n).map(|i| (((i + seed) * 7919 % 10_007) as f32 / 5003.0 - 1.0) * 2.0).collect()
}

/// One sequence: its queries, keys and values by position.
struct Sequence {
    attention: Attention,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    /// The pages of the sequence, aligned to 4 bytes like KV memory.
    pages: Vec<Vec<u32>>,
}

fn bytes(page: &[u32]) -> &[u8] {
    // SAFETY: the slice covers the bytes of the numbers.
    unsafe { std::slice::from_raw_parts(page.as_ptr().cast(), size_of_val(page)) }
}

fn bytes_mut(page: &mut [u32]) -> &mut [u8] {
    // SAFETY: the slice covers the bytes of the numbers.
    unsafe { std::slice::from_raw_parts_mut(page.as_mut_ptr().cast(), size_of_val(page)) }
}

impl Sequence {
    fn new(attention: Attention, n: usize, seed: usize) -> Self {
        let kv = attention.kv;
        let (q_width, kv_width) = (attention.n_heads * kv.head_dim, kv.n_kv_heads * kv.head_dim);
        let k = numbers(n * kv_width, seed + 1);
        let v = if kv.n_parts == 1 { k.clone() } else { numbers(n * kv_width, seed + 2) };
        // Unwritten memory is NaN, so that a read of it shows in the result.
        let mut pages = vec![vec![u32::MAX; kv.page_bytes() / 4]; n.div_ceil(kv.block_tokens)];
        for position in 0..n {
            let (row, page) = (position * kv_width, bytes_mut(&mut pages[position / kv.block_tokens]));
            let slot = position % kv.block_tokens;
            let values = if kv.n_parts == 1 { &[][..] } else { &v[row..][..kv_width] };
            cpu(Isa::best()).write_kv(&kv, page, slot, &k[row..][..kv_width], values);
        }
        Self { attention, q: numbers(n * q_width, seed), k, v, pages }
    }

    fn width(&self) -> usize {
        self.attention.n_heads * self.attention.kv.head_dim
    }

    /// Computes the outputs of the positions of `range` in one call.
    fn attended(&self, cpu: &Processor, range: Range<usize>) -> Vec<f32> {
        let q = &self.q[range.start * self.width()..range.end * self.width()];
        let mut out = vec![f32::NAN; q.len()];
        cpu.attend(&self.attention, q, &[self.stretch(0..range.len(), range.start)], &mut out);
        out
    }

    fn stretch(&self, rows: Range<usize>, start: usize) -> Stretch<'_> {
        let first_block = self.attention.first_seen(start) / self.attention.kv.block_tokens;
        let pages = self.pages[first_block..].iter().map(|page| bytes(page)).collect();
        Stretch { rows, start, first_block, pages }
    }

    /// Computes the reference output of one position: attention in f64.
    fn truth(&self, position: usize) -> Vec<f64> {
        let Attention { kv, n_heads, scale, .. } = self.attention;
        let kv_width = kv.n_kv_heads * kv.head_dim;
        let mut out = Vec::new();
        for head in 0..n_heads {
            let kv_head = head / (n_heads / kv.n_kv_heads);
            let q = &self.q[position * self.width() + head * kv.head_dim..][..kv.head_dim];
            let at = |numbers: &[f32], token: usize, dim: usize| {
                f64::from(numbers[token * kv_width + kv_head * kv.head_dim + dim])
            };
            let tokens: Vec<usize> = (self.attention.first_seen(position)..=position).collect();
            let scores = tokens.iter().map(|t| {
                (0..kv.head_dim).map(|d| f64::from(q[d]) * at(&self.k, *t, d)).sum::<f64>() * f64::from(scale)
            });
            let scores: Vec<f64> = scores.collect();
            let greatest = scores.iter().copied().fold(f64::MIN, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - greatest).exp()).collect();
            let total: f64 = weights.iter().sum();
            for dim in 0..kv.head_dim {
                out.push(tokens.iter().zip(&weights).map(|(t, w)| w / total * at(&self.v, *t, dim)).sum());
            }
        }
        out
    }
}

fn attention(
    n_kv_heads: usize,
    group: usize,
    head_dim: usize,
    block_tokens: usize,
    format: Format,
) -> Attention {
    let kv = KvShape { n_parts: 2, block_tokens, n_kv_heads, head_dim, format };
    Attention { kv, n_heads: n_kv_heads * group, scale: (head_dim as f32).powf(-0.5), window: None }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn a_query_does_not_depend_on_the_chunk(
        n in 1usize..90, cut in 0usize..90, group in 1usize..5, head_dim in 1usize..80,
        block_tokens in proptest::sample::select(&[4usize, 16, 24, 32]),
        window in proptest::option::of(1usize..60),
        format in proptest::sample::select(&[Format::F32, Format::Bf16, Format::Fp8]),
        n_parts in 1usize..3,
    ) {
        // The width is even, because pages are whole numbers of 32-bit words in this test.
        let head_dim = head_dim + head_dim % 2;
        let mut attention = Attention { window, ..attention(2, group, head_dim, block_tokens, format) };
        attention.kv.n_parts = n_parts;
        let sequence = Sequence::new(attention, n, 3);
        let whole = sequence.attended(&cpu(Isa::best()), 0..n);
        let cut = cut.min(n);
        for isa in Isa::all() {
            let cpu = cpu(isa);
            let parts = [sequence.attended(&cpu, 0..cut), sequence.attended(&cpu, cut..n)].concat();
            prop_assert!(parts == whole, "{isa:?}");
            let last = sequence.attended(&cpu, n - 1..n);
            prop_assert!(whole.ends_with(&last));
        }
    }

    #[test]
    fn it_is_attention(
        n in 1usize..70, group in 1usize..4, window in proptest::option::of(1usize..40), n_parts in 1usize..3,
    ) {
        let mut attention = Attention { window, ..attention(2, group, 24, 16, Format::F32) };
        attention.kv.n_parts = n_parts;
        let sequence = Sequence::new(attention, n, 11);
        let whole = sequence.attended(&cpu(Isa::best()), 0..n);
        for (position, out) in whole.chunks(sequence.width()).enumerate() {
            for (out, truth) in out.iter().zip(sequence.truth(position)) {
                prop_assert!((f64::from(*out) - truth).abs() < 2e-5, "{out} at {position} is not {truth}");
            }
        }
    }
}

#[test]
fn sequences_of_a_batch_do_not_see_each_other() {
    let attention = attention(1, 2, 32, 16, Format::Bf16);
    let (a, b) = (Sequence::new(attention, 40, 1), Sequence::new(attention, 7, 100));
    let width = a.width();
    let q = [&a.q[39 * width..], &b.q[..]].concat();
    let mut out = vec![f32::NAN; q.len()];
    let cpu = cpu(Isa::best());
    cpu.attend(&attention, &q, &[a.stretch(0..1, 39), b.stretch(1..8, 0)], &mut out);
    assert_eq!(out, [a.attended(&cpu, 39..40), b.attended(&cpu, 0..7)].concat());
}
