//! The stage that one of several processes of a node computes.

use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use kv_cache::{FenceSignal, KvMemory};
use types::StageLayers;

use super::CpuBackend;
use super::job::JobRow;
use super::prepared::PreparedModel;
use super::rank::{Outcomes, Step};
use super::remote::{RemoteStage, StageInput, StageLost, StageResults, StageWeights};
use super::settings::CpuSettings;
use super::stage::Stage;
use crate::error::OpenError;
use crate::kv_room::KvRoom;
use crate::model::Scratch;
use crate::model::ranks::RankFence;

/// A stage whose model's config is read, and whose weights are not loaded.
#[derive(Debug)]
pub struct PreparedStage {
    prepared: PreparedModel,
    n_blocks: u32,
}

/// A stage that computes what another process sends.
#[derive(Debug)]
pub struct StageProcess {
    memory: KvMemory,
    weights: StageWeights,
    layers: Range<u16>,
    width: usize,
    /// Locked while a step is computed: the stage computes one at a time.
    stage: Mutex<Stage>,
}

impl PreparedStage {
    /// Reads the config of a model for one of its stages. The settings say how many there are.
    pub fn prepare(folder: &Path, kv: KvRoom, settings: &CpuSettings, nth: usize) -> Result<Self, OpenError> {
        let prepared = PreparedModel::stage(folder, kv, settings, nth)?;
        let n_blocks = prepared.n_blocks()?;
        Ok(Self { prepared, n_blocks })
    }

    /// Returns the number of blocks for which this process has room.
    pub fn n_blocks(&self) -> u32 {
        self.n_blocks
    }

    /// Returns the layers of each stage of the model.
    pub fn layers_of_stages(&self) -> &StageLayers {
        &self.prepared.all_stages
    }

    /// Loads the stage's weights, and takes memory for `n_blocks` blocks.
    pub fn open(self, n_blocks: u32) -> Result<StageProcess, OpenError> {
        let Self { prepared, .. } = self;
        let loaded = prepared.load()?;
        let memory = prepared.memory(n_blocks)?;
        let weights = loaded.described(&prepared.layout);
        let width = prepared.folder.config.hidden;
        let layers = prepared.stages.iter().next().expect("there is a stage");
        let stage = prepared.start(&loaded, &memory)?.into_iter().next().expect("there is a stage");
        Ok(StageProcess { memory, weights, layers, width, stage: Mutex::new(stage) })
    }

    /// Loads the weights of the last stage, and makes the backend of the whole model. `remote` are the stages before it,
    /// in order.
    pub fn open_head(self, n_blocks: u32, remote: &[Arc<dyn RemoteStage>]) -> Result<CpuBackend, OpenError> {
        CpuBackend::load(self.prepared, n_blocks, remote)
    }
}

impl StageProcess {
    pub fn weights(&self) -> &StageWeights {
        &self.weights
    }

    pub fn memory(&self) -> &KvMemory {
        &self.memory
    }

    /// Returns the layers that this process computes.
    pub fn layers(&self) -> Range<u16> {
        self.layers.clone()
    }

    /// Computes one step, and raises `signal` as layers are written.
    pub fn compute(&self, input: StageInput, signal: FenceSignal) -> Result<StageResults, StageLost> {
        let n_tokens: usize = input.rows.iter().map(|row| row.tokens.len()).sum();
        let n_expected = if self.layers.start == 0 { 0 } else { n_tokens * self.width };
        if input.hidden.len() != n_expected {
            return Err(StageLost("the rows of a step are not those of its tokens".to_owned()));
        }
        let written = RankFence::new(signal, usize::from(self.memory.n_ranks()));
        let stage = self.stage.lock().unwrap_or_else(PoisonError::into_inner);
        let results = stage.results(step_of(input, written), &Scratch::default());
        results.ok_or_else(|| StageLost("a compute thread has ended".to_owned()))
    }
}

/// Makes the step that the stage's ranks compute.
fn step_of(input: StageInput, written: RankFence) -> Step {
    let StageInput { rows, hidden, routing_leads } = input;
    let outcomes: Outcomes = rows.iter().map(|row| row.outcome.clone()).collect();
    Step {
        resolved: outcomes.iter().map(|_| Ok(())).collect(),
        rows: rows.into_iter().map(|row| JobRow::of_stage(row.tokens, row.start, row.tables)).collect(),
        written,
        outcomes,
        hidden,
        routing_leads,
    }
}
