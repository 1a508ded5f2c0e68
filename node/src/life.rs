//! One role of a node that computes, from announcement to drain: its services and its watchdog over one
//! worker. A life has several roles one after another if an operator changes the role.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use chassis::admin::Readiness;
use chassis::rpc::Callers;
use chassis::{Listener, Shutdown, spawn_guarded};
use registry::Registry;
use tonic::service::Routes;
use types::{NodeId, Role};

use crate::config::NodeConfig;
use crate::error::NodeError;
use crate::parts::NodeParts;
use crate::ports::Ports;
use crate::running::{Announcement, RunningNode};
use crate::status::{StatusParts, StatusService, WorkerStatus};
use crate::switch::Switch;
use crate::watchdog::Watchdog;

/// The inputs of one role of a node, besides its worker and connectors.
#[derive(Debug)]
pub struct Life<'a> {
    pub config: &'a NodeConfig,
    pub id: NodeId,
    pub role: Role,
    pub registry: &'a dyn Registry,
    /// Triggers the drain of the node.
    pub shutdown: Shutdown,
    /// Is triggered when the registry lists the node.
    pub announced: Shutdown,
    /// Whether the worker outlives the drain, for another role.
    pub worker_stays: Arc<AtomicBool>,
    pub readiness: Readiness,
    /// The queue of requests for another role.
    pub switch: Switch,
    pub grpc: Box<dyn Listener>,
    /// The advertised address of the gRPC services.
    pub address: String,
    pub admin: String,
}

/// Serves in one role until `shutdown`. `services` contains the role's services, health and reflection; this
/// function adds the status service.
pub async fn live(parts: NodeParts, services: Routes, life: Life<'_>) -> Result<(), NodeError> {
    let readiness = life.readiness.clone();
    let draining = Shutdown::new();

    let watchdog = Watchdog::new(parts.clone(), readiness.clone(), draining.clone(), life.config.stuck_after);
    let status = StatusService::new(StatusParts {
        epoch: parts.epoch,
        pool: parts.pool.clone(),
        arriving: parts.arriving.clone(),
        worker: Some(WorkerStatus { load: parts.worker.load(), stuck: watchdog.stuck() }),
        standings: watchdog.standings(),
        draining: draining.clone(),
        switch: Some(life.switch),
        world: parts.world.clone(),
    });
    let mut ports = Ports::default();
    let callers = Callers::known_to(&parts.world).calling(&life.address);
    ports.grpc(life.grpc, services.add_service(status.server()), life.config.connections, callers);
    let gauges = parts.metrics.clone().follow(parts.pool.clone(), parts.arriving.clone());
    let _gauges = spawn_guarded(ports.gate(), "gauges", gauges);

    let running = RunningNode {
        registry: life.registry,
        readiness: life.readiness,
        ports,
        work: parts.gate.clone(),
        drain: life.config.drain,
        shutdown: life.shutdown,
        draining,
        announced: life.announced,
    };
    let announcement = Announcement {
        id: life.id,
        role: life.role,
        epoch: parts.epoch,
        host: parts.host.clone(),
        address: life.address,
        admin: life.admin,
        connectors: &parts.connectors,
        model: &parts.model,
        keeps_role: life.config.group.grid.n_processes() > 1,
    };
    let stop_worker = || {
        if !life.worker_stays.load(Ordering::Relaxed) {
            parts.worker.drain();
        }
    };
    running.run(announcement, watchdog.run(), stop_worker).await
}
