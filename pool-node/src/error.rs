//! Why a pool node did not come up, or did not go down well.

use device::MemoryError;
use node::NodeError;
use registry::RegistryError;

#[derive(Debug, thiserror::Error)]
pub enum PoolNodeError {
    #[error("{0}")]
    Config(String),
    #[error("watch the registry")]
    Watch(#[source] RegistryError),
    /// No block of this model fits into the memory that was given.
    #[error("`pool.memory`: {bytes} bytes are not one block, which takes {block_bytes}")]
    TooSmall { bytes: u64, block_bytes: usize },
    #[error("take memory for KV, as `pool.memory` says")]
    Memory(#[source] MemoryError),
    #[error("be a node")]
    Node(#[from] NodeError),
    #[error("describe services")]
    Services(#[source] chassis::error::StartError),
}
