//! What can be typed behind `baton bench engine`.

use std::num::NonZero;
use std::path::PathBuf;

use chassis::byte_size::ByteSize;
use clap::{Args, ValueEnum};
use engine::load::Quantize;
use engine::measure::{Offline, SamplingMode, Workload};
use engine::{CpuSettings, CudaSettings, Device, LoadFormat, StepLimits};
use types::KvDtype;

/// The bundled model and the smallest ones that there are of each architecture.
const CHECK_FOLDERS: &[&str] = &[
    "engine/tests/models/llama",
    "engine/tests/models/llama3",
    "engine/tests/models/mistral",
    "engine/tests/models/qwen2",
    "engine/tests/models/qwen2-window",
    "engine/tests/models/qwen3",
    "models/demo",
];

/// Measure the engine by itself: decode steps, first tokens, many requests at once, and the device's limits.
#[derive(Args, Clone, Debug)]
pub(crate) struct EngineArgs {
    /// A model's folder; a `config.json` alone is enough for random weights.
    #[arg(long, default_value = "bench/shapes/llama-3.1-8b", value_name = "FOLDER")]
    pub(crate) model: PathBuf,
    /// What computes: `auto`, `cpu`, `cuda`, or `cuda:N` for a certain GPU.
    #[arg(long, default_value = "auto", value_name = "DEVICE")]
    pub(crate) device: Device,
    /// Number of tensor-parallel ranks: GPUs from the device's number on, or groups of threads.
    #[arg(long, default_value_t = NonZero::<u16>::MIN, value_name = "RANKS")]
    pub(crate) tp: NonZero<u16>,
    /// Where weights come from.
    #[arg(long, value_enum, default_value_t = Weights::Dummy)]
    pub(crate) weights: Weights,
    /// What becomes of the layers' weights as they are loaded, or written.
    #[arg(long, value_enum, default_value_t = Quantized::No)]
    pub(crate) quantize: Quantized,
    /// The number type of KV.
    #[arg(long, value_enum, default_value_t = Kv::Bf16)]
    pub(crate) kv_dtype: Kv,
    /// Memory for KV.
    #[arg(long, default_value = "48GiB", value_name = "BYTES")]
    pub(crate) kv_memory: ByteSize,
    /// Rows of the decode steps that are measured.
    #[arg(long, value_delimiter = ',', default_value = "1,8,32,64,128,256", value_name = "N,…")]
    pub(crate) batches: Vec<usize>,
    /// Draw their tokens in these ways, one after the other.
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "greedy,top-p,penalties",
        value_name = "WAY,…"
    )]
    pub(crate) draws: Vec<Draws>,
    /// Tokens of each sequence before its first decode step.
    #[arg(long, default_value_t = 1024, value_name = "N")]
    pub(crate) context: usize,
    /// Prompts whose first token is waited for, one at a time.
    #[arg(long, value_delimiter = ',', default_value = "2048,8192", value_name = "N,…")]
    pub(crate) prompts: Vec<usize>,
    /// Requests that are there all at once; 0 leaves this out.
    #[arg(long, default_value_t = 512, value_name = "N")]
    pub(crate) requests: usize,
    /// Tokens of each of them.
    #[arg(long, default_value_t = 1024, value_name = "N")]
    pub(crate) request_prompt: usize,
    /// Tokens that each of them asks for.
    #[arg(long, default_value_t = 128, value_name = "N")]
    pub(crate) request_output: usize,
    /// Tokens of a step of theirs.
    #[arg(long, default_value_t = 8192, value_name = "N")]
    pub(crate) request_step_tokens: usize,
    /// The most tokens of a step.
    #[arg(long, default_value_t = 8192, value_name = "N")]
    pub(crate) step_tokens: usize,
    /// The most sequences of a step.
    #[arg(long, default_value_t = 256, value_name = "N")]
    pub(crate) rows: usize,
    /// Say where the time of a decode step goes, too. On a GPU.
    #[arg(long)]
    pub(crate) profile: bool,
    /// Compare the GPU with the CPU instead, alone, in company, in chunks; and, deterministic, with itself, exactly. With
    /// `--deterministic` the named model is compared with itself and nothing else.
    #[arg(long)]
    pub(crate) check: bool,
    /// Let it sleep and wake this many times instead: how long that takes, what memory it gives, and whether the tokens are
    /// the same afterwards.
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub(crate) naps: usize,
    /// Write made-up weights of the model's shape into this folder instead, as a checkpoint: to measure how fast it is
    /// loaded, by `--model FOLDER --weights safetensors`. With `--weights safetensors`, the model's own.
    #[arg(long, value_name = "FOLDER")]
    pub(crate) write_weights: Option<PathBuf>,
    /// Compute every row the same in any company, for comparison: what `model.deterministic` is for nodes. On a GPU.
    #[arg(long)]
    pub(crate) deterministic: bool,
    /// Launch each kernel of a decode step by itself instead of recorded steps, for comparison.
    #[arg(long)]
    pub(crate) no_graphs: bool,
    /// The folder of CUDA's libraries, if they are not where the loader looks.
    #[arg(long, value_name = "FOLDER")]
    pub(crate) cuda_libraries: Option<PathBuf>,
    /// Kernels for this kind of GPU: `sm_90a` are Hopper's own, `sm_90` what every GPU has.
    #[arg(long, value_name = "ARCH")]
    pub(crate) arch: Option<String>,
    /// The file that everything found is written to, as JSON.
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
    /// The commit that the report names, where there is no repository to ask.
    #[arg(long, value_name = "NAME")]
    pub(crate) commit: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Weights {
    /// Random ones, from the config alone.
    Dummy,
    /// The folder's own.
    Safetensors,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Quantized {
    /// They stay as they are.
    No,
    /// 8 bits a weight, and a scale for each row.
    Fp8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kv {
    Bf16,
    Fp8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Draws {
    /// The likeliest.
    Greedy,
    /// Temperature 0.8, top-p 0.9.
    TopP,
    /// The same with a repetition and a presence penalty.
    Penalties,
}

impl Draws {
    fn meant(self) -> SamplingMode {
        match self {
            Self::Greedy => SamplingMode::Greedy,
            Self::TopP => SamplingMode::TopP,
            Self::Penalties => SamplingMode::Penalties,
        }
    }
}

impl EngineArgs {
    pub(crate) fn workload(&self) -> Workload {
        Workload {
            batches: self.batches.clone(),
            draws: self.draws.iter().map(|draws| draws.meant()).collect(),
            context_tokens: self.context,
            prompts: self.prompts.clone(),
            offline: (self.requests > 0).then_some(Offline {
                n_requests: self.requests,
                prompt_tokens: self.request_prompt,
                output_tokens: self.request_output,
                rows_max: self.rows,
                step_tokens: self.request_step_tokens,
            }),
            step_tokens: self.step_tokens,
        }
    }

    pub(crate) fn load_format(&self) -> LoadFormat {
        match self.weights {
            Weights::Dummy => LoadFormat::Dummy { seed: 1 },
            Weights::Safetensors => LoadFormat::Safetensors,
        }
    }

    pub(crate) fn quantize(&self) -> Quantize {
        match self.quantize {
            Quantized::No => Quantize::No,
            Quantized::Fp8 => Quantize::Fp8,
        }
    }

    pub(crate) fn kv_dtype(&self) -> KvDtype {
        match self.kv_dtype {
            Kv::Bf16 => KvDtype::Bf16,
            Kv::Fp8 => KvDtype::Fp8E4m3,
        }
    }

    pub(crate) fn cpu(&self) -> CpuSettings {
        CpuSettings {
            load_format: self.load_format(),
            ranks: self.tp,
            quantize: self.quantize(),
            kv_dtype: self.kv_dtype(),
            ..CpuSettings::default()
        }
    }

    pub(crate) fn cuda(&self) -> CudaSettings {
        CudaSettings {
            ordinal: if let Device::Cuda(ordinal) = self.device { ordinal } else { 0 },
            ranks: self.tp,
            limits: StepLimits { tokens: self.step_tokens.max(self.request_step_tokens), rows: self.rows },
            load_format: self.load_format(),
            quantize: self.quantize(),
            kv_dtype: self.kv_dtype(),
            libraries: self.cuda_libraries.clone(),
            arch: self.arch.clone(),
            deterministic: self.deterministic,
            graphs: !self.no_graphs,
            ..CudaSettings::default()
        }
    }

    /// The named model if one was named, else all that are kept for this.
    pub(crate) fn check_folders(&self) -> Vec<PathBuf> {
        match self.weights {
            Weights::Safetensors => vec![self.model.clone()],
            Weights::Dummy => CHECK_FOLDERS.iter().map(PathBuf::from).collect(),
        }
    }
}
