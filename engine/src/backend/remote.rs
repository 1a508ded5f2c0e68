//! Stages and ranks in other processes: what a step and its results are there, the connections to them as traits, and a stage
//! that computes for another process.

use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use kernels::cpu::Format;
use kv_cache::{FenceSignal, KvMemory};
use types::{BlockIdx, Fingerprint, ProcessShare, TokenId};

pub use crate::error::StageLost;
use crate::error::{OpenError, RowError};

/// Another process of a node, and its part of the model.
#[derive(Clone, Debug)]
pub struct RemoteProcess {
    pub share: ProcessShare,
    pub stage: Arc<dyn RemoteStage>,
}

/// The processes that compute the other ranks of this process's stage.
pub trait StageMates: Debug + Send + Sync + 'static {
    /// Sends bytes to all of them, and waits for theirs, which come in the order of their ranks. All processes of a stage
    /// exchange the same number of times.
    fn exchange(&self, mine: Bytes) -> Result<Vec<Bytes>, StageLost>;

    /// Returns whether one of them is lost. For ranks that exchange nothing: an exchange fails by itself.
    fn is_lost(&self) -> bool;
}

/// The connections between the ranks of one stage that are in several processes.
#[derive(Clone, Debug)]
pub struct StageRanks {
    /// On processors, ranks exchange their results with these. On GPUs they only report whether one is lost.
    pub mates: Arc<dyn StageMates>,
    /// On GPUs, ranks find each other by this id, and add up their results.
    pub sums_id: Bytes,
}

/// A pipeline stage in another process, or some ranks of one.
pub trait RemoteStage: Debug + Send + Sync + 'static {
    /// Waits until the stage has loaded its weights, and returns their description.
    fn loaded(&self) -> Result<StageWeights, StageLost>;

    /// Sends a step to the stage. Waits for room on the connection only.
    fn begin(&self, input: StageInput) -> Result<(), StageLost>;

    /// Waits for the results of the oldest step. Calls `layers_done` with the number of the first layer whose KV is not
    /// written yet, as the layers are computed.
    fn finish(&self, layers_done: &mut dyn FnMut(u16)) -> Result<StageResults, StageLost>;
}

/// A pipeline stage of this process, which computes for another one.
pub trait StageProcess: Debug + Send + Sync + 'static {
    /// Returns the part of the model that this process has loaded.
    fn loaded(&self) -> &LoadedStage;

    /// Takes a step, and does not wait for its results. `signal` is raised as layers are written.
    fn begin(&self, input: StageInput, signal: FenceSignal) -> Result<(), StageLost>;

    /// Waits for the results of the oldest step. Each begun step is finished once.
    fn finish(&self) -> Result<StageResults, StageLost>;
}

/// The part of a model that a process has loaded.
#[derive(Debug)]
pub struct LoadedStage {
    pub weights: StageWeights,
    /// The memory with the KV of this process's layers.
    pub memory: KvMemory,
    /// The layers that this process computes.
    pub layers: Range<u16>,
}

/// A stage of this process in place of one in another process, without a connection. For checks.
#[derive(Debug)]
pub struct DirectStage(pub Arc<dyn StageProcess>);

impl RemoteStage for DirectStage {
    fn loaded(&self) -> Result<StageWeights, StageLost> {
        Ok(self.0.loaded().weights.clone())
    }

    fn begin(&self, input: StageInput) -> Result<(), StageLost> {
        self.0.begin(input, FenceSignal::new().0)
    }

    fn finish(&self, layers_done: &mut dyn FnMut(u16)) -> Result<StageResults, StageLost> {
        let results = self.0.finish()?;
        layers_done(self.0.loaded().layers.end);
        Ok(results)
    }
}

/// A step, as a stage in another process needs it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StageInput {
    pub rows: Vec<StageRow>,
    /// The rows that the stage before computed, in the form of the device: see [`StageResults::hidden`]. Empty for the
    /// first stage.
    pub hidden: Bytes,
    /// See [`StepOutput::routing_leads`](crate::StepOutput::routing_leads).
    pub routing_leads: Vec<f32>,
}

/// A row of a step, without its sampling, which the last stage does.
#[derive(Clone, Debug, PartialEq)]
pub struct StageRow {
    pub tokens: Vec<TokenId>,
    pub start: usize,
    /// The sequence's blocks, one table for each layer group.
    pub tables: Vec<Vec<BlockIdx>>,
    /// Whether the last stage samples a token for the row.
    pub is_wanted: bool,
    /// The number of the row's tokens for which the last stage tells the log-probability of the next one.
    pub n_targets: usize,
    /// The row's error in an earlier stage.
    pub outcome: Result<(), RowError>,
}

/// The results of a stage.
#[derive(Clone, Debug, PartialEq)]
pub struct StageResults {
    /// The rows for the next stage. From a processor: (tokens, hidden) numbers of f32. From a GPU: as many of bf16, and
    /// then the same rows after the norm of the next stage's first layer. All are little endian. Empty from a process
    /// without the first rank, and after the last stage.
    pub hidden: Bytes,
    /// One for each row.
    pub outcomes: Vec<Result<(), RowError>>,
    pub routing_leads: Vec<f32>,
}

/// The description of the weights that one process has loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageWeights {
    /// The parts of the model's fingerprint that are equal in all processes.
    pub model: Fingerprint,
    /// The bytes of the loaded matrices, for each format.
    pub formats: Vec<(Format, usize)>,
}

/// Waits until all processes have loaded their weights, and returns these. Refuses a stage of another model than `ours`.
pub(super) fn weights_of(
    remote: &[RemoteProcess],
    ours: &Fingerprint,
) -> Result<Vec<StageWeights>, OpenError> {
    let weights = |RemoteProcess { share, stage }: &RemoteProcess| {
        let theirs = stage.loaded().map_err(OpenError::StageLost)?;
        let agreed = ours.agree(&theirs.model);
        agreed.map_err(|mismatch| OpenError::OtherModel { stage: share.stage, mismatch })?;
        Ok(theirs)
    };
    remote.iter().map(weights).collect()
}
