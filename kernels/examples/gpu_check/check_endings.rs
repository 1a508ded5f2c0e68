//! Checks the work after products of few rows, done by the kernel that multiplies, against f64.

use baton_kernels::cuda::ops::{FEW_ROWS_FORMS, SKINNY_ROWS_MAX};
use baton_kernels::cuda::{
    AddedRows, ComputeCard, Ending, FewRowsForm, Fp8Scales, FusedKernel, FusedProduct, HeadsRows, KvNumber,
    KvPages, PendingNorm, SKINNY_FORMS, WeightMatrix,
};
use device::cuda::{Bf16, Buffer, CudaError};

use super::check_products::product;
use super::check_rows::{EPSILON, POISON, let_through};
use super::draw::{Draw, wide};
use super::extent::Extent;
use super::fp8::Matrix;
use super::rotation::Rotation;
use super::verdict::{BF16_ERROR, Verdicts};

/// A matrix on the host and on the GPU.
enum Drawn {
    Bf16 { here: Vec<Bf16>, there: Buffer<Bf16>, k: usize },
    Fp8(Matrix),
}

/// The rows to multiply, and their pending norm.
struct Rows {
    x: Vec<Bf16>,
    there: Buffer<Bf16>,
    squares: Vec<f32>,
    squares_there: Buffer<f32>,
}

/// The formats of matrices.
pub(crate) const FORMATS: [Option<Fp8Scales>; 3] = [None, Some(Fp8Scales::OfRows), Some(Fp8Scales::OfBlocks)];

/// The number of partial sums of squares of a row: more than a warp has lanes.
const N_PARTS: usize = 37;

pub(crate) fn all(card: &ComputeCard, verdicts: &mut Verdicts, extent: Extent) -> Result<(), CudaError> {
    for fp8 in FORMATS {
        for n_rows in extent.of(&[3, 128, 8, 1, 17, 33, 64], 2) {
            let forms = forms(card, fp8, *n_rows);
            for (nth, form) in forms.iter().enumerate() {
                // Every form is checked with and without a pending norm, over the numbers of rows.
                let is_pending = (nth + n_rows) % 2 == 0;
                for (width, k) in extent.of(&[(200_usize, 264), (8, 40), (1096, 4096)], 2) {
                    let of_gate = match fp8 {
                        Some(Fp8Scales::OfBlocks) => width.next_multiple_of(Fp8Scales::BLOCK_ROWS),
                        _ => *width,
                    };
                    gated(
                        card,
                        verdicts,
                        &Drawn::new(card, fp8, 2 * of_gate, *k)?,
                        (*form, *n_rows, is_pending),
                    )?;
                    added(card, verdicts, &Drawn::new(card, fp8, *width, *k)?, (*form, *n_rows, is_pending))?;
                }
                for (shape, extras) in HEADS {
                    for number in [KvNumber::Bf16, KvNumber::Fp8] {
                        heads(card, verdicts, (*shape, number, *extras), fp8, (*form, *n_rows, is_pending))?;
                    }
                }
            }
        }
    }
    Ok(())
}

/// Optional tensors of the heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Extras {
    None,
    Bias,
    BiasAndNorms,
}

/// The width of heads, their numbers for q and for k and v, and the optional tensors.
const HEADS: &[((usize, usize, usize), Extras)] = &[
    ((128, 5, 2), Extras::None),
    ((128, 3, 3), Extras::BiasAndNorms),
    ((64, 4, 1), Extras::BiasAndNorms),
    ((64, 3, 2), Extras::Bias),
];

pub(crate) fn forms(card: &ComputeCard, fp8: Option<Fp8Scales>, n_rows: usize) -> Vec<FusedKernel> {
    let is_skinny = fp8.is_none() && n_rows <= SKINNY_ROWS_MAX;
    let skinny = SKINNY_FORMS.iter().filter(|_| is_skinny).copied().map(FusedKernel::Skinny);
    let serves = |form: &&FewRowsForm| form.serves(n_rows) && (form.takes_fp8() || fp8.is_none());
    let few = FEW_ROWS_FORMS.iter().filter(|_| card.has_few_rows()).filter(serves).copied();
    skinny.chain(few.map(FusedKernel::Few)).collect()
}

impl Drawn {
    fn new(card: &ComputeCard, fp8: Option<Fp8Scales>, n: usize, k: usize) -> Result<Self, CudaError> {
        let mut draw = Draw::new((5 * n * k) as u64);
        if let Some(scaling) = fp8 {
            return Ok(Self::Fp8(Matrix::drawn(card, &mut draw, scaling, (n, k))?));
        }
        let here = draw.narrow(n * k, 1.0 / (k as f32).sqrt());
        let there = card.upload(&here)?;
        Ok(Self::Bf16 { here, there, k })
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Bf16 { .. } => "bf16",
            Self::Fp8(matrix) => matrix.format(),
        }
    }

    fn k(&self) -> usize {
        match self {
            Self::Bf16 { k, .. } => *k,
            Self::Fp8(matrix) => matrix.k,
        }
    }

    fn weights(&self) -> WeightMatrix<'_> {
        match self {
            Self::Bf16 { there, .. } => WeightMatrix::Bf16(there.view()),
            Self::Fp8(matrix) => matrix.weights(),
        }
    }

    /// Returns the product's rows, each times the factor of its pending norm.
    fn product(&self, rows: &Rows, is_pending: bool) -> Vec<Vec<f64>> {
        let sums = match self {
            Self::Bf16 { here, k, .. } => product(here, &rows.x, *k),
            Self::Fp8(matrix) => matrix.product(&rows.x),
        };
        let n_rows = rows.x.len() / self.k();
        let of_row = |(nth, row): (usize, &[f64])| {
            let scale = if is_pending { rows.scale(nth, self.k()) } else { 1.0 };
            row.iter().map(|sum| sum * scale).collect()
        };
        sums.chunks(sums.len() / n_rows).enumerate().map(of_row).collect()
    }
}

impl Rows {
    fn new(card: &ComputeCard, n_rows: usize, k: usize) -> Result<Self, CudaError> {
        let mut draw = Draw::new((11 * n_rows + k) as u64);
        let x = draw.narrow(n_rows * k, 1.0);
        let squares: Vec<f32> = (0..n_rows * N_PARTS).map(|_| (draw.number() + 1.1) * 8.0).collect();
        let (there, squares_there) = (card.upload(&x)?, card.upload(&squares)?);
        Ok(Self { x, there, squares, squares_there })
    }

    fn scale(&self, row: usize, k: usize) -> f64 {
        let squares = &self.squares[row * N_PARTS..(row + 1) * N_PARTS];
        let squares: f64 = squares.iter().map(|part| f64::from(*part)).sum();
        1.0 / (squares / k as f64 + f64::from(EPSILON)).sqrt()
    }

    fn times<'a>(&'a self, w: &'a Drawn, is_pending: bool) -> FusedProduct<'a> {
        let pending_norm = PendingNorm { squares: self.squares_there.view(), epsilon: EPSILON };
        FusedProduct {
            w: w.weights(),
            x: self.there.view(),
            k: w.k(),
            pending_norm: is_pending.then_some(pending_norm),
        }
    }
}

/// The form, the number of rows, and whether a norm is pending.
type Case = (FusedKernel, usize, bool);

fn gated(
    card: &ComputeCard,
    verdicts: &mut Verdicts,
    w: &Drawn,
    (form, n_rows, is_pending): Case,
) -> Result<(), CudaError> {
    let rows = Rows::new(card, n_rows, w.k())?;
    let both = w.product(&rows, is_pending);
    let width = both[0].len() / 2;
    let reference: Vec<f64> = both.iter().flat_map(|row| let_through(row)).collect();
    let mut y = card.buffer::<Bf16>(n_rows * width)?;
    card.fill(y.view_mut(), POISON)?;
    card.multiply_own(form, rows.times(w, is_pending), Ending::Gated(y.view_mut()))?;
    let name = format!("gated {} {n_rows}x{width}x{}, {form:?}, pending norm {is_pending}", w.name(), w.k());
    verdicts.compare(name, &wide(&card.download(y.view())?), &reference, BF16_ERROR);
    Ok(())
}

fn added(
    card: &ComputeCard,
    verdicts: &mut Verdicts,
    w: &Drawn,
    (form, n_rows, is_pending): Case,
) -> Result<(), CudaError> {
    let rows = Rows::new(card, n_rows, w.k())?;
    let sums = w.product(&rows, is_pending);
    let n = sums[0].len();
    let n_parts = form.parts(n);
    let mut draw = Draw::new(n as u64);
    let (before, weight) = (draw.narrow(n_rows * n, 2.0), draw.narrow(n, 1.5));
    let (mut residual, weight_there) = (card.upload(&before)?, card.upload(&weight)?);
    let (mut out, mut squares) = (card.buffer::<Bf16>(n_rows * n)?, card.buffer::<f32>(n_rows * n_parts)?);
    card.fill(out.view_mut(), POISON)?;
    card.fill(squares.view_mut(), POISON)?;
    let added = AddedRows {
        residual: residual.view_mut(),
        out: out.view_mut(),
        weight: weight_there.view(),
        squares: squares.view_mut(),
    };
    card.multiply_own(form, rows.times(w, is_pending), Ending::Added(added))?;
    let name = format!("added {} {n_rows}x{n}x{}, {form:?}, pending norm {is_pending}", w.name(), w.k());
    let reference: Vec<f64> =
        sums.concat().iter().zip(wide(&before)).map(|(sum, before)| sum + before).collect();
    let found = wide(&card.download(residual.view())?);
    verdicts.compare(format!("{name}, residual"), &found, &reference, BF16_ERROR);
    // The reference uses the stored numbers, because later readers see those, and the norm must be theirs.
    let weight = wide(&weight);
    let times: Vec<f64> = found.iter().enumerate().map(|(at, number)| number * weight[at % n]).collect();
    verdicts.compare(format!("{name}, out"), &wide(&card.download(out.view())?), &times, BF16_ERROR);
    let of_part = if form.norms_heads() { 128 } else { 16 };
    let parts = found.chunks(n).flat_map(|row| row.chunks(of_part));
    let parts: Vec<f64> = parts.map(|part| part.iter().map(|number| number * number).sum()).collect();
    let squares: Vec<f64> = card.download(squares.view())?.into_iter().map(f64::from).collect();
    verdicts.compare(format!("{name}, squares"), &squares, &parts, 1e-5);
    Ok(())
}

fn heads(
    card: &ComputeCard,
    verdicts: &mut Verdicts,
    ((head_dim, n_q_heads, n_kv_heads), number, extras): ((usize, usize, usize), KvNumber, Extras),
    fp8: Option<Fp8Scales>,
    (form, n_rows, is_pending): Case,
) -> Result<(), CudaError> {
    let has_norms = extras == Extras::BiasAndNorms;
    if has_norms && !form.norms_heads() {
        return Ok(());
    }
    let n_blocks = 10;
    let (n, k) = ((n_q_heads + 2 * n_kv_heads) * head_dim, 264);
    let w = Drawn::new(card, fp8, n, k)?;
    let rows = Rows::new(card, n_rows, k)?;
    let kv = KvPages { n_kv_heads, head_dim, n_blocks, number };
    let mut draw = Draw::new(6);
    let rotation = Rotation::drawn(&mut draw, (n_rows, n_q_heads), kv, has_norms);
    let there = rotation.upload(card)?;
    let bias = if extras == Extras::None { vec![Bf16(0); n] } else { draw.narrow(n, 0.5) };
    let bias_there = card.upload(&bias)?;
    let (mut qkv, mut pages) = (card.buffer::<Bf16>(n_rows * n)?, card.buffer::<Bf16>(kv.halves())?);
    card.fill(qkv.view_mut(), POISON)?;
    card.fill(pages.view_mut(), POISON)?;
    let of_rope = HeadsRows {
        rope: there.rope(qkv.view_mut(), pages.view_mut()),
        bias: (extras != Extras::None).then(|| bias_there.view()),
    };
    card.multiply_own(form, rows.times(&w, is_pending), Ending::Heads(of_rope))?;
    let bias = wide(&bias);
    let biased =
        |sums: &Vec<f64>| -> Vec<f64> { sums.iter().zip(&bias).map(|(sum, bias)| sum + bias).collect() };
    let before: Vec<Vec<f64>> = w.product(&rows, is_pending).iter().map(biased).collect();
    let name = format!(
        "heads {} {n_rows} rows, {head_dim} {n_q_heads}/{n_kv_heads}, {extras:?}, {number:?}, {form:?}, pending norm {is_pending}",
        w.name()
    );
    let found = (card.download(qkv.view())?, card.download(pages.view())?);
    rotation.compare(verdicts, &name, before.iter().map(Vec::as_slice), found);
    Ok(())
}
