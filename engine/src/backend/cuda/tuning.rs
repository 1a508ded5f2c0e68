//! Which way of multiplying is fastest for the shapes of a model, found out once for each kind of card.

use kernels::cuda::matmul::{Choices, RUNGS};
use kernels::cuda::{Answer, Bf16, Card, CudaError, ProductShape, Products, View};
use tracing::{info, warn};

use super::CudaSettings;
use super::decoder::Decoder;
use super::weights::all_of;
use super::workspace::Workspace;
use crate::backend::StepLimits;

/// One of a model's products: its matrices are alike, one in each layer.
struct Kind<'a> {
    matrices: Vec<View<'a, Bf16>>,
    k: usize,
    rows_max: usize,
    is_wide: bool,
}

impl Kind<'_> {
    fn n(&self) -> usize {
        self.matrices.first().map_or(0, |matrix| matrix.len() / self.k)
    }

    /// The rungs up to the first that holds every step.
    fn shapes(&self) -> impl Iterator<Item = ProductShape> + '_ {
        let n_needed = RUNGS.iter().take_while(|rung| **rung < self.rows_max).count() + 1;
        let rungs = RUNGS.iter().take(n_needed).filter(|rung| **rung <= self.rows_max);
        rungs.map(|n_rows| ProductShape { n: self.n(), k: self.k, n_rows: *n_rows, is_wide: self.is_wide })
    }
}

/// Reads what is remembered, measures what is not, and remembers that.
pub(super) fn tune(
    card: &Card,
    products: &mut Products,
    decoder: &Decoder,
    space: &mut Workspace,
    limits: StepLimits,
    settings: &CudaSettings,
) -> Result<(), CudaError> {
    let about = format!("{} {}, cuBLASLt {}", card.name(), card.arch(), products.library_version());
    let file = settings.choices_file(&about);
    if let Some(file) = &file {
        products.adopt(Choices::read(file, &about));
    }
    let kinds = kinds(decoder, limits);
    let missing: Vec<(&Kind<'_>, ProductShape)> = kinds
        .iter()
        .flat_map(|kind| kind.shapes().map(move |shape| (kind, shape)))
        .filter(|(_, shape)| products.choices().get(*shape).is_none())
        .collect();
    if missing.is_empty() || !settings.tunes {
        return Ok(());
    }
    info!(shapes = missing.len(), "measure matrix products");
    fill(card, space)?;
    for (kind, shape) in missing {
        measure(card, products, kind, shape, space)?;
    }
    if let Some(file) = file
        && let Err(error) = products.choices().write(&file, &about)
    {
        warn!(%error, "measurements of matrix products are not kept");
    }
    Ok(())
}

fn kinds(decoder: &Decoder, limits: StepLimits) -> Vec<Kind<'_>> {
    let (layers, sizes) = (&decoder.weights.layers, decoder.sizes);
    let of_layers = |matrices, k| Kind { matrices, k, rows_max: limits.tokens, is_wide: false };
    let head = vec![decoder.weights.head().view()];
    vec![
        of_layers(all_of(layers, |layer| &layer.qkv), sizes.hidden),
        of_layers(all_of(layers, |layer| &layer.o), sizes.q_width),
        of_layers(all_of(layers, |layer| &layer.gate_up), sizes.hidden),
        of_layers(all_of(layers, |layer| &layer.down), sizes.intermediate),
        Kind { matrices: head, k: sizes.hidden, rows_max: limits.rows, is_wide: true },
    ]
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
) -> Result<(), CudaError> {
    let ProductShape { n, k, n_rows, is_wide } = shape;
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
    products.tune(card, shape, y, &kind.matrices, x)
}
