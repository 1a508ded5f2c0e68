//! Weights that are made up where they are needed.

use super::{Bf16, Card, CudaError, ViewMut, launch};
use crate::cuda::card::grid;

const THREADS: u32 = 256;
/// Blocks of threads for each multiprocessor: enough to fill it.
const BLOCKS_AT_ONCE: usize = 8;

impl Card {
    /// Random numbers between plus and minus `32768 * scale`, the same for the same key on every machine: number `i` is
    /// 16 bits of the draw for `key + i`, rounded down to a multiple of four.
    pub fn dummy_weights(&self, out: ViewMut<'_, Bf16>, key: u64, scale: f32) -> Result<(), CudaError> {
        let kernel = "dummy_weights";
        self.check_places(kernel, &[], &[&out])?;
        let n = out.len() as u64;
        if n == 0 {
            return Ok(());
        }
        let config = grid(self.n_multiprocessors() as usize * BLOCKS_AT_ONCE, 1, THREADS);
        launch!(self, kernel, config, &out.address, &n, &key, &scale)
    }
}
