//! Checks products of many rows with a matrix, and the work after them, against sums in f64. Measures their
//! speed.

use baton_kernels::cuda::{ComputeCard, ManyRows};
use device::cuda::{Bf16, CudaError, ViewMut};
use serde_json::{Value, json};

use super::check_products::product;
use super::check_rows::{POISON, let_through};
use super::draw::{Draw, wide};
use super::extent::Extent;
use super::measure::{MATRICES, seconds};
use super::verdict::{BF16_ERROR, Verdicts};

/// The numbers of rows of the matrix, and their widths: odd sizes, with one tile and with many.
pub(crate) const SHAPES: &[(usize, usize)] =
    &[(16, 8), (272, 72), (1040, 264), (528, 4096), (4624, 1032), (1152, 264)];
/// The numbers of rows of x: around the limits of a block and of a pair, and more pairs than are grouped.
pub(crate) const ROWS: &[usize] = &[3, 300, 128, 129, 256, 1, 2309];
/// The maximum number of sums that the CPU also computes.
pub(crate) const SUMS_MAX: usize = 2 << 20;

pub(crate) fn check(card: &ComputeCard, verdicts: &mut Verdicts, extent: Extent) -> Result<(), CudaError> {
    if !card.has_many_rows() {
        eprintln!("many rows: this GPU is not Hopper: left out");
        return Ok(());
    }
    for (n, k) in extent.of(SHAPES, 3) {
        for n_rows in extent.of(ROWS, 2).iter().filter(|n_rows| **n_rows * n <= SUMS_MAX) {
            one(card, verdicts, (*n, *k, *n_rows))?;
        }
    }
    Ok(())
}

/// Returns the ending with this name.
pub(crate) fn ending<'a>(what: &str, y: ViewMut<'a, Bf16>) -> ManyRows<'a> {
    match what {
        "added" => ManyRows::Added(y),
        "gated" => ManyRows::Gated(y),
        _ => ManyRows::Sums(y),
    }
}

/// Runs a kernel whose output is `into` before, and checks that it writes nothing in the 64 rows of `n` numbers behind
/// the output. Returns the output.
pub(crate) fn output(
    card: &ComputeCard,
    verdicts: &mut Verdicts,
    name: &str,
    n: usize,
    into: &[Bf16],
    run: impl FnOnce(ViewMut<'_, Bf16>) -> Result<(), CudaError>,
) -> Result<Vec<Bf16>, CudaError> {
    let behind = poison(64 * n);
    let mut y = card.upload(&[into, &behind].concat())?;
    run(y.view_mut().slice(0..into.len()))?;
    let mut answer = card.download(y.view())?;
    verdicts.holds(format!("{name}, nothing beyond"), answer.split_off(into.len()) == behind);
    Ok(answer)
}

/// Returns numbers that show whether a kernel wrote over them.
pub(crate) fn poison(n: usize) -> Vec<Bf16> {
    vec![Bf16(u16::from_le_bytes([POISON; 2])); n]
}

fn one(
    card: &ComputeCard,
    verdicts: &mut Verdicts,
    (n, k, n_rows): (usize, usize, usize),
) -> Result<(), CudaError> {
    let mut draw = Draw::new((7 * n * k + n_rows) as u64);
    let (w, x) = (draw.narrow(n * k, 1.0 / (k as f32).sqrt()), draw.narrow(n_rows * k, 1.0));
    let sums = product(&w, &x, k);
    let (w, x) = (card.upload(&w)?, card.upload(&x)?);
    let name = format!("many_rows {n_rows}x{n}x{k}");
    let before = draw.narrow(n_rows * n, 1.0);
    let mut found = |what: &str, into: &[Bf16]| {
        let run = |y: ViewMut<'_, Bf16>| card.multiply_many(w.view(), x.view(), k, ending(what, y));
        output(card, verdicts, &format!("{name}, {what}"), n, into, run)
    };
    let plain = found("sums", &poison(n_rows * n))?;
    let added = found("added", &before)?;
    let gated = found("gated", &poison(n_rows * n / 2))?;
    verdicts.compare(name.clone(), &wide(&plain), &sums, BF16_ERROR);
    // The result must equal that of a separate kernel, to the last bit.
    let mut all = plain.iter().zip(&before).zip(&added);
    let is_sum =
        |((a, b), sum): ((&Bf16, &Bf16), &Bf16)| Bf16::from(f32::from(*a) + f32::from(*b)).0 == sum.0;
    verdicts.holds(format!("{name}, added to what was there"), all.all(is_sum));
    let reference: Vec<f64> = sums.chunks(n).flat_map(let_through).collect();
    verdicts.compare(format!("{name}, gated"), &wide(&gated), &reference, BF16_ERROR);
    Ok(())
}

/// The number of products in sequence, enough for the GPU to reach its power limit.
pub(crate) const N_LAUNCHES: usize = 40;

pub(crate) fn measure(card: &ComputeCard) -> Result<Vec<Value>, CudaError> {
    let mut lines = vec![];
    if !card.has_many_rows() {
        return Ok(lines);
    }
    for (name, n, k) in MATRICES.iter().filter(|(name, ..)| *name != "lm_head") {
        let w = card.upload(&Draw::new(33).many(n * k, 0.02))?;
        for n_rows in [256, 512, 2048, 8192] {
            let x = card.upload(&Draw::new(34).many(n_rows * k, 1.0))?;
            let mut y = card.buffer::<Bf16>(n_rows * n)?;
            for what in ["sums", "added", "gated"] {
                let time = seconds(card, N_LAUNCHES, |_| {
                    let len = if what == "gated" { n_rows * n / 2 } else { n_rows * n };
                    let rows = ending(what, y.view_mut().slice(0..len));
                    card.multiply_many(w.view(), x.view(), *k, rows)
                })?;
                let flop = (2 * n_rows * n * k) as f64;
                let what = format!("many_rows {name} {n_rows}x{n}x{k}, {what}");
                eprintln!("{what}: {:.1} us, {:.1} TFLOP/s", time * 1e6, flop / time / 1e12);
                lines.push(json!({"what": what, "us": time * 1e6, "flop_per_s": flop / time}));
            }
        }
    }
    Ok(lines)
}
