//! Hot path.
//! Attention over paged KV. A page has a block of tokens and can be anywhere in memory.
//!
//! A query handles its keys sixteen at a time, in order of position, with a running maximum and a running sum
//! (online softmax). Its result does not depend on the other queries in the batch, nor on how a prompt was
//! cut into chunks. Queries of one sequence that share a KV head share the work of widening its keys and
//! values.

use std::ops::Range;

use super::columns::Columns;
use super::exp::exp;
use super::matrix::Format;
use super::number;
use super::processor::Processor;
use super::scratch;
use super::simd::{Kernel, LANES, Simd, Tiles};
use super::tile::{self, F32Row, Start, Sums};

/// Limit of queries in one part of the work, all with the same KV head.
const QUERIES: usize = 32;

/// The layout of one layer's KV in a page: `[K|V][kv_head][token][dim]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KvShape {
    /// 2 for K and V; 1 for latent vectors, which are keys and values.
    pub n_parts: usize,
    pub block_tokens: usize,
    pub n_kv_heads: usize,
    pub head_dim: usize,
    /// The number format of K and V: `F32`, `Bf16` or `Fp8`.
    pub format: Format,
}

/// The parameters of one layer's attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    pub kv: KvShape,
    /// The number of query heads, a multiple of the number of KV heads.
    pub n_heads: usize,
    /// The factor for scores.
    pub scale: f32,
    /// The number of tokens that a query sees, with itself. `None` means all earlier tokens.
    pub window: Option<usize>,
}

/// Neighbouring tokens of one sequence, and the pages of all tokens that they see.
#[derive(Clone, Debug)]
pub struct Stretch<'a> {
    /// The tokens' rows in the activations.
    pub rows: Range<usize>,
    /// The position of the first token.
    pub start: usize,
    /// The index of the sequence's block in the first page.
    pub first_block: usize,
    pub pages: Vec<&'a [u8]>,
}

impl KvShape {
    /// Returns the bytes of a page.
    ///
    /// # Panics
    /// If KV cannot have this format.
    pub fn page_bytes(&self) -> usize {
        let number_bytes = match self.format {
            Format::F32 => 4,
            Format::Bf16 => 2,
            Format::Fp8 => 1,
            Format::F16 | Format::Q8 | Format::Fp8Blocks => {
                panic!("KV in {} is not implemented", self.format.as_str())
            }
        };
        self.n_parts * self.n_kv_heads * self.head_numbers() * number_bytes
    }

    /// Returns the numbers of one head's K or V in a page.
    fn head_numbers(&self) -> usize {
        self.block_tokens * self.head_dim
    }

    /// Returns the index in a page of one head's keys (part 0) or values (part 1), from `token` on.
    fn numbers(&self, part: usize, head: usize, token: usize) -> usize {
        (part * self.n_kv_heads + head) * self.head_numbers() + token * self.head_dim
    }
}

impl Attention {
    /// Returns the first position that a query at `position` sees.
    pub fn first_seen(&self, position: usize) -> usize {
        self.window.map_or(0, |window| (position + 1).saturating_sub(window))
    }
}

impl Processor {
    /// Writes keys and values of neighbouring tokens into a page, from `slot` on. Both are rows of
    /// `n_kv_heads * head_dim`; `values` are none if the page has latent vectors.
    ///
    /// # Panics
    /// If the page does not have this shape, or the tokens do not fit into it.
    pub fn write_kv(&self, shape: &KvShape, page: &mut [u8], slot: usize, keys: &[f32], values: &[f32]) {
        assert_eq!(page.len(), shape.page_bytes(), "page");
        assert_eq!(values.len(), (shape.n_parts - 1) * keys.len(), "values");
        let width = shape.n_kv_heads * shape.head_dim;
        assert!(slot + keys.len() / width <= shape.block_tokens, "tokens beyond the page");
        for (part, rows) in [keys, values].into_iter().enumerate() {
            for (token, row) in rows.chunks_exact(width).enumerate() {
                for (head, numbers) in row.chunks_exact(shape.head_dim).enumerate() {
                    self.write_head(shape.format, page, shape.numbers(part, head, slot + token), numbers);
                }
            }
        }
    }

    fn write_head(&self, format: Format, page: &mut [u8], at: usize, numbers: &[f32]) {
        if format == Format::F32 {
            let page = number::f32s_mut(page).expect("pages are aligned");
            page[at..at + numbers.len()].copy_from_slice(numbers);
        } else if format == Format::Fp8 {
            for (narrow, wide) in page[at..].iter_mut().zip(numbers) {
                *narrow = number::f32_to_f8(*wide);
            }
        } else {
            let page = number::u16s_mut(page).expect("pages are aligned");
            self.narrow(numbers, &mut page[at..at + numbers.len()]);
        }
    }

    /// Computes attention for every query of the stretches. `q` and `out` are rows of `n_heads * head_dim`.
    ///
    /// # Panics
    /// If the pages of a stretch do not have the shape, or are too few.
    pub fn attend(&self, attention: &Attention, q: &[f32], stretches: &[Stretch<'_>], out: &mut [f32]) {
        let width = attention.n_heads * attention.kv.head_dim;
        assert_eq!(q.len(), out.len());
        let parts: Vec<Part<'_>> = stretches.iter().flat_map(|stretch| parts(attention, stretch)).collect();
        let out = Columns::new(out, 0..width);
        self.pool().run(parts.len(), &|nth| {
            let work = Work::new(attention, &parts[nth]);
            scratch::with_wide(work.scratch_numbers(), |numbers| {
                scratch::with_sums(2 * LANES, |sums| {
                    self.isa().run(AttentionKernel {
                        work,
                        q,
                        out: &out,
                        scratch: Scratch::new(work, numbers, sums),
                    });
                });
            });
        });
    }
}

/// Some rows of one stretch, for one KV head.
#[derive(Clone, Debug)]
struct Part<'a> {
    stretch: &'a Stretch<'a>,
    /// The part's rows, counted from the start of the stretch.
    rows: Range<usize>,
    kv_head: usize,
}

fn parts<'a>(attention: &Attention, stretch: &'a Stretch<'a>) -> impl Iterator<Item = Part<'a>> + use<'a> {
    let rows_at_once = (QUERIES * attention.kv.n_kv_heads / attention.n_heads).max(1);
    let n_rows = stretch.rows.len();
    (0..attention.kv.n_kv_heads).flat_map(move |kv_head| {
        (0..n_rows).step_by(rows_at_once).map(move |first| {
            let rows = first..(first + rows_at_once).min(n_rows);
            Part { stretch, rows, kv_head }
        })
    })
}

/// A part, and values derived from the shape.
#[derive(Clone, Copy)]
struct Work<'a> {
    attention: &'a Attention,
    part: &'a Part<'a>,
    /// The number of query heads per KV head.
    group: usize,
    /// The size of a head, padded to whole vectors.
    padded: usize,
}

impl<'a> Work<'a> {
    fn new(attention: &'a Attention, part: &'a Part<'a>) -> Self {
        let group = attention.n_heads / attention.kv.n_kv_heads;
        Self { attention, part, group, padded: attention.kv.head_dim.next_multiple_of(LANES) }
    }

    fn n_queries(&self) -> usize {
        self.part.rows.len() * self.group
    }

    fn scratch_numbers(&self) -> usize {
        (2 * self.n_queries() + 2 * LANES) * self.padded + (LANES + 3) * self.n_queries()
    }

    /// Returns the query's row in the activations, and the first column of its head.
    fn place(&self, query: usize) -> (usize, usize) {
        let row = self.part.stretch.rows.start + self.part.rows.start + query / self.group;
        let head = self.part.kv_head * self.group + query % self.group;
        (row, head * self.attention.kv.head_dim)
    }

    fn position(&self, query: usize) -> usize {
        self.part.stretch.start + self.part.rows.start + query / self.group
    }

    /// Returns the range of positions that at least one query sees.
    fn seen(&self) -> Range<usize> {
        let last = self.position(self.n_queries() - 1);
        self.attention.first_seen(self.position(0))..last + 1
    }
}

/// The buffers of a part. Each row has `padded` numbers; the padding is zero.
struct Scratch<'a> {
    queries: &'a mut [f32],
    /// The weighted sum of values for each query.
    outputs: &'a mut [f32],
    /// The current sixteen keys, widened.
    keys: &'a mut [f32],
    values: &'a mut [f32],
    /// The greatest score so far for each query.
    greatest: &'a mut [f32],
    /// The sum of all weights so far for each query, relative to the greatest score.
    total: &'a mut [f32],
    /// The factors that scale the earlier sums to the greatest score of the current sixteen keys.
    shrink: &'a mut [f32],
    /// The scores of the current sixteen keys, and then their weights.
    weights: &'a mut [[f32; LANES]],
    sums: &'a mut [Sums],
}

impl<'a> Scratch<'a> {
    fn new(work: Work<'_>, numbers: &'a mut [f32], sums: &'a mut [Sums]) -> Self {
        numbers.fill(0.0);
        let n_queries = work.n_queries();
        let (queries, rest) = numbers.split_at_mut(n_queries * work.padded);
        let (outputs, rest) = rest.split_at_mut(n_queries * work.padded);
        let (keys, rest) = rest.split_at_mut(LANES * work.padded);
        let (values, rest) = rest.split_at_mut(LANES * work.padded);
        let (weights, rest) = rest.split_at_mut(n_queries * LANES);
        let (greatest, rest) = rest.split_at_mut(n_queries);
        let (total, shrink) = rest.split_at_mut(n_queries);
        greatest.fill(f32::NEG_INFINITY);
        let weights = weights.as_chunks_mut().0;
        Self { queries, outputs, keys, values, greatest, total, shrink, weights, sums }
    }
}

/// Up to sixteen neighbouring tokens in one page.
#[derive(Clone, Copy)]
struct Keys<'a> {
    page: &'a [u8],
    /// The index of the first token in the page.
    token: usize,
    /// The position of the first token in the sequence.
    position: usize,
    n: usize,
}

struct AttentionKernel<'a> {
    work: Work<'a>,
    q: &'a [f32],
    out: &'a Columns<'a>,
    scratch: Scratch<'a>,
}

impl Kernel for AttentionKernel<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let block_tokens = self.work.attention.kv.block_tokens;
        let (seen, first_block) = (self.work.seen(), self.work.part.stretch.first_block);
        self.take_queries();
        for block in seen.start / block_tokens..seen.end.div_ceil(block_tokens) {
            let page = self.work.part.stretch.pages[block - first_block];
            let mut token = 0;
            while token < block_tokens {
                let n = LANES.min(block_tokens - token);
                self.look_at(simd, Keys { page, token, position: block * block_tokens + token, n });
                token += n;
            }
        }
        self.give_outputs();
    }
}

impl AttentionKernel<'_> {
    #[inline(always)]
    fn take_queries(&mut self) {
        let (head_dim, width) = (self.work.attention.kv.head_dim, self.width());
        for (nth, query) in self.scratch.queries.chunks_exact_mut(self.work.padded).enumerate() {
            let (row, column) = self.work.place(nth);
            query[..head_dim].copy_from_slice(&self.q[row * width + column..][..head_dim]);
        }
    }

    #[inline(always)]
    fn give_outputs(&mut self) {
        let head_dim = self.work.attention.kv.head_dim;
        for (nth, output) in self.scratch.outputs.chunks_exact_mut(self.work.padded).enumerate() {
            let total = self.scratch.total[nth];
            for number in output.iter_mut() {
                *number /= total;
            }
            let (row, column) = self.work.place(nth);
            self.out.set(row, column, &output[..head_dim]);
        }
    }

    fn width(&self) -> usize {
        self.work.attention.n_heads * self.work.attention.kv.head_dim
    }

    /// Updates all queries with up to sixteen keys and their values.
    #[inline(always)]
    fn look_at<S: Simd>(&mut self, simd: S, keys: Keys<'_>) {
        if keys.position >= self.work.seen().end {
            return;
        }
        self.widen(simd, keys);
        self.score(simd);
        for nth in 0..self.work.n_queries() {
            self.weigh(simd, nth, self.seen(nth, keys));
        }
        self.add_values(simd, keys);
    }

    /// Returns the range of the sixteen keys that a query sees.
    #[inline(always)]
    fn seen(&self, query: usize, keys: Keys<'_>) -> Range<usize> {
        let position = self.work.position(query);
        let first = self.work.attention.first_seen(position).saturating_sub(keys.position);
        let end = (position + 1).saturating_sub(keys.position).min(keys.n);
        first.min(end)..end
    }

    /// Widens keys and values of this part's KV head to f32.
    #[inline(always)]
    fn widen<S: Simd>(&mut self, simd: S, keys: Keys<'_>) {
        let (kv, head, padded) = (self.work.attention.kv, self.work.part.kv_head, self.work.padded);
        for token in 0..keys.n {
            let range = token * padded..token * padded + kv.head_dim;
            let at = kv.numbers(0, head, keys.token + token);
            widen(simd, kv.format, keys.page, at, &mut self.scratch.keys[range.clone()]);
            let at = kv.numbers(kv.n_parts - 1, head, keys.token + token);
            widen(simd, kv.format, keys.page, at, &mut self.scratch.values[range]);
        }
    }

    /// Computes the dot products of all queries with sixteen keys.
    #[inline(always)]
    fn score<S: Simd>(&mut self, simd: S) {
        let (mut nth, n) = (0, self.work.n_queries());
        while nth < n {
            match S::TILES {
                Tiles::Small => self.score_some::<S, 1, 4>(simd, nth),
                Tiles::Large if nth + 2 <= n => {
                    self.score_some::<S, 2, 8>(simd, nth);
                    nth += 1;
                }
                Tiles::Large => self.score_some::<S, 1, 8>(simd, nth),
            }
            nth += 1;
        }
    }

    /// Computes the scores of `Q` queries, with `K` keys at a time.
    #[inline(always)]
    fn score_some<S: Simd, const Q: usize, const K: usize>(&mut self, simd: S, nth: usize) {
        let Scratch { queries, keys, sums, weights, .. } = &mut self.scratch;
        let padded = self.work.padded;
        let mut x = [F32Row::new(&queries[nth * padded..][..padded]); Q];
        for q in 1..Q {
            x[q] = F32Row::new(&queries[(nth + q) * padded..][..padded]);
        }
        for first in (0..LANES).step_by(K) {
            let mut w = [F32Row::new(&keys[first * padded..][..padded]); K];
            for k in 1..K {
                w[k] = F32Row::new(&keys[(first + k) * padded..][..padded]);
            }
            tile::tile::<S, _, _, Q, K, LANES>(simd, x, w, Start::Fresh, 0, &mut sums[first..]);
        }
        for (sums, scores) in sums.as_chunks::<LANES>().0[..Q].iter().zip(&mut weights[nth..nth + Q]) {
            simd.store(simd.sums(sums), scores);
        }
    }

    /// Turns one query's scores into weights, relative to the greatest score so far.
    #[inline(always)]
    fn weigh<S: Simd>(&mut self, simd: S, nth: usize, seen: Range<usize>) {
        self.scratch.shrink[nth] = 1.0;
        if seen.is_empty() {
            return;
        }
        let weights = &mut self.scratch.weights[nth];
        simd.store(simd.mul(simd.load(weights), simd.splat(self.work.attention.scale)), weights);
        hide(weights, &seen, f32::NEG_INFINITY);
        let before = self.scratch.greatest[nth];
        let greatest = before.max(simd.greatest(simd.load(weights)));
        simd.store(exp(simd, simd.sub(simd.load(weights), simd.splat(greatest))), weights);
        hide(weights, &seen, 0.0);
        // Earlier sums are relative to a smaller maximum, so they are scaled. If the maximum did not change,
        // they need no factor.
        let shrink =
            if greatest > before { first_lane(simd, exp(simd, simd.splat(before - greatest))) } else { 1.0 };
        self.scratch.shrink[nth] = shrink;
        self.scratch.greatest[nth] = greatest;
        self.scratch.total[nth] = self.scratch.total[nth] * shrink + simd.sum(simd.load(weights));
    }

    /// Adds sixteen values to every query's output. Queries that see the same values share the loads.
    #[inline(always)]
    fn add_values<S: Simd>(&mut self, simd: S, keys: Keys<'_>) {
        let (mut nth, n) = (0, self.work.n_queries());
        while nth < n {
            let seen = self.seen(nth, keys);
            let pair = S::TILES != Tiles::Small && nth + 1 < n && self.seen(nth + 1, keys) == seen;
            if !seen.is_empty() {
                if pair {
                    self.weighted(nth, seen).add_all::<S, 2>(simd);
                } else {
                    self.weighted(nth, seen).add_all::<S, 1>(simd);
                }
            }
            nth += if pair { 2 } else { 1 };
        }
    }

    #[inline(always)]
    fn weighted(&mut self, nth: usize, seen: Range<usize>) -> WeightedValues<'_> {
        let Scratch { outputs, values, weights, shrink, .. } = &mut self.scratch;
        WeightedValues {
            outputs: &mut outputs[nth * self.work.padded..],
            values,
            weights: &weights[nth..],
            shrink: &shrink[nth..],
            padded: self.work.padded,
            seen,
        }
    }
}

/// The values to add to the outputs of some neighbouring queries.
struct WeightedValues<'a> {
    outputs: &'a mut [f32],
    values: &'a [f32],
    weights: &'a [[f32; LANES]],
    shrink: &'a [f32],
    padded: usize,
    seen: Range<usize>,
}

impl WeightedValues<'_> {
    /// Adds values to `Q` outputs, with the number of vectors at a time that the registers allow.
    #[inline(always)]
    fn add_all<S: Simd, const Q: usize>(mut self, simd: S) {
        let mut at = 0;
        if S::TILES != Tiles::Small {
            while at + 8 * LANES <= self.padded {
                self.add::<S, Q, 8>(simd, at);
                at += 8 * LANES;
            }
        }
        while at + 2 * LANES <= self.padded {
            self.add::<S, Q, 2>(simd, at);
            at += 2 * LANES;
        }
        if at < self.padded {
            self.add::<S, Q, 1>(simd, at);
        }
    }

    /// Adds to `N` vectors of `Q` outputs, from `at` on. Tokens are added in order, each by one fused
    /// multiply-add.
    #[inline(always)]
    fn add<S: Simd, const Q: usize, const N: usize>(&mut self, simd: S, at: usize) {
        let mut sums = [[simd.zero(); N]; Q];
        for q in 0..Q {
            let output = vectors::<N>(&self.outputs[q * self.padded + at..]);
            for i in 0..N {
                sums[q][i] = simd.mul(simd.load(&output[i]), simd.splat(self.shrink[q]));
            }
        }
        for token in self.seen.clone() {
            let values = vectors::<N>(&self.values[token * self.padded + at..]);
            for q in 0..Q {
                let weight = simd.splat(self.weights[q][token]);
                for i in 0..N {
                    sums[q][i] = simd.mul_add(weight, simd.load(&values[i]), sums[q][i]);
                }
            }
        }
        for q in 0..Q {
            let output = &mut self.outputs[q * self.padded + at..][..N * LANES].as_chunks_mut().0;
            for i in 0..N {
                simd.store(sums[q][i], &mut output[i]);
            }
        }
    }
}

#[inline(always)]
fn vectors<const N: usize>(numbers: &[f32]) -> &[[f32; LANES]] {
    numbers[..N * LANES].as_chunks().0
}

/// Overwrites the lanes that the query does not see.
#[inline(always)]
fn hide(lanes: &mut [f32; LANES], seen: &Range<usize>, with: f32) {
    if seen.len() < LANES {
        lanes[..seen.start].fill(with);
        lanes[seen.end..].fill(with);
    }
}

#[inline(always)]
fn first_lane<S: Simd>(simd: S, a: S::Floats) -> f32 {
    let mut lanes = [0.0; LANES];
    simd.store(a, &mut lanes);
    lanes[0]
}

#[inline(always)]
fn widen<S: Simd>(simd: S, format: Format, page: &[u8], at: usize, wide: &mut [f32]) {
    if format == Format::F32 {
        let page = number::f32s(page).expect("pages are aligned");
        wide.copy_from_slice(&page[at..at + wide.len()]);
        return;
    }
    let place = at..at + wide.len();
    let (wide, wide_tail) = wide.as_chunks_mut::<LANES>();
    if format == Format::Fp8 {
        let (narrow, narrow_tail) = page[place].as_chunks::<LANES>();
        for (wide, narrow) in wide.iter_mut().zip(narrow) {
            simd.store(simd.load_f8(narrow), wide);
        }
        for (wide, narrow) in wide_tail.iter_mut().zip(narrow_tail) {
            *wide = number::f8_to_f32(*narrow);
        }
        return;
    }
    let page = number::u16s(page).expect("pages are aligned");
    let (narrow, narrow_tail) = page[place].as_chunks::<LANES>();
    for (wide, narrow) in wide.iter_mut().zip(narrow) {
        simd.store(simd.load_bf16(narrow), wide);
    }
    for (wide, narrow) in wide_tail.iter_mut().zip(narrow_tail) {
        *wide = number::bf16_to_f32(*narrow);
    }
}

#[cfg(test)]
mod tests;
