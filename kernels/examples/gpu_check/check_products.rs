//! Products of few rows with a matrix: against sums in f64.

use baton_kernels::cuda::{Bf16, Card, CudaError, SKINNY_FORMS, SkinnyForm};

use super::check_rows::POISON;
use super::draw::{Draw, wide};
use super::verdict::{BF16_ERROR, Verdicts};

/// Rows of the matrix, and their width: odd ones, and one like a model's.
const SHAPES: &[(usize, usize)] = &[(1, 8), (17, 40), (50, 264), (130, 1032), (512, 4096), (33, 14336)];

pub(crate) fn all(card: &Card, verdicts: &mut Verdicts) -> Result<(), CudaError> {
    for (n, k) in SHAPES {
        for n_rows in [1, 2, 5, 7, 8] {
            for form in SKINNY_FORMS {
                skinny(card, verdicts, *form, (*n, *k, n_rows))?;
            }
        }
    }
    Ok(())
}

fn skinny(
    card: &Card,
    verdicts: &mut Verdicts,
    form: SkinnyForm,
    (n, k, n_rows): (usize, usize, usize),
) -> Result<(), CudaError> {
    let mut draw = Draw::new((n * k + n_rows) as u64);
    let (w, x) = (draw.narrow(n * k, 1.0), draw.narrow(n_rows * k, 1.0));
    let (w_wide, x_wide) = (wide(&w), wide(&x));
    let dot = |row: &[f64], of: &[f64]| row.iter().zip(of).map(|(a, b)| a * b).sum::<f64>();
    let reference: Vec<f64> =
        x_wide.chunks(k).flat_map(|row| w_wide.chunks(k).map(move |of| dot(row, of))).collect();
    let (w, x) = (card.upload(&w)?, card.upload(&x)?);
    let mut narrow = card.buffer::<Bf16>(n * n_rows)?;
    let mut whole = card.buffer::<f32>(n * n_rows)?;
    card.fill(narrow.view_mut(), POISON)?;
    card.fill(whole.view_mut(), POISON)?;
    card.skinny(form, narrow.view_mut(), w.view(), x.view(), k)?;
    card.skinny_wide(form, whole.view_mut(), w.view(), x.view(), k)?;
    let name = format!("skinny {} {n_rows}x{n}x{k}", form.name);
    verdicts.compare(name.clone(), &wide(&card.download(narrow.view())?), &reference, BF16_ERROR);
    let answer: Vec<f64> = card.download(whole.view())?.into_iter().map(f64::from).collect();
    verdicts.compare(format!("{name} in f32"), &answer, &reference, 1e-4);
    Ok(())
}
