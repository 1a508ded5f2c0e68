//! What one watch knows: the registry's word, and those whom it has doubts about.

use std::collections::BTreeSet;

use tokio::time::Instant;
use types::{NodeId, NodeInfo};

use crate::MembershipEvent;
use crate::members::Members;

/// The members as one watch has told them. Pure: the time comes in as an argument.
///
/// A registry that was restarted without its data says that there are no members. One that stood still for longer
/// than its leases ends them all when it wakes. Both are facts about the registry and not about the nodes, who are
/// about to announce themselves again. So after such an event departures are *doubted*: a missing node is only
/// missed, until the doubts end.
#[derive(Debug, Default)]
pub(crate) struct Known {
    members: Members,
    /// Members who, says the registry, are none.
    missed: BTreeSet<NodeId>,
    /// `None`: the registry is believed, and no node is missing.
    doubts_end: Option<Instant>,
}

/// Members that are not in the registry's list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AbsentMembers {
    HaveLeft,
    MayReturn,
}

impl Known {
    /// The registry's whole state. If absent members may return, there are doubts until `until`. Doubts that have not ended begin anew: without a connection no node could be heard.
    pub(crate) fn snapshot(
        &mut self,
        nodes: Vec<NodeInfo>,
        absent: AbsentMembers,
        until: Instant,
    ) -> MembershipEvent {
        let doubted = absent == AbsentMembers::MayReturn || self.doubts_end.is_some();
        let kept = if doubted { self.absent_from(&nodes) } else { Vec::new() };
        self.doubts_end = doubted.then_some(until);
        self.missed = kept.iter().map(|node| node.id.clone()).collect();
        self.members.apply(&MembershipEvent::Snapshot(nodes.into_iter().chain(kept).collect()));
        self.members.snapshot()
    }

    fn absent_from(&self, nodes: &[NodeInfo]) -> Vec<NodeInfo> {
        let present: BTreeSet<&NodeId> = nodes.iter().map(|node| &node.id).collect();
        self.members.iter().filter(|node| !present.contains(&node.id)).cloned().collect()
    }

    pub(crate) fn joined(&mut self, node: NodeInfo) -> Vec<MembershipEvent> {
        self.missed.remove(&node.id);
        self.members.join(node)
    }

    pub(crate) fn left(&mut self, id: NodeId) -> Option<MembershipEvent> {
        if self.doubts_end.is_none() {
            return self.members.leave(&id);
        }
        if self.members.get(&id).is_some() {
            self.missed.insert(id);
        }
        None
    }

    pub(crate) fn doubts_end(&self) -> Option<Instant> {
        self.doubts_end
    }

    /// The doubts are over: who is still missed has left.
    pub(crate) fn believe(&mut self) -> Vec<MembershipEvent> {
        self.doubts_end = None;
        let missed = std::mem::take(&mut self.missed);
        missed.iter().filter_map(|id| self.members.leave(id)).collect()
    }

    pub(crate) fn n_missed(&self) -> usize {
        self.missed.len()
    }
}

#[cfg(test)]
mod tests;
