//! The CPU decoder for all architectures. Its optional tensors are data, read once from the config. Its field
//! names are those of the checkpoint.

use std::ops::Range;

use super::attention::Attention;
use super::config::ModelConfig;
use super::experts::Experts;
use super::latent_attention::LatentAttention;
use super::mlp::{Mlp, MlpShape};
use super::nn::{Embedding, HasBias, Linear, RmsNorm, embedding, output_layer};
use super::pass::Pass;
use super::tensor::Tensor;
use crate::error::LoadError;
use crate::load::Weights;

/// The layers of a model, or some neighbours of them. A decoder reads and writes the KV of each layer in a pass, and
/// keeps no other state for a sequence.
#[derive(Debug)]
pub struct Decoder {
    /// `None` without the first layer.
    embedding: Option<Embedding>,
    /// The number of layers before these.
    first: usize,
    layers: Vec<Layer>,
    /// `None` without the last layer.
    output: Option<Output>,
}

/// The parts of a model after its last layer.
#[derive(Debug)]
struct Output {
    norm: RmsNorm,
    head: Linear,
}

#[derive(Debug)]
struct Layer {
    attention_norm: RmsNorm,
    attention: LayerAttention,
    mlp_norm: RmsNorm,
    feed_forward: FeedForward,
}

#[derive(Debug)]
enum LayerAttention {
    Heads(Attention),
    Latent(LatentAttention),
}

#[derive(Debug)]
enum FeedForward {
    Dense(Mlp),
    Experts(Experts),
}

impl Decoder {
    /// Loads a model's weights by name.
    pub fn load(config: &ModelConfig, weights: &Weights<'_>) -> Result<Self, LoadError> {
        Self::load_layers(config, weights, 0..config.n_layers)
    }

    /// Loads the weights of some neighbouring layers, and those before the first and after the last layer if these
    /// layers include them.
    pub fn load_layers(
        config: &ModelConfig,
        weights: &Weights<'_>,
        layers: Range<usize>,
    ) -> Result<Self, LoadError> {
        let (first, has_last) = (layers.start, layers.end == config.n_layers);
        let embedding = (first == 0).then(|| embedding(weights, config)).transpose()?;
        let output = || {
            let norm = RmsNorm::load(&weights.under("model.norm"), config.hidden, config.norm_epsilon)?;
            Ok(Output { norm, head: output_layer(weights, config, embedding.as_ref())? })
        };
        let output = has_last.then(output).transpose()?;
        let layer = |nth: usize| Layer::load(config, &weights.under(&format!("model.layers.{nth}")), nth);
        let layers = layers.map(layer).collect::<Result<_, _>>()?;
        Ok(Self { embedding, first, layers, output })
    }

    /// Looks up the tokens' embeddings, the input of the first layer: (tokens, hidden).
    ///
    /// # Panics
    /// If the decoder does not have the first layer.
    pub fn embed(&self, pass: &Pass<'_>) -> Tensor {
        pass.embed(self.embedding.as_ref().expect("the first layer is here"))
    }

    /// Computes some neighbouring layers: `x` becomes their output.
    ///
    /// # Panics
    /// If the decoder does not have these layers.
    pub fn forward(&self, layers: Range<usize>, x: &mut Tensor, pass: &mut Pass<'_>) {
        for layer in &self.layers[layers.start - self.first..layers.end - self.first] {
            layer.forward(x, pass);
        }
    }

    /// Computes the logits of rows of the last layer's output: (rows, vocab), or the share of the columns of the pass's
    /// rank.
    ///
    /// # Panics
    /// If the decoder does not have the last layer.
    pub fn logits(&self, rows: &Tensor, pass: &Pass<'_>) -> Tensor {
        let Output { norm, head } = self.output.as_ref().expect("the last layer is here");
        pass.linear(&pass.norm(rows, norm), head)
    }
}

impl Layer {
    fn load(config: &ModelConfig, weights: &Weights<'_>, nth: usize) -> Result<Self, LoadError> {
        let norm = |name: &str| RmsNorm::load(&weights.under(name), config.hidden, config.norm_epsilon);
        Ok(Self {
            attention_norm: norm("input_layernorm")?,
            attention: LayerAttention::load(config, &weights.under("self_attn"), nth)?,
            mlp_norm: norm("post_attention_layernorm")?,
            feed_forward: FeedForward::load(config, weights, nth)?,
        })
    }

    fn forward(&self, x: &mut Tensor, pass: &mut Pass<'_>) {
        let attended = self.attention.forward(&pass.norm(x, &self.attention_norm), pass);
        pass.add(x, &attended);
        let fed = self.feed_forward.forward(&pass.norm(x, &self.mlp_norm), pass);
        pass.add(x, &fed);
    }
}

impl LayerAttention {
    fn load(config: &ModelConfig, weights: &Weights<'_>, layer: usize) -> Result<Self, LoadError> {
        match config.latent {
            Some(shape) => LatentAttention::load(config, shape, weights, layer).map(Self::Latent),
            None => Attention::load(config, weights, layer).map(Self::Heads),
        }
    }

    fn forward(&self, x: &Tensor, pass: &mut Pass<'_>) -> Tensor {
        match self {
            Self::Heads(attention) => attention.forward(x, pass),
            Self::Latent(attention) => attention.forward(x, pass),
        }
    }
}

impl FeedForward {
    fn load(config: &ModelConfig, weights: &Weights<'_>, layer: usize) -> Result<Self, LoadError> {
        if let Some(mixture) = config.mixture.as_ref().filter(|mixture| mixture.layers[layer]) {
            return Experts::load(weights, config, mixture).map(Self::Experts);
        }
        let has_bias = HasBias(config.optional.mlp_bias);
        let shape = MlpShape { hidden: config.hidden, intermediate: config.intermediate, has_bias };
        Mlp::load(&weights.under("mlp"), shape, ["gate_proj", "up_proj", "down_proj"]).map(Self::Dense)
    }

    fn forward(&self, x: &Tensor, pass: &Pass<'_>) -> Tensor {
        match self {
            Self::Dense(mlp) => mlp.forward(x, pass),
            Self::Experts(experts) => experts.forward(x, pass),
        }
    }
}
