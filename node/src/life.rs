//! A node's life: announce, serve, wait, drain.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt as _;

use chassis::admin::Readiness;
use chassis::{Listener, Shutdown, spawn_guarded};
use registry::Registry;
use tonic::service::Routes;
use tracing::info;
use types::node::PROTOCOL;
use types::{NodeId, NodeInfo, Role};

use crate::config::NodeConfig;
use crate::error::NodeError;
use crate::parts::NodeParts;
use crate::ports::Ports;
use crate::status::StatusService;
use crate::watchdog::Watchdog;

/// What a node needs to live, besides its parts.
#[derive(Debug)]
pub struct Life<'a> {
    pub config: &'a NodeConfig,
    pub id: NodeId,
    pub role: Role,
    pub registry: &'a dyn Registry,
    /// Asked to stop, a node drains.
    pub shutdown: Shutdown,
    pub readiness: Readiness,
    pub grpc: Box<dyn Listener>,
    /// Where others find it, and its admin port.
    pub address: String,
    pub admin: String,
}

/// Lives until `shutdown`. `services` are the role's own, with health and reflection; status is added here.
pub async fn live(parts: NodeParts, services: Routes, life: Life<'_>) -> Result<(), NodeError> {
    let readiness = life.readiness.clone();
    let draining = Shutdown::new();

    let info = node_info(&parts, &life);
    let watchdog = Watchdog::new(parts.clone(), readiness.clone(), draining.clone(), life.config.stuck_after);
    let status =
        StatusService::new(parts.clone(), draining.clone(), watchdog.stuck(), watchdog.standings()).server();
    let mut ports = Ports::default();
    ports.grpc(life.grpc, services.add_service(status), life.config.connections);
    let gauges = parts.metrics.clone().follow(parts.pool.clone(), parts.arriving.clone());
    let _gauges = spawn_guarded(ports.gate(), "gauges", gauges);

    let announcement = life.registry.announce(info.clone()).await.map_err(NodeError::Announce)?;
    let _watch = spawn_guarded(ports.gate(), "watchdog", watchdog.run());
    info!(node = %info.id, epoch = %info.epoch, role = %info.role, address = info.address, admin = info.admin,
        connectors = ?parts.connectors, "node is up");
    life.shutdown.wait().await;

    info!("draining");
    draining.trigger();
    readiness.set_unready("draining");
    announcement.withdraw().await;
    parts.worker.drain();
    let drained = parts.gate.close(life.config.drain).await.map_err(NodeError::Drain);
    ports.close().await;
    drained
}

/// What the node says of itself.
fn node_info(parts: &NodeParts, life: &Life<'_>) -> NodeInfo {
    NodeInfo {
        id: life.id.clone(),
        epoch: parts.epoch,
        role: life.role,
        pid: std::process::id(),
        host: parts.host.to_string(),
        address: life.address.clone(),
        admin: life.admin.clone(),
        wires: parts.connectors.addresses(),
        without: parts.connectors.missing(),
        model: (*parts.model).clone(),
        protocol: PROTOCOL,
    }
}

/// Tells whether two nodes share a machine and what it takes to share memory: the kernel's boot id, and which
/// `/dev/shm` the node sees. Containers of one machine have one each, unless they were given one in common.
pub fn host_id() -> String {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let folder = fs::metadata("/dev/shm").map(|folder| folder.dev().to_string()).unwrap_or_default();
    format!("{} shm:{folder}", boot.trim())
}

/// A name for a node that was given none: the machine's, and the port that is its own.
pub fn default_id(role: Role, bound: SocketAddr) -> NodeId {
    let machine = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    NodeId::new(format!("{role}-{}-{}", machine.trim(), bound.port()))
}
