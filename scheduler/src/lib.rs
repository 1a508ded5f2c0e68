//! Decides which tokens of which sequences run in each step, and runs the loop.
//!
//! Suggested reading order: what comes in ([`submission`], [`handle`]) and where results go ([`sink`]); the pure
//! parts: who comes first ([`rank`]), what a step holds ([`batcher`]), who gives way ([`growth`]), what it will take
//! ([`load`]); a sequence's life (`sequence`, `room`); a step's (`flight`, `lead`); the state machine ([`worker`]) and what turns its
//! crank ([`driver`]).
#![forbid(unsafe_code)]

pub mod submission;
pub mod handle;
mod inbox;
pub mod sink;
pub mod rank;
pub mod batcher;
pub mod growth;
pub mod load;
mod sequence;
mod room;
mod flight;
mod lead;
pub mod worker;
pub mod driver;
pub mod settings;
pub mod metrics;
pub mod error;
#[cfg(test)]
mod testing;

pub use driver::{Driver, WorkerThread, worker as new_worker};
pub use error::SchedulerError;
pub use handle::{Ticket, WorkerHandle};
pub use inbox::WorkerState;
pub use load::WorkerLoad;
pub use metrics::SchedulerMetrics;
pub use settings::SchedulerSettings;
pub use sink::{SINK_SLACK, SequenceEnd, Sink, StepTiming};
pub use submission::{NewSequence, Source};
pub use worker::WorkerParts;
