//! The feed-forward part of a layer.

use super::config::ModelConfig;
use super::nn::{HasBias, Linear};
use super::pass::Pass;
use super::tensor::Tensor;
use crate::error::LoadError;
use crate::load::Weights;

/// The feed-forward part: `down(silu(gate(x)) * up(x))`.
#[derive(Debug)]
pub(super) struct Mlp {
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl Mlp {
    pub(super) fn load(weights: &Weights<'_>, config: &ModelConfig) -> Result<Self, LoadError> {
        let (hidden, intermediate) = (config.hidden, config.intermediate);
        let has_bias = HasBias(config.optional.mlp_bias);
        Ok(Self {
            gate: Linear::load(&weights.under("gate_proj"), intermediate, hidden, has_bias)?,
            up: Linear::load(&weights.under("up_proj"), intermediate, hidden, has_bias)?,
            down: Linear::load(&weights.under("down_proj"), hidden, intermediate, has_bias)?,
        })
    }

    pub(super) fn forward(&self, x: &Tensor, pass: &Pass<'_>) -> Tensor {
        let [gate, up] = pass.linears(x, [&self.gate, &self.up]); // (tokens, intermediate)
        pass.linear(&pass.gated(gate, &up), &self.down)
    }
}
