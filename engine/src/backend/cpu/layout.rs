//! The layout of a model's KV in host memory, shared with the GPU backend.

use std::ops::Range;

use kv_cache::KvMemory;
use tracing::info;
use types::layout::{Attention, LayerGroup, LayerShape, Shard};
use types::{KvDtype, KvLayout, StageLayers};

use super::settings::CpuSettings;
use crate::error::LoadError;
use crate::model::ModelConfig;

pub(super) fn layout(config: &ModelConfig, settings: &CpuSettings) -> Result<KvLayout, LoadError> {
    if settings.kv_dtype == KvDtype::F16 {
        return Err(LoadError::KvDtype(settings.kv_dtype));
    }
    let layout = KvLayout {
        block_tokens: settings.block_tokens,
        dtype: settings.kv_dtype,
        groups: match config.latent {
            Some(shape) => latent_groups(config.n_layers as u16, shape.width() as u16),
            None => groups(config.n_kv_heads as u16, config.head_dim as u16, &config.windows),
        },
        shard: Shard::WHOLE,
    };
    let n_ranks = settings.ranks.get();
    check_shares(config, usize::from(n_ranks))?;
    layout.over_ranks(n_ranks).map_err(|uneven| LoadError::Ranks(uneven.to_string()))
}

/// Rejects a number of ranks that would split heads or leave a rank without outputs of a matrix.
fn check_shares(config: &ModelConfig, n_ranks: usize) -> Result<(), LoadError> {
    let ModelConfig { n_heads, hidden, intermediate, vocab, .. } = *config;
    if !n_heads.is_multiple_of(n_ranks) {
        return Err(LoadError::Ranks(format!("{n_heads} heads do not spread over {n_ranks} ranks")));
    }
    let of_experts = config.mixture.as_ref().map(|mixture| mixture.n_experts.min(mixture.intermediate));
    let of_latents = config.latent.map(|shape| shape.width().min(shape.q_rank.unwrap_or(usize::MAX)));
    let others = of_experts.into_iter().chain(of_latents).min().unwrap_or(usize::MAX);
    match hidden.min(intermediate).min(vocab).min(others) < n_ranks {
        true => Err(LoadError::Ranks(format!("a layer has fewer outputs than there are ranks, {n_ranks}"))),
        false => Ok(()),
    }
}

/// Returns one group of layers with a latent vector for each token. Every rank holds all of it.
pub(in crate::backend) fn latent_groups(n_layers: u16, width: u16) -> Vec<LayerGroup> {
    let layers = (0..n_layers).map(|layer| LayerShape { layer, n_kv_heads: 1, head_dim: width });
    vec![LayerGroup { attention: Attention::Latent, layers: layers.collect() }]
}

/// Groups layers by window, in the order of their first layers.
pub(in crate::backend) fn groups(n_kv_heads: u16, head_dim: u16, windows: &[Option<u32>]) -> Vec<LayerGroup> {
    let mut groups: Vec<LayerGroup> = Vec::new();
    for (layer, window) in (0..).zip(windows) {
        let attention = window.map_or(Attention::Full, |tokens| Attention::SlidingWindow { tokens });
        let shape = LayerShape { layer, n_kv_heads, head_dim };
        match groups.iter_mut().find(|group| group.attention == attention) {
            Some(group) => group.layers.push(shape),
            None => groups.push(LayerGroup { attention, layers: vec![shape] }),
        }
    }
    groups
}

/// Logs the bytes of KV of all ranks, if each of several holds all latents.
pub(in crate::backend) fn log_latents(config: &ModelConfig, memory: &KvMemory) {
    if config.latent.is_some() && memory.n_ranks() > 1 {
        let (ranks, mib) = (memory.n_ranks(), memory.bytes() >> 20);
        info!(ranks, mib, "each rank holds all latents; this is the KV memory of all ranks");
    }
}

/// Logs the layers and the bytes of KV of each stage, if there are several.
pub(in crate::backend) fn log_stages(stages: &StageLayers, memory: &KvMemory) {
    if stages.n_stages() > 1 {
        let layers: Vec<Range<u16>> = stages.iter().collect();
        info!(?layers, kv_bytes = ?memory.stage_bytes(), "pipeline stages opened");
    }
}
