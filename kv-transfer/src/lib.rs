//! Moves the KV of one sequence from one node's memory into another's.
//!
//! `CONTRACT.md` beside this crate's manifest lists the guarantees to both sides, with the test that checks each of
//! them.
//!
//! Suggested reading order:
//!
//! - the traits ([`connector`]), and waiting for KV ([`arrival`])
//! - a landing on the node that granted it ([`landing`]), and why its blocks return only once the wire is quiet
//!   ([`quiet`])
//! - the state of each page (`pages`) and its verification ([`digest`])
//! - the sender's side (`outgoing`), and the threads that serve both sides (`wire_threads`)
//! - the lanes between ranks ([`reshard`], [`lanes`]), and their bytes in memory (`runs`)
//! - a node of several processes ([`processes`])
//! - the wires ([`mod@connectors`]), the test suite of every wire (`conformance`), and fault injection ([`faults`])
#![forbid(unsafe_code)]

pub mod connector;
mod connector_parts;
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
mod fields;
pub mod processes;
pub mod connectors;
pub mod faults;
#[cfg(any(test, feature = "test-support"))]
pub mod conformance;
pub mod metrics;
pub mod error;

pub use arrival::{Arrival, ArrivalStatus};
pub use arrived::ArrivedKv;
pub use chunk_queue::{Chunk, ChunkQueue};
pub use connector::{Auto, KvConnector, KvSender, WireKind};
pub use connector_parts::ConnectorParts;
pub use connectors::follower::FollowerStreams;
pub use connectors::follower_landings::FollowerLandings;
pub use connectors::{build, connectors};
pub use error::TransferError;
pub use faults::{Fault, FaultKind, Faults};
pub use landings::LandRequest;
pub use metrics::TransferMetrics;
pub use processes::{
    LandOrder, LandingEvent, LandingQueues, LandingReport, OtherProcesses, PutOrder, ReportLandings,
};
pub use quiet::Quiet;
pub use settings::{FrameSizes, HostSlots, HostSlotsOutOfRange, TransferSettings};
