//! The keys of a `config.json`. A key that changes results and is unknown to the architecture is rejected.

use serde_json::{Map, Value};

use super::architecture::Architecture;

/// The keys that are read for every architecture.
const READ: &[&str] = &[
    "architectures",
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "original_max_position_embeddings",
    "quantization_config",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "tie_word_embeddings",
    "vocab_size",
];

/// Common keys without effect on results, which are not logged.
const WITHOUT_EFFECT: &[&str] = &[
    "_name_or_path",
    "attention_dropout",
    "bos_token_id",
    "dtype",
    "initializer_factor",
    "initializer_range",
    "model_type",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "torch_dtype",
    "transformers_version",
    "use_cache",
];

/// Parts of the names of keys that change results in some architecture.
const CHANGES_NUMBERS: &[&str] = &[
    "activation",
    "alibi",
    "attention_chunk",
    "attn_temperature",
    "bias",
    "clip",
    "expert",
    "factor",
    "head_dim",
    "hidden_act",
    "interleave",
    "layer_types",
    "lora_rank",
    "multiplier",
    "norm",
    "residual",
    "rope",
    "rotary",
    "scal",
    "sink",
    "softcap",
    "soft_cap",
    "window",
];

/// Parts of the names of keys that have no effect if their value is 1. Every other key has no effect if its
/// value is 0.
const MULTIPLIES: &[&str] = &["factor", "multiplier", "scal"];

/// Checks the keys of a config. Returns those that are not read, for the log. Rejects a key that changes
/// results. `defaults` are the architecture's, for keys that the config lacks.
pub(super) fn check(
    config: &Map<String, Value>,
    architecture: &Architecture,
    defaults: &Map<String, Value>,
) -> Result<Vec<String>, String> {
    let known = |key: &str| READ.contains(&key) || architecture.keys.contains(&key);
    let uses_windows = config.get("use_sliding_window").or_else(|| defaults.get("use_sliding_window"));
    let windows_are_off = uses_windows == Some(&Value::Bool(false));
    let mut unread = Vec::new();
    for (key, value) in
        config.iter().filter(|(key, _)| !known(key) && !WITHOUT_EFFECT.contains(&key.as_str()))
    {
        let is_refused = match key.as_str() {
            "sliding_window" | "max_window_layers" if windows_are_off => false,
            "use_qk_norm" => !value.is_null() && *value != architecture.head_norms,
            _ => contains(key, CHANGES_NUMBERS) && !is_neutral(key, value),
        };
        if is_refused {
            return Err(format!("{key} is {value}, which is not implemented for {}", architecture.name));
        }
        unread.push(key.clone());
    }
    Ok(unread)
}

fn contains(key: &str, parts: &[&str]) -> bool {
    parts.iter().any(|part| key.contains(part))
}

/// Returns whether the value turns the feature off.
fn is_neutral(key: &str, value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Bool(true) => false,
        Value::Number(number) => {
            let neutral = if contains(key, MULTIPLIES) { 1.0 } else { 0.0 };
            number.as_f64() == Some(neutral)
        }
        Value::String(text) => text.is_empty() || text == "silu",
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Checks the keys of an architecture without norms of heads.
    fn checked(config: &Value, known: &'static [&'static str]) -> Result<Vec<String>, String> {
        let plain = Architecture::named("LlamaForCausalLM").expect("it is known");
        let architecture = Architecture { name: "A", keys: known, ..*plain };
        check(config.as_object().expect("an object"), &architecture, &Map::new())
    }

    #[test]
    fn a_key_that_changes_numbers_is_refused_by_name() {
        for config in [
            json!({"attn_logit_softcapping": 50.0}),
            json!({"final_logit_softcapping": 30.0}),
            json!({"embedding_multiplier": 12.0}),
            json!({"residual_multiplier": 0.22}),
            json!({"logits_scaling": 8.0}),
            json!({"query_pre_attn_scalar": 256}),
            json!({"logit_scale": 0.0625}),
            json!({"partial_rotary_factor": 0.5}),
            json!({"rotary_pct": 0.25}),
            json!({"clip_qkv": 8.0}),
            json!({"attention_bias": true}),
            json!({"use_qkv_bias": true}),
            json!({"lm_head_bias": true}),
            json!({"use_qk_norm": true}),
            json!({"sliding_window": 4096}),
            json!({"sliding_window": 4096, "use_sliding_window": true}),
            json!({"num_local_experts": 8}),
            json!({"kv_lora_rank": 512}),
            json!({"no_rope_layers": [1, 1, 0]}),
            json!({"rope_local_base_freq": 10000.0}),
            json!({"hidden_activation": "gelu_pytorch_tanh"}),
        ] {
            let (key, value) = config.as_object().and_then(|keys| keys.iter().next()).expect("a key");
            let error = checked(&config, &[]).expect_err(key);
            assert_eq!(error, format!("{key} is {value}, which is not implemented for A"));
        }
    }

    #[test]
    fn keys_that_say_that_a_feature_is_not_used_are_taken() {
        let config = json!({
            "attn_logit_softcapping": null, "embedding_multiplier": 1.0, "partial_rotary_factor": 1,
            "attention_bias": false, "no_rope_layers": [], "num_experts": 0, "use_mrope": false,
            "use_sliding_window": false, "sliding_window": 4096, "max_window_layers": 28, "use_qk_norm": false,
        });
        checked(&config, &[]).expect("none of them changes a number");
    }

    #[test]
    fn keys_that_are_not_read_are_returned_and_common_ones_are_not() {
        let config = json!({
            "hidden_size": 8, "torch_dtype": "bfloat16", "attention_bias": true, "some_new_key": 5, "bos_token_id": 1,
        });
        assert_eq!(checked(&config, &["attention_bias"]), Ok(vec!["some_new_key".to_owned()]));
    }
}
