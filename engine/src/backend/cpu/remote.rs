//! Stages in other processes: what a step and its results are there, and the connection to them as a trait.

use std::fmt::Debug;

use kernels::cpu::Format;
use types::{BlockIdx, Fingerprint, TokenId};

use crate::error::RowError;
pub use crate::error::StageLost;

/// A pipeline stage in another process.
pub trait RemoteStage: Debug + Send + Sync + 'static {
    /// Waits until the stage has loaded its weights, and returns their description.
    fn loaded(&self) -> Result<StageWeights, StageLost>;

    /// Sends a step to the stage. Waits for room on the connection only.
    fn begin(&self, input: StageInput) -> Result<(), StageLost>;

    /// Waits for the results of the oldest step. Calls `layers_done` with the number of the first layer whose KV is not
    /// written yet, as the layers are computed.
    fn finish(&self, layers_done: &mut dyn FnMut(u16)) -> Result<StageResults, StageLost>;
}

/// A step, as a stage in another process needs it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StageInput {
    pub rows: Vec<StageRow>,
    /// The rows that the stage before computed: (tokens, hidden). Empty for the first stage.
    pub hidden: Vec<f32>,
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
    /// The row's error in an earlier stage.
    pub outcome: Result<(), RowError>,
}

/// What a stage has computed.
#[derive(Clone, Debug, PartialEq)]
pub struct StageResults {
    /// (tokens, hidden)
    pub hidden: Vec<f32>,
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
