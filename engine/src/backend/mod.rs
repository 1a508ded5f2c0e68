//! The contract of a backend, and the table of all backends.

use std::fmt::Debug;
use std::num::NonZero;
use std::ops::Range;
use std::path::{Path, PathBuf};

use kv_cache::KvMemory;
use tracing::warn;
use types::{ModelInfo, StageSplit};

use crate::error::{BackendError, OpenError};
use crate::kv_room::KvRoom;
use crate::step::{PendingStep, StepBatch, StepOutput};

pub mod asleep;
pub mod cpu;
pub mod cuda;
pub mod device;
#[cfg(any(test, feature = "test-support"))]
pub mod flaky;
pub mod mock;
pub mod process;
pub mod remote;

pub use asleep::{Asleep, SleepFailed, WakeFailed};
pub use device::Device;

/// The maximum number of steps that are launched and not yet collected, on a backend with one pipeline stage.
pub const STEPS_IN_FLIGHT_MAX: usize = 2;

/// Computes KV from tokens, and the next tokens from KV.
///
/// **Who calls it.** One scheduler worker, from its own thread. A backend has no requests, sockets or deadlines; it
/// sees slots, positions and block tables.
///
/// **In which order.** `launch`, and for each launched step one `collect`, oldest first. The next step may be launched
/// before the previous one is collected, so that the device never waits for the host; at most
/// [`steps_in_flight_max`](Self::steps_in_flight_max) are in flight. The device runs steps in launch order, so a row may
/// use KV that the steps in flight write, and the token that one of them samples
/// ([`RowInput::Previous`](crate::RowInput::Previous)).
/// `Previous` means the token that this slot samples in the latest launched step in which it has a sampling row. That
/// step is in flight, and it is the only one in flight in which the slot samples.
///
/// ```text
/// right: launch(1) launch(2) collect(1) launch(3) collect(2) collect(3)
/// wrong: launch(1) launch(2) collect(2)          the order differs
/// wrong: launch(1) launch(2) launch(3)           too many in flight, if `steps_in_flight_max` is 2
/// wrong: launch(1), drop                         each step must be collected, even if its tokens are not used
/// ```
///
/// **Who owns what.** The memory is shared; the caller holds the blocks by lease. A launched step reads and
/// writes the blocks in its rows' tables until it is collected. The caller keeps those leases until then,
/// even if the sequence ends. A block is written from `start` to `start + n_tokens` only, and never while it
/// is shared.
///
/// **What it promises.** A row's token and KV depend on that row's tokens, sampling and positions alone: the
/// same alone, batched, in chunks, recomputed, or with KV from another node. The step's fence opens for a
/// layer when that layer's KV of *all* rows is written. A failed row has its error at its own index of the
/// output.
///
/// **Sleep.** Between sequences the caller can put it to [`sleep`](Self::sleep). That turns it into an
/// [`Asleep`], which can be turned back into a backend.
///
/// **What it never does.** It does not stop a sequence. It does not sample forbidden tokens
/// ([`SampleSpec::forbids`](crate::SampleSpec::forbids)), but the caller decides what a sampled token means.
/// A backend waits only for its device.
pub trait Backend: Debug + Send + 'static {
    fn model(&self) -> &ModelInfo;

    /// Returns the KV memory. All block tables refer to blocks in it.
    fn memory(&self) -> &KvMemory;

    /// Starts one step and does not wait for it. After an error, nothing has started.
    fn launch(&mut self, batch: StepBatch<'_>) -> Result<PendingStep, BackendError>;

    /// Waits for the oldest step. After an error, its KV must not be read, and layers whose fence was not
    /// open yet have a broken fence.
    fn collect(&mut self, step: PendingStep) -> Result<StepOutput, BackendError>;

    /// Returns the path of the model's `tokenizer.json`; `None` for a model without a folder. Grammars need the bytes of
    /// tokens.
    fn tokenizer_file(&self) -> Option<PathBuf> {
        None
    }

    /// Returns the most alternatives that the backend reports beside each token of a prompt
    /// ([`Row::prompt_logprobs`](crate::Row::prompt_logprobs)); `None` if it has no log-probabilities of prompts. No row may
    /// ask for more.
    fn prompt_top_max(&self) -> Option<u8> {
        None
    }

    /// Returns the maximum number of steps that are launched and not yet collected: one more than the device computes at
    /// the same time.
    fn steps_in_flight_max(&self) -> usize {
        STEPS_IN_FLIGHT_MAX
    }

    /// Returns the number of rows that the device multiplies together in steps of at least twice this number. A step with
    /// one row more than a multiple of it takes about as long as a step with the next multiple.
    fn rows_together(&self) -> usize {
        1
    }

    /// Returns whether a launched step runs without the host. If so, the next step may be launched late in
    /// this one.
    fn runs_by_itself(&self) -> bool {
        false
    }

    /// Returns the memory of weights and KV. Keeps small objects that are slow to make: code, graphs,
    /// addresses.
    ///
    /// Fails without effect while a launched step is not collected or another clone of
    /// [`memory`](Self::memory) exists.
    fn sleep(self: Box<Self>) -> Result<Box<dyn Asleep>, SleepFailed>;

    /// Returns the bytes in use on the backend's GPUs, by all processes; without GPUs, this process's
    /// resident memory. `None` if unknown.
    fn used_bytes(&self) -> Option<u64>;
}

/// The settings that a backend is opened with.
#[derive(Clone, Debug)]
pub struct EngineSettings {
    /// The model: `mock`, `mock:NAME` or `mock:FILE.toml`; `cpu:FOLDER`, `cuda:FOLDER`, or a folder's path
    /// alone.
    pub model: String,
    /// The device for a model that is given by its folder alone.
    pub device: Device,
    /// The architecture of GPU kernels: see [`CudaSettings::arch`](cuda::CudaSettings::arch).
    pub gpu_arch: Option<String>,
    /// Whether a row's results do not depend on other rows: see
    /// [`CudaSettings::deterministic`](cuda::CudaSettings::deterministic). The other backends are always
    /// deterministic.
    pub deterministic: bool,
    /// The size limits of one step. A GPU backend allocates memory for the largest step at the start.
    pub limits: StepLimits,
    /// The number of tensor-parallel ranks, which divide the heads: groups of threads, or GPUs.
    pub ranks: NonZero<u16>,
    /// The pipeline stages, which divide the layers: groups of threads, or of GPUs.
    pub stages: StageSplit,
    pub experts: ExpertPlacement,
    pub kv: KvRoom,
    /// How a mock's simulated costs pass. Real models ignore it.
    pub pace: mock::Pace,
    /// The settings for a real model on the CPU.
    pub cpu: cpu::CpuSettings,
}

/// Where the experts of a mixture are, if several GPUs compute it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertPlacement {
    /// Each rank has some columns of every expert's inner layer.
    Cut,
    /// Each rank has whole experts: every n-th one, for n ranks. On GPUs only.
    Spread,
}

impl ExpertPlacement {
    /// Refuses experts that are spread, for backends that do not run on GPUs.
    pub fn ensure_cut(self, what: &str) -> Result<(), OpenError> {
        match self {
            Self::Cut => Ok(()),
            Self::Spread => Err(OpenError::Experts(format!(
                "\"spread\" is set, and {what} computes the model: experts are spread over GPUs only"
            ))),
        }
    }
}

/// The size limits of one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepLimits {
    /// The most tokens of all rows together.
    pub tokens: usize,
    pub rows: usize,
}

impl Default for StepLimits {
    fn default() -> Self {
        Self { tokens: 512, rows: 256 }
    }
}

impl EngineSettings {
    /// Returns the numbers of the GPUs that compute the model. With `auto` the machine may have none.
    pub fn gpus(&self) -> Range<usize> {
        let is_folder = Path::new(&self.model).join("config.json").exists();
        let is_on_gpu = if is_folder { self.device != Device::Cpu } else { self.model.starts_with("cuda:") };
        if is_on_gpu { self.cuda().gpus() } else { 0..0 }
    }

    /// Returns the settings of a model on the CPU.
    pub fn on_cpu(&self) -> cpu::CpuSettings {
        cpu::CpuSettings { ranks: self.ranks, stages: self.stages.clone(), ..self.cpu.clone() }
    }

    /// Refuses several stages, for backends that have one.
    fn check_one_stage(&self, what: &str) -> Result<(), OpenError> {
        match self.stages.n_stages.get() {
            1 => Ok(()),
            n => Err(OpenError::Stages(format!("{n} are set, and {what} has one"))),
        }
    }

    /// Returns the part of the settings that a GPU backend takes.
    pub fn cuda(&self) -> cuda::CudaSettings {
        cuda::CudaSettings {
            ordinal: if let Device::Cuda(ordinal) = self.device { ordinal } else { 0 },
            ranks: self.ranks,
            stages: self.stages.clone(),
            experts: self.experts,
            arch: self.gpu_arch.clone(),
            deterministic: self.deterministic,
            limits: self.limits,
            load_format: self.cpu.load_format,
            kv_dtype: self.cpu.kv_dtype,
            quantize: self.cpu.quantize,
            activations: self.cpu.activations,
            ..cuda::CudaSettings::default()
        }
    }
}

type Constructor = fn(&EngineSettings, Option<&str>) -> Result<Box<dyn Backend>, OpenError>;

/// The backends by the word before the colon. A new backend is one file and one line in this table.
const BACKENDS: &[(&str, Constructor)] = &[("mock", mock::open), ("cpu", cpu::open), ("cuda", cuda::open)];

/// Opens the model that the settings name.
pub fn open(settings: &EngineSettings) -> Result<Box<dyn Backend>, OpenError> {
    if Path::new(&settings.model).join("config.json").exists() {
        return open_folder(settings);
    }
    let (kind, name) = match settings.model.split_once(':') {
        Some((kind, name)) => (kind, Some(name)),
        None => (settings.model.as_str(), None),
    };
    let known = |name: &str| BACKENDS.iter().find(|(known, _)| *known == name);
    let Some((_, constructor)) = known(kind) else {
        let known: Vec<&str> = BACKENDS.iter().map(|(name, _)| *name).collect();
        return Err(OpenError::UnknownModel { name: settings.model.clone(), known: known.join(", ") });
    };
    constructor(settings, name)
}

/// Opens a model that is given by its folder, on the device of the settings.
fn open_folder(settings: &EngineSettings) -> Result<Box<dyn Backend>, OpenError> {
    let folder = Some(settings.model.as_str());
    match settings.device {
        Device::Cpu => cpu::open(settings, folder),
        Device::Cuda(_) => cuda::open(settings, folder),
        Device::Auto => match cuda::open(settings, folder) {
            Err(error) if error.is_no_gpu() => {
                warn!(%error, "no GPU can be used, the CPU computes the model");
                cpu::open(settings, folder)
            }
            opened => opened,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mock::Pace;

    fn opened(model: &str, kv_bytes: usize) -> Result<Box<dyn Backend>, OpenError> {
        let cpu = cpu::CpuSettings::default();
        let (device, limits) = (Device::Cpu, StepLimits::default());
        let (model, gpu_arch, ranks) = (model.to_owned(), None, NonZero::<u16>::MIN);
        open(&EngineSettings {
            model,
            device,
            gpu_arch,
            deterministic: false,
            limits,
            ranks,
            stages: StageSplit::default(),
            experts: ExpertPlacement::Cut,
            kv: kv_bytes.into(),
            pace: Pace::Modelled,
            cpu,
        })
    }

    #[test]
    fn a_model_is_found_by_name() {
        let backend = opened("mock", 1 << 20).expect("the plain mock");
        assert_eq!(backend.model().name, "mock");
        assert!(backend.memory().n_blocks() > 0);
        let error = opened("nonsense", 1 << 20).expect_err("no such backend");
        assert_eq!(error.to_string(), "no model \"nonsense\": known are mock, cpu, cuda");
    }

    #[test]
    fn memory_that_holds_no_block_is_refused() {
        let error = opened("mock", 10).expect_err("ten bytes");
        assert_eq!(error.to_string(), "10 bytes of KV memory hold no block of 8192 bytes");
    }
}
