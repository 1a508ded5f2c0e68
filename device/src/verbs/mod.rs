//! RDMA: writes into another machine's memory, through libibverbs.
//!
//! The library is loaded at run time and never linked, so the executable starts without it. This module has
//! only what KV transfer needs: reliable connections, one-sided writes whose last one carries a number, and
//! completions with notifications instead of polling. See `docs/decisions/0011-rdma-by-hand.md`.
//!
//! Suggested reading order: errors ([`error`]), C's structures (`layout`) and
//! functions (`sys`), devices and ports ([`device`]),
//! registered memory ([`region`]), completions ([`completions`]), and requests ([`queue_pair`]).

pub mod error;
mod layout;
mod sys;
pub mod device;
pub mod region;
pub mod completions;
pub mod queue_pair;

pub use completions::{Completion, Completions, Done};
pub use device::{Device, PortState};
pub use error::{Failure, VerbsError};
pub use queue_pair::{Copy, PathTo, QueuePair, QueuePairAddress, Room};
pub use region::{Domain, Region, Rights, knows_dmabuf};
