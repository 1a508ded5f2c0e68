//! An FP8 matrix on the GPU, and its conversion to bf16 for products of many rows.

use super::{Bf16, ComputeCard, CudaError, View, ViewMut, ensure, launch, number, rows_of};
use device::cuda::card::grid;

/// The number of numbers in a group of a row. Numbers are reordered within a group.
const GROUP: usize = 64;
/// The number of blocks of threads for each multiprocessor, and of their threads, in the conversion.
const BLOCKS_AT_ONCE: usize = 8;
const WIDEN_THREADS: u32 = 256;

/// Rows of FP8 weights (e4m3) on the GPU, each with a scale.
///
/// A row is padded with zeroes to whole groups of 64 numbers. Within a group the numbers are in the order of
/// a tensor core's lanes: see [`Self::place`].
#[derive(Clone, Copy, Debug)]
pub struct Fp8Rows<'a> {
    pub numbers: View<'a, u8>,
    pub scales: View<'a, f32>,
}

impl Fp8Rows<'_> {
    /// Returns the bytes of a row of `k` numbers.
    pub fn width(k: usize) -> usize {
        k.next_multiple_of(GROUP)
    }

    /// Returns the index of number `nth` in a row's memory.
    ///
    /// Each of four lanes has 16 bytes of a group, and 4 bytes of every 16 numbers: pair `lane` of the first
    /// eight in bytes 0 and 2, pair `lane` of the second eight in bytes 1 and 3.
    pub fn place(nth: usize) -> usize {
        let (group, sixteen, within) = (nth / GROUP, nth % GROUP / 16, nth % 16);
        let (eight, lane, of_pair) = (within / 8, within % 8 / 2, within % 2);
        group * GROUP + lane * 16 + sixteen * 4 + of_pair * 2 + eight
    }
}

impl ComputeCard {
    /// Writes rows of `k` bf16 numbers: each the FP8 number times its row's scale, rounded to nearest.
    pub fn widen_fp8(&self, out: ViewMut<'_, Bf16>, w: Fp8Rows<'_>, k: usize) -> Result<(), CudaError> {
        let kernel = "widen_fp8";
        self.check_places(kernel, &[&out, &w.numbers], &[&w.scales])?;
        let n = check_rows(kernel, w, k)?;
        ensure(kernel, out.len() == n * k, "an output of another size")?;
        if n == 0 {
            return Ok(());
        }
        let width = Fp8Rows::width(k);
        let n_blocks = (n * width / 16).div_ceil(WIDEN_THREADS as usize);
        let n_blocks = n_blocks.min(self.n_multiprocessors() as usize * BLOCKS_AT_ONCE);
        let (n, k, width) = (number(kernel, n)?, number(kernel, k)?, number(kernel, width)?);
        let (from, scales) = (w.numbers.address(), w.scales.address());
        launch!(
            self,
            kernel,
            grid(n_blocks, 1, WIDEN_THREADS),
            &out.address(),
            &from,
            &scales,
            &n,
            &k,
            &width
        )
    }
}

/// Checks the rows and returns their number.
pub(super) fn check_rows(kernel: &'static str, w: Fp8Rows<'_>, k: usize) -> Result<usize, CudaError> {
    ensure(kernel, k > 0 && k.is_multiple_of(8), "rows whose width is not a multiple of 8")?;
    let n = rows_of(kernel, w.numbers.len(), Fp8Rows::width(k))?;
    ensure(kernel, w.scales.len() == n, "not one scale for each row")?;
    Ok(n)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_has_a_place_and_lanes_hold_pairs_of_both_halves() {
        let mut places: Vec<usize> = (0..192).map(Fp8Rows::place).collect();
        // Lane 1 has numbers 18, 19, 26 and 27 of the numbers 16 to 31.
        let of_lane: Vec<usize> =
            (20..24).map(|place| places.iter().position(|one| *one == place).unwrap()).collect();
        assert_eq!(of_lane, [18, 26, 19, 27]);
        assert!((0..192).all(|nth| places[nth] / 64 == nth / 64));
        places.sort_unstable();
        assert_eq!(places, (0..192).collect::<Vec<_>>());
        assert_eq!((Fp8Rows::width(8), Fp8Rows::width(64), Fp8Rows::width(65)), (64, 64, 128));
    }
}
