//! Checks products with an FP8 matrix against sums in f64, and measures their speed.

use baton_kernels::cpu::number::{f8_to_f32, f32_to_bf16};
use baton_kernels::cuda::ops::{FEW_ROWS_SHARES, FewRowsForm};
use baton_kernels::cuda::{
    ComputeCard, Ending, Factors, Fp8Rows, Fp8Scales, FusedKernel, FusedProduct, OutputRows, Products,
    WeightMatrix,
};
use device::cuda::{Bf16, Buffer, CudaError};
use serde_json::Value;

use super::check_products::SHAPES;
use super::check_rows::POISON;
use super::draw::{Draw, wide};
use super::extent::Extent;
use super::measure::{BEYOND_CACHES, Limits, MATRICES, N_LAUNCHES, line, seconds};
use super::verdict::{BF16_ERROR, Verdicts};

/// A matrix in the checkpoint's format and in the GPU's format.
pub(crate) struct Matrix {
    pub(crate) n: usize,
    pub(crate) k: usize,
    bytes: Vec<u8>,
    scales: Vec<f32>,
    scaling: Fp8Scales,
    numbers_there: Buffer<u8>,
    scales_there: Buffer<f32>,
}

impl Matrix {
    /// Draws 8-bit numbers of all sizes, without NaN.
    pub(crate) fn drawn(
        card: &ComputeCard,
        draw: &mut Draw,
        scaling: Fp8Scales,
        (n, k): (usize, usize),
    ) -> Result<Self, CudaError> {
        let byte = |bits: u64| if bits & 0x7F == 0x7F { 0 } else { bits as u8 };
        let bytes: Vec<u8> = (0..n * k).map(|_| byte(draw.bits())).collect();
        let scales: Vec<f32> = (0..scaling.count(n, k)).map(|_| (draw.number() + 1.5) / 256.0).collect();
        let width = Fp8Rows::width(k);
        let mut there = vec![0; n * width];
        for (row, bytes) in bytes.chunks(k).enumerate() {
            for (nth, byte) in bytes.iter().enumerate() {
                there[row * width + Fp8Rows::place(nth)] = *byte;
            }
        }
        let (numbers_there, scales_there) = (card.upload(&there)?, card.upload(&scales)?);
        Ok(Self { n, k, bytes, scales, scaling, numbers_there, scales_there })
    }

    pub(crate) fn rows(&self) -> Fp8Rows<'_> {
        let (numbers, scales) = (self.numbers_there.view(), self.scales_there.view());
        Fp8Rows { numbers, scales, scaling: self.scaling }
    }

    pub(crate) fn format(&self) -> &'static str {
        name(self.scaling)
    }

    /// Returns the name of a kernel family for the matrix.
    fn kernel(&self, family: &str) -> String {
        format!("{family}_{}", self.format())
    }

    /// Returns whether kernels take the matrix as gate and up.
    pub(crate) fn has_gate(&self) -> bool {
        self.scaling.has_halves(self.n)
    }

    pub(crate) fn weights(&self) -> WeightMatrix<'_> {
        WeightMatrix::Fp8(self.rows())
    }

    /// Returns the matrix in f32.
    pub(crate) fn wide(&self) -> Vec<f32> {
        let of_row = self.k.div_ceil(Fp8Scales::BLOCK_COLUMNS);
        let scaled = |(at, byte): (usize, &u8)| {
            let (row, column) = (at / self.k, at % self.k);
            let scale = match self.scaling {
                Fp8Scales::OfRows => row,
                Fp8Scales::OfBlocks => {
                    row / Fp8Scales::BLOCK_ROWS * of_row + column / Fp8Scales::BLOCK_COLUMNS
                }
            };
            f8_to_f32(*byte) * self.scales[scale]
        };
        self.bytes.iter().enumerate().map(scaled).collect()
    }

    /// Returns the product of every row of `x` with every row of the matrix.
    pub(crate) fn product(&self, x: &[Bf16]) -> Vec<f64> {
        let (w, x) = (self.wide(), wide(x));
        let dot = |row: &[f64], of: &[f32]| row.iter().zip(of).map(|(a, b)| a * f64::from(*b)).sum::<f64>();
        x.chunks(self.k).flat_map(|row| w.chunks(self.k).map(move |of| dot(row, of))).collect()
    }
}

pub(crate) const SCALES: [Fp8Scales; 2] = [Fp8Scales::OfRows, Fp8Scales::OfBlocks];

/// Returns the end of the names of kernels for these scales.
pub(crate) fn name(scaling: Fp8Scales) -> &'static str {
    match scaling {
        Fp8Scales::OfRows => "fp8",
        Fp8Scales::OfBlocks => "blocks",
    }
}

pub(crate) fn check(card: &ComputeCard, verdicts: &mut Verdicts, extent: Extent) -> Result<(), CudaError> {
    SCALES.into_iter().try_for_each(|scaling| check_scaled(card, verdicts, scaling, extent))
}

fn check_scaled(
    card: &ComputeCard,
    verdicts: &mut Verdicts,
    scaling: Fp8Scales,
    extent: Extent,
) -> Result<(), CudaError> {
    for (n, k) in extent.of(SHAPES, 3) {
        let mut draw = Draw::new((7 * n * k) as u64);
        let matrix = Matrix::drawn(card, &mut draw, scaling, (*n, *k))?;
        widened(card, verdicts, &matrix)?;
        if card.has_few_rows() {
            for n_rows in extent.of(&[7, 33, 128, 1, 2, 8, 9, 16, 17, 32, 64, 65, 127], 3) {
                few_rows(card, verdicts, &matrix, *n_rows)?;
            }
            company(card, verdicts, &matrix)?;
        }
    }
    if extent == Extent::Whole {
        every_way(card, verdicts, scaling)?;
    }
    Ok(())
}

/// Checks the conversion of the matrix to bf16, to the last bit.
fn widened(card: &ComputeCard, verdicts: &mut Verdicts, matrix: &Matrix) -> Result<(), CudaError> {
    let Matrix { n, k, .. } = *matrix;
    let mut out = card.buffer::<Bf16>(n * k)?;
    card.fill(out.view_mut(), POISON)?;
    card.widen_fp8(out.view_mut(), matrix.rows(), k)?;
    let expected: Vec<Bf16> = matrix.wide().into_iter().map(|number| Bf16(f32_to_bf16(number))).collect();
    verdicts.holds(format!("{} {n}x{k}", matrix.kernel("widen")), card.download(out.view())? == expected);
    Ok(())
}

fn few_rows(
    card: &ComputeCard,
    verdicts: &mut Verdicts,
    matrix: &Matrix,
    n_rows: usize,
) -> Result<(), CudaError> {
    let Matrix { n, k, .. } = *matrix;
    let x = Draw::new((3 * n * k + n_rows) as u64).narrow(n_rows * k, 1.0);
    let reference = matrix.product(&x);
    let x = card.upload(&x)?;
    let mut y = card.buffer::<Bf16>(n * n_rows)?;
    for shares in FEW_ROWS_SHARES {
        card.fill(y.view_mut(), POISON)?;
        let form = FusedKernel::Few(FewRowsForm::Clusters { shares: *shares });
        card.multiply_own(
            form,
            FusedProduct::plain(matrix.weights(), x.view(), k),
            Ending::Sums(y.view_mut()),
        )?;
        let name = format!("{} {n_rows}x{n}x{k}, shares {shares}", matrix.kernel("few_rows"));
        verdicts.compare(name, &wide(&card.download(y.view())?), &reference, BF16_ERROR);
    }
    Ok(())
}

/// Checks that a row's result has the same bits alone and with any other rows.
fn company(card: &ComputeCard, verdicts: &mut Verdicts, matrix: &Matrix) -> Result<(), CudaError> {
    let Matrix { n, k, .. } = *matrix;
    let x = card.upload(&Draw::new(37).narrow(128 * k, 1.0))?;
    let form = FusedKernel::Few(FewRowsForm::of(n, k));
    let mut all = card.buffer::<Bf16>(128 * n)?;
    card.multiply_own(
        form,
        FusedProduct::plain(matrix.weights(), x.view(), k),
        Ending::Sums(all.view_mut()),
    )?;
    let all = card.download(all.view())?;
    for (first, n_rows) in [(0, 1), (0, 13), (7, 1), (8, 17), (63, 64), (127, 1)] {
        let mut some = card.buffer::<Bf16>(n_rows * n)?;
        let rows = x.slice(first * k..(first + n_rows) * k);
        card.multiply_own(
            form,
            FusedProduct::plain(matrix.weights(), rows, k),
            Ending::Sums(some.view_mut()),
        )?;
        let is_same = card.download(some.view())? == all[first * n..(first + n_rows) * n];
        let kernel = matrix.kernel("few_rows");
        verdicts.holds(format!("{kernel} {n}x{k}, {n_rows} rows from {first} on, of 128 and alone"), is_same);
    }
    Ok(())
}

/// Checks the chosen method for each number of rows, measured and by default, and the deterministic method.
fn every_way(card: &ComputeCard, verdicts: &mut Verdicts, scaling: Fp8Scales) -> Result<(), CudaError> {
    let (n, k) = (1032, 520);
    let matrix = Matrix::drawn(card, &mut Draw::new(41), scaling, (n, k))?;
    // A second matrix is widened into the same memory right before, so that its numbers must be overwritten.
    let before = Matrix::drawn(card, &mut Draw::new(43), scaling, (n, k))?;
    let (mut guessed, mut fixed) = (Products::open(card, None)?, Products::open_deterministic(card, None)?);
    guessed.make_room(card, n * k)?;
    fixed.make_room(card, n * k)?;
    for n_rows in [1, 8, 100, 128, 129, 300, 1000] {
        let x = Draw::new(n_rows as u64).narrow(n_rows * k, 1.0);
        let reference = matrix.product(&x);
        let x = card.upload(&x)?;
        let mut y = card.buffer::<Bf16>(n * n_rows)?;
        for (name, products) in [("guessed", &mut guessed), ("fixed", &mut fixed)] {
            card.fill(y.view_mut(), POISON)?;
            for one in [&before, &matrix] {
                let factors = Factors { w: one.weights(), x: x.view(), k };
                products.multiply(card, OutputRows::Narrow(y.view_mut()), factors)?;
            }
            let name = format!("{} {n_rows}x{n}x{k}, {name}", matrix.kernel("product"));
            verdicts.compare(name, &wide(&card.download(y.view())?), &reference, BF16_ERROR);
        }
    }
    Ok(())
}

pub(crate) fn measure(card: &ComputeCard, limits: &Limits) -> Result<Vec<Value>, CudaError> {
    let mut lines = vec![];
    for (name, n, k) in MATRICES.iter().filter(|(name, ..)| *name != "lm_head") {
        for scaling in SCALES {
            lines.extend(measure_one(card, limits, (name, *n, *k), scaling)?);
        }
    }
    Ok(lines)
}

fn measure_one(
    card: &ComputeCard,
    limits: &Limits,
    (of, n, k): (&str, usize, usize),
    scaling: Fp8Scales,
) -> Result<Vec<Value>, CudaError> {
    let (mut lines, kind) = (vec![], name(scaling));
    let n_copies = (BEYOND_CACHES / (n * k)).max(1) + 1;
    let numbers: Vec<u8> =
        Draw::new(29).many(n_copies * n * k, 1.0).into_iter().map(|number| number.0 as u8 & 0xF7).collect();
    let scales = vec![0.01_f32; n_copies * scaling.count(n, k)];
    let (numbers, scales) = (card.upload(&numbers)?, card.upload(&scales)?);
    let rows = |nth: usize| {
        let (first, first_scale) = (nth % n_copies * n * k, nth % n_copies * scaling.count(n, k));
        let scales = scales.slice(first_scale..first_scale + scaling.count(n, k));
        Fp8Rows { numbers: numbers.slice(first..first + n * k), scales, scaling }
    };
    let mut wide = card.buffer::<Bf16>(n * k)?;
    let time = seconds(card, N_LAUNCHES, |nth| card.widen_fp8(wide.view_mut(), rows(nth), k))?;
    lines.push(line(&format!("widen_{kind} {of} {n}x{k}"), time, (3 * n * k) as f64, limits.copy));
    for n_rows in [1, 8, 16, 32, 64, 128] {
        if !card.has_few_rows() {
            continue;
        }
        let x = card.upload(&Draw::new(28).narrow(n_rows * k, 1.0))?;
        let mut y = card.buffer::<Bf16>(n_rows * n)?;
        for shares in FEW_ROWS_SHARES {
            let form = FewRowsForm::Clusters { shares: *shares };
            let time = seconds(card, 4 * N_LAUNCHES, |nth| {
                let product = FusedProduct::plain(WeightMatrix::Fp8(rows(nth)), x.view(), k);
                card.multiply_own(FusedKernel::Few(form), product, Ending::Sums(y.view_mut()))
            })?;
            let chosen = if form == FewRowsForm::of(n, k) { " (chosen)" } else { "" };
            let what = format!("few_rows_{kind} {of} {n_rows}x{n}x{k}, shares {shares}{chosen}");
            lines.push(line(&what, time, (n * k + 2 * n_rows * (n + k)) as f64, limits.read));
        }
    }
    Ok(lines)
}
