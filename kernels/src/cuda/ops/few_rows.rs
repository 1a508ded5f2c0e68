//! Products of up to 128 rows with a large matrix on Hopper, bound by reading the matrix.

use super::endings::{
    CheckedProduct, Ending, FusedKernel, FusedProduct, KernelNames, WeightMatrix, kernel_names,
};
use super::{Bf16, ComputeCard, CudaError, Fp8Rows, Fp8Scales, GRID_SIDE_MAX, ensure, launch, number};
use crate::cuda::tensor_map::{BoxSize, Matrix, TensorMap};
use device::cuda::card::Grid;

/// The maximum number of rows in one pass over the matrix.
pub const FEW_ROWS_MAX: usize = 128;
/// The possible cluster sizes. The blocks of threads of a cluster share a pass along `k`.
pub const FEW_ROWS_SHARES: &[usize] = &[1, 2, 4, 8];

/// The maximum number of rows of [`FewRowsForm::Even`].
const EVEN_ROWS_MAX: usize = 64;

/// How a product is divided among blocks of threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FewRowsForm {
    /// A cluster of blocks of threads for every 128 rows of the matrix. The blocks share a pass along `k`;
    /// their number is one of [`FEW_ROWS_SHARES`]. A row's result depends on `shares` only, not on the other
    /// rows.
    Clusters { shares: usize },
    /// Every block of threads that runs at the same time has an equal part of the matrix, with any start and
    /// end. For up to 64 rows, with a bf16 matrix. A row's result depends on the number of multiprocessors.
    Even,
}

/// Every form, for tuning and checks.
pub const FEW_ROWS_FORMS: &[FewRowsForm] = &[
    FewRowsForm::Clusters { shares: 1 },
    FewRowsForm::Clusters { shares: 2 },
    FewRowsForm::Clusters { shares: 4 },
    FewRowsForm::Clusters { shares: 8 },
    FewRowsForm::Even,
];

impl FewRowsForm {
    /// Returns a good form for a matrix: the fewest shares that give nearly every multiprocessor a block of
    /// threads.
    ///
    /// The form depends on the matrix only, not on the number of rows or of multiprocessors.
    pub fn of(n: usize, k: usize) -> Self {
        let is_enough = |shares: &&usize| n.div_ceil(W_ROWS) * **shares >= BLOCKS_ENOUGH;
        let mut useful = FEW_ROWS_SHARES.iter().filter(|shares| k >= **shares * 4 * TILE_COLUMNS);
        let shares = useful.clone().find(is_enough).or_else(|| useful.next_back()).copied().unwrap_or(1);
        Self::Clusters { shares }
    }

    /// Returns the form for a product whose sums are spread over ranks. Ranks wait for each other's blocks of
    /// threads, so all GPUs must run clusters in the same order.
    pub fn joined(self, n: usize, k: usize) -> Self {
        match self {
            Self::Clusters { .. } => self,
            Self::Even => Self::of(n, k),
        }
    }

    /// Returns whether this form multiplies `n_rows` rows.
    pub fn serves(self, n_rows: usize) -> bool {
        match self {
            Self::Clusters { .. } => n_rows <= FEW_ROWS_MAX,
            Self::Even => n_rows <= EVEN_ROWS_MAX,
        }
    }

    /// Returns whether this form also multiplies by a matrix in FP8.
    pub fn takes_fp8(self) -> bool {
        matches!(self, Self::Clusters { .. })
    }
}

/// The number of blocks of threads that keep a Hopper GPU busy: 90 % of an H200's multiprocessors.
const BLOCKS_ENOUGH: usize = 118;
/// The number of rows of the matrix for a cluster, and of threads of each of its blocks, as in
/// `few_rows.cuh`. The copy engine loads the rows in two halves, which may be at any distance.
pub(super) const UNIT: usize = 64;
const W_ROWS: usize = 2 * UNIT;
const THREADS: u32 = 288;
/// The number of columns that are loaded at once: one tile, or two tiles of 8-bit numbers.
const TILE_COLUMNS: usize = 64;
const STEP_COLUMNS: usize = 2 * TILE_COLUMNS;

/// A kernel for at most `rows_max` rows.
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

/// The kernels of `few_rows.cu`.
const SIZES: &[Size] = &[
    size!("few_rows", 8, 6),
    size!("few_rows", 16, 6),
    size!("few_rows", 32, 5),
    size!("few_rows", 64, 4),
    size!("few_rows", 128, 3),
];

/// A family of kernels for a matrix in FP8, as in `few_rows_fp8.cuh`. None has an f32 output.
macro_rules! fp8_sizes {
    ($family:literal) => {
        &[
            size!($family, 8, 6),
            size!($family, 16, 5),
            size!($family, 32, 4),
            size!($family, 64, 3),
            size!($family, 128, 4),
        ]
    };
}

const SIZES_FP8: &[Size] = fp8_sizes!("few_rows_fp8");
const SIZES_BLOCKS: &[Size] = fp8_sizes!("few_rows_blocks");

/// The kernels of `few_rows_even.cu`. None has the `Joined` ending.
const SIZES_EVEN: &[Size] = &[
    size!("few_rows_even", 8, 6),
    size!("few_rows_even", 16, 6),
    size!("few_rows_even", 32, 6),
    size!("few_rows_even", 64, 6),
];
/// The distance between two rows of a part in shared memory, in numbers.
const PART_STRIDE: usize = W_ROWS + 4;
/// The numbers in all parts that a block of threads leaves: two parts of the maximum number of rows.
pub(in crate::cuda) const MEETING_PARTS: usize = 2 * EVEN_ROWS_MAX * W_ROWS;

/// The fields of Meeting in few_rows_even.cu, in the same order. The struct is copied to the GPU as bytes.
#[derive(Clone, Copy)]
#[repr(C)]
struct Meeting {
    parts: u64,
    arrived: u64,
    n_tiles: u32,
}

impl ComputeCard {
    /// Returns whether this GPU has our kernels for up to [`FEW_ROWS_MAX`] rows.
    pub fn has_few_rows(&self) -> bool {
        self.has(SIZES[0].names.sums)
    }

    /// Computes [`ComputeCard::multiply_own`] for up to 128 rows.
    pub(super) fn few_rows(
        &self,
        form: FewRowsForm,
        product: FusedProduct<'_>,
        ending: Ending<'_>,
    ) -> Result<(), CudaError> {
        let form = match &ending {
            Ending::Joined(..) => form.joined(product.w.n_rows(product.k), product.k),
            _ => form,
        };
        match form {
            FewRowsForm::Clusters { shares } => self.few_rows_clusters(shares, product, ending),
            FewRowsForm::Even => self.few_rows_even(product, ending),
        }
    }

    fn few_rows_clusters(
        &self,
        shares: usize,
        product: FusedProduct<'_>,
        ending: Ending<'_>,
    ) -> Result<(), CudaError> {
        let form = FewRowsForm::Clusters { shares };
        let FusedProduct { w, x, k, .. } = product;
        let of_kernel = match w {
            WeightMatrix::Bf16(_) | WeightMatrix::Widened(_) => SIZES,
            WeightMatrix::Fp8(Fp8Rows { scaling: Fp8Scales::OfRows, .. }) => SIZES_FP8,
            WeightMatrix::Fp8(Fp8Rows { scaling: Fp8Scales::OfBlocks, .. }) => SIZES_BLOCKS,
        };
        let kernel = of_kernel[0].names.of(&ending);
        ensure(kernel, FEW_ROWS_SHARES.contains(&shares), "a number of shares other than 1, 2, 4 or 8")?;
        let checked = product.check(self, kernel, FusedKernel::Few(form), &ending)?;
        let CheckedProduct { sizes, pending_norm, ending: words, n_parts } = checked;
        let (n, n_rows) = (sizes.n as usize, sizes.n_rows as usize);
        ensure(kernel, n_rows <= FEW_ROWS_MAX, "more than 128 rows")?;
        ensure(kernel, n_parts <= GRID_SIDE_MAX, "too many rows of the matrix")?;
        let size = of_kernel.iter().find(|size| size.rows_max >= n_rows);
        let size = size.expect("the rows were just counted");
        let kernel = size.names.of(&ending);
        ensure(kernel, self.has(kernel), "a GPU other than Hopper, or an FP8 matrix with an f32 output")?;
        if n == 0 || n_rows == 0 {
            return Ok(());
        }
        let of_x = Matrix { address: x.address(), n_rows, n_columns: k, stride: k };
        let (blocks, of_tiles) = ((shares, n_parts, 1), TensorMap::of(of_x, size.rows_max)?);
        match w {
            WeightMatrix::Bf16(w) | WeightMatrix::Widened(w) => {
                let of_w = TensorMap::of(Matrix { address: w.address(), n_rows: n, ..of_x }, UNIT)?;
                let shared_bytes = shared_bytes(size);
                let config = Grid { waits: product.is_widened(), ..Grid::of(blocks, THREADS, shared_bytes) };
                launch!(self, kernel, config, shares, &words, &pending_norm, &of_w, &of_tiles, &sizes)
            }
            WeightMatrix::Fp8(w) => {
                let boxes = BoxSize { columns: TILE_COLUMNS, rows: UNIT };
                let of_w = TensorMap::of_bytes(w.numbers.address(), n, Fp8Rows::width(k), boxes)?;
                let config = Grid::of(blocks, THREADS, shared_bytes_fp8(size));
                let scales = w.scales.address();
                launch!(
                    self,
                    kernel,
                    config,
                    shares,
                    &words,
                    &pending_norm,
                    &of_w,
                    &of_tiles,
                    &sizes,
                    &scales
                )
            }
        }
    }

    /// Multiplies in the form [`FewRowsForm::Even`].
    fn few_rows_even(&self, product: FusedProduct<'_>, ending: Ending<'_>) -> Result<(), CudaError> {
        let FusedProduct { w, x, k, .. } = product;
        let kernel = SIZES_EVEN[0].names.of(&ending);
        let checked = product.check(self, kernel, FusedKernel::Few(FewRowsForm::Even), &ending)?;
        let CheckedProduct { sizes, pending_norm, ending: words, n_parts } = checked;
        let (n, n_rows) = (sizes.n as usize, sizes.n_rows as usize);
        ensure(kernel, n_rows <= EVEN_ROWS_MAX, "more than 64 rows")?;
        let size = SIZES_EVEN.iter().find(|size| size.rows_max >= n_rows);
        let size = size.expect("the rows were just counted");
        let kernel = size.names.of(&ending);
        ensure(kernel, self.has(kernel), "a GPU other than Hopper")?;
        let Some(w) = w.in_bf16() else {
            return ensure(kernel, false, "an FP8 matrix");
        };
        if n == 0 || n_rows == 0 {
            return Ok(());
        }
        let n_units = n_parts * k.div_ceil(TILE_COLUMNS);
        let n_blocks = n_units.min(self.n_multiprocessors() as usize);
        let counts = (n_units + 1).checked_mul(n_blocks).and_then(|most| u32::try_from(most).ok());
        ensure(kernel, counts.is_some(), "a matrix that is too large")?;
        let of_x = Matrix { address: x.address(), n_rows, n_columns: k, stride: k };
        let of_tiles = TensorMap::of(of_x, size.rows_max)?;
        let of_w = TensorMap::of(Matrix { address: w.address(), n_rows: n, ..of_x }, UNIT)?;
        let (parts, arrived) = self.meeting();
        let meeting = Meeting { parts, arrived, n_tiles: number(kernel, n_parts)? };
        let config = Grid {
            waits: product.is_widened(),
            ..Grid::of((n_blocks, 1, 1), THREADS, shared_bytes_even(size))
        };
        launch!(self, kernel, config, 1, &words, &pending_norm, &of_w, &of_tiles, &sizes, &meeting)
    }
}

/// Returns the bytes of a ring of tiles, with padding to align it to 1,024 bytes.
fn shared_bytes(size: &Size) -> u32 {
    let ring = size.stages * (W_ROWS + size.rows_max) * TILE_COLUMNS * size_of::<Bf16>();
    (ring + 1024) as u32
}

fn shared_bytes_fp8(size: &Size) -> u32 {
    let ring = size.stages * STEP_COLUMNS * (W_ROWS + size.rows_max * size_of::<Bf16>());
    (ring + 1024) as u32
}

/// Returns the bytes of the ring, and of one part beside it.
fn shared_bytes_even(size: &Size) -> u32 {
    shared_bytes(size) + (size.rows_max * PART_STRIDE * size_of::<f32>()) as u32
}

/// Returns the dynamic shared memory of a kernel in these files.
pub(in crate::cuda) fn shared_bytes_of(kernel: &str) -> Option<u32> {
    let of = |sizes: &'static [Size]| sizes.iter().find(|size| size.names.has(kernel));
    let even = of(SIZES_EVEN).map(shared_bytes_even);
    let fp8 = of(SIZES_FP8).or_else(|| of(SIZES_BLOCKS)).map(shared_bytes_fp8);
    of(SIZES).map(shared_bytes).or(fp8).or(even)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_matrix_has_as_many_shares_as_keep_a_card_busy() {
        // The matrices are those of an 8B model (o, down, qkv, gate with up, the output), and one that is too
        // narrow to be shared.
        for (n, k, shares) in [
            (4096, 4096, 4),
            (4096, 14_336, 4),
            (6144, 4096, 4),
            (28_672, 4096, 1),
            (128_256, 4096, 1),
            (64, 64, 1),
        ] {
            assert_eq!(FewRowsForm::of(n, k), FewRowsForm::Clusters { shares }, "{n} x {k}");
        }
    }

    #[test]
    fn ranks_join_by_clusters_alone() {
        for form in FEW_ROWS_FORMS {
            let joined = form.joined(4096, 14_336);
            assert!(matches!(joined, FewRowsForm::Clusters { .. }), "{form:?}");
            assert_eq!(joined, joined.joined(4096, 14_336));
        }
        assert_eq!(FewRowsForm::Even.joined(4096, 14_336), FewRowsForm::of(4096, 14_336));
    }

    #[test]
    fn even_division_is_for_few_rows_in_bf16() {
        let clusters = FewRowsForm::of(4096, 4096);
        for (n_rows, even) in [(1, true), (64, true), (65, false)] {
            assert_eq!(FewRowsForm::Even.serves(n_rows), even, "{n_rows} rows");
            assert!(clusters.serves(n_rows));
        }
        assert!(!clusters.serves(129));
        assert!(clusters.takes_fp8() && !FewRowsForm::Even.takes_fp8());
    }
}
