//! Checks embedding, norms, the gate, rotation and argmax against plain loops in f64.

use baton_kernels::cuda::{ComputeCard, KvNumber, KvPages, NOWHERE};
use device::cuda::{Bf16, CudaError};

use super::draw::{Draw, wide};
use super::extent::Extent;
use super::rotation::Rotation;
use super::verdict::{BF16_ERROR, Verdicts};

/// A byte that makes NaN of every number that it fills.
pub(crate) const POISON: u8 = 0xFF;
pub(crate) const EPSILON: f32 = 1e-5;

pub(crate) fn all(card: &ComputeCard, verdicts: &mut Verdicts, extent: Extent) -> Result<(), CudaError> {
    for (n_rows, width) in extent.of(&[(1, 8), (3, 64), (5, 4096), (2, 16384), (17, 5120)], 4) {
        embedding(card, verdicts, *n_rows, *width)?;
        norms(card, verdicts, *n_rows, *width)?;
    }
    for (n_rows, width) in [(1, 8), (3, 2056), (7, 14336)] {
        silu(card, verdicts, n_rows, width)?;
    }
    for (head_dim, n_q_heads, n_kv_heads, has_norms) in
        [(64, 3, 1, false), (128, 32, 8, false), (128, 5, 5, true)]
    {
        for number in [KvNumber::Bf16, KvNumber::Fp8] {
            rope(card, verdicts, (head_dim, n_q_heads, n_kv_heads), has_norms, number)?;
        }
    }
    for (n_rows, width) in extent.of(&[(1, 1), (3, 1000), (2, 32_003), (1, 128_256), (64, 32_003)], 3) {
        argmax(card, verdicts, *n_rows, *width)?;
    }
    no_number(card, verdicts)
}

fn embedding(
    card: &ComputeCard,
    verdicts: &mut Verdicts,
    n_rows: usize,
    width: usize,
) -> Result<(), CudaError> {
    let mut draw = Draw::new(1);
    let vocabulary = 37;
    let table = draw.narrow(vocabulary * width, 1.0);
    let tokens: Vec<u32> = (0..n_rows).map(|_| draw.below(vocabulary) as u32).collect();
    let mut out = card.buffer::<Bf16>(n_rows * width)?;
    card.fill(out.view_mut(), POISON)?;
    card.embedding(out.view_mut(), card.upload(&table)?.view(), card.upload(&tokens)?.view())?;
    let answer = card.download(out.view())?;
    let is_right = tokens.iter().enumerate().all(|(row, token)| {
        let from = *token as usize * width;
        answer[row * width..(row + 1) * width] == table[from..from + width]
    });
    verdicts.holds(format!("embedding {n_rows}x{width}"), is_right);
    card.embedding(
        out.view_mut(),
        card.upload(&table)?.view(),
        card.upload(&vec![u32::MAX; n_rows])?.view(),
    )?;
    let are_nan = wide(&card.download(out.view())?).iter().all(|number| number.is_nan());
    verdicts.holds(format!("embedding of unknown tokens {n_rows}x{width}"), are_nan);
    Ok(())
}

pub(crate) fn normed(row: &[f64], weight: &[f64]) -> Vec<f64> {
    let squares: f64 = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
    let scale = 1.0 / (squares + f64::from(EPSILON)).sqrt();
    row.iter().zip(weight).map(|(x, w)| x * scale * w).collect()
}

fn norms(card: &ComputeCard, verdicts: &mut Verdicts, n_rows: usize, width: usize) -> Result<(), CudaError> {
    let mut draw = Draw::new(2);
    let (x, residual, weight) =
        (draw.narrow(n_rows * width, 3.0), draw.narrow(n_rows * width, 2.0), draw.narrow(width, 1.5));
    let (on_card, by) = (card.upload(&x)?, card.upload(&weight)?);
    let mut out = card.buffer::<Bf16>(x.len())?;
    card.fill(out.view_mut(), POISON)?;
    card.rms_norm(out.view_mut(), on_card.view(), by.view(), EPSILON)?;
    let by_rows =
        |x: &[f64]| -> Vec<f64> { x.chunks(width).flat_map(|row| normed(row, &wide(&weight))).collect() };
    let answer = wide(&card.download(out.view())?);
    verdicts.compare(format!("rms_norm {n_rows}x{width}"), &answer, &by_rows(&wide(&x)), BF16_ERROR);

    let sums: Vec<Bf16> =
        x.iter().zip(&residual).map(|(x, r)| Bf16::from(f32::from(*x) + f32::from(*r))).collect();
    let mut kept = card.upload(&residual)?;
    card.fill(out.view_mut(), POISON)?;
    card.add_rms_norm(out.view_mut(), kept.view_mut(), on_card.view(), by.view(), EPSILON)?;
    verdicts.holds(format!("residual {n_rows}x{width}"), card.download(kept.view())? == sums);
    let answer = wide(&card.download(out.view())?);
    verdicts.compare(format!("add_rms_norm {n_rows}x{width}"), &answer, &by_rows(&wide(&sums)), BF16_ERROR);
    Ok(())
}

/// Computes `silu(gate) * up` of a row that has gate, then up.
pub(crate) fn let_through(row: &[f64]) -> Vec<f64> {
    let (gate, up) = row.split_at(row.len() / 2);
    gate.iter().zip(up).map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up).collect()
}

fn silu(card: &ComputeCard, verdicts: &mut Verdicts, n_rows: usize, width: usize) -> Result<(), CudaError> {
    let gate_up = Draw::new(3).narrow(2 * n_rows * width, 6.0);
    let mut out = card.buffer::<Bf16>(n_rows * width)?;
    card.fill(out.view_mut(), POISON)?;
    card.silu_mul(out.view_mut(), card.upload(&gate_up)?.view(), width)?;
    let reference: Vec<f64> = wide(&gate_up).chunks(2 * width).flat_map(let_through).collect();
    let answer = wide(&card.download(out.view())?);
    verdicts.compare(format!("silu_mul {n_rows}x{width}"), &answer, &reference, BF16_ERROR);
    Ok(())
}

fn rope(
    card: &ComputeCard,
    verdicts: &mut Verdicts,
    (head_dim, n_q_heads, n_kv_heads): (usize, usize, usize),
    has_norms: bool,
    number: KvNumber,
) -> Result<(), CudaError> {
    let mut draw = Draw::new(4);
    let (n_rows, n_blocks) = (21, 5);
    let width = (n_q_heads + 2 * n_kv_heads) * head_dim;
    let kv = KvPages { n_kv_heads, head_dim, n_blocks, number };
    let qkv = draw.narrow(n_rows * width, 2.0);
    let rotation = Rotation::drawn(&mut draw, (n_rows, n_q_heads), kv, has_norms);
    let there = rotation.upload(card)?;
    let (mut rows, mut pages) = (card.upload(&qkv)?, card.buffer::<Bf16>(kv.halves())?);
    card.fill(pages.view_mut(), POISON)?;
    card.rope_write_kv(there.rope(rows.view_mut(), pages.view_mut()))?;
    let name = format!("rope_write_kv {head_dim} {n_q_heads}/{n_kv_heads} norms: {has_norms}, {number:?}");
    let before = wide(&qkv);
    let found = (card.download(rows.view())?, card.download(pages.view())?);
    rotation.compare(verdicts, &name, before.chunks(width), found);
    Ok(())
}

fn argmax(card: &ComputeCard, verdicts: &mut Verdicts, n_rows: usize, width: usize) -> Result<(), CudaError> {
    let mut draw = Draw::new(5);
    // The logits have few different values, so most rows have several greatest ones, and the first one must
    // win.
    let mut logits: Vec<f32> = (0..n_rows * width).map(|_| draw.below(1000) as f32 - 500.0).collect();
    logits[..width].iter_mut().for_each(|number| *number = -*number - 1e6);
    let reference: Vec<u32> = logits
        .chunks(width)
        .map(|row| (0..width).rev().max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap_or(0) as u32)
        .collect();
    let mut out = card.buffer::<u32>(n_rows)?;
    let mut keys = card.buffer::<u64>(card.argmax_keys(n_rows, width))?;
    card.fill(out.view_mut(), POISON)?;
    card.fill(keys.view_mut(), POISON)?;
    card.argmax(out.view_mut(), keys.view_mut(), card.upload(&logits)?.view())?;
    verdicts.holds(format!("argmax {n_rows}x{width}"), card.download(out.view())? == reference);
    Ok(())
}

/// Checks that a NaN of either sign wins its row and gives no token. An infinite best logit must give no
/// token either.
fn no_number(card: &ComputeCard, verdicts: &mut Verdicts) -> Result<(), CudaError> {
    let width = 5000;
    let mut logits = {
        let mut draw = Draw::new(15);
        (0..6 * width).map(|_| draw.number() * 9.0).collect::<Vec<f32>>()
    };
    let mut spoil = |row: usize, at: usize, by: f32| logits[row * width + at] = by;
    spoil(1, 4999, f32::NAN);
    spoil(2, 17, -f32::NAN);
    spoil(3, 300, f32::NAN);
    spoil(3, 200, -f32::NAN);
    spoil(3, 100, f32::INFINITY);
    spoil(4, 2500, f32::INFINITY);
    logits[5 * width..].fill(f32::NEG_INFINITY);
    let logits = card.upload(&logits)?;
    let mut keys = card.buffer::<u64>(card.argmax_keys(6, width))?;
    let (mut best, mut drawn) = (card.buffer::<u32>(6)?, card.buffer::<u32>(6)?);
    card.argmax(best.view_mut(), keys.view_mut(), logits.view())?;
    card.keep_tokens(drawn.view_mut(), best.view(), logits.view())?;
    let (best, drawn) = (card.download(best.view())?, card.download(drawn.view())?);
    verdicts.holds("argmax finds what is no number", best[1..5] == [4999, 17, 200, 2500]);
    let no_others = drawn[1..].iter().all(|token| *token == NOWHERE);
    verdicts.holds("what is no number is no token", drawn[0] == best[0] && no_others);
    Ok(())
}
