//! Checks products of few rows with a matrix against sums in f64.

use std::ops::Range;

use baton_kernels::cuda::ops::{FEW_ROWS_FORMS, FewRowsForm};
use baton_kernels::cuda::{
    ComputeCard, Ending, FusedKernel, FusedProduct, SKINNY_FORMS, SkinnyForm, WeightMatrix,
};
use device::cuda::{Bf16, Buffer, CudaError};

use super::check_rows::POISON;
use super::draw::{Draw, wide};
use super::extent::Extent;
use super::verdict::{BF16_ERROR, Verdicts};

/// The numbers of rows of the matrix, and their widths: odd sizes, and one like a model's.
pub(crate) const SHAPES: &[(usize, usize)] =
    &[(1, 8), (17, 40), (130, 1032), (50, 264), (512, 4096), (33, 14336)];

pub(crate) fn all(card: &ComputeCard, verdicts: &mut Verdicts, extent: Extent) -> Result<(), CudaError> {
    for (n, k) in extent.of(SHAPES, 3) {
        for n_rows in extent.of(&[1, 7, 8, 2, 5], 2) {
            for form in SKINNY_FORMS {
                skinny(card, verdicts, *form, (*n, *k, *n_rows))?;
            }
        }
        if card.has_few_rows() {
            for n_rows in extent.of(&[7, 33, 128, 1, 2, 8, 9, 16, 17, 32, 64, 65, 127], 3) {
                few_rows(card, verdicts, (*n, *k, *n_rows))?;
            }
            if extent == Extent::Whole {
                company(card, verdicts, (*n, *k))?;
            }
        }
    }
    if card.has_few_rows() && extent == Extent::Whole {
        even(card, verdicts)?;
    }
    Ok(())
}

/// Computes the product of every row of `x` with every row of `w`.
pub(crate) fn product(w: &[Bf16], x: &[Bf16], k: usize) -> Vec<f64> {
    let (w, x) = (wide(w), wide(x));
    let dot = |row: &[f64], of: &[f64]| row.iter().zip(of).map(|(a, b)| a * b).sum::<f64>();
    x.chunks(k).flat_map(|row| w.chunks(k).map(move |of| dot(row, of))).collect()
}

fn few_rows(
    card: &ComputeCard,
    verdicts: &mut Verdicts,
    (n, k, n_rows): (usize, usize, usize),
) -> Result<(), CudaError> {
    let mut draw = Draw::new((3 * n * k + n_rows) as u64);
    let (w, x) = (draw.narrow(n * k, 1.0), draw.narrow(n_rows * k, 1.0));
    let reference = product(&w, &x, k);
    let (w, x) = (card.upload(&w)?, card.upload(&x)?);
    let mut narrow = card.buffer::<Bf16>(n * n_rows)?;
    let mut whole = card.buffer::<f32>(n * n_rows)?;
    for form in FEW_ROWS_FORMS.iter().copied().filter(|form| form.serves(n_rows)) {
        card.fill(narrow.view_mut(), POISON)?;
        card.fill(whole.view_mut(), POISON)?;
        let product = FusedProduct::plain(WeightMatrix::Bf16(w.view()), x.view(), k);
        card.multiply_own(FusedKernel::Few(form), product, Ending::Sums(narrow.view_mut()))?;
        card.multiply_own(FusedKernel::Few(form), product, Ending::Wide(whole.view_mut()))?;
        let name = format!("few_rows {n_rows}x{n}x{k}, {form:?}");
        verdicts.compare(name.clone(), &wide(&card.download(narrow.view())?), &reference, BF16_ERROR);
        let answer: Vec<f64> = card.download(whole.view())?.into_iter().map(f64::from).collect();
        verdicts.compare(format!("{name} in f32"), &answer, &reference, 1e-4);
    }
    Ok(())
}

/// Checks matrices of real sizes, divided evenly, one after the other, repeatedly. The results equal those of
/// clusters except for the order of sums, and have the same bits each time, whichever block finishes last.
fn even(card: &ComputeCard, verdicts: &mut Verdicts) -> Result<(), CudaError> {
    let mut draw = Draw::new(32);
    let shapes = [(4096, 4096), (28_672, 4096), (4096, 14_336), (6144, 4096), (1160, 4160)];
    let matrices: Vec<Buffer<Bf16>> =
        shapes.iter().map(|(n, k)| card.upload(&draw.narrow(n * k, 0.02))).collect::<Result<_, _>>()?;
    for n_rows in [64, 33, 16, 5] {
        let x = card.upload(&draw.narrow(n_rows * 14_336, 1.0))?;
        let mut answers = [FewRowsForm::Clusters { shares: 1 }, FewRowsForm::Even].map(|form| (form, vec![]));
        for (form, found) in &mut answers {
            let n_times = if *form == FewRowsForm::Even { 12 } else { 1 };
            let mut all: Vec<Buffer<f32>> = vec![];
            for nth in 0..n_times * shapes.len() {
                all.push(card.buffer(n_rows * shapes[nth % shapes.len()].0)?);
            }
            let mut graph = card.record(|| {
                all.iter_mut().enumerate().try_for_each(|(nth, y)| {
                    let (w, (_, k)) = (&matrices[nth % shapes.len()], shapes[nth % shapes.len()]);
                    let product =
                        FusedProduct::plain(WeightMatrix::Bf16(w.view()), x.slice(0..n_rows * k), k);
                    card.multiply_own(FusedKernel::Few(*form), product, Ending::Wide(y.view_mut()))
                })
            })?;
            graph.launch()?;
            graph.launch()?;
            for y in &all {
                found.push(card.download(y.view())?);
            }
        }
        let [(_, clusters), (_, even)] = answers;
        for (nth, (n, k)) in shapes.iter().enumerate() {
            let name = format!("few_rows {n_rows}x{n}x{k}, even");
            let wide = |numbers: &Vec<f32>| numbers.iter().copied().map(f64::from).collect::<Vec<_>>();
            verdicts.compare(format!("{name} and clusters"), &wide(&even[nth]), &wide(&clusters[nth]), 3e-5);
            let is_same = even.iter().skip(nth).step_by(shapes.len()).all(|again| *again == even[nth]);
            verdicts.holds(format!("{name}, the same each time"), is_same);
        }
    }
    Ok(())
}

/// Checks that a row's result has the same bits alone and with any other rows.
fn company(card: &ComputeCard, verdicts: &mut Verdicts, (n, k): (usize, usize)) -> Result<(), CudaError> {
    let mut draw = Draw::new(31);
    let w = card.upload(&draw.narrow(n * k, 1.0))?;
    let x = card.upload(&draw.narrow(128 * k, 1.0))?;
    let (form, w) = (FusedKernel::Few(FewRowsForm::of(n, k)), WeightMatrix::Bf16(w.view()));
    let rows = |of: Range<usize>| FusedProduct::plain(w, x.slice(of.start * k..of.end * k), k);
    let mut first_rows = vec![];
    for n_rows in [1, 8, 13, 32, 64, 128] {
        let mut y = card.buffer::<f32>(n_rows * n)?;
        card.multiply_own(form, rows(0..n_rows), Ending::Wide(y.view_mut()))?;
        first_rows.push(card.download(y.slice(0..n))?);
    }
    let is_same = first_rows.iter().all(|row| *row == first_rows[0]);
    verdicts.holds(format!("few_rows {n}x{k}, alone and in company"), is_same);
    let mut all = card.buffer::<f32>(128 * n)?;
    card.multiply_own(form, rows(0..128), Ending::Wide(all.view_mut()))?;
    let mut alone = card.buffer::<f32>(n)?;
    for row in [1, 7, 8, 63, 100, 127] {
        card.multiply_own(form, rows(row..row + 1), Ending::Wide(alone.view_mut()))?;
        let is_same = card.download(alone.view())? == card.download(all.slice(row * n..(row + 1) * n))?;
        verdicts.holds(format!("few_rows {n}x{k}, row {row} of 128 and alone"), is_same);
    }
    Ok(())
}

fn skinny(
    card: &ComputeCard,
    verdicts: &mut Verdicts,
    form: SkinnyForm,
    (n, k, n_rows): (usize, usize, usize),
) -> Result<(), CudaError> {
    let mut draw = Draw::new((n * k + n_rows) as u64);
    let (w, x) = (draw.narrow(n * k, 1.0), draw.narrow(n_rows * k, 1.0));
    let reference = product(&w, &x, k);
    let (w, x) = (card.upload(&w)?, card.upload(&x)?);
    let mut narrow = card.buffer::<Bf16>(n * n_rows)?;
    let mut whole = card.buffer::<f32>(n * n_rows)?;
    card.fill(narrow.view_mut(), POISON)?;
    card.fill(whole.view_mut(), POISON)?;
    let product = FusedProduct::plain(WeightMatrix::Bf16(w.view()), x.view(), k);
    card.multiply_own(FusedKernel::Skinny(form), product, Ending::Sums(narrow.view_mut()))?;
    card.multiply_own(FusedKernel::Skinny(form), product, Ending::Wide(whole.view_mut()))?;
    let name = format!("skinny {} {n_rows}x{n}x{k}", form.name);
    verdicts.compare(name.clone(), &wide(&card.download(narrow.view())?), &reference, BF16_ERROR);
    let answer: Vec<f64> = card.download(whole.view())?.into_iter().map(f64::from).collect();
    verdicts.compare(format!("{name} in f32"), &answer, &reference, 1e-4);
    Ok(())
}
