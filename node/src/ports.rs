//! The two ports of a node's process: served, and closed.

use std::net::SocketAddr;
use std::time::Duration;

use chassis::admin::Readiness;
use chassis::metrics::Metrics;
use chassis::server::ServerLimits;
use chassis::{Gate, Listener, Shutdown, StillHeld, Task, spawn_guarded};
use tonic::service::Routes;
use tracing::warn;

use crate::error::NodeError;

/// How long the ports may take to close once nothing is under way.
const CLOSE_WITHIN: Duration = Duration::from_secs(2);

type Serving = Task<Result<(), StillHeld>>;

/// Ports that are being served. Dropped, they are closed at once.
#[derive(Debug)]
pub struct Ports {
    gate: Gate,
    close: Shutdown,
    serving: Vec<Serving>,
}

impl Ports {
    /// Serves the admin pages.
    pub fn admin(listener: Box<dyn Listener>, readiness: Readiness, metrics: Metrics) -> Self {
        let (gate, close) = (Gate::new("ports"), Shutdown::new());
        let pages = chassis::admin::router(readiness, metrics);
        let pages = chassis::admin::serve(listener, pages, close.clone());
        let serving = vec![spawn_guarded(&gate, "admin", pages)];
        Self { gate, close, serving }
    }

    /// Serves the gRPC services too.
    pub fn grpc(&mut self, listener: Box<dyn Listener>, services: Routes) {
        let serve = chassis::rpc::serve(listener, services, self.close.clone(), ServerLimits::default());
        self.serving.push(spawn_guarded(&self.gate, "grpc", serve));
    }

    /// Where what belongs to the ports runs.
    pub fn gate(&self) -> &Gate {
        &self.gate
    }

    pub async fn close(self) {
        self.close.trigger();
        for port in self.serving {
            if !matches!(tokio::time::timeout(CLOSE_WITHIN, port).await, Ok(Ok(Ok(())))) {
                warn!("a port was closed with connections open");
            }
        }
    }
}

/// What others are told to connect to: `host`, or the address that was bound.
pub fn advertised(host: Option<&str>, listener: &dyn Listener) -> Result<String, NodeError> {
    let bound: SocketAddr = listener
        .local_addr()
        .map_err(|source| NodeError::Listen { addr: host.unwrap_or_default().to_owned(), source })?;
    Ok(host.map_or_else(|| bound.to_string(), |host| format!("{host}:{}", bound.port())))
}
