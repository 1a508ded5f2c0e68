//! The parts of a node that computes: one worker, one block pool, and the connectors over the same memory.

use std::sync::Arc;

use chassis::{Gate, World, spawn_guarded};
use engine::Backend;
use kv_cache::{BlockPool, KvMemory};
use kv_transfer::{ConnectorParts, Faults};
use scheduler::{Driver, WorkerHandle, WorkerParts, WorkerThread};
use tokio::sync::oneshot;
use tokio::task::spawn_blocking;
use types::{Epoch, ModelInfo, NodeId};

use crate::config::NodeConfig;
use crate::connectors::Connectors;
use crate::error::NodeError;
use crate::grammars::Grammars;
use crate::group::Group;
use crate::host::host_id;
use crate::metrics::{NodeMetrics, ProcessMetrics};
use chassis::counted::Counter;

/// The parts that a node's services share. Cheap to clone.
#[derive(Clone, Debug)]
pub struct NodeParts {
    pub world: World,
    pub epoch: Epoch,
    pub host: Arc<str>,
    pub model: Arc<ModelInfo>,
    pub pool: BlockPool,
    pub worker: WorkerHandle,
    pub grammars: Grammars,
    pub connectors: Connectors,
    /// The number of landings whose KV has not fully arrived.
    pub arriving: Counter,
    /// The number of prompts whose KV is held until its landing is known.
    pub held: Counter,
    /// The gate of all work on prompts. A drain waits until it is empty.
    pub gate: Gate,
    /// The gate of the connectors' tasks and threads.
    pub wires: Gate,
    pub metrics: NodeMetrics,
}

/// How the worker's loop is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drive {
    /// The worker has a thread of its own, because the backend's steps block.
    Thread,
    /// The worker is a task in virtual time, for a backend that only models the duration of its steps.
    Task,
}

/// A running worker. It ends when it is drained or its last handle is dropped; dropping this value does not
/// stop it.
#[derive(Debug)]
pub enum WorkerRun {
    Thread(WorkerThread),
    Task(oneshot::Receiver<Box<dyn Backend>>),
}

/// Returns the model as other processes see it: with the configured name if there is one, and the key of
/// block hashes.
fn described(model: &ModelInfo, config: &NodeConfig, world: &World) -> ModelInfo {
    let name = config.model_name.clone().unwrap_or_else(|| model.name.clone());
    let fingerprint = model.fingerprint.clone().hashed_with(&world.identity().block_hash_key());
    ModelInfo { name, fingerprint, ..model.clone() }
}

/// The parts of a life that are made before the worker: an epoch, and connectors over the backend's memory.
#[derive(Debug)]
pub(crate) struct NodeWithoutWorker {
    epoch: Epoch,
    host: Arc<str>,
    model: Arc<ModelInfo>,
    connectors: Connectors,
    wires: Gate,
}

/// The parts of a backend that connectors need.
#[derive(Debug)]
pub(crate) struct BackendParts<'a> {
    pub(crate) model: &'a ModelInfo,
    pub(crate) memory: KvMemory,
    /// The other processes of the node, if there are any.
    pub(crate) group: Option<Arc<Group>>,
}

impl NodeWithoutWorker {
    /// Makes an epoch and starts the connectors. Errors may be temporary, such as a port that another process
    /// uses.
    pub(crate) async fn bind(
        id: &NodeId,
        config: &NodeConfig,
        backend: BackendParts<'_>,
        world: &World,
        metrics: &ProcessMetrics,
    ) -> Result<Self, NodeError> {
        let BackendParts { model, memory, group } = backend;
        let model = Arc::new(described(model, config, world));
        let epoch = group.as_ref().map_or_else(|| world.epoch(), |group| group.epoch());
        let (host, wires) = (Arc::<str>::from(host_id()), Gate::new("wires"));
        let parts = ConnectorParts {
            node: id.clone(),
            epoch,
            memory,
            fingerprint: model.fingerprint.clone(),
            world: world.clone(),
            gate: wires.clone(),
            settings: config.transfer.clone(),
            metrics: metrics.transfer.clone(),
            faults: Faults::none(),
            processes: group.map(|group| group as _),
        };
        let mut connectors = Connectors::build(&config.connectors, &host, &parts).await?;
        if let Some(costs) =
            engine::backend::mock::wire_costs(&config.engine.model).map_err(NodeError::Model)?
        {
            connectors = connectors.paced(costs, &model.layout);
        }
        Ok(Self { epoch, host, model, connectors, wires })
    }
}

impl NodeParts {
    /// Builds a node's parts from the connectors and the backend, and starts the worker.
    pub(crate) fn over(
        wired: NodeWithoutWorker,
        config: &NodeConfig,
        backend: Box<dyn Backend>,
        world: World,
        metrics: &ProcessMetrics,
        drive: Drive,
    ) -> Result<(Self, WorkerRun), NodeError> {
        let grammars = Grammars::of(&*backend);
        let pool = BlockPool::new(backend.memory().layout(), backend.memory().n_blocks());
        let (worker, driver) = scheduler::new_worker(WorkerParts {
            backend,
            pool: pool.clone(),
            world: world.clone(),
            settings: config.scheduler,
            metrics: metrics.scheduler.clone(),
        })
        .map_err(NodeError::Worker)?;
        let worker_run = WorkerRun::start(driver, drive)?;
        let NodeWithoutWorker { epoch, host, model, connectors, wires } = wired;
        let parts = Self {
            world,
            epoch,
            host,
            model,
            pool,
            worker,
            grammars,
            connectors,
            arriving: Counter::default(),
            held: Counter::default(),
            gate: Gate::new("prompts"),
            wires,
            metrics: metrics.node.clone(),
        };
        Ok((parts, worker_run))
    }

    /// Returns the same parts with an open gate, for another role after a drain.
    pub(crate) fn reopened(self) -> Self {
        Self { gate: Gate::new("prompts"), ..self }
    }
}

impl WorkerRun {
    fn start(driver: Driver, drive: Drive) -> Result<Self, NodeError> {
        match drive {
            Drive::Thread => driver.on_thread().map(Self::Thread).map_err(NodeError::Worker),
            Drive::Task => {
                let (backend, in_the_end) = oneshot::channel();
                let turn = async move {
                    // Without a receiver the backend is dropped here, so the send error is ignored.
                    let _ = backend.send(driver.drive_simulated().await);
                };
                spawn_guarded(&Gate::new("worker"), "worker", turn).detach();
                Ok(Self::Task(in_the_end))
            }
        }
    }

    /// Returns the worker's backend after the worker has [stopped](WorkerHandle::stopped); `None` if it panicked.
    pub(crate) async fn backend(self) -> Option<Box<dyn Backend>> {
        match self {
            Self::Thread(thread) => spawn_blocking(|| thread.join()).await.ok().flatten(),
            Self::Task(in_the_end) => in_the_end.await.ok(),
        }
    }
}
