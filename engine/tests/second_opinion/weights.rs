//! Random weights of a model, of a size that keeps activations and logits of order 1.

use std::collections::HashMap;

use candle_core::{Device, Tensor};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::Value;

/// Returns a number of a config.
pub(crate) fn number(config: &Value, key: &str) -> usize {
    config[key].as_u64().unwrap_or_else(|| panic!("{key} of {config}")) as usize
}

/// Returns whether a layer has experts.
pub(crate) fn has_experts(config: &Value, layer: usize) -> bool {
    let step = config.get("decoder_sparse_step").map_or(1, |_| number(config, "decoder_sparse_step"));
    n_experts(config).is_some() && (layer + 1).is_multiple_of(step)
}

pub(crate) fn n_experts(config: &Value) -> Option<usize> {
    let count = config.get("num_experts").or(config.get("num_local_experts"));
    count.map(|count| count.as_u64().expect("a number") as usize)
}

/// Makes the tensors of a checkpoint.
pub(crate) fn random(config: &Value, seed: u64) -> HashMap<String, Tensor> {
    // Another seed than the config's, whose numbers would be the same.
    let mut checkpoint = Checkpoint { rng: StdRng::seed_from_u64(!seed), config, tensors: HashMap::new() };
    checkpoint.fill();
    checkpoint.tensors
}

struct Checkpoint<'a> {
    rng: StdRng,
    config: &'a Value,
    tensors: HashMap<String, Tensor>,
}

impl Checkpoint<'_> {
    fn fill(&mut self) {
        let (vocab, hidden) = (number(self.config, "vocab_size"), number(self.config, "hidden_size"));
        self.matrix("model.embed_tokens", vocab, hidden);
        self.norm("model.norm", hidden);
        if self.config["tie_word_embeddings"] == false {
            self.matrix("lm_head", vocab, hidden);
        }
        for layer in 0..number(self.config, "num_hidden_layers") {
            let layer_name = format!("model.layers.{layer}");
            self.norm(&format!("{layer_name}.input_layernorm"), hidden);
            self.norm(&format!("{layer_name}.post_attention_layernorm"), hidden);
            self.attention(&format!("{layer_name}.self_attn"), hidden);
            if has_experts(self.config, layer) {
                self.experts(&layer_name, hidden);
            } else {
                let names = ["gate_proj", "up_proj", "down_proj"];
                let inner = number(self.config, "intermediate_size");
                self.feed_forward(&format!("{layer_name}.mlp"), names, hidden, inner);
            }
        }
    }

    fn attention(&mut self, name: &str, hidden: usize) {
        let n_heads = number(self.config, "num_attention_heads");
        let head_dim = match self.config.get("head_dim") {
            Some(_) => number(self.config, "head_dim"),
            None => hidden / n_heads,
        };
        let (q, kv) = (n_heads * head_dim, number(self.config, "num_key_value_heads") * head_dim);
        let architecture = self.config["architectures"][0].as_str().unwrap_or_default();
        let has_biases = self.config["attention_bias"] == true;
        let (qkv_bias, head_norms) =
            (has_biases || architecture.starts_with("Qwen2"), architecture.starts_with("Qwen3"));
        for (part, width) in [("q_proj", q), ("k_proj", kv), ("v_proj", kv)] {
            self.matrix(&format!("{name}.{part}"), width, hidden);
            if qkv_bias {
                self.bias(&format!("{name}.{part}"), width);
            }
        }
        self.matrix(&format!("{name}.o_proj"), hidden, q);
        if has_biases {
            self.bias(&format!("{name}.o_proj"), hidden);
        }
        if head_norms {
            self.norm(&format!("{name}.q_norm"), head_dim);
            self.norm(&format!("{name}.k_norm"), head_dim);
        }
    }

    fn experts(&mut self, layer_name: &str, hidden: usize) {
        let n_experts = n_experts(self.config).expect("the layer has experts");
        let (part, names, inner) = match self.config.get("moe_intermediate_size") {
            Some(_) => ("mlp", ["gate_proj", "up_proj", "down_proj"], "moe_intermediate_size"),
            None => ("block_sparse_moe", ["w1", "w3", "w2"], "intermediate_size"),
        };
        let inner = number(self.config, inner);
        self.matrix(&format!("{layer_name}.{part}.gate"), n_experts, hidden);
        for expert in 0..n_experts {
            self.feed_forward(&format!("{layer_name}.{part}.experts.{expert}"), names, hidden, inner);
        }
    }

    fn feed_forward(&mut self, name: &str, names: [&str; 3], hidden: usize, inner: usize) {
        let [gate, up, down] = names;
        self.matrix(&format!("{name}.{gate}"), inner, hidden);
        self.matrix(&format!("{name}.{up}"), inner, hidden);
        self.matrix(&format!("{name}.{down}"), hidden, inner);
    }

    /// A product with it has the variance of its input.
    fn matrix(&mut self, name: &str, n_rows: usize, width: usize) {
        let most = (3.0 / width as f32).sqrt();
        let numbers = self.numbers(n_rows * width, most);
        self.insert(format!("{name}.weight"), numbers, &[n_rows, width]);
    }

    fn norm(&mut self, name: &str, width: usize) {
        let numbers = self.numbers(width, 0.5).into_iter().map(|number| 1.0 + number).collect();
        self.insert(format!("{name}.weight"), numbers, &[width]);
    }

    fn bias(&mut self, name: &str, width: usize) {
        let numbers = self.numbers(width, 0.5);
        self.insert(format!("{name}.bias"), numbers, &[width]);
    }

    fn numbers(&mut self, count: usize, most: f32) -> Vec<f32> {
        (0..count).map(|_| self.rng.random_range(-most..most)).collect()
    }

    fn insert(&mut self, name: String, numbers: Vec<f32>, shape: &[usize]) {
        let tensor = Tensor::from_vec(numbers, shape, &Device::Cpu).expect("the shape fits");
        self.tensors.insert(name, tensor);
    }
}
