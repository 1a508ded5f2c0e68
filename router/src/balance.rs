//! Moves nodes between prefill and decode when another ratio serves the present demand better.
//!
//! `demand` measures what clients ask for, and `prediction` compares ratios; both are pure, and so is `move_delay`,
//! which waits until a prediction was the same for long enough. This file is the task that asks nodes to change their
//! roles. One router of a cluster acts: the one that has the lock `balance` in the registry. See
//! `docs/decisions/0029-routers-balance-roles.md`.

mod demand;
mod move_delay;
mod prediction;
mod settings;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use chassis::World;
use prometheus::IntCounterVec;
use registry::{Lock, LockName, Registry};
use serde::Serialize;
use tokio::time::Instant;
use tracing::{info, warn};
use types::{Epoch, NodeId, NodeInfo, Role, in_full};

use crate::admission::Admission;
use crate::cluster::{Cluster, GroupMember, NodeState};
use crate::rpc::NodeClient;
use demand::DemandWindow;
use move_delay::MoveDelay;
use prediction::{GroupNumbers, Move, NodeNumbers};
pub use settings::{BalanceSection, BalanceSettings};

/// The interval of predictions.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// The interval of attempts to take the lock.
const LOCK_AGAIN: Duration = Duration::from_secs(2);
/// The age beyond which a node's report is too old. Nodes report once a second while nothing changes.
const REPORT_AGE_MAX: Duration = Duration::from_secs(3);
/// The time that a node may take to stop its old work and announce itself again.
const MOVE_WITHIN: Duration = Duration::from_secs(300);
/// The time after which a node that still has its old role has not changed it.
const KEPT_AFTER: Duration = Duration::from_secs(5);
/// The time without a registration and without an answer after which a node that changes its role is gone. It has no
/// registration while it drains. Its port is closed for less: the tasks of its old role have ten seconds to end.
const GONE_AFTER: Duration = Duration::from_secs(15);
/// The number of moves that `/debug/cluster` shows.
const MOVES_SHOWN: usize = 16;

/// The parts that the controller needs.
#[derive(Debug)]
pub struct BalanceParts {
    pub settings: BalanceSettings,
    pub world: World,
    pub cluster: Cluster,
    pub admission: Admission,
    pub registry: Arc<dyn Registry>,
    /// Moves by outcome.
    pub moves: IntCounterVec,
}

/// The outcome of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MoveOutcome {
    /// The node works in its new role.
    Moved,
    /// The node refused, or could not be asked.
    Refused,
    /// The node has its old role again.
    Kept,
    /// The node did not come back in time, has no registration any more, or was started again.
    Lost,
}

impl MoveOutcome {
    pub(crate) const ALL: [Self; 4] = [Self::Moved, Self::Refused, Self::Kept, Self::Lost];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Moved => "moved",
            Self::Refused => "refused",
            Self::Kept => "kept",
            Self::Lost => "lost",
        }
    }
}

/// The controller's report for `/debug/cluster`. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct BalanceReport(Arc<Mutex<ReportedBalance>>);

/// The controller's state, as `/debug/cluster` shows it.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ReportedBalance {
    /// Whether this router moves nodes, or why not.
    pub controller: String,
    /// The last decision for each model.
    pub models: BTreeMap<String, String>,
    /// The last moves, the newest last.
    pub moves: Vec<ReportedMove>,
}

/// A move of a node, and how it ended.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ReportedMove {
    pub node: String,
    pub from: &'static str,
    pub to: &'static str,
    pub why: String,
    /// `under way`, or the outcome.
    pub outcome: String,
}

impl BalanceReport {
    pub fn shown(&self) -> ReportedBalance {
        self.report().clone()
    }

    fn report(&self) -> MutexGuard<'_, ReportedBalance> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A move that a node has begun.
#[derive(Debug)]
struct MoveUnderWay {
    node: NodeId,
    from: Role,
    to: Role,
    epoch: Epoch,
    began: Instant,
    /// The time at which the node last had a registration, or answered.
    heard: Instant,
}

impl MoveUnderWay {
    /// Returns the outcome if the move has ended by `now`. `seen` is the node's registration, if it has one.
    fn outcome(&self, seen: Option<(&NodeInfo, &NodeState)>, now: Instant) -> Option<MoveOutcome> {
        let took = now.saturating_duration_since(self.began);
        let Some((info, state)) = seen else {
            return (now >= self.heard + GONE_AFTER || took >= MOVE_WITHIN).then_some(MoveOutcome::Lost);
        };
        let is_ready = *state == NodeState::Ready;
        match info.role {
            role if role == self.to && is_ready => Some(MoveOutcome::Moved),
            role if role == self.from && info.epoch != self.epoch => Some(MoveOutcome::Lost),
            role if role == self.from && is_ready && took >= KEPT_AFTER => Some(MoveOutcome::Kept),
            _ => (took >= MOVE_WITHIN).then_some(MoveOutcome::Lost),
        }
    }
}

/// The controller. One task owns it.
#[derive(Debug)]
pub struct Balance {
    parts: BalanceParts,
    report: BalanceReport,
    lock: Option<Lock>,
    lock_asked: Option<Instant>,
    models: BTreeMap<String, ModelBalance>,
    under_way: Option<MoveUnderWay>,
    /// The client of the node that was asked last.
    asked: Option<NodeClient>,
}

/// The controller's state for one model.
#[derive(Debug)]
struct ModelBalance {
    demand: DemandWindow,
    delay: MoveDelay,
}

impl Balance {
    pub fn new(parts: BalanceParts, report: BalanceReport) -> Self {
        MoveOutcome::ALL.iter().for_each(|outcome| drop(parts.moves.with_label_values(&[outcome.as_str()])));
        Self {
            parts,
            report,
            lock: None,
            lock_asked: None,
            models: BTreeMap::new(),
            under_way: None,
            asked: None,
        }
    }

    /// Looks at the cluster again and again, until the future is dropped.
    pub async fn run(mut self) {
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let wanted = self.look();
            self.keep_lock().await;
            if self.follow_move().await || !self.acts() {
                continue;
            }
            if let Some(wanted) = wanted {
                self.start(wanted).await;
            }
        }
    }

    fn acts(&self) -> bool {
        self.lock.as_ref().is_some_and(Lock::is_held)
    }

    /// Takes the lock if no router has it.
    async fn keep_lock(&mut self) {
        if self.acts() {
            return;
        }
        let now = self.parts.world.now();
        if self.lock_asked.is_some_and(|asked| now < asked + LOCK_AGAIN) {
            return;
        }
        (self.lock, self.lock_asked) = (None, Some(now));
        let says = match self.parts.registry.lock(LockName::Balance).await {
            Ok(Some(lock)) => {
                info!("this router moves nodes between roles");
                // Another router may have moved nodes a moment ago.
                self.models.values_mut().for_each(|model| model.delay.pause(now));
                self.lock = Some(lock);
                "this router moves nodes".to_owned()
            }
            Ok(None) => "another router moves nodes".to_owned(),
            Err(error) => format!("the registry gives no lock: {}", in_full(&error)),
        };
        self.report.report().controller = says;
    }

    /// Predicts for every model. Returns a move that is due.
    fn look(&mut self) -> Option<Move> {
        let now = self.parts.world.now();
        let groups = self.parts.cluster.groups_in_force();
        self.models.retain(|name, _| groups.iter().any(|(known, _)| known == name));
        let mut due = None;
        for (name, members) in groups {
            let settings = self.parts.settings;
            let model = self.models.entry(name.clone()).or_insert_with(|| ModelBalance {
                demand: DemandWindow::new(settings.window),
                delay: MoveDelay::new(settings, now),
            });
            let arrived = self.parts.admission.arrived(&name);
            let roles = members.iter().map(|member| (member.info.id.clone(), member.info.role)).collect();
            let demand = model.demand.measure(arrived, now);
            let nodes = members.iter().map(|member| numbers(member, now)).collect();
            let predicted = GroupNumbers { nodes, demand }.predict(settings.margin);
            let says = match &predicted {
                Ok(wanted) => wanted.to_string(),
                Err(reason) => format!("no node is moved: {reason}"),
            };
            self.report.report().models.insert(name, says);
            due = due.or(model.delay.due(roles, predicted.ok(), now));
        }
        due
    }

    /// Asks a node to change its role.
    async fn start(&mut self, wanted: Move) {
        let Move { node, from, to, .. } = wanted.clone();
        let why = wanted.to_string();
        info!(%node, %from, %to, why, "moving a node to another role");
        let epoch = self.member(&node).map(|(info, _)| info.epoch);
        self.asked = self.parts.cluster.client(&node);
        let begun = match &self.asked {
            Some(client) => client.change_role(to).await,
            None => Err("the node has left".to_owned()),
        };
        let begun = begun.and_then(|()| epoch.ok_or_else(|| "the node has left".to_owned()));
        let now = self.parts.world.now();
        self.models.values_mut().for_each(|model| model.delay.pause(now));
        let mut report = self.report.report();
        if report.moves.len() >= MOVES_SHOWN {
            report.moves.remove(0);
        }
        let (id, from_word, to_word) = (node.to_string(), from.as_str(), to.as_str());
        let outcome = "under way".to_owned();
        report.moves.push(ReportedMove { node: id, from: from_word, to: to_word, why, outcome });
        drop(report);
        match begun {
            Ok(epoch) => {
                self.under_way = Some(MoveUnderWay { node, from, to, epoch, began: now, heard: now });
            }
            Err(reason) => self.ended(&node, MoveOutcome::Refused, &reason),
        }
    }

    /// Returns whether a move is still under way.
    async fn follow_move(&mut self) -> bool {
        let Some(node) = self.under_way.as_ref().map(|under_way| under_way.node.clone()) else {
            return false;
        };
        let seen = self.member(&node);
        let is_heard = match (&seen, &self.asked) {
            (None, Some(client)) => client.answers().await,
            (seen, _) => seen.is_some(),
        };
        let now = self.parts.world.now();
        let seen = seen.as_ref().map(|(info, state)| (&**info, state));
        let Some(under_way) = &mut self.under_way else { return false };
        if is_heard {
            under_way.heard = now;
        }
        let Some(outcome) = under_way.outcome(seen, now) else { return true };
        let took = now.saturating_duration_since(under_way.began);
        self.under_way = None;
        self.ended(&node, outcome, &format!("after {:.1} s", took.as_secs_f64()));
        false
    }

    /// Returns a node's registration.
    fn member(&self, node: &NodeId) -> Option<(Arc<NodeInfo>, NodeState)> {
        self.parts.cluster.everyone().into_iter().find(|(info, _)| info.id == *node)
    }

    fn ended(&self, node: &NodeId, outcome: MoveOutcome, detail: &str) {
        match outcome {
            MoveOutcome::Moved => info!(%node, detail, "node has moved to its new role"),
            _ => warn!(%node, outcome = outcome.as_str(), detail, "node has not moved to its new role"),
        }
        self.parts.moves.with_label_values(&[outcome.as_str()]).inc();
        if let Some(last) = self.report.report().moves.last_mut() {
            last.outcome = format!("{}: {detail}", outcome.as_str());
        }
    }
}

/// Returns the measured numbers of a node.
fn numbers(member: &GroupMember, now: Instant) -> NodeNumbers {
    let GroupMember { info, state, load, reported, assigned_tokens } = member;
    let missing = match (state, reported) {
        (NodeState::Ready, Some(at)) if now.saturating_duration_since(*at) <= REPORT_AGE_MAX => None,
        (NodeState::Ready, Some(_)) => Some("its last report is old".to_owned()),
        (NodeState::Ready, None) => Some("it has not reported".to_owned()),
        (state, _) => Some(format!("it is {}", state.as_str())),
    };
    let (id, role, keeps_role) = (info.id.clone(), info.role, info.keeps_role);
    NodeNumbers { id, role, keeps_role, missing, load: *load, assigned_tokens: *assigned_tokens }
}
