//! The arguments of `baton bench engine`.

use std::num::NonZero;
use std::path::{Path, PathBuf};

use chassis::byte_size::ByteSize;
use clap::{Args, ValueEnum};
use engine::cuda::process::open_apart;
use engine::load::{Activations, Quantize};
use engine::measure::{Offline, SamplingMode, Workload};
use engine::{
    CpuSettings, CudaBackend, CudaSettings, Device, ExpertPlacement, LoadFormat, OpenError, StepLimits,
};
use types::{KvDtype, StageSplit};

/// The model that is measured if none is named.
const DEFAULT_MODEL: &str = "bench/shapes/llama-3.1-8b";

/// The folders that `--check` compares: the bundled model, and the smallest test model of each architecture.
/// `qwen3-moe-fp8` has random weights that `--quantize fp8-blocks --write-weights` wrote.
const CHECK_FOLDERS: &[&str] = &[
    "engine/tests/models/llama",
    "engine/tests/models/llama3",
    "engine/tests/models/llama-yarn",
    "engine/tests/models/mistral",
    "engine/tests/models/qwen2",
    "engine/tests/models/qwen2-window",
    "engine/tests/models/qwen3",
    "engine/tests/models/qwen3-fp8",
    "engine/tests/models/mixtral",
    "engine/tests/models/qwen3-moe",
    "engine/tests/models/qwen3-moe-stacked",
    "engine/tests/models/qwen3-moe-fp8",
    "models/demo",
];

/// The folders with latent attention.
const CHECK_FOLDERS_OF_LATENTS: &[&str] =
    &["engine/tests/models/deepseek-v2", "engine/tests/models/deepseek-v3"];

/// Measure the engine alone: decode steps, first tokens, many requests at once, and the device's limits.
#[derive(Args, Clone, Debug)]
pub(crate) struct EngineArgs {
    /// A model's folder, or a GGUF file; a `config.json` alone is enough for random weights. Without it:
    /// `bench/shapes/llama-3.1-8b`, and with `--check` the test models.
    #[arg(long, value_name = "FOLDER")]
    pub(crate) model: Option<PathBuf>,
    /// The device that computes: `auto`, `cpu`, `cuda`, or `cuda:N` for a certain GPU.
    #[arg(long, default_value = "auto", value_name = "DEVICE")]
    pub(crate) device: Device,
    /// Number of tensor-parallel ranks: GPUs from the device's number on, or groups of threads.
    #[arg(long, default_value_t = NonZero::<u16>::MIN, value_name = "RANKS")]
    pub(crate) tp: NonZero<u16>,
    /// Where the experts of a mixture are with several ranks: `cut`, some columns of every expert; `spread`, whole experts.
    #[arg(long, value_enum, default_value_t = Experts::Cut)]
    pub(crate) experts: Experts,
    /// Number of pipeline stages, which divide the layers: each has as many GPUs, or groups of threads, as there are ranks.
    #[arg(long, default_value_t = NonZero::<u16>::MIN, value_name = "STAGES")]
    pub(crate) stages: NonZero<u16>,
    /// Let the stages compute as in processes of their own.
    #[arg(long)]
    pub(crate) apart: bool,
    /// The source of the model's weights.
    #[arg(long, value_enum, default_value_t = WeightSource::Dummy)]
    pub(crate) weights: WeightSource,
    /// The quantization of the layers' weights when they are loaded or written.
    #[arg(long, value_enum, default_value_t = WeightFormat::No)]
    pub(crate) quantize: WeightFormat,
    /// The input of products with FP8 weights.
    #[arg(long, value_enum, default_value_t = ActivationFormat::Auto)]
    pub(crate) activations: ActivationFormat,
    /// The number format of KV.
    #[arg(long, value_enum, default_value_t = Kv::Bf16)]
    pub(crate) kv_dtype: Kv,
    /// The memory for KV.
    #[arg(long, default_value = "48GiB", value_name = "BYTES")]
    pub(crate) kv_memory: ByteSize,
    /// Numbers of sequences in a decode step; each is measured.
    #[arg(long, value_delimiter = ',', default_value = "1,8,32,64,128,256", value_name = "N,…")]
    pub(crate) batches: Vec<usize>,
    /// The ways of sampling tokens in decode steps; each is measured.
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "greedy,top-p,penalties",
        value_name = "WAY,…"
    )]
    pub(crate) draws: Vec<Draws>,
    /// Tokens of each sequence before its first measured decode step.
    #[arg(long, default_value_t = 1024, value_name = "N")]
    pub(crate) context: usize,
    /// Lengths of prompts whose time to first token is measured, one prompt at a time.
    #[arg(long, value_delimiter = ',', default_value = "2048,8192", value_name = "N,…")]
    pub(crate) prompts: Vec<usize>,
    /// Number of requests that start at the same time, to measure throughput; 0 skips this measurement.
    #[arg(long, default_value_t = 512, value_name = "N")]
    pub(crate) requests: usize,
    /// Prompt tokens of each request in the throughput measurement.
    #[arg(long, default_value_t = 1024, value_name = "N")]
    pub(crate) request_prompt: usize,
    /// Output tokens of each request in the throughput measurement.
    #[arg(long, default_value_t = 128, value_name = "N")]
    pub(crate) request_output: usize,
    /// The largest number of tokens in one step of the throughput measurement.
    #[arg(long, default_value_t = 8192, value_name = "N")]
    pub(crate) request_step_tokens: usize,
    /// The largest number of tokens in one step of the other measurements.
    #[arg(long, default_value_t = 8192, value_name = "N")]
    pub(crate) step_tokens: usize,
    /// The largest number of sequences in one step.
    #[arg(long, default_value_t = 256, value_name = "N")]
    pub(crate) rows: usize,
    /// Also report how the time of a decode step is divided. On a GPU only.
    #[arg(long)]
    pub(crate) profile: bool,
    /// Compare the GPU's results with the CPU's instead of measuring: sequences alone, in batches and in
    /// chunks. Also compare deterministic results with themselves, bit by bit. The weights are those in the
    /// model's folder. With `--deterministic` the model is only compared with itself, with the weights of
    /// `--weights`.
    #[arg(long)]
    pub(crate) check: bool,
    /// Let the engine sleep and wake this many times instead of measuring. Report the times, the released
    /// memory, and whether the tokens stay the same.
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub(crate) naps: usize,
    /// Write random weights of the model's shape into this folder instead of measuring, as a checkpoint, to
    /// measure loading with `--model FOLDER --weights safetensors`. With `--weights safetensors`, write the
    /// model's own weights.
    #[arg(long, value_name = "FOLDER")]
    pub(crate) write_weights: Option<PathBuf>,
    /// Compute each row with the same result in every batch, as `model.deterministic` does for nodes, to
    /// compare the speed. On a GPU only.
    #[arg(long)]
    pub(crate) deterministic: bool,
    /// Launch each kernel of a decode step separately instead of a CUDA graph, to compare the speed.
    #[arg(long)]
    pub(crate) no_graphs: bool,
    /// The folder of CUDA's libraries, if the loader does not search it.
    #[arg(long, value_name = "FOLDER")]
    pub(crate) cuda_libraries: Option<PathBuf>,
    /// Compile kernels for this GPU architecture: `sm_90a` for Hopper only, `sm_90` for every GPU.
    #[arg(long, value_name = "ARCH")]
    pub(crate) arch: Option<String>,
    /// Write all results to this file as JSON.
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
    /// The commit to name in the report, if there is no repository to read it from.
    #[arg(long, value_name = "NAME")]
    pub(crate) commit: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum WeightSource {
    /// Random weights, with the shapes of `config.json`.
    Dummy,
    /// The weights in the folder.
    Safetensors,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum WeightFormat {
    /// Weights as they are in the checkpoint.
    No,
    /// Weights with 8 bits, and a scale for each row.
    Fp8,
    /// Weights with 8 bits, and a scale for each 128 rows and columns. Only a checkpoint has these: see
    /// `--write-weights`.
    Fp8Blocks,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ActivationFormat {
    /// Rounded to FP8 if the checkpoint was made for that.
    Auto,
    /// Not rounded.
    Full,
    /// Rounded to FP8.
    Fp8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Experts {
    Cut,
    Spread,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kv {
    Bf16,
    Fp8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Draws {
    /// Always the most likely token.
    Greedy,
    /// Random tokens with temperature 0.8 and top-p 0.9.
    TopP,
    /// Random tokens as with `top-p`, with a repetition penalty and a presence penalty.
    Penalties,
    /// The most likely token of those that continue a JSON object, by a made-up vocabulary.
    Grammar,
}

impl Draws {
    fn meant(self) -> SamplingMode {
        match self {
            Self::Greedy => SamplingMode::Greedy,
            Self::TopP => SamplingMode::TopP,
            Self::Penalties => SamplingMode::Penalties,
            Self::Grammar => SamplingMode::Grammar,
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
            WeightSource::Dummy => LoadFormat::Dummy { seed: 1 },
            WeightSource::Safetensors => LoadFormat::Safetensors,
        }
    }

    pub(crate) fn quantize(&self) -> Quantize {
        match self.quantize {
            WeightFormat::No | WeightFormat::Fp8Blocks => Quantize::No,
            WeightFormat::Fp8 => Quantize::Fp8,
        }
    }

    pub(crate) fn activations(&self) -> Activations {
        match self.activations {
            ActivationFormat::Auto => Activations::Auto,
            ActivationFormat::Full => Activations::Full,
            ActivationFormat::Fp8 => Activations::Fp8,
        }
    }

    pub(crate) fn experts(&self) -> ExpertPlacement {
        match self.experts {
            Experts::Cut => ExpertPlacement::Cut,
            Experts::Spread => ExpertPlacement::Spread,
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
            stages: self.stage_split(),
            quantize: self.quantize(),
            activations: self.activations(),
            kv_dtype: self.kv_dtype(),
            ..CpuSettings::default()
        }
    }

    pub(crate) fn cuda(&self) -> CudaSettings {
        CudaSettings {
            ordinal: if let Device::Cuda(ordinal) = self.device { ordinal } else { 0 },
            ranks: self.tp,
            stages: self.stage_split(),
            experts: self.experts(),
            limits: StepLimits { tokens: self.step_tokens.max(self.request_step_tokens), rows: self.rows },
            load_format: self.load_format(),
            quantize: self.quantize(),
            activations: self.activations(),
            kv_dtype: self.kv_dtype(),
            libraries: self.cuda_libraries.clone(),
            arch: self.arch.clone(),
            deterministic: self.deterministic,
            graphs: !self.no_graphs,
            ..CudaSettings::default()
        }
    }

    /// Opens a model on GPUs, with these settings.
    pub(crate) fn opened(
        &self,
        folder: &Path,
        kv_bytes: usize,
        settings: &CudaSettings,
    ) -> Result<CudaBackend, OpenError> {
        match self.apart {
            true => open_apart(folder, kv_bytes, settings),
            false => CudaBackend::open(folder, kv_bytes, settings),
        }
    }

    fn stage_split(&self) -> StageSplit {
        StageSplit { n_stages: self.stages, layers: Vec::new() }
    }

    /// Returns the named model, or the default one.
    pub(crate) fn model(&self) -> &Path {
        self.model.as_deref().unwrap_or(Path::new(DEFAULT_MODEL))
    }

    /// Returns the models that `--check` compares with the CPU: the named one, otherwise all test models.
    pub(crate) fn check_folders(&self) -> Vec<PathBuf> {
        if let Some(model) = &self.model {
            return vec![model.clone()];
        }
        let of_latents = match (self.quantize, self.kv_dtype()) {
            (WeightFormat::No, KvDtype::Bf16) => CHECK_FOLDERS_OF_LATENTS,
            _ => &[],
        };
        CHECK_FOLDERS.iter().chain(of_latents).map(PathBuf::from).collect()
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Typed {
        #[command(flatten)]
        args: EngineArgs,
    }

    #[test]
    fn a_check_compares_the_named_model_or_the_test_models() {
        let n_in_fp8 = CHECK_FOLDERS.len();
        let n_all = n_in_fp8 + CHECK_FOLDERS_OF_LATENTS.len();
        for (typed, named, n_folders) in [
            ("--check", DEFAULT_MODEL, n_all),
            ("--check --weights safetensors", DEFAULT_MODEL, n_all),
            ("--check --quantize fp8", DEFAULT_MODEL, n_in_fp8),
            ("--check --kv-dtype fp8", DEFAULT_MODEL, n_in_fp8),
            ("--check --model some/model", "some/model", 1),
            ("--check --model some/model --weights safetensors", "some/model", 1),
        ] {
            let words = ["engine"].into_iter().chain(typed.split(' '));
            let args = Typed::try_parse_from(words).expect(typed).args;
            let folders = args.check_folders();
            assert_eq!((args.model(), folders.len()), (Path::new(named), n_folders), "{typed}");
            assert_eq!(folders.contains(&PathBuf::from("some/model")), args.model.is_some(), "{typed}");
        }
    }
}
