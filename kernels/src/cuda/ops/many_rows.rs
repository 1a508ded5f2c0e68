//! Products of many rows with a large matrix on Hopper, bound by arithmetic, with optional work after the
//! product.

use super::fp8::{SCALES_ALIGN, check_halves, check_rows};
use super::{
    Bf16, ComputeCard, CudaError, Fp8Rows, Fp8Scales, QuantizedRows, View, ViewMut, ensure, launch, number,
    rows_of,
};
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

/// The names of the kernels for products in FP8, by their tiles and endings.
struct Fp8Kernels {
    sums: &'static str,
    added: &'static str,
    gated: &'static str,
    narrow: &'static str,
    narrow_added: &'static str,
    split: &'static str,
    split_added: &'static str,
}

macro_rules! fp8_kernels {
    ($family:literal) => {
        Fp8Kernels {
            sums: $family,
            added: concat!($family, "_added"),
            gated: concat!($family, "_gated"),
            narrow: concat!($family, "_narrow"),
            narrow_added: concat!($family, "_narrow_added"),
            split: concat!($family, "_split"),
            split_added: concat!($family, "_split_added"),
        }
    };
}

const OF_ROWS: Fp8Kernels = fp8_kernels!("many_rows_fp8");
const OF_BLOCKS: Fp8Kernels = fp8_kernels!("many_rows_blocks");

impl Fp8Kernels {
    fn of(scaling: Fp8Scales) -> &'static Self {
        match scaling {
            Fp8Scales::OfRows => &OF_ROWS,
            Fp8Scales::OfBlocks => &OF_BLOCKS,
        }
    }

    fn has(&self, kernel: &str) -> bool {
        let Self { sums, added, gated, narrow, narrow_added, split, split_added } = self;
        [sums, added, gated, narrow, narrow_added, split, split_added].iter().any(|name| **name == kernel)
    }
}

/// The output of the sums of a product.
#[derive(Debug)]
pub enum ManyRows<'a> {
    /// The output is a number for each pair of rows.
    Sums(ViewMut<'a, Bf16>),
    /// The sums are rounded to bf16 and added to the existing numbers of the output.
    Added(ViewMut<'a, Bf16>),
    /// The matrix has the rows of gate, then of up: `silu(gate) * up`.
    Gated(ViewMut<'a, Bf16>),
}

/// The tiles of a product in FP8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ManyFp8Form {
    /// Tiles of 256 rows of the matrix.
    Wide,
    /// Tiles of 128 rows of the matrix, for more tiles of few rows. There is no gate.
    Narrow,
    /// Like [`Narrow`](Self::Narrow), and two blocks of threads share the sums of a tile.
    Split,
}

impl ManyFp8Form {
    /// The word for this form in the file of measurements.
    pub fn name(self) -> &'static str {
        match self {
            Self::Wide => "wide",
            Self::Narrow => "narrow",
            Self::Split => "split",
        }
    }

    pub fn has_gate(self) -> bool {
        self == Self::Wide
    }
}

pub const MANY_FP8_FORMS: &[ManyFp8Form] = &[ManyFp8Form::Wide, ManyFp8Form::Narrow, ManyFp8Form::Split];

/// The distances in a matrix between tiles, and between the parts of a tile that one load copies, in rows.
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

    fn narrow() -> Self {
        Self { tile_rows: HALF, half_rows: HALF / CLUSTER }
    }
}

/// How tiles cover the output of a product.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Tiling {
    Plain,
    Gated,
    Narrow,
    Split,
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

/// The fields of EightsShape in many_rows_fp8.cu, in the same order.
#[derive(Clone, Copy)]
#[repr(C)]
struct EightsShape {
    tiles: ManyShape,
    n: u32,
    scales_apart: u32,
    /// Aligns the addresses to 8 bytes.
    padding: u32,
    w_scales: u64,
    x_scales: u64,
}

/// A product's sizes: `n` rows of the matrix, `n_rows` rows that it multiplies, and the `k` numbers or bytes of
/// each.
#[derive(Clone, Copy)]
struct ManySizes {
    n: usize,
    n_rows: usize,
    k: usize,
}

/// The arguments that products of bf16 and of FP8 have in common.
struct ManyLaunch {
    of_y: TensorMap,
    shape: ManyShape,
    config: Grid,
}

impl ComputeCard {
    /// Returns whether this GPU has our kernels for many rows.
    pub fn has_many_rows(&self) -> bool {
        self.has(SUMS)
    }

    /// Returns the number of rows that a cluster multiplies together; 1 if this GPU lacks our kernels for many rows.
    pub fn rows_together(&self) -> usize {
        if self.has_many_rows() { CLUSTER * ROWS } else { 1 }
    }

    /// Returns whether this GPU multiplies FP8 by FP8.
    pub fn has_many_rows_fp8(&self) -> bool {
        self.has(OF_ROWS.sums)
    }

    /// Computes `x * transpose(w)` for any number of rows of `k` numbers, and the work after it.
    pub fn multiply_many(
        &self,
        w: View<'_, Bf16>,
        x: View<'_, Bf16>,
        k: usize,
        rows: ManyRows<'_>,
    ) -> Result<(), CudaError> {
        let (kernel, tiling, y) = match rows {
            ManyRows::Sums(y) => (SUMS, Tiling::Plain, y),
            ManyRows::Added(y) => (ADDED, Tiling::Plain, y),
            ManyRows::Gated(y) => (GATED, Tiling::Gated, y),
        };
        ensure(kernel, k.is_multiple_of(8), "rows whose width is not a multiple of 8")?;
        self.check_places(kernel, &[&w, &x, &y], &[])?;
        let (n, n_rows) = (rows_of(kernel, w.len(), k)?, rows_of(kernel, x.len(), k)?);
        let Some(many) = self.many_launch(kernel, tiling, &y, ManySizes { n, n_rows, k })? else {
            return Ok(());
        };
        let matrix = |address, n_rows| Matrix { address, n_rows, n_columns: k, stride: k };
        let of_w = TensorMap::of(matrix(w.address(), n), HALF)?;
        let of_x = TensorMap::of(matrix(x.address(), n_rows), ROWS)?;
        launch!(self, kernel, many.config, CLUSTER, &many.of_y, &of_w, &of_x, &many.shape)
    }

    /// Like [`multiply_many`](Self::multiply_many), for factors in FP8.
    pub fn multiply_many_fp8(
        &self,
        form: ManyFp8Form,
        w: Fp8Rows<'_>,
        x: QuantizedRows<'_>,
        k: usize,
        rows: ManyRows<'_>,
    ) -> Result<(), CudaError> {
        let of = Fp8Kernels::of(w.scaling);
        let (kernel, tiling, y) = match (form, rows) {
            (ManyFp8Form::Wide, ManyRows::Sums(y)) => (of.sums, Tiling::Plain, y),
            (ManyFp8Form::Wide, ManyRows::Added(y)) => (of.added, Tiling::Plain, y),
            (ManyFp8Form::Wide, ManyRows::Gated(y)) => (of.gated, Tiling::Gated, y),
            (ManyFp8Form::Narrow, ManyRows::Sums(y)) => (of.narrow, Tiling::Narrow, y),
            (ManyFp8Form::Narrow, ManyRows::Added(y)) => (of.narrow_added, Tiling::Narrow, y),
            (ManyFp8Form::Split, ManyRows::Sums(y)) => (of.split, Tiling::Split, y),
            (ManyFp8Form::Split, ManyRows::Added(y)) => (of.split_added, Tiling::Split, y),
            (_, ManyRows::Gated(_)) => return ensure(of.narrow, false, "a gate in narrow tiles"),
        };
        self.check_places(kernel, &[&w.numbers, &x.numbers, &y], &[&w.scales, &x.scales])?;
        let (n, width) = (check_rows(kernel, w, k)?, Fp8Rows::width(k));
        let n_rows = rows_of(kernel, x.numbers.len(), width)?;
        let scales_apart = QuantizedRows::scales_apart(n_rows);
        ensure(kernel, x.scales.len() == QuantizedRows::n_scales(n_rows, k), "not one scale for each group")?;
        if tiling == Tiling::Gated {
            check_halves(kernel, w, n)?;
        }
        let sizes = ManySizes { n, n_rows, k: width };
        let Some(many) = self.many_launch(kernel, tiling, &y, sizes)? else { return Ok(()) };
        let w_box = if form == ManyFp8Form::Wide { HALF } else { HALF / CLUSTER };
        let of_w = TensorMap::of_fp8(w.numbers.address(), n, width, w_box)?;
        let of_x = TensorMap::of_fp8(x.numbers.address(), n_rows, width, ROWS)?;
        let shape = EightsShape {
            tiles: many.shape,
            n: number(kernel, n)?,
            scales_apart: number(kernel, scales_apart)?,
            padding: 0,
            w_scales: w.scales.address(),
            x_scales: x.scales.address(),
        };
        launch!(self, kernel, many.config, CLUSTER, &many.of_y, &of_w, &of_x, &shape)
    }

    /// Checks the output and returns how tiles cover it; `None` for an empty product.
    fn many_launch(
        &self,
        kernel: &'static str,
        tiling: Tiling,
        y: &ViewMut<'_, Bf16>,
        sizes: ManySizes,
    ) -> Result<Option<ManyLaunch>, CudaError> {
        ensure(kernel, self.has(kernel), "a GPU other than Hopper")?;
        let ManySizes { n, n_rows, k } = sizes;
        let is_split = tiling == Tiling::Split;
        let (width, MatrixTiles { tile_rows, half_rows }) = match tiling {
            Tiling::Gated => (n / 2, MatrixTiles::gated(n)),
            Tiling::Narrow | Tiling::Split => (n, MatrixTiles::narrow()),
            Tiling::Plain => (n, MatrixTiles::plain()),
        };
        ensure(
            kernel,
            n.is_multiple_of(2) && width.is_multiple_of(8),
            "an output whose width is not a multiple of 8",
        )?;
        ensure(kernel, y.len() == width * n_rows, "an output of the wrong size")?;
        if n == 0 || n_rows == 0 {
            return Ok(None);
        }
        let rows_of_cluster = if is_split { ROWS } else { CLUSTER * ROWS };
        let (n_pairs, n_columns) = (n_rows.div_ceil(rows_of_cluster), width.div_ceil(tile_rows));
        let shape = ManyShape {
            k: number(kernel, k)?,
            n_pairs: number(kernel, n_pairs)?,
            n_columns: number(kernel, n_columns)?,
            tile_rows: number(kernel, tile_rows)?,
            half_rows: number(kernel, half_rows)?,
        };
        let of_y = Matrix { address: y.address(), n_rows, n_columns: width, stride: width };
        let at_once =
            if is_split { usize::MAX } else { (self.n_multiprocessors() as usize / CLUSTER).max(1) };
        let n_clusters = at_once.min(n_pairs * n_columns);
        Ok(Some(ManyLaunch {
            of_y: TensorMap::of(of_y, GROUP_ROWS)?,
            shape,
            config: Grid::of((n_clusters * CLUSTER, 1, 1), THREADS, SHARED_BYTES),
        }))
    }
}

const _: () = assert!(SCALES_ALIGN.is_multiple_of(CLUSTER * ROWS), "a tile reads beyond the scales");

/// The bytes of the ring and of the output buffer, with padding to align them to 1,024 bytes. Six stages of narrow
/// tiles take as much as four of the others.
pub(super) const SHARED_BYTES: u32 = {
    let ring = STAGES * (ROWS + 2 * HALF) * TILE_COLUMNS;
    ((ring + ROWS * HALF) * size_of::<Bf16>() + 1024) as u32
};

/// Returns the dynamic shared memory of a kernel in this file.
pub(in crate::cuda) fn shared_bytes_of(kernel: &str) -> Option<u32> {
    let of_bf16 = [SUMS, ADDED, GATED];
    let is_here = of_bf16.contains(&kernel) || OF_ROWS.has(kernel) || OF_BLOCKS.has(kernel);
    is_here.then_some(SHARED_BYTES)
}
