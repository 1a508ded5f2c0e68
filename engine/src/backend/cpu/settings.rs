//! Settings of the processor's backend.

use std::num::NonZero;

use kernels::cpu::Arithmetic;
use types::KvDtype;

use crate::load::Quantize;

/// How the processor computes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuSettings {
    /// Threads that compute, of all ranks together; `None`: one per core.
    pub threads: Option<NonZero<usize>>,
    /// Tensor-parallel ranks: groups of threads, each with its share of the outputs and of the KV.
    pub ranks: NonZero<u16>,
    /// How bf16 weights are multiplied.
    pub arithmetic: Arithmetic,
    pub kv_dtype: KvDtype,
    pub block_tokens: u16,
    pub quantize: Quantize,
    pub load_format: LoadFormat,
}

/// Where weights come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum LoadFormat {
    #[default]
    Safetensors,
    /// Random ones, from the config alone: for measuring speed.
    Dummy { seed: u64 },
}

impl Default for CpuSettings {
    fn default() -> Self {
        Self {
            threads: None,
            ranks: NonZero::<u16>::MIN,
            arithmetic: Arithmetic::F32,
            // What most models were trained with; f32 is for those who compare with a reference.
            kv_dtype: KvDtype::Bf16,
            block_tokens: 16,
            quantize: Quantize::No,
            load_format: LoadFormat::Safetensors,
        }
    }
}

impl CpuSettings {
    pub(super) fn threads(&self) -> NonZero<usize> {
        self.threads.or_else(|| std::thread::available_parallelism().ok()).unwrap_or(NonZero::<usize>::MIN)
    }
}
