//! Products of up to 128 rows with a large matrix on Hopper, whose time is mostly that of reading the matrix.

use super::endings::{Checked, Ending, KernelNames, OwnForm, OwnProduct, Weights, kernel_names};
use super::{Bf16, Card, CudaError, Fp8Rows, GRID_SIDE_MAX, ensure, launch};
use crate::cuda::card::Grid;
use crate::cuda::tensor_map::{Matrix, TensorMap};

/// The most rows that one pass over the matrix serves.
pub const FEW_ROWS_MAX: usize = 128;
/// Blocks of threads that may share a pass along `k`: a cluster.
pub const FEW_ROWS_SHARES: &[usize] = &[1, 2, 4, 8];

/// How the work is divided. A row's answer depends on `shares` and on nothing else: it is the same in any company.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FewRowsForm {
    /// Blocks of threads that share a pass along `k`: one of [`FEW_ROWS_SHARES`].
    pub shares: usize,
}

impl FewRowsForm {
    /// A good form for a matrix: as few shares as give nearly every multiprocessor a block of threads.
    ///
    /// It depends on the matrix alone: not on the number of rows, and not on how many multiprocessors this card has.
    pub fn of(n: usize, k: usize) -> Self {
        let is_enough = |shares: &&usize| n.div_ceil(W_ROWS) * **shares >= BLOCKS_ENOUGH;
        let mut useful = FEW_ROWS_SHARES.iter().filter(|shares| k >= **shares * 4 * TILE_COLUMNS);
        let shares = useful.clone().find(is_enough).or_else(|| useful.next_back()).copied().unwrap_or(1);
        Self { shares }
    }
}

/// Blocks of threads that keep a card of Hopper's kind busy: nine in ten of an H200's multiprocessors.
const BLOCKS_ENOUGH: usize = 118;
/// Rows of the matrix for a cluster, and the threads of each of its blocks, as in `few_rows.cuh`. The copy engine brings
/// the rows in halves, which may lie apart.
pub(super) const UNIT: usize = 64;
const W_ROWS: usize = 2 * UNIT;
const THREADS: u32 = 288;
/// Numbers of a row that are brought at once: a tile, or two of 8 bits.
const TILE_COLUMNS: usize = 64;
const STEP_COLUMNS: usize = 2 * TILE_COLUMNS;

/// A kernel for so many rows at most.
struct Size {
    rows_max: usize,
    stages: usize,
    names: KernelNames,
}

macro_rules! size {
    ($family:literal, $rows:literal, $stages:literal) => {
        Size { rows_max: $rows, stages: $stages, names: kernel_names!($family, $rows) }
    };
}

/// As in `few_rows.cu`.
const SIZES: &[Size] = &[
    size!("few_rows", 8, 6),
    size!("few_rows", 16, 6),
    size!("few_rows", 32, 5),
    size!("few_rows", 64, 4),
    size!("few_rows", 128, 3),
];
/// As in `few_rows_fp8.cu`, of which none answers in f32.
const SIZES_FP8: &[Size] = &[
    size!("few_rows_fp8", 8, 6),
    size!("few_rows_fp8", 16, 5),
    size!("few_rows_fp8", 32, 4),
    size!("few_rows_fp8", 64, 3),
    size!("few_rows_fp8", 128, 4),
];

impl Card {
    /// Whether this card multiplies up to [`FEW_ROWS_MAX`] rows by a kernel of our own.
    pub fn has_few_rows(&self) -> bool {
        self.has(SIZES[0].names.sums)
    }

    /// [`Card::multiply_own`] of up to 128 rows.
    pub(super) fn few_rows(
        &self,
        form: FewRowsForm,
        product: OwnProduct<'_>,
        ending: Ending<'_>,
    ) -> Result<(), CudaError> {
        let OwnProduct { w, x, k, .. } = product;
        let of_kernel = match w {
            Weights::Bf16(_) => SIZES,
            Weights::Fp8(_) => SIZES_FP8,
        };
        let kernel = of_kernel[0].names.of(&ending);
        ensure(kernel, FEW_ROWS_SHARES.contains(&form.shares), "shares that are not 1, 2, 4 or 8")?;
        let checked = product.check(self, kernel, OwnForm::Few(form), &ending)?;
        let Checked { sizes, owed, ending: words, n_parts } = checked;
        let (n, n_rows) = (sizes.n as usize, sizes.n_rows as usize);
        ensure(kernel, n_rows <= FEW_ROWS_MAX, "more than 128 rows")?;
        ensure(kernel, n_parts <= GRID_SIDE_MAX, "too many rows of the matrix")?;
        let size = of_kernel.iter().find(|size| size.rows_max >= n_rows);
        let size = size.expect("the rows were just counted");
        let kernel = size.names.of(&ending);
        ensure(
            kernel,
            self.has(kernel),
            "a card that is not of Hopper's kind, or FP8 with an answer in f32",
        )?;
        if n == 0 || n_rows == 0 {
            return Ok(());
        }
        let of_x = Matrix { address: x.address, n_rows, n_columns: k, stride: k };
        let (blocks, of_tiles) = ((form.shares, n_parts, 1), TensorMap::of(of_x, size.rows_max)?);
        match w {
            Weights::Bf16(w) => {
                let of_w = TensorMap::of(Matrix { address: w.address, n_rows: n, ..of_x }, UNIT)?;
                let config = Grid { blocks, threads: THREADS, shared_bytes: shared_bytes(size) };
                launch!(self, kernel, config, form.shares, &words, &owed, &of_w, &of_tiles, &sizes)
            }
            Weights::Fp8(w) => {
                let boxes = (TILE_COLUMNS, UNIT);
                let of_w = TensorMap::of_bytes(w.numbers.address, n, Fp8Rows::width(k), boxes)?;
                let config = Grid { blocks, threads: THREADS, shared_bytes: shared_bytes_fp8(size) };
                let scales = w.scales.address;
                launch!(self, kernel, config, form.shares, &words, &owed, &of_w, &of_tiles, &sizes, &scales)
            }
        }
    }
}

/// A ring of tiles, and what it takes to begin on an edge of 1,024 bytes.
fn shared_bytes(size: &Size) -> u32 {
    let ring = size.stages * (W_ROWS + size.rows_max) * TILE_COLUMNS * size_of::<Bf16>();
    (ring + 1024) as u32
}

fn shared_bytes_fp8(size: &Size) -> u32 {
    let ring = size.stages * STEP_COLUMNS * (W_ROWS + size.rows_max * size_of::<Bf16>());
    (ring + 1024) as u32
}

/// Shared memory that a kernel of these files asks for.
pub(in crate::cuda) fn shared_bytes_of(kernel: &str) -> Option<u32> {
    let of = |sizes: &'static [Size]| sizes.iter().find(|size| size.names.has(kernel));
    of(SIZES).map(shared_bytes).or_else(|| of(SIZES_FP8).map(shared_bytes_fp8))
}
