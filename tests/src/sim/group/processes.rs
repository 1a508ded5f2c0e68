//! The processes of the node, and what happens to them: they die, or stand still.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use chassis::admin::Readiness;
use chassis::net::MemoryNet;
use chassis::{Gate, Shutdown, Standstill, Task, World, spawn_guarded};
use kv_transfer::TransferMetrics;
use node::NodeConfig;
use node::group::{FollowerParts, GroupError, follow};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};
use types::in_full;

use super::super::net::{Crash, SimNet};
use super::clock::Seen;
use super::plan::{Fault, NodeProcess, ProcessFault};
use super::reference::{JOIN, Reference};
use super::relay::{ConnectionEnds, FollowerNet};
use super::reports::LandingReports;
use super::waits::{LOOK_EVERY, THREADS_RUN_WITHIN_MS, Waits};

/// The head's host.
pub const HEAD: &str = "head";
/// A process that stands still for longer is lost.
const SILENT_MAX: Duration = Duration::from_secs(5);
/// Limit of faults of processes in a plan.
const FAULTS_MAX: usize = 16;

/// The processes of one node.
#[derive(Debug)]
pub struct Processes {
    pub settings: ProcessSettings,
    head: Head,
    followers: Vec<Follower>,
}

/// The common settings of all processes.
#[derive(Clone, Debug)]
pub struct ProcessSettings {
    pub n_followers: usize,
    pub reference: &'static Reference,
    pub waits: Waits,
    pub world: World,
    /// The network of the connections to the head.
    pub joining: MemoryNet,
    pub kv: SimNet,
    pub delay: Duration,
    pub faults: Vec<Fault>,
    pub reports: LandingReports,
    /// The gate of relays.
    pub own_gate: Gate,
}

/// The head's process. The run itself executes it.
#[derive(Debug, Default)]
struct Head {
    standstill: Standstill,
    dead: Shutdown,
}

/// A follower's process.
#[derive(Debug)]
struct Follower {
    ends: ConnectionEnds,
    standstill: Standstill,
    gate: Gate,
    /// Ready when the follower has loaded its weights.
    readiness: Readiness,
    /// `None` after its death, or when its end was checked. Never held across an await.
    life: Mutex<Option<Task<Result<(), GroupError>>>>,
}

/// Returns the name of a follower's host.
pub fn follower_host(follower: usize) -> String {
    format!("follower-{follower}")
}

impl Processes {
    /// Starts the followers.
    pub fn start(settings: ProcessSettings) -> Arc<Self> {
        let (process_faults, triggered) = mpsc::channel(FAULTS_MAX);
        let follower = |nth| Follower::start(&settings, nth, process_faults.clone());
        let followers = (0..settings.n_followers).map(follower).collect();
        let own_gate = settings.own_gate.clone();
        let all = Arc::new(Self { settings, head: Head::default(), followers });
        spawn_guarded(&own_gate, "faults of processes", Arc::clone(&all).apply_all(triggered)).detach();
        all
    }

    /// Applies the faults that messages trigger.
    async fn apply_all(self: Arc<Self>, mut triggered: mpsc::Receiver<ProcessFault>) {
        while let Some(fault) = triggered.recv().await {
            let all = Arc::clone(&self);
            let apply = async move {
                all.settings.waits.log.say(format_args!("{fault:?}"));
                all.apply(fault).await;
            };
            spawn_guarded(&self.settings.own_gate, "fault of a process", apply).detach();
        }
    }

    /// Applies a fault, and waits until a pause is over.
    pub async fn apply(&self, fault: ProcessFault) {
        match fault {
            ProcessFault::Dies(NodeProcess::Head, how) => self.end_head(how),
            ProcessFault::Dies(NodeProcess::Follower(follower), how) => self.end_follower(follower, how),
            ProcessFault::Pauses(process, time) => self.pause(process, time).await,
        }
    }

    // === the head ===

    /// Runs a part of the head, and all tasks that it starts. Returns `None` if the head dies.
    pub async fn of_head<T>(&self, part: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            () = self.head.dead.wait() => None,
            value = self.head.standstill.clone().run(part) => Some(value),
        }
    }

    /// Returns the handle that stops the head's threads.
    pub fn standstill_of_head(&self) -> Standstill {
        self.head.standstill.clone()
    }

    pub fn head_is_dead(&self) -> bool {
        self.head.dead.requested()
    }

    /// The tasks continue, because they must still release what they hold. None of their messages arrives.
    fn end_head(&self, how: Crash) {
        self.note(|seen| {
            for connection in &mut seen.connections {
                connection.must_end = true;
                connection.is_closed |= how == Crash::Process;
            }
            seen.is_head_stopped = false;
        });
        self.settings.kv.crash(HEAD, how);
        self.followers.iter().for_each(|follower| follower.ends.end(how));
        self.head.standstill.go_on();
        self.head.dead.trigger();
    }

    // === followers ===

    /// Ends a process. Its tasks continue as those of the head do.
    fn end_follower(&self, follower: usize, how: Crash) {
        self.note(|seen| {
            let connection = &mut seen.connections[follower];
            connection.must_end = true;
            connection.is_closed |= how == Crash::Process;
        });
        self.settings.kv.crash(&follower_host(follower), how);
        let Follower { ends, standstill, life, .. } = &self.followers[follower];
        ends.end(how);
        standstill.go_on();
        life.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    /// Checks that the followers end by themselves if the head is dead. One that has not joined tries to for its own time.
    pub async fn check_end_after_head(&self) {
        if self.head_is_dead() {
            self.followers_load().await;
            let followers_end = async {
                while !self.followers.iter().all(Follower::has_ended) {
                    sleep(LOOK_EVERY).await;
                }
            };
            self.settings.waits.in_time("the followers end after their head's death", followers_end).await;
        }
    }

    /// Waits for followers that load their weights. The clock stands still, because the time of their threads is real.
    async fn followers_load(&self) {
        let progress = &self.settings.waits.progress;
        let _stopped = progress.stop_clock();
        for _ in 0..THREADS_RUN_WITHIN_MS {
            let connections = progress.seen().connections;
            let mut all = self.followers.iter().zip(connections);
            if !all.any(|(follower, seen)| seen.is_accepted && follower.is_loading()) {
                return;
            }
            thread::sleep(Duration::from_millis(1));
            tokio::task::yield_now().await;
        }
    }

    /// Checks that all followers end, because their head has.
    pub async fn check_ends(&self) {
        let waits = &self.settings.waits;
        for (nth, Follower { life, gate, .. }) in self.followers.iter().enumerate() {
            let life = life.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(life) = life {
                match waits.soon("a follower ends", life).await {
                    Some(Ok(Err(error))) => {
                        waits.log.say(format_args!("follower {nth} ends: {}", in_full(&error)));
                    }
                    Some(Ok(Ok(()))) => {
                        waits.log.accuse(format_args!("follower {nth} ends without a reason"));
                    }
                    Some(Err(error)) => waits.log.accuse(format_args!("follower {nth}: {error:?}")),
                    None => {}
                }
            }
            waits.all_end(gate).await;
        }
    }

    // === pauses ===

    /// Stops a process for some time, as SIGSTOP does. Threads complete the step that they compute.
    async fn pause(&self, process: NodeProcess, time: Duration) {
        // An earlier pause may end the node or not: that depends on who joins during it.
        while !self.settings.waits.all_have_joined() {
            sleep(LOOK_EVERY).await;
        }
        if self.head_is_dead() {
            return;
        }
        let standstill = match process {
            NodeProcess::Head => &self.head.standstill,
            NodeProcess::Follower(follower) => &self.followers[follower].standstill,
        };
        self.begin_pause(process, time);
        standstill.stop();
        sleep(time).await;
        standstill.go_on();
        match process {
            // The head can notice its followers' end only now.
            NodeProcess::Head => self.note(|seen| seen.is_head_stopped = false),
            NodeProcess::Follower(follower) => {
                self.settings.waits.progress.note(|seen| seen.connections[follower].n_held -= 1);
            }
        }
    }

    fn begin_pause(&self, process: NodeProcess, time: Duration) {
        let connections = match process {
            NodeProcess::Head => 0..self.followers.len(),
            NodeProcess::Follower(follower) => follower..follower + 1,
        };
        self.note(|seen| {
            for connection in &mut seen.connections[connections] {
                connection.must_end |= time > SILENT_MAX && !connection.is_closed;
            }
            match process {
                NodeProcess::Head => seen.is_head_stopped = true,
                NodeProcess::Follower(follower) => seen.connections[follower].n_held += 1,
            }
        });
    }

    /// Waits until no process stands still.
    pub async fn all_go_on(&self) {
        let standstills = || self.followers.iter().map(|follower| &follower.standstill);
        while standstills().chain([&self.head.standstill]).any(Standstill::is_stopped) {
            sleep(LOOK_EVERY).await;
        }
    }

    /// Records the effects of a fault.
    fn note(&self, change: impl FnOnce(&mut Seen)) {
        self.settings.waits.progress.note(|seen| {
            change(seen);
            seen.last_fault = Some(Instant::now());
        });
    }
}

impl Follower {
    fn start(settings: &ProcessSettings, nth: usize, process_faults: mpsc::Sender<ProcessFault>) -> Self {
        let ends = ConnectionEnds::default();
        let net = FollowerNet {
            joining: settings.joining.clone(),
            kv: settings.kv.host(&follower_host(nth)),
            head: JOIN.to_owned(),
            follower: nth,
            delay: settings.delay,
            faults: settings.faults.clone(),
            ends: ends.clone(),
            process_faults,
            progress: settings.waits.progress.clone(),
            reports: settings.reports.clone(),
            gate: settings.own_gate.clone(),
        };
        let config = settings.reference.config(settings.n_followers as u16 + 1, &follower_host(nth));
        let world = settings.world.clone().with_net(Arc::new(net)).fork(&follower_host(nth));
        let gate = Gate::new("follower");
        let standstill = Standstill::default();
        let readiness = Readiness::unready("waiting for the head");
        let following = follow_head(world, gate.clone(), config, nth, readiness.clone());
        let following = standstill.clone().run(following);
        let life = spawn_guarded(&settings.own_gate, "follower", following);
        Self { ends, standstill, gate, readiness, life: Mutex::new(Some(life)) }
    }

    fn is_loading(&self) -> bool {
        self.readiness.check().is_err() && !self.has_ended()
    }

    fn has_ended(&self) -> bool {
        self.life.lock().unwrap_or_else(PoisonError::into_inner).as_ref().is_none_or(Task::is_finished)
    }
}

/// Runs the follower of one stage until its head is gone.
async fn follow_head(
    world: World,
    gate: Gate,
    config: NodeConfig,
    nth: usize,
    readiness: Readiness,
) -> Result<(), GroupError> {
    let parts = FollowerParts {
        world,
        gate,
        config: &config,
        head: JOIN.to_owned(),
        place: nth as u16,
        metrics: TransferMetrics::default(),
        readiness,
    };
    follow(parts, Shutdown::new()).await
}
