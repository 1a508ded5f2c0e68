//! NCCL between two processes: one communicator, whose messages go from slots of the one card to slots of the other.
//!
//! Suggested reading order: the library (`library`, found when it is asked for and never linked), and what is done with
//! it (`communicator`).

pub mod library;
pub mod communicator;

pub use communicator::{Communicator, Message, Rank};
pub use library::{Nccl, UniqueId};
