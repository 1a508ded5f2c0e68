//! The processes of a simulated cluster: the work of `baton router` and `baton decode`, in one process.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use chassis::metrics::Metrics;
use chassis::rpc::Callers;
use chassis::server::ServerLimits;
use chassis::{Gate, Jumps, Shutdown, Standstill, Task, World, spawn_guarded};
use decode_node::DecodeService;
use engine::backend::flaky::{Failures, Flaky};
use engine::{Backend, Mock, MockSettings, Pace};
use kv_cache::BlockPool;
use node::{Counter, Drive, Lives, NodeConfig, NodeError, NodeParts, RawNodeConfig};
use prefill_node::PrefillService;
use registry::embedded::bootstrap_server;
use registry::memory::TTL;
use registry::{MemoryRegistry, Registry, RegistryParts};
use router::admission::{Admission, AdmissionParts};
use router::balance::{Balance, BalanceParts, BalanceReport};
use router::dispatch::{Budget, Dispatch, DispatchParts};
use router::metrics::RouterMetrics;
use router::text::RouterModels;
use router::{Cluster, NodeState};
use scheduler::WorkerHandle;
use tokio::time::Instant;
use tonic::service::Routes;
use types::{Epoch, NodeId, NodeInfo, Role, in_full};

use super::log::EventLog;
use super::net::{Crash, SimNet};
use super::plan::{MODELS, NodeShape, POOL, ROUTERS, Shape};
use super::pool::PoolHost;

pub const REGISTRY_URL: &str = "embedded://router:50051";
/// The time limit of a node's drain.
pub const DRAIN_MS: u64 = 3_000;
/// The time for which a new request waits for a usable node.
pub const NODES_WAIT_NEW: Duration = Duration::from_secs(2);
/// The number of tokens in a block, in every model.
pub const BLOCK_TOKENS: usize = 4;

/// Returns a model's settings, without the costs of its steps. The second model gives other answers.
pub fn model(name: &str) -> MockSettings {
    let toml = "
        context_tokens = 1024
        eos_one_in = 60
        [layout]
        block_tokens = 4
        n_layers = 2
        n_kv_heads = 2
        head_dim = 4
    ";
    let settings = MockSettings::parse("simulated", toml).expect("right settings");
    assert_eq!(usize::from(settings.layout.block_tokens), BLOCK_TOKENS, "one block size for the judge");
    MockSettings { weights: u64::from(name != MODELS[0]), ..settings }
}

// === a node ===

/// One node: its processes, one after the other, with all lives of each.
#[derive(Debug)]
pub struct NodeHost {
    pub shape: NodeShape,
    net: SimNet,
    /// The node's clock, which continues from one process to the next.
    world: World,
    pub jumps: Jumps,
    n_processes: u32,
    running: Option<Process>,
    lives: Lived,
    /// The time at which the process last continued after a stop.
    went_on: Option<Instant>,
}

/// All lives of a node, in order. Never held across an await.
type Lived = Arc<Mutex<Vec<LifeSeen>>>;

/// A view of one role in one life of a node. It keeps nothing alive.
#[derive(Clone, Debug)]
pub struct LifeSeen {
    pub name: String,
    pub epoch: Epoch,
    pub role: Role,
    pub pool: BlockPool,
    pub worker: WorkerHandle,
    pub gate: Gate,
    pub arriving: Counter,
}

#[derive(Debug)]
struct Process {
    /// The number of the node's lives before the process's first one.
    n_lives_before: usize,
    shutdown: Shutdown,
    standstill: Standstill,
    living: Task<()>,
}

impl NodeHost {
    pub fn new(shape: NodeShape, net: SimNet, seed: u64) -> Self {
        let (jumps, lives) = (Jumps::default(), Lived::default());
        let world = World::seeded(seed).with_jumps(&jumps);
        Self { shape, net, world, jumps, n_processes: 0, running: None, lives, went_on: None }
    }

    pub fn is_running(&self) -> bool {
        self.running.as_ref().is_some_and(|process| !process.living.is_finished())
    }

    /// Returns all lives of the node. Each must have released everything at the end.
    pub fn lives(&self) -> Vec<LifeSeen> {
        locked(&self.lives).clone()
    }

    /// Returns the current life of the process, or the life in which it fell asleep.
    pub fn life(&self) -> Option<LifeSeen> {
        let process = self.running.as_ref()?;
        locked(&self.lives).get(process.n_lives_before..)?.last().cloned()
    }

    /// Starts a process, unless one is running.
    pub fn start(&mut self) {
        if self.is_running() && !self.running.as_ref().is_some_and(|process| process.shutdown.requested()) {
            return;
        }
        self.crash(Crash::Process);
        self.n_processes += 1;
        let name = self.shape.name.clone();
        let world = self.world.clone().with_net(self.net.host(&name));
        let world = world.fork(&format!("{name} {}", self.n_processes));
        let backend = Box::new(Flaky::new(self.mock(), self.failures()));
        let (shutdown, lives) = (Shutdown::new(), Arc::clone(&self.lives));
        let n_lives_before = locked(&lives).len();
        let run =
            run_here(self.shape.clone(), world, backend, lives, shutdown.clone(), self.net.log().clone());
        let standstill = Standstill::default();
        let living = spawn_guarded(&Gate::new("simulated node"), "node", standstill.clone().run(run));
        self.running = Some(Process { n_lives_before, shutdown, standstill, living });
    }

    fn mock(&self) -> Mock {
        let mut settings = model(self.shape.model);
        settings.cost.step_ms = self.shape.step_ms;
        settings.cost.decode_row_ms = self.shape.step_ms / 20.0;
        settings.cost.prefill_token_ms = self.shape.prefill_token_ms;
        let NodeShape { model, ranks, n_blocks, .. } = self.shape;
        Mock::over_ranks(model, settings, ranks, n_blocks, Pace::Modelled).expect("memory for a few blocks")
    }

    fn failures(&self) -> Failures {
        let (launch, collect) = self.shape.failing_steps.iter().partition(|step| *step % 2 == 0);
        Failures { launch, collect, ..Failures::default() }
    }

    /// Ends the process without a drain. Its tasks may linger, but none of their messages arrives.
    pub fn crash(&mut self, how: Crash) {
        if let Some(process) = self.running.take() {
            self.net.crash(&self.shape.name, how);
            // The tasks continue, because lingering tasks must still release what they hold.
            process.standstill.go_on();
        }
    }

    /// Stops the process, with its timers and its traffic.
    pub fn stop(&mut self) {
        if let Some(process) = &self.running {
            process.standstill.stop();
            self.net.hold_host(&self.shape.name);
        }
    }

    pub fn go_on(&mut self) {
        if let Some(process) = self.running.as_ref().filter(|process| process.standstill.is_stopped()) {
            process.standstill.go_on();
            self.went_on = Some(Instant::now());
        }
        self.net.release_host(&self.shape.name);
    }

    /// Returns the time since the process last went on after a stop.
    pub fn went_on_ago(&self) -> Option<Duration> {
        self.went_on.map(|at| at.elapsed())
    }

    /// Returns whether the process has been running for `at_least`, so that its timers have fired.
    pub fn keeps_time(&self, at_least: Duration) -> bool {
        let is_stopped = self.running.as_ref().is_some_and(|process| process.standstill.is_stopped());
        !is_stopped && self.went_on.is_none_or(|at| at.elapsed() >= at_least)
    }

    /// Asks the process to drain and end.
    pub fn drain(&mut self) {
        if let Some(process) = &self.running {
            process.shutdown.trigger();
        }
    }
}

fn locked(lives: &Lived) -> MutexGuard<'_, Vec<LifeSeen>> {
    lives.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a node's process until it is asked to end.
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
        // The process was killed before it had its ports, so it ends.
        return;
    };
    let registry_parts = RegistryParts { world: world.clone(), gate: Gate::new("registry") };
    let registry = registry::open(REGISTRY_URL, registry_parts).expect("a right address");
    let services = |role: Role, parts: &NodeParts| {
        let mut lives = locked(&lived);
        let name = format!("{}, life {}", shape.name, lives.len() + 1);
        lives.push(LifeSeen::of(name, role, parts));
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
        group: None,
    };
    match node::lives::run(lives, backend).await {
        Ok(()) => {}
        // A cut drain is no failure of the run: the plan gives drains less time than a request may take.
        Err(error @ (NodeError::Drain(_) | NodeError::WorkerLate(_))) => {
            log.say(format_args!("{} is cut short: {error}", shape.name));
        }
        Err(error) => log.accuse(format_args!("{} ends: {}", shape.name, in_full(&error))),
    }
}

fn services(role: Role, parts: &NodeParts, config: &NodeConfig) -> Routes {
    // A node that changes its role asks the health of others.
    let (mut services, _health) = chassis::rpc::standard_services(&[], &[]).expect("described");
    if role.prefills() {
        services = services.add_service(PrefillService::new(parts.clone()).server());
    }
    if role.decodes() {
        services = services.add_service(DecodeService::new(parts.clone(), config.decode.clone()).server());
    }
    services
}

impl LifeSeen {
    fn of(name: String, role: Role, parts: &NodeParts) -> Self {
        let NodeParts { epoch, pool, worker, gate, arriving, .. } = parts.clone();
        Self { name, epoch, role, pool, worker, gate, arriving }
    }
}

fn config(shape: &NodeShape) -> NodeConfig {
    let mut raw = RawNodeConfig::default();
    raw.node.listen = format!("{}:7000", shape.name);
    raw.node.admin = format!("{}:7001", shape.name);
    raw.node.advertise.clone_from(&shape.name);
    raw.node.drain_ms = DRAIN_MS;
    // The operator has no key.
    raw.cluster.insecure = true;
    raw.transfer.listen = format!("{}:7002", shape.name);
    raw.transfer.connectors = vec!["tcp".to_owned()];
    raw.expert.transfer.streams = shape.streams;
    raw.expert.transfer.stall_ms = shape.stall_ms;
    raw.expert.transfer.frame_bytes = shape.frame_bytes;
    raw.expert.scheduler.step_tokens_max = shape.step_tokens_max;
    raw.expert.scheduler.sequences_max = 16;
    raw.expert.scheduler.growth_blocks = shape.growth_blocks;
    raw.expert.scheduler.queue_ms_max = shape.queue_ms_max;
    raw.expert.decode.local_tokens_max = shape.local_tokens_max;
    raw.expert.decode.landings_max = shape.landings_max;
    NodeConfig::resolve(raw).expect("right settings")
}

// === the router ===

/// A router: its lives, one after the other. The registry is in the first router.
#[derive(Debug)]
pub struct RouterHost {
    pub name: &'static str,
    shape: Shape,
    net: SimNet,
    world: World,
    n_lives: u32,
    running: Option<RouterLife>,
    /// The number of failed attempts in all earlier lives.
    n_failed_before: u64,
}

#[derive(Debug)]
struct RouterLife {
    dispatch: Dispatch,
    cluster: Cluster,
    metrics: RouterMetrics,
    /// The registry in this router; `None` if it uses the first router's.
    registry: Option<MemoryRegistry>,
    standstill: Standstill,
    _following: Task<()>,
    _serving: Option<Task<()>>,
    _lines: Task<()>,
    /// Moves nodes between roles.
    balance: Option<Task<()>>,
}

impl RouterHost {
    pub fn new(name: &'static str, shape: Shape, net: SimNet, seed: u64) -> Self {
        let world = World::seeded(seed);
        Self { name, shape, net, world, n_lives: 0, running: None, n_failed_before: 0 }
    }

    /// Returns the router's endpoint and the process behind it, while it runs.
    pub fn dispatch(&self) -> Option<(Dispatch, Standstill)> {
        self.running.as_ref().map(|life| (life.dispatch.clone(), life.standstill.clone()))
    }

    /// Stops the process, with its timers and its traffic.
    pub fn stop(&self) {
        if let Some(life) = &self.running {
            life.standstill.stop();
            self.net.hold_host(self.name);
        }
    }

    pub fn go_on(&self) {
        self.running.iter().for_each(|life| life.standstill.go_on());
        self.net.release_host(self.name);
    }

    /// Moves no more nodes between roles, in this life and in later ones.
    pub fn stop_balancing(&mut self) {
        self.shape.balance = None;
        self.running.iter_mut().for_each(|life| life.balance = None);
    }

    /// Returns the number of nodes that this life has moved.
    pub fn n_moves(&self) -> u64 {
        let moved = |life: &RouterLife| life.metrics.role_moves.with_label_values(&["moved"]).get();
        self.running.as_ref().map_or(0, moved)
    }

    pub fn cluster(&self) -> Option<&Cluster> {
        self.running.as_ref().map(|life| &life.cluster)
    }

    /// Returns the values that the router still holds for requests; none if no request is under way.
    pub fn left_over(&self) -> Option<String> {
        let life = self.running.as_ref()?;
        let (n_inside, n_assigned) = (life.dispatch.admission().n_inside(), life.cluster.n_assigned());
        let left = || format!("{}: {n_inside} requests in lines, {n_assigned} assigned to nodes", self.name);
        (n_inside > 0 || n_assigned > 0).then(left)
    }

    /// Checks the router's lines.
    pub fn integrity(&self) -> Result<(), String> {
        self.running.as_ref().map_or(Ok(()), |life| life.dispatch.admission().integrity())
    }

    /// Returns the number of attempts, in all lives, that failed for another reason than a full node.
    pub fn n_failed_attempts(&self) -> u64 {
        self.n_failed_before + self.running.as_ref().map_or(0, |life| failed_attempts(&life.metrics))
    }

    /// Returns the number of streams that were continued on another node, in this life.
    pub fn n_continuations(&self) -> u64 {
        self.running.as_ref().map_or(0, |life| life.metrics.continuations.get())
    }

    /// Returns the members of the cluster in this router's registry.
    pub fn members(&self) -> Vec<NodeInfo> {
        let registry = self.running.as_ref().and_then(|life| life.registry.as_ref());
        registry.map(MemoryRegistry::members).unwrap_or_default()
    }

    pub async fn start(&mut self) {
        if self.running.is_some() {
            return;
        }
        self.n_lives += 1;
        let standstill = Standstill::default();
        let life = standstill.clone().run(self.life(standstill)).await;
        self.running = Some(life);
    }

    async fn life(&self, standstill: Standstill) -> RouterLife {
        let world = self.world.clone().with_net(self.net.host(self.name));
        let world = world.fork(&format!("{} {}", self.name, self.n_lives));
        let gate = Gate::new("router");
        let registry =
            (self.name == ROUTERS[0]).then(|| MemoryRegistry::new(TTL, world.clone(), gate.clone()));
        let cluster = Cluster::new(world.clone(), gate.clone(), RouterModels::default(), None);
        let (following, serving, shared): (_, _, Arc<dyn Registry>) = match &registry {
            Some(registry) => {
                let listener =
                    world.net().listen(&format!("{}:50051", self.name)).await.expect("a free port");
                let routes = Routes::new(bootstrap_server(registry.clone(), Shutdown::new()));
                let (limits, callers) = (ServerLimits::default(), Callers::known_to(&world));
                let serving = chassis::rpc::serve(listener, routes, Shutdown::new(), limits, callers);
                let serving = spawn_guarded(&gate, "serve", async move { drop(serving.await) });
                (cluster.follow(registry, None).await, Some(serving), Arc::new(registry.clone()))
            }
            None => {
                let parts = RegistryParts { world: world.clone(), gate: gate.clone() };
                let remote = registry::open(REGISTRY_URL, parts).expect("a right address");
                (cluster.follow(&*remote, None).await, None, remote)
            }
        };
        let metrics = RouterMetrics::new(&Metrics::new("router"));
        let dispatch = Dispatch::new(self.parts(world.clone(), cluster.clone(), metrics.clone()));
        let balance = self.shape.balance.map(|settings| BalanceParts {
            settings,
            world,
            cluster: cluster.clone(),
            admission: dispatch.admission().clone(),
            registry: shared,
            moves: metrics.role_moves.clone(),
        });
        let balance = balance.map(|parts| Balance::new(parts, BalanceReport::default()).run());
        RouterLife {
            _lines: spawn_guarded(&gate, "lines", dispatch.serve_lines()),
            balance: balance.map(|balance| spawn_guarded(&gate, "balance", balance)),
            dispatch,
            cluster,
            metrics,
            registry,
            standstill,
            _following: following.expect("it need not be there yet"),
            _serving: serving,
        }
    }

    fn parts(&self, world: World, cluster: Cluster, metrics: RouterMetrics) -> DispatchParts {
        let policy = router::policy::by_name(self.shape.policy).expect("a policy by that name");
        let admission = Admission::new(AdmissionParts {
            world: world.clone(),
            cluster: cluster.clone(),
            order: self.shape.order,
            computing: policy.computing(),
            requests_max: 64,
            wait_max: self.shape.wait_max,
            metrics: metrics.clone(),
        });
        DispatchParts {
            world,
            cluster,
            policy,
            admission,
            order: self.shape.order,
            explain_share: 0.0,
            budget: Budget {
                attempts_max: self.shape.attempts_max,
                wait_max: self.shape.wait_max,
                nodes_wait_new: NODES_WAIT_NEW,
                nodes_wait_begun: Duration::from_secs(30),
            },
            metrics,
            drain: router::drain::Drain::default(),
        }
    }

    pub fn crash(&mut self, how: Crash) {
        self.n_failed_before = self.n_failed_attempts();
        if let Some(life) = self.running.take() {
            self.net.crash(self.name, how);
            life.standstill.go_on();
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

/// All processes of one run's cluster.
#[derive(Debug)]
pub struct Hosts {
    /// The routers. The first one has the registry.
    pub routers: Vec<RouterHost>,
    pub nodes: Vec<NodeHost>,
    pub pool: Option<PoolHost>,
}

impl Hosts {
    pub async fn start(shape: &Shape, net: &SimNet, seed: u64) -> Self {
        let routers = ROUTERS[..shape.n_routers].iter();
        let routers = routers.map(|name| RouterHost::new(name, shape.clone(), net.clone(), seed)).collect();
        let nodes = shape.nodes.iter().map(|node| NodeHost::new(node.clone(), net.clone(), seed)).collect();
        let pool = shape.has_pool.then(|| PoolHost::new(net.clone(), seed));
        let mut hosts = Self { routers, nodes, pool };
        hosts.start_all().await;
        hosts
    }

    pub fn node(&mut self, name: &str) -> Option<&mut NodeHost> {
        self.nodes.iter_mut().find(|node| node.shape.name == name)
    }

    pub fn router(&mut self, name: &str) -> Option<&mut RouterHost> {
        self.routers.iter_mut().find(|router| router.name == name)
    }

    pub async fn start_one(&mut self, name: &str) {
        if let Some(node) = self.node(name) {
            node.start();
        } else if let Some(router) = self.router(name) {
            router.start().await;
        } else if name == POOL {
            self.pool.iter_mut().for_each(PoolHost::start);
        }
    }

    pub fn crash(&mut self, name: &str, how: Crash) {
        if let Some(node) = self.node(name) {
            node.crash(how);
        } else if let Some(router) = self.router(name) {
            router.crash(how);
        } else if name == POOL {
            self.pool.iter_mut().for_each(|pool| pool.crash(how));
        }
    }

    pub fn stop(&mut self, name: &str) {
        self.node(name).into_iter().for_each(NodeHost::stop);
        self.router(name).into_iter().for_each(|router| router.stop());
        self.pool.iter().filter(|_| name == POOL).for_each(PoolHost::stop);
    }

    pub fn go_on(&mut self, name: &str) {
        self.node(name).into_iter().for_each(NodeHost::go_on);
        self.router(name).into_iter().for_each(|router| router.go_on());
        self.pool.iter().filter(|_| name == POOL).for_each(PoolHost::go_on);
    }

    /// Asks a process to stop.
    pub fn drain(&mut self, name: &str) {
        self.node(name).into_iter().for_each(NodeHost::drain);
        self.pool.iter().filter(|_| name == POOL).for_each(PoolHost::drain);
    }

    /// Returns whether every router knows every node in its present life and role.
    pub fn is_whole(&self) -> bool {
        self.routers.iter().all(|router| self.is_known_to(router))
    }

    fn is_known_to(&self, router: &RouterHost) -> bool {
        let everyone = router.cluster().map(Cluster::everyone).unwrap_or_default();
        let is_ready = |name: &str, life: Option<(Epoch, Role)>| {
            everyone.iter().any(|(info, state)| {
                let is_it =
                    info.id.as_str() == name && life.is_none_or(|life| (info.epoch, info.role) == life);
                is_it && *state == NodeState::Ready
            })
        };
        let is_known = |node: &NodeHost| {
            node.life().is_some_and(|life| is_ready(&node.shape.name, Some((life.epoch, life.role))))
        };
        self.nodes.iter().all(is_known) && (self.pool.is_none() || is_ready(POOL, None))
    }

    /// Starts every process that has ended, and continues every stopped one.
    pub async fn start_all(&mut self) {
        for router in &mut self.routers {
            router.go_on();
            router.start().await;
        }
        for node in &mut self.nodes {
            node.go_on();
            node.start();
        }
        if let Some(pool) = &mut self.pool {
            pool.go_on();
            pool.start();
        }
    }
}

/// The time within which every router of a new cluster must know every node.
pub const WHOLE_WITHIN: Duration = Duration::from_secs(5);
