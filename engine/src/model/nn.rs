//! Matrices and norms, loaded by their names in the checkpoint. [`Pass`](super::Pass) computes with them.

use kernels::cpu::Matrix;

use super::config::ModelConfig;
use crate::error::LoadError;
use crate::load::Weights;

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

/// The embedding and the output layer, which may be the same matrix.
#[derive(Debug)]
pub struct Vocabulary {
    pub(super) embed: Embedding,
    pub(super) head: Linear,
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

impl Vocabulary {
    pub fn load(weights: &Weights<'_>, config: &ModelConfig) -> Result<Self, LoadError> {
        let (vocab, hidden) = (config.vocab, config.hidden);
        let embed = weights.under("model.embed_tokens").vocabulary("weight", vocab, hidden)?;
        let head = match config.tied {
            true => Linear { weight: embed.clone(), bias: None },
            false => {
                let weight = weights.under("lm_head").vocabulary("weight", vocab, hidden)?;
                Linear { weight, bias: None }
            }
        };
        Ok(Self { embed: Embedding(embed), head })
    }
}
