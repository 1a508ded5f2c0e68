//! Biases of products.

use super::{Bf16, ComputeCard, CudaError, GRID_SIDE_MAX, View, ViewMut, ensure, launch, number, rows_of};
use device::cuda::card::grid;

const THREADS: usize = 256;

impl ComputeCard {
    /// Computes `x[row] += bias`, for every row.
    pub fn add_bias(&self, x: ViewMut<'_, Bf16>, bias: View<'_, Bf16>) -> Result<(), CudaError> {
        let kernel = "add_bias";
        self.check_places(kernel, &[&x, &bias], &[])?;
        ensure(kernel, bias.len().is_multiple_of(8), "rows whose width is not a multiple of 8")?;
        let n_rows = rows_of(kernel, x.len(), bias.len())?;
        ensure(kernel, n_rows <= GRID_SIDE_MAX, "too many rows")?;
        if n_rows == 0 {
            return Ok(());
        }
        let config = grid(bias.len().div_ceil(8 * THREADS), n_rows, THREADS as u32);
        let width = number(kernel, bias.len())?;
        launch!(self, kernel, config, &x.address(), &bias.address(), &width)
    }
}
