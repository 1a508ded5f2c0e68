//! The members of the cluster, built from events.

use std::collections::BTreeMap;

use types::{NodeId, NodeInfo};

use crate::MembershipEvent;

/// The members by id. After all events of one watch are applied in order, this map equals the registry's
/// state.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Members(BTreeMap<NodeId, NodeInfo>);

impl Members {
    pub fn apply(&mut self, event: &MembershipEvent) {
        match event {
            MembershipEvent::Snapshot(nodes) => {
                self.0 = nodes.iter().map(|node| (node.id.clone(), node.clone())).collect();
            }
            MembershipEvent::Joined(node) => {
                self.0.insert(node.id.clone(), node.clone());
            }
            // The epoch is compared, so that the end of an older life does not remove a newer one.
            MembershipEvent::Left { id, epoch } => {
                if self.0.get(id).is_some_and(|node| node.epoch == *epoch) {
                    self.0.remove(id);
                }
            }
        }
    }

    pub fn get(&self, id: &NodeId) -> Option<&NodeInfo> {
        self.0.get(id)
    }

    pub fn iter(&self) -> impl Iterator<Item = &NodeInfo> {
        self.0.values()
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Inserts or replaces a node. Returns the events that this causes.
    pub(crate) fn join(&mut self, node: NodeInfo) -> Vec<MembershipEvent> {
        let before = self.0.insert(node.id.clone(), node.clone());
        joined(before.as_ref(), node)
    }

    pub(crate) fn leave(&mut self, id: &NodeId) -> Option<MembershipEvent> {
        self.0.remove(id).map(|node| left(&node))
    }

    pub(crate) fn snapshot(&self) -> MembershipEvent {
        MembershipEvent::Snapshot(self.0.values().cloned().collect())
    }
}

/// Returns the events of `node` replacing `before`.
pub(crate) fn joined(before: Option<&NodeInfo>, node: NodeInfo) -> Vec<MembershipEvent> {
    match before {
        Some(before) if *before == node => Vec::new(),
        Some(before) if before.epoch != node.epoch => vec![left(before), MembershipEvent::Joined(node)],
        Some(_) | None => vec![MembershipEvent::Joined(node)],
    }
}

pub(crate) fn left(node: &NodeInfo) -> MembershipEvent {
    MembershipEvent::Left { id: node.id.clone(), epoch: node.epoch }
}
