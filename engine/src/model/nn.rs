//! What models are made of. Loading names the parts as the checkpoint does; what is done with them is in [`Pass`].

use kernels::cpu::Matrix;

use super::config::ModelConfig;
use super::pass::Pass;
use super::tensor::Tensor;
use crate::error::LoadError;
use crate::load::Weights;

/// One row per token of the vocabulary.
#[derive(Clone, Debug)]
pub struct Embedding(pub(super) Matrix);

/// `y = x × weightᵀ + bias`
#[derive(Clone, Debug)]
pub struct Linear {
    pub(super) weight: Matrix,
    pub(super) bias: Option<Vec<f32>>,
}

/// Root-mean-square norm.
#[derive(Clone, Debug)]
pub struct RmsNorm {
    pub(super) weight: Vec<f32>,
    pub(super) epsilon: f32,
}

/// `down(silu(gate(x)) * up(x))`
#[derive(Debug)]
pub struct Mlp {
    gate: Linear,
    up: Linear,
    down: Linear,
}

/// The embedding and the layer that turns hidden states back into tokens, which may be the same matrix.
#[derive(Debug)]
pub struct Vocabulary {
    pub(super) embed: Embedding,
    pub(super) head: Linear,
}

impl Linear {
    /// `cols` numbers in, `rows` numbers out.
    pub fn load(weights: &Weights<'_>, rows: usize, cols: usize) -> Result<Self, LoadError> {
        Ok(Self { weight: weights.matrix("weight", rows, cols)?, bias: None })
    }

    pub fn load_biased(weights: &Weights<'_>, rows: usize, cols: usize) -> Result<Self, LoadError> {
        let plain = Self::load(weights, rows, cols)?;
        Ok(Self { bias: Some(weights.vector("bias", rows)?), ..plain })
    }

    /// With a bias if the config says so.
    pub fn load_as(
        weights: &Weights<'_>,
        rows: usize,
        cols: usize,
        biased: Biased,
    ) -> Result<Self, LoadError> {
        match biased {
            Biased(true) => Self::load_biased(weights, rows, cols),
            Biased(false) => Self::load(weights, rows, cols),
        }
    }
}

/// Whether a config gives some layers a bias.
#[derive(Clone, Copy, Debug)]
pub struct Biased(pub bool);

impl RmsNorm {
    pub fn load(weights: &Weights<'_>, width: usize, epsilon: f32) -> Result<Self, LoadError> {
        Ok(Self { weight: weights.vector("weight", width)?, epsilon })
    }
}

impl Mlp {
    pub fn load(weights: &Weights<'_>, config: &ModelConfig, biased: Biased) -> Result<Self, LoadError> {
        let (hidden, intermediate) = (config.hidden, config.intermediate);
        Ok(Self {
            gate: Linear::load_as(&weights.under("gate_proj"), intermediate, hidden, biased)?,
            up: Linear::load_as(&weights.under("up_proj"), intermediate, hidden, biased)?,
            down: Linear::load_as(&weights.under("down_proj"), hidden, intermediate, biased)?,
        })
    }

    pub fn forward(&self, x: &Tensor, pass: &Pass<'_>) -> Tensor {
        let [gate, up] = pass.linears(x, [&self.gate, &self.up]); // (tokens, intermediate)
        pass.linear(&pass.gated(gate, &up), &self.down)
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
