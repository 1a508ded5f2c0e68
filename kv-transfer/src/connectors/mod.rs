//! The wires, by name. A new one is one file and one line in [`connectors`].

pub mod cuda_ipc;
pub mod flaky;
pub mod link;
pub mod loopback;
pub mod nccl;
#[cfg(feature = "rdma")]
pub mod rdma;
pub mod shm;
pub mod tcp;

use std::sync::Arc;

use futures::future::BoxFuture;

use crate::connector::{ConnectorParts, KvConnector};
use crate::error::TransferError;

/// Builds one connector. Binding a socket or opening a device may take time and may fail.
pub type Build = fn(ConnectorParts) -> BoxFuture<'static, Result<Arc<dyn KvConnector>, TransferError>>;

/// Every wire that this crate has, the fastest first.
pub fn connectors() -> &'static [(&'static str, Build)] {
    &[
        (loopback::SCHEME, |parts| Box::pin(async { Ok(loopback::Loopback::shared(parts)) })),
        (cuda_ipc::SCHEME, |parts| {
            Box::pin(async { Ok(cuda_ipc::listen(parts).await? as Arc<dyn KvConnector>) })
        }),
        (nccl::SCHEME, |parts| Box::pin(async { Ok(nccl::listen(parts).await? as Arc<dyn KvConnector>) })),
        (shm::SCHEME, |parts| Box::pin(async { Ok(shm::listen(parts).await? as Arc<dyn KvConnector>) })),
        #[cfg(feature = "rdma")]
        (rdma::SCHEME, |parts| Box::pin(async { Ok(rdma::listen(parts).await? as Arc<dyn KvConnector>) })),
        (tcp::SCHEME, |parts| Box::pin(async { Ok(tcp::listen(parts).await? as Arc<dyn KvConnector>) })),
    ]
}

/// Builds the wire of this name.
pub async fn build(name: &str, parts: ConnectorParts) -> Result<Arc<dyn KvConnector>, TransferError> {
    match connectors().iter().find(|(known, _)| *known == name) {
        Some((_, build)) => build(parts).await,
        None => {
            let known = connectors().iter().map(|(known, _)| *known).collect::<Vec<_>>().join(", ");
            Err(TransferError::UnknownConnector { name: name.to_owned(), known })
        }
    }
}
