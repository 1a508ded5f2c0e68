//! The members that one watch knows, including those that may return.

use std::collections::BTreeSet;

use tokio::time::Instant;
use types::{NodeId, NodeInfo};

use crate::MembershipEvent;
use crate::members::Members;

/// The members according to one watch. The struct reads no clock: the time is an argument.
///
/// A registry that restarted without its data reports no members. A registry that was suspended for longer
/// than its leases expires them all when it resumes. Neither proves that the nodes have ended; they will
/// announce themselves again. So after such an event departures are *doubted*: a missing node stays a member
/// until the doubts end.
#[derive(Debug, Default)]
pub(crate) struct KnownMembers {
    members: Members,
    /// Members that the registry does not report, while departures are doubted.
    missed: BTreeSet<NodeId>,
    /// The time at which missing members count as left; `None`: departures are believed, and no member is
    /// missing.
    doubts_end: Option<Instant>,
}

/// How to treat members that are not in the registry's snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AbsentMembers {
    HaveLeft,
    MayReturn,
}

impl KnownMembers {
    /// Replaces the known members by the registry's whole state. If absent members may return, a member that is
    /// missing from this state is removed only at `until`. Members that wait for their removal already wait until
    /// then too, because no node could announce itself without a connection.
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

    /// Ends the doubts: members that are still missing have left.
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
