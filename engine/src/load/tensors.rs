//! The tensors that a model reads, and the check for others in a checkpoint.

use std::collections::{HashMap, HashSet};

use tracing::info;

use super::checkpoint::Checkpoint;
use super::kv_scales;
use crate::error::LoadError;
use crate::model::{LatentShape, Mixture, ModelConfig, OptionalTensors};

/// A tensor that a model reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    pub name: String,
    /// The number of rows; `None` for a vector.
    pub rows: Option<usize>,
    pub cols: usize,
}

impl TensorSpec {
    pub(super) fn shape(&self) -> Vec<usize> {
        self.rows.into_iter().chain([self.cols]).collect()
    }

    /// Returns whether the tensor is a layer's matrix, which may be quantized.
    pub(super) fn is_linear(&self) -> bool {
        let is_router = self.name.ends_with(".gate.weight");
        self.rows.is_some() && self.name.starts_with("model.layers.") && !is_router
    }
}

/// The embedding, and the output layer where it has weights of its own.
pub(super) const EMBEDDING: &str = "model.embed_tokens.weight";
pub(super) const OUTPUT: &str = "lm_head.weight";

/// Returns all tensors that a decoder with this config reads, with the names that all architectures use.
pub fn tensors(config: &ModelConfig) -> Vec<TensorSpec> {
    let ModelConfig { hidden, intermediate, vocab, .. } = *config;
    let mut all = vec![matrix(EMBEDDING.to_owned(), vocab, hidden)];
    for nth in 0..config.n_layers {
        let of = |part: &str| format!("model.layers.{nth}.{part}");
        for norm in ["input_layernorm", "post_attention_layernorm"] {
            all.push(vector(of(&format!("{norm}.weight")), hidden));
        }
        let attention = match config.latent {
            Some(shape) => latent_attention(config, shape),
            None => attention(config),
        };
        all.extend(attention.into_iter().map(|tensor| TensorSpec { name: of(&tensor.name), ..tensor }));
        match config.mixture.as_ref().filter(|mixture| mixture.layers[nth]) {
            Some(mixture) => {
                let experts = experts(config, mixture).into_iter();
                all.extend(
                    experts.map(|(name, rows, cols)| matrix(of(&format!("{name}.weight")), rows, cols)),
                );
                all.extend(mixture.correction().map(|name| vector(of(&name), mixture.n_experts)));
            }
            None => {
                for (name, rows, cols) in [
                    ("mlp.gate_proj", intermediate, hidden),
                    ("mlp.up_proj", intermediate, hidden),
                    ("mlp.down_proj", hidden, intermediate),
                ] {
                    all.push(matrix(of(&format!("{name}.weight")), rows, cols));
                    if config.optional.mlp_bias {
                        all.push(vector(of(&format!("{name}.bias")), rows));
                    }
                }
            }
        }
    }
    all.push(vector("model.norm.weight".to_owned(), hidden));
    if !config.tied {
        all.push(matrix(OUTPUT.to_owned(), vocab, hidden));
    }
    all
}

fn matrix(name: String, rows: usize, cols: usize) -> TensorSpec {
    TensorSpec { name, rows: Some(rows), cols }
}

fn vector(name: String, cols: usize) -> TensorSpec {
    TensorSpec { name, rows: None, cols }
}

/// Returns the matrices and the biases of a layer's products: name, rows, columns and whether there is a bias.
fn products(all: &[(&str, usize, usize, bool)]) -> Vec<TensorSpec> {
    let mut tensors = Vec::new();
    for (name, rows, cols, has_bias) in all {
        tensors.push(matrix(format!("{name}.weight"), *rows, *cols));
        tensors.extend(has_bias.then(|| vector(format!("{name}.bias"), *rows)));
    }
    tensors
}

/// Returns the tensors of a layer's attention.
fn attention(config: &ModelConfig) -> Vec<TensorSpec> {
    let ModelConfig { hidden, head_dim, .. } = *config;
    let OptionalTensors { qkv_bias, o_bias, head_norms, .. } = config.optional;
    let (q, kv) = (config.n_heads * head_dim, config.n_kv_heads * head_dim);
    let mut all = products(&[
        ("self_attn.q_proj", q, hidden, qkv_bias),
        ("self_attn.k_proj", kv, hidden, qkv_bias),
        ("self_attn.v_proj", kv, hidden, qkv_bias),
        ("self_attn.o_proj", hidden, q, o_bias),
    ]);
    if head_norms {
        all.push(vector("self_attn.q_norm.weight".to_owned(), head_dim));
        all.push(vector("self_attn.k_norm.weight".to_owned(), head_dim));
    }
    all
}

/// Returns the tensors of a layer's latent attention.
fn latent_attention(config: &ModelConfig, shape: LatentShape) -> Vec<TensorSpec> {
    let ModelConfig { hidden, n_heads, .. } = *config;
    let OptionalTensors { qkv_bias, o_bias, .. } = config.optional;
    let q = n_heads * shape.q_head();
    let mut all = products(&[
        ("self_attn.kv_a_proj_with_mqa", shape.width(), hidden, qkv_bias),
        ("self_attn.kv_b_proj", n_heads * shape.kv_head(), shape.kv_rank, false),
        ("self_attn.o_proj", hidden, n_heads * shape.value, o_bias),
    ]);
    all.push(vector("self_attn.kv_a_layernorm.weight".to_owned(), shape.kv_rank));
    match shape.q_rank {
        None => all.extend(products(&[("self_attn.q_proj", q, hidden, false)])),
        Some(rank) => {
            all.extend(products(&[
                ("self_attn.q_a_proj", rank, hidden, qkv_bias),
                ("self_attn.q_b_proj", q, rank, false),
            ]));
            all.push(vector("self_attn.q_a_layernorm.weight".to_owned(), rank));
        }
    }
    all
}

/// Returns the matrices of a layer's experts and of its router: name, rows and columns.
fn experts(config: &ModelConfig, mixture: &Mixture) -> Vec<(String, usize, usize)> {
    let (hidden, intermediate) = (config.hidden, mixture.intermediate);
    let mut all = vec![(mixture.router(), mixture.n_experts, hidden)];
    for nth in 0..mixture.n_experts {
        let [gate, up, down] = mixture.style.matrices.map(|matrix| mixture.expert(nth, matrix));
        all.extend([(gate, intermediate, hidden), (up, intermediate, hidden), (down, hidden, intermediate)]);
    }
    if let Some(intermediate) = mixture.shared {
        let [gate, up, down] =
            mixture.style.matrices.map(|matrix| format!("{}.{matrix}", mixture.shared_part()));
        all.extend([(gate, intermediate, hidden), (up, intermediate, hidden), (down, hidden, intermediate)]);
    }
    all
}

/// Returns whether the tensor holds the matrices of all experts of a layer, instead of a tensor for each expert.
fn holds_experts(config: &ModelConfig, checkpoint: &Checkpoint, name: &str) -> bool {
    let Some(mixture) = &config.mixture else { return false };
    let of_layer = |layer: usize| format!("model.layers.{layer}.{}.experts.", mixture.style.part);
    let mut layers = (0..config.n_layers).filter(|layer| mixture.layers[*layer]).map(of_layer);
    let is_stacked = |layer: &String| {
        [format!("{layer}gate_up_proj"), format!("{layer}down_proj")].iter().any(|stacked| stacked == name)
    };
    let Some(layer) = layers.find(is_stacked) else { return false };
    let single = format!("{layer}0.{}.weight", mixture.style.matrices[0]);
    checkpoint.shape(&single).is_none()
        && checkpoint.shape(name).is_some_and(|shape| shape.first() == Some(&mixture.n_experts))
}

/// Rejects a checkpoint with a tensor that is not read: the model would be computed without it.
pub fn check_all_read(config: &ModelConfig, checkpoint: &Checkpoint) -> Result<(), LoadError> {
    let read: HashMap<String, TensorSpec> =
        tensors(config).into_iter().map(|tensor| (tensor.name.clone(), tensor)).collect();
    let is_scale = |name: &str| {
        let matrix = checkpoint.scaled_by(name).and_then(|matrix| read.get(matrix));
        matrix.is_some_and(|tensor| tensor.rows.is_some())
    };
    let kv_scales: HashSet<String> = kv_scales::names(config).flatten().collect();
    let is_unread = |name: &str| {
        let is_read =
            read.contains_key(name) || kv_scales.contains(name) || holds_experts(config, checkpoint, name);
        !is_read && !is_scale(name) && !may_be_unread(config, name)
    };
    let names = || checkpoint.files().iter().flat_map(|file| file.names());
    let n_left_out = names().filter(|name| is_of_prediction(config, name)).count();
    if n_left_out > 0 {
        info!(tensors = n_left_out, "layers of multi-token prediction are left out");
    }
    let mut unread: Vec<(&str, &std::path::Path)> = Vec::new();
    for file in checkpoint.files() {
        unread.extend(file.names().filter(|name| is_unread(name)).map(|name| (name, file.path())));
    }
    unread.sort_unstable();
    match unread.as_slice() {
        [] => Ok(()),
        [(tensor, path), others @ ..] => Err(LoadError::UnreadTensor {
            tensor: (*tensor).to_owned(),
            path: path.to_path_buf(),
            architecture: config.architecture,
            n_others: others.len(),
        }),
    }
}

/// Returns whether some checkpoints have this tensor and the model does not need it.
fn may_be_unread(config: &ModelConfig, name: &str) -> bool {
    // Older tools stored the rotary frequencies, which follow from the config and so need not be read.
    let is_frequencies = name.ends_with(".rotary_emb.inv_freq");
    is_frequencies || (config.tied && name == OUTPUT) || is_of_prediction(config, name)
}

/// Returns whether the tensor is one of a layer of multi-token prediction, which stand behind the model's own layers.
fn is_of_prediction(config: &ModelConfig, name: &str) -> bool {
    let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
    let layer = layer.and_then(|(layer, _)| layer.parse::<usize>().ok());
    layer.is_some_and(|layer| {
        (config.n_layers..config.n_layers.saturating_add(config.n_prediction_layers)).contains(&layer)
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;
    use crate::load::ModelFolder;

    fn models() -> impl Iterator<Item = std::path::PathBuf> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models");
        [
            "llama",
            "llama3",
            "mistral",
            "qwen2",
            "qwen2-window",
            "qwen3",
            "mixtral",
            "qwen3-moe",
            "deepseek-v2",
            "deepseek-v3",
            "qwen3-fp8",
            "deepseek-v3-fp8",
            "qwen3-moe-fp8",
        ]
        .into_iter()
        .map(move |name| folder.join(name))
    }

    #[test]
    fn a_model_has_the_tensors_that_its_checkpoint_has() {
        for path in models() {
            let config = ModelFolder::open(&path).expect("it opens").config;
            let checkpoint = Checkpoint::open(&path).expect("it opens");
            let names = checkpoint.files().iter().flat_map(|file| file.names());
            let is_other =
                |name: &str| is_of_prediction(&config, name) || checkpoint.scaled_by(name).is_some();
            let names: BTreeSet<&str> = names.filter(|name| !is_other(name)).collect();
            let tensors = tensors(&config);
            assert_eq!(tensors.iter().map(|one| one.name.as_str()).collect::<BTreeSet<_>>(), names);
            for one in &tensors {
                let file = checkpoint.files().iter().find(|file| file.tensor(&one.name).is_some());
                let found =
                    file.and_then(|file| file.tensor(&one.name)).expect("it is there").expect("whole");
                assert_eq!(found.shape, one.shape(), "{}", one.name);
            }
        }
    }
}
