//! A layer of experts: the choice of each row's experts, and the products with the experts' matrices.
//!
//! The GPU works out which rows an expert computes; the host knows only the number of choices. With few rows,
//! products read the experts that have rows and no others. On Hopper, many rows are copied expert by expert
//! and multiplied in the tiles of `many_rows.cuh`.

use super::many_rows::{self, MatrixTiles};
use super::{Bf16, ComputeCard, CudaError, GRID_SIDE_MAX, View, ViewMut, ensure, launch, number, rows_of};
use crate::cuda::tensor_map::{Matrix, TensorMap};
use device::cuda::Buffer;
use device::cuda::card::{Grid, grid};

/// The largest number of experts of a layer, and of experts of a row, as in `experts.cu`.
pub const EXPERTS_MAX: usize = 512;
pub const EXPERTS_OF_ROW_MAX: usize = 32;

/// The numbers of threads and of rows of a block that chooses, as in `experts.cu`.
const SCORE_THREADS: u32 = 512;
const SCORE_ROWS: usize = 8;
const PLACE_THREADS: u32 = 512;
/// The number of threads of a block that multiplies few rows.
const UNIT_THREADS: u32 = 256;
const ROW_THREADS: u32 = 256;
const GATHER_BLOCKS: usize = 8;
/// From this average number of rows of an expert on, tiles of many rows are faster.
const TILES_FROM: usize = 16;

const GROUPED: &str = "grouped_rows";
const GROUPED_GATED: &str = "grouped_rows_gated";

/// The sizes of a layer of experts, or of one rank's share of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertSizes {
    pub hidden: usize,
    /// The width of an expert's inner layer.
    pub width: usize,
    pub n_experts: usize,
    /// The number of experts that compute each row.
    pub per_row: usize,
    /// Whether the weights of a row's experts add up to one.
    pub is_normalized: bool,
}

/// How the rows of experts are multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertsForm {
    /// Units of 16 rows of a matrix, up to 8 or 32 rows of an expert at a time. A row's result does not depend
    /// on the other rows.
    Units,
    /// Tiles of 128 rows of an expert. On Hopper only.
    Tiles,
}

/// The weights of a layer of experts.
#[derive(Clone, Copy, Debug)]
pub struct ExpertLayer<'a> {
    /// One row for each expert.
    pub router: View<'a, Bf16>,
    /// For each expert the rows of gate, then of up.
    pub gate_up: View<'a, Bf16>,
    pub down: View<'a, Bf16>,
    pub sizes: ExpertSizes,
}

/// The memory of a layer of experts: choices, their places, and the rows of experts.
#[derive(Debug)]
pub struct ExpertSpace {
    sizes: ExpertSizes,
    rows_max: usize,
    experts: Buffer<u32>,
    weights: Buffer<f32>,
    starts: Buffer<u32>,
    counts: Buffer<u32>,
    touched: Buffer<u32>,
    tiles: Buffer<u32>,
    choices: Buffer<u32>,
    places: Buffer<u32>,
    /// The rows that enter the first product, then those that leave the second: (places, hidden).
    rows: Buffer<Bf16>,
    /// The rows between both products: (places, width).
    gated: Buffer<Bf16>,
}

/// The fields of RouterShape in experts.cu, in the same order, as in all structs below.
#[repr(C)]
struct RouterShape {
    n_rows: u32,
    k: u32,
    n_experts: u32,
    per_row: u32,
    is_normalized: u32,
}

#[repr(C)]
struct Places {
    starts: u64,
    counts: u64,
    touched: u64,
    tiles: u64,
    choices: u64,
    places: u64,
}

#[repr(C)]
struct PlacesShape {
    n_choices: u32,
    n_experts: u32,
    tile_rows: u32,
    n_tiles_max: u32,
}

#[repr(C)]
struct ExpertRows {
    starts: u64,
    counts: u64,
    touched: u64,
    choices: u64,
}

#[repr(C)]
struct UnitsShape {
    n: u32,
    k: u32,
    n_experts: u32,
    per_row: u32,
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

/// One product of the rows of all experts.
struct ExpertProduct<'a> {
    /// The names of the kernels for 8 and for 32 rows of an expert, and for tiles.
    names: [&'static str; 3],
    w: View<'a, Bf16>,
    x: u64,
    y: u64,
    /// The rows of an expert's matrix, their width, and the width of the output.
    n: usize,
    k: usize,
    y_width: usize,
    matrix: MatrixTiles,
}

impl ExpertSizes {
    /// Returns the number of places of rows of experts, if each expert's rows start a tile.
    fn n_places(self, rows_max: usize) -> usize {
        let tile = many_rows::ROWS;
        (rows_max * self.per_row + self.n_experts * (tile - 1)).next_multiple_of(tile)
    }

    /// Returns the bytes of an [`ExpertSpace`] for up to `rows_max` rows.
    pub fn space_bytes(self, rows_max: usize) -> usize {
        let (n_places, n_choices) = (self.n_places(rows_max), rows_max * self.per_row);
        let words = 3 * n_choices + 3 * self.n_experts + n_places + n_places / many_rows::ROWS + 2;
        words * size_of::<u32>() + n_places * (self.hidden + self.width) * size_of::<Bf16>()
    }
}

impl ExpertSpace {
    /// Allocates the memory for up to `rows_max` rows.
    pub fn new(card: &ComputeCard, sizes: ExpertSizes, rows_max: usize) -> Result<Self, CudaError> {
        let (n_places, n_choices) = (sizes.n_places(rows_max), rows_max * sizes.per_row);
        Ok(Self {
            sizes,
            rows_max,
            experts: card.buffer(n_choices)?,
            weights: card.buffer(n_choices)?,
            starts: card.buffer(sizes.n_experts)?,
            counts: card.buffer(sizes.n_experts)?,
            touched: card.buffer(sizes.n_experts + 1)?,
            tiles: card.buffer(n_places / many_rows::ROWS + 1)?,
            choices: card.buffer(n_places)?,
            places: card.buffer(n_choices)?,
            rows: card.buffer(n_places * sizes.hidden)?,
            gated: card.buffer(n_places * sizes.width)?,
        })
    }

    fn n_tiles_max(&self) -> usize {
        self.tiles.len() - 1
    }
}

impl ExpertLayer<'_> {
    fn check(&self, card: &ComputeCard, space: &ExpertSpace, n_rows: usize) -> Result<(), CudaError> {
        let kernel = "experts";
        let Self { router, gate_up, down, sizes } = self;
        let ExpertSizes { hidden, width, n_experts, per_row, .. } = *sizes;
        card.check_places(kernel, &[router, gate_up, down, &space.rows.view(), &space.gated.view()], &[])?;
        ensure(kernel, space.sizes == *sizes && n_rows <= space.rows_max, "room for other rows")?;
        ensure(kernel, n_experts <= EXPERTS_MAX, "more than 512 experts")?;
        let is_chosen = (1..=EXPERTS_OF_ROW_MAX.min(n_experts)).contains(&per_row);
        ensure(kernel, is_chosen, "no experts for a row, or more than 32")?;
        let are_eights = hidden.is_multiple_of(8) && width.is_multiple_of(8) && hidden > 0 && width > 0;
        ensure(kernel, are_eights, "rows whose width is not a multiple of 8")?;
        let are_whole = router.len() == n_experts * hidden
            && gate_up.len() == n_experts * 2 * width * hidden
            && down.len() == n_experts * width * hidden;
        ensure(kernel, are_whole, "matrices of another size than that of all experts")
    }
}

impl ComputeCard {
    /// Returns the fastest form for these rows.
    pub fn experts_form(&self, sizes: ExpertSizes, n_rows: usize) -> ExpertsForm {
        let are_many = n_rows * sizes.per_row >= TILES_FROM * sizes.n_experts;
        match self.has(GROUPED) && are_many {
            true => ExpertsForm::Tiles,
            false => ExpertsForm::Units,
        }
    }

    /// Chooses the experts of each row of `x`, and computes `silu(gate) * up` for each choice.
    pub fn gate_experts(
        &self,
        form: ExpertsForm,
        layer: ExpertLayer<'_>,
        x: View<'_, Bf16>,
        space: &mut ExpertSpace,
    ) -> Result<(), CudaError> {
        let ExpertSizes { hidden, width, .. } = layer.sizes;
        let n_rows = rows_of("experts", x.len(), hidden)?;
        self.check_places("experts", &[&x], &[])?;
        layer.check(self, space, n_rows)?;
        if n_rows == 0 {
            return Ok(());
        }
        self.choose_experts(layer, x, space, n_rows)?;
        self.place_choices(form, space, n_rows)?;
        if form == ExpertsForm::Tiles {
            self.gather_choices(x, space)?;
        }
        let product = ExpertProduct {
            names: ["experts_gated_8", "experts_gated_32", GROUPED_GATED],
            w: layer.gate_up,
            x: if form == ExpertsForm::Tiles { space.rows.view().address() } else { x.address() },
            y: space.gated.view().address(),
            n: 2 * width,
            k: hidden,
            y_width: width,
            matrix: MatrixTiles::gated(2 * width),
        };
        self.multiply_experts(form, product, space, n_rows)
    }

    /// Multiplies the rows of [`gate_experts`](Self::gate_experts) by the second matrix, and adds up the
    /// experts of each row of `out`.
    pub fn sum_experts(
        &self,
        form: ExpertsForm,
        layer: ExpertLayer<'_>,
        out: ViewMut<'_, Bf16>,
        space: &mut ExpertSpace,
    ) -> Result<(), CudaError> {
        let kernel = "sum_choices";
        let ExpertSizes { hidden, width, per_row, .. } = layer.sizes;
        let n_rows = rows_of(kernel, out.len(), hidden)?;
        self.check_places(kernel, &[&out], &[])?;
        layer.check(self, space, n_rows)?;
        if n_rows == 0 {
            return Ok(());
        }
        let product = ExpertProduct {
            names: ["experts_summed_8", "experts_summed_32", GROUPED],
            w: layer.down,
            x: space.gated.view().address(),
            y: space.rows.view().address(),
            n: hidden,
            k: width,
            y_width: hidden,
            matrix: MatrixTiles::plain(),
        };
        self.multiply_experts(form, product, space, n_rows)?;
        let (config, width) = (grid(n_rows, 1, ROW_THREADS), number(kernel, hidden)?);
        launch!(
            self,
            kernel,
            config,
            &out.address(),
            &space.rows.view().address(),
            &space.places.view().address(),
            &space.weights.view().address(),
            &width,
            &number(kernel, per_row)?
        )
    }

    fn choose_experts(
        &self,
        layer: ExpertLayer<'_>,
        x: View<'_, Bf16>,
        space: &mut ExpertSpace,
        n_rows: usize,
    ) -> Result<(), CudaError> {
        let kernel = "choose_experts";
        let ExpertSizes { hidden, n_experts, per_row, is_normalized, .. } = layer.sizes;
        let shape = RouterShape {
            n_rows: number(kernel, n_rows)?,
            k: number(kernel, hidden)?,
            n_experts: number(kernel, n_experts)?,
            per_row: number(kernel, per_row)?,
            is_normalized: u32::from(is_normalized),
        };
        let config = grid(n_rows.div_ceil(SCORE_ROWS), 1, SCORE_THREADS);
        launch!(
            self,
            kernel,
            config,
            &space.experts.view_mut().address(),
            &space.weights.view_mut().address(),
            &layer.router.address(),
            &x.address(),
            &shape
        )
    }

    fn place_choices(
        &self,
        form: ExpertsForm,
        space: &mut ExpertSpace,
        n_rows: usize,
    ) -> Result<(), CudaError> {
        let kernel = "place_choices";
        let n_experts = space.sizes.n_experts;
        let shape = PlacesShape {
            n_choices: number(kernel, n_rows * space.sizes.per_row)?,
            n_experts: number(kernel, n_experts)?,
            tile_rows: if form == ExpertsForm::Tiles { many_rows::ROWS as u32 } else { 1 },
            n_tiles_max: number(kernel, space.n_tiles_max())?,
        };
        let to = Places {
            starts: space.starts.view_mut().address(),
            counts: space.counts.view_mut().address(),
            touched: space.touched.view_mut().address(),
            tiles: space.tiles.view_mut().address(),
            choices: space.choices.view_mut().address(),
            places: space.places.view_mut().address(),
        };
        let config = grid(n_experts, 1, PLACE_THREADS);
        launch!(self, kernel, config, &to, &space.experts.view().address(), &shape)
    }

    fn gather_choices(&self, x: View<'_, Bf16>, space: &mut ExpertSpace) -> Result<(), CudaError> {
        let kernel = "gather_choices";
        let config = grid(self.n_multiprocessors() as usize * GATHER_BLOCKS, 1, ROW_THREADS);
        launch!(
            self,
            kernel,
            config,
            &space.rows.view_mut().address(),
            &x.address(),
            &space.choices.view().address(),
            &space.tiles.slice(space.n_tiles_max()..space.tiles.len()).address(),
            &number(kernel, many_rows::ROWS)?,
            &number(kernel, space.sizes.hidden)?,
            &number(kernel, space.sizes.per_row)?
        )
    }

    fn multiply_experts(
        &self,
        form: ExpertsForm,
        product: ExpertProduct<'_>,
        space: &ExpertSpace,
        n_rows: usize,
    ) -> Result<(), CudaError> {
        if form == ExpertsForm::Tiles {
            return self.multiply_tiles(product, space);
        }
        let ExpertProduct { names: [of_8, of_32, _], w, x, y, n, k, .. } = product;
        let (kernel, blocks) = if n_rows <= 8 { (of_8, 3) } else { (of_32, 2) };
        let rows = ExpertRows {
            starts: space.starts.view().address(),
            counts: space.counts.view().address(),
            touched: space.touched.view().address(),
            choices: space.choices.view().address(),
        };
        let shape = UnitsShape {
            n: number(kernel, n)?,
            k: number(kernel, k)?,
            n_experts: number(kernel, space.sizes.n_experts)?,
            per_row: number(kernel, space.sizes.per_row)?,
        };
        let config = grid(self.n_multiprocessors() as usize * blocks, 1, UNIT_THREADS);
        launch!(self, kernel, config, &y, &w.address(), &x, &rows, &shape)
    }

    fn multiply_tiles(&self, product: ExpertProduct<'_>, space: &ExpertSpace) -> Result<(), CudaError> {
        let ExpertProduct { names: [.., kernel], w, x, y, n, k, y_width, matrix } = product;
        ensure(kernel, self.has(kernel), "a GPU other than Hopper")?;
        let n_places = space.choices.len();
        let n_columns = y_width.div_ceil(matrix.tile_rows);
        let shape = GroupedShape {
            k: number(kernel, k)?,
            n_pairs: number(kernel, n_columns.div_ceil(many_rows::CLUSTER))?,
            n: number(kernel, n)?,
            tile_rows: number(kernel, matrix.tile_rows)?,
            half_rows: number(kernel, matrix.half_rows)?,
            n_tiles_max: number(kernel, space.n_tiles_max())?,
            tiles: space.tiles.view().address(),
        };
        let of = |address, n_rows, width| Matrix { address, n_rows, n_columns: width, stride: width };
        let of_y = TensorMap::of(of(y, n_places, y_width), many_rows::GROUP_ROWS)?;
        let of_w = TensorMap::of(of(w.address(), w.len() / k, k), many_rows::HALF)?;
        let of_x = TensorMap::of(of(x, n_places, k), many_rows::ROWS / many_rows::CLUSTER)?;
        let n_clusters = self.n_multiprocessors() as usize / many_rows::CLUSTER;
        let blocks = (n_clusters.max(1) * many_rows::CLUSTER).min(GRID_SIDE_MAX);
        let config = Grid::of((blocks, 1, 1), many_rows::THREADS, many_rows::SHARED_BYTES);
        launch!(self, kernel, config, many_rows::CLUSTER, &of_y, &of_w, &of_x, &shape)
    }
}

/// Returns the dynamic shared memory of a kernel of `grouped_rows.cu`.
pub(in crate::cuda) fn shared_bytes_of(kernel: &str) -> Option<u32> {
    [GROUPED, GROUPED_GATED].contains(&kernel).then_some(many_rows::SHARED_BYTES)
}
