//! Mixtures of experts as a config describes them: which layers have them, and how a token's experts are chosen.

use serde::Deserialize;

/// What the mixtures of one architecture are called in a config and in a checkpoint.
#[derive(Debug, PartialEq, Eq)]
pub struct MixtureStyle {
    /// The part of a layer that holds `gate`, the router, and `experts`.
    pub part: &'static str,
    /// The names of an expert's matrices for gate, up and down.
    pub matrices: [&'static str; 3],
    pub normalized: Normalized,
    /// The number of experts if a config has none.
    pub n_experts: usize,
}

/// Whether the scores of a token's experts are divided by their sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Normalized {
    Always,
    /// If `norm_topk_prob` is set.
    AsConfigured,
}

/// The mixtures of experts of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mixture {
    pub n_experts: usize,
    /// The number of experts that compute each token.
    pub per_token: usize,
    /// The width of an expert's inner layer.
    pub intermediate: usize,
    /// Whether the scores of a token's experts are divided by their sum.
    pub is_normalized: bool,
    /// Whether each layer has experts. Other layers have one feed-forward part.
    pub layers: Vec<bool>,
    pub style: &'static MixtureStyle,
}

/// The keys of `config.json` that describe mixtures.
#[derive(Debug, Deserialize)]
pub(super) struct RawMixture {
    num_experts: Option<usize>,
    /// The name in configs of newer versions of `transformers`, and in all of Mixtral.
    num_local_experts: Option<usize>,
    num_experts_per_tok: Option<usize>,
    moe_intermediate_size: Option<usize>,
    norm_topk_prob: Option<bool>,
    decoder_sparse_step: Option<usize>,
    mlp_only_layers: Option<Vec<usize>>,
}

impl Mixture {
    /// `intermediate` is the width of an expert if the config names none for experts.
    pub(super) fn resolve(
        style: &'static MixtureStyle,
        raw: RawMixture,
        n_layers: usize,
        intermediate: usize,
    ) -> Result<Self, String> {
        let n_experts = match (raw.num_experts, raw.num_local_experts) {
            (Some(one), Some(other)) if one != other => {
                return Err(format!("num_experts is {one} and num_local_experts {other}"));
            }
            (one, other) => one.or(other).unwrap_or(style.n_experts),
        };
        let per_token = raw.num_experts_per_tok.unwrap_or(0);
        if n_experts == 0 || u16::try_from(n_experts).is_err() {
            return Err(format!("num_experts is {n_experts}"));
        }
        if per_token == 0 || per_token > n_experts {
            return Err(format!("num_experts_per_tok is {per_token}, of {n_experts} experts"));
        }
        let intermediate = raw.moe_intermediate_size.unwrap_or(intermediate);
        if intermediate == 0 || u32::try_from(intermediate).is_err() {
            return Err(format!("moe_intermediate_size is {intermediate}"));
        }
        let step = raw.decoder_sparse_step.unwrap_or(1);
        if step == 0 {
            return Err("decoder_sparse_step is 0".to_owned());
        }
        let dense = raw.mlp_only_layers.unwrap_or_default();
        if let Some(layer) = dense.iter().find(|layer| **layer >= n_layers) {
            return Err(format!("mlp_only_layers names layer {layer} of {n_layers}"));
        }
        let has_experts = |layer: usize| !dense.contains(&layer) && (layer + 1).is_multiple_of(step);
        Ok(Self {
            n_experts,
            per_token,
            intermediate,
            is_normalized: match style.normalized {
                Normalized::Always => true,
                Normalized::AsConfigured => raw.norm_topk_prob.unwrap_or(false),
            },
            layers: (0..n_layers).map(has_experts).collect(),
            style,
        })
    }

    /// Returns the settings as text, for the fingerprint.
    pub(super) fn fingerprint(&self) -> String {
        let Self { n_experts, per_token, intermediate, is_normalized, layers, style: _ } = self;
        let layers: Vec<usize> = (0..layers.len()).filter(|layer| layers[*layer]).collect();
        format!(
            "{per_token} of {n_experts} of {intermediate}, normalized {is_normalized}, in layers {layers:?}"
        )
    }

    /// Returns the name of an expert's matrix in a layer, without `.weight`.
    pub(crate) fn expert(&self, expert: usize, matrix: &str) -> String {
        format!("{}.experts.{expert}.{matrix}", self.style.part)
    }

    /// Returns the name of a layer's router, without `.weight`.
    pub(crate) fn router(&self) -> String {
        format!("{}.gate", self.style.part)
    }
}
