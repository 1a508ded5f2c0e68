//! The sizes of a layer of experts, and its memory on the GPU: choices, their places, and rows.

use super::fp8::{Fp8Rows, QuantizedRows};
use super::many_rows;
use super::{Bf16, ComputeCard, CudaError, number};
use device::cuda::Buffer;

/// The numbers of threads of a block that places choices, and of one that copies rows, and the number of the latter for each
/// multiprocessor, as in `experts.cu`.
pub(super) const PLACE_THREADS: u32 = 512;
pub(super) const ROW_THREADS: u32 = 256;
pub(super) const GATHER_BLOCKS: usize = 8;

/// The most rows of an item, as in `expert_rows.cuh`.
pub(super) const ITEM_ROWS: usize = 64;
/// The words of an item, as in `expert_rows.cuh`.
const ITEM_WORDS: usize = 4;

/// The numbers of rows and of experts that a block scores, as in `expert_choice.cuh`.
pub(super) const SCORE_ROWS: usize = 8;
pub(super) const SCORE_EXPERTS: usize = 16;

/// The sizes of a layer of experts, or of one rank's share of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertSizes {
    pub hidden: usize,
    /// The width of an expert's inner layer.
    pub width: usize,
    /// The number of experts of all ranks that rows choose from.
    pub n_experts: usize,
    pub held: HeldExperts,
    /// The number of experts that are chosen for each row.
    pub per_row: usize,
    /// The number of experts after the others that compute every row. If experts are spread, every rank has them.
    pub n_shared: usize,
    /// Whether the weights of a row's experts add up to one.
    pub is_normalized: bool,
}

/// The experts that a rank has, of those that rows choose from: every `every`-th one, from `first` on. It computes its own
/// choices only, and a shared expert for the rows that have the fewest choices here. So it gets a part of each row's sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldExperts {
    pub first: usize,
    pub every: usize,
}

impl HeldExperts {
    pub const ALL: Self = Self { first: 0, every: 1 };
}

/// How the rows of experts are multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertsForm {
    /// Items of up to 64 rows of an expert, with units of some rows of its matrix. On Hopper, units of 128 rows pass through
    /// a ring in shared memory. A row's result does not depend on the other rows.
    Units,
    /// Tiles of 128 rows of an expert. On Hopper only.
    Tiles,
}

/// The rows that products with experts in FP8 take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertActivations {
    /// In bf16, without rounding.
    Full,
    /// Rounded to FP8 before both products, as [`ComputeCard::round_rows`] does. The router scores the rows as they are.
    Rounded,
}

/// The memory of a layer of experts: choices, their places, and the rows of experts.
#[derive(Debug)]
pub struct ExpertSpace {
    pub(super) sizes: ExpertSizes,
    pub(super) rows_max: usize,
    pub(super) experts: Buffer<u32>,
    pub(super) weights: Buffer<f32>,
    /// The scores of all experts for each row, and the number of blocks that have scored each eight rows.
    pub(super) scores: Buffer<f32>,
    pub(super) n_scored: Buffer<u32>,
    pub(super) items: Buffer<u32>,
    pub(super) tiles: Buffer<u32>,
    pub(super) choices: Buffer<u32>,
    pub(super) places: Buffer<u32>,
    /// The rows that enter the first product, then those that leave the second: (places, hidden).
    pub(super) rows: Buffer<Bf16>,
    /// The rows between both products: (places, width).
    pub(super) gated: Buffer<Bf16>,
    /// The memory for rows in FP8; `None` if rows are not rounded.
    pub(super) quantized: Option<QuantizedSpace>,
}

/// The memory for rows in FP8. The rows that enter the first product are in [`ExpertSpace::rows`].
#[derive(Debug)]
pub(super) struct QuantizedSpace {
    /// The layer's input, and its scales.
    pub(super) x: Buffer<u8>,
    pub(super) x_scales: Buffer<f32>,
    /// The rows that enter the second product.
    pub(super) gated: Buffer<u8>,
    /// The scales of the rows that enter a product, at their places.
    pub(super) scales: Buffer<f32>,
}

/// The fields of Places in expert_places.cuh, in the same order.
#[repr(C)]
pub(super) struct Places {
    items: u64,
    tiles: u64,
    choices: u64,
    places: u64,
}

/// The fields of PlacesShape in expert_places.cuh, in the same order.
#[repr(C)]
pub(super) struct PlacesShape {
    n_choices: u32,
    n_experts: u32,
    tile_rows: u32,
    n_tiles_max: u32,
    n_items_max: u32,
}

/// The numbers of bytes and of scales of a [`QuantizedSpace`].
struct QuantizedLens {
    x: usize,
    x_scales: usize,
    gated: usize,
    scales: usize,
}

impl ExpertSizes {
    /// Returns the number of the rank's experts that rows choose from.
    pub fn n_held(self) -> usize {
        self.n_experts / self.held.every
    }

    /// Returns the number of all of the rank's experts, with those that compute every row.
    pub fn n_all(self) -> usize {
        self.n_held() + self.n_shared
    }

    /// Returns the number of experts that compute each row.
    pub fn n_choices(self) -> usize {
        self.per_row + self.n_shared
    }

    /// Returns the largest number of items: up to 64 rows of an expert.
    fn n_items_max(self, rows_max: usize) -> usize {
        self.n_all() + rows_max * self.n_choices() / ITEM_ROWS
    }

    /// Returns the number of places of rows of experts, if each expert's rows start a tile.
    pub(super) fn n_places(self, rows_max: usize) -> usize {
        let tile = many_rows::ROWS;
        (rows_max * self.n_choices() + self.n_all() * (tile - 1)).next_multiple_of(tile)
    }

    /// Returns the number of numbers of [`ExpertSpace::rows`], which also has rows in FP8 or in the order of lanes.
    fn n_row_numbers(self, rows_max: usize) -> usize {
        let padded = Fp8Rows::width(self.hidden);
        (self.n_places(rows_max) * self.hidden.max(padded / 2)).max(rows_max * padded)
    }

    /// Returns the number of scores, which blocks write whole.
    fn n_scores(self, rows_max: usize) -> usize {
        rows_max.next_multiple_of(2 * SCORE_ROWS) * self.n_experts.next_multiple_of(SCORE_EXPERTS)
    }

    /// Returns the bytes of an [`ExpertSpace`] for up to `rows_max` rows.
    pub fn space_bytes(self, rows_max: usize, activations: ExpertActivations) -> usize {
        let (n_places, n_choices) = (self.n_places(rows_max), rows_max * self.n_choices());
        let scores = self.n_scores(rows_max) + rows_max.div_ceil(SCORE_ROWS);
        let of_experts = (self.n_items_max(rows_max) + 1) * ITEM_WORDS;
        let words = scores + 3 * n_choices + of_experts + n_places + n_places / many_rows::ROWS + 1;
        let numbers = self.n_row_numbers(rows_max) + n_places * self.width;
        let quantized = match activations {
            ExpertActivations::Full => 0,
            ExpertActivations::Rounded => QuantizedSpace::bytes(self, rows_max),
        };
        words * size_of::<u32>() + numbers * size_of::<Bf16>() + quantized
    }
}

impl ExpertSpace {
    /// Allocates the memory for up to `rows_max` rows. `activations` are those of experts in FP8.
    pub fn new(
        card: &ComputeCard,
        sizes: ExpertSizes,
        rows_max: usize,
        activations: ExpertActivations,
    ) -> Result<Self, CudaError> {
        let (n_places, n_choices) = (sizes.n_places(rows_max), rows_max * sizes.n_choices());
        Ok(Self {
            sizes,
            rows_max,
            experts: card.buffer(n_choices)?,
            weights: card.buffer(n_choices)?,
            scores: card.buffer(sizes.n_scores(rows_max))?,
            n_scored: card.upload(&vec![0; rows_max.div_ceil(SCORE_ROWS)])?,
            items: card.buffer((sizes.n_items_max(rows_max) + 1) * ITEM_WORDS)?,
            tiles: card.buffer(n_places / many_rows::ROWS + 1)?,
            choices: card.buffer(n_places)?,
            places: card.buffer(n_choices)?,
            rows: card.buffer(sizes.n_row_numbers(rows_max))?,
            gated: card.buffer(n_places * sizes.width)?,
            quantized: match activations {
                ExpertActivations::Full => None,
                ExpertActivations::Rounded => Some(QuantizedSpace::new(card, sizes, rows_max)?),
            },
        })
    }

    /// Returns the rows that products with experts in FP8 take.
    pub fn activations(&self) -> ExpertActivations {
        match self.quantized {
            None => ExpertActivations::Full,
            Some(_) => ExpertActivations::Rounded,
        }
    }

    /// Returns the addresses of the places.
    pub(super) fn place_addresses(&mut self) -> Places {
        Places {
            items: self.items.view_mut().address(),
            tiles: self.tiles.view_mut().address(),
            choices: self.choices.view_mut().address(),
            places: self.places.view_mut().address(),
        }
    }

    pub(super) fn places_shape(&self, tile_rows: u32, n_rows: usize) -> Result<PlacesShape, CudaError> {
        let kernel = "place_choices";
        Ok(PlacesShape {
            n_choices: number(kernel, n_rows * self.sizes.n_choices())?,
            n_experts: number(kernel, self.sizes.n_all())?,
            tile_rows,
            n_tiles_max: number(kernel, self.n_tiles_max())?,
            n_items_max: number(kernel, self.n_items_max())?,
        })
    }

    pub(super) fn n_items_max(&self) -> usize {
        self.items.len() / ITEM_WORDS - 1
    }

    pub(super) fn n_tiles_max(&self) -> usize {
        self.tiles.len() - 1
    }
}

impl QuantizedLens {
    fn of(sizes: ExpertSizes, rows_max: usize) -> Self {
        let ExpertSizes { hidden, width, .. } = sizes;
        let n_places = sizes.n_places(rows_max);
        Self {
            x: rows_max * Fp8Rows::width(hidden),
            x_scales: QuantizedRows::n_scales(rows_max, hidden),
            gated: n_places * Fp8Rows::width(width),
            scales: QuantizedRows::n_scales(n_places, hidden.max(width)),
        }
    }
}

impl QuantizedSpace {
    pub(super) fn new(card: &ComputeCard, sizes: ExpertSizes, rows_max: usize) -> Result<Self, CudaError> {
        let QuantizedLens { x, x_scales, gated, scales } = QuantizedLens::of(sizes, rows_max);
        Ok(Self {
            x: card.buffer(x)?,
            x_scales: card.buffer(x_scales)?,
            gated: card.buffer(gated)?,
            scales: card.buffer(scales)?,
        })
    }

    /// Returns the bytes that [`new`](Self::new) allocates.
    pub(super) fn bytes(sizes: ExpertSizes, rows_max: usize) -> usize {
        let QuantizedLens { x, x_scales, gated, scales } = QuantizedLens::of(sizes, rows_max);
        x + gated + (x_scales + scales) * size_of::<f32>()
    }
}
