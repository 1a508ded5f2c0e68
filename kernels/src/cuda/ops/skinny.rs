//! Products of few rows with a large matrix, which take the time to read the matrix.

use super::{Bf16, Card, CudaError, View, ViewMut, ensure, launch, number, rows_of};
use crate::cuda::card::grid;

/// The most rows that one pass over the matrix serves.
pub const SKINNY_ROWS_MAX: usize = 8;

/// One way of dividing the work; which is fastest depends on the matrix and the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SkinnyForm {
    /// As in the kernel's name: warps, groups of 16 rows of the matrix, loads in flight.
    pub name: &'static str,
    narrow: &'static str,
    wide: &'static str,
    threads: u32,
    rows_at_once: usize,
}

macro_rules! form {
    ($name:literal, $warps:literal, $groups:literal) => {
        SkinnyForm {
            name: $name,
            narrow: concat!("skinny_", $name),
            wide: concat!("skinny_wide_", $name),
            threads: $warps * 32,
            rows_at_once: $groups * 16,
        }
    };
}

/// Every form that there is; the first does well for most matrices (`docs/measurements`).
pub const SKINNY_FORMS: &[SkinnyForm] =
    &[form!("16x1x2", 16, 1), form!("8x1x4", 8, 1), form!("4x1x4", 4, 1), form!("8x1x2", 8, 1)];

impl Card {
    /// `y = x * transpose(w)`: `x` is up to 8 rows of `k`, `w` is rows of `k`, `y` has a number for each pair of rows.
    pub fn skinny(
        &self,
        form: SkinnyForm,
        y: ViewMut<'_, Bf16>,
        w: View<'_, Bf16>,
        x: View<'_, Bf16>,
        k: usize,
    ) -> Result<(), CudaError> {
        self.check_places(form.narrow, &[&y, &w, &x], &[])?;
        let (n, n_rows) = check(form.narrow, y.len(), w.len(), x.len(), k)?;
        self.launch_skinny(form.narrow, form, y.address, (w, x), (n, k, n_rows))
    }

    /// The same, with an answer in f32: for logits, which are compared with one another.
    pub fn skinny_wide(
        &self,
        form: SkinnyForm,
        y: ViewMut<'_, f32>,
        w: View<'_, Bf16>,
        x: View<'_, Bf16>,
        k: usize,
    ) -> Result<(), CudaError> {
        self.check_places(form.wide, &[&y, &w, &x], &[])?;
        let (n, n_rows) = check(form.wide, y.len(), w.len(), x.len(), k)?;
        self.launch_skinny(form.wide, form, y.address, (w, x), (n, k, n_rows))
    }

    fn launch_skinny(
        &self,
        kernel: &'static str,
        form: SkinnyForm,
        y: u64,
        (w, x): (View<'_, Bf16>, View<'_, Bf16>),
        (n, k, n_rows): (usize, usize, usize),
    ) -> Result<(), CudaError> {
        if n == 0 || n_rows == 0 {
            return Ok(());
        }
        let config = grid(n.div_ceil(form.rows_at_once), 1, form.threads);
        let (n, k, n_rows) = (number(kernel, n)?, number(kernel, k)?, number(kernel, n_rows)?);
        launch!(self, kernel, config, &y, &w.address, &x.address, &n, &k, &n_rows)
    }
}

/// Rows of the matrix, and rows of `x`.
fn check(kernel: &'static str, y: usize, w: usize, x: usize, k: usize) -> Result<(usize, usize), CudaError> {
    ensure(kernel, k.is_multiple_of(8), "rows that are not a multiple of 8 wide")?;
    let (n, n_rows) = (rows_of(kernel, w, k)?, rows_of(kernel, x, k)?);
    ensure(kernel, n_rows <= SKINNY_ROWS_MAX, "more than 8 rows")?;
    ensure(kernel, y == n * n_rows, "an output that is not rows by rows")?;
    Ok((n, n_rows))
}
