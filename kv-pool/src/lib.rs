//! The shared store of KV blocks: what a node of it does.
//!
//! A pool node is a receiver and a sender of KV like any other, over the same connectors, with nothing that computes in
//! between: it lands what prefill nodes put, layer by layer, keeps full blocks by their chained hashes, and fills the
//! landings of decode nodes from them. Which node of the pool keeps a sequence is `types::place`.
//!
//! Suggested reading order: [`shelf`], the life of one sequence in it ([`parcel`]), [`kept`].
#![forbid(unsafe_code)]

pub mod shelf;
pub mod parcel;
pub mod kept;
pub mod error;

pub use error::PoolError;
pub use parcel::{Incoming, Parcel};
pub use shelf::{PutRequest, Shelf};
