//! A random config with a prompt.
//!
//! Left out, because candle differs from `transformers` or lacks it:
//! - Llama: `head_dim` other than hidden size by heads, and biases.
//! - Mistral: a tied output layer.
//! - Mixtral: `head_dim`, and a tied output layer.
//! - Qwen2: windows in some layers only (candle has no `max_window_layers`), and a window shorter than the prompt while
//!   `use_sliding_window` is false, which candle applies nevertheless.
//! - Qwen3: windows, which candle refuses.
//! - Qwen3-MoE: windows and `mlp_only_layers`.

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use serde_json::{Map, Value, json};

/// The largest number of log-probabilities that a step gives is 255, and a case compares all tokens.
const VOCAB_MAX: usize = 200;
const CONTEXT_TOKENS: usize = 128;
/// The longest prompt, without and with experts. The check of routing computes every beginning of the prompt.
const PROMPT_TOKENS_MAX: [usize; 2] = [48, 24];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Architecture {
    Llama,
    Mistral,
    Mixtral,
    Qwen2,
    Qwen3,
    Qwen3Moe,
}

/// A model and a prompt.
#[derive(Debug)]
pub(crate) struct Case {
    pub(crate) architecture: Architecture,
    /// `config.json`.
    pub(crate) config: Value,
    pub(crate) prompt: Vec<u32>,
    /// The number of the prompt's tokens that the engine computes in its first step. A second step computes the rest.
    pub(crate) first_step: usize,
}

impl Case {
    pub(crate) fn random(architecture: Architecture, seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let has_experts = matches!(architecture, Architecture::Mixtral | Architecture::Qwen3Moe);
        let n_tokens = rng.random_range(2..=PROMPT_TOKENS_MAX[usize::from(has_experts)]);
        let mut config = shape(architecture, &mut rng);
        config.append(&mut details(architecture, n_tokens, &mut rng));
        let vocab = config["vocab_size"].as_u64().expect("a number") as u32;
        let prompt = (0..n_tokens).map(|_| rng.random_range(0..vocab)).collect();
        let first_step = rng.random_range(1..=n_tokens);
        Self { architecture, config: config.into(), prompt, first_step }
    }
}

/// Picks one of some values.
fn one_of<T: Clone>(rng: &mut StdRng, values: &[T]) -> T {
    values.choose(rng).expect("there are some").clone()
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(fields) => fields,
        _ => unreachable!("it is written as an object"),
    }
}

/// The keys that all architectures have.
fn shape(architecture: Architecture, rng: &mut StdRng) -> Map<String, Value> {
    use Architecture::{Llama, Mistral, Mixtral, Qwen2, Qwen3, Qwen3Moe};
    let n_kv_heads = rng.random_range(1..=3);
    let n_heads = n_kv_heads * rng.random_range(1..=4);
    let head_dim = one_of(rng, &[4, 6, 8, 10, 12, 16, 20, 32]);
    let hidden = match architecture {
        Llama | Mixtral | Qwen2 => n_heads * head_dim,
        Mistral | Qwen3 | Qwen3Moe => rng.random_range(8..=72),
    };
    let tied = match architecture {
        Mistral | Mixtral => false,
        Llama | Qwen2 | Qwen3 | Qwen3Moe => rng.random(),
    };
    let mut shape = object(json!({
        "bos_token_id": 0,
        "eos_token_id": 1,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": rng.random_range(8..=96),
        "max_position_embeddings": CONTEXT_TOKENS,
        "num_attention_heads": n_heads,
        "num_hidden_layers": rng.random_range(1..=3),
        "num_key_value_heads": n_kv_heads,
        "rms_norm_eps": one_of(rng, &[1e-6, 1e-5, 1e-2]),
        "rope_theta": one_of(rng, &[100.0, 10_000.0, 500_000.0, 1_000_000.0]),
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
        "vocab_size": rng.random_range(20..=VOCAB_MAX),
    }));
    if matches!(architecture, Mistral | Qwen3 | Qwen3Moe) {
        shape.insert("head_dim".to_owned(), head_dim.into());
    }
    shape
}

/// The keys of one architecture.
fn details(architecture: Architecture, n_tokens: usize, rng: &mut StdRng) -> Map<String, Value> {
    let is_windowed: bool = rng.random();
    let window = is_windowed.then(|| rng.random_range(1..=n_tokens));
    let n_experts = rng.random_range(2..=9);
    let per_token = rng.random_range(1..=n_experts.min(4));
    let details = match architecture {
        Architecture::Llama => json!({"architectures": ["LlamaForCausalLM"], "rope_scaling": scaling(rng)}),
        Architecture::Mistral => json!({"architectures": ["MistralForCausalLM"], "sliding_window": window}),
        Architecture::Mixtral => json!({
            "architectures": ["MixtralForCausalLM"],
            "num_experts_per_tok": per_token,
            "num_local_experts": n_experts,
            "sliding_window": window,
        }),
        Architecture::Qwen2 => json!({
            "architectures": ["Qwen2ForCausalLM"],
            "max_window_layers": 0,
            "sliding_window": window.unwrap_or(CONTEXT_TOKENS),
            "use_sliding_window": is_windowed,
        }),
        Architecture::Qwen3 => json!({
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": rng.random::<bool>(),
            "max_window_layers": 0,
            "sliding_window": null,
            "use_sliding_window": false,
        }),
        Architecture::Qwen3Moe => json!({
            "architectures": ["Qwen3MoeForCausalLM"],
            "attention_bias": rng.random::<bool>(),
            "decoder_sparse_step": rng.random_range(1..=2),
            "max_window_layers": 0,
            "moe_intermediate_size": rng.random_range(4..=40),
            "norm_topk_prob": rng.random::<bool>(),
            "num_experts": n_experts,
            "num_experts_per_tok": per_token,
            "sliding_window": null,
            "use_sliding_window": false,
        }),
    };
    object(details)
}

/// Scaled positions, as in Llama 3.1, or none.
fn scaling(rng: &mut StdRng) -> Value {
    if rng.random() {
        return Value::Null;
    }
    json!({
        "factor": one_of(rng, &[2.0, 8.0, 32.0]),
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": one_of(rng, &[16, 32, 64]),
        "rope_type": "llama3",
    })
}
