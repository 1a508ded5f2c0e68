//! The errors of starting, running and stopping a pool node.

use device::MemoryError;
use node::NodeError;
use registry::RegistryError;

#[derive(Debug, thiserror::Error)]
pub enum PoolNodeError {
    #[error("{0}")]
    Config(String),
    #[error("watch the registry")]
    Watch(#[source] RegistryError),
    /// The configured memory is smaller than one block of the model.
    #[error("`pool.memory`: {bytes} bytes are less than one block, which has {block_bytes}")]
    TooSmall { bytes: u64, block_bytes: usize },
    #[error("allocate the memory for KV (`pool.memory`)")]
    Memory(#[source] MemoryError),
    #[error("run the node")]
    Node(#[from] NodeError),
    #[error("describe services")]
    Services(#[source] chassis::error::StartError),
}
