//! NCCL between two processes: one communicator, which sends messages from slots of one GPU to slots of the
//! other.
//!
//! Suggested reading order: the library (`library`, loaded on first use, never linked) and its use
//! (`communicator`).

pub mod library;
pub mod communicator;

pub use communicator::{Communicator, Message, Rank};
pub use library::{Nccl, UniqueId};
