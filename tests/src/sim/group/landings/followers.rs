//! The followers of the node, and what happens to their processes.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use chassis::net::MemoryNet;
use chassis::{Gate, Standstill, Task, World, spawn_guarded};
use node::group::GroupError;
use tokio::time::{Instant, sleep};
use types::in_full;

use super::super::super::net::{Crash, SimNet};
use super::super::plan::Fault;
use super::super::reference::{JOIN, config};
use super::super::relay::{ConnectionEnds, FollowerNet};
use super::super::reports::LandingReports;
use super::super::run::follower;
use super::super::waits::Waits;

/// A follower that stands still for longer is lost.
const SILENT_MAX: Duration = Duration::from_secs(5);

/// The followers of one node.
#[derive(Debug)]
pub struct Followers {
    all: Vec<Follower>,
    pub settings: FollowerSettings,
}

/// What all followers have in common.
#[derive(Clone, Debug)]
pub struct FollowerSettings {
    pub n_followers: usize,
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

/// A follower's process.
#[derive(Debug)]
struct Follower {
    ends: ConnectionEnds,
    standstill: Standstill,
    gate: Gate,
    /// `None` after its death. Never held across an await.
    life: Mutex<Option<Task<Result<(), GroupError>>>>,
}

/// Returns the name of a follower's host.
pub fn host(follower: usize) -> String {
    format!("follower-{follower}")
}

impl Followers {
    /// Starts all processes.
    pub fn start(settings: FollowerSettings) -> Self {
        let all = (0..settings.n_followers).map(|nth| Follower::start(&settings, nth)).collect();
        Self { all, settings }
    }

    /// Ends a process.
    pub fn die(&self, follower: usize, how: Crash) {
        let Follower { ends, standstill, life, .. } = &self.all[follower];
        self.settings.waits.progress.note(|seen| {
            let connection = &mut seen.connections[follower];
            connection.must_end = true;
            connection.is_closed |= how == Crash::Process;
            seen.last_fault = Some(Instant::now());
        });
        self.settings.kv.crash(&host(follower), how);
        match how {
            Crash::Process => ends.cut.trigger(),
            Crash::Machine => ends.silence.trigger(),
        }
        // The tasks continue, because lingering tasks must still release what they hold. None of their messages arrives.
        standstill.go_on();
        life.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    /// Stops a process for some time, as SIGSTOP does.
    pub async fn pause(&self, follower: usize, time: Duration) {
        let progress = &self.settings.waits.progress;
        progress.note(|seen| {
            let connection = &mut seen.connections[follower];
            connection.n_held += 1;
            connection.must_end |= time > SILENT_MAX && !connection.is_closed;
            seen.last_fault = Some(Instant::now());
        });
        self.all[follower].standstill.stop();
        sleep(time).await;
        self.all[follower].standstill.go_on();
        progress.note(|seen| seen.connections[follower].n_held -= 1);
    }

    /// Waits until all processes have ended, because their head has.
    pub async fn ended(self) {
        let waits = &self.settings.waits;
        for (nth, Follower { life, gate, .. }) in self.all.into_iter().enumerate() {
            if let Some(life) = life.into_inner().unwrap_or_else(PoisonError::into_inner) {
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
            waits.all_end(&gate).await;
        }
    }
}

impl Follower {
    fn start(settings: &FollowerSettings, nth: usize) -> Self {
        let ends = ConnectionEnds::default();
        let net = FollowerNet {
            joining: settings.joining.clone(),
            kv: settings.kv.host(&host(nth)),
            head: JOIN.to_owned(),
            follower: nth,
            delay: settings.delay,
            faults: settings.faults.clone(),
            ends: ends.clone(),
            progress: settings.waits.progress.clone(),
            reports: settings.reports.clone(),
            gate: settings.own_gate.clone(),
        };
        let config = config(settings.n_followers as u16 + 1, &host(nth));
        let world = settings.world.clone().with_net(Arc::new(net)).fork(&host(nth));
        let gate = Gate::new("follower");
        let standstill = Standstill::default();
        let following = standstill.clone().run(follower(world, gate.clone(), config, nth));
        let life = spawn_guarded(&settings.own_gate, "follower", following);
        Self { ends, standstill, gate, life: Mutex::new(Some(life)) }
    }
}
