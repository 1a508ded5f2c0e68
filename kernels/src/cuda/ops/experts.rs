//! A layer of experts: the choice of each row's experts, and the products with the experts' matrices.
//!
//! The GPU determines which rows an expert computes; the host knows only the number of choices. With few
//! rows, products read the experts that have rows and no others. On Hopper, many rows are copied expert by
//! expert and multiplied in the tiles of `many_rows.cuh`.
//!
//! The rows that experts in FP8 multiply have other forms: see [`experts_fp8`](super::experts_fp8).

use super::expert_products::{ExpertPart, ExpertProduct};
use super::expert_space::{
    ExpertActivations, ExpertSizes, ExpertSpace, ExpertsForm, GATHER_BLOCKS, PLACE_THREADS, ROW_THREADS,
    SCORE_EXPERTS, SCORE_ROWS,
};
use super::experts_fp8::check_fp8;
use super::many_rows;
use super::rows::{NormedRows, check_norm};
use super::{Bf16, ComputeCard, CudaError, View, ViewMut, WeightMatrix, ensure, launch, number, rows_of};
use device::cuda::card::grid;

/// The largest number of experts of a layer, and of experts of a row, as in `experts.cu`.
pub const EXPERTS_MAX: usize = 512;
pub const EXPERTS_OF_ROW_MAX: usize = 32;

/// The largest number of groups of experts: a lane has each, in `expert_choice.cuh`.
pub const EXPERT_GROUPS_MAX: usize = 32;

/// The number of threads of a block that scores rows, as in `experts.cu`.
const SCORE_THREADS: u32 = 512;
/// Up to this number of rows, a block scores them for 16 experts only, so that all multiprocessors have work.
const SCORED_AT_ONCE: usize = 512;
/// From this average number of rows of an expert on, tiles of many rows are faster than the ring, which takes 64 rows at a
/// time, and for matrices in FP8 that are widened first.
const TILES_FROM: usize = 40;
/// The same for rows in FP8.
const ROUNDED_FROM: usize = 48;

/// How a row's experts are chosen and weighted, beside [`ExpertSizes`].
#[derive(Clone, Copy, Debug)]
pub struct ExpertChoice<'a> {
    /// The correction that is added to the sigmoids of scores for the choice; `None`: scores are exponentials,
    /// divided by their sum.
    pub correction: Option<View<'a, f32>>,
    /// The number of groups of neighbouring experts, and of those whose experts a row may have; `None`: any.
    pub groups: Option<[usize; 2]>,
    /// The factor of all weights.
    pub scaling: f32,
}

impl ExpertChoice<'_> {
    /// The experts with the greatest exponentials.
    pub const PLAIN: Self = Self { correction: None, groups: None, scaling: 1.0 };
}

/// The weights of a layer of experts.
#[derive(Clone, Copy, Debug)]
pub struct ExpertLayer<'a> {
    /// One row for each expert.
    pub router: View<'a, Bf16>,
    pub choice: ExpertChoice<'a>,
    /// For each expert the rows of gate, then of up.
    pub gate_up: WeightMatrix<'a>,
    pub down: WeightMatrix<'a>,
    pub sizes: ExpertSizes,
}

/// The rows of a layer's input.
#[derive(Debug)]
pub enum ExpertInput<'a> {
    Normed(View<'a, Bf16>),
    /// They are added to the residual first, and the sum is normed: see [`ComputeCard::norms_with_choice`].
    Given {
        given: View<'a, Bf16>,
        rows: NormedRows<'a>,
    },
}

/// The output of the sums of each row's experts.
#[derive(Debug)]
pub enum ExpertSums<'a> {
    Written(ViewMut<'a, Bf16>),
    /// They are added to the residual, and the sum is normed.
    Normed(NormedRows<'a>),
}

/// The fields of ChoiceSums in choice_sums.cuh, in the same order.
#[repr(C)]
struct ChoiceSums {
    y: u64,
    places: u64,
    weights: u64,
    per_row: u32,
    are_early: u32,
}

/// The fields of RouterShape in expert_choice.cuh, in the same order.
#[repr(C)]
pub(super) struct RouterShape {
    n_rows: u32,
    k: u32,
    n_experts: u32,
    per_row: u32,
    n_shared: u32,
    is_normalized: u32,
    n_groups: u32,
    groups_per_row: u32,
    scaling: f32,
    first_held: u32,
    every: u32,
}

impl ExpertInput<'_> {
    /// Returns the number of numbers of all rows.
    pub fn n_numbers(&self) -> usize {
        match self {
            Self::Normed(x) => x.len(),
            Self::Given { given, .. } => given.len(),
        }
    }
}

impl ExpertLayer<'_> {
    /// Returns the address of the correction. A null address tells the kernel that there is none.
    pub(super) fn correction(&self) -> u64 {
        self.choice.correction.map_or(0, |correction| correction.address())
    }

    pub(super) fn router_shape(&self, kernel: &'static str, n_rows: usize) -> Result<RouterShape, CudaError> {
        let ExpertSizes { hidden, n_experts, per_row, n_shared, held, is_normalized, .. } = self.sizes;
        let [n_groups, groups_per_row] = self.choice.groups.unwrap_or_default();
        Ok(RouterShape {
            n_rows: number(kernel, n_rows)?,
            k: number(kernel, hidden)?,
            n_experts: number(kernel, n_experts)?,
            per_row: number(kernel, per_row)?,
            n_shared: number(kernel, n_shared)?,
            is_normalized: u32::from(is_normalized),
            n_groups: number(kernel, n_groups)?,
            groups_per_row: number(kernel, groups_per_row)?,
            scaling: self.choice.scaling,
            first_held: number(kernel, held.first)?,
            every: number(kernel, held.every)?,
        })
    }

    fn check(
        &self,
        card: &ComputeCard,
        form: ExpertsForm,
        space: &ExpertSpace,
        n_rows: usize,
    ) -> Result<(), CudaError> {
        let kernel = "experts";
        let Self { router, gate_up, down, sizes, .. } = self;
        let ExpertSizes { hidden, width, n_experts, per_row, .. } = *sizes;
        let views = [router, &gate_up.halves(), &down.halves(), &space.rows.view(), &space.gated.view()];
        card.check_places(kernel, &views.map(|view| view as _), &[])?;
        ensure(kernel, space.sizes == *sizes && n_rows <= space.rows_max, "room for other rows")?;
        ensure(kernel, sizes.n_all() <= EXPERTS_MAX, "more than 512 experts")?;
        let are_chosen = per_row > 0 && per_row <= n_experts && sizes.n_choices() <= EXPERTS_OF_ROW_MAX;
        ensure(kernel, are_chosen, "no experts for a row, or more than 32")?;
        let are_held = sizes.held.first < sizes.held.every && n_experts.is_multiple_of(sizes.held.every);
        ensure(kernel, are_held, "experts that do not spread evenly over ranks")?;
        if let Some(correction) = &self.choice.correction {
            card.check_places(kernel, &[], &[correction])?;
            ensure(kernel, correction.len() == n_experts, "not one correction for each expert")?;
        }
        if let Some([n_groups, per_row_max]) = self.choice.groups {
            let are_whole = (1..=EXPERT_GROUPS_MAX).contains(&n_groups) && n_experts.is_multiple_of(n_groups);
            let are_enough =
                (1..=n_groups).contains(&per_row_max) && n_experts / n_groups * per_row_max >= per_row;
            ensure(
                kernel,
                are_whole && are_enough,
                "groups that are uneven, too many, or too small for a row",
            )?;
        }
        let are_eights = hidden.is_multiple_of(8) && width.is_multiple_of(8) && hidden > 0 && width > 0;
        ensure(kernel, are_eights, "rows whose width is not a multiple of 8")?;
        ensure(
            kernel,
            router.len() == n_experts * hidden,
            "a router of another size than that of all experts",
        )?;
        for (matrix, n, k) in [(gate_up, 2 * width, hidden), (down, hidden, width)] {
            match matrix {
                WeightMatrix::Bf16(numbers) | WeightMatrix::Widened(numbers) => {
                    ensure(
                        kernel,
                        numbers.len() == sizes.n_all() * n * k,
                        "matrices of another size than that of all experts",
                    )?;
                }
                WeightMatrix::Fp8(rows) => check_fp8(*rows, *sizes, n, k)?,
            }
        }
        let are_alike = gate_up.fp8_scales() == down.fp8_scales();
        ensure(kernel, form == ExpertsForm::Tiles || are_alike, "matrices in two formats")
    }
}

impl ComputeCard {
    /// Returns the fastest form for these rows of a layer in bf16, or in FP8.
    pub fn experts_form(&self, layer: ExpertLayer<'_>, space: &ExpertSpace, n_rows: usize) -> ExpertsForm {
        let tiles_from = match (layer.gate_up, space.activations()) {
            (WeightMatrix::Fp8(_), ExpertActivations::Rounded) => ROUNDED_FROM,
            _ => TILES_FROM,
        };
        let are_many = n_rows * layer.sizes.per_row >= tiles_from * layer.sizes.n_experts;
        match self.has_many_rows() && are_many {
            true => ExpertsForm::Tiles,
            false => ExpertsForm::Units,
        }
    }

    /// Chooses the experts of each row of the input, and computes `silu(gate) * up` for each choice.
    pub fn gate_experts(
        &self,
        form: ExpertsForm,
        layer: ExpertLayer<'_>,
        input: ExpertInput<'_>,
        space: &mut ExpertSpace,
    ) -> Result<(), CudaError> {
        let ExpertSizes { hidden, width, .. } = layer.sizes;
        let n_rows = rows_of("experts", input.n_numbers(), hidden)?;
        layer.check(self, form, space, n_rows)?;
        if n_rows == 0 {
            return Ok(());
        }
        let entering = match self.norms_with_choice(form, layer, space, n_rows) {
            true => self.choose_few(layer, input, space)?,
            false => self.choose_and_place(form, layer, input, space)?,
        };
        let product = ExpertProduct {
            part: ExpertPart::Gated,
            w: layer.gate_up,
            x: entering,
            y: space.gated.view().address(),
            n: 2 * width,
            k: hidden,
            y_width: width,
        };
        self.multiply_experts(form, product, space, n_rows)
    }

    /// Chooses and places. Returns the address of the rows that enter the first product.
    fn choose_and_place(
        &self,
        form: ExpertsForm,
        layer: ExpertLayer<'_>,
        input: ExpertInput<'_>,
        space: &mut ExpertSpace,
    ) -> Result<u64, CudaError> {
        let kernel = "experts";
        let ExpertInput::Normed(x) = input else {
            return Err(CudaError::Argument { kernel, wrong: "rows that are not normed" });
        };
        self.check_places(kernel, &[&x], &[])?;
        let n_rows = rows_of(kernel, x.len(), layer.sizes.hidden)?;
        self.choose_experts(layer, x, space, n_rows)?;
        let rows_at = |space: &ExpertSpace| space.rows.view().address();
        Ok(match (form, layer.gate_up.fp8_scales()) {
            (ExpertsForm::Units, None) => {
                self.place_choices(form, space, n_rows)?;
                x.address()
            }
            (ExpertsForm::Units, Some(_)) if self.has_fp8_ring(space) => self.place_and_quantize(x, space)?,
            (ExpertsForm::Units, Some(_)) => {
                self.place_and_order(x, space)?;
                rows_at(space)
            }
            (ExpertsForm::Tiles, fp8) => {
                self.place_choices(form, space, n_rows)?;
                match fp8 {
                    Some(_) => self.quantize_choices(x, space)?,
                    None => self.gather_choices(x, space)?,
                }
                rows_at(space)
            }
        })
    }

    /// Multiplies the rows of [`gate_experts`](Self::gate_experts) by the second matrix, and adds up the
    /// experts of each row.
    pub fn sum_experts(
        &self,
        form: ExpertsForm,
        layer: ExpertLayer<'_>,
        to: ExpertSums<'_>,
        space: &mut ExpertSpace,
    ) -> Result<(), CudaError> {
        let kernel = "sum_choices";
        let ExpertSizes { hidden, width, .. } = layer.sizes;
        let n_rows = match &to {
            ExpertSums::Written(out) => {
                self.check_places(kernel, &[out], &[])?;
                rows_of(kernel, out.len(), hidden)?
            }
            ExpertSums::Normed(NormedRows { out, residual, weight, .. }) => {
                self.check_places(kernel, &[out, residual, weight], &[])?;
                let are_alike = out.len() == residual.len() && weight.len() == hidden;
                ensure(kernel, are_alike, "output, residual and norm of different lengths")?;
                check_norm(kernel, out.len(), hidden)?
            }
        };
        layer.check(self, form, space, n_rows)?;
        if n_rows == 0 {
            return Ok(());
        }
        let x = match layer.down.fp8_scales() {
            None => space.gated.view().address(),
            Some(_) => self.round_gated(form, space, n_rows)?,
        };
        let product = ExpertProduct {
            part: ExpertPart::Summed,
            w: layer.down,
            x,
            y: space.rows.view().address(),
            n: hidden,
            k: width,
            y_width: hidden,
        };
        self.multiply_experts(form, product, space, n_rows)?;
        let (config, width) = (grid(n_rows, 1, ROW_THREADS), number(kernel, hidden)?);
        let sums = ChoiceSums {
            y: space.rows.view().address(),
            places: space.places.view().address(),
            weights: space.weights.view().address(),
            per_row: number(kernel, layer.sizes.n_choices())?,
            are_early: u32::from(form == ExpertsForm::Units && self.has_ring_for(layer.down, space)),
        };
        match to {
            ExpertSums::Written(out) => launch!(self, kernel, config, &out.address(), &sums, &width),
            ExpertSums::Normed(NormedRows { out, residual, weight, epsilon }) => {
                let kernel = "add_choices_rms_norm";
                let (out, residual, weight) = (out.address(), residual.address(), weight.address());
                launch!(self, kernel, config, &out, &residual, &sums, &weight, &width, &epsilon)
            }
        }
    }

    fn choose_experts(
        &self,
        layer: ExpertLayer<'_>,
        x: View<'_, Bf16>,
        space: &mut ExpertSpace,
        n_rows: usize,
    ) -> Result<(), CudaError> {
        let are_many = n_rows > SCORED_AT_ONCE;
        let kernel = if are_many { "choose_experts_of_many" } else { "choose_experts" };
        let (shape, correction) = (layer.router_shape(kernel, n_rows)?, layer.correction());
        let (n_tiles, n_eights) =
            (layer.sizes.n_experts.div_ceil(SCORE_EXPERTS), n_rows.div_ceil(SCORE_ROWS));
        let (experts, weights) = (space.experts.view_mut().address(), space.weights.view_mut().address());
        let (scores, n_scored) = (space.scores.view_mut().address(), space.n_scored.view_mut().address());
        let (router, x) = (layer.router.address(), x.address());
        if are_many {
            let config = grid(n_eights.div_ceil(2), 1, SCORE_THREADS);
            launch!(self, kernel, config, &experts, &weights, &scores, &router, &correction, &x, &shape)
        } else {
            let config = grid(n_tiles, n_eights, SCORE_THREADS);
            launch!(
                self,
                kernel,
                config,
                &experts,
                &weights,
                &scores,
                &n_scored,
                &router,
                &correction,
                &x,
                &shape
            )
        }
    }

    fn place_choices(
        &self,
        form: ExpertsForm,
        space: &mut ExpertSpace,
        n_rows: usize,
    ) -> Result<(), CudaError> {
        let kernel = "place_choices";
        let tile_rows = if form == ExpertsForm::Tiles { many_rows::ROWS as u32 } else { 1 };
        let (to, shape) = (space.place_addresses(), space.places_shape(tile_rows, n_rows)?);
        let config = grid(space.sizes.n_all(), 1, PLACE_THREADS);
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
            &number(kernel, space.sizes.n_choices())?
        )
    }
}
