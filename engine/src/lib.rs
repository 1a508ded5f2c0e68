//! Runs the model: turns tokens into KV and KV into tokens.
//!
//! Suggested reading order: inputs and outputs ([`step`]), the contract ([`backend`]), the size of KV memory
//! ([`kv_room`]), errors ([`error`]), the tests of all backends ([`conformance`], [`equality`]), and
//! measurements ([`measure`]). Then a real model: its weights ([`load`]), its layers ([`model`]), its
//! sampling ([`sampler`]), and its device: the CPU ([`cpu`]) or a GPU ([`cuda`]).
#![forbid(unsafe_code)]

pub mod step;
pub mod backend;
pub mod kv_room;
pub mod error;
pub mod conformance;
pub mod equality;
pub mod measure;

pub mod load;
pub mod model;
pub mod sampler;

pub use backend::cpu;
pub use backend::cpu::{CpuBackend, CpuSettings, LoadFormat};
pub use backend::cuda;
pub use backend::cuda::{CudaBackend, CudaSettings};
pub use backend::mock::{Mock, MockSettings, Pace};
pub use backend::{
    Asleep, Backend, Device, EngineSettings, ExpertPlacement, SleepFailed, StepLimits, WakeFailed, open,
};
pub use backend::{process, remote};
pub use error::{BackendError, LoadError, OpenError, RowError};
pub use kv_room::{AutoRoom, KvRoom};
pub use step::{
    PendingStep, PromptTargets, Row, RowInput, SampleSpec, SampledToken, SlotId, StepBatch, StepOutput,
};
