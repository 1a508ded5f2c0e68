//! Notices that nothing moves on this node although there is work, and says which stage stands still.
//!
//! It depends on no work that comes: it looks at intervals, at what the worker said last and when it said it.

use std::fmt;
use std::time::Duration;

use chassis::Shutdown;
use chassis::admin::Readiness;
use scheduler::{WorkerLoad, WorkerState};
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::{info, warn};
use types::BlockCounts;

use crate::parts::NodeParts;
use crate::standing::Standings;

/// How often it looks.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// The stage that stands still.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stuck {
    /// The worker has not come back from the engine.
    Step { running: u32, waiting: u32 },
    /// The worker turns, but nobody gets blocks, and nobody runs who would give some back.
    Room { waiting: u32, blocks: BlockCounts },
}

/// Since when something should have moved, and where it stopped.
type Finding = (Stuck, Instant);

impl fmt::Display for Stuck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Step { running, waiting } => {
                write!(f, "step: the engine does not come back, {running} sequences run and {waiting} wait")
            }
            Self::Room { waiting, blocks } => {
                let BlockCounts { free, leased, cached, quarantined, .. } = blocks;
                write!(
                    f,
                    "room: {waiting} sequences wait for blocks, {free} free, {leased} leased, {cached} cached, \
                    {quarantined} quarantined"
                )
            }
        }
    }
}

/// What stands still by the worker's last word, if anything does.
///
/// A worker speaks on every turn, and once a second when it has nothing to do. One whose sequences all wait for whoever
/// reads them turns, and is not stuck: what reads them has deadlines of its own.
fn look(load: &WorkerLoad, now: Instant, bound: Duration) -> Option<Finding> {
    let WorkerLoad { node, last_turn, last_progress, .. } = *load;
    if now - last_turn > bound {
        return Some((Stuck::Step { running: node.running, waiting: node.waiting }, last_turn));
    }
    let nobody_runs = node.waiting > 0 && node.running == 0;
    let stuck = nobody_runs && now - last_progress > bound;
    stuck.then_some((Stuck::Room { waiting: node.waiting, blocks: node.blocks }, last_progress))
}

/// Watches one worker. Clones of what it found go to the status stream.
#[derive(Debug)]
pub(crate) struct Watchdog {
    node: NodeParts,
    readiness: Readiness,
    draining: Shutdown,
    /// How long nothing may move.
    bound: Duration,
    stuck: watch::Sender<Option<Stuck>>,
    standings: Standings,
}

impl Watchdog {
    pub(crate) fn new(node: NodeParts, readiness: Readiness, draining: Shutdown, bound: Duration) -> Self {
        Self {
            node,
            readiness,
            draining,
            bound,
            stuck: watch::Sender::new(None),
            standings: Standings::default(),
        }
    }

    pub(crate) fn stuck(&self) -> watch::Receiver<Option<Stuck>> {
        self.stuck.subscribe()
    }

    /// What routers say of the node: a refusal makes it unready.
    pub(crate) fn standings(&self) -> Standings {
        self.standings.clone()
    }

    /// Keeps readiness true until the node drains or the worker is gone.
    pub(crate) async fn run(self) {
        let mut state = self.node.worker.state();
        while !self.draining.requested() {
            let known = state.borrow_and_update().clone();
            self.judge(&known);
            tokio::select! {
                biased;
                () = self.draining.wait() => {}
                changed = state.changed() => if changed.is_err() { return },
                () = tokio::time::sleep(LOOK_EVERY) => {}
            }
        }
    }

    fn judge(&self, state: &WorkerState) {
        match state {
            WorkerState::Running => self.judge_running(),
            WorkerState::Draining | WorkerState::Stopped => self.readiness.set_unready("draining"),
            WorkerState::Dead(reason) => self.readiness.set_unready(format!("the worker is dead: {reason}")),
        }
    }

    fn judge_running(&self) {
        let (load, now) = (*self.node.worker.load().borrow(), self.node.world.now());
        match look(&load, now, self.bound) {
            None => {
                self.note(None);
                match self.standings.refusal(now) {
                    None => self.readiness.set_ready(),
                    Some(reason) => self.readiness.set_unready(reason),
                }
            }
            Some((stuck, since)) => {
                self.note(Some(stuck));
                self.readiness
                    .set_unready(format!("nothing has moved for {} ms, {stuck}", (now - since).as_millis()));
            }
        }
    }

    /// One line when it begins, one when it ends.
    fn note(&self, found: Option<Stuck>) {
        let before = *self.stuck.borrow();
        if before == found {
            return;
        }
        self.stuck.send_replace(found);
        match (before, found) {
            (None, Some(stuck)) => warn!(stage = %stuck, "nothing moves"),
            (Some(_), None) => info!("it moves again"),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use types::NodeLoad;

    use super::*;

    const BOUND: Duration = Duration::from_secs(4);

    /// A worker that ran and waited so, turned so many seconds ago, and progressed so many seconds ago.
    fn found(running: u32, waiting: u32, turned: u64, progressed: u64) -> Option<&'static str> {
        let now = Instant::now() + Duration::from_secs(100);
        let ago = |seconds| now - Duration::from_secs(seconds);
        let node = NodeLoad { running, waiting, ..NodeLoad::default() };
        let load = WorkerLoad {
            node,
            growth_reserve_blocks: 0,
            last_progress: ago(progressed),
            last_turn: ago(turned),
        };
        look(&load, now, BOUND).map(|(stuck, _)| match stuck {
            Stuck::Step { .. } => "step",
            Stuck::Room { .. } => "room",
        })
    }

    #[test]
    fn stages() {
        for (running, waiting, turned, progressed, expected, why) in [
            (0, 0, 1, 1, None, "idle"),
            (3, 0, 0, 0, None, "busy"),
            (3, 2, 4, 4, None, "a long step"),
            (3, 2, 5, 5, Some("step"), "a step without end"),
            (0, 0, 5, 5, Some("step"), "the first step hangs before it was told of"),
            (3, 0, 0, 9, None, "those who run wait for their readers"),
            (0, 2, 0, 3, None, "room may come yet"),
            (0, 2, 0, 5, Some("room"), "nobody will give it"),
        ] {
            assert_eq!(found(running, waiting, turned, progressed), expected, "{why}");
        }
    }
}
