//! Settings of the GPU backend, without the model and the size of KV memory.

use std::num::NonZero;
use std::ops::Range;
use std::path::{Path, PathBuf};

use device::cuda::Cache;
use types::{KvDtype, ProcessShare, StageSplit};

use crate::backend::{ExpertPlacement, StepLimits};
use crate::cpu::LoadFormat;
use crate::load::{Activations, Quantize};

/// The settings of the GPU backend.
#[derive(Clone, Debug)]
pub struct CudaSettings {
    /// The GPU's number in the driver's order; with several ranks or stages, the first one's.
    pub ordinal: usize,
    /// Tensor-parallel ranks: the number of GPUs, in the driver's order, each with its share of the model.
    pub ranks: NonZero<u16>,
    /// Pipeline stages: each has some of the layers, and one GPU for each rank. A stage's GPUs have the numbers after those
    /// that the previous stage uses.
    pub stages: StageSplit,
    pub experts: ExpertPlacement,
    /// The part of the model that this process computes; `None`: it computes all.
    pub only: Option<ProcessShare>,
    pub limits: StepLimits,
    pub load_format: LoadFormat,
    pub kv_dtype: KvDtype,
    pub quantize: Quantize,
    pub activations: Activations,
    /// The folder of CUDA's libraries, if the loader does not find them.
    pub libraries: Option<PathBuf>,
    /// The folder for compiled kernels and product measurements. `None` means that they are not kept.
    pub cache: Option<PathBuf>,
    /// The architecture that kernels are compiled for: `sm_90a` includes Hopper's own kernels, `sm_90` does
    /// not. `None` means the GPU's own architecture.
    pub arch: Option<String>,
    /// Whether a row's results are the same alone, in any batch, in any chunks, and when recomputed.
    pub deterministic: bool,
    /// Whether decode steps are recorded as graphs.
    pub graphs: bool,
    /// Whether product methods are measured if there is no stored measurement.
    pub tunes: bool,
}

impl Default for CudaSettings {
    fn default() -> Self {
        Self {
            ordinal: 0,
            ranks: NonZero::<u16>::MIN,
            stages: StageSplit::default(),
            experts: ExpertPlacement::Cut,
            only: None,
            limits: StepLimits::default(),
            load_format: LoadFormat::Safetensors,
            kv_dtype: KvDtype::Bf16,
            quantize: Quantize::No,
            activations: Activations::Auto,
            libraries: None,
            cache: user_cache(|name| std::env::var_os(name).map(PathBuf::from)),
            arch: None,
            deterministic: false,
            graphs: true,
            tunes: true,
        }
    }
}

/// The attention chunk of a deterministic backend, in tokens.
const CHUNK_TOKENS: usize = 512;

impl CudaSettings {
    /// Returns the numbers of the GPUs that compute the model.
    pub fn gpus(&self) -> Range<usize> {
        let n_stages = if self.only.is_some() { 1 } else { self.stages.n_stages.get() };
        self.ordinal..self.ordinal + self.ranks_here().len() * usize::from(n_stages)
    }

    /// Returns the stage that this process computes; `None`: it computes all.
    pub(super) fn only_stage(&self) -> Option<usize> {
        self.only.as_ref().map(|share| share.stage)
    }

    /// Returns the ranks of each stage that this process computes.
    pub(super) fn ranks_here(&self) -> Range<u16> {
        self.only.as_ref().map_or(0..self.ranks.get(), |share| share.ranks.clone())
    }

    /// Returns whether other processes compute some ranks of this one's stage.
    pub(super) fn has_mates(&self) -> bool {
        self.ranks_here().len() < usize::from(self.ranks.get())
    }

    /// Returns the number of tokens of a sequence for each block of threads; `None` if it depends on the
    /// batch.
    pub(super) fn chunk_tokens(&self) -> Option<usize> {
        self.deterministic.then_some(CHUNK_TOKENS)
    }

    /// Describes the arithmetic, for the fingerprint. A deterministic backend gives the same results on the
    /// same number of GPUs with the same kernels.
    pub(super) fn arithmetic(&self, arch: &str) -> String {
        match (self.deterministic, self.ranks.get()) {
            (true, n_ranks) if self.has_mates() => {
                format!("bf16 on {n_ranks} GPUs of several processes, {arch}, the same in any company")
            }
            (true, 1) => format!("bf16 on a GPU, {arch}, the same in any company"),
            (true, n_ranks) => format!("bf16 on {n_ranks} GPUs, {arch}, the same in any company"),
            (false, _) => "bf16 on a GPU".to_owned(),
        }
    }

    pub(super) fn kernel_cache(&self) -> Cache {
        self.cache.as_ref().map_or_else(Cache::none, |folder| Cache::at(&folder.join("kernels")))
    }

    /// Returns the file with the chosen product methods for the GPU that `about` describes.
    pub(super) fn choices_file(&self, about: &str) -> Option<PathBuf> {
        let name: String = about.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
        self.cache.as_ref().map(|folder| folder.join("products").join(format!("{name}.txt")))
    }
}

/// Returns the XDG cache folder: `$XDG_CACHE_HOME`, else `$HOME/.cache`; `None` if neither is set.
fn user_cache(variable: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    let named = |name| variable(name).filter(|path| path.is_absolute());
    let base = named("XDG_CACHE_HOME").or_else(|| named("HOME").map(|home| home.join(Path::new(".cache"))));
    base.map(|base| base.join("baton"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_measured_lies_beside_what_is_compiled() {
        let home = |name: &str| (name == "HOME").then(|| PathBuf::from("/home/x"));
        let settings = CudaSettings { cache: user_cache(home), ..CudaSettings::default() };
        let file = settings.choices_file("NVIDIA H200, cuBLASLt 130100");
        assert_eq!(
            file.as_deref(),
            Some(Path::new("/home/x/.cache/baton/products/NVIDIA-H200--cuBLASLt-130100.txt"))
        );
        assert_eq!(user_cache(|_| Some(PathBuf::from("relative"))), None);
    }
}
