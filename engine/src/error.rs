//! The errors of this crate, and the caller's next step after each.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use device::cuda::CudaError;
use grammar::ConstraintError;
use types::{CallerAction, StageError};

use crate::model::config::ConfigProblem;

/// The error of a whole step. None of its rows has a token, and the KV that it should have written must not
/// be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BackendError {
    #[error("launch step: {0}")]
    Launch(String),
    #[error("collect step: {0}")]
    Collect(String),
    /// Steps were collected in another order than launched, or too many were launched.
    #[error("steps out of order: {0}")]
    Order(String),
    /// Memory that should be returned is in use.
    #[error("memory cannot be returned: {0}")]
    Held(String),
    /// The device is lost, so no later step can succeed.
    #[error("device lost: {0}")]
    DeviceLost(String),
}

impl BackendError {
    /// Returns whether the backend is unusable.
    pub fn is_fatal(&self) -> bool {
        matches!(self, Self::DeviceLost(_))
    }

    pub fn caller_action(&self) -> CallerAction {
        match self {
            Self::Order(_) | Self::Held(_) => CallerAction::Bug,
            Self::Launch(_) | Self::Collect(_) | Self::DeviceLost(_) => CallerAction::RetryElsewhere,
        }
    }
}

/// The connection to a stage in another process is lost. No later step can succeed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct StageLost(pub String);

impl StageLost {
    pub(crate) fn other_step() -> Self {
        Self("a stage in another process has answered with rows of another step".to_owned())
    }

    pub(crate) fn too_many_steps() -> Self {
        Self("more steps were sent than a stage takes".to_owned())
    }
}

/// The error of one row of a step. It has no effect on the other rows.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RowError {
    /// The KV that the row read is not its sequence's KV.
    #[error("kv checksum mismatch at layer {layer}, position {position}: {what}")]
    KvMismatch { layer: u16, position: usize, what: &'static str },
    /// Another user has borrowed a page that this row uses.
    #[error("page of layer {layer}, position {position}: {reason}")]
    Page { layer: u16, position: usize, reason: String },
    /// The row continues a token in flight, but there is none.
    #[error("no token in flight for this slot")]
    NoTokenInFlight,
    /// The row has a token without an embedding in the model.
    #[error("token {token} is not in a vocabulary of {vocab}")]
    UnknownToken { token: u32, vocab: usize },
    /// No token can be sampled: every token is forbidden, or no logit is finite.
    #[error("sample token: {0}")]
    Sample(String),
    /// Following the row's grammar costs more than its limits.
    #[error("follow grammar: {0}")]
    Grammar(String),
    #[error("follow grammar: {}", ConstraintError::DeadEnd)]
    GrammarDeadEnd,
    /// A GPU has stopped waiting for the row's mask.
    #[error("follow grammar: the host computed the mask of allowed tokens too late")]
    LateMask,
}

impl RowError {
    /// Returns the caller's next step. A failed sequence can be recomputed on another node from its tokens.
    pub fn caller_action(&self) -> CallerAction {
        match self {
            Self::KvMismatch { .. } | Self::Sample(_) | Self::Grammar(_) | Self::LateMask => {
                CallerAction::RetryElsewhere
            }
            Self::Page { .. } | Self::NoTokenInFlight => CallerAction::Bug,
            Self::UnknownToken { .. } | Self::GrammarDeadEnd => CallerAction::Reject,
        }
    }
}

/// The reason why a model could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("no model {name:?}: known are {known}")]
    UnknownModel { name: String, known: String },
    #[error("read costs {path}")]
    ReadCosts {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("parse costs {name}")]
    ParseCosts {
        name: String,
        #[source]
        source: Box<toml::de::Error>,
    },
    #[error("mock settings: {0}")]
    MockSettings(String),
    #[error("{bytes} bytes of KV memory hold no block of {block_bytes} bytes")]
    NoKvMemory { bytes: usize, block_bytes: usize },
    #[error("allocate KV memory: {0}")]
    KvMemory(String),
    /// The model and its KV are larger than the GPU's free memory.
    #[error("{0}")]
    CudaMemory(String),
    #[error("tensor parallel: {0}")]
    Ranks(String),
    /// The experts cannot be where the settings say.
    #[error("expert.model.experts: {0}")]
    Experts(String),
    /// The backend does not divide a model over pipeline stages.
    #[error("pipeline stages: {0}")]
    Stages(String),
    /// Another process of the node has loaded another model.
    #[error("the process of stage {stage} has loaded another model ('here' is this process)")]
    OtherModel {
        stage: usize,
        #[source]
        mismatch: types::node::FingerprintMismatch,
    },
    #[error("open a model in several processes")]
    StageLost(#[source] StageLost),
    /// The GPU's kernels do not support this model.
    #[error("{0}")]
    CudaModel(String),
    #[error("{}", types::in_full(.0))]
    Cuda(CudaError),
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The model's files have changed since it was opened.
    #[error("the model's files have changed: opened before ('here'), read now ('there')")]
    Changed(#[source] types::node::FingerprintMismatch),
    #[error("config.json has changed since the model was opened")]
    ConfigChanged,
}

impl From<CudaError> for OpenError {
    fn from(error: CudaError) -> Self {
        Self::Cuda(error)
    }
}

impl OpenError {
    /// Returns whether the error means that no GPU is usable, for any model.
    pub fn is_no_gpu(&self) -> bool {
        use CudaError::{
            CardTooOld, DriverTooOld, NoCublas, NoDevice, NoDriver, NoNvrtc, NoSuchDevice, TooFewCards,
        };
        matches!(
            self,
            Self::Cuda(
                NoDriver
                    | NoDevice
                    | NoSuchDevice { .. }
                    | TooFewCards { .. }
                    | NoNvrtc { .. }
                    | NoCublas { .. }
                    | DriverTooOld { .. }
                    | CardTooOld { .. }
            )
        )
    }

    pub fn caller_action(&self) -> CallerAction {
        CallerAction::Reject
    }
}

/// The reason why a model's weights could not be read.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error("write {path}")]
    Write {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("read {path}")]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("parse {path}")]
    Config {
        path: PathBuf,
        #[source]
        source: Box<ConfigProblem>,
    },
    #[error("{path} is of architecture {name:?}, which is not implemented: {known} are")]
    Architecture { path: PathBuf, name: String, known: String },
    #[error("no model.safetensors, no model.safetensors.index.json and no .gguf file in {folder}")]
    NoWeights { folder: PathBuf },
    #[error(
        "{folder} has several GGUF files, among them {} and {}: name one",
        Path::new(&.names[0]).display(),
        Path::new(&.names[1]).display()
    )]
    SeveralGguf { folder: PathBuf, names: [OsString; 2] },
    #[error("read header of {path}: {reason}")]
    Header { path: PathBuf, reason: String },
    #[error("no tensor {tensor} in {path}")]
    MissingTensor { tensor: String, path: PathBuf },
    /// The checkpoint has a tensor that the model would be computed without.
    #[error("tensor {tensor} in {path} is not read by {architecture}{}", and_others(*.n_others))]
    UnreadTensor { tensor: String, path: PathBuf, architecture: &'static str, n_others: usize },
    #[error("tensor {tensor} in {path} has shape {found:?}, not {expected:?}")]
    Shape { tensor: String, path: PathBuf, expected: Vec<usize>, found: Vec<usize> },
    #[error(
        "tensor {tensor} in {path} is of {found}, which is not implemented: BF16, F16, F32 and F8_E4M3 are"
    )]
    Dtype { tensor: String, path: PathBuf, found: String },
    #[error("tensor {tensor} in {path} is of F8_E4M3, and its scales {wrong}")]
    Scales { tensor: String, path: PathBuf, wrong: String },
    #[error(
        "tensor {tensor} in {path} is {found:?}, not one scale of KV or one for each KV head, from 2^-23 to 2^23"
    )]
    KvScale { tensor: String, path: PathBuf, found: Vec<f32> },
    #[error(
        "tensor {tensor} in {path} is a vector of F8_E4M3, which is not implemented: BF16, F16 and F32 are"
    )]
    VectorInFp8 { tensor: String, path: PathBuf },
    #[error("tensor {tensor} contains NaN")]
    NoNumber { tensor: String },
    #[error("{path} is too short: tensor {tensor} ends at byte {needed} of its data, which has {found}")]
    ShortFile { tensor: String, path: PathBuf, needed: usize, found: usize },
    #[error("allocate memory for weights")]
    Memory(#[source] std::io::Error),
    #[error("start compute threads")]
    Threads(#[source] std::io::Error),
    #[error("KV in {0} is not implemented on the CPU: bf16, f32 and fp8_e4m3 are")]
    KvDtype(types::KvDtype),
    #[error(
        "activations are to be rounded to FP8, and no matrix of the model is in FP8: set model.quantize = \"fp8\", or \
         expert.model.activations = \"auto\""
    )]
    Activations,
    /// The model cannot be divided over this number of ranks.
    #[error("tensor parallel: {0}")]
    Ranks(String),
    /// The layers cannot be divided over the stages.
    #[error("pipeline stages: {0}")]
    Stages(StageError),
}

fn and_others(n_others: usize) -> String {
    match n_others {
        0 => String::new(),
        1 => ", nor is 1 other tensor".to_owned(),
        _ => format!(", nor are {n_others} other tensors"),
    }
}
