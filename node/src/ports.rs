//! The gRPC port and the admin port of a node's process.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use axum::Router;
use axum::body::Body;
use chassis::connections::{ConnectionCounts, ConnectionLimits};
use chassis::net::host_port;
use chassis::rpc::Callers;
use chassis::server::ServerLimits;
use chassis::{Gate, Listener, Shutdown, StillHeld, Stream, Task, spawn_guarded};
use tokio::sync::Mutex;
use tonic::Status;
use tonic::service::Routes;
use tracing::warn;

use crate::error::NodeError;

/// The longest time that each port may take to close.
const CLOSE_WITHIN: Duration = Duration::from_secs(2);
/// How long open streams may run after the ports begin to close.
const CUT_AFTER: Duration = Duration::from_millis(500);

type Serving = Task<Result<(), StillHeld>>;

/// Ports that are being served. Dropping the value closes them at once.
#[derive(Debug)]
pub struct Ports {
    gate: Gate,
    close: Shutdown,
    serving: Vec<Serving>,
}

impl Default for Ports {
    fn default() -> Self {
        Self { gate: Gate::new("ports"), close: Shutdown::new(), serving: Vec::new() }
    }
}

impl Ports {
    /// Opens the admin port with the pages of `pages`.
    pub fn admin(listener: Box<dyn Listener>, pages: Router, connections: ConnectionLimits) -> Self {
        let mut ports = Self::default();
        let pages = chassis::admin::serve(
            listener,
            pages,
            ports.close.clone(),
            connections,
            ConnectionCounts::default(),
        );
        ports.serving.push(spawn_guarded(&ports.gate, "admin", pages));
        ports
    }

    /// Opens the gRPC port with `services`.
    pub fn grpc(
        &mut self,
        listener: Box<dyn Listener>,
        services: Routes,
        connections: ConnectionLimits,
        callers: Callers,
    ) {
        let limits = ServerLimits { connections, drain: CUT_AFTER, ..ServerLimits::default() };
        let serve = chassis::rpc::serve(listener, services, self.close.clone(), limits, callers);
        self.serving.push(spawn_guarded(&self.gate, "grpc", serve));
    }

    /// Opens a gRPC port that answers every call with UNAVAILABLE and the reason `why`.
    pub fn refusing(
        listener: Box<dyn Listener>,
        why: &'static str,
        connections: ConnectionLimits,
        callers: Callers,
    ) -> Self {
        let refuse = move || async move { Status::unavailable(why).into_http::<Body>() };
        let mut ports = Self::default();
        ports.grpc(listener, Routes::from(Router::new().fallback(refuse)), connections, callers);
        ports
    }

    /// Returns the gate for tasks that end with the ports.
    pub fn gate(&self) -> &Gate {
        &self.gate
    }

    pub async fn close(self) {
        self.close.trigger();
        for port in self.serving {
            if !matches!(tokio::time::timeout(CLOSE_WITHIN, port).await, Ok(Ok(Ok(())))) {
                warn!("a port of the node was closed with open connections");
            }
        }
    }
}

/// A listener that several servers use one after another. Clones share one socket.
#[derive(Clone, Debug)]
pub struct KeptListener {
    /// The listener. The server that is accepting holds the mutex.
    listener: Arc<Mutex<Box<dyn Listener>>>,
    addr: SocketAddr,
}

impl KeptListener {
    pub fn new(listener: Box<dyn Listener>) -> io::Result<Self> {
        let addr = listener.local_addr()?;
        Ok(Self { listener: Arc::new(Mutex::new(listener)), addr })
    }
}

#[async_trait]
impl Listener for KeptListener {
    async fn accept(&mut self) -> io::Result<(Stream, SocketAddr)> {
        self.listener.lock().await.accept().await
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.addr)
    }
}

/// Returns the address for other processes: `host` with the bound port, or the bound address.
pub fn advertised(host: Option<&str>, listener: &dyn Listener) -> Result<String, NodeError> {
    let bound: SocketAddr = listener
        .local_addr()
        .map_err(|source| NodeError::Listen { addr: host.unwrap_or_default().to_owned(), source })?;
    Ok(host.map_or_else(|| bound.to_string(), |host| host_port(host, bound.port())))
}

#[cfg(test)]
mod tests {
    use chassis::World;

    use super::*;

    #[tokio::test]
    async fn an_ipv6_address_is_announced_in_brackets() {
        let listener = World::real().net().listen("127.0.0.1:0").await.expect("a free port");
        let port = listener.local_addr().expect("bound").port();
        for (host, expected) in [
            (Some("fd00::2"), format!("[fd00::2]:{port}")),
            (Some("[fd00::2]"), format!("[fd00::2]:{port}")),
            (Some("10.0.0.5"), format!("10.0.0.5:{port}")),
            (Some("decode-0.decode"), format!("decode-0.decode:{port}")),
            (None, format!("127.0.0.1:{port}")),
        ] {
            assert_eq!(advertised(host, &*listener).expect("bound"), expected);
        }
    }
}
