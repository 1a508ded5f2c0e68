//! The wires, by name. A new wire is one file with its [`WireKind`], a `mod` line here and a line in `WIRES`.

pub mod cuda_ipc;
#[cfg(any(test, feature = "test-support"))]
pub mod flaky;
mod gpu;
pub mod link;
pub mod loopback;
pub mod nccl;
#[cfg(feature = "rdma")]
pub mod rdma;
pub mod shm;
pub mod tcp;
#[cfg(test)]
mod toy;
mod unix;

use std::sync::Arc;

use crate::connector::{KvConnector, WireKind};
use crate::connector_parts::ConnectorParts;
use crate::error::TransferError;

/// All wires of this crate, the fastest first.
const WIRES: &[WireKind] = &[
    loopback::WIRE,
    cuda_ipc::WIRE,
    nccl::WIRE,
    shm::WIRE,
    #[cfg(feature = "rdma")]
    rdma::WIRE,
    tcp::WIRE,
    #[cfg(test)]
    toy::WIRE,
];

/// Returns all wires of this crate, the fastest first.
pub fn connectors() -> &'static [WireKind] {
    WIRES
}

/// Returns the names of all wires.
pub fn names() -> Vec<&'static str> {
    WIRES.iter().map(|wire| wire.name).collect()
}

/// Builds the connector of this name.
pub async fn build(name: &str, parts: ConnectorParts) -> Result<Arc<dyn KvConnector>, TransferError> {
    match WIRES.iter().find(|wire| wire.name == name) {
        Some(wire) => (wire.build)(parts).await,
        None => {
            let (name, known) = (name.to_owned(), names().join(", "));
            Err(TransferError::UnknownConnector { name, known })
        }
    }
}
