//! Mixtures of experts as a config describes them: which layers have them, and how a token's experts are chosen.

use serde::Deserialize;

/// The names of one architecture's mixtures in a config and in a checkpoint.
#[derive(Debug, PartialEq, Eq)]
pub struct MixtureStyle {
    /// The part of a layer that holds `gate`, the router, and `experts`.
    pub part: &'static str,
    /// The names of an expert's matrices for gate, up and down.
    pub matrices: [&'static str; 3],
    pub normalized: Normalized,
    /// The number of experts if a config has none.
    pub n_experts: usize,
    pub scoring: Scoring,
    /// The values of `topk_method` that the architecture has; none if it does not read the key.
    pub topk_methods: &'static [&'static str],
}

/// How scores are made of the router's products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scoring {
    Softmax,
    /// Experts are chosen by the sum of their score and a correction, a vector of the checkpoint.
    Sigmoid,
}

/// Whether the scores of a token's experts are divided by their sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Normalized {
    Always,
    Never,
    /// If `norm_topk_prob` is set.
    AsConfigured,
}

/// The limit of a token's experts to those of some groups. Groups are neighbouring experts, all of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupLimit {
    pub n_groups: usize,
    /// The number of groups whose experts a token may have.
    pub per_token: usize,
}

/// The mixtures of experts of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Mixture {
    pub n_experts: usize,
    /// The number of experts that compute each token.
    pub per_token: usize,
    /// The width of an expert's inner layer.
    pub intermediate: usize,
    /// Whether the scores of a token's experts are divided by their sum.
    pub is_normalized: bool,
    pub groups: Option<GroupLimit>,
    /// The factor of the weights of a token's experts.
    pub scaling: f32,
    /// The width of the inner layer of the experts that compute every token; `None`: there are none.
    pub shared: Option<usize>,
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
    /// DeepSeek's name.
    n_routed_experts: Option<usize>,
    num_experts_per_tok: Option<usize>,
    moe_intermediate_size: Option<usize>,
    norm_topk_prob: Option<bool>,
    decoder_sparse_step: Option<usize>,
    mlp_only_layers: Option<Vec<usize>>,
    first_k_dense_replace: Option<usize>,
    moe_layer_freq: Option<usize>,
    n_shared_experts: Option<usize>,
    scoring_func: Option<String>,
    topk_method: Option<String>,
    n_group: Option<usize>,
    topk_group: Option<usize>,
    routed_scaling_factor: Option<f32>,
}

impl Mixture {
    /// `intermediate` is the width of an expert if the config names none for experts.
    pub(super) fn resolve(
        style: &'static MixtureStyle,
        raw: RawMixture,
        n_layers: usize,
        intermediate: usize,
    ) -> Result<Self, String> {
        let (name, n_experts) = raw.n_experts(style)?;
        let per_token = raw.num_experts_per_tok.unwrap_or(0);
        if n_experts == 0 || u16::try_from(n_experts).is_err() {
            return Err(format!("{name} is {n_experts}"));
        }
        if per_token == 0 || per_token > n_experts {
            return Err(format!("num_experts_per_tok is {per_token}, of {n_experts} experts"));
        }
        let intermediate = raw.moe_intermediate_size.unwrap_or(intermediate);
        if intermediate == 0 || u32::try_from(intermediate).is_err() {
            return Err(format!("moe_intermediate_size is {intermediate}"));
        }
        let scaling = raw.routed_scaling_factor.unwrap_or(1.0);
        if !scaling.is_finite() || scaling <= 0.0 {
            return Err(format!("routed_scaling_factor is {scaling}"));
        }
        Ok(Self {
            n_experts,
            per_token,
            intermediate,
            is_normalized: match style.normalized {
                Normalized::Always => true,
                Normalized::Never => false,
                Normalized::AsConfigured => raw.norm_topk_prob.unwrap_or(false),
            },
            groups: raw.groups(style, n_experts)?,
            scaling,
            shared: raw.n_shared_experts.filter(|n| *n > 0).map(|n| n.saturating_mul(intermediate)),
            layers: raw.layers(n_layers)?,
            style,
        })
    }

    /// Returns the settings as text, for the fingerprint.
    pub(super) fn fingerprint(&self) -> String {
        let Self {
            n_experts,
            per_token,
            intermediate,
            is_normalized,
            groups,
            scaling,
            shared,
            layers,
            style: MixtureStyle { scoring, .. },
        } = self;
        let layers: Vec<usize> = (0..layers.len()).filter(|layer| layers[*layer]).collect();
        let mut text = format!(
            "{per_token} of {n_experts} of {intermediate}, normalized {is_normalized}, in layers {layers:?}"
        );
        // Mixtures without these have the fingerprints of older versions.
        if *scoring != Scoring::Softmax {
            text += &format!(", scored by {scoring:?}");
        }
        if let Some(GroupLimit { n_groups, per_token }) = groups {
            text += &format!(", {per_token} of {n_groups} groups");
        }
        if *scaling != 1.0 {
            text += &format!(", times {scaling}");
        }
        if let Some(shared) = shared {
            text += &format!(", shared {shared}");
        }
        text
    }

    /// Returns the name of an expert's matrix in a layer, without `.weight`.
    pub(crate) fn expert(&self, expert: usize, matrix: &str) -> String {
        format!("{}.experts.{expert}.{matrix}", self.style.part)
    }

    /// Returns the name of a layer's router, without `.weight`.
    pub(crate) fn router(&self) -> String {
        format!("{}.gate", self.style.part)
    }

    /// Returns the name of the vector of a layer that is added to scores for the choice.
    pub(crate) fn correction(&self) -> Option<String> {
        match self.style.scoring {
            Scoring::Softmax => None,
            Scoring::Sigmoid => Some(format!("{}.e_score_correction_bias", self.router())),
        }
    }

    /// Returns the name of the part of a layer that holds the shared experts.
    pub(crate) fn shared_part(&self) -> String {
        format!("{}.shared_experts", self.style.part)
    }
}

impl RawMixture {
    /// Returns the number of experts and the name of its key.
    fn n_experts(&self, style: &MixtureStyle) -> Result<(&'static str, usize), String> {
        let named = [
            ("num_experts", self.num_experts),
            ("num_local_experts", self.num_local_experts),
            ("n_routed_experts", self.n_routed_experts),
        ];
        let mut set = named.into_iter().filter_map(|(name, n)| Some((name, n?)));
        let first = set.next().unwrap_or(("num_experts", style.n_experts));
        match set.find(|other| other.1 != first.1) {
            Some(other) => Err(format!("{} is {} and {} {}", first.0, first.1, other.0, other.1)),
            None => Ok(first),
        }
    }

    /// Returns whether each layer has experts.
    fn layers(&self, n_layers: usize) -> Result<Vec<bool>, String> {
        let step = self.decoder_sparse_step.unwrap_or(1);
        let distance = self.moe_layer_freq.unwrap_or(1);
        for (name, number) in [("decoder_sparse_step", step), ("moe_layer_freq", distance)] {
            if number == 0 {
                return Err(format!("{name} is 0"));
            }
        }
        let dense = self.mlp_only_layers.as_deref().unwrap_or_default();
        if let Some(layer) = dense.iter().find(|layer| **layer >= n_layers) {
            return Err(format!("mlp_only_layers names layer {layer} of {n_layers}"));
        }
        let first = self.first_k_dense_replace.unwrap_or(0);
        let has_experts = |layer: usize| {
            let is_dense = dense.contains(&layer) || layer < first;
            !is_dense && (layer + 1).is_multiple_of(step) && layer.is_multiple_of(distance)
        };
        Ok((0..n_layers).map(has_experts).collect())
    }

    fn groups(&self, style: &MixtureStyle, n_experts: usize) -> Result<Option<GroupLimit>, String> {
        let scoring = style.scoring.as_str();
        if let Some(other) = self.scoring_func.as_deref().filter(|other| *other != scoring) {
            return Err(format!("scoring_func {other:?} is not implemented: {scoring} is"));
        }
        if style.topk_methods.is_empty() {
            return Ok(None);
        }
        let method = self.topk_method.as_deref().unwrap_or("null");
        if !style.topk_methods.contains(&method) {
            let known = style.topk_methods.join(" or ");
            return Err(format!("topk_method {method:?} is not implemented: {known} is"));
        }
        if method == "greedy" {
            return Ok(None);
        }
        let n_groups = self.n_group.filter(|n| *n > 0);
        let n_groups = n_groups.ok_or_else(|| format!("topk_method {method:?} needs n_group"))?;
        let per_token = self.topk_group.filter(|n| *n > 0);
        let per_token = per_token.ok_or_else(|| format!("topk_method {method:?} needs topk_group"))?;
        let limit = GroupLimit { n_groups, per_token };
        limit.check(style.scoring, n_experts, self.num_experts_per_tok.unwrap_or(0)).map(|()| Some(limit))
    }
}

impl GroupLimit {
    fn check(self, scoring: Scoring, n_experts: usize, experts_per_token: usize) -> Result<(), String> {
        let Self { n_groups, per_token } = self;
        if per_token > n_groups {
            return Err(format!("topk_group is {per_token}, but n_group is {n_groups}"));
        }
        if !n_experts.is_multiple_of(n_groups) {
            return Err(format!("{n_experts} experts do not divide into n_group {n_groups}"));
        }
        let size = n_experts / n_groups;
        if experts_per_token > per_token * size {
            return Err(format!(
                "num_experts_per_tok is {experts_per_token}, but topk_group {per_token} of n_group {n_groups} have {} \
                 experts",
                per_token * size
            ));
        }
        match scoring {
            // A group's score is the sum of its two best experts.
            Scoring::Sigmoid if size < 2 => {
                Err(format!("n_group is {n_groups}, of {n_experts} experts: a group needs two"))
            }
            Scoring::Sigmoid | Scoring::Softmax => Ok(()),
        }
    }
}

impl Scoring {
    fn as_str(self) -> &'static str {
        match self {
            Self::Softmax => "softmax",
            Self::Sigmoid => "sigmoid",
        }
    }
}
