//! Operations on single rows: embedding, norms, the gate.

use super::{Bf16, ComputeCard, CudaError, GRID_SIDE_MAX, View, ViewMut, ensure, launch, number, rows_of};
use device::cuda::card::grid;

/// The number of threads for a row in the norm, as in `norm.cu`.
const NORM_THREADS: u32 = 256;
/// The widest row that a block of threads can keep in registers, as in `norm.cu`.
const NORM_WIDTH_MAX: usize = 16_384;

/// The residual to which rows are added; `out` receives the norm of the sum.
#[derive(Debug)]
pub struct NormedRows<'a> {
    pub residual: ViewMut<'a, Bf16>,
    pub out: ViewMut<'a, Bf16>,
    pub weight: View<'a, Bf16>,
    pub epsilon: f32,
}

impl ComputeCard {
    /// Computes `out[row] = table[tokens[row]]`. An invalid token gives a row of NaN.
    pub fn embedding(
        &self,
        out: ViewMut<'_, Bf16>,
        table: View<'_, Bf16>,
        tokens: View<'_, u32>,
    ) -> Result<(), CudaError> {
        let kernel = "embedding";
        self.check_places(kernel, &[&out, &table], &[&tokens])?;
        if tokens.is_empty() {
            return Ok(());
        }
        let width = rows_of(kernel, out.len(), tokens.len())?;
        ensure(kernel, width.is_multiple_of(8), "rows whose width is not a multiple of 8")?;
        let n_tokens = rows_of(kernel, table.len(), width)?;
        let (width, n_tokens) = (number(kernel, width)?, number(kernel, n_tokens)?);
        let config = grid(tokens.len(), 1, 128);
        launch!(self, kernel, config, &out.address(), &table.address(), &tokens.address(), &width, &n_tokens)
    }

    /// Computes `out = norm(x) * weight`, row by row.
    pub fn rms_norm(
        &self,
        out: ViewMut<'_, Bf16>,
        x: View<'_, Bf16>,
        weight: View<'_, Bf16>,
        epsilon: f32,
    ) -> Result<(), CudaError> {
        let kernel = "rms_norm";
        self.check_places(kernel, &[&out, &x, &weight], &[])?;
        ensure(kernel, out.len() == x.len(), "an output whose length differs from the input's")?;
        let n_rows = check_norm(kernel, x.len(), weight.len())?;
        let width = number(kernel, weight.len())?;
        if n_rows == 0 {
            return Ok(());
        }
        let config = grid(n_rows, 1, NORM_THREADS);
        launch!(self, kernel, config, &out.address(), &x.address(), &weight.address(), &width, &epsilon)
    }

    /// Computes `residual += x`, then `out = norm(residual) * weight`, row by row.
    pub fn add_rms_norm(
        &self,
        out: ViewMut<'_, Bf16>,
        residual: ViewMut<'_, Bf16>,
        x: View<'_, Bf16>,
        weight: View<'_, Bf16>,
        epsilon: f32,
    ) -> Result<(), CudaError> {
        let kernel = "add_rms_norm";
        self.check_places(kernel, &[&out, &residual, &x, &weight], &[])?;
        let are_alike = out.len() == x.len() && residual.len() == x.len();
        ensure(kernel, are_alike, "output, residual and input of different lengths")?;
        let n_rows = check_norm(kernel, x.len(), weight.len())?;
        let width = number(kernel, weight.len())?;
        if n_rows == 0 {
            return Ok(());
        }
        let config = grid(n_rows, 1, NORM_THREADS);
        launch!(
            self,
            kernel,
            config,
            &out.address(),
            &residual.address(),
            &x.address(),
            &weight.address(),
            &width,
            &epsilon
        )
    }

    /// Computes `out = silu(gate) * up`, where each row of `gate_up` is gate, then up, of `width` numbers
    /// each.
    pub fn silu_mul(
        &self,
        out: ViewMut<'_, Bf16>,
        gate_up: View<'_, Bf16>,
        width: usize,
    ) -> Result<(), CudaError> {
        let kernel = "silu_mul";
        self.check_places(kernel, &[&out, &gate_up], &[])?;
        ensure(kernel, width.is_multiple_of(8), "rows whose width is not a multiple of 8")?;
        let n_rows = rows_of(kernel, out.len(), width)?;
        ensure(kernel, gate_up.len() == 2 * out.len(), "an input that is not twice the output")?;
        ensure(kernel, n_rows <= GRID_SIDE_MAX, "too many rows")?;
        if n_rows == 0 {
            return Ok(());
        }
        let (config, width) = (grid(width.div_ceil(8 * 256), n_rows, 256), number(kernel, width)?);
        launch!(self, kernel, config, &out.address(), &gate_up.address(), &width)
    }
}

pub(super) fn check_norm(kernel: &'static str, len: usize, width: usize) -> Result<usize, CudaError> {
    ensure(kernel, width.is_multiple_of(8), "rows whose width is not a multiple of 8")?;
    ensure(kernel, width <= NORM_WIDTH_MAX, "rows wider than 16,384")?;
    rows_of(kernel, len, width)
}
