//! Settings of the CPU backend.

use std::num::NonZero;

use kernels::cpu::Arithmetic;
use types::{KvDtype, StageSplit};

use crate::load::{Activations, Quantize};

/// The settings of the CPU backend, without the model and the size of KV memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuSettings {
    /// Compute threads of all ranks and stages together. `None` means one for each core.
    pub threads: Option<NonZero<usize>>,
    /// Tensor-parallel ranks: groups of threads, each with its share of the outputs and of KV.
    pub ranks: NonZero<u16>,
    /// Pipeline stages: groups of threads, each with its share of the layers. Each has all ranks.
    pub stages: StageSplit,
    /// The arithmetic for bf16 weights.
    pub arithmetic: Arithmetic,
    pub kv_dtype: KvDtype,
    pub block_tokens: u16,
    pub quantize: Quantize,
    pub activations: Activations,
    pub load_format: LoadFormat,
}

/// The source of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum LoadFormat {
    #[default]
    Safetensors,
    /// Random weights, from the config alone, for speed measurements.
    Dummy { seed: u64 },
}

impl Default for CpuSettings {
    fn default() -> Self {
        Self {
            threads: None,
            ranks: NonZero::<u16>::MIN,
            stages: StageSplit::default(),
            arithmetic: Arithmetic::F32,
            // The default is bf16, because most models were trained with it. f32 is for comparisons with a
            // reference.
            kv_dtype: KvDtype::Bf16,
            block_tokens: 16,
            quantize: Quantize::No,
            activations: Activations::Auto,
            load_format: LoadFormat::Safetensors,
        }
    }
}

impl CpuSettings {
    pub(super) fn threads(&self) -> NonZero<usize> {
        self.threads.or_else(|| std::thread::available_parallelism().ok()).unwrap_or(NonZero::<usize>::MIN)
    }
}
