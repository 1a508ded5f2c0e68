//! Checks attention with keys and values that are made of latents against sums in f64, and measures it beside attention
//! over latents.

use baton_kernels::cuda::ops::{
    BLOCK_TOKENS, LATENT_Q_HEAD, LATENT_RANK, LATENT_ROTATED, LATENT_UNROTATED, LATENT_VALUE, LATENT_WIDTH,
};
use baton_kernels::cuda::{
    ComputeCard, ExpandedAttention, KvNumber, LatentAttention, PrefillSequence, WidenedPages, WidenedSize,
};
use device::cuda::{Bf16, CudaError};
use serde_json::{Value, json};

use super::draw::{Draw, wide};
use super::extent::Extent;
use super::measure::seconds;
use super::pages::{ScatteredPages, halves};
use super::verdict::Verdicts;

const NAN: Bf16 = Bf16(0x7fc0);
/// Keys and values are rounded to bf16, and the output once more.
const ERROR: f64 = 9e-3;
const LENGTHS: &[usize] = &[16, 200, 33, 1, 129, 417, 65];
/// Rows of the output that belong to no sequence. They come first.
const OTHER_ROWS: usize = 3;

/// Sequences of latents in scattered pages, and the matrices of the heads.
struct Scene {
    number: KvNumber,
    n_heads: usize,
    pages: ScatteredPages,
    q: Vec<Bf16>,
    keys: Vec<Bf16>,
    values: Vec<Bf16>,
    sequences: Vec<PrefillSequence>,
    scale: f32,
}

impl Scene {
    /// Draws sequences whose last tokens are new.
    fn new(number: KvNumber, n_heads: usize, sequences: &[(usize, usize)]) -> Self {
        let mut draw = Draw::new(n_heads as u64);
        let lengths: Vec<usize> = sequences.iter().map(|(length, _)| *length).collect();
        let mut first_row = OTHER_ROWS;
        let sequences: Vec<PrefillSequence> = sequences
            .iter()
            .map(|(length, n_queries)| {
                let sequence = PrefillSequence { first_row, n_queries: *n_queries, length: *length };
                first_row += n_queries;
                sequence
            })
            .collect();
        Self {
            number,
            n_heads,
            pages: ScatteredPages::draw(&mut draw, &lengths, 1, LATENT_WIDTH).rounded_to(number),
            q: draw.many(first_row * stride(n_heads), 1.0),
            keys: draw.many(n_heads * LATENT_RANK * LATENT_UNROTATED, 0.1),
            values: draw.many(n_heads * LATENT_RANK * LATENT_VALUE, 0.1),
            sequences,
            scale: 0.1,
        }
    }

    fn n_rows(&self) -> usize {
        self.q.len() / stride(self.n_heads)
    }

    /// Computes the attention on the GPU, with room for this number of heads.
    fn computed(&self, card: &ComputeCard, heads_of_room: usize) -> Result<Vec<Bf16>, CudaError> {
        let room: usize =
            self.sequences.iter().map(|sequence| ExpandedAttention::numbers_of_head(sequence.length)).sum();
        let mut room = card.upload(&vec![NAN; room * heads_of_room])?;
        let mut out = card.upload(&vec![NAN; self.n_rows() * self.n_heads * LATENT_VALUE])?;
        let on_card = card.prefill_sequences(&self.sequences)?;
        let pages = halves(&self.pages.pages, self.number);
        let numbers = [&self.q, &pages, &self.keys, &self.values].map(|numbers| card.upload(numbers));
        let [q, pages, keys, values] = numbers;
        let (q, pages, keys, values) = (q?, pages?, keys?, values?);
        let tables = card.upload(&self.pages.tables)?;
        let mut widened = match self.number {
            KvNumber::Bf16 => None,
            KvNumber::Fp8 => {
                let n_tokens = self.pages.tables.len() * BLOCK_TOKENS;
                Some(WidenedPages::new(card, WidenedSize::of_latents(n_tokens))?)
            }
        };
        card.attend_expanded(ExpandedAttention {
            out: out.view_mut(),
            q: q.view(),
            q_stride: stride(self.n_heads),
            n_heads: self.n_heads,
            pages: pages.view(),
            number: self.number,
            widened: widened.as_mut(),
            n_blocks: self.pages.n_blocks,
            tables: tables.view(),
            sequences: &self.sequences,
            on_card: on_card.view(),
            keys: keys.view(),
            values: values.view(),
            room: room.view_mut(),
            scale: self.scale,
        })?;
        card.download(out.view())
    }

    /// Computes the output of one head for all new tokens of a sequence.
    fn reference(&self, nth: usize, head: usize) -> Vec<Vec<f64>> {
        let PrefillSequence { first_row, n_queries, length } = self.sequences[nth];
        let of_head = |matrix: &[Bf16]| {
            wide(&matrix[head * LATENT_RANK * LATENT_VALUE..(head + 1) * LATENT_RANK * LATENT_VALUE])
        };
        let (keys, values) = (of_head(&self.keys), of_head(&self.values));
        let (mut of_keys, mut of_values) = (vec![], vec![]);
        for token in 0..length {
            let block = self.pages.tables[nth * self.pages.table_stride + token / BLOCK_TOKENS] as usize;
            let at = (block * BLOCK_TOKENS + token % BLOCK_TOKENS) * LATENT_WIDTH;
            let latent = wide(&self.pages.pages[at..at + LATENT_WIDTH]);
            let mut key = vec![0.0; LATENT_UNROTATED];
            for (row, number) in keys.chunks(LATENT_UNROTATED).zip(&latent) {
                key.iter_mut().zip(row).for_each(|(key, weight)| *key += number * weight);
            }
            key.extend_from_slice(&latent[LATENT_RANK..]);
            of_keys.push(key);
            of_values.push(values.chunks(LATENT_RANK).map(|row| dot(row, &latent)).collect::<Vec<f64>>());
        }
        let attend = |query: usize| {
            let at = (first_row + query) * stride(self.n_heads) + head * LATENT_Q_HEAD;
            let q = wide(&self.q[at..at + LATENT_Q_HEAD]);
            let seen = length - n_queries + query + 1;
            let scores: Vec<f64> =
                of_keys[..seen].iter().map(|key| dot(key, &q) * f64::from(self.scale)).collect();
            let greatest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let shares: Vec<f64> = scores.iter().map(|score| (score - greatest).exp()).collect();
            let total: f64 = shares.iter().sum();
            let mut out = vec![0.0; LATENT_VALUE];
            for (share, value) in shares.iter().zip(&of_values) {
                out.iter_mut().zip(value).for_each(|(out, number)| *out += share / total * number);
            }
            out
        };
        (0..n_queries).map(attend).collect()
    }
}

/// The numbers between two rows of q. Others follow the heads, as in a model.
fn stride(n_heads: usize) -> usize {
    n_heads * LATENT_Q_HEAD + LATENT_WIDTH
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

pub(crate) fn all(card: &ComputeCard, verdicts: &mut Verdicts, extent: Extent) -> Result<(), CudaError> {
    if !card.expands_latents() {
        return Ok(());
    }
    let whole: Vec<(usize, usize)> = LENGTHS.iter().map(|length| (*length, *length)).collect();
    let last: Vec<(usize, usize)> =
        LENGTHS.iter().enumerate().map(|(nth, length)| (*length, (*length).min(1 + 67 * nth))).collect();
    let [bf16, fp8] = [KvNumber::Bf16, KvNumber::Fp8];
    let heads: &[_] =
        &[(bf16, 3, 3), (fp8, 3, 2), (bf16, 3, 2), (bf16, 16, 16), (fp8, 16, 16), (bf16, 20, 7)];
    for (number, n_heads, heads_of_room) in extent.of(heads, 2).iter().copied() {
        for (which, sequences) in [("all", &whole), ("the last", &last)] {
            let scene = Scene::new(number, n_heads, sequences);
            let found = scene.computed(card, heads_of_room)?;
            let name =
                format!("keys of latents in {number:?}, {heads_of_room} of {n_heads} heads, {which} tokens");
            let others = OTHER_ROWS * n_heads * LATENT_VALUE;
            let are_left = found[..others].iter().all(|number| number.0 == NAN.0);
            let are_whole = found[others..].iter().all(|number| !f32::from(*number).is_nan());
            verdicts.holds(format!("{name}, the rows of sequences are written"), are_left && are_whole);
            // The reference is slow: the first and the last head are checked.
            let (mut of_found, mut reference) = (vec![], vec![]);
            for (nth, sequence) in scene.sequences.iter().enumerate() {
                for head in [0, n_heads - 1] {
                    for (query, out) in scene.reference(nth, head).into_iter().enumerate() {
                        let at = ((sequence.first_row + query) * n_heads + head) * LATENT_VALUE;
                        of_found.extend(wide(&found[at..at + LATENT_VALUE]));
                        reference.extend(out);
                    }
                }
            }
            verdicts.compare(name, &of_found, &reference, ERROR);
        }
    }
    spoilt(card, verdicts, bf16)?;
    spoilt(card, verdicts, fp8)
}

/// A block that does not exist makes the rows that see it NaN, and those of no other sequence.
fn spoilt(card: &ComputeCard, verdicts: &mut Verdicts, number: KvNumber) -> Result<(), CudaError> {
    let mut scene = Scene::new(number, 4, &[(40, 40), (100, 100), (50, 50)]);
    let sound = scene.computed(card, 4)?;
    scene.pages.tables[scene.pages.table_stride + 1] = scene.pages.n_blocks as u32;
    let found = scene.computed(card, 4)?;
    let at = |row: usize| (OTHER_ROWS + row) * 4 * LATENT_VALUE;
    let alike = |of: std::ops::Range<usize>| {
        found[of.clone()].iter().zip(&sound[of]).all(|(one, other)| one.0 == other.0)
    };
    let is_nan = found[at(40)..at(140)].iter().all(|number| f32::from(*number).is_nan());
    let others_are_alike = alike(at(0)..at(40)) && alike(at(140)..at(190));
    verdicts.holds(
        format!("keys of latents in {number:?}, a block that does not exist"),
        is_nan && others_are_alike,
    );
    Ok(())
}

/// Measures the attention of a prompt's last tokens, with the 16 heads of DeepSeek-V2-Lite.
pub(crate) fn measure(card: &ComputeCard) -> Result<Vec<Value>, CudaError> {
    const HEADS: usize = 16;
    let mut lines = vec![];
    for (n_queries, length) in
        [(8192, 8192), (2048, 8192), (256, 8192), (128, 8192), (512, 512), (2048, 32_768)]
    {
        let mut draw = Draw::new(38);
        let n_blocks = length / BLOCK_TOKENS;
        let q = card.upload(&draw.many(n_queries * HEADS * LATENT_WIDTH, 1.0))?;
        let pages = card.upload(&draw.many(n_blocks * BLOCK_TOKENS * LATENT_WIDTH, 1.0))?;
        let matrix = card.upload(&draw.many(HEADS * LATENT_RANK * LATENT_VALUE, 0.1))?;
        let tables = card.upload(&draw.order(n_blocks))?;
        let mut out = card.buffer::<Bf16>(n_queries * HEADS * LATENT_RANK)?;
        let mut room = card.buffer::<Bf16>(HEADS * ExpandedAttention::numbers_of_head(length))?;
        let sequences = [PrefillSequence { first_row: 0, n_queries, length }];
        let on_card = card.prefill_sequences(&sequences)?;
        let over_latents = seconds(card, 4, |_| {
            let attention = LatentAttention {
                out: out.view_mut(),
                q: q.view(),
                n_heads: HEADS,
                pages: pages.view(),
                number: KvNumber::Bf16,
                n_blocks,
                tables: tables.view(),
                scale: 0.1,
            };
            card.attend_latents_of_chunks(attention, &sequences, on_card.view())
        })?;
        let mut line = |what: &str, width: usize, time: f64| {
            // Each query sees the tokens before the first query, and on average half of the queries' own tokens.
            let seen = n_queries * (length - n_queries) + n_queries * (n_queries + 1) / 2;
            let flop = (2 * seen * HEADS * width) as f64;
            let what = format!("{what}, {n_queries} queries of {length} tokens");
            eprintln!("{what}: {:.1} us, {:.1} TFLOP/s", time * 1e6, flop / time / 1e12);
            lines.push(json!({"what": what, "us": time * 1e6, "flop_per_s": flop / time}));
        };
        line("attention over latents", 2 * LATENT_RANK + LATENT_ROTATED, over_latents);
        if card.expands_latents() {
            let expanded = seconds(card, 4, |_| {
                card.attend_expanded(ExpandedAttention {
                    out: out.view_mut().slice(0..n_queries * HEADS * LATENT_VALUE),
                    q: q.view(),
                    q_stride: HEADS * LATENT_Q_HEAD,
                    n_heads: HEADS,
                    pages: pages.view(),
                    number: KvNumber::Bf16,
                    widened: None,
                    n_blocks,
                    tables: tables.view(),
                    sequences: &sequences,
                    on_card: on_card.view(),
                    keys: matrix.view(),
                    values: matrix.view(),
                    room: room.view_mut(),
                    scale: 0.1,
                })
            })?;
            line("keys and values made of latents, and attention", LATENT_Q_HEAD + LATENT_VALUE, expanded);
        }
    }
    Ok(lines)
}
