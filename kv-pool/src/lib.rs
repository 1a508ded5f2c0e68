//! The shared store of KV blocks: which node keeps a sequence, and what that node does.
//!
//! A pool node is a receiver and a sender of KV like any other, over the same connectors, with nothing that computes in
//! between: it lands what prefill nodes put, layer by layer, keeps whole blocks by their chained hashes, and fills the
//! landings of decode nodes from them.
//!
//! Suggested reading order: [`place`], [`shelf`], [`kept`].
#![forbid(unsafe_code)]

pub mod place;
pub mod shelf;
pub mod kept;
pub mod error;

pub use error::PoolError;
pub use shelf::{Delivery, Put, PutRequest, Shelf};
