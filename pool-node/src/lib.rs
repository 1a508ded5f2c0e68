//! A pool node: it stores KV between prefill and decode, and for later prompts with the same beginning.
//!
//! A pool node receives KV from prefill nodes and sends it to decode nodes, over the same connectors that
//! these nodes use. It computes nothing. `types::place` decides which pool node stores a sequence.
//!
//! Suggested reading order: [`store`], the blocks and their digests; [`service`], the calls of routers;
//! `model`, the choice of the model; [`parts`] and [`life`], from bind to drain.
#![forbid(unsafe_code)]

pub mod config;
pub mod store;
pub mod service;
mod stored;
mod model;
pub mod parts;
pub mod life;
pub mod metrics;
pub mod error;

pub use config::{PoolConfig, RawPoolConfig};
pub use error::PoolNodeError;
pub use life::{Life, live};
pub use parts::PoolParts;
pub use service::PoolService;
pub use store::{BlockStore, Incoming, PutRequest, StoreError, StoredSequence};
