//! Measures the GPU's maximum memory speed, the reference for other kernels.

use super::{Bf16, ComputeCard, CudaError, View, ViewMut, ensure, launch};
use device::cuda::card::grid;

/// The number of threads of a probe's block.
const THREADS: u32 = 512;

impl ComputeCard {
    /// Reads all numbers and does nothing else. `out` is one number, which is hardly ever written.
    pub fn probe_read(&self, out: ViewMut<'_, u32>, from: View<'_, Bf16>) -> Result<(), CudaError> {
        let kernel = "probe_read";
        self.check_places(kernel, &[&from], &[&out])?;
        ensure(
            kernel,
            !out.is_empty() && from.len().is_multiple_of(8),
            "numbers that are not whole vectors",
        )?;
        let n_eights = (from.len() / 8) as u64;
        let config = grid(self.n_multiprocessors() as usize * 4, 1, THREADS);
        launch!(self, kernel, config, &out.address(), &from.address(), &n_eights)
    }

    /// Copies all numbers with ordinary loads and stores.
    pub fn probe_copy(&self, to: ViewMut<'_, Bf16>, from: View<'_, Bf16>) -> Result<(), CudaError> {
        let kernel = "probe_copy";
        self.check_places(kernel, &[&to, &from], &[])?;
        let is_whole = to.len() == from.len() && from.len().is_multiple_of(8);
        ensure(kernel, is_whole, "numbers that are not whole vectors, or different lengths")?;
        let n_eights = (from.len() / 8) as u64;
        let config = grid(self.n_multiprocessors() as usize * 4, 1, THREADS);
        launch!(self, kernel, config, &to.address(), &from.address(), &n_eights)
    }
}
