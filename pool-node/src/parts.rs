//! The parts of a pool node: memory, the connectors over it, and the block store.

use std::sync::Arc;

use chassis::metrics::Metrics;
use chassis::{Gate, World};
use kv_cache::KvMemory;
use kv_transfer::{ConnectorParts, Faults, TransferMetrics};
use node::host::host_id;
use node::{Connectors, Counter};
use types::{Epoch, ModelInfo, NodeId, StageLayers};

use crate::config::PoolConfig;
use crate::error::PoolNodeError;
use crate::metrics::PoolMetrics;
use crate::store::BlockStore;

/// The parts that a pool node's services share. Cheap to clone.
#[derive(Clone, Debug)]
pub struct PoolParts {
    pub world: World,
    pub epoch: Epoch,
    pub host: Arc<str>,
    /// The model whose KV is kept.
    pub model: Arc<ModelInfo>,
    pub store: BlockStore,
    pub connectors: Connectors,
    /// The number of incoming and stored sequences.
    pub sequences: Counter,
    pub sequences_max: u32,
    /// The gate of all work on sequences. A drain waits until it is empty.
    pub gate: Gate,
    /// The gate of the connectors' tasks and threads.
    pub wires: Gate,
    pub metrics: PoolMetrics,
}

impl PoolParts {
    /// Allocates the memory, makes the block store, and starts the connectors.
    pub async fn build(
        id: &NodeId,
        config: &PoolConfig,
        model: ModelInfo,
        world: World,
        metrics: &Metrics,
    ) -> Result<Self, PoolNodeError> {
        let (epoch, host, wires) = (world.epoch(), Arc::<str>::from(host_id()), Gate::new("wires"));
        let parts = ConnectorParts {
            node: id.clone(),
            epoch,
            memory: memory(config, &model)?,
            fingerprint: model.fingerprint.clone(),
            world: world.clone(),
            gate: wires.clone(),
            settings: config.transfer.clone(),
            metrics: TransferMetrics::new(metrics),
            faults: Faults::none(),
            processes: None,
        };
        let connectors = Connectors::build(&config.connectors, &host, &parts).await?;
        Ok(Self {
            world,
            epoch,
            host,
            model: Arc::new(model),
            store: BlockStore::new(parts, connectors.all().to_vec()),
            connectors,
            sequences: Counter::default(),
            sequences_max: config.sequences_max,
            gate: Gate::new("sequences"),
            wires,
            metrics: PoolMetrics::new(metrics),
        })
    }
}

fn memory(config: &PoolConfig, model: &ModelInfo) -> Result<KvMemory, PoolNodeError> {
    let refused = |why: String| PoolNodeError::Config(format!("pool.memory: {why}"));
    let bytes = config.memory.bytes().map_err(|error| refused(error.to_string()))?;
    let given =
        usize::try_from(bytes).map_err(|_| refused("more than this machine can address".to_owned()))?;
    let n_blocks = KvMemory::blocks_within(&model.layout, &StageLayers::one(), given);
    if n_blocks == 0 {
        let block_bytes = model.layout.group_indices().map(|group| model.layout.block_bytes(group)).sum();
        return Err(PoolNodeError::TooSmall { bytes, block_bytes });
    }
    KvMemory::host(model.layout.clone(), n_blocks).map_err(PoolNodeError::Memory)
}
