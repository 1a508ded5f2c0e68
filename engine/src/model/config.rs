//! A model's description: its `config.json`, raw and resolved.

use serde::Deserialize;
use serde_json::{Map, Value};
use tracing::info;
use types::TokenId;

use super::architecture::{Architecture, BiasSettings, OptionalTensors, Windows};
use super::latent::{LatentShape, RawLatent};
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
    /// The numbers of a head; with latent attention, those that are rotated.
    pub head_dim: usize,
    /// The number of tokens of the longest sequence, prompt and output together.
    pub context_tokens: usize,
    pub norm_epsilon: f32,
    pub rope: Rope,
    /// Whether the output layer is the embedding.
    pub tied: bool,
    /// The format of activations that the checkpoint was made for.
    pub activations: ActivationFormat,
    /// Whether the weights are said to have a scale for each block. Files say it tensor by tensor, so only made-up weights
    /// follow this.
    pub has_block_scales: bool,
    /// Whether each layer has scales for its keys and its values, for KV in FP8.
    pub has_kv_scales: bool,
    pub optional: OptionalTensors,
    /// The number of last tokens that each layer sees, with the current one. `None` means all tokens.
    pub windows: Vec<Option<u32>>,
    /// The latent attention; `None`: all layers have keys and values for heads.
    pub latent: Option<LatentShape>,
    /// The mixtures of experts; `None`: all layers have one feed-forward part.
    pub mixture: Option<Mixture>,
    /// The number of layers of multi-token prediction that a checkpoint may have. They are left out.
    pub n_prediction_layers: usize,
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
    original_max_position_embeddings: Option<f32>,
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
    num_nextn_predict_layers: Option<usize>,
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
#[serde(untagged, expecting = "eos_token_id is a token id, or a list of token ids")]
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
        let defaults: Map<String, Value> = serde_json::from_str(architecture.defaults)?;
        let mut unread_keys = keys::check(&keys, architecture, &defaults).map_err(ConfigProblem::Meaning)?;
        keys.retain(|key, _| !unread_keys.contains(key));
        for (key, value) in defaults {
            keys.entry(key).or_insert(value);
        }
        let keys = Value::Object(keys);
        let mixture = architecture
            .mixture
            .map(|style| Ok::<_, ConfigProblem>((style, RawMixture::deserialize(&keys)?)));
        let mixture = mixture.transpose()?;
        let latent = architecture.has_latents.then(|| RawLatent::deserialize(&keys)).transpose()?;
        let raw: RawConfig = serde_json::from_value(keys)?;
        for rope in raw.rope_parameters.iter().chain(&raw.rope_scaling) {
            unread_keys.extend(rope.ignored_keys().map(|key| format!("rope_scaling.{key}")));
        }
        let generation = generation.map(serde_json::from_slice::<RawGeneration>).transpose();
        let generation = generation
            .map_err(|error| ConfigProblem::Meaning(format!("generation_config.json beside it: {error}")))?;
        let generation = generation.unwrap_or_default();
        let latent = latent.map(|raw| LatentShape::resolve(&raw)).transpose();
        let latent = latent.map_err(ConfigProblem::Meaning)?;
        let config = Self::resolve(architecture, raw, generation, latent).map_err(ConfigProblem::Meaning)?;
        let (n_layers, intermediate) = (config.n_layers, config.intermediate);
        let mixture = mixture.map(|(style, raw)| Mixture::resolve(style, raw, n_layers, intermediate));
        let mixture = mixture.transpose().map_err(ConfigProblem::Meaning)?;
        Ok(Self { mixture, unread_keys, ..config })
    }

    fn resolve(
        architecture: &Architecture,
        raw: RawConfig,
        generation: RawGeneration,
        latent: Option<LatentShape>,
    ) -> Result<Self, String> {
        if let Some(act) = raw.hidden_act.as_deref().filter(|act| *act != "silu") {
            return Err(format!("hidden_act {act:?} is not implemented: silu is"));
        }
        let quantized = raw.quantization_config.as_ref();
        let activations = quantized.map(quantization::activations).transpose()?;
        let has_kv_scales = quantized.map(quantization::has_kv_scales).transpose()?.unwrap_or(false);
        if has_kv_scales && latent.is_some() {
            return Err(
                "quantization_config: kv_cache_scheme is not implemented for latent attention".to_owned()
            );
        }
        let n_heads = raw.num_attention_heads;
        let rope = rope(&raw)?;
        let eos = generation.eos_token_id.or(raw.eos_token_id.clone());
        let config = Self {
            architecture: architecture.name,
            vocab: raw.vocab_size,
            hidden: raw.hidden_size,
            intermediate: raw.intermediate_size,
            n_layers: raw.num_hidden_layers,
            n_heads,
            n_kv_heads: raw.num_key_value_heads.unwrap_or(n_heads),
            head_dim: match latent {
                Some(latent) => latent.rotated,
                None => raw.head_dim.unwrap_or(raw.hidden_size / n_heads.max(1)),
            },
            context_tokens: rope.context_tokens(raw.max_position_embeddings),
            norm_epsilon: raw.rms_norm_eps.unwrap_or(1e-6),
            rope,
            tied: raw.tie_word_embeddings.unwrap_or(false),
            activations: activations.unwrap_or(ActivationFormat::Full),
            has_block_scales: quantized.is_some_and(quantization::has_block_scales),
            has_kv_scales,
            optional: architecture.optional_tensors(BiasSettings {
                attention: raw.attention_bias.unwrap_or(false),
                mlp: raw.mlp_bias.unwrap_or(false),
            }),
            windows: windows(architecture, &raw)?,
            latent,
            mixture: None,
            n_prediction_layers: raw.num_nextn_predict_layers.unwrap_or(0),
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
            latent,
            mixture,
            n_prediction_layers: _,
            eos_tokens: _,
            // The fingerprint of the weights has it: see `ActivationFormat::added_to`.
            activations: _,
            has_block_scales: _,
            // The fingerprint of the weights has them.
            has_kv_scales: _,
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
        // Other models have no such parts, so that their fingerprints are those of older versions.
        parts.extend(latent.iter().map(|latent| ("latents", latent.fingerprint())));
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
        if self.latent.is_some() && self.n_heads != self.n_kv_heads {
            return Err(format!(
                "num_key_value_heads is {}, but latent attention has one for each of {} heads",
                self.n_kv_heads, self.n_heads
            ));
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
    let resolved = |rope: &Option<RawRope>| {
        let rope = rope.as_ref().map(|rope| rope.with_trained_tokens(raw.original_max_position_embeddings));
        Rope::resolve(raw.rope_theta, rope.as_ref(), raw.max_position_embeddings)
    };
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
mod tests;
