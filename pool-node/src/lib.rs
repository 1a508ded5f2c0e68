//! Keeps KV between the nodes that compute it and the nodes that decode it, and for whoever wants it later.
//!
//! What a sequence's life here is, [`service`] says; whose KV is kept, the registry (`model`); what the node is made of
//! and its life from bind to drain, [`parts`] and [`life`]. The blocks themselves are `kv-pool`'s.
#![forbid(unsafe_code)]

pub mod config;
mod model;
pub mod parts;
pub mod service;
mod parcels;
mod status;
pub mod life;
pub mod metrics;
pub mod error;

pub use config::{PoolConfig, RawPoolConfig};
pub use error::PoolNodeError;
pub use life::{Life, live};
pub use parts::PoolParts;
pub use service::PoolService;
