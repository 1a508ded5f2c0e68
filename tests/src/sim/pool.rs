//! A simulated pool node: the work of `baton pool`.

use chassis::byte_size::ByteSize;
use chassis::metrics::Metrics;
use chassis::{Gate, Shutdown, Standstill, Task, World, spawn_guarded};
use node::{KvMemorySize, NodeError};
use pool_node::error::PoolNodeError;
use pool_node::{Life, PoolConfig, RawPoolConfig};
use registry::RegistryParts;
use types::{NodeId, in_full};

use super::host::REGISTRY_URL;
use super::log::EventLog;
use super::net::{Crash, SimNet};
use super::plan::{MODELS, POOL};

/// The memory of the pool node: room for a few hundred tokens of the mock's KV.
const MEMORY: ByteSize = ByteSize(256 << 10);

/// The pool node's processes, one after the other.
#[derive(Debug)]
pub struct PoolHost {
    net: SimNet,
    world: World,
    n_processes: u32,
    running: Option<Process>,
}

#[derive(Debug)]
struct Process {
    shutdown: Shutdown,
    standstill: Standstill,
    living: Task<()>,
}

impl PoolHost {
    pub fn new(net: SimNet, seed: u64) -> Self {
        let world = World::seeded(seed);
        Self { net, world, n_processes: 0, running: None }
    }

    /// Starts a process, unless one is running.
    pub fn start(&mut self) {
        let goes_on = |process: &Process| !process.living.is_finished() && !process.shutdown.requested();
        if self.running.as_ref().is_some_and(goes_on) {
            return;
        }
        self.crash(Crash::Process);
        self.n_processes += 1;
        let world = self.world.clone().with_net(self.net.host(POOL));
        let world = world.fork(&format!("{POOL} {}", self.n_processes));
        let (shutdown, standstill) = (Shutdown::new(), Standstill::default());
        let run = standstill.clone().run(run_here(world, shutdown.clone(), self.net.log().clone()));
        let living = spawn_guarded(&Gate::new("simulated pool"), "pool", run);
        self.running = Some(Process { shutdown, standstill, living });
    }

    /// Ends the process without a drain.
    pub fn crash(&mut self, how: Crash) {
        if let Some(process) = self.running.take() {
            self.net.crash(POOL, how);
            process.standstill.go_on();
        }
    }

    /// Stops the process, with its timers and its traffic.
    pub fn stop(&self) {
        if let Some(process) = &self.running {
            process.standstill.stop();
            self.net.hold_host(POOL);
        }
    }

    pub fn go_on(&self) {
        self.running.iter().for_each(|process| process.standstill.go_on());
        self.net.release_host(POOL);
    }

    /// Asks the process to stop.
    pub fn drain(&self) {
        self.running.iter().for_each(|process| process.shutdown.trigger());
    }
}

async fn run_here(world: World, shutdown: Shutdown, log: EventLog) {
    let config = config();
    let bind = async |addr: &str| world.net().listen(addr).await;
    let (Ok(grpc), Ok(admin)) = (bind(&config.listen).await, bind(&config.admin).await) else {
        // The process was killed before it had its ports, so it ends.
        return;
    };
    let registry_parts = RegistryParts { world: world.clone(), gate: Gate::new("registry") };
    let registry = registry::open(REGISTRY_URL, registry_parts).expect("a right address");
    let life = Life {
        config: &config,
        id: NodeId::new(POOL),
        world,
        metrics: Metrics::new("node"),
        registry: &*registry,
        shutdown,
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
