//! Scales of KV in FP8, as some checkpoints have them: one for the keys of a layer and one for its values.
//!
//! The tool that wrote the checkpoint has measured which scale brings the numbers into the range of FP8. Here a scale is rounded
//! up to a power of two, and becomes a part of the weights: the weights of keys are divided by it and those of queries
//! multiplied, the weights of values are divided and those of the output multiplied. Powers of two round no number. So
//! attention and transfers need no scales.

use std::ops::RangeInclusive;

use kernels::cpu::{Format, Matrix};
use types::KvDtype;

use super::checkpoint::Checkpoint;
use super::weights::TensorSource;
use crate::error::LoadError;
use crate::model::ModelConfig;

/// The scales that are taken. With others, weights could become too large or too small for their format.
const POWERS: RangeInclusive<f32> = f32::EPSILON..=1.0 / f32::EPSILON;
/// The bits of an f32 that are zero in powers of two.
const MANTISSA: u32 = (1 << (f32::MANTISSA_DIGITS - 1)) - 1;

/// A checkpoint whose weights make keys and values that fit the format of KV.
#[derive(Debug)]
pub struct KvScaled<'a> {
    checkpoint: &'a Checkpoint,
    /// The scales of each layer; empty if KV is not in FP8, or the checkpoint has none.
    layers: Vec<LayerScales>,
    has_head_norms: bool,
}

/// Powers of two.
#[derive(Clone, Copy, Debug, PartialEq)]
struct LayerScales {
    keys: f32,
    values: f32,
}

/// Returns the names of each layer's scales, of keys and of values; none if the checkpoint has none.
pub(super) fn names(config: &ModelConfig) -> impl Iterator<Item = [String; 2]> {
    let n_layers = if config.has_kv_scales { config.n_layers } else { 0 };
    (0..n_layers).map(|nth| ["k", "v"].map(|part| format!("model.layers.{nth}.self_attn.{part}_scale")))
}

impl<'a> KvScaled<'a> {
    pub fn of(checkpoint: &'a Checkpoint, config: &ModelConfig, kv: KvDtype) -> Result<Self, LoadError> {
        let read = |name: String| power_of(checkpoint, name, config.n_kv_heads);
        let layer = |[keys, values]: [String; 2]| {
            Ok::<_, LoadError>(LayerScales { keys: read(keys)?, values: read(values)? })
        };
        let layers = match kv {
            KvDtype::Fp8E4m3 => names(config).map(layer).collect::<Result<_, _>>()?,
            _ => Vec::new(),
        };
        Ok(Self { checkpoint, layers, has_head_norms: config.optional.head_norms })
    }

    /// Returns the factor of a tensor.
    fn factor(&self, name: &str) -> f32 {
        let in_layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once(".self_attn."));
        let of_layer =
            in_layer.and_then(|(nth, part)| Some((self.layers.get(nth.parse::<usize>().ok()?)?, part)));
        let Some((LayerScales { keys, values }, part)) = of_layer else { return 1.0 };
        match (part, self.has_head_norms) {
            ("q_norm.weight", true) | ("q_proj.weight" | "q_proj.bias", false) => *keys,
            // A norm removes a factor of its input.
            ("k_norm.weight", true) | ("k_proj.weight" | "k_proj.bias", false) => keys.recip(),
            ("v_proj.weight" | "v_proj.bias", _) => values.recip(),
            ("o_proj.weight", _) => *values,
            _ => 1.0,
        }
    }
}

/// Returns the smallest power of two that is no less than a scale. Of the scales of heads, the largest one counts.
fn power_of(checkpoint: &Checkpoint, tensor: String, n_kv_heads: usize) -> Result<f32, LoadError> {
    let (found, path) = checkpoint.numbers(&tensor)?;
    if !found.iter().all(|scale| POWERS.contains(scale)) || ![1, n_kv_heads].contains(&found.len()) {
        let path = path.to_owned();
        return Err(LoadError::KvScale { tensor, path, found });
    }
    let largest = found.into_iter().fold(0.0, f32::max);
    Ok(f32::from_bits((largest.to_bits() + MANTISSA) & !MANTISSA))
}

impl TensorSource for KvScaled<'_> {
    fn matrix(&self, name: &str, rows: usize, cols: usize) -> Result<Matrix, LoadError> {
        let matrix = self.checkpoint.matrix(name, rows, cols)?;
        match self.factor(name) {
            1.0 => Ok(matrix),
            factor => matrix.times(factor).map_err(LoadError::Memory),
        }
    }

    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, LoadError> {
        let (mut vector, factor) = (self.checkpoint.vector(name, len)?, self.factor(name));
        vector.iter_mut().for_each(|number| *number *= factor);
        Ok(vector)
    }

    fn fp8_format(&self, name: &str) -> Option<Format> {
        self.checkpoint.fp8_format(name)
    }
}
