//! The weights of a model, or of some of its layers, in memory, and their description.

use std::ops::Range;
use std::sync::Arc;

use kernels::cpu::{Arithmetic, Processor};
use types::{Fingerprint, KvLayout};

use super::settings::{CpuSettings, LoadFormat};
use crate::backend::remote::StageWeights;
use crate::error::LoadError;
use crate::load::weights::{HasFp8, LoadedFormats};
use crate::load::{
    Checkpoint, Dummy, KvScaled, ModelFolder, Quantize, TensorSource, Weights, fingerprint, tensors,
};
use crate::model::{ActivationFormat, Decoder};

/// Weights in memory, and their description.
#[derive(Debug)]
pub(super) struct LoadedModel {
    pub(super) decoder: Arc<Decoder>,
    /// The parts of the fingerprint that are equal in all processes of a node, without the layout's.
    common_parts: Vec<(&'static str, String)>,
    pub(super) formats: LoadedFormats,
    pub(super) activations: ActivationFormat,
}

impl LoadedModel {
    /// Loads some neighbouring layers, with the parts before the model's first and after its last one.
    pub(super) fn load(
        folder: &ModelFolder,
        settings: &CpuSettings,
        processor: &Processor,
        layers: Range<usize>,
    ) -> Result<Self, LoadError> {
        let config = &folder.config;
        let formats = LoadedFormats::default();
        let is_part = layers.len() < config.n_layers;
        let load = |source: &dyn TensorSource| {
            let weights = Weights::new(source, processor, settings.quantize, &formats);
            Decoder::load_layers(config, &weights, layers.clone()).map(Arc::new)
        };
        let (decoder, weights) = match settings.load_format {
            LoadFormat::Safetensors => {
                let checkpoint = Checkpoint::open(folder.path())?;
                tensors::check_all_read(config, &checkpoint)?;
                let scaled = KvScaled::of(&checkpoint, config, settings.kv_dtype)?;
                (load(&scaled)?, fingerprint::of_weights(&checkpoint))
            }
            LoadFormat::Dummy { seed } => (load(&Dummy { seed, processor })?, dummy_weights(seed)),
        };
        let activations = match formats.has_fp8() {
            // Only the inputs of products with FP8 matrices are rounded, and other processes may have such matrices.
            HasFp8(false) if is_part => ActivationFormat::Full,
            has_fp8 => settings.activations.resolve(config.activations, has_fp8)?,
        };
        let common_parts = common_parts(folder, processor.arithmetic(), weights)?;
        Ok(Self { decoder, common_parts, formats, activations })
    }

    /// Returns the parts of a model's fingerprint that are equal in all processes of a node, without loading its weights.
    pub(super) fn fingerprint_before(
        folder: &ModelFolder,
        layout: &KvLayout,
        settings: &CpuSettings,
    ) -> Result<Fingerprint, LoadError> {
        let weights = match settings.load_format {
            LoadFormat::Safetensors => fingerprint::of_weights(&Checkpoint::open(folder.path())?),
            LoadFormat::Dummy { seed } => dummy_weights(seed),
        };
        Ok(fingerprint::fingerprint(layout, common_parts(folder, settings.arithmetic, weights)?))
    }

    /// Returns the description of the weights that this process has loaded.
    pub(super) fn described(&self, layout: &KvLayout) -> StageWeights {
        let model = fingerprint::fingerprint(layout, self.common_parts.clone());
        StageWeights { model, formats: self.formats.bytes_by_format() }
    }

    /// Returns the model's fingerprint. `others` are the weights that other processes have loaded.
    pub(super) fn fingerprint(
        &self,
        folder: &ModelFolder,
        layout: &KvLayout,
        settings: &CpuSettings,
        others: &[StageWeights],
    ) -> Result<Fingerprint, LoadError> {
        let all = self.formats.clone();
        others.iter().for_each(|other| all.add(&other.formats));
        let dtype = match settings.quantize {
            Quantize::No => all.main_format().map_or("none", |format| format.as_str()),
            Quantize::Q8 | Quantize::Fp8 => settings.quantize.as_str(),
        };
        let activations = settings.activations.resolve(folder.config.activations, all.has_fp8())?;
        let dtype = activations.added_to(all.has_blocks().added_to(dtype.to_owned()));
        Ok(fingerprint::fingerprint(layout, self.common_parts.iter().cloned().chain([("dtype", dtype)])))
    }
}

/// Returns the parts of a fingerprint that are equal in all processes of a node, without the layout's.
fn common_parts(
    folder: &ModelFolder,
    arithmetic: Arithmetic,
    weights: String,
) -> Result<Vec<(&'static str, String)>, LoadError> {
    let arithmetic = match arithmetic {
        Arithmetic::F32 => "f32",
        Arithmetic::Bf16 => "bf16",
    };
    let parts = [
        ("weights", weights),
        ("arithmetic", arithmetic.to_owned()),
        ("tokenizer", fingerprint::of_tokenizer(folder.tokenizer()?.as_deref())),
    ];
    Ok(parts.into_iter().chain(folder.config.fingerprint_parts()).collect())
}

fn dummy_weights(seed: u64) -> String {
    format!("dummy, seed {seed}")
}
