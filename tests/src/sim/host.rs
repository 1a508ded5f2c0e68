//! The processes of a simulated cluster: what `baton router` and `baton decode` do, in one process.

use std::time::Duration;

use chassis::admin::Readiness;
use chassis::metrics::Metrics;
use chassis::server::ServerLimits;
use chassis::{Gate, Jumps, Shutdown, Task, World, spawn_guarded};
use decode_node::DecodeService;
use engine::backend::flaky::{Failures, Flaky};
use engine::{Mock, MockSettings, Pace};
use kv_cache::BlockPool;
use node::metrics::ProcessMetrics;
use node::ports::{Ports, advertised};
use node::{Drive, Life, NodeConfig, NodeParts, RawNodeConfig, live};
use prefill_node::PrefillService;
use registry::embedded::bootstrap_server;
use registry::memory::TTL;
use registry::{MemoryRegistry, RegistryParts};
use router::admission::Admission;
use router::dispatch::{Budget, Dispatch, Parts};
use router::metrics::RouterMetrics;
use router::text::RouterModels;
use router::{Cluster, NodeState};
use tonic::service::Routes;
use types::{NodeId, NodeInfo};

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

/// One node, in one life after another.
#[derive(Debug)]
pub struct NodeHost {
    pub shape: NodeShape,
    net: SimNet,
    seed: u64,
    /// The calendar of its machine.
    pub jumps: Jumps,
    n_lives: u32,
    running: Option<NodeLife>,
    /// What every life had, and must have given back in the end.
    pub pools: Vec<(String, BlockPool)>,
}

#[derive(Debug)]
struct NodeLife {
    parts: NodeParts,
    shutdown: Shutdown,
    living: Task<()>,
}

impl NodeHost {
    pub fn new(shape: NodeShape, net: SimNet, seed: u64) -> Self {
        Self { shape, net, seed, jumps: Jumps::default(), n_lives: 0, running: None, pools: Vec::new() }
    }

    pub fn is_running(&self) -> bool {
        self.running.as_ref().is_some_and(|life| !life.living.is_finished())
    }

    pub fn parts(&self) -> Option<&NodeParts> {
        self.running.as_ref().map(|life| &life.parts)
    }

    /// Begins a life, unless one goes on.
    pub async fn start(&mut self) {
        if self.is_running() && !self.running.as_ref().is_some_and(|life| life.shutdown.requested()) {
            return;
        }
        self.crash(Crash::Process);
        self.n_lives += 1;
        let name = self.shape.name.clone();
        let world = World::seeded(self.seed).with_net(self.net.host(&name)).with_jumps(&self.jumps);
        let world = world.fork(&format!("{name} {}", self.n_lives));
        let config = config(&self.shape);
        let id = NodeId::new(&*name);
        let metrics = Metrics::new("node");
        let counted = ProcessMetrics::new(&metrics);
        let backend = Box::new(Flaky::new(self.mock(), self.failures()));
        let parts = NodeParts::build(&id, &config, backend, world.clone(), &counted, Drive::Task).await;
        let (parts, _crank) = parts.expect("a port that is free, and memory");
        self.pools.push((format!("{name}, life {}", self.n_lives), parts.pool.clone()));
        let shutdown = Shutdown::new();
        let life = live_here(self.shape.clone(), config, world, metrics, parts.clone(), shutdown.clone());
        let living = spawn_guarded(&Gate::new("simulated node"), "node", life);
        self.running = Some(NodeLife { parts, shutdown, living });
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

    /// Ends its life without asking. Its tasks may linger, but nobody hears of them any more.
    pub fn crash(&mut self, how: Crash) {
        if self.running.take().is_some() {
            self.net.crash(&self.shape.name, how);
        }
    }

    /// Asks it to stop.
    pub fn drain(&mut self) {
        if let Some(life) = &self.running {
            life.shutdown.trigger();
        }
    }
}

async fn live_here(
    shape: NodeShape,
    config: NodeConfig,
    world: World,
    metrics: Metrics,
    parts: NodeParts,
    shutdown: Shutdown,
) {
    let bind = async |addr: &str| world.net().listen(addr).await;
    let (Ok(grpc), Ok(admin)) = (bind(&config.listen).await, bind(&config.admin).await) else {
        // It was killed before it had its ports.
        return;
    };
    let registry_parts = RegistryParts { world: world.clone(), gate: Gate::new("registry") };
    let registry = registry::open(REGISTRY_URL, registry_parts).expect("a right address");
    let mut services = Routes::default();
    if shape.role.prefills() {
        services = services.add_service(PrefillService::new(parts.clone()).server());
    }
    if shape.role.decodes() {
        services = services.add_service(DecodeService::new(parts.clone(), config.decode.clone()).server());
    }
    let id = NodeId::new(&*shape.name);
    let (config, role, readiness) = (&config, shape.role, Readiness::unready("starting"));
    let at = |listener| advertised(config.advertise.as_deref(), listener).expect("it is bound");
    let (address, admin_address) = (at(&*grpc), at(&*admin));
    let ports = Ports::admin(admin, chassis::admin::router(readiness.clone(), metrics));
    let registry = &*registry;
    let life = Life { config, id, role, registry, shutdown, readiness, grpc, address, admin: admin_address };
    // A drain that is late is cut short: the plan gives it less time than a request may take.
    let _ = live(parts, services, life).await;
    ports.close().await;
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
        let cluster = Cluster::new(world.clone(), gate.clone(), RouterModels::default());
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
            node.start().await;
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
                let epoch = node.parts().map(|parts| parts.epoch);
                info.id.as_str() == node.shape.name && Some(info.epoch) == epoch && *state == NodeState::Ready
            })
        };
        self.nodes.iter().all(is_known)
    }

    /// Everyone who does not live begins a new life.
    pub async fn start_all(&mut self) {
        self.router.start().await;
        for node in &mut self.nodes {
            node.start().await;
        }
    }
}

/// How long a fresh cluster may need until everybody knows everybody.
pub const WHOLE_WITHIN: Duration = Duration::from_secs(5);
