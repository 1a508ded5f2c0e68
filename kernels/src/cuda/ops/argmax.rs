//! The likeliest token of each row of logits.

use super::{ComputeCard, CudaError, GRID_SIDE_MAX, View, ViewMut, ensure, launch, number, rows_of};
use device::cuda::card::grid;

/// The number of threads of both kernels, as in `argmax.cu`. It is also the maximum number of parts in the
/// final merge.
const THREADS: usize = 256;

impl ComputeCard {
    /// Returns the number of keys in the scratch buffer of [`ComputeCard::argmax`].
    pub fn argmax_keys(&self, n_rows: usize, width: usize) -> usize {
        n_rows * self.argmax_parts(n_rows, width)
    }

    /// Computes `out[row]`, the index of the greatest number of the row; the lowest index if several are
    /// equal. NaN is the greatest.
    ///
    /// `keys` is a scratch buffer of at least [`ComputeCard::argmax_keys`] keys.
    pub fn argmax(
        &self,
        out: ViewMut<'_, u32>,
        keys: ViewMut<'_, u64>,
        logits: View<'_, f32>,
    ) -> Result<(), CudaError> {
        let kernel = "argmax_parts";
        self.check_places(kernel, &[], &[&out, &keys, &logits])?;
        let n_rows = out.len();
        if n_rows == 0 {
            return ensure(kernel, logits.is_empty(), "logits without an output");
        }
        let width = rows_of(kernel, logits.len(), n_rows)?;
        ensure(kernel, width > 0, "empty rows")?;
        ensure(kernel, n_rows <= GRID_SIDE_MAX, "too many rows")?;
        ensure(kernel, keys.len() >= self.argmax_keys(n_rows, width), "too little room for keys")?;
        let n_parts = self.argmax_parts(n_rows, width);
        let part_width = number(kernel, width.div_ceil(n_parts))?;
        let (wide, parts) = (number(kernel, width)?, number(kernel, n_parts)?);
        let config = grid(n_parts, n_rows, THREADS as u32);
        launch!(self, kernel, config, &keys.address(), &logits.address(), &wide, &part_width)?;
        let config = grid(n_rows, 1, THREADS as u32);
        launch!(self, "argmax_rows", config, &out.address(), &keys.address(), &parts)
    }

    /// Returns the number of parts of a row: enough to fill the GPU, with at least a few numbers for each
    /// thread.
    fn argmax_parts(&self, n_rows: usize, width: usize) -> usize {
        let wanted = (4 * self.n_multiprocessors() as usize).div_ceil(n_rows.max(1));
        wanted.min(width.div_ceil(4 * THREADS)).clamp(1, THREADS)
    }
}
