//! The stage, or the ranks of one, that one of several processes of a node computes.

use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

use kv_cache::FenceSignal;
use types::{Fingerprint, ProcessShare, StageLayers};

use super::CpuBackend;
use super::job::JobRow;
use super::loading::LoadedModel;
use super::prepared::{PreparedModel, StageOthers};
use super::rank::{Outcomes, Step};
use super::rows::numbers_of;
use super::settings::CpuSettings;
use super::stage::Stage;
use crate::backend::remote::{
    LoadedStage, RemoteProcess, StageInput, StageLost, StageMates, StageProcess, StageResults,
};
use crate::error::OpenError;
use crate::kv_room::KvRoom;
use crate::model::Scratch;
use crate::model::ranks::RankFence;

/// A process's share of a model whose config is read, and whose weights are not loaded.
#[derive(Debug)]
pub struct PreparedStage {
    prepared: PreparedModel,
    n_blocks: u32,
}

/// A stage that computes what another process sends.
#[derive(Debug)]
pub struct CpuStage {
    loaded: LoadedStage,
    width: usize,
    begun: SyncSender<(StageInput, FenceSignal)>,
    /// Locked while a step is computed: the stage computes one at a time.
    computing: Mutex<Computing>,
}

/// What computes the steps that were begun.
#[derive(Debug)]
struct Computing {
    begun: Receiver<(StageInput, FenceSignal)>,
    stage: Stage,
}

/// Limit of steps that were begun and not computed. A head has one more in flight than there are stages.
const BEGUN_MAX: usize = 256;

impl PreparedStage {
    /// Reads the config of a model for one of its processes. The settings say how many stages and ranks there are.
    pub fn prepare(
        folder: &Path,
        kv: KvRoom,
        settings: &CpuSettings,
        share: ProcessShare,
    ) -> Result<Self, OpenError> {
        let prepared = PreparedModel::of_process(folder, kv, settings, share)?;
        let n_blocks = prepared.n_blocks()?;
        Ok(Self { prepared, n_blocks })
    }

    /// Returns the number of blocks for which this process has room.
    pub fn n_blocks(&self) -> u32 {
        self.n_blocks
    }

    /// Returns the fingerprint that all processes of a node share.
    pub fn fingerprint(&self) -> Result<Fingerprint, OpenError> {
        let PreparedModel { folder, layout, settings, .. } = &self.prepared;
        Ok(LoadedModel::fingerprint_before(folder, layout, settings)?)
    }

    /// Returns the layers of each stage of the model.
    pub fn layers_of_stages(&self) -> &StageLayers {
        &self.prepared.all_stages
    }

    /// Loads the stage's weights, and takes memory for `n_blocks` blocks. `mates` has the stage's other ranks.
    pub fn open(self, n_blocks: u32, mates: Option<Arc<dyn StageMates>>) -> Result<CpuStage, OpenError> {
        let Self { prepared, .. } = self;
        let model = prepared.load()?;
        let memory = prepared.memory(n_blocks)?;
        let weights = model.described(&prepared.layout);
        let width = prepared.folder.config.hidden;
        let layers = prepared.stages.iter().next().expect("there is a stage");
        let others = StageOthers { mates, processes: Vec::new() };
        let stage = prepared.start(&model, &memory, others)?.into_iter().next().expect("there is a stage");
        let (sender, begun) = sync_channel(BEGUN_MAX);
        let computing = Mutex::new(Computing { begun, stage });
        let loaded = LoadedStage { weights, memory, layers };
        Ok(CpuStage { loaded, width, begun: sender, computing })
    }

    /// Loads the weights of the last stage, and makes the backend of the whole model. `remote` are the other processes, and
    /// `mates` those with ranks of the last stage.
    pub fn open_head(
        self,
        n_blocks: u32,
        remote: &[RemoteProcess],
        mates: Option<Arc<dyn StageMates>>,
    ) -> Result<CpuBackend, OpenError> {
        CpuBackend::load(self.prepared, n_blocks, remote, mates)
    }
}

impl StageProcess for CpuStage {
    fn loaded(&self) -> &LoadedStage {
        &self.loaded
    }

    fn begin(&self, input: StageInput, signal: FenceSignal) -> Result<(), StageLost> {
        self.begun.try_send((input, signal)).map_err(|_| StageLost::too_many_steps())
    }

    fn finish(&self) -> Result<StageResults, StageLost> {
        let Computing { begun, stage } = &*self.computing.lock().unwrap_or_else(PoisonError::into_inner);
        let (input, signal) = begun.recv().map_err(|_| StageLost("no step was begun".to_owned()))?;
        let n_tokens: usize = input.rows.iter().map(|row| row.tokens.len()).sum();
        let n_expected = if self.loaded.layers.start == 0 { 0 } else { n_tokens * self.width };
        let hidden = numbers_of(&input.hidden).filter(|hidden| hidden.len() == n_expected);
        let hidden = hidden.ok_or_else(StageLost::other_step)?;
        let written = Arc::new(RankFence::new(signal, self.loaded.memory.ranks()));
        let results = stage.results(step_of(input, hidden, written), &Scratch::default());
        results.ok_or_else(|| StageLost("a compute thread has ended".to_owned()))
    }
}

/// Makes the step that the stage's ranks compute.
fn step_of(input: StageInput, hidden: Vec<f32>, written: Arc<RankFence>) -> Step {
    let StageInput { rows, routing_leads, .. } = input;
    let outcomes: Outcomes = rows.iter().map(|row| row.outcome.clone()).collect();
    Step {
        resolved: outcomes.iter().map(|_| Ok(())).collect(),
        rows: rows.into_iter().map(JobRow::of_process).collect(),
        written,
        outcomes,
        hidden,
        routing_leads,
    }
}
