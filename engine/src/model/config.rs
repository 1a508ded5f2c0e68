//! What a model is: its `config.json`, as written and as meant.

use serde::Deserialize;
use serde_json::Value;
use types::TokenId;

use super::quantization;
use super::rope::{RawRope, Rope};

/// A model's shape, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    pub architecture: String,
    pub vocab: usize,
    pub hidden: usize,
    pub intermediate: usize,
    pub n_layers: usize,
    pub n_heads: usize,
    pub n_kv_heads: usize,
    pub head_dim: usize,
    /// The longest sequence, prompt and output together.
    pub context_tokens: usize,
    pub norm_epsilon: f32,
    pub rope: Rope,
    /// The output layer is the embedding.
    pub tied: bool,
    /// The projections of attention have biases.
    pub attention_bias: bool,
    /// Those of the feed-forward layers have.
    pub mlp_bias: bool,
    pub window: Window,
    pub eos_tokens: Vec<TokenId>,
}

/// Which layers see a window only, as far as a config says so.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Window {
    /// How many tokens such a layer sees, the current one included.
    pub tokens: Option<u32>,
    /// Whether windows are used at all, for those who can turn them off.
    pub is_used: bool,
    /// Layers below this number see everything, for those who mix.
    pub full_layers: usize,
    /// By layer, in newer configs; this is then the truth.
    pub is_windowed: Option<Vec<bool>>,
}

impl Window {
    /// Layer by layer, from `layer_types` if it is there and by `otherwise` if not.
    pub fn by_layer(&self, n_layers: usize, otherwise: impl Fn(usize) -> bool) -> Vec<Option<u32>> {
        let is_windowed = |layer: usize| match &self.is_windowed {
            Some(layers) => layers[layer],
            None => otherwise(layer),
        };
        (0..n_layers).map(|layer| self.tokens.filter(|_| is_windowed(layer))).collect()
    }
}

/// `config.json`, as far as we read it. What we do not know belongs to others.
#[derive(Debug, Deserialize)]
struct RawConfig {
    #[serde(default)]
    architectures: Vec<String>,
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

/// `generation_config.json`, as far as we read it.
#[derive(Debug, Default, Deserialize)]
struct RawGeneration {
    eos_token_id: Option<TokenIds>,
}

/// One id or several.
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

/// Why a config is no model of ours.
#[derive(Debug, thiserror::Error)]
pub enum ConfigProblem {
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    #[error("{0}")]
    Meaning(String),
}

/// The architecture that a `config.json` names, whatever else is in it.
pub fn architecture(config: &[u8]) -> Result<Option<String>, ConfigProblem> {
    #[derive(Deserialize)]
    struct Named {
        #[serde(default)]
        architectures: Vec<String>,
    }
    let named: Named = serde_json::from_slice(config)?;
    Ok(named.architectures.into_iter().next())
}

impl ModelConfig {
    /// Reads a `config.json`, and the `generation_config.json` beside it if there is one: whose end tokens count.
    pub fn parse(config: &[u8], generation: Option<&[u8]>) -> Result<Self, ConfigProblem> {
        let raw: RawConfig = serde_json::from_slice(config)?;
        let generation: RawGeneration =
            generation.map(serde_json::from_slice).transpose()?.unwrap_or_default();
        Self::resolve(raw, generation).map_err(ConfigProblem::Meaning)
    }

    fn resolve(raw: RawConfig, generation: RawGeneration) -> Result<Self, String> {
        let architecture = raw.architectures.first().cloned().ok_or("architectures names none")?;
        if let Some(act) = raw.hidden_act.as_deref().filter(|act| *act != "silu") {
            return Err(format!("hidden_act {act:?} is not implemented: silu is"));
        }
        if let Some(quantized) = &raw.quantization_config {
            quantization::check(quantized)?;
        }
        let n_heads = raw.num_attention_heads;
        let eos = generation.eos_token_id.or(raw.eos_token_id.clone());
        let config = Self {
            architecture,
            vocab: raw.vocab_size,
            hidden: raw.hidden_size,
            intermediate: raw.intermediate_size,
            n_layers: raw.num_hidden_layers,
            n_heads,
            n_kv_heads: raw.num_key_value_heads.unwrap_or(n_heads),
            head_dim: raw.head_dim.unwrap_or(raw.hidden_size / n_heads.max(1)),
            context_tokens: raw.max_position_embeddings,
            norm_epsilon: raw.rms_norm_eps.unwrap_or(1e-6),
            rope: Rope::resolve(raw.rope_theta, raw.rope_parameters.as_ref().or(raw.rope_scaling.as_ref()))?,
            tied: raw.tie_word_embeddings.unwrap_or(false),
            attention_bias: raw.attention_bias.unwrap_or(false),
            mlp_bias: raw.mlp_bias.unwrap_or(false),
            window: window(&raw)?,
            eos_tokens: eos.map(TokenIds::tokens).unwrap_or_default(),
        };
        config.check()?;
        Ok(config)
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
        // These are kept in 16 bits from here on.
        let widest = self.n_layers.max(self.n_heads).max(self.head_dim);
        if widest > usize::from(u16::MAX) {
            return Err(format!("{widest} layers, heads or numbers of a head are too many"));
        }
        if !self.n_heads.is_multiple_of(self.n_kv_heads) {
            return Err(format!("{} heads cannot share {} KV heads", self.n_heads, self.n_kv_heads));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(format!("head_dim {} has no two halves to rotate", self.head_dim));
        }
        Ok(())
    }
}

fn window(raw: &RawConfig) -> Result<Window, String> {
    let is_windowed = match &raw.layer_types {
        Some(kinds) if kinds.len() != raw.num_hidden_layers => {
            return Err(format!(
                "layer_types has {} entries for {} layers",
                kinds.len(),
                raw.num_hidden_layers
            ));
        }
        Some(kinds) => Some(kinds.iter().map(|kind| is_windowed(kind)).collect::<Result<_, _>>()?),
        None => None,
    };
    Ok(Window {
        tokens: raw.sliding_window.filter(|tokens| *tokens > 0),
        is_used: raw.use_sliding_window.unwrap_or(false),
        full_layers: raw.max_window_layers.unwrap_or(0),
        is_windowed,
    })
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
        assert_eq!(config.window.by_layer(2, |_| true), [None, None]);
    }

    #[test]
    fn generation_has_the_last_word_on_the_end() {
        let bytes = br#"{"architectures": ["A"], "vocab_size": 10, "hidden_size": 8, "intermediate_size": 12,
            "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64, "eos_token_id": 3}"#;
        let config = ModelConfig::parse(bytes, Some(br#"{"eos_token_id": [7, 8]}"#)).expect("a config");
        assert_eq!(config.eos_tokens, [TokenId(7), TokenId(8)]);
    }

    #[test]
    fn nonsense_is_refused_by_name() {
        for (changes, expected) in [
            (r#"{"num_key_value_heads": 3}"#, "4 heads cannot share 3 KV heads"),
            (r#"{"head_dim": 7}"#, "head_dim 7 has no two halves to rotate"),
            (r#"{"num_attention_heads": 0}"#, "num_attention_heads is 0"),
            (r#"{"architectures": []}"#, "architectures names none"),
            (r#"{"hidden_act": "gelu"}"#, "hidden_act \"gelu\" is not implemented: silu is"),
            (r#"{"layer_types": ["full_attention"]}"#, "layer_types has 1 entries for 2 layers"),
            (r#"{"layer_types": ["x", "y"]}"#, "layer_types: \"x\" is not implemented"),
            (r#"{"rope_scaling": {"rope_type": "yarn"}}"#, "rope_type \"yarn\" is not implemented"),
        ] {
            assert_eq!(config(changes).expect_err(changes), expected);
        }
    }

    #[test]
    fn layers_may_differ_in_what_they_see() {
        let types = r#"{"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]}"#;
        assert_eq!(config(types).expect("a config").window.by_layer(2, |_| false), [None, Some(5)]);
        let all = config(r#"{"sliding_window": 5}"#).expect("a config");
        assert_eq!(all.window.by_layer(2, |_| true), [Some(5), Some(5)]);
        assert_eq!(all.window.by_layer(2, |layer| layer > 0), [None, Some(5)]);
    }
}
