//! Detects that the node makes no progress although it has work, and names the stage that is stuck.
//!
//! The watchdog polls the worker's last report and the report's age, so it works when no event arrives any
//! more.

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

/// The interval at which the watchdog checks for progress.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// The stage in which a node's work is stuck.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StuckStage {
    /// An engine step has not returned.
    Step { running: u32, waiting: u32 },
    /// The worker runs, but no sequence gets blocks, and no running sequence could free any.
    Room { waiting: u32, blocks: BlockCounts },
}

/// A stuck stage, and the time of its last progress.
type Finding = (StuckStage, Instant);

impl fmt::Display for StuckStage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Step { running, waiting } => {
                write!(
                    f,
                    "step: the engine step has not returned, {running} sequences run and {waiting} wait"
                )
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

/// Finds the stuck stage in the worker's last report. Returns `None` if the worker makes progress or has no
/// work.
///
/// `n_held` counts landings that wait for their KV and held KV that waits for its landing. They hold blocks,
/// depend on other nodes and end at their requests' deadlines. While there are any, waiting prompts are not
/// stuck.
///
/// A worker reports on every turn, and once a second while idle. A worker whose sequences all wait for slow
/// readers keeps reporting and is not stuck, because the readers have deadlines.
fn look(load: &WorkerLoad, n_held: u32, now: Instant, bound: Duration) -> Option<Finding> {
    let WorkerLoad { node, last_turn, last_progress, .. } = *load;
    if now - last_turn > bound {
        return Some((StuckStage::Step { running: node.running, waiting: node.waiting }, last_turn));
    }
    let nobody_runs = node.waiting > 0 && node.running == 0 && n_held == 0;
    let stuck = nobody_runs && now - last_progress > bound;
    stuck.then_some((StuckStage::Room { waiting: node.waiting, blocks: node.blocks }, last_progress))
}

/// Watches one worker, sets the node's readiness, and publishes its findings to the status stream.
#[derive(Debug)]
pub(crate) struct Watchdog {
    node: NodeParts,
    readiness: Readiness,
    draining: Shutdown,
    /// The longest time without progress.
    bound: Duration,
    stuck: watch::Sender<Option<StuckStage>>,
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

    pub(crate) fn stuck(&self) -> watch::Receiver<Option<StuckStage>> {
        self.stuck.subscribe()
    }

    /// Returns the reports of routers on the node, to be filled by the status service: a refusal makes the
    /// node unready.
    pub(crate) fn standings(&self) -> Standings {
        self.standings.clone()
    }

    /// Updates the readiness until the node drains or the worker has ended.
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
        let n_held = self.node.arriving.count() + self.node.held.count();
        match look(&load, n_held, now, self.bound) {
            None => {
                self.note(None);
                self.readiness.set(self.standings.refusal(now), self.standings.rollout_waits_for(now));
            }
            Some((stuck, since)) => {
                self.note(Some(stuck));
                self.readiness
                    .set_unready(format!("no progress for {} ms: {stuck}", (now - since).as_millis()));
            }
        }
    }

    /// Logs one line when the node gets stuck and one when it recovers.
    fn note(&self, found: Option<StuckStage>) {
        let before = *self.stuck.borrow();
        if before == found {
            return;
        }
        self.stuck.send_replace(found);
        match (before, found) {
            (None, Some(stuck)) => warn!(stage = %stuck, "the node makes no progress"),
            (Some(_), None) => info!("the node makes progress again"),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use types::NodeLoad;

    use super::*;

    const BOUND: Duration = Duration::from_secs(4);

    /// Returns the finding for a worker with these counts, whose last turn and last progress were this many
    /// seconds ago.
    fn found(running: u32, waiting: u32, turned: u64, progressed: u64) -> Option<&'static str> {
        found_beside(0, running, waiting, turned, progressed)
    }

    /// Returns the finding for a worker with these counts on a node with `n_held` landings or held transfers.
    fn found_beside(
        n_held: u32,
        running: u32,
        waiting: u32,
        turned: u64,
        progressed: u64,
    ) -> Option<&'static str> {
        let now = Instant::now() + Duration::from_secs(100);
        let ago = |seconds| now - Duration::from_secs(seconds);
        let node = NodeLoad { running, waiting, ..NodeLoad::default() };
        let load = WorkerLoad {
            node,
            growth_reserve_blocks: 0,
            last_progress: ago(progressed),
            last_turn: ago(turned),
        };
        look(&load, n_held, now, BOUND).map(|(stuck, _)| match stuck {
            StuckStage::Step { .. } => "step",
            StuckStage::Room { .. } => "room",
        })
    }

    #[test]
    fn prompts_that_wait_for_blocks_of_open_landings_are_no_standstill() {
        assert_eq!(found_beside(1, 0, 2, 0, 9), None);
        assert_eq!(found_beside(1, 0, 2, 5, 9), Some("step"));
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
            (0, 2, 0, 5, Some("room"), "no room will come"),
        ] {
            assert_eq!(found(running, waiting, turned, progressed), expected, "{why}");
        }
    }
}
