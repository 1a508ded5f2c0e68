//! Moves the KV of one sequence from one node's memory into another's.
//!
//! `CONTRACT.md` beside this crate's manifest says what each side may rely on, with the test that pins each sentence.
//!
//! Suggested reading order: the traits ([`connector`]), waiting for KV ([`arrival`]), what a landing is on the node
//! that granted it ([`landing`]) and why its blocks come back only once the wire is quiet ([`quiet`]); which pages are
//! there (`pages`) and how one knows that they are right ([`digest`]); the sender's side (`outgoing`), and the threads on which both run (`wire_threads`); which ranks have
//! what for which of the other side's ([`reshard`], [`lanes`]) and how that lies in memory (`runs`); then the wires
//! themselves ([`mod@connectors`]), the suite that each of them passes (`conformance`) and the faults that can be
//! played on them ([`faults`]).
#![forbid(unsafe_code)]

pub mod connector;
pub mod settings;
pub mod arrival;
mod arrived;
pub mod landing;
mod landings;
pub mod quiet;
mod pending_copies;
mod wire_threads;
mod pages;
mod chunk_queue;
pub mod digest;
mod outgoing;
pub mod reshard;
pub mod lanes;
mod runs;
pub mod connectors;
pub mod faults;
#[cfg(any(test, feature = "test-support"))]
pub mod conformance;
pub mod metrics;
pub mod error;

pub use arrival::{Arrival, ArrivalStatus};
pub use arrived::ArrivedKv;
pub use chunk_queue::{Chunk, ChunkQueue};
pub use connector::{Auto, ConnectorParts, KvConnector, KvSender, LandRequest, WireKind};
pub use connectors::{build, connectors};
pub use error::TransferError;
pub use faults::{Fault, FaultKind, Faults};
pub use metrics::TransferMetrics;
pub use quiet::Quiet;
pub use settings::{Taper, TransferSettings};
