//! A node's process: one life after another over one backend, with sleep between them.
//!
//! When a life ends, its announcement, epoch, connectors and KV end with it, so that no other process relies on them.
//! The backend remains: it sleeps or begins the next life.
//! See `docs/decisions/0015-a-life-ends-with-its-memory.md`.
//!
//! A change of role ends no life: services and announcement are exchanged, and the memory with its prefix cache stays.

use std::fmt;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use chassis::admin::Readiness;
use chassis::error::StartError;
use chassis::metrics::Metrics;
use chassis::rpc::Callers;
use chassis::{Gate, Listener, Shutdown, World, spawn_guarded};
use engine::{Asleep, Backend, BackendError, SleepFailed, WakeFailed};
use registry::{Lock, Registry};
use scheduler::WorkerState;
use tokio::task::spawn_blocking;
use tokio::time::Instant;
use tonic::service::Routes;
use tracing::{info, warn};
use types::{ModelInfo, NodeId, Role, in_full};

use crate::config::NodeConfig;
use crate::error::NodeError;
use crate::gpus;
use crate::group::Group;
use crate::life::{Life, live};
use crate::metrics::ProcessMetrics;
use crate::parts::{BackendParts, Drive, NodeParts, NodeWithoutWorker, WorkerRun};
use crate::ports::{KeptListener, Ports, advertised};
use crate::role::RoleChange;
use crate::switch::{
    Change, PendingSwitch, RoleRequest, Switch, SwitchRefusal, SwitchRequest, SwitchRequests, switch,
};

/// The longest time that the tasks of a life may take to end after its ports are closed.
const END_WITHIN: Duration = Duration::from_secs(10);

/// The longest wait of a switch's caller for the registry to list the node.
const ANNOUNCED_WITHIN: Duration = Duration::from_secs(5);

/// The interval of attempts to sleep while the backend's memory is still in use.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// A function that makes the gRPC services of a role.
pub type Services<'a> = &'a (dyn Fn(Role, &NodeParts) -> Result<Routes, StartError> + Sync);

/// The inputs of a node's process, besides its backend.
pub struct Lives<'a> {
    pub config: &'a NodeConfig,
    pub id: NodeId,
    /// The role in which the node starts.
    pub role: Role,
    pub registry: &'a dyn Registry,
    pub services: Services<'a>,
    pub world: World,
    pub metrics: Metrics,
    pub drive: Drive,
    /// The shutdown that starts the drain of an awake node, or ends a sleeping one.
    pub shutdown: Shutdown,
    pub grpc: Box<dyn Listener>,
    pub admin: Box<dyn Listener>,
    /// The other processes of the node, if there are any. The node ends when one is lost, does not sleep and keeps its
    /// role.
    pub group: Option<Arc<Group>>,
}

/// Runs the node, awake or asleep, until `shutdown`.
pub async fn run(lives: Lives<'_>, backend: Box<dyn Backend>) -> Result<(), NodeError> {
    let Lives { config, id, role, registry, services, world, metrics, drive, shutdown, grpc, admin, group } =
        lives;
    metrics.show_refusals(world.identity().refusals());
    let identity = world.identity().clone();
    metrics.show_certificates(move || identity.expiries());
    let readiness = Readiness::unready("starting");
    let (switch, requests) = switch();
    let host = config.advertise.as_deref();
    let (address, admin_address) = (advertised(host, &*grpc)?, advertised(host, &*admin)?);
    let key = config.cluster.admin_key(&config.admin).map_err(|error| NodeError::Config(in_full(&error)))?;
    let guarded = switch.clone().pages().merge(chassis::admin::config_page(config.shown.clone()));
    let guarded = key.guard(guarded, world.identity().refusals().clone());
    let pages = chassis::admin::router(readiness.clone(), metrics.clone()).merge(guarded);
    let ports = Ports::admin(admin, pages, config.connections);
    let mut node = Node {
        config,
        id,
        role,
        registry,
        services,
        world,
        metrics: ProcessMetrics::new(&metrics),
        drive,
        shutdown,
        readiness,
        switch,
        requests,
        grpc: KeptListener::new(grpc)
            .map_err(|source| NodeError::Listen { addr: address.clone(), source })?,
        address,
        admin: admin_address,
        group: group.clone(),
    };
    let gate = Gate::new("gpus");
    let gpus = gpus::follow(config.gpus(), node.metrics.gpus.clone());
    let reading = spawn_guarded(&gate, "gpus", gpus);
    let ended = match group {
        None => node.go_on(backend).await,
        Some(group) => {
            let shutdown = node.shutdown.clone();
            let stopping = async {
                group.stop_with_followers(&shutdown).await;
                std::future::pending().await
            };
            tokio::select! {
                biased;
                ended = node.go_on(backend) => ended,
                lost = group.lost() => Err(NodeError::Group(lost)),
                ended = stopping => ended,
            }
        }
    };
    drop(reading);
    ports.close().await;
    ended
}

/// The state of a node that is kept from life to life.
struct Node<'a> {
    config: &'a NodeConfig,
    id: NodeId,
    /// The role of the current life; during sleep, that of the last one.
    role: Role,
    registry: &'a dyn Registry,
    services: Services<'a>,
    world: World,
    metrics: ProcessMetrics,
    drive: Drive,
    shutdown: Shutdown,
    readiness: Readiness,
    switch: Switch,
    requests: SwitchRequests,
    grpc: KeptListener,
    address: String,
    admin: String,
    group: Option<Arc<Group>>,
}

/// A caller that waits for a switch to end, with the data for its answer.
struct Waiting {
    asked: PendingSwitch,
    since: Instant,
    /// Device memory in use before the switch, in bytes.
    used_bytes: Option<u64>,
    /// The right to change roles, until the new role is announced.
    _lock: Option<Lock>,
}

/// How the services of one role ended.
enum ServicesEnd {
    /// The process was asked to stop, or the role could not begin.
    Stopped(Result<(), NodeError>),
    /// The node was asked to sleep.
    SleepRequested(Waiting),
    /// The node was asked to take another role.
    RoleRequested(Role, Waiting),
    /// The node could not be announced in the role that the caller requested.
    RoleFailed(NodeError, Waiting),
}

/// How a life ended.
enum LifeEnd {
    /// The process was asked to stop, and the node has drained.
    Stopped,
    /// The node was asked to sleep. The life has returned its backend.
    SleepRequested(Box<dyn Backend>, Waiting),
    /// The life could not begin. The caller that requested the wake still waits for an answer.
    WakeFailed(Box<dyn Backend>, NodeError, Waiting),
}

impl Node<'_> {
    async fn go_on(&mut self, mut backend: Box<dyn Backend>) -> Result<(), NodeError> {
        let mut waiting = None;
        loop {
            let asleep = match self.live(backend, waiting.take()).await? {
                LifeEnd::Stopped => return Ok(()),
                LifeEnd::SleepRequested(backend, asked) => self.fall_asleep(backend, asked).await?,
                LifeEnd::WakeFailed(backend, why, asked) => Ok(self.sleep_on(backend, why, asked).await?),
            };
            backend = match asleep {
                Err(awake) => awake,
                Ok(asleep) => match self.sleep(asleep).await? {
                    None => return Ok(()),
                    Some((woken, asked)) => {
                        waiting = Some(asked);
                        woken
                    }
                },
            };
        }
    }

    /// Runs one life. The caller in `waiting` gets its answer when the node is ready.
    async fn live(
        &mut self,
        backend: Box<dyn Backend>,
        mut waiting: Option<Waiting>,
    ) -> Result<LifeEnd, NodeError> {
        let (used_bytes, world, metrics) = (backend.used_bytes(), self.world.clone(), &self.metrics);
        let (memory, group) = (backend.memory().clone(), self.group.clone());
        let of_backend = BackendParts { model: backend.model(), memory, group };
        let wired = match NodeWithoutWorker::bind(&self.id, self.config, of_backend, &world, metrics).await {
            Ok(wired) => wired,
            Err(why) => match waiting.take() {
                Some(waiting) => return Ok(LifeEnd::WakeFailed(backend, why, waiting)),
                None => return Err(why),
            },
        };
        let (mut parts, worker_run) =
            NodeParts::over(wired, self.config, backend, world, metrics, self.drive)?;
        let mut role_before = self.role;
        loop {
            match self.serve(parts.clone(), waiting.take(), used_bytes).await? {
                ServicesEnd::Stopped(ended) => {
                    threads_end(parts, ended.is_ok().then_some(worker_run)).await;
                    return ended.map(|()| LifeEnd::Stopped);
                }
                ServicesEnd::SleepRequested(asked) => {
                    return Ok(LifeEnd::SleepRequested(backend_of(parts, worker_run).await?, asked));
                }
                ServicesEnd::RoleRequested(role, asked) => {
                    match parts.gate.close(END_WITHIN).await {
                        Ok(()) => {
                            role_before = self.role;
                            self.set_role(role);
                            waiting = Some(asked);
                        }
                        Err(late) => asked.role_stays(self.role, in_full(&late)),
                    }
                    parts = parts.reopened();
                }
                ServicesEnd::RoleFailed(why, asked) => {
                    self.set_role(role_before);
                    asked.role_stays(role_before, in_full(&why));
                }
            }
        }
    }

    /// Serves in the current role until the node is asked for something else. The caller in `waiting` gets its answer
    /// when the node is ready.
    async fn serve(
        &mut self,
        parts: NodeParts,
        mut waiting: Option<Waiting>,
        used_bytes: Option<u64>,
    ) -> Result<ServicesEnd, NodeError> {
        let services = (self.services)(self.role, &parts).map_err(NodeError::Services)?;
        let model = Arc::clone(&parts.model);
        let (ending, worker_stays) = (self.shutdown.child(), Arc::new(AtomicBool::new(false)));
        let announced = Shutdown::new();
        let life = Life {
            config: self.config,
            id: self.id.clone(),
            role: self.role,
            registry: self.registry,
            shutdown: ending.clone(),
            announced: announced.clone(),
            worker_stays: Arc::clone(&worker_stays),
            readiness: self.readiness.clone(),
            switch: self.switch.clone(),
            grpc: Box::new(self.grpc.clone()),
            address: self.address.clone(),
            admin: self.admin.clone(),
        };
        let mut living = pin!(live(parts, services, life));
        let mut is_ready = false;
        let (mut asked, role, lock) = loop {
            tokio::select! {
                biased;
                ended = &mut living => return Ok(ServicesEnd::of(ended, waiting)),
                () = in_use(&self.readiness, &announced), if !is_ready => {
                    is_ready = true;
                    waiting.take().into_iter().for_each(|it| it.done(used_bytes, &announced));
                }
                asked = self.requests.next() => match asked.request {
                    SwitchRequest::Wake(_) => asked.answer(Err(SwitchRefusal::AwakeAlready)),
                    SwitchRequest::Sleep if self.group.is_some() => {
                        let why = "the other processes of this node do not sleep".to_owned();
                        asked.answer(Err(SwitchRefusal::CannotSleep(why)));
                    }
                    SwitchRequest::Sleep => break (asked, None, None),
                    SwitchRequest::Role(wanted) => {
                        let allowed = tokio::select! {
                            biased;
                            ended = &mut living => return Ok(ServicesEnd::of(ended, waiting)),
                            allowed = self.may_take(wanted, &model) => allowed,
                        };
                        match allowed {
                            Ok(lock) => break (asked, Some(wanted.role), lock),
                            Err(refusal) => asked.answer(Err(refusal)),
                        }
                    }
                },
            }
        };
        waiting.take().into_iter().for_each(|it| it.done(used_bytes, &announced));
        match role {
            None => info!("node was asked to sleep"),
            Some(role) => info!(%role, "node was asked to change its role"),
        }
        asked.begins();
        let asked = Waiting { asked, since: Instant::now(), used_bytes: None, _lock: lock };
        worker_stays.store(role.is_some(), Ordering::Relaxed);
        ending.trigger();
        match living.await {
            ended if self.shutdown.requested() => return Ok(ServicesEnd::Stopped(ended)),
            Ok(()) => {}
            Err(NodeError::Drain(late)) => {
                let before = role.map_or("sleep", |_| "role change");
                warn!(%late, "drain before {before} timed out, remaining requests are cancelled")
            }
            Err(error) => return Err(error),
        }
        Ok(match role {
            None => ServicesEnd::SleepRequested(asked),
            Some(role) => ServicesEnd::RoleRequested(role, asked),
        })
    }

    /// Checks that the node may change its role. Returns the right to do so, unless the change is forced.
    async fn may_take(&self, wanted: RoleRequest, model: &ModelInfo) -> Result<Option<Lock>, SwitchRefusal> {
        let RoleRequest { role, force } = wanted;
        if role == self.role {
            return Err(SwitchRefusal::RoleAlready(role));
        }
        if self.group.is_some() {
            let why = "a node of several processes keeps its role".to_owned();
            return Err(SwitchRefusal::CannotChangeRole { role: self.role, why });
        }
        self.certified(role).map_err(|why| SwitchRefusal::CannotChangeRole { role: self.role, why })?;
        if force {
            return Ok(None);
        }
        let change = RoleChange { id: &self.id, model, from: self.role, to: role, world: &self.world };
        change.begin(self.registry).await.map(Some)
    }

    fn set_role(&mut self, role: Role) {
        self.role = role;
        self.metrics.set_role(role);
        self.readiness.set_unready("starting");
    }

    /// Puts the backend to sleep and answers the caller. Returns the backend awake if it cannot sleep.
    async fn fall_asleep(
        &self,
        backend: Box<dyn Backend>,
        waiting: Waiting,
    ) -> Result<Result<Box<dyn Asleep>, Box<dyn Backend>>, NodeError> {
        let waiting = Waiting { used_bytes: backend.used_bytes(), ..waiting };
        match slept(backend, self.drive).await? {
            Ok(asleep) => {
                self.say_asleep();
                let change = waiting.tell(asleep.used_bytes(), None);
                let Change { took, used_bytes_before, used_bytes_after, .. } = change;
                info!(
                    ms = took.as_millis() as u64,
                    used_bytes_before, used_bytes_after, "node is asleep, its device memory is released"
                );
                Ok(Ok(asleep))
            }
            Err(SleepFailed { why, .. }) if why.is_fatal() => Err(NodeError::Sleep(why)),
            Err(SleepFailed { backend, why }) => {
                warn!(error = in_full(&why), "sleep failed, the node stays awake");
                waiting.asked.answer(Err(SwitchRefusal::CannotSleep(in_full(&why))));
                Ok(Err(backend))
            }
        }
    }

    /// Puts the backend back to sleep after a life could not begin, and reports the cause to the caller.
    async fn sleep_on(
        &self,
        backend: Box<dyn Backend>,
        why: NodeError,
        waiting: Waiting,
    ) -> Result<Box<dyn Asleep>, NodeError> {
        let asleep =
            slept(backend, self.drive).await?.map_err(|sleepless| NodeError::Sleep(sleepless.why))?;
        self.say_asleep();
        waiting.not_woken(in_full(&why));
        Ok(asleep)
    }

    /// Refuses a role that the node's certificate is not for, because peers would refuse it.
    fn certified(&self, role: Role) -> Result<(), String> {
        match self.world.identity().tls().map(|tls| tls.name()) {
            Some(name) if !name.is_for(role, &self.id) => {
                Err(format!("`tls.cert` names {name}, and the {role} node {} needs another one", self.id))
            }
            _ => Ok(()),
        }
    }

    fn say_asleep(&self) {
        // A sleeping node is not ready, but blocks no rollout: an operator put it to sleep.
        self.readiness.set(Some("asleep".to_owned()), None);
        self.metrics.sleeps();
    }

    /// Sleeps until the node is woken. If the process is asked to stop, drops the backend and returns `None`.
    async fn sleep(
        &mut self,
        mut asleep: Box<dyn Asleep>,
    ) -> Result<Option<(Box<dyn Backend>, Waiting)>, NodeError> {
        let callers = Callers::known_to(&self.world).calling(&self.address);
        let (grpc, connections) = (Box::new(self.grpc.clone()), self.config.connections);
        let refusing = Ports::refusing(grpc, "the node sleeps", connections, callers);
        let woken = loop {
            let asked = tokio::select! {
                biased;
                () = self.shutdown.wait() => break None,
                asked = self.requests.next() => asked,
            };
            let role = match asked.request {
                SwitchRequest::Wake(role) => role,
                SwitchRequest::Sleep => {
                    asked.answer(Err(SwitchRefusal::AsleepAlready));
                    continue;
                }
                SwitchRequest::Role(_) => {
                    asked.answer(Err(SwitchRefusal::Asleep));
                    continue;
                }
            };
            if let Err(why) = self.certified(role.unwrap_or(self.role)) {
                asked.answer(Err(SwitchRefusal::CannotWake(why)));
                continue;
            }
            let used_bytes = asleep.used_bytes();
            let waiting = Waiting { asked, since: Instant::now(), used_bytes, _lock: None };
            match aside(self.drive, move || asleep.wake()).await? {
                // A stop request that came during the wake prevents the next life.
                Ok(_) if self.shutdown.requested() => break None,
                Ok(backend) => {
                    self.role = role.unwrap_or(self.role);
                    self.metrics.set_role(self.role);
                    break Some((backend, waiting));
                }
                Err(WakeFailed { asleep: same, why }) => {
                    waiting.not_woken(in_full(&why));
                    asleep = same;
                }
            }
        };
        refusing.close().await;
        self.metrics.wakes();
        self.readiness.set_unready("starting");
        Ok(woken)
    }
}

/// Puts the backend to sleep. Tries again while memory is still in use, because connector threads end after
/// their tasks.
async fn slept(
    mut backend: Box<dyn Backend>,
    drive: Drive,
) -> Result<Result<Box<dyn Asleep>, SleepFailed>, NodeError> {
    let give_up = Instant::now() + END_WITHIN;
    loop {
        match aside(drive, move || backend.sleep()).await? {
            Err(SleepFailed { backend: same, why: BackendError::Held(_) }) if Instant::now() < give_up => {
                backend = same;
                tokio::time::sleep(LOOK_EVERY).await;
            }
            done => return Ok(done),
        }
    }
}

/// Waits until all threads that use the GPU have ended. They do so slightly longer than their tasks run, and a thread would
/// crash in CUDA's libraries if the process ended first. A worker that has not drained has no `worker_run`, and may be
/// stuck.
async fn threads_end(parts: NodeParts, worker_run: Option<WorkerRun>) {
    let (wires, worker) = (parts.wires.clone(), parts.worker.clone());
    drop(parts);
    if let Err(late) = wires.close(END_WITHIN).await {
        warn!(%late, "connector threads are still running at process exit");
    }
    let Some(worker_run) = worker_run else { return };
    let ends = async {
        worker.stopped().await;
        drop(worker_run.backend().await);
    };
    if tokio::time::timeout(END_WITHIN, ends).await.is_err() {
        warn!("worker's thread is still running at process exit");
    }
}

/// Returns the backend of an ended life, once all tasks and threads of that life have ended.
async fn backend_of(parts: NodeParts, worker_run: WorkerRun) -> Result<Box<dyn Backend>, NodeError> {
    let (gate, wires, worker) = (parts.gate.clone(), parts.wires.clone(), parts.worker.clone());
    drop(parts);
    gate.close(END_WITHIN).await.map_err(NodeError::Drain)?;
    wires.close(END_WITHIN).await.map_err(NodeError::Drain)?;
    match tokio::time::timeout(END_WITHIN, worker.stopped()).await {
        Ok(WorkerState::Dead(reason)) => Err(NodeError::WorkerDead(reason)),
        Ok(_) => worker_run.backend().await.ok_or(NodeError::BackendLost),
        Err(_) => Err(NodeError::WorkerLate(END_WITHIN)),
    }
}

/// Waits until the node is ready, and for a while until the registry lists it. Cancel-safe.
async fn in_use(readiness: &Readiness, announced: &Shutdown) {
    readiness.wait().await;
    let _ = tokio::time::timeout(ANNOUNCED_WITHIN, announced.wait()).await;
}

/// Runs blocking work on another thread, or inline if the worker is simulated.
async fn aside<T: Send + 'static>(
    drive: Drive,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, NodeError> {
    match drive {
        Drive::Thread => spawn_blocking(work).await.map_err(|_| NodeError::BackendLost),
        Drive::Task => Ok(work()),
    }
}

impl ServicesEnd {
    /// Returns how services ended without a request.
    fn of(ended: Result<(), NodeError>, waiting: Option<Waiting>) -> Self {
        match (ended, waiting) {
            (Err(why @ NodeError::Announce(_)), Some(waiting)) if waiting.is_role_change() => {
                Self::RoleFailed(why, waiting)
            }
            (ended, _) => Self::Stopped(ended),
        }
    }
}

impl Waiting {
    fn is_role_change(&self) -> bool {
        matches!(self.asked.request, SwitchRequest::Role(_))
    }

    /// Answers the caller that the node is awake, or has its new role.
    fn done(self, used_bytes: Option<u64>, announced: &Shutdown) {
        let (request, announced) = (self.asked.request, announced.requested());
        if let SwitchRequest::Role(RoleRequest { role, .. }) = request {
            let ms = self.tell(None, Some(announced)).took.as_millis() as u64;
            return info!(ms, %role, announced, "node has changed its role, its KV stays");
        }
        let Change { took, used_bytes_before, used_bytes_after, .. } = self.tell(used_bytes, Some(announced));
        info!(ms = took.as_millis() as u64, used_bytes_before, used_bytes_after, announced, "node is awake");
    }

    fn role_stays(self, role: Role, why: String) {
        warn!(error = why, %role, "change of role failed, the role stays");
        self.asked.answer(Err(SwitchRefusal::CannotChangeRole { role, why }));
    }

    fn not_woken(self, why: String) {
        warn!(error = why, "wake failed, the node stays asleep");
        self.asked.answer(Err(SwitchRefusal::CannotWake(why)));
    }

    /// Sends the caller a successful answer, with the duration and the memory in use.
    fn tell(self, used_bytes: Option<u64>, announced: Option<bool>) -> Change {
        let change = Change {
            took: self.since.elapsed(),
            used_bytes_before: self.used_bytes,
            used_bytes_after: used_bytes,
            announced,
        };
        self.asked.answer(Ok(change));
        change
    }
}

impl fmt::Debug for Lives<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lives").field("id", &self.id).field("role", &self.role).finish_non_exhaustive()
    }
}
