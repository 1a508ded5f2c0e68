//! Checks the rounding of activations to FP8 against the CPU's, to the last bit, and products of FP8 by FP8
//! against sums in f64. Measures their speed.

use std::num::NonZero;

use baton_kernels::cpu::number::f8_to_f32;
use baton_kernels::cpu::{Arithmetic, Processor, ROUND_GROUP};
use baton_kernels::cuda::{
    ComputeCard, Fp8Rows, Fp8Scales, MANY_FP8_FORMS, ManyFp8Form, ManyRows, QuantizedRows,
};
use device::cuda::{Bf16, Buffer, CudaError, ViewMut};
use serde_json::{Value, json};

use super::check_rows::{POISON, let_through};
use super::draw::{Draw, wide};
use super::extent::Extent;
use super::fp8::{Matrix, SCALES, name};
use super::many_rows::{N_LAUNCHES, ROWS, SHAPES, SUMS_MAX, ending, output, poison};
use super::measure::{BEYOND_CACHES, MATRICES, seconds};
use super::verdict::{BF16_ERROR, Verdicts};

pub(crate) fn check(card: &ComputeCard, verdicts: &mut Verdicts, extent: Extent) -> Result<(), CudaError> {
    for (n, k) in extent.of(SHAPES, 3) {
        let drawn = |scaling| Matrix::drawn(card, &mut Draw::new((5 * n * k) as u64), scaling, (*n, *k));
        let matrices = [drawn(Fp8Scales::OfRows)?, drawn(Fp8Scales::OfBlocks)?];
        for n_rows in extent.of(ROWS, 2).iter().filter(|n_rows| **n_rows * n <= SUMS_MAX) {
            let rounded = rounds(card, verdicts, *n_rows, *k)?;
            if card.has_many_rows_fp8() {
                for (matrix, form) in
                    matrices.iter().flat_map(|one| MANY_FP8_FORMS.iter().map(move |form| (one, form)))
                {
                    multiplies(card, verdicts, *form, matrix, &rounded)?;
                }
            }
        }
    }
    if card.has_many_rows_fp8() && extent == Extent::Whole {
        SCALES.into_iter().try_for_each(|scaling| forms_agree(card, verdicts, scaling))?;
    }
    Ok(())
}

/// Multiplies matrices of real sizes in all forms, again and again. The sums are those of wide tiles but for their
/// order, and the same each time: threads that wrote where others still read would change them.
fn forms_agree(card: &ComputeCard, verdicts: &mut Verdicts, scaling: Fp8Scales) -> Result<(), CudaError> {
    for (n, k) in [(4096, 14_336), (6144, 4096), (4096, 4096)] {
        let mut draw = Draw::new((n + k) as u64);
        let matrix = Matrix::drawn(card, &mut draw, scaling, (n, k))?;
        for n_rows in [128, 256, 512] {
            let x = card.upload(&draw.narrow(n_rows * k, 1.0))?;
            let (numbers, scales) = in_fp8(card, &x, n_rows, k)?;
            let quantized = QuantizedRows { numbers: numbers.view(), scales: scales.view() };
            let mut y = card.buffer::<Bf16>(n_rows * n)?;
            let mut multiplied = |form: ManyFp8Form| {
                card.fill(y.view_mut(), POISON)?;
                card.multiply_many_fp8(form, matrix.rows(), quantized, k, ManyRows::Sums(y.view_mut()))?;
                card.download(y.view())
            };
            let expected = wide(&multiplied(ManyFp8Form::Wide)?);
            for form in MANY_FP8_FORMS {
                let name = format!("many_rows_{} {} {n_rows}x{n}x{k}", matrix.format(), form.name());
                let first = multiplied(*form)?;
                verdicts.compare(format!("{name} and wide tiles"), &wide(&first), &expected, BF16_ERROR);
                let again = (0..20).map(|_| multiplied(*form)).collect::<Result<Vec<_>, _>>()?;
                verdicts.holds(format!("{name}, the same each time"), again.iter().all(|one| *one == first));
            }
        }
    }
    Ok(())
}

/// Rows as they are, and as the CPU rounds them.
struct Rows {
    x: Vec<Bf16>,
    rounded: Vec<Bf16>,
}

/// Draws rows whose groups have very different sizes, some of them only zeroes, and checks their rounding.
fn rounds(card: &ComputeCard, verdicts: &mut Verdicts, n_rows: usize, k: usize) -> Result<Rows, CudaError> {
    let mut draw = Draw::new((11 * n_rows * k) as u64);
    let mut x = Vec::with_capacity(n_rows * k);
    for row in 0..n_rows {
        for first in (0..k).step_by(ROUND_GROUP) {
            let scale = match row % 4 {
                0 | 1 => [1.0, 0.25, 3.0, 0.0][(row + first / ROUND_GROUP) % 4],
                2 => [1e-3, 300.0, 1e-30][first / ROUND_GROUP % 3],
                _ => 1e30,
            };
            x.extend(draw.narrow(ROUND_GROUP.min(k - first), scale));
        }
    }
    let mut expected: Vec<f32> = x.iter().map(|number| f32::from(*number)).collect();
    let cpu = Processor::new(Arithmetic::F32, NonZero::<usize>::MIN).expect("a thread starts");
    cpu.round_rows(&mut expected, k);
    let rounded: Vec<Bf16> = expected.iter().map(|number| Bf16::from(*number)).collect();

    let there = card.upload(&x)?;
    let mut out = card.buffer::<Bf16>(x.len())?;
    card.fill(out.view_mut(), POISON)?;
    card.round_rows(out.view_mut(), there.view(), k)?;
    let is_same = |found: Vec<f32>| found.iter().zip(&expected).all(|(a, b)| a == b);
    let found = card.download(out.view())?.into_iter().map(f32::from).collect();
    verdicts.holds(format!("round_rows {n_rows}x{k}"), is_same(found));
    if card.has_many_rows_fp8() {
        let (numbers, scales) = in_fp8(card, &there, n_rows, k)?;
        let (numbers, scales) = (card.download(numbers.view())?, card.download(scales.view())?);
        let (width, apart) = (Fp8Rows::width(k), QuantizedRows::scales_apart(n_rows));
        let number = |row: usize, nth: usize| {
            let scale = scales[nth / ROUND_GROUP * apart + row];
            f8_to_f32(numbers[row * width + Fp8Rows::place(nth)]) * scale
        };
        let found = (0..n_rows * k).map(|at| number(at / k, at % k)).collect();
        verdicts.holds(format!("quantize_rows {n_rows}x{k}"), is_same(found));
    }
    Ok(Rows { x, rounded })
}

fn in_fp8(
    card: &ComputeCard,
    x: &Buffer<Bf16>,
    n_rows: usize,
    k: usize,
) -> Result<(Buffer<u8>, Buffer<f32>), CudaError> {
    let mut numbers = card.buffer(n_rows * Fp8Rows::width(k))?;
    let mut scales = card.buffer(QuantizedRows::n_scales(n_rows, k))?;
    card.fill(numbers.view_mut(), POISON)?;
    card.fill(scales.view_mut(), 0xFF)?;
    card.quantize_rows(numbers.view_mut(), scales.view_mut(), x.view(), k)?;
    Ok((numbers, scales))
}

fn multiplies(
    card: &ComputeCard,
    verdicts: &mut Verdicts,
    form: ManyFp8Form,
    matrix: &Matrix,
    rows: &Rows,
) -> Result<(), CudaError> {
    let (n, k) = (matrix.n, matrix.k);
    // The sums of rows with enormous numbers do not fit bf16; such rows are left out.
    let is_small = |row: &&[Bf16]| row.iter().all(|number| f32::from(*number).abs() < 1e20);
    let small: Vec<usize> =
        rows.rounded.chunks(k).enumerate().filter(|(_, row)| is_small(row)).map(|(nth, _)| nth).collect();
    let pick = |numbers: &[Bf16], width: usize| -> Vec<Bf16> {
        small.iter().flat_map(|row| numbers[row * width..(row + 1) * width].to_vec()).collect()
    };
    let (x, n_rows) = (card.upload(&rows.x)?, rows.x.len() / k);
    let sums = matrix.product(&pick(&rows.rounded, k));
    let (numbers, scales) = in_fp8(card, &x, n_rows, k)?;
    let quantized = QuantizedRows { numbers: numbers.view(), scales: scales.view() };
    let name = format!("many_rows_{} {} {n_rows}x{n}x{k}", matrix.format(), form.name());
    let before = Draw::new(n_rows as u64).narrow(n_rows * n, 1.0);
    let mut found = |what: &str, into: &[Bf16]| {
        let run =
            |y: ViewMut<'_, Bf16>| card.multiply_many_fp8(form, matrix.rows(), quantized, k, ending(what, y));
        output(card, verdicts, &format!("{name}, {what}"), n, into, run)
    };
    let plain = found("sums", &poison(n_rows * n))?;
    let added = found("added", &before)?;
    let gated = (form.has_gate() && matrix.has_gate())
        .then(|| found("gated", &poison(n_rows * n / 2)))
        .transpose()?;
    verdicts.compare(name.clone(), &wide(&pick(&plain, n)), &sums, BF16_ERROR);
    let plus = |(sum, before): (&Bf16, &Bf16)| Bf16::from(f32::from(*sum) + f32::from(*before));
    let expected: Vec<Bf16> = pick(&plain, n).iter().zip(&pick(&before, n)).map(plus).collect();
    verdicts.holds(format!("{name}, added to what was there"), pick(&added, n) == expected);
    let Some(gated) = gated else { return Ok(()) };
    let reference: Vec<f64> = sums.chunks(n).flat_map(let_through).collect();
    verdicts.compare(format!("{name}, gated"), &wide(&pick(&gated, n / 2)), &reference, BF16_ERROR);
    Ok(())
}

pub(crate) fn measure(card: &ComputeCard) -> Result<Vec<Value>, CudaError> {
    let mut lines = vec![];
    if !card.has_many_rows_fp8() {
        return Ok(lines);
    }
    for (name, n, k) in MATRICES.iter().filter(|(name, ..)| *name != "lm_head") {
        for scaling in SCALES {
            lines.extend(measure_one(card, (name, *n, *k), scaling)?);
        }
    }
    Ok(lines)
}

fn measure_one(
    card: &ComputeCard,
    (of, n, k): (&str, usize, usize),
    scaling: Fp8Scales,
) -> Result<Vec<Value>, CudaError> {
    let (mut lines, kind) = (vec![], name(scaling));
    let n_copies = (BEYOND_CACHES / (n * k)).max(1) + 1;
    let drawn = Draw::new(35).many(n_copies * n * k, 1.0);
    let numbers: Vec<u8> = drawn.into_iter().map(|number| number.0 as u8 & 0xF7).collect();
    let (numbers, scales) = (card.upload(&numbers)?, card.upload(&vec![0.01_f32; scaling.count(n, k)])?);
    for n_rows in [64, 128, 256, 512, 2048, 8192] {
        let x = card.upload(&Draw::new(36).many(n_rows * k, 1.0))?;
        let (mut to, mut to_scales) =
            (card.buffer::<u8>(n_rows * k)?, card.buffer::<f32>(QuantizedRows::n_scales(n_rows, k))?);
        let time = seconds(card, N_LAUNCHES, |_| {
            card.quantize_rows(to.view_mut(), to_scales.view_mut(), x.view(), k)
        })?;
        let what = format!("quantize_rows {of} {n_rows}x{k}");
        eprintln!("{what}: {:.1} us", time * 1e6);
        lines.push(json!({"what": what, "us": time * 1e6}));
        let mut y = card.buffer::<Bf16>(n_rows * n)?;
        let forms = MANY_FP8_FORMS.iter().filter(|form| form.has_gate() || n_rows <= 512);
        let ways = forms.flat_map(|form| ["sums", "added", "gated"].map(|what| (*form, what)));
        for (form, what) in ways.filter(|(form, what)| form.has_gate() || *what != "gated") {
            let time = seconds(card, N_LAUNCHES, |nth| {
                let len = if what == "gated" { n_rows * n / 2 } else { n_rows * n };
                let first = nth % n_copies * n * k;
                let w =
                    Fp8Rows { numbers: numbers.slice(first..first + n * k), scales: scales.view(), scaling };
                let quantized = QuantizedRows { numbers: to.view(), scales: to_scales.view() };
                let rows: ManyRows<'_> = ending(what, y.view_mut().slice(0..len));
                card.multiply_many_fp8(form, w, quantized, k, rows)
            })?;
            let flop = (2 * n_rows * n * k) as f64;
            let what = format!("many_rows_{kind} {} {of} {n_rows}x{n}x{k}, {what}", form.name());
            eprintln!("{what}: {:.1} us, {:.1} TFLOP/s", time * 1e6, flop / time / 1e12);
            lines.push(json!({"what": what, "us": time * 1e6, "flop_per_s": flop / time}));
        }
    }
    Ok(lines)
}
