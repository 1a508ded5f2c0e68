//! Circuit breakers: a node whose status is good but whose work fails gets no work for a while.
//!
//! [`Breaker`] is the pure core. [`Breakers`] has one for each node that has failed lately, and decides which
//! nodes a policy sees. The last nodes of a kind are never left out: a node that may fail is better than none.
//! `paths` has one for each pair of nodes between which KV was lost.

mod paths;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use prometheus::{IntCounterVec, IntGauge};
use tokio::time::Instant;
use tracing::info;
use types::{NodeId, NodeInfo, Refusal, RefusalKind};

use crate::policy::{ClusterView, Decision, NodeView, Route};
use paths::{PathChoice, PathEnds, Paths};

/// The failures in a row that open a breaker.
const FAILURES_MAX: u32 = 3;
/// The time for which a breaker is open. It doubles from the first value to the last with each failed trial.
const OPEN_FOR: std::ops::RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(30);
/// The time after which a node's failures are forgotten.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(600);

/// Whether a node gets work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BreakerState {
    Closed,
    /// The node gets no work until this time.
    Open {
        until: Instant,
    },
    /// One request tries the node.
    HalfOpen,
}

/// The breaker of one node: failures in a row open it, and one request at a time tries the node again.
#[derive(Clone, Copy, Debug)]
pub struct Breaker {
    state: BreakerState,
    failures: u32,
    open_for: Duration,
    last_failure: Instant,
}

impl Breaker {
    pub(crate) fn new(now: Instant) -> Self {
        Self { state: BreakerState::Closed, failures: 0, open_for: *OPEN_FOR.start(), last_failure: now }
    }

    /// Makes a breaker that opens with the next failure.
    fn suspecting(now: Instant) -> Self {
        Self { failures: FAILURES_MAX - 1, ..Self::new(now) }
    }

    pub fn state(&self) -> BreakerState {
        self.state
    }

    pub fn failures(&self) -> u32 {
        self.failures
    }

    /// Returns whether the node may get a request at `now`.
    pub(crate) fn admits(&self, now: Instant) -> bool {
        match self.state {
            BreakerState::Closed => true,
            BreakerState::Open { until } => now >= until,
            BreakerState::HalfOpen => false,
        }
    }

    /// Notes that a request goes to the node. Returns whether it is the one that tries the node.
    pub(crate) fn begin(&mut self, now: Instant) -> bool {
        let tries = matches!(self.state, BreakerState::Open { until } if now >= until);
        if tries {
            self.state = BreakerState::HalfOpen;
        }
        tries
    }

    /// Notes failed work. Returns whether the breaker has opened.
    pub(crate) fn failed(&mut self, now: Instant) -> bool {
        self.failures += 1;
        self.last_failure = now;
        match self.state {
            BreakerState::Closed if self.failures < FAILURES_MAX => return false,
            BreakerState::Closed => self.open_for = *OPEN_FOR.start(),
            BreakerState::HalfOpen => self.open_for = (self.open_for * 2).min(*OPEN_FOR.end()),
            BreakerState::Open { .. } => return false,
        }
        self.state = BreakerState::Open { until: now + self.open_for };
        true
    }

    /// Notes that the trial ended and says nothing about the node: another request may try it.
    pub(crate) fn abandoned(&mut self, now: Instant) {
        if self.state == BreakerState::HalfOpen {
            self.state = BreakerState::Open { until: now };
        }
    }

    fn is_forgotten(&self, now: Instant) -> bool {
        now >= self.last_failure + FORGOTTEN_AFTER
    }
}

/// The breakers of all nodes. Clones share them.
#[derive(Clone, Debug)]
pub struct Breakers(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// Locked for one look-up or change, or one choice.
    failing: Mutex<Failing>,
    changes: IntCounterVec,
    n_open: IntGauge,
}

#[derive(Debug, Default)]
struct Failing {
    /// The nodes that have failed and have not succeeded since.
    nodes: BTreeMap<NodeId, NodeFailures>,
    paths: Paths,
}

/// The failures of one life of a node.
#[derive(Debug)]
struct NodeFailures {
    info: Arc<NodeInfo>,
    breaker: Breaker,
}

/// The request that tries a node or a path. Without a verdict, its drop lets another request try it.
#[derive(Debug)]
pub(crate) struct Trial {
    breakers: Breakers,
    of: Tried,
}

#[derive(Debug)]
enum Tried {
    Node(NodeId),
    Path(PathEnds),
}

impl Breakers {
    /// Makes the breakers. `changes` counts their changes by the new state, `n_open` the nodes without work.
    pub fn new(changes: IntCounterVec, n_open: IntGauge) -> Self {
        Self(Arc::new(Inner { failing: Mutex::default(), changes, n_open }))
    }

    /// Calls `choose` for a route among the nodes whose breakers are not open, over a path that works. `held_by` is the
    /// node that holds the KV already. Returns the route, and the trials that it makes.
    pub(crate) fn route<E>(
        &self,
        mut view: ClusterView,
        now: Instant,
        held_by: Option<&NodeInfo>,
        choose: impl Fn(&ClusterView) -> Result<Decision, E>,
    ) -> Result<(Decision, Vec<Trial>), E> {
        let mut failing = self.failing();
        if failing.nodes.is_empty() && failing.paths.len() == 0 {
            drop(failing);
            return choose(&view).map(|decision| (decision, Vec::new()));
        }
        filter(&mut view, &failing.nodes, now);
        // The lock is held, so that two requests do not try one node.
        let decision = failing.paths.choose(&view, &PathChoice { choose, held_by, now })?;
        let nodes = decision.route.prefill.iter().chain([&decision.route.decode]);
        let mut trials: Vec<Trial> =
            nodes.filter_map(|node| self.begin(node, &mut failing.nodes, now)).collect();
        if let Some(path) = PathEnds::of(&decision.route, held_by)
            && failing.paths.get_mut(&path).is_some_and(|breaker| breaker.begin(now))
        {
            trials.push(Trial { breakers: self.clone(), of: Tried::Path(path) });
        }
        drop(failing);
        Ok((decision, trials))
    }

    fn begin(
        &self,
        node: &NodeInfo,
        failing: &mut BTreeMap<NodeId, NodeFailures>,
        now: Instant,
    ) -> Option<Trial> {
        let one = failing.get_mut(&node.id).filter(|one| one.info.epoch == node.epoch)?;
        let tries = one.breaker.begin(now);
        if tries {
            self.changed("half_open");
        }
        tries.then(|| Trial { breakers: self.clone(), of: Tried::Node(node.id.clone()) })
    }

    /// Notes a failed attempt. Only failed work counts, not a refusal because the node has no room or stops.
    /// If KV was lost between two nodes, it counts against both nodes of the route, and against the path.
    pub(crate) fn failed(
        &self,
        node: &Arc<NodeInfo>,
        refusal: &Refusal,
        route: Option<&Route>,
        now: Instant,
    ) {
        let kind = refusal.kind;
        let both = route.filter(|_| matches!(kind, RefusalKind::Wire | RefusalKind::Landing));
        match (both, kind) {
            (Some(route), _) => {
                self.path_failed(route, refusal, now);
                for node in route.prefill.iter().chain([&route.decode]) {
                    self.count(node, refusal, now);
                }
            }
            (None, RefusalKind::Failed | RefusalKind::Wire | RefusalKind::Landing) => {
                self.count(node, refusal, now);
            }
            _ => {}
        }
    }

    fn count(&self, node: &Arc<NodeInfo>, refusal: &Refusal, now: Instant) {
        if node.role.pools() {
            return; // KV goes to prefill nodes while a pool node fails.
        }
        let failing = &mut self.failing().nodes;
        failing.retain(|_, one| !one.breaker.is_forgotten(now) && one.is_life_of(node));
        let first = || NodeFailures { info: Arc::clone(node), breaker: Breaker::new(now) };
        let breaker = &mut failing.entry(node.id.clone()).or_insert_with(first).breaker;
        if breaker.failed(now) {
            let (failures, open_for) = (breaker.failures, breaker.open_for);
            self.changed("open");
            info!(node = %node.id, failures, ?open_for, %refusal, "node gets no work for a while: its work fails");
        }
        self.count_open(failing);
    }

    fn path_failed(&self, route: &Route, refusal: &Refusal, now: Instant) {
        let Some(path) = PathEnds::of(route, None) else { return };
        let opened = self.failing().paths.failed(path.clone(), now);
        if let Some(Breaker { open_for, .. }) = opened {
            let [from, to] = path.nodes();
            info!(%from, %to, ?open_for, %refusal, "KV was lost between two nodes: this pair is not used for a while");
        }
    }

    /// Notes that a node has done its work.
    pub(crate) fn succeeded(&self, node: &NodeId) {
        let failing = &mut self.failing().nodes;
        let Some(one) = failing.remove(node) else { return };
        if one.breaker.state != BreakerState::Closed {
            self.changed("closed");
            info!(%node, "node gets work again");
        }
        self.count_open(failing);
    }

    /// Returns the breaker of a node that has failed lately.
    pub fn of(&self, node: &NodeInfo) -> Option<Breaker> {
        let failing = self.failing();
        let one = failing.nodes.get(&node.id).filter(|one| one.info.epoch == node.epoch)?;
        Some(one.breaker)
    }

    /// Returns the pairs of nodes between which KV was lost lately, the sender first, with their breakers.
    pub fn paths(&self) -> Vec<([NodeId; 2], Breaker)> {
        self.failing().paths.shown()
    }

    fn changed(&self, state: &str) {
        self.0.changes.with_label_values(&[state]).inc();
    }

    fn count_open(&self, failing: &BTreeMap<NodeId, NodeFailures>) {
        let n = failing.values().filter(|one| one.breaker.state != BreakerState::Closed).count();
        self.0.n_open.set(n as i64);
    }

    fn failing(&self) -> MutexGuard<'_, Failing> {
        self.0.failing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Trial {
    /// Notes that KV has arrived over the path, if this is the trial of one.
    pub(crate) fn kv_arrived(&self) {
        if let Tried::Path(path) = &self.of
            && self.breakers.failing().paths.worked(path)
        {
            let [from, to] = path.nodes();
            info!(%from, %to, "KV is sent between two nodes again");
        }
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        let mut failing = self.breakers.failing();
        let breaker = match &self.of {
            Tried::Node(node) => failing.nodes.get_mut(node).map(|one| &mut one.breaker),
            Tried::Path(path) => failing.paths.get_mut(path),
        };
        if let Some(breaker) = breaker {
            breaker.abandoned(Instant::now());
        }
    }
}

impl NodeFailures {
    /// Returns false for another life of the node: it begins without failures.
    fn is_life_of(&self, node: &NodeInfo) -> bool {
        self.info.id != node.id || self.info.epoch == node.epoch
    }
}

/// Removes the nodes whose breakers are open, unless no other node of their kind is left.
fn filter(view: &mut ClusterView, failing: &BTreeMap<NodeId, NodeFailures>, now: Instant) {
    let admits = |node: &NodeView| match failing.get(&node.info.id) {
        Some(one) if one.info.epoch == node.info.epoch => one.breaker.admits(now),
        _ => true,
    };
    let decodes = |node: &NodeView| node.info.role.decodes();
    let decode_left = view.nodes.iter().any(|node| decodes(node) && admits(node));
    let prefill_left = view.prefill_nodes().any(admits);
    view.nodes.retain(|node| {
        let is_last = if decodes(node) { !decode_left } else { !prefill_left };
        is_last || admits(node)
    });
}

#[cfg(test)]
mod tests;
