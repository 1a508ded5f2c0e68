//! Products of many rows with a large matrix on Hopper, bound by arithmetic, with optional work after the
//! product.

use super::{Bf16, ComputeCard, CudaError, View, ViewMut, ensure, launch, number, rows_of};
use crate::cuda::tensor_map::{Matrix, TensorMap};
use device::cuda::card::Grid;

/// The number of blocks of threads in a cluster, which share loads of the matrix, and of their threads, as in
/// `many_rows.cuh`.
pub(super) const CLUSTER: usize = 2;
pub(super) const THREADS: u32 = 384;
/// The tile sizes: rows of x in a block; rows of half a tile of the matrix; columns loaded at once; rows
/// written at once; stages of the ring.
pub(super) const ROWS: usize = 128;
pub(super) const HALF: usize = 128;
const TILE_COLUMNS: usize = 64;
pub(super) const GROUP_ROWS: usize = 64;
const STAGES: usize = 4;

const SUMS: &str = "many_rows";
const ADDED: &str = "many_rows_added";
const GATED: &str = "many_rows_gated";

/// What is done with the sums of a product.
#[derive(Debug)]
pub enum ManyRows<'a> {
    /// The output is a number for each pair of rows.
    Sums(ViewMut<'a, Bf16>),
    /// The sums are rounded to bf16 and added to the existing numbers of the output.
    Added(ViewMut<'a, Bf16>),
    /// The matrix has the rows of gate, then of up: `silu(gate) * up`.
    Gated(ViewMut<'a, Bf16>),
}

/// The distances in a matrix between tiles, and between the halves of a tile, in rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct MatrixTiles {
    pub(super) tile_rows: usize,
    pub(super) half_rows: usize,
}

impl MatrixTiles {
    /// The tiles of a matrix of `n` rows of gate, then of up.
    pub(super) fn gated(n: usize) -> Self {
        Self { tile_rows: HALF, half_rows: n / 2 }
    }

    pub(super) fn plain() -> Self {
        Self { tile_rows: 2 * HALF, half_rows: HALF }
    }
}

/// The fields of ManyShape in many_rows.cu, in the same order. The struct is copied to the GPU as bytes.
#[derive(Clone, Copy)]
#[repr(C)]
struct ManyShape {
    k: u32,
    n_pairs: u32,
    n_columns: u32,
    tile_rows: u32,
    half_rows: u32,
}

impl ComputeCard {
    /// Returns whether this GPU has our kernels for many rows.
    pub fn has_many_rows(&self) -> bool {
        self.has(SUMS)
    }

    /// Computes `x * transpose(w)` for any number of rows of `k` numbers, and the work after it.
    pub fn multiply_many(
        &self,
        w: View<'_, Bf16>,
        x: View<'_, Bf16>,
        k: usize,
        rows: ManyRows<'_>,
    ) -> Result<(), CudaError> {
        let (kernel, y) = match rows {
            ManyRows::Sums(y) => (SUMS, y),
            ManyRows::Added(y) => (ADDED, y),
            ManyRows::Gated(y) => (GATED, y),
        };
        ensure(kernel, self.has(kernel), "a GPU other than Hopper")?;
        ensure(kernel, k.is_multiple_of(8), "rows whose width is not a multiple of 8")?;
        self.check_places(kernel, &[&w, &x, &y], &[])?;
        let (n, n_rows) = (rows_of(kernel, w.len(), k)?, rows_of(kernel, x.len(), k)?);
        let (width, MatrixTiles { tile_rows, half_rows }) =
            if kernel == GATED { (n / 2, MatrixTiles::gated(n)) } else { (n, MatrixTiles::plain()) };
        ensure(
            kernel,
            n.is_multiple_of(2) && width.is_multiple_of(8),
            "an output whose width is not a multiple of 8",
        )?;
        ensure(kernel, y.len() == width * n_rows, "an output of the wrong size")?;
        if n == 0 || n_rows == 0 {
            return Ok(());
        }
        let (n_pairs, n_columns) = (n_rows.div_ceil(CLUSTER * ROWS), width.div_ceil(tile_rows));
        let shape = ManyShape {
            k: number(kernel, k)?,
            n_pairs: number(kernel, n_pairs)?,
            n_columns: number(kernel, n_columns)?,
            tile_rows: number(kernel, tile_rows)?,
            half_rows: number(kernel, half_rows)?,
        };
        let matrix = |address, n_rows, width| Matrix { address, n_rows, n_columns: width, stride: width };
        let of_y = TensorMap::of(matrix(y.address(), n_rows, width), GROUP_ROWS)?;
        let of_w = TensorMap::of(matrix(w.address(), n, k), HALF)?;
        let of_x = TensorMap::of(matrix(x.address(), n_rows, k), ROWS)?;
        let n_clusters = (self.n_multiprocessors() as usize / CLUSTER).min(n_pairs * n_columns).max(1);
        let config = Grid::of((n_clusters * CLUSTER, 1, 1), THREADS, SHARED_BYTES);
        launch!(self, kernel, config, CLUSTER, &of_y, &of_w, &of_x, &shape)
    }
}

/// The bytes of the ring and of the output buffer, with padding to align them to 1,024 bytes.
pub(super) const SHARED_BYTES: u32 = {
    let ring = STAGES * (ROWS + 2 * HALF) * TILE_COLUMNS;
    ((ring + ROWS * HALF) * size_of::<Bf16>() + 1024) as u32
};

/// Returns the dynamic shared memory of a kernel in this file.
pub(in crate::cuda) fn shared_bytes_of(kernel: &str) -> Option<u32> {
    [SUMS, ADDED, GATED].contains(&kernel).then_some(SHARED_BYTES)
}
