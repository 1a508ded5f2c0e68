//! The wires, by name. A new wire is one file with its [`WireKind`], a `mod` line here and a line in `WIRES`.

pub mod cuda_ipc;
pub(crate) mod follower;
pub(crate) mod follower_landings;
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

use self::link::connect::STREAMS_MAX;
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

/// Refuses a connector that does not move the KV of a node of several processes.
fn check_processes(wire: &WireKind, parts: &ConnectorParts) -> Result<(), TransferError> {
    let Some(processes) = &parts.processes else { return Ok(()) };
    if wire.name != tcp::SCHEME {
        let name = wire.name;
        return Err(TransferError::SeveralProcesses(format!(
            "{name} does not move KV of a node of several processes: set connectors to tcp"
        )));
    }
    if processes.n_processes() >= usize::from(STREAMS_MAX) {
        return Err(TransferError::SeveralProcesses(format!(
            "tcp moves KV of at most {STREAMS_MAX} processes, and the node has {}",
            processes.n_processes() + 1
        )));
    }
    Ok(())
}

/// Builds the connector of this name.
pub async fn build(name: &str, parts: ConnectorParts) -> Result<Arc<dyn KvConnector>, TransferError> {
    match WIRES.iter().find(|wire| wire.name == name) {
        Some(wire) => {
            check_processes(wire, &parts)?;
            (wire.build)(parts).await
        }
        None => {
            let (name, known) = (name.to_owned(), names().join(", "));
            Err(TransferError::UnknownConnector { name, known })
        }
    }
}
