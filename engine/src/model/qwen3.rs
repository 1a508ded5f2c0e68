//! Qwen3: Qwen2 that norms each head of q and k, in place of their biases.

use std::sync::Arc;

use super::config::ModelConfig;
use super::nn::{Biased, Linear, Mlp, RmsNorm, Vocabulary};
use super::pass::Pass;
use super::tensor::Tensor;
use super::{Architecture, Model, Parts};
use crate::error::LoadError;
use crate::load::Weights;

pub const ARCHITECTURE: Architecture = Architecture {
    name: "Qwen3ForCausalLM",
    windows: |config| {
        let window = &config.window;
        window.by_layer(config.n_layers, |layer| window.is_used && layer >= window.full_layers)
    },
    parts: |config| Parts {
        qkv_bias: config.attention_bias,
        o_bias: config.attention_bias,
        head_norms: true,
        ..Parts::PLAIN
    },
    load: |config, weights| Ok(Arc::new(Qwen3::load(config, weights)?)),
};

#[derive(Debug)]
struct Qwen3 {
    vocabulary: Vocabulary,
    layers: Vec<Layer>,
    norm: RmsNorm,
}

#[derive(Debug)]
struct Layer {
    attention_norm: RmsNorm,
    attention: Attention,
    mlp_norm: RmsNorm,
    mlp: Mlp,
}

#[derive(Debug)]
struct Attention {
    layer: usize,
    head_dim: usize,
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    q_norm: RmsNorm,
    k_norm: RmsNorm,
}

impl Qwen3 {
    fn load(config: &ModelConfig, weights: &Weights<'_>) -> Result<Self, LoadError> {
        let layer = |nth: usize| Layer::load(config, &weights.under(&format!("model.layers.{nth}")), nth);
        Ok(Self {
            vocabulary: Vocabulary::load(weights, config)?,
            layers: (0..config.n_layers).map(layer).collect::<Result<_, _>>()?,
            norm: RmsNorm::load(&weights.under("model.norm"), config.hidden, config.norm_epsilon)?,
        })
    }
}

impl Model for Qwen3 {
    fn forward(&self, pass: &mut Pass<'_>) -> Tensor {
        let mut x = pass.embed(&self.vocabulary.embed); // (tokens, hidden)
        for layer in &self.layers {
            layer.forward(&mut x, pass);
        }
        let x = pass.norm(&pass.wanted(&x), &self.norm); // (wanted, hidden)
        pass.linear(&x, &self.vocabulary.head) // (wanted, vocab)
    }
}

impl Layer {
    fn load(config: &ModelConfig, weights: &Weights<'_>, layer: usize) -> Result<Self, LoadError> {
        let norm = |name: &str| RmsNorm::load(&weights.under(name), config.hidden, config.norm_epsilon);
        Ok(Self {
            attention_norm: norm("input_layernorm")?,
            attention: Attention::load(config, &weights.under("self_attn"), layer)?,
            mlp_norm: norm("post_attention_layernorm")?,
            mlp: Mlp::load(&weights.under("mlp"), config, Biased(false))?,
        })
    }

    fn forward(&self, x: &mut Tensor, pass: &mut Pass<'_>) {
        let attended = self.attention.forward(&pass.norm(x, &self.attention_norm), pass);
        pass.add(x, &attended);
        let fed = self.mlp.forward(&pass.norm(x, &self.mlp_norm), pass);
        pass.add(x, &fed);
    }
}

impl Attention {
    fn load(config: &ModelConfig, weights: &Weights<'_>, layer: usize) -> Result<Self, LoadError> {
        let (hidden, head_dim, biased) = (config.hidden, config.head_dim, Biased(config.attention_bias));
        let (q_width, kv_width) = (config.n_heads * head_dim, config.n_kv_heads * head_dim);
        Ok(Self {
            layer,
            head_dim,
            q: Linear::load_as(&weights.under("q_proj"), q_width, hidden, biased)?,
            k: Linear::load_as(&weights.under("k_proj"), kv_width, hidden, biased)?,
            v: Linear::load_as(&weights.under("v_proj"), kv_width, hidden, biased)?,
            o: Linear::load_as(&weights.under("o_proj"), hidden, q_width, biased)?,
            q_norm: RmsNorm::load(&weights.under("q_norm"), head_dim, config.norm_epsilon)?,
            k_norm: RmsNorm::load(&weights.under("k_norm"), head_dim, config.norm_epsilon)?,
        })
    }

    fn forward(&self, x: &Tensor, pass: &mut Pass<'_>) -> Tensor {
        let [mut q, mut k, v] = pass.heads(x, [&self.q, &self.k, &self.v], self.head_dim); // (tokens, heads * head_dim)
        pass.norm_heads(&mut q, &self.q_norm);
        pass.norm_heads(&mut k, &self.k_norm);
        pass.rotate(&mut q, self.head_dim);
        pass.rotate(&mut k, self.head_dim);
        let attended = pass.attend(self.layer, &q, &k, &v); // (tokens, heads * head_dim)
        pass.linear(&attended, &self.o)
    }
}
