//! Measures the speed of each kernel against the GPU's limits, which are measured in the same minute.

use baton_kernels::cuda::ops::{BLOCK_TOKENS, FEW_ROWS_FORMS, FewRowsForm};
use baton_kernels::cuda::{
    ComputeCard, DecodeAttention, Ending, FusedKernel, FusedProduct, KvNumber, KvPages, PrefillAttention,
    PrefillSequence, RopeWriteKv, SKINNY_FORMS, SkinnyForm, WeightMatrix, WidenedPages, WidenedSize,
};
use device::cuda::{Bf16, Buffer, CudaError, View, ViewMut};
use serde_json::{Value, json};

use super::Part;
use super::draw::Draw;
use super::fp8;
use super::measure_endings;
use super::{check_expanded, check_experts, many_rows, rounding};

/// The number of timed repetitions. The result is their median.
const N_TIMES: usize = 21;
/// The number of launches in one repetition. The gaps between launches count, as in a step.
pub(crate) const N_LAUNCHES: usize = 8;
/// More bytes than any cache holds. Kernels get memory of this size, so that no data is read twice from a
/// cache.
pub(crate) const BEYOND_CACHES: usize = 400 << 20;

/// The matrices of a layer of an 8B model, and its output layer: the numbers of rows, and their widths.
pub(crate) const MATRICES: &[(&str, usize, usize)] = &[
    ("qkv", 6144, 4096),
    ("o", 4096, 4096),
    ("gate_up", 28672, 4096),
    ("down", 4096, 14336),
    ("lm_head", 128_256, 4096),
];

/// The GPU's read and copy rates in bytes per second, without other work.
pub(crate) struct Limits {
    pub(crate) read: f64,
    pub(crate) copy: f64,
}

pub(crate) fn all(card: &ComputeCard, is_wanted: impl Fn(Part) -> bool) -> Result<Value, CudaError> {
    let limits = limits(card)?;
    eprintln!("read {:.3} TB/s, copy {:.3} TB/s (read plus written)", limits.read / 1e12, limits.copy / 1e12);
    let value = json!({
        "read_bytes_per_s": limits.read,
        "copy_bytes_per_s": limits.copy,
        "rows": if is_wanted(Part::Rows) { rows(card, &limits)? } else { vec![] },
        "products": if is_wanted(Part::Products) { products_all(card, &limits)? } else { vec![] },
        "many_rows": if is_wanted(Part::ManyRows) { many_rows::measure(card)? } else { vec![] },
        "experts": if is_wanted(Part::Experts) { check_experts::measure(card)? } else { vec![] },
        "endings": if is_wanted(Part::Endings) { measure_endings::all(card, &limits)? } else { vec![] },
        "fp8": if is_wanted(Part::Fp8) { fp8::measure(card, &limits)? } else { vec![] },
        "many_rows_fp8": if is_wanted(Part::Fp8) { rounding::measure(card)? } else { vec![] },
        "decode_attention": if is_wanted(Part::Attention) { decode_all(card, &limits)? } else { vec![] },
        "prefill_attention": if is_wanted(Part::Attention) { prefill_all(card)? } else { vec![] },
        "latents": if is_wanted(Part::Latent) { check_expanded::measure(card)? } else { vec![] },
    });
    let again = self::limits(card)?;
    eprintln!("read again {:.3} TB/s", again.read / 1e12);
    Ok(value)
}

/// Returns the median time of one call in seconds. Passes the call's number, so that each call can use other
/// memory.
pub(crate) fn seconds(
    card: &ComputeCard,
    n_launches: usize,
    mut call: impl FnMut(usize) -> Result<(), CudaError>,
) -> Result<f64, CudaError> {
    let mut times = Vec::with_capacity(N_TIMES);
    let mut graph = card.record(|| (0..n_launches).try_for_each(&mut call))?;
    for _ in 0..N_TIMES + 3 {
        let start = card.mark()?;
        graph.launch()?;
        let end = card.mark()?;
        times.push(f64::from(start.ms_until(&end)?) / 1e3 / n_launches as f64);
    }
    let mut warm = times.split_off(3);
    warm.sort_by(f64::total_cmp);
    Ok(warm[N_TIMES / 2])
}

fn limits(card: &ComputeCard) -> Result<Limits, CudaError> {
    let n = 1 << 30;
    let from = card.upload(&Draw::new(20).many(n, 1.0))?;
    let mut to = card.buffer::<Bf16>(n)?;
    let mut out = card.buffer::<u32>(1)?;
    let bytes = (n * 2) as f64;
    let read = seconds(card, 1, |_| card.probe_read(out.view_mut(), from.view()))?;
    let copy = seconds(card, 1, |_| card.probe_copy(to.view_mut(), from.view()))?;
    Ok(Limits { read: bytes / read, copy: 2.0 * bytes / copy })
}

pub(crate) fn line(what: &str, seconds: f64, bytes: f64, limit: f64) -> Value {
    let share = bytes / seconds / limit;
    eprintln!(
        "{what}: {:.2} us, {:.3} TB/s, {:.1} % of the limit",
        seconds * 1e6,
        bytes / seconds / 1e12,
        share * 100.0
    );
    json!({"what": what, "us": seconds * 1e6, "bytes_per_s": bytes / seconds, "share_of_limit": share})
}

fn rows(card: &ComputeCard, limits: &Limits) -> Result<Vec<Value>, CudaError> {
    let mut lines = vec![];
    let width = 4096;
    let weight = card.upload(&Draw::new(21).narrow(28672, 1.0))?;
    for n_rows in [1, 64, 8192] {
        let bytes = (n_rows * width * 2) as f64;
        let x = card.upload(&Draw::new(22).many(n_rows * width, 1.0))?;
        let (mut residual, mut out) =
            (card.upload(&Draw::new(23).many(n_rows * width, 1.0))?, card.buffer(n_rows * width)?);
        let by = weight.slice(0..width);
        let time = seconds(card, N_LAUNCHES, |_| {
            card.add_rms_norm(out.view_mut(), residual.view_mut(), x.view(), by, 1e-5)
        })?;
        lines.push(line(&format!("add_rms_norm {n_rows}x{width}"), time, 4.0 * bytes, limits.copy));
        let time = seconds(card, N_LAUNCHES, |_| card.rms_norm(out.view_mut(), x.view(), by, 1e-5))?;
        lines.push(line(&format!("rms_norm {n_rows}x{width}"), time, 2.0 * bytes, limits.copy));

        let gate_up = card.upload(&Draw::new(24).many(n_rows * 28672, 1.0))?;
        let mut out = card.buffer(n_rows * 14336)?;
        let time = seconds(card, N_LAUNCHES, |_| card.silu_mul(out.view_mut(), gate_up.view(), 14336))?;
        lines.push(line(&format!("silu_mul {n_rows}x14336"), time, (n_rows * 14336 * 6) as f64, limits.copy));
        lines.push(rope(card, limits, n_rows)?);
        if n_rows <= 64 {
            lines.push(argmax(card, limits, n_rows)?);
        }
    }
    Ok(lines)
}

fn argmax(card: &ComputeCard, limits: &Limits, n_rows: usize) -> Result<Value, CudaError> {
    let width = 128_256;
    let mut draw = Draw::new(25);
    let logits: Vec<f32> = (0..n_rows * width).map(|_| draw.number()).collect();
    let logits = card.upload(&logits)?;
    let (mut out, mut keys) = (card.buffer(n_rows)?, card.buffer(card.argmax_keys(n_rows, width))?);
    let time = seconds(card, N_LAUNCHES, |_| card.argmax(out.view_mut(), keys.view_mut(), logits.view()))?;
    Ok(line(&format!("argmax {n_rows}x{width}"), time, (n_rows * width * 4) as f64, limits.read))
}

fn rope(card: &ComputeCard, limits: &Limits, n_rows: usize) -> Result<Value, CudaError> {
    let (n_q_heads, kv) = (
        32,
        KvPages {
            n_kv_heads: 8,
            head_dim: 128,
            n_blocks: n_rows.div_ceil(BLOCK_TOKENS),
            number: KvNumber::Bf16,
        },
    );
    let width = (n_q_heads + 2 * kv.n_kv_heads) * kv.head_dim;
    let mut qkv = card.upload(&Draw::new(26).many(n_rows * width, 1.0))?;
    let mut pages = card.buffer::<Bf16>(kv.halves())?;
    let indices = card.upload(&(0..n_rows as u32).collect::<Vec<_>>())?;
    let turns = card.upload(&vec![[0.6_f32, 0.8]; n_rows * kv.head_dim / 2])?;
    let time = seconds(card, N_LAUNCHES, |_| {
        card.rope_write_kv(RopeWriteKv {
            qkv: qkv.view_mut(),
            n_q_heads,
            pages: pages.view_mut(),
            kv,
            positions: indices.view(),
            slots: indices.view(),
            turns: turns.view(),
            norms: None,
            epsilon: 1e-5,
        })
    })?;
    Ok(line(
        &format!("rope_write_kv {n_rows} rows of 32/8 heads"),
        time,
        (n_rows * width * 4) as f64,
        limits.copy,
    ))
}

fn products_all(card: &ComputeCard, limits: &Limits) -> Result<Vec<Value>, CudaError> {
    let mut lines = vec![];
    for (name, n, k) in MATRICES {
        // There are more copies than any cache holds, and they are read in turn.
        let n_copies = (BEYOND_CACHES / (n * k * 2)).max(1) + 1;
        let weights = card.upload(&Draw::new(27).many(n_copies * n * k, 0.02))?;
        for n_rows in [1, 8] {
            for form in SKINNY_FORMS {
                lines.push(skinny(card, limits, (name, *form), &weights, (*n, *k, n_rows))?);
            }
        }
        if card.has_few_rows() {
            for n_rows in [1, 8, 16, 32, 64, 128] {
                for form in FEW_ROWS_FORMS.iter().copied().filter(|form| form.serves(n_rows)) {
                    lines.push(few_rows(card, limits, (name, form), &weights, (*n, *k, n_rows))?);
                }
            }
        }
    }
    Ok(lines)
}

fn skinny(
    card: &ComputeCard,
    limits: &Limits,
    (name, form): (&str, SkinnyForm),
    weights: &Buffer<Bf16>,
    sizes: (usize, usize, usize),
) -> Result<Value, CudaError> {
    let (n, k, n_rows) = sizes;
    let (time, bytes) = product(card, weights, sizes, |y, w, x| {
        let product = FusedProduct::plain(WeightMatrix::Bf16(w), x, k);
        card.multiply_own(FusedKernel::Skinny(form), product, Ending::Sums(y))
    })?;
    Ok(line(&format!("skinny {} {name} {n_rows}x{n}x{k}", form.name), time, bytes, limits.read))
}

fn few_rows(
    card: &ComputeCard,
    limits: &Limits,
    (name, form): (&str, FewRowsForm),
    weights: &Buffer<Bf16>,
    sizes: (usize, usize, usize),
) -> Result<Value, CudaError> {
    let (n, k, n_rows) = sizes;
    let (time, bytes) = product(card, weights, sizes, |y, w, x| {
        card.multiply_own(
            FusedKernel::Few(form),
            FusedProduct::plain(WeightMatrix::Bf16(w), x, k),
            Ending::Sums(y),
        )
    })?;
    let chosen = if form == FewRowsForm::of(n, k) { " (chosen)" } else { "" };
    let what = format!("few_rows {name} {n_rows}x{n}x{k}, {form:?}{chosen}");
    Ok(line(&what, time, bytes, limits.read))
}

/// Returns the time of one product in seconds, and the bytes that it moves. Each call uses other weights, so
/// that none are cached.
fn product(
    card: &ComputeCard,
    weights: &Buffer<Bf16>,
    (n, k, n_rows): (usize, usize, usize),
    multiply: impl Fn(ViewMut<'_, Bf16>, View<'_, Bf16>, View<'_, Bf16>) -> Result<(), CudaError>,
) -> Result<(f64, f64), CudaError> {
    let x = card.upload(&Draw::new(28).narrow(n_rows * k, 1.0))?;
    let mut y = card.buffer::<Bf16>(n_rows * n)?;
    let n_copies = weights.len() / (n * k);
    let time = seconds(card, 4 * N_LAUNCHES, |nth| {
        let from = nth % n_copies * n * k;
        multiply(y.view_mut(), weights.slice(from..from + n * k), x.view())
    })?;
    Ok((time, (2 * (n * k + n_rows * (n + k))) as f64))
}

fn decode_all(card: &ComputeCard, limits: &Limits) -> Result<Vec<Value>, CudaError> {
    let mut lines = vec![];
    for (n_rows, length) in [(1, 1024), (8, 1024), (64, 1024), (256, 1024), (1, 32768), (16, 8192)] {
        let chosen = DecodeAttention::chunk_tokens_for(card, n_rows, 8, length);
        for chunk_tokens in [256, 512, 1024, chosen] {
            lines.push(decode(card, limits, (n_rows, length), chunk_tokens, KvNumber::Bf16)?);
        }
        lines.push(decode(card, limits, (n_rows, length), chosen, KvNumber::Fp8)?);
    }
    Ok(lines)
}

fn decode(
    card: &ComputeCard,
    limits: &Limits,
    (n_rows, length): (usize, usize),
    chunk_tokens: usize,
    number: KvNumber,
) -> Result<Value, CudaError> {
    let n_q_heads = 32;
    let (n_kv_heads, head_dim, of_row) = (8, 128, length / BLOCK_TOKENS);
    let bytes = n_rows * length * n_kv_heads * head_dim * if number == KvNumber::Fp8 { 2 } else { 4 };
    let n_layers = BEYOND_CACHES / bytes + 1;
    let kv = KvPages { n_kv_heads, head_dim, n_blocks: n_rows * of_row, number };
    let mut draw = Draw::new(29);
    let pages = card.upload(&pages_of(draw.many(n_layers * kv.halves(), 1.0), number))?;
    let tables = card.upload(&draw.order(kv.n_blocks))?;
    let lengths = card.upload(&vec![length as u32; n_rows])?;
    let q = card.upload(&draw.many(n_rows * n_q_heads * head_dim, 1.0))?;
    let mut out = card.buffer::<Bf16>(n_rows * n_q_heads * head_dim)?;
    let n_parts = DecodeAttention::n_parts(n_rows, n_q_heads, length, chunk_tokens);
    let mut parts = card.buffer::<f32>(DecodeAttention::parts_numbers(n_parts, head_dim))?;
    let mut part_sums = card.buffer::<[f32; 2]>(n_parts)?;
    let time = seconds(card, N_LAUNCHES, |nth| {
        let from = nth % n_layers * kv.halves();
        card.decode_attention(DecodeAttention {
            out: out.view_mut(),
            parts: parts.view_mut(),
            part_sums: part_sums.view_mut(),
            q: q.view(),
            q_stride: n_q_heads * head_dim,
            n_q_heads,
            pages: pages.slice(from..from + kv.halves()),
            kv,
            tables: tables.view(),
            rows_of_table: 1,
            last_is_new: true,
            lengths: lengths.view(),
            length_max: length,
            chunk_tokens,
            window: usize::MAX,
            scale: 0.088,
            leaves_cache: false,
        })
    })?;
    Ok(line(
        &format!("decode_attention {n_rows}x{length} chunks of {chunk_tokens}, {number:?}"),
        time,
        bytes as f64,
        limits.read,
    ))
}

/// Replaces NaN patterns in 8-bit numbers. Each 16-bit number holds two of them.
fn pages_of(halves: Vec<Bf16>, number: KvNumber) -> Vec<Bf16> {
    match number {
        KvNumber::Bf16 => halves,
        KvNumber::Fp8 => halves.into_iter().map(|half| Bf16(half.0 & 0xB7B7)).collect(),
    }
}

fn prefill_all(card: &ComputeCard) -> Result<Vec<Value>, CudaError> {
    [(1, 2048, 2048), (1, 8192, 8192), (4, 2048, 2048), (1, 2048, 16384)]
        .into_iter()
        .flat_map(|shape| [KvNumber::Bf16, KvNumber::Fp8].map(|number| prefill(card, shape, number)))
        .collect()
}

fn prefill(
    card: &ComputeCard,
    (n_sequences, n_queries, length): (usize, usize, usize),
    number: KvNumber,
) -> Result<Value, CudaError> {
    let (n_q_heads, head_dim) = (32, 128);
    let kv = KvPages { n_kv_heads: 8, head_dim, n_blocks: n_sequences * length / BLOCK_TOKENS, number };
    let mut draw = Draw::new(30);
    let pages = card.upload(&pages_of(draw.many(kv.halves(), 1.0), number))?;
    let tables = card.upload(&draw.order(kv.n_blocks))?;
    let q = card.upload(&draw.many(n_sequences * n_queries * n_q_heads * head_dim, 1.0))?;
    let mut out = card.buffer::<Bf16>(q.len())?;
    let sequences: Vec<_> = (0..n_sequences)
        .map(|nth| PrefillSequence { first_row: nth * n_queries, n_queries, length })
        .collect();
    let on_card = card.prefill_sequences(&sequences)?;
    let mut widened =
        WidenedPages::new(card, WidenedSize { n_tokens: n_sequences * length, n_kv_heads: 8, head_dim })?;
    let time = seconds(card, 4, |_| {
        card.prefill_attention(PrefillAttention {
            out: out.view_mut(),
            q: q.view(),
            q_stride: n_q_heads * head_dim,
            n_q_heads,
            pages: pages.view(),
            kv,
            tables: tables.view(),
            sequences: &sequences,
            on_card: on_card.view(),
            window: usize::MAX,
            scale: 0.088,
            widened: Some(&mut widened),
        })
    })?;
    // Each query sees the tokens before the first query, and on average half of the queries' own tokens.
    let seen =
        n_queries as f64 * (length - n_queries) as f64 + n_queries as f64 * (n_queries + 1) as f64 / 2.0;
    let flop = 4.0 * seen * (n_sequences * n_q_heads * head_dim) as f64;
    let what = format!("prefill_attention {n_sequences} of {n_queries} queries, {length} tokens, {number:?}");
    eprintln!("{what}: {:.1} us, {:.1} TFLOP/s", time * 1e6, flop / time / 1e12);
    Ok(json!({"what": what, "us": time * 1e6, "flop_per_s": flop / time}))
}
