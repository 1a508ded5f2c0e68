//! Measurements of the GPU's limits. Not used while serving.

use device::cuda::{CudaError, View};
use kernels::cuda::{OutputRows, WeightMatrix};
use serde::Serialize;

use super::CudaBackend;
use super::decoder::{Decoder, Pass};
use super::plan::Dims;
use super::profile::{DecodeProfile, profile_decode};
use super::rank::{Order, PREPARE_WITHIN};
use super::timing::{fastest, time_recorded};
use super::tools::Tools;
use super::weights::{FeedForward, MATRIX_KINDS, MatrixKind, all_of};
use super::workspace::Workspace;

/// The numbers of rows for which products are measured.
const PRODUCT_ROWS: [usize; 8] = [1, 8, 32, 64, 128, 256, 2048, 8192];

/// The GPU's limits, measured with the model's own weights.
#[derive(Clone, Debug, Serialize)]
pub struct CudaLimits {
    pub gpu: String,
    pub weight_bytes: usize,
    /// The rate of reading all matrices without computing.
    pub read_bytes_per_s: f64,
    /// The rates of all products of all layers in sequence, recorded like steps, without the output layer and
    /// without experts.
    pub products: Vec<ProductRate>,
}

#[derive(Clone, Debug, Serialize)]
pub struct ProductRate {
    pub rows: usize,
    pub ms: f64,
    pub flop_per_s: f64,
    pub weight_bytes_per_s: f64,
}

impl CudaBackend {
    /// Measures the limits of the first rank's GPU, with its share of the weights.
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

    /// Times the parts of a step with `rows` sequences of `length` tokens each, on the first rank's GPU.
    pub fn profile_decode(&mut self, rows: usize, length: usize) -> Result<DecodeProfile, CudaError> {
        self.helpers.begin(&Order::Profile { rows, length })?;
        let profile = profile_decode(&mut self.rank.tools, rows, length)?;
        self.helpers.finish(PREPARE_WITHIN)?;
        Ok(profile)
    }
}

fn read_rate(tools: &mut Tools) -> Result<f64, CudaError> {
    let Tools { card, decoder, space, .. } = tools;
    let layers = &decoder.weights.layers;
    let of_layers = MATRIX_KINDS.iter().flat_map(|kind| all_of(layers, *kind));
    let of_experts = layers.iter().filter_map(|layer| match &layer.feed_forward {
        FeedForward::Dense(_) => None,
        FeedForward::Experts(experts) => Some([experts.gate_up.view(), experts.down.view()]),
    });
    let matrices = of_layers.chain(of_experts.flatten()).map(WeightMatrix::halves);
    let matrices: Vec<View<'_, _>> = matrices.chain([decoder.weights.head()]).collect();
    let bytes: usize = matrices.iter().map(|matrix| 2 * matrix.len()).sum();
    let ms = fastest(|| {
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
        MATRIX_KINDS.iter().try_for_each(|kind| decoder.products_of(pass, *kind))
    })?;
    let layers = &tools.decoder.weights.layers;
    let matrices = MATRIX_KINDS.iter().flat_map(|kind| layers.iter().filter_map(kind));
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

impl Decoder {
    /// Runs one kind of product of every layer.
    fn products_of(&self, pass: &mut Pass<'_>, which: MatrixKind) -> Result<(), CudaError> {
        let n = pass.dims.n_tokens;
        let Workspace { normed, attended, gated, qkv, gate_up, given, .. } = &mut *pass.space;
        for linear in self.weights.layers.iter().filter_map(which) {
            let k = linear.columns;
            let x = [&*normed, &*attended, &*gated].into_iter().find(|x| x.len() >= n * k);
            let x = x.expect("a buffer fits the input of each product").slice(0..n * k);
            let len = n * linear.weight.view().n_rows(k);
            let y = [&mut *given, &mut *qkv, &mut *gate_up].into_iter().find(|y| y.len() >= len);
            let y = y.expect("a buffer fits the output of each product").view_mut().slice(0..len);
            pass.products.multiply(pass.card, OutputRows::Narrow(y), linear.factors(x))?;
        }
        Ok(())
    }
}
