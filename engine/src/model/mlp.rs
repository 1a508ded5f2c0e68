//! The feed-forward part of a layer.

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

/// The sizes of a feed-forward part.
#[derive(Clone, Copy, Debug)]
pub(super) struct MlpShape {
    pub(super) hidden: usize,
    pub(super) intermediate: usize,
    pub(super) has_bias: HasBias,
}

impl Mlp {
    /// `names` are those of gate, up and down.
    pub(super) fn load(weights: &Weights<'_>, shape: MlpShape, names: [&str; 3]) -> Result<Self, LoadError> {
        let MlpShape { hidden, intermediate, has_bias } = shape;
        let [gate, up, down] = names.map(|name| weights.under(name));
        Ok(Self {
            gate: Linear::load(&gate, intermediate, hidden, has_bias)?,
            up: Linear::load(&up, intermediate, hidden, has_bias)?,
            down: Linear::load(&down, hidden, intermediate, has_bias)?,
        })
    }

    pub(super) fn forward(&self, x: &Tensor, pass: &Pass<'_>) -> Tensor {
        let [gate, up] = pass.linears(x, [&self.gate, &self.up]); // (tokens, intermediate)
        pass.linear(&pass.gated(gate, &up), &self.down)
    }
}
