//! Compares the GPU's results with the CPU's.

use std::path::Path;

use engine::equality::{Comparison, Comparisons, Tolerance, compare, compare_with_itself};
use engine::load::ModelFolder;
use engine::load::weights::HasFp8;
use engine::model::ActivationFormat;
use engine::{Backend, CpuBackend, CpuSettings, CudaBackend, CudaSettings, LoadFormat, StepLimits};
use serde::{Deserialize, Serialize};
use types::{KvDtype, ModelInfo, StageSplit, TokenId};

use super::args::EngineArgs;
use crate::exit::CommandError;

/// The KV memory of a model that is compared with the CPU, in bytes.
const KV_BYTES: usize = 64 << 20;
/// The number of tokens that are generated and compared after each prompt.
const N_STEPS: usize = 24;
/// The limits of a step, enough for the longest golden prompt.
const LIMITS: StepLimits = StepLimits { tokens: 2048, rows: 256 };
/// The tolerance for bf16, compared with f32 on the CPU. Numbers are rounded to 8 bits in every layer, which
/// matters most in narrow models such as the test models. The tolerance is 1.5 times the largest difference
/// that was seen (`docs/measurements`). That holds for `routing` too: a choice of experts differed at a lead of 0.07.
const TOLERANCE: Tolerance = Tolerance { epsilon: 0.5, logprob: 0.5, logprob_share: 0.05, routing: 0.1 };

/// The tolerance with KV in FP8. Numbers that differ in their last bits before they are rounded to 3 bits may
/// differ by an eighth afterwards.
const TOLERANCE_OF_KV: Tolerance =
    Tolerance { epsilon: 1.1, logprob: 5.5, logprob_share: 0.05, routing: 0.1 };

/// The tolerance with activations in FP8, which are rounded to 3 bits before every product.
const TOLERANCE_OF_ACTIVATIONS: Tolerance =
    Tolerance { epsilon: 1.9, logprob: 6.0, logprob_share: 0.05, routing: 0.1 };

/// The KV memory of a model that is compared with itself, in bytes: enough for the sequences of the largest
/// batch.
const ALIKE_KV_BYTES: usize = 24 << 30;
/// The prompt lengths of a model that is compared with itself: a few tokens, some chunks of attention, and
/// lengths at and beside the edges of chunks. Models with shorter contexts have shorter prompts.
const ALIKE_PROMPTS: [u32; 6] = [1, 33, 130, 512, 513, 1100];

/// The length of one further prompt: GPUs compute the attention of many tokens in another way than that of few. Models
/// with experts have it only if they have latents: where rounding exchanges experts, all tokens after it change.
const LONG_PROMPT: u32 = 400;

/// The comparison of one model, for the report.
#[derive(Debug, Serialize)]
pub(super) struct ModelComparison {
    model: String,
    /// The reference of the comparison.
    with: &'static str,
    tolerance: Tolerance,
    recorded: Comparison,
    launched: Comparison,
    /// The log-probabilities of prompts, whose steps are never recorded.
    prompts: Comparison,
}

impl ModelComparison {
    /// Takes the comparisons with CUDA graphs, and then those without.
    fn of(model: String, with: &'static str, tolerance: Tolerance, both: [Comparisons; 2]) -> Self {
        let [recorded, launched] = both;
        let mut prompts = recorded.prompts;
        prompts.merge(launched.prompts);
        Self { model, with, tolerance, recorded: recorded.sampled, launched: launched.sampled, prompts }
    }

    pub(super) fn is_equal(&self) -> bool {
        [&self.recorded, &self.launched, &self.prompts].iter().all(|comparison| comparison.is_equal())
    }

    pub(super) fn line(&self) -> String {
        let mut all = self.recorded.clone();
        all.merge(self.launched.clone());
        let verdict = if self.is_equal() { "equal" } else { "NOT EQUAL" };
        let mut line = format!("{}: {verdict} to {}; {}", self.model, self.with, figures(&all));
        line.push_str(&format!("; prompts: {}", figures(&self.prompts)));
        for wrong in all.wrong.iter().take(5).chain(self.prompts.wrong.iter().take(5)) {
            line.push_str(&format!("\n  {wrong}"));
        }
        line
    }
}

fn figures(comparison: &Comparison) -> String {
    let Comparison { n_tokens, n_near_ties, n_routing_ties, worst_logprob, worst_lead, .. } = comparison;
    format!(
        "{n_tokens} tokens, {n_near_ties} near ties, {n_routing_ties} of routing, log-probabilities within \
         {worst_logprob:.3}, other tokens over leads of {worst_lead:.3}"
    )
}

/// Returns whether the model has a layer for each stage.
pub(super) fn has_layers(folder: &Path, args: &EngineArgs) -> Result<bool, CommandError> {
    let config = ModelFolder::open(folder).map_err(CommandError::start)?.config;
    Ok(config.n_layers >= usize::from(args.stages.get()))
}

/// Compares a model on the GPU with the CPU, once with CUDA graphs and once with each kernel launched
/// separately. The CPU's KV is in f32, or in 8 bits if the model's KV is.
pub(super) fn check(folder: &Path, args: &EngineArgs) -> Result<ModelComparison, CommandError> {
    let of_checkpoint = ModelFolder::open(folder).map_err(CommandError::start)?.config.activations;
    // A model without weights in FP8 has a config for full activations, or is refused when it is opened.
    let activations = args.activations().resolve(of_checkpoint, HasFp8(true)).map_err(CommandError::start)?;
    let (kv_dtype, tolerance) = match (args.kv_dtype(), activations) {
        (KvDtype::Fp8E4m3, ActivationFormat::Full) => (KvDtype::Fp8E4m3, TOLERANCE_OF_KV),
        (KvDtype::Fp8E4m3, ActivationFormat::Fp8) => (KvDtype::Fp8E4m3, TOLERANCE_OF_ACTIVATIONS),
        (_, ActivationFormat::Fp8) => (KvDtype::F32, TOLERANCE_OF_ACTIVATIONS),
        (_, ActivationFormat::Full) => (KvDtype::F32, TOLERANCE),
    };
    let cpu = CpuSettings {
        kv_dtype,
        quantize: args.quantize(),
        activations: args.activations(),
        ..CpuSettings::default()
    };
    let mut reference = CpuBackend::open(folder, 2 * KV_BYTES, &cpu).map_err(CommandError::start)?;
    let prompts = prompts(folder, reference.model())?;
    let settings = CudaSettings { load_format: LoadFormat::Safetensors, limits: LIMITS, ..args.cuda() };
    let mut compared = |graphs: bool| -> Result<Comparisons, CommandError> {
        let settings = CudaSettings { graphs, ..settings.clone() };
        let mut subject = args.opened(folder, KV_BYTES, &settings).map_err(CommandError::start)?;
        compare(&mut reference, &mut subject, &prompts, N_STEPS, tolerance).map_err(CommandError::work)
    };
    let (recorded, launched) = (compared(true)?, compared(false)?);
    let model = folder.display().to_string();
    Ok(ModelComparison::of(model, "the CPU", tolerance, [recorded, launched]))
}

/// Runs the conformance suites of sleep and of grammars on the GPU. A node of several processes does not sleep.
///
/// # Panics
/// If a case fails.
pub(super) fn check_contract(folder: &Path, args: &EngineArgs) {
    let settings = CudaSettings { load_format: LoadFormat::Safetensors, limits: LIMITS, ..args.cuda() };
    let open = || -> Box<dyn Backend> {
        let opened = args.opened(folder, KV_BYTES, &settings);
        Box::new(opened.expect("the backend opens, as it did before the check"))
    };
    if !args.apart {
        engine::conformance::sleep::suite(&open);
    }
    engine::conformance::grammar::suite(&open);
}

/// Compares a deterministic model with itself in other batches, bit by bit. A model with several pipeline stages is compared
/// with the same model in one stage.
pub(super) fn check_alike(folder: &Path, args: &EngineArgs) -> Result<ModelComparison, CommandError> {
    let settings = CudaSettings { deterministic: true, ..args.cuda() };
    let (settings, kv_bytes) = match args.deterministic {
        true => (settings, ALIKE_KV_BYTES),
        false => {
            (CudaSettings { load_format: LoadFormat::Safetensors, limits: LIMITS, ..settings }, KV_BYTES)
        }
    };
    let compared = |graphs: bool| -> Result<Comparisons, CommandError> {
        let of_subject = CudaSettings { graphs, ..settings.clone() };
        let mut subject = args.opened(folder, kv_bytes, &of_subject).map_err(CommandError::start)?;
        let model = subject.model();
        let prompts = match args.deterministic {
            true => ALIKE_PROMPTS.map(|len| any(len.min(longest(model)), model.vocab)).to_vec(),
            false => prompts(folder, model)?,
        };
        if args.stages.get() == 1 {
            return compare_with_itself(&mut subject, &prompts, N_STEPS).map_err(CommandError::work);
        }
        let settings = CudaSettings { graphs, stages: StageSplit::default(), ..settings.clone() };
        let mut one = CudaBackend::open(folder, kv_bytes, &settings).map_err(CommandError::start)?;
        compare(&mut one, &mut subject, &prompts, N_STEPS, Tolerance::NONE).map_err(CommandError::work)
    };
    let (recorded, launched) = (compared(true)?, compared(false)?);
    let model = folder.display().to_string();
    let with = if args.stages.get() == 1 { "itself, to the last bit" } else { "one stage, to the last bit" };
    Ok(ModelComparison::of(model, with, Tolerance::NONE, [recorded, launched]))
}

#[derive(Deserialize)]
struct Golden {
    #[serde(default)]
    prompts: Vec<GoldenPrompt>,
}

#[derive(Deserialize)]
struct GoldenPrompt {
    prompt_ids: Vec<u32>,
}

/// Returns the golden prompts of a model that has some, otherwise arbitrary tokens; and a long prompt.
fn prompts(folder: &Path, model: &ModelInfo) -> Result<Vec<Vec<TokenId>>, CommandError> {
    let tokens = |ids: Vec<u32>| ids.into_iter().map(TokenId).collect();
    let golden = match std::fs::read(folder.join("golden.json")) {
        Ok(bytes) => serde_json::from_slice::<Golden>(&bytes).map_err(CommandError::start)?.prompts,
        Err(_) => Vec::new(),
    };
    let mut prompts: Vec<Vec<TokenId>> = match golden.is_empty() {
        true => [5, 33, 16, 100].map(|len| any(len, model.vocab)).to_vec(),
        false => golden.into_iter().map(|prompt| tokens(prompt.prompt_ids)).collect(),
    };
    let config = ModelFolder::open(folder).map_err(CommandError::start)?.config;
    if config.mixture.is_none() || config.latent.is_some() {
        prompts.push(any(LONG_PROMPT.min(longest(model)), model.vocab));
    }
    Ok(prompts)
}

/// Returns the length of the longest prompt whose continuation has room.
fn longest(model: &ModelInfo) -> u32 {
    model.context_tokens.saturating_sub(N_STEPS as u32)
}

/// Makes a prompt of `len` arbitrary tokens, different for each length.
fn any(len: u32, vocab: u32) -> Vec<TokenId> {
    (0..len).map(|nth| TokenId((nth * 7 + len) % vocab)).collect()
}
