//! Checks attention over pages against a plain softmax in f64.

use baton_kernels::cuda::ops::BLOCK_TOKENS;
use baton_kernels::cuda::{
    ComputeCard, DecodeAttention, KvNumber, KvPages, PrefillAttention, PrefillSequence, WidenedPages,
    WidenedSize,
};
use device::cuda::{Bf16, CudaError};

use super::check_rows::POISON;
use super::draw::{Draw, wide};
use super::extent::Extent;
use super::pages::{ScatteredPages, halves};
use super::verdict::{BF16_ERROR, Verdicts};

/// Sequences in scattered pages. Positions without a token are NaN.
struct Scene {
    kv: KvPages,
    n_q_heads: usize,
    lengths: Vec<usize>,
    table_stride: usize,
    tables: Vec<u32>,
    /// The pages' numbers, as the kernels read them. With 8-bit KV, these are numbers that 8 bits can
    /// represent.
    pages: Vec<Bf16>,
    scale: f32,
}

impl Scene {
    fn new(seed: u64, heads: (usize, usize, usize), lengths: &[usize]) -> Self {
        Self::of(KvNumber::Bf16, seed, heads, lengths)
    }

    fn of(
        number: KvNumber,
        seed: u64,
        (head_dim, n_q_heads, n_kv_heads): (usize, usize, usize),
        lengths: &[usize],
    ) -> Self {
        let scattered = ScatteredPages::draw(&mut Draw::new(seed), lengths, 2 * n_kv_heads, head_dim);
        let ScatteredPages { n_blocks, table_stride, tables, pages } = scattered.rounded_to(number);
        let kv = KvPages { n_kv_heads, head_dim, n_blocks, number };
        let scale = 1.0 / (head_dim as f32).sqrt() * 3.0;
        Self { kv, n_q_heads, lengths: lengths.to_vec(), table_stride, tables, pages, scale }
    }

    /// Returns one head's K (part 0) or V (part 1) of a token.
    fn numbers<'a>(&self, pages: &'a [f64], row: usize, part: usize, head: usize, token: usize) -> &'a [f64] {
        let block = self.tables[row * self.table_stride + token / BLOCK_TOKENS] as usize;
        let page = (block * 2 + part) * self.kv.n_kv_heads + head;
        &pages[(page * BLOCK_TOKENS + token % BLOCK_TOKENS) * self.kv.head_dim..][..self.kv.head_dim]
    }

    /// Computes the reference output of one head's query at `position`, over the last `window` tokens.
    fn attend(
        &self,
        pages: &[f64],
        row: usize,
        head: usize,
        q: &[f64],
        position: usize,
        window: usize,
    ) -> Vec<f64> {
        let kv_head = head / (self.n_q_heads / self.kv.n_kv_heads);
        let seen = (position + 1).saturating_sub(window)..position + 1;
        let score = |token| -> f64 {
            let k = self.numbers(pages, row, 0, kv_head, token);
            k.iter().zip(q).map(|(k, q)| k * q).sum::<f64>() * f64::from(self.scale)
        };
        let scores: Vec<f64> = seen.clone().map(score).collect();
        let greatest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = scores.iter().map(|score| (score - greatest).exp()).sum();
        let mut out = vec![0.0; self.kv.head_dim];
        for (token, score) in seen.zip(scores) {
            let share = (score - greatest).exp() / total;
            let v = self.numbers(pages, row, 1, kv_head, token);
            out.iter_mut().zip(v).for_each(|(out, v)| *out += share * v);
        }
        out
    }
}

pub(crate) fn all(card: &ComputeCard, verdicts: &mut Verdicts, extent: Extent) -> Result<(), CudaError> {
    let lengths = extent.of(&[1, 16, 17, 63, 64, 65, 200, 777, 1, 1024], 7);
    let all_heads = [(64, 3, 1), (128, 8, 2), (128, 7, 1), (128, 32, 8), (64, 16, 1), (128, 4, 4)];
    for heads in extent.of(&all_heads, 3) {
        let scene = Scene::new(6, *heads, lengths);
        for (chunk_tokens, window) in
            [(2048, usize::MAX), (64, usize::MAX), (256, usize::MAX), (64, 100), (1024, 33)]
        {
            decode(card, verdicts, &scene, chunk_tokens, window)?;
        }
    }
    for heads in extent.of(&[(64, 3, 1), (128, 8, 2), (128, 32, 8)], 2) {
        let scene = Scene::of(KvNumber::Fp8, 14, *heads, lengths);
        for (chunk_tokens, window) in [(2048, usize::MAX), (64, usize::MAX), (64, 100)] {
            decode(card, verdicts, &scene, chunk_tokens, window)?;
        }
        let scene = Scene::of(KvNumber::Fp8, 15, *heads, &[1, 5, 64, 130, 300, 257]);
        for queries in [[1, 5, 64, 130, 300, 257], [1, 2, 33, 129, 70, 1]] {
            prefill(card, verdicts, &scene, &queries, usize::MAX)?;
            prefill(card, verdicts, &scene, &queries, 70)?;
        }
    }
    for number in [KvNumber::Bf16, KvNumber::Fp8] {
        spoilt(card, verdicts, number)?;
        let alike_in = [((128, 4, 1), 300), ((128, 8, 2), usize::MAX), ((64, 7, 1), usize::MAX)];
        for (heads, window) in extent.of(&alike_in, 0) {
            rows_do_not_depend_on_others(card, verdicts, number, *heads, *window)?;
        }
    }
    for heads in extent.of(&[(64, 2, 1), (128, 4, 1), (128, 3, 3)], 2) {
        let scene = Scene::new(7, *heads, &[1, 5, 64, 130, 300, 257]);
        // The queries are whole prompts, tails after a cached prefix, one token each, and none for some
        // sequences.
        for queries in [[1, 5, 64, 130, 300, 257], [1, 2, 33, 129, 70, 1], [1; 6], [0, 0, 1, 0, 299, 256]] {
            prefill(card, verdicts, &scene, &queries, usize::MAX)?;
        }
        prefill(card, verdicts, &scene, &[1, 5, 64, 130, 300, 257], 70)?;
        prefill(card, verdicts, &scene, &[1, 5, 64, 130, 300, 100], 1)?;
    }
    // Checks many tiles of tokens, and windows that end within a tile.
    for number in [KvNumber::Bf16, KvNumber::Fp8] {
        let scene = Scene::of(number, 12, (128, 4, 2), &[1300, 640, 769, 1151, 128, 1024]);
        for window in extent.of(&[usize::MAX, 500, 128], 0) {
            prefill(card, verdicts, &scene, &[200, 640, 129, 30, 128, 1], *window)?;
        }
    }
    Ok(())
}

fn decode(
    card: &ComputeCard,
    verdicts: &mut Verdicts,
    scene: &Scene,
    chunk_tokens: usize,
    window: usize,
) -> Result<(), CudaError> {
    let (head_dim, n_q_heads, n_rows) = (scene.kv.head_dim, scene.n_q_heads, scene.lengths.len());
    let width = n_q_heads * head_dim;
    let q_stride = width + 64;
    let q = Draw::new(8).narrow(n_rows * q_stride, 1.0);
    let length_max = scene.lengths.iter().copied().max().unwrap_or(0);
    let n_parts = DecodeAttention::n_parts(n_rows, n_q_heads, length_max, chunk_tokens);
    let mut out = card.buffer::<Bf16>(n_rows * width)?;
    let mut parts = card.buffer::<f32>(DecodeAttention::parts_numbers(n_parts, head_dim))?;
    let mut part_sums = card.buffer::<[f32; 2]>(n_parts)?;
    let lengths: Vec<u32> = scene.lengths.iter().map(|length| *length as u32).collect();
    let (wide_q, pages) = (wide(&q), wide(&scene.pages));
    let mut reference = Vec::with_capacity(n_rows * width);
    for (row, length) in scene.lengths.iter().enumerate() {
        for head in 0..n_q_heads {
            let query = &wide_q[row * q_stride + head * head_dim..][..head_dim];
            reference.extend(scene.attend(&pages, row, head, query, length - 1, window));
        }
    }
    for leaves_cache in [false, true] {
        card.fill(out.view_mut(), POISON)?;
        card.fill(parts.view_mut(), POISON)?;
        card.fill(part_sums.view_mut(), POISON)?;
        card.decode_attention(DecodeAttention {
            out: out.view_mut(),
            parts: parts.view_mut(),
            part_sums: part_sums.view_mut(),
            q: card.upload(&q)?.view(),
            q_stride,
            n_q_heads,
            pages: card.upload(&halves(&scene.pages, scene.kv.number))?.view(),
            kv: scene.kv,
            tables: card.upload(&scene.tables)?.view(),
            rows_of_table: 1,
            last_is_new: true,
            lengths: card.upload(&lengths)?.view(),
            length_max,
            chunk_tokens,
            window,
            scale: scene.scale,
            leaves_cache,
        })?;
        let name = format!(
            "decode_attention {head_dim} {n_q_heads}/{} chunks of {chunk_tokens}, window {}, leaves cache {leaves_cache}",
            scene.kv.n_kv_heads,
            window.min(length_max)
        );
        verdicts.compare(name, &wide(&card.download(out.view())?), &reference, BF16_ERROR);
    }
    Ok(())
}

/// Checks tokens of one sequence with a common table. Each token must give the same bits as in a step of one
/// row that ends with it.
fn rows_do_not_depend_on_others(
    card: &ComputeCard,
    verdicts: &mut Verdicts,
    kv_number: KvNumber,
    heads: (usize, usize, usize),
    window: usize,
) -> Result<(), CudaError> {
    let (head_dim, n_q_heads, n_kv_heads) = heads;
    let (width, length, chunk_tokens) = (n_q_heads * head_dim, 1100, 256);
    let scene = Scene::of(kv_number, 13, heads, &[length]);
    let q = card.upload(&Draw::new(14).narrow(length * width, 1.0))?;
    let (pages, tables) = (card.upload(&halves(&scene.pages, scene.kv.number))?, card.upload(&scene.tables)?);
    let lengths = card.upload(&(1..=length as u32).collect::<Vec<_>>())?;
    let n_parts = DecodeAttention::n_parts(length, n_q_heads, length, chunk_tokens);
    let mut parts = card.buffer::<f32>(DecodeAttention::parts_numbers(n_parts, head_dim))?;
    let mut part_sums = card.buffer::<[f32; 2]>(n_parts)?;
    let mut attended = |rows: std::ops::Range<usize>| -> Result<Vec<Bf16>, CudaError> {
        let mut out = card.buffer::<Bf16>(rows.len() * width)?;
        card.decode_attention(DecodeAttention {
            out: out.view_mut(),
            parts: parts.view_mut(),
            part_sums: part_sums.view_mut(),
            q: q.slice(rows.start * width..rows.end * width),
            q_stride: width,
            n_q_heads,
            pages: pages.view(),
            kv: scene.kv,
            tables: tables.view(),
            rows_of_table: rows.len(),
            last_is_new: false,
            lengths: lengths.slice(rows.clone()),
            length_max: rows.end,
            chunk_tokens,
            window,
            scale: scene.scale,
            leaves_cache: false,
        })?;
        card.download(out.view())
    };
    let together = attended(0..length)?;
    let mut is_same = true;
    for row in [0, 1, 15, 16, 255, 256, 257, 299, 300, 511, 512, 700, 1023, 1024, 1099] {
        is_same &= attended(row..row + 1)? == together[row * width..(row + 1) * width];
    }
    is_same &= attended(500..900)? == together[500 * width..900 * width];
    let name =
        format!("decode_attention {head_dim} {n_q_heads}/{n_kv_heads} {kv_number:?}, alone and in company");
    verdicts.holds(name, is_same);
    Ok(())
}

/// Checks that a table with an invalid block gives NaN.
fn spoilt(card: &ComputeCard, verdicts: &mut Verdicts, kv_number: KvNumber) -> Result<(), CudaError> {
    let mut scene = Scene::of(kv_number, 9, (128, 4, 2), &[40, 40]);
    scene.tables[1] = 1_000_000;
    let n_parts = DecodeAttention::n_parts(2, 4, 40, 32);
    let (mut parts, mut part_sums) = (card.buffer::<f32>(n_parts * 128)?, card.buffer::<[f32; 2]>(n_parts)?);
    let q = card.upload(&Draw::new(10).narrow(80 * 4 * 128, 1.0))?;
    let (pages, tables) = (card.upload(&halves(&scene.pages, scene.kv.number))?, card.upload(&scene.tables)?);
    for chunk_tokens in [32, 64] {
        let mut out = card.buffer::<Bf16>(2 * 4 * 128)?;
        card.decode_attention(DecodeAttention {
            out: out.view_mut(),
            parts: parts.view_mut(),
            part_sums: part_sums.view_mut(),
            q: q.view(),
            q_stride: 512,
            n_q_heads: 4,
            pages: pages.view(),
            kv: scene.kv,
            tables: tables.view(),
            rows_of_table: 1,
            last_is_new: true,
            lengths: card.upload(&[40, 40])?.view(),
            length_max: 40,
            chunk_tokens,
            window: usize::MAX,
            scale: 0.1,
            leaves_cache: false,
        })?;
        let out = wide(&card.download(out.view())?);
        let is_shown = out[..512].iter().all(|x| x.is_nan()) && out[512..].iter().all(|x| x.is_finite());
        verdicts.holds(
            format!("decode_attention {kv_number:?}, a block that is not there, chunks of {chunk_tokens}"),
            is_shown,
        );
    }
    let sequences =
        [40, 40].map(|length| PrefillSequence { first_row: 40 - length, n_queries: length, length });
    let sequences = [sequences[0], PrefillSequence { first_row: 40, ..sequences[1] }];
    let mut out = card.buffer::<Bf16>(80 * 4 * 128)?;
    let mut widened = WidenedPages::new(card, WidenedSize { n_tokens: 96, n_kv_heads: 2, head_dim: 128 })?;
    card.prefill_attention(PrefillAttention {
        out: out.view_mut(),
        q: q.view(),
        q_stride: 512,
        n_q_heads: 4,
        pages: pages.view(),
        kv: scene.kv,
        tables: tables.view(),
        sequences: &sequences,
        on_card: card.prefill_sequences(&sequences)?.view(),
        window: usize::MAX,
        scale: 0.1,
        widened: Some(&mut widened),
    })?;
    let out = wide(&card.download(out.view())?);
    let is_shown =
        out[..40 * 512].iter().all(|x| x.is_nan()) && out[40 * 512..].iter().all(|x| x.is_finite());
    verdicts.holds(format!("prefill_attention {kv_number:?}, a block that is not there"), is_shown);
    Ok(())
}

fn prefill(
    card: &ComputeCard,
    verdicts: &mut Verdicts,
    scene: &Scene,
    queries: &[usize; 6],
    window: usize,
) -> Result<(), CudaError> {
    let (head_dim, n_q_heads) = (scene.kv.head_dim, scene.n_q_heads);
    let width = n_q_heads * head_dim;
    let q_stride = width + 128;
    let mut n_rows = 0;
    let mut sequences = vec![];
    for (n_queries, length) in queries.iter().zip(&scene.lengths) {
        sequences.push(PrefillSequence { first_row: n_rows, n_queries: *n_queries, length: *length });
        n_rows += n_queries;
    }
    let narrow_q = Draw::new(11).narrow(n_rows * q_stride, 1.0);
    let (q, pages) = (wide(&narrow_q), wide(&scene.pages));
    let mut reference = Vec::with_capacity(n_rows * width);
    for (nth, sequence) in sequences.iter().enumerate() {
        for query in 0..sequence.n_queries {
            let position = sequence.length - sequence.n_queries + query;
            for head in 0..n_q_heads {
                let q = &q[(sequence.first_row + query) * q_stride + head * head_dim..][..head_dim];
                reference.extend(scene.attend(&pages, nth, head, q, position, window));
            }
        }
    }
    // Pages in FP8 are read as they are, or widened for one sequence, or for four, at a time.
    let n_wide = if scene.kv.number == KvNumber::Fp8 { &[0, 1, 4][..] } else { &[0] };
    for n_wide in n_wide {
        let size = WidenedSize {
            n_tokens: n_wide * scene.table_stride * BLOCK_TOKENS,
            n_kv_heads: scene.kv.n_kv_heads,
            head_dim,
        };
        let mut widened = (*n_wide > 0).then(|| WidenedPages::new(card, size)).transpose()?;
        let mut out = card.buffer::<Bf16>(n_rows * width)?;
        card.fill(out.view_mut(), POISON)?;
        card.prefill_attention(PrefillAttention {
            out: out.view_mut(),
            q: card.upload(&narrow_q)?.view(),
            q_stride,
            n_q_heads,
            pages: card.upload(&halves(&scene.pages, scene.kv.number))?.view(),
            kv: scene.kv,
            tables: card.upload(&scene.tables)?.view(),
            sequences: &sequences,
            on_card: card.prefill_sequences(&sequences)?.view(),
            window,
            scale: scene.scale,
            widened: widened.as_mut(),
        })?;
        let name = format!(
            "prefill_attention {head_dim} {n_q_heads}/{} {:?}, {n_wide} widened, queries {queries:?}, window {}",
            scene.kv.n_kv_heads,
            scene.kv.number,
            window.min(1024)
        );
        verdicts.compare(name, &wide(&card.download(out.view())?), &reference, BF16_ERROR);
    }
    Ok(())
}
