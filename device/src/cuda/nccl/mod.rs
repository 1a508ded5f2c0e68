//! NCCL between processes: a communicator of a pair, which sends messages from slots of one GPU to slots of the other, and
//! one of the ranks of a model, which adds up their numbers.
//!
//! Suggested reading order: the library (`library`, loaded on first use, never linked), the pair (`communicator`), the ranks
//! (`ranks`).

pub mod library;
pub mod communicator;
pub mod ranks;

pub use communicator::{Communicator, Message, Rank};
pub use library::{Nccl, UniqueId};
pub use ranks::{EndOfSums, RankPlace, RankSums};
