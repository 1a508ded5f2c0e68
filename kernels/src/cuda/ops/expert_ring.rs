//! The products of few rows with experts, on Hopper: weights that pass through a ring in shared memory (`expert_ring.cuh`).

use super::expert_products::{ExpertPart, ExpertProduct, ExpertRows, UnitsShape};
use super::expert_space::{ExpertSpace, ITEM_ROWS};
use super::experts_fp8::not_widened;
use super::{
    Bf16, ComputeCard, CudaError, Fp8Rows, Fp8Scales, QuantizedRows, View, WeightMatrix, launch, number,
};
use crate::cuda::tensor_map::{Matrix, TensorMap, UnitMatrices};
use device::cuda::card::Grid;

const GATED: &str = "experts_ring_gated";
const SUMMED: &str = "experts_ring_summed";
const GATED_FP8: &str = "experts_ring_fp8_gated";
const SUMMED_FP8: &str = "experts_ring_fp8_summed";
const GATED_BLOCKS: &str = "experts_ring_blocks_gated";
const SUMMED_BLOCKS: &str = "experts_ring_blocks_summed";

/// The numbers of threads, of rows of a matrix and of x in a stage, and of stages, as in `expert_ring.cuh`.
const THREADS: u32 = 416;
const TILE_ROWS: usize = 128;
const X_ROWS: usize = ITEM_ROWS;
const STAGES: usize = 9;
/// The units of gate and up in a tile.
const TILE_UNITS: usize = TILE_ROWS / 16;
const ROW_BYTES: usize = 128;
/// The ring, which begins at a multiple of 1,024, and the scales of its rows of x.
const SHARED_BYTES: u32 =
    (1024 + STAGES * ((TILE_ROWS + X_ROWS) * ROW_BYTES + X_ROWS * size_of::<f32>())) as u32;

/// The fields of the struct of this name in experts_ring_fp8.cu, in the same order.
#[repr(C)]
struct RingFp8Shape {
    of: UnitsShape,
    x_apart: u32,
    w_scales: u64,
    x_scales: u64,
}

impl ComputeCard {
    /// Returns whether few rows are multiplied by the kernels of this file.
    pub(super) fn has_ring(&self) -> bool {
        self.has(GATED)
    }

    /// Returns whether units multiply rows in FP8, so that no weight is widened.
    pub(super) fn has_fp8_ring(&self, space: &ExpertSpace) -> bool {
        space.quantized.is_some() && self.has(GATED_FP8)
    }

    /// Returns whether units with these matrices pass through a ring.
    pub(super) fn has_ring_for(&self, w: WeightMatrix<'_>, space: &ExpertSpace) -> bool {
        match w {
            WeightMatrix::Fp8(_) => self.has_fp8_ring(space),
            WeightMatrix::Bf16(_) | WeightMatrix::Widened(_) => self.has_ring(),
        }
    }

    pub(super) fn multiply_in_ring(
        &self,
        product: &ExpertProduct<'_>,
        w: View<'_, Bf16>,
        space: &ExpertSpace,
    ) -> Result<(), CudaError> {
        let ExpertProduct { part, x, y, n, k, .. } = *product;
        let (kernel, of_w) = match part {
            ExpertPart::Gated => {
                (GATED, TensorMap::of_units(units(product, w.address(), k, space), TILE_UNITS)?)
            }
            ExpertPart::Summed => {
                let matrix = Matrix { address: w.address(), n_rows: w.len() / k, n_columns: k, stride: k };
                (SUMMED, TensorMap::of(matrix, TILE_ROWS)?)
            }
        };
        let shape = UnitsShape::of(kernel, [n, k], space)?;
        let rows: ExpertRows = space.expert_rows();
        launch!(self, kernel, self.ring_grid(), &y, &of_w, &x, &rows, &shape)
    }

    /// Multiplies rows in FP8 by the first matrix, or rounds rows and multiplies them by the second one.
    pub(super) fn multiply_fp8_in_ring(
        &self,
        product: &ExpertProduct<'_>,
        w: Fp8Rows<'_>,
        space: &ExpertSpace,
        n_rows: usize,
    ) -> Result<(), CudaError> {
        let ExpertProduct { part, x, y, n, k, .. } = *product;
        let Some(quantized) = &space.quantized else { return not_widened() };
        let kernel = match (part, w.scaling) {
            (ExpertPart::Gated, Fp8Scales::OfRows) => GATED_FP8,
            (ExpertPart::Summed, Fp8Scales::OfRows) => SUMMED_FP8,
            (ExpertPart::Gated, Fp8Scales::OfBlocks) => GATED_BLOCKS,
            (ExpertPart::Summed, Fp8Scales::OfBlocks) => SUMMED_BLOCKS,
        };
        let (width, address) = (Fp8Rows::width(k), w.numbers.address());
        let (of_w, x_apart, x_scales) = match part {
            ExpertPart::Gated => {
                let of_w = TensorMap::of_fp8_units(units(product, address, width, space), TILE_UNITS)?;
                (of_w, QuantizedRows::scales_apart(n_rows), quantized.x_scales.view().address())
            }
            ExpertPart::Summed => (TensorMap::of_fp8(address, w.n_rows(k), width, TILE_ROWS)?, 0, 0),
        };
        let shape = RingFp8Shape {
            of: UnitsShape::of(kernel, [n, width], space)?,
            x_apart: number(kernel, x_apart)?,
            w_scales: w.scales.address(),
            x_scales,
        };
        launch!(self, kernel, self.ring_grid(), &y, &of_w, &x, &space.expert_rows(), &shape)
    }

    fn ring_grid(&self) -> Grid {
        Grid::of((self.n_multiprocessors() as usize, 1, 1), THREADS, SHARED_BYTES)
    }
}

/// Describes the matrices of gate and up, whose rows have `width` numbers with padding.
fn units(product: &ExpertProduct<'_>, address: u64, width: usize, space: &ExpertSpace) -> UnitMatrices {
    UnitMatrices { address, n_experts: space.sizes.n_all(), n_rows: product.n / 2, width }
}

/// Returns the dynamic shared memory of a kernel of this file.
pub(in crate::cuda) fn shared_bytes_of(kernel: &str) -> Option<u32> {
    let all = [GATED, SUMMED, GATED_FP8, SUMMED_FP8, GATED_BLOCKS, SUMMED_BLOCKS];
    all.contains(&kernel).then_some(SHARED_BYTES)
}
