//! Matrices and norms, loaded by their names in the checkpoint. [`Pass`](super::Pass) computes with them.

use kernels::cpu::Matrix;

use super::config::ModelConfig;
use crate::error::LoadError;
use crate::load::Weights;

const EMBEDDING: &str = "model.embed_tokens";

/// A table with one row for each token of the vocabulary.
#[derive(Clone, Debug)]
pub struct Embedding(pub(super) Matrix);

/// A linear layer: `y = x × weightᵀ + bias`.
#[derive(Clone, Debug)]
pub struct Linear {
    pub(super) weight: Matrix,
    pub(super) bias: Option<Vec<f32>>,
}

/// A root-mean-square norm.
#[derive(Clone, Debug)]
pub struct RmsNorm {
    pub(super) weight: Vec<f32>,
    pub(super) epsilon: f32,
}

impl Linear {
    /// Loads a layer with `cols` inputs and `rows` outputs.
    pub fn load(
        weights: &Weights<'_>,
        rows: usize,
        cols: usize,
        has_bias: HasBias,
    ) -> Result<Self, LoadError> {
        let weight = weights.matrix("weight", rows, cols)?;
        let bias = match has_bias {
            HasBias(true) => Some(weights.vector("bias", rows)?),
            HasBias(false) => None,
        };
        Ok(Self { weight, bias })
    }
}

/// Whether a checkpoint has a bias for a matrix.
#[derive(Clone, Copy, Debug)]
pub struct HasBias(pub bool);

impl RmsNorm {
    pub fn load(weights: &Weights<'_>, width: usize, epsilon: f32) -> Result<Self, LoadError> {
        Ok(Self { weight: weights.vector("weight", width)?, epsilon })
    }
}

/// Loads the embedding.
pub fn embedding(weights: &Weights<'_>, config: &ModelConfig) -> Result<Embedding, LoadError> {
    weights.under(EMBEDDING).vocabulary("weight", config.vocab, config.hidden).map(Embedding)
}

/// Loads the output layer, which may be the same matrix as the embedding. `embedding` is `None` if it is not loaded.
pub fn output_layer(
    weights: &Weights<'_>,
    config: &ModelConfig,
    embedding: Option<&Embedding>,
) -> Result<Linear, LoadError> {
    let weight = match embedding.filter(|_| config.tied) {
        Some(Embedding(matrix)) => matrix.clone(),
        None => {
            let name = if config.tied { EMBEDDING } else { "lm_head" };
            weights.under(name).vocabulary("weight", config.vocab, config.hidden)?
        }
    };
    Ok(Linear { weight, bias: None })
}
