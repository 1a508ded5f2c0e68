//! Attention in which several heads of q share a head of k and v.

use super::config::ModelConfig;
use super::nn::{HasBias, Linear, RmsNorm};
use super::pass::{AttentionInput, Pass};
use super::tensor::Tensor;
use crate::error::LoadError;
use crate::load::Weights;

#[derive(Debug)]
pub(super) struct Attention {
    layer: usize,
    head_dim: usize,
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    head_norms: Option<HeadNorms>,
}

/// Norms of each head of q and of k, before rotation.
#[derive(Debug)]
struct HeadNorms {
    q: RmsNorm,
    k: RmsNorm,
}

impl Attention {
    pub(super) fn load(config: &ModelConfig, weights: &Weights<'_>, layer: usize) -> Result<Self, LoadError> {
        let (hidden, head_dim, optional) = (config.hidden, config.head_dim, config.optional);
        let (q_width, kv_width) = (config.n_heads * head_dim, config.n_kv_heads * head_dim);
        let linear = |name: &str, rows: usize, cols: usize, bias: bool| {
            Linear::load(&weights.under(name), rows, cols, HasBias(bias))
        };
        Ok(Self {
            layer,
            head_dim,
            q: linear("q_proj", q_width, hidden, optional.qkv_bias)?,
            k: linear("k_proj", kv_width, hidden, optional.qkv_bias)?,
            v: linear("v_proj", kv_width, hidden, optional.qkv_bias)?,
            o: linear("o_proj", hidden, q_width, optional.o_bias)?,
            head_norms: match optional.head_norms {
                true => Some(HeadNorms::load(config, weights)?),
                false => None,
            },
        })
    }

    /// Computes attention: (tokens, hidden) to (tokens, hidden).
    pub(super) fn forward(&self, x: &Tensor, pass: &mut Pass<'_>) -> Tensor {
        let [mut q, mut k, v] = pass.heads(x, [&self.q, &self.k, &self.v], self.head_dim); // (tokens, heads * head_dim)
        if let Some(norms) = &self.head_norms {
            pass.norm_heads(&mut q, &norms.q);
            pass.norm_heads(&mut k, &norms.k);
        }
        pass.rotate(&mut q, self.head_dim);
        pass.rotate(&mut k, self.head_dim);
        let scale = (self.head_dim as f32).sqrt().recip();
        let input = AttentionInput { layer: self.layer, scale, q: &q, k: &k, v: Some(&v) };
        let attended = pass.attend(input); // (tokens, heads * head_dim)
        pass.linear(&attended, &self.o)
    }
}

impl HeadNorms {
    fn load(config: &ModelConfig, weights: &Weights<'_>) -> Result<Self, LoadError> {
        let norm = |name: &str| RmsNorm::load(&weights.under(name), config.head_dim, config.norm_epsilon);
        Ok(Self { q: norm("q_norm")?, k: norm("k_norm")? })
    }
}
