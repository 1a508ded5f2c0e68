//! What the card can do at most, and where the time of a step goes: for measurements, never while serving.

use kernels::cuda::{Answer, CudaError, OwnForm, View, Weights};
use serde::Serialize;

use super::CudaBackend;
use super::decoder::{Decoder, Pass};
use super::layer::{Normed, form, heads_form};
use super::plan::Dims;
use super::rank::{Order, PREPARE_WITHIN, Tools};
use super::weights::{LayerWeights, Linear, all_of};
use super::workspace::Workspace;

/// Runs of which the fastest counts.
const N_TIMES: usize = 5;
/// Rows at which matrix products are measured.
const PRODUCT_ROWS: [usize; 8] = [1, 8, 32, 64, 128, 256, 2048, 8192];

/// Measured on the model's own weights.
#[derive(Clone, Debug, Serialize)]
pub struct CudaLimits {
    pub gpu: String,
    pub weight_bytes: usize,
    /// All matrices read, and nothing done with them.
    pub read_bytes_per_s: f64,
    /// All products of all layers, one after the other, recorded as steps are; the output layer left out.
    pub products: Vec<ProductRate>,
}

#[derive(Clone, Debug, Serialize)]
pub struct ProductRate {
    pub rows: usize,
    pub ms: f64,
    pub flop_per_s: f64,
    pub weight_bytes_per_s: f64,
}

/// Where a decode step's time goes: each kind of work of all layers by itself, recorded and run as steps are.
#[derive(Clone, Debug, Serialize)]
pub struct DecodeProfile {
    pub rows: usize,
    pub length: usize,
    /// What was run, and its milliseconds.
    pub parts: Vec<(&'static str, f64)>,
    pub step_ms: f64,
}

type Part = (&'static str, fn(&Decoder, &mut Pass<'_>) -> Result<(), CudaError>);

impl CudaBackend {
    /// Of the first rank's card, and of its share of the weights.
    pub fn limits(&mut self) -> Result<CudaLimits, CudaError> {
        let tools = &mut self.rank.tools;
        let read_bytes_per_s = read_rate(tools)?;
        let rows = PRODUCT_ROWS.into_iter().filter(|rows| *rows <= self.limits.tokens);
        let rows: Vec<usize> = rows.collect();
        let products = rows.into_iter().map(|rows| product_rate(tools, rows)).collect::<Result<_, _>>()?;
        Ok(CudaLimits {
            gpu: tools.card.name().to_owned(),
            weight_bytes: self.loaded.bytes,
            read_bytes_per_s,
            products,
        })
    }

    /// The parts of a step of so many rows, of sequences of so many tokens, on the first rank's card.
    pub fn profile_decode(&mut self, rows: usize, length: usize) -> Result<DecodeProfile, CudaError> {
        self.helpers.begin(&Order::Profile { rows, length })?;
        let profile = profile_decode(&mut self.rank.tools, rows, length)?;
        self.helpers.finish(PREPARE_WITHIN)?;
        Ok(profile)
    }
}

pub(super) fn profile_decode(
    tools: &mut Tools,
    rows: usize,
    length: usize,
) -> Result<DecodeProfile, CudaError> {
    let dims = Dims::of_decodes(tools.memory.layout().groups.len(), rows, length);
    tools.lay(&dims.measured_words(length, tools.memory.n_blocks()))?;
    let parts: [Part; 6] = [
        ("products of q, k and v, rope, KV written", Decoder::all_projected),
        ("attention", Decoder::all_attention),
        ("product of o, residual, norm", Decoder::all_attended_given),
        ("products of gate and up, gate", Decoder::all_gated),
        ("product of down, residual, norm", Decoder::all_gated_given),
        ("output layer and argmax", |decoder, pass| decoder.draw(pass)),
    ];
    let mut times = Vec::with_capacity(parts.len());
    for (name, work) in parts {
        times.push((name, time_recorded(tools, dims, work)?));
    }
    let step_ms = time_recorded(tools, dims, |decoder, pass| decoder.forward(pass, |_| Ok(())))?;
    Ok(DecodeProfile { rows, length, parts: times, step_ms })
}

fn time_recorded(
    tools: &mut Tools,
    dims: Dims,
    work: impl Fn(&Decoder, &mut Pass<'_>) -> Result<(), CudaError>,
) -> Result<f64, CudaError> {
    tools.pass(dims, &[], |decoder, pass| {
        work(decoder, pass)?;
        let card = pass.card;
        let mut graph = card.record(|| work(decoder, pass))?;
        least(|| {
            let start = card.mark()?;
            graph.launch()?;
            let end = card.mark()?;
            start.ms_until(&end)
        })
    })
}

fn read_rate(tools: &mut Tools) -> Result<f64, CudaError> {
    let Tools { card, decoder, space, .. } = tools;
    let layers = &decoder.weights.layers;
    let of_layers = KINDS.iter().flat_map(|kind| all_of(layers, *kind)).map(Weights::halves);
    let matrices: Vec<View<'_, _>> = of_layers.chain([decoder.weights.head()]).collect();
    let bytes: usize = matrices.iter().map(|matrix| 2 * matrix.len()).sum();
    let ms = least(|| {
        let start = card.mark()?;
        for matrix in &matrices {
            card.probe_read(space.best.view_mut(), *matrix)?;
        }
        let end = card.mark()?;
        start.ms_until(&end)
    })?;
    Ok(bytes as f64 / ms * 1e3)
}

fn product_rate(tools: &mut Tools, rows: usize) -> Result<ProductRate, CudaError> {
    let Tools { card, space, .. } = tools;
    card.dummy_weights(space.normed.view_mut(), 3, 1.0 / 32768.0)?;
    card.dummy_weights(space.attended.view_mut(), 4, 1.0 / 32768.0)?;
    card.dummy_weights(space.gated.view_mut(), 5, 1.0 / 32768.0)?;
    let dims = Dims { n_tokens: rows, ..Dims::default() };
    let ms = time_recorded(tools, dims, |decoder, pass| {
        KINDS.iter().try_for_each(|kind| decoder.products_of(pass, *kind))
    })?;
    let layers = &tools.decoder.weights.layers;
    let matrices = KINDS.iter().flat_map(|kind| layers.iter().map(kind));
    let (numbers, bytes) = matrices.fold((0, 0), |(numbers, bytes), linear| {
        let (weights, k) = (linear.weight.view(), linear.columns);
        (numbers + weights.n_rows(k) * k, bytes + 2 * weights.halves().len())
    });
    let per_second = |what: usize| what as f64 / ms * 1e3;
    Ok(ProductRate {
        rows,
        ms,
        flop_per_s: per_second(2 * rows * numbers),
        weight_bytes_per_s: per_second(bytes),
    })
}

/// The matrices of a layer.
const KINDS: &[fn(&LayerWeights) -> &Linear] =
    &[|layer| &layer.qkv, |layer| &layer.o, |layer| &layer.gate_up, |layer| &layer.down];

/// The least of some times, the first left out: it may load something.
pub(super) fn least(mut time: impl FnMut() -> Result<f32, CudaError>) -> Result<f64, CudaError> {
    time()?;
    let mut least = f32::INFINITY;
    for _ in 0..N_TIMES {
        least = least.min(time()?);
    }
    Ok(f64::from(least))
}

impl Decoder {
    /// One kind of product of every layer.
    fn products_of(&self, pass: &mut Pass<'_>, which: fn(&LayerWeights) -> &Linear) -> Result<(), CudaError> {
        let n = pass.dims.n_tokens;
        let Workspace { normed, attended, gated, qkv, gate_up, given, .. } = &mut *pass.space;
        for layer in &self.weights.layers {
            let linear = which(layer);
            let k = linear.columns;
            let x = [&*normed, &*attended, &*gated].into_iter().find(|x| x.len() >= n * k);
            let x = x.expect("an input of each product has a room").slice(0..n * k);
            let weights = linear.weight.view();
            let len = n * weights.n_rows(k);
            let y = [&mut *given, &mut *qkv, &mut *gate_up].into_iter().find(|y| y.len() >= len);
            let y = y.expect("an answer of each product has a room").view_mut().slice(0..len);
            pass.products.multiply(pass.card, Answer::Narrow(y), weights, x, k)?;
        }
        Ok(())
    }

    fn all_attention(&self, pass: &mut Pass<'_>) -> Result<(), CudaError> {
        self.places.iter().try_for_each(|place| self.attend_decodes(pass, *place))
    }

    fn all_projected(&self, pass: &mut Pass<'_>) -> Result<(), CudaError> {
        let mut layers = self.weights.layers.iter().zip(&self.places);
        layers.try_for_each(|(layer, place)| {
            let normed = self.normed_for(pass, &layer.down, heads_form(pass, layer));
            self.project(pass, layer, *place, normed)
        })
    }

    fn all_attended_given(&self, pass: &mut Pass<'_>) -> Result<(), CudaError> {
        self.weights.layers.iter().try_for_each(|layer| self.give_attended(pass, layer).map(drop))
    }

    fn all_gated(&self, pass: &mut Pass<'_>) -> Result<(), CudaError> {
        self.weights.layers.iter().try_for_each(|layer| {
            let normed = self.normed_for(pass, &layer.o, form(pass, &layer.gate_up));
            self.gate(pass, layer, normed)
        })
    }

    fn all_gated_given(&self, pass: &mut Pass<'_>) -> Result<(), CudaError> {
        let layers = &self.weights.layers;
        let mut nth = 0..layers.len();
        nth.try_for_each(|nth| self.give_gated(pass, &layers[nth], layers.get(nth + 1)).map(drop))
    }

    /// What a product that is done so finds when it comes after another.
    fn normed_for(&self, pass: &Pass<'_>, before: &Linear, product: Option<OwnForm>) -> Normed {
        match (form(pass, before), product) {
            (Some(form), Some(_)) if pass.peers.is_none() => {
                Normed::Owed { n_parts: form.parts(self.sizes.hidden) }
            }
            _ => Normed::Whole,
        }
    }
}
