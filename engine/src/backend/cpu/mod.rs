//! The CPU backend. It is exact, and the reference for the other backends.
//!
//! A separate thread computes a step, so `launch` returns at once. The whole batch goes through each layer
//! together. A row gets the same bits alone and in any batch (see `kernels::cpu`). With several ranks, each
//! rank has its own thread and its own memory for KV. The bits stay the same (see [`crate::model::ranks`]).

mod compute;
mod job;
mod rank;
mod settings;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::io;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use kernels::cpu::{Arithmetic, Processor};
use kv_cache::{FenceSignal, KvMemory};
use tracing::info;
use types::layout::{Attention, LayerGroup, LayerShape, Shard};
use types::{Fingerprint, KvDtype, KvLayout, ModelInfo};

pub use settings::{CpuSettings, LoadFormat};

use super::asleep::{self, Asleep, ClosedBackend, SleepFailed};
use super::{Backend, EngineSettings, STEPS_IN_FLIGHT_MAX};
use crate::error::{BackendError, LoadError, OpenError};
use crate::kv_room::{KvRoom, n_blocks, not_taken};
use crate::load::weights::{HasBlocks, LoadedFormats};
use crate::load::{Checkpoint, Dummy, ModelFolder, Quantize, Weights, fingerprint, tensors};
use crate::model::{ActivationFormat, Decoder, ModelConfig};
use crate::step::{PendingStep, StepBatch, StepOutput};
use compute::Compute;
use job::{JobRow, StepJob};
use rank::Rank;

/// The CPU backend: a model in memory, and its compute thread.
#[derive(Debug)]
pub struct CpuBackend {
    model: ModelInfo,
    memory: KvMemory,
    /// The number of clones of the memory that the backend itself holds.
    n_holders: usize,
    opened: OpenParams,
    /// The queue to the compute thread; `None` after the thread was told to end.
    jobs: Option<SyncSender<StepJob>>,
    results: Receiver<StepOutput>,
    in_flight: VecDeque<u64>,
    n_launched: u64,
    thread: Option<thread::JoinHandle<()>>,
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
    let settings = CpuSettings { ranks: engine.ranks, ..engine.cpu.clone() };
    Ok(Box::new(CpuBackend::open(Path::new(folder), engine.kv, &settings)?))
}

impl CpuBackend {
    /// Loads a model from its folder. Resident memory is its weights, its KV and a step's workspace.
    pub fn open(folder: &Path, kv: impl Into<KvRoom>, settings: &CpuSettings) -> Result<Self, OpenError> {
        let kv = kv.into();
        kv.check_on_host()?;
        let processors = processors(settings).map_err(LoadError::Threads)?;
        let processor = processors.first().expect("there is a rank");
        let folder = ModelFolder::open(folder)?;
        folder.config.log_unread_keys();
        let loaded = LoadedWeights::load(&folder, settings, processor)?;
        let layout = layout(&folder.config, settings)?;
        let kv_bytes = kv.on_host(&layout, folder.config.context_tokens);
        let memory = memory(&layout, kv_bytes)?;
        if folder.config.latent.is_some() && memory.n_ranks() > 1 {
            let (ranks, mib) = (memory.n_ranks(), memory.bytes() >> 20);
            info!(ranks, mib, "each rank holds all latents; this is the KV memory of all ranks");
        }
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
        let activations = loaded.activations;
        let ranks = Rank::all(processors, &loaded.model, &memory, &folder.config, activations);
        let compute = Compute::new(ranks, &folder.config).map_err(LoadError::Threads)?;
        Self::start(model, memory, compute, loaded.weight_bytes, opened)
    }

    /// Returns the bytes of all weight matrices, which every decode step reads.
    pub fn weight_bytes(&self) -> usize {
        self.weight_bytes
    }

    fn start(
        model: ModelInfo,
        memory: KvMemory,
        compute: Compute,
        weight_bytes: usize,
        opened: OpenParams,
    ) -> Result<Self, OpenError> {
        let (jobs, jobs_in) = sync_channel(STEPS_IN_FLIGHT_MAX);
        let (results_out, results) = sync_channel(STEPS_IN_FLIGHT_MAX);
        let thread = thread::Builder::new().name("compute-0".to_owned());
        let thread = thread.spawn(move || compute.run(&jobs_in, &results_out)).map_err(LoadError::Threads)?;
        Ok(Self {
            model,
            n_holders: memory.n_holders(),
            memory,
            opened,
            jobs: Some(jobs),
            results,
            in_flight: VecDeque::with_capacity(STEPS_IN_FLIGHT_MAX),
            n_launched: 0,
            thread: Some(thread),
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
        if self.in_flight.len() == STEPS_IN_FLIGHT_MAX {
            return Err(BackendError::Order(format!("{STEPS_IN_FLIGHT_MAX} steps are in flight already")));
        }
        let (signal, fence) = FenceSignal::new();
        let job = StepJob { rows: batch.rows.iter().map(JobRow::of).collect(), signal };
        // The channel has room for all steps that may be in flight, so this does not wait.
        let sent = self.jobs.as_ref().map(|jobs| jobs.send(job).is_ok());
        if sent != Some(true) {
            return Err(BackendError::DeviceLost("the compute thread has ended".to_owned()));
        }
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
        let lost = |_| BackendError::DeviceLost("the compute thread ended during a step".to_owned());
        self.results.recv().map_err(lost)
    }

    fn tokenizer_file(&self) -> Option<PathBuf> {
        Some(self.opened.folder.join("tokenizer.json"))
    }

    fn has_prompt_logprobs(&self) -> bool {
        true
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

impl Drop for CpuBackend {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // If the thread panicked, the panic is logged, and `collect` has returned that the device is
            // lost, so the result is ignored.
            let _ = thread.join();
        }
    }
}

/// Creates a processor for each rank. They share the threads.
fn processors(settings: &CpuSettings) -> io::Result<Vec<Processor>> {
    let n_ranks = usize::from(settings.ranks.get());
    let each = NonZero::new(settings.threads().get() / n_ranks).unwrap_or(NonZero::<usize>::MIN);
    (0..n_ranks).map(|_| Processor::new(settings.arithmetic, each)).collect()
}

// === loading ===

/// Weights in memory, and their description.
struct LoadedWeights {
    model: Arc<Decoder>,
    weights: String,
    weight_format: &'static str,
    has_blocks: HasBlocks,
    weight_bytes: usize,
    activations: ActivationFormat,
}

impl LoadedWeights {
    fn load(folder: &ModelFolder, settings: &CpuSettings, processor: &Processor) -> Result<Self, LoadError> {
        let config = &folder.config;
        let seen = LoadedFormats::default();
        let load = |source: &dyn crate::load::TensorSource| {
            let weights = Weights::new(source, processor, settings.quantize, &seen);
            Decoder::load(config, &weights).map(Arc::new)
        };
        let (model, weights) = match settings.load_format {
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
        Ok(Self { model, weights, weight_format, has_blocks, weight_bytes, activations })
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
fn latent_groups(n_layers: u16, width: u16) -> Vec<LayerGroup> {
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

fn memory(layout: &KvLayout, kv_bytes: usize) -> Result<KvMemory, OpenError> {
    KvMemory::host(layout.clone(), n_blocks(layout, kv_bytes)?).map_err(|error| not_taken(&error))
}
