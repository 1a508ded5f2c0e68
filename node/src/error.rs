//! The errors of starting, running and stopping a node.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use engine::{BackendError, OpenError};
use kv_transfer::TransferError;
use registry::RegistryError;
use scheduler::SchedulerError;

use crate::group::GroupError;

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
    #[error("the worker is still running {} ms after its requests were cancelled", .0.as_millis())]
    WorkerLate(Duration),
    #[error("the worker is dead: {0}")]
    WorkerDead(Arc<str>),
    #[error("put the backend to sleep")]
    Sleep(#[source] BackendError),
    #[error("the backend is lost: its thread has panicked")]
    BackendLost,
    #[error("a node of several processes")]
    Group(#[source] GroupError),
}
