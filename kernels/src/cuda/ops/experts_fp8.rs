//! The rows that products with experts in FP8 multiply, before and between the two products.
//!
//! Tiles multiply rows in FP8, and so do units of rounded rows on Hopper (`experts_ring_fp8.cu`). Other units multiply rows of
//! bf16 in the order of a tensor core's lanes (`expert_units.cuh`).

use super::expert_space::{
    ExpertActivations, ExpertSizes, ExpertSpace, ExpertsForm, GATHER_BLOCKS, PLACE_THREADS, QuantizedSpace,
    ROW_THREADS,
};
use super::fp8::QuantizedShape;
use super::many_rows;
use super::{Bf16, ComputeCard, CudaError, Fp8Rows, QuantizedRows, View, ensure, launch, number};
use crate::cpu::ROUND_GROUP;
use device::cuda::card::{Grid, grid};

/// The number of numbers of a thread that orders rows.
const ORDERED_AT_ONCE: usize = 8;

/// The fields of OrderedShape in experts.cu, in the same order.
#[repr(C)]
struct OrderedShape {
    n_rows: u32,
    k: u32,
    are_rounded: u32,
}

/// The fields of GatherShape in grouped_rows_fp8.cu, in the same order.
#[repr(C)]
struct GatherShape {
    tile_rows: u32,
    width: u32,
    per_row: u32,
    n_groups: u32,
    to_apart: u32,
    from_apart: u32,
}

/// Checks the matrices of all experts, each of `n` rows of `k` numbers.
pub(super) fn check_fp8(w: Fp8Rows<'_>, sizes: ExpertSizes, n: usize, k: usize) -> Result<(), CudaError> {
    let kernel = "experts_fp8";
    let (width, n_experts) = (sizes.width, sizes.n_all());
    ensure(
        kernel,
        width.is_multiple_of(Fp8Rows::width(1)),
        "an inner layer whose width is not a multiple of 64",
    )?;
    let (numbers, scales) = (n * Fp8Rows::width(k), w.scaling.count(n, k));
    let are_whole = w.numbers.len() == n_experts * numbers && w.scales.len() == n_experts * scales;
    ensure(kernel, are_whole, "matrices of another size than that of all experts")
}

impl ComputeCard {
    /// Places the choices, and writes the rows of `x` to the space in the order of lanes, rounded or not.
    pub(super) fn place_and_order(
        &self,
        x: View<'_, Bf16>,
        space: &mut ExpertSpace,
    ) -> Result<(), CudaError> {
        let kernel = "place_and_order";
        let (hidden, n_experts) = (space.sizes.hidden, space.sizes.n_all());
        let n_rows = x.len() / hidden;
        let (to, shape) = (space.place_addresses(), space.places_shape(1, n_rows)?);
        let rows = OrderedShape {
            n_rows: number(kernel, n_rows)?,
            k: number(kernel, hidden)?,
            are_rounded: u32::from(space.activations() == ExpertActivations::Rounded),
        };
        let config = self.placing_grid(n_experts, n_rows, hidden);
        let (experts, ordered) = (space.experts.view().address(), space.rows.view_mut().address());
        launch!(self, kernel, config, &to, &experts, &shape, &ordered, &x.address(), &rows)
    }

    /// Places the choices, and writes the rows of `x` in FP8. Returns the address of the latter.
    pub(super) fn place_and_quantize(
        &self,
        x: View<'_, Bf16>,
        space: &mut ExpertSpace,
    ) -> Result<u64, CudaError> {
        let kernel = "place_and_quantize";
        let (hidden, n_experts) = (space.sizes.hidden, space.sizes.n_all());
        let n_rows = x.len() / hidden;
        let (to, shape) = (space.place_addresses(), space.places_shape(1, n_rows)?);
        let Some(quantized) = &mut space.quantized else { return not_widened() };
        let (numbers, scales) = (quantized.x.view_mut().address(), quantized.x_scales.view_mut().address());
        let (rows, experts) = (QuantizedShape::of(kernel, n_rows, hidden)?, space.experts.view().address());
        let config = self.placing_grid(n_experts, n_rows, hidden);
        launch!(self, kernel, config, &to, &experts, &shape, &numbers, &scales, &x.address(), &rows)?;
        Ok(numbers)
    }

    /// Returns one block for each expert, and blocks that write rows of `k` numbers in another form.
    fn placing_grid(&self, n_experts: usize, n_rows: usize, k: usize) -> Grid {
        let n_threads = n_rows * k.next_multiple_of(ROUND_GROUP) / ORDERED_AT_ONCE;
        let n_blocks = n_threads.div_ceil(PLACE_THREADS as usize).min(self.n_multiprocessors() as usize * 4);
        grid(n_experts + n_blocks, 1, PLACE_THREADS)
    }

    /// Writes the rows of `x` in FP8.
    fn quantize_input(&self, x: View<'_, Bf16>, space: &mut ExpertSpace) -> Result<(), CudaError> {
        let (hidden, Some(quantized)) = (space.sizes.hidden, &mut space.quantized) else {
            return not_widened();
        };
        let n_rows = x.len() / hidden;
        let to = quantized.x.view_mut().slice(0..n_rows * Fp8Rows::width(hidden));
        let scales = quantized.x_scales.view_mut().slice(0..QuantizedRows::n_scales(n_rows, hidden));
        self.quantize_rows(to, scales, x, hidden)
    }

    /// Writes the row of each choice to its place, in FP8.
    pub(super) fn quantize_choices(
        &self,
        x: View<'_, Bf16>,
        space: &mut ExpertSpace,
    ) -> Result<(), CudaError> {
        let kernel = "gather_quantized";
        self.quantize_input(x, space)?;
        let ExpertSpace { sizes, tiles, choices, rows, quantized, .. } = space;
        let Some(quantized) = quantized else { return not_widened() };
        let (hidden, n_tiles_max) = (sizes.hidden, tiles.len() - 1);
        let (n_rows, width) = (x.len() / hidden, Fp8Rows::width(hidden));
        let QuantizedSpace { x: numbers, x_scales, scales, .. } = quantized;
        let shape = GatherShape {
            tile_rows: number(kernel, many_rows::ROWS)?,
            width: number(kernel, width)?,
            per_row: number(kernel, sizes.n_choices())?,
            n_groups: number(kernel, hidden.div_ceil(ROUND_GROUP))?,
            to_apart: number(kernel, QuantizedRows::scales_apart(sizes.n_places(n_rows)))?,
            from_apart: number(kernel, QuantizedRows::scales_apart(n_rows))?,
        };
        let config = grid(self.n_multiprocessors() as usize * GATHER_BLOCKS, 1, ROW_THREADS);
        launch!(
            self,
            kernel,
            config,
            &rows.view_mut().address(),
            &scales.view_mut().address(),
            &numbers.view().address(),
            &x_scales.view().address(),
            &choices.view().address(),
            &tiles.slice(n_tiles_max..n_tiles_max + 1).address(),
            &shape
        )
    }

    /// Rounds the rows between both products, if rows are rounded. The second product of `experts_ring_fp8.cu` does it itself.
    /// Returns the address of the rows that enter the second product.
    pub(super) fn round_gated(
        &self,
        form: ExpertsForm,
        space: &mut ExpertSpace,
        n_rows: usize,
    ) -> Result<u64, CudaError> {
        if form == ExpertsForm::Units && self.has_fp8_ring(space) {
            return Ok(space.gated.view().address());
        }
        let ExpertSpace { sizes, gated, quantized, .. } = space;
        let (width, address, n_choices) =
            (sizes.width, gated.view_mut().address(), n_rows * sizes.n_choices());
        match (form, quantized) {
            (ExpertsForm::Units, None) => Ok(address),
            // The order within 64 numbers does not matter for the scales of 128.
            (ExpertsForm::Units, Some(_)) => {
                let kernel = "round_rows";
                let config = self.rounding_grid(n_choices, width);
                let (n_choices, k) = (number(kernel, n_choices)?, number(kernel, width)?);
                launch!(self, kernel, config, &address, &address, &n_choices, &k)?;
                Ok(address)
            }
            (ExpertsForm::Tiles, Some(QuantizedSpace { gated: numbers, scales, .. })) => {
                let n_places = sizes.n_places(n_rows);
                let to = numbers.view_mut().slice(0..n_places * Fp8Rows::width(width));
                let scales = scales.view_mut().slice(0..QuantizedRows::n_scales(n_places, width));
                self.quantize_rows(to, scales, gated.slice(0..n_places * width), width)?;
                Ok(numbers.view().address())
            }
            (ExpertsForm::Tiles, None) => not_widened(),
        }
    }
}

pub(super) fn not_widened<T>() -> Result<T, CudaError> {
    Err(CudaError::Argument { kernel: "experts_fp8", wrong: "experts in FP8 that were not widened" })
}
