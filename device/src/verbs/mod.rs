//! RDMA: writing into another machine's memory, by libibverbs.
//!
//! The library is looked for at run time and never linked: what is built here starts where there is none, and says so.
//! This is as much of it as KV needs: reliable connections, one-sided writes whose last one brings a number, and
//! completions that are waited for and not polled for. See `docs/decisions/0011-rdma-by-hand.md`.
//!
//! Suggested reading order: what can go wrong ([`error`]), the functions as C has them (`sys`), a device and its ports
//! ([`device`]), memory that it may reach ([`region`]), what it has done ([`completions`]), and what it is told
//! ([`queue_pair`]).

pub mod error;
mod sys;
pub mod device;
pub mod region;
pub mod completions;
pub mod queue_pair;

pub use completions::{Completion, Completions, Done};
pub use device::{Device, PortState};
pub use error::{Failure, VerbsError};
pub use queue_pair::{Address, Copy, PathTo, QueuePair, Room};
pub use region::{Domain, Region, Rights, knows_dmabuf};
