//! The CPU backend. It is exact, and the reference for the other backends.
//!
//! Separate threads compute a step, so `launch` returns at once. The whole batch goes through each layer
//! together. A row gets the same bits alone and in any batch (see `kernels::cpu`). With several ranks, each
//! rank has its own thread and its own memory for KV. The bits stay the same (see [`crate::model::ranks`]).
//! With several stages, each stage has its own ranks, for its own layers, and steps flow through all stages
//! (see `pipeline`).

mod intake;
mod job;
mod outlet;
mod pipeline;
mod rank;
mod settings;
mod stage;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::io;
use std::num::NonZero;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kernels::cpu::{Arithmetic, Processor};
use kv_cache::{FenceSignal, KvMemory};
use tracing::info;
use types::layout::{Attention, LayerGroup, LayerShape, Shard};
use types::{Fingerprint, KvDtype, KvLayout, ModelInfo, StageLayers};

pub use settings::{CpuSettings, LoadFormat};

use super::asleep::{self, Asleep, ClosedBackend, SleepFailed};
use super::{Backend, EngineSettings};
use crate::error::{BackendError, LoadError, OpenError};
use crate::kv_room::{KvRoom, n_blocks, not_taken};
use crate::load::weights::{HasBlocks, LoadedFormats};
use crate::load::{Checkpoint, Dummy, ModelFolder, Quantize, Weights, fingerprint, tensors};
use crate::model::{ActivationFormat, Decoder, ModelConfig};
use crate::step::{PendingStep, StepBatch, StepOutput};
use job::{JobRow, StepJob};
use pipeline::{Pipeline, PipelineParts};
use rank::{Rank, StagePlace};
use stage::Stage;

/// The CPU backend: a model in memory, and its compute threads.
#[derive(Debug)]
pub struct CpuBackend {
    model: ModelInfo,
    memory: KvMemory,
    /// The number of clones of the memory that the backend itself holds.
    n_holders: usize,
    opened: OpenParams,
    pipeline: Pipeline,
    in_flight: VecDeque<u64>,
    steps_in_flight_max: usize,
    n_launched: u64,
    weight_bytes: usize,
}

/// The parameters of `open`, kept so that waking opens the same model.
#[derive(Clone, Debug)]
struct OpenParams {
    folder: PathBuf,
    kv_bytes: usize,
    settings: CpuSettings,
}

/// Returns the CPU's constructor in the table of backends. `name` is a model's folder.
pub(super) fn open(engine: &EngineSettings, name: Option<&str>) -> Result<Box<dyn Backend>, OpenError> {
    let folder = name.unwrap_or_default();
    let settings = CpuSettings { ranks: engine.ranks, stages: engine.stages.clone(), ..engine.cpu.clone() };
    Ok(Box::new(CpuBackend::open(Path::new(folder), engine.kv, &settings)?))
}

impl CpuBackend {
    /// Loads a model from its folder. Resident memory is its weights, its KV and a step's workspace.
    pub fn open(folder: &Path, kv: impl Into<KvRoom>, settings: &CpuSettings) -> Result<Self, OpenError> {
        let kv = kv.into();
        kv.check_on_host()?;
        let folder = ModelFolder::open(folder)?;
        let stages = settings.stages.over(folder.config.n_layers as u16).map_err(LoadError::Stages)?;
        let processors = processors(settings, &stages).map_err(LoadError::Threads)?;
        let processor = processors.first().and_then(|of_stage| of_stage.first()).expect("there is a rank");
        folder.config.log_unread_keys();
        let loaded = LoadedModel::load(&folder, settings, processor)?;
        let layout = layout(&folder.config, settings)?;
        let kv_bytes = kv.on_host(&layout, &stages, folder.config.context_tokens);
        let memory = memory(&layout, &stages, kv_bytes)?;
        log_latents(&folder.config, &memory);
        log_stages(&stages, &memory);
        // The number of bytes is kept, so that waking allocates the same amount, whatever the free memory is
        // then.
        let opened = OpenParams { folder: folder.path().to_owned(), kv_bytes, settings: settings.clone() };
        let model = ModelInfo {
            name: folder.name(),
            context_tokens: KvMemory::longest(&layout, memory.n_blocks(), folder.config.context_tokens)
                as u32,
            vocab: folder.config.vocab as u32,
            eos_tokens: folder.config.eos_tokens.clone(),
            fingerprint: loaded.fingerprint(&folder, &layout, processor, settings)?,
            layout,
        };
        let stages = started(processors, &loaded, &memory, &folder.config, &stages)?;
        Self::start(model, memory, stages, loaded.weight_bytes, opened)
    }

    /// Returns the bytes of all weight matrices, which every decode step reads.
    pub fn weight_bytes(&self) -> usize {
        self.weight_bytes
    }

    fn start(
        model: ModelInfo,
        memory: KvMemory,
        stages: Vec<Stage>,
        weight_bytes: usize,
        opened: OpenParams,
    ) -> Result<Self, OpenError> {
        let steps_in_flight_max = stages.len() + 1;
        let (vocab, eos_tokens) = (model.vocab as usize, model.eos_tokens.clone());
        let n_ranks = usize::from(memory.n_ranks());
        let parts = PipelineParts { stages, n_ranks, vocab, eos_tokens, steps_in_flight_max };
        let n_holders = memory.n_holders();
        let pipeline = Pipeline::start(parts).map_err(LoadError::Threads)?;
        Ok(Self {
            model,
            n_holders,
            memory,
            opened,
            pipeline,
            in_flight: VecDeque::with_capacity(steps_in_flight_max),
            steps_in_flight_max,
            n_launched: 0,
            weight_bytes,
        })
    }
}

impl Backend for CpuBackend {
    fn model(&self) -> &ModelInfo {
        &self.model
    }

    fn memory(&self) -> &KvMemory {
        &self.memory
    }

    fn launch(&mut self, batch: StepBatch<'_>) -> Result<PendingStep, BackendError> {
        if self.in_flight.len() == self.steps_in_flight_max {
            return Err(BackendError::Order(format!(
                "{} steps are in flight already",
                self.steps_in_flight_max
            )));
        }
        let (signal, fence) = FenceSignal::new();
        let job = StepJob { rows: batch.rows.iter().map(JobRow::of).collect(), signal };
        self.pipeline.launch(job)?;
        let number = self.n_launched;
        self.n_launched += 1;
        self.in_flight.push_back(number);
        Ok(PendingStep::new(number, fence, None))
    }

    fn collect(&mut self, step: PendingStep) -> Result<StepOutput, BackendError> {
        match self.in_flight.front() {
            None => return Err(BackendError::Order(format!("step {} is not in flight", step.step()))),
            Some(oldest) if *oldest != step.step() => {
                let order = format!("step {} was collected before step {oldest}", step.step());
                return Err(BackendError::Order(order));
            }
            Some(_) => self.in_flight.pop_front(),
        };
        self.pipeline.collect()
    }

    fn tokenizer_file(&self) -> Option<PathBuf> {
        Some(self.opened.folder.join("tokenizer.json"))
    }

    fn prompt_top_max(&self) -> Option<u8> {
        Some(u8::MAX)
    }

    fn steps_in_flight_max(&self) -> usize {
        self.steps_in_flight_max
    }

    fn sleep(self: Box<Self>) -> Result<Box<dyn Asleep>, SleepFailed> {
        if let Err(why) = asleep::check_idle(self.in_flight.len())
            .and_then(|()| asleep::check_not_held(self.memory.n_holders(), self.n_holders))
        {
            return Err(SleepFailed { backend: self, why });
        }
        let OpenParams { folder, kv_bytes, settings } = self.opened.clone();
        Ok(Box::new(ClosedBackend::close(*self, move || Self::open(&folder, kv_bytes, &settings))))
    }

    fn used_bytes(&self) -> Option<u64> {
        asleep::resident_bytes()
    }
}

/// Creates a processor for each rank of each stage. They share the threads.
fn processors(settings: &CpuSettings, stages: &StageLayers) -> io::Result<Vec<Vec<Processor>>> {
    let n_ranks = usize::from(settings.ranks.get());
    let each = settings.threads().get() / (n_ranks * stages.n_stages());
    let each = NonZero::new(each).unwrap_or(NonZero::<usize>::MIN);
    let of_stage = |_| (0..n_ranks).map(|_| Processor::new(settings.arithmetic, each)).collect();
    stages.iter().map(of_stage).collect()
}

/// Starts the ranks of all stages.
fn started(
    processors: Vec<Vec<Processor>>,
    model: &LoadedModel,
    memory: &KvMemory,
    config: &ModelConfig,
    stages: &StageLayers,
) -> Result<Vec<Stage>, LoadError> {
    let of_stage = |(nth, (layers, processors)): (usize, (Range<u16>, Vec<Processor>))| {
        let layers = layers.start.into()..layers.end.into();
        let place = StagePlace { nth, layers, n_layers: config.n_layers };
        Stage::new(Rank::all(processors, model, memory, config, &place)).map_err(LoadError::Threads)
    };
    stages.iter().zip(processors).enumerate().map(of_stage).collect()
}

/// Logs the bytes of KV of all ranks, if each of several holds all latents.
pub(super) fn log_latents(config: &ModelConfig, memory: &KvMemory) {
    if config.latent.is_some() && memory.n_ranks() > 1 {
        let (ranks, mib) = (memory.n_ranks(), memory.bytes() >> 20);
        info!(ranks, mib, "each rank holds all latents; this is the KV memory of all ranks");
    }
}

/// Logs the layers and the bytes of KV of each stage, if there are several.
pub(super) fn log_stages(stages: &StageLayers, memory: &KvMemory) {
    if stages.n_stages() > 1 {
        let layers: Vec<Range<u16>> = stages.iter().collect();
        info!(?layers, kv_bytes = ?memory.stage_bytes(), "pipeline stages opened");
    }
}

// === loading ===

/// A model's weights in memory, and their description.
struct LoadedModel {
    decoder: Arc<Decoder>,
    weights: String,
    weight_format: &'static str,
    has_blocks: HasBlocks,
    weight_bytes: usize,
    activations: ActivationFormat,
}

impl LoadedModel {
    fn load(folder: &ModelFolder, settings: &CpuSettings, processor: &Processor) -> Result<Self, LoadError> {
        let config = &folder.config;
        let seen = LoadedFormats::default();
        let load = |source: &dyn crate::load::TensorSource| {
            let weights = Weights::new(source, processor, settings.quantize, &seen);
            Decoder::load(config, &weights).map(Arc::new)
        };
        let (decoder, weights) = match settings.load_format {
            LoadFormat::Safetensors => {
                let checkpoint = Checkpoint::open(folder.path())?;
                tensors::check_all_read(config, &checkpoint)?;
                (load(&checkpoint)?, fingerprint::of_weights(&checkpoint))
            }
            LoadFormat::Dummy { seed } => (load(&Dummy { seed, processor })?, format!("dummy, seed {seed}")),
        };
        let weight_format = seen.main_format().map_or("none", |format| format.as_str());
        let activations = settings.activations.resolve(config.activations, seen.has_fp8())?;
        let (has_blocks, weight_bytes) = (seen.has_blocks(), seen.bytes());
        Ok(Self { decoder, weights, weight_format, has_blocks, weight_bytes, activations })
    }

    fn fingerprint(
        &self,
        folder: &ModelFolder,
        layout: &KvLayout,
        processor: &Processor,
        settings: &CpuSettings,
    ) -> Result<Fingerprint, LoadError> {
        let arithmetic = match processor.arithmetic() {
            Arithmetic::F32 => "f32",
            Arithmetic::Bf16 => "bf16",
        };
        let dtype = match settings.quantize {
            Quantize::No => self.weight_format.to_owned(),
            Quantize::Q8 | Quantize::Fp8 => settings.quantize.as_str().to_owned(),
        };
        let parts = [
            ("weights", self.weights.clone()),
            ("dtype", self.activations.added_to(self.has_blocks.added_to(dtype))),
            ("arithmetic", arithmetic.to_owned()),
            ("tokenizer", fingerprint::of_tokenizer(folder.tokenizer()?.as_deref())),
        ];
        Ok(fingerprint::fingerprint(layout, parts.into_iter().chain(folder.config.fingerprint_parts())))
    }
}

fn layout(config: &ModelConfig, settings: &CpuSettings) -> Result<KvLayout, LoadError> {
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
pub(super) fn latent_groups(n_layers: u16, width: u16) -> Vec<LayerGroup> {
    let layers = (0..n_layers).map(|layer| LayerShape { layer, n_kv_heads: 1, head_dim: width });
    vec![LayerGroup { attention: Attention::Latent, layers: layers.collect() }]
}

/// Groups layers by window, in the order of their first layers.
pub(super) fn groups(n_kv_heads: u16, head_dim: u16, windows: &[Option<u32>]) -> Vec<LayerGroup> {
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

fn memory(layout: &KvLayout, stages: &StageLayers, kv_bytes: usize) -> Result<KvMemory, OpenError> {
    let n_blocks = n_blocks(layout, stages, kv_bytes)?;
    KvMemory::host_of_stages(layout.clone(), stages, n_blocks).map_err(|error| not_taken(&error))
}
