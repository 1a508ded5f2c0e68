//! Products of up to 128 rows with a large matrix on Hopper, whose time is mostly that of reading the matrix.

use super::{Bf16, Card, CudaError, View, ViewMut, ensure, launch, number, rows_of};
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
/// Rows of the matrix for a block of threads, and its threads, as in `few_rows.cu`.
const W_ROWS: usize = 128;
const THREADS: u32 = 288;
/// Numbers of a row that are brought at once.
const TILE_COLUMNS: usize = 64;

/// A kernel, for so many rows at most.
struct Size {
    rows_max: usize,
    stages: usize,
    narrow: &'static str,
    wide: &'static str,
}

macro_rules! size {
    ($rows:literal, $stages:literal) => {
        Size {
            rows_max: $rows,
            stages: $stages,
            narrow: concat!("few_rows_", $rows),
            wide: concat!("few_rows_wide_", $rows),
        }
    };
}

/// As in `few_rows.cu`.
const SIZES: &[Size] = &[size!(8, 6), size!(16, 6), size!(32, 5), size!(64, 4), size!(128, 3)];

/// The product's sizes: rows of the matrix, their width, rows of `x`.
type Sizes = (usize, usize, usize);

/// The fields of FewRowsShape in few_rows.cu, in their order: it is copied as bytes.
#[derive(Clone, Copy)]
#[repr(C)]
struct Shape {
    n: u32,
    k: u32,
    n_rows: u32,
}

impl Card {
    /// Whether this card can do [`Card::few_rows`].
    pub fn has_few_rows(&self) -> bool {
        self.has(SIZES[0].narrow)
    }

    /// `y = x * transpose(w)`: `x` is up to 128 rows of `k`, `w` is rows of `k`, `y` has a number for each pair of rows.
    pub fn few_rows(
        &self,
        form: FewRowsForm,
        y: ViewMut<'_, Bf16>,
        w: View<'_, Bf16>,
        x: View<'_, Bf16>,
        k: usize,
    ) -> Result<(), CudaError> {
        let kernel = SIZES[0].narrow;
        self.check_places(kernel, &[&y, &w, &x], &[])?;
        let sizes = check(kernel, form, (y.len(), w.len(), x.len()), k)?;
        self.launch_few_rows(|size| size.narrow, form, y.address, (w, x), sizes)
    }

    /// The same, with an answer in f32: for logits, which are compared with one another.
    pub fn few_rows_wide(
        &self,
        form: FewRowsForm,
        y: ViewMut<'_, f32>,
        w: View<'_, Bf16>,
        x: View<'_, Bf16>,
        k: usize,
    ) -> Result<(), CudaError> {
        let kernel = SIZES[0].wide;
        self.check_places(kernel, &[&y, &w, &x], &[])?;
        let sizes = check(kernel, form, (y.len(), w.len(), x.len()), k)?;
        self.launch_few_rows(|size| size.wide, form, y.address, (w, x), sizes)
    }

    fn launch_few_rows(
        &self,
        kernel_of: fn(&Size) -> &'static str,
        form: FewRowsForm,
        y: u64,
        (w, x): (View<'_, Bf16>, View<'_, Bf16>),
        (n, k, n_rows): Sizes,
    ) -> Result<(), CudaError> {
        let size = SIZES.iter().find(|size| size.rows_max >= n_rows).expect("the rows were counted before");
        let kernel = kernel_of(size);
        ensure(kernel, self.has(kernel), "a card that is not of Hopper's kind")?;
        if n == 0 || n_rows == 0 {
            return Ok(());
        }
        let of_w = Matrix { address: w.address, n_rows: n, n_columns: k, stride: k };
        let of_x = Matrix { address: x.address, n_rows, ..of_w };
        let of_w = TensorMap::of(of_w, W_ROWS)?;
        let of_x = TensorMap::of(of_x, size.rows_max)?;
        let blocks = (form.shares, n.div_ceil(W_ROWS), 1);
        let config = Grid { blocks, threads: THREADS, shared_bytes: shared_bytes(size) };
        let shape = Shape { n: number(kernel, n)?, k: number(kernel, k)?, n_rows: number(kernel, n_rows)? };
        launch!(self, kernel, config, form.shares, &y, &of_w, &of_x, &shape)
    }
}

/// Rows of the matrix, their width, rows of `x`.
fn check(kernel: &'static str, form: FewRowsForm, (y, w, x): Sizes, k: usize) -> Result<Sizes, CudaError> {
    ensure(kernel, FEW_ROWS_SHARES.contains(&form.shares), "shares that are not 1, 2, 4 or 8")?;
    ensure(kernel, k.is_multiple_of(8), "rows that are not a multiple of 8 wide")?;
    let (n, n_rows) = (rows_of(kernel, w, k)?, rows_of(kernel, x, k)?);
    ensure(kernel, n_rows <= FEW_ROWS_MAX, "more than 128 rows")?;
    ensure(kernel, y == n * n_rows, "an output that is not rows by rows")?;
    ensure(kernel, n.div_ceil(W_ROWS) <= super::GRID_SIDE_MAX, "too many rows of the matrix")?;
    Ok((n, k, n_rows))
}

/// A ring of tiles, and what it takes to begin on an edge of 1,024 bytes.
fn shared_bytes(size: &Size) -> u32 {
    let ring = size.stages * (W_ROWS + size.rows_max) * TILE_COLUMNS * size_of::<Bf16>();
    (ring + 1024) as u32
}

/// Shared memory that a kernel of this file asks for.
pub(in crate::cuda) fn shared_bytes_of(kernel: &str) -> Option<u32> {
    SIZES.iter().find(|size| size.narrow == kernel || size.wide == kernel).map(shared_bytes)
}
