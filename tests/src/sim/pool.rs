//! A simulated pool node: the work of `baton pool`.

use chassis::byte_size::ByteSize;
use chassis::metrics::Metrics;
use chassis::{Gate, Shutdown, Task, World, spawn_guarded};
use node::{KvMemorySize, NodeError};
use pool_node::error::PoolNodeError;
use pool_node::{Life, PoolConfig, RawPoolConfig};
use registry::RegistryParts;
use types::{NodeId, in_full};

use super::host::REGISTRY_URL;
use super::log::EventLog;
use super::net::{Crash, SimNet};
use super::plan::{MODELS, POOL};

/// Room for a few hundred tokens of the mock's KV.
const MEMORY: ByteSize = ByteSize(256 << 10);

/// The pool node's processes, one after the other.
#[derive(Debug)]
pub struct PoolHost {
    net: SimNet,
    world: World,
    n_processes: u32,
    running: Option<Task<()>>,
}

impl PoolHost {
    pub fn new(net: SimNet, seed: u64) -> Self {
        let world = World::seeded(seed);
        Self { net, world, n_processes: 0, running: None }
    }

    /// Starts a process, unless one is running.
    pub fn start(&mut self) {
        if self.running.as_ref().is_some_and(|living| !living.is_finished()) {
            return;
        }
        self.n_processes += 1;
        let world = self.world.clone().with_net(self.net.host(POOL));
        let world = world.fork(&format!("{POOL} {}", self.n_processes));
        let run = run_here(world, self.net.log().clone());
        self.running = Some(spawn_guarded(&Gate::new("simulated pool"), "pool", run));
    }

    /// Ends its process without a drain.
    pub fn crash(&mut self, how: Crash) {
        if self.running.take().is_some() {
            self.net.crash(POOL, how);
        }
    }
}

async fn run_here(world: World, log: EventLog) {
    let config = config();
    let bind = async |addr: &str| world.net().listen(addr).await;
    let (Ok(grpc), Ok(admin)) = (bind(&config.listen).await, bind(&config.admin).await) else {
        // It was killed before it had its ports.
        return;
    };
    let registry_parts = RegistryParts { world: world.clone(), gate: Gate::new("registry") };
    let registry = registry::open(REGISTRY_URL, registry_parts).expect("a right address");
    let life = Life {
        config: &config,
        id: NodeId::new(POOL),
        world,
        metrics: Metrics::new("pool"),
        registry: &*registry,
        shutdown: Shutdown::new(),
        grpc,
        admin,
    };
    match pool_node::live(life).await {
        Ok(()) | Err(PoolNodeError::Node(NodeError::Drain(_))) => {}
        Err(error) => log.accuse(format_args!("{POOL} ends: {}", in_full(&error))),
    }
}

fn config() -> PoolConfig {
    let mut raw = RawPoolConfig::default();
    raw.pool.memory = KvMemorySize::Bytes(MEMORY);
    raw.pool.model = MODELS[0].to_owned();
    raw.node.listen = format!("{POOL}:7000");
    raw.node.admin = format!("{POOL}:7001");
    raw.node.advertise = POOL.to_owned();
    raw.transfer.listen = format!("{POOL}:7002");
    raw.transfer.connectors = vec!["tcp".to_owned()];
    PoolConfig::resolve(raw).expect("right settings")
}
