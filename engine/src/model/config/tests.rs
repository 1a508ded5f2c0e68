use super::*;
use crate::model::latent::RotatedPairs;
use crate::model::mixture::{GroupLimit, Scoring};

fn config(changes: &str) -> Result<ModelConfig, String> {
    let plain = r#"{"architectures": ["LlamaForCausalLM"], "vocab_size": 10, "hidden_size": 8,
        "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 64, "eos_token_id": 3}"#;
    let mut raw: serde_json::Map<String, Value> = serde_json::from_str(plain).expect("JSON");
    raw.extend(serde_json::from_str::<serde_json::Map<String, Value>>(changes).expect("JSON"));
    let bytes = serde_json::to_vec(&raw).expect("JSON");
    ModelConfig::parse(&bytes, None).map_err(|problem| problem.to_string())
}

#[test]
fn what_is_not_said_is_as_usual() {
    let config = config("{}").expect("a plain config");
    assert_eq!((config.n_kv_heads, config.head_dim, config.tied), (4, 2, false));
    assert_eq!(config.eos_tokens, [TokenId(3)]);
    assert_eq!(config.windows, [None, None]);
}

#[test]
fn generation_has_the_last_word_on_the_end() {
    let bytes = br#"{"architectures": ["LlamaForCausalLM"], "vocab_size": 10, "hidden_size": 8, "intermediate_size": 12,
        "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64, "eos_token_id": 3}"#;
    let config = ModelConfig::parse(bytes, Some(br#"{"eos_token_id": [7, 8]}"#)).expect("a config");
    assert_eq!(config.eos_tokens, [TokenId(7), TokenId(8)]);
}

#[test]
fn malformed_values_are_refused_by_name() {
    for (changes, expected) in [
        (r#"{"num_key_value_heads": 3}"#, "4 heads cannot share 3 KV heads"),
        (r#"{"head_dim": 7}"#, "head_dim 7 is odd: rotary embedding needs two halves"),
        (r#"{"num_attention_heads": 0}"#, "num_attention_heads is 0"),
        (r#"{"architectures": []}"#, "architectures names none"),
        (r#"{"hidden_act": "gelu"}"#, "hidden_act \"gelu\" is not implemented: silu is"),
        (r#"{"layer_types": ["full_attention"]}"#, "layer_types has 1 entries for 2 layers"),
        (r#"{"layer_types": ["x", "y"]}"#, "layer_types: \"x\" is not implemented"),
        (r#"{"rope_scaling": {"rope_type": "dynamic"}}"#, "rope_type \"dynamic\" is not implemented"),
        (r#"{"rope_scaling": {"rope_type": "yarn"}}"#, "rope scaling needs factor above zero"),
        (
            r#"{"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": "x"}}"#,
            "rope settings: beta_fast is \"x\"",
        ),
        (r#"{"rope_scaling": {"factor": 2.0}}"#, "rope settings with factor name no rope_type"),
        (
            r#"{"rope_parameters": {"full_attention": {"rope_type": "default"}}}"#,
            "rope settings with full_attention name no rope_type",
        ),
        (
            r#"{"rope_parameters": {"rope_type": "linear", "factor": 2.0, "mscale": 1.5}}"#,
            "rope_type \"linear\" with mscale is not implemented",
        ),
        (
            r#"{"rope_parameters": {"rope_theta": 5.0}, "rope_scaling": {"type": "linear", "factor": 2.0}}"#,
            "rope_parameters and rope_scaling differ",
        ),
    ] {
        assert_eq!(config(changes).expect_err(changes), expected);
    }
}

/// Parses a config of another architecture, with changes.
fn config_of(name: &str, changes: &str) -> Result<ModelConfig, String> {
    let first = format!(r#"{{"architectures": ["{name}"], "num_key_value_heads": 4, "#);
    config(&changes.replacen('{', &first, 1))
}

#[test]
fn each_architecture_has_its_rule_for_windows() {
    let windows = |name: &str, changes: &str| config_of(name, changes).map(|config| config.windows);
    assert_eq!(windows("MistralForCausalLM", r#"{"sliding_window": 5}"#), Ok(vec![Some(5), Some(5)]));
    assert_eq!(windows("MistralForCausalLM", r#"{"sliding_window": null}"#), Ok(vec![None, None]));
    for name in ["Qwen2ForCausalLM", "Qwen3ForCausalLM"] {
        assert_eq!(windows(name, r#"{"sliding_window": 5, "max_window_layers": 1}"#), Ok(vec![None, None]));
        let upper = r#"{"sliding_window": 5, "use_sliding_window": true, "max_window_layers": 1}"#;
        assert_eq!(windows(name, upper), Ok(vec![None, Some(5)]));
        let listed = r#"{"sliding_window": 5, "use_sliding_window": true,
            "layer_types": ["sliding_attention", "full_attention"]}"#;
        assert_eq!(windows(name, listed), Ok(vec![Some(5), None]));
    }
    let mixed = r#"{"layer_types": ["sliding_attention", "full_attention"]}"#;
    let refused = |name: &str| windows(name, mixed).expect_err("layers do not differ there");
    assert_eq!(
        refused("LlamaForCausalLM"),
        "layer_types with a window are not implemented for LlamaForCausalLM"
    );
    assert_eq!(
        refused("MistralForCausalLM"),
        "layer_types without a window are not implemented for MistralForCausalLM"
    );
}

#[test]
fn an_architecture_and_its_config_say_which_tensors_a_model_has() {
    for (name, changes, expected) in [
        ("LlamaForCausalLM", r#"{"hidden_size": 8}"#, [false, false, false, false]),
        ("LlamaForCausalLM", r#"{"attention_bias": true}"#, [true, true, false, false]),
        ("LlamaForCausalLM", r#"{"mlp_bias": true}"#, [false, false, true, false]),
        ("MistralForCausalLM", r#"{"hidden_size": 8}"#, [false, false, false, false]),
        ("Qwen2ForCausalLM", r#"{"hidden_size": 8}"#, [true, false, false, false]),
        ("Qwen3ForCausalLM", r#"{"hidden_size": 8}"#, [false, false, false, true]),
        ("Qwen3ForCausalLM", r#"{"attention_bias": true}"#, [true, true, false, true]),
    ] {
        let OptionalTensors { qkv_bias, o_bias, mlp_bias, head_norms } =
            config_of(name, changes).expect("a config").optional;
        assert_eq!([qkv_bias, o_bias, mlp_bias, head_norms], expected, "{name}, {changes}");
    }
}

#[test]
fn a_key_that_an_architecture_does_not_know_is_refused_or_kept_for_the_log() {
    let error = config_of("MistralForCausalLM", r#"{"attention_bias": true}"#).expect_err("it has none");
    assert_eq!(error, "attention_bias is true, which is not implemented for MistralForCausalLM");
    let config = config(r#"{"some_new_key": 5, "torch_dtype": "bfloat16"}"#).expect("a config");
    assert_eq!(config.unread_keys, ["some_new_key"]);
}

/// The expected values are those of the classes in `transformers` 5.
#[test]
fn what_a_config_lacks_is_what_transformers_takes() {
    let bare = |name: &str| {
        let config = format!(r#"{{"architectures": ["{name}"]}}"#);
        ModelConfig::parse(config.as_bytes(), None).expect("a config")
    };
    for (name, n_kv_heads, context_tokens, intermediate, window) in [
        ("LlamaForCausalLM", 32, 2048, 11008, None),
        ("MistralForCausalLM", 8, 131_072, 14336, Some(4096)),
        ("Qwen2ForCausalLM", 32, 32768, 22016, None),
        ("Qwen3ForCausalLM", 32, 32768, 22016, None),
    ] {
        let config = bare(name);
        let found = (config.n_kv_heads, config.context_tokens, config.intermediate, config.windows[31]);
        assert_eq!(found, (n_kv_heads, context_tokens, intermediate, window), "{name}");
    }
    let wide = config_of("Qwen3ForCausalLM", r#"{"num_key_value_heads": 2}"#).expect("a config");
    assert_eq!(wide.head_dim, 128, "not hidden_size / num_attention_heads");
    let window = r#"{"num_key_value_heads": null, "use_sliding_window": true, "max_window_layers": 1}"#;
    let config = config_of("Qwen2ForCausalLM", window).expect("a config");
    assert_eq!((config.n_kv_heads, config.windows), (4, vec![None, Some(4096)]), "null is a value");
}

#[test]
fn mixtures_are_read_and_their_mistakes_named() {
    let mixture = |name: &str, changes: &str| config_of(name, changes).map(|config| config.mixture);
    let found =
        mixture("MixtralForCausalLM", r#"{"sliding_window": null}"#).expect("a config").expect("experts");
    assert_eq!((found.n_experts, found.per_token, found.intermediate), (8, 2, 12));
    assert_eq!((found.is_normalized, found.layers), (true, vec![true, true]));
    let sparse =
        r#"{"mlp_only_layers": [0], "moe_intermediate_size": 4, "num_experts": 6, "num_experts_per_tok": 3}"#;
    let found = mixture("Qwen3MoeForCausalLM", sparse).expect("a config").expect("experts");
    assert_eq!((found.n_experts, found.per_token, found.intermediate), (6, 3, 4));
    assert_eq!((found.is_normalized, found.layers), (false, vec![false, true]));
    assert_eq!(mixture("LlamaForCausalLM", r#"{"hidden_size": 8}"#), Ok(None));
    for (changes, expected) in [
        (r#"{"num_experts": 0}"#, "num_experts is 0"),
        (r#"{"num_experts": 4, "num_local_experts": 5}"#, "num_experts is 4 and num_local_experts 5"),
        (r#"{"num_experts_per_tok": 129}"#, "num_experts_per_tok is 129, of 128 experts"),
        (r#"{"moe_intermediate_size": 0}"#, "moe_intermediate_size is 0"),
        (r#"{"decoder_sparse_step": 0}"#, "decoder_sparse_step is 0"),
        (r#"{"mlp_only_layers": [2]}"#, "mlp_only_layers names layer 2 of 2"),
        (
            r#"{"use_sliding_window": true}"#,
            "use_sliding_window is true, which is not implemented for Qwen3MoeForCausalLM",
        ),
        (
            r#"{"use_qk_norm": false}"#,
            "use_qk_norm is false, which is not implemented for Qwen3MoeForCausalLM",
        ),
    ] {
        assert_eq!(mixture("Qwen3MoeForCausalLM", changes).expect_err(changes), expected);
    }
    let published = r#"{"use_qk_norm": true, "max_window_layers": 28, "sliding_window": 4096}"#;
    let config = config_of("Qwen3MoeForCausalLM", published).expect("norms are there, and windows are off");
    assert_eq!((config.optional.head_norms, config.windows), (true, vec![None, None]));
    let parts =
        |changes: &str| config_of("Qwen3MoeForCausalLM", changes).expect("a config").fingerprint_parts();
    assert_ne!(parts(r#"{"norm_topk_prob": true}"#), parts(r#"{"norm_topk_prob": false}"#));
    assert_ne!(parts(r#"{"mlp_only_layers": [0]}"#), parts(r#"{"mlp_only_layers": [1]}"#));
}

/// Parses a small config of DeepSeek's, with changes.
fn deepseek(name: &str, changes: &str) -> Result<ModelConfig, String> {
    let small = r#"{"num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4,
        "topk_group": 2, "#;
    config_of(name, &changes.replacen('{', small, 1))
}

#[test]
fn latent_attention_is_read_and_its_mistakes_named() {
    let config = deepseek("DeepseekV3ForCausalLM", r#"{"q_lora_rank": null}"#).expect("a config");
    let latent = config.latent.expect("it has latents");
    assert_eq!((latent.q_rank, latent.kv_rank, latent.width(), latent.q_head()), (None, 512, 576, 192));
    assert_eq!((latent.value, latent.pairs, config.head_dim), (128, RotatedPairs::Neighbours, 64));
    let bare = |name: &str| {
        let config = format!(r#"{{"architectures": ["{name}"], "num_experts_per_tok": 8}}"#);
        let config = ModelConfig::parse(config.as_bytes(), None).expect("a config");
        let mixture = config.mixture.expect("experts");
        let first = mixture.layers.iter().position(|has_experts| *has_experts);
        (config.latent.expect("latents").q_rank, mixture.n_experts, mixture.groups, mixture.shared, first)
    };
    assert_eq!(bare("DeepseekV2ForCausalLM"), (Some(1536), 64, None, Some(2 * 1407), Some(0)));
    let groups = Some(GroupLimit { n_groups: 8, per_token: 4 });
    assert_eq!(bare("DeepseekV3ForCausalLM"), (Some(1536), 256, groups, Some(2048), Some(3)));
    for (changes, expected) in [
        (r#"{"kv_lora_rank": 0}"#, "kv_lora_rank is 0"),
        (r#"{"q_lora_rank": 70000}"#, "q_lora_rank is 70000"),
        (r#"{"v_head_dim": null}"#, "v_head_dim is 0"),
        (r#"{"qk_rope_head_dim": 7}"#, "qk_rope_head_dim 7 is odd: rotary embedding needs pairs"),
        (r#"{"kv_lora_rank": 65535}"#, "kv_lora_rank and qk_rope_head_dim are 65599 together"),
        (
            r#"{"qk_head_dim": 128}"#,
            "qk_head_dim is 128, but qk_nope_head_dim and qk_rope_head_dim are 192 together",
        ),
        (
            r#"{"num_attention_heads": 8}"#,
            "num_key_value_heads is 4, but latent attention has one for each of 8 heads",
        ),
        (r#"{"hidden_act": "gelu"}"#, "hidden_act \"gelu\" is not implemented: silu is"),
    ] {
        assert_eq!(deepseek("DeepseekV3ForCausalLM", changes).expect_err(changes), expected);
    }
}

#[test]
fn routing_by_groups_is_read_and_its_mistakes_named() {
    let mixture =
        |name: &str, changes: &str| deepseek(name, changes).map(|config| config.mixture.expect("experts"));
    let found = mixture("DeepseekV2ForCausalLM", r#"{"moe_layer_freq": 2}"#).expect("a config");
    assert_eq!((found.groups, found.scaling, found.is_normalized), (None, 1.0, false), "greedy");
    assert_eq!(found.layers, [true, false]);
    let limited = r#"{"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0,
        "first_k_dense_replace": 1, "n_shared_experts": 0}"#;
    let found = mixture("DeepseekV2ForCausalLM", limited).expect("a config");
    assert_eq!(found.groups, Some(GroupLimit { n_groups: 4, per_token: 2 }));
    assert_eq!((found.scaling, found.shared, found.layers), (16.0, None, vec![false, true]));
    let found = mixture("DeepseekV3ForCausalLM", r#"{"n_shared_experts": 2}"#).expect("a config");
    assert_eq!((found.scaling, found.shared, found.is_normalized), (2.5, Some(4096), true));
    assert_eq!((found.style.scoring, found.layers), (Scoring::Sigmoid, vec![false, false]));
    for (changes, expected) in [
        (r#"{"topk_group": 5}"#, "topk_group is 5, but n_group is 4"),
        (r#"{"n_group": 3}"#, "8 experts do not divide into n_group 3"),
        (r#"{"n_group": 8}"#, "num_experts_per_tok is 3, but topk_group 2 of n_group 8 have 2 experts"),
        (r#"{"n_group": 8, "num_experts_per_tok": 2}"#, "n_group is 8, of 8 experts: a group needs two"),
        (r#"{"n_group": null}"#, "topk_method \"noaux_tc\" needs n_group"),
        (r#"{"topk_group": 0}"#, "topk_method \"noaux_tc\" needs topk_group"),
        (r#"{"scoring_func": "softmax"}"#, "scoring_func \"softmax\" is not implemented: sigmoid is"),
        (r#"{"topk_method": "greedy"}"#, "topk_method \"greedy\" is not implemented: noaux_tc is"),
        (r#"{"routed_scaling_factor": 0.0}"#, "routed_scaling_factor is 0"),
        (r#"{"n_routed_experts": 0}"#, "n_routed_experts is 0"),
        (r#"{"moe_layer_freq": 0}"#, "moe_layer_freq is 0"),
    ] {
        assert_eq!(mixture("DeepseekV3ForCausalLM", changes).expect_err(changes), expected);
    }
    for (changes, expected) in [
        (
            r#"{"topk_method": "noaux_tc"}"#,
            "topk_method \"noaux_tc\" is not implemented: greedy or group_limited_greedy is",
        ),
        (
            r#"{"norm_topk_prob": true}"#,
            "norm_topk_prob is true, which is not implemented for DeepseekV2ForCausalLM",
        ),
    ] {
        assert_eq!(mixture("DeepseekV2ForCausalLM", changes).expect_err(changes), expected);
    }
}

#[test]
fn a_key_that_an_architecture_does_not_know_has_no_effect() {
    let with = config_of("Qwen3MoeForCausalLM", r#"{"first_k_dense_replace": 1}"#).expect("a config");
    let without = config_of("Qwen3MoeForCausalLM", r#"{"hidden_size": 8}"#).expect("a config");
    assert_eq!((with.mixture, with.unread_keys), (without.mixture, vec!["first_k_dense_replace".to_owned()]));
}

#[test]
fn trained_tokens_beside_the_rotary_settings_have_priority() {
    let rope = |changes: &str| config(changes).expect(changes).rope;
    let llama3 = r#""rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0"#;
    for settings in [r#""rope_type": "yarn", "factor": 4.0"#, llama3] {
        let inside = |tokens: u32, beside: &str| {
            let inside = format!(r#""original_max_position_embeddings": {tokens}"#);
            rope(&format!(r#"{{{beside} "rope_scaling": {{{settings}, {inside}}}}}"#))
        };
        let beside = inside(64, r#""original_max_position_embeddings": 32,"#);
        assert_eq!(beside, inside(32, ""), "{settings}");
        assert_ne!(beside, inside(64, ""), "{settings}");
        assert_eq!(inside(64, r#""original_max_position_embeddings": null,"#), inside(64, ""), "{settings}");
    }
    let plain = r#"{"original_max_position_embeddings": 32, "rope_parameters": {"rope_theta": 5.0}}"#;
    assert_eq!(rope(plain), rope(r#"{"rope_theta": 5.0}"#));
}

#[test]
fn yarn_lengthens_the_context() {
    for (scaling, expected) in [
        (r#"{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}"#, 256),
        (r#"{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}"#, 64),
        (r#"{"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}"#, 64),
        (r#"{"rope_type": "yarn", "factor": 4.0}"#, 256),
        (r#"{"rope_type": "linear", "factor": 4.0}"#, 64),
    ] {
        let config = config(&format!(r#"{{"rope_scaling": {scaling}}}"#)).expect(scaling);
        assert_eq!(config.context_tokens, expected, "{scaling}");
    }
}

#[test]
fn keys_of_yarn_that_transformers_ignores_are_taken() {
    let yarn = |more: &str| {
        let changes = format!(r#"{{"rope_scaling": {{"rope_type": "yarn", "factor": 4.0{more}}}}}"#);
        config(&changes).expect(more)
    };
    let ignored = yarn(r#", "attn_factor": 0.878, "finetuned": true"#);
    assert_eq!(ignored.rope, yarn("").rope);
    assert_eq!(
        (ignored.unread_keys, yarn("").unread_keys),
        (vec!["rope_scaling.attn_factor".to_owned()], vec![])
    );
    let linear = r#"{"rope_scaling": {"type": "linear", "factor": 2.0, "attn_factor": 0.5}}"#;
    let error = config(linear).expect_err("of another type");
    assert_eq!(error, "rope_type \"linear\" with attn_factor is not implemented");
}

/// Returns the names of the parts of a fingerprint that differ.
fn differing(parts: &[(&'static str, String)], others: &[(&'static str, String)]) -> Vec<&'static str> {
    parts.iter().zip(others).filter(|(one, other)| one != other).map(|(one, _)| one.0).collect()
}

#[test]
fn latents_and_routing_are_in_the_fingerprint() {
    let yarn =
        |more: &str| format!(r#"{{"rope_scaling": {{"type": "yarn", "factor": 40, "mscale": 1.0{more}}}}}"#);
    let parts =
        |changes: &str| deepseek("DeepseekV3ForCausalLM", changes).expect("a config").fingerprint_parts();
    let plain = parts(&yarn(""));
    for (changes, expected) in [
        (r#"{"q_lora_rank": 24"#, "latents"),
        (r#"{"kv_lora_rank": 24"#, "latents"),
        (r#"{"qk_nope_head_dim": 24"#, "latents"),
        (r#"{"v_head_dim": 24"#, "latents"),
        (r#"{"rope_interleave": false"#, "latents"),
        (r#"{"n_routed_experts": 16"#, "experts"),
        (r#"{"n_group": 2"#, "experts"),
        (r#"{"topk_group": 3"#, "experts"),
        (r#"{"n_shared_experts": 3"#, "experts"),
        (r#"{"first_k_dense_replace": 1"#, "experts"),
        (r#"{"norm_topk_prob": false"#, "experts"),
        (r#"{"routed_scaling_factor": 2.0"#, "experts"),
    ] {
        let changed = parts(&yarn("").replacen('{', &format!("{changes}, "), 1));
        assert_eq!(differing(&plain, &changed), [expected], "{changes}");
    }
    assert_ne!(plain, parts(&yarn(r#", "mscale_all_dim": 1.0"#)), "both factors of YaRN");
    assert_ne!(plain, parts(&yarn(r#", "beta_fast": 16"#)));
}

#[test]
fn all_that_numbers_depend_on_is_in_the_fingerprint() {
    let parts = |changes: &str| config(changes).expect("a config").fingerprint_parts();
    let plain = parts(r#"{"hidden_size": 8}"#);
    for (changes, expected) in [
        (r#"{"rms_norm_eps": 1e-5}"#, "norm_epsilon"),
        (r#"{"attention_bias": true}"#, "biases"),
        (r#"{"mlp_bias": true}"#, "biases"),
        (r#"{"tie_word_embeddings": true}"#, "tied"),
        (r#"{"intermediate_size": 16}"#, "shape"),
        (r#"{"rope_theta": 5.0}"#, "rope"),
    ] {
        assert_eq!(differing(&plain, &parts(changes)), [expected]);
    }
}
