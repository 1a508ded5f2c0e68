//! A model's description: its `config.json`, raw and resolved.

use serde::Deserialize;
use serde_json::{Map, Value};
use tracing::info;
use types::TokenId;

use super::architecture::{Architecture, BiasSettings, OptionalTensors, Windows};
use super::mixture::{Mixture, RawMixture};
use super::quantization::ActivationFormat;
use super::rope::{RawRope, Rope};
use super::{keys, quantization};

/// A model's description, resolved and checked.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// The architecture's name.
    pub architecture: &'static str,
    pub vocab: usize,
    pub hidden: usize,
    pub intermediate: usize,
    pub n_layers: usize,
    pub n_heads: usize,
    pub n_kv_heads: usize,
    pub head_dim: usize,
    /// The number of tokens of the longest sequence, prompt and output together.
    pub context_tokens: usize,
    pub norm_epsilon: f32,
    pub rope: Rope,
    /// Whether the output layer is the embedding.
    pub tied: bool,
    /// The format of activations that the checkpoint was made for.
    pub activations: ActivationFormat,
    pub optional: OptionalTensors,
    /// The number of last tokens that each layer sees, with the current one. `None` means all tokens.
    pub windows: Vec<Option<u32>>,
    /// The mixtures of experts; `None`: all layers have one feed-forward part.
    pub mixture: Option<Mixture>,
    pub eos_tokens: Vec<TokenId>,
    /// Keys of the config that are not read and are not known to change results.
    pub unread_keys: Vec<String>,
}

/// The keys of `config.json` that are read.
#[derive(Debug, Deserialize)]
struct RawConfig {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    max_position_embeddings: usize,
    rms_norm_eps: Option<f32>,
    hidden_act: Option<String>,
    rope_theta: Option<f32>,
    rope_scaling: Option<RawRope>,
    rope_parameters: Option<RawRope>,
    tie_word_embeddings: Option<bool>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    sliding_window: Option<u32>,
    use_sliding_window: Option<bool>,
    max_window_layers: Option<usize>,
    layer_types: Option<Vec<String>>,
    eos_token_id: Option<TokenIds>,
    quantization_config: Option<Value>,
}

/// The keys of `generation_config.json` that are read.
#[derive(Debug, Default, Deserialize)]
struct RawGeneration {
    eos_token_id: Option<TokenIds>,
}

/// The value of a key that has one token id or several.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum TokenIds {
    One(u32),
    Several(Vec<u32>),
}

impl TokenIds {
    fn tokens(self) -> Vec<TokenId> {
        match self {
            Self::One(id) => vec![TokenId(id)],
            Self::Several(ids) => ids.into_iter().map(TokenId).collect(),
        }
    }
}

/// The reason why a config is rejected.
#[derive(Debug, thiserror::Error)]
pub enum ConfigProblem {
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    #[error("{0}")]
    Meaning(String),
    #[error("architecture {name:?} is not implemented: {known} are")]
    Architecture { name: String, known: String },
}

/// Reads the architecture named in a `config.json`. It is read before the other keys, because they depend on
/// it.
fn architecture(config: &[u8]) -> Result<&'static Architecture, ConfigProblem> {
    #[derive(Deserialize)]
    struct Named {
        #[serde(default)]
        architectures: Vec<String>,
    }
    let named: Named = serde_json::from_slice(config)?;
    match named.architectures.first() {
        Some(name) => Architecture::named(name)
            .map_err(|known| ConfigProblem::Architecture { name: name.clone(), known }),
        None => Err(ConfigProblem::Meaning("architectures names none".to_owned())),
    }
}

impl ModelConfig {
    /// Reads a `config.json`. If there is a `generation_config.json` beside it, its end tokens are added.
    pub fn parse(config: &[u8], generation: Option<&[u8]>) -> Result<Self, ConfigProblem> {
        let architecture = architecture(config)?;
        let mut keys: Map<String, Value> = serde_json::from_slice(config)?;
        let unread_keys =
            keys::check(&keys, architecture.name, architecture.keys).map_err(ConfigProblem::Meaning)?;
        let defaults: Map<String, Value> = serde_json::from_str(architecture.defaults)?;
        for (key, value) in defaults {
            keys.entry(key).or_insert(value);
        }
        let keys = Value::Object(keys);
        let mixture = architecture
            .mixture
            .map(|style| Ok::<_, ConfigProblem>((style, RawMixture::deserialize(&keys)?)));
        let mixture = mixture.transpose()?;
        let raw: RawConfig = serde_json::from_value(keys)?;
        let generation: RawGeneration =
            generation.map(serde_json::from_slice).transpose()?.unwrap_or_default();
        let config = Self::resolve(architecture, raw, generation).map_err(ConfigProblem::Meaning)?;
        let (n_layers, intermediate) = (config.n_layers, config.intermediate);
        let mixture = mixture.map(|(style, raw)| Mixture::resolve(style, raw, n_layers, intermediate));
        let mixture = mixture.transpose().map_err(ConfigProblem::Meaning)?;
        Ok(Self { mixture, unread_keys, ..config })
    }

    fn resolve(
        architecture: &Architecture,
        raw: RawConfig,
        generation: RawGeneration,
    ) -> Result<Self, String> {
        if let Some(act) = raw.hidden_act.as_deref().filter(|act| *act != "silu") {
            return Err(format!("hidden_act {act:?} is not implemented: silu is"));
        }
        let quantized = raw.quantization_config.as_ref();
        let activations = quantized.map(quantization::activations).transpose()?;
        let n_heads = raw.num_attention_heads;
        let eos = generation.eos_token_id.or(raw.eos_token_id.clone());
        let config = Self {
            architecture: architecture.name,
            vocab: raw.vocab_size,
            hidden: raw.hidden_size,
            intermediate: raw.intermediate_size,
            n_layers: raw.num_hidden_layers,
            n_heads,
            n_kv_heads: raw.num_key_value_heads.unwrap_or(n_heads),
            head_dim: raw.head_dim.unwrap_or(raw.hidden_size / n_heads.max(1)),
            context_tokens: raw.max_position_embeddings,
            norm_epsilon: raw.rms_norm_eps.unwrap_or(1e-6),
            rope: rope(&raw)?,
            tied: raw.tie_word_embeddings.unwrap_or(false),
            activations: activations.unwrap_or(ActivationFormat::Full),
            optional: architecture.optional_tensors(BiasSettings {
                attention: raw.attention_bias.unwrap_or(false),
                mlp: raw.mlp_bias.unwrap_or(false),
            }),
            windows: windows(architecture, &raw)?,
            mixture: None,
            eos_tokens: eos.map(TokenIds::tokens).unwrap_or_default(),
            unread_keys: Vec::new(),
        };
        config.check()?;
        Ok(config)
    }

    /// Returns all settings that results depend on, beside weights, rotation and the layout of KV.
    pub fn fingerprint_parts(&self) -> Vec<(&'static str, String)> {
        // The pattern has no `..`, so that a new field must be added to the parts or listed as excluded.
        let Self {
            architecture,
            vocab,
            hidden,
            intermediate,
            n_layers,
            n_heads,
            n_kv_heads,
            head_dim,
            context_tokens: _,
            norm_epsilon,
            rope,
            tied,
            optional: OptionalTensors { qkv_bias, o_bias, mlp_bias, head_norms },
            windows,
            mixture,
            eos_tokens: _,
            // What follows from it is a part of its own: see `ActivationFormat::describe`.
            activations: _,
            unread_keys: _,
        } = self;
        let shape = format!(
            "{n_layers} layers of {hidden}, {n_heads} heads of {head_dim}, {n_kv_heads} KV heads, intermediate \
             {intermediate}, vocabulary {vocab}"
        );
        let biases = format!("qkv {qkv_bias}, o {o_bias}, mlp {mlp_bias}");
        let mut parts = vec![
            ("architecture", (*architecture).to_owned()),
            ("shape", shape),
            ("norm_epsilon", norm_epsilon.to_string()),
            ("rope", rope.fingerprint()),
            ("tied", tied.to_string()),
            ("biases", biases),
            ("head_norms", head_norms.to_string()),
            ("windows", format!("{windows:?}")),
        ];
        // Dense models have no such part, so that their fingerprints are those of older versions.
        parts.extend(mixture.iter().map(|mixture| ("experts", mixture.fingerprint())));
        parts
    }

    /// Logs one line with the keys that are not read.
    pub fn log_unread_keys(&self) {
        if !self.unread_keys.is_empty() {
            let keys = self.unread_keys.join(", ");
            info!(keys, "config.json has keys that are not read");
        }
    }

    fn check(&self) -> Result<(), String> {
        let counts = [
            ("vocab_size", self.vocab),
            ("hidden_size", self.hidden),
            ("intermediate_size", self.intermediate),
            ("num_hidden_layers", self.n_layers),
            ("num_attention_heads", self.n_heads),
            ("num_key_value_heads", self.n_kv_heads),
            ("head_dim", self.head_dim),
            ("max_position_embeddings", self.context_tokens),
        ];
        for (name, count) in counts {
            if count == 0 || u32::try_from(count).is_err() {
                return Err(format!("{name} is {count}"));
            }
        }
        // Larger numbers are rejected, because later code stores them in 16 bits.
        let widest = self.n_layers.max(self.n_heads).max(self.head_dim);
        if widest > usize::from(u16::MAX) {
            return Err(format!("{widest} layers, heads or numbers of a head are too many"));
        }
        if !self.n_heads.is_multiple_of(self.n_kv_heads) {
            return Err(format!("{} heads cannot share {} KV heads", self.n_heads, self.n_kv_heads));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(format!("head_dim {} is odd: rotary embedding needs two halves", self.head_dim));
        }
        Ok(())
    }
}

/// Reads the rotary settings. Newer configs have `rope_parameters`; older ones have `rope_theta` and
/// `rope_scaling`.
fn rope(raw: &RawConfig) -> Result<Rope, String> {
    let resolved = |rope: &Option<RawRope>| Rope::resolve(raw.rope_theta, rope.as_ref());
    match (&raw.rope_parameters, &raw.rope_scaling) {
        (parameters @ Some(_), None) => resolved(parameters),
        (None, scaling) => resolved(scaling),
        (parameters, scaling) => {
            let (one, other) = (resolved(parameters)?, resolved(scaling)?);
            if one != other {
                return Err("rope_parameters and rope_scaling differ".to_owned());
            }
            Ok(one)
        }
    }
}

/// Returns the window of each layer.
fn windows(architecture: &Architecture, raw: &RawConfig) -> Result<Vec<Option<u32>>, String> {
    let n_layers = raw.num_hidden_layers;
    let listed = listed_windows(raw)?;
    let tokens = raw.sliding_window.filter(|tokens| *tokens > 0);
    match architecture.windows {
        Windows::Never => match listed.contains(&true) {
            true => Err(format!("layer_types with a window are not implemented for {}", architecture.name)),
            false => Ok(vec![None; n_layers]),
        },
        Windows::AllLayers => match tokens.is_some() && listed.contains(&false) {
            true => {
                Err(format!("layer_types without a window are not implemented for {}", architecture.name))
            }
            false => Ok(vec![tokens; n_layers]),
        },
        Windows::UpperLayers => {
            let tokens = tokens.filter(|_| raw.use_sliding_window == Some(true));
            let first = raw.max_window_layers.unwrap_or(0);
            let is_windowed = |layer: usize| listed.get(layer).copied().unwrap_or(layer >= first);
            Ok((0..n_layers).map(|layer| tokens.filter(|_| is_windowed(layer))).collect())
        }
    }
}

/// Returns whether each layer has a window, by `layer_types`; empty without `layer_types`.
fn listed_windows(raw: &RawConfig) -> Result<Vec<bool>, String> {
    let kinds = raw.layer_types.as_deref().unwrap_or_default();
    if raw.layer_types.is_some() && kinds.len() != raw.num_hidden_layers {
        return Err(format!("layer_types has {} entries for {} layers", kinds.len(), raw.num_hidden_layers));
    }
    kinds.iter().map(|kind| is_windowed(kind)).collect()
}

fn is_windowed(kind: &str) -> Result<bool, String> {
    match kind {
        "full_attention" => Ok(false),
        "sliding_attention" => Ok(true),
        _ => Err(format!("layer_types: {kind:?} is not implemented")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            (r#"{"rope_scaling": {"rope_type": "yarn"}}"#, "rope_type \"yarn\" is not implemented"),
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
            assert_eq!(
                windows(name, r#"{"sliding_window": 5, "max_window_layers": 1}"#),
                Ok(vec![None, None])
            );
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
        let sparse = r#"{"mlp_only_layers": [0], "moe_intermediate_size": 4, "num_experts": 6, "num_experts_per_tok": 3}"#;
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
        ] {
            assert_eq!(mixture("Qwen3MoeForCausalLM", changes).expect_err(changes), expected);
        }
        let parts =
            |changes: &str| config_of("Qwen3MoeForCausalLM", changes).expect("a config").fingerprint_parts();
        assert_ne!(parts(r#"{"norm_topk_prob": true}"#), parts(r#"{"norm_topk_prob": false}"#));
        assert_ne!(parts(r#"{"mlp_only_layers": [0]}"#), parts(r#"{"mlp_only_layers": [1]}"#));
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
            let changed = parts(changes);
            let differ = plain.iter().zip(&changed).filter(|(one, other)| one != other);
            assert_eq!(differ.map(|(one, _)| one.0).collect::<Vec<_>>(), [expected]);
        }
    }
}
