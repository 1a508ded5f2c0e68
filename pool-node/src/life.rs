//! The life of a pool node: bind, learn the model, announce, serve, wait, drain.

use std::time::Duration;

use chassis::admin::Readiness;
use chassis::metrics::Metrics;
use chassis::rpc::Callers;
use chassis::{Listener, Shutdown, World, spawn_guarded};
use kv_cache::BlockPool;
use node::metrics::NodeMetrics;
use node::ports::advertised;
use node::{Announcement, NodeError, Ports, RunningNode, Standings, StatusParts, StatusService};
use registry::Registry;
use tokio::time::Instant;
use tracing::error;
use types::{NodeId, Role, in_full};

use crate::config::PoolConfig;
use crate::error::PoolNodeError;
use crate::model::kept_model;
use crate::parts::PoolParts;
use crate::service::PoolService;

/// The interval at which the node checks whether it is idle, for an integrity check of its blocks.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The interval at which the readiness is set from the routers' reports.
const STANDING_EVERY: Duration = Duration::from_millis(250);

/// The inputs of a pool node's life.
#[derive(Debug)]
pub struct Life<'a> {
    pub config: &'a PoolConfig,
    pub id: NodeId,
    pub world: World,
    pub metrics: Metrics,
    pub registry: &'a dyn Registry,
    /// The shutdown that starts the drain.
    pub shutdown: Shutdown,
    pub grpc: Box<dyn Listener>,
    pub admin: Box<dyn Listener>,
}

/// Runs a pool node until `shutdown`.
pub async fn live(life: Life<'_>) -> Result<(), PoolNodeError> {
    let Life { config, id, world, metrics, registry, shutdown, grpc, admin } = life;
    metrics.show_refusals(world.identity().refusals());
    let identity = world.identity().clone();
    metrics.show_certificates(move || identity.expiries());
    let host = config.advertise.as_deref();
    let (address, admin_address) = (advertised(host, &*grpc)?, advertised(host, &*admin)?);
    let readiness = Readiness::unready("waiting for a node whose KV can be kept");
    let admin_key = config.cluster.admin_key(&config.admin);
    let admin_key = admin_key.map_err(|error| NodeError::Config(in_full(&error)))?;
    let config_page = chassis::admin::config_page(config.shown.clone());
    let guarded = admin_key.guard(config_page, world.identity().refusals().clone());
    let pages = chassis::admin::router(readiness.clone(), metrics.clone()).merge(guarded);
    let mut ports = Ports::admin(admin, pages, config.connections);
    let key = world.identity().block_hash_key();
    let model = tokio::select! {
        biased;
        () = shutdown.wait() => {
            ports.close().await;
            return Ok(());
        }
        model = kept_model(registry, config.model.as_deref(), &key) => model.map_err(PoolNodeError::Watch)?,
    };
    let parts = PoolParts::build(&id, config, model, world, &metrics).await?;

    let draining = Shutdown::new();
    let own = [proto::v1::pool_server::SERVICE_NAME, proto::v1::node_status_server::SERVICE_NAME];
    let (services, _health) = chassis::rpc::standard_services(&[proto::FILE_DESCRIPTOR_SET], &own)
        .map_err(PoolNodeError::Services)?;
    let services = services.add_service(PoolService::new(parts.clone()).server());
    let standings = Standings::default();
    let status = StatusService::new(StatusParts {
        epoch: parts.epoch,
        pool: parts.store.pool().clone(),
        arriving: parts.sequences.clone(),
        worker: None,
        standings: standings.clone(),
        switch: None,
        draining: draining.clone(),
        world: parts.world.clone(),
    });
    let callers = Callers::known_to(&parts.world).calling(&address);
    ports.grpc(grpc, services.add_service(status.server()), config.connections, callers);
    let gauges = NodeMetrics::new(&metrics).follow(parts.store.pool().clone(), parts.sequences.clone());
    let _gauges = spawn_guarded(ports.gate(), "gauges", gauges);
    let _books = spawn_guarded(ports.gate(), "books", check_books(parts.clone()));

    let watch = keep_ready(readiness.clone(), standings);
    let (work, drain) = (parts.gate.clone(), config.drain);
    let announced = Shutdown::new();
    let running = RunningNode { registry, readiness, ports, work, drain, shutdown, draining, announced };
    let announcement = Announcement {
        id,
        role: Role::Pool,
        epoch: parts.epoch,
        host: parts.host.clone(),
        address,
        admin: admin_address,
        connectors: &parts.connectors,
        model: &parts.model,
        keeps_role: true,
    };
    Ok(running.run(announcement, watch, || ()).await?)
}

/// Sets the readiness from the routers' reports, at intervals. Never returns.
async fn keep_ready(readiness: Readiness, standings: Standings) {
    loop {
        let now = Instant::now();
        readiness.set(standings.refusal(now), standings.rollout_waits_for(now));
        tokio::time::sleep(STANDING_EVERY).await;
    }
}

/// Checks the block pool's integrity if sequences were stored since the last check, but none lately: the check locks
/// the pool.
async fn check_books(parts: PoolParts) {
    let (mut checked, mut seen, mut worked_at) = (0, 0, Instant::now());
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let put = parts.metrics.tokens.get();
        if put != seen || parts.sequences.count() > 0 {
            (seen, worked_at) = (put, Instant::now());
        }
        if put == checked || worked_at.elapsed() < BlockPool::CHECK_AFTER {
            continue;
        }
        checked = put;
        if let Err(error) = parts.store.pool().integrity() {
            parts.metrics.integrity_failures.inc();
            error!(%error, "block pool integrity check failed");
        }
    }
}
