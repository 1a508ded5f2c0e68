//! Products of many rows with a large matrix on Hopper, whose time is that of multiplying, and what may come after.

use super::{Bf16, ComputeCard, CudaError, View, ViewMut, ensure, launch, number, rows_of};
use crate::cuda::tensor_map::{Matrix, TensorMap};
use device::cuda::card::Grid;

/// Blocks of threads that share what they read of the matrix, and their threads, as in `many_rows.cu`.
const CLUSTER: usize = 2;
const THREADS: u32 = 384;
/// Rows of x of a block; half of the matrix's of a tile; columns that are brought at once; rows that leave at once; tiles that
/// are there at once.
const ROWS: usize = 128;
const HALF: usize = 128;
const TILE_COLUMNS: usize = 64;
const GROUP_ROWS: usize = 64;
const STAGES: usize = 4;

const SUMS: &str = "many_rows";
const ADDED: &str = "many_rows_added";
const GATED: &str = "many_rows_gated";

/// What becomes of the sums.
#[derive(Debug)]
pub enum ManyRows<'a> {
    /// A number for each pair of rows.
    Sums(ViewMut<'a, Bf16>),
    /// The same, rounded to bf16 and added to what is there.
    Added(ViewMut<'a, Bf16>),
    /// The matrix is rows of a gate and then as many of what it lets through: `silu(gate) * up`.
    Gated(ViewMut<'a, Bf16>),
}

/// The fields of ManyShape in many_rows.cu, in their order: it is copied as bytes.
#[derive(Clone, Copy)]
#[repr(C)]
struct Shape {
    k: u32,
    n_pairs: u32,
    n_columns: u32,
    tile_rows: u32,
    half_rows: u32,
}

impl ComputeCard {
    /// Whether this card multiplies many rows by a kernel of our own.
    pub fn has_many_rows(&self) -> bool {
        self.has(SUMS)
    }

    /// `x * transpose(w)` of rows of `k` numbers, as many as there are, and what becomes of it.
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
        ensure(kernel, self.has(kernel), "a card that is not of Hopper's kind")?;
        ensure(kernel, k.is_multiple_of(8), "rows that are not a multiple of 8 wide")?;
        self.check_places(kernel, &[&w, &x, &y], &[])?;
        let (n, n_rows) = (rows_of(kernel, w.len(), k)?, rows_of(kernel, x.len(), k)?);
        // How wide y is, and how far tiles and halves of tiles are apart in w.
        let (width, tile_rows, half_rows) =
            if kernel == GATED { (n / 2, HALF, n / 2) } else { (n, 2 * HALF, HALF) };
        ensure(kernel, n.is_multiple_of(2) && width.is_multiple_of(8), "an output not a multiple of 8 wide")?;
        ensure(kernel, y.len() == width * n_rows, "an output that is not rows by rows")?;
        if n == 0 || n_rows == 0 {
            return Ok(());
        }
        let (n_pairs, n_columns) = (n_rows.div_ceil(CLUSTER * ROWS), width.div_ceil(tile_rows));
        let shape = Shape {
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

/// The ring, what leaves, and what it takes to begin on an edge of 1,024 bytes.
const SHARED_BYTES: u32 = {
    let ring = STAGES * (ROWS + 2 * HALF) * TILE_COLUMNS;
    ((ring + ROWS * HALF) * size_of::<Bf16>() + 1024) as u32
};

/// Shared memory that a kernel of this file asks for.
pub(in crate::cuda) fn shared_bytes_of(kernel: &str) -> Option<u32> {
    [SUMS, ADDED, GATED].contains(&kernel).then_some(SHARED_BYTES)
}
