//! Why a node did not come up, or did not go down well.

use std::io;

use engine::OpenError;
use kv_transfer::TransferError;
use registry::RegistryError;
use scheduler::SchedulerError;

#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    #[error("{0}")]
    Config(String),
    #[error("open model")]
    Model(#[source] OpenError),
    #[error("start worker")]
    Worker(#[source] SchedulerError),
    #[error("build connector")]
    Connector(#[source] TransferError),
    #[error("listen on {addr}")]
    Listen { addr: String, source: io::Error },
    #[error("announce")]
    Announce(#[source] RegistryError),
    #[error("describe services")]
    Services(#[source] chassis::error::StartError),
    #[error("serve")]
    Serve(#[source] chassis::StillHeld),
    #[error("drain")]
    Drain(#[source] chassis::StillHeld),
}
