//! Paths: pairs of nodes between which KV was lost lately, while both nodes work with others.
//!
//! A policy chooses nodes, not pairs. If it chooses a pair whose path fails, one of the two is left out and the policy
//! chooses again. The last pair is used nevertheless.

use std::collections::BTreeMap;

use tokio::time::Instant;
use types::{Epoch, NodeId, NodeInfo};

use super::Breaker;
use crate::policy::{ClusterView, Decision, Route};

/// The largest number of paths that are remembered. A further one replaces the path that failed the longest ago.
const PATHS_MAX: usize = 1024;

/// The sender and the receiver of KV, in their present lives.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PathEnds {
    from: (NodeId, Epoch),
    to: (NodeId, Epoch),
}

/// The paths that have failed and have not worked since. One failure opens a path's breaker.
#[derive(Debug, Default)]
pub(super) struct Paths(BTreeMap<PathEnds, Breaker>);

/// The choice of a route, with the node that holds the KV already, if there is one.
pub(super) struct PathChoice<'a, C> {
    pub(super) choose: C,
    pub(super) held_by: Option<&'a NodeInfo>,
    pub(super) now: Instant,
}

impl PathEnds {
    /// Returns the path of a route's KV; `None` if the decode node computes the prompt.
    pub(super) fn of(route: &Route, held_by: Option<&NodeInfo>) -> Option<Self> {
        let end = |node: &NodeInfo| (node.id.clone(), node.epoch);
        Some(Self { from: end(held_by.or(route.prefill.as_deref())?), to: end(&route.decode) })
    }

    /// Returns the nodes of the path, the sender first.
    pub(super) fn nodes(&self) -> [&NodeId; 2] {
        [&self.from.0, &self.to.0]
    }
}

impl Paths {
    /// Returns the nodes of each path, the sender first, and the path's breaker.
    pub(super) fn shown(&self) -> Vec<([NodeId; 2], Breaker)> {
        self.0.iter().map(|(path, breaker)| (path.nodes().map(NodeId::clone), *breaker)).collect()
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Notes lost KV. Returns the breaker if it has opened.
    pub(super) fn failed(&mut self, path: PathEnds, now: Instant) -> Option<Breaker> {
        self.0.retain(|_, breaker| !breaker.is_forgotten(now));
        if self.0.len() >= PATHS_MAX && !self.0.contains_key(&path) {
            let oldest = self.0.iter().min_by_key(|(_, breaker)| breaker.last_failure);
            oldest.map(|(path, _)| path.clone()).and_then(|path| self.0.remove(&path));
        }
        let breaker = self.0.entry(path).or_insert_with(|| Breaker::suspecting(now));
        breaker.failed(now).then_some(*breaker)
    }

    /// Notes that KV has arrived. Returns whether the path failed before.
    pub(super) fn worked(&mut self, path: &PathEnds) -> bool {
        self.0.remove(path).is_some()
    }

    pub(super) fn get_mut(&mut self, path: &PathEnds) -> Option<&mut Breaker> {
        self.0.get_mut(path)
    }

    /// Chooses a route whose path works, if there is one. Leaves out decode nodes first, so that prompts are not computed
    /// by decode nodes alone.
    pub(super) fn choose<E>(
        &self,
        view: &ClusterView,
        choice: &PathChoice<'_, impl Fn(&ClusterView) -> Result<Decision, E>>,
    ) -> Result<Decision, E> {
        let first = (choice.choose)(view)?;
        if self.admits(&first, choice) {
            return Ok(first);
        }
        let ends: [fn(&Route) -> Option<&NodeInfo>; 2] =
            [|route| Some(&route.decode), |route| route.prefill.as_deref()];
        let other = ends.into_iter().find_map(|end| self.without(view.clone(), &first, end, choice));
        Ok(other.unwrap_or(first))
    }

    /// Leaves out one end of each chosen path, until the path of a choice works.
    fn without<E>(
        &self,
        mut view: ClusterView,
        first: &Decision,
        end: fn(&Route) -> Option<&NodeInfo>,
        choice: &PathChoice<'_, impl Fn(&ClusterView) -> Result<Decision, E>>,
    ) -> Option<Decision> {
        let mut chosen = first.clone();
        loop {
            let left_out = end(&chosen.route)?.id.clone();
            view.nodes.retain(|node| node.info.id != left_out);
            if first.route.prefill.is_some() {
                view.prefill_nodes().next()?;
            }
            chosen = (choice.choose)(&view).ok()?;
            if self.admits(&chosen, choice) {
                return Some(chosen);
            }
        }
    }

    fn admits<C>(&self, decision: &Decision, choice: &PathChoice<'_, C>) -> bool {
        let path = PathEnds::of(&decision.route, choice.held_by);
        path.and_then(|path| self.0.get(&path)).is_none_or(|breaker| breaker.admits(choice.now))
    }
}
