//! Generated weights, computed on the GPU.

use super::{Bf16, ComputeCard, CudaError, ViewMut, ensure, launch};
use device::cuda::card::grid;

const THREADS: u32 = 256;
/// The number of blocks of threads for each multiprocessor: enough to fill it.
const BLOCKS_AT_ONCE: usize = 8;

/// A part of a larger matrix, in rows of `width` numbers. A row starts with `n_real` numbers of the matrix
/// and is filled with zeroes. The first row starts at number `first`, and each next row `stride` further.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DummyPart {
    pub first: usize,
    pub width: usize,
    pub n_real: usize,
    pub stride: usize,
}

impl ComputeCard {
    /// Writes random numbers between plus and minus `32768 * scale`, the same for the same key on every
    /// machine: number `i` is 16 bits of the draw for `key + i`, rounded down to a multiple of four.
    pub fn dummy_weights(&self, out: ViewMut<'_, Bf16>, key: u64, scale: f32) -> Result<(), CudaError> {
        let n = out.len();
        let padded = n.next_multiple_of(4);
        self.dummy_part(
            out,
            key,
            scale,
            DummyPart { first: 0, width: padded, n_real: padded, stride: padded },
        )
    }

    /// Writes a part of the matrix that [`dummy_weights`](Self::dummy_weights) would write. All fields of
    /// `part` are multiples of 4.
    pub fn dummy_part(
        &self,
        out: ViewMut<'_, Bf16>,
        key: u64,
        scale: f32,
        part: DummyPart,
    ) -> Result<(), CudaError> {
        let kernel = "dummy_weights";
        self.check_places(kernel, &[], &[&out])?;
        let DummyPart { first, width, n_real, stride } = part;
        let are_fours = [first, width, n_real, stride].iter().all(|n| n.is_multiple_of(4));
        ensure(kernel, are_fours && (width > 0 || out.is_empty()), "numbers that are not multiples of four")?;
        let n = out.len() as u64;
        if n == 0 {
            return Ok(());
        }
        let [first, width, n_real, stride] = [first, width, n_real, stride].map(|n| n as u64);
        let config = grid(self.n_multiprocessors() as usize * BLOCKS_AT_ONCE, 1, THREADS);
        launch!(self, kernel, config, &out.address(), &n, &key, &scale, &first, &width, &n_real, &stride)
    }
}
