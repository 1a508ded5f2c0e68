//! Measures the fastest product methods for the shapes of a model, once for each kind of GPU.
//!
//! Each shape is measured alone first. For few rows, the fastest methods are then tried in whole decode
//! steps, in which kernels overlap, and two that are fast alone may slow each other down.

use std::collections::BTreeMap;

use device::cuda::{Bf16, CudaError, View};
use kernels::cuda::matmul::{Choice, Choices, TUNED_ROWS, TuningResult};
use kernels::cuda::{
    ComputeCard, Epilogue, Fp8Scales, FusedKernel, NormedRows, OutputRows, ProductOutput, ProductShape,
    Products, WeightMatrix, source,
};
use tracing::{debug, info, warn};
use types::in_full;

use super::CudaSettings;
use super::decoder::Decoder;
use super::latent::LatentSpace;
use super::lockstep::Helpers;
use super::plan::{BLOCK_TOKENS, Dims};
use super::rank::{Order, PREPARE_WITHIN, Rank};
use super::timing::time_step;
use super::tools::Tools;
use super::weights::{MATRIX_KINDS, all_of};
use super::workspace::Workspace;
use crate::backend::StepLimits;

/// The largest number of rows that is measured in whole steps. Larger products take long, so the kernels
/// before and after them matter little.
const STEP_ROWS_MAX: usize = 128;
/// The number of tokens of each sequence in the measured steps.
const STEP_TOKENS: usize = 1024;
/// The maximum number of rounds over all products. There are several, because the fastest method of one
/// product may change with the methods of the others.
const ROUNDS_MAX: usize = 2;
/// The search runs from each start whose step takes at most this multiple of the shortest step.
const START_MAX: f64 = 1.05;
/// The smallest gain that counts: repeated runs differ by this much.
const GAIN_MIN: f64 = 0.002;

/// One of a model's products, with the same shape in each layer.
struct Kind<'a> {
    matrices: Vec<WeightMatrix<'a>>,
    k: usize,
    rows_max: usize,
    is_wide: bool,
    fp8: Option<Fp8Scales>,
    after: JoinedWork,
}

/// The work after a product of many rows, which one kernel may do together with the product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum JoinedWork {
    Other,
    Gate,
    Norm,
}

impl Kind<'_> {
    fn n(&self) -> usize {
        self.matrices.first().map_or(0, |matrix| matrix.n_rows(self.k))
    }

    /// Returns the tuned numbers of rows, up to the first that is enough for every step.
    fn shapes(&self) -> impl Iterator<Item = ProductShape> + '_ {
        let n_needed = TUNED_ROWS.iter().take_while(|n_rows| **n_rows < self.rows_max).count() + 1;
        let rows = TUNED_ROWS.iter().take(n_needed).filter(|n_rows| **n_rows <= self.rows_max);
        rows.map(|n_rows| self.shape(*n_rows))
    }

    fn shape(&self, n_rows: usize) -> ProductShape {
        ProductShape { n: self.n(), k: self.k, n_rows, is_wide: self.is_wide, fp8: self.fp8 }
    }
}

/// Reads stored measurements, measures the other products, and stores the results. All ranks have products of
/// the same shapes and use the methods that the first rank chooses.
pub(super) fn tune(
    tools: &mut Tools,
    helpers: &mut Helpers<Rank>,
    limits: StepLimits,
    settings: &CudaSettings,
) -> Result<(), CudaError> {
    let Tools { card, decoder, products, space, .. } = tools;
    let about = format!(
        "{} {}, cuBLASLt {}, kernels {}, in company{}",
        card.name(),
        card.arch(),
        products.library_version(),
        source::digest(),
        if products.rounds_activations() { ", activations in FP8" } else { "" }
    );
    let file = settings.choices_file(&about);
    if let Some(file) = &file {
        products.adopt(Choices::read(file, &about));
    }
    // Ranks add up their partial sums before the norm, so the norm is not part of the product's work.
    let has_peers = decoder.sizes.share.n_ranks > 1;
    let norm = if has_peers { JoinedWork::Other } else { JoinedWork::Norm };
    let kinds = kinds(decoder, limits, norm);
    let missing: Vec<(&Kind<'_>, ProductShape)> = kinds
        .iter()
        .flat_map(|kind| kind.shapes().map(move |shape| (kind, shape)))
        .filter(|(_, shape)| products.choices().get(*shape).is_none())
        .collect();
    if missing.is_empty() || !settings.tunes {
        return choose(tools, helpers);
    }
    info!(shapes = missing.len(), "GEMM kernels are being measured for shapes without a stored choice");
    fill(card, space)?;
    if !decoder.sizes.stage.is_first() {
        // No step of this stage alone embeds tokens.
        card.dummy_weights(space.residual.view_mut(), 4, 1.0 / 32768.0)?;
    }
    let mut best = BTreeMap::new();
    for (kind, shape) in missing {
        best.insert(shape, measure(card, products, kind, shape, space, decoder.weights.norm.view())?);
    }
    let shapes: Vec<ProductShape> = kinds.iter().map(|kind| kind.shape(1)).collect();
    tune_in_steps(tools, helpers, limits, &shapes, &best)?;
    if let Some(file) = file
        && let Err(error) = tools.products.choices().write(&file, &about)
    {
        warn!(%error, "choices of GEMM kernels cannot be written to their file");
    }
    choose(tools, helpers)
}

/// Sends the choices to the other ranks.
fn choose(tools: &Tools, helpers: &mut Helpers<Rank>) -> Result<(), CudaError> {
    if helpers.are_there() {
        helpers.begin(&Order::SetChoices(tools.products.choices().clone()))?;
        helpers.finish(PREPARE_WITHIN)?;
    }
    Ok(())
}

/// Tunes products in steps of few rows, one number of rows after the other.
fn tune_in_steps(
    tools: &mut Tools,
    helpers: &mut Helpers<Rank>,
    limits: StepLimits,
    shapes: &[ProductShape],
    best: &BTreeMap<ProductShape, Vec<Choice>>,
) -> Result<(), CudaError> {
    let (n_blocks, n_groups) = (tools.decoder.n_blocks, tools.memory.layout().groups.len());
    let length = STEP_TOKENS.min(n_blocks * BLOCK_TOKENS);
    for n_rows in TUNED_ROWS.iter().copied().filter(|n_rows| *n_rows <= STEP_ROWS_MAX.min(limits.rows)) {
        let dims = Dims::of_decodes(n_groups, n_rows, length);
        let shapes: Vec<ProductShape> =
            shapes.iter().map(|shape| ProductShape { n_rows, ..*shape }).collect();
        let words = dims.measured_words(length, n_blocks as u32);
        if words.len() <= tools.space.words.len() {
            helpers.begin(&Order::WriteWords(words.as_slice().into()))?;
            tools.write_words(&words)?;
            helpers.finish(PREPARE_WITHIN)?;
            tune_one_step(tools, helpers, &shapes, dims, best)?;
        }
    }
    Ok(())
}

/// Returns the products of the model. `norm` is the work after a product that a norm follows.
fn kinds(decoder: &Decoder, limits: StepLimits, norm: JoinedWork) -> Vec<Kind<'_>> {
    let (layers, sizes) = (&decoder.weights.layers, decoder.sizes);
    let [qkv, o, gate_up, down, q_b, shared_gate_up, shared_down] =
        MATRIX_KINDS.map(|kind| all_of(layers, kind));
    let of_layers = [
        (qkv, sizes.hidden, JoinedWork::Other),
        (o, sizes.q_width, norm),
        (gate_up, sizes.hidden, JoinedWork::Gate),
        (down, sizes.intermediate, norm),
        (q_b, sizes.latent.map_or(0, |latent| latent.q_rank), JoinedWork::Other),
        (shared_gate_up, sizes.hidden, JoinedWork::Gate),
        (shared_down, sizes.shared, norm),
    ];
    let mut kinds = Vec::new();
    for (matrices, k, after) in of_layers {
        // A checkpoint may have only some layers in FP8, so a kind of matrix may have several shapes.
        for fp8 in [None, Some(Fp8Scales::OfRows), Some(Fp8Scales::OfBlocks)] {
            let matrices: Vec<_> =
                matrices.iter().copied().filter(|matrix| matrix.fp8_scales() == fp8).collect();
            if !matrices.is_empty() {
                let rows_max = limits.tokens;
                kinds.push(Kind { matrices, k, rows_max, is_wide: false, fp8, after });
            }
        }
    }
    if !sizes.stage.is_last() {
        return kinds;
    }
    let head = vec![WeightMatrix::Bf16(decoder.weights.head())];
    kinds.push(Kind {
        matrices: head,
        k: sizes.hidden,
        rows_max: limits.rows,
        is_wide: true,
        fp8: None,
        after: JoinedWork::Other,
    });
    kinds
}

/// Fills the inputs with varied numbers: a GPU computes faster with zeroes than with real data.
fn fill(card: &ComputeCard, space: &mut Workspace) -> Result<(), CudaError> {
    card.dummy_weights(space.gated.view_mut(), 1, 1.0 / 32768.0)?;
    card.dummy_weights(space.attended.view_mut(), 2, 1.0 / 32768.0)?;
    card.dummy_weights(space.normed.view_mut(), 3, 1.0 / 32768.0)
}

fn measure(
    card: &ComputeCard,
    products: &mut Products,
    kind: &Kind<'_>,
    shape: ProductShape,
    space: &mut Workspace,
    norm: View<'_, Bf16>,
) -> Result<Vec<Choice>, CudaError> {
    // For few rows, the work after the product is measured in whole steps, so it is left out here.
    let after = if shape.n_rows > STEP_ROWS_MAX { kind.after } else { JoinedWork::Other };
    let (output, x) = match after {
        JoinedWork::Other => rooms(shape, space),
        JoinedWork::Gate => gate_rooms(shape, space),
        JoinedWork::Norm => norm_rooms(shape, space, norm),
    };
    let TuningResult { best, refused } = products.tune(card, shape, output, &kind.matrices, x)?;
    for (choice, ms) in &best {
        debug!(?shape, ?choice, ms, "GEMM kernel was timed alone");
    }
    for (choice, error) in &refused {
        warn!(?shape, ?choice, error = in_full(error), "GEMM kernel failed on this GPU and is not used");
    }
    Ok(best.into_iter().map(|(choice, _)| choice).collect())
}

/// Like [`rooms`], with the gate as the work after the product.
fn gate_rooms(shape: ProductShape, space: &mut Workspace) -> (ProductOutput<'_>, View<'_, Bf16>) {
    let ProductShape { n, k, n_rows, .. } = shape;
    let Workspace { normed, gated, gate_up, .. } = space;
    let gated = Epilogue::Gate(gated.view_mut().slice(0..n_rows * n / 2));
    let both = OutputRows::Narrow(gate_up.view_mut().slice(0..n_rows * n));
    (ProductOutput { y: both, next: Some(gated) }, normed.slice(0..n_rows * k))
}

/// Like [`rooms`], with the residual and its norm as the work after the product.
fn norm_rooms<'a>(
    shape: ProductShape,
    space: &'a mut Workspace,
    weight: View<'a, Bf16>,
) -> (ProductOutput<'a>, View<'a, Bf16>) {
    let ProductShape { n, k, n_rows, .. } = shape;
    let Workspace { attended, gated, given, residual, normed, .. } = space;
    let x = [&*attended, &*gated].into_iter().find(|x| x.len() >= n_rows * k);
    let x = x.expect("a buffer fits the input of each product").slice(0..n_rows * k);
    let next = Epilogue::Norm(NormedRows {
        residual: residual.view_mut().slice(0..n_rows * n),
        out: normed.view_mut().slice(0..n_rows * n),
        weight,
        epsilon: 1e-5,
    });
    let y = OutputRows::Narrow(given.view_mut().slice(0..n_rows * n));
    (ProductOutput { y, next: Some(next) }, x)
}

/// Returns the input and the output of a product of this shape.
fn rooms(shape: ProductShape, space: &mut Workspace) -> (ProductOutput<'_>, View<'_, Bf16>) {
    let ProductShape { n, k, n_rows, is_wide, .. } = shape;
    let Workspace { normed, gated, attended, qkv, gate_up, given, logits, latent, .. } = space;
    // Finds an input buffer that is large enough, and an output in another buffer.
    let x = [&*normed, &*gated, &*attended].into_iter().find(|x| x.len() >= n_rows * k);
    let x = x.expect("a buffer fits the input of each product").slice(0..n_rows * k);
    let y = if is_wide {
        OutputRows::Wide(logits.view_mut().slice(0..n_rows * n))
    } else {
        let of_latents = latent.as_mut().map(LatentSpace::room);
        let rooms = [given, qkv, gate_up].into_iter().chain(of_latents);
        let room = rooms.into_iter().find(|room| room.len() >= n_rows * n);
        let room = room.expect("a buffer fits the output of each product of a layer");
        OutputRows::Narrow(room.view_mut().slice(0..n_rows * n))
    };
    (ProductOutput { y, next: None }, x)
}

/// Tries the fastest methods of each product in whole decode steps, and keeps those with the shortest steps.
fn tune_one_step(
    tools: &mut Tools,
    helpers: &mut Helpers<Rank>,
    shapes: &[ProductShape],
    dims: Dims,
    best: &BTreeMap<ProductShape, Vec<Choice>>,
) -> Result<(), CudaError> {
    let starts = starts(tools, helpers, shapes, dims, best)?;
    let least = starts.iter().map(|(time, _)| *time).fold(f64::INFINITY, f64::min);
    let ways: Vec<(ProductShape, &[Choice])> =
        shapes.iter().filter_map(|shape| Some((*shape, best.get(shape)?.as_slice()))).collect();
    let mut found: Option<(f64, Choices)> = None;
    for (time, choices) in starts.into_iter().filter(|(time, _)| *time <= least * START_MAX) {
        tools.products.adopt(choices);
        let time = search(tools, helpers, &ways, dims, time)?;
        if found.as_ref().is_none_or(|(shortest, _)| time < *shortest) {
            found = Some((time, tools.products.choices().clone()));
        }
    }
    if let Some((_, choices)) = found {
        tools.products.adopt(choices);
    }
    Ok(())
}

/// Returns the starts of the search, with their step times. There are several, because changing one product
/// at a time does not show the gain of changing all: our kernels also do the work after a product, and a norm
/// only if the next product uses one of our kernels too, and kernels that load into registers slow down those
/// that use the copy engine. There are at most three starts: the methods that are fastest alone, our kernels
/// for all products, and our kernels that load into registers for all products.
fn starts(
    tools: &mut Tools,
    helpers: &mut Helpers<Rank>,
    shapes: &[ProductShape],
    dims: Dims,
    best: &BTreeMap<ProductShape, Vec<Choice>>,
) -> Result<Vec<(f64, Choices)>, CudaError> {
    let mut starts = vec![(time_together(tools, helpers, dims)?, tools.products.choices().clone())];
    let is_own: fn(&Choice) -> bool = |choice| matches!(choice, Choice::Own(_));
    let is_skinny: fn(&Choice) -> bool = |choice| matches!(choice, Choice::Own(FusedKernel::Skinny(_)));
    for is_wanted in [is_own, is_skinny] {
        for shape in shapes.iter().filter(|shape| !shape.is_wide) {
            let ways = best.get(shape).map(Vec::as_slice).unwrap_or_default();
            if let Some(own) = ways.iter().find(|choice| is_wanted(choice)) {
                tools.products.prefer(*shape, *own);
            }
        }
        let choices = tools.products.choices().clone();
        if starts.iter().all(|(_, known)| *known != choices) {
            let time = time_together(tools, helpers, dims)?;
            debug!(rows = dims.n_tokens, ms = time, "engine step was timed with Baton's own GEMM kernels");
            starts.push((time, choices));
        }
    }
    Ok(starts)
}

/// Searches from the current methods of the products and the current step time, `shortest`, among `ways`.
/// Returns the final step time.
fn search(
    tools: &mut Tools,
    helpers: &mut Helpers<Rank>,
    ways: &[(ProductShape, &[Choice])],
    dims: Dims,
    mut shortest: f64,
) -> Result<f64, CudaError> {
    for _ in 0..ROUNDS_MAX {
        let mut is_changed = false;
        for (shape, ways) in ways {
            let before = tools.products.choices().get(*shape);
            let mut kept = before;
            for choice in ways.iter().filter(|choice| Some(**choice) != before) {
                tools.products.prefer(*shape, *choice);
                let time = time_together(tools, helpers, dims)?;
                debug!(?shape, ?choice, ms = time, shortest, "a step was timed with a candidate GEMM kernel");
                if time < shortest * (1.0 - GAIN_MIN) {
                    (shortest, kept, is_changed) = (time, Some(*choice), true);
                }
            }
            if let Some(kept) = kept {
                tools.products.prefer(*shape, kept);
            }
        }
        if !is_changed {
            break;
        }
    }
    Ok(shortest)
}

/// Measures [`time_step`] on all ranks at once.
fn time_together(tools: &mut Tools, helpers: &mut Helpers<Rank>, dims: Dims) -> Result<f64, CudaError> {
    choose(tools, helpers)?;
    helpers.begin(&Order::TimeStep(dims))?;
    let time = time_step(tools, dims)?;
    helpers.finish(PREPARE_WITHIN)?;
    Ok(time)
}
