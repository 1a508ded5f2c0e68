//! Decides which tokens each engine step computes, and runs the loop of steps.
//!
//! Suggested reading order:
//!
//! - submissions ([`submission`], [`landing_room`], `arrivals`, [`handle`]) and results ([`sink`])
//! - pure functions: order ([`precedence`]), batching ([`batcher`]), preemption ([`growth`]), predictions ([`load`])
//! - the state of a sequence (`sequence`, `room`) and of a step (`launched_step`, `lead`)
//! - the state machine ([`worker`]) and the loop that runs it ([`driver`])
#![forbid(unsafe_code)]

pub mod submission;
pub mod handle;
pub mod landing_room;
mod arrivals;
mod inbox;
pub mod sink;
pub mod precedence;
pub mod batcher;
pub mod growth;
pub mod load;
mod sequence;
mod room;
mod launched_step;
mod lead;
pub mod worker;
pub mod driver;
pub mod settings;
pub mod metrics;
pub mod error;
#[cfg(test)]
mod testing;

pub use arrivals::ExpectedArrival;
pub use driver::{Driver, WorkerThread, worker as new_worker};
pub use error::SchedulerError;
pub use handle::{Ticket, WorkerHandle};
pub use inbox::WorkerState;
pub use landing_room::{GrantedRoom, RoomRequest};
pub use load::WorkerLoad;
pub use metrics::SchedulerMetrics;
pub use settings::SchedulerSettings;
pub use sink::{SINK_SLACK, SequenceEnd, Sink, StepTiming, StepWork};
pub use submission::{NewSequence, Source};
pub use worker::WorkerParts;
