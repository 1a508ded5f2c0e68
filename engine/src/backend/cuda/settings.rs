//! What a GPU is told beside the model and the memory for KV.

use std::num::NonZero;
use std::path::{Path, PathBuf};

use kernels::cuda::Cache;
use types::KvDtype;

use crate::backend::StepLimits;
use crate::cpu::LoadFormat;
use crate::load::Quantize;

/// How a GPU computes.
#[derive(Clone, Debug)]
pub struct CudaSettings {
    /// Which GPU, as the driver counts; of several, the first one.
    pub ordinal: usize,
    /// Tensor-parallel ranks: so many GPUs, one after the other, each with its share of the model.
    pub ranks: NonZero<u16>,
    pub limits: StepLimits,
    pub load_format: LoadFormat,
    pub kv_dtype: KvDtype,
    pub quantize: Quantize,
    /// Where CUDA's libraries lie, if not where the loader looks.
    pub libraries: Option<PathBuf>,
    /// Where compiled kernels and measurements of products are kept; `None`: nowhere.
    pub cache: Option<PathBuf>,
    /// Kernels for this kind of card: `sm_90a` are Hopper's own, `sm_90` what every card has. `None`: the card's own.
    pub arch: Option<String>,
    /// Whether a row's numbers are the same in any company: alone, in any batch, in any chunks, computed again.
    pub deterministic: bool,
    /// Whether decode steps are recorded as graphs.
    pub graphs: bool,
    /// Whether ways of multiplying are measured where nothing is remembered of them.
    pub tunes: bool,
}

impl Default for CudaSettings {
    fn default() -> Self {
        Self {
            ordinal: 0,
            ranks: NonZero::<u16>::MIN,
            limits: StepLimits::default(),
            load_format: LoadFormat::Safetensors,
            kv_dtype: KvDtype::Bf16,
            quantize: Quantize::No,
            libraries: None,
            cache: user_cache(|name| std::env::var_os(name).map(PathBuf::from)),
            arch: None,
            deterministic: false,
            graphs: true,
            tunes: true,
        }
    }
}

/// Tokens of a chunk of attention where a row must be the same in any company.
const CHUNK_TOKENS: usize = 512;

impl CudaSettings {
    /// How far each block of threads goes along a sequence; `None`: as suits the batch.
    pub(super) fn chunk_tokens(&self) -> Option<usize> {
        self.deterministic.then_some(CHUNK_TOKENS)
    }

    /// What a fingerprint says: rows that are the same in any company are the same on cards that run the same kernels, as
    /// many of them.
    pub(super) fn arithmetic(&self, arch: &str) -> String {
        match (self.deterministic, self.ranks.get()) {
            (true, 1) => format!("bf16 on a GPU, {arch}, the same in any company"),
            (true, n_ranks) => format!("bf16 on {n_ranks} GPUs, {arch}, the same in any company"),
            (false, _) => "bf16 on a GPU".to_owned(),
        }
    }

    pub(super) fn kernel_cache(&self) -> Cache {
        self.cache.as_ref().map_or_else(Cache::none, |folder| Cache::at(&folder.join("kernels")))
    }

    /// The file that remembers how products are done on such a card.
    pub(super) fn choices_file(&self, about: &str) -> Option<PathBuf> {
        let name: String = about.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
        self.cache.as_ref().map(|folder| folder.join("products").join(format!("{name}.txt")))
    }
}

/// Where the XDG convention says: `$XDG_CACHE_HOME`, else `$HOME/.cache`, else nowhere.
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
