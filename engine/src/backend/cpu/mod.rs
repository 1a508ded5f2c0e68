//! The CPU backend. It is exact, and the reference for the other backends.
//!
//! Separate threads compute a step, so `launch` returns at once. The whole batch goes through each layer
//! together. A row gets the same bits alone and in any batch (see `kernels::cpu`). With several ranks, each
//! rank has its own thread and its own memory for KV. The bits stay the same (see [`crate::model::ranks`]).
//! With several stages, each stage has its own ranks, for its own layers, and steps flow through all stages
//! (see `pipeline`).

mod elsewhere;
mod intake;
mod job;
mod layout;
mod loading;
mod mate;
mod outlet;
mod pipeline;
mod prepared;
pub mod process;
mod rank;
mod rows;
mod settings;
mod stage;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kv_cache::{FenceSignal, KvMemory};
use types::ModelInfo;

pub use kernels::cpu::Format;
pub(super) use layout::{groups, latent_groups, log_latents, log_stages};
pub use settings::{CpuSettings, LoadFormat};

use super::asleep::{self, Asleep, ClosedBackend, SleepFailed};
use super::remote::{RemoteProcess, StageMates, weights_of};
use super::{Backend, EngineSettings};
use crate::error::{BackendError, LoadError, OpenError};
use crate::kv_room::KvRoom;
use crate::step::{PendingStep, StepBatch, StepOutput};
use elsewhere::Elsewhere;
use job::{JobRow, StepJob};
use mate::{LostReason, Mate};
use pipeline::{Pipeline, PipelineParts, PipelineStage};
use prepared::{PreparedModel, StageOthers};

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
    /// The number of other processes.
    n_remote: usize,
}

/// Returns the CPU's constructor in the table of backends. `name` is a model's folder.
pub(super) fn open(engine: &EngineSettings, name: Option<&str>) -> Result<Box<dyn Backend>, OpenError> {
    engine.experts.ensure_cut("a processor")?;
    let folder = name.unwrap_or_default();
    Ok(Box::new(CpuBackend::open(Path::new(folder), engine.kv, &engine.on_cpu())?))
}

impl CpuBackend {
    /// Loads a model from its folder. Resident memory is its weights, its KV and a step's workspace.
    pub fn open(folder: &Path, kv: impl Into<KvRoom>, settings: &CpuSettings) -> Result<Self, OpenError> {
        let prepared = PreparedModel::whole(folder, kv.into(), settings)?;
        let n_blocks = prepared.n_blocks()?;
        Self::load(prepared, n_blocks, &[], None)
    }

    /// Loads the stages of this process. `remote` are the other processes, and `mates` those with ranks of the last stage.
    fn load(
        prepared: PreparedModel,
        n_blocks: u32,
        remote: &[RemoteProcess],
        mates: Option<Arc<dyn StageMates>>,
    ) -> Result<Self, OpenError> {
        let loaded = prepared.load()?;
        let memory = prepared.memory(n_blocks)?;
        log_latents(&prepared.folder.config, &memory);
        log_stages(&prepared.stages, &memory);
        let others = weights_of(remote, &loaded.described(&prepared.layout).model)?;
        let model = prepared.info(&loaded, &memory, &others)?;
        // The number of bytes is kept, so that waking allocates the same amount, whatever the free memory is
        // then.
        let PreparedModel { folder, kv_bytes, settings, .. } = &prepared;
        let (folder, settings) = (folder.path().to_owned(), settings.clone());
        let opened = OpenParams { folder, kv_bytes: *kv_bytes, settings, n_remote: remote.len() };
        let (width, weight_bytes) = (prepared.folder.config.hidden, loaded.formats.bytes());
        let (lost, first_stage) = (LostReason::default(), prepared.first_stage);
        let n_steps = prepared.all_stages.n_stages() + 1;
        let of_stage = |nth| -> Result<Vec<Mate>, OpenError> {
            let processes = remote.iter().filter(|process| process.share.stage == nth);
            let mates = processes.map(|process| Mate::start(process, n_steps, &lost));
            Ok(mates.collect::<Result<_, _>>().map_err(LoadError::Threads)?)
        };
        let elsewhere = |nth| {
            of_stage(nth).map(|mates| PipelineStage::Elsewhere(Elsewhere { processes: mates.into(), width }))
        };
        let mut stages = (0..first_stage).map(elsewhere).collect::<Result<Vec<_>, _>>()?;
        let others = StageOthers { mates, processes: of_stage(first_stage)? };
        stages.extend(prepared.start(&loaded, &memory, others)?.into_iter().map(PipelineStage::Here));
        Self::start(model, memory, stages, weight_bytes, opened, lost)
    }

    /// Refuses sleep of a node of several processes.
    fn check_one_process(&self) -> Result<(), BackendError> {
        match self.opened.n_remote {
            0 => Ok(()),
            n => Err(BackendError::Held(format!("{n} other processes of this node do not sleep"))),
        }
    }

    /// Returns the bytes of all weight matrices, which every decode step reads.
    pub fn weight_bytes(&self) -> usize {
        self.weight_bytes
    }

    fn start(
        model: ModelInfo,
        memory: KvMemory,
        stages: Vec<PipelineStage>,
        weight_bytes: usize,
        opened: OpenParams,
        lost: LostReason,
    ) -> Result<Self, OpenError> {
        let steps_in_flight_max = stages.len() + 1;
        let (vocab, eos_tokens) = (model.vocab as usize, model.eos_tokens.clone());
        let n_ranks = memory.n_ranks();
        let parts = PipelineParts { stages, n_ranks, vocab, eos_tokens, steps_in_flight_max, lost };
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
        if let Err(why) = self
            .check_one_process()
            .and_then(|()| asleep::check_idle(self.in_flight.len()))
            .and_then(|()| asleep::check_not_held(self.memory.n_holders(), self.n_holders))
        {
            return Err(SleepFailed { backend: self, why });
        }
        let OpenParams { folder, kv_bytes, settings, .. } = self.opened.clone();
        Ok(Box::new(ClosedBackend::close(*self, move || Self::open(&folder, kv_bytes, &settings))))
    }

    fn used_bytes(&self) -> Option<u64> {
        asleep::resident_bytes()
    }
}
