//! The processes of a simulated cluster: what `baton router` and `baton decode` do, in one process.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use chassis::metrics::Metrics;
use chassis::server::ServerLimits;
use chassis::{Gate, Jumps, Shutdown, Task, World, spawn_guarded};
use decode_node::DecodeService;
use engine::backend::flaky::{Failures, Flaky};
use engine::{Backend, Mock, MockSettings, Pace};
use kv_cache::BlockPool;
use node::{Counter, Drive, Lives, NodeConfig, NodeError, NodeParts, RawNodeConfig};
use prefill_node::PrefillService;
use registry::embedded::bootstrap_server;
use registry::memory::TTL;
use registry::{MemoryRegistry, RegistryParts};
use router::admission::Admission;
use router::dispatch::{Budget, Dispatch, Parts};
use router::metrics::RouterMetrics;
use router::text::RouterModels;
use router::{Cluster, NodeState};
use scheduler::WorkerHandle;
use tonic::service::Routes;
use types::{Epoch, NodeId, NodeInfo, Role, in_full};

use super::log::EventLog;
use super::net::{Crash, SimNet};
use super::plan::{NodeShape, Shape};

pub const ROUTER: &str = "router";
const ROUTER_ADDR: &str = "router:50051";
pub const REGISTRY_URL: &str = "embedded://router:50051";
/// How long a node that is asked to stop may take.
const DRAIN_MS: u64 = 3_000;

/// The model of every node, but for what its steps cost.
pub fn model() -> MockSettings {
    let toml = "
        context_tokens = 1024
        eos_one_in = 60
        [layout]
        block_tokens = 4
        n_layers = 2
        n_kv_heads = 2
        head_dim = 4
    ";
    MockSettings::parse("simulated", toml).expect("right settings")
}

// === a node ===

/// One node: its processes, one after the other, each with one life after another.
#[derive(Debug)]
pub struct NodeHost {
    pub shape: NodeShape,
    net: SimNet,
    seed: u64,
    /// The calendar of its machine.
    pub jumps: Jumps,
    n_processes: u32,
    running: Option<Process>,
    lives: Lived,
}

/// Every life that there was, the last one last. Never held across an await.
type Lived = Arc<Mutex<Vec<LifeSeen>>>;

/// What is seen of a life. It holds nothing that would keep the life from ending.
#[derive(Clone, Debug)]
pub struct LifeSeen {
    pub name: String,
    pub epoch: Epoch,
    pub pool: BlockPool,
    pub worker: WorkerHandle,
    pub gate: Gate,
    pub arriving: Counter,
}

#[derive(Debug)]
struct Process {
    /// Lives before its first one.
    n_lives_before: usize,
    shutdown: Shutdown,
    living: Task<()>,
}

impl NodeHost {
    pub fn new(shape: NodeShape, net: SimNet, seed: u64) -> Self {
        let (jumps, lives) = (Jumps::default(), Lived::default());
        Self { shape, net, seed, jumps, n_processes: 0, running: None, lives }
    }

    pub fn is_running(&self) -> bool {
        self.running.as_ref().is_some_and(|process| !process.living.is_finished())
    }

    /// All lives, which must have given everything back in the end.
    pub fn lives(&self) -> Vec<LifeSeen> {
        locked(&self.lives).clone()
    }

    /// The life that its process is in, or was in when it fell asleep.
    pub fn life(&self) -> Option<LifeSeen> {
        let process = self.running.as_ref()?;
        locked(&self.lives).get(process.n_lives_before..)?.last().cloned()
    }

    /// Begins a process, unless one goes on.
    pub fn start(&mut self) {
        if self.is_running() && !self.running.as_ref().is_some_and(|process| process.shutdown.requested()) {
            return;
        }
        self.crash(Crash::Process);
        self.n_processes += 1;
        let name = self.shape.name.clone();
        let world = World::seeded(self.seed).with_net(self.net.host(&name)).with_jumps(&self.jumps);
        let world = world.fork(&format!("{name} {}", self.n_processes));
        let backend = Box::new(Flaky::new(self.mock(), self.failures()));
        let (shutdown, lives) = (Shutdown::new(), Arc::clone(&self.lives));
        let n_lives_before = locked(&lives).len();
        let run =
            run_here(self.shape.clone(), world, backend, lives, shutdown.clone(), self.net.log().clone());
        let living = spawn_guarded(&Gate::new("simulated node"), "node", run);
        self.running = Some(Process { n_lives_before, shutdown, living });
    }

    fn mock(&self) -> Mock {
        let mut settings = model();
        settings.cost.step_ms = self.shape.step_ms;
        settings.cost.decode_row_ms = self.shape.step_ms / 20.0;
        settings.cost.prefill_token_ms = self.shape.prefill_token_ms;
        let NodeShape { ranks, n_blocks, .. } = self.shape;
        Mock::over_ranks("mock", settings, ranks, n_blocks, Pace::Modelled).expect("memory for a few blocks")
    }

    fn failures(&self) -> Failures {
        let (launch, collect) = self.shape.failing_steps.iter().partition(|step| *step % 2 == 0);
        Failures { launch, collect, ..Failures::default() }
    }

    /// Ends its process without asking. Its tasks may linger, but nobody hears of them any more.
    pub fn crash(&mut self, how: Crash) {
        if self.running.take().is_some() {
            self.net.crash(&self.shape.name, how);
        }
    }

    /// Asks it to stop.
    pub fn drain(&mut self) {
        if let Some(process) = &self.running {
            process.shutdown.trigger();
        }
    }
}

fn locked(lives: &Lived) -> MutexGuard<'_, Vec<LifeSeen>> {
    lives.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A node's process, until it is asked to stop.
async fn run_here(
    shape: NodeShape,
    world: World,
    backend: Box<dyn Backend>,
    lived: Lived,
    shutdown: Shutdown,
    log: EventLog,
) {
    let config = config(&shape);
    let bind = async |addr: &str| world.net().listen(addr).await;
    let (Ok(grpc), Ok(admin)) = (bind(&config.listen).await, bind(&config.admin).await) else {
        // It was killed before it had its ports.
        return;
    };
    let registry_parts = RegistryParts { world: world.clone(), gate: Gate::new("registry") };
    let registry = registry::open(REGISTRY_URL, registry_parts).expect("a right address");
    let services = |role: Role, parts: &NodeParts| {
        let mut lives = locked(&lived);
        let name = format!("{}, life {}", shape.name, lives.len() + 1);
        lives.push(LifeSeen::of(name, parts));
        Ok(services(role, parts, &config))
    };
    let lives = Lives {
        config: &config,
        id: NodeId::new(&*shape.name),
        role: shape.role,
        registry: &*registry,
        services: &services,
        world,
        metrics: Metrics::new("node"),
        drive: Drive::Task,
        shutdown,
        grpc,
        admin,
    };
    match node::lives::run(lives, backend).await {
        Ok(()) => {}
        // The plan gives drains less time than a request may take.
        Err(error @ (NodeError::Drain(_) | NodeError::WorkerLate(_))) => {
            log.say(format_args!("{} is cut short: {error}", shape.name));
        }
        Err(error) => log.accuse(format_args!("{} ends: {}", shape.name, in_full(&error))),
    }
}

fn services(role: Role, parts: &NodeParts, config: &NodeConfig) -> Routes {
    let mut services = Routes::default();
    if role.prefills() {
        services = services.add_service(PrefillService::new(parts.clone()).server());
    }
    if role.decodes() {
        services = services.add_service(DecodeService::new(parts.clone(), config.decode.clone()).server());
    }
    services
}

impl LifeSeen {
    fn of(name: String, parts: &NodeParts) -> Self {
        let NodeParts { epoch, pool, worker, gate, arriving, .. } = parts.clone();
        Self { name, epoch, pool, worker, gate, arriving }
    }
}

fn config(shape: &NodeShape) -> NodeConfig {
    let mut raw = RawNodeConfig::default();
    raw.node.listen = format!("{}:7000", shape.name);
    raw.node.admin = format!("{}:7001", shape.name);
    raw.node.advertise.clone_from(&shape.name);
    raw.node.drain_ms = DRAIN_MS;
    raw.transfer.listen = format!("{}:7002", shape.name);
    raw.transfer.connectors = vec!["tcp".to_owned()];
    raw.transfer.streams = shape.streams;
    raw.transfer.stall_ms = shape.stall_ms;
    raw.transfer.frame_bytes = shape.frame_bytes;
    raw.scheduler.step_tokens_max = 64;
    raw.scheduler.sequences_max = 16;
    raw.scheduler.growth_blocks = shape.growth_blocks;
    raw.scheduler.queue_ms_max = shape.queue_ms_max;
    raw.decode.local_tokens_max = shape.local_tokens_max;
    raw.decode.landings_max = shape.landings_max;
    NodeConfig::resolve(raw).expect("right settings")
}

// === the router ===

/// The router, with the registry in it, in one life after another.
#[derive(Debug)]
pub struct RouterHost {
    shape: Shape,
    net: SimNet,
    seed: u64,
    n_lives: u32,
    running: Option<RouterLife>,
    /// Routes that were tried in all lives but this one.
    n_failed_before: u64,
}

#[derive(Debug)]
struct RouterLife {
    dispatch: Dispatch,
    cluster: Cluster,
    metrics: RouterMetrics,
    registry: MemoryRegistry,
    _following: Task<()>,
    _serving: Task<()>,
}

impl RouterHost {
    pub fn new(shape: Shape, net: SimNet, seed: u64) -> Self {
        Self { shape, net, seed, n_lives: 0, running: None, n_failed_before: 0 }
    }

    /// The way in, while it lives.
    pub fn dispatch(&self) -> Option<Dispatch> {
        self.running.as_ref().map(|life| life.dispatch.clone())
    }

    pub fn cluster(&self) -> Option<&Cluster> {
        self.running.as_ref().map(|life| &life.cluster)
    }

    /// Attempts that failed for another reason than a full node, in all lives.
    pub fn n_failed_attempts(&self) -> u64 {
        self.n_failed_before + self.running.as_ref().map_or(0, |life| failed_attempts(&life.metrics))
    }

    /// Who is in the cluster, by the one who knows.
    pub fn members(&self) -> Vec<NodeInfo> {
        self.running.as_ref().map(|life| life.registry.members()).unwrap_or_default()
    }

    pub async fn start(&mut self) {
        if self.running.is_some() {
            return;
        }
        self.n_lives += 1;
        let world = World::seeded(self.seed).with_net(self.net.host(ROUTER));
        let world = world.fork(&format!("{ROUTER} {}", self.n_lives));
        let gate = Gate::new("router");
        let registry = MemoryRegistry::new(TTL, world.clone(), gate.clone());
        let cluster = Cluster::new(world.clone(), gate.clone(), RouterModels::default(), None);
        let following = cluster.follow(&registry).await.expect("a table in memory can be watched");
        let listener = world.net().listen(ROUTER_ADDR).await.expect("the port is free");
        let routes = Routes::new(bootstrap_server(registry.clone(), Shutdown::new()));
        let serving = chassis::rpc::serve(listener, routes, Shutdown::new(), ServerLimits::default());
        let serving = async move { drop(serving.await) };
        let metrics = RouterMetrics::new(&Metrics::new("router"));
        let dispatch = Dispatch::new(self.parts(world, cluster.clone(), metrics.clone()));
        self.running = Some(RouterLife {
            dispatch,
            cluster,
            metrics,
            registry,
            _following: following,
            _serving: spawn_guarded(&gate, "serve", serving),
        });
    }

    fn parts(&self, world: World, cluster: Cluster, metrics: RouterMetrics) -> Parts {
        Parts {
            world,
            cluster,
            policy: router::policy::by_name(self.shape.policy).expect("a policy by that name"),
            admission: Admission::new(64),
            order: self.shape.order,
            budget: Budget { attempts_max: self.shape.attempts_max, wait_max: self.shape.wait_max },
            metrics,
        }
    }

    pub fn crash(&mut self, how: Crash) {
        self.n_failed_before = self.n_failed_attempts();
        if let Some(life) = self.running.take() {
            self.net.crash(ROUTER, how);
            life.cluster.forget();
        }
    }
}

fn failed_attempts(metrics: &RouterMetrics) -> u64 {
    let is_failure =
        |kind: &&types::RefusalKind| !matches!(kind, types::RefusalKind::Full | types::RefusalKind::Queue);
    let kinds = types::RefusalKind::ALL.iter().filter(is_failure);
    kinds.map(|kind| metrics.retries.with_label_values(&[kind.code()]).get()).sum()
}

// === all of them ===

/// The cluster of one run.
#[derive(Debug)]
pub struct Hosts {
    pub router: RouterHost,
    pub nodes: Vec<NodeHost>,
}

impl Hosts {
    pub async fn start(shape: &Shape, net: &SimNet, seed: u64) -> Self {
        let mut router = RouterHost::new(shape.clone(), net.clone(), seed);
        router.start().await;
        let mut nodes = Vec::new();
        for shape in &shape.nodes {
            let mut node = NodeHost::new(shape.clone(), net.clone(), seed);
            node.start();
            nodes.push(node);
        }
        Self { router, nodes }
    }

    pub fn node(&mut self, name: &str) -> Option<&mut NodeHost> {
        self.nodes.iter_mut().find(|node| node.shape.name == name)
    }

    /// Whether the router knows every node in the life that it is in.
    pub fn is_whole(&self) -> bool {
        let everyone = self.router.cluster().map(Cluster::everyone).unwrap_or_default();
        let is_known = |node: &NodeHost| {
            everyone.iter().any(|(info, state)| {
                let epoch = node.life().map(|life| life.epoch);
                info.id.as_str() == node.shape.name && Some(info.epoch) == epoch && *state == NodeState::Ready
            })
        };
        self.nodes.iter().all(is_known)
    }

    /// Everyone who does not live begins a new life.
    pub async fn start_all(&mut self) {
        self.router.start().await;
        self.nodes.iter_mut().for_each(NodeHost::start);
    }
}

/// How long a fresh cluster may need until everybody knows everybody.
pub const WHOLE_WITHIN: Duration = Duration::from_secs(5);
