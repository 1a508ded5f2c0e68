//! The products of a layer of experts: units of few rows, or tiles of many rows.

use super::expert_space::{ExpertSpace, ExpertsForm};
use super::experts_fp8::not_widened;
use super::many_rows::{self, MatrixTiles};
use super::{
    Bf16, ComputeCard, CudaError, Fp8Rows, Fp8Scales, GRID_SIDE_MAX, QuantizedRows, View, WeightMatrix,
    ensure, launch, number,
};
use crate::cuda::tensor_map::{Matrix, TensorMap};
use device::cuda::card::{Grid, grid};

/// The number of threads of a block that multiplies few rows.
const UNIT_THREADS: u32 = 256;

/// The names of the kernels for 8 and for 32 rows of an expert, and for tiles.
struct KernelNames {
    of_8: &'static str,
    of_32: &'static str,
    tiles: &'static str,
}

macro_rules! kernel_names {
    ($units:literal, $tiles:literal) => {
        KernelNames { of_8: concat!($units, "_8"), of_32: concat!($units, "_32"), tiles: $tiles }
    };
}

const GATED: KernelNames = kernel_names!("experts_gated", "grouped_rows_gated");
const SUMMED: KernelNames = kernel_names!("experts_summed", "grouped_rows");
const GATED_FP8: KernelNames = kernel_names!("experts_fp8_gated", "grouped_rows_fp8_gated");
const SUMMED_FP8: KernelNames = kernel_names!("experts_fp8_summed", "grouped_rows_fp8");
const GATED_BLOCKS: KernelNames = kernel_names!("experts_blocks_gated", "grouped_rows_blocks_gated");
const SUMMED_BLOCKS: KernelNames = kernel_names!("experts_blocks_summed", "grouped_rows_blocks");

/// Which of an expert's two products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExpertPart {
    Gated,
    Summed,
}

impl KernelNames {
    fn of(part: ExpertPart, fp8: Option<Fp8Scales>) -> &'static Self {
        match (part, fp8) {
            (ExpertPart::Gated, None) => &GATED,
            (ExpertPart::Summed, None) => &SUMMED,
            (ExpertPart::Gated, Some(Fp8Scales::OfRows)) => &GATED_FP8,
            (ExpertPart::Summed, Some(Fp8Scales::OfRows)) => &SUMMED_FP8,
            (ExpertPart::Gated, Some(Fp8Scales::OfBlocks)) => &GATED_BLOCKS,
            (ExpertPart::Summed, Some(Fp8Scales::OfBlocks)) => &SUMMED_BLOCKS,
        }
    }
}

/// The fields of the struct of this name in expert_units.cuh, in the same order, as in all structs below.
#[repr(C)]
pub(super) struct ExpertRows {
    items: u64,
    choices: u64,
}

#[repr(C)]
pub(super) struct UnitsShape {
    n: u32,
    k: u32,
    n_items_max: u32,
    per_row: u32,
}

impl UnitsShape {
    /// Describes matrices of `n` rows of `k` numbers, with padding.
    pub(super) fn of(
        kernel: &'static str,
        [n, k]: [usize; 2],
        space: &ExpertSpace,
    ) -> Result<Self, CudaError> {
        Ok(Self {
            n: number(kernel, n)?,
            k: number(kernel, k)?,
            n_items_max: number(kernel, space.n_items_max())?,
            per_row: number(kernel, space.sizes.n_choices())?,
        })
    }
}

/// `ExpertMatrices` in experts_fp8.cu.
#[repr(C)]
struct Fp8Matrices {
    numbers: u64,
    scales: u64,
}

#[repr(C)]
struct GroupedShape {
    k: u32,
    n_pairs: u32,
    n: u32,
    tile_rows: u32,
    half_rows: u32,
    n_tiles_max: u32,
    tiles: u64,
}

#[repr(C)]
struct GroupedEightsShape {
    tiles: GroupedShape,
    scales_of_expert: u32,
    scales_apart: u32,
    w_scales: u64,
    x_scales: u64,
}

impl ExpertSpace {
    pub(super) fn expert_rows(&self) -> ExpertRows {
        ExpertRows { items: self.items.view().address(), choices: self.choices.view().address() }
    }
}

/// One product of the rows of all experts.
pub(super) struct ExpertProduct<'a> {
    pub(super) part: ExpertPart,
    pub(super) w: WeightMatrix<'a>,
    pub(super) x: u64,
    pub(super) y: u64,
    /// The rows of an expert's matrix, their width, and the width of the output.
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) y_width: usize,
}

impl ComputeCard {
    pub(super) fn multiply_experts(
        &self,
        form: ExpertsForm,
        product: ExpertProduct<'_>,
        space: &ExpertSpace,
        n_rows: usize,
    ) -> Result<(), CudaError> {
        match form {
            ExpertsForm::Units => self.multiply_units(product, space, n_rows),
            ExpertsForm::Tiles => self.multiply_tiles(product, space, n_rows),
        }
    }

    fn multiply_units(
        &self,
        product: ExpertProduct<'_>,
        space: &ExpertSpace,
        n_rows: usize,
    ) -> Result<(), CudaError> {
        let ExpertProduct { part, w, x, y, n, k, .. } = product;
        match w {
            WeightMatrix::Bf16(w) | WeightMatrix::Widened(w) if self.has_ring() => {
                return self.multiply_in_ring(&product, w, space);
            }
            WeightMatrix::Fp8(w) if self.has_fp8_ring(space) => {
                return self.multiply_fp8_in_ring(&product, w, space, n_rows);
            }
            _ => {}
        }
        let names = KernelNames::of(part, w.fp8_scales());
        let (kernel, blocks) = if n_rows <= 8 { (names.of_8, 3) } else { (names.of_32, 2) };
        let rows = space.expert_rows();
        let width = if w.fp8_scales().is_some() { Fp8Rows::width(k) } else { k };
        let shape = UnitsShape::of(kernel, [n, width], space)?;
        let config = grid(self.n_multiprocessors() as usize * blocks, 1, UNIT_THREADS);
        match w {
            WeightMatrix::Bf16(w) | WeightMatrix::Widened(w) => {
                launch!(self, kernel, config, &y, &w.address(), &x, &rows, &shape)
            }
            WeightMatrix::Fp8(w) => {
                let w = Fp8Matrices { numbers: w.numbers.address(), scales: w.scales.address() };
                launch!(self, kernel, config, &y, &w, &x, &rows, &shape)
            }
        }
    }

    fn multiply_tiles(
        &self,
        product: ExpertProduct<'_>,
        space: &ExpertSpace,
        n_rows: usize,
    ) -> Result<(), CudaError> {
        let kernel = KernelNames::of(product.part, product.w.fp8_scales()).tiles;
        ensure(kernel, self.has(kernel), "a GPU other than Hopper")?;
        match product.w {
            WeightMatrix::Bf16(w) | WeightMatrix::Widened(w) => {
                self.multiply_tiles_bf16(kernel, &product, w, space)
            }
            WeightMatrix::Fp8(w) => self.multiply_tiles_fp8(kernel, &product, w, space, n_rows),
        }
    }

    fn multiply_tiles_bf16(
        &self,
        kernel: &'static str,
        product: &ExpertProduct<'_>,
        w: View<'_, Bf16>,
        space: &ExpertSpace,
    ) -> Result<(), CudaError> {
        let ExpertProduct { x, y, k, y_width, .. } = *product;
        let n_places = space.choices.len();
        let shape = grouped_shape(kernel, product, k, space)?;
        let of = |address, n_rows, width| Matrix { address, n_rows, n_columns: width, stride: width };
        let of_y = TensorMap::of(of(y, n_places, y_width), many_rows::GROUP_ROWS)?;
        let of_w = TensorMap::of(of(w.address(), w.len() / k, k), many_rows::HALF)?;
        let of_x = TensorMap::of(of(x, n_places, k), many_rows::ROWS / many_rows::CLUSTER)?;
        launch!(self, kernel, self.tiles_grid(), many_rows::CLUSTER, &of_y, &of_w, &of_x, &shape)
    }

    fn multiply_tiles_fp8(
        &self,
        kernel: &'static str,
        product: &ExpertProduct<'_>,
        w: Fp8Rows<'_>,
        space: &ExpertSpace,
        n_rows: usize,
    ) -> Result<(), CudaError> {
        let ExpertProduct { x, y, n, k, y_width, .. } = *product;
        let Some(quantized) = &space.quantized else { return not_widened() };
        let (n_places, width) = (space.sizes.n_places(n_rows), Fp8Rows::width(k));
        let shape = GroupedEightsShape {
            tiles: grouped_shape(kernel, product, width, space)?,
            scales_of_expert: number(kernel, w.scaling.count(n, k))?,
            scales_apart: number(kernel, QuantizedRows::scales_apart(n_places))?,
            w_scales: w.scales.address(),
            x_scales: quantized.scales.view().address(),
        };
        let of_y = Matrix { address: y, n_rows: n_places, n_columns: y_width, stride: y_width };
        let of_y = TensorMap::of(of_y, many_rows::GROUP_ROWS)?;
        let of_w = TensorMap::of_fp8(w.numbers.address(), w.n_rows(k), width, many_rows::HALF)?;
        let of_x = TensorMap::of_fp8(x, n_places, width, many_rows::ROWS / many_rows::CLUSTER)?;
        launch!(self, kernel, self.tiles_grid(), many_rows::CLUSTER, &of_y, &of_w, &of_x, &shape)
    }

    fn tiles_grid(&self) -> Grid {
        let n_clusters = self.n_multiprocessors() as usize / many_rows::CLUSTER;
        let blocks = (n_clusters.max(1) * many_rows::CLUSTER).min(GRID_SIDE_MAX);
        Grid::of((blocks, 1, 1), many_rows::THREADS, many_rows::SHARED_BYTES)
    }
}

/// Describes the tiles of a product. `k` is the width of the rows of both factors, in numbers with padding.
fn grouped_shape(
    kernel: &'static str,
    product: &ExpertProduct<'_>,
    k: usize,
    space: &ExpertSpace,
) -> Result<GroupedShape, CudaError> {
    let matrix = match product.part {
        ExpertPart::Gated => MatrixTiles::gated(product.n),
        ExpertPart::Summed => MatrixTiles::plain(),
    };
    let n_columns = product.y_width.div_ceil(matrix.tile_rows);
    Ok(GroupedShape {
        k: number(kernel, k)?,
        n_pairs: number(kernel, n_columns.div_ceil(many_rows::CLUSTER))?,
        n: number(kernel, product.n)?,
        tile_rows: number(kernel, matrix.tile_rows)?,
        half_rows: number(kernel, matrix.half_rows)?,
        n_tiles_max: number(kernel, space.n_tiles_max())?,
        tiles: space.tiles.view().address(),
    })
}

/// Returns the dynamic shared memory of a kernel for tiles.
pub(in crate::cuda) fn shared_bytes_of(kernel: &str) -> Option<u32> {
    let all = [GATED, SUMMED, GATED_FP8, SUMMED_FP8, GATED_BLOCKS, SUMMED_BLOCKS];
    all.iter().any(|names| names.tiles == kernel).then_some(many_rows::SHARED_BYTES)
}
