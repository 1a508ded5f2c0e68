//! Generated weights, computed on the GPU.

use std::ops::Range;

use super::{
    Bf16, ComputeCard, CudaError, Fp8Rows, Fp8RowsMut, Fp8Scales, ViewMut, ensure, launch, number, rows_of,
};
use crate::cpu::random::RandomNumbers;
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

/// A part of a larger matrix of `cols` columns: some of its rows and columns. Rows and columns that follow them are zeroes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DummyRows {
    pub cols: usize,
    pub rows: Range<usize>,
    pub columns: Range<usize>,
}

/// The fields of the struct of this name in dummy.cu, in the same order.
#[repr(C)]
struct DummyFp8 {
    key: u64,
    scale: f32,
    cols: u32,
    n_rows: u32,
    n_real: u32,
    first_row: u32,
    width: u32,
    first_column: u32,
    n_columns: u32,
    has_blocks: u32,
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

    /// Writes a part of the matrix that [`dummy_weights`](Self::dummy_weights) would write, in FP8. Bytes and scales are
    /// those of the CPU, which quantizes whole rows.
    pub fn dummy_fp8(
        &self,
        to: Fp8RowsMut<'_>,
        random: RandomNumbers,
        part: &DummyRows,
    ) -> Result<(), CudaError> {
        let kernel = "dummy_fp8";
        let Fp8RowsMut { numbers: out, scales, scaling, k } = to;
        self.check_places(kernel, &[&out], &[&scales])?;
        let DummyRows { cols, rows, columns } = part;
        let are_fours = [*cols, columns.start, columns.len()].iter().all(|n| n.is_multiple_of(4));
        ensure(kernel, are_fours && k > 0, "numbers that are not multiples of four")?;
        let (n_rows, width) = (rows_of(kernel, out.len(), Fp8Rows::width(k))?, Fp8Rows::width(k));
        let are_inside = rows.len() <= n_rows && columns.len() <= k && columns.end <= *cols;
        ensure(kernel, are_inside, "more rows or columns than there is room for")?;
        ensure(kernel, scales.len() == scaling.count(n_rows, k), "not one scale for each row or block")?;
        if n_rows == 0 {
            return Ok(());
        }
        let n_blocks = n_rows.div_ceil(THREADS as usize / 32);
        let config = grid(n_blocks.min(self.n_multiprocessors() as usize * BLOCKS_AT_ONCE), 1, THREADS);
        let number = |n| number(kernel, n);
        let part = DummyFp8 {
            key: random.key,
            scale: random.scale,
            cols: number(*cols)?,
            n_rows: number(n_rows)?,
            n_real: number(rows.len())?,
            first_row: number(rows.start)?,
            width: number(width)?,
            first_column: number(columns.start)?,
            n_columns: number(columns.len())?,
            has_blocks: u32::from(scaling == Fp8Scales::OfBlocks),
        };
        launch!(self, kernel, config, &out.address(), &scales.address(), &part)
    }
}
