//! A model before it is loaded: the whole of it, or the share that one of several processes computes.

use std::io;
use std::num::NonZero;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use kernels::cpu::Processor;
use kv_cache::KvMemory;
use types::{KvLayout, ModelInfo, ProcessShare, StageLayers};

use super::layout::layout;
use super::loading::LoadedModel;
use super::mate::{Mate, RanksOfMates};
use super::rank::{Rank, StagePlace};
use super::settings::CpuSettings;
use super::stage::Stage;
use crate::backend::remote::{StageMates, StageWeights};
use crate::error::{LoadError, OpenError};
use crate::kv_room::{KvRoom, n_blocks, not_taken};
use crate::load::ModelFolder;
use crate::model::ranks::OtherRanks;

/// A model whose config is read and whose stages are known.
#[derive(Debug)]
pub(super) struct PreparedModel {
    pub(super) folder: ModelFolder,
    pub(super) settings: CpuSettings,
    pub(super) layout: KvLayout,
    /// All stages of the model.
    pub(super) all_stages: StageLayers,
    /// The stages and the ranks that this process computes.
    pub(super) stages: StageLayers,
    /// The number of stages before them.
    pub(super) first_stage: usize,
    /// The processors of the ranks of each of these stages.
    processors: Vec<Vec<Processor>>,
    pub(super) kv_bytes: usize,
}

/// The other processes of a stage that this process computes a share of.
#[derive(Debug, Default)]
pub(super) struct StageOthers {
    /// Where the ranks of this process exchange columns with the others.
    pub(super) mates: Option<Arc<dyn StageMates>>,
    /// The processes that compute for this one, if it is the head.
    pub(super) processes: Vec<Mate>,
}

impl PreparedModel {
    /// Reads a model's config. This process computes all stages.
    pub(super) fn whole(folder: &Path, kv: KvRoom, settings: &CpuSettings) -> Result<Self, OpenError> {
        Self::prepare(folder, kv, settings, None)
    }

    /// Reads a model's config. This process computes a share of it.
    pub(super) fn of_process(
        folder: &Path,
        kv: KvRoom,
        settings: &CpuSettings,
        share: ProcessShare,
    ) -> Result<Self, OpenError> {
        Self::prepare(folder, kv, settings, Some(share))
    }

    fn prepare(
        folder: &Path,
        kv: KvRoom,
        settings: &CpuSettings,
        only: Option<ProcessShare>,
    ) -> Result<Self, OpenError> {
        kv.check_on_host()?;
        let folder = ModelFolder::open(folder)?;
        let all = settings.stages.over(folder.config.n_layers as u16).map_err(LoadError::Stages)?;
        let stages = match &only {
            None => all.clone(),
            Some(ProcessShare { stage, ranks }) => {
                all.only(Some(*stage)).map_err(LoadError::Stages)?.with_ranks(ranks.clone())
            }
        };
        let processors = processors(settings, &stages).map_err(LoadError::Threads)?;
        folder.config.log_unread_keys();
        let layout = layout(&folder.config, settings)?;
        let kv_bytes = kv.on_host(&layout, &stages, folder.config.context_tokens);
        let (settings, first_stage) = (settings.clone(), only.map_or(0, |share| share.stage));
        Ok(Self { folder, settings, layout, all_stages: all, stages, first_stage, processors, kv_bytes })
    }

    /// Returns the number of blocks for which this process has room. None is an error.
    pub(super) fn n_blocks(&self) -> Result<u32, OpenError> {
        n_blocks(&self.layout, &self.stages, self.kv_bytes)
    }

    pub(super) fn load(&self) -> Result<LoadedModel, LoadError> {
        let processor = self.processors.first().and_then(|of_stage| of_stage.first());
        let processor = processor.expect("there is a rank");
        let (mut layers, n_layers) = (self.stages.iter(), self.folder.config.n_layers);
        let first = layers.next().expect("there is a stage");
        let end = layers.last().unwrap_or(first.clone()).end;
        let layers = usize::from(first.start)..usize::from(end).min(n_layers);
        LoadedModel::load(&self.folder, &self.settings, processor, layers)
    }

    pub(super) fn memory(&self, n_blocks: u32) -> Result<KvMemory, OpenError> {
        let memory = KvMemory::host_of_stages(self.layout.clone(), &self.stages, n_blocks);
        memory.map_err(|error| not_taken(&error))
    }

    /// Returns the description of the model, with the weights that other processes have loaded.
    pub(super) fn info(
        &self,
        loaded: &LoadedModel,
        memory: &KvMemory,
        others: &[StageWeights],
    ) -> Result<ModelInfo, LoadError> {
        let (config, layout) = (&self.folder.config, self.layout.clone());
        Ok(ModelInfo {
            name: self.folder.name(),
            context_tokens: KvMemory::longest(&layout, memory.n_blocks(), config.context_tokens) as u32,
            vocab: config.vocab as u32,
            eos_tokens: config.eos_tokens.clone(),
            fingerprint: loaded.fingerprint(&self.folder, &layout, &self.settings, others)?,
            layout,
        })
    }

    /// Starts the ranks of this process's stages. With `others`, there is one stage.
    pub(super) fn start(
        self,
        loaded: &LoadedModel,
        memory: &KvMemory,
        others: StageOthers,
    ) -> Result<Vec<Stage>, LoadError> {
        let Self { folder, stages, first_stage, processors, .. } = self;
        let config = &folder.config;
        let StageOthers { mates, processes } = others;
        let (mut mates, mut processes) = (mates.map(RanksOfMates), Some(processes));
        let of_stage = |(nth, (layers, processors)): (usize, (Range<u16>, Vec<Processor>))| {
            let layers = layers.start.into()..layers.end.into();
            let place = StagePlace { nth: first_stage + nth, layers, n_layers: config.n_layers };
            let mates = mates.take().map(|mates| Box::new(mates) as Box<dyn OtherRanks>);
            let ranks = Rank::all(processors, loaded, memory, config, &place, mates);
            Stage::new(ranks, processes.take().unwrap_or_default()).map_err(LoadError::Threads)
        };
        stages.iter().zip(processors).enumerate().map(of_stage).collect()
    }
}

/// Creates a processor for each rank of each stage of this process. They share the threads.
fn processors(settings: &CpuSettings, stages: &StageLayers) -> io::Result<Vec<Vec<Processor>>> {
    let n_ranks = stages.ranks(settings.ranks.get()).len();
    let each = settings.threads().get() / (n_ranks * stages.n_stages());
    let each = NonZero::new(each).unwrap_or(NonZero::<usize>::MIN);
    let of_stage = |_| (0..n_ranks).map(|_| Processor::new(settings.arithmetic, each)).collect();
    stages.iter().map(of_stage).collect()
}
