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

/// A part of a larger matrix of `cols` columns: some of its rows and columns. Rows and columns that follow them are zeroes.
/// Columns are multiples of 4.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DummyRows {
    pub cols: usize,
    pub rows: Range<usize>,
    pub columns: Range<usize>,
}

/// The fields of the struct of this name in dummy.cu, in the same order.
#[repr(C)]
struct DummyPart {
    key: u64,
    scale: f32,
    cols: u32,
    n_rows: u32,
    n_real: u32,
    first_row: u32,
    width: u32,
    first_column: u32,
    n_columns: u32,
}

impl DummyPart {
    /// Describes a part in `n_rows` rows of `width` numbers.
    fn of(
        kernel: &'static str,
        part: &DummyRows,
        random: RandomNumbers,
        [n_rows, width]: [usize; 2],
    ) -> Result<Self, CudaError> {
        let DummyRows { cols, rows, columns } = part;
        let fours = [*cols, columns.start, columns.len(), width];
        let are_fours = fours.iter().all(|n| n.is_multiple_of(4)) && width > 0;
        ensure(kernel, are_fours, "numbers that are not multiples of four")?;
        let are_inside = rows.len() <= n_rows && columns.len() <= width && columns.end <= *cols;
        ensure(kernel, are_inside, "more rows or columns than there is room for")?;
        let number = |n| number(kernel, n);
        Ok(Self {
            key: random.key,
            scale: random.scale,
            cols: number(*cols)?,
            n_rows: number(n_rows)?,
            n_real: number(rows.len())?,
            first_row: number(rows.start)?,
            width: number(width)?,
            first_column: number(columns.start)?,
            n_columns: number(columns.len())?,
        })
    }
}

impl ComputeCard {
    /// Writes random numbers between plus and minus `32768 * scale`, the same for the same key on every
    /// machine: number `i` is 16 bits of the draw for `key + i`, rounded down to a multiple of four.
    pub fn dummy_weights(&self, out: ViewMut<'_, Bf16>, key: u64, scale: f32) -> Result<(), CudaError> {
        if out.is_empty() {
            return Ok(());
        }
        let padded = out.len().next_multiple_of(4);
        let all = DummyRows { cols: padded, rows: 0..1, columns: 0..padded };
        self.write_dummy(
            out,
            DummyPart::of("dummy_weights", &all, RandomNumbers { key, scale }, [1, padded])?,
        )
    }

    /// Writes a part of the matrix that [`dummy_weights`](Self::dummy_weights) would write, with `width` numbers in a row.
    pub fn dummy_rows(
        &self,
        out: ViewMut<'_, Bf16>,
        width: usize,
        random: RandomNumbers,
        part: &DummyRows,
    ) -> Result<(), CudaError> {
        let kernel = "dummy_weights";
        let n_rows = rows_of(kernel, out.len(), width)?;
        self.write_dummy(out, DummyPart::of(kernel, part, random, [n_rows, width])?)
    }

    fn write_dummy(&self, out: ViewMut<'_, Bf16>, part: DummyPart) -> Result<(), CudaError> {
        let kernel = "dummy_weights";
        self.check_places(kernel, &[], &[&out])?;
        let n = out.len() as u64;
        if n == 0 {
            return Ok(());
        }
        let config = grid(self.n_multiprocessors() as usize * BLOCKS_AT_ONCE, 1, THREADS);
        launch!(self, kernel, config, &out.address(), &n, &part)
    }

    /// Like [`dummy_rows`](Self::dummy_rows), in FP8. Bytes and scales are those of the CPU, which quantizes whole rows.
    pub fn dummy_fp8(
        &self,
        to: Fp8RowsMut<'_>,
        random: RandomNumbers,
        part: &DummyRows,
    ) -> Result<(), CudaError> {
        let kernel = "dummy_fp8";
        let Fp8RowsMut { numbers: out, scales, scaling, k } = to;
        self.check_places(kernel, &[&out], &[&scales])?;
        let width = Fp8Rows::width(k);
        let n_rows = rows_of(kernel, out.len(), width)?;
        let part = DummyPart::of(kernel, part, random, [n_rows, k])?;
        let part = DummyPart { width: number(kernel, width)?, ..part };
        ensure(kernel, scales.len() == scaling.count(n_rows, k), "not one scale for each row or block")?;
        if n_rows == 0 {
            return Ok(());
        }
        let n_blocks = n_rows.div_ceil(THREADS as usize / 32);
        let config = grid(n_blocks.min(self.n_multiprocessors() as usize * BLOCKS_AT_ONCE), 1, THREADS);
        let has_blocks = u32::from(scaling == Fp8Scales::OfBlocks);
        launch!(self, kernel, config, &out.address(), &scales.address(), &part, &has_blocks)
    }
}
