//! The check before an awake node changes its role: another node does the work that this node would stop doing.
//!
//! Nodes change their roles one at a time, under a lock in the registry, so that each check sees the result of the
//! change before.

use std::time::Duration;

use futures::StreamExt as _;
use registry::{Lock, LockName, MembershipEvent, Registry};
use tokio::time::Instant;
use types::{ModelInfo, NodeId, NodeInfo, Role};

use crate::switch::SwitchRefusal;

/// The longest wait for the registry's list of members.
const MEMBERS_WITHIN: Duration = Duration::from_secs(3);

/// The longest wait for another node's change of role, and the pause between two looks.
const LOCK_WITHIN: Duration = Duration::from_secs(3);
const LOCK_AGAIN: Duration = Duration::from_millis(50);

/// A requested change of a node's role.
#[derive(Debug)]
pub(crate) struct RoleChange<'a> {
    pub(crate) id: &'a NodeId,
    pub(crate) model: &'a ModelInfo,
    pub(crate) from: Role,
    pub(crate) to: Role,
}

impl RoleChange<'_> {
    /// Waits for the right to change roles and checks the change under it. The right must be kept until the new role is
    /// announced.
    pub(crate) async fn begin(&self, registry: &dyn Registry) -> Result<Lock, SwitchRefusal> {
        let give_up = Instant::now() + LOCK_WITHIN;
        let lock = loop {
            let taken = registry.lock(LockName::RoleChange).await;
            let taken = taken.map_err(|error| SwitchRefusal::CannotChangeRole {
                role: self.from,
                why: format!("the registry does not answer: {}", types::in_full(&error)),
            })?;
            match taken {
                Some(lock) => break lock,
                None if Instant::now() >= give_up => return Err(SwitchRefusal::AnotherChanges),
                None => tokio::time::sleep(LOCK_AGAIN).await,
            }
        };
        self.check(registry).await?;
        Ok(lock)
    }

    /// Returns an error if no other member does the work that the node would stop doing, or if the registry does not
    /// list the members in time.
    async fn check(&self, registry: &dyn Registry) -> Result<(), SwitchRefusal> {
        let cannot = |why: String| SwitchRefusal::CannotChangeRole { role: self.from, why };
        let members = async {
            let mut events = registry.watch().await.map_err(|error| cannot(error.to_string()))?;
            match events.next().await {
                Some(MembershipEvent::Snapshot(members)) => Ok(members),
                _ => Err(cannot("the registry does not list its members".to_owned())),
            }
        };
        let late = |_| cannot("the registry does not answer, so other nodes are unknown".to_owned());
        let members = tokio::time::timeout(MEMBERS_WITHIN, members).await.map_err(late)??;
        match self.lost(&members) {
            Some(work) => Err(SwitchRefusal::LastOfKind { work, model: self.model.name.clone() }),
            None => Ok(()),
        }
    }

    /// Returns the kind of work that only this node does for its model, and that it would stop doing. A node that changes
    /// its role drains first, so the last one that decodes stops even if it decodes afterwards. Prompts are computed by
    /// decode nodes meanwhile.
    fn lost(&self, members: &[NodeInfo]) -> Option<&'static str> {
        let is_peer = |node: &&NodeInfo| {
            let model = &node.model;
            node.id != *self.id
                && model.name == self.model.name
                && model.fingerprint == self.model.fingerprint
        };
        let is_done = |does: fn(Role) -> bool| members.iter().filter(is_peer).any(|node| does(node.role));
        let is_only = |does: fn(Role) -> bool| does(self.from) && !is_done(does);
        let stops_prefill = is_only(Role::prefills) && !self.to.prefills();
        let work = [("prefills", stops_prefill), ("decodes", is_only(Role::decodes))];
        work.into_iter().find(|(_, is_lost)| *is_lost).map(|(work, _)| work)
    }
}

#[cfg(test)]
mod tests {
    use registry::conformance::node as any_node;
    use types::Fingerprint;

    use super::*;

    fn model(name: &str, weights: &str) -> ModelInfo {
        let fingerprint = Fingerprint::new([("weights".to_owned(), weights.to_owned())]);
        ModelInfo { name: name.to_owned(), fingerprint, ..any_node("any", 1).model }
    }

    fn node(id: &str, role: Role, model: ModelInfo) -> NodeInfo {
        NodeInfo { role, model, ..any_node(id, 1) }
    }

    #[test]
    fn another_node_must_do_the_work_that_ends() {
        use Role::{Both, Decode, Pool, Prefill};
        let own = || model("m", "a");
        for (from, to, other, lost) in [
            (Prefill, Decode, node("p", Prefill, own()), None),
            (Prefill, Decode, node("b", Both, own()), None),
            (Prefill, Decode, node("d", Decode, own()), Some("prefills")),
            (Prefill, Decode, node("k", Pool, own()), Some("prefills")),
            (Prefill, Both, node("d", Decode, own()), None),
            (Decode, Prefill, node("d", Decode, own()), None),
            (Decode, Prefill, node("p", Prefill, own()), Some("decodes")),
            (Decode, Prefill, node("d", Decode, model("n", "a")), Some("decodes")),
            (Decode, Prefill, node("d", Decode, model("m", "b")), Some("decodes")),
            (Both, Prefill, node("p", Prefill, own()), Some("decodes")),
            (Decode, Both, node("p", Prefill, own()), Some("decodes")),
            (Decode, Both, node("d", Decode, own()), None),
            (Both, Decode, node("p", Prefill, own()), Some("decodes")),
            (Both, Prefill, node("b", Both, own()), None),
        ] {
            let id = NodeId::new("x");
            let members = [node("x", from, own()), other];
            let change = RoleChange { id: &id, model: &own(), from, to };
            assert_eq!(change.lost(&members), lost, "{change:?} beside {:?}", members[1]);
        }
    }
}
