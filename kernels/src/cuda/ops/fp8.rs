//! Products of rows with a matrix in FP8: of few rows directly, of many by widening it first.

use super::few_rows::{FEW_ROWS_MAX, FEW_ROWS_SHARES, FewRowsForm};
use super::{Bf16, Card, CudaError, GRID_SIDE_MAX, View, ViewMut, ensure, launch, number, rows_of};
use crate::cuda::card::{Grid, grid};
use crate::cuda::tensor_map::{Matrix, TensorMap};

/// Numbers of a row that lie in an order of their own.
const GROUP: usize = 64;
/// Rows of the matrix for a block of threads, and its threads, as in `few_rows_fp8.cu`.
const W_ROWS: usize = 128;
const THREADS: u32 = 288;
/// Numbers of a row that are brought at once: two groups.
const STEP_COLUMNS: usize = 2 * GROUP;
/// Blocks of threads for each multiprocessor, and their threads, of what widens.
const BLOCKS_AT_ONCE: usize = 8;
const WIDEN_THREADS: u32 = 256;

/// Rows of weights in FP8 (e4m3) on the card, each with a scale.
///
/// A row is filled up with zeroes to whole groups of 64 numbers, and within a group the numbers lie as the lanes of a
/// tensor core's product hold them: [`Self::place`] says where.
#[derive(Clone, Copy, Debug)]
pub struct Fp8Rows<'a> {
    pub numbers: View<'a, u8>,
    pub scales: View<'a, f32>,
}

impl Fp8Rows<'_> {
    /// Bytes of a row of `k` numbers.
    pub fn width(k: usize) -> usize {
        k.next_multiple_of(GROUP)
    }

    /// Where number `nth` of a row lies in it.
    ///
    /// Four lanes have 16 bytes of a group each, and 4 bytes of each 16 numbers: pair `lane` of the first eight in bytes 0
    /// and 2, pair `lane` of the second eight in bytes 1 and 3.
    pub fn place(nth: usize) -> usize {
        let (group, sixteen, within) = (nth / GROUP, nth % GROUP / 16, nth % 16);
        let (eight, lane, of_pair) = (within / 8, within % 8 / 2, within % 2);
        group * GROUP + lane * 16 + sixteen * 4 + of_pair * 2 + eight
    }
}

/// A kernel, for so many rows at most.
struct Size {
    rows_max: usize,
    stages: usize,
    name: &'static str,
}

macro_rules! size {
    ($rows:literal, $stages:literal) => {
        Size { rows_max: $rows, stages: $stages, name: concat!("few_rows_fp8_", $rows) }
    };
}

/// As in `few_rows_fp8.cu`.
const SIZES: &[Size] = &[size!(8, 6), size!(16, 5), size!(32, 4), size!(64, 3), size!(128, 4)];

/// The fields of FewRowsShape in few_rows_fp8.cu, in their order: it is copied as bytes.
#[derive(Clone, Copy)]
#[repr(C)]
struct Shape {
    n: u32,
    k: u32,
    n_rows: u32,
}

impl Card {
    /// `y = x * transpose(w)`, as [`Card::few_rows`] does it: on Hopper, for up to 128 rows. A row's answer depends on
    /// `form.shares` and on nothing else.
    pub fn few_rows_fp8(
        &self,
        form: FewRowsForm,
        y: ViewMut<'_, Bf16>,
        w: Fp8Rows<'_>,
        x: View<'_, Bf16>,
        k: usize,
    ) -> Result<(), CudaError> {
        let kernel = SIZES[0].name;
        self.check_places(kernel, &[&y, &w.numbers, &x], &[&w.scales])?;
        ensure(kernel, FEW_ROWS_SHARES.contains(&form.shares), "shares that are not 1, 2, 4 or 8")?;
        let n = check_rows(kernel, w, k)?;
        let n_rows = rows_of(kernel, x.len(), k)?;
        ensure(kernel, n_rows <= FEW_ROWS_MAX, "more than 128 rows")?;
        ensure(kernel, y.len() == n * n_rows, "an output that is not rows by rows")?;
        ensure(kernel, n.div_ceil(W_ROWS) <= GRID_SIDE_MAX, "too many rows of the matrix")?;
        let size = SIZES.iter().find(|size| size.rows_max >= n_rows).expect("the rows were just counted");
        let kernel = size.name;
        ensure(kernel, self.has(kernel), "a card that is not of Hopper's kind")?;
        if n == 0 || n_rows == 0 {
            return Ok(());
        }
        let of_w = TensorMap::of_bytes(w.numbers.address, n, Fp8Rows::width(k), (GROUP, W_ROWS))?;
        let of_x = Matrix { address: x.address, n_rows, n_columns: k, stride: k };
        let of_x = TensorMap::of(of_x, size.rows_max)?;
        let blocks = (form.shares, n.div_ceil(W_ROWS), 1);
        let config = Grid { blocks, threads: THREADS, shared_bytes: shared_bytes(size) };
        let shape = Shape { n: number(kernel, n)?, k: number(kernel, k)?, n_rows: number(kernel, n_rows)? };
        launch!(self, kernel, config, form.shares, &y.address, &w.scales.address, &of_w, &of_x, &shape)
    }

    /// Rows of `k` numbers of bf16: each the nearest to the number in FP8 times its scale.
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
        let (from, scales) = (w.numbers.address, w.scales.address);
        launch!(self, kernel, grid(n_blocks, 1, WIDEN_THREADS), &out.address, &from, &scales, &n, &k, &width)
    }
}

/// How many there are.
fn check_rows(kernel: &'static str, w: Fp8Rows<'_>, k: usize) -> Result<usize, CudaError> {
    ensure(kernel, k > 0 && k.is_multiple_of(8), "rows that are not a multiple of 8 wide")?;
    let n = rows_of(kernel, w.numbers.len(), Fp8Rows::width(k))?;
    ensure(kernel, w.scales.len() == n, "not one scale for each row")?;
    Ok(n)
}

/// A ring of tiles, and what it takes to begin on an edge of 1,024 bytes.
fn shared_bytes(size: &Size) -> u32 {
    let ring = size.stages * STEP_COLUMNS * (W_ROWS + size.rows_max * size_of::<Bf16>());
    (ring + 1024) as u32
}

/// Shared memory that a kernel of this file asks for.
pub(in crate::cuda) fn shared_bytes_of(kernel: &str) -> Option<u32> {
    SIZES.iter().find(|size| size.name == kernel).map(shared_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_has_a_place_and_lanes_hold_pairs_of_both_halves() {
        let mut places: Vec<usize> = (0..192).map(Fp8Rows::place).collect();
        // Of numbers 16 to 31, lane 1 has 18, 19, 26 and 27.
        let of_lane: Vec<usize> =
            (20..24).map(|place| places.iter().position(|one| *one == place).unwrap()).collect();
        assert_eq!(of_lane, [18, 26, 19, 27]);
        assert!((0..192).all(|nth| places[nth] / 64 == nth / 64));
        places.sort_unstable();
        assert_eq!(places, (0..192).collect::<Vec<_>>());
        assert_eq!((Fp8Rows::width(8), Fp8Rows::width(64), Fp8Rows::width(65)), (64, 64, 128));
    }
}
