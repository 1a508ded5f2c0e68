//! What every node does in its life: announce, serve, wait, drain.

use std::sync::Arc;
use std::time::Duration;

use chassis::admin::Readiness;
use chassis::{Gate, Shutdown, spawn_guarded};
use registry::Registry;
use tracing::info;
use types::node::PROTOCOL;
use types::{Epoch, ModelInfo, NodeId, NodeInfo, Role};

use crate::connectors::Connectors;
use crate::error::NodeError;
use crate::ports::Ports;

/// What a node announces in the registry.
#[derive(Debug)]
pub struct Announcement<'a> {
    pub id: NodeId,
    pub role: Role,
    pub epoch: Epoch,
    pub host: Arc<str>,
    /// The advertised address of the gRPC services.
    pub address: String,
    pub admin: String,
    pub connectors: &'a Connectors,
    pub model: &'a ModelInfo,
    pub keeps_role: bool,
}

/// A node with open ports that is not yet announced.
#[derive(Debug)]
pub struct RunningNode<'a> {
    pub registry: &'a dyn Registry,
    pub readiness: Readiness,
    pub ports: Ports,
    /// The gate of all work on requests. A drain waits for it for at most `drain`.
    pub work: Gate,
    pub drain: Duration,
    /// The shutdown that starts the drain.
    pub shutdown: Shutdown,
    /// A signal that is triggered when the node stops accepting new work.
    pub draining: Shutdown,
}

impl Announcement<'_> {
    fn info(&self) -> NodeInfo {
        NodeInfo {
            id: self.id.clone(),
            epoch: self.epoch,
            role: self.role,
            pid: std::process::id(),
            host: self.host.to_string(),
            address: self.address.clone(),
            admin: self.admin.clone(),
            wires: self.connectors.addresses(),
            without: self.connectors.missing(),
            model: self.model.clone(),
            protocol: PROTOCOL,
            keeps_role: self.keeps_role,
        }
    }
}

impl RunningNode<'_> {
    /// Runs the node until `shutdown`, then drains it. `watch` updates the node's readiness while it is announced;
    /// `stop_work` is called when the node stops accepting new work.
    pub async fn run(
        self,
        announcement: Announcement<'_>,
        watch: impl Future<Output = ()> + Send + 'static,
        stop_work: impl FnOnce(),
    ) -> Result<(), NodeError> {
        let info = announcement.info();
        let announced = self.registry.announce(info.clone()).await.map_err(NodeError::Announce)?;
        let watch = spawn_guarded(self.ports.gate(), "watchdog", watch);
        info!(node = %info.id, epoch = %info.epoch, role = %info.role, address = info.address, admin = info.admin,
            connectors = ?announcement.connectors, model = info.model.name, "node is up");
        self.shutdown.wait().await;

        info!("node is draining");
        self.draining.trigger();
        drop(watch);
        self.readiness.set_unready("draining");
        announced.withdraw().await;
        stop_work();
        let drained = self.work.close(self.drain).await.map_err(NodeError::Drain);
        self.ports.close().await;
        drained
    }
}
