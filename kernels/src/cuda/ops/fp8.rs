//! An FP8 matrix on the GPU, its conversion to bf16 for products of many rows, and the rounding of activations
//! to FP8.

use super::{Bf16, ComputeCard, CudaError, View, ViewMut, ensure, launch, number, rows_of};
use crate::cpu::ROUND_GROUP;
use device::cuda::card::{Grid, grid};

/// The number of numbers in a group of a row. Numbers are reordered within a group.
const GROUP: usize = 64;
/// The number of blocks of threads for each multiprocessor, and of their threads, in the conversion.
const BLOCKS_AT_ONCE: usize = 8;
const WIDEN_THREADS: u32 = 256;

/// The number of numbers of a thread, and of threads of a block, in the rounding.
const ROUNDED_AT_ONCE: usize = 8;
const ROUND_THREADS: u32 = 256;
/// The scales of a group are padded to the rows of two tiles, so that a block of threads may read all of its tile.
pub(super) const SCALES_ALIGN: usize = 256;

/// Which weights of an FP8 matrix share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Fp8Scales {
    /// Those of a row.
    OfRows,
    /// Those of 64 rows and 128 columns. The scales of the first 64 rows come first. Checkpoints have blocks of 128
    /// rows; half of that lets matrices that are stacked on the GPU begin at any multiple of 64.
    OfBlocks,
}

impl Fp8Scales {
    /// The rows and the columns of a block.
    pub const BLOCK_ROWS: usize = 64;
    pub const BLOCK_COLUMNS: usize = 128;

    /// Returns the number of scales of a matrix of `n` rows of `k` numbers.
    pub fn count(self, n: usize, k: usize) -> usize {
        match self {
            Self::OfRows => n,
            Self::OfBlocks => n.div_ceil(Self::BLOCK_ROWS) * k.div_ceil(Self::BLOCK_COLUMNS),
        }
    }

    /// Returns whether both halves of a matrix of `n` rows, gate and up, begin with scales of their own.
    pub fn has_halves(self, n: usize) -> bool {
        self == Self::OfRows || (n / 2).is_multiple_of(Self::BLOCK_ROWS)
    }
}

/// Rows of FP8 weights (e4m3) on the GPU, and their scales.
///
/// A row is padded with zeroes to whole groups of 64 numbers. Within a group the numbers are in the order of
/// a tensor core's lanes: see [`Self::place`].
#[derive(Clone, Copy, Debug)]
pub struct Fp8Rows<'a> {
    pub numbers: View<'a, u8>,
    pub scales: View<'a, f32>,
    pub scaling: Fp8Scales,
}

/// Rows of FP8 weights to be written, each with `k` numbers.
#[derive(Debug)]
pub struct Fp8RowsMut<'a> {
    pub numbers: ViewMut<'a, u8>,
    pub scales: ViewMut<'a, f32>,
    pub scaling: Fp8Scales,
    pub k: usize,
}

impl Fp8Rows<'_> {
    /// Returns the number of rows of `k` numbers.
    pub(in crate::cuda) fn n_rows(self, k: usize) -> usize {
        self.numbers.len() / Self::width(k).max(1)
    }

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

    /// Writes numbers to their places, as pairs of bytes. Places without a number get zeroes.
    ///
    /// # Panics
    /// If the pairs are not those of a whole row of these numbers.
    pub fn pack(numbers: &[u8], pairs: &mut [Bf16]) {
        assert_eq!(2 * pairs.len(), Self::width(numbers.len()));
        let (groups, rest) = numbers.as_chunks::<GROUP>();
        let (of_groups, of_rest) = pairs.as_chunks_mut::<{ GROUP / 2 }>();
        for (group, pairs) in groups.iter().zip(&mut *of_groups) {
            pack_group(group, pairs);
        }
        if let [_, ..] = rest {
            let mut group = [0; GROUP];
            group[..rest.len()].copy_from_slice(rest);
            pack_group(&group, &mut of_groups[groups.len()]);
        }
        debug_assert!(of_rest.is_empty());
    }
}

/// Writes the numbers of a group to the places of [`Fp8Rows::place`].
#[inline(always)]
fn pack_group(group: &[u8; GROUP], pairs: &mut [Bf16; GROUP / 2]) {
    for sixteen in 0..4 {
        for nth in 0..8 {
            let pair = [group[sixteen * 16 + nth], group[sixteen * 16 + 8 + nth]];
            pairs[nth / 2 * 8 + sixteen * 2 + nth % 2] = Bf16(u16::from_le_bytes(pair));
        }
    }
}

/// Rows of activations in FP8 (e4m3), in the layout of [`Fp8Rows`]. Each 128 numbers of a row have a scale, a
/// power of two; the scales of all rows for the first 128 numbers come first.
#[derive(Clone, Copy, Debug)]
pub struct QuantizedRows<'a> {
    pub numbers: View<'a, u8>,
    pub scales: View<'a, f32>,
}

/// The fields of the struct of this name in quantize.cuh, in the same order.
#[repr(C)]
pub(super) struct QuantizedShape {
    n_rows: u32,
    k: u32,
    width: u32,
    scales_apart: u32,
}

impl QuantizedShape {
    pub(super) fn of(kernel: &'static str, n_rows: usize, k: usize) -> Result<Self, CudaError> {
        Ok(Self {
            n_rows: number(kernel, n_rows)?,
            k: number(kernel, k)?,
            width: number(kernel, Fp8Rows::width(k))?,
            scales_apart: number(kernel, QuantizedRows::scales_apart(n_rows))?,
        })
    }
}

impl QuantizedRows<'_> {
    /// Returns the distance between the scales of two groups.
    pub fn scales_apart(n_rows: usize) -> usize {
        n_rows.next_multiple_of(SCALES_ALIGN)
    }

    pub fn n_scales(n_rows: usize, k: usize) -> usize {
        Self::scales_apart(n_rows) * k.div_ceil(ROUND_GROUP)
    }
}

impl ComputeCard {
    /// Rounds rows of `k` numbers to FP8, and keeps them in bf16.
    pub fn round_rows(&self, out: ViewMut<'_, Bf16>, x: View<'_, Bf16>, k: usize) -> Result<(), CudaError> {
        let kernel = "round_rows";
        self.check_places(kernel, &[&out, &x], &[])?;
        ensure(kernel, k > 0 && k.is_multiple_of(8), "rows whose width is not a multiple of 8")?;
        ensure(kernel, out.len() == x.len(), "an output whose length differs from the input's")?;
        let n_rows = rows_of(kernel, x.len(), k)?;
        if n_rows == 0 {
            return Ok(());
        }
        let config = self.rounding_grid(n_rows, k);
        let (n_rows, k) = (number(kernel, n_rows)?, number(kernel, k)?);
        launch!(self, kernel, config, &out.address(), &x.address(), &n_rows, &k)
    }

    /// Writes rows of `k` bf16 numbers in FP8, with the rounding of [`round_rows`](Self::round_rows).
    pub fn quantize_rows(
        &self,
        out: ViewMut<'_, u8>,
        scales: ViewMut<'_, f32>,
        x: View<'_, Bf16>,
        k: usize,
    ) -> Result<(), CudaError> {
        let kernel = "quantize_rows";
        self.check_places(kernel, &[&out, &x], &[&scales])?;
        ensure(kernel, self.has(kernel), "a GPU other than Hopper")?;
        ensure(kernel, k > 0 && k.is_multiple_of(8), "rows whose width is not a multiple of 8")?;
        let (n_rows, width) = (rows_of(kernel, x.len(), k)?, Fp8Rows::width(k));
        ensure(kernel, out.len() == n_rows * width, "an output of another size")?;
        ensure(kernel, scales.len() == QuantizedRows::n_scales(n_rows, k), "not one scale for each group")?;
        if n_rows == 0 {
            return Ok(());
        }
        let (config, shape) = (self.rounding_grid(n_rows, k), QuantizedShape::of(kernel, n_rows, k)?);
        launch!(self, kernel, config, &out.address(), &scales.address(), &x.address(), &shape)
    }

    pub(super) fn rounding_grid(&self, n_rows: usize, k: usize) -> Grid {
        let n_threads = n_rows * k.next_multiple_of(ROUND_GROUP) / ROUNDED_AT_ONCE;
        let n_blocks = n_threads.div_ceil(ROUND_THREADS as usize);
        grid(n_blocks.min(self.n_multiprocessors() as usize * BLOCKS_AT_ONCE), 1, ROUND_THREADS)
    }

    /// Writes rows of `k` bf16 numbers: each the FP8 number times its scale, rounded to nearest.
    pub fn widen_fp8(&self, out: ViewMut<'_, Bf16>, w: Fp8Rows<'_>, k: usize) -> Result<(), CudaError> {
        let kernel = match w.scaling {
            Fp8Scales::OfRows => "widen_fp8",
            Fp8Scales::OfBlocks => "widen_fp8_blocks",
        };
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
    ensure(kernel, w.scales.len() == w.scaling.count(n, k), "not one scale for each row or block")?;
    Ok(n)
}

/// Checks that gate and up, the two halves of a matrix of `n` rows, begin with scales of their own.
pub(super) fn check_halves(kernel: &'static str, w: Fp8Rows<'_>, n: usize) -> Result<(), CudaError> {
    ensure(
        kernel,
        w.scaling.has_halves(n),
        "a gate whose width is not a multiple of 64, with scales of blocks",
    )
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

    #[test]
    fn packed_numbers_are_at_their_places() {
        for len in [0, 1, 63, 64, 65, 192, 200] {
            let numbers: Vec<u8> = (1..=len as u8).collect();
            let mut pairs = vec![Bf16(0x0909); Fp8Rows::width(len) / 2];
            Fp8Rows::pack(&numbers, &mut pairs);
            let mut expected = vec![0; Fp8Rows::width(len)];
            numbers.iter().enumerate().for_each(|(nth, number)| expected[Fp8Rows::place(nth)] = *number);
            let bytes: Vec<u8> = pairs.iter().flat_map(|pair| pair.0.to_le_bytes()).collect();
            assert_eq!(bytes, expected, "{len}");
        }
    }
}
