//! Checks latent attention against sums in f64: latents in pages, queries, attention of single tokens and of chunks,
//! and that a row alone has the bits of a row among others.

use baton_kernels::cuda::ops::{
    BLOCK_TOKENS, LATENT_Q_HEAD, LATENT_RANK, LATENT_ROTATED, LATENT_UNROTATED, LATENT_VALUE, LATENT_WIDTH,
};
use baton_kernels::cuda::{
    ComputeCard, KvNumber, LatentAttention, LatentQueries, LatentRows, NormedLatents, PrefillSequence,
    WriteLatents,
};
use device::cuda::{Bf16, CudaError};

use super::draw::{Draw, wide};
use super::extent::Extent;
use super::pages::{ScatteredPages, halves, numbers_of};
use super::verdict::{BF16_ERROR, Verdicts, error_of};

const NAN: Bf16 = Bf16(0x7fc0);
const HEADS: &[usize] = &[3, 16, 64, 20, 128];
const EPSILON: f32 = 1e-6;

pub(crate) fn all(card: &ComputeCard, verdicts: &mut Verdicts, extent: Extent) -> Result<(), CudaError> {
    let lengths = extent.of(&[1, 16, 33, 0, 200, 65, 777, 1024, 1500], 6);
    let numbers = [KvNumber::Bf16, KvNumber::Fp8];
    let cases = extent.of(HEADS, 2).iter().flat_map(|n_heads| numbers.map(|number| (*n_heads, number)));
    for (n_heads, number) in cases {
        let scene = Scene::new(number, n_heads, lengths);
        for chunk_tokens in [4096, 64, 256] {
            decode(card, verdicts, &scene, chunk_tokens)?;
        }
        let n_new: Vec<usize> =
            lengths.iter().enumerate().map(|(nth, length)| (*length).min(1 + 37 * nth)).collect();
        chunks(card, verdicts, &scene, lengths)?;
        chunks(card, verdicts, &scene, &n_new)?;
        rows_do_not_depend_on_others(card, verdicts, &scene)?;
        for n_rows in [1, 16, 70].into_iter().filter(|_| number == KvNumber::Bf16) {
            products(card, verdicts, n_heads, n_rows)?;
        }
    }
    for number in numbers {
        spoilt(card, verdicts, number)?;
        for (q, kv, n_rows) in [(None, 512, 3), (Some((24, 20)), 12, 70), (Some((1536, 1536)), 512, 2)] {
            writes(card, verdicts, number, (q, kv, n_rows))?;
        }
    }
    Ok(())
}

/// Sequences of latents in scattered pages. Positions without a token are NaN.
struct Scene {
    number: KvNumber,
    n_heads: usize,
    n_blocks: usize,
    lengths: Vec<usize>,
    table_stride: usize,
    tables: Vec<u32>,
    pages: Vec<Bf16>,
    scale: f32,
}

impl Scene {
    fn new(number: KvNumber, n_heads: usize, lengths: &[usize]) -> Self {
        let scattered = ScatteredPages::draw(&mut Draw::new(n_heads as u64), lengths, 1, LATENT_WIDTH);
        let ScatteredPages { n_blocks, table_stride, tables, pages } = scattered.rounded_to(number);
        let scale = 2.0 / (LATENT_WIDTH as f32).sqrt();
        Self { number, n_heads, n_blocks, lengths: lengths.to_vec(), table_stride, tables, pages, scale }
    }

    fn name(&self) -> String {
        format!("latents in {:?}, {} heads", self.number, self.n_heads)
    }

    fn queries(&self, n_rows: usize) -> Vec<Bf16> {
        Draw::new(n_rows as u64).narrow(n_rows * self.n_heads * LATENT_WIDTH, 1.0)
    }

    /// Computes the sum of one query over the first `n_tokens` of a sequence.
    fn attend(&self, row: usize, q: &[Bf16], n_tokens: usize) -> Vec<f64> {
        let q = wide(q);
        let latents: Vec<Vec<f64>> = (0..n_tokens)
            .map(|token| {
                let block = self.tables[row * self.table_stride + token / BLOCK_TOKENS] as usize;
                wide(
                    &self.pages[(block * BLOCK_TOKENS + token % BLOCK_TOKENS) * LATENT_WIDTH..]
                        [..LATENT_WIDTH],
                )
            })
            .collect();
        let score = |latent: &Vec<f64>| -> f64 {
            latent.iter().zip(&q).map(|(a, b)| a * b).sum::<f64>() * f64::from(self.scale)
        };
        let scores: Vec<f64> = latents.iter().map(score).collect();
        let greatest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = scores.iter().map(|score| (score - greatest).exp()).sum();
        let mut out = vec![0.0; LATENT_RANK];
        for (latent, score) in latents.iter().zip(scores) {
            let share = (score - greatest).exp() / total;
            out.iter_mut().zip(latent).for_each(|(out, number)| *out += share * number);
        }
        out
    }
}

/// Computes attention of single tokens, whose lengths may be others than those of the sequences.
fn decoded(
    card: &ComputeCard,
    scene: &Scene,
    q: &[Bf16],
    lengths: &[u32],
    table: (&[u32], usize),
    chunk_tokens: usize,
) -> Result<Vec<Bf16>, CudaError> {
    let (tables, rows_of_table) = table;
    let length_max = lengths.iter().copied().max().unwrap_or(0) as usize;
    let n_parts = lengths.len() * scene.n_heads * length_max.div_ceil(chunk_tokens).max(1);
    let mut out = card.upload(&vec![NAN; lengths.len() * scene.n_heads * LATENT_RANK])?;
    let (mut parts, mut part_sums) = (card.buffer::<f32>(n_parts * LATENT_RANK)?, card.buffer(n_parts)?);
    let (q, pages) = (card.upload(q)?, card.upload(&halves(&scene.pages, scene.number))?);
    let (tables, lengths) = (card.upload(tables)?, card.upload(lengths)?);
    let attention = LatentAttention {
        out: out.view_mut(),
        q: q.view(),
        n_heads: scene.n_heads,
        pages: pages.view(),
        number: scene.number,
        n_blocks: scene.n_blocks,
        tables: tables.view(),
        scale: scene.scale,
    };
    let rows = LatentRows {
        parts: parts.view_mut(),
        part_sums: part_sums.view_mut(),
        lengths: lengths.view(),
        length_max,
        rows_of_table,
        last_is_new: rows_of_table == 1,
        chunk_tokens,
    };
    card.attend_latents(attention, rows)?;
    card.download(out.view())
}

fn decode(
    card: &ComputeCard,
    verdicts: &mut Verdicts,
    scene: &Scene,
    chunk_tokens: usize,
) -> Result<(), CudaError> {
    let q = scene.queries(scene.lengths.len());
    let lengths: Vec<u32> = scene.lengths.iter().map(|length| *length as u32).collect();
    let found = decoded(card, scene, &q, &lengths, (&scene.tables, 1), chunk_tokens)?;
    let reference: Vec<f64> = q
        .chunks(LATENT_WIDTH)
        .enumerate()
        .flat_map(|(nth, q)| {
            let row = nth / scene.n_heads;
            scene.attend(row, q, scene.lengths[row])
        })
        .collect();
    let name = format!("{}, single tokens, chunks of {chunk_tokens}", scene.name());
    verdicts.compare(name, &wide(&found), &reference, BF16_ERROR);
    Ok(())
}

/// Computes attention of the last `n_new` tokens of each sequence.
fn chunks(
    card: &ComputeCard,
    verdicts: &mut Verdicts,
    scene: &Scene,
    n_new: &[usize],
) -> Result<(), CudaError> {
    let (mut sequences, mut tables, mut first_row) = (Vec::new(), Vec::new(), 0);
    let mut of_rows = Vec::new();
    for (row, (n_queries, length)) in n_new.iter().zip(&scene.lengths).enumerate() {
        if *n_queries == 0 {
            continue;
        }
        sequences.push(PrefillSequence { first_row, n_queries: *n_queries, length: *length });
        tables.extend_from_slice(&scene.tables[row * scene.table_stride..(row + 1) * scene.table_stride]);
        first_row += n_queries;
        of_rows.extend((length - n_queries..*length).map(|position| (row, position + 1)));
    }
    let q = scene.queries(first_row);
    let on_card: Vec<[u32; 3]> = sequences
        .iter()
        .map(|sequence| [sequence.first_row, sequence.n_queries, sequence.length].map(|number| number as u32))
        .collect();
    let mut out = card.upload(&vec![NAN; first_row * scene.n_heads * LATENT_RANK])?;
    let (q_on_card, pages) = (card.upload(&q)?, card.upload(&halves(&scene.pages, scene.number))?);
    let (tables, on_card) = (card.upload(&tables)?, card.upload(&on_card)?);
    let attention = LatentAttention {
        out: out.view_mut(),
        q: q_on_card.view(),
        n_heads: scene.n_heads,
        pages: pages.view(),
        number: scene.number,
        n_blocks: scene.n_blocks,
        tables: tables.view(),
        scale: scene.scale,
    };
    card.attend_latents_of_chunks(attention, &sequences, on_card.view())?;
    let found = card.download(out.view())?;
    // The reference is slow: each row has one of its heads checked.
    let (mut of_found, mut reference) = (Vec::new(), Vec::new());
    for (nth, (row, n_tokens)) in of_rows.iter().enumerate() {
        let at = nth * scene.n_heads + nth * 7 % scene.n_heads;
        of_found.extend(wide(&found[at * LATENT_RANK..(at + 1) * LATENT_RANK]));
        reference.extend(scene.attend(*row, &q[at * LATENT_WIDTH..(at + 1) * LATENT_WIDTH], *n_tokens));
    }
    let name = format!("{}, {first_row} tokens of chunks", scene.name());
    verdicts.compare(name, &of_found, &reference, BF16_ERROR);
    verdicts.holds(
        format!("{}, all rows of chunks are written", scene.name()),
        found.iter().all(|number| !f32::from(*number).is_nan()),
    );
    Ok(())
}

/// Tokens of one sequence that share its table have the bits of each alone.
fn rows_do_not_depend_on_others(
    card: &ComputeCard,
    verdicts: &mut Verdicts,
    scene: &Scene,
) -> Result<(), CudaError> {
    let row = scene.lengths.iter().position(|length| *length == 200).expect("a sequence of 200 tokens");
    let table = &scene.tables[row * scene.table_stride..(row + 1) * scene.table_stride];
    let lengths: Vec<u32> = (100..200).collect();
    let q = scene.queries(lengths.len());
    let together = decoded(card, scene, &q, &lengths, (table, lengths.len()), 64)?;
    let width = scene.n_heads * LATENT_WIDTH;
    let alone = decoded(card, scene, &q[99 * width..], &lengths[99..], (table, 1), 64)?;
    let is_alike =
        alone.iter().zip(&together[99 * scene.n_heads * LATENT_RANK..]).all(|(one, other)| one.0 == other.0);
    verdicts.holds(format!("{}, the last row alone", scene.name()), is_alike);
    Ok(())
}

/// A block that does not exist makes its own sequence NaN, and no other.
fn spoilt(card: &ComputeCard, verdicts: &mut Verdicts, number: KvNumber) -> Result<(), CudaError> {
    let mut scene = Scene::new(number, 16, &[40, 100]);
    let q = scene.queries(2);
    let sound = decoded(card, &scene, &q, &[40, 100], (&scene.tables, 1), 64)?;
    scene.tables[scene.table_stride + 1] = scene.n_blocks as u32;
    let found = decoded(card, &scene, &q, &[40, 100], (&scene.tables, 1), 64)?;
    let (first, second) = found.split_at(16 * LATENT_RANK);
    let is_alike = first.iter().zip(&sound).all(|(one, other)| one.0 == other.0);
    let is_nan = second.iter().all(|number| f32::from(*number).is_nan());
    verdicts.holds(format!("{}, a block that does not exist", scene.name()), is_alike && is_nan);
    Ok(())
}

/// Returns cosines and sines of 50 positions.
fn turns(draw: &mut Draw) -> Vec<[f32; 2]> {
    (0..50 * LATENT_ROTATED / 2)
        .map(|_| draw.number() * 3.0)
        .map(|angle| [angle.cos(), angle.sin()])
        .collect()
}

fn turned(numbers: &[f64], turns: &[[f32; 2]]) -> Vec<f64> {
    let (first, second) = numbers.split_at(LATENT_ROTATED / 2);
    let pairs = || {
        first
            .iter()
            .zip(second)
            .zip(turns)
            .map(|((a, b), [cos, sin])| (*a, *b, f64::from(*cos), f64::from(*sin)))
    };
    let firsts = pairs().map(|(a, b, cos, sin)| a * cos - b * sin);
    firsts.chain(pairs().map(|(a, b, cos, sin)| b * cos + a * sin)).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Checks queries, and values of sums.
fn products(
    card: &ComputeCard,
    verdicts: &mut Verdicts,
    n_heads: usize,
    n_rows: usize,
) -> Result<(), CudaError> {
    let mut draw = Draw::new((n_heads + n_rows) as u64);
    let stride = n_heads * LATENT_Q_HEAD + LATENT_WIDTH;
    let (q, turns) = (draw.narrow(n_rows * stride, 1.0), turns(&mut draw));
    let keys = draw.narrow(n_heads * LATENT_RANK * LATENT_UNROTATED, 0.1);
    let positions: Vec<u32> = (0..n_rows).map(|_| draw.below(50) as u32).collect();
    let mut out = card.upload(&vec![NAN; n_rows * n_heads * LATENT_WIDTH])?;
    let on_card = [card.upload(&q)?, card.upload(&keys)?];
    let (positions_on_card, turns_on_card) = (card.upload(&positions)?, card.upload(&turns)?);
    card.make_queries(LatentQueries {
        out: out.view_mut(),
        q: on_card[0].view(),
        stride,
        n_heads,
        positions: positions_on_card.view(),
        turns: turns_on_card.view(),
        keys: on_card[1].view(),
    })?;
    let keys = wide(&keys);
    let mut reference = Vec::new();
    for (row, position) in q.chunks(stride).zip(&positions) {
        for (head, keys) in keys.chunks(LATENT_RANK * LATENT_UNROTATED).enumerate() {
            let q = wide(&row[head * LATENT_Q_HEAD..(head + 1) * LATENT_Q_HEAD]);
            let (unrotated, rotated) = q.split_at(LATENT_UNROTATED);
            reference.extend(keys.chunks(LATENT_UNROTATED).map(|key| dot(key, unrotated)));
            reference.extend(turned(rotated, &turns[*position as usize * LATENT_ROTATED / 2..]));
        }
    }
    let name = format!("latents, {n_heads} heads, {n_rows} rows");
    verdicts.compare(format!("{name}, queries"), &wide(&card.download(out.view())?), &reference, BF16_ERROR);

    let sums = draw.narrow(n_rows * n_heads * LATENT_RANK, 1.0);
    let values = draw.narrow(n_heads * LATENT_VALUE * LATENT_RANK, 0.1);
    let mut out = card.upload(&vec![NAN; n_rows * n_heads * LATENT_VALUE])?;
    let on_card = [card.upload(&sums)?, card.upload(&values)?];
    card.multiply_values(out.view_mut(), on_card[0].view(), on_card[1].view())?;
    let (sums, values) = (wide(&sums), wide(&values));
    let of_head = |(nth, sum): (usize, &[f64])| -> Vec<f64> {
        let head = nth % n_heads;
        let values = &values[head * LATENT_VALUE * LATENT_RANK..(head + 1) * LATENT_VALUE * LATENT_RANK];
        values.chunks(LATENT_RANK).map(|value| dot(value, sum)).collect()
    };
    let reference: Vec<f64> = sums.chunks(LATENT_RANK).enumerate().flat_map(of_head).collect();
    verdicts.compare(format!("{name}, values"), &wide(&card.download(out.view())?), &reference, BF16_ERROR);
    Ok(())
}

/// Computes the norm of a row. Only its first `width` numbers count; the others are zeroes.
fn normed(numbers: &[f64], weight: &[f64], width: usize) -> Vec<f64> {
    let by = (dot(numbers, numbers) / width as f64 + f64::from(EPSILON)).sqrt().recip();
    numbers.iter().zip(weight).map(|(number, weight)| number * by * weight).collect()
}

/// Checks latents in pages, and the normed latents of q. `q` is their width with and without padding.
fn writes(
    card: &ComputeCard,
    verdicts: &mut Verdicts,
    number: KvNumber,
    (q, kv_width, n_rows): (Option<(usize, usize)>, usize, usize),
) -> Result<(), CudaError> {
    let mut draw = Draw::new((kv_width + n_rows) as u64);
    let q_rank = q.map_or(40, |(rank, _)| rank);
    let stride = q_rank + LATENT_WIDTH;
    let mut rows = draw.narrow(n_rows * stride, 1.0);
    for row in rows.chunks_mut(stride) {
        row[q_rank + kv_width..q_rank + LATENT_RANK].fill(Bf16::default());
        if let Some((rank, width)) = q {
            row[width..rank].fill(Bf16::default());
        }
    }
    let (weight, q_weight, turns) =
        (draw.narrow(LATENT_RANK, 1.0), draw.narrow(q_rank, 1.0), turns(&mut draw));
    let n_blocks = n_rows.div_ceil(BLOCK_TOKENS) + 1;
    let mut slots: Vec<u32> = draw.order(n_blocks * BLOCK_TOKENS)[..n_rows].to_vec();
    slots[n_rows - 1] = u32::MAX;
    let positions: Vec<u32> = (0..n_rows).map(|_| draw.below(50) as u32).collect();
    let empty = halves(&vec![NAN; n_blocks * BLOCK_TOKENS * LATENT_WIDTH], number);
    let mut pages = card.upload(&empty)?;
    let mut out = card.upload(&vec![NAN; n_rows * q_rank])?;
    let on_card = [card.upload(&rows)?, card.upload(&weight)?, card.upload(&q_weight)?];
    let words = [card.upload(&positions)?, card.upload(&slots)?];
    let turns_on_card = card.upload(&turns)?;
    card.write_latents(WriteLatents {
        rows: on_card[0].view(),
        stride,
        q: q.map(|(_, width)| NormedLatents { out: out.view_mut(), weight: on_card[2].view(), width }),
        pages: pages.view_mut(),
        number,
        n_blocks,
        positions: words[0].view(),
        slots: words[1].view(),
        turns: turns_on_card.view(),
        weight: on_card[1].view(),
        width: kv_width,
        epsilon: EPSILON,
    })?;
    let (weight, q_weight) = (wide(&weight), wide(&q_weight));
    let found = numbers_of(&card.download(pages.view())?, number);
    let (mut written, mut reference, mut of_q) = (Vec::new(), Vec::new(), Vec::new());
    for (nth, row) in rows.chunks(stride).enumerate() {
        let row = wide(row);
        if let Some((_, width)) = q {
            of_q.extend(normed(&row[..q_rank], &q_weight, width));
        }
        if slots[nth] != u32::MAX {
            written.extend_from_slice(&found[slots[nth] as usize * LATENT_WIDTH..][..LATENT_WIDTH]);
            reference.extend(normed(&row[q_rank..q_rank + LATENT_RANK], &weight, kv_width));
            let turns = &turns[positions[nth] as usize * LATENT_ROTATED / 2..];
            reference.extend(turned(&row[q_rank + LATENT_RANK..], turns));
        }
    }
    let name = format!("latents of {kv_width} numbers in {number:?}, {n_rows} rows");
    verdicts.compare(format!("{name}, in pages"), &written, &reference, error_of(number));
    let n_others = found.len() - written.len();
    let n_nan = found.iter().filter(|number| number.is_nan()).count();
    verdicts.holds(format!("{name}, other slots are untouched"), n_nan == n_others);
    if q.is_some() {
        verdicts.compare(format!("{name}, of q"), &wide(&card.download(out.view())?), &of_q, BF16_ERROR);
    }
    Ok(())
}
