//! Which way of multiplying is fastest for the shapes of a model, found out once for each kind of card.
//!
//! Each shape is measured by itself first. For few rows the best ways are then tried in whole decode steps: one
//! kernel begins while the one before it ends, and two that are fast by themselves may stand in each other's way.

use std::collections::BTreeMap;

use kernels::cuda::matmul::{Choice, Choices, Measured, RUNGS};
use kernels::cuda::{
    Answer, Bf16, Card, CudaError, Next, NormedRows, OwnForm, ProductShape, Products, View, Weights, source,
};
use tracing::{debug, info, warn};
use types::in_full;

use super::CudaSettings;
use super::decoder::Decoder;
use super::limits::least;
use super::lockstep::Helpers;
use super::plan::{BLOCK_TOKENS, Dims};
use super::rank::{Order, PREPARE_WITHIN, Rank, Tools};
use super::weights::all_of;
use super::workspace::Workspace;
use crate::backend::StepLimits;

/// Products of more rows are long, and what comes before and after them counts little.
const ROWS_IN_COMPANY_MAX: usize = 128;
/// Tokens of each sequence of the steps that they are tried in.
const TOKENS_IN_COMPANY: usize = 1024;
/// What is best beside others may be another once those are done in other ways: all are tried again, so often at most.
const ROUNDS_MAX: usize = 2;
/// A search begins where steps take no longer than this, of the least.
const START_MAX: f64 = 1.05;
/// A way that is better by less is as good: times differ by that much from one run to the next.
const GAIN_MIN: f64 = 0.002;

/// One of a model's products: its matrices are alike, one in each layer.
struct Kind<'a> {
    matrices: Vec<Weights<'a>>,
    k: usize,
    rows_max: usize,
    is_wide: bool,
    is_fp8: bool,
    after: After,
}

/// What comes after many rows of a product, which a kernel may do together with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum After {
    Other,
    Gate,
    Norm,
}

impl Kind<'_> {
    fn n(&self) -> usize {
        self.matrices.first().map_or(0, |matrix| matrix.n_rows(self.k))
    }

    /// The rungs up to the first that holds every step.
    fn shapes(&self) -> impl Iterator<Item = ProductShape> + '_ {
        let n_needed = RUNGS.iter().take_while(|rung| **rung < self.rows_max).count() + 1;
        let rungs = RUNGS.iter().take(n_needed).filter(|rung| **rung <= self.rows_max);
        rungs.map(|n_rows| self.shape(*n_rows))
    }

    fn shape(&self, n_rows: usize) -> ProductShape {
        ProductShape { n: self.n(), k: self.k, n_rows, is_wide: self.is_wide, is_fp8: self.is_fp8 }
    }
}

/// Reads what is remembered, measures what is not, and remembers that. All ranks' products are of the same shapes, and done
/// in the same ways: the first one's choice.
pub(super) fn tune(
    tools: &mut Tools,
    helpers: &mut Helpers<Rank>,
    limits: StepLimits,
    settings: &CudaSettings,
) -> Result<(), CudaError> {
    let Tools { card, decoder, products, space, .. } = tools;
    let about = format!(
        "{} {}, cuBLASLt {}, kernels {}, in company",
        card.name(),
        card.arch(),
        products.library_version(),
        source::digest()
    );
    let file = settings.choices_file(&about);
    if let Some(file) = &file {
        products.adopt(Choices::read(file, &about));
    }
    let kinds = kinds(decoder, limits, helpers.are_there());
    let missing: Vec<(&Kind<'_>, ProductShape)> = kinds
        .iter()
        .flat_map(|kind| kind.shapes().map(move |shape| (kind, shape)))
        .filter(|(_, shape)| products.choices().get(*shape).is_none())
        .collect();
    if missing.is_empty() || !settings.tunes {
        return choose(tools, helpers);
    }
    info!(shapes = missing.len(), "measure matrix products");
    fill(card, space)?;
    let mut best = BTreeMap::new();
    for (kind, shape) in missing {
        best.insert(shape, measure(card, products, kind, shape, space, decoder.weights.norm.view())?);
    }
    let shapes: Vec<ProductShape> = kinds.iter().map(|kind| kind.shape(1)).collect();
    in_company(tools, helpers, limits, &shapes, &best)?;
    if let Some(file) = file
        && let Err(error) = tools.products.choices().write(&file, &about)
    {
        warn!(%error, "measurements of matrix products are not kept");
    }
    choose(tools, helpers)
}

/// The other ranks do as this one.
fn choose(tools: &Tools, helpers: &mut Helpers<Rank>) -> Result<(), CudaError> {
    if helpers.are_there() {
        helpers.begin(&Order::Choose(tools.products.choices().clone()))?;
        helpers.finish(PREPARE_WITHIN)?;
    }
    Ok(())
}

/// Steps of few rows, one number after the other.
fn in_company(
    tools: &mut Tools,
    helpers: &mut Helpers<Rank>,
    limits: StepLimits,
    shapes: &[ProductShape],
    best: &BTreeMap<ProductShape, Vec<Choice>>,
) -> Result<(), CudaError> {
    let (n_blocks, n_groups) = (tools.decoder.n_blocks, tools.memory.layout().groups.len());
    let length = TOKENS_IN_COMPANY.min(n_blocks * BLOCK_TOKENS);
    for n_rows in RUNGS.iter().copied().filter(|rung| *rung <= ROWS_IN_COMPANY_MAX.min(limits.rows)) {
        let dims = Dims::of_decodes(n_groups, n_rows, length);
        let shapes: Vec<ProductShape> =
            shapes.iter().map(|shape| ProductShape { n_rows, ..*shape }).collect();
        let words = dims.measured_words(length, n_blocks as u32);
        if words.len() <= tools.space.words.len() {
            helpers.begin(&Order::Lay(words.as_slice().into()))?;
            tools.lay(&words)?;
            helpers.finish(PREPARE_WITHIN)?;
            try_in_company(tools, helpers, &shapes, dims, best)?;
        }
    }
    Ok(())
}

fn kinds(decoder: &Decoder, limits: StepLimits, shares: bool) -> Vec<Kind<'_>> {
    // Ranks add up what they have before it is normed.
    let norm = if shares { After::Other } else { After::Norm };
    let (layers, sizes) = (&decoder.weights.layers, decoder.sizes);
    let of_layers = [
        (all_of(layers, |layer| &layer.qkv), sizes.hidden, After::Other),
        (all_of(layers, |layer| &layer.o), sizes.q_width, norm),
        (all_of(layers, |layer| &layer.gate_up), sizes.hidden, After::Gate),
        (all_of(layers, |layer| &layer.down), sizes.intermediate, norm),
    ];
    let mut kinds = Vec::new();
    for (matrices, k, after) in of_layers {
        // A checkpoint may have some layers in FP8 and others not.
        let (in_fp8, in_bf16): (Vec<_>, Vec<_>) =
            matrices.into_iter().partition(|matrix| matches!(matrix, Weights::Fp8(_)));
        for (matrices, is_fp8) in [(in_bf16, false), (in_fp8, true)] {
            if !matrices.is_empty() {
                let rows_max = limits.tokens;
                kinds.push(Kind { matrices, k, rows_max, is_wide: false, is_fp8, after });
            }
        }
    }
    let head = vec![Weights::Bf16(decoder.weights.head())];
    kinds.push(Kind {
        matrices: head,
        k: sizes.hidden,
        rows_max: limits.rows,
        is_wide: true,
        is_fp8: false,
        after: After::Other,
    });
    kinds
}

/// Numbers that are not all alike: a card computes faster with zeroes than with anything that is served.
fn fill(card: &Card, space: &mut Workspace) -> Result<(), CudaError> {
    card.dummy_weights(space.gated.view_mut(), 1, 1.0 / 32768.0)?;
    card.dummy_weights(space.attended.view_mut(), 2, 1.0 / 32768.0)?;
    card.dummy_weights(space.normed.view_mut(), 3, 1.0 / 32768.0)
}

fn measure(
    card: &Card,
    products: &mut Products,
    kind: &Kind<'_>,
    shape: ProductShape,
    space: &mut Workspace,
    norm: View<'_, Bf16>,
) -> Result<Vec<Choice>, CudaError> {
    // What comes after few rows is tried in company.
    let after = if shape.n_rows > ROWS_IN_COMPANY_MAX { kind.after } else { After::Other };
    let (y, x) = match after {
        After::Other => rooms(shape, space),
        After::Gate => gate_rooms(shape, space),
        After::Norm => norm_rooms(shape, space, norm),
    };
    let Measured { best, refused } = products.tune(card, shape, y, &kind.matrices, x)?;
    for (choice, ms) in &best {
        debug!(?shape, ?choice, ms, "a product by itself");
    }
    for (choice, error) in &refused {
        warn!(?shape, ?choice, error = in_full(error), "a way of multiplying does not run on this GPU");
    }
    Ok(best.into_iter().map(|(choice, _)| choice).collect())
}

/// Where an answer goes, and what comes after it.
type Room<'a> = (Answer<'a>, Option<Next<'a>>);

/// The same as [`rooms`], with a gate behind it.
fn gate_rooms(shape: ProductShape, space: &mut Workspace) -> (Room<'_>, View<'_, Bf16>) {
    let ProductShape { n, k, n_rows, .. } = shape;
    let Workspace { normed, gated, gate_up, .. } = space;
    let gated = Next::Gate(gated.view_mut().slice(0..n_rows * n / 2));
    let both = Answer::Narrow(gate_up.view_mut().slice(0..n_rows * n));
    ((both, Some(gated)), normed.slice(0..n_rows * k))
}

/// The same, with the residual and its norm behind it.
fn norm_rooms<'a>(
    shape: ProductShape,
    space: &'a mut Workspace,
    weight: View<'a, Bf16>,
) -> (Room<'a>, View<'a, Bf16>) {
    let ProductShape { n, k, n_rows, .. } = shape;
    let Workspace { attended, gated, given, residual, normed, .. } = space;
    let x = [&*attended, &*gated].into_iter().find(|x| x.len() >= n_rows * k);
    let x = x.expect("what each product reads has a room").slice(0..n_rows * k);
    let next = Next::Norm(NormedRows {
        residual: residual.view_mut().slice(0..n_rows * n),
        out: normed.view_mut().slice(0..n_rows * n),
        weight,
        epsilon: 1e-5,
    });
    ((Answer::Narrow(given.view_mut().slice(0..n_rows * n)), Some(next)), x)
}

/// What a product of this shape reads, and where its answer goes.
fn rooms(shape: ProductShape, space: &mut Workspace) -> (Room<'_>, View<'_, Bf16>) {
    let ProductShape { n, k, n_rows, is_wide, .. } = shape;
    let Workspace { normed, gated, attended, qkv, gate_up, given, logits, .. } = space;
    // Rows as wide as `k`, from wherever there are enough, and room for the answer elsewhere.
    let x = [&*normed, &*gated, &*attended].into_iter().find(|x| x.len() >= n_rows * k);
    let x = x.expect("what each product reads has a room").slice(0..n_rows * k);
    let y = if is_wide {
        Answer::Wide(logits.view_mut().slice(0..n_rows * n))
    } else {
        let room = [given, qkv, gate_up].into_iter().find(|room| room.len() >= n_rows * n);
        let room = room.expect("what each product of a layer gives has a room");
        Answer::Narrow(room.view_mut().slice(0..n_rows * n))
    };
    ((y, None), x)
}

/// Tries the best ways of each product in whole decode steps, and keeps those with which they take the least time.
fn try_in_company(
    tools: &mut Tools,
    helpers: &mut Helpers<Rank>,
    shapes: &[ProductShape],
    dims: Dims,
    best: &BTreeMap<ProductShape, Vec<Choice>>,
) -> Result<(), CudaError> {
    let starts = starts(tools, helpers, shapes, dims, best)?;
    let least = starts.iter().map(|(time, _)| *time).fold(f64::INFINITY, f64::min);
    let mut found: Option<(f64, Choices)> = None;
    for (time, choices) in starts.into_iter().filter(|(time, _)| *time <= least * START_MAX) {
        tools.products.adopt(choices);
        let time = search(tools, helpers, shapes, dims, (best, time))?;
        if found.as_ref().is_none_or(|(shortest, _)| time < *shortest) {
            found = Some((time, tools.products.choices().clone()));
        }
    }
    if let Some((_, choices)) = found {
        tools.products.adopt(choices);
    }
    Ok(())
}

/// Where to begin, and how long a step takes there. Our own kernels do what comes after a product too, a norm only where
/// the product behind it is their own as well; and kernels that read by registers stand in the way of those that read by
/// the copy engine. So no way of one product shows what ways of all of them together are worth: beside what is best by
/// itself there are our own for all of a layer's products, and of them those that read by registers.
fn starts(
    tools: &mut Tools,
    helpers: &mut Helpers<Rank>,
    shapes: &[ProductShape],
    dims: Dims,
    best: &BTreeMap<ProductShape, Vec<Choice>>,
) -> Result<Vec<(f64, Choices)>, CudaError> {
    let mut starts = vec![(time_together(tools, helpers, dims)?, tools.products.choices().clone())];
    let is_own: fn(&Choice) -> bool = |choice| matches!(choice, Choice::Own(_));
    let is_skinny: fn(&Choice) -> bool = |choice| matches!(choice, Choice::Own(OwnForm::Skinny(_)));
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
            debug!(rows = dims.n_tokens, ms = time, "a step by our own kernels");
            starts.push((time, choices));
        }
    }
    Ok(starts)
}

/// From where the products are done as they are, with which a step takes so long. Answers how long it takes in the end.
fn search(
    tools: &mut Tools,
    helpers: &mut Helpers<Rank>,
    shapes: &[ProductShape],
    dims: Dims,
    (best, mut shortest): (&BTreeMap<ProductShape, Vec<Choice>>, f64),
) -> Result<f64, CudaError> {
    for _ in 0..ROUNDS_MAX {
        let mut is_changed = false;
        for shape in shapes {
            let Some(ways) = best.get(shape) else { continue };
            let before = tools.products.choices().get(*shape);
            let mut kept = before;
            for choice in ways.iter().filter(|choice| Some(**choice) != before) {
                tools.products.prefer(*shape, *choice);
                let time = time_together(tools, helpers, dims)?;
                debug!(?shape, ?choice, ms = time, shortest, "a step with another way");
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

/// As [`time_step`], on all ranks at once.
fn time_together(tools: &mut Tools, helpers: &mut Helpers<Rank>, dims: Dims) -> Result<f64, CudaError> {
    choose(tools, helpers)?;
    helpers.begin(&Order::TimeStep(dims))?;
    let time = time_step(tools, dims)?;
    helpers.finish(PREPARE_WITHIN)?;
    Ok(time)
}

/// Milliseconds of a whole decode step, recorded as those that are served.
pub(super) fn time_step(tools: &mut Tools, dims: Dims) -> Result<f64, CudaError> {
    tools.pass(dims, &[], |decoder, pass| {
        // Code is loaded when it first runs, which cannot be recorded.
        decoder.forward(pass, |_| Ok(()))?;
        let card = pass.card;
        let mut graph = card.record(|| decoder.forward(pass, |_| Ok(())))?;
        least(|| {
            let start = card.mark()?;
            graph.launch()?;
            start.ms_until(&card.mark()?)
        })
    })
}
